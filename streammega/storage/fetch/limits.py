"""How much may be in flight, and what changes that.

Values without a clock or a lock: `fetcher.py` tells them what happened.

Limits       how many requests and bytes may be in flight now, and what these numbers become after
             answers and refusals
Pace         how far apart requests are sent, where a server refuses nearly all of them
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

Below `NO_QUEUEING` they do not; in between nobody knows, and nothing changes.
"""
NO_QUEUEING = QUEUEING / 2
SHRINK = 0.8
"""What is left of the limit where answers queue: no halving, as nobody refused anything."""
GROW = 1.25
"""What the limit becomes where answers do not queue: back up in as many looks as it went down."""
GROW_BY = 1.0
"""And so many more: a limit of a few requests would take many looks to be a useful one again."""
LEAST_QUICKEST = 1e-4
"""Seconds. Quicker answers come from memory; multiples of their time say nothing of a queue."""
LEAST_REQUESTS = 192
"""Queueing takes the limit down to so many: many small reads are what object stores are good at."""
LEAST_BYTES = 8 << 20
"""Or to fewer that are so many bytes together.

More than a cache of a processor holds only waits in socket buffers.
"""
FEWEST = 8
"""And to no fewer than so many, however large they are."""
FIRST_BYTES = LEAST_BYTES
"""May be in flight at first, and twice as many with every look that finds no queue: where storage
is near, more would only fill socket buffers, and where it is far, a few round trips reach all."""
SHARES = 4
"""A thread waits for room for at most this part of what may be in flight: several have work."""
REFUSED_TOGETHER = 0.25
"""Seconds within which refusals are one event.

What was in flight together is refused together, and halves the limit once.
"""

REFUSED_IN_A_ROW = 16
"""Refusals without an answer between them: fewer in flight are no help against a server that counts
requests by the second.
"""
FIRST_INTERVAL = 0.005
"""Seconds from one request to the next, when they are counted: 200 a second."""
LONGEST_INTERVAL = 0.5
"""Seconds. An outage makes it as long, and its end should be noticed soon."""
SHORTEST_INTERVAL = 0.001
"""Seconds. Below it the server sets no pace."""
SLOWER = 1.3
"""What the interval becomes times after a refusal."""
FASTER = 0.99
"""What it becomes times after the first answer in a row; after the n-th, the n-th power: soon all
of it where the server has recovered.
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


@dataclass(frozen=True, slots=True)
class Limits:
    """How many requests and bytes may be in flight.

    A change is a new value; `requests` never exceeds `most_requests`.

    | what happened                | `requests` becomes                                            |
    |------------------------------|---------------------------------------------------------------|
    | a refusal (429, 503)         | half, at least 1; once for all that were refused together     |
    | an answer                    | a little more: one more after as many answers as it allows    |
    | a look: answers queue        | `SHRINK` of it, not below the least for their size; where it  |
    |                              | is below that already, it stays                               |
    | a look: answers do not queue | `GROW` of it, and `GROW_BY`; and `bytes` are doubled          |
    """

    most_requests: float
    most_bytes: int
    requests: float
    """How many may be in flight now; a fraction, so that it can grow by less than one."""
    bytes: int
    """How many bytes may be in flight now; they only grow."""
    halved_at: float = -math.inf
    """When a refusal halved it last, in seconds of the caller's clock."""

    @classmethod
    def of(cls, config: StorageConfig) -> Limits:
        """Those that a config asks for, with all of its requests allowed at first, and a few of its
        bytes.
        """
        most = float(config.max_requests)
        return cls(most, config.in_flight_bytes, most, min(FIRST_BYTES, config.in_flight_bytes))

    def admit(self, requests: int, in_flight_bytes: int, size: int) -> bool:
        """Whether a request of `size` bytes may be sent beside so many, of so many bytes."""
        if requests >= self.requests:
            return False
        # One that is larger than the limit goes alone: it would never be sent else.
        if requests == 0:
            return True
        return in_flight_bytes + size <= self.bytes

    def share(self, size: int) -> int:
        """Requests of `size` bytes, at least one, that a thread may wait for room for."""
        of_requests = int(self.requests) // SHARES
        of_bytes = self.bytes // max(1, size) // SHARES
        return max(1, min(of_requests, of_bytes))

    def after_answers(self, count: int) -> Limits:
        """What they become when so many requests were answered.

        As many answers as fit into the limit raise it by one.
        """
        # As nearly always: this is asked for every answer.
        if self.requests >= self.most_requests:
            return self
        return self._with_requests(self.requests + count / self.requests)

    def after_look(self, queueing: float, size: int) -> Limits:
        """What they become when requests of `size` bytes take `queueing` times as long as the
        quickest did.

        Where answers queue behind each other, fewer in flight do as well and cost less.
        """
        if queueing > QUEUEING:
            fewer = max(_least_requests(size), self.requests * SHRINK)
            # Below the least already, by refusals: answers that queue are no reason to send more.
            return self._with_requests(min(self.requests, fewer))
        if queueing < NO_QUEUEING:
            more = self._with_requests(self.requests * GROW + GROW_BY)
            return replace(more, bytes=min(self.most_bytes, 2 * self.bytes))
        return self

    def after_refusal(self, now: float) -> Limits:
        """What they become when storage refused a request for want of capacity.

        `now`: seconds of any clock, the same one for all refusals.
        """
        if now - self.halved_at <= REFUSED_TOGETHER:
            return self
        half = self.requests / 2
        return replace(self, requests=max(1.0, half), halved_at=now)

    def _with_requests(self, requests: float) -> Limits:
        return replace(self, requests=min(self.most_requests, requests))


@dataclass(frozen=True, slots=True)
class Pace:
    """How far apart requests are sent. A change is a new value.

    | what happened                               | `interval` becomes                             |
    |---------------------------------------------|------------------------------------------------|
    | refusals in a row, `REFUSED_IN_A_ROW`       | `FIRST_INTERVAL`, from 0                       |
    | a refusal of what was sent at this pace     | `SLOWER` times as long                         |
    | the n-th answer in a row                    | `FASTER`**n times as long; 0 when it is short  |
    """

    interval: float = 0.0
    """Seconds; 0: as many go out as limits allow."""
    refused: int = 0
    """Refusals in a row."""
    answered: int = 0
    """Answers in a row."""
    changed_at: float = -math.inf
    """When a refusal made it longer: what was sent before tells nothing of it."""

    def after_refusal(self, sent_at: float, now: float) -> Pace:
        """What it becomes when a request that was sent at `sent_at` was refused."""
        if sent_at < self.changed_at:
            return self
        refused = self.refused + 1
        if not self.interval and refused < REFUSED_IN_A_ROW:
            return replace(self, refused=refused, answered=0)
        longer = max(FIRST_INTERVAL, self.interval * SLOWER)
        return Pace(interval=min(longer, LONGEST_INTERVAL), refused=refused, changed_at=now)

    def after_answer(self) -> Pace:
        """What it becomes when a request was answered."""
        if not self.interval:
            # as nearly always: this is asked for every answer
            return replace(self, refused=0) if self.refused else self
        answered = self.answered + 1
        shorter = self.interval * FASTER**answered
        if shorter < SHORTEST_INTERVAL:
            shorter = 0.0
        return replace(self, interval=shorter, refused=0, answered=answered)


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

    def queueing(self, size_class: int) -> float:
        """How many times as long as the quickest the latest answers of this class took, by their
        median.

        Of the latest look alone: what was slow before that may have passed.
        """
        latest = list(self._recent[size_class])[-ADAPT_EVERY:]
        quickest = max(self._quickest[size_class], LEAST_QUICKEST)
        return statistics.median(latest) / quickest

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


def _least_requests(size: int) -> int:
    """As many of `size` bytes as are `LEAST_BYTES`, within `FEWEST` and `LEAST_REQUESTS`."""
    of_size = LEAST_BYTES // max(1, size)
    return min(LEAST_REQUESTS, max(FEWEST, of_size))


def _straggling_after(recent: deque[float]) -> float:
    """Seconds; infinite as long as there are too few answers to compare with."""
    if len(recent) < HEDGE_AFTER:
        return math.inf
    ordered = sorted(recent)
    nearly_slowest = ordered[int(len(ordered) * NEARLY_ALL)]
    median = ordered[len(ordered) // 2]
    longest = min(BEYOND_SLOWEST * nearly_slowest, BEYOND_MEDIAN * median)
    return max(HEDGE_FLOOR, longest)
