"""Range requests in flight: in order of need, within limits, retried and hedged.

A fetch group is one buffer and the requests that fill it. Groups are admitted in the order of their
submission, while there is memory, and their requests are sent in that order too, in batches. Threads
wait in the transport, without the GIL. There are as many as batches were ever in flight at once.
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
from streammega.errors.logs import get_logger
from streammega.storage import retry
from streammega.storage.cache.page_cache import CachedStore
from streammega.storage.fetch.buffer_pool import BufferPool
from streammega.storage.fetch.flow_control import (
    FEW_LATE,
    HEDGE_AFTER,
    MAX_COPIES,
    FlowControl,
    can_hedge,
)
from streammega.storage.fetch.requests import (
    Answer,
    Counters,
    FetchGroup,
    RangeRequest,
    RequestQueue,
    can_batch,
    send,
)
from streammega.storage.fork_lock import process_lock
from streammega.storage.retry import RetryPolicy
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

_live: weakref.WeakSet[Fetcher] = weakref.WeakSet()
HEDGE_SECONDS = 0.02
"""Seconds between two searches for stragglers."""
CLOSE_TIMEOUT = 5.0
"""Seconds that `close` waits for requests in flight. Slower threads end later, by themselves."""
MIN_WAIT = 0.001
"""Least seconds that the clock waits, so that others get the lock."""


class Fetcher:
    """Fills fetch groups: `submit` never blocks, `wait` blocks until groups are ready, `release`
    frees their memory, `close` ends everything.

    One thread at a time may wait.

    One lock guards all state. Each change of it, by a caller, an answer or the clock, ends with
    `_advance`, which does all that the change makes possible. Who waits for what:

        | thread                | waits for                                    | woken by               |
        |-----------------------|----------------------------------------------|------------------------|
        | `streammega-read`     | a batch to send                              | `_advance`, one thread |
        |                       |                                              | for each batch         |
        | `streammega-clock`    | the end of a pause, the pace, the next search| `_advance`, if it is   |
        |                       | for stragglers                               | sooner than before     |
        | the caller of `wait`  | a group                                      | `_complete`            |

    Args: max_threads: threads that send at once; None: as many as requests may be in flight.
    """

    def __init__(
        self, config: StorageConfig, budget: int | None = None, max_threads: int | None = None
    ) -> None:
        self.config = config
        self.pool = BufferPool(config.memory_bytes if budget is None else budget)
        self.counters = Counters()
        self.flow = FlowControl(config)
        self._max_threads = max_threads or config.max_concurrent_requests
        self._policy = RetryPolicy.of(config)
        self._lock = process_lock()
        self._work = threading.Condition(self._lock)  # of the threads that send
        self._time = threading.Condition(self._lock)  # of the clock
        self._ready = threading.Condition(self._lock)  # of the caller of `wait`
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._clock: threading.Thread | None = None
        self._wake_at = math.inf  # when the clock wakes
        self._unadmitted: deque[FetchGroup] = deque()
        self._serial = 0  # of the request that was admitted last
        self._first_failed = math.inf  # the least serial that failed: later ones are not needed
        self._queue = RequestQueue()
        self._batches: deque[list[RangeRequest]] = deque()  # for threads that are about to wake
        self._busy = 0  # threads that have a batch, or will take one of `_batches`
        # By id, in the order that they were sent, so that hedging looks at the oldest first.
        self._in_flight: dict[int, RangeRequest] = {}
        self._missing = 0  # groups that are waited for
        self._hedged_at = -math.inf  # when stragglers were searched for last
        _live.add(self)

    def submit(self, groups: Sequence[FetchGroup]) -> None:
        """Queue groups, in order of need. None of them may be larger than the budget."""
        with self._lock:
            self._unadmitted.extend(groups)
            self._advance()

    def wait(self, groups: Sequence[FetchGroup]) -> None:
        """Return when all of them are filled. Raises the error that one of them ended with."""
        began = time.monotonic()
        with self._lock:
            missing = [group for group in groups if not group.ready]
            self._missing = len(missing)
            for group in missing:
                group.awaited = True
            try:
                while self._missing and not any(group.error for group in groups):
                    if self._closed:
                        raise StorageError("the loader was closed while a batch was awaited")
                    self._ready.wait(retry.WARN_EVERY_S)
                    if time.monotonic() - began >= retry.WARN_EVERY_S:
                        self._warn_of_wait(time.monotonic() - began)
            finally:  # also after Ctrl-C: the next call counts its own groups only
                for group in missing:
                    group.awaited = False
        for group in groups:
            if group.error is not None:
                raise group.error

    def _warn_of_wait(self, seconds: float) -> None:
        """Say what is waited for: a slow answer fails after `request_timeout` only."""
        oldest = min(self._in_flight.values(), key=lambda request: request.sent_at, default=None)
        if oldest is not None:
            text = (
                "a batch has waited %.0f s for storage: %s sends slowly or nothing; such a request "
                "ends after %.4g s (request_timeout) and is sent again"
            )
            url = oldest.store.url(oldest.key)
            timeout = self.config.request_timeout
            warn_once(log, "wait", text, seconds, url, timeout, every=retry.WARN_EVERY_S)

    def release(self, groups: Sequence[FetchGroup]) -> None:
        """Free their memory, as soon as no request in flight writes to it."""
        with self._lock:
            for group in groups:
                group.release()
            self._advance()

    def close(self) -> None:
        """End all threads. Those in a request end with it, and are waited for a few seconds."""
        with self._lock:
            self._closed = True
            for group in self._unadmitted:
                group.take_requests()
            self._unadmitted.clear()
            self._queue.clear()
            self._batches.clear()
            self._in_flight.clear()
            for condition in (self._work, self._time, self._ready):
                condition.notify_all()
            threads = [*self._threads, *([self._clock] if self._clock else [])]
        deadline = time.monotonic() + min(CLOSE_TIMEOUT, self.config.tuning.read_timeout)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self.pool.clear()

    @property
    def is_full(self) -> bool:
        """Whether a group waits for memory."""
        return bool(self._unadmitted)

    @property
    def depth(self) -> tuple[int, int, int]:
        """(requests in flight, requests queued or paused, bytes of memory in use)."""
        return self.flow.requests, len(self._queue), self.pool.in_use

    # Everything below runs under the lock, but for `send`.

    def _advance(self, *, is_sender: bool = False) -> None:
        """Admit groups and hand batches to threads, as far as memory and flow control allow it now.

        All threads are woken at once. If each woke the next one, each would wait for the GIL after
        the other. is_sender: the calling thread takes a batch next, so it needs none to wake.
        """
        if self._closed:
            return
        now = time.monotonic()
        self._admit()
        self._queue.resume(now)
        added = 0
        while self._can_send(now):
            if self._busy == len(self._threads):
                self._start_thread()
                break
            self._batches.append(self._next_batch(now))
            self._busy += 1
            added += 1
        self._work.notify(added - is_sender)
        self._set_clock(now)

    def _admit(self) -> None:
        """Reserve memory for groups in the order submitted, and queue their requests.

        No group overtakes another, although a smaller one might fit: what is needed next would wait.
        """
        while self._unadmitted:
            group = self._unadmitted[0]
            if not group.released and not self.pool.has_room(group.size):
                break
            self._unadmitted.popleft()
            requests = group.take_requests()
            if group.released:
                continue
            group.reserve(self.pool)
            for request in requests:
                self._serial += 1
                request.serial = self._serial
                self._queue.push(request)

    def _can_send(self, now: float) -> bool:
        """Whether a batch may be sent now."""
        first = self._first_wanted()
        if first is None:
            return False
        count = 1
        # A further copy, and what failed before, goes alone.
        if first.copies == 0 and first.failures == 0 and self.flow.requests > 0:
            count = self.flow.full_batch(first.size, self._queue.waiting)
        return self.flow.can_send(first.size, now, count)

    def _next_batch(self, now: float) -> list[RangeRequest]:
        """The requests to send now: one, or several small ones that go out together."""
        batch: list[RangeRequest] = []
        batch_bytes = 0
        while (request := self._first_wanted()) is not None:
            if batch and not (
                len(batch) < self.flow.batch_requests(batch[0].size_class)
                and can_batch(batch[0], request, batch_bytes)
                and self.flow.can_send(request.size, now)
            ):
                break
            self._queue.pop()
            self._start_copy(request, now)
            batch.append(request)
            batch_bytes += request.size
        self.flow.pace.sent(now)
        return batch

    def _first_wanted(self) -> RangeRequest | None:
        """The first request of the queue that is still wanted. Those before it are dropped."""
        while True:
            request = self._queue.first()
            if request is None:
                return None
            is_needed = request.serial <= self._first_failed and not request.group.released
            if is_needed and not request.done:
                return request
            self._queue.pop()
            self._end_copy(request)

    def _start_copy(self, request: RangeRequest, now: float) -> None:
        """A copy of a request is about to be sent."""
        # A further copy was counted when it was queued.
        if request.copies == 0:
            request.copies = 1
            request.sent_at = math.inf
            self._in_flight[id(request)] = request
        if not request.first_sent_at:
            request.first_sent_at = now
        request.group.busy += 1
        self.flow.started(request.size)
        self.counters.requests += 1

    def _end_copy(self, request: RangeRequest) -> None:
        """A copy was answered, failed, or was dropped from the queue."""
        # A request that was dropped before it was sent has no copy to lose.
        request.copies = max(0, request.copies - 1)
        if request.copies == 0:
            self._in_flight.pop(id(request), None)

    # Threads

    def _start_thread(self) -> None:
        """Start a thread, unless there are enough. It takes a batch, then starts the next one: what
        is still queued by then may go out in larger batches.
        """
        if len(self._threads) < self._max_threads:
            # A daemon: a request that hangs must not delay the end of the program.
            thread = threading.Thread(target=self._run, name="streammega-read", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        """What a thread does until the fetcher is closed."""
        answer: Answer | None = None
        while True:
            # An answer is noted and the next batch taken in one go: each time that a thread takes the
            # lock, it may have to wait for others.
            with self._lock:
                if answer is not None:
                    self._finish(answer)
                    answer = None  # else its memory would stay while the thread waits
                self._advance(is_sender=True)
                while not self._batches and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
                batch = self._batches.popleft()
            answer = send(batch)
            del batch

    def _finish(self, answer: Answer) -> None:
        """Note how a batch ended."""
        batch, began, seconds, error, refusals = answer
        self._busy -= 1
        is_refusal = isinstance(error, StorageError) and error.throttled
        if is_refusal or refusals:
            self.counters.throttled += len(batch) if is_refusal else refusals
            self.flow.refused(began, time.monotonic())
        elif error is None:
            self.counters.latencies.append(seconds)
            is_cached = isinstance(batch[0].store, CachedStore)
            size_class = batch[0].size_class
            self.flow.answered(size_class, len(batch), seconds, sent_at=began, is_cached=is_cached)
        for request in batch:
            # The first copy began when the request was sent, further ones later.
            is_further = request.sent_at < began
            self.flow.finished(request.size)
            self._end_copy(request)
            if error is None:
                self._succeeded(request, is_further=is_further)
            elif not request.done and not request.group.released:
                self._failed(request, error, alone=len(batch) == 1, is_refusal=is_refusal)
            request.group.end_copy()

    def _set_clock(self, now: float) -> None:
        """Have the clock wake at the next event, if that is sooner than it will."""
        events = [self._queue.next_resume]
        pace = self.flow.pace
        if pace.interval and self._queue.waiting and pace.next_at > now:  # else it waits for room
            events.append(pace.next_at)
        if self._in_flight and self._may_hedge:
            events.append(self._hedged_at + HEDGE_SECONDS)
        wake_at = max(now + MIN_WAIT, min(events))
        if wake_at >= self._wake_at:
            return
        self._wake_at = wake_at
        self._time.notify()
        if self._clock is None:
            name = "streammega-clock"
            self._clock = threading.Thread(target=self._keep_time, name=name, daemon=True)
            self._clock.start()

    @property
    def _may_hedge(self) -> bool:
        """Whether a request may be known as a straggler."""
        enough = len(self.counters.latencies) >= HEDGE_AFTER
        return enough and self.config.tuning.hedge_requests and not self.flow.pace.interval

    def _keep_time(self) -> None:
        """What the clock does until the fetcher is closed."""
        with self._lock:
            while not self._closed:
                seconds = self._wake_at - time.monotonic()
                if seconds > 0:
                    self._time.wait(seconds if seconds < math.inf else None)
                    continue
                self._wake_at = math.inf
                self._hedge()
                self._advance()

    # How requests end

    def _succeeded(self, request: RangeRequest, *, is_further: bool) -> None:
        if not isinstance(request.store, CachedStore):
            self.counters.fetched_bytes += request.size
        if request.done:
            self.counters.duplicate_bytes += request.size
            return
        request.done = True
        if is_further:
            self.counters.hedges_won += 1
            self.flow.straggled(request.size_class)
        group = request.group
        group.missing -= 1
        if group.missing == 0:
            self._complete(group)

    def _failed(
        self, request: RangeRequest, error: BaseException, *, alone: bool, is_refusal: bool
    ) -> None:
        """Queue a request again, at once or after a pause, or fail its group."""
        if request.copies > 0:
            return  # its other copy decides
        if not alone:
            # It is unknown which one of the batch failed. Each is tried alone now, also after the
            # deadline: `can_batch` sends those with failures alone.
            request.failures = max(request.failures, 1)
            self.counters.retries += 1
            self._queue.push(request)
            return
        now = time.monotonic()
        elapsed = now - request.first_sent_at
        request.failures += 1
        try:
            pause = self._policy.next_pause(error, request.failures, elapsed)
        except BaseException as final:
            self.counters.errors += 1
            # `wait` raises this error first, so requests after it are not needed.
            self._first_failed = min(self._first_failed, request.serial)
            if request.group.error is None:
                request.group.error = final
                self._complete(request.group)
            return
        self.counters.retries += 1
        if self.flow.pace.interval and is_refusal:
            # The pace delays all requests. With a longer pause of its own, an early request would
            # be sent after later ones.
            pause = min(pause, self.flow.pace.interval)
        self._queue.pause(request, now + pause)

    def _complete(self, group: FetchGroup) -> None:
        """Waiting for this group is over. Wakes the caller of `wait` after the last one."""
        if not group.awaited:
            return
        group.awaited = False
        self._missing -= 1
        if self._missing == 0 or group.error is not None:
            self._ready.notify()

    def _hedge(self) -> None:
        """Queue another copy of requests that take longer than nearly all of their size did."""
        now = time.monotonic()
        self._hedged_at = now
        if not self._may_hedge:
            return
        counters = self.counters
        straggler_seconds = self.flow.latencies.straggler_seconds()
        late = []
        for request in self._in_flight.values():
            limit = straggler_seconds.get(request.size_class, math.inf)
            may_repeat = request.copies < MAX_COPIES and not request.done
            # The third copy follows sooner: the answer has been late for long by then.
            if may_repeat and now - request.sent_at > limit * (1 + request.copies) / 2:
                late.append(request)
        if len(late) > FEW_LATE:
            late = [request for request in late if self.flow.is_overtaken(request.sent_at)]
        for request in late:
            if not can_hedge(counters.hedges, counters.requests):
                return
            counters.hedges += 1
            request.copies += 1
            self._queue.push_hedge(request, counters.hedges)


@atexit.register
def _close_all() -> None:
    """Before the interpreter ends while threads still write to buffers."""
    for fetcher in list(_live):
        with contextlib.suppress(Exception):
            fetcher.close()
