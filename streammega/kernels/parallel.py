"""How many threads a nogil kernel may be run on."""

from __future__ import annotations

import os


def num_threads() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # not on Linux
