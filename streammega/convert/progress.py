"""How a conversion tells how far it is: by calls of a function that the caller gave."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""(bytes, tokens) of what was just done: bytes of the inputs that were read, or of the tokens that
were copied where inputs hold tokens already.
"""


def no_progress(size: int, tokens: int) -> None:
    """Tells nobody."""
