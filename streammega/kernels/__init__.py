"""numba kernels: arrays in, arrays out. Compiled once per machine (cached on disk), without the
GIL.

No kernel uses numba's own threads: their pools survive neither a fork nor calls from several
threads. What runs in parallel runs independent chunks on Python threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path


def num_threads() -> int:
    """Cores this process may use, by its affinity and by the quota of its container."""
    on_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    return min(cores, cpu_quota() or cores)


@cache
def cpu_quota(
    groups_of_process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Cores whose time the control groups of this process allow, the last in part; None: no limit.

    More threads would only be stopped in turn. It is read once: tokenizers ask at every batch.
    """
    try:
        groups = os.fsdecode(groups_of_process.read_bytes()).split("\n")
    except OSError:
        return None  # not on Linux
    quotas: list[int] = []
    for group in groups:
        _, _, rest = group.partition(":")
        controllers, colon, path = rest.partition(":")
        # Version 2 names no controllers; version 1 has a tree for each.
        tree = root / "cpu" if controllers else root
        if colon and (not controllers or "cpu" in controllers.split(",")):
            quotas += _quotas_up_from(tree / path.lstrip("/"), tree)
    return min(quotas, default=None)


def _quotas_up_from(group: Path, tree: Path) -> Iterator[int]:
    """Those of a group and of all above it. In a container its own group may be the tree, and its
    path be of the host: then the groups on the way are not there.
    """
    for folder in (group, *group.parents):
        if not folder.is_relative_to(tree):
            return
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # not there, or "max"
                quota, period = map(int, " ".join((folder / n).read_text() for n in names).split())
                if quota > 0:  # version 1: -1 is no limit
                    yield -(-quota // period)
