"""Ranges of an object of which each is a request of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from streammega.storage.fetch.threads import Pool
from streammega.storage.retry import RetryPolicy
from streammega.storage.store import Buffer, Bytes, Span

FEW = 8
SMALL = 64 << 10
"""Up to so many ranges of so many bytes together go out by one call: what a thread for each would
cost is more than trying all again when one fails.
"""


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
