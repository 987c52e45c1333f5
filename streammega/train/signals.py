"""How a run is asked to stop: by SIGTERM or Ctrl-C.

| first | later | the run ends |
|---|---|---|
| SIGTERM or Ctrl-C | | after the step under way, with a checkpoint |
| SIGTERM or Ctrl-C | Ctrl-C | at once |
| Ctrl-C | SIGTERM | at once: so torchrun passes a second Ctrl-C on to its ranks |
| SIGTERM | SIGTERM | as after the first: schedulers send several |
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ONE_REQUEST = 1.0
"""Seconds in which all signals are one request: the terminal sends a signal to every process, and the
launcher passes it on once more.
"""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Terminated(Exception):
    """A signal ended the run, after a checkpoint. `number`: of the signal."""

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.number = number


class StopRequests:
    """What the signals that reach this process ask for.

    Python runs signal handlers between two instructions of the main thread. After `listen` each
    signal is also written to a pipe, at once and in C. Another thread can read it while the main
    thread is blocked. Each signal counts once, in the thread that reads it.
    """

    def __init__(self) -> None:
        self.first_signal: signal.Signals | None = None
        """The signal that asks the run to end."""
        self.first_signal_time = 0.0
        self.at_once_time: float | None = None
        """When the end at once was asked for (time.monotonic), if it was."""
        self._is_graceful = False
        self._is_announced = False
        self._read_end: int | None = None
        self._wakeup_fd = -1

    def listen(self) -> None:
        """Receive signals also while the main thread is blocked. Call it in the main thread; in others
        it does nothing.
        """
        if _is_main_thread():
            self._read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            # A full pipe is no problem: the thread that reads it knows that signals came.
            self._wakeup_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def wait(self, seconds: float) -> None:
        """Wait for a signal, at most so many seconds."""
        if self._read_end is None:
            time.sleep(seconds)
        else:
            select.select([self._read_end], [], [], seconds)
            self._read()

    def close(self) -> None:
        """Stop listening. The pipe stays open: a thread may be reading."""
        if self._read_end is not None and _is_main_thread():
            signal.set_wakeup_fd(self._wakeup_fd)

    @contextmanager
    def graceful(self, *, announce: bool) -> Iterator[None]:
        """In this context a first signal asks for the end after the step; one for the end at once
        raises KeyboardInterrupt. Outside of it every Ctrl-C asks for the end at once.

        announce: print what a first Ctrl-C does. Signals that are ignored stay ignored: Ctrl-C is not
        meant for a shell's background jobs.
        """
        if not _is_main_thread():
            yield
            return

        def handle(number: int, _: Any) -> None:
            if self._read_end is None:
                self._note(number)
            else:
                self._read()
            if self.at_once_time is not None:
                raise KeyboardInterrupt
            if announce and self.first_signal == signal.SIGINT and not self._is_announced:
                self._is_announced = True
                text = (
                    "Ctrl-C: ends after the step under way, with a checkpoint; once more: at once\n"
                )
                os.write(2, text.encode())

        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        # None: a handler in C, which cannot be put back
        replaced = [number for number in SIGNALS if handlers[number] not in (signal.SIG_IGN, None)]
        self._is_graceful = True
        for number in replaced:
            signal.signal(number, handle)
        try:
            yield
        finally:
            self._is_graceful = False
            for number in replaced:
                signal.signal(number, handlers[number])

    def _read(self) -> None:
        assert self._read_end is not None
        try:
            numbers = os.read(self._read_end, 64)
        except BlockingIOError:  # another thread has read them
            return
        for number in numbers:
            self._note(number)

    def _note(self, number: int) -> None:
        """Count a signal. Signals that are not in the table are ignored."""
        if number not in SIGNALS:
            return
        now = time.monotonic()
        if self.first_signal is None:
            self.first_signal = signal.Signals(number)
            self.first_signal_time = now
        is_later = now - self.first_signal_time > ONE_REQUEST
        is_second = is_later and signal.SIGINT in (self.first_signal, number)
        is_interrupt = number == signal.SIGINT and not self._is_graceful
        if self.at_once_time is None and (is_second or is_interrupt):
            self.at_once_time = now


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
