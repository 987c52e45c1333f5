"""The command `diff-orders`: which settings of two runs differ, and the first sample that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streammega.cli.options import AsJson, Html, Split, show_progress
from streammega.cli.render import Report, show_report
from streammega.errors import ConfigError

if TYPE_CHECKING:
    from streammega.cli.trace import TracedRunFile
    from streammega.storage.progress import ProgressObserver

MAX_LISTED = 50
"""Differing settings that are listed one by one."""


def diff_orders(
    config: Annotated[str, typer.Argument(help="The TOML file of one run.")],
    other: Annotated[str, typer.Argument(help="The TOML file of the other.")],
    split: Split = "train",
    samples: Annotated[
        int | None, typer.Option(help="Compare so many samples; by default all of the shorter run.")
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Compare the orders of two runs: settings that differ, and the first sample that does.

    Reads no tokens. Exit status 1 if a sample differs.
    """
    from streammega.cli.trace import open_run
    from streammega.train.config import load_run

    if samples is not None and samples < 1:
        raise ConfigError(f"--samples {samples}: nothing is compared; give at least 1")
    runs = [load_run(config), load_run(other)]
    with show_progress("opening") as progress:
        one, two = (open_run(run, split, None) for run in runs)
        differences = differences_report(one, two, samples, progress)
    report = {"runs": [config, other], **differences}
    title = f"orders of {config} and {other}"
    show_report(report, summary=_summary(report), as_json=as_json, html=html, title=title)
    if report["first_sample"] is not None:
        raise typer.Exit(1)


def differences_report(
    one: TracedRunFile,
    two: TracedRunFile,
    samples: int | None,
    progress: ProgressObserver | None = None,
) -> Report:
    """How the orders of two runs compare, as values for JSON."""
    from streammega.order.state import differing_values
    from streammega.samples.order_differences import compare_orders

    ends = [run.end for run in (one, two)]
    for run in (one, two):
        available = run.provenance.source.num_samples
        if available is not None:
            ends.append(available)
    if samples is not None:
        ends.append(samples)
    comparison = compare_orders(one.provenance, two.provenance, max(0, min(ends)), progress)
    listed = dict(islice(comparison.settings.items(), MAX_LISTED))
    report: Report = {
        "split": one.split,
        "samples": comparison.samples,
        "first_sample": comparison.first,
        "first_steps": None,
        "looked_at": None,
        "same_of_these": None,
        "settings": _both(listed),
        "settings_not_listed": len(comparison.settings) - len(listed) or None,
        "tokens": {},
        "steps": _both(differing_values(_steps_of(one), _steps_of(two))),
    }
    if comparison.first is not None:
        report["first_steps"] = [run.schedule.step_of(comparison.first) for run in (one, two)]
        report["looked_at"] = comparison.looked_at
        report["same_of_these"] = comparison.shared
        report["tokens"] = _both(_tokens_of(one, two, comparison.samples))
    return report


def _both(values: Mapping[str, Sequence[Any]]) -> dict[str, Report]:
    """A row for each name, with the value of either run."""
    from streammega.order.state import shown_value

    rows = {}
    for name, pair in values.items():
        first, second = (shown_value(v) if isinstance(v, list | dict) else v for v in pair)
        rows[name] = {"first": first, "second": second}
    return rows


def _tokens_of(one: TracedRunFile, two: TracedRunFile, samples: int) -> dict[str, list[int]]:
    """How many tokens the first samples of each run take from each dataset, over all phases."""
    from streammega.samples.usage import sample_usage

    tokens: dict[str, list[int]] = {}
    for place, run in enumerate((one, two)):
        for phase in sample_usage(run.provenance, samples, run.schedule.excluded):
            for dataset in phase.datasets:
                tokens.setdefault(dataset.dataset, [0, 0])[place] += dataset.tokens
    return tokens


def _summary(report: Report) -> str:
    first = report["first_sample"]
    if first is None:
        same = f"the first {report['samples']:,} samples of {report['split']} are the same"
        # these settings make a resume refuse the state, or act after the compared samples
        return f"{same}; settings differ" if report["settings"] else same
    places = zip(report["first_steps"], report["runs"], strict=True)
    steps = [f"step {'(excluded)' if step is None else step} of {run}" for step, run in places]
    return (
        f"they differ from sample {first} on ({', '.join(steps)}); of {report['looked_at']:,} samples "
        f"from there on, {report['same_of_these']:,} are the same"
    )


def _steps_of(run: TracedRunFile) -> Report:
    """Settings that decide which step takes a sample, but not its tokens."""
    return {
        "samples_of_a_step": [list(stage) for stage in run.schedule.stages],
        "exclude_samples": [list(span) for span in run.schedule.excluded_ranges],
        "names_of_datasets": run.provenance.dataset_names,
    }
