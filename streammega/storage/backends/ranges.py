"""Ranges of an object, each by a request of its own, and the check of its answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from streammega.errors import ShortReadError, StorageError
from streammega.storage.retry import RetryPolicy
from streammega.storage.store import Buffer, Bytes, Span
from streammega.storage.thread_pool import Pool

FEW = 8
SMALL = 64 << 10
"""Up to so many ranges of so many bytes together go out by one call: what a thread for each would
cost is more than trying all again when one fails.
"""


PARTIAL_CONTENT = 206
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)", re.IGNORECASE)


def check_range(
    url: str, span: Span, status: int, content_range: str, length: int | None = None
) -> None:
    """Raise unless the head of an answer promises the bytes of `span`, up to the object's end.

    length: the Content-Length. The body's length is checked by `store.checked` when it is there.
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
    found = _CONTENT_RANGE.fullmatch(content_range)
    if found:
        first, last, size = found.groups()
        end = stop if size == "*" else min(stop, int(size))
        if (int(first), int(last) + 1) == (start, end):
            return
    raise wrong_range(url, span, f"status {status} and Content-Range {content_range!r}")


def wrong_range(url: str, span: Span, answer: str) -> ShortReadError:
    """For an answer that names other bytes than were asked for."""
    start, stop = span
    return ShortReadError(
        f"{url}: the server sent other bytes than were asked for: wanted bytes [{start}, {stop}), "
        f"got {answer}; check the proxies and caches between here and the server"
    )


class ReadsInto(Protocol):
    """The part of a `Store` that reads once, without trying again."""

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """As of `Store`."""


def read_side_by_side(
    store: ReadsInto,
    key: str,
    starts: Sequence[int],
    stops: Sequence[int],
    etag: str,
    policy: RetryPolicy,
    pool: Pool,
) -> list[Buffer]:
    """Bytes [starts[i], stops[i]) of an object, for each i.

    By concurrent requests, each tried again by itself as `policy` says.
    """

    def read(span: Span) -> Buffer:
        """One range, tried again by itself."""
        start, stop = span
        out = np.empty(stop - start, np.uint8)
        # There is no range request for no bytes.
        if start < stop:
            policy.call(lambda: store.read_into(key, [span], [out], etag))
        return out.data

    def read_together(spans: list[Span]) -> list[Buffer]:
        """Several ranges by one call, tried again together."""
        outs = [np.empty(stop - start, np.uint8) for start, stop in spans]
        policy.call(lambda: store.read_into(key, spans, outs, etag))
        return [out.data for out in outs]

    spans = [(int(start), int(stop)) for start, stop in zip(starts, stops, strict=True)]
    # Nothing goes on beside a single one: the thread that asks may do it.
    if len(spans) == 1:
        (only,) = spans
        return [read(only)]
    sizes = [stop - start for start, stop in spans]
    if sum(sizes) <= SMALL and len(spans) <= FEW and all(sizes):
        return read_together(spans)
    return pool.map(read, spans)
