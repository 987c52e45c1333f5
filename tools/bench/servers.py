#!/usr/bin/env python3
"""Servers that limit or delay requests: the rate of the loader with its defaults, compared with the
best of many fixed numbers of requests in flight.

    .venv/bin/python tools/bench/servers.py                # --servers names some
    .venv/bin/python tools/bench/servers.py --mib 8 16 32 96    # the same loader with so many bytes in flight

The other side is the same loader with `max_concurrent_requests` fixed to the best value of a grid. Sides take
turns, and the share is that of the medians. Server and files are those of runner.py.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench import harness
from tools.bench.runner import PACKAGES, Bench, serving

KIB = 1 << 10
SERVERS: dict[str, dict[str, Any]] = {
    "unshaped": {},
    "20 ms before the first byte": {"latency": 0.02, "bandwidth": 90e6},
    "bodies below 300 KiB are 40 ms late": {"small_bytes": 300 * KIB, "small_latency": 0.04},
    "8 bodies at once, 20 ms each": {"latency": 0.02, "answers_at_once": 8},
    "10 requests a second": {"rate": 10.0, "burst": 10},
    "100 requests a second, 1,000 at once before": {"rate": 100.0, "burst": 1000},
}
GRID = (1, 4, 16, 64, 384)
LATENCIES = (0.002, 0.02)
"""Seconds before the first byte, with which numbers of bytes in flight are compared."""
COUNTED_SECONDS = 12.0
"""Least seconds with a server that counts requests: a shorter run is mostly its burst."""


def tokens_per_second(
    bench: Bench, order: str, settings: dict[str, dict[str, int]], seconds: float
) -> float | None:
    """Whole seconds from the first batch on; None: the side failed."""
    result = bench.ours(
        order=order, seconds=seconds, num_samples=100_000, ids_only=True, **settings
    )
    return result.get("whole_rate")


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--servers", nargs="*", default=[""], help="parts of their names")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--mib", nargs="*", type=int, help="bytes in flight to compare, in MiB")
    chosen = parser.parse_args()
    harness.print_head(PACKAGES[:3], chosen.runs)
    if chosen.mib:
        harness.table("server, latency", *(f"{mib} MiB: M tokens/s" for mib in chosen.mib))
    else:
        harness.table("server, order", "best fixed: M tokens/s", "by itself: M tokens/s", "share")
    with serving() as bench:
        for name, behaviour in SERVERS.items():
            if not any(part in name for part in chosen.servers):
                continue
            if chosen.mib:
                compare_bytes(bench, name, behaviour, chosen)
            else:
                for order in ("stream", "megatron"):
                    compare(bench, name, order, behaviour, chosen)
    return 0


def compare(
    bench: Bench, name: str, order: str, behaviour: dict[str, Any], chosen: argparse.Namespace
) -> None:
    """Print one line of the table."""
    seconds = max(chosen.seconds, COUNTED_SECONDS) if "rate" in behaviour else chosen.seconds

    def side(max_concurrent_requests: int | None) -> float | None:
        bench.server.behave(**behaviour)  # each begins with the burst that the server allows
        return tokens_per_second(
            bench,
            order,
            {}
            if max_concurrent_requests is None
            else {"storage": {"max_concurrent_requests": max_concurrent_requests}},
            seconds,
        )

    tried = {
        max_concurrent_requests: side(max_concurrent_requests) or 0.0
        for max_concurrent_requests in GRID
    }
    best = max(tried, key=lambda max_concurrent_requests: tried[max_concurrent_requests])
    medians = harness.medians(
        chosen.runs, {"fixed": partial(side, best), "itself": partial(side, None)}
    )
    if len(medians) < 2:
        harness.row(f"{name}, {order}", "failed", "", "")
        return
    fixed = medians["fixed"] / 1e6
    itself = medians["itself"] / 1e6
    harness.row(
        f"{name}, {order}",
        f"{fixed:,.3g} ({best})",
        f"{itself:,.3g}",
        f"{100 * itself / fixed:.0f} %",
    )


def compare_bytes(
    bench: Bench, name: str, behaviour: dict[str, Any], chosen: argparse.Namespace
) -> None:
    """Print a line for each latency: the rate with each number of bytes in flight."""

    def side(mib: int, latency: float) -> float | None:
        bench.server.behave(**(behaviour | {"latency": latency}))
        return tokens_per_second(
            bench, "stream", {"tuning": {"max_in_flight_bytes": mib << 20}}, chosen.seconds
        )

    for latency in LATENCIES:
        sides = {str(mib): partial(side, mib, latency) for mib in chosen.mib}
        rates = harness.medians(chosen.runs, sides).values()
        harness.row(f"{name}, {1000 * latency:.0f} ms", *(f"{rate / 1e6:,.3g}" for rate in rates))


if __name__ == "__main__":
    sys.exit(main())
