"""Threads that wait for storage: results and errors in order, and Ctrl-C at once, also where the
signal goes to another thread or comes just before the wait.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from streammega import DataConfig, StreamLoader
from streammega.loading.engine import Engine
from streammega.storage import thread_pool
from streammega.storage.thread_pool import Pool

LONG = 30.0
"""Seconds that what is waited for takes."""


@pytest.fixture
def interrupted() -> Iterator[Callable[[], None]]:
    """Begin a thread that is interrupted itself, in the main thread's place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        time.sleep(0.5)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    yield thread.start
    thread.join()
    signal.signal(signal.SIGINT, before)


def test_work_of_others_is_waited_for_no_longer(interrupted: Callable[[], None]) -> None:
    end = threading.Event()
    began = time.monotonic()
    interrupted()
    with pytest.raises(KeyboardInterrupt):
        Pool(1).call(lambda: end.wait(LONG))
    end.set()
    assert time.monotonic() - began < LONG / 2


def test_batches_are_waited_for_no_longer(
    interrupted: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(engine: Engine) -> None:
        deadline = time.monotonic() + LONG
        while not engine._closed and time.monotonic() < deadline:
            time.sleep(0.05)
        engine._ready.put(None)

    monkeypatch.setattr(Engine, "_run", run)
    config = DataConfig(blend=["mock://tokens=1000,vocab=50"], sequence_length=8, order="stream")
    loader = StreamLoader(config, micro_batch_size=1, global_batch_size=1)
    began = time.monotonic()
    interrupted()
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    assert time.monotonic() - began < LONG / 2


class TestPool:
    def test_results_come_in_order_and_the_first_error_in_that_order(self) -> None:
        pool = thread_pool.Pool(4)
        assert pool.map(lambda x: x * x, range(50)) == [x * x for x in range(50)]

        def fail(x: int) -> int:
            time.sleep(0.2 if x == 3 else 0.0)
            if x in (3, 5):
                raise ValueError(x)
            return x

        with pytest.raises(ValueError, match="3"):
            pool.map(fail, range(8))
        assert thread_pool.parallel_map(str, [1, 2, 3], 2) == ["1", "2", "3"]
        assert thread_pool.parallel_map(str, [], 2) == []

    def test_an_error_stops_what_others_still_wait_for(self) -> None:
        """Also through work that waits for other work."""
        stopped = threading.Event()

        def inner(_: int) -> None:
            try:
                thread_pool.pause(60)
            except thread_pool.Cancelled:
                stopped.set()
                raise

        def outer(x: int) -> None:
            if x == 0:
                time.sleep(0.2)
                raise ValueError("first")
            thread_pool.parallel_map(inner, [1, 2], 2)

        with pytest.raises(ValueError, match="first"):
            thread_pool.parallel_map(outer, [0, 1], 2)
        assert stopped.wait(30), "long before its pause ends"

    def test_threads_without_work_leave(self) -> None:
        before = threading.active_count()
        pool = thread_pool.Pool(8, idle_timeout=0.1)
        pool.map(lambda _: time.sleep(0.01), range(16))
        deadline = time.monotonic() + 60
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert threading.active_count() <= before
        assert pool.map(str, [1]) == ["1"], "and come again"

    @pytest.mark.parametrize("allowed", [0, 1])
    def test_a_system_without_more_threads_is_an_error_or_slower_and_never_a_hang(
        self, allowed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = threading.Thread.start
        started: list[threading.Thread] = []

        def limited(thread: threading.Thread) -> None:
            if len(started) >= allowed:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        pool = thread_pool.Pool(4)
        monkeypatch.setattr(threading.Thread, "start", limited)
        if allowed:
            assert pool.map(str, range(9)) == [str(number) for number in range(9)]
        else:
            with pytest.raises(RuntimeError, match="new thread"):
                pool.map(str, range(9))
        monkeypatch.undo()
        results: list[str] = []
        caller = threading.Thread(
            target=lambda: results.extend(pool.map(str, range(9))), daemon=True
        )
        caller.start()
        caller.join(60)
        assert results == [str(number) for number in range(9)]
