"""What a conversion made, as figures, text and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import streammega
from streammega.config import StorageConfig
from streammega.convert.job import HISTOGRAM_BINS, Job, UnitRecord, length_histogram
from streammega.convert.told import count_of
from streammega.convert.write.document_order import DocumentSet, document_tokens
from streammega.convert.write.packing import PackCounts
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.manifest import MANIFEST, Manifest
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize, without_controls

SHOWN_MESSAGES = 10
"""Faults that are shown on a terminal; the JSON has all that were kept."""
KEPT_MESSAGES = 10_000
"""Faults that are kept, of a corpus that may have millions."""
SHORTEST = 1e-9
"""Seconds, for speeds of what took none."""


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """Documents and tokens written; `dropped`: what happened to others, by reason; histogram: bin b
    has [2^b, 2^(b+1)) tokens.

    inputs: path, format and bytes of each. files_passed_over: what was found and is no input, by
    reason; names_passed_over: the first of each. members_left_out: of archives, by their suffix, or
    what they are. packing: of bins,
    how many there are, their padding in tokens, the documents in them (pieces) and the most of one,
    the documents that were split or dropped because they are longer than a bin; {} without bins.
    tokens counts the padding too, and one token behind each shard.
    """

    prefix: str
    kind: str
    shards: int
    documents: int
    sequences: int
    tokens: int
    dtype: str
    vocab_size: int | None
    eod_id: int | None
    text_bytes: int
    stored_bytes: int
    seconds: float
    dropped: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    histogram: list[int] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    files_passed_over: dict[str, int] = field(default_factory=dict)
    names_passed_over: dict[str, list[str]] = field(default_factory=dict)
    members_left_out: dict[str, int] = field(default_factory=dict)
    packing: dict[str, int] = field(default_factory=dict)

    @property
    def empty_documents(self) -> int:
        """Documents left out since they had no text."""
        return self.dropped.get("empty", 0)

    @property
    def compression(self) -> float:
        """Bytes of tokens for each stored byte."""
        token_bytes = self.tokens * np.dtype(self.dtype).itemsize
        return token_bytes / max(1, self.stored_bytes)

    def as_text(self) -> str:
        """For a terminal."""
        lines = [self._line_of_output(), self._line_of_speed()]
        if self.packing:
            lines.append(self._line_of_packing())
        if self.files_passed_over:
            reasons = sorted(self.files_passed_over.items())
            files = "; ".join(f"{reason}: {count:,}" for reason, count in reasons)
            lines.append(f"files not read, by reason: {files}")
        if self.members_left_out:
            kinds = sorted(self.members_left_out.items())
            members = "; ".join(f"{kind}: {count:,}" for kind, count in kinds)
            lines.append(f"members of archives not read, by kind: {members}")
        shown = self.messages[:SHOWN_MESSAGES]
        lines += [f"  left out: {message}" for message in shown]
        more = len(self.messages) - len(shown)
        if more:
            lines.append(f"  and {more} more; --report FILE.json has them")
        return without_controls("\n".join(lines))

    def as_json(self, command: Sequence[str] = ()) -> str:
        """Everything; command: the words that asked for it, without secrets."""
        values = {"streammega": streammega.__version__, "command": list(command)} | asdict(self)
        values["compression"] = self.compression
        histogram = np.trim_zeros(np.array(values.pop("histogram")), "b").tolist()
        values["document_lengths"] = [
            {"from_tokens": 2**number, "to_tokens": 2 ** (number + 1) - 1, "documents": documents}
            for number, documents in enumerate(histogram)
        ]
        return json.dumps(values, indent=1)

    def _line_of_output(self) -> str:
        empty = ""
        if self.empty_documents:
            empty = f" ({pluralize(self.empty_documents, 'empty one')} left out)"
        megabytes = self.stored_bytes / 1e6
        ratio = f" ({self.compression:.2f}x smaller than .bin)" if self.kind == "zst" else ""
        return (
            f"{self.prefix}: {pluralize(self.documents, 'document')}{empty}, "
            f"{pluralize(self.tokens, 'token')} of "
            f"{self.dtype}, eod_id {self.eod_id}, vocab_size {self.vocab_size}, "
            f"{megabytes:,.1f} MB in {pluralize(self.shards, f'{self.kind} shard')}{ratio}"
        )

    def _line_of_packing(self) -> str:
        packing = self.packing
        bins = max(1, packing["bins"])
        share = packing["padding"] / max(1, self.tokens)
        told = (
            f"{pluralize(packing['bins'], 'bin')}, {share:.3%} padding; {packing['pieces'] / bins:.1f} "
            f"documents a bin, {packing['most_pieces']:,} at most"
        )
        for happened in ("split", "dropped"):
            if packing[happened]:
                told += f"; {packing[happened]:,} longer than a bin were {happened}"
        return told

    def _line_of_speed(self) -> str:
        mean_tokens = self.tokens / max(1, self.documents)
        seconds = max(self.seconds, SHORTEST)
        tokens_per_second = self.tokens / seconds
        megabytes_per_second = self.text_bytes / 1e6 / seconds
        dropped = ""
        for reason, count in sorted(self.dropped.items()):
            # Empty documents are told of beside those that are not.
            if reason != "empty":
                dropped += f"; {count_of(reason, count)}"
        return (
            f"{pluralize(round(mean_tokens), 'token')} per document; "
            f"{tokens_per_second:,.0f} tokens/s, "
            f"{megabytes_per_second:,.1f} MB/s{dropped}"
        )


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """What parts are made of."""

    dtypes: list[Any]
    multimodal: set[bool]
    tokens: int


def count_parts(parts: Sequence[DocumentSet], job: Job) -> Kinds:
    """dtypes, modes and tokens of parts, by a look at each index."""
    dtypes = []
    multimodal = set()
    tokens = 0
    for part in parts:
        indexed = part.open(job)
        dtypes.append(indexed.dtype)
        multimodal.add(indexed.sequence_modes is not None)
        tokens += int(indexed.sequence_lengths.sum(dtype=np.int64))
    return Kinds(dtypes=dtypes, multimodal=multimodal, tokens=tokens)


def make_report(
    prefix: str,
    storage: StorageConfig,
    manifest: Manifest,
    records: Sequence[UnitRecord],
    duplicates: int,
    source_bytes: int,
    seconds: float,
    packing: PackCounts | None = None,
) -> ConvertReport:
    """Sums over units; without units (datasets that passed as they are) nothing was dropped."""
    total = _sum_of(records)
    histogram = total.histogram
    if not records:
        indexed = IndexedDataset(prefix + MANIFEST, storage)
        histogram = length_histogram(document_tokens(indexed))
    dropped: dict[str, int] = {"duplicates": duplicates} if duplicates else {}
    return ConvertReport(
        prefix=redact_urls(prefix),
        kind=manifest.kind,
        shards=len(manifest.shards),
        documents=manifest.documents,
        sequences=manifest.sequences,
        tokens=manifest.tokens,
        dtype=manifest.dtype,
        vocab_size=manifest.vocab_size,
        eod_id=manifest.eod_id,
        text_bytes=source_bytes,
        stored_bytes=sum(shard.bytes for shard in manifest.shards),
        seconds=seconds,
        dropped=dropped | total.counts,
        messages=total.messages,
        members_left_out=total.members,
        histogram=histogram,
        packing={} if packing is None else asdict(packing),
    )


def _sum_of(records: Sequence[UnitRecord]) -> UnitRecord:
    """What happened in all units: counts, the first messages, and the histogram."""
    total = UnitRecord(digest="")
    histogram = np.zeros(HISTOGRAM_BINS, np.int64)
    for record in records:
        for reason, count in record.counts.items():
            total.count(reason, count)
        for kind, count in record.members.items():
            total.members[kind] = total.members.get(kind, 0) + count
        room = KEPT_MESSAGES - len(total.messages)
        total.messages += record.messages[:room]
        histogram += np.array(record.histogram)
    total.histogram = histogram.tolist()
    return total
