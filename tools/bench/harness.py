"""What all benches share: sides take turns, medians are compared, and tables are printed.

A machine varies by a quarter from minute to minute. So the sides of a figure are measured in turns
within one run, who goes first changes from round to round, and ratios are those of medians.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import inspect
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
SIDE = "--side"
"""Begins the arguments of a bench that runs one side: the name of a function, and its arguments as JSON."""
RESAMPLES = 2000
"""Resamples of an interval: its ends differ by less than a percent between seeds."""


def turns(names: Sequence[str], number: int) -> list[str]:
    """The sides in the order of a round: each goes first as often as the others."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def in_turns(rounds: int, sides: Mapping[str, Callable[[], T | None]]) -> dict[str, list[T]]:
    """What each side gives in so many rounds. A side that fails once, with None, is left out."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in turns(list(sides), number):
            if name not in results:
                continue
            value = sides[name]()
            if value is None:
                del results[name]
            else:
                results[name].append(value)
    return results


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


def versions(packages: Sequence[str]) -> str:
    """Packages with their versions, or that they are not installed."""
    shown = []
    for package in packages:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        shown.append(f"{package} {version}")
    return ", ".join(shown)


def machine() -> str:
    """The version of Python and the number of cores."""
    return f"Python {platform.python_version()}, {os.cpu_count()} cores"


def table(*columns: str) -> None:
    """The head of a table, in Markdown."""
    row(*columns)
    print("|" + "---|" * len(columns), flush=True)


def row(*columns: object) -> None:
    """A line of a table, printed at once."""
    print("| " + " | ".join(str(column) for column in columns) + " |", flush=True)


def peak_bytes() -> int:
    """The peak memory of this process, whose threads do the work."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def bytes_with_workers() -> int:
    """The memory of this process and its workers now; 0 without workers.

    Memory that several of them share counts once.
    """
    workers = multiprocessing.active_children()
    pids = [os.getpid(), *(worker.pid for worker in workers)] if workers else []
    total = 0
    for pid in pids:
        # a worker may end meanwhile
        with contextlib.suppress(OSError):
            usage = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += int(usage.partition("\nPss:")[2].split()[0]) * 1024
    return total


RESULT = "RESULT "
"""Begins the line that a side prints: some libraries print lines of their own."""


def print_result(result: Mapping[str, Any]) -> None:
    """What a side in a process of its own gives to `run_side`."""
    print(RESULT + json.dumps(result, default=float), flush=True)


def run_side(
    command: Sequence[object], timeout: float = 600, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a side in a process of its own, by a Python program and its arguments.

    Raises SystemExit, with what it said, if it gave no result.
    """
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(words[1:])[:200]} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT))
    return result


def in_process(side: Callable[..., Any], timeout: float = 3600, **arguments: Any) -> dict[str, Any]:
    """Run a function of a bench, whose `main` calls `parser`, in a process of its own."""
    words = [inspect.getfile(side), SIDE, side.__name__, json.dumps(arguments)]
    return run_side(words, timeout)


Figure = Callable[..., None]


class Figures(dict[str, Figure]):
    """The figures of a bench, by the names of the functions that measure and print them."""

    def __init__(self, **figures: Figure) -> None:
        super().__init__(figures)
        self.by_default = list(figures)

    def figure(self, *, by_default: bool = True) -> Callable[[Figure], Figure]:
        """Register a function. by_default: whether it is measured when no figure is named."""

        def add(function: Figure) -> Figure:
            self[function.__name__] = function
            if by_default:
                self.by_default.append(function.__name__)
            return function

        return add


def parser(
    description: str | None, figures: Figures | None = None, runs: int = 3
) -> argparse.ArgumentParser:
    """The options that benches share. A process that `in_process` started runs its side and ends."""
    if sys.argv[1:2] == [SIDE]:
        name, arguments = sys.argv[2:]
        result = getattr(sys.modules["__main__"], name)(**json.loads(arguments))
        print_result({**result, "peak": peak_bytes()})
        sys.exit()
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--runs", type=int, default=runs, help="of each side (%(default)s)")
    if figures is not None:
        names = list(figures)
        options.add_argument("--figures", nargs="+", choices=names, default=figures.by_default)
    return options


def print_head(packages: Sequence[str], runs: int) -> None:
    """Print the machine, the versions and the number of runs."""
    print(f"{machine()}; {versions(packages)}; medians of {runs} runs\n", flush=True)


def print_figures(figures: Mapping[str, Figure], chosen: argparse.Namespace) -> int:
    """Measure the chosen figures. Returns the exit status: 1 if one failed, which ends no other."""
    failed = 0
    for name in chosen.figures:
        began = time.perf_counter()
        try:
            figures[name](chosen)
        except (Exception, SystemExit):
            traceback.print_exc()
            failed = 1
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return failed
