"""Threads that wait for storage, and never delay the end of the program.

They are daemons: an endpoint that hangs delays neither Ctrl-C nor the exit. Python joins the threads
of `concurrent.futures` at exit. Cancelled work is not begun, its pauses between tries end at once,
and its requests in flight end by themselves.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from streammega.storage.progress import note_part, observer

Item = TypeVar("Item")
Result = TypeVar("Result")
CALLS = "steps"
"""What is shown of calls of `parallel_map`."""
IDLE_TIMEOUT = 10.0
"""Seconds after which a thread without work ends."""
POLL_SECONDS = 0.2
"""Seconds between two checks whether the work that waits was itself cancelled, and for signals."""


class _ThreadState(threading.local):
    """What holds for the work of a thread, and for what it gives to other threads."""

    stop: threading.Event | None = None
    """Set when the batch of this thread is cancelled."""
    retry_end = math.inf
    """When the retries of the outermost `RetryPolicy.call` end, by `time.monotonic`."""
    refusals = 0
    """See `retry.take_refusals`."""


thread_state = _ThreadState()


class Cancelled(Exception):
    """Ends the work of a thread whose results are not wanted any more. It stays in the thread."""


class Batch:
    """Calls that threads make until `stop` is set."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.stop = threading.Event()
        self._retry_end = thread_state.retry_end
        self._calls = calls
        self._futures: list[Future[Any]] = [Future() for _ in calls]

    def run(self, number: int) -> None:
        """Make one call, unless the batch was cancelled."""
        future = self._futures[number]
        if self.stop.is_set():
            return
        thread_state.stop = self.stop
        thread_state.retry_end = self._retry_end
        try:
            future.set_result(self._calls[number]())
        except BaseException as error:
            future.set_exception(error)

    def wait(self) -> list[Any]:
        """All results, in order.

        Raises the error of the first call that has one, as soon as all before it are done.
        """
        outer_stop = thread_state.stop
        results = []
        try:
            for future in self._futures:
                while not future.done():
                    # A signal that comes to another thread is noticed by polling only, and so is
                    # the stop of an outer batch.
                    with contextlib.suppress(TimeoutError):
                        future.exception(POLL_SECONDS)
                    if outer_stop is not None and outer_stop.is_set():
                        raise Cancelled
                results.append(future.result())
            return results
        finally:  # also after an error or Ctrl-C: the rest is not wanted
            self.stop.set()


class Pool:
    """At most `max_threads` daemon threads, started when there is work for them.

    Not for use across a fork.
    """

    def __init__(
        self, max_threads: int, name: str = "streammega-read", idle_timeout: float = IDLE_TIMEOUT
    ) -> None:
        self._max_threads = max_threads
        self._name = name
        self._idle_timeout = idle_timeout
        self._jobs: queue.SimpleQueue[tuple[Batch, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0  # calls that are queued or running: more threads would have no work

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """`function` of each item, concurrently, in the order of the items.

        Raises the first one's error, in that order.
        """
        return self.begin(function, items).wait()

    def begin(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Batch:
        """The same, without waiting: `Batch.wait` returns the results."""
        calls = [partial(function, item) for item in items]
        batch = Batch(calls)
        with self._lock:
            for number in range(len(calls)):
                self._jobs.put((batch, number))
            self._busy += len(calls)
            new_threads = max(0, min(self._max_threads, self._busy) - self._threads)
            self._threads += new_threads
        for number in range(new_threads):
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            except RuntimeError:  # the system has no more threads: those that there are do the work
                with self._lock:
                    self._threads -= new_threads - number
                    if self._threads == 0:
                        batch.stop.set()
                        raise
                break
        return batch

    def call(self, function: Callable[[], Result]) -> Result:
        """`function()`. Called in the main thread, it runs in another one, so that Ctrl-C is noticed."""
        if threading.current_thread() is not threading.main_thread():
            return function()
        (result,) = self.map(lambda _: function(), [None])
        return result

    def _run(self) -> None:
        while True:
            try:
                batch, number = self._jobs.get(timeout=self._idle_timeout)
            except queue.Empty:
                with self._lock:
                    # Otherwise new work counts on this thread.
                    if self._jobs.empty():
                        self._threads -= 1
                        return
                continue
            batch.run(number)
            # Otherwise a thread that waits for work would keep all results alive.
            del batch
            with self._lock:
                self._busy -= 1


def parallel_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    max_threads: int,
    *,
    is_local: bool = False,
) -> list[Result]:
    """`function` of each item by at most so many threads, in the order of the items.

    See `Pool.map`. is_local: the work is on local files, so this thread does it: other threads
    would only take turns, and starting them takes longer than opening a file. The observer of
    this process sees how many calls are done.
    """
    listed = list(items)
    if observer() is not None:
        function = _counted(function)
        note_part(CALLS, 0, len(listed), unit="")
    if is_local:
        return [function(item) for item in listed]
    pool = Pool(max_threads, "streammega-open", idle_timeout=0.0)
    if len(listed) == 1:
        return [pool.call(partial(function, listed[0]))]
    return pool.map(function, listed)


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    max_threads: int,
    *,
    ahead_items: int | None = None,
) -> Generator[Result, None, None]:
    """`function` of each item by at most so many threads: results in the order of the items, each as
    soon as it is there. What was begun ahead is not wanted any more after an error, Ctrl-C, or the end
    of this iterator.

    ahead_items: items taken ahead of the result that is waited for; None: a few.
    """
    if ahead_items is None:
        ahead_items = 2 * max_threads
    pool = Pool(max_threads, "streammega-map", idle_timeout=0.0)
    ahead: deque[Batch] = deque()
    try:
        for item in items:
            ahead.append(pool.begin(function, [item]))
            if len(ahead) > ahead_items:
                (result,) = ahead.popleft().wait()
                yield result
        while ahead:
            (result,) = ahead.popleft().wait()
            yield result
    finally:
        for batch in ahead:
            batch.stop.set()


def _counted(function: Callable[[Item], Result]) -> Callable[[Item], Result]:
    """The same function, which reports each call that is done to the observer of this process."""

    def call(item: Item) -> Result:
        result = function(item)
        note_part(CALLS, 1)
        return result

    return call


def pause(seconds: float, stop: threading.Event | None = None) -> None:
    """Sleep. Raises Cancelled as soon as `stop` is set or the batch of this thread is cancelled."""
    stop = stop or thread_state.stop
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Cancelled
