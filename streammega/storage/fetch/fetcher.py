"""Range requests in flight: in order of need, within limits, retried and hedged.

A fetch group is one buffer and the requests that fill it. Groups are admitted in the order of their
submission, while there is memory, and their requests are sent in that order too. Threads wait in the
transport, without the GIL. There are as many threads as batches were ever in flight at once.
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
from streammega.storage.fetch.flow_control import FEW_LATE, MAX_COPIES, FlowControl, can_hedge
from streammega.storage.fetch.requests import (
    Counters,
    FetchGroup,
    RangeRequest,
    RequestQueue,
    can_batch,
    send,
)
from streammega.storage.fork_lock import process_lock
from streammega.storage.retry import RetryPolicy, take_refusals
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

_live: weakref.WeakSet[Fetcher] = weakref.WeakSet()
HEDGE_SECONDS = 0.02
"""Seconds between two searches for stragglers."""
CLOSE_TIMEOUT = 5.0
"""Seconds that `close` waits for requests in flight. Slower threads end later, by themselves."""
MIN_WAIT = 0.001
"""Least seconds that a thread waits for the next event, so that others get the lock."""


class Fetcher:
    """Fills fetch groups: `submit` never blocks, `wait` blocks until groups are ready, `release`
    frees their memory, `close` ends everything.

    One thread at a time may wait.

    Args: max_threads: threads that send at once; None: as many as requests may be in flight.
    """

    def __init__(
        self, config: StorageConfig, budget: int | None = None, max_threads: int | None = None
    ) -> None:
        self.config = config
        self.pool = BufferPool(config.memory_bytes if budget is None else budget)
        self.counters = Counters()
        self.flow = FlowControl(config)
        self.unadmitted_bytes = 0
        self._max_threads = max_threads or config.max_concurrent_requests
        self._policy = RetryPolicy.of(config)
        # The lock guards all of the state below. Sending threads wait for `_work`, the caller of
        # `wait` for `_ready`: so neither is woken for the other.
        self._lock = process_lock()
        self._work = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads that send nothing now
        self._looking = 0  # of these, the ones that are about to look for work
        self._unadmitted: deque[FetchGroup] = deque()
        self._serial = 0  # of the request that was admitted last
        self._first_failed = math.inf  # the least serial that failed: later ones are not needed
        self._queue = RequestQueue()
        # By id, in the order that they were sent, so that hedging looks at the oldest first.
        self._in_flight: dict[int, RangeRequest] = {}
        self._missing = 0  # groups that are waited for
        self._hedged_at = -math.inf  # when stragglers were searched for last
        _live.add(self)

    def submit(self, groups: Sequence[FetchGroup]) -> None:
        """Queue groups, in order of need. None of them may be larger than the budget."""
        with self._lock:
            self._unadmitted.extend(groups)
            self.unadmitted_bytes += sum(group.size for group in groups)
            self._admit()

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
                    self._hedge()
                    self._ready.wait(HEDGE_SECONDS)
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
                group.released = True
                self._free(group)
            self._admit()

    def close(self) -> None:
        """End all threads. Those in a request end with it, and are waited for a few seconds."""
        with self._lock:
            self._closed = True
            for group in self._unadmitted:
                group.take_requests()
            self._unadmitted.clear()
            self._queue.clear()
            self._work.notify_all()
            self._ready.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + min(CLOSE_TIMEOUT, self.config.tuning.read_timeout)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self.pool.clear()

    @property
    def depth(self) -> tuple[int, int, int]:
        """(requests in flight, requests queued or paused, bytes of memory in use)."""
        return self.flow.requests, len(self._queue), self.pool.in_use

    # Everything below runs under the lock, but for `send`.

    def _admit(self) -> None:
        """Reserve memory for groups in the order submitted, and queue their requests.

        No group overtakes another, although a smaller one might fit: what is needed next would wait.
        """
        while self._unadmitted:
            group = self._unadmitted[0]
            if not group.released and not self.pool.has_room(group.size):
                break
            self._unadmitted.popleft()
            self.unadmitted_bytes -= group.size
            requests = group.take_requests()
            if group.released:
                continue
            group.takes_memory = True
            group.pool = self.pool
            self.pool.reserve(group.size)
            for request in requests:
                self._serial += 1
                request.serial = self._serial
                self._queue.push(request)
        self._wake()

    # Threads

    def _wake(self) -> None:
        """Have as many threads look for work as there are batches to send, or one wait for the next
        event, if there is any.

        All are woken at once. If each woke the next one, each would wait for the GIL after the other.
        """
        if self._closed:
            return
        first = self._queue.first()
        batches = 0 if first is None else self._startable_batches(first, time.monotonic())
        if batches == 0 and self._next_event() is not None:
            batches = 1
        missing = batches - self._looking
        if missing <= 0:
            return
        waiting = self._idle - self._looking
        if waiting:
            self._looking += min(missing, waiting)
            self._work.notify(missing)
        elif len(self._threads) < self._max_threads:
            # One now: when it has found work, it starts the next one.
            # A daemon: a request that hangs must not delay the end of the program.
            thread = threading.Thread(target=self._run, name="streammega-read", daemon=True)
            self._threads.append(thread)
            self._idle += 1
            self._looking += 1
            thread.start()

    def _run(self) -> None:
        """What a thread does until the fetcher is closed."""
        with self._lock:
            while not self._closed:
                batch = self._next_batch()
                # A thread whose wait has ended by itself was not counted.
                self._looking = max(0, self._looking - 1)
                if batch:
                    self._execute(batch)
                    continue
                next_event = self._next_event()
                if next_event is None:
                    self._work.wait()
                else:
                    self._work.wait(max(MIN_WAIT, next_event - time.monotonic()))

    def _next_event(self) -> float | None:
        """When a thread must look for work without being woken: at the end of the first pause, or
        when the pace allows the next request.
        """
        next_resume = self._queue.next_resume
        if self.flow.pace.interval and self._queue.waiting:
            return min(self.flow.pace.next_at, next_resume or math.inf)
        return next_resume

    def _next_batch(self) -> list[RangeRequest]:
        """The requests to send now: none, one, or several small ones that go out together."""
        now = time.monotonic()
        self._queue.resume(now)
        batch: list[RangeRequest] = []
        batch_bytes = 0
        while True:
            request = self._drop_unwanted()
            if request is None:
                break
            if not batch and not self._startable_batches(request, now):
                break
            if batch and not (
                len(batch) < self.flow.batch_requests(batch[0].size_class)
                and can_batch(batch[0], request, batch_bytes)
                and self.flow.can_send(request.size, now)
            ):
                break
            self._queue.pop()
            self._start(request, now)
            batch.append(request)
            batch_bytes += request.size
        if batch:
            self.flow.pace.sent(now)
        return batch

    def _startable_batches(self, first: RangeRequest, now: float) -> int:
        """How many batches may be sent now, if the requests behind `first` are like it."""
        queued = self._queue.waiting
        count = 1
        # A further copy, and what failed before, goes alone.
        if first.copies == 0 and first.failures == 0 and self.flow.requests > 0:
            count = self.flow.full_batch(first.size, queued)
        if not self.flow.can_send(first.size, now, count):
            return 0
        return max(1, min(self.flow.room(first.size), queued) // count)

    def _drop_unwanted(self) -> RangeRequest | None:
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

    def _start(self, request: RangeRequest, now: float) -> None:
        """A copy of a request is about to be sent."""
        # A further copy was counted when it was queued.
        if request.copies == 0:
            request.copies = 1
            request.sent_at = now
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

    def _execute(self, batch: list[RangeRequest]) -> None:
        """Send requests together, outside of the lock, and note how they ended."""
        self._idle -= 1
        self._wake()
        # A request that was just taken from the queue has another copy only if that is in flight.
        further_copies = {id(request) for request in batch if request.copies > 1}
        error: BaseException | None = None
        self._lock.release()
        # Measured without the wait for the lock: that is no latency of the storage.
        began = time.monotonic()
        try:
            send(batch)
        except BaseException as caught:  # raised by `wait`, not in this thread
            error = caught
        finally:
            seconds = time.monotonic() - began
            refusals = take_refusals()  # that the store outlived
            self._lock.acquire()
        self._idle += 1
        self._looking += 1
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
            self.flow.finished(request.size)
            request.group.busy -= 1
            self._end_copy(request)
            if error is None:
                self._succeeded(request, is_further=id(request) in further_copies)
            elif not request.done and not request.group.released:
                self._failed(request, error, alone=len(batch) == 1, is_refusal=is_refusal)
            if request.group.released:
                self._free(request.group)
                self._admit()
        if time.monotonic() - self._hedged_at >= HEDGE_SECONDS:
            self._hedge()

    # How requests end

    def _succeeded(self, request: RangeRequest, *, is_further: bool) -> None:
        if not isinstance(request.store, CachedStore):
            self.counters.fetched_bytes += request.size
        if request.done:
            self.counters.duplicate_bytes += request.size
            return
        request.done = True
        self.counters.hedges_won += is_further
        group = request.group
        group.missing -= 1
        if group.missing == 0:
            self._complete(group)

    def _failed(
        self, request: RangeRequest, error: BaseException, *, alone: bool, is_refusal: bool
    ) -> None:
        """Send a request again, at once or after a pause, or fail its group."""
        if request.copies > 0:
            return  # its other copy decides
        if not alone:
            # It is unknown which one of the batch failed. Each is tried alone now, also after the
            # deadline: `can_batch` sends those with failures alone.
            request.failures = max(request.failures, 1)
            self.counters.retries += 1
            self._queue.push(request)
            self._wake()
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
        self._wake()

    def _complete(self, group: FetchGroup) -> None:
        """Waiting for this group is over. Wakes the caller of `wait` after the last one."""
        if not group.awaited:
            return
        group.awaited = False
        self._missing -= 1
        if self._missing == 0 or group.error is not None:
            self._ready.notify_all()

    def _free(self, group: FetchGroup) -> None:
        # Copies in flight would write to what the buffer is used for next.
        if group.busy > 0 or not group.takes_memory:
            return
        group.takes_memory = False
        self.pool.free(group.size, group.buffer)
        group.buffer = None

    def _hedge(self) -> None:
        """Send another copy of requests that take longer than nearly all of their size did."""
        now = time.monotonic()
        self._hedged_at = now
        if not self.config.tuning.hedge_requests or self.flow.pace.interval:
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
            self.flow.straggled(request.size_class)
            self._wake()


@atexit.register
def _close_all() -> None:
    """Before the interpreter ends while threads still write to buffers."""
    for fetcher in list(_live):
        with contextlib.suppress(Exception):
            fetcher.close()
