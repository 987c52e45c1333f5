"""How far a command is, on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType

from tqdm import tqdm

from streammega.cli.render import print_text
from streammega.storage.progress import ProgressObserver, observing
from streammega.storage.thread_pool import CALLS

LINE_EVERY = 30.0
"""Seconds between two lines, if stderr is not a terminal."""
REDRAW_EVERY = 1.0
"""Seconds between two drawings of a bar, whether or not anything was done: its clock goes on."""

SCALED_FROM = 10_000
"""Things from which on numbers are written as 12.5k."""


@dataclass
class Part:
    """How far something is that a stage waits for."""

    unit: str
    done: int = 0
    expected: int = 0
    began: float = field(default_factory=time.monotonic)


def _meter(
    name: str, done: int, total: int | None, seconds: float, unit: str, postfix: str = ""
) -> str:
    """The figures of a bar, without the bar."""
    line = tqdm.format_meter(
        done,
        total,
        seconds,
        ncols=0,
        prefix=name,
        unit=unit,
        unit_scale=_is_scaled(total, unit),
        postfix=postfix,
    )
    return str(line)


def _is_scaled(total: int | None, unit: str) -> bool:
    """Whether numbers are written as 1.25M. 2 files are not 2.00 files."""
    return unit == "B" or total is None or total >= SCALED_FROM


class ProgressDisplay(ProgressObserver):
    """Shows what is done, its speed, and the time left where the total is known.

    Use it as a context manager, around the work: it shows the parts of all work within. It
    shows that it waits, too. line_every: seconds between two lines; None: LINE_EVERY.
    """

    def __init__(
        self,
        stage: str,
        total: int | None = None,
        unit: str = "B",
        *,
        line_every: float | None = None,
    ) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._interval = REDRAW_EVERY if self._on_terminal else line_every or LINE_EVERY
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show_now_and_then, daemon=True)
        self._lock = threading.Lock()
        self._bar: tqdm | None = None
        self._within = ExitStack()
        self.begin(stage, total, unit)

    def begin(self, stage: str, total: int | None = None, unit: str = "B") -> None:
        """As of ProgressObserver."""
        with self._lock:
            self._stage = stage
            self._unit = unit
            self._total = total
            self._done = 0
            self._tokens = 0
            self._parts: dict[str, Part] = {}
            self._began = time.monotonic()
            if self._on_terminal:
                self._close_bar()
                scaled = _is_scaled(total, unit)
                self._bar = tqdm(unit=unit, unit_scale=scaled, desc=stage, total=total, leave=False)

    def advance(self, size: int, tokens: int = 0) -> None:
        """As of ProgressObserver."""
        with self._lock:
            self._done += size
            self._tokens += tokens
            if self._bar is not None:
                self._bar.set_postfix_str(self._postfix(), refresh=False)
                self._bar.update(size)

    def part(self, name: str, size: int, expected: int = 0, unit: str = "B") -> None:
        """As of ProgressObserver."""
        with self._lock:
            part = self._parts.setdefault(name, Part(unit))
            part.done += size
            part.expected += expected

    def __enter__(self) -> ProgressDisplay:
        self._within.enter_context(observing(self))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._within.close()
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
                    self._bar.set_postfix_str(self._postfix(), refresh=False)
                    self._bar.refresh()
                elif not self._on_terminal:
                    print_text(self._line(), to_stderr=True)

    def _line(self) -> str:
        seconds = time.monotonic() - self._began
        postfix = self._postfix()
        if not self._done and not self._total:
            figures = f", {postfix}" if postfix else ""
            return f"{self._stage}: {tqdm.format_interval(seconds)} so far{figures}"
        return _meter(self._stage, self._done, self._total, seconds, self._unit, postfix)

    def _postfix(self) -> str:
        """The figures of tokens, and of parts that are not done or have no known end. Steps are left
        out where the stage counts its own.
        """
        figures = []
        if self._tokens:
            seconds = max(time.monotonic() - self._began, 1e-3)
            figures.append(f"{self._tokens:,} tokens, {self._tokens / seconds:,.0f} tokens/s")
        for name, part in self._parts.items():
            is_shown = part.done < part.expected or not part.expected
            if is_shown and not (name == CALLS and self._total):
                seconds = time.monotonic() - part.began
                figures.append(_meter(name, part.done, part.expected or None, seconds, part.unit))
        return ", ".join(figures)
