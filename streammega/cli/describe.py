"""What a dataset is, for people: counts, sizes, first tokens, document lengths."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset import IndexedDataset
from streammega.dataset.shards import split_name
from streammega.errors.redaction import redact_urls

BAR_WIDTH = 40


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Counts and lengths of one dataset. Lengths in tokens; histogram edges are powers of two."""

    prefix: str
    kind: str
    shards: int
    dtype: str
    multimodal: bool
    sequences: int
    documents: int
    tokens: int
    bin_bytes: int
    shortest: int
    median: float
    longest: int
    empty: int
    first_tokens: list[int]
    highest_first_token: int
    edges: NDArray[np.int64]
    counts: NDArray[np.int64]


def document_lengths(indexed: IndexedDataset) -> NDArray[np.int64]:
    """Tokens of each document, int64 [documents]."""
    before = np.concatenate(
        [np.zeros(1, np.int64), np.cumsum(indexed.sequence_lengths, dtype=np.int64)]
    )
    return np.diff(before[indexed.document_indices])


def summarize(indexed: IndexedDataset, num_first_tokens: int = 32) -> Summary:
    """Read the index, and of the tokens only the first few."""
    lengths = document_lengths(indexed)
    top = int(lengths.max(initial=1))
    edges = np.array([0, 1, *(2**k for k in range(1, max(top, 1).bit_length() + 1))], np.int64)
    first = first_tokens(indexed, num_first_tokens)
    return Summary(
        prefix=redact_urls(indexed.prefix),
        kind=split_name(indexed.shards[0])[1],
        shards=len(indexed.shards),
        dtype=str(indexed.dtype),
        multimodal=indexed.sequence_modes is not None,
        sequences=len(indexed),
        documents=len(lengths),
        tokens=int(lengths.sum()),
        bin_bytes=indexed.bin_info.size,
        shortest=int(lengths.min(initial=top)) if len(lengths) else 0,
        median=float(np.median(lengths)) if len(lengths) else 0.0,
        longest=int(lengths.max(initial=0)),
        empty=int((lengths == 0).sum()),
        first_tokens=first,
        highest_first_token=max(first, default=-1),
        edges=edges,
        counts=np.histogram(lengths, edges)[0].astype(np.int64),
    )


def first_tokens(indexed: IndexedDataset, count: int) -> list[int]:
    """The first `count` tokens of the dataset, over sequence bounds."""
    tokens: list[int] = []
    for number in range(len(indexed)):
        if len(tokens) >= count:
            break
        length = min(int(indexed.sequence_lengths[number]), count - len(tokens))
        if length:
            tokens += indexed.get(number, 0, length).tolist()
    return tokens


def as_text(summary: Summary, tokenizer: str | None) -> str:
    """The summary as lines of text, with the first tokens decoded when a
    tokenizer.json is given.
    """
    mode = ", multimodal" if summary.multimodal else ""
    kind = {"bin": "Megatron .bin/.idx", "zst": "zstd shards (.bin.zst)", "tar": "WebDataset tars"}[
        summary.kind
    ]
    shards = f" in {summary.shards:,} shards" if summary.shards > 1 else ""
    lines = [
        f"{summary.prefix}: {kind}{shards}, {summary.dtype}{mode}",
        f"  documents  {summary.documents:,} ({summary.sequences:,} sequences, {summary.empty:,} empty documents)",
        f"  tokens     {summary.tokens:,}",
        f"  .bin       {summary.bin_bytes:,} bytes"
        + (", decompressed" if summary.kind == "zst" else ""),
        f"  lengths    shortest {summary.shortest:,}, median {summary.median:,.0f}, longest {summary.longest:,} tokens",
        f"  first ids  {' '.join(map(str, summary.first_tokens))}",
    ]
    if tokenizer:
        lines.append(f"  decoded    {_decoded(summary, tokenizer)!r}")
    lines.append("  document lengths (tokens):")
    most = max(int(summary.counts.max(initial=0)), 1)
    for low, high, count in zip(summary.edges[:-1], summary.edges[1:], summary.counts, strict=True):
        bar = "█" * max(round(BAR_WIDTH * int(count) / most), int(count > 0))
        lines.append(f"    {f'{low:,}–{high - 1:,}':>19} {int(count):>11,} {bar}")
    return "\n".join(lines)


def write_plot(summary: Summary, path: str) -> None:
    """The histogram as a PNG. Raises ConfigError when matplotlib is not installed."""
    from streammega.cli.plotting import pyplot

    figure, axes = pyplot().subplots(figsize=(8, 4))
    axes.stairs(summary.counts, np.maximum(summary.edges, 0.5), fill=True)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens per document")
    axes.set_ylabel("documents")
    axes.set_title(f"{summary.prefix}: {summary.documents:,} documents, {summary.tokens:,} tokens")
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _decoded(summary: Summary, name: str) -> str:
    from streammega.convert.tokenize.tokenizers import load_tokenizer
    from streammega.errors import FormatError

    model = load_tokenizer(name)
    if summary.highest_first_token >= model.vocab_size:
        raise FormatError(
            f"{summary.prefix}: token id {summary.highest_first_token} is past the {model.vocab_size} ids of {name}; the data "
            f"was made with another tokenizer"
        )
    return model.decode(summary.first_tokens)


def describe_input(path: str, storage: StorageConfig) -> str:
    """What an input of another format is (text, JSON lines, Parquet, MDS, ...), with its first
    document.

    Raises ObjectNotFoundError, ConvertError.
    """
    from streammega.convert.documents import LongRecord, LongText, RawDocument
    from streammega.convert.options import ConvertOptions
    from streammega.convert.read.inputs import find_inputs
    from streammega.convert.read.long_records import short
    from streammega.convert.read.readers import read_slice
    from streammega.convert.read.slices import Skipped, Slice
    from streammega.convert.read.suffixes import without_queries

    found = find_inputs([path], storage)
    sizes: dict[str, list[int]] = {}
    for item in found:
        sizes.setdefault(item.format, []).append(item.size)
    lines = [redact_urls(without_queries(path))]
    lines += [
        f"  {kind:<10} {len(own):,} inputs, {sum(own):,} bytes"
        for kind, own in sorted(sizes.items())
    ]
    for document in itertools.islice(
        read_slice(Slice(input=found[0]), ConvertOptions(), storage, Skipped()), 1
    ):
        if isinstance(document, LongRecord) and document.document.fields is not None:
            document = replace(document.document, fields=short(document.document.fields, 200))
        if isinstance(document, LongText | LongRecord):
            document = RawDocument(data=next(document.pieces), path=path)
        if isinstance(document, RawDocument):
            known = document.fields is not None
            shown = (
                json.dumps(document.fields, default=str)
                if known
                else document.data.decode(errors="replace")
            )
            lines.append(f"  first      {shown[:200]!r}")
        else:
            lines.append(
                f"  first      {document.tokens.dtype} tokens {document.tokens[:32].tolist()}"
            )
    lines.append("  streammega convert makes shards of it")
    return "\n".join(lines)
