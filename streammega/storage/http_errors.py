"""What a failed request means: one error for one cause, whichever transport met it."""

from __future__ import annotations

import errno
import re
import socket

from streammega.errors import (
    AccessDeniedError,
    EndpointError,
    ObjectNotFoundError,
    ShortReadError,
    StorageError,
)
from streammega.storage.fd_limit import explain_fd_limit, explain_fd_limit_of_connection

TRANSIENT_STATUSES = frozenset((408, 409, 425))
"""Statuses below 500 after which another try may succeed: timeout, conflict, too early."""
PERMANENT_STATUSES = frozenset((501, 505))
"""Statuses from 500 on after which no other try can: the server does not support the request."""
REFUSED = (400, 401, 403)
"""Statuses of answers whose code says why: expired credentials, a clock that differs, another region.
An answer to HEAD has no body, and so no code.
"""
PARTIAL_CONTENT = 206
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)", re.IGNORECASE)
_EXPIRED = re.compile("ExpiredToken|TokenExpired|TokenRefreshRequired")
"""Codes of S3 and OSS for temporary credentials whose time is over."""
CLOCK_DIFFERS = "RequestTimeTooSkewed"
"""The code of S3 and OSS where the clocks of client and server differ by minutes."""
_WRONG_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed")
"""Codes of S3 for requests that went to another region than the bucket's."""
_BUSY = ("SlowDown", "ServiceUnavailable", "TooManyRequests")
"""Codes for too many requests, also in answers with status 200, which botocore takes for a 500."""
NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""Names of botocore's errors."""
FAILED_RENEWALS = ("CredentialRetrievalError", "MetadataRetrievalError")
"""Names of botocore's errors for a source of credentials that does not answer."""
STILL_EXPIRED = "refreshed credentials are still expired"
"""Part of the message of botocore's RuntimeError where the source gives old credentials."""
NO_RENEWAL = "credentials could not be renewed"
"""Part of the message of `no_renewal`. An error that is raised within obstore loses its class."""
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
"""Parts of the names of network errors. Neither botocore nor aiohttp has one class for them."""
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
"""Numbers of an OSError where a network failed. A name that was not found has EAI_*."""


def failure_of_status(url: str, status: int, code: str, reason: str) -> StorageError:
    """The error for an answer. code: S3's, "" where the answer has none. reason: what the server said."""
    if code == "NoSuchBucket":
        return missing_bucket(url)
    if status == 404:
        return missing(url)
    if code == CLOCK_DIFFERS:
        return server_failed(
            url, f"the clock of this machine differs from its own; set it: {reason}"
        )
    if _EXPIRED.search(code):
        return expired(url, reason)
    if status in (401, 403):
        return denied(url, reason)
    # A HEAD has no body: of a wrong region it says 400 alone.
    if status == 301 or code in _WRONG_REGION or (status == 400 and not code):
        return wrong_region(url, reason)
    if status == 416:
        return truncated(url, reason)
    if status in (429, 503) or code in _BUSY:
        return throttled(url, reason)
    has_failed = status >= 500 and status not in PERMANENT_STATUSES
    # S3 sends this code with status 400.
    if status in TRANSIENT_STATUSES or has_failed or code == "RequestTimeout":
        return server_failed(url, reason)
    return StorageError(f"{url}: {reason}")


def short_read(url: str, start: int, stop: int, got: int) -> ShortReadError:
    """The error for a body of another length than was asked for."""
    return ShortReadError(
        f"{url}: wanted bytes [{start}, {stop}), got {got} bytes; the object is shorter than its "
        f"index says, or changed while it was read: compare its size with the .idx, or convert it "
        f"again"
    )


def truncated(url: str, reason: str) -> ShortReadError:
    """The error for a range outside of the object. Trying again does not help."""
    error = ShortReadError(
        f"{url}: the object ends before the bytes that were asked for ({reason}); compare its size "
        f"with the .idx, and copy or convert it again if it is shorter"
    )
    error.transient = False
    return error


def throttled(url: str, reason: str) -> EndpointError:
    """The error for an endpoint that asks for fewer requests."""
    error = EndpointError(
        f"{url}: the endpoint is overloaded or limits requests; lower max_concurrent_requests if this goes on "
        f"({reason})"
    )
    error.throttled = True
    return error


def missing(url: str) -> ObjectNotFoundError:
    """The error for an object that does not exist."""
    return ObjectNotFoundError(
        f"{url}: no such object; check the bucket and the key (datasets are named without .bin and .idx)"
    )


def no_size(url: str) -> StorageError:
    """The error for an answer to HEAD without a size."""
    return StorageError(
        f"{url}: the server does not say how large the object is (no Content-Length); have it send "
        f"the size, without compression (Content-Encoding)"
    )


def missing_bucket(url: str) -> ObjectNotFoundError:
    """The error for a bucket that does not exist."""
    return ObjectNotFoundError(
        f"{url}: the bucket {root_of(url)} does not exist; check its name, or create it first"
    )


def denied(url: str, reason: str) -> AccessDeniedError:
    """The error for credentials that are wrong, or have no right to the object."""
    return AccessDeniedError(
        f"{url}: access denied; check the credentials, their rights and the bucket ({reason})"
    )


def wrong_region(url: str, reason: str) -> StorageError:
    """The error for a request that the bucket's region refuses."""
    return StorageError(
        f"{url}: the server refuses the request, as where the bucket is in another region; set "
        f"AWS_DEFAULT_REGION or the region of client_kwargs, and check endpoint_url ({reason})"
    )


def expired(url: str, reason: str) -> AccessDeniedError:
    """The error for temporary credentials whose time is over."""
    error = AccessDeniedError(
        f"{url}: the credentials have expired; renew them where they come from ({reason})"
    )
    error.has_expired = True
    return error


def no_renewal(reason: str) -> EndpointError:
    """The error for a source of credentials that does not answer. Another try may help."""
    error = EndpointError(
        f"{NO_RENEWAL}; check the service, command or file that they come from ({reason})"
    )
    error.silent = True
    return error


def no_answer(url: str, reason: str) -> EndpointError:
    """The error for a connection that was refused or reset, or for a server that did not answer.

    Another try may help. `silent`: if the endpoint never answered this process, retries
    end soon (Tuning.connect_deadline).
    """
    error = EndpointError(
        f"{url}: the endpoint did not answer; check endpoint_url, the network and DNS ({reason})"
    )
    error.silent = True
    return error


def server_failed(url: str, reason: str) -> EndpointError:
    """The error for an answer that says that the server failed. Another try may help."""
    return EndpointError(
        f"{url}: the server could not answer it now; check its state and log if this goes on "
        f"({reason})"
    )


def failure_without_status(
    url: str, error: BaseException, text: str, *, of_network: bool
) -> StorageError:
    """The error for a request that ended without a status.

    text: what the client's error says. of_network: whether the network failed.
    """
    limit = explain_fd_limit_of_connection(error) if of_network else explain_fd_limit(error)
    if limit:
        return EndpointError(f"{url}: {limit}")  # another try may help, since other connections end
    return no_answer(url, text) if of_network else StorageError(f"{url}: {text}")


def answer_of(error: BaseException) -> tuple[int, str]:
    """The HTTP status, and the code of S3, in an error of a driver or in its cause; 0 and "": none."""
    cause: BaseException | None = error
    while cause is not None:
        answer = getattr(cause, "response", None)
        if isinstance(answer, dict):  # of botocore, which takes the status of a HEAD for a code
            code = str(answer.get("Error", {}).get("Code", ""))
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if status:
                return status, "" if code.isdigit() else code
        # of aiohttp, Azure, gcsfs; aiohttp's errors of bodies have another `code`
        is_of_gcs = type(cause).__name__ == "HttpError"
        for name in ("status", "status_code", *(["code"] if is_of_gcs else [])):
            value = getattr(cause, name, None)
            if isinstance(value, int):
                return value, ""
        cause = cause.__cause__
    return 0, ""


def is_of_network(error: BaseException) -> bool:
    """Whether the network failed, or the server did not answer.

    Drivers raise an OSError without a number for nearly everything. The caller must handle
    FileNotFoundError and PermissionError first, which may have no number either.
    """
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    name = type(error).__name__
    if any(sign in name for sign in _NETWORK):
        return True
    if isinstance(error, OSError):
        return error.errno is None or error.errno in _NETWORK_NUMBERS
    return False


def check_range(
    url: str, span: tuple[int, int], status: int, content_range: str, length: int | None = None
) -> None:
    """Raise unless the head of an answer promises the bytes of `span`, up to the object's end.

    length: the Content-Length. `store.check_length` checks the body's.
    """
    start, stop = span
    if status != PARTIAL_CONTENT and not content_range:
        # The whole object, which may be what was asked for.
        if start == 0 and length == stop:
            return
        raise StorageError(
            f"{url}: the server does not serve ranges: asked for bytes [{start}, {stop}), it "
            f"answered with status {status} and no Content-Range, as for the whole object; use a "
            f"server that serves ranges, or copy the data to a disk"
        )
    match = _CONTENT_RANGE.fullmatch(content_range)
    if match:
        first, last, size = match.groups()
        end = stop if size == "*" else min(stop, int(size))
        if (int(first), int(last) + 1) == (start, end):
            return
    raise wrong_range(url, span, f"status {status} and Content-Range {content_range!r}")


def wrong_range(url: str, span: tuple[int, int], answer: str) -> ShortReadError:
    """The error for an answer that names other bytes than were asked for."""
    start, stop = span
    return ShortReadError(
        f"{url}: the server sent other bytes than were asked for: wanted bytes [{start}, {stop}), "
        f"got {answer}; check the proxies and caches between here and the server"
    )


def root_of(url: str) -> str:
    """The bucket or host of a URL, with its scheme: `s3://bucket`; a path is its own."""
    scheme, separator, path = url.partition("://")
    host, _, _ = path.partition("/")
    return scheme + separator + host
