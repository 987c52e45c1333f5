"""Reads in flight: in order of need, under limits, tried again, hedged.

The thin executor under the planner. A *holding* is one buffer and the reads that fill it. Holdings
are admitted in the order submitted, while memory lasts; their reads are sent in that order too.
Threads wait in the transport, outside of the GIL; there are as many as jobs (`jobs.py`) were ever
in flight at once. What a read is and where it stands is told in `reads.py`, what is in flight and
how much more may be in `flight.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

from streammega.config import StorageConfig
from streammega.errors import StorageError
from streammega.storage.cache.store import CachedStore
from streammega.storage.fetch.flight import Flight
from streammega.storage.fetch.jobs import send, together
from streammega.storage.fetch.latencies import may_hedge
from streammega.storage.fetch.memory import BufferPool
from streammega.storage.fetch.reads import Counters, Holding, Read, ReadQueue
from streammega.storage.fork_lock import process_lock
from streammega.storage.retry import RetryPolicy, given_up
from streammega.storage.store import Bytes

_live: weakref.WeakSet[Fetcher] = weakref.WeakSet()
TICK = 0.02
"""Seconds between two looks for stragglers while somebody waits."""
LEAVE_AFTER = 5.0
"""Seconds that closing waits for requests in flight.

The threads of slower ones end later, by themselves.
"""
SHORTEST_WAIT = 0.001
"""Seconds that a thread waits for a pause to end, at least: in them the others get the lock."""


class Fetcher:
    """Fills holdings: `submit` never blocks, `wait` blocks until they are ready, `release` frees
    their memory.

    Raises, from `wait`, what a read ended with. `close` gives up everything that is not done. One
    thread at a time waits.

    most_threads: as many as may send at once; None: as many as requests may be in flight.
    """

    def __init__(
        self, config: StorageConfig, budget: int | None = None, most_threads: int | None = None
    ) -> None:
        self.config = config
        self._most_threads = most_threads or config.max_requests
        self.pool = BufferPool(config.memory_bytes if budget is None else budget)
        self.counters = Counters()
        self._policy = RetryPolicy.of(config)
        # One lock for all of the state below: what is done under it takes microseconds, requests
        # are sent outside of it. Two conditions of it, so that work wakes a thread, and what is
        # ready wakes whoever waits for it, and not the reverse.
        self._lock = process_lock()
        self._work = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads that send nothing now
        # Reads, in the order of their way.
        self._unadmitted: deque[Holding] = deque()
        self.unadmitted_bytes = 0
        self._serial = 0  # of the read admitted last
        # Serial of the first read that was given up: none after it is sent.
        self._given_up: float = math.inf
        self._queue = ReadQueue()
        self._missing = 0  # holdings that are waited for
        self.flight = Flight(config)
        _live.add(self)

    def submit(self, holdings: Sequence[Holding]) -> None:
        """Queue holdings, in order of need. None of them may be larger than the budget."""
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
                # All threads may be in requests: nobody else would look for stragglers.
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
        """End all threads.

        Those in a request end with it, which its timeouts bound; they are not waited for long.
        """
        with self._lock:
            self._closed = True
            for holding in self._unadmitted:
                holding.take_reads()
            self._unadmitted.clear()
            self._queue.clear()
            self._work.notify_all()
            self._ready.notify_all()
            threads = list(self._threads)
            for read in self.flight.reads.values():
                # Such a read may wait for a page that another process fetches, for a minute.
                if isinstance(read.store, CachedStore):
                    read.store.close()
        deadline = time.monotonic() + min(LEAVE_AFTER, self.config.stall_timeout)
        for thread in threads:
            if thread is not threading.current_thread():
                seconds_left = deadline - time.monotonic()
                thread.join(max(0.0, seconds_left))
        self.pool.clear()

    @property
    def depth(self) -> tuple[int, int, int]:
        """(requests in flight, reads queued or paused, bytes held)."""
        return self.flight.requests, len(self._queue), self.pool.in_use

    # --- Everything below runs under the lock, but for `send`. ---

    def _admit(self) -> None:
        """Give buffers to holdings in the order submitted, and queue their reads.

        None out of turn, though a smaller one might fit: what is needed next would wait for it.
        """
        while self._unadmitted:
            holding = self._unadmitted[0]
            if not holding.released and not self.pool.has_room(holding.size):
                break
            self._unadmitted.popleft()
            self.unadmitted_bytes -= holding.size
            reads = holding.take_reads()
            if holding.released:
                continue
            holding.takes_memory = True
            if holding.keeps_body:
                self.pool.reserve(holding.size)
            else:
                holding.buffer = self.pool.take(holding.size)
            for read in reads:
                self._serial += 1
                read.serial = self._serial
                self._queue.push(read)
        self._wake()

    # Threads: each looks for work, and has the next one look when it found some.

    def _wake(self) -> None:
        """Have one more thread look for work.

        It wakes the next one when it finds some: as many as there is work for.
        """
        read = self._queue.first()
        if read is None or self._closed:
            return
        # Else room comes with an answer, whose thread looks then; but no answer may be awaited
        # where only the pace holds a read back.
        if self.flight.pace.interval or self._has_room_for_job(read):
            self._call_thread()

    def _have_somebody_wait(self) -> None:
        """Have an idle thread wake up when the first pause is over, or the pace allows.

        The one that waits for that now may take other work meanwhile.
        """
        if not self._closed and self._next_look() is not None:
            self._call_thread()

    def _call_thread(self) -> None:
        if self._idle:
            self._work.notify()
        elif len(self._threads) < self._most_threads:
            # A daemon: a request that hangs does not hold up the end of the program.
            thread = threading.Thread(target=self._run, name="streammega-read", daemon=True)
            self._threads.append(thread)
            self._idle += 1  # from now on, lest another one is started for the same work
            thread.start()

    def _run(self) -> None:
        """What a thread does until the fetcher is closed."""
        with self._lock:
            while not self._closed:
                job = self._next()
                if job:
                    self._serve(job)
                    continue
                look_at = self._next_look()
                if look_at is None:
                    self._work.wait()
                else:
                    seconds_left = look_at - time.monotonic()
                    self._work.wait(max(seconds_left, SHORTEST_WAIT))

    def _next_look(self) -> float | None:
        """When a thread should look for work though nothing wakes it: a pause is over then, or the
        pace lets the next request go.
        """
        times = []
        if self._queue.next_resume is not None:
            times.append(self._queue.next_resume)
        if self.flight.pace.interval and self._queue.waiting:
            times.append(self.flight.send_at)
        return min(times, default=None)

    def _serve(self, job: list[Read]) -> None:
        """Send reads together, outside of the lock, and note how they ended."""
        self._idle -= 1
        self._wake()
        self._have_somebody_wait()
        # What took off just now has another copy only where its first request still flies.
        second_requests = [read for read in job if read.copies > 1]
        self._lock.release()
        try:
            # Measured without the wait for the lock: that is no latency of the storage.
            began = time.monotonic()
            answer = send(job, past_cache=bool(second_requests))
            seconds = time.monotonic() - began
        finally:
            self._lock.acquire()
        self._idle += 1
        if answer.error is None:
            self._observe(job, began, seconds)
        elif _is_refusal(answer.error):
            self.flight.refused(began, time.monotonic())
        alone = len(job) == 1
        for number, read in enumerate(job):
            body = answer.bodies[number] if answer.bodies else None
            second = read in second_requests
            self._finish(read, answer.error, body, alone=alone, second=second)

    # The way of a read, as in the table of `Read`: queued, flying, perhaps hedged or paused, done.

    def _next(self) -> list[Read]:
        """The reads to send now, as far as limits allow: one, or several small ones of an object,
        which go out together.
        """
        now = time.monotonic()
        flight = self.flight
        self._queue.resume(now)
        job: list[Read] = []
        job_bytes = 0
        most_reads = 1
        while len(job) < most_reads:
            read = self._first_wanted()
            if read is None:
                break
            if not job:
                if not self._has_room_for_job(read):
                    break
                most_reads = flight.most_together(read)
            elif not flight.may_send(read.size, now) or not together(job[0], read, job_bytes):
                break
            self._queue.pop()
            flight.take_off(read, now)
            self.counters.requests += 1
            job.append(read)
            job_bytes += read.size
        if job:
            flight.sent_at_pace(now)
        return job

    def _has_room_for_job(self, first: Read) -> bool:
        return self.flight.has_room_for_job(first, self._queue.waiting, time.monotonic())

    def _first_wanted(self) -> Read | None:
        """The head of the queue, after what is not wanted any more was dropped from it."""
        while True:
            read = self._queue.first()
            if read is None:
                return None
            unwanted = read.done or read.holding.released or read.serial > self._given_up
            if not unwanted:
                return read
            self._queue.pop()
            self.flight.land(read)

    def _finish(
        self,
        read: Read,
        error: BaseException | None,
        body: Bytes | None,
        *,
        alone: bool,
        second: bool,
    ) -> None:
        """A request ended: by itself or as one of several, the first of a try or the second."""
        holding = read.holding
        self.flight.end(read)
        if error is None:
            self._succeeded(read, body, second=second)
        elif not read.done and not holding.released:
            self._failed(read, error, alone=alone)
        if holding.released:
            self._free(holding)
            self._admit()

    def _succeeded(self, read: Read, body: Bytes | None, *, second: bool) -> None:
        # A cached store counts by itself what it did not have.
        if not isinstance(read.store, CachedStore):
            self.counters.fetched_bytes += read.size
        if read.done:
            # By its other request, which brought the same bytes.
            self.counters.duplicate_bytes += read.size
            return
        read.done = True
        if second:
            self.counters.hedges_won += 1
        holding = read.holding
        if holding.keeps_body:
            holding.buffer = body
        holding.missing -= 1
        if holding.missing == 0:
            self._settled(holding)

    def _failed(self, read: Read, error: BaseException, *, alone: bool) -> None:
        if _is_refusal(error):
            self.counters.throttled += 1
            self.flight.limits = self.flight.limits.after_refusal(time.monotonic())
        if read.copies > 0:
            return  # its other request may yet succeed, and decides if it does not
        if alone:
            self._pause_or_give_up(read, error)
            return
        # One of several failed, who knows which: each is tried by itself, at once, also after the
        # deadline. `together` keeps those with failures apart.
        read.failures = max(read.failures, 1)
        self.counters.retries += 1
        self._queue.push(read)
        self._wake()

    def _pause_or_give_up(self, read: Read, error: BaseException) -> None:
        now = time.monotonic()
        elapsed = now - read.first_began
        read.failures += 1
        pause = self._policy.pause(error, read.failures, elapsed)
        if pause is None:
            self._give_up(read, error, elapsed)
            return
        # At most once in half a minute in this process: no matter that the lock is held.
        self._policy.say(error, elapsed)
        self.counters.retries += 1
        if self.flight.pace.interval and _is_refusal(error):
            # The pace pauses for all of them: by pauses of their own, what is needed first would
            # come after what is needed later.
            pause = min(pause, self.flight.pace.interval)
        self._queue.pause(read, now + pause)
        self._have_somebody_wait()

    def _give_up(self, read: Read, error: BaseException, elapsed: float) -> None:
        if isinstance(error, StorageError):
            error = given_up(error, read.failures, elapsed)
        self.counters.errors += 1
        # Whoever waits gets this error first: nobody will ask for what is needed later.
        self._given_up = min(self._given_up, read.serial)
        if read.holding.error is None:
            read.holding.error = error
            self._settled(read.holding)

    def _settled(self, holding: Holding) -> None:
        """Waiting for this holding is over; tell whoever waits when it was the last."""
        if not holding.awaited:
            return
        holding.awaited = False
        self._missing -= 1
        if self._missing == 0 or holding.error is not None:
            self._ready.notify_all()

    def _free(self, holding: Holding) -> None:
        # Requests that still write to the buffer would write into what it is used for next, and
        # those whose bodies are kept take memory until they end.
        if holding.busy > 0 or not holding.takes_memory:
            return
        holding.takes_memory = False
        if holding.keeps_body:
            self.pool.end_reservation(holding.size)
        elif holding.buffer is not None:
            self.pool.give_back(holding.buffer)
        holding.buffer = None

    # What answers tell of the storage.

    def _observe(self, job: list[Read], began: float, seconds: float) -> None:
        """Note how long reads that were sent together took, and adapt how many are in flight."""
        self.counters.latencies.append(seconds)
        if not self.flight.answered(job, began, seconds):
            return
        # Before anybody waits: what straggles now will be waited for.
        self._hedge()
        self.flight.look(job, time.monotonic())

    def _hedge(self) -> None:
        """Send a second request for reads that take longer than nearly all of their size did."""
        if not self.config.hedge or self.flight.pace.interval:
            return
        counters = self.counters
        for read in self.flight.stragglers(time.monotonic()):
            if not may_hedge(counters.hedges, counters.requests):
                return
            counters.hedges += 1
            read.copies += 1
            self._queue.push_second(read, counters.hedges)
            self._wake()


def _is_refusal(error: BaseException) -> bool:
    """Whether the server asks for fewer requests."""
    return isinstance(error, StorageError) and error.throttled


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes away, under threads that still write to buffers."""
    for fetcher in list(_live):
        with contextlib.suppress(Exception):
            fetcher.close()
