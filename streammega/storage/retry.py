"""The one retry policy: which failures are tried again, for how long, and after which pause.

An endpoint that never answered is mistyped rather than down, and is not waited for as long.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from streammega.config import StorageConfig
from streammega.errors import ShortReadError, StorageError
from streammega.storage.fork_lock import process_lock
from streammega.storage.thread_pool import pause as interruptible_pause
from streammega.storage.warn_once import warn_once

log = logging.getLogger(__name__)

Result = TypeVar("Result")
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 10.0
"""Seconds of the longest pause after the first failure, and after any.

Longer pauses spare an overloaded endpoint little, and a run that waits would notice its recovery
late.
"""
SHORTEST_PAUSE = FIRST_PAUSE / 2
"""Seconds. With less than this left, the deadline counts as reached."""
MOST_DOUBLINGS = 16
"""Of the first pause: far past the longest one, far below what a float holds."""
SHORT_READS = 6
"""Times a body of another length is tried again.

Connections cut bodies now and then, but a truncated object stays truncated.
"""
WARN_AFTER_S = 3.0
"""Seconds of failures before the first warning. Short outages are not reported."""
WARN_EVERY_S = 30.0
"""Seconds between two warnings of this process: an outage fails hundreds of reads at once."""


class Endpoint:
    """One server, as `storage_options` name it."""

    def __init__(self) -> None:
        self.answered = False
        """Whether it ever did, whatever it said, in this process or its parent."""


_endpoints: dict[tuple[str, str, bytes], Endpoint] = {}
_lock = process_lock()


def endpoint_of(scheme: str, root: str, options: Mapping[str, Any]) -> Endpoint:
    """The endpoint that serves a bucket.

    All buckets under the same options have the same one, and all URLs of one http host. All stores
    of this process share it: a run may write to a new bucket after days.
    """
    host = root if scheme in ("http", "https") else ""
    # A digest tells options apart without keeping their secrets.
    spelled = repr(sorted(options.items(), key=str))
    digest = hashlib.blake2b(spelled.encode(), digest_size=16).digest()
    with _lock:
        return _endpoints.setdefault((scheme, host, digest), Endpoint())


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Capped exponential backoff with jitter, until something has failed for `deadline` seconds.

    `retries`: at most so many times, whatever the deadline; None: the deadline alone counts.
    `endpoint`: whose answers are noted; what fails for want of one, before there was any, is given
    up after `first_answer` seconds. None: it has answered.
    """

    deadline: float
    retries: int | None = None
    endpoint: Endpoint | None = None
    first_answer: float = math.inf

    @classmethod
    def of(cls, config: StorageConfig, endpoint: Endpoint | None = None) -> RetryPolicy:
        """The policy that a config asks for."""
        return cls(
            retries=config.retries,
            deadline=config.give_up_after,
            endpoint=endpoint,
            first_answer=config.first_answer_within if endpoint else math.inf,
        )

    @property
    def has_answered(self) -> bool:
        """Whether the endpoint ever did."""
        return self.endpoint is None or self.endpoint.answered

    def inherit(self, answered: bool) -> None:
        """Take over what another process knew of the endpoint."""
        if answered:
            self._note_answer()

    def pause(self, error: BaseException, attempt: int, elapsed: float) -> float | None:
        """Seconds to wait before trying again after the `attempt`-th failure (from 1).

        None: give up. `elapsed`: seconds since the first try began. What waiting cannot mend (no
        such object, no access, a changed object) is given up at once.
        """
        if not isinstance(error, StorageError) or not error.transient:
            return None
        if attempt > self._most_retries(error):
            return None
        left = self._deadline_of(error) - elapsed
        if left < SHORTEST_PAUSE:
            return None
        longest = longest_pause(attempt)
        # Drawn, so that ranks that failed together do not return together.
        pause = random.uniform(longest / 2, longest)
        # The last try is at the deadline, as promised, whatever the pauses were.
        if left - pause < SHORTEST_PAUSE:
            return left
        return pause

    def _deadline_of(self, error: BaseException) -> float:
        if self._never_answered(error):
            return min(self.deadline, self.first_answer)
        return self.deadline

    def _never_answered(self, error: BaseException) -> bool:
        """Whether this is one more sign that nothing is there."""
        return isinstance(error, StorageError) and error.silent and not self.has_answered

    def _most_retries(self, error: StorageError) -> float:
        if self.retries is not None:
            return self.retries
        if isinstance(error, ShortReadError):
            return SHORT_READS
        return math.inf

    def call(self, attempt: Callable[[], Result], stop: threading.Event | None = None) -> Result:
        """`attempt()` until it succeeds or is given up; then its last error is raised.

        A pause ends at once, by `thread_pool.Cancelled`, when `stop` is set or nobody waits for this
        thread's work any more.
        """
        began = time.monotonic()
        failures = 0
        while True:
            try:
                result = attempt()
                self._note_answer()
                return result
            except StorageError as error:
                # A refusal is an answer, too: somebody is there.
                if not error.silent:
                    self._note_answer()
                failures += 1
                elapsed = time.monotonic() - began
                pause = self.pause(error, failures, elapsed)
                if pause is None:
                    raise self._ended(error, failures, elapsed) from None
                self.warn(error, elapsed)
            interruptible_pause(pause, stop)

    def _note_answer(self) -> None:
        if self.endpoint is not None:
            self.endpoint.answered = True

    def _ended(self, error: StorageError, failures: int, elapsed: float) -> StorageError:
        error = retries_exhausted(error, failures, elapsed)
        if self._never_answered(error) and self.first_answer < self.deadline:
            _append(error, "; this endpoint never answered (first_answer_within)")
        return error

    def warn(self, error: BaseException, elapsed: float) -> None:
        """Warn now and then that requests fail: since when, until when, and why."""
        if elapsed < WARN_AFTER_S:
            return
        deadline = self._deadline_of(error)
        setting = "give_up_after" if deadline == self.deadline else "first_answer_within"
        until = f"{deadline:.0f} s ({setting})"
        if self.retries is not None:
            until += f" or {self.retries} retries"
        warn_once(
            log,
            "outage",
            "storage requests have failed for %.0f s; retrying for up to %s: %s",
            elapsed,
            until,
            error,
            every=WARN_EVERY_S,
        )


TRY_ONCE = RetryPolicy(deadline=0.0, retries=0)
"""For clients whose users try again by themselves."""


def longest_pause(attempt: int) -> float:
    """Seconds of the longest pause after the `attempt`-th failure (from 1)."""
    doublings = min(attempt - 1, MOST_DOUBLINGS)
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**doublings)


def retries_exhausted(error: StorageError, failures: int, elapsed: float) -> StorageError:
    """The error, saying how often it was tried, if trying again might have helped."""
    if error.transient:
        tries = "1 try" if failures == 1 else f"{failures} tries"
        _append(error, f" [given up after {tries} in {elapsed:.1f} s]")
    return error


def _append(error: StorageError, words: str) -> None:
    """Say more in an error's message, where it has one."""
    if error.args:
        message, *rest = error.args
        error.args = (f"{message}{words}", *rest)
