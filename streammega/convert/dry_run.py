"""What a conversion would do, before it does anything: its plan, its first documents as tokens, and
an estimate by a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, Tokens, bounds_of
from streammega.convert.job import Job, UnitRecord
from streammega.convert.options import ConvertOptions, Runner
from streammega.convert.read.compression import compression_of
from streammega.convert.read.formats import FORMATS
from streammega.convert.read.source import Input, Skipped
from streammega.convert.read.stdin import is_pipe
from streammega.convert.run import plan
from streammega.convert.tokenize.encode import encoder_of
from streammega.convert.tokenize.tokenizers import Tokenizer
from streammega.convert.write.destination import check_may_write
from streammega.convert.write.segments import Selection, batches_of, token_dtype
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize
from streammega.kernels.parallel import num_threads
from streammega.storage.progress import ProgressObserver

SAMPLED_UNITS = 8
"""Units that are looked into, spread over all: inputs differ."""
SAMPLE_BYTES = 1 << 20
"""Of each of them."""
SHOWN_DOCUMENTS = 3
SHOWN_TOKENS = 24
"""How much of a document and of a sequence is shown."""


@dataclass(frozen=True, kw_only=True)
class ShownSequence:
    """The beginning of a sequence: its ids, what each stands for ([] for tokens without a
    tokenizer), its mode or None.
    """

    ids: list[int]
    pieces: list[str]
    mode: int | None
    length: int


@dataclass(kw_only=True)
class Sample:
    """Documents of some units, as they would be stored. shown: the sequences of the first ones.
    dropped: documents that would be left out, by reason.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    is_complete: bool = True
    """Whether it is all of the inputs."""
    dtype: np.dtype[Any] | None = None
    """Of its tokens; None without any."""
    shown: list[list[ShownSequence]] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Plan:
    """What a conversion would do. inputs: files and bytes by format. documents, tokens,
    output_bytes, shards: estimates, which scale the sample by the bytes of all inputs.
    """

    prefix: str
    kind: str
    inputs: dict[str, tuple[int, int]]
    units: int
    workers: int
    tokenizer: str
    eod_id: int | None
    dtype: str
    sample: Sample
    documents: int
    tokens: int
    output_bytes: int
    shards: int
    notes: list[str]

    def as_text(self) -> str:
        """For a terminal."""
        lines = [f"{self.prefix}: nothing is written; this is what would be done"]
        for name, (count, size) in sorted(self.inputs.items()):
            lines.append(f"  input      {count:,} {name}, {size:,} bytes")
        tokenizer = self.tokenizer or "none: the inputs hold tokens"
        lines.append(f"  work       {pluralize(self.units, 'unit')}, {self.workers} at a time")
        lines.append(f"  tokenizer  {tokenizer}; documents end with id {self.eod_id}")
        for number, document in enumerate(self.sample.shown):
            lines += [_shown(number, sequence) for sequence in document]
        for reason, count in sorted(self.sample.dropped.items()):
            lines.append(f"  left out   {count:,} of the sample: {reason}")
        lines.append(
            f"  output     about {pluralize(self.documents, 'document')}, "
            f"{pluralize(self.tokens, 'token')} of "
            f"{self.dtype}, {self.output_bytes / 1e6:,.1f} MB in "
            f"{pluralize(self.shards, f'{self.kind} shard')} (by "
            f"{pluralize(self.sample.documents, 'document')}, "
            f"{self.sample.bytes:,} bytes)"
        )
        lines += [f"  note       {note}" for note in self.notes]
        return "\n".join(lines)


def plan_conversion(
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
) -> Plan:
    """What `convert` would do with the same arguments. Writes nothing; a little of the inputs is
    read.

    Raises what `convert` would raise before its first document, and for the documents of the
    sample.
    """
    for name in inputs:
        if is_pipe(name):
            raise ConfigError(
                f"{name}: can be read only once, so a dry run would take it away; give files"
            )
    conversion = plan(
        inputs,
        output,
        options=options,
        runner=runner,
        overwrite=overwrite,
        storage=storage,
        input_storage=input_storage,
        progress=progress,
        **settings,
    )
    conversion.publisher.check(conversion.inputs, overwrite=overwrite)
    check_may_write(conversion.prefix, conversion.storage)
    options = conversion.options
    job = conversion.job(all_units=True)
    conversion.progress.begin("reading samples", None)
    sample = _take_sample(job, conversion.tokenizer, conversion.progress)
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
    workers = min(conversion.runner.workers or num_threads(), max(1, len(job.units)))
    return Plan(
        prefix=redact_urls(conversion.prefix),
        kind=options.kind,
        inputs=_by_format(conversion.inputs),
        units=len(job.units),
        workers=workers,
        tokenizer=conversion.tokenizer.name if conversion.tokenizer else "",
        eod_id=conversion.metadata["eod_id"],
        dtype=str(dtype),
        sample=sample,
        documents=round(sample.documents * scale),
        tokens=tokens,
        output_bytes=output_bytes,
        shards=shards,
        notes=_notes(options, conversion.inputs, conversion.skipped_files.counts),
    )


def _take_sample(job: Job, tokenizer: Tokenizer | None, progress: ProgressObserver) -> Sample:
    """Up to SAMPLE_BYTES of each of some units, spread over all."""
    sample = Sample()
    if not job.units:
        return sample
    spread = np.linspace(0, len(job.units) - 1, SAMPLED_UNITS)
    units = np.unique(spread.astype(int)).tolist()
    sample.is_complete = len(units) == len(job.units)
    for unit in units:
        record = UnitRecord(digest="")
        skipped = Skipped()
        selection = Selection(job, record)
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
            kept, _ = selection.choose(batch)
            _add(sample, kept, job, tokenizer)
            progress.advance(batch.source_bytes, len(kept.tokens))
        sample.bytes += size
        for counts in (record.counts, skipped.counts):
            for reason, count in counts.items():
                sample.dropped[reason] = sample.dropped.get(reason, 0) + count
    return sample


def _beginning(document: RawDocument) -> RawDocument:
    """A document; of a long text, only as much as a sample takes."""
    if document.record or len(document.data) <= SAMPLE_BYTES:
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
    token_bounds = bounds_of(batch.lengths)
    sequence_bounds = bounds_of(batch.documents)
    for document in range(min(len(batch.documents), SHOWN_DOCUMENTS - len(sample.shown))):
        sequences = []
        for number in range(*sequence_bounds[document : document + 2].tolist()):
            start, stop = token_bounds[number : number + 2].tolist()
            ids = batch.tokens[start : min(stop, start + SHOWN_TOKENS)].tolist()
            sequences.append(
                ShownSequence(
                    ids=ids,
                    pieces=[] if tokenizer is None else [tokenizer.decode([one]) for one in ids],
                    mode=None if batch.modes is None else int(batch.modes[number]),
                    length=stop - start,
                )
            )
        sample.shown.append(sequences)


def _by_format(inputs: Sequence[Input]) -> dict[str, tuple[int, int]]:
    """(files, bytes) of each format."""
    totals: dict[str, tuple[int, int]] = {}
    for item in inputs:
        files, size = totals.get(item.format, (0, 0))
        totals[item.format] = (files + 1, size + item.size)
    return totals


def _notes(
    options: ConvertOptions, inputs: Sequence[Input], passed_over: dict[str, int]
) -> list[str]:
    notes = [
        f"{pluralize(count, 'file')} of folders left out: {reason}"
        for reason, count in sorted(passed_over.items())
    ]
    if options.dedup:
        notes.append("duplicates are not looked for in the sample: less may be left")
    if options.kind == "zst":
        notes.append("the bytes of the output are those before their compression")
    if any(not FORMATS[item.format].is_even or compression_of(item.path) for item in inputs):
        notes.append(
            "the estimate is rough: columns, archives and compressed files hold more or less than "
            "their bytes"
        )
    return notes


def _shown(number: int, sequence: ShownSequence) -> str:
    """A line for a sequence of a document."""
    mode = "" if sequence.mode is None else f" mode {sequence.mode},"
    more = " ..." if sequence.length > len(sequence.ids) else ""
    tokens = [str(token_id) for token_id in sequence.ids]
    if sequence.pieces:
        with_pieces = zip(sequence.ids, sequence.pieces, strict=True)
        tokens = [f"{token_id}={piece!r}" for token_id, piece in with_pieces]
    return f"  document {number},{mode} {pluralize(sequence.length, 'token')}: {' '.join(tokens)}{more}"
