"""How much may be in flight, and what changes that.

Values without a clock or a lock: `flight.py` tells them what happened.

Limits    how many requests and bytes may be in flight now, and what these numbers become after
          answers and refusals; the bytes by `byte_limit.py`
Pace      how far apart requests are sent, where a server refuses nearly all of them
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from streammega.config import StorageConfig
from streammega.storage.fetch.byte_limit import (
    LEAST_BYTES,
    NO_QUEUEING,
    QUEUEING,
    ByteLimit,
    Look,
)

SHRINK = 0.8
"""What is left of the limit where answers queue: no halving, as nobody refused anything."""
GROW = 1.25
"""What the limit becomes where answers do not queue: back up in as many looks as it went down."""
GROW_BY = 1.0
"""And so many more: a limit of a few requests would take many looks to be a useful one again."""
LEAST_REQUESTS = 192
"""Queueing takes the limit down to so many: many small reads are what object stores are good at.

Or to fewer that are `LEAST_BYTES` together.
"""
FEWEST = 8
"""And to no fewer than so many, however large they are."""
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

JOB_BYTES = 2 << 20
"""Bytes of reads that are sent together: larger ones keep a thread busy by themselves."""


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
    | a look: answers do not queue | `GROW` of it, and `GROW_BY`                                   |

    A look changes the bytes too, as told in `ByteLimit`.
    """

    most_requests: float
    requests: float
    """How many may be in flight now; a fraction, so that it can grow by less than one."""
    of_bytes: ByteLimit
    halved_at: float = -math.inf
    """When a refusal halved it last, in seconds of the caller's clock."""

    @classmethod
    def of(cls, config: StorageConfig) -> Limits:
        """Those that a config asks for, with all of its requests allowed at first, and a few of its
        bytes.
        """
        most = float(config.max_requests)
        return cls(most, most, ByteLimit.of(config))

    @property
    def bytes(self) -> int:
        """How many bytes may be in flight now."""
        return self.of_bytes.bytes

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

    def after_look(self, look: Look) -> Limits:
        """What they become after a look at how long answers take.

        Where answers queue behind each other, fewer in flight do as well and cost less.
        """
        looked = replace(self, of_bytes=self.of_bytes.after(look))
        if look.queueing > QUEUEING:
            fewer = max(_least_requests(look.size), self.requests * SHRINK)
            # Below the least already, by refusals: answers that queue are no reason to send more.
            return looked._with_requests(min(self.requests, fewer))
        if look.queueing < NO_QUEUEING:
            return looked._with_requests(self.requests * GROW + GROW_BY)
        return looked

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


def _least_requests(size: int) -> int:
    """As many of `size` bytes as are `LEAST_BYTES`, within `FEWEST` and `LEAST_REQUESTS`."""
    of_size = LEAST_BYTES // max(1, size)
    return min(LEAST_REQUESTS, max(FEWEST, of_size))
