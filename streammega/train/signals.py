"""Signals of this process, heard whatever its main thread waits in."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

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
