"""The one retry policy: which failures are tried again, how often, and after which pause."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from streammega.config import StorageConfig
from streammega.errors import StorageError

Result = TypeVar("Result")
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Capped exponential backoff with jitter, at most `retries` times and not past `deadline` seconds from the first try."""

    retries: int
    deadline: float

    @classmethod
    def of(cls, config: StorageConfig) -> RetryPolicy:
        """The policy that a config asks for: its deadline is that of all tries together."""
        return cls(retries=config.retries, deadline=config.timeout * 2)

    def pause(self, error: BaseException, attempt: int, elapsed: float) -> float | None:
        """Seconds to wait before trying again after the `attempt`-th failure (from 1), or None: give up.

        What cannot be mended by waiting (no such object, no access, a changed object) is given up at once.
        """
        if not isinstance(error, StorageError) or not error.transient or attempt > self.retries:
            return None
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (attempt - 1))
        pause = random.uniform(longest / 2, longest)  # so that ranks that failed together do not return together
        return pause if elapsed + pause < self.deadline else None

    def call(self, attempt: Callable[[], Result]) -> Result:
        """`attempt()` until it succeeds or is given up; then its last error is raised."""
        began, failures = time.monotonic(), 0
        while True:
            try:
                return attempt()
            except StorageError as error:
                failures += 1
                pause = self.pause(error, failures, time.monotonic() - began)
                if pause is None:
                    raise
            time.sleep(pause)
