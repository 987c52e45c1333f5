"""Python's garbage collector, kept from looking through all that was imported, again and again."""

from __future__ import annotations

import gc


def take_as_old() -> None:
    """Have the collector take all objects there are for old ones, without a look at them.

    It looks through all objects when many young ones were made since it did so last. While torch is
    in memory that takes a tenth of a second, and importing numba makes so many that it does it
    twice before the first batch. What is imported stays: nothing would be found.
    """
    if gc.get_freeze_count():
        return  # somebody keeps objects out of its sight, and thawing would undo that
    gc.freeze()
    gc.unfreeze()
