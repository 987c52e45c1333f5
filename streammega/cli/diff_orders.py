"""The command that compares the orders of two runs: what differs, and from which sample on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streammega.cli.options import AsJson, Html, Split
from streammega.cli.render import Report, show_report
from streammega.errors import ConfigError

if TYPE_CHECKING:
    from streammega.cli.trace import TracedRunFile

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
    from streammega.cli.trace import open_run
    from streammega.train.config import load_run

    if samples is not None and samples < 1:
        raise ConfigError(f"--samples {samples}: nothing is compared; give at least 1")
    one = open_run(load_run(config), split, None)
    two = open_run(load_run(other), split, None)
    report = {"runs": [config, other], **differences_report(one, two, samples)}
    title = f"orders of {config} and {other}"
    show_report(report, summary=_summary(report), as_json=as_json, html=html, title=title)
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
    settings: dict[str, str] = {}
    for name, values in found.settings.items():
        settings |= _differences(name, *values)
    steps = None
    if found.first is not None:
        steps = [run.schedule.step_of(found.first) for run in (one, two)]
    return {
        "split": one.split,
        "samples": found.samples,
        "first_sample": found.first,
        "first_steps": steps,
        "looked_at": None if found.first is None else found.looked_at,
        "same_of_these": None if found.first is None else found.shared,
        "settings": settings,
        "tokens": _tokens_of(one, two, found.samples) if found.first is not None else {},
        "steps": _step_differences(one, two),
    }


def _tokens_of(one: TracedRunFile, two: TracedRunFile, samples: int) -> dict[str, list[int]]:
    """How many tokens the first samples of each run take from each dataset, over all phases."""
    from streammega.samples.usage import sample_usage

    tokens: dict[str, list[int]] = {}
    for place, run in enumerate((one, two)):
        for phase in sample_usage(run.provenance, samples, run.schedule.skipped):
            for dataset in phase.datasets:
                tokens.setdefault(dataset.dataset, [0, 0])[place] += dataset.tokens
    return tokens


def _summary(report: Report) -> str:
    first = report["first_sample"]
    if first is None:
        same = f"the first {report['samples']:,} samples of {report['split']} are the same"
        # a resume is refused by these, or they come into play after those samples
        return f"{same}; settings differ" if report["settings"] else same
    places = zip(report["first_steps"], report["runs"], strict=True)
    steps = ", ".join(f"step {_step(step)} of {run}" for step, run in places)
    return (
        f"they differ from sample {first} on ({steps}); of {report['looked_at']:,} samples from "
        f"there on, {report['same_of_these']:,} are the same"
    )


def _step(number: int | None) -> str:
    return "(skipped)" if number is None else str(number)


def _differences(name: str, one: Any, two: Any) -> dict[str, str]:
    """{name of a part: both values} of each part in which two values differ."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        found: dict[str, str] = {}
        for key in {**one, **two}:
            if one.get(key) != two.get(key):
                found |= _differences(f"{name}.{key}", one.get(key), two.get(key))
        return found
    if None in (one, two):
        return {name: f"{_brief(one)} and {_brief(two)}"}
    if not isinstance(one, list) or not isinstance(two, list):
        return {name: f"{one} and {two}"}
    if len(one) != len(two):
        return {name: f"{len(one)} and {len(two)} of them"}
    pairs = [(number, a, b) for number, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    found = {f"{name}[{number}]": f"{a} and {b}" for number, a, b in pairs[:MOST_LISTED]}
    if len(pairs) > MOST_LISTED:
        found[f"{name}, others"] = f"{len(pairs) - MOST_LISTED} more"
    return found


def _brief(value: Any) -> str:
    """A value that the other run has none of: of a phase where it begins."""
    if isinstance(value, Mapping) and "first_sample" in value:
        return f"one from sample {value['first_sample']} on"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_brief(of)}" for name, of in value.items())
    return "none" if value is None else str(value)


def _step_differences(one: TracedRunFile, two: TracedRunFile) -> dict[str, str]:
    """What says which step takes a sample, and not which tokens it has."""
    found: dict[str, str] = {}
    schedules = [run.schedule.stages for run in (one, two)]
    if schedules[0] != schedules[1]:
        sizes = [", ".join(f"{size} from sample {first}" for first, size in s) for s in schedules]
        found["samples of a step"] = f"{sizes[0]}; and {sizes[1]}"
    skips = [[list(span) for span in run.schedule.skips] for run in (one, two)]
    if skips[0] != skips[1]:
        found["skip_samples"] = f"{skips[0]} and {skips[1]}"
    if one.provenance.datasets != two.provenance.datasets:
        names = [run.provenance.dataset_names for run in (one, two)]
        found |= _differences("names of datasets", *names)
    return found
