"""Anything with an fsspec driver: s3fs, hdfs, memory, S3 servers that obstore rejects, and what forked
processes read.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

import fsspec
import fsspec.asyn

from streammega.config import StorageConfig
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    EndpointError,
    ObjectNotFoundError,
    StreammegaError,
)
from streammega.errors.logs import get_logger
from streammega.storage.backends.obstore import S3_SCHEMES
from streammega.storage.backends.remote import (
    RemoteStore,
    note_client,
    part_bytes,
    repeats_itself,
)
from streammega.storage.backends.s3_options import (
    CONNECT_TIMEOUT,
    OSS_OPTIONS,
    S3_OPTIONS,
    s3_endpoint,
)
from streammega.storage.etags import check_version, modified_of_info
from streammega.storage.fd_limit import explain_fd_limit
from streammega.storage.http_errors import (
    FAILED_RENEWALS,
    NO_CREDENTIALS,
    REFUSED,
    STILL_EXPIRED,
    answer_of,
    check_range,
    denied,
    failure_of_status,
    failure_without_status,
    is_of_network,
    missing,
    no_renewal,
    no_size,
)
from streammega.storage.store import (
    ObjectInfo,
    ObjectWriter,
    Span,
    check_object_key,
    listed_etag,
)

log = get_logger(__name__)

RECHECK = 30.0
"""Seconds between two checks of the ETag of an object whose bodies come without one."""
_HTTP = ("http", "https")
_VERSION_MARKS = {
    **dict.fromkeys(S3_SCHEMES, "?versionId="),
    **dict.fromkeys(("az", "abfs", "abfss"), "?versionid="),
}
"""What s3fs and adlfs take, in a name, for a version of an object, and leave out by default."""
_OPTIONS_OF_BUCKETS = (S3_OPTIONS | OSS_OPTIONS) - {"client_kwargs"}


def driver_options(scheme: str, config: StorageConfig) -> dict[str, Any]:
    """`storage_options` for fsspec's driver of a scheme. http gets none of the options of buckets."""
    options = dict(config.storage_options)
    if scheme.lower() in _HTTP:
        return {name: options[name] for name in options if name not in _OPTIONS_OF_BUCKETS}
    return options


def check_version_mark(scheme: str, name: str, url: str) -> None:
    """Raise ConfigError for a name that the driver of a scheme would cut at the mark of a version."""
    mark = _VERSION_MARKS.get(scheme)
    if mark and mark in name:
        raise ConfigError(
            f"{url}: fsspec's driver takes {mark!r} for the end of the name, and would read the object "
            f"before it; copy that version, or the object of this name, to a plain name"
        )


class FsspecStore(RemoteStore):
    """One fsspec file system.

    root: the bucket or host that keys lack. Without one, keys are whole paths, and URLs for http.
    """

    def __init__(self, scheme: str, root: str, config: StorageConfig) -> None:
        super().__init__(scheme, root, config)
        self._is_s3 = scheme in S3_SCHEMES  # s3fs serves them
        self._checked: dict[tuple[str, str], float] = {}  # when, by key and ETag

    def _path(self, key: str) -> str:
        """A key as the driver has it."""
        if not self.root:
            return key
        if self.scheme in _HTTP:
            return f"{self.scheme}://{self.root}/{quote(key)}"
        return f"{self.root}/{key}"

    @property
    def transport(self) -> str:
        """The client's name."""
        return "fsspec"

    def _full_url(self, key: str) -> str:
        path = self._path(key)
        return path if "://" in path else f"{self.scheme}://{path.lstrip('/')}"

    def info(self, key: str) -> ObjectInfo:
        """Size and ETag (or the driver's own checksum of its listing)."""
        self._check_key(key)
        path = self._path(key)

        def head(fs: Any) -> ObjectInfo:
            try:
                meta = self._ask(fs, "info", path)
            except Exception as error:
                if self._is_s3 and answer_of(error)[0] in REFUSED:
                    self._get(fs, key, [(0, 1)], "")  # the answer to GET says why
                raise
            if meta.get("type") == "directory":
                raise FileNotFoundError(path)
            etag = _etag_of(meta)
            # The driver's own digest. For http it covers the URL alone, and not the version.
            if not etag and self.scheme not in _HTTP:
                etag = fs.ukey(path)
            if meta["size"] is None:
                raise no_size(self.url(key))
            return ObjectInfo(key=key, size=int(meta["size"]), etag=str(etag))

        return self._call(key, head)

    def _ask(self, fs: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """One call of the driver, within `request_timeout`.

        A driver without an event loop cannot be interrupted, so its own timeouts apply.
        """
        if not fs.async_impl:
            return getattr(fs, method)(*args, **kwargs)
        call = getattr(fs, f"_{method}")
        return fsspec.asyn.sync(
            fs.loop, call, *args, timeout=self._config.request_timeout, **kwargs
        )

    def _get(self, client: Any, key: str, spans: Sequence[Span], etag: str) -> Sequence[Any]:
        """For s3, oss and http, the headers of each answer are checked.

        Other drivers do not show them, so the object's ETag is looked up now and then.
        """
        path = self._path(key)
        if not self._is_s3 and self.scheme not in _HTTP:
            bodies = [
                self._ask(client, "cat_file", path, start=start, end=stop) for start, stop in spans
            ]
            self._recheck(key, etag)
            return bodies
        get = _get_from_s3 if self._is_s3 else _get_by_http
        arguments = (get, client, path, self.url(key), spans, etag)
        timeout = self._config.request_timeout
        answers = fsspec.asyn.sync(client.loop, _get_all, *arguments, timeout=timeout)
        if not all(is_compared for _, is_compared in answers):
            self._recheck(key, etag)
        return [body for body, _ in answers]

    def _recheck(self, key: str, etag: str) -> None:
        """Look up and compare the ETag, if that was not done in the last `RECHECK` seconds."""
        if not etag:
            return
        now = time.monotonic()
        checked_at = self._checked.get((key, etag), -math.inf)
        if now - checked_at >= RECHECK:
            check_version(self.url(key), etag, self.info(key).etag)
            self._checked[key, etag] = now

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Objects whose keys begin with a prefix, which may end inside a name. Sorted by key.

        ETags are empty where listings have none. Sizes that they lack are looked up one by one.
        """
        path = self._path(prefix)
        # Drivers list whole folders. Other objects are left out below.
        folder = path.rpartition("/")[0]

        def find(fs: Any) -> Any:
            """The files of the folder by name; none if the folder does not exist.

            Not by `_ask`: a listing is many requests, and `request_timeout` is for one.
            """
            try:
                listed = (
                    fs.find(folder, detail=True).values()
                    if recursive
                    else fs.ls(folder, detail=True)
                )
            except FileNotFoundError:
                return {}
            return {entry["name"]: entry for entry in listed if entry["type"] == "file"}

        files = self._call(prefix, find)
        # Other drivers have any text as ETag.
        spell_etag = listed_etag if self._is_s3 else str
        # As `_path` quotes keys. Without a root they are URLs.
        spell_name = unquote if self.root and self.scheme in _HTTP else str
        wanted = spell_name(path.lstrip("/"))
        listed = []
        for name, meta in files.items():
            listed_path = spell_name(name.lstrip("/"))
            if listed_path.startswith(wanted):
                # Spelled as the prefix: some drivers begin their names with a slash.
                key = prefix + listed_path[len(wanted) :]
                if meta["size"] is None:
                    listed.append(self.info(key))
                    continue
                etag = spell_etag(_etag_of(meta))
                written = modified_of_info(meta)
                listed.append(
                    ObjectInfo(key=key, size=int(meta["size"]), etag=etag, modified=written)
                )
        return sorted(listed, key=lambda info: info.key)

    def open_writer(self, key: str) -> ObjectWriter:
        """A writer that publishes nothing under `key` before it commits."""
        self._check_key(key)
        path = self._path(key)
        # A driver for this writer alone: with s3fs its calls are replaced by ones that retry.
        fs = note_client(self._open())

        def wrap(error: BaseException) -> BaseException:
            return self._error(key, error)

        try:
            if self._is_s3:
                fs.call_s3 = self._trying_again(key, fs, fs.call_s3)
                file = fs.open(path, "wb", autocommit=False)
                return S3fsWriter(file, wrap)
            # Other drivers publish a file when it is closed, or while it is written.
            temporary = f"{path}.{uuid.uuid4().hex}.partial"
            file = fs.open(temporary, "wb")
            publish = partial(_rename, fs, temporary, path)
            return FsspecWriter(file, publish, [file.close, partial(fs.rm_file, temporary)], wrap)
        except BaseException as error:
            raise self._error(key, error) from None

    def _trying_again(self, key: str, fs: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the driver with retries, for parts of an upload."""

        def attempt(*args: Any, **kwargs: Any) -> Any:
            renew = self._renewal()
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                ours = self._error(key, error)
            if isinstance(ours, AccessDeniedError) and ours.has_expired and renew is not None:
                renew()
                ours.transient = True
                if self.scheme == "s3":
                    # botocore asks its source again for a new client only.
                    fs.connect(refresh=True)
            raise ours from None

        return lambda *args, **kwargs: self._policy.call(lambda: attempt(*args, **kwargs))

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str = ""
    ) -> bool:
        """s3fs has a condition for new objects; other drivers have none."""
        if not self._is_s3 or not if_absent:
            return super().put(key, data, if_absent=if_absent, if_match=if_match)
        self._check_key(key)

        def attempt(fs: Any) -> bool:
            try:
                fs.pipe_file(self._path(key), bytes(data), mode="create")
            except FileExistsError:
                return False
            return True

        return self._call(key, attempt)

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        self._check_key(key)
        with contextlib.suppress(ObjectNotFoundError):
            self._call(key, lambda fs: self._ask(fs, "rm_file", self._path(key)))

    def _check_key(self, key: str) -> None:
        check_version_mark(self.scheme, key, self.url(key))
        if self._is_s3:  # other drivers may send keys as they are
            check_object_key(self.url(key), key)

    def _driver_options(self) -> dict[str, Any]:
        """Arguments for the driver, apart from those of all drivers."""
        return driver_options(self.scheme, self._config)

    def _open(self) -> Any:
        """A driver that does not retry, where that can be set: `storage.retry` does."""
        options = self._driver_options()
        # Listings cached by the driver would hide that an object was replaced.
        options |= {"use_listings_cache": False, "skip_instance_cache": True}
        if self._is_s3:
            limits = {
                "connect_timeout": min(CONNECT_TIMEOUT, self._config.request_timeout),
                "read_timeout": self._config.tuning.read_timeout,
                "max_pool_connections": max(10, self._config.max_concurrent_requests),
                "retries": {"total_max_attempts": 1},
                # some servers send the checksum of the whole object with a range of it
                "response_checksum_validation": "when_required",
            }
            options["config_kwargs"] = limits | dict(options.get("config_kwargs") or {})
        elif self.scheme in _HTTP:
            import aiohttp

            timeout = aiohttp.ClientTimeout(
                total=self._config.request_timeout,
                sock_connect=min(CONNECT_TIMEOUT, self._config.request_timeout),
                sock_read=self._config.tuning.read_timeout,
            )
            limits = {"timeout": timeout}
            options["client_kwargs"] = limits | dict(options.get("client_kwargs") or {})
        if self.scheme == "s3":
            s3_endpoint(self.root, self._config.storage_options)
        try:
            driver = _driver_class("s3" if self._is_s3 else self.scheme)
            # Checked beforehand: a driver that lacks an argument raises again when it is collected.
            inspect.signature(driver.__init__).bind(None, **options)
            fs = driver(**options)
            if self._is_s3:
                fs.retries = 1  # s3fs counts tries, not retries
                fs._call_s3 = _without_repetition(self.scheme, fs._call_s3)
            return fs
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(
                f"{self.scheme}://: the fsspec driver is not installed: {error}"
            ) from None
        except Exception as error:
            limit = explain_fd_limit(error)
            if limit:
                raise EndpointError(f"{self.scheme}://: {limit}") from None
            raise ConfigError(f"{self.scheme}://: storage_options do not fit: {error}") from None

    def _error(self, key: str, error: BaseException) -> BaseException:
        return driver_error(self.url(key), error)


def _driver_class(scheme: str) -> Any:
    """The class of a driver. Raises ConfigError for an unknown scheme, ImportError."""
    try:
        return fsspec.get_filesystem_class(scheme)
    except ValueError:
        nearest = get_close_matches(scheme, fsspec.available_protocols(), 1)
        hint = f"did you mean {nearest[0]}://?" if nearest else "fsspec has no driver of that name"
        raise ConfigError(f"{scheme}://: no storage has this scheme; {hint}") from None


def driver_error(url: str, error: BaseException) -> BaseException:
    """Our error for an error of an fsspec driver."""
    if isinstance(error, StreammegaError) or not isinstance(error, Exception):
        return error
    status, code = answer_of(error)
    cause = error.__cause__
    # fsspec's driver of http raises FileNotFoundError for every failure.
    if (
        cause is not None
        and isinstance(error, FileNotFoundError)
        and (status or is_of_network(cause))
    ):
        error = cause
    name = type(error).__name__
    text = f"{name}: {error}".splitlines()[0]
    if status:
        return failure_of_status(url, status, code, f"{code}; {text}" if code else text)
    if isinstance(error, FileNotFoundError):
        return missing(url)
    if name in FAILED_RENEWALS or STILL_EXPIRED in text:
        return no_renewal(name)
    if isinstance(error, PermissionError) or name in NO_CREDENTIALS:
        return denied(url, text)
    if isinstance(error, KeyError) and error.args == ("ContentLength",):  # of s3fs
        return no_size(url)
    return failure_without_status(url, error, text, of_network=is_of_network(error))


def _etag_of(meta: Mapping[str, Any]) -> Any:
    """The ETag in what a driver returns, or an empty text."""
    return meta.get("ETag") or meta.get("etag") or ""


async def _get_all(
    get: Callable[..., Any], fs: Any, key: str, url: str, spans: Sequence[Span], etag: str
) -> list[tuple[bytes, bool]]:
    """The bytes of each span, by concurrent requests, and whether the version was compared.

    get: sends one request.
    """
    tasks = [asyncio.ensure_future(get(fs, key, url, span, etag)) for span in spans]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        # If one fails, the others are not wanted.
        for task in tasks:
            task.cancel()


async def _get_from_s3(fs: Any, key: str, url: str, span: Span, etag: str) -> tuple[bytes, bool]:
    """By s3fs's own client."""
    bucket, _, name = key.lstrip("/").partition("/")
    answer = await fs._call_s3(
        "get_object", Bucket=bucket, Key=name, Range=_range_of(span), **fs.req_kw
    )
    body = answer["Body"]
    try:
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        check_version(url, etag, str(answer.get("ETag") or ""))
        content_range = answer.get("ContentRange", "")
        check_range(url, span, status, content_range, answer.get("ContentLength"))
        return bytes(await body.read()), True
    finally:
        body.close()


def _without_repetition(scheme: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of s3fs that raises StorageError where a listing has the same token twice.

    s3fs would ask for that page for ever.
    """

    async def checked(method: str, *args: Any, **kwargs: Any) -> Any:
        answer = await call(method, *args, **kwargs)
        if method == "list_objects_v2":
            token = kwargs.get("ContinuationToken")
            if token and token == answer.get("NextContinuationToken"):
                raise repeats_itself(f"{scheme}://{kwargs['Bucket']}/{kwargs['Prefix']}")
        return answer

    return checked


async def _get_by_http(fs: Any, key: str, url: str, span: Span, etag: str) -> tuple[bytes, bool]:
    """By the session of fsspec's driver of http."""
    options = dict(fs.kwargs)
    headers = dict(options.pop("headers", {}))
    # A compressed body would have other ranges.
    headers |= {"Range": _range_of(span), "Accept-Encoding": "identity"}
    session = await fs.set_session()
    async with session.get(fs.encode_url(key), headers=headers, **options) as answer:
        answer.raise_for_status()
        answered_etag = answer.headers.get("ETag", "")
        if answered_etag:
            check_version(url, etag, answered_etag)
        content_range = answer.headers.get("Content-Range", "")
        check_range(url, span, answer.status, content_range, answer.content_length)
        return bytes(await answer.read()), bool(answered_etag)


def _range_of(span: Span) -> str:
    start, stop = span
    return f"bytes={start}-{stop - 1}"  # a range of HTTP holds its end


Wrap = Callable[[BaseException], BaseException]
"""Turns a driver's error into ours."""
_GLOB_SIGNS = "*?["


def _rename(fs: Any, old: str, new: str) -> None:
    """Move a file."""
    # The default `mv` of fsspec takes a name with glob characters for a glob.
    own_move = type(fs).mv is not fsspec.AbstractFileSystem.mv
    if not own_move and any(sign in old for sign in _GLOB_SIGNS):
        fs.cp_file(old, new)
        fs.rm_file(old)
    else:
        fs.mv(old, new)


class FsspecWriter(ObjectWriter):
    """A driver's file, which is published after it was closed.

    Args: publish: publishes it. discard: the steps that remove it instead. Each of them is tried.
    """

    def __init__(
        self,
        file: Any,
        publish: Callable[[], Any],
        discard: Sequence[Callable[[], Any]],
        wrap: Wrap,
    ) -> None:
        self._file = file
        self._publish = publish
        self._discard = discard
        self._wrap = wrap

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        try:
            self._file.write(data)
        except Exception as error:
            raise self._wrap(error) from None

    def commit(self) -> None:
        """Send what is left and publish."""
        try:
            self._file.close()
            self._publish()
        except Exception as error:
            raise self._wrap(error) from None

    def abort(self) -> None:
        """Throw away what was written, as far as the driver can."""
        for step in self._discard:
            try:
                step()
            except Exception as error:
                log.debug("an unfinished file could not be removed: %s", type(error).__name__)


class S3fsWriter(FsspecWriter):
    """An s3fs file opened without autocommit: a multipart upload that is completed or aborted."""

    def __init__(self, file: Any, wrap: Wrap) -> None:
        # The finaliser would publish a file that is not closed.
        close = partial(setattr, file, "closed", True)
        super().__init__(file, file.commit, [file.discard, close], wrap)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. s3fs sends a part when it has `blocksize` bytes, which grow."""
        # s3fs of 2024 has no such setting.
        if not getattr(self._file.fs, "fixed_upload_size", False):
            parts = getattr(self._file, "parts", None) or []
            self._file.blocksize = max(self._file.blocksize, part_bytes(len(parts)))
        super().write(data)
