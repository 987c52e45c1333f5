"""How far a command is, on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

import typer
from tqdm import tqdm

from streammega.storage.progress import ProgressObserver

LINE_EVERY = 30.0
"""Seconds between two lines, if stderr is not a terminal."""
REDRAW_EVERY = 1.0
"""Seconds between two drawings of a bar, whether or not anything was done: its clock goes on."""


class ProgressDisplay(ProgressObserver):
    """Shows bytes, tokens, their speeds, and the time left where the total is known.

    Use it as a context manager, around the work. It shows that it waits, too. line_every: seconds
    between two lines; None: LINE_EVERY.
    """

    def __init__(
        self, stage: str, total: int | None = None, *, line_every: float | None = None
    ) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._interval = REDRAW_EVERY if self._on_terminal else line_every or LINE_EVERY
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show_now_and_then, daemon=True)
        self._lock = threading.Lock()
        self._bar: tqdm | None = None
        self.begin(stage, total)

    def begin(self, stage: str, total: int | None = None, unit: str = "B") -> None:
        """As of ProgressObserver. unit: what is counted in place of bytes."""
        with self._lock:
            self._stage = stage
            self._unit = unit
            self._total = total
            self._bytes = 0
            self._tokens = 0
            self._began = time.monotonic()
            if self._on_terminal:
                self._close_bar()
                self._bar = tqdm(unit=unit, unit_scale=True, desc=stage, total=total, leave=False)

    def advance(self, size: int, tokens: int = 0) -> None:
        """As of ProgressObserver."""
        with self._lock:
            self._bytes += size
            self._tokens += tokens
            if self._bar is not None:
                self._bar.set_postfix_str(self._token_figures(), refresh=False)
                self._bar.update(size)

    def __enter__(self) -> ProgressDisplay:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._close_bar()

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show_now_and_then(self) -> None:
        while not self._ended.wait(self._interval):
            with self._lock:
                if self._bar is not None:
                    self._bar.refresh()
                elif not self._on_terminal:
                    typer.echo(self._line(), err=True)

    def _line(self) -> str:
        seconds = time.monotonic() - self._began
        if not self._bytes and not self._total:
            figures = f", {self._token_figures()}" if self._tokens else ""
            return f"{self._stage}: {tqdm.format_interval(seconds)} so far{figures}"
        line = tqdm.format_meter(
            self._bytes,
            self._total,
            seconds,
            ncols=0,  # the figures without a bar
            prefix=self._stage,
            unit=self._unit,
            unit_scale=True,
            postfix=self._token_figures(),
        )
        return str(line)

    def _token_figures(self) -> str:
        if not self._tokens:
            return ""
        seconds = max(time.monotonic() - self._began, 1e-3)
        return f"{self._tokens:,} tokens, {self._tokens / seconds:,.0f} tokens/s"
