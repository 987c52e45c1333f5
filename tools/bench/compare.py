#!/usr/bin/env python3
"""This checkout against another one of streammega: the same work, the same server, side after side
in one run.

    git worktree add ../before <commit>
    .venv/bin/python tools/bench/compare.py ../before               # all figures; --figures names some

Loading, workers, the Megatron order, local files, blends, first batch and memory are here. For what
ranks do (`training.py`), conversion (`convert.py`), openings (`opening.py`) and comparisons with other
loaders (`table.py`), run the bench of each checkout by hand, in turns.

The two checkouts take turns, and begin alternately, so that neither has the warmer caches. A ratio
is that of the medians, with a 95 % bootstrap interval: above 1.00 this checkout does more. Files
and server are those of runner.py.
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import harness
from tools.bench.runner import (
    FOLDER,
    HERE,
    LOCAL,
    OUR_WORKERS,
    PACKAGES,
    SHAPES,
    WHOLE_EPOCH,
    Bench,
    serving,
)


class Figure(NamedTuple):
    """One thing that is measured: the name of its result, the arguments of the side that does it.

    is_rate: False for seconds and bytes, whose ratio is turned round. shape: how the server
    behaves. side: a function of sides.py.
    """

    name: str
    result: str
    arguments: dict[str, Any]
    shape: str = "unshaped"
    is_rate: bool = True
    side: str = "ours"


CPU = "CPU seconds per 10^9 tokens"
ALL_FIELDS = {"fields": ["tokens", "labels", "loss_mask", "position_ids"]}
"""What a batch of int64 had before 0.1.0 by default: equal work on both sides."""
FIGURES = (
    Figure("stream order, ids, tokens/s", "tokens", {"ids_only": True, "warmup": 2000}),
    Figure("stream order, int64, tokens/s", "tokens", {"warmup": 2000, **ALL_FIELDS}),
    Figure("stream order, int64, the fields of the default, tokens/s", "tokens", {"warmup": 2000}),
    Figure(f"stream order, ids, {CPU}", "cpu", {"ids_only": True, "warmup": 2000}, is_rate=False),
    Figure(f"stream order, int64, {CPU}", "cpu", {"warmup": 2000, **ALL_FIELDS}, is_rate=False),
    Figure(
        "stream order, int64, 20 ms of latency, tokens/s", "tokens", {"warmup": 500}, shape="shaped"
    ),
    Figure("1 GiB shuffled, first batch included, tokens/s", "whole_rate", WHOLE_EPOCH),
    Figure("first batch, seconds from construction", "first", WHOLE_EPOCH, is_rate=False),
    *(
        Figure(
            f"the same by a DataLoader with 2 {name} workers, tokens/s",
            "tokens",
            {**WHOLE_EPOCH, **method, "workers": 2},
            side="ours_workers",
        )
        for name, method in OUR_WORKERS.items()
    ),
    Figure("Megatron order, samples/s", "rate", {"order": "megatron", "warmup": 100}),
    *(
        Figure(
            f"{order} order, local files, tokens/s",
            "tokens",
            {"order": order, "prefix": LOCAL, "warmup": 1000, "num_samples": 10**7},
        )
        for order in ("megatron", "stream")
    ),
    Figure("blend of 256 datasets, 2 M samples, seconds", "blend", {}, is_rate=False, side="blend"),
    Figure("peak memory, bytes", "peak", {}, is_rate=False),
)


def measure(bench: Bench, figure: Figure, checkout: Path, seconds: float) -> float | None:
    """One run of a figure by one checkout; None if it failed."""
    arguments: dict[str, Any] = {
        "seconds": seconds,
        "endpoint": bench.server.endpoint,
        "prefix": "s3://data/web",
        "index_cache": str(FOLDER / f"idx-{checkout.name}"),
    }
    if figure.arguments.get("prefix") == LOCAL:
        del arguments["endpoint"]
    value = bench.side(figure.side, checkout, **(arguments | figure.arguments)).get(figure.result)
    return None if value is None else float(value)


def compare(bench: Bench, figure: Figure, other: Path, runs: int, seconds: float) -> None:
    """Print one line of the table."""
    bench.server.behave(**SHAPES[figure.shape])
    sides = {
        "before": partial(measure, bench, figure, other, seconds),
        "after": partial(measure, bench, figure, HERE, seconds),
    }
    measured = harness.in_turns(runs, sides)
    if len(measured) < len(sides):
        harness.row(figure.name, "failed", "", "")
        return
    before = statistics.median(measured["before"])
    after = statistics.median(measured["after"])
    if figure.is_rate:
        ratio = after / before
        low, high = harness.interval(measured["after"], measured["before"])
    else:
        ratio = before / after
        low, high = harness.interval(measured["before"], measured["after"])
    harness.row(
        figure.name, f"{before:,.4g}", f"{after:,.4g}", f"{ratio:.2f} [{low:.2f}, {high:.2f}]"
    )


def main() -> int:
    parser = harness.parser(__doc__, runs=7)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--figures", nargs="*", default=[""], help="parts of their names")
    parser.add_argument("--seconds", type=float, default=4.0)
    chosen = parser.parse_args()
    other = chosen.other.resolve()
    if not (other / "streammega").is_dir():
        parser.error(f"{other} is no checkout of streammega")
    harness.print_head(PACKAGES, chosen.runs)
    harness.table("figure", "before", "after", "ratio, above 1.00 is better")
    with serving() as bench:
        for figure in FIGURES:
            if any(part in figure.name for part in chosen.figures):
                compare(bench, figure, other, chosen.runs, chosen.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
