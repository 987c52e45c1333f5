"""Python's garbage collector, kept from looking through all that was imported, again and again."""

from __future__ import annotations

import atexit
import functools
import gc

_FROZEN_BY_OTHERS: list[bool] = []
"""Not empty once somebody was seen to have frozen objects."""

OUT_OF_SIGHT_ANYWAY = 4096
"""Objects of which nobody needs to have frozen any: Python 3.12 puts those that never end there, a few
hundred, whenever it looks through all. Whoever freezes a program freezes more than twice as many.
"""


def take_as_old() -> None:
    """Have the collector take all objects there are for old ones, without a look at them.

    It looks through all objects when many young ones were made since it did so last. While torch is
    in memory that takes a tenth of a second, and importing numba makes so many that it does it
    twice before the first batch. What is imported stays: nothing would be found.
    """
    # Somebody keeps objects out of its sight, and thawing would undo that.
    if _FROZEN_BY_OTHERS or gc.get_freeze_count() > OUT_OF_SIGHT_ANYWAY:
        # Noted, since counting them looks at each: of half a million it takes 40 ms, at every
        # dataset that is opened.
        if not _FROZEN_BY_OTHERS:
            _FROZEN_BY_OTHERS.append(True)
        return
    gc.freeze()
    gc.unfreeze()


@functools.cache
def end_without_a_look() -> None:
    """Have this process end without a look at all that was imported, as Python does twice.

    Of torch and numba that takes more than half a second, for which whoever waits for a worker
    process waits. For processes that are ours alone: what is in a cycle by then, and no young
    object, is left to the system, whatever would be called when it is collected.
    """
    atexit.register(_put_out_of_sight)


def _put_out_of_sight() -> None:
    gc.collect(1)  # of what was made lately something may have to be closed
    gc.freeze()
