"""Range requests, the groups that they fill, the queue in which they wait, and how they are sent."""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from streammega.storage.cache.page_cache import MIN_PAGED_BYTES, CachedStore
from streammega.storage.derived_stores import DerivedStore
from streammega.storage.fetch.buffer_pool import BufferPool
from streammega.storage.fetch.flow_control import BATCH_BYTES, size_class_of
from streammega.storage.retry import take_refusals
from streammega.storage.store import Bytes, Store


@dataclass(slots=True, eq=False)
class RangeRequest:
    """Bytes [start, stop) of an object, for the buffer of its group from `buffer_offset` on.

    | state     | `copies` | `done` | where it is                      | next                          |
    |-----------|----------|--------|----------------------------------|-------------------------------|
    | queued    | 0        | no     | the queue, by `serial`           | in flight; dropped if it is   |
    |           |          |        |                                  | not wanted any more           |
    | in flight | 1        | no     | `Fetcher._in_flight`, in a batch | done; hedged; after an error  |
    |           |          |        |                                  | queued, paused or failed      |
    | hedged    | 2 or 3   | no     | `Fetcher._in_flight`; a further  | done by the copy that is first|
    |           |          |        | copy in the queue until it is    | answered; in flight when the  |
    |           |          |        | sent                             | others have failed            |
    | paused    | 0        | no     | the queue's pauses               | queued                        |
    | failed    | 0        | no     | nowhere; its group has the error |                               |
    | done      | 0 to 2   | yes    | `_in_flight`, if a copy is there |                               |

    A further copy counts from when it is queued, the first one from when it is sent: there are never
    more than `MAX_COPIES` (flow_control.py).
    """

    store: Store
    key: str
    etag: str
    start: int
    stop: int
    buffer_offset: int
    group: FetchGroup = field(init=False)
    size: int = field(init=False)
    size_class: int = field(init=False)
    serial: int = field(init=False, default=0)
    """Its place in the order of need, given at admission."""
    copies: int = field(init=False, default=0)
    done: bool = field(init=False, default=False)
    failures: int = field(init=False, default=0)
    first_sent_at: float = field(init=False, default=0.0)
    """When it was sent first: how long it has failed counts from there."""
    sent_at: float = field(init=False, default=0.0)
    """When its first copy was sent last: whether it is a straggler counts from there. inf between the
    choice of a batch and its sending by a thread, which waits for the GIL.
    """

    def __post_init__(self) -> None:
        self.size = self.stop - self.start
        self.size_class = size_class_of(self.size)

    @property
    def out(self) -> Bytes:
        """The place for its bytes. The group keeps its buffer while requests write to it."""
        return self.group.take_buffer()[self.buffer_offset : self.buffer_offset + self.size]


class FetchGroup:
    """A buffer of `size` bytes and the requests that fill it.

    It takes memory of a pool from `reserve` until its reader has released it and no copy of a request
    is in flight, which might still write to the buffer: then it frees itself.

    Args: slot: a number for the caller's use.
    """

    def __init__(self, size: int, requests: list[RangeRequest], slot: int = -1) -> None:
        self.size = size
        self.slot = slot
        self.missing = len(requests)
        """Requests that are not done."""
        self.busy = 0
        """Copies in flight."""
        self.awaited = False
        """Whether `Fetcher.wait` waits for it."""
        self.released = False
        """Whether its reader gave it up."""
        self.buffer: Bytes | None = None
        """None until the first answer arrives, and after its memory was freed."""
        self.error: BaseException | None = None
        self._pool: BufferPool | None = None  # as long as it takes memory
        self._requests: Sequence[RangeRequest] = requests
        for request in requests:
            request.group = self

    def reserve(self, pool: BufferPool) -> None:
        """Count its bytes as in use. The caller checked that the pool has room."""
        pool.reserve(self.size)
        self._pool = pool

    def take_buffer(self) -> Bytes:
        """Take its buffer from the pool, unless another request has done so."""
        assert self._pool is not None
        with self._pool.lock:
            if self.buffer is None:
                self.buffer = self._pool.take(self.size)
            return self.buffer

    def take_requests(self) -> Sequence[RangeRequest]:
        """Its requests, which it forgets. As long as both refer to each other, only the garbage
        collector can free them, which stops all threads for a tenth of a second.
        """
        requests = self._requests
        self._requests = ()
        return requests

    def release(self) -> None:
        """Its reader needs it no more."""
        self.released = True
        self._free_unused()

    def end_copy(self) -> None:
        """A copy in flight has ended."""
        self.busy -= 1
        self._free_unused()

    def _free_unused(self) -> None:
        if self.released and self.busy == 0 and self._pool is not None:
            self._pool.free(self.size, self.buffer)
            self._pool = None
            self.buffer = None

    @property
    def ready(self) -> bool:
        """Whether all its bytes arrived, or it failed."""
        return self.missing == 0 or self.error is not None


class RequestQueue:
    """Requests to send, most needed first, and those that pause before the next try.

    Two heaps, of (serial, request) and of (end of the pause, serial, request).
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, RangeRequest]] = []
        self._paused: list[tuple[float, int, RangeRequest]] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._paused)

    @property
    def waiting(self) -> int:
        """Requests that may be sent now."""
        return len(self._waiting)

    def push(self, request: RangeRequest) -> None:
        """Queue a request by its serial."""
        heapq.heappush(self._waiting, (request.serial, request))

    def push_hedge(self, request: RangeRequest, hedge: int) -> None:
        """Queue a further copy of a request before all others; of several, the latest goes first.

        `hedge`: its number among the further copies.
        """
        heapq.heappush(self._waiting, (-hedge, request))

    def first(self) -> RangeRequest | None:
        """The request to send next."""
        return self._waiting[0][1] if self._waiting else None

    def pop(self) -> RangeRequest:
        """Remove that request and return it."""
        return heapq.heappop(self._waiting)[1]

    def pause(self, request: RangeRequest, until: float) -> None:
        """Queue a request at a later time."""
        heapq.heappush(self._paused, (until, request.serial, request))

    def resume(self, now: float) -> None:
        """Queue the requests whose pause is over."""
        while self._paused and self._paused[0][0] <= now:
            self.push(heapq.heappop(self._paused)[2])

    @property
    def next_resume(self) -> float:
        """When the first pause ends; inf if there is no pause."""
        return self._paused[0][0] if self._paused else math.inf

    def clear(self) -> None:
        """Forget all requests."""
        self._waiting.clear()
        self._paused.clear()


@dataclass
class Counters:
    """Counts since the fetcher was made."""

    requests: int = 0
    """Sent, further copies too."""
    fetched_bytes: int = 0
    """Bytes of answers, without those of cached stores, which count their own."""
    duplicate_bytes: int = 0
    """Bytes of requests whose other copy was answered first."""
    retries: int = 0
    hedges: int = 0
    """Further copies that were queued."""
    hedges_won: int = 0
    """Further copies that were answered first."""
    throttled: int = 0
    """Requests that were refused (429, 503)."""
    errors: int = 0
    """Requests that failed for good."""
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    """Seconds of the latest answers: enough of them for a steady percentile."""


class Answer(NamedTuple):
    """How a batch ended."""

    batch: list[RangeRequest]
    began: float
    """When it was sent."""
    seconds: float
    error: BaseException | None
    """None if all bytes are in the buffers."""
    refusals: int
    """Refusals (429, 503) that the store outlived."""


def send(batch: list[RangeRequest]) -> Answer:
    """Read the bytes of a batch into the buffers of its groups. Blocks, so it is called without a
    lock: a wait for one is no latency of the storage.
    """
    began = time.monotonic()
    by_object = defaultdict(list)
    for request in batch:
        request.sent_at = min(request.sent_at, began)
        by_object[id(request.store), request.key, request.etag].append(request)
    error: BaseException | None = None
    try:
        for (_, key, etag), requests in by_object.items():
            store = requests[0].store
            spans = [(request.start, request.stop) for request in requests]
            # an iterator: a buffer is taken when the answer is there
            store.fetch_into(key, spans, (request.out for request in requests), etag)
    except BaseException as caught:  # raised by `Fetcher.wait`, not in this thread
        error = caught
    return Answer(batch, began, time.monotonic() - began, error, take_refusals())


def can_batch(first: RangeRequest, request: RangeRequest, batch_bytes: int) -> bool:
    """Whether a request may go out with a batch that begins with `first` and has so many bytes.

    All are of one object or unpacked from local files, small, and none of them failed before.
    """
    # Pages of large requests are looked up one after the other: several threads do it faster.
    if isinstance(first.store, CachedStore) and first.size >= MIN_PAGED_BYTES:
        return False
    # One that fails again would fail the others.
    if request.failures > 0 or first.failures > 0:
        return False
    is_same_object = (
        request.store is first.store and request.key == first.key and request.etag == first.etag
    )
    # Unpacking local files needs no round trip. Requests of one shard rarely follow each other
    # there, so a thread would take one at a time.
    if not is_same_object and not (_unpacks(first) and _unpacks(request)):
        return False
    return batch_bytes + request.size <= BATCH_BYTES


def _unpacks(request: RangeRequest) -> bool:
    """Whether a request is of a local file that is shown in another form."""
    return isinstance(request.store, DerivedStore) and request.store.is_local
