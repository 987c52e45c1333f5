"""What the phases of a run take from their datasets: as values for JSON, and as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from streammega.cli.trace_report import Report, TracedRunFile, counted
from streammega.samples.dealt import dealt_samples

OF_CHANGES = ("of_rests", "joined", "taken_over", "too_short", "passed_over")
"""What is only told where lengths or lanes changed, or a dataset began anew."""


def phases_report(run: TracedRunFile, last_step: int) -> Report:
    """What each phase takes from its datasets, up to a step."""
    end = run.end_of(last_step)
    available = run.provenance.source.num_samples
    if available is not None:
        end = min(end, available)
    phases = []
    for dealt in dealt_samples(run.provenance, end, run.steps.skipped):
        entry = asdict(dealt)
        datasets = entry.pop("datasets")
        steps = run.steps.steps_between(dealt.first_sample, dealt.stop)
        entry["steps"] = None if steps is None else list(steps)
        entry["samples"] = dealt.samples
        entry["datasets"] = [_dataset_entry(dataset, dealt.samples) for dataset in datasets]
        phases.append(entry)
    return {
        "split": run.split,
        "last_step": last_step,
        "samples": sum(phase["samples"] for phase in phases),
        "phases": phases,
    }


def _dataset_entry(dataset: dict[str, Any], samples: int) -> Report:
    """A dataset of a phase, without what it has nothing of; `dealt` is its share of the samples."""
    entry = {name: value for name, value in dataset.items() if name not in OF_CHANGES or value}
    dealt = dataset["samples"] / samples if samples else 0.0
    name = entry.pop("dataset")
    share = entry.pop("share")
    return {"dataset": name, "share": share, "dealt": dealt, **entry}


def phases_as_text(report: Report) -> str:
    """The same for people."""
    samples = counted(report["samples"], "sample")
    steps = counted(report["last_step"], "step")
    lines = [f"{samples} of {report['split']}, {steps}"]
    for phase in report["phases"]:
        lines.append(_phase_as_text(phase))
        width = max(len(dataset["dataset"]) for dataset in phase["datasets"])
        heads = f"  {'':<{width}}{'weight':>9}{'dealt':>9}{'samples':>16}{'tokens':>20}"
        lines.append(f"{heads}  epochs so far")
        for dataset in phase["datasets"]:
            before, after = dataset["epochs"]
            lines.append(
                f"  {dataset['dataset']:<{width}}{dataset['share']:>9.3%}{dataset['dealt']:>9.3%}"
                f"{dataset['samples']:>16,}{dataset['tokens']:>20,}  {before:.4g} to {after:.4g}"
            )
            lines += [f"    {words}" for words in _changes_as_text(dataset)]
    return "\n".join(lines)


def _phase_as_text(phase: Report) -> str:
    steps = "no step"
    if phase["steps"] is not None:
        first, last = phase["steps"]
        steps = f"steps {first:,} to {last:,}" if first < last else f"step {first:,}"
    lanes = "" if phase["lanes"] is None else f", {phase['lanes']:,} lanes"
    skipped = f", {phase['skipped']:,} of them skipped" if phase["skipped"] else ""
    return (
        f"phase {phase['phase']}: {steps}, samples [{phase['first_sample']:,}, "
        f"{phase['stop']:,}){skipped}, of {phase['sequence_length']:,} tokens{lanes}"
    )


def _changes_as_text(dataset: Report) -> list[str]:
    """What became of what epochs in progress had left."""
    lines = []
    if dataset.get("taken_over"):
        waits = dataset.get("too_short", 0)
        lines.append(
            f"an epoch in progress had {dataset['taken_over']:,} tokens left, which are cut anew; "
            f"{waits:,} of them are too short for a sample, and wait"
        )
    if dataset.get("of_rests"):
        lines.append(
            f"samples of such tokens: {dataset['of_rests']:,}, of which {dataset.get('joined', 0):,} "
            "join several runs"
        )
    if dataset.get("passed_over"):
        lines.append(f"its restart passes over {dataset['passed_over']:,} tokens of an epoch")
    return lines
