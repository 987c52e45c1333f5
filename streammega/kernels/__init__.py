"""numba kernels: arrays in, arrays out. Compiled once per machine (cached on disk), without the
GIL.

No kernel uses numba's own threads: their pools survive neither a fork nor calls from several
threads. What runs in parallel runs independent chunks on Python threads.
"""

from __future__ import annotations

import os


def num_threads() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # not on Linux
