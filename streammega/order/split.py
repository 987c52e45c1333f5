"""Split strings such as "99,1,0": which part of a dataset is train, valid and test, by Megatron's
rounding.
"""

from __future__ import annotations

import math
import re

import numpy as np

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
    total = float(np.sum(parts))  # Megatron's sum: Python's rounds otherwise from 3.12 on
    is_negative = "-" in split  # the numbers are looked for without their signs
    if is_negative or not 1 <= len(parts) <= 3 or not math.isfinite(total) or total <= 0:
        raise ConfigError(
            f"split {split!r} needs one to three numbers, not negative, not all zero, such as "
            "'99,1,0'"
        )
    parts += [0.0] * (3 - len(parts))
    train, valid, test = parts
    return train / total, valid / total, test / total


def split_bounds(split: str, count: int) -> dict[str, tuple[int, int] | None]:
    """[begin, end) of each split among `count` sequences; None where the split has no share.

    Book-ends are cumulated left to right in float64 and rounded half to even, as Megatron does.
    """
    bounds: dict[str, tuple[int, int] | None] = {}
    low = 0.0
    for name, fraction in zip(SPLITS, split_fractions(split), strict=True):
        high = low + fraction
        begin = int(round(low * float(count)))
        end = int(round(high * float(count)))
        bounds[name] = (begin, end) if high > low else None
        low = high
    return bounds
