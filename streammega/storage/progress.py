"""The progress of a conversion or a verification."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""(bytes, tokens) of what was just done."""


class ProgressObserver:
    """Called while the work goes on, from any thread. Write a subclass."""

    def begin(self, stage: str, total: int | None) -> None:
        """A stage of the work begins. total: its bytes; None: unknown."""

    def advance(self, size: int, tokens: int = 0) -> None:
        """`size` bytes and `tokens` tokens of the stage were just done.

        While inputs are converted these are bytes as they are stored (compressed ones are read
        compressed), later the bytes of tokens that are written.
        """
