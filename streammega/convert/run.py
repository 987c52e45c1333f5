"""A conversion from its inputs to a published dataset: plan, run, publish."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.conversion import Conversion, WrittenDataset
from streammega.convert.job import length_histogram
from streammega.convert.options import ConvertOptions, Runner
from streammega.convert.read.inputs import described
from streammega.convert.read.stdin import (
    check_output,
    forget_pipes,
    is_pipe,
    keep_pipes,
    named_as_given,
    tell_of_pipes,
)
from streammega.convert.report import ConvertReport, sum_records
from streammega.convert.setup import check_output_is_free, check_writable, merge_settings, plan
from streammega.convert.work_dir import output_lock, work_folder
from streammega.convert.write.destination import Destination
from streammega.convert.write.document_order import document_tokens
from streammega.convert.write.publish import Publisher
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.manifest import MANIFEST, Manifest
from streammega.dataset.shard import split_name
from streammega.errors.redaction import redact_urls
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
    options, runner = merge_settings(options, runner, settings)
    named: dict[str, Any] = {
        "options": options,
        "runner": runner,
        "overwrite": overwrite,
        "storage": storage or StorageConfig(),
        "input_storage": input_storage,
        "progress": progress,
    }
    check_output(output)
    if not any(is_pipe(name) for name in inputs):
        return convert_files(inputs, output, **named)
    with _pipes_as_files(inputs, output, options, runner, named["storage"], overwrite) as kept:
        files = [kept.get(name, name) for name in inputs]
        report = convert_files(files, output, is_kept=True, **named)
    messages = [named_as_given(message, kept) for message in report.messages]
    return replace(report, messages=messages)


def convert_files(
    inputs: Sequence[str],
    output: str,
    *,
    is_kept: bool = False,
    is_merge: bool = False,
    **named: Any,
) -> ConvertReport:
    """Convert inputs that can be read again. Other arguments are those of `convert`.

    is_kept: the inputs are streams, kept in a work folder that is locked already. is_merge: tasks have done all
    units.
    """
    began = time.monotonic()
    conversion = plan(inputs, output, **named)
    with ExitStack() as stack:
        if not is_kept:
            stack.enter_context(output_lock(conversion.prefix, conversion.work))
        check_output_is_free(conversion)
        try:
            conversion.publisher.reserve(overwrite=conversion.overwrite)
            written = conversion.run(is_merge=is_merge)
            manifest = conversion.publish(written)
        except BaseException:
            if is_kept:  # what was made of a stream cannot be resumed
                conversion.remove_work()
            elif not is_merge:  # else tasks may be at work in the folder
                conversion.release()
            raise
        conversion.remove_work()
    return _make_report(conversion, written, manifest, time.monotonic() - began)


def _make_report(
    conversion: Conversion, written: WrittenDataset, manifest: Manifest, seconds: float
) -> ConvertReport:
    """Sums over units. Without units, where datasets are copied as they are, nothing was dropped."""
    total = sum_records(written.records)
    histogram = total.histogram
    if not written.records:
        indexed = IndexedDataset(conversion.prefix + MANIFEST, conversion.storage)
        histogram = length_histogram(document_tokens(indexed))
    dropped = {"duplicates": written.duplicates} if written.duplicates else {}
    return ConvertReport(
        prefix=redact_urls(conversion.prefix),
        kind=manifest.kind,
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
        inputs=described(conversion.inputs),
        files_passed_over=conversion.skipped_files.counts,
        names_passed_over=conversion.skipped_files.names,
        members_left_out=total.members,
        packing={} if written.packing is None else asdict(written.packing),
    )


@contextmanager
def _pipes_as_files(
    inputs: Sequence[str],
    output: str,
    options: ConvertOptions,
    runner: Runner,
    storage: StorageConfig,
    overwrite: bool,
) -> Iterator[dict[str, str]]:
    """The file of each input that can be read once: all of it is read into the work folder first.

    The output is locked until the block ends.
    """
    prefix, _ = split_name(output)
    work = work_folder(prefix, runner.work)
    with output_lock(prefix, work):
        # Of no job yet: what was made of a stream cannot be resumed.
        destination = Destination(prefix, options.kind, storage)
        Publisher(destination, work, "").check([], overwrite=overwrite)
        check_writable(prefix, storage, replaces=overwrite)
        kept = keep_pipes(inputs, work, options.read_as)
        try:
            with tell_of_pipes(kept):
                yield kept
        except BaseException:
            forget_pipes(work)
            raise
