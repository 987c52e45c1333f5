"""A conversion from its inputs to published shards; started again, it goes on where it stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.cluster import shared_files
from streammega.convert.conversion import Conversion, WrittenDataset
from streammega.convert.options import ConvertOptions, Runner
from streammega.convert.preflight import check_writable, warn_of_little_room
from streammega.convert.prepare import prepare, sorted_settings
from streammega.convert.read.inputs import described
from streammega.convert.read.pipes import (
    check_output,
    forget_pipes,
    is_pipe,
    keep_pipes,
    named_as_given,
    tell_of_pipes,
)
from streammega.convert.report import ConvertReport, make_report
from streammega.convert.resume import can_resume
from streammega.convert.work_folder import held_output, work_folder
from streammega.convert.write.destination import Destination
from streammega.convert.write.manifest_metadata import Labels
from streammega.convert.write.publish import Publisher
from streammega.dataset.growing.checks import check_not_grown
from streammega.dataset.manifest import Manifest
from streammega.dataset.shards import split_name
from streammega.storage.open import is_remote
from streammega.storage.progress import ProgressObserver


def convert(
    inputs: Sequence[str],
    output: str,
    *,
    options: ConvertOptions | None = None,
    runner: Runner | None = None,
    overwrite: bool = False,
    storage: StorageConfig | None = None,
    input_storage: StorageConfig | None = None,
    progress: ProgressObserver | None = None,
    **settings: Any,
) -> ConvertReport:
    """Convert a corpus to token shards: text through a tokenizer, or tokens from one layout to
    another.

    What is made depends on the inputs and the options alone: not on workers, engine, memory, or how
    often it was interrupted. Nothing appears under the final names unless all of it is done; a
    manifest, written last, lists the shards.

    Args:
        inputs: files, folders, globs, `@list` files and URLs, `-` for stdin; see `find_inputs`.
        output: prefix to write, a path or URL.
        options: or its fields by name (`tokenizer="tok.json"`, `key="text"`, ...): see
            ConvertOptions.
        runner: or its fields by name (`workers=4`, `engine="ray"`, ...): see Runner.
        overwrite: replace an existing dataset.
        storage: of the output and the work folder.
        input_storage: of the inputs; by default `storage`.
        progress: is told which stage of the work begins and what was just done.

    Raises ConfigError, ConvertError (naming file and line), ObjectNotFoundError, StorageError.
    """
    storage = storage or StorageConfig()
    input_storage = input_storage or storage
    options, runner = sorted_settings(options, runner, settings)
    check_output(output)
    if any(is_pipe(name) for name in inputs):
        return _convert_pipes(
            inputs, output, options, runner, overwrite, storage, input_storage, progress
        )
    return _convert_files(
        inputs, output, options, runner, overwrite, storage, input_storage, progress
    )


def _convert_files(
    inputs: Sequence[str],
    output: str,
    options: ConvertOptions,
    runner: Runner,
    overwrite: bool,
    storage: StorageConfig,
    input_storage: StorageConfig,
    progress: ProgressObserver | None,
    *,
    is_held: bool = False,
) -> ConvertReport:
    """Convert inputs that can be read again. is_held: the output and the work folder are locked."""
    began = time.monotonic()
    conversion, labels, passed_over = prepare(
        inputs, output, options, runner, storage, input_storage, progress
    )
    lock = nullcontext() if is_held else held_output(conversion.prefix, conversion.work)
    with lock:
        written, manifest = _run(conversion, labels, overwrite=overwrite)
    report = make_report(
        conversion.prefix,
        storage,
        manifest,
        written.records,
        written.duplicates,
        written.source_bytes,
        time.monotonic() - began,
        written.packing,
    )
    return replace(
        report,
        inputs=described(conversion.inputs),
        files_passed_over=passed_over.counts,
        names_passed_over=passed_over.names,
    )


def _run(
    conversion: Conversion, labels: Labels, *, overwrite: bool
) -> tuple[WrittenDataset, Manifest]:
    """Make all shards and publish them. What is done when it fails is kept for a second run."""
    conversion.publisher.check(conversion.inputs, overwrite=overwrite)
    # What is done already takes room, and is not done again.
    if not (os.path.isdir(conversion.work) and can_resume(conversion.work)):
        warn_of_little_room(conversion.prefix, conversion.inputs)
    check_not_grown(conversion.prefix, conversion.storage, overwrite=overwrite)
    check_writable(conversion.prefix, conversion.storage, replaces=overwrite)
    if is_remote(conversion.work):
        check_writable(conversion.work, conversion.storage, is_work=True)
    try:
        with ExitStack() as cluster:
            if conversion.runner.engine == "ray":
                files = shared_files(conversion.work, conversion.inputs)
                conversion.files = cluster.enter_context(files)
            conversion.publisher.reserve(overwrite=overwrite)
            written = conversion.make()
        manifest = conversion.publish(written, labels)
    except BaseException:
        conversion.leave()
        raise
    conversion.remove_work()
    return written, manifest


def _convert_pipes(
    inputs: Sequence[str],
    output: str,
    options: ConvertOptions,
    runner: Runner,
    overwrite: bool,
    storage: StorageConfig,
    input_storage: StorageConfig,
    progress: ProgressObserver | None,
) -> ConvertReport:
    """Convert inputs some of which can be read once: they are read into the work folder first."""
    prefix, _ = split_name(output)
    work = work_folder(prefix, runner.work)
    # From before the pipes are read to the end: what is kept of them is this conversion's alone.
    with held_output(prefix, work):
        # Else what is there may be half of this very conversion.
        if not (os.path.isdir(work) and can_resume(work)):
            destination = Destination(prefix, options.kind, storage)
            Publisher(destination, work, "").check([], overwrite=overwrite)
        check_writable(prefix, storage, replaces=overwrite)
        kept = keep_pipes(inputs, work, options.read_as)
        files = [kept.get(name, name) for name in inputs]
        try:
            with tell_of_pipes(kept):
                report = _convert_files(
                    files,
                    output,
                    options,
                    runner,
                    overwrite,
                    storage,
                    input_storage,
                    progress,
                    is_held=True,
                )
        except BaseException:
            forget_pipes(work)
            raise
    messages = [named_as_given(message, kept) for message in report.messages]
    return replace(report, messages=messages)
