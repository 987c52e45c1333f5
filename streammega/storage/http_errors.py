"""What a failed request means: one error for one cause, whichever transport met it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

from streammega.errors import AccessDeniedError, EndpointError, ObjectNotFoundError, StorageError
from streammega.storage.endpoints import root_of
from streammega.storage.store import ended_early, throttled

PASSING = frozenset((408, 409, 425))
"""Statuses below 500 that a second try mends: too slow, a conflict of requests, too early."""
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
    {
        errno.EIO,
        errno.EPIPE,
        errno.EAGAIN,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ETIMEDOUT,
        errno.EMFILE,
        errno.ENFILE,
        socket.EAI_AGAIN,
        socket.EAI_NONAME,
    }
)
"""What an OSError is numbered by where a network failed; names that are not found have EAI_*."""


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
    server_failed = status >= 500 and status not in LASTING
    # A code of S3's, which comes with status 400.
    too_slow = "RequestTimeout" in text
    if status in PASSING or server_failed or too_slow:
        return unreachable(url, reason)
    return StorageError(f"{url}: {reason}")


def missing(url: str) -> ObjectNotFoundError:
    """No object of that name."""
    return ObjectNotFoundError(
        f"{url}: no such object; check the bucket and the key (a prefix has no .bin/.idx)"
    )


def no_size(url: str) -> StorageError:
    """An answer to a look at an object that leaves its size out."""
    return StorageError(
        f"{url}: the server does not say how large the object is (no Content-Length); have it send "
        f"the size, without compression (Content-Encoding)"
    )


def missing_bucket(url: str) -> ObjectNotFoundError:
    """Nowhere for an object of that name to be, or to be written to."""
    return ObjectNotFoundError(
        f"{url}: the bucket {root_of(url)} does not exist; check its name, or create it first"
    )


def denied(url: str, reason: str) -> AccessDeniedError:
    """The credentials are wrong, or have no right to it."""
    return AccessDeniedError(
        f"{url}: access denied; check the credentials, their rights and the bucket ({reason})"
    )


def no_answer(url: str, reason: str) -> EndpointError:
    """Refused, reset, not found by its name, or silent.

    The network or the server may be well again in a while.
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
    """The HTTP status that an error of botocore, aiohttp or their users came with; 0: none."""
    for cause in _causes(error):
        answer = getattr(cause, "response", None)
        if isinstance(answer, dict):
            metadata = answer.get("ResponseMetadata", {})
            status: Any = metadata.get("HTTPStatusCode")
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
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    name = type(error).__name__
    if any(sign in name for sign in _NETWORK):
        return True
    if isinstance(error, OSError):
        return error.errno is None or error.errno in _NETWORK_NUMBERS
    return False
