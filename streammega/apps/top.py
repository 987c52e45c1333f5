"""The command `top`: a run while it goes on, from the metrics that its loaders serve."""

from __future__ import annotations

import itertools
import shutil
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streammega.cli.options import AsJson
from streammega.cli.render import Report, as_text, print_text, show_report
from streammega.errors import EndpointError

if TYPE_CHECKING:
    from streammega.apps.metrics import Watch

ENDED_AFTER = 60.0
"""Seconds without any answer after which the run counts as ended."""
SHOWN_SOURCES = 10
SHOWN_PROBLEMS = 3
LINES_OF_OTHERS = 14
"""Lines of the screen that are not rows of ranks."""


def top(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="ADDRESS...",
            help="Where ranks serve metrics: HOST:PORT, HOST:FIRST-LAST for a port each, or a URL.",
        ),
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Print the figures of one interval, and end.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Watch a run: throughput, waits of each rank, stragglers, cache, requests, tokens by dataset.

    Ranks serve metrics by train.metrics_port, or StreamLoader(metrics_port=...). Without a terminal
    each look is a line. --json prints one look. Ctrl-C ends it.
    """
    from streammega.apps.metrics import Watch

    watch = Watch(addresses)
    began = time.monotonic()
    watch.look()
    if not watch.any_answers:
        raise EndpointError(_nothing_answers(watch))
    if once or as_json:
        time.sleep(max(0.0, began + interval - time.monotonic()))
        watch.look()
        report = watch.report()
        show_report(report if as_json else {}, summary=report_text(report), as_json=as_json)
    elif sys.stdout.isatty():
        _show_live(watch, interval)
    else:
        for report in _reports(watch, interval):
            print_text(f"{time.strftime('%H:%M:%S')} {report_line(report)}")


def _nothing_answers(watch: Watch) -> str:
    problems = watch.problems
    reasons = problems[:SHOWN_PROBLEMS]
    if len(problems) > SHOWN_PROBLEMS:
        reasons.append(f"and {len(problems) - SHOWN_PROBLEMS:,} others")
    return (
        f"no rank answers: {'; '.join(reasons)}. Does the run go on, and does it serve metrics, by "
        f"train.metrics_port or StreamLoader(metrics_port=...)? Ranks serve them on their own machine "
        f"alone: from another one, forward the port (ssh -L)"
    )


def _reports(watch: Watch, interval: float) -> Iterator[Report]:
    """A report after each interval. Raises EndpointError if nothing has answered for long."""
    while True:
        time.sleep(interval)
        watch.look()
        yield watch.report()
        answered_at = max(each.answered_at or 0.0 for each in watch.endpoints)
        if time.monotonic() - answered_at > ENDED_AFTER:
            raise EndpointError(
                f"no rank has answered for {ENDED_AFTER:.0f} s: the run has ended, or its machines "
                f"cannot be reached"
            )


def _show_live(watch: Watch, interval: float) -> None:
    """Draw the report on the terminal, again after each interval."""
    import rich.console
    import rich.live
    import rich.text

    console = rich.console.Console()
    with rich.live.Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for report in itertools.chain([watch.report()], _reports(watch, interval)):
            rows = max(1, shutil.get_terminal_size().lines - LINES_OF_OTHERS)
            text = rich.text.Text(report_text(report, max_ranks=rows))
            for finding in report["findings"]:
                text.highlight_words([finding], "bold yellow")
            live.update(text, refresh=True)


def report_line(report: Report) -> str:
    """The report in one line, for a log."""
    now, window = report["now"], report["window"]
    parts = [
        f"{report['answering']}/{report['addresses']} ranks answer",
        f"{now['tokens_per_second']:,.0f} tokens/s",
        f"waits {100 * now['waited_share']:.1f} %",
        f"{now['fetched_bytes_per_second'] / 1e6:,.1f} MB/s read",
    ]
    if now["cache_share"] is not None:
        parts.append(f"{100 * now['cache_share']:.0f} % from the cache")
    parts.append(f"{now['requests_per_second']:,.0f} requests/s")
    parts += [
        f"{window[name]:,} {name}" for name in ("retries", "refused", "failed") if window[name]
    ]
    return "; ".join([", ".join(parts), *report["findings"]])


def report_text(report: Report, max_ranks: int | None = None) -> str:
    """The report for people. max_ranks: rows of the table of ranks, those that wait longest."""
    now, window = report["now"], report["window"]
    seconds = f"the last {report['window_seconds']:.0f} s"
    lines = [
        f"{report['answering']} of {report['addresses']} addresses answer, "
        f"at {time.strftime('%H:%M:%S')}",
        f"throughput  {now['tokens_per_second']:,.0f} tokens/s; "
        f"{window['tokens_per_second']:,.0f} over {seconds}",
        f"waits       {100 * now['waited_share']:.1f} % of the time for data, in the mean of the ranks; "
        f"{100 * window['waited_share']:.1f} % over {seconds}",
        f"storage     {now['fetched_bytes_per_second'] / 1e6:,.1f} MB/s, "
        f"{now['requests_per_second']:,.1f} requests/s; over {seconds} {window['retries']:,} "
        f"repeated, {window['refused']:,} refused, {window['failed']:,} failed",
    ]
    if window["cache_share"] is not None:
        lines.append(f"cache       {100 * window['cache_share']:.1f} % of the bytes")
    if report["findings"]:
        lines += ["", *report["findings"]]
    ranks = sorted(report["ranks"], key=_longest_wait_first)
    shown = ranks[:max_ranks]
    lines += ["", as_text({"ranks": [_row_of(row) for row in shown]})]
    if len(shown) < len(ranks):
        lines.append(f"and {len(ranks) - len(shown):,} ranks that wait less")
    sources = [
        {
            "dataset": row["source"],
            "tokens": row["tokens"],
            "%": round(100 * row["share"], 1),
            "tokens/s": round(row["tokens_per_second"]),
        }
        for row in report["sources"][:SHOWN_SOURCES]
    ]
    if sources:
        lines += ["", as_text({"sources": sources})]
        if len(report["sources"]) > SHOWN_SOURCES:
            lines.append(
                f"and {len(report['sources']) - SHOWN_SOURCES:,} datasets with fewer tokens"
            )
    return "\n".join(lines)


def _longest_wait_first(row: Report) -> tuple[float, int]:
    window = row.get("window")
    waited = (
        window["waited_share"] if window and row["state"] == "reads" else 2.0
    )  # the silent first
    return -waited, row["dp_rank"] or 0


def _row_of(row: Report) -> dict[str, Any]:
    """A row of the table of ranks: figures of the window."""
    rates = row.get("window") if row["state"] == "reads" else None
    figures: dict[str, Any] = dict.fromkeys(
        (
            "tokens/s",
            "batches/s",
            "waits %",
            "for ranks %",
            "MB/s",
            "cache %",
            "requests/s",
            "median ms",
            "refused",
        )
    )
    if rates:
        cache, grad_wait = rates["cache_share"], rates["grad_wait_share"]
        figures = {
            "tokens/s": round(rates["tokens_per_second"]),
            "batches/s": round(rates["batches_per_second"], 2),
            "waits %": round(100 * rates["waited_share"], 1),
            "for ranks %": None if grad_wait is None else round(100 * grad_wait, 1),
            "MB/s": round(rates["fetched_bytes_per_second"] / 1e6, 1),
            "cache %": None if cache is None else round(100 * cache),
            "requests/s": round(rates["requests_per_second"], 1),
            "median ms": round(1e3 * rates["request_median_seconds"], 1),
            "refused": rates["refused"],
        }
    return {"rank": row["dp_rank"], "address": row["address"], "state": row["state"], **figures}
