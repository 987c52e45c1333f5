"""What a conversion would do, before it does anything: its plan, its first documents as tokens, and
an estimate by a sample.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from streammega.convert.documents import RawDocument, Tokens, offsets_of
from streammega.convert.job import Job
from streammega.convert.options import ConvertOptions
from streammega.convert.read.compression import compression_of
from streammega.convert.read.formats import FORMATS
from streammega.convert.read.inputs import Inputs, input_names
from streammega.convert.read.source import Input, Skipped
from streammega.convert.read.stdin import is_pipe
from streammega.convert.run import plan
from streammega.convert.tokenize.encode import encoder_of
from streammega.convert.tokenize.tokenizers import Tokenizer
from streammega.convert.write.destination import check_may_write
from streammega.convert.write.segments import batches_of, select_documents, token_dtype
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.kernels import num_threads
from streammega.storage.progress import ProgressObserver

SAMPLED_UNITS = 8
"""Units that are looked into, spread over all: inputs differ."""
SAMPLE_BYTES = 1 << 20
"""Bytes that are read of each sampled unit."""
SHOWN_DOCUMENTS = 3
SHOWN_TOKENS = 24
"""How much of a document and of a sequence is shown."""


@dataclass(kw_only=True)
class Sample:
    """Documents of some units, as they would be stored.

    first_documents: a row for each of their sequences, with the first ids and their text.
    dropped: documents that would be left out, by reason.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    is_complete: bool = True
    """Whether it is all of the inputs."""
    dtype: np.dtype[Any] | None = None
    """The dtype of its tokens; None if there are none."""
    first_documents: list[dict[str, Any]] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)


def plan_conversion(
    inputs: Inputs, output: str | os.PathLike[str], **arguments: Any
) -> dict[str, Any]:
    """What `convert` would do with the same arguments. Writes nothing; a little of the inputs is
    read.

    documents, tokens, output_bytes, shards are estimates: they scale the sample by the bytes of all
    inputs. Raises what `convert` would raise before its first document, and for the documents of
    the sample.
    """
    inputs, output = input_names(inputs), os.fspath(output)
    for name in inputs:
        if is_pipe(name):
            raise ConfigError(
                f"{name}: can be read only once, so a dry run would take it away; give files"
            )
    conversion = plan(inputs, output, **arguments)
    conversion.publisher.check(conversion.inputs, overwrite=conversion.overwrite)
    check_may_write(conversion.prefix, conversion.storage)
    options = conversion.options
    tokenizer = conversion.tokenizer
    job = conversion.job(all_units=True)
    conversion.progress.begin("reading samples", None)
    sample = _take_sample(job, tokenizer, conversion.progress)
    scale = 1.0
    if not sample.is_complete:
        input_bytes = sum(item.size for item in conversion.inputs)
        scale = max(1.0, input_bytes / max(1, sample.bytes))
    # the ids of most tokenizers fit 16 bits
    dtype = np.dtype(options.dtype or sample.dtype or np.uint16)
    tokens = round(sample.tokens * scale)
    output_bytes = tokens * dtype.itemsize
    shards = 1
    if options.shard_bytes is not None:
        shards = max(1, -(-output_bytes // options.shard_bytes))
    formats = {item.format: {"files": 0, "bytes": 0} for item in conversion.inputs}
    for item in conversion.inputs:
        formats[item.format]["files"] += 1
        formats[item.format]["bytes"] += item.size
    return {
        "dataset": redact_urls(conversion.prefix),
        "format": options.format,
        "units": len(job.units),
        "workers": min(conversion.execution.workers or num_threads(), max(1, len(job.units))),
        "tokenizer": tokenizer.name if tokenizer else "none: the inputs hold tokens",
        "eod_id": conversion.metadata["eod_id"],
        "dtype": str(dtype),
        "documents": round(sample.documents * scale),
        "tokens": tokens,
        "output_bytes": output_bytes,
        "shards": shards,
        "notes": _notes(options, conversion.inputs),
        "inputs": formats,
        "files_passed_over": conversion.skipped_files.counts,
        "sample": {
            "documents": sample.documents,
            "bytes": sample.bytes,
            "dropped": sample.dropped,
            "first_documents": sample.first_documents,
        },
    }


def _take_sample(job: Job, tokenizer: Tokenizer | None, progress: ProgressObserver) -> Sample:
    """Up to SAMPLE_BYTES of each of some units, spread over all."""
    sample = Sample()
    skipped = Skipped()
    if not job.units:
        return sample
    spread = np.linspace(0, len(job.units) - 1, SAMPLED_UNITS)
    units = np.unique(spread.astype(int)).tolist()
    sample.is_complete = len(units) == len(job.units)
    for unit in units:
        size = 0
        for batch in batches_of(job, unit, skipped):
            if size >= SAMPLE_BYTES:
                sample.is_complete = False
                break
            if not isinstance(batch, Tokens):
                beginnings = [_beginning(document) for document in batch]
                sample.is_complete = sample.is_complete and beginnings == batch
                batch = encoder_of(job)(beginnings, skipped)
            size += batch.source_bytes
            kept, _ = select_documents(batch, job, skipped)
            _add(sample, kept, job, tokenizer)
            progress.advance(batch.source_bytes, len(kept.tokens))
        sample.bytes += size
    sample.dropped = skipped.counts
    return sample


def _beginning(document: RawDocument) -> RawDocument:
    """A document; of a long text, only as much as a sample takes."""
    if document.is_record or len(document.data) <= SAMPLE_BYTES:
        return document
    # The bytes may end within a character, which is left out.
    text = document.data[:SAMPLE_BYTES].decode("utf-8", "ignore")
    return replace(document, data=text.encode())


def _add(sample: Sample, batch: Tokens, job: Job, tokenizer: Tokenizer | None) -> None:
    sample.documents += len(batch.documents)
    sample.tokens += len(batch.tokens)
    if len(batch.tokens):
        dtype = token_dtype([batch.tokens], job.options.dtype)
        sample.dtype = dtype if sample.dtype is None else np.result_type(sample.dtype, dtype)
    token_bounds = offsets_of(batch.lengths)
    sequence_bounds = offsets_of(batch.documents)
    shown = sample.documents - len(batch.documents)
    for document in range(min(len(batch.documents), max(0, SHOWN_DOCUMENTS - shown))):
        for number in range(*sequence_bounds[document : document + 2].tolist()):
            start, stop = token_bounds[number : number + 2].tolist()
            ids = batch.tokens[start : min(stop, start + SHOWN_TOKENS)].tolist()
            sample.first_documents.append(
                {
                    "document": shown + document,
                    "mode": None if batch.modes is None else int(batch.modes[number]),
                    "tokens": stop - start,
                    "ids": ids,
                    "pieces": [] if tokenizer is None else [tokenizer.decode([one]) for one in ids],
                }
            )


def _notes(options: ConvertOptions, inputs: Sequence[Input]) -> list[str]:
    notes = []
    if options.dedup:
        notes.append("duplicates are not looked for in the sample: less may be left")
    if options.format == "zst":
        notes.append("the bytes of the output are those before their compression")
    if any(not FORMATS[item.format].is_even or compression_of(item.path) for item in inputs):
        notes.append(
            "the estimate is rough: columns, archives and compressed files hold more or less than "
            "their bytes"
        )
    return notes
