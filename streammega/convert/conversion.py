"""One conversion: from inputs that are known to shards that are published."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from streammega.config import StorageConfig
from streammega.convert import resume
from streammega.convert.cluster import SharedFiles
from streammega.convert.digests import digest_of_json
from streammega.convert.engines import TaskList, run_tasks
from streammega.convert.job import Job, UnitRecord, plan_units, segment_bytes_within, stored_bytes
from streammega.convert.options import ConvertOptions, Runner
from streammega.convert.read.inputs import Input
from streammega.convert.tokenize.tokenizers import Tokenizer
from streammega.convert.told import (
    check_all_done,
    check_errors,
    reasons_of,
    tell_of_ids,
    tell_of_origins,
)
from streammega.convert.write.dedup import remove_duplicates
from streammega.convert.write.destination import Destination
from streammega.convert.write.document_order import DocumentSet
from streammega.convert.write.manifest_metadata import Labels
from streammega.convert.write.packing import PackCounts
from streammega.convert.write.publish import Publisher
from streammega.convert.write.shards import (
    ShardLayout,
    lay_out,
    layout_digest,
    origins_written,
    parts_of_datasets,
    parts_of_units,
    read_pack_counts,
    write_shard,
)
from streammega.convert.write.units import run_unit
from streammega.dataset.manifest import Manifest, Shard
from streammega.errors import ConfigError, ConvertError
from streammega.kernels.parallel import num_threads
from streammega.storage.open import is_remote
from streammega.storage.progress import Progress, ProgressObserver

log = logging.getLogger(__name__)

THREADS = 4
"""Units that one process works on: nine tenths of their time are outside of the GIL."""
SHUFFLED_AT_ONCE = 4
"""Shards that are written at once where documents are shuffled: each holds a bucket, and while it
reads that, some of it twice.
"""
NO_UNITS = (
    "these inputs are laid into shards as they are, so there is nothing to be shared out; run it "
    "without tasks (--task)"
)


@dataclass(frozen=True, kw_only=True)
class WrittenDataset:
    """All shards of a dataset, written but not published.

    records: of units; none where datasets passed as they are. duplicates: documents that were left
    out as such.
    """

    layout: ShardLayout
    shards: list[Shard]
    records: list[UnitRecord]
    duplicates: int
    source_bytes: int
    packing: PackCounts | None = None
    """Of all shards; None where documents lie end to end."""


@dataclass(frozen=True, kw_only=True)
class DoneShare:
    """Units that were done, by their numbers. before: how many of them were already when it was
    begun; units_of_all: of the whole conversion.
    """

    records: dict[int, UnitRecord]
    before: int
    units_of_all: int


@dataclass(kw_only=True)
class Conversion:
    """One conversion: its settings, and what it needs to be run.

    work: its work folder. files: what the machines of a cluster must see.
    """

    prefix: str
    options: ConvertOptions
    runner: Runner
    storage: StorageConfig
    input_storage: StorageConfig
    work: str
    inputs: list[Input]
    tokenizer: Tokenizer | None
    progress: ProgressObserver = field(default_factory=ProgressObserver)
    files: SharedFiles = field(default_factory=SharedFiles)

    def make(self) -> WrittenDataset:
        """Write all shards; what an interrupted run has done is not done again."""
        if self.runner.restart:
            resume.forget(self.work, self.storage)
        if not self.options.origins:
            tell_of_origins(self.inputs, self.input_storage)
        job = self.job()
        records: list[UnitRecord] = []
        duplicates = 0
        if self._passes_as_it_is:
            if self.runner.merges_tasks:
                raise ConfigError(NO_UNITS)
            parts = parts_of_datasets(self.inputs, self.input_storage)
            sources = [f"{item.path} {item.etag}" for item in self.inputs]
            source_bytes = sum(item.size for item in self.inputs)
        else:
            records = self._units(job)
            parts = parts_of_units(job, records)
            sources = [record.digest for record in records]
            source_bytes = sum(record.source_bytes for record in records)
            if self.options.dedup and parts:
                self.progress.begin("removing duplicates", None)
                parts, duplicates = remove_duplicates(job, parts, self.runner.memory_bytes)
        layout = self._layout(job, parts, sources, records)
        shards = self._shards(job, layout)
        return WrittenDataset(
            layout=layout,
            shards=shards,
            records=records,
            duplicates=duplicates,
            source_bytes=source_bytes,
            packing=self._packing(job, len(shards)),
        )

    def do_share(self, choose: Callable[[int], Sequence[int]]) -> DoneShare:
        """Do some of the units and nothing else: those that `choose` names, of as many as there
        are. Whatever fails, what is done stays for others.
        """
        if self._passes_as_it_is:
            raise ConfigError(NO_UNITS)
        job = self.job()
        numbers = choose(len(job.units))
        before = resume.units_done(job, numbers)
        records = self._do_units(job, numbers, before)
        return DoneShare(records=records, before=len(before), units_of_all=len(job.units))

    def publish(self, written: WrittenDataset, labels: Labels) -> Manifest:
        """Put everything under its final name. May be interrupted and repeated."""
        self.progress.begin("publishing", None)
        layout = written.layout
        shards = written.shards
        if not layout.multimodal:
            # There are no modes to be learned.
            labels = labels | {"loss_modes": None}
        origins = None
        if self.options.origins:
            origins, num_ids = origins_written(self.work, layout, self.storage)
            if self.options.id_field is not None and not num_ids:
                tell_of_ids(self.options.id_field, shards)
        manifest = Manifest(
            kind=self.options.kind,
            dtype=layout.dtype,
            multimodal=layout.multimodal,
            **labels,
            documents=sum(shard.documents for shard in shards),
            sequences=sum(shard.sequences for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            shards=shards,
            origins=origins,
            pack=_pack_label(self.options.pack, written.packing),
        )
        return self.publisher.publish(layout, manifest)

    def leave(self) -> None:
        """After an interruption: keep what a second run can use, and nothing else."""
        if is_remote(self.work) or not os.path.isdir(self.work):
            return
        if self.runner.merges_tasks:  # what is there is of tasks, some of which may be at work
            return
        if resume.can_resume(self.work):
            log.warning(
                "what is done is kept in %s; run the same command again to go on", self.work
            )
        else:
            self.remove_work()

    def remove_work(self) -> None:
        """Forget everything unfinished: at once, so that a kill leaves all of it or nothing."""
        self.publisher.release()
        resume.remove(self.work, self.storage)

    def job(self, *, all_units: bool = False) -> Job:
        """All that workers have to know; without units, unless all are asked for, where datasets
        pass as they are.
        """
        units = []
        if all_units or not self._passes_as_it_is:
            units = plan_units(self.inputs, self.options, self.input_storage)
        units_at_once = self.runner.workers or num_threads()
        return Job(
            options=self.options,
            storage=self.storage,
            input_storage=self.input_storage,
            work=self.work,
            units=units,
            tokenizer_digest=self._tokenizer_digest,
            segment_bytes=segment_bytes_within(self.runner.memory_bytes, units_at_once),
        )

    @cached_property
    def destination(self) -> Destination:
        """Where its shards go."""
        return Destination(self.prefix, self.options.kind, self.storage)

    @cached_property
    def publisher(self) -> Publisher:
        """Publishes this job, of these inputs and options."""
        inputs = [f"{item.path} {item.format} {item.size} {item.etag}" for item in self.inputs]
        job = digest_of_json([self.options.digest(), self._tokenizer_digest, inputs])
        return Publisher(self.destination, self.work, job, has_origins=self.options.origins)

    @property
    def _tokenizer_digest(self) -> str:
        return self.tokenizer.digest if self.tokenizer else ""

    @property
    def _passes_as_it_is(self) -> bool:
        """Whether the inputs can be laid into shards without being made segments first."""
        return self.options.plain and all(item.format == "megatron" for item in self.inputs)

    def _units(self, job: Job) -> list[UnitRecord]:
        """Records of all units, which are done in the end."""
        numbers = range(len(job.units))
        done = resume.units_done(job, numbers)
        if self.runner.merges_tasks:
            check_all_done(numbers, done)
        done = self._do_units(job, numbers, done)
        records = [done[number] for number in numbers]
        check_errors(records, self.options, all_done=True)
        return records

    def _do_units(
        self, job: Job, numbers: Sequence[int], done: dict[int, UnitRecord]
    ) -> dict[int, UnitRecord]:
        """Records of units by their numbers; those that are `done` are not done again."""
        if done and not self.runner.merges_tasks:
            log.warning(
                "going on with a conversion that was interrupted: %d of %d units are done",
                len(done),
                len(numbers),
            )
        left = [number for number in numbers if number not in done]
        self.progress.begin(
            "converting", stored_bytes(piece for number in left for piece in job.units[number])
        )
        work = TaskList(
            function=run_unit,
            shared=job,
            numbers=left,
            # Splitting sentences is Python throughout, and holds the GIL.
            threads=1 if self.options.split_sentences else THREADS,
            files=self.files,
        )
        records = dict(done)
        check_errors(records.values(), self.options)
        for number, record in run_tasks(work, self.runner, self.progress.advance):
            records[number] = record
            if record.errors:
                check_errors(records.values(), self.options)
        return records

    def _shards(self, job: Job, layout: ShardLayout) -> list[Shard]:
        """All shards, which are written in the end."""
        done = resume.shards_done(job, layout, self.publisher)
        numbers = [number for number in range(layout.num_shards) if number not in done]
        itemsize = np.dtype(layout.dtype).itemsize
        self.progress.begin(
            "writing shards", layout.tokens * itemsize * len(numbers) // layout.num_shards
        )
        work = TaskList(
            function=_write_shard,
            shared=(job, layout, self._threads_of_shard(len(numbers))),
            numbers=numbers,
            # A tar is written by Python, which holds the GIL.
            threads=1 if self.options.kind == "tar" else num_threads(),
            files=self.files,
        )
        # those that are shuffled or packed hold many documents
        holds_many = bool(layout.buckets) or self.options.pack is not None
        most_at_once = SHUFFLED_AT_ONCE if holds_many else None
        for number, shard in run_tasks(work, self.runner, self.progress.advance, most_at_once):
            done[number] = shard
        return [done[number] for number in range(layout.num_shards)]

    def _threads_of_shard(self, shards: int) -> int:
        """Threads that copy into one of so many shards: fewer shards than workers would leave some
        of these idle.
        """
        # A cluster gives every task one core.
        if self.runner.engine == "ray" or not shards:
            return 1
        workers = self.runner.workers or num_threads()
        return max(1, workers // shards)

    def _packing(self, job: Job, num_shards: int) -> PackCounts | None:
        """What packing made of all documents; None where they are not packed."""
        if self.options.pack is None:
            return None
        counts = PackCounts()
        for number in range(num_shards):
            counts.add(read_pack_counts(job, number))
        return counts

    def _layout(
        self,
        job: Job,
        parts: list[DocumentSet],
        sources: Sequence[str],
        records: Sequence[UnitRecord],
    ) -> ShardLayout:
        """What goes into which shard.

        Raises ConvertError where nothing is left, or modes are there and not there.
        """
        parts = [part for part in parts if part.documents]
        if not parts:
            self.remove_work()  # nothing in it is of use
            raise ConvertError(
                f"the {len(self.inputs)} input files hold no text and no tokens; nothing was "
                f"written{reasons_of(records)}"
            )
        layout = lay_out(job, parts, self.destination, self.runner.memory_bytes)
        layout = replace(layout, digest=layout_digest(job, layout, sources))
        return self.publisher.choose_names(layout)


def _pack_label(length: int | None, counts: PackCounts | None) -> dict[str, int] | None:
    """What a manifest says of bins."""
    if length is None or counts is None:
        return None
    return {"length": length, "bins": counts.bins, "padding": counts.padding}


def _write_shard(shared: tuple[Job, ShardLayout, int], number: int, progress: Progress) -> Shard:
    job, layout, threads = shared
    return write_shard(job, layout, number, progress, threads)
