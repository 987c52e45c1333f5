"""What is fetched: reads, the holdings that they fill, the queue they wait in, and counters."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from streammega.storage.fetch.latencies import size_class_of
from streammega.storage.store import Bytes, Store, gives_bodies

LEAST_KEPT = 64 << 10
"""Bytes of a body that is kept as it came, at least: what memory of its own costs beside the budget
is little of it.
"""


class Read:
    """Bytes [start, stop) of an object, into a holding's buffer from byte `buffer_offset` of it on.

    Where a read stands, and which method of `Fetcher` or `Flight` moves it on:

    | state  | `copies` | `done` | where it is              | goes to                              |
    |--------|----------|--------|--------------------------|--------------------------------------|
    | queued | 0        | no     | the queue, by `serial`   | flying, by `take_off`; dropped, by   |
    |        |          |        |                          | `_first_wanted`                      |
    | flying | 1        | no     | `Flight.reads`           | hedged, by `_hedge`; done, by        |
    |        |          |        |                          | `_succeeded`; by `_failed`: queued   |
    |        |          |        |                          | (was one of several), paused or given|
    |        |          |        |                          | up                                   |
    | hedged | 2        | no     | `Flight.reads`; its      | done, by `_succeeded`, whichever is  |
    |        |          |        | second request is in the | answered first; flying, by `land`,   |
    |        |          |        | queue until it takes off | when one of the two fails            |
    | paused | 0        | no     | the queue's pauses       | queued, by `ReadQueue.resume`, when  |
    |        |          |        |                          | its pause is over                    |
    | given  | 0        | no     | nowhere; its holding has | nowhere                              |
    | up     |          |        | the error                |                                      |
    | done   | 0 or 1   | yes    | `Flight.reads`, while 1  | nowhere; its other request lands, or |
    |        |          |        |                          | is dropped                           |

    A second request counts as a copy from when it is queued, the first one from when it takes off:
    so there are never more than two. Where one of two failed, another may be sent in its place. A
    read that nobody wants any more (its holding was released, or an earlier read was given up) is
    dropped at the queue's head; one that was in flight then is not tried again after its holding
    was released.
    """

    __slots__ = (
        "buffer_offset",
        "copies",
        "done",
        "etag",
        "failures",
        "first_began",
        "holding",
        "key",
        "serial",
        "size",
        "size_class",
        "start",
        "stop",
        "store",
        "try_began",
    )

    def __init__(
        self, store: Store, key: str, etag: str, start: int, stop: int, buffer_offset: int
    ) -> None:
        self.store = store
        self.key = key
        self.etag = etag
        self.start = start
        self.stop = stop
        self.buffer_offset = buffer_offset
        self.size = stop - start
        self.size_class = size_class_of(self.size)
        self.holding: Holding
        self.serial = 0
        """Its place in the order of need, given at admission."""
        self.copies = 0
        """Its requests that are in flight, and a second one that is queued."""
        self.done = False
        self.failures = 0
        """Tries that failed."""
        self.first_began = 0.0
        """When its first request took off: what says how long it has been failing. 0: none did."""
        self.try_began = 0.0
        """When its latest try took off: what says whether it is a straggler."""

    @property
    def out(self) -> Bytes:
        """Where its bytes go. Its holding is kept while it is busy."""
        buffer = self.holding.buffer
        assert buffer is not None
        return buffer[self.buffer_offset : self.buffer_offset + self.size]


class Holding:
    """One buffer of `size` bytes, held from admission until it is released.

    `slot` is a number of its user's, which means nothing here. The buffer is one of the pool's, or,
    where the only read brings all of it in memory of its own, that memory (`keeps_body`): it counts
    of the budget from admission on, but is there only when the read is done.
    """

    __slots__ = (
        "_reads",
        "alignment",
        "awaited",
        "buffer",
        "busy",
        "error",
        "keeps_body",
        "missing",
        "released",
        "size",
        "slot",
        "takes_memory",
    )

    def __init__(self, size: int, reads: list[Read], slot: int = -1, alignment: int = 1) -> None:
        self.size = size
        self.alignment = alignment
        """Its first byte lies at a multiple of so many bytes: of a token's."""
        self._reads: Sequence[Read] = reads
        self.slot = slot
        self.keeps_body = (
            len(reads) == 1 and size == reads[0].size >= LEAST_KEPT and gives_bodies(reads[0].store)
        )
        self.missing = len(reads)
        """Reads that are not done."""
        self.busy = 0
        """Requests that may still write to the buffer: it is not used again before they end."""
        self.awaited = False
        """Whether somebody waits for it, and has not heard that this is over."""
        self.released = False
        self.takes_memory = False
        """Whether it was admitted, and its memory was not given back."""
        self.buffer: Bytes | None = None
        self.error: BaseException | None = None
        for read in reads:
            read.holding = self

    def take_reads(self) -> Sequence[Read]:
        """Its reads, which it forgets.

        Each refers to its holding. If that referred to them for longer than until they are queued,
        only the collector could free both, when it looks through all of the program, torch
        included, a tenth of a second in which no thread runs.
        """
        reads = self._reads
        self._reads = ()
        return reads

    @property
    def ready(self) -> bool:
        """Whether waiting for it is over: everything is there, or never will be."""
        return self.missing == 0 or self.error is not None


class ReadQueue:
    """Reads that are to be sent, most needed first, and those whose pause has to end before.

    Its user holds a lock. Two heaps: of (serial, read) and of (end of the pause, serial, read).
    Serials differ, so that reads are never compared.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Read]] = []
        self._paused: list[tuple[float, int, Read]] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._paused)

    @property
    def waiting(self) -> int:
        """Reads that may be sent now."""
        return len(self._waiting)

    def push(self, read: Read) -> None:
        """Queue a read in its place of the order of need."""
        heapq.heappush(self._waiting, (read.serial, read))

    def push_second(self, read: Read, hedge: int) -> None:
        """Queue the second request of a read before everything else: somebody waits for it.

        `hedge`: how many reads were hedged so far, this one too; the latest goes first.
        """
        heapq.heappush(self._waiting, (-hedge, read))

    def first(self) -> Read | None:
        """The one to send next."""
        if not self._waiting:
            return None
        _, read = self._waiting[0]
        return read

    def pop(self) -> Read:
        """Take that one."""
        _, read = heapq.heappop(self._waiting)
        return read

    def pause(self, read: Read, until: float) -> None:
        """Keep a read until then."""
        heapq.heappush(self._paused, (until, read.serial, read))

    def resume(self, now: float) -> None:
        """Queue the reads whose pause is over."""
        while self._paused:
            until, _, read = self._paused[0]
            if until > now:
                return
            heapq.heappop(self._paused)
            self.push(read)

    @property
    def next_resume(self) -> float | None:
        """When the first pause ends; None: there is none."""
        if not self._paused:
            return None
        until, _, _ = self._paused[0]
        return until

    def clear(self) -> None:
        """Forget all reads."""
        self._waiting.clear()
        self._paused.clear()


@dataclass
class Counters:
    """What was fetched, since the fetcher was made."""

    requests: int = 0
    """Sent, second ones too."""
    fetched_bytes: int = 0
    """Bytes of answers, but for those of a cached store, which counts them by itself."""
    duplicate_bytes: int = 0
    """Bytes of requests whose read was done by its other one."""
    retries: int = 0
    hedges: int = 0
    """Reads for which a second request was queued."""
    hedges_won: int = 0
    """Those whose second request was answered first."""
    throttled: int = 0
    """Refusals for want of capacity (429, 503)."""
    errors: int = 0
    """Reads that were given up."""
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=1024))
    """Seconds of the latest answers: so many that a percentile of them is steady."""
