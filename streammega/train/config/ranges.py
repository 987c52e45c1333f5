"""What the numbers of a run's settings may be: refused by name where they stand, before torch meets
them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from streammega.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Numbers of at least `low` and at most `high`, or less than `high` where it is `open`."""

    low: float
    high: float = math.inf
    open: bool = False

    def __contains__(self, value: float) -> bool:
        # NaN is in no range: it compares as false with everything.
        is_below = value < self.high if self.open else value <= self.high
        return self.low <= value and is_below

    def __str__(self) -> str:
        least = f"at least {self.low:g}"
        # The smallest number above 0, as nobody wants to read it.
        if self.low == sys.float_info.min:
            least = "more than 0"
        if self.high == math.inf:
            return least
        if self.high == sys.float_info.max:
            return f"{least}, and finite"
        bound = "less than" if self.open else "at most"
        return f"{least} and {bound} {self.high:g}"


def check_numbers(section: str, settings: Any, ranges: Mapping[str, Range]) -> None:
    """Raise ConfigError for a setting out of its range, and for true or false where a number is
    meant: Python takes them for one.

    settings: a dataclass; ranges: by the name of a field, of which None is in no range and good.
    """
    for item in fields(settings):
        name = f"{section}.{item.name}"
        value = getattr(settings, item.name)
        may_be_bool = "bool" in str(item.type)
        if isinstance(value, bool) and not may_be_bool:
            raise ConfigError(f"{name} is {str(value).lower()}; it must be a number")
        allowed = ranges.get(item.name)
        if allowed is None or value is None:
            continue
        if value not in allowed:
            raise ConfigError(f"{name} is {value}; it must be {allowed}")
