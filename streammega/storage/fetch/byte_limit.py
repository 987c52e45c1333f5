"""How many bytes may be in flight: tried twice as many and half as many, and kept where it pays.

A value without a clock or a lock: `flight.py` tells it what happened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streammega.config import StorageConfig
from streammega.storage.fetch.latencies import size_class_of

QUEUEING = 5.0
"""Answers that take so many times as long as the quickest ones queue behind each other.

Below `NO_QUEUEING` they do not; in between nobody knows.
"""
NO_QUEUEING = QUEUEING / 2
LEAST_BYTES = 8 << 20
"""More than a cache of a processor holds only waits in socket buffers; fewer are few round trips
where storage is far.
"""
WORTH_DOUBLING = 1.1
"""What twice as many bytes in flight have to bring, in bytes a second: they cost memory, and what
is needed next waits behind them. Less would be seen in noise too.
"""
LOST_BY_HALVING = 0.95
"""Half as many that bring less than this share of it are too few.

With `WORTH_DOUBLING` it keeps what one trial found from being undone by the next.
"""
LOOKS = 2
"""That prove a trial: one look alone is noise on a busy machine."""
OTHERS = 8
"""Looks at reads of other sizes after which a trial ends as if it had not been: such reads may be
all that comes.
"""
MOST_REST = 64
"""Looks from one trial that failed to the next, at most: storage and network change."""


@dataclass(frozen=True, slots=True)
class Look:
    """What answers told since the look before."""

    size: int
    """Of their reads, in bytes: the time of other sizes is not compared with theirs."""
    seconds: float
    """That they took, by their median."""
    queueing: float
    """In multiples of the quickest ever."""
    in_flight_bytes: int
    """At once, at most."""

    @property
    def rate(self) -> float:
        """Bytes a second: those in flight, over the time that each of them is."""
        return self.in_flight_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Trial:
    """A change that may have been for nothing, or too much."""

    before: int
    """The limit in bytes before it."""
    look: Look
    """What was seen with that."""
    gains: tuple[float, ...] = ()
    """What looks since then have brought, in multiples of its bytes a second."""
    others: int = 0
    """Looks since then that were at other sizes."""


@dataclass(frozen=True, slots=True)
class ByteLimit:
    """How many bytes may be in flight. A change is a new value, of `after`.

    | the look                         | the limit becomes                                        |
    |----------------------------------|----------------------------------------------------------|
    | half of it was not in flight     | what it was before an unproved doubling, else it stays:  |
    |                                  | nobody needs more, and nothing is learned                |
    | `OTHERS` at other sizes          | what it was before the trial                             |
    | one of `LOOKS` after a doubling  | what it was before, if all of them brought less than     |
    |                                  | `WORTH_DOUBLING` times as many bytes a second            |
    | one of `LOOKS` after a halving   | what it was before, if any of them brought less than     |
    |                                  | `LOST_BY_HALVING` of them                                |
    | else: answers do not queue       | double, on trial                                         |
    | else                             | half, on trial, not below the least                      |

    After a trial that failed the next waits for a look, after another one for two, four and so on.
    Looks are noise as well: where they differ, more in flight is the lesser evil.
    """

    most: int
    bytes: int
    """How many may be in flight now."""
    trial: Trial | None = None
    rest: int = 0
    """Looks until the next trial."""
    next_rest: int = 1
    """Looks to rest after the next trial that fails."""

    @classmethod
    def of(cls, config: StorageConfig) -> ByteLimit:
        """That of a config, with the least allowed at first: where storage is near, more would only
        fill socket buffers, and where it is far, a few round trips reach all.
        """
        return cls(config.in_flight_bytes, min(LEAST_BYTES, config.in_flight_bytes))

    def after(self, look: Look) -> ByteLimit:
        """What it becomes after a look."""
        trial = self.trial
        if 2 * look.in_flight_bytes <= self.bytes:
            return self._idle()
        if trial is None:
            return self._tried(look)
        if size_class_of(look.size) != size_class_of(trial.look.size):
            if trial.others == OTHERS:
                return replace(self, bytes=trial.before, trial=None)
            return replace(self, trial=replace(trial, others=trial.others + 1))
        gains = (*trial.gains, look.rate / trial.look.rate)
        if self.bytes > trial.before:
            failed = len(gains) == LOOKS and max(gains) < WORTH_DOUBLING
            passed = gains[-1] >= WORTH_DOUBLING
        else:
            failed = min(gains) < LOST_BY_HALVING
            passed = len(gains) == LOOKS
        if failed:
            return self._undone()
        if not passed:
            return replace(self, trial=replace(trial, gains=gains))
        next_rest = 1 if self.bytes > trial.before else self.next_rest
        return replace(self, trial=None, rest=0, next_rest=next_rest)._tried(look)

    def _idle(self) -> ByteLimit:
        """Less is in flight than may be."""
        if self.trial is None or self.bytes < self.trial.before:
            return replace(self, trial=None)
        return replace(self, bytes=self.trial.before, trial=None)

    def _undone(self) -> ByteLimit:
        assert self.trial is not None
        return replace(
            self,
            bytes=self.trial.before,
            trial=None,
            rest=self.next_rest,
            next_rest=min(MOST_REST, 2 * self.next_rest),
        )

    def _tried(self, look: Look) -> ByteLimit:
        """Where no trial is under way: the next one begins, unless it is time to rest."""
        if self.rest:
            return replace(self, rest=self.rest - 1)
        half = max(min(LEAST_BYTES, self.most), self.bytes // 2)
        double = min(self.most, 2 * self.bytes)
        tried = double if look.queueing < NO_QUEUEING else half
        if tried == self.bytes:
            return self
        return replace(self, bytes=tried, trial=Trial(before=self.bytes, look=look))
