"""numba's own first call, ahead of need, on a thread."""

from __future__ import annotations

import functools
import os
import threading

import numpy as np

from streammega.kernels.plan import copy_bytes

MOST_SECONDS = 10.0
"""What a fork waits for the thread: a fork while modules are imported may hold what the thread
waits for, and a child that cannot compile is better than a parent that hangs.
"""


@functools.cache
def begin() -> None:
    """Make the first call, once in a process. Whoever calls a kernel meanwhile waits for it.

    With the first kernel, whichever it is, numba imports and registers modules of its own for a
    quarter of a second. Begun when a program imports the loader, that is over when it has found its
    data.
    """
    # No daemon: what is within LLVM when Python ends could end the process by a signal.
    thread = threading.Thread(target=_call, name="numba-first-call", daemon=False)
    # A child that was forked meanwhile would find numba's lock held by a thread that it has not.
    os.register_at_fork(before=lambda: thread.join(MOST_SECONDS))
    thread.start()


def _call() -> None:
    no_bytes = np.empty(0, np.uint8)
    none = np.empty(0, np.int64)
    copy_bytes(no_bytes, none, none, none)
