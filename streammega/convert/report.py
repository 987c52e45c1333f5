"""What a conversion made, as figures, text, JSON and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.convert.write.assemble import DocumentSet, document_tokens
from streammega.convert.write.units import BINS, UnitRecord
from streammega.dataset.indexed import IndexedDataset
from streammega.dataset.manifest import MANIFEST, Manifest
from streammega.errors.redaction import redact_urls


@dataclass(frozen=True, kw_only=True)
class ConvertReport:
    """Documents and tokens written; `dropped`: what happened to others, by reason; histogram: bin b
    has [2^b, 2^(b+1)) tokens.

    files_passed_over: of folders and globs, those that were not read, by reason.
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
    files_passed_over: dict[str, int] = field(default_factory=dict)

    @property
    def empty_documents(self) -> int:
        """Documents left out since they had no text."""
        return self.dropped.get("empty", 0)

    @property
    def compression(self) -> float:
        """Bytes of tokens for each stored byte."""
        return self.tokens * np.dtype(self.dtype).itemsize / max(1, self.stored_bytes)

    def as_text(self) -> str:
        """For a terminal."""
        others = sorted(
            (reason, count) for reason, count in self.dropped.items() if reason != "empty"
        )
        dropped = "".join(f"; {count:,} {reason}" for reason, count in others)
        empty = f" ({self.empty_documents} empty ones left out)" if self.empty_documents else ""
        size = f", {self.stored_bytes / 1e6:,.1f} MB in {self.shards} {self.kind} shard{'s' * (self.shards > 1)}"
        ratio = f" ({self.compression:.2f}x smaller than .bin)" if self.kind == "zst" else ""
        mean = self.tokens / max(1, self.documents)
        lines = [
            f"{self.prefix}: {self.documents:,} documents{empty}, {self.tokens:,} tokens of {self.dtype}, eod_id {self.eod_id}, "
            f"vocab_size {self.vocab_size}{size}{ratio}",
            f"{mean:,.0f} tokens per document; {self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s, "
            f"{self.text_bytes / 1e6 / max(self.seconds, 1e-9):,.1f} MB/s{dropped}",
        ]
        if self.files_passed_over:
            files = ", ".join(
                f"{count:,} {kind}" for kind, count in sorted(self.files_passed_over.items())
            )
            lines.append(f"files not read: {files}")
        shown = self.messages[:10]
        lines += [f"  passed over: {message}" for message in shown]
        if len(self.messages) > len(shown):
            lines.append(
                f"  and {len(self.messages) - len(shown)} more; --report FILE.json has them"
            )
        return "\n".join(lines)

    def as_json(self) -> str:
        """Everything."""
        # tokens of a document: [edge, next edge)
        edges = [2**bin for bin in range(len(self.histogram) + 1)]
        return json.dumps(
            asdict(self) | {"compression": self.compression, "histogram_edges": edges}, indent=1
        )


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """What parts are made of."""

    dtypes: list[Any]
    multimodal: set[bool]
    tokens: int


def count_parts(parts: Sequence[DocumentSet], storage: StorageConfig) -> Kinds:
    """dtypes, modes and tokens of parts, by a look at each index."""
    dtypes = []
    multimodal = set()
    tokens = 0
    for part in parts:
        indexed = IndexedDataset(part.dataset, storage)
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
) -> ConvertReport:
    """Sums over units; without units (datasets that passed as they are) nothing was dropped."""
    dropped: dict[str, int] = {"duplicates": duplicates} if duplicates else {}
    messages: list[str] = []
    histogram = [0] * BINS
    for record in records:
        for reason, count in record.counts.items():
            dropped[reason] = dropped.get(reason, 0) + count
        messages += record.messages[: max(0, 10_000 - len(messages))]
        histogram = [a + b for a, b in zip(histogram, record.histogram, strict=True)]
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
        dropped=dropped,
        messages=messages,
        histogram=histogram if records else _histogram(IndexedDataset(prefix + MANIFEST, storage)),
    )


def _histogram(indexed: IndexedDataset) -> list[int]:
    """Of a dataset as it is."""
    sizes = document_tokens(indexed)
    return [
        int(n)
        for n in np.bincount(np.log2(np.maximum(sizes, 1)).astype(np.int64), minlength=BINS)[:BINS]
    ]
