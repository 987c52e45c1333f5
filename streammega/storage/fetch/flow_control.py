"""How many requests and bytes may be in flight, by answers and refusals.

1. Bytes: at most NEAR_BYTES at first, and where storage is near. Where it is far, each answer allows
   some more, up to `max_in_flight_bytes`. A request that is larger goes alone.
2. Requests: at most `max_concurrent_requests`. A refusal (429, 503) halves the window, and each answer raises
   it again, as the congestion window of TCP.
3. Pace: after many refusals in a row the server counts requests per second. Requests then go one
   by one, further apart after each refusal and closer after each answer.
4. Batches: small requests of one object go out together, more of them where storage is near. They
   go out alone before the first answer, and for a while after a refusal or a straggler of far storage.

No clock and no lock: the fetcher passes the time and holds its own lock.
"""

from __future__ import annotations

import math
from collections import deque

from streammega.config import StorageConfig

REFUSED_TOGETHER = 0.25
"""Seconds within which refusals halve the window once, for requests in flight are refused together."""

REFUSED_IN_A_ROW = 16
"""Refusals without an answer between them that start the pace."""
FIRST_INTERVAL = 0.005
"""Seconds from one request to the next at first: 200 requests a second."""
MAX_INTERVAL = 0.5
"""Seconds. The interval reaches it in an outage, whose end should be noticed soon."""
MIN_INTERVAL = 0.001
"""Seconds. A shorter interval ends the pace."""
SLOW_DOWN_FACTOR = 1.3
"""Factor of the interval after a refusal."""
SPEED_UP_FACTOR = 0.99
"""Factor of the interval after an answer; its n-th power after the n-th answer in a row."""

BATCH_BYTES = 2 << 20
"""Largest batch. Larger requests keep a thread busy by themselves."""
BATCH_REQUESTS = 8
"""Requests of a batch. Every return from the transport waits for the GIL, so there should be few."""
NEAR_BATCH_REQUESTS = 24
"""Requests of a batch where storage is near: a round trip is less than the work of a thread."""
FIRST_ALONE = 32
"""Requests that go out alone before the first answer: the training loop waits for them, and a batch
takes two round trips, the second one for its last request.
"""
ALONE_AFTER_REFUSAL = 64
"""Answers after a refusal until requests go out together again: a refusal of one of a batch loses the
answers of all.
"""
ALONE_AFTER_STRAGGLER = 512
"""Answers after a straggler of far storage until requests go out together again. A batch waits for its
slowest answer: where one request in a hundred is slow, 8 % of batches of eight are.
"""
NEAR = 0.004
"""Seconds. Storage is near if its quickest answers take less."""
NEAR_BYTES = 8 << 20
"""Bytes that keep near storage busy. More would wait for their turn, in memory."""
FAR_AFTER = 64
"""Answers without a quick one after which storage is far. The first ones wait for connections."""
FAR_BYTES = 1 << 20
"""More bytes in flight after each answer of far storage."""
SHARES = 4
"""A thread waits for room for at most this part of the window, so that several have work."""

HEDGE_SHARE = 0.05
"""Further copies are at most this share of requests: where all are slow, more load makes them slower."""
FEW_LATE = 4
"""So many late requests may be sent again at any time, more only if later ones were answered."""
OVERTAKERS = 8
"""Answers to later requests after which a late one is a straggler. Where a full link or a machine
without a free core delays all requests, they end about in the order in which they were sent.
"""
MAX_COPIES = 3
"""Most copies of a request in flight. Where one request in a hundred is slow, two copies both are once in
10,000 requests: too often for a long run.
"""
FIRST_HEDGES = 4
"""Requests that may be sent twice whatever the share."""
HEDGE_AFTER = 32
"""Answers of a size that are needed before one of that size is called slow."""
HEDGE_FLOOR = 0.01
"""Seconds before which nothing is sent twice."""
SLOWEST_PERCENTILE = 0.99
BEYOND_SLOWEST = 1.5
"""A straggler takes this many times as long as the 99th percentile,"""
BEYOND_MEDIAN = 3.0
"""or this many times as long as the median, if that is less."""
LATENCIES = 256
"""Latest answers of a size that are remembered."""


class Pace:
    """The time from one request to the next, where a server counts requests per second.

    `interval` is 0 while there is no pace.
    """

    def __init__(self) -> None:
        self.interval = 0.0
        self.next_at = 0.0
        """When the next request may be sent."""
        self._refused = 0  # in a row
        self._answered = 0  # in a row
        self._slower_at = -math.inf

    def sent(self, now: float) -> None:
        """A request was sent: the next one follows after the interval."""
        if self.interval:
            self.next_at = max(now, self.next_at) + self.interval

    def refused(self, sent_at: float, now: float) -> None:
        """A request was refused. Requests that were sent before the last change are ignored."""
        if sent_at < self._slower_at:
            return
        self._refused += 1
        self._answered = 0
        if self.interval or self._refused >= REFUSED_IN_A_ROW:
            longer = max(FIRST_INTERVAL, self.interval * SLOW_DOWN_FACTOR)
            self.interval = min(longer, MAX_INTERVAL)
            self._slower_at = now

    def answered(self) -> None:
        """A request was answered."""
        self._refused = 0
        if self.interval:
            self._answered += 1
            self.interval *= SPEED_UP_FACTOR**self._answered
            if self.interval < MIN_INTERVAL:
                self.interval = 0.0
                self._answered = 0


class Latencies:
    """Seconds that the latest answers took, for each class of request sizes."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._quickest: dict[int, float] = {}

    def add(self, size_class: int, seconds: float) -> None:
        """Note the time of an answer."""
        recent = self._recent.get(size_class)
        if recent is None:
            recent = deque(maxlen=LATENCIES)
            self._recent[size_class] = recent
        recent.append(seconds)
        if seconds < self._quickest.get(size_class, math.inf):
            self._quickest[size_class] = seconds

    def is_near(self, size_class: int) -> bool:
        """Whether storage is near. Before the first answer it counts as far."""
        return self._quickest.get(size_class, math.inf) < NEAR

    def straggler_seconds(self) -> dict[int, float]:
        """Seconds after which a request is a straggler, for each class that has enough answers."""
        limits = {}
        for size_class, recent in self._recent.items():
            if len(recent) >= HEDGE_AFTER:
                ordered = sorted(recent)
                slowest = ordered[int(len(ordered) * SLOWEST_PERCENTILE)]
                median = ordered[len(ordered) // 2]
                limit = min(BEYOND_SLOWEST * slowest, BEYOND_MEDIAN * median)
                limits[size_class] = max(HEDGE_FLOOR, limit)
        return limits


class FlowControl:
    """What is in flight, and whether more requests may be sent.

    window: requests that may be in flight now; a fraction, so that it grows by less than one.
    max_bytes: bytes that may be in flight now. near_bytes: the least that they are.
    """

    def __init__(self, config: StorageConfig) -> None:
        self.window = float(config.max_concurrent_requests)
        self.near_bytes = min(config.tuning.max_in_flight_bytes, NEAR_BYTES)
        self.max_bytes = self.near_bytes
        self.requests = 0
        self.bytes = 0
        self.pace = Pace()
        self.latencies = Latencies()
        self._max_window = self.window
        self._far_bytes = config.tuning.max_in_flight_bytes
        self._sent_at = deque([-math.inf] * OVERTAKERS, OVERTAKERS)  # of what was answered last
        self._answers = 0
        self._quickest = math.inf  # seconds of an answer of the storage, whatever its size
        self._halved_at = -math.inf
        self._alone = 0  # answers until requests go out together again

    def can_send(self, size: int, now: float, count: int = 1) -> bool:
        """Whether `count` requests of `size` bytes may be sent now."""
        if self.pace.interval and now < self.pace.next_at:
            return False
        if self.requests + count > math.ceil(self.window):
            return False
        # A request that is larger than the limit goes alone.
        alone = self.requests == 0 and count == 1
        return alone or self.bytes + count * size <= self.max_bytes

    def batch_requests(self, size_class: int) -> int:
        """How many small requests may go out together."""
        is_first = not self._answers and self.requests < FIRST_ALONE
        if self.pace.interval or self._alone or is_first:
            return 1
        return NEAR_BATCH_REQUESTS if self.latencies.is_near(size_class) else BATCH_REQUESTS

    def full_batch(self, size: int, queued: int) -> int:
        """For how many requests of `size` bytes a thread waits until there is room: a whole batch,
        but at most a part of the window. With fewer it would soon need the lock again.
        """
        size = max(1, size)
        batch = min(self.batch_requests(size_class_of(size)), BATCH_BYTES // size, queued)
        window = min(int(self.window), self.max_bytes // size)
        return max(1, min(batch, window // SHARES))

    def started(self, size: int) -> None:
        """A request of `size` bytes is about to be sent."""
        self.requests += 1
        self.bytes += size

    def finished(self, size: int) -> None:
        """A request has ended, with or without an error."""
        self.requests -= 1
        self.bytes -= size

    def is_overtaken(self, sent_at: float) -> bool:
        """Whether the latest answers are all to requests that were sent later."""
        return sent_at < min(self._sent_at)

    def answered(
        self,
        size_class: int,
        count: int,
        seconds: float,
        *,
        sent_at: float = 0.0,
        is_cached: bool = False,
    ) -> None:
        """`count` requests that were sent together at `sent_at` were answered. is_cached: the answer
        may come from a cache, which does not say where the storage is.
        """
        self._sent_at.append(sent_at)
        self.latencies.add(size_class, seconds)
        if not is_cached:
            self._quickest = min(self._quickest, seconds)
        self._answers += 1
        is_far = self._quickest >= NEAR and self._answers > FAR_AFTER
        further = min(self.max_bytes + FAR_BYTES, self._far_bytes)
        self.max_bytes = further if is_far else self.near_bytes
        self.pace.answered()
        self._alone = max(0, self._alone - count)
        if self.window < self._max_window:
            self.window = min(self._max_window, self.window + count / self.window)

    def refused(self, sent_at: float, now: float) -> None:
        """The server refused a batch that was sent at `sent_at`."""
        self.pace.refused(sent_at, now)
        self._alone = max(self._alone, ALONE_AFTER_REFUSAL)
        if now - self._halved_at > REFUSED_TOGETHER:
            self.window = max(1.0, self.window / 2)
            self._halved_at = now

    def straggled(self, size_class: int) -> None:
        """A further copy of a request was answered before the first. A copy that is answered later tells
        nothing: the first had waited for a full link or for a core, and going alone takes more of both.
        """
        if not self.latencies.is_near(size_class):
            self._alone = ALONE_AFTER_STRAGGLER


def size_class_of(size: int) -> int:
    """The class of a size. Sizes of one class differ by less than a factor of two, so that their
    answers take about as long.
    """
    return size.bit_length()


def can_hedge(hedges: int, requests: int) -> bool:
    """Whether one more request may be sent twice, after `hedges` of `requests` were."""
    return hedges < FIRST_HEDGES + HEDGE_SHARE * requests
