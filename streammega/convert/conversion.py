"""A planned conversion: `run` makes its shards, `publish` makes a dataset of them.

`convert` does both, one task of several does a share of the units, and a merge does both without
reading anything.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.job import (
    Job,
    UnitRecord,
    plan_units,
    read_records,
    segment_bytes_within,
    stored_bytes,
)
from streammega.convert.options import ConvertOptions, ExecutionConfig, digest_of_json
from streammega.convert.read.formats import needs_process
from streammega.convert.read.inputs import SkippedFiles
from streammega.convert.read.megatron import check_local_version, dataset_name
from streammega.convert.read.source import Input
from streammega.convert.report import sum_skipped
from streammega.convert.tokenize.of_dataset import stored_copy
from streammega.convert.tokenize.tokenizers import Tokenizer
from streammega.convert.work_dir import WorkDir
from streammega.convert.workers import run_parallel
from streammega.convert.write.destination import Destination
from streammega.convert.write.document_order import remove_duplicates
from streammega.convert.write.manifest_metadata import Labels
from streammega.convert.write.packing import PackingStats
from streammega.convert.write.publish import Publisher
from streammega.convert.write.segments import run_unit
from streammega.convert.write.shards import (
    ShardLayout,
    ShardRecord,
    column_of_shards,
    plan_shards,
    read_shards,
    segments_of_inputs,
    write_shard,
)
from streammega.dataset.columns import StoredColumn
from streammega.dataset.manifest import Manifest
from streammega.dataset.names import MANIFEST, dataset_of, strip_suffix
from streammega.dataset.opening import find_shards
from streammega.dataset.provenance import ENDING, has_provenance
from streammega.errors import ConfigError, ConvertError
from streammega.errors.cached_property import cached_property
from streammega.errors.logs import get_logger
from streammega.errors.words import pluralize
from streammega.kernels import num_threads
from streammega.storage.progress import ProgressObserver

log = get_logger(__name__)

MAX_THREADS = 4
"""Units that threads of one process do at once: nine tenths of their time are outside of the GIL."""
MAX_SHUFFLED_SHARDS = 4
"""Shards that are written at once where documents are shuffled or packed: each holds a bucket, and
while it reads that, some of it twice.
"""
SHOWN_ERRORS = 5
"""Skipped records that are shown, where there are too many."""
SHOWN_UNITS = 20
"""Units that are named, where some are not done."""
NO_UNITS = (
    "these inputs are copied into shards as they are, so there is nothing to share out; run it "
    "without tasks (--task)"
)


@dataclass(frozen=True, kw_only=True)
class WrittenDataset:
    """All shards of a dataset, written but not published.

    records: those of units; empty where datasets are copied as they are. duplicates: documents that
    were left out as such.
    """

    layout: ShardLayout
    shards: list[ShardRecord]
    records: list[UnitRecord]
    duplicates: int
    source_bytes: int

    @property
    def packing(self) -> PackingStats | None:
        """What packing made of all documents; None without bins."""
        counts = [shard.packing for shard in self.shards if shard.packing is not None]
        total = PackingStats()
        for count in counts:
            total.add(count)
        return total if counts else None


@dataclass(kw_only=True)
class Conversion:
    """One conversion, as `plan` makes it."""

    prefix: str
    work_dir: WorkDir
    inputs: list[Input]
    skipped_files: SkippedFiles
    options: ConvertOptions
    execution: ExecutionConfig
    storage: StorageConfig
    input_storage: StorageConfig
    tokenizer: Tokenizer | None
    metadata: Labels
    """What the manifest says of token ids."""
    overwrite: bool = False
    progress: ProgressObserver = field(default_factory=ProgressObserver)

    @cached_property
    def destination(self) -> Destination:
        """Where its shards go."""
        return Destination(self.prefix, self.options.format, self.storage)

    @cached_property
    def publisher(self) -> Publisher:
        """Publishes this job: these inputs with these options."""
        inputs = [f"{item.path} {item.format} {item.size} {item.etag}" for item in self.inputs]
        job = digest_of_json([self.options.digest(), self._tokenizer_digest, inputs])
        return Publisher(
            self.destination,
            self.work_dir,
            job,
            has_origins=self.options.provenance,
            columns=[column.name for column in self._columns],
        )

    @property
    def _tokenizer_digest(self) -> str:
        return self.tokenizer.digest if self.tokenizer else ""

    @property
    def _columns(self) -> tuple[StoredColumn, ...]:
        """What all inputs have for each token, without their objects."""
        return tuple(column._replace(files=()) for column in self.inputs[0].columns)

    @property
    def _copies_datasets(self) -> bool:
        """Whether the inputs can be copied into shards without becoming segments first."""
        return self.options.copies_documents and all(
            item.format == "megatron" for item in self.inputs
        )

    def job(self) -> Job:
        """All that workers have to know; without units where datasets are copied as they are."""
        units = []
        if not self._copies_datasets:
            units = plan_units(self.inputs, self.options, self.input_storage)
        units_at_once = self.execution.workers or num_threads()
        return Job(
            options=self.options,
            storage=self.storage,
            input_storage=self.input_storage,
            work_dir=self.work_dir,
            units=units,
            tokenizer_digest=self._tokenizer_digest,
            columns=self._columns,
            segment_bytes=segment_bytes_within(self.execution.shuffle_memory_bytes, units_at_once),
        )

    def run(self, *, is_merge: bool = False) -> WrittenDataset:
        """Write all shards. What an interrupted run has done is not done again.

        is_merge: all units are done already, by tasks.
        """
        if not self.execution.resume:
            self.work_dir.clear()
        if not self.options.provenance:
            _warn_missing_provenance(self.inputs, self.input_storage)
        _warn_of_earlier_merge(self.inputs)
        job = self.job()
        records: list[UnitRecord] = []
        duplicates = 0
        if self._copies_datasets:
            if is_merge:
                raise ConfigError(NO_UNITS)
            parts = segments_of_inputs(self.inputs, self.input_storage)
            sources = [f"{item.path} {item.etag}" for item in self.inputs]
            source_bytes = sum(item.size for item in self.inputs)
        else:
            numbers = range(len(job.units))
            done = read_records(job, numbers)
            if is_merge:
                _check_all_units_done(numbers, done)
            elif done:
                log.warning(
                    "resuming an interrupted conversion: %d of %d units are done",
                    len(done),
                    len(numbers),
                )
            done = self.do_units(job, numbers, done)
            records = [done[number] for number in numbers]
            _check_errors(records, self.options, all_done=True)
            parts = [segment for record in records for segment in record.segments]
            sources = [record.digest for record in records]
            source_bytes = sum(record.source_bytes for record in records)
            if self.options.dedup and parts:
                parts, duplicates = remove_duplicates(
                    job, parts, self.execution.shuffle_memory_bytes, self.progress
                )
        parts = [part for part in parts if part.documents]
        if not parts:
            self.remove_work()  # nothing in it is of use
            total = sum_skipped(records)
            reasons = [f"; {reason}: {count:,}" for reason, count in sorted(total.counts.items())]
            reasons += [f"\n  {message}" for message in total.messages[:3]]
            raise ConvertError(
                f"the {len(self.inputs)} input files hold no text and no tokens; nothing was "
                f"written{''.join(reasons)}"
            )
        layout = plan_shards(
            job, parts, sources, self.destination, self.execution.shuffle_memory_bytes
        )
        layout = self.publisher.choose_names(layout)
        shards = self._write_shards(job, layout)
        for part in parts:
            if part.is_input:
                check_local_version(part.name, part.version, self.input_storage)
        return WrittenDataset(
            layout=layout,
            shards=shards,
            records=records,
            duplicates=duplicates,
            source_bytes=source_bytes,
        )

    def run_units(self, first: int, step: int) -> tuple[list[UnitRecord], int, int]:
        """Do every step-th unit from `first` on, and nothing else. What is done stays for others.

        Returns their records, how many of them were done before, and the number of all units.
        """
        if self._copies_datasets:
            raise ConfigError(NO_UNITS)
        job = self.job()
        numbers = range(first, len(job.units), step)
        before = read_records(job, numbers)
        records = self.do_units(job, numbers, before)
        return list(records.values()), len(before), len(job.units)

    def publish(self, written: WrittenDataset) -> Manifest:
        """Put everything under its final name. May be interrupted and repeated."""
        self.progress.begin("publishing")
        options = self.options
        layout = written.layout
        shards = [record.shard for record in written.shards]
        metadata = dict(self.metadata)
        if not layout.multimodal:
            metadata["loss_modes"] = None  # there are no modes
        num_ids = sum(record.ids for record in written.shards)
        if options.id_field is not None and not num_ids and any(s.documents for s in shards):
            # A record may lack it, not all.
            log.warning(
                "no record has a text or number in %r (--id-field), so no document can be found or "
                "skipped by its id; is the field mistyped?",
                options.id_field,
            )
        packing = written.packing
        pack = None
        if packing is not None and options.pack_length is not None:
            pack = {"length": options.pack_length, "bins": packing.bins, "padding": packing.padding}
        manifest = Manifest(
            kind=options.format,
            dtype=layout.dtype,
            multimodal=layout.multimodal,
            **metadata,
            documents=sum(shard.documents for shard in shards),
            sequences=sum(shard.sequences for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            shards=shards,
            origins=[record.origins for record in written.shards] if options.provenance else None,
            pack=pack,
            columns=tuple(column_of_shards(column, written.shards) for column in self._columns),
        )
        return self.publisher.publish(
            layout, written.shards, manifest, self.progress, self._tokenizer_copy()
        )

    def _tokenizer_copy(self) -> bytes:
        """What is stored of the tokenizer that the manifest names; empty where it is not known."""
        digest = self.metadata["tokenizer"].get("digest", "")
        if self.tokenizer is not None:
            return self.tokenizer.stored() if digest else b""
        names = [strip_suffix(item.path.removesuffix(MANIFEST)) for item in self.inputs]
        return stored_copy(digest, names, self.input_storage) if digest else b""

    def release(self) -> None:
        """After an interruption: keep what a second run can use, and nothing else."""
        if self.work_dir.is_remote or not os.path.isdir(self.work_dir.url):
            return
        if self.work_dir.can_resume():
            log.warning(
                "what is done is kept in %s; run the same command again%s to resume",
                self.work_dir.url,
                "" if self.execution.resume else " without --no-resume",
            )
        else:
            self.remove_work()

    def remove_work(self) -> None:
        """Remove everything unfinished: at once, so that a kill leaves all of it or nothing."""
        self.work_dir.remove()

    def do_units(
        self, job: Job, numbers: Sequence[int], done: dict[int, UnitRecord]
    ) -> dict[int, UnitRecord]:
        """The records of units by their numbers; those that are `done` are not done again."""
        remaining = [number for number in numbers if number not in done]
        self.progress.begin(
            "converting", stored_bytes(piece for number in remaining for piece in job.units[number])
        )
        records = dict(done)
        _check_errors(records.values(), self.options)
        for number, record in run_parallel(
            partial(run_unit, job),
            remaining,
            self.execution,
            self.progress.advance,
            max_threads=MAX_THREADS,
            in_processes=any(
                needs_process(piece.input) for unit in remaining for piece in job.units[unit]
            ),
            may_leave_out=self.options.on_error == "skip",
            work_dir=self.work_dir,
            inputs=self.inputs,
        ):
            records[number] = record
            if record.skipped.errors:
                _check_errors(records.values(), self.options)
        return records

    def _write_shards(self, job: Job, layout: ShardLayout) -> list[ShardRecord]:
        """Write the shards that are not written yet. Returns all of them."""
        done = read_shards(job, layout)
        for number in self.publisher.missing_shards(layout, done):
            del done[number]
        numbers = [number for number in range(layout.num_shards) if number not in done]
        token_bytes = np.dtype(layout.dtype).itemsize
        token_bytes += sum(column.token_bytes for column in job.columns)
        self.progress.begin(
            "writing shards", layout.tokens * token_bytes * len(numbers) // layout.num_shards
        )
        # Fewer shards than workers would leave some of these idle, so several threads copy into
        # each. A cluster gives every task one core.
        threads = 1
        if self.execution.backend != "ray" and numbers:
            threads = max(1, (self.execution.workers or num_threads()) // len(numbers))
        needs_memory = bool(layout.buckets) or self.options.pack_length is not None
        for number, record in run_parallel(
            partial(write_shard, job, layout, threads=threads),
            numbers,
            self.execution,
            self.progress.advance,
            # A tar is written by Python, which holds the GIL.
            max_threads=1 if self.options.format == "tar" else num_threads(),
            max_at_once=MAX_SHUFFLED_SHARDS if needs_memory else None,
            work_dir=self.work_dir,
            inputs=self.inputs,
        ):
            done[number] = record
        return [done[number] for number in range(layout.num_shards)]


def _check_all_units_done(numbers: Sequence[int], done: Collection[int]) -> None:
    """Raise ConvertError for units that tasks have not done."""
    missing = [number for number in numbers if number not in done]
    if missing:
        named = ", ".join(map(str, missing[:SHOWN_UNITS])) + (
            ", ..." if len(missing) > SHOWN_UNITS else ""
        )
        raise ConvertError(
            f"{len(missing)} of {len(numbers)} units are not done, or were of other inputs, options "
            f"or tokenizers: {named}; start the tasks again that have not ended (task i of N does the "
            f"units i, i + N, ...), with the same inputs, options and tokenizer as here"
        )


def _check_errors(
    records: Collection[UnitRecord], options: ConvertOptions, *, all_done: bool = False
) -> None:
    """Raise ConvertError if more records were skipped than `max_errors` allows.

    A part of all records is known when all units are done, a number at once.
    """
    if options.max_errors is None or ("%" in str(options.max_errors) and not all_done):
        return
    read = sum(record.skipped.records for record in records)
    max_errors = options.max_errors_of(read)
    errors = sum(record.skipped.errors for record in records)
    if max_errors is None or errors <= max_errors:
        return
    first = list(chain.from_iterable(record.skipped.messages for record in records))[:SHOWN_ERRORS]
    raise ConvertError(
        f"{pluralize(errors, 'record')} of {read:,} that were read "
        f"{'was' if errors == 1 else 'were'} skipped, more than max_errors (--max-errors) "
        f"{options.max_errors}; mend them, or raise the limit: what is done is kept. The first are:"
        + "".join(f"\n  {message}" for message in first)
    )


def _warn_of_earlier_merge(inputs: Sequence[Input]) -> None:
    """Warn of a dataset as large as all others together: every document would be there twice."""
    sizes: dict[str, int] = {}
    for item in inputs:
        if item.format == "megatron":
            name = dataset_of(item.path.removesuffix(MANIFEST))
            sizes[name] = sizes.get(name, 0) + item.size
    for name, size in sizes.items():
        if len(sizes) > 2 and 2 * size == sum(sizes.values()):
            log.warning(
                "%s: has as many bytes of tokens as the %d other datasets of the inputs together. Is "
                "it made of them? Then leave it out by --exclude",
                name,
                len(sizes) - 1,
            )


def _warn_missing_provenance(inputs: Sequence[Input], storage: StorageConfig) -> None:
    """Say that origins of inputs are left out: who did not ask for them may not know of them."""
    datasets = [item for item in inputs if item.format == "megatron"]
    if not datasets:
        return
    # Of the first alone: shards of one dataset all have them, or none has.
    name = dataset_name(datasets[0].path)
    first_shard = strip_suffix(find_shards(name, storage)[0])
    if has_provenance(first_shard, storage):
        log.warning(
            "%s: tells where its documents came from (%s), which this conversion leaves out; "
            "--provenance carries it over",
            name,
            ENDING,
        )
