"""What `trace` says of a run: of steps and samples the documents, of documents the steps; and what
`describe` says of its phases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from streammega.cli.render import Report
from streammega.dataset.provenance import DocumentOrigin
from streammega.loading.balanced_batches import BalancedBatches
from streammega.order.batch_size import batch_schedule
from streammega.order.step_numbers import StepNumbers, rank_of
from streammega.samples.dealt import dealt_samples
from streammega.samples.phases import Phased
from streammega.samples.provenance import Provenance
from streammega.samples.traced import DocumentName, TracedRun
from streammega.train.config import RunConfig
from streammega.train.splits import batch_sizes, data_of

OF_CHANGES = ("of_rests", "joined", "taken_over", "too_short", "passed_over")
"""What is only told where lengths or lanes changed, or a dataset began anew."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class TracedRunFile:
    """One split of a run, whose steps and documents are asked for.

    ranks: how many data-parallel ranks, where the ranks of samples are wanted.
    """

    provenance: Provenance
    steps: StepNumbers
    split: str
    micro_batch_size: int
    last_step: int
    ranks: int | None

    @property
    def end(self) -> int:
        """The sample behind those of the run's last step."""
        return self.end_of(self.last_step)

    def end_of(self, step: int) -> int:
        """The sample behind those of a step."""
        return self.steps.samples(step).stop

    def place(self, sample: int) -> Report:
        """The step of a sample, its phase if the run has several, and where the ranks are known the
        one that reads it.
        """
        place: Report = {"sample": sample, "step": self.steps.step_of(sample)}
        if isinstance(self.provenance.source, Phased):
            place["phase"] = self.provenance.phase_of(sample)
        if self.ranks is not None:
            place["rank"] = self._rank_of(sample, self.ranks)
        return place

    def _rank_of(self, sample: int, ranks: int) -> int:
        """The rank that reads a sample, of so many."""
        schedule = self.steps.schedule
        config = self.provenance.config
        first = sample - schedule.offset_at(sample)
        if config.balance_batches:
            dealt = self._balanced.sample_ids(first, schedule.size_at(sample))
            _, (rank,), _ = np.nonzero(dealt == sample)
            return int(rank)
        contiguous = config.order == "megatron"
        return rank_of(sample, first, self.micro_batch_size, ranks, contiguous=contiguous)

    @cached_property
    def _balanced(self) -> BalancedBatches:
        """How global batches are dealt out by cost."""
        assert self.ranks is not None
        return BalancedBatches(
            samples=self.provenance.source,
            micro_batch_size=self.micro_batch_size,
            dp_size=self.ranks,
        )


def open_run(run: RunConfig, split: str, ranks: int | None) -> TracedRunFile:
    """A split of a run, as its trainer reads it. Raises ConfigError where ranks do not divide the
    batches.
    """
    data = data_of(run, split)
    sizes = batch_sizes(run, split)
    train = run.train
    schedule = batch_schedule(
        train.global_batch_size, sizes.get("rampup"), data.batch_changes(split)
    )
    if ranks is not None:
        schedule.check(train.micro_batch_size, 0, ranks)
    # An evaluation begins with the first sample every time.
    last_step = train.iters if split == "train" else max(1, train.eval_iters)
    return TracedRunFile(
        provenance=Provenance(data, split, train.global_batch_size),
        steps=StepNumbers(schedule=schedule, skips=tuple(data.skip_samples)),
        split=split,
        micro_batch_size=train.micro_batch_size,
        last_step=last_step,
        ranks=ranks,
    )


def trace_report(
    run: TracedRunFile,
    samples: Sequence[int],
    tokens: tuple[int, int] | None = None,
    decode: Decode | None = None,
) -> Report:
    """What samples are made of, and how much of which dataset they are."""
    ids = np.array(samples, np.int64)
    traced = run.provenance.trace(ids, tokens)
    stored = run.provenance.tokens(ids)[0] if decode is not None else None
    listed = []
    for row, sample in enumerate(traced):
        runs = []
        for part in sample.runs:
            entry = _run_entry(part)
            if decode is not None and stored is not None and not part.skipped:
                columns = slice(part.column, part.column + part.stop - part.start)
                entry["text"] = decode(stored[row, columns].tolist())
            runs.append(entry)
        seams = {"seams": list(sample.seams)} if sample.seams else {}
        listed.append({**run.place(sample.sample), **seams, "runs": runs})
    return {"split": run.split, "samples": listed, "datasets": _shares(traced)}


def readings_report(run: TracedRunFile, names: Sequence[DocumentName], last_step: int) -> Report:
    """In which steps documents are read, up to a step."""
    end = run.end_of(last_step)
    documents = []
    for name in names:
        entry = document_entry(run.provenance, name)
        since = run.provenance.skipped_from(name)
        entry["readings"] = _readings(run, name, end, since)
        documents.append(entry)
    return {"split": run.split, "last_step": last_step, "documents": documents}


def skipped_report(run: TracedRunFile, last_step: int) -> Report:
    """Which documents are skipped, from where on, and in which steps each was seen before, up to a
    step.
    """
    end = run.end_of(last_step)
    documents = []
    for name, since in run.provenance.skipped_documents().items():
        readings = _readings(run, name, min(since, end), None)
        documents.append(
            {
                **document_entry(run.provenance, name),
                "skipped_from": run.place(since),
                "tokens_seen": _distinct([tuple(reading["tokens"]) for reading in readings]),
                "readings": readings,
            }
        )
    seen = [document for document in documents if document["readings"]]
    return {
        "split": run.split,
        "last_step": last_step,
        "skipped_documents": len(documents),
        "seen_before": len(seen),
        "tokens_seen": sum(document["tokens_seen"] for document in seen),
        "documents": documents,
    }


def _readings(run: TracedRunFile, name: DocumentName, end: int, since: int | None) -> list[Report]:
    """Where tokens of a document are read before a sample. since: the one from which on they are
    not seen.
    """
    readings = []
    for reading in run.provenance.readings(name, end):
        place = run.place(reading.sample)
        # Of samples that are skipped, nothing is seen.
        if place["step"] is None:
            continue
        entry = {**place, "tokens": [reading.start, reading.stop]}
        if since is not None and reading.sample >= since:
            entry["skipped"] = True
        readings.append(entry)
    return readings


def _distinct(ranges: Sequence[tuple[int, ...]]) -> int:
    """How many tokens are in any of some ranges [start, stop)."""
    count = 0
    behind = 0
    for start, stop in sorted(ranges):
        count += max(0, stop - max(start, behind))
        behind = max(behind, stop)
    return count


def document_entry(provenance: Provenance, name: DocumentName) -> Report:
    """What a document is called, and how long it is."""
    shard = provenance.shards(name.dataset)[name.shard]
    runs = shard.tokens_of(name.document)
    return {
        **_origin_entry(provenance.origin(name)),
        "dataset": provenance.dataset_name(name.dataset),
        "shard": provenance.shard_name(name.dataset, name.shard),
        "document": name.document,
        "document_tokens": runs[0].document_tokens if runs else 0,
    }


def _origin_entry(origin: DocumentOrigin | None) -> Report:
    """Where a document came from, as far as that is known."""
    if origin is None:
        return {}
    entry = {"origin": origin.location}
    if origin.id:
        entry["id"] = origin.id
    return entry


def _run_entry(part: TracedRun) -> Report:
    return {
        "column": part.column,
        "dataset": part.dataset,
        "shard": part.shard,
        "document": part.name.document,
        "tokens": [part.start, part.stop],
        "document_tokens": part.document_tokens,
        **_origin_entry(part.origin),
        **({"ends_document": True} if part.stop == part.document_tokens else {}),
        **({"skipped": True} if part.skipped else {}),
    }


def _shares(traced: Sequence[Any]) -> Report:
    """Tokens and documents that are seen of each dataset, the largest first."""
    tokens: dict[str, int] = {}
    documents: dict[str, set[DocumentName]] = {}
    for sample in traced:
        for part in sample.runs:
            if part.skipped:
                continue
            tokens[part.dataset] = tokens.get(part.dataset, 0) + part.stop - part.start
            documents.setdefault(part.dataset, set()).add(part.name)
    by_size = sorted(tokens, key=lambda name: -tokens[name])
    return {name: {"tokens": tokens[name], "documents": len(documents[name])} for name in by_size}


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


def _dataset_entry(dataset: Report, samples: int) -> Report:
    """A dataset of a phase, without what it has nothing of; `dealt` is its share of the samples."""
    entry = {name: value for name, value in dataset.items() if name not in OF_CHANGES or value}
    dealt = dataset["samples"] / samples if samples else 0.0
    name = entry.pop("dataset")
    share = entry.pop("share")
    return {"dataset": name, "share": share, "dealt": dealt, **entry}
