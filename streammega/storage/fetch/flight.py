"""What is in flight, how much more may be, and what answers tell of that.

Its user holds a lock. The numbers themselves are values (`limits.py`, `byte_limit.py`); here is
what they are told, and when.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from streammega.config import StorageConfig
from streammega.storage.fetch.byte_limit import Look
from streammega.storage.fetch.latencies import Latencies
from streammega.storage.fetch.limits import JOB_BYTES, Limits, Pace
from streammega.storage.fetch.reads import Read

LOOK_EVERY = 64
"""Answers from one look at how long they take to the next: a median of fewer says little."""
LOOK_FLIGHTS = 4
"""Or so many times the bytes that may be in flight: of reads of megabytes 64 are seconds."""


class Flight:
    """Reads in flight.

    Answers of what was sent before the last look count for stragglers alone: what a look changed
    shows in what was sent after it, and the next look would change it again for the same reason.
    """

    def __init__(self, config: StorageConfig) -> None:
        self.reads: dict[int, Read] = {}
        """By id; in the order they took off, so that hedging looks at the oldest first."""
        self.requests = 0
        self.bytes = 0
        self.limits = Limits.of(config)
        self.pace = Pace()
        self.send_at = 0.0
        """When the next request may be sent, at that pace."""
        self._latencies = Latencies()
        self._looked_at = -math.inf
        # Since then.
        self._most_bytes = 0  # at once
        self._answers = 0
        self._answered_bytes = 0
        self._seconds: dict[int, list[float]] = {}  # that jobs took, by the class of their sizes

    def may_send(self, size: int, now: float) -> bool:
        """Whether a request of `size` bytes may be sent now."""
        if self.pace.interval and now < self.send_at:
            return False
        return self.limits.admit(self.requests, self.bytes, size)

    def most_together(self, first: Read) -> int:
        """How many reads may go out together with this one."""
        if self.pace.interval:
            return 1
        return self._latencies.most_together(first.size_class)

    def has_room_for_job(self, first: Read, waiting: int, now: float) -> bool:
        """Whether as many reads may be sent now as go out together with this one, if those behind
        it are alike: a thread that took fewer would be back for the lock so much sooner.

        waiting: reads that are queued, this one too.
        """
        if not self.may_send(first.size, now):
            return False
        # Second requests, and what failed before, are sent by themselves.
        if first.copies > 0 or first.failures > 0 or self.requests == 0:
            return True
        reads = min(
            self._latencies.most_together(first.size_class),
            JOB_BYTES // max(1, first.size),
            waiting,
            self.limits.share(first.size),
        )
        others = reads - 1
        return others <= 0 or self.limits.admit(
            self.requests + others,
            self.bytes + others * first.size,
            first.size,
        )

    def sent_at_pace(self, now: float) -> None:
        """A job is about to be sent."""
        if self.pace.interval:
            self.send_at = max(now, self.send_at) + self.pace.interval

    def take_off(self, read: Read, now: float) -> None:
        """A request is about to be sent: the first of a try, or the second of a hedged read."""
        # A second request was counted when it was queued, and its read flies already.
        if read.copies == 0:
            read.copies = 1
            read.try_began = now
            self.reads[id(read)] = read
        if not read.first_began:
            read.first_began = now
        read.holding.busy += 1
        self.requests += 1
        self.bytes += read.size
        self._most_bytes = max(self._most_bytes, self.bytes)

    def end(self, read: Read) -> None:
        """A request has ended, whichever way."""
        self.requests -= 1
        self.bytes -= read.size
        read.holding.busy -= 1
        self.land(read)

    def land(self, read: Read) -> None:
        """One copy of a read fewer in flight, or queued."""
        # A read that is dropped before it took off has none to lose.
        read.copies = max(0, read.copies - 1)
        if read.copies == 0:
            self.reads.pop(id(read), None)

    def answered(self, job: list[Read], began: float, seconds: float) -> bool:
        """Note how long reads that were sent together took. Whether it is time to look."""
        first = job[0]
        self._latencies.note(first.size_class, seconds)
        self.pace = self.pace.after_answer()
        if began >= self._looked_at:
            self._answers += len(job)
            self._answered_bytes += sum(read.size for read in job)
            self._seconds.setdefault(first.size_class, []).append(seconds)
            enough_bytes = LOOK_FLIGHTS * self.limits.bytes
            if self._answers >= LOOK_EVERY or self._answered_bytes >= enough_bytes:
                return True
        self.limits = self.limits.after_answers(len(job))
        return False

    def look(self, job: list[Read], now: float) -> None:
        """Adapt how much may be in flight to the answers since the last look.

        job: the one that was answered last.
        """
        first = job[0]
        seconds = statistics.median(self._seconds[first.size_class])
        look = Look(
            size=first.size,
            seconds=seconds,
            queueing=self._latencies.queueing(first.size_class, seconds),
            # What was in flight when the limit fell is more for a moment.
            in_flight_bytes=min(self._most_bytes, self.limits.bytes),
        )
        self.limits = self.limits.after_look(look)
        self._looked_at = now
        self._most_bytes = self.bytes
        self._answers = 0
        self._answered_bytes = 0
        self._seconds.clear()

    def refused(self, began: float, now: float) -> None:
        """The server refused a job that was sent at `began`.

        Once for all of the job: nobody knows how many of them were refused.
        """
        self.pace = self.pace.after_refusal(began, now)

    def stragglers(self, now: float) -> Iterator[Read]:
        """Reads that take longer than nearly all of their size did, and were sent once."""
        straggling_after = self._latencies.straggling_after()
        for read in self.reads.values():
            longest = straggling_after.get(read.size_class, math.inf)
            if read.copies == 1 and now - read.try_began > longest:
                yield read
