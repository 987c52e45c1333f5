"""Split strings such as "99,1,0": which part of a dataset is train, valid and test, by Megatron's
rounding.
"""

from __future__ import annotations

import math
import re

from streammega.errors import ConfigError

SPLITS = ("train", "valid", "test")


def split_fractions(split: str) -> tuple[float, float, float]:
    """The three parts of a split string as fractions that add up to one.

    Raises ConfigError for a string without numbers, with more than three, or with nothing above
    zero.
    """
    try:
        parts = [float(text) for text in re.findall(r"[.0-9]+", split)]
    except ValueError:
        raise ConfigError(
            f"split {split!r} holds something that is no number; write it as '99,1,0'"
        ) from None
    if "-" in split or not 1 <= len(parts) <= 3 or not math.isfinite(sum(parts)) or sum(parts) <= 0:
        raise ConfigError(
            f"split {split!r} needs one to three numbers, not negative, not all zero, such as '99,1,0'"
        )
    parts += [0.0] * (3 - len(parts))
    total = sum(parts)
    return parts[0] / total, parts[1] / total, parts[2] / total


def split_bounds(split: str, count: int) -> dict[str, tuple[int, int] | None]:
    """[begin, end) of each split among `count` sequences; None where the split has no share.

    Book-ends are cumulated left to right in float64 and rounded half to even, as Megatron does.
    """
    ends = [0.0]
    at = 0.0
    for fraction in split_fractions(split):
        at += fraction
        ends.append(at)
    bounds: dict[str, tuple[int, int] | None] = {}
    for name, low, high in zip(SPLITS, ends[:-1], ends[1:], strict=True):
        bounds[name] = (
            (int(round(low * float(count))), int(round(high * float(count))))
            if high > low
            else None
        )
    return bounds
