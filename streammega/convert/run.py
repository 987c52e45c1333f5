"""A conversion from its inputs to a published dataset: plan, run, publish.

`convert` does all of it. Where several processes that know nothing of each other share the work
(Slurm arrays, Kubernetes jobs), each runs `convert_task` on its part of the units, and `merge_tasks`
makes the dataset. Tasks may run in any order and number, and be killed and started again: a unit
is made of its inputs alone, and one that has a record is not done again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.config.validate import unknown_setting
from streammega.convert.conversion import Conversion, WrittenDataset
from streammega.convert.job import length_histogram
from streammega.convert.options import ConvertOptions, ExecutionConfig
from streammega.convert.read.columns import with_columns
from streammega.convert.read.formats import FORMATS
from streammega.convert.read.inputs import (
    Inputs,
    OwnOutput,
    SkippedFiles,
    describe_inputs,
    find_inputs,
    input_names,
)
from streammega.convert.read.source import Input
from streammega.convert.read.stdin import (
    is_pipe,
    pipes_as_files,
    with_pipe_names,
)
from streammega.convert.report import ConvertReport, sum_skipped
from streammega.convert.tokenize.chat import as_option, find_template
from streammega.convert.tokenize.encode import NO_TOKENIZER, BatchEncoder, keep_encoder
from streammega.convert.tokenize.tokenizers import load_tokenizer, resolve_eod
from streammega.convert.work_dir import WorkDir, output_lock
from streammega.convert.write.destination import (
    Condition,
    Destination,
    check_may_write,
    check_output,
    check_writable,
    warn_of_little_room,
)
from streammega.convert.write.manifest_metadata import labels_of
from streammega.convert.write.publish import Publisher
from streammega.dataset.indexed import IndexedDataset, document_tokens
from streammega.dataset.manifest import Manifest
from streammega.dataset.names import MANIFEST, split_name
from streammega.errors import ConfigError, ConvertError
from streammega.errors.extras import import_extra
from streammega.errors.redaction import redact_urls
from streammega.storage.open import is_remote
from streammega.storage.progress import ProgressObserver

WHY_DELETE = "--overwrite removes what it replaced"
MERGE = "merge"
"""The value of --task that makes the dataset of what all tasks did."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of `of` tasks, counted from 0."""

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise ConfigError(
                f"there is no task {self.number} of {self.of}; tasks are counted from 0, to "
                f"{self.of - 1}"
            )


def parse_task(text: str) -> Task | None:
    """The task of "3/16"; None for "merge". Raises ConfigError for anything else."""
    if text == MERGE:
        return None
    number, slash, of = text.partition("/")
    if not slash or not number.isdigit() or not of.isdigit():
        raise ConfigError(
            f"task (--task) is {text!r}; give the number of a task, from 0 on, and how many there "
            f"are, such as 3/16, or '{MERGE}' when all of them have ended"
        )
    return Task(number=int(number), of=int(of))


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """What a task did. units: of this task; units_before: of those, done by an earlier start of it;
    units_of_all: of all tasks together.
    """

    task: Task
    units: int
    units_before: int
    units_of_all: int
    documents: int
    tokens: int
    seconds: float


def convert(
    inputs: Inputs,
    output: str | os.PathLike[str],
    *,
    options: ConvertOptions | None = None,
    execution: ExecutionConfig | None = None,
    overwrite: bool = False,
    storage: StorageConfig | None = None,
    input_storage: StorageConfig | None = None,
    progress: ProgressObserver | None = None,
    **settings: Any,
) -> ConvertReport:
    """Convert a corpus to token shards: text through a tokenizer, or tokens from one layout to
    another.

    What is made depends on the inputs and the options alone: not on workers, backend, memory, or
    how often it was interrupted. Nothing appears under the final names unless all of it is done; a
    manifest, written last, lists the shards.

    Args:
        inputs: files, folders, globs, `@list` files and URLs, `-` for stdin; a list of them, or
            a single one. See `find_inputs`.
        output: prefix to write, a path or URL.
        options: or its fields by name (`tokenizer="tok.json"`, `text_key="text"`, ...): see
            ConvertOptions.
        execution: or its fields by name (`workers=4`, `backend="ray"`, ...): see ExecutionConfig.
        overwrite: replace an existing dataset.
        storage: of the output and the work folder.
        input_storage: of the inputs; by default `storage`.
        progress: its methods are called when a stage begins and when some of it is done.

    Raises ConfigError, ConvertError (naming file and line), ObjectNotFoundError, StorageError.
    """
    began = time.monotonic()
    options, execution = merge_settings(options, execution, settings)
    storage = storage or StorageConfig()
    inputs, output = input_names(inputs), os.fspath(output)
    check_output(output)
    with ExitStack() as stack:
        pipes: dict[str, str] = {}
        if any(is_pipe(name) for name in inputs):
            prefix, _ = split_name(output)
            work_dir = WorkDir.of(prefix, execution.work_dir, storage)
            stack.enter_context(output_lock(prefix, work_dir))
            # Of no job yet: what was made of a stream cannot be resumed.
            destination = Destination(prefix, options.format, storage)
            Publisher(destination, work_dir, "").check([], overwrite=overwrite)
            _check_output_writable(prefix, storage, overwrite=overwrite)
            pipes = stack.enter_context(pipes_as_files(inputs, work_dir))
        conversion = plan(
            [pipes.get(name, name) for name in inputs],
            output,
            options=options,
            execution=execution,
            overwrite=overwrite,
            storage=storage,
            input_storage=input_storage,
            progress=progress,
        )
        if not pipes:
            stack.enter_context(output_lock(conversion.prefix, conversion.work_dir))
        _check_before_run(conversion)
        try:
            written = conversion.run()
            manifest = conversion.publish(written)
        except BaseException:
            if pipes:  # what was made of a stream cannot be resumed
                conversion.remove_work()
            else:
                conversion.release()
            raise
        conversion.remove_work()
        report = _make_report(conversion, written, manifest, time.monotonic() - began)
        messages = [with_pipe_names(message, pipes) for message in report.messages]
        return replace(report, messages=messages)


def convert_task(
    inputs: Inputs, output: str | os.PathLike[str], task: Task, **arguments: Any
) -> TaskReport:
    """Do one task's share of a conversion; `merge_tasks` makes the dataset.

    All tasks, and what merges, are given the same inputs, output, options and work folder (of the
    execution: a URL, or a folder of a shared file system). Other arguments and errors are those of
    `convert`.
    """
    began = time.monotonic()
    conversion = _plan_of_tasks(inputs, output, arguments)
    conversion.work_dir.check_unlocked()
    conversion.publisher.check(conversion.inputs, overwrite=conversion.overwrite)
    check_may_write(conversion.prefix, conversion.storage)
    records, num_before, num_units = conversion.run_units(task.number, task.of)
    return TaskReport(
        task=task,
        units=len(records),
        units_before=num_before,
        units_of_all=num_units,
        documents=sum(record.documents for record in records),
        tokens=sum(record.tokens for record in records),
        seconds=time.monotonic() - began,
    )


def merge_tasks(inputs: Inputs, output: str | os.PathLike[str], **arguments: Any) -> ConvertReport:
    """Make the dataset of what tasks did: `convert`, which does none of their work.

    Arguments are those of `convert`. Raises ConvertError where some of the work is not done.
    """
    began = time.monotonic()
    conversion = _plan_of_tasks(inputs, output, arguments)
    with output_lock(conversion.prefix, conversion.work_dir):
        _check_before_run(conversion)
        written = conversion.run(is_merge=True)
        manifest = conversion.publish(written)
        conversion.remove_work()
        return _make_report(conversion, written, manifest, time.monotonic() - began)


def _plan_of_tasks(
    inputs: Inputs, output: str | os.PathLike[str], arguments: dict[str, Any]
) -> Conversion:
    """A planned conversion. Raises ConfigError for what several processes cannot share."""
    inputs, output = input_names(inputs), os.fspath(output)
    check_output(output)
    if any(is_pipe(name) for name in inputs):
        raise ConfigError("a pipe can be read once: give tasks (--task) files that all can read")
    conversion = plan(inputs, output, **arguments)
    execution = conversion.execution
    if not execution.resume:
        raise ConfigError(
            "resume=False (--no-resume) would forget what other tasks have done; remove the work "
            "folder before the first of them starts"
        )
    if execution.backend != "local":
        raise ConfigError(
            "tasks (--task) and the ray backend both share the work out; choose one of them"
        )
    if execution.work_dir is None and is_remote(output):
        raise ConfigError(
            f"{output}: tasks need a work folder that all of them can write; name one by --work-dir, "
            f"a URL in the folder of the output for instance"
        )
    return conversion


def _check_before_run(conversion: Conversion) -> None:
    """Raise what would fail in the end, while the output is locked."""
    prefix = conversion.prefix
    overwrite = conversion.overwrite
    conversion.publisher.check(conversion.inputs, overwrite=overwrite)
    # What is done already takes room, and is not done again.
    if not conversion.work_dir.can_resume():
        warn_of_little_room(prefix, conversion.inputs)
    _check_output_writable(prefix, conversion.storage, overwrite=overwrite)
    if conversion.work_dir.is_remote:
        why_delete = "a work folder is removed in the end"
        check_writable(conversion.work_dir.url, conversion.storage, why_delete=why_delete)


def _check_output_writable(prefix: str, storage: StorageConfig, *, overwrite: bool) -> None:
    commits: Condition | None = None
    if is_remote(prefix):  # on a disk a lock takes the place of conditions
        commits = "if_match" if overwrite else "if_absent"
    check_writable(prefix, storage, why_delete=WHY_DELETE if overwrite else "", commits=commits)


def plan(
    inputs: Sequence[str],
    output: str,
    *,
    options: ConvertOptions | None = None,
    execution: ExecutionConfig | None = None,
    overwrite: bool = False,
    storage: StorageConfig | None = None,
    input_storage: StorageConfig | None = None,
    progress: ProgressObserver | None = None,
    **settings: Any,
) -> Conversion:
    """A conversion that has not begun; rights, buckets and disks are not looked at yet.

    Arguments and errors are those of `convert`.
    """
    options, execution = merge_settings(options, execution, settings)
    storage = storage or StorageConfig()
    input_storage = input_storage or storage
    check_output(output)
    prefix, _ = split_name(output)
    options = replace(options, format=options.format_of(output))
    tokenizer = None
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer, **options.tokenizer_settings)
        if options.append_eod:
            # The token itself, as its files name it now: for workers elsewhere, and so that another
            # one is another conversion. Inputs of ids need none.
            with suppress(ConvertError):
                eod, _ = resolve_eod(tokenizer, options.eod)
                options = replace(options, eod=eod)
    if options.chat_template is not None:
        # All of it, for workers elsewhere, and so that another one is another conversion.
        template = find_template(options.chat_template, options.tokenizer)
        options = replace(options, chat_template=as_option(template))
    skipped_files = SkippedFiles()
    work_dir = WorkDir.of(prefix, execution.work_dir, storage)
    own_output = OwnOutput(prefix=prefix, work_dir=work_dir.url)
    files = find_inputs(inputs, input_storage, options, skipped_files, own_output)
    if not options.drop_columns:
        files = with_columns(files, input_storage)
    _check_packages(files, options)
    metadata = labels_of(files, options, tokenizer, input_storage)
    if tokenizer is None and options.eod_id is None:
        # What is cut keeps the end of its document.
        options = replace(options, eod_id=metadata["eod_id"])
    if options.keep_modes is not None:
        # The sequence with the end may be one of those left out.
        metadata = metadata | {"eod_id": None}
    if any(FORMATS[item.format].has_text for item in files):
        if tokenizer is None:
            raise ConvertError(NO_TOKENIZER)
        if options.eod_id is not None and all(FORMATS[item.format].has_text for item in files):
            raise ConfigError(
                f"eod_id (--eod-id) is {options.eod_id}, and goes with inputs of token ids; these "
                f"hold text: name the tokenizer's end of a document with --eod"
            )
        # Making the encoder raises what would fail at the first text.
        encoder = BatchEncoder(tokenizer, options, input_storage)
        encoder.warn()
        keep_encoder(encoder)
    # A cluster of this machine alone sees its folders.
    is_cluster = execution.backend == "ray" and os.environ.get("RAY_ADDRESS", "local") != "local"
    if is_cluster and execution.work_dir is None and is_remote(prefix):
        raise ConfigError(
            f"{prefix}: the machines of a Ray cluster need a work folder that all of them can "
            f"write; name one by --work-dir, a URL in the folder of the output for instance"
        )
    return Conversion(
        prefix=prefix,
        work_dir=work_dir,
        inputs=files,
        skipped_files=skipped_files,
        options=options,
        execution=execution,
        storage=storage,
        input_storage=input_storage,
        tokenizer=tokenizer,
        metadata=metadata,
        overwrite=overwrite,
        progress=progress or ProgressObserver(),
    )


def _check_packages(files: Sequence[Input], options: ConvertOptions) -> None:
    """Raise ConfigError for a package that is needed and not installed."""
    for item in {item.format: item for item in files}.values():
        package = FORMATS[item.format].package
        if package:
            import_extra(package, "convert", f"{item.path}: reading {item.format} needs {package}")
    if options.provenance:
        import_extra("pyarrow", "convert", "--provenance needs pyarrow")


def merge_settings(
    options: ConvertOptions | None, execution: ExecutionConfig | None, settings: dict[str, Any]
) -> tuple[ConvertOptions, ExecutionConfig]:
    """Put fields of options and execution that were given by name in their places."""
    of_options: dict[str, Any] = {}
    of_execution: dict[str, Any] = {}
    if "text_key" in settings and "text_keys" in settings:
        raise ConfigError("text_key and text_keys both name the keys of the text; give one of them")
    for name, value in settings.items():
        if name == "text_key":
            of_options["text_keys"] = (value,)
        elif name in {field.name for field in fields(ConvertOptions)}:
            of_options[name] = value
        elif name in {field.name for field in fields(ExecutionConfig)}:
            of_execution[name] = value
        else:
            raise ConfigError(unknown_setting(name, ConvertOptions, ExecutionConfig))
    options = replace(options or ConvertOptions(), **of_options)
    execution = replace(execution or ExecutionConfig(), **of_execution)
    return options, execution


def _make_report(
    conversion: Conversion, written: WrittenDataset, manifest: Manifest, seconds: float
) -> ConvertReport:
    """Sums over units. Without units, where datasets are copied as they are, nothing was dropped."""
    total = sum_skipped(written.records)
    if written.records:
        histogram = np.sum([record.histogram for record in written.records], axis=0).tolist()
    else:
        indexed = IndexedDataset(conversion.prefix + MANIFEST, conversion.storage)
        histogram = length_histogram(document_tokens(indexed))
    dropped = {"duplicates": written.duplicates} if written.duplicates else {}
    folder = conversion.prefix.removesuffix(conversion.destination.stem)
    return ConvertReport(
        prefix=redact_urls(conversion.prefix),
        format=manifest.kind,
        shards=len(manifest.shards),
        documents=manifest.documents,
        sequences=manifest.sequences,
        tokens=manifest.tokens,
        dtype=manifest.dtype,
        vocab_size=manifest.vocab_size,
        eod_id=manifest.eod_id,
        text_bytes=written.source_bytes,
        stored_bytes=sum(shard.bytes for shard in manifest.shards),
        seconds=seconds,
        dropped=dropped | total.counts,
        messages=total.messages,
        histogram=histogram,
        inputs=describe_inputs(conversion.inputs),
        files_passed_over=conversion.skipped_files.counts,
        names_passed_over=conversion.skipped_files.names,
        members_left_out=total.members,
        eod_in_texts=total.eod_in_texts,
        packing={} if written.packing is None else asdict(written.packing),
        shard_prefixes=[redact_urls(folder + shard.name) for shard in manifest.shards],
    )
