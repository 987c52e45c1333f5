"""Threads that wait for storage, and never make anybody wait for them.

Requests are waited for in daemon threads: an endpoint that hangs then holds up neither Ctrl-C nor
the end of the program, as the threads of `concurrent.futures` would, which Python joins at exit.
What is stopped is not begun any more, its pauses between tries end at once, and its requests under
way end by themselves.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
LEAVE_AFTER = 10.0
"""Seconds after which a thread without work ends."""
LOOK_AGAIN = 0.2
"""Seconds between two looks whether work that waits for other work was stopped, and for signals."""
_of_thread = threading.local()


class Stopped(Exception):
    """What ends the work of a thread whose results nobody waits for any more.

    It stays within such threads.
    """


class SharedWork:
    """One function called on several items, by any number of threads, until somebody stops it."""

    def __init__(self, function: Callable[[Any], Any], items: list[Any]) -> None:
        self.count = len(items)
        self.stop = threading.Event()
        self._function = function
        self._items = items
        self._results: list[Any] = [None] * self.count
        self._errors: dict[int, BaseException] = {}
        self._done = [False] * self.count
        # The first item that is not done, or has an error: with it, what is waited for is decided.
        self._first_missing = 0
        self._changed = threading.Condition()

    def run(self, number: int) -> None:
        """Call the function on one item, unless that is not wanted any more."""
        if self.stop.is_set():
            return
        _of_thread.stop = self.stop
        try:
            self._results[number] = self._function(self._items[number])
        except BaseException as error:
            self._errors[number] = error
        finally:
            _of_thread.stop = None
        with self._changed:
            self._done[number] = True
            while self._goes_on() and self._done[self._first_missing]:
                self._first_missing += 1
            if not self._goes_on():
                self._changed.notify_all()

    def wait(self) -> list[Any]:
        """All results, in order.

        Raises the error of the first item that has one, as soon as all before it are done.
        """
        outer_stop = _stop_of_thread()
        try:
            with self._changed:
                while self._goes_on():
                    # Whoever sets the stop of an outer work does not notify this one. And a signal
                    # that comes as the main thread begins to wait, or to another thread, is heard
                    # of by a look only.
                    self._changed.wait(LOOK_AGAIN)
                    if outer_stop is not None and outer_stop.is_set():
                        raise Stopped
            if self._first_missing in self._errors:
                raise self._errors[self._first_missing]
            return self._results
        finally:  # also for an error, or for Ctrl-C: nobody wants the rest
            self.stop.set()

    def _goes_on(self) -> bool:
        return self._first_missing < self.count and self._first_missing not in self._errors


class Pool:
    """At most `most` daemon threads, started when there is work for them.

    Not for use across a fork.
    """

    def __init__(
        self, most: int, name: str = "streammega-read", leave_after: float = LEAVE_AFTER
    ) -> None:
        self._most = most
        self._name = name
        self._leave_after = leave_after
        self._jobs: queue.SimpleQueue[tuple[SharedWork, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0  # items that are queued or worked on: no more threads are of use

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """`function` of each item, concurrently, in the order of the items.

        Raises the first one's error, in that order.
        """
        return self.begin(function, items).wait()

    def begin(self, function: Callable[[Item], Result], items: Iterable[Item]) -> SharedWork:
        """The same, without waiting: the results are for `SharedWork.wait`."""
        work = SharedWork(function, list(items))
        with self._lock:
            for number in range(work.count):
                self._jobs.put((work, number))
            self._busy += work.count
            wanted_threads = min(self._most, self._busy)
            new_threads = max(0, wanted_threads - self._threads)
            self._threads += new_threads
        for _ in range(new_threads):
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return work

    def call(self, function: Callable[[], Result]) -> Result:
        """`function()`.

        The main thread has another one do it, so that it hears of Ctrl-C meanwhile.
        """
        if threading.current_thread() is not threading.main_thread():
            return function()
        (result,) = self.map(lambda _: function(), [None])
        return result

    def _run(self) -> None:
        while True:
            try:
                work, number = self._jobs.get(timeout=self._leave_after)
            except queue.Empty:
                with self._lock:
                    # Else work came just now, and counts on this thread.
                    if self._jobs.empty():
                        self._threads -= 1
                        return
                continue
            work.run(number)
            # A thread that waits for the next one would keep all that its results hold.
            del work
            with self._lock:
                self._busy -= 1


def each(function: Callable[[Item], Result], items: Iterable[Item], most: int) -> list[Result]:
    """`function` of each item by at most `most` threads at once, in the order of the items.

    See `Pool.map`.
    """
    wanted = list(items)
    pool = Pool(most, "streammega-open", leave_after=0.0)
    if len(wanted) == 1:
        (only,) = wanted
        return [pool.call(lambda: function(only))]
    return pool.map(function, wanted)


def pause(seconds: float, stop: threading.Event | None = None) -> None:
    """Sleep.

    Raises Stopped at once when `stop` is set, or the work of this thread is not wanted any more.
    """
    stop = stop or _stop_of_thread()
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Stopped


def _stop_of_thread() -> threading.Event | None:
    stop: threading.Event | None = getattr(_of_thread, "stop", None)
    return stop
