"""The version of an object: its ETag, or its Last-Modified where the server sends no ETag. Of other
files, what their file system tells: an ETag, a time, or their size alone.

Versions are compared with those of the same kind only.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from streammega.errors import ObjectChangedError
from streammega.errors.logs import get_logger
from streammega.storage.http_errors import root_of
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

MODIFIED = "modified "
"""The prefix of versions that are a time. No ETag has it, for ETags are quoted or hexadecimal."""
SIZED = "size "
"""The prefix of versions that are the bytes of a file, where nothing else is known of it."""
_ETAG_KEYS = ("ETag", "etag", "Content-MD5", "blob_id", "sha", "CRC")
_TIME_KEYS = (
    *("Last-Modified", "LastModified", "last_modified", "mtime", "modified", "modify"),
    *("modificationTime", "updated", "created"),
)
"""What drivers of fsspec call the digest or ETag of a file, and when it was written."""


def version_of(etag: str | None, modified: datetime | None) -> str:
    """The version in an answer: its ETag as it is spelled, else its Last-Modified.

    Empty where it has neither.
    """
    if etag:
        return etag
    # Transports say 1970 where the header is missing.
    if modified is not None and modified.timestamp() > 0:
        return MODIFIED + modified.isoformat()
    return ""


def is_etag(version: str) -> bool:
    """Whether a version is an ETag, and not a time or size. Servers compare ETags for conditional writes."""
    return bool(version) and not version.startswith((MODIFIED, SIZED))


def version_like(expected: str, etag: str | None, modified: datetime | None) -> str:
    """The version in an answer, of the same kind as the expected one.

    Empty where the answer has none of that kind.
    """
    if expected.startswith(MODIFIED):
        return version_of(None, modified)
    return etag or ""


def version_of_info(info: Mapping[str, Any], like: str = "") -> str:
    """The version in what a driver of fsspec knows of a file; of the same kind as `like`, if that is
    given. Empty where it knows none of that kind.
    """
    etag = next((str(info[key]) for key in _ETAG_KEYS if info.get(key)), "")
    time = next((info[key] for key in _TIME_KEYS if info.get(key)), None)
    size = f"{SIZED}{info.get('size')}"
    # A time has whole seconds alone, so the size belongs to it.
    modified = "" if time is None else f"{MODIFIED}{_whole_seconds(time)}, {size}"
    if not like:
        return etag or modified or size
    if like.startswith(SIZED):
        return size
    return modified if like.startswith(MODIFIED) else etag


def modified_of_info(info: Mapping[str, Any]) -> float:
    """When a file was written by what a driver of fsspec knows, in seconds since 1970; 0: not known."""
    times = (info[key] for key in _TIME_KEYS if info.get(key))
    time = next(times, 0.0)
    if isinstance(time, datetime):
        return time.timestamp()
    return float(time) if isinstance(time, (int, float)) else 0.0


def _whole_seconds(time: Any) -> str:
    """A time of a driver, which may spell it otherwise in its listings: with parts of seconds, or as
    another type.
    """
    if isinstance(time, datetime):
        time = time.timestamp()
    return str(int(time)) if isinstance(time, (int, float)) else str(time)


def same_version(one: str, other: str) -> bool:
    """Whether two versions of one kind are the same.

    Some answers leave the quotes out, some servers weaken their ETags.
    """
    return bare_version(one) == bare_version(other)


def check_version(url: str, expected: str, actual: str) -> None:
    """Raise ObjectChangedError if an answer is of another version than the object that was opened.

    An answer without a version, or with one of the other kind, cannot be compared: some servers
    send ETags with some answers only. One warning says so.
    """
    if not expected:
        return
    if not actual or expected.startswith(MODIFIED) != actual.startswith(MODIFIED):
        warn_incomparable(url)
    elif not same_version(expected, actual):
        kind = "ETag " if is_etag(actual) else ""
        raise ObjectChangedError(
            f"{url}: the object was replaced while it was being read ({kind}{actual}, it was "
            f"{expected}); data would be mixed. Start again on the new object, or put the old one "
            f"back"
        )


def bare_version(version: str) -> str:
    """A version without what answers of one server may add to it: quotes, and a mark of weakness."""
    return version.removeprefix("W/").strip('"')


def warn_unversioned(url: str) -> None:
    """Warn once for each object that only its size shows whether it changes, so no cache keeps it."""
    warn_once(
        log,
        url,
        "%s: the server sends neither ETag nor Last-Modified, so a replaced object cannot be "
        "noticed; it is read again in every run and kept in no cache. Have the server send ETags",
        url,
    )


def warn_incomparable(url: str) -> None:
    """Warn once for each server that its answers cannot be compared with what was opened."""
    warn_once(
        log,
        root_of(url),
        "%s: the server sends ETag or Last-Modified with some answers and not with others. So an "
        "object that is replaced during a run is noticed only if it became shorter. Have the "
        "server send ETags with every answer",
        url,
    )
