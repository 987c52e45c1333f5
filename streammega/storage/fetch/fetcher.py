"""Reads in flight: in order of need, under limits, tried again, hedged. The thin executor under the planner.

A *holding* is one buffer and the reads that fill it. Holdings are admitted in the order submitted, while memory lasts; their
reads are issued in that order too. Threads wait in the transport, outside of the GIL; there are as many as requests were ever
in flight at once.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import math
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from streammega.config import StorageConfig
from streammega.errors import StorageError
from streammega.storage.cache.store import SMALL, CachedStore
from streammega.storage.fetch.memory import BufferPool
from streammega.storage.retry import RetryPolicy, given_up
from streammega.storage.store import Bytes, Store

_live: weakref.WeakSet[Fetcher] = weakref.WeakSet()
TICK = 0.02
"""Seconds between two looks for stragglers while somebody waits."""
HEDGE_SHARE, HEDGE_AFTER, HEDGE_FLOOR = 0.05, 32, 0.01
"""At most this share of reads is sent twice; after so many answers; none before so many seconds."""
LATENCIES = 256
ADAPT_EVERY, QUEUEING = 64, 5.0
"""How often the number of requests in flight is adapted, in requests; the latency, in multiples of the least, above which it
shrinks."""
LEAST_REQUESTS, LEAST_BYTES = 192, 8 << 20
"""It shrinks to so many, or to fewer that have so many bytes together: more than a cache holds only waits in socket buffers."""
JOB_READS, JOB_BYTES = 8, 2 << 20
"""Reads that one thread sends together, and their bytes: every return from the transport waits for the GIL."""
NEAR, NEAR_JOB_READS = 0.004, 24
"""Below so many seconds for the quickest answers, more go together: the round trip is less than the work of a thread."""
LEAVE_AFTER = 5.0
"""Seconds that closing waits for requests in flight; the threads of slower ones end later, by themselves."""


class Read:
    """Bytes [start, stop) of an object, into a part of a holding's buffer."""

    __slots__ = (
        "at", "began", "copies", "done", "etag", "failures", "first", "holding", "key", "serial", "start", "stop", "store",
    )  # fmt: skip

    def __init__(self, store: Store, key: str, etag: str, start: int, stop: int, at: int) -> None:
        self.store, self.key, self.etag, self.start, self.stop, self.at = store, key, etag, start, stop, at
        self.holding: Holding
        self.copies, self.failures, self.serial, self.done = 0, 0, 0, False
        self.began, self.first = 0.0, 0.0

    @property
    def out(self) -> Bytes:
        """Where its bytes go. Its holding is kept while it is busy."""
        buffer = self.holding.buffer
        assert buffer is not None
        return buffer[self.at : self.at + self.stop - self.start]


class Holding:
    """One buffer, held from admission until it is released."""

    __slots__ = ("awaited", "buffer", "busy", "error", "missing", "reads", "released", "size", "slot")

    def __init__(self, size: int, reads: list[Read], slot: int = -1) -> None:
        self.size, self.reads, self.slot = size, reads, slot
        self.missing, self.busy, self.awaited = len(reads), 0, False
        self.buffer: Bytes | None = None
        self.error: BaseException | None = None
        self.released = False
        for read in reads:
            read.holding = self

    @property
    def ready(self) -> bool:
        """Whether waiting for it is over: everything is there, or never will be."""
        return self.missing == 0 or self.error is not None


@dataclass
class Counters:
    """What was fetched, since the fetcher was made."""

    requests: int = 0
    fetched_bytes: int = 0
    duplicate_bytes: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    throttled: int = 0
    errors: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=1024))


class Fetcher:
    """Fills holdings. `submit` never blocks; `wait` blocks until holdings are ready; `release` frees their memory.

    Raises, from `wait`, what a read ended with. `close` gives up everything that is not done.
    """

    def __init__(self, config: StorageConfig, budget: int | None = None) -> None:
        self.config = config
        self.pool = BufferPool(config.memory_bytes if budget is None else budget)
        self.counters = Counters()
        self._policy = RetryPolicy.of(config)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._unadmitted: deque[Holding] = deque()
        self._queue: list[tuple[int, Read]] = []
        self._paused: list[tuple[float, int, Read]] = []
        self._flying: dict[int, Read] = {}
        self._threads: list[threading.Thread] = []
        self._idle = self._serial = self._requests = self._flying_bytes = self._missing = 0
        self.unadmitted_bytes = 0
        self._limit = float(config.max_requests)
        self._slowed = 0.0
        self._latency: dict[int, deque[float]] = {}
        self._given_up: float = math.inf
        self._quickest: dict[int, float] = {}
        self._adapted = 0
        self._closed = False
        _live.add(self)

    def submit(self, holdings: Sequence[Holding]) -> None:
        """Queue holdings, in order of need."""
        with self._lock:
            self._unadmitted.extend(holdings)
            self.unadmitted_bytes += sum(holding.size for holding in holdings)
            self._admit()

    def wait(self, holdings: Sequence[Holding]) -> None:
        """Return when all of them are filled. Raises the error that one of them ended with."""
        with self._lock:
            missing = [holding for holding in holdings if not holding.ready]
            self._missing = len(missing)
            for holding in missing:
                holding.awaited = True
            while self._missing and not any(holding.error for holding in holdings):
                if self._closed:
                    raise StorageError("the loader was closed while a batch was awaited")
                self._hedge()
                self._ready.wait(TICK)
            for holding in missing:
                holding.awaited = False
        for holding in holdings:
            if holding.error is not None:
                raise holding.error

    def release(self, holdings: Sequence[Holding]) -> None:
        """Give back their memory, once requests that still write into it have ended."""
        with self._lock:
            for holding in holdings:
                holding.released = True
                self._free(holding)
            self._admit()

    def close(self) -> None:
        """End all threads: those in a request end with it, which its timeouts bound; they are not waited for long."""
        with self._lock:
            self._closed = True
            self._unadmitted.clear()
            self._queue.clear()
            self._paused.clear()
            self._work.notify_all()
            self._ready.notify_all()
            threads = list(self._threads)
            for store in {read.store for read in self._flying.values() if isinstance(read.store, CachedStore)}:
                store.close()  # its reads may wait for another process
        deadline = time.monotonic() + min(LEAVE_AFTER, self.config.stall_timeout)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self.pool.clear()

    @property
    def depth(self) -> tuple[int, int, int]:
        """(requests in flight, reads queued, bytes held)."""
        return self._requests, len(self._queue) + len(self._paused), self.pool.in_use

    # Everything below runs under the lock, but for `_run` and `_fetch`.

    def _admit(self) -> None:
        while self._unadmitted and self.pool.has_room(self._unadmitted[0].size):
            holding = self._unadmitted.popleft()
            self.unadmitted_bytes -= holding.size
            holding.buffer = self.pool.take(holding.size)
            for read in holding.reads:
                self._serial += 1
                read.serial = self._serial
                heapq.heappush(self._queue, (read.serial, read))
        self._wake()

    def _wake(self) -> None:
        """Have one more thread look for work. It wakes the next one when it finds some: as many as there is work for."""
        if not self._closed and self._next_fits():
            self._call_thread()

    def _have_somebody_wait(self) -> None:
        """Have a thread that is idle wake up when the first pause is over: who does so now may take other work meanwhile."""
        if self._paused and not self._closed:
            self._call_thread()

    def _call_thread(self) -> None:
        if self._idle:
            self._work.notify()
        elif len(self._threads) < self.config.max_requests:
            thread = threading.Thread(target=self._run, name="streammega-read", daemon=True)
            self._threads.append(thread)
            self._idle += 1
            thread.start()

    def _next_fits(self) -> bool:
        if not self._queue or self._requests >= self._limit:
            return False
        read = self._queue[0][1]
        return not self._requests or self._flying_bytes + read.stop - read.start <= self.config.in_flight_bytes

    def _next(self) -> list[Read]:
        """The reads to send now, as far as limits allow: several small ones of an object go out together."""
        now = time.monotonic()
        while self._paused and self._paused[0][0] <= now:
            read = heapq.heappop(self._paused)[2]
            heapq.heappush(self._queue, (read.serial, read))
        job: list[Read] = []
        size = 0
        most = JOB_READS
        while self._clean() and self._next_fits() and len(job) < most:
            read = self._queue[0][1]
            if not job and self._quickest.get((read.stop - read.start).bit_length(), 1.0) < NEAR:
                most = NEAR_JOB_READS
            if job and not _together(job[0], read, size):
                break
            heapq.heappop(self._queue)
            self._take_off(read, now)
            job.append(read)
            size += read.stop - read.start
        return job

    def _clean(self) -> bool:
        """Drop what is not wanted any more from the head of the queue; whether something is left."""
        while self._queue:
            read = self._queue[0][1]
            if not (read.done or read.holding.released or read.serial > self._given_up):
                break
            self._land(heapq.heappop(self._queue)[1])
        return bool(self._queue)

    def _take_off(self, read: Read, now: float) -> None:
        read.holding.busy += 1
        if read.copies == 0:
            read.copies, read.began = 1, now
            self._flying[id(read)] = read
        if not read.first:
            read.first = now
        self._requests += 1
        self._flying_bytes += read.stop - read.start
        self.counters.requests += 1

    def _run(self) -> None:
        with self._lock:
            while not self._closed:
                job = self._next()
                if not job:
                    timeout = self._paused[0][0] - time.monotonic() if self._paused else None
                    self._work.wait(None if timeout is None else max(timeout, 0.001))
                    continue
                self._idle -= 1
                self._wake()
                self._have_somebody_wait()
                self._lock.release()
                try:
                    began = time.monotonic()
                    error = self._fetch(job)
                    taken = time.monotonic() - began
                finally:
                    self._lock.acquire()
                self._idle += 1
                if error is None:
                    self._observe(job, taken)
                for read in job:
                    self._finish(read, error, alone=len(job) == 1)

    def _fetch(self, job: list[Read]) -> BaseException | None:
        first = job[0]
        read_into = first.store.read_into
        if isinstance(first.store, CachedStore) and any(read.copies > 1 for read in job):
            read_into = first.store.read_past_cache  # a second request would wait for the page that the first one fetches
        try:
            outs = [read.out for read in job]
            read_into(first.key, [(read.start, read.stop) for read in job], outs, first.etag)
        except BaseException as error:
            return error
        return None

    def _finish(self, read: Read, error: BaseException | None, *, alone: bool) -> None:
        size, holding = read.stop - read.start, read.holding
        self._requests -= 1
        self._flying_bytes -= size
        holding.busy -= 1
        self._land(read)
        if error is None:
            self._succeeded(read, size)
        elif not read.done and not holding.released:
            self._failed(read, error, alone=alone)
        if holding.released:
            self._free(holding)
            self._admit()

    def _land(self, read: Read) -> None:
        """One copy of a read fewer in flight, or queued."""
        read.copies = max(0, read.copies - 1)
        if read.copies == 0:
            self._flying.pop(id(read), None)

    def _succeeded(self, read: Read, size: int) -> None:
        if not isinstance(read.store, CachedStore):  # which counts by itself what it did not have
            self.counters.fetched_bytes += size
        if read.done:
            self.counters.duplicate_bytes += size
            return
        read.done = True
        self.counters.hedges_won += read.copies > 0
        holding = read.holding
        holding.missing -= 1
        if holding.missing == 0:
            self._settled(holding)

    def _observe(self, job: list[Read], taken: float) -> None:
        """Note how long reads took, and adapt how many are in flight.

        Where answers take many times as long as the quickest did, requests queue behind each other: fewer do as well, and cost
        less. Else the limit grows back to what is configured.
        """
        self.counters.latencies.append(taken)
        kind = (job[0].stop - job[0].start).bit_length()
        seen = self._latency.setdefault(kind, deque(maxlen=LATENCIES))
        seen.append(taken)
        self._quickest[kind] = min(taken, self._quickest.get(kind, math.inf))
        most = float(self.config.max_requests)
        if self.counters.requests - self._adapted < ADAPT_EVERY:
            self._limit = min(most, self._limit + len(job) / self._limit)
            return
        self._adapted = self.counters.requests
        self._hedge()  # before anybody waits
        queueing = statistics.median(list(seen)[-ADAPT_EVERY:]) / max(self._quickest[kind], 1e-4)
        if queueing > QUEUEING:
            size = job[0].stop - job[0].start
            least = min(LEAST_REQUESTS, max(8, LEAST_BYTES // size), most)
            self._limit = max(least, self._limit * 0.8)
        elif queueing < QUEUEING / 2:
            self._limit = min(most, self._limit * 1.25 + 1)

    def _failed(self, read: Read, error: BaseException, *, alone: bool) -> None:
        if isinstance(error, StorageError) and error.throttled:
            self._slow_down()
        if read.copies:
            return  # its other copy is still under way
        now = time.monotonic()
        if not alone:  # one of several failed, who knows which: each is tried by itself
            read.failures = max(read.failures, 1)
            self.counters.retries += 1
            heapq.heappush(self._queue, (read.serial, read))
            return self._wake()
        read.failures += 1
        elapsed = now - read.first
        pause = self._policy.pause(error, read.failures, elapsed)
        if pause is None:
            if isinstance(error, StorageError):
                error = given_up(error, read.failures, elapsed)
            self.counters.errors += 1
            self._given_up = min(self._given_up, read.serial)  # what is needed later will not be asked for
            if read.holding.error is None:
                read.holding.error = error
                self._settled(read.holding)
            return None
        self._policy.say(error, elapsed)
        self.counters.retries += 1
        heapq.heappush(self._paused, (now + pause, read.serial, read))
        self._have_somebody_wait()
        return None

    def _settled(self, holding: Holding) -> None:
        """Waiting for this holding is over; tell whoever waits when it was the last."""
        if holding.awaited:
            holding.awaited = False
            self._missing -= 1
            if self._missing == 0 or holding.error is not None:
                self._ready.notify_all()

    def _slow_down(self) -> None:
        """Half as many requests in flight, once for all that were refused together; more again as answers come."""
        self.counters.throttled += 1
        now = time.monotonic()
        if now - self._slowed > 0.25:
            self._slowed = now
            self._limit = max(1.0, self._limit / 2)

    def _hedge(self) -> None:
        """Send a second request for reads that take longer than nearly all of their size did."""
        if not self.config.hedge:
            return
        now, slowest = time.monotonic(), {size: _slowest(seen) for size, seen in self._latency.items()}
        for read in list(self._flying.values()):
            if self.counters.hedges >= 4 + HEDGE_SHARE * self.counters.requests:
                return
            if read.copies == 1 and now - read.began > slowest.get((read.stop - read.start).bit_length(), math.inf):
                self.counters.hedges += 1
                read.copies += 1  # queued counts, so that it is not queued twice
                heapq.heappush(self._queue, (-self.counters.hedges, read))
                self._wake()

    def _free(self, holding: Holding) -> None:
        if holding.busy == 0 and holding.buffer is not None:
            self.pool.give_back(holding.buffer)
            holding.buffer = None


def _slowest(seen: deque[float]) -> float:
    """The time after which a read is a straggler: above the 99th percentile, unless stragglers make up that percentile."""
    if len(seen) < HEDGE_AFTER:
        return math.inf
    ordered = sorted(seen)
    return max(HEDGE_FLOOR, min(1.5 * ordered[int(len(ordered) * 0.99)], 6 * ordered[len(ordered) // 2]))


def _together(first: Read, read: Read, size: int) -> bool:
    """Whether a read may go out with others, of `size` bytes so far: of the same object, small, and none that failed before."""
    if isinstance(first.store, CachedStore) and first.stop - first.start >= SMALL:
        return False  # its pages are looked for one after the other
    same = read.store is first.store and read.key == first.key and read.etag == first.etag
    return same and not read.failures and not first.failures and size + read.stop - read.start <= JOB_BYTES


@atexit.register
def _close_all() -> None:
    for fetcher in list(_live):
        with contextlib.suppress(Exception):
            fetcher.close()
