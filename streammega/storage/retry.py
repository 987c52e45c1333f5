"""The one retry policy: which failures are tried again, for how long, and after which pause.

An endpoint that never answered may be mistyped, and is not waited for as long.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from streammega.config import StorageConfig
from streammega.errors import ShortReadError, StorageError
from streammega.errors.logs import get_logger
from streammega.storage.thread_pool import pause as interruptible_pause
from streammega.storage.thread_pool import thread_state
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

Result = TypeVar("Result")
FIRST_PAUSE = 0.1
MAX_PAUSE = 10.0
"""Seconds of the longest pause after the first failure, and after any.

Longer pauses would hardly relieve an overloaded endpoint, and delay the run after its recovery.
"""
MIN_PAUSE = FIRST_PAUSE / 2
"""Seconds. With less than this left, the deadline counts as reached."""
MAX_DOUBLINGS = 16
"""Doublings of the first pause: far more than the longest pause has, and no overflow."""
MAX_SHORT_READS = 6
"""Times a body of another length is tried again.

Connections cut bodies now and then, but a truncated object stays truncated.
"""
WARN_AFTER_S = 3.0
"""Seconds of failures before the first warning. Short outages are not reported."""
WARN_EVERY_S = 30.0
"""Seconds between two warnings of this process: an outage fails hundreds of reads at once."""


_answered: set[bytes] = set()
"""Endpoints that answered this process or its parent, with any answer."""


def take_refusals() -> int:
    """How many tries of this thread's calls were refused (429, 503) since this was asked last.

    A call that succeeds after them shows nothing of them, and flow control must know.
    """
    refusals = thread_state.refusals
    thread_state.refusals = 0
    return refusals


def endpoint_of(scheme: str, root: str, options: Mapping[str, Any]) -> bytes:
    """An identifier of the server of a bucket.

    All buckets with the same options have the same server, and all URLs of one http host. So a new
    bucket of a long run counts as a server that has answered.
    """
    host = root if scheme in ("http", "https") else ""
    spelled = repr((scheme, host, sorted(options.items(), key=str)))
    # A digest, since options may hold secrets.
    return hashlib.blake2b(spelled.encode(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Capped exponential backoff with jitter, until something has failed for `deadline` seconds.

    retries: most retries before the deadline; None: no limit.
    endpoint: from `endpoint_of`. Until it has answered, requests fail after `first_answer` seconds.
        Empty: it counts as answered.
    """

    deadline: float
    retries: int | None = None
    endpoint: bytes = b""
    first_answer: float = math.inf

    @classmethod
    def of(cls, config: StorageConfig, endpoint: bytes = b"") -> RetryPolicy:
        """The policy that a config asks for."""
        return cls(
            retries=config.tuning.max_retries,
            deadline=config.retry_timeout,
            endpoint=endpoint,
            first_answer=config.tuning.connect_deadline if endpoint else math.inf,
        )

    @property
    def has_answered(self) -> bool:
        """Whether the endpoint ever answered."""
        return not self.endpoint or self.endpoint in _answered

    def note_answer(self) -> None:
        """The endpoint answered this process, or the one that it was started by."""
        if self.endpoint:
            _answered.add(self.endpoint)

    def next_pause(self, error: BaseException, failures: int, elapsed: float) -> float:
        """Seconds to wait before the next try. Raises the error when there is to be none.

        Errors that are not transient (no such object, no access, a changed object) are raised at
        once. failures: so far, at least 1. elapsed: seconds since the first try began.
        """
        if not isinstance(error, StorageError) or not error.transient:
            raise error from None
        never_answered = error.silent and not self.has_answered
        deadline = min(self.deadline, self.first_answer) if never_answered else self.deadline
        retries: float = MAX_SHORT_READS if isinstance(error, ShortReadError) else math.inf
        if self.retries is not None:
            retries = self.retries
        remaining = deadline - elapsed
        if failures > retries or remaining < MIN_PAUSE:
            tries = "1 try" if failures == 1 else f"{failures} tries"
            note = f" [failed after {tries} in {elapsed:.1f} s"
            if failures <= retries and not never_answered:
                note += f", retry_timeout is {self.deadline:.4g} s"
            note += "]"
            if never_answered and self.first_answer < self.deadline:
                note += "; this endpoint never answered, so retry_timeout does not hold"
            if error.args:
                # An inner policy may have appended its note already.
                message, _, inner_note = str(error.args[0]).partition(" [failed after")
                hint = "" if never_answered else inner_note.partition("]")[2]
                error.args = (message + note + hint, *error.args[1:])
            raise error from None
        # Without so much time left the error follows soon.
        if min(elapsed, remaining) >= WARN_AFTER_S:
            why = "retry_timeout" if deadline == self.deadline else "this endpoint never answered"
            until = f"{deadline:.0f} s ({why})"
            if self.retries is not None:
                until += f" or {self.retries} retries"
            text = "storage requests have failed for %.0f s; retrying for up to %s: %s"
            warn_once(log, "outage", text, elapsed, until, error, every=WARN_EVERY_S)
        longest = min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, MAX_DOUBLINGS))
        # Random, so that ranks that failed together do not return together.
        pause = random.uniform(longest / 2, longest)
        # The last try is at the deadline.
        return remaining if remaining - pause < MIN_PAUSE else pause

    def call(
        self,
        attempt: Callable[[], Result],
        stop: threading.Event | None = None,
        *,
        is_answer: bool = True,
    ) -> Result:
        """`attempt()` until it succeeds; after the last try its error is raised.

        is_answer: whether success shows that the endpoint answers. Opening a client does not.

        Within a call of another policy it ends with that one, also in a thread of a pool. A pause
        ends at once, by `thread_pool.Cancelled`, when `stop` is set or this thread's work is not
        wanted any more.
        """
        began = time.monotonic()
        outer_end = thread_state.retry_end
        policy = self
        if outer_end < began + self.deadline:
            policy = replace(self, deadline=outer_end - began)
        thread_state.retry_end = began + policy.deadline
        failures = 0
        try:
            while True:
                try:
                    result = attempt()
                    if is_answer:
                        self.note_answer()
                    return result
                except StorageError as error:
                    # A refusal is an answer, too.
                    if not error.silent:
                        self.note_answer()
                    failures += 1
                    pause = policy.next_pause(error, failures, time.monotonic() - began)
                    if error.throttled:  # one that is raised is counted where it is caught
                        thread_state.refusals += 1
                interruptible_pause(pause, stop)
        finally:
            thread_state.retry_end = outer_end


TRY_ONCE = RetryPolicy(deadline=0.0, retries=0)
"""For clients whose callers retry by themselves."""
