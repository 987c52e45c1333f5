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
    """Numbers of at least `low` and at most `high`, or less than that where it is `open`."""

    low: float
    high: float = math.inf
    open: bool = False

    def __contains__(self, value: float) -> bool:
        below = value < self.high if self.open else value <= self.high
        return self.low <= value and below  # of NaN that is False

    def __str__(self) -> str:
        least = "more than 0" if self.low == sys.float_info.min else f"at least {self.low:g}"
        if self.high == math.inf:
            return least
        if self.high == sys.float_info.max:
            return f"{least}, and finite"
        return f"{least} and {'less than' if self.open else 'at most'} {self.high:g}"


def check_numbers(section: str, settings: Any, ranges: Mapping[str, Range]) -> None:
    """Raise ConfigError for a setting out of its range, and for true or false where a number is
    meant: Python takes them for one.

    settings: a dataclass; ranges: by the name of a field, of which None is in no range and good.
    """
    for item in fields(settings):
        value = getattr(settings, item.name)
        if isinstance(value, bool) and "bool" not in str(item.type):
            raise ConfigError(f"{section}.{item.name} is {str(value).lower()}; it must be a number")
        if item.name in ranges and value is not None and value not in ranges[item.name]:
            raise ConfigError(f"{section}.{item.name} is {value}; it must be {ranges[item.name]}")
