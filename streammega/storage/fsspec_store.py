"""Anything with an fsspec driver: s3fs, ossfs (`oss://`), hdfs, memory, and S3 servers that obstore rejects."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec

from streammega.config import StorageConfig
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    EndpointError,
    ObjectNotFoundError,
    ShortReadError,
    StorageError,
    StreammegaError,
)
from streammega.storage.base import Buffer, ObjectInfo, checked
from streammega.storage.options import redact

log = logging.getLogger(__name__)


class FsspecStore:
    """One fsspec file system. Implements `storage.base.Store`; opened lazily, per process."""

    def __init__(self, scheme: str, config: StorageConfig) -> None:
        self.scheme = scheme
        self._config = config
        self._lock = threading.Lock()
        self._opened: tuple[int, Any, ThreadPoolExecutor] | None = None

    def __repr__(self) -> str:
        return f"FsspecStore({self.scheme}://)"

    def __getstate__(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["scheme"], state["config"])  # type: ignore[misc]

    def url(self, key: str) -> str:
        """The full URL of a key, without credentials."""
        return redact(f"{self.scheme}://{key.lstrip('/')}", self._config.storage_options)

    def info(self, key: str) -> ObjectInfo:
        """Size and ETag (or the driver's own checksum of its listing)."""
        fs, _ = self._filesystem()
        try:
            meta = fs.info(key)
            if meta.get("type") == "directory":
                raise FileNotFoundError(key)
            etag = meta.get("ETag") or meta.get("etag") or fs.ukey(key)
        except BaseException as error:
            raise self._error(key, error) from None
        return ObjectInfo(key=key, size=int(meta["size"]), etag=str(etag))

    def read_ranges(self, key: str, starts: Sequence[int], stops: Sequence[int]) -> list[Buffer]:
        """Concurrent range requests; each body's length is checked."""
        fs, pool = self._filesystem()
        spans = [(int(a), int(b)) for a, b in zip(starts, stops, strict=True)]
        wanted = [(a, b) for a, b in spans if b > a]
        try:
            if fs.async_impl and wanted:
                paths = [key] * len(wanted)
                low, high = [a for a, _ in wanted], [b for _, b in wanted]
                bodies = iter(fs.cat_ranges(paths, low, high, on_error="raise", batch_size=self._config.max_requests))
            else:
                bodies = pool.map(lambda span: fs.cat_file(key, start=span[0], end=span[1]), wanted)
            return [checked(self.url(key), a, b, memoryview(next(bodies) if b > a else b"")) for a, b in spans]
        except BaseException as error:
            raise self._error(key, error) from None

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects under a prefix; the prefix may end inside a name."""
        fs, _ = self._filesystem()
        folder = prefix.rpartition("/")[0]
        try:
            found = fs.find(folder, detail=True)
        except BaseException as error:
            raise self._error(prefix, error) from None
        items = [
            ObjectInfo(key=key, size=int(meta["size"]), etag=str(meta.get("ETag") or meta.get("etag") or ""))
            for key, meta in found.items()
            if key.lstrip("/").startswith(prefix.lstrip("/"))
        ]
        return sorted(items, key=lambda item: item.key)

    def open_writer(self, key: str) -> FsspecWriter | RenamingWriter:
        """A writer that shows nothing under `key` before it commits."""
        fs, _ = self._filesystem()
        try:
            if self.scheme in ("s3", "s3a"):
                return FsspecWriter(fs.open(key, "wb", autocommit=False), lambda error: self._error(key, error))
            return RenamingWriter(fs, key, lambda error: self._error(key, error))
        except BaseException as error:
            raise self._error(key, error) from None

    def delete(self, key: str) -> None:
        """Delete an object if it is there."""
        fs, _ = self._filesystem()
        try:
            fs.rm_file(key)
        except FileNotFoundError:
            pass
        except BaseException as error:
            raise self._error(key, error) from None

    def _filesystem(self) -> tuple[Any, ThreadPoolExecutor]:
        with self._lock:
            if self._opened is None or self._opened[0] != os.getpid():
                pool = ThreadPoolExecutor(self._config.max_requests, thread_name_prefix="streammega-read")
                self._opened = (os.getpid(), self._open(), pool)
            return self._opened[1], self._opened[2]

    def _open(self) -> Any:
        options = dict(self._config.storage_options)
        # Listings cached by the driver would hide that an object was replaced.
        options |= {"use_listings_cache": False, "skip_instance_cache": True}
        if self.scheme in ("s3", "s3a"):
            limits = {
                "connect_timeout": min(10.0, self._config.timeout),
                "read_timeout": self._config.timeout,
                "retries": {"max_attempts": self._config.retries, "mode": "standard"},
            }
            options["config_kwargs"] = limits | dict(options.get("config_kwargs") or {})
        try:
            return fsspec.filesystem(self.scheme, **options)
        except ImportError as error:
            extra = " (pip install 'streammega[oss]')" if self.scheme == "oss" else ""
            raise ConfigError(f"{self.scheme}://: the fsspec driver is not installed{extra}: {error}") from None
        except Exception as error:
            reason = redact(str(error), self._config.storage_options)
            raise ConfigError(f"{self.scheme}://: storage_options do not fit: {reason}") from None

    def _error(self, key: str, error: BaseException) -> BaseException:
        """The streammega error for whatever an fsspec driver raises."""
        if isinstance(error, StreammegaError) or not isinstance(error, Exception):
            return error
        name, url = type(error).__name__, self.url(key)
        text = redact(f"{name}: {error}".splitlines()[0], self._config.storage_options)
        if isinstance(error, FileNotFoundError):
            return ObjectNotFoundError(f"{url}: no such object; check the bucket and the key (a prefix has no .bin/.idx)")
        if isinstance(error, PermissionError) or name in (
            "NoCredentialsError",
            "PartialCredentialsError",
            "ProfileNotFound",
        ):
            return AccessDeniedError(f"{url}: access denied; check the credentials, their rights and the bucket ({text})")
        if "InvalidRange" in text or "416, message" in text or "not satisfiable" in text:
            return ShortReadError(f"{url}: the object ends before the bytes that were asked for; is it truncated? ({text})")
        if isinstance(error, (ConnectionError, TimeoutError)) or "Timeout" in name or "Connect" in name or "Endpoint" in name:
            return EndpointError(f"{url}: the endpoint did not answer; check endpoint_url, the network and DNS ({text})")
        return StorageError(f"{url}: {text}")


class RenamingWriter:
    """For drivers that publish a file when it is closed, or while it is written: another name, then a rename."""

    def __init__(self, fs: Any, key: str, wrap: Any) -> None:
        self._fs, self._key, self._wrap = fs, key, wrap
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
            self._fs.mv(self._temporary, self._key)
        except Exception as error:
            raise self._wrap(error) from None

    def abort(self) -> None:
        """Close and remove the temporary file."""
        for step in (self._file.close, lambda: self._fs.rm_file(self._temporary)):
            try:
                step()
            except Exception:  # the writer is being thrown away: what could be removed, was
                log.debug("could not remove %s", self._temporary)


class FsspecWriter:
    """An s3fs file opened without autocommit: a multipart upload that is completed or aborted."""

    def __init__(self, file: Any, wrap: Any) -> None:
        self._file, self._wrap = file, wrap

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
