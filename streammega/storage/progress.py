"""Reports of how far some work is, and who receives them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]
"""(bytes, tokens) of what was just done."""


class ProgressObserver:
    """Called while the work goes on, from any thread. Write a subclass. Work counts when it is done,
    not when it begins.

    Public functions take it as `progress`; None: there is no observer.
    """

    def begin(self, stage: str, total: int | None = None, unit: str = "B") -> None:
        """A stage of the work begins. total: how much it is; None: unknown. unit: what is counted:
        bytes, or things such as " files".
        """

    def advance(self, size: int, tokens: int = 0) -> None:
        """`size` of the stage's total and `tokens` tokens were just done.

        While inputs are converted these are bytes as they are stored (compressed ones are read
        compressed), later the bytes of tokens that are written.
        """

    def part(self, name: str, size: int, expected: int = 0, unit: str = "B") -> None:
        """`size` of something that the stage waits for, such as copies of index files, was just done.

        name: what it is. expected: how much more of it was found to do, besides what was expected
        before.
        """


_current: ProgressObserver | None = None
"""The observer of this process."""


@contextmanager
def observing(progress: ProgressObserver) -> Iterator[None]:
    """Report the parts of all work of this process, such as copies of indices, to an observer."""
    global _current
    before = _current
    _current = progress
    try:
        yield
    finally:
        _current = before


def observer() -> ProgressObserver | None:
    """The observer of this process; None: there is none."""
    return _current


def note_part(name: str, size: int, expected: int = 0, unit: str = "B") -> None:
    """Report to the observer of this process, if there is one. See `ProgressObserver.part`."""
    if _current is not None:
        _current.part(name, size, expected, unit)


def _end_in_child() -> None:
    """A forked child has no thread that shows anything, and may have a lock that one holds."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_end_in_child)
