"""Alibaba OSS by its dialect of S3: endpoints and regions in the manner of ossfs, and two clients of S3.

Hosts of the dialect (`bucket.s3.oss-cn-hangzhou.aliyuncs.com`) take buckets by host name only.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import obstore.exceptions

from streammega.config import StorageConfig
from streammega.errors import ConfigError, ShortReadError, StreammegaError
from streammega.errors.cached_property import cached_property
from streammega.storage.backends.fsspec import FsspecStore
from streammega.storage.backends.obstore import ObstoreStore
from streammega.storage.backends.oss_credentials import OssCredentials
from streammega.storage.backends.s3_options import (
    CREDENTIALS_LAST,
    OSS_OPTIONS,
    check_no_settings,
    client_options,
    is_http_url,
)
from streammega.storage.http_errors import truncated
from streammega.storage.store import Buffer, ObjectInfo, ObjectWriter

_ALIYUN = ".aliyuncs.com"
_REGION_OF_HOST = re.compile(
    r"(?:vpc100-)?oss-(?!accelerate)([a-z]+-[a-z0-9-]+?)(?:-internal)?\..+"
    r"|([a-z]+-[a-z0-9-]+)\.oss\.aliyuncs\.com"  # dual stack
)
_DEFAULT_REGION = "us-east-1"
"""The region in signatures where none is known, as for accelerate endpoints.

Alibaba's example for AWS's Java SDK uses it too (`Region.AWS_GLOBAL`).
"""
_FORBID_OVERWRITE = "x-oss-forbid-overwrite"
"""OSS's header for new objects. It does not implement If-None-Match and If-Match for PUT."""
_ALREADY_EXISTS = "FileAlreadyExists"
"""The code of the answer, with status 409, where there is one."""
_OBSTORE_ENVIRONMENT = ("AWS_SERVER_SIDE_ENCRYPTION", "AWS_CHECKSUM_ALGORITHM")
"""Variables of AWS that obstore reads, and that its arguments cannot override."""


@dataclass(frozen=True, kw_only=True)
class OssEndpoint:
    """Where buckets are: the host of OSS's own dialect, with its port and without a bucket.

    `region` is "" if it is unknown.
    """

    scheme: str
    host: str
    region: str

    @property
    def is_address(self) -> bool:
        """Whether the host is an IP address or localhost. Buckets are in the path then."""
        name = urlsplit(f"//{self.host}").hostname or ""
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return name == "localhost"

    @property
    def s3_host(self) -> str:
        """The host of S3's dialect."""
        is_public = self.host.startswith("oss-") and self.host.endswith(_ALIYUN)
        return f"s3.{self.host}" if is_public else self.host

    @property
    def url(self) -> str:
        """The endpoint of S3's dialect, to which clients add the bucket."""
        return f"{self.scheme}://{self.s3_host}"

    def bucket_url(self, bucket: str) -> str:
        """The URL of a bucket."""
        if self.is_address:
            return f"{self.url}/{bucket}"
        return f"{self.scheme}://{bucket}.{self.s3_host}"


def oss_endpoint(
    bucket: str, options: Mapping[str, Any], environment: Mapping[str, str]
) -> OssEndpoint:
    """The endpoint of the options, else of OSS_ENDPOINT, else the public one of the region.

    It may have a scheme (default https), the bucket, and the `s3.` of the other dialect. The region
    is that of the options, of the host's name, or OSS_REGION. `oss-cn-hangzhou` means `cn-hangzhou`.
    Raises ConfigError, also for an unknown option.
    """
    check_no_settings(f"oss://{bucket}", options)
    unknown = sorted(set(options) - OSS_OPTIONS)
    if unknown:
        raise ConfigError(
            f"oss://{bucket}: storage_options hold {', '.join(unknown)}, which is not known; they "
            f"may hold {', '.join(sorted(OSS_OPTIONS))}"
        )
    region = str(options.get("region") or "").strip().removeprefix("oss-")
    environment_region = environment.get("OSS_REGION", "").strip().removeprefix("oss-")
    endpoint = options.get("endpoint") or options.get("endpoint_url")
    endpoint = str(endpoint or environment.get("OSS_ENDPOINT") or "").strip()
    if not endpoint:
        region = region or environment_region
        if not region:
            raise ConfigError(
                f"oss://{bucket}: no endpoint; pass storage_options={{'endpoint': "
                f"'oss-cn-hangzhou.aliyuncs.com'}} with the bucket's region "
                f"('oss-cn-hangzhou-internal.aliyuncs.com' from within Alibaba Cloud), or set "
                f"OSS_ENDPOINT"
            )
        endpoint = f"oss-{region}{_ALIYUN}"
    endpoint = endpoint if "://" in endpoint else f"https://{endpoint}"
    parts = urlsplit(endpoint)
    more_than_host = parts.username or parts.query or parts.path not in ("", "/")
    if not is_http_url(endpoint) or more_than_host:
        raise ConfigError(
            f"oss://{bucket}: the endpoint is no http(s) host; it is given like "
            f"'https://oss-cn-hangzhou.aliyuncs.com', without a path or a user"
        )
    host = parts.netloc.lower().removeprefix(f"{bucket}.").removeprefix("s3.")
    named = _REGION_OF_HOST.fullmatch(host)
    if named and not region:
        # The host's name goes before the environment, which applies to all endpoints.
        region = named[1] or named[2]
    return OssEndpoint(scheme=parts.scheme, host=host, region=region or environment_region)


def oss_arguments(
    bucket: str, config: StorageConfig, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Keyword arguments for `obstore.store.S3Store`, without credentials. Raises ConfigError."""
    options = config.storage_options
    for name in _OBSTORE_ENVIRONMENT:
        if environment.get(name):
            raise ConfigError(
                f"oss://{bucket}: {name} is set, and obstore would send it to OSS; unset it, or "
                f"set transport='fsspec'"
            )
    endpoint = oss_endpoint(bucket, options, environment)
    url = endpoint.url if endpoint.is_address else endpoint.bucket_url(bucket)
    return {
        # obstore reads AWS_* too. These settings override all of them that matter.
        "config": {
            "endpoint": url,
            "aws_endpoint_url_s3": url,  # goes before `endpoint`
            "region": endpoint.region or _DEFAULT_REGION,
            "virtual_hosted_style_request": not endpoint.is_address,
            "skip_signature": bool(options.get("anon")),
            "unsigned_payload": False,
            "request_payer": False,
            "s3_express": False,
            # OSS needs a Content-MD5 there, which obstore does not send.
            "disable_bulk_delete": True,
        },
        "client_options": client_options(config, url, options.get("client_kwargs") or {}),
    }


class OssStore(ObstoreStore):
    """One bucket, by obstore. headers: sent with all requests."""

    def __init__(
        self,
        scheme: str,
        root: str,
        config: StorageConfig,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(scheme, root, config)
        self._headers = dict(headers or {})
        self._credentials = OssCredentials.from_options(root, config.storage_options)

    @cached_property
    def _creating(self) -> OssStore:
        """The same bucket by a client that replaces no object: obstore has no headers for one request."""
        headers = {_FORBID_OVERWRITE: "true"}
        return OssStore(self.scheme, self.root, self._config, headers)

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str = ""
    ) -> bool:
        """OSS has a condition for new objects only, and ignores it in buckets with versioning."""
        if not if_absent:
            return super().put(key, data, if_match=if_match)
        self._check_key(key)

        def attempt(client: Any) -> bool:
            try:
                client.put(key, bytes(data), use_multipart=False)
            except obstore.exceptions.AlreadyExistsError as error:
                if _ALREADY_EXISTS not in str(error):
                    raise
                return False
            return True

        return self._creating._call(key, attempt)

    def open_writer(self, key: str) -> ObjectWriter:
        """A multipart upload that is completed by `commit`, aborted by `abort`."""
        # With a key that was just read: parts cannot be sent again with another one.
        if self._credentials is not None:
            self._credentials.current(read_again=True)
        return super().open_writer(key)

    def read_start(self, key: str, size: int) -> tuple[ObjectInfo, Buffer]:
        """One GET request, or two where the object is shorter: OSS answers such a range with all of it."""
        try:
            return super().read_start(key, size)
        except ShortReadError:
            info, body = self.get(key, size)
            if info.size > size:
                raise
            return info, body

    def _s3_arguments(self) -> dict[str, Any]:
        arguments = oss_arguments(self.root, self._config, os.environ)
        arguments["client_options"]["default_headers"] = self._headers
        if self._credentials is not None:
            # Raise our error for missing credentials here, not within obstore.
            self._credentials.current()
            arguments["credential_provider"] = self._provide
        return arguments

    def _provide(self) -> dict[str, Any]:
        """The current key, in the form of obstore."""
        assert self._credentials is not None
        key = self._credentials.current()
        soon = datetime.now(UTC) + CREDENTIALS_LAST
        return {
            "access_key_id": key.access_key_id,
            "secret_access_key": key.access_key_secret,
            "token": key.token or None,
            "expires_at": min(soon, key.expires) if key.expires else soon,
        }

    def _renewal(self) -> Callable[[], bool] | None:
        credentials, client = self._credentials, self._opened
        if credentials is None or credentials.is_fixed:
            return None
        used = credentials.current()

        def renew() -> bool:
            credentials.renew(used)
            with self._lock:
                # A client keeps a key for minutes. Another thread may have opened a new one.
                if self._opened is client:
                    self._opened = None
            return True

        return renew

    def _error(self, key: str, error: BaseException) -> BaseException:
        text = str(error)
        of_obstore = isinstance(error, Exception) and not isinstance(error, StreammegaError)
        if of_obstore and "non-partial response" in text:
            return truncated(
                self.url(key), "OSS answers a range that reaches past the end with the whole object"
            )
        return super()._error(key, error)


class OssS3fsStore(FsspecStore):
    """One bucket, by s3fs: for transport='fsspec', and in forked processes that cannot use obstore."""

    def __init__(self, scheme: str, root: str, config: StorageConfig) -> None:
        super().__init__(scheme, root, config)
        self._credentials = OssCredentials.from_options(root, config.storage_options)

    def _driver_options(self) -> dict[str, Any]:
        """Arguments for s3fs."""
        endpoint = oss_endpoint(self.root, self._config.storage_options, os.environ)
        if self._credentials is not None:
            # Raise our error for missing credentials here, not within s3fs.
            self._credentials.current()
        client_kwargs = self._config.storage_options.get("client_kwargs") or {}
        return {
            "anon": self._credentials is None,
            "session": _session(self._credentials),
            "endpoint_url": endpoint.url,
            "client_kwargs": {
                "region_name": endpoint.region or _DEFAULT_REGION,
                "verify": client_kwargs.get("verify"),
            },
            "config_kwargs": {
                "s3": {"addressing_style": "path" if endpoint.is_address else "virtual"},
                # OSS takes no bodies in chunks, in which botocore sends checksums.
                "request_checksum_calculation": "when_required",
                "use_dualstack_endpoint": False,
                "use_fips_endpoint": False,
            },
        }

    def _renewal(self) -> Callable[[], bool] | None:
        credentials = self._credentials
        if credentials is None or credentials.is_fixed:
            return None
        # s3fs asks for the key at every request.
        used = credentials.current()
        return lambda: credentials.renew(used)


def _session(credentials: OssCredentials | None) -> Any:
    """aiobotocore's session for OSS. It reads no settings and profiles of AWS."""
    from aiobotocore.credentials import AioCredentials
    from aiobotocore.session import AioSession
    from botocore.credentials import ReadOnlyCredentials

    class Keys(AioCredentials):  # type: ignore[misc]
        """The current key, for every request."""

        async def get_frozen_credentials(self) -> Any:
            assert credentials is not None
            key = credentials.current()
            return ReadOnlyCredentials(key.access_key_id, key.access_key_secret, key.token or None)

    class Session(AioSession):  # type: ignore[misc]
        async def get_credentials(self) -> Any:
            return Keys("", "")

    unset = (None, None, None, None)
    no_file = (None, None, os.devnull, None)
    session = Session(
        session_vars={
            "ca_bundle": unset,
            "profile": unset,
            "config_file": no_file,
            "credentials_file": no_file,
        }
    )
    session.register("before-call.s3", _ask_oss)
    session.register("after-call.s3", _hear_oss)
    return session


def _ask_oss(model: Any, params: Mapping[str, Any], **_: Any) -> None:
    """Give a request of botocore the headers of OSS."""
    headers = params["headers"]
    if model.name == "GetObject":
        # Without it, a range past the end is answered with the whole object.
        headers["x-oss-range-behavior"] = "standard"
    if headers.pop("If-None-Match", None):
        headers[_FORBID_OVERWRITE] = "true"


def _hear_oss(parsed: Mapping[str, Any], **_: Any) -> None:
    """Give OSS's error for an object that exists the name that s3fs knows."""
    error = parsed.get("Error", {})
    if error.get("Code") == _ALREADY_EXISTS:
        error |= {"Code": "PreconditionFailed", "Condition": "If-None-Match"}
