"""How a conversion or a verification tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""(bytes, tokens) of what was just done."""


class ProgressObserver:
    """Is called as the work goes on, by any thread; make a subclass of it."""

    def begin(self, stage: str, total: int | None) -> None:
        """A stage of the work begins, of so many bytes; None: nobody knows how many."""

    def advance(self, size: int, tokens: int = 0) -> None:
        """So many bytes and tokens of the stage were just done.

        While inputs are converted these are bytes as they are stored (compressed ones are read
        compressed), later the bytes of tokens that are written.
        """
