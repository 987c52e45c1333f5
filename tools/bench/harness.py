"""What every bench does alike: sides take turns, medians are compared, and what was measured is told.

A machine varies by a quarter from minute to minute. So the sides of a figure are measured in turns
within one run, who goes first changes from round to round, and ratios are those of medians.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")
RESAMPLES = 2000
"""Of an interval: enough that its ends differ by less than a percent between seeds."""


def turns(names: Sequence[str], number: int) -> list[str]:
    """The sides in the order of a round: each goes first as often as the others."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def in_turns(rounds: int, sides: Mapping[str, Callable[[], T | None]]) -> dict[str, list[T]]:
    """What each side gives in so many rounds. A side that fails once, with None, is left out."""
    given: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in turns(list(sides), number):
            if name not in given:
                continue
            value = sides[name]()
            if value is None:
                del given[name]
            else:
                given[name].append(value)
    return given


def medians(rounds: int, sides: Mapping[str, Callable[[], float | None]]) -> dict[str, float]:
    """The median of each side that never failed."""
    return {name: statistics.median(values) for name, values in in_turns(rounds, sides).items()}


def interval(
    numerators: Sequence[float], denominators: Sequence[float], paired: bool = False
) -> tuple[float, float]:
    """The middle 95 % of the ratio of medians over resampled rounds.

    Args:
        paired: the two of a round are drawn together, as what disturbs one disturbs the other.
    """
    rng = np.random.default_rng(0)  # the same figures give the same interval
    upper_rounds = rng.integers(0, len(numerators), (RESAMPLES, len(numerators)))
    lower_rounds = upper_rounds
    if not paired:
        lower_rounds = rng.integers(0, len(denominators), (RESAMPLES, len(denominators)))
    upper_medians = np.median(np.array(numerators)[upper_rounds], axis=1)
    lower_medians = np.median(np.array(denominators)[lower_rounds], axis=1)
    low, high = np.percentile(upper_medians / lower_medians, [2.5, 97.5])
    return float(low), float(high)


def seconds_of(action: Callable[[], object]) -> float:
    """The wall time of a call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def installed(package: str) -> bool:
    """Whether pip knows a package of this name here."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def versions(packages: Sequence[str]) -> str:
    """Packages with their versions, or that they are not installed."""
    told = []
    for package in packages:
        version = importlib.metadata.version(package) if installed(package) else "not installed"
        told.append(f"{package} {version}")
    return ", ".join(told)


def machine() -> str:
    """The Python and the cores that figures are of."""
    return f"Python {platform.python_version()}, {os.cpu_count()} cores"


def table(*columns: str) -> None:
    """The head of a table, in Markdown."""
    row(*columns)
    print("|" + "---|" * len(columns), flush=True)


def row(*columns: object) -> None:
    """A line of a table, printed at once."""
    print("| " + " | ".join(str(column) for column in columns) + " |", flush=True)
