"""Anything with an fsspec driver: s3fs, hdfs, memory, and S3 servers that obstore rejects."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import fsspec
import fsspec.asyn

from streammega.config import StorageConfig
from streammega.errors import (
    ConfigError,
    EndpointError,
    ObjectNotFoundError,
    StorageError,
    StreammegaError,
)
from streammega.errors.redaction import redact
from streammega.storage.backends.ranges import read_side_by_side
from streammega.storage.descriptors import blame_limit, blame_limit_of_connection
from streammega.storage.endpoints import endpoint_of
from streammega.storage.failures import (
    NO_BUCKET,
    NO_CREDENTIALS,
    denied,
    failure_of_status,
    is_of_network,
    missing,
    missing_bucket,
    no_answer,
    status_of,
    unreachable,
)
from streammega.storage.fetch.threads import Pool
from streammega.storage.parts import part_bytes
from streammega.storage.retry import RetryPolicy
from streammega.storage.store import (
    Buffer,
    Bytes,
    ObjectInfo,
    Span,
    check_object_key,
    ended_early,
    fill,
    listed_etag,
    throttled,
)
from streammega.storage.versions import check_version

log = logging.getLogger(__name__)

RECHECK = 30.0
"""Seconds between two looks at the ETag of an object whose bodies come without one."""
_of_parents: list[Any] = []
"""Drivers that this process was forked with, kept: s3fs's would try to close its parent's
connections, and print why not.
"""


class FsspecStore:
    """One fsspec file system. Implements `storage.store.Store`; opened lazily, per process."""

    def __init__(self, scheme: str, config: StorageConfig) -> None:
        self.scheme = scheme
        self._config = config
        self._lock = threading.Lock()
        self._opened: tuple[int, Any, Pool] | None = None
        self._policy = RetryPolicy.of(config, endpoint_of(scheme, "", config.storage_options))
        self._checked: dict[tuple[str, str], float] = {}

    def __repr__(self) -> str:
        return f"FsspecStore({self.scheme}://)"

    def __getstate__(self) -> dict[str, Any]:
        return {
            "scheme": self.scheme,
            "config": self._config,
            "answered": self._policy.has_answered,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scheme"], state["config"])  # type: ignore[misc]
        self._policy.inherit(state["answered"])

    def url(self, key: str) -> str:
        """The full URL of a key, without credentials."""
        # keys of http are URLs
        whole = key if "://" in key else f"{self.scheme}://{key.lstrip('/')}"
        return redact(whole, self._config.storage_options)

    def info(self, key: str) -> ObjectInfo:
        """Size and ETag (or the driver's own checksum of its listing)."""
        self._check_object_key(key)
        fs, pool = self._filesystem()

        def head() -> ObjectInfo:
            try:
                meta = fs.info(key)
                if meta.get("type") == "directory":
                    raise FileNotFoundError(key)
                etag = meta.get("ETag") or meta.get("etag") or self._checksum(fs, key)
            except BaseException as error:
                raise self._error(key, error) from None
            return ObjectInfo(key=key, size=int(meta["size"]), etag=str(etag))

        return pool.call(lambda: self._policy.call(head))

    def _checksum(self, fs: Any, key: str) -> str:
        """What a driver makes of its own knowledge of an object; of http that is the URL alone,
        which tells no versions apart.
        """
        return "" if self.scheme in ("http", "https") else str(fs.ukey(key))

    def read_ranges(
        self, key: str, starts: Sequence[int], stops: Sequence[int], etag: str = ""
    ) -> list[Buffer]:
        """Concurrent range requests; each body's length is checked, failures are tried again."""
        _, pool = self._filesystem()
        return read_side_by_side(self, key, starts, stops, etag, self._policy, pool)

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """One request each; drivers other than s3fs do not tell the ETag of a body, so the object's
        is asked for now and then.
        """
        self._check_object_key(key)
        fs, _ = self._filesystem()
        url = self.url(key)
        try:
            if self.scheme == "s3":
                answers = fsspec.asyn.sync(
                    fs.loop, _get_object, fs, key, spans, timeout=self._config.timeout
                )
                for _, found in answers:
                    check_version(url, etag, found)
                bodies = [body for body, _ in answers]
            else:
                bodies = [fs.cat_file(key, start=start, end=stop) for start, stop in spans]
                self._recheck(key, etag)
            fill(url, spans, [memoryview(body) for body in bodies], outs)
        except BaseException as error:
            raise self._error(key, error) from None

    def _recheck(self, key: str, etag: str) -> None:
        """Compare the ETag if that was not done in the last `RECHECK` seconds."""
        now = time.monotonic()
        if etag and now - self._checked.get((key, etag), -math.inf) >= RECHECK:
            check_version(self.url(key), etag, self.info(key).etag)
            self._checked[key, etag] = now

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Objects under a prefix; the prefix may end inside a name."""
        fs, pool = self._filesystem()
        folder = prefix.rpartition("/")[0]

        def find() -> Any:
            try:
                if recursive:
                    return fs.find(folder, detail=True)
                return {
                    item["name"]: item
                    for item in fs.ls(folder, detail=True)
                    if item["type"] == "file"
                }
            except FileNotFoundError:
                return {}
            except BaseException as error:
                raise self._error(prefix, error) from None

        found = pool.call(lambda: self._policy.call(find))
        # what other drivers call an ETag may be anything
        spell = listed_etag if self.scheme == "s3" else str
        items = [
            ObjectInfo(
                key=key,
                size=int(meta["size"]),
                etag=spell(meta.get("ETag") or meta.get("etag") or ""),
            )
            for key, meta in found.items()
            if key.lstrip("/").startswith(prefix.lstrip("/"))
        ]
        return sorted(items, key=lambda item: item.key)

    def open_writer(self, key: str) -> FsspecWriter | RenamingWriter:
        """A writer that shows nothing under `key` before it commits."""
        self._check_object_key(key)
        fs = self._open()
        try:
            if self.scheme == "s3":
                fs.call_s3 = self._trying_again(key, fs.call_s3)
                return FsspecWriter(
                    fs.open(key, "wb", autocommit=False), lambda error: self._error(key, error)
                )
            return RenamingWriter(fs, key, lambda error: self._error(key, error))
        except BaseException as error:
            raise self._error(key, error) from None

    def _trying_again(self, key: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call of the driver under the retry policy: for parts of an upload."""

        def attempt(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                raise self._error(key, error) from None

        return lambda *args, **kwargs: self._policy.call(lambda: attempt(*args, **kwargs))

    def create(self, key: str, data: bytes) -> bool:
        """One PUT under the condition that nothing is there, by s3fs.

        Raises StorageError for drivers that have no such.
        """
        self._check_object_key(key)
        if self.scheme != "s3":
            raise StorageError(f"{self.url(key)}: its driver has no conditional writes")
        fs, _ = self._filesystem()

        def attempt() -> bool:
            try:
                fs.pipe_file(key, data, mode="create")
            except FileExistsError:
                return False
            except BaseException as error:
                raise self._error(key, error) from None
            return True

        return self._policy.call(attempt)

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        self._check_object_key(key)
        fs, _ = self._filesystem()
        try:
            self._trying_again(key, fs.rm_file)(key)
        except ObjectNotFoundError:
            pass

    def _check_object_key(self, key: str) -> None:
        if self.scheme == "s3":  # other drivers may send keys as they are
            check_object_key(self.url(key), key)

    def _filesystem(self) -> tuple[Any, Pool]:
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                _of_parents.append(self._opened)
                pool = Pool(min(32, self._config.max_requests))
                self._opened = (os.getpid(), self._open(), pool)
            return self._opened[1], self._opened[2]

    def _open(self) -> Any:
        """A driver that tries once, where drivers can be told to: what fails is tried again by
        storage.retry.
        """
        options = dict(self._config.storage_options)
        # Listings cached by the driver would hide that an object was replaced.
        options |= {"use_listings_cache": False, "skip_instance_cache": True}
        if self.scheme == "s3":
            limits = {
                "connect_timeout": min(10.0, self._config.timeout),
                "read_timeout": self._config.stall_timeout,
                "max_pool_connections": max(10, self._config.max_requests),
                "retries": {"total_max_attempts": 1},
            }
            options["config_kwargs"] = limits | dict(options.get("config_kwargs") or {})
        try:
            fs = fsspec.filesystem(self.scheme, **options)
            if self.scheme == "s3":
                fs.retries = 1  # s3fs counts tries, not retries
            return fs
        except ImportError as error:
            raise ConfigError(
                f"{self.scheme}://: the fsspec driver is not installed: {error}"
            ) from None
        except Exception as error:
            limit = blame_limit(error)
            if limit:
                raise EndpointError(f"{self.scheme}://: {limit}") from None
            reason = redact(str(error), self._config.storage_options)
            raise ConfigError(f"{self.scheme}://: storage_options do not fit: {reason}") from None

    def _error(self, key: str, error: BaseException) -> BaseException:
        """The streammega error for whatever an fsspec driver raises."""
        if isinstance(error, StreammegaError) or not isinstance(error, Exception):
            return error
        name = type(error).__name__
        url = self.url(key)
        text = redact(f"{name}: {error}".splitlines()[0], self._config.storage_options)
        status = status_of(error)
        if status:
            return failure_of_status(url, status, text)
        if isinstance(error, FileNotFoundError):
            return missing_bucket(url) if NO_BUCKET in text else missing(url)
        if isinstance(error, PermissionError) or name in NO_CREDENTIALS:
            return denied(url, text)
        if "InvalidRange" in text or "416, message" in text or "not satisfiable" in text:
            return ended_early(url, text)
        # what s3fs makes of a bare 503
        busy = isinstance(error, OSError) and error.errno == errno.EBUSY
        if (
            busy
            or "SlowDown" in text
            or "reduce your request rate" in text
            or "TooManyRequests" in text
            or "(503)" in text
        ):
            return throttled(url, text)
        broken = is_of_network(error)
        limit = blame_limit_of_connection(error) if broken else blame_limit(error)
        if limit:
            return EndpointError(f"{url}: {limit}")  # may be tried again: other connections end
        if "InternalError" in text or "(500)" in text:
            return unreachable(url, text)
        if broken:
            return no_answer(url, text)
        return StorageError(f"{url}: {text}")


async def _get_object(fs: Any, key: str, spans: Sequence[Span]) -> list[tuple[bytes, str]]:
    """Bytes of spans of an S3 object, each with the ETag of its answer, by concurrent requests of
    s3fs's own client.
    """
    bucket, _, name = key.lstrip("/").partition("/")

    async def get(start: int, stop: int) -> tuple[bytes, str]:
        answer = await fs._call_s3(
            "get_object", Bucket=bucket, Key=name, Range=f"bytes={start}-{stop - 1}", **fs.req_kw
        )
        try:
            return await answer["Body"].read(), str(answer.get("ETag") or "")
        finally:
            answer["Body"].close()

    tasks = [asyncio.ensure_future(get(start, stop)) for start, stop in spans]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class RenamingWriter:
    """For drivers that publish a file when it is closed, or while it is written: another name, then
    a rename.
    """

    def __init__(self, fs: Any, key: str, wrap: Any) -> None:
        self._fs = fs
        self._key = key
        self._wrap = wrap
        self._temporary = f"{key}.{uuid.uuid4().hex}.partial"
        self._file = fs.open(self._temporary, "wb")

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        try:
            self._file.write(data)
        except Exception as error:
            raise self._wrap(error) from None

    def commit(self) -> None:
        """Close, then rename."""
        try:
            self._file.close()
            _rename(self._fs, self._temporary, self._key)
        except Exception as error:
            raise self._wrap(error) from None

    def abort(self) -> None:
        """Close and remove the temporary file."""
        for step in (self._file.close, lambda: self._fs.rm_file(self._temporary)):
            try:
                step()
            except Exception:  # the writer is being thrown away: what could be removed, was
                log.debug("could not remove %s", self._temporary)


def _rename(fs: Any, old: str, new: str) -> None:
    """Move a file. fsspec's own `mv`, of drivers that have none, takes signs of globs in a name for
    one: then it is copied.
    """
    if type(fs).mv is fsspec.AbstractFileSystem.mv and any(sign in old for sign in "*?["):
        fs.cp_file(old, new)
        fs.rm_file(old)
    else:
        fs.mv(old, new)


class FsspecWriter:
    """An s3fs file opened without autocommit: a multipart upload that is completed or aborted."""

    def __init__(self, file: Any, wrap: Any) -> None:
        self._file = file
        self._wrap = wrap

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes, in parts that grow: s3fs sends one whenever `blocksize` bytes are there."""
        # s3fs of 2024 has no such setting
        if not getattr(self._file.fs, "fixed_upload_size", False):
            sent = len(getattr(self._file, "parts", None) or [])
            self._file.blocksize = max(self._file.blocksize, part_bytes(sent))
        try:
            self._file.write(data)
        except Exception as error:
            raise self._wrap(error) from None

    def commit(self) -> None:
        """Send what is left and publish."""
        try:
            self._file.close()
            self._file.commit()
        except Exception as error:
            raise self._wrap(error) from None

    def abort(self) -> None:
        """Discard the upload, and keep the file's finaliser from publishing it."""
        try:
            self._file.discard()
        except Exception as error:
            log.debug("the upload could not be discarded: %s", type(error).__name__)
        self._file.closed = True
