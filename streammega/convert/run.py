"""A conversion from its inputs to published shards; started again, it goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import filelock
import numpy as np

from streammega.config import StorageConfig
from streammega.convert.cluster import SharedFiles, shared_files
from streammega.convert.engines import TaskList, run_tasks
from streammega.convert.options import ConvertOptions, Runner
from streammega.convert.preflight import check_encoder, check_writable, make_work_folder
from streammega.convert.read.folders import FilePatterns, PassedOver
from streammega.convert.read.inputs import Input, find_inputs
from streammega.convert.read.pairs import dataset_name
from streammega.convert.read.pipes import KEPT as KEPT_PIPE
from streammega.convert.read.pipes import (
    check_output,
    forget_pipes,
    is_pipe,
    keep_pipes,
    named_as_given,
    tell_of_pipes,
)
from streammega.convert.report import ConvertReport, count_parts, make_report
from streammega.convert.tokenize.chat_sources import as_option, find_template
from streammega.convert.tokenize.tokenizers import TextTokenizer, load_tokenizer
from streammega.convert.write import units as unit_limits
from streammega.convert.write.assemble import (
    DocumentSet,
    Layout,
    OrderedDocuments,
    layout_digest,
    number_sequences,
    plan_bounds,
    read_shard,
    remove_duplicates,
    write_shard,
)  # fmt: skip
from streammega.convert.write.labels import Labels, labels_of
from streammega.convert.write.publish import Publisher
from streammega.convert.write.units import Job, UnitRecord, plan_units, read_record, run_unit
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.manifest import MANIFEST, Manifest, Shard
from streammega.dataset.node_cache import default_cache_dir
from streammega.dataset.shards import shard_name, split_name
from streammega.errors import ConfigError, ConvertError
from streammega.kernels.parallel import num_threads
from streammega.storage import join_url, open_store, parent_url
from streammega.storage.open import is_remote

log = logging.getLogger(__name__)

KEPT = ("lock", "target.json", "publishing.json", "claim.json")
"""What a restart leaves in the work folder: who works there, and which names of the output are its
own.
"""
THREADS = 4
"""Units that one process works on: nine tenths of their time are outside of the GIL."""


def convert(
    inputs: Sequence[str],
    output: str,
    *,
    options: ConvertOptions | None = None,
    runner: Runner | None = None,
    overwrite: bool = False,
    storage: StorageConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> ConvertReport:
    """Convert a corpus to token shards: text through a tokenizer, or tokens from one layout to
    another.

    What is made depends on the inputs and the options alone: not on workers, engine, memory, or how
    often it was interrupted. Nothing appears under the final names unless all of it is done; a
    manifest, written last, lists the shards.

    Args: inputs: files, folders, globs, `@list` files and URLs, `-` for stdin; see `find_inputs`.
        output: prefix to write, a path or URL. options, or its fields by name
        (`tokenizer="tok.json"`, `key="text"`, ...): see ConvertOptions. runner, or its fields by
        name (`workers=4`, `engine="ray"`, ...): see Runner. overwrite: replace an existing dataset.
        progress: called with the bytes and tokens of what was just done.

    Raises ConfigError, ConvertError (naming file and line), ObjectNotFoundError, StorageError.
    """
    storage = storage or StorageConfig()
    began = time.monotonic()
    options, runner = _settings(options, runner, settings)
    check_output(output)
    if any(map(is_pipe, inputs)):
        return _convert_pipes(inputs, output, options, runner, overwrite, storage, progress)
    conversion, labels, passed = prepare(inputs, output, options, runner, storage, {}, progress)
    prefix = conversion.prefix
    work = conversion.work
    beside = _work_folder(prefix, None)
    with _locked(beside, named=beside == work), _locked(work) if work != beside else nullcontext():
        conversion.publisher.check(conversion.inputs, overwrite=overwrite)
        check_writable(prefix, storage, replaces=overwrite)
        if is_remote(work):
            check_writable(work, storage, is_work=True)
        try:
            with ExitStack() as cluster:
                if runner.engine == "ray":
                    conversion.files = cluster.enter_context(shared_files(work, conversion.inputs))
                conversion.publisher.claim(overwrite=overwrite)
                layout, shards, records = conversion.make()
            manifest = conversion.publish(layout, shards, labels)
        except BaseException:
            conversion.leave()
            raise
        conversion.remove_work()
    seconds = time.monotonic() - began
    made = make_report(
        prefix, storage, manifest, records, conversion.duplicates, conversion.source_bytes, seconds
    )
    return replace(made, files_passed_over=passed.counts)


def prepare(
    inputs: Sequence[str],
    output: str,
    options: ConvertOptions | None,
    runner: Runner | None,
    storage: StorageConfig,
    settings: dict[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[_Conversion, Labels, PassedOver]:
    """A conversion that has not begun, and what its manifest will say; raises what can be known
    before its first document.
    """
    options, runner = _settings(options, runner, settings)
    check_output(output)
    prefix, named = split_name(output)
    if prefix != output and not output.endswith(".idx"):
        options = replace(options, kind=named)
    tokenizer = (
        load_tokenizer(options.tokenizer, **options.tokenizer_settings)
        if options.tokenizer
        else None
    )
    # all of it, for workers elsewhere, and so that another one is another conversion
    if options.chat_template is not None:
        options = replace(
            options,
            chat_template=as_option(find_template(options.chat_template, options.tokenizer)),
        )
    passed = PassedOver()
    found = find_inputs(
        inputs, storage, FilePatterns(include=options.include, exclude=options.exclude), passed
    )
    labels = labels_of(found, options, tokenizer, storage)
    if tokenizer is None and options.eod_id is None:
        # what is cut keeps the end of its document
        options = replace(options, eod_id=labels["eod_id"])
    if options.modes is not None:
        labels = labels | {"eod_id": None}  # the sequence with the end may be one of those left out
    check_encoder(found, tokenizer, options, storage)
    _check_ray(prefix, runner)
    work = _work_folder(prefix, runner.work)
    conversion = _Conversion(
        prefix, options, runner, storage, work, found, tokenizer, progress or _no_progress
    )
    return conversion, labels, passed


def _convert_pipes(
    inputs: Sequence[str],
    output: str,
    options: ConvertOptions,
    runner: Runner,
    overwrite: bool,
    storage: StorageConfig,
    progress: Callable[[int, int], None] | None,
) -> ConvertReport:
    """Convert inputs some of which can be read once: they are read into the work folder first."""
    prefix, _ = split_name(output)
    work = _work_folder(prefix, runner.work)
    with _locked(work):
        # else it is half published, perhaps by this very conversion
        if not os.path.exists(os.path.join(work, "target.json")):
            Publisher(prefix, options.kind, work, storage, "").check([], overwrite=overwrite)
        check_writable(prefix, storage, replaces=overwrite)
        kept = keep_pipes(inputs, work)
    read = [kept.get(item, item) for item in inputs]
    try:
        with tell_of_pipes(kept):
            made = convert(
                read,
                output,
                options=options,
                runner=runner,
                overwrite=overwrite,
                storage=storage,
                progress=progress,
            )
    except BaseException:
        forget_pipes(work)
        raise
    return replace(made, messages=[named_as_given(message, kept) for message in made.messages])


def _settings(
    options: ConvertOptions | None, runner: Runner | None, settings: dict[str, Any]
) -> tuple[ConvertOptions, Runner]:
    """Fields given by name, sorted into the two."""
    if "key" in settings:
        settings["keys"] = (settings.pop("key"),)
    own = {
        name: settings.pop(name) for name in list(settings) if name in Runner.__dataclass_fields__
    }
    return replace(options or ConvertOptions(), **settings), replace(runner or Runner(), **own)


def _check_ray(prefix: str, runner: Runner) -> None:
    """Raise ConfigError for a work folder of this machine alone, where other machines are to write
    to it.
    """
    if (
        runner.engine == "ray"
        and runner.work is None
        and is_remote(prefix)
        and os.environ.get("RAY_ADDRESS", "local") != "local"
    ):
        raise ConfigError(
            f"{prefix}: the machines of a Ray cluster need a work folder that all of them can write; name one by --work, a URL "
            f"beside the output for instance"
        )


def _no_progress(size: int, tokens: int) -> None:
    pass


def _work_folder(prefix: str, given: str | None) -> str:
    """A folder of this conversion alone, removed in the end: within the one given, beside a local
    output, or in the cache.
    """
    stem = prefix.rpartition("/")[2]
    own = hashlib.blake2b(prefix.encode(), digest_size=6).hexdigest()
    if given:
        return join_url(given, f"{stem}.convert-{own}")
    if not is_remote(prefix):
        _, key = open_store(prefix, StorageConfig())
        return os.path.join(os.path.dirname(key), f".{os.path.basename(key)}.convert")
    return str(default_cache_dir() / "convert" / f"{stem}-{own}")


@contextmanager
def _locked(work: str, *, named: bool = True) -> Iterator[None]:
    """One conversion at a time in a work folder of this machine.

    Without `named`, the folder is that of conversions which name none: locked too, so that two to
    one output do not meet whatever their folders are; but it is not needed.
    """
    if is_remote(work):
        yield
        return
    try:
        make_work_folder(work)
    except ConvertError:
        if named:
            raise
        yield
        return
    lock = filelock.FileLock(os.path.join(work, "lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ConvertError(
            f"{work}: another conversion to this output is running; wait for it, or choose another output"
        ) from None
    try:
        yield
    finally:
        lock.release()
        if os.path.isdir(work) and set(os.listdir(work)) <= {"lock"}:
            shutil.rmtree(work, ignore_errors=True)
        # of a run that was killed at its very end
        shutil.rmtree(f"{work}.removed", ignore_errors=True)


def held_by_another(output: str) -> bool:
    """Whether a conversion to this output is running on this machine, in a work folder that was not
    named.
    """
    prefix = split_name(output.removesuffix(MANIFEST))[0]
    lock = os.path.join(_work_folder(prefix, None), "lock")
    if not os.path.exists(lock):
        return False
    try:
        with filelock.FileLock(lock, timeout=0):
            return False
    except filelock.Timeout:
        return True


@dataclass
class _Conversion:
    """One conversion: its settings, and what is known of it so far."""

    prefix: str
    options: ConvertOptions
    runner: Runner
    storage: StorageConfig
    work: str
    inputs: list[Input]
    tokenizer: TextTokenizer | None
    progress: Callable[[int, int], None]
    duplicates: int = 0
    source_bytes: int = 0
    files: SharedFiles = field(default_factory=SharedFiles)

    def make(self) -> tuple[Layout, list[Shard], list[UnitRecord]]:
        """All shards, written but not published."""
        if self.runner.restart:
            self.forget()
        job = self.job()
        records: list[UnitRecord] = []
        if self._direct():
            parts = self._datasets()
            sources = [f"{item.path} {item.etag}" for item in self.inputs]
            self.source_bytes = sum(item.size for item in self.inputs)
        else:
            records = self._units(job)
            parts = self._segments(job, records)
            sources = [record.digest for record in records]
            self.source_bytes = sum(record.source_bytes for record in records)
            if self.options.dedup and parts:
                parts, self.duplicates = remove_duplicates(job, parts, self.runner.memory_bytes)
        layout = self._layout(job, parts, sources, records)
        shards = {
            number: shard
            for number in range(layout.num_shards)
            if (shard := read_shard(job, layout, number))
        }
        for number in self.publisher.lost(layout, shards):
            del shards[number]
        left = [number for number in range(layout.num_shards) if number not in shards]
        threads = 1 if self.options.kind == "tar" else num_threads()
        work = TaskList(
            function=_write_shard,
            shared=(job, layout),
            numbers=left,
            threads=threads,
            files=self.files,
        )
        # each holds two buckets, of an eighth of the memory
        at_once = 4 if layout.buckets else None
        for number, shard in run_tasks(
            work, self.runner, self.progress if self._direct() else _no_progress, at_once
        ):
            shards[number] = shard
        return layout, [shards[number] for number in range(layout.num_shards)], records

    def job(self, *, all_units: bool = False) -> Job:
        """All that workers have to know; without units, unless all are asked for, where datasets
        pass as they are.
        """
        digest = self.tokenizer.digest if self.tokenizer else ""
        units = (
            []
            if self._direct() and not all_units
            else plan_units(self.inputs, self.options, self.storage)
        )
        share = self.runner.memory_bytes // (16 * (self.runner.workers or num_threads()))
        return Job(
            options=self.options,
            storage=self.storage,
            work=self.work,
            units=units,
            tokenizer_digest=digest,
            segment_bytes=min(unit_limits.SEGMENT_BYTES, max(1 << 20, share)),
        )

    def _direct(self) -> bool:
        """Whether the inputs can be laid into shards as they are."""
        return self.options.plain and all(item.format == "megatron" for item in self.inputs)

    def _datasets(self) -> list[DocumentSet]:
        names = [dataset_name(item.path) for item in self.inputs]
        return [
            DocumentSet(
                dataset=name, documents=len(IndexedDataset(name, self.storage).document_indices) - 1
            )
            for name in names
        ]

    def _units(self, job: Job) -> list[UnitRecord]:
        done = {
            number: record
            for number in range(len(job.units))
            if (record := read_record(job, number))
        }
        if done:
            log.warning(
                "going on with a conversion that was interrupted: %d of %d units are done",
                len(done),
                len(job.units),
            )
            self.progress(
                sum(r.source_bytes for r in done.values()), sum(r.tokens for r in done.values())
            )
        left = [number for number in range(len(job.units)) if number not in done]
        threads = 1 if self.options.split_sentences else THREADS
        work = TaskList(
            function=run_unit, shared=job, numbers=left, threads=threads, files=self.files
        )
        for number, record in run_tasks(work, self.runner, self.progress):
            done[number] = record
        return [done[number] for number in range(len(job.units))]

    def _segments(self, job: Job, records: Sequence[UnitRecord]) -> list[DocumentSet]:
        return [
            DocumentSet(
                dataset=join_url(job.work, segment.name),
                documents=segment.documents,
                side=f"{segment.name}.side"
                if self.options.dedup or self.options.shuffle_seed is not None
                else "",
                unit=unit,
            )
            for unit, record in enumerate(records)
            for segment in record.segments
        ]

    def _reasons(self, records: Sequence[UnitRecord]) -> str:
        """Why nothing is left, for a message: counts by reason, and the first faults with their
        places.
        """
        counts: dict[str, int] = {}
        for record in records:
            for reason, count in record.counts.items():
                counts[reason] = counts.get(reason, 0) + count
        told = "".join(f"; {count:,} {reason}" for reason, count in sorted(counts.items()))
        messages = [message for record in records for message in record.messages]
        return told + "".join(f"\n  {message}" for message in messages[:3])

    def _layout(
        self,
        job: Job,
        parts: list[DocumentSet],
        sources: Sequence[str],
        records: Sequence[UnitRecord],
    ) -> Layout:
        if not any(part.documents for part in parts):
            self.remove_work()  # nothing in it is of use
            raise ConvertError(
                f"the {len(self.inputs)} input files hold no text and no tokens; nothing was written{self._reasons(records)}"
            )
        parts = [part for part in parts if part.documents]
        kinds = count_parts(parts, self.storage)
        dtype = np.dtype(self.options.dtype or np.result_type(*kinds.dtypes))
        if len(kinds.multimodal) > 1:
            raise ConvertError("some inputs have modes and others have none; convert them apart")
        buckets = 0
        if self.options.shuffle_seed is not None:
            buckets = max(1, -(-kinds.tokens * dtype.itemsize * 8 // self.runner.memory_bytes))
        documents = OrderedDocuments(job, parts, buckets)
        bounds = plan_bounds(documents, dtype.itemsize, self.options.shard_bytes)
        stem = self.prefix.rpartition("/")[2]
        count = len(bounds) - 1
        names = (
            [stem]
            if self.options.shard_bytes is None
            else [shard_name(stem, n, count) for n in range(count)]
        )
        folder = (
            join_url(self.work, "out") if not is_remote(self.prefix) else parent_url(self.prefix)
        )
        layout = Layout(
            parts=parts,
            dtype=str(dtype),
            multimodal=kinds.multimodal == {True},
            buckets=buckets,
            bounds=bounds,
            names=names,
            targets=[join_url(folder, name) for name in names],
            first_sequences=number_sequences(documents, bounds)
            if self.options.kind == "tar"
            else [0] * count,
        )
        return self.publisher.aim(replace(layout, digest=layout_digest(job, layout, sources)))

    def publish(self, layout: Layout, shards: list[Shard], labels: Labels) -> Manifest:
        """Put everything under its final name. May be interrupted and repeated."""
        manifest = Manifest(
            kind=self.options.kind,
            dtype=layout.dtype,
            multimodal=layout.multimodal,
            **(labels if layout.multimodal else labels | {"loss_modes": None}),
            documents=sum(shard.documents for shard in shards),
            sequences=sum(shard.sequences for shard in shards),
            tokens=sum(shard.tokens for shard in shards),
            shards=shards,
        )
        return self.publisher.publish(layout, manifest)

    @cached_property
    def publisher(self) -> Publisher:
        """Of this conversion: what is published under which names."""
        inputs = [f"{item.path} {item.format} {item.size} {item.etag}" for item in self.inputs]
        asked = json.dumps(
            [self.options.digest(), self.tokenizer.digest if self.tokenizer else "", inputs]
        )
        job = hashlib.blake2b(asked.encode(), digest_size=12).hexdigest()
        return Publisher(self.prefix, self.options.kind, self.work, self.storage, job)

    def leave(self) -> None:
        """After an interruption: keep what a second run can use, and nothing else."""
        if is_remote(self.work) or not os.path.isdir(self.work):
            return
        names = os.listdir(self.work)
        if any(name.startswith(("unit-", "shard-")) and name.endswith(".json") for name in names):
            log.warning(
                "what is done is kept in %s; run the same command again to go on", self.work
            )
        else:
            self.remove_work()

    def forget(self) -> None:
        """Remove what an interrupted run has done; the lock is held, and what is noted of the
        output's names stays true.
        """
        if is_remote(self.work):
            store, key = open_store(f"{self.work}/", self.storage)
            names = [info.key for info in store.list(key)]
        else:
            store, key = open_store(self.work, self.storage)
            names = [os.path.join(root, name) for root, _, files in os.walk(key) for name in files]
        kept = {f"{key.rstrip('/')}/{name}" for name in KEPT}
        # records go before what they speak of
        for name in sorted(names, key=lambda name: not name.endswith(".json")):
            if name not in kept and not name.rpartition("/")[2].startswith(KEPT_PIPE):
                store.delete(name)

    def remove_work(self) -> None:
        """Forget everything unfinished: at once, so that a kill leaves all of it or nothing."""
        self.publisher.release()
        if is_remote(self.work):
            store, key = open_store(f"{self.work}/", self.storage)
            keys = [info.key for info in store.list(key)]
            # What is noted of the output goes last: as long as anything is here, it says whose the
            # output is.
            for name in sorted(keys, key=lambda name: name.endswith(KEPT)):
                store.delete(name)
        elif os.path.isdir(self.work):
            gone = f"{self.work}.removed"
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(self.work, gone)
            shutil.rmtree(gone, ignore_errors=True)


def _write_shard(
    shared: tuple[Job, Layout], number: int, progress: Callable[[int, int], None]
) -> Shard:
    return write_shard(*shared, number, progress)
