"""How long answers took, by size: what tells queueing, stragglers and near storage apart.

Without a clock: `flight.py` tells it what happened.
"""

from __future__ import annotations

import math
from collections import deque

LEAST_QUICKEST = 1e-4
"""Seconds. Quicker answers come from memory; multiples of their time say nothing of a queue."""
JOB_READS = 8
"""Reads that one thread sends together: every return from the transport waits for the GIL."""
NEAR_JOB_READS = 24
"""As many where storage is near: the round trip is less than the work of a thread."""
NEAR = 0.004
"""Seconds. Storage whose quickest answers take less is near."""
HEDGE_SHARE = 0.05
"""At most this share of reads is sent twice: where all are slow, it makes them slower."""
FIRST_HEDGES = 4
"""So many are sent twice whatever the share: a run of few requests has stragglers too."""
HEDGE_AFTER = 32
"""Answers of a size before one of that size can be called slow."""
HEDGE_FLOOR = 0.01
"""Seconds before which nothing is sent twice: a second request would hardly be the first to end."""
NEARLY_ALL = 0.99
BEYOND_SLOWEST = 1.5
"""A straggler takes so many times as long as the 99th percentile,"""
BEYOND_MEDIAN = 6.0
"""or so many times as long as the median, if that is less.

Where stragglers are many, they make up that percentile.
"""
LATENCIES = 256
"""Answers of a size that are remembered.

Storage changes within a run, and what it was an hour ago misleads.
"""


class Latencies:
    """Seconds that answers took, of each class of sizes. Its user holds a lock."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._quickest: dict[int, float] = {}

    def note(self, size_class: int, seconds: float) -> None:
        """An answer came after so many seconds."""
        recent = self._recent.get(size_class)
        if recent is None:
            recent = deque(maxlen=LATENCIES)
            self._recent[size_class] = recent
        recent.append(seconds)
        if seconds < self._quickest.get(size_class, math.inf):
            self._quickest[size_class] = seconds

    def queueing(self, size_class: int, seconds: float) -> float:
        """How many times as long as the quickest answer of this class so many seconds are."""
        quickest = max(self._quickest[size_class], LEAST_QUICKEST)
        return seconds / quickest

    def most_together(self, size_class: int) -> int:
        """How many small reads one thread sends together: more where storage is near.

        It is far until an answer came.
        """
        quickest = self._quickest.get(size_class, math.inf)
        return NEAR_JOB_READS if quickest < NEAR else JOB_READS

    def straggling_after(self) -> dict[int, float]:
        """Seconds after which a read is a straggler, of each class of which an answer came."""
        seconds = {}
        for size_class, recent in self._recent.items():
            seconds[size_class] = _straggling_after(recent)
        return seconds


def size_class_of(size: int) -> int:
    """The class of a size in bytes.

    Sizes of one class differ by less than a factor of two: their answers should take about as long.
    """
    return size.bit_length()


def may_hedge(hedges: int, requests: int) -> bool:
    """Whether one more read may be sent twice, after so many of so many requests."""
    return hedges < FIRST_HEDGES + HEDGE_SHARE * requests


def _straggling_after(recent: deque[float]) -> float:
    """Seconds; infinite as long as there are too few answers to compare with."""
    if len(recent) < HEDGE_AFTER:
        return math.inf
    ordered = sorted(recent)
    nearly_slowest = ordered[int(len(ordered) * NEARLY_ALL)]
    median = ordered[len(ordered) // 2]
    longest = min(BEYOND_SLOWEST * nearly_slowest, BEYOND_MEDIAN * median)
    return max(HEDGE_FLOOR, longest)
