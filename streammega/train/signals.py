"""How a run is asked to stop: by SIGTERM or Ctrl-C.

| first | later | the run ends |
|---|---|---|
| SIGTERM or Ctrl-C | | after the step under way, with a checkpoint |
| SIGTERM or Ctrl-C | Ctrl-C | at once |
| Ctrl-C | SIGTERM | at once: so torchrun passes a second Ctrl-C on to its ranks |
| SIGTERM | SIGTERM | as after the first: schedulers send several; at once while the disk or a save is waited for |

Python runs handlers between two instructions of the main thread. A rank that waits in a collective sees a
signal when that ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
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


class StopNow(KeyboardInterrupt):
    """Signals ask for the end at once. `number`: SIGINT if one of them was Ctrl-C."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self.number = number


class StopRequests:
    """What the signals that reach this process ask for.

    is_waiting: whether the run waits for a save, or to write to its log.
    """

    def __init__(self, is_waiting: Callable[[], bool]) -> None:
        self._is_waiting = is_waiting
        self.first_signal: signal.Signals | None = None
        """The signal that asks the run to end."""
        self._first_time = 0.0

    @contextmanager
    def graceful(self, *, announce: bool) -> Iterator[None]:
        """In this context a first signal asks for the end after the step; one for the end at once
        raises StopNow. In threads other than the main one it does nothing.

        announce: print what a first Ctrl-C does. Signals that are ignored stay ignored: Ctrl-C is not
        meant for a shell's background jobs.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _: Any) -> None:
            now = time.monotonic()
            if self.first_signal is None:
                self.first_signal = signal.Signals(number)
                self._first_time = now
                if announce and number == signal.SIGINT:
                    text = "Ctrl-C: ends after the step under way, with a checkpoint; once more: at once\n"
                    os.write(2, text.encode())
            elif now - self._first_time > ONE_REQUEST:
                if signal.SIGINT in (self.first_signal, number):
                    raise StopNow(signal.SIGINT)
                if self._is_waiting():
                    raise StopNow(signal.SIGTERM)

        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        # None: a handler in C, which cannot be put back
        replaced = [number for number in SIGNALS if handlers[number] not in (signal.SIG_IGN, None)]
        for number in replaced:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number in replaced:
                signal.signal(number, handlers[number])
