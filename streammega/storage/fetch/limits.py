"""How much may be in flight, and what changes that. Values without a clock or a lock: `fetcher.py`
tells them what happened.

Limits       how many requests and bytes may be in flight now, and what these numbers become after answers and refusals
Latencies    how long answers took, by size: what tells queueing, stragglers and near storage apart
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace

from streammega.config import StorageConfig

ADAPT_EVERY = 64
"""Requests from one look at how long answers take to the next: a median of fewer says little."""
QUEUEING = 5.0
"""Answers that take so many times as long as the quickest ones queue behind each other.

Below half of it they do not.
"""
SHRINK = 0.8
"""What is left of the limit where answers queue: less than a halving, as nobody
refused anything.
"""
GROW = 1.25
"""What the limit becomes where answers do not queue, and one more: back up in as many looks as it
went down.
"""
LEAST_QUICKEST = 1e-4
"""Seconds. Quicker answers come from memory; multiples of their time say nothing of a queue."""
LEAST_REQUESTS = 192
"""Queueing takes the limit down to so many: many small reads are what object stores are good at."""
LEAST_BYTES = 8 << 20
"""Or to fewer that are so many bytes together: more than a cache of a processor holds only waits in
socket buffers.
"""
FEWEST = 8
"""And to no fewer than so many, however large they are."""
REFUSED_TOGETHER = 0.25
"""Seconds within which refusals are one event: what was in flight together is refused together, and
halves the limit once.
"""

JOB_READS = 8
"""Reads that one thread sends together: every return from the transport waits for the GIL."""
NEAR_JOB_READS = 24
"""As many where storage is near: the round trip is less than the work of a thread."""
NEAR = 0.004
"""Seconds. Storage whose quickest answers take less is near."""
JOB_BYTES = 2 << 20
"""Bytes of reads that are sent together: larger ones keep a thread busy by themselves."""

HEDGE_SHARE = 0.05
"""At most this share of reads is sent twice: where all are slow, second requests
make them slower.
"""
FIRST_HEDGES = 4
"""So many are sent twice whatever the share: a run of few requests has stragglers too."""
HEDGE_AFTER = 32
"""Answers of a size before one of that size can be called slow."""
HEDGE_FLOOR = 0.01
"""Seconds before which nothing is sent twice: a second request would hardly be the first to end."""
BEYOND_SLOWEST = 1.5
"""A straggler takes so many times as long as the 99th percentile,"""
BEYOND_MEDIAN = 6.0
"""or so many times as long as the median, if that is less: where stragglers are many they make up
that percentile.
"""
LATENCIES = 256
"""Answers of a size that are remembered: storage changes within a run, and what it was an hour ago
misleads.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many requests and bytes may be in flight. A change is a new value; `requests` never
    exceeds `most_requests`.

    | what happened                | `requests` becomes                                                       |
    |------------------------------|--------------------------------------------------------------------------|
    | a refusal (429, 503)         | half, at least 1; once for all that were refused together                |
    | an answer                    | a little more: one more after as many answers as it allows               |
    | a look: answers queue        | `SHRINK` of it, not below the least for their size; below that it stays  |
    | a look: answers do not queue | `GROW` of it, and one                                                    |
    """

    most_requests: float
    most_bytes: int
    requests: float
    """How many may be in flight now; a fraction, so that it can grow by less than one."""
    halved_at: float = -math.inf
    """When a refusal halved it last, in seconds of the caller's clock."""

    @classmethod
    def of(cls, config: StorageConfig) -> Limits:
        """Those that a config asks for, with all of its requests allowed at first."""
        most = float(config.max_requests)
        return cls(most, config.in_flight_bytes, most)

    def admit(self, requests: int, in_flight_bytes: int, size: int) -> bool:
        """Whether a request of `size` bytes may be sent beside so many, of so many bytes."""
        if requests >= self.requests:
            return False
        if requests == 0:
            return True  # one that is larger than the limit would never be sent else
        return in_flight_bytes + size <= self.most_bytes

    def after_answers(self, count: int) -> Limits:
        """What they become when so many requests were answered: as many answers as fit into the
        limit raise it by one.
        """
        if self.requests >= self.most_requests:
            return self  # as nearly always; this is asked for every answer
        return self._with_requests(self.requests + count / self.requests)

    def after_look(self, queueing: float, size: int) -> Limits:
        """What they become when requests of `size` bytes take `queueing` times as long as the
        quickest did.

        Where answers queue behind each other, fewer in flight do as well and cost less.
        """
        if queueing > QUEUEING:
            least = min(LEAST_REQUESTS, max(FEWEST, LEAST_BYTES // max(1, size)))
            # Below the least already, by refusals: answers that queue are no reason to send more.
            return self._with_requests(min(self.requests, max(least, self.requests * SHRINK)))
        if queueing < QUEUEING / 2:
            return self._with_requests(self.requests * GROW + 1)
        return self

    def after_refusal(self, now: float) -> Limits:
        """What they become when storage refused a request for want of capacity, `now` in seconds of
        any clock.
        """
        if now - self.halved_at <= REFUSED_TOGETHER:
            return self
        return replace(self, requests=max(1.0, self.requests / 2), halved_at=now)

    def _with_requests(self, requests: float) -> Limits:
        return replace(self, requests=min(self.most_requests, requests))


class Latencies:
    """Seconds that answers took, of each class of sizes. Its user holds a lock."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._quickest: dict[int, float] = {}

    def note(self, size_class: int, seconds: float) -> None:
        """An answer came after so many seconds."""
        recent = self._recent.get(size_class)
        if recent is None:
            recent = self._recent[size_class] = deque(maxlen=LATENCIES)
        recent.append(seconds)
        if seconds < self._quickest.get(size_class, math.inf):
            self._quickest[size_class] = seconds

    def queueing(self, size_class: int) -> float:
        """How many times as long as the quickest the latest answers of this class took, by their
        median.
        """
        latest = list(self._recent[size_class])[-ADAPT_EVERY:]
        return statistics.median(latest) / max(self._quickest[size_class], LEAST_QUICKEST)

    def most_together(self, size_class: int) -> int:
        """How many small reads one thread sends together: more where storage is near; it is far
        until an answer came.
        """
        if self._quickest.get(size_class, math.inf) < NEAR:
            return NEAR_JOB_READS
        return JOB_READS

    def straggling_after(self) -> dict[int, float]:
        """Seconds after which a read is a straggler, of each class of which an answer came."""
        return {
            size_class: _straggling_after(recent) for size_class, recent in self._recent.items()
        }


def size_class_of(size: int) -> int:
    """Sizes of one class differ by less than a factor of two: their answers should take about as
    long.
    """
    return size.bit_length()


def may_hedge(hedges: int, requests: int) -> bool:
    """Whether one more read may be sent twice, after so many of so many requests."""
    return hedges < FIRST_HEDGES + HEDGE_SHARE * requests


def _straggling_after(recent: deque[float]) -> float:
    if len(recent) < HEDGE_AFTER:
        return math.inf
    ordered = sorted(recent)
    nearly_slowest = ordered[int(len(ordered) * 0.99)]
    median = ordered[len(ordered) // 2]
    return max(HEDGE_FLOOR, min(BEYOND_SLOWEST * nearly_slowest, BEYOND_MEDIAN * median))
