"""A signal that no wait of the main thread is broken off by: Ctrl-C that came to another thread, or
just before the wait began.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from streammega import DataConfig, StreamLoader
from streammega.loading.engine import Engine
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
