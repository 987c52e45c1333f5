"""`storage_options` in the fsspec manner, translated for obstore."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from streammega.config import StorageConfig
from streammega.errors import AccessDeniedError, ConfigError
from streammega.errors.logs import get_logger
from streammega.errors.redaction import remember_secrets
from streammega.storage.backends.remote import CONNECT_TIMEOUT, ENDPOINT_VARIABLES
from streammega.storage.http_errors import no_renewal
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)
CREDENTIALS_LAST = timedelta(minutes=10)
"""The expiry that obstore is given. It asks again five minutes before: they may have been renewed."""
S3_OPTIONS = frozenset(
    (
        "anon",
        "client_kwargs",
        "config_kwargs",
        "default_block_size",
        "endpoint_url",
        "key",
        "password",
        "profile",
        "requester_pays",
        "secret",
        "token",
        "use_listings_cache",
        "use_ssl",
        "username",
    )
)
OSS_OPTIONS = frozenset(
    (
        "anon",
        "client_kwargs",
        "credentials_file",
        "credentials_provider",
        "default_block_size",
        "default_cache_type",
        "endpoint",
        "endpoint_url",
        "key",
        "region",
        "secret",
        "token",
        "use_listings_cache",
    )
)
CLIENT_KWARGS = frozenset(("endpoint_url", "region_name", "verify"))


def check_no_settings(url: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError where storage_options hold a setting of StorageConfig."""
    settings = sorted(set(options) & {field.name for field in fields(StorageConfig)})
    if settings:
        raise ConfigError(
            f"{url}: storage_options (--storage) hold {', '.join(settings)}, which is a setting of "
            f"the storage itself; write it above [storage_options], in a file for --storage-file"
        )


def s3_arguments(bucket: str, config: StorageConfig) -> dict[str, Any]:
    """Keyword arguments for `obstore.store.S3Store`, from s3fs-style storage options.

    Credentials: the explicit ones, or none with `anon`, or botocore's provider chain (environment,
    profile, container, instance role), refreshed by that chain when they expire: the same that s3fs
    uses. Raises ConfigError for an option that neither knows, AccessDeniedError when there are no
    credentials.
    """
    options = dict(config.storage_options)
    check_no_settings(f"s3://{bucket}", options)
    unknown = sorted(set(options) - S3_OPTIONS)
    if unknown:
        raise ConfigError(
            f"s3://{bucket}: storage_options hold {', '.join(unknown)}, which the obstore transport does "
            f"not know; it knows {', '.join(sorted(S3_OPTIONS))}. Correct the name, or set "
            f"transport='fsspec' to hand it to s3fs"
        )
    client_kwargs = dict(options.get("client_kwargs") or {})
    config_kwargs = dict(options.get("config_kwargs") or {})
    of_s3 = dict(config_kwargs.pop("s3", None) or {})
    style = of_s3.pop("addressing_style", "auto")
    # no error: s3fs may follow them, where obstore cannot serve a bucket
    if config_kwargs or of_s3:
        names = ", ".join(sorted([*config_kwargs, *(f"s3.{name}" for name in of_s3)]))
        text = (
            "config_kwargs of storage_options hold %s, which the obstore transport does not follow; "
            "leave it out, or set transport='fsspec'"
        )
        warn_once(log, names, text, names)
    settings = _late_session(options, with_handlers=False)
    endpoint = s3_endpoint(bucket, options, settings)
    store: dict[str, Any] = {"region": s3_region(options, endpoint, settings)}
    if style == "virtual":
        store["virtual_hosted_style_request"] = True
    if endpoint:
        bucket_endpoint = _with_bucket(endpoint, bucket) if style == "virtual" else endpoint
        store["endpoint"] = bucket_endpoint
        # In obstore, that of the environment goes before `endpoint`.
        store["aws_endpoint_url_s3"] = bucket_endpoint
    if options.get("requester_pays"):
        store["request_payer"] = True
    arguments: dict[str, Any] = {
        "config": store,
        "client_options": client_options(config, endpoint or "", client_kwargs),
    }
    if options.get("anon"):
        store["skip_signature"] = True
    else:
        session = _late_session(options, with_handlers=True)
        arguments["credential_provider"] = _credential_provider(bucket, options, session)
    return arguments


def client_options(
    config: StorageConfig, endpoint: str, client_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Options of obstore's HTTP client: timeouts, certificates, and plain http if the endpoint has it."""
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=config.request_timeout),
        "read_timeout": timedelta(seconds=config.tuning.read_timeout),
        "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT, config.request_timeout)),
        "allow_http": endpoint.startswith("http://"),
    }
    unknown = sorted(set(client_kwargs) - CLIENT_KWARGS)
    if unknown:
        raise ConfigError(
            f"client_kwargs of storage_options hold {', '.join(unknown)}, which the obstore transport "
            f"does not know; it knows {', '.join(sorted(CLIENT_KWARGS))}. Correct the name, or set "
            f"transport='fsspec'"
        )
    verify = client_kwargs.get("verify")
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        with open(verify, "rb") as file:
            client["root_certificate"] = file.read()
    return client


def _with_bucket(endpoint: str, bucket: str) -> str:
    """https://oss-cn-x.aliyuncs.com -> https://bucket.oss-cn-x.aliyuncs.com, once."""
    scheme, host = endpoint.split("://", 1)
    if host.startswith(f"{bucket}."):
        return endpoint
    return f"{scheme}://{bucket}.{host}"


def _late_session(options: Mapping[str, Any], *, with_handlers: bool) -> Callable[[], Any]:
    """A function that returns botocore's session, and makes it at the first call.

    Importing botocore takes longer than a first batch, and most options need no session.
    with_handlers: for clients, as those that get credentials; they take most of a session's time.
    """

    @cache
    def session() -> Any:
        import botocore.session

        return botocore.session.Session(
            profile=options.get("profile"), include_builtin_handlers=with_handlers
        )

    return session


def s3_endpoint(
    bucket: str, options: Mapping[str, Any], session: Callable[[], Any] | None = None
) -> str | None:
    """The endpoint in the options, or else in the user's AWS configuration, if there is one.

    Raises ConfigError, without the endpoint: it may hold a password. Clients would end the process,
    or repeat it.
    """
    client_kwargs = options.get("client_kwargs") or {}
    endpoint = options.get("endpoint_url") or client_kwargs.get("endpoint_url")
    if not endpoint:
        endpoint = _endpoint_of(session or _late_session(options, with_handlers=False))
    _check_endpoint(f"s3://{bucket}", endpoint)
    return endpoint


def s3_region(
    options: Mapping[str, Any],
    endpoint: str | None,
    session: Callable[[], Any] | None = None,
) -> str:
    """The region of signatures and default endpoints: the options', or else the user's."""
    region = (options.get("client_kwargs") or {}).get("region_name")
    # Only signatures and default endpoints need a region.
    if not region and not (endpoint and options.get("anon")):
        session = session or _late_session(options, with_handlers=False)
        region = os.environ.get("AWS_DEFAULT_REGION")
        # A profile that does not exist is reported when credentials are looked up.
        with suppress(Exception):
            region = region or session().get_config_variable("region")
    return str(region or "us-east-1")


def _check_endpoint(url: str, endpoint: str | None) -> None:
    if endpoint and not is_http_url(endpoint):
        raise ConfigError(
            f"{url}: the endpoint is no URL like 'https://host:9000'; write it so, and in its "
            f"password %2F for '/', %40 for '@' and so on"
        )


def is_http_url(text: str) -> bool:
    """Whether clients accept it as a URL with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of brackets
        return False


def _endpoint_of(session: Callable[[], Any]) -> str | None:
    """The endpoint in the user's AWS configuration, if there is one."""
    for name in ENDPOINT_VARIABLES["s3"]:
        if os.environ.get(name):
            return os.environ[name]
    try:
        endpoint = session().get_scoped_config().get("endpoint_url")
    except Exception:
        # The profile does not exist, which is reported when credentials are looked up.
        return None
    return str(endpoint) if endpoint else None


def _credential_provider(
    bucket: str, options: Mapping[str, Any], session: Callable[[], Any]
) -> Callable[[], dict[str, Any]]:
    key = options.get("key") or options.get("username")
    secret = options.get("secret") or options.get("password")
    if bool(key) != bool(secret):
        raise ConfigError(
            f"s3://{bucket}: storage_options need both 'key' and 'secret', or neither; only one of "
            f"them was given"
        )
    if key:
        fixed = {
            "access_key_id": key,
            "secret_access_key": secret,
            "token": options.get("token"),
            "expires_at": None,
        }
        return lambda: dict(fixed)
    credentials = s3_credentials(bucket, options, session)

    def provide() -> dict[str, Any]:
        """The current credentials, in the form of obstore."""
        try:
            # botocore refreshes here when they are about to expire.
            frozen = credentials.get_frozen_credentials()
        except Exception as error:
            # obstore prints the traceback.
            raise no_renewal(f"{type(error).__name__}: {error}") from None
        current = {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
        }
        remember_secrets(current)
        return {**current, "expires_at": datetime.now(UTC) + CREDENTIALS_LAST}

    return provide


def s3_credentials(
    bucket: str, options: Mapping[str, Any], session: Callable[[], Any] | None = None
) -> Any:
    """botocore's credentials of its provider chain. Raises AccessDeniedError where it finds none."""
    session = session or _late_session(options, with_handlers=True)
    import botocore.exceptions

    try:
        credentials = session().get_credentials()
    except (
        botocore.exceptions.CredentialRetrievalError,
        botocore.exceptions.MetadataRetrievalError,
    ) as error:
        raise no_renewal(type(error).__name__) from None
    except botocore.exceptions.BotoCoreError as error:
        raise AccessDeniedError(
            f"s3://{bucket}: {error}; correct the profile in ~/.aws/config or AWS_PROFILE"
        ) from None
    if credentials is None:
        raise AccessDeniedError(
            f"s3://{bucket}: no credentials found; set AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, run 'aws configure', or pass storage_options={{'key': ..., "
            f"'secret': ...}} ({{'anon': True}} for a public bucket)"
        )
    return credentials


ENDPOINT_OPTIONS = {"gs": "base_url", "az": "endpoint"}
"""obstore's names of the endpoint."""
_DRIVER_OPTIONS = ("default_block_size", "project", "use_listings_cache")
"""Options of gcsfs and adlfs that obstore does not need."""
_DEFAULT_TOKENS = ("google_default", "cloud", "cache")
"""Values of gcsfs's `token` that mean default credentials. obstore finds them without an option."""


def cloud_arguments(scheme: str, config: StorageConfig) -> dict[str, Any]:
    """Keyword arguments for `obstore.store.from_url`.

    `endpoint_url` is an emulator or gateway, which may use plain http. `anon` sends no signature.
    gcsfs's `token` may be the path of a service account's file, or its content as a mapping. All
    other options have obstore's names, and obstore refuses unknown ones.
    """
    options = dict(config.storage_options)
    check_no_settings(f"{scheme}://", options)
    for name in _DRIVER_OPTIONS:
        options.pop(name, None)
    client_kwargs = options.pop("client_kwargs", None) or {}
    endpoint_option = ENDPOINT_OPTIONS[scheme]
    endpoint_url = options.pop("endpoint_url", None)
    if endpoint_url:
        options[endpoint_option] = endpoint_url
    # For Azure, obstore has its own option `token`.
    token = options.pop("token", None) if scheme == "gs" else None
    anonymous = options.pop("anon", False)
    if anonymous or token == "anon":
        options["skip_signature"] = True
    elif isinstance(token, Mapping):
        options["service_account_key"] = json.dumps(dict(token))
    elif token and token not in _DEFAULT_TOKENS:
        options["application_credentials"] = str(token)
    endpoint = str(options.get(endpoint_option) or "")
    _check_endpoint(f"{scheme}://", endpoint)
    return {
        "config": options,
        "client_options": client_options(config, endpoint, client_kwargs),
    }
