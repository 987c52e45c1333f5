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
from streammega.convert.read.inputs import Input
from streammega.convert.read.open import Skipped
from streammega.convert.read.stdin import is_pipe
from streammega.convert.read.suffixes import TEXT_FORMATS, is_compressed
from streammega.convert.setup import check_may_write, plan
from streammega.convert.tokenize.encode import encoder_of
from streammega.convert.tokenize.tokenizers import Tokenizer
from streammega.convert.write.segments import Selection, token_dtype
from streammega.convert.write.units import batches_of
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
EVEN_FORMATS = (*TEXT_FORMATS, "megatron", "raw", "npy")
"""Formats whose documents take as many bytes at their end as in their beginning."""


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
class Plan:
    """What a conversion would do. Estimates scale what the sample held by the bytes of all inputs.

    inputs: files and bytes by format. units: of how many bytes each. documents, tokens,
    output_bytes: estimates. dropped: documents of the sample that would be left out, by
    reason.
    """

    prefix: str
    kind: str
    inputs: dict[str, tuple[int, int]]
    units: int
    workers: int
    tokenizer: str
    eod_id: int | None
    dtype: str
    sampled_documents: int
    sampled_bytes: int
    shown: list[list[ShownSequence]]
    documents: int
    tokens: int
    output_bytes: int
    shards: int
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_text(self) -> str:
        """For a terminal."""
        lines = [f"{self.prefix}: nothing is written; this is what would be done"]
        for name, (count, size) in sorted(self.inputs.items()):
            lines.append(f"  input      {count:,} {name}, {size:,} bytes")
        tokenizer = self.tokenizer or "none: the inputs hold tokens"
        lines.append(f"  work       {pluralize(self.units, 'unit')}, {self.workers} at a time")
        lines.append(f"  tokenizer  {tokenizer}; documents end with id {self.eod_id}")
        for number, document in enumerate(self.shown):
            lines += [_shown(number, sequence) for sequence in document]
        for reason, count in sorted(self.dropped.items()):
            lines.append(f"  left out   {count:,} of the sample: {reason}")
        lines.append(
            f"  output     about {pluralize(self.documents, 'document')}, "
            f"{pluralize(self.tokens, 'token')} of "
            f"{self.dtype}, {self.output_bytes / 1e6:,.1f} MB in "
            f"{pluralize(self.shards, f'{self.kind} shard')} (by "
            f"{pluralize(self.sampled_documents, 'document')}, "
            f"{self.sampled_bytes:,} bytes)"
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
    if not sample.is_all_of_it:
        input_bytes = sum(item.size for item in conversion.inputs)
        scale = max(1.0, input_bytes / max(1, sample.bytes))
    dtype = np.dtype(options.dtype or sample.dtype)
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
        sampled_documents=sample.documents,
        sampled_bytes=sample.bytes,
        shown=sample.shown,
        documents=round(sample.documents * scale),
        tokens=tokens,
        output_bytes=output_bytes,
        shards=shards,
        dropped=sample.dropped,
        notes=_notes(options, conversion.inputs, conversion.skipped_files.counts),
    )


def _take_sample(job: Job, tokenizer: Tokenizer | None, progress: ProgressObserver) -> _Sample:
    """Of some units, spread over all."""
    sample = _Sample(job, tokenizer)
    if not job.units:
        return sample
    spread = np.linspace(0, len(job.units) - 1, SAMPLED_UNITS)
    wanted = np.unique(spread.astype(int)).tolist()
    for unit in wanted:
        bytes_before, tokens_before = sample.bytes, sample.tokens
        sample.take(unit)
        progress.advance(sample.bytes - bytes_before, sample.tokens - tokens_before)
    if len(wanted) < len(job.units):
        sample.is_all_of_it = False
    return sample


class _Sample:
    """Some of the documents of some units, as they would be stored."""

    def __init__(self, job: Job, tokenizer: Tokenizer | None) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self.documents = 0
        self.tokens = 0
        self.bytes = 0
        self.is_all_of_it = True
        """Whether nothing of the inputs was left out of it."""
        self._dtypes: list[np.dtype[Any]] = []
        self.shown: list[list[ShownSequence]] = []
        self.dropped: dict[str, int] = {}

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the shards: all of the sample's tokens fit it."""
        if not self._dtypes:
            # Nothing was found; most tokenizers' ids fit this.
            return np.dtype(np.uint16)
        return np.result_type(*self._dtypes)

    def take(self, unit: int) -> None:
        """Look into a unit: at batches of it, until these hold SAMPLE_BYTES."""
        record = UnitRecord(digest="")
        skipped = Skipped()
        selection = Selection(self._job, record)
        size = 0
        for batch in batches_of(self._job, unit, skipped):
            if size >= SAMPLE_BYTES:
                self.is_all_of_it = False
                break
            if not isinstance(batch, Tokens):
                batch = [self._beginning(document) for document in batch]
            tokens = batch if isinstance(batch, Tokens) else encoder_of(self._job)(batch, skipped)
            size += tokens.source_bytes
            kept, _ = selection.choose(tokens)
            self._add(kept)
        self.bytes += size
        for counts in (record.counts, skipped.counts):
            for reason, count in counts.items():
                self.dropped[reason] = self.dropped.get(reason, 0) + count

    def _beginning(self, document: RawDocument) -> RawDocument:
        """A document; of a long text, only as much as a sample takes."""
        if document.record or len(document.data) <= SAMPLE_BYTES:
            return document
        self.is_all_of_it = False
        # The bytes may end within a character, which is left out.
        text = document.data[:SAMPLE_BYTES].decode("utf-8", "ignore")
        return replace(document, data=text.encode())

    def _add(self, batch: Tokens) -> None:
        self.documents += len(batch.documents)
        self.tokens += len(batch.tokens)
        if len(batch.tokens):
            self._dtypes.append(token_dtype([batch.tokens], self._job.options.dtype))
        token_bounds = bounds_of(batch.lengths)
        room = SHOWN_DOCUMENTS - len(self.shown)
        first = 0
        for num_sequences in batch.documents[:room].tolist():
            sequences = []
            for number in range(first, first + num_sequences):
                start = int(token_bounds[number])
                sequences.append(self._sequence(batch, number, start))
            self.shown.append(sequences)
            first += num_sequences

    def _sequence(self, batch: Tokens, number: int, start: int) -> ShownSequence:
        length = int(batch.lengths[number])
        stop = start + min(length, SHOWN_TOKENS)
        ids = batch.tokens[start:stop].tolist()
        pieces = []
        if self._tokenizer is not None:
            pieces = [self._tokenizer.decode([token_id]) for token_id in ids]
        mode = None if batch.modes is None else int(batch.modes[number])
        return ShownSequence(ids=ids, pieces=pieces, mode=mode, length=length)


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
    if any(item.format not in EVEN_FORMATS or is_compressed(item.path) for item in inputs):
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
