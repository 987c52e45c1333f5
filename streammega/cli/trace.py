"""The command `trace`, which explains the steps of a run and finds documents in them.

It computes both from the run's config and needs no log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from streammega.cli.options import (
    AsJson,
    DataWords,
    GlobalBatchSize,
    OrderName,
    Seed,
    SequenceLength,
    Split,
    StorageFile,
    StorageOption,
    load_data,
    one_epoch,
    show_progress,
)
from streammega.cli.render import Report, show_report
from streammega.config import ORDERS
from streammega.errors import ConfigError
from streammega.errors.logs import get_logger

if TYPE_CHECKING:
    from streammega.convert.tokenize.tokenizers import Tokenizer
    from streammega.dataset.provenance import DocumentOrigin
    from streammega.order.schedule import TrainingSchedule
    from streammega.samples.document_names import DocumentName
    from streammega.samples.provenance import Provenance, TracedRun, TracedSample
    from streammega.storage.progress import ProgressObserver
    from streammega.train.config import RunConfig

log = get_logger(__name__)

MAX_FOUND = 100
"""Documents with a text that are reported. A text that more documents have says little."""
TRACED_AT_ONCE = 64
"""Samples that are traced together."""
MIN_INNER = 3
"""The fewest ids of a text that a search uses without the first and the last one.

Within a document the tokenizer may cut the ends of the text in another way.
"""

OF_CHANGES = ("from_remainder", "carried_tokens", "unused_tokens")
"""Fields that are reported only after lengths or lanes changed."""
Decode = Callable[[Sequence[int]], str]


def trace(
    words: DataWords,
    step: Annotated[
        int | None, typer.Option(help="A step, counted from 1: what its global batch is made of.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="One sample, by its number in the global stream.")
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            help="A document, to list the steps that read it: NAME#NUMBER of a dataset or shard; its "
            "id, URL or FILE:LINE, if convert kept --provenance; or, with --tokenizer, a text, which "
            "is searched in all tokens."
        ),
    ] = None,
    excluded: Annotated[
        bool,
        typer.Option(
            "--excluded",
            help="List the documents of exclude_documents, and the steps that read each before.",
        ),
    ] = False,
    steps: Annotated[
        str | None,
        typer.Option(
            help="With --find and --excluded: the steps to search, FIRST:STOP (STOP is excluded); by "
            "default all of the run."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="With --step: only the samples of this data-parallel rank.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="The number of data-parallel ranks, to name the rank of each sample."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Only these tokens of each sample: START:STOP (STOP is excluded)."),
    ] = None,
    split: Split = "train",
    validation: Annotated[
        str | None, typer.Option(help="A validation set, by its name in the run.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer, to show the text; as convert takes it.")
    ] = None,
    text: Annotated[
        bool,
        typer.Option(
            "--text",
            help="With --step and --sample: show the text, by the tokenizer that the data names.",
        ),
    ] = False,
    sequence_length: SequenceLength = None,
    global_batch_size: GlobalBatchSize = None,
    order: OrderName = None,
    seed: Seed = None,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Which documents does a step of a run read, and which steps read a document?

    The order is computed, so no log of the run is needed. Only .idx files are read, and with --text
    or --tokenizer also tokens. Datasets are traced as a run of one epoch.
    """
    _check_asked(step, sample, find, excluded, tokens)
    _check_belongs("--rank", rank, "--step", step)
    _check_belongs("--steps", steps, "--find or --excluded", find or excluded or None)
    _check_belongs("--text", text or None, "--step or --sample", None if find or excluded else 1)
    options = {
        "sequence_length": sequence_length,
        "global_batch_size": global_batch_size,
        "order": order,
        "seed": seed,
    }
    data, of_file = load_data(words, storage, storage_file, options=options, looks_only=True)
    model = _load(tokenizer)
    with show_progress("opening") as progress:
        settings = of_file or one_epoch(data, global_batch_size)
        settings = _chosen_run(settings, validation)
        run = open_run(settings, "valid" if validation else split, ranks)
        check_step(run, "--step", step)
        searched = _steps(run, steps)
        try:
            if excluded:
                report = excluded_report(run, searched, progress)
            elif find is not None:
                documents = _documents(run, find, model, progress)
                report = uses_report(run, documents, searched, progress)
            else:
                samples = [sample] if sample is not None else _samples_of(run, step or 0, rank)
                model = model or (_needed_tokenizer(run) if text else None)
                decode = None if model is None else model.decode
                report = trace_report(run, samples, _range("--tokens", tokens), decode, progress)
        except IndexError as error:  # no sample or document has the number that was given
            raise ConfigError(str(error)) from None
    name = words[0] if of_file else " ".join(words)
    show_report({"run": name, **report}, as_json=as_json)
    if "interrupted" in report:
        raise KeyboardInterrupt


def _check_asked(
    step: int | None, sample: int | None, find: str | None, excluded: bool, tokens: str | None
) -> None:
    """Raise ConfigError unless exactly one question is asked, with options that belong to it."""
    from streammega.config import MAX_SAMPLES

    chosen = [name for name in (step, sample, find, excluded or None) if name is not None]
    if len(chosen) != 1:
        raise ConfigError(
            "give one of --step, --sample, --find and --excluded: what is to be explained"
        )
    if sample is not None and sample >= MAX_SAMPLES:
        raise ConfigError(f"--sample {sample}: no run has so many samples")
    if (find is not None or excluded) and tokens is not None:
        raise ConfigError("--tokens goes with --step or --sample only")


def _check_belongs(option: str, value: object, to: str, other: object) -> None:
    """Raise ConfigError for an option that has no effect without another one."""
    if value is not None and other is None:
        raise ConfigError(f"{option} {value}: goes with {to}, which is not given")


def check_step(run: TracedRunFile, option: str, step: int | None) -> None:
    """Raise ConfigError for a step that the run does not have."""
    if step is None or 1 <= step <= run.last_step:
        return
    how_to_look_further = ""
    if step > run.last_step:
        setting = "train.train_iters" if run.split == "train" else "train.eval_iters"
        how_to_look_further = f"; to look further, add {setting}={step}"
    raise ConfigError(
        f"{option} {step}: steps are counted from 1, and the run's last is {run.last_step}"
        f"{how_to_look_further}"
    )


def _chosen_run(run: RunConfig, validation: str | None) -> RunConfig:
    """The run; for a validation set, the run with that set as its valid split."""
    from streammega.train.splits import validation_sets

    if validation is None:
        return run
    sets = validation_sets(run)
    if validation not in sets:
        known = ", ".join(sets) or "none"
        raise ConfigError(f"there is no validation set {validation!r}; the run has {known}")
    return sets[validation]


def _samples_of(run: TracedRunFile, step: int, rank: int | None) -> list[int]:
    """The samples of a step, or of one rank in it."""
    samples = list(run.schedule.samples_of_step(step))
    if rank is None:
        return samples
    if run.ranks is None or not 0 <= rank < run.ranks:
        raise ConfigError(f"--rank {rank}: say by --ranks how many there are; the first is 0")
    return [sample for sample in samples if run.place(sample)["rank"] == rank]


def _range(option: str, text: str | None) -> tuple[int, int] | None:
    """(3, 40) of "3:40". Raises ConfigError."""
    if text is None:
        return None
    parsed = re.fullmatch(r"(\d+):(\d+)", text)
    if not parsed:
        raise ConfigError(
            f"{option} {text!r}: write it as START:STOP (STOP is excluded), such as 1:128"
        )
    return int(parsed[1]), int(parsed[2])


def _steps(run: TracedRunFile, text: str | None) -> range:
    """The steps that --steps names; without it, all of the run. Raises ConfigError."""
    chosen = _range("--steps", text)
    if chosen is None:
        return range(1, run.last_step + 1)
    first, stop = chosen
    check_step(run, "--steps", first)
    check_step(run, "--steps", stop - 1)
    if first >= stop:
        raise ConfigError(f"--steps {text}: is empty; STOP is the step after the last to search")
    return range(first, stop)


def _load(tokenizer: str | None) -> Tokenizer | None:
    if tokenizer is None:
        return None
    from streammega.convert.tokenize.tokenizers import load_tokenizer

    return load_tokenizer(tokenizer)


def _own_tokenizer(run: TracedRunFile, *, by_name: bool = False) -> Tokenizer | None:
    """The tokenizer of all datasets of a run, if one of them has a copy of it; by_name: or else by its
    name.
    """
    from streammega.convert.tokenize.of_dataset import tokenizer_of

    provenance = run.provenance
    manifests = [provenance.manifest(number) for number in range(len(provenance.datasets))]
    if len({frozenset(manifest.tokenizers) for manifest in manifests}) != 1:
        return None
    model, _ = tokenizer_of(manifests[0], provenance.config.storage, by_name=by_name)
    return model


def _needed_tokenizer(run: TracedRunFile) -> Tokenizer:
    """The tokenizer that the data names. Raises ConfigError where it names none, or several."""
    model = _own_tokenizer(run, by_name=True)
    if model is None:
        raise ConfigError(
            "--text: the manifests of the data name no tokenizer that can be loaded, or several; name "
            "it by --tokenizer"
        )
    return model


def _documents(
    run: TracedRunFile, what: str, model: Tokenizer | None, progress: ProgressObserver
) -> list[DocumentName]:
    """The documents that --find names, or that have its text. Raises ConfigError if none does."""
    from streammega.samples.provenance import documents_with

    names = run.provenance.names
    matches = names.find(what)
    if matches:
        return matches
    model = model or _own_tokenizer(run)
    if model is None:
        raise ConfigError(
            f"--find: {names.describe_missing([what])}. To find a text, give the --tokenizer that "
            "made the tokens"
        )
    with_text: dict[DocumentName, None] = {}
    for name, _, ids in documents_with(run.provenance, _patterns(what, model), progress):
        # the patterns lack the first and last id, so the whole text is compared
        if what in model.decode(ids.tolist()):
            with_text[name] = None
        if len(with_text) == MAX_FOUND:
            log.warning("%d documents have this text; no more are looked for", MAX_FOUND)
            break
    if not with_text:
        raise ConfigError(
            f"no document of this split has the text {what!r}; is it the tokenizer of the data, and "
            "does the text begin and end with whole words?"
        )
    return list(with_text)


def _patterns(text: str, model: Tokenizer) -> list[list[int]]:
    """Ids to search for: the text as tokenized at the beginning of a document, and within one."""
    patterns: list[list[int]] = []
    for written in (text, f" {text}"):
        (encoded,) = model.encode([written])
        ids: list[int] = [int(token) for token in encoded]
        if len(ids) >= MIN_INNER + 2:
            ids = ids[1:-1]
        if ids and ids not in patterns:
            patterns.append(ids)
    if not patterns:
        raise ConfigError(f"--find {text!r}: has no token")
    return patterns


@dataclass(frozen=True, kw_only=True)
class TracedRunFile:
    """One split of a run, as `trace` explains it.

    ranks: the number of data-parallel ranks; None if reports name no ranks.
    """

    provenance: Provenance
    schedule: TrainingSchedule
    split: str
    micro_batch_size: int
    last_step: int
    ranks: int | None

    @property
    def end(self) -> int:
        """The sample after those of the run's last step."""
        return self.end_of(self.last_step)

    def end_of(self, step: int) -> int:
        """The sample after those of a step."""
        return self.schedule.samples_of_step(step).stop

    def place(self, sample: int) -> Report:
        """The step of a sample, its phase if the run has several, and its rank if `ranks` is set."""
        place: Report = {"sample": sample, "step": self.schedule.step_of(sample)}
        source = self.provenance.source
        if len(source.segments) > 1:
            place["phase"] = source.segment_number(sample)
        if self.ranks is not None:
            place["rank"] = self._rank_of(sample, self.ranks)
        return place

    def _rank_of(self, sample: int, ranks: int) -> int:
        """The rank that reads a sample."""
        from streammega.order.sharding import rank_of

        schedule = self.schedule
        config = self.provenance.config
        first = sample - schedule.offset_at(sample)
        contiguous = ORDERS[config.order].has_contiguous_ranks
        return rank_of(sample, first, self.micro_batch_size, ranks, contiguous=contiguous)


def open_run(run: RunConfig, split: str, ranks: int | None) -> TracedRunFile:
    """A split of a run, as its trainer reads it. Raises ConfigError where ranks do not divide the
    batches.
    """
    from streammega.order.schedule import training_schedule
    from streammega.samples.provenance import Provenance
    from streammega.train.splits import batch_sizes, data_of

    data = data_of(run, split)
    sizes = batch_sizes(run, split)
    train = run.train
    schedule = training_schedule(
        data, split, train.global_batch_size, sizes.get("rampup_batch_size")
    )
    if ranks is not None:
        schedule.check(train.micro_batch_size, 0, ranks)
    # An evaluation begins with the first sample every time.
    last_step = train.train_iters if split == "train" else max(1, train.eval_iters)
    return TracedRunFile(
        provenance=Provenance(data, split, train.global_batch_size),
        schedule=schedule,
        split=split,
        micro_batch_size=train.micro_batch_size,
        last_step=last_step,
        ranks=ranks,
    )


def trace_report(
    run: TracedRunFile,
    samples: Sequence[int],
    tokens: tuple[int, int] | None,
    decode: Decode | None,
    progress: ProgressObserver,
) -> Report:
    """The documents of samples, and how many tokens they take from each dataset."""
    traced: list[TracedSample] = []
    listed = []
    progress.begin("tracing", len(samples), " samples")
    for first in range(0, len(samples), TRACED_AT_ONCE):
        ids = np.array(samples[first : first + TRACED_AT_ONCE], np.int64)
        traced += run.provenance.trace(ids, tokens)
        stored = run.provenance.tokens(ids)[0] if decode is not None else None
        for row, sample in enumerate(traced[first:]):
            runs = []
            for part in sample.runs:
                entry = _run_entry(part)
                if decode is not None and stored is not None and not part.excluded:
                    columns = slice(part.column, part.column + part.stop - part.start)
                    entry["text"] = decode(stored[row, columns].tolist())
                runs.append(entry)
            listed.append({**run.place(sample.sample), "runs": runs})
        progress.advance(len(ids))
    return {"split": run.split, "samples": listed, "datasets": _shares(traced)}


def uses_report(
    run: TracedRunFile, names: Sequence[DocumentName], steps: range, progress: ProgressObserver
) -> Report:
    """The steps of some that read documents. Ctrl-C ends the search: the report has what was found."""
    uses, searched = _uses(run, names, steps, progress)
    documents = []
    for name in names:
        since = run.provenance.excluded_from(name)
        for use in uses[name]:
            if since is not None and use["sample"] >= since:
                use["excluded"] = True
        documents.append({**document_entry(run.provenance, name), "uses": uses[name]})
    return {"split": run.split, **searched, "documents": documents}


def excluded_report(run: TracedRunFile, steps: range, progress: ProgressObserver) -> Report:
    """The excluded documents, where each exclusion begins, and the steps that read it before."""
    excluded = run.provenance.excluded_documents()
    uses_of, searched = _uses(run, list(excluded), steps, progress)
    documents = []
    for name, since in excluded.items():
        uses = [use for use in uses_of[name] if use["sample"] < since]
        documents.append(
            {
                **document_entry(run.provenance, name),
                "excluded_from": run.place(since),
                "tokens_seen": _distinct([tuple(use["tokens"]) for use in uses]),
                "uses": uses,
            }
        )
    seen_before = [document for document in documents if document["uses"]]
    return {
        "split": run.split,
        **searched,
        "excluded_documents": len(documents),
        "seen_before": len(seen_before),
        "tokens_seen": sum(document["tokens_seen"] for document in seen_before),
        "documents": documents,
    }


def _uses(
    run: TracedRunFile, names: Sequence[DocumentName], steps: range, progress: ProgressObserver
) -> tuple[dict[DocumentName, list[Report]], Report]:
    """({document: the samples of some steps that read it}, which steps were searched)."""
    uses: dict[DocumentName, list[Report]] = {name: [] for name in names}
    searched: Report = {"steps": [steps.start, steps.stop]}
    start = run.schedule.samples_of_step(steps.start).start
    end = run.end_of(steps.stop - 1)
    try:
        for use in run.provenance.uses(names, start=start, end=end, progress=progress):
            place = run.place(use.sample)
            if place["step"] is not None:  # training sees nothing of excluded samples
                uses[use.document].append({**place, "tokens": [use.start, use.stop]})
    except KeyboardInterrupt:
        searched["interrupted"] = True
    return uses, searched


def _distinct(ranges: Sequence[tuple[int, ...]]) -> int:
    """How many tokens the ranges [start, stop) cover, each counted once."""
    count = 0
    behind = 0
    for start, stop in sorted(ranges):
        count += max(0, stop - max(start, behind))
        behind = max(behind, stop)
    return count


def document_entry(provenance: Provenance, name: DocumentName) -> Report:
    """The names of a document, and its length."""
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
    """Where a document came from, if its shard keeps that."""
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
        **({"excluded": True} if part.excluded else {}),
    }


def _shares(traced: Sequence[Any]) -> Report:
    """Tokens and documents that training sees of each dataset, the largest first."""
    tokens: dict[str, int] = {}
    documents: dict[str, set[DocumentName]] = {}
    for sample in traced:
        for part in sample.runs:
            if part.excluded:
                continue
            tokens[part.dataset] = tokens.get(part.dataset, 0) + part.stop - part.start
            documents.setdefault(part.dataset, set()).add(part.name)
    by_size = sorted(tokens, key=lambda name: -tokens[name])
    return {name: {"tokens": tokens[name], "documents": len(documents[name])} for name in by_size}


def phases_report(run: TracedRunFile, last_step: int) -> Report:
    """What each phase takes from its datasets, up to a step."""
    from streammega.samples.segments import short_names
    from streammega.samples.shuffling import mixing_report
    from streammega.samples.usage import sample_usage

    source = run.provenance.source
    names = short_names(source.prefixes)
    end = run.end_of(last_step)
    available = source.num_samples
    if available is not None:
        end = min(end, available)
    phases = []
    for dealt in sample_usage(run.provenance, end, run.schedule.excluded):
        entry = asdict(dealt)
        datasets = entry.pop("datasets")
        steps = run.schedule.steps_between(dealt.first_sample, dealt.stop)
        entry["steps"] = None if steps is None else list(steps)
        entry["samples"] = dealt.samples
        batch = run.schedule.size_at(dealt.first_sample)
        segment = source.segments[dealt.phase]
        entry["mixing"] = mixing_report(segment, dealt.first_sample, batch, names)
        entry["datasets"] = [_dataset_entry(dataset, dealt.samples) for dataset in datasets]
        phases.append(entry)
    return {
        "split": run.split,
        "last_step": last_step,
        "samples": sum(phase["samples"] for phase in phases),
        "phases": phases,
    }


def show_phases(report: Report, *, as_json: bool) -> None:
    """Print a report with phases. For people, what it says of their mixing is one line or two."""
    from streammega.samples.shuffling import mixing_lines

    if not as_json:
        phases = [{**phase, "mixing": mixing_lines(phase["mixing"])} for phase in report["phases"]]
        report = {**report, "phases": phases}
    show_report(report, as_json=as_json)


def _dataset_entry(dataset: Report, samples: int) -> Report:
    """A dataset of a phase, without values that are 0; `dealt` is its share of the samples."""
    entry = {name: value for name, value in dataset.items() if name not in OF_CHANGES or value}
    dealt = dataset["samples"] / samples if samples else 0.0
    name = entry.pop("dataset")
    share = entry.pop("share")
    return {"dataset": name, "share": share, "dealt": dealt, **entry}
