"""The command that compares the orders of two runs: what differs, and from which sample on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streammega.cli.options import AsJson, Html, Split
from streammega.cli.trace import show_report
from streammega.errors import ConfigError

if TYPE_CHECKING:
    from streammega.cli.trace_report import Report, TracedRunFile

MOST_LISTED = 12
"""Entries of a list that are named one by one, where two lists differ."""


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
    """Say what of the order differs between two runs, and from which sample on.

    Reads no tokens. Exit status 1 if a sample differs.
    """
    from streammega.cli.trace_report import open_run
    from streammega.train.config import load_run

    if samples is not None and samples < 1:
        raise ConfigError(f"--samples {samples}: nothing is compared; give at least 1")
    one = open_run(load_run(config), split, None)
    two = open_run(load_run(other), split, None)
    report = {"runs": [config, other], **differences_report(one, two, samples)}
    text = as_text(report)
    title = f"orders of {config} and {other}"
    summary, _, _ = text.partition("\n")
    show_report(report, text, as_json=as_json, html=html, title=title, summary=summary)
    if report["first_sample"] is not None:
        raise typer.Exit(1)


def differences_report(one: TracedRunFile, two: TracedRunFile, samples: int | None) -> Report:
    """How the orders of two runs compare, as values for JSON."""
    from streammega.samples.order_differences import compare_orders

    ends = [run.end for run in (one, two)]
    for run in (one, two):
        available = run.provenance.source.num_samples
        if available is not None:
            ends.append(available)
    if samples is not None:
        ends.append(samples)
    found = compare_orders(one.provenance, two.provenance, max(0, min(ends)))
    settings = {
        name: {"values": list(values), "differences": _words(*values)}
        for name, values in found.settings.items()
    }
    steps = None
    if found.first is not None:
        steps = [run.steps.step_of(found.first) for run in (one, two)]
    return {
        "split": one.split,
        "samples": found.samples,
        "first_sample": found.first,
        "first_steps": steps,
        "looked_at": None if found.first is None else found.looked_at,
        "same_of_these": None if found.first is None else found.shared,
        "settings": settings,
        "tokens": _tokens_of(one, two, found.samples) if found.first is not None else {},
        "steps": _step_words(one, two),
    }


def _tokens_of(one: TracedRunFile, two: TracedRunFile, samples: int) -> dict[str, list[int]]:
    """How many tokens the first samples of each run take from each dataset, over all phases."""
    from streammega.samples.dealt import dealt_samples

    tokens: dict[str, list[int]] = {}
    for place, run in enumerate((one, two)):
        for phase in dealt_samples(run.provenance, samples, run.steps.skipped):
            for dataset in phase.datasets:
                tokens.setdefault(dataset.dataset, [0, 0])[place] += dataset.tokens
    return tokens


def as_text(report: Report) -> str:
    """The differences for people."""
    one, two = report["runs"]
    lines = []
    first = report["first_sample"]
    if first is None:
        lines.append(f"the first {report['samples']:,} samples of {report['split']} are the same")
    else:
        steps = report["first_steps"]
        lines.append(
            f"they differ from sample {first} on (step {_step(steps[0])} of {one}, step "
            f"{_step(steps[1])} of {two}); of {report['looked_at']:,} samples from there on, "
            f"{report['same_of_these']:,} are the same"
        )
    for name, setting in report["settings"].items():
        lines += [f"  {name}{words}" for words in setting["differences"]]
    if first is None and report["settings"]:
        lines.append(
            "  (a resume is refused by these, or they come into play behind those samples)"
        )
    lines += [f"  {words}" for words in report["steps"]]
    lines += _tokens_as_text(report)
    return "\n".join(lines)


def _tokens_as_text(report: Report) -> list[str]:
    """A line for each of the datasets of which other amounts are read, the most first."""
    others = {name: both for name, both in report["tokens"].items() if both[0] != both[1]}
    by_difference = sorted(others, key=lambda name: -abs(others[name][0] - others[name][1]))
    lines = [
        f"  tokens of {name}: {others[name][0]:,} and {others[name][1]:,}"
        for name in by_difference[:MOST_LISTED]
    ]
    if len(others) > MOST_LISTED:
        lines.append(f"  and of {len(others) - MOST_LISTED} other datasets")
    return lines


def _step(number: int | None) -> str:
    return "(skipped)" if number is None else str(number)


def _words(one: Any, two: Any) -> list[str]:
    """A line for each thing in which two values differ, to be put behind a name."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        return [
            f".{name}{words}" for name in names for words in _words(one.get(name), two.get(name))
        ]
    if None in (one, two):
        return [f": {_brief(one)} and {_brief(two)}"]
    if not isinstance(one, list) or not isinstance(two, list):
        return [f": {one} and {two}"]
    if len(one) != len(two):
        return [f": {len(one)} and {len(two)} of them"]
    pairs = enumerate(zip(one, two, strict=True))
    lines = [f"[{number}]: {a} and {b}" for number, (a, b) in pairs if a != b]
    if len(lines) > MOST_LISTED:
        left = len(lines) - MOST_LISTED
        lines = [*lines[:MOST_LISTED], f": and {left} more"]
    return lines


def _brief(value: Any) -> str:
    """A value that the other run has none of: of a phase where it begins."""
    if isinstance(value, Mapping) and "first_sample" in value:
        return f"one from sample {value['first_sample']} on"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_brief(of)}" for name, of in value.items())
    return "none" if value is None else str(value)


def _step_words(one: TracedRunFile, two: TracedRunFile) -> list[str]:
    """What says which step takes a sample, and not which tokens it has."""
    lines = []
    schedules = [run.steps.schedule.stages for run in (one, two)]
    if schedules[0] != schedules[1]:
        sizes = [", ".join(f"{size} from sample {first}" for first, size in s) for s in schedules]
        lines.append(f"samples of a step: {sizes[0]}; and {sizes[1]}")
    skips = [[list(span) for span in run.steps.skips] for run in (one, two)]
    if skips[0] != skips[1]:
        lines.append(f"skip_samples: {skips[0]} and {skips[1]}")
    if one.provenance.datasets != two.provenance.datasets:
        names = [run.provenance.dataset_names for run in (one, two)]
        lines += [f"names of datasets{words}" for words in _words(*names)]
    return lines
