"""Lines that are logged once, or once in a while, for each key."""

from __future__ import annotations

import logging
import math
import time

from streammega.storage.fork_lock import process_lock

_lock = process_lock()
_warned_at: dict[tuple[str, str], float] = {}
"""When this process logged one last, by logger and key."""


def warn_once(
    log: logging.Logger,
    key: str,
    text: str,
    *args: object,
    every: float = math.inf,
    level: int = logging.WARNING,
) -> None:
    """Log a line, unless this logger has logged one of `key` in the last `every` seconds."""
    now = time.monotonic()
    with _lock:
        if now - _warned_at.get((log.name, key), -math.inf) < every:
            return
        _warned_at[log.name, key] = now
    log.log(level, text, *args)
