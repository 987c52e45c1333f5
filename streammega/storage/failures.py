"""What a failed request means: one error for one cause, whichever transport met it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

from streammega.errors import AccessDeniedError, EndpointError, ObjectNotFoundError, StorageError
from streammega.storage.store import ended_early, throttled

PASSING = frozenset((408, 409, 425))
"""Statuses below 500 that a second try mends: too slow, a conflict with another
request, too early.
"""
LASTING = frozenset((501, 505))
"""Statuses from 500 on that none does: the server cannot do what was asked."""
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""Names of botocore's errors."""
NO_BUCKET = "bucket does not exist"
"""In what s3fs makes of NoSuchBucket, which leaves the code out."""
_NETWORK = (
    "Timeout",
    "Connect",
    "Endpoint",
    "Payload",
    "ResponseStream",
    "IncompleteRead",
    "HTTPClient",
    "ServerDisconnected",
)
"""In the names of errors of botocore and aiohttp, neither of which has one class for them."""
_NETWORK_NUMBERS = frozenset(
    getattr(errno, name)
    for name in (
        "EIO", "EPIPE", "EAGAIN", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ECONNREFUSED", "ECONNRESET",
        "ETIMEDOUT", "EMFILE", "ENFILE",
    )
) | {socket.EAI_AGAIN, socket.EAI_NONAME}  # fmt: skip


def failure_of_status(url: str, status: int, text: str) -> StorageError:
    """The error for an answer.

    `text`: what the server said, of which `url`'s error repeats the first line.
    """
    reason = text.splitlines()[0] if text else f"status {status}"
    if "NoSuchBucket" in text or NO_BUCKET in text:
        return missing_bucket(url)
    if status == 404:
        return missing(url)
    if status in (401, 403) or "ExpiredToken" in text:
        return denied(url, reason)
    if status == 416:
        return ended_early(url, reason)
    if status in (429, 503):
        return throttled(url, reason)
    if status in PASSING or (status >= 500 and status not in LASTING) or "RequestTimeout" in text:
        return unreachable(url, reason)
    return StorageError(f"{url}: {reason}")


def missing(url: str) -> ObjectNotFoundError:
    """No object of that name."""
    return ObjectNotFoundError(
        f"{url}: no such object; check the bucket and the key (a prefix has no .bin/.idx)"
    )


def missing_bucket(url: str) -> ObjectNotFoundError:
    """Nowhere for an object of that name to be, or to be written to."""
    bucket = "/".join(url.split("/", 3)[:3])
    return ObjectNotFoundError(
        f"{url}: the bucket {bucket} does not exist; check its name, or create it first"
    )


def denied(url: str, reason: str) -> AccessDeniedError:
    """The credentials are wrong, or have no right to it."""
    return AccessDeniedError(
        f"{url}: access denied; check the credentials, their rights and the bucket ({reason})"
    )


def no_answer(url: str, reason: str) -> EndpointError:
    """Refused, reset, not found by its name, or silent: the network or the server may be well again
    in a while.
    """
    error = unreachable(url, reason)
    error.silent = True
    return error


def unreachable(url: str, reason: str) -> EndpointError:
    """An answer that says that the server failed: it may be well again in a while."""
    return EndpointError(
        f"{url}: the endpoint did not answer; check endpoint_url, the network and DNS ({reason})"
    )


def status_of(error: BaseException) -> int:
    """The HTTP status that an error of botocore's, aiohttp's or a driver above them came with; 0:
    none.
    """
    for cause in _causes(error):
        answer = getattr(cause, "response", None)
        if isinstance(answer, dict):
            status: Any = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = getattr(cause, "status", None)
        if isinstance(status, int):
            return status
    return 0


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def is_of_network(error: BaseException) -> bool:
    """Whether something between here and the server failed.

    Drivers raise errors without a number for nearly everything.
    """
    if isinstance(error, (ConnectionError, TimeoutError)) or any(
        sign in type(error).__name__ for sign in _NETWORK
    ):
        return True
    return isinstance(error, OSError) and (error.errno is None or error.errno in _NETWORK_NUMBERS)
