"""What a conversion would do, before it does anything: its plan, its first documents as tokens, and
an estimate by a sample.
"""

from __future__ import annotations

import bz2
import io
import json
import lzma
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import zstandard

from streammega.config import StorageConfig
from streammega.convert.documents import LongRecord, LongText, RawDocument, Tokens
from streammega.convert.options import ConvertOptions, Runner
from streammega.convert.preflight import check_may_write
from streammega.convert.read.inputs import Input
from streammega.convert.read.long_records import TextFile, short, with_fields
from streammega.convert.read.pipes import is_pipe
from streammega.convert.read.slices import Skipped, fault, read_head
from streammega.convert.read.suffixes import is_compressed, suffix_of
from streammega.convert.run import prepare
from streammega.convert.tokenize.tokenizers import TextTokenizer
from streammega.convert.write.units import Job, UnitRecord, batches_of, chooser, encoder_of
from streammega.errors import ConfigError, ConvertError, FormatError, StorageError
from streammega.errors.redaction import redact_urls
from streammega.kernels.parallel import num_threads

SAMPLED_UNITS = 8
"""Units that are looked into, spread over all: inputs differ."""
SAMPLE_BYTES = 1 << 20
"""Of each of them."""
SHOWN_DOCUMENTS = 3
SHOWN_TOKENS = 24
HEAD_BYTES = 1 << 20
"""Of a compressed file, to see by how much it grows."""


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
    output_bytes, seconds: estimates. dropped: documents of the sample that would be left out, by
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
    seconds: float
    shards: int
    dropped: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_text(self) -> str:
        """For a terminal."""
        lines = [f"{self.prefix}: nothing is written; this is what would be done"]
        lines += [
            f"  input      {count:,} {name}, {size:,} bytes"
            for name, (count, size) in sorted(self.inputs.items())
        ]
        lines += [
            f"  work       {self.units:,} units, {self.workers} at a time",
            f"  tokenizer  {self.tokenizer or 'none: the inputs hold tokens'}; documents end with id {self.eod_id}",
        ]
        for number, document in enumerate(self.shown):
            for sequence in document:
                mode = "" if sequence.mode is None else f" mode {sequence.mode},"
                lines.append(
                    f"  document {number},{mode} {sequence.length:,} tokens: {_shown(sequence)}"
                )
        lines += [
            f"  left out   {count:,} of the sample: {reason}"
            for reason, count in sorted(self.dropped.items())
        ]
        lines.append(
            f"  output     about {self.documents:,} documents, {self.tokens:,} tokens of {self.dtype}, "
            f"{self.output_bytes / 1e6:,.1f} MB in {self.shards:,} {self.kind} shard{'s' * (self.shards > 1)}, "
            f"{_time(self.seconds)} (by {self.sampled_documents:,} documents, {self.sampled_bytes:,} bytes)"
        )
        return "\n".join(lines + [f"  note       {note}" for note in self.notes])


def plan_conversion(
    inputs: Sequence[str],
    output: str,
    *,
    options: ConvertOptions | None = None,
    runner: Runner | None = None,
    overwrite: bool = False,
    storage: StorageConfig | None = None,
    **settings: Any,
) -> Plan:
    """What `convert` would do with the same arguments. Writes nothing; a little of the inputs is
    read.

    Raises what `convert` would raise before its first document, and for the documents of the
    sample.
    """
    storage = storage or StorageConfig()
    for name in filter(is_pipe, inputs):
        raise ConfigError(
            f"{name}: can be read only once, so a dry run would take it away; give files"
        )
    conversion, labels, passed = prepare(inputs, output, options, runner, storage, settings)
    conversion.publisher.check(conversion.inputs, overwrite=overwrite)
    check_may_write(conversion.prefix, storage)
    job = conversion.job(all_units=True)
    sample = _Sample(job, conversion.tokenizer)
    wanted = (
        np.unique(np.linspace(0, max(0, len(job.units) - 1), SAMPLED_UNITS).astype(int)).tolist()
        if job.units
        else []
    )
    if wanted:  # once for nothing: what is loaded on the way is not what takes the time
        _Sample(job, conversion.tokenizer).take(wanted[0], most=1)
    for number in wanted:
        sample.take(number)
    expected = _expected_bytes(conversion.inputs, storage)
    scale = (
        max(1.0, expected / max(1, sample.bytes))
        if not sample.whole or len(wanted) < len(job.units)
        else 1.0
    )
    dtype = np.dtype(conversion.options.dtype or sample.dtype)
    tokens = round(sample.tokens * scale)
    workers = min(conversion.runner.workers or num_threads(), max(1, len(job.units)))
    shard_bytes = conversion.options.shard_bytes
    return Plan(
        prefix=redact_urls(conversion.prefix),
        kind=conversion.options.kind,
        inputs=_by_format(conversion.inputs),
        units=len(job.units),
        workers=workers,
        tokenizer=conversion.tokenizer.name if conversion.tokenizer else "",
        eod_id=labels["eod_id"],
        dtype=str(dtype),
        sampled_documents=sample.documents,
        sampled_bytes=sample.bytes,
        shown=sample.shown,
        documents=round(sample.documents * scale),
        tokens=tokens,
        output_bytes=tokens * dtype.itemsize,
        seconds=sample.seconds * scale / workers,
        shards=1 if shard_bytes is None else max(1, -(-tokens * dtype.itemsize // shard_bytes)),
        dropped=sample.dropped,
        notes=_notes(conversion.options, conversion.inputs, passed.counts),
    )


class _Sample:
    """Some of the documents of some units, as they would be stored."""

    def __init__(self, job: Job, tokenizer: TextTokenizer | None) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self.documents = self.tokens = self.bytes = 0
        self.seconds = 0.0
        self.whole = True
        self.dtype: np.dtype[Any] = np.dtype(np.uint16)
        self.shown: list[list[ShownSequence]] = []
        self.dropped: dict[str, int] = {}

    def take(self, unit: int, most: int = SAMPLE_BYTES) -> None:
        """Look into a unit: at batches of it, until these hold `most` bytes."""
        record = UnitRecord(digest="")
        skipped = Skipped()
        size = 0
        choose = chooser(self._job, unit, record)
        began = time.monotonic()
        for batch in batches_of(self._job, unit, skipped):
            if size >= most:
                self.whole = False
                break
            if isinstance(batch, LongText | LongRecord):
                batch = self._begun(batch, skipped)
                self.whole = False
            tokens = batch if isinstance(batch, Tokens) else encoder_of(self._job)(batch, skipped)
            size += tokens.source_bytes
            self._add(choose(tokens))
        self.seconds += time.monotonic() - began
        self.bytes += size
        for counts in (record.counts, skipped.counts):
            for reason, count in counts.items():
                self.dropped[reason] = self.dropped.get(reason, 0) + count

    def _begun(self, item: LongText | LongRecord, skipped: Skipped) -> list[RawDocument]:
        """The beginning of a document that is not held; nothing of one that is broken, where faults
        are passed over.
        """
        try:
            return [_beginning(item)]
        except FormatError as error:
            fault(self._job.options, skipped, "broken record", str(error))
            return []

    def _add(self, batch: Tokens) -> None:
        self.documents += len(batch.documents)
        self.tokens += len(batch.tokens)
        if len(batch.tokens):
            self.dtype = (
                np.result_type(self.dtype, batch.tokens.dtype)
                if self.documents
                else batch.tokens.dtype
            )
        starts = np.cumsum(batch.lengths, dtype=np.int64) - batch.lengths
        firsts = np.cumsum(batch.documents) - batch.documents
        for document in range(min(len(firsts), SHOWN_DOCUMENTS - len(self.shown))):
            sequences = range(
                int(firsts[document]), int(firsts[document] + batch.documents[document])
            )
            self.shown.append(
                [self._sequence(batch, number, int(starts[number])) for number in sequences]
            )

    def _sequence(self, batch: Tokens, number: int, start: int) -> ShownSequence:
        length = int(batch.lengths[number])
        ids = batch.tokens[start : start + min(length, SHOWN_TOKENS)].tolist()
        return ShownSequence(
            ids=ids,
            pieces=[self._tokenizer.decode([id_]) for id_ in ids] if self._tokenizer else [],
            mode=None if batch.modes is None else int(batch.modes[number]),
            length=length,
        )


def _beginning(item: LongText | LongRecord) -> RawDocument:
    """Of a document that is not held, as much as a sample takes."""
    if isinstance(item, LongRecord):
        record = with_fields(item, TextFile(io.BytesIO(), SAMPLE_BYTES))
        fields = short(record.fields, SAMPLE_BYTES)
        return replace(record, fields=fields, size=len(json.dumps(fields, default=str)))
    data = b""
    for piece in item.pieces:
        data += piece
        if len(data) >= SAMPLE_BYTES:
            break
    whole = data[:SAMPLE_BYTES].decode("utf-8", "ignore")  # which may end within a letter
    return RawDocument(data=whole.encode(), path=item.path)


def _expected_bytes(inputs: Sequence[Input], storage: StorageConfig) -> float:
    """Of all inputs, decompressed; those of one suffix grow as the first of them does."""
    growth: dict[str, float] = {}
    total = 0.0
    for item in inputs:
        suffix = suffix_of(item.path) if is_compressed(item.path) else ""
        if suffix not in growth:
            growth[suffix] = _growth(item, suffix, storage) if suffix else 1.0
        total += item.size * growth[suffix]
    return total


def _growth(item: Input, suffix: str, storage: StorageConfig) -> float:
    """By how much the beginning of a compressed file grows; 1.0 where that cannot be told."""
    openers: dict[str, Any] = {
        ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
        ".gz": lambda: zlib.decompressobj(31),
        ".tgz": lambda: zlib.decompressobj(31),
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lzma.LZMADecompressor,
    }
    try:
        head = read_head(item.url, storage, HEAD_BYTES)
        reader = openers[suffix]()
        grown = reader.decompress(head)
        rest = len(getattr(reader, "unused_data", b"") or b"")  # of further frames
        return len(grown) / max(1, len(head) - rest)
    except (
        ConvertError,
        StorageError,
        OSError,
        EOFError,
        zlib.error,
        lzma.LZMAError,
        zstandard.ZstdError,
        KeyError,
    ):
        return 1.0


def _by_format(inputs: Sequence[Input]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for item in inputs:
        count, size = found.get(item.format, (0, 0))
        found[item.format] = count + 1, size + item.size
    return found


def _notes(
    options: ConvertOptions, inputs: Sequence[Input], passed_over: dict[str, int]
) -> list[str]:
    notes = [
        f"{count:,} files of folders are passed over: {reason}"
        for reason, count in sorted(passed_over.items())
    ]
    if options.dedup:
        notes.append("duplicates are not looked for in the sample: less may be left")
    if options.kind == "zst":
        notes.append("the bytes of the output are those before their compression")
    if any(item.format not in ("text", "jsonl", "megatron", "raw", "npy") for item in inputs):
        notes.append(
            "columns and archives hold more or less than their bytes tell: a rough estimate"
        )
    return notes


def _shown(sequence: ShownSequence) -> str:
    more = " ..." if sequence.length > len(sequence.ids) else ""
    if not sequence.pieces:
        return " ".join(map(str, sequence.ids)) + more
    return (
        " ".join(
            f"{id_}={piece!r}" for id_, piece in zip(sequence.ids, sequence.pieces, strict=True)
        )
        + more
    )


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:,.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
