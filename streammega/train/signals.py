"""How a run is asked to stop: SIGTERM, or Ctrl-C. It ends after the step under way, with a
checkpoint; or at once.

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
"""Seconds in which all signals are one request: a launcher passes on what the terminal has sent to
every process already.
"""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Terminated(Exception):
    """A signal ended the run, after a checkpoint. `number`: of the signal."""

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.number = number


class StopRequests:
    """What the signals that came ask for, by the table above."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """What asked for the end, if anything did."""
        self.at_once = False
        """Whether the end of the step is not to be waited for."""
        self._since = 0.0

    def note(self, number: int, now: float) -> None:
        """A signal came, at a time in seconds. Others than those of the table count for nothing."""
        if number not in SIGNALS:
            return
        if self.first is None:
            self.first = signal.Signals(number)
            self._since = now
        elif signal.SIGINT in (self.first, number) and now - self._since > ONE_REQUEST:
            self.at_once = True


@contextmanager
def heard(requests: StopRequests, *, says: bool) -> Iterator[None]:
    """Note signals instead of ending by them; KeyboardInterrupt where the end is wanted at once.
    `says`: tell what a first does.

    Signals that are ignored stay so: a shell's background jobs are no business of Ctrl-C. They
    reach main threads only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: Any) -> None:
        """Note the signal; what the first Ctrl-C does is told at once."""
        told = requests.first is not None
        requests.note(number, time.monotonic())
        if requests.at_once:
            raise KeyboardInterrupt
        if says and not told and number == signal.SIGINT:
            os.write(
                2, b"Ctrl-C: ends after the step under way, with a checkpoint; once more: at once\n"
            )

    before = {number: signal.getsignal(number) for number in SIGNALS}
    # None: of C, cannot be put back
    ours = [number for number in SIGNALS if before[number] not in (signal.SIG_IGN, None)]
    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


SIGNALS_AT_ONCE = 64
"""Bytes of a read of signals, one each; what is left is read at the next turn."""


class SignalPipe:
    """Numbers of the signals that reach this process, whatever its main thread waits in.

    Python's own handlers run between two instructions of the main thread; what is read here is
    written by the handler in C.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._before = -1

    def listen(self) -> None:
        """Begin, in the main thread; in another one no signal is ever seen."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _, write_end = self._pipe
        # A full pipe says enough: the thread that reads it knows that signals came.
        self._before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def wait(self, seconds: float) -> bytes:
        """The signals that came, at once, or none after so many seconds."""
        if self._pipe is None:
            time.sleep(seconds)
            return b""
        read_end, _ = self._pipe
        readable, _, _ = select.select([read_end], [], [], seconds)
        if not readable:
            return b""
        try:
            return os.read(read_end, SIGNALS_AT_ONCE)
        except OSError:
            # None after all: select may say so, and must not block what comes next.
            return b""

    def close(self) -> None:
        """Stop listening. The pipe stays open: the thread may be reading."""
        if self._pipe is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before)
