"""What a dataset is, for people: counts, sizes, first tokens, document lengths."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset import IndexedDataset
from streammega.dataset.shards import split_name
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize

if TYPE_CHECKING:
    from streammega.convert.read.slices import Item

BAR_WIDTH = 40
"""Characters of the longest bar."""
FORMS = {"bin": "Megatron .bin/.idx", "zst": "zstd shards (.bin.zst)", "tar": "WebDataset tars"}
SHOWN_CHARACTERS = 200
"""Of the first document of an input."""
SHOWN_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Counts and lengths of one dataset. Lengths in tokens; histogram edges are powers of two.

    bins, bin_tokens: of a packed dataset; 0 of others.
    """

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
    bins: int = 0
    bin_tokens: int = 0


def document_lengths(indexed: IndexedDataset) -> NDArray[np.int64]:
    """Tokens of each document, int64 [documents]."""
    ends_of_sequences = np.cumsum(indexed.sequence_lengths, dtype=np.int64)
    tokens_before_sequence = np.concatenate([np.zeros(1, np.int64), ends_of_sequences])
    return np.diff(tokens_before_sequence[indexed.document_indices])


def summarize(indexed: IndexedDataset, num_first_tokens: int = 32) -> Summary:
    """Read the index, and of the tokens only the first few."""
    lengths = document_lengths(indexed)
    longest = int(lengths.max(initial=0))
    edges = _powers_of_two_above(longest)
    counts, _ = np.histogram(lengths, edges)
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
        shortest=int(lengths.min()) if len(lengths) else 0,
        median=float(np.median(lengths)) if len(lengths) else 0.0,
        longest=longest,
        empty=int((lengths == 0).sum()),
        first_tokens=first,
        highest_first_token=max(first, default=-1),
        edges=edges,
        counts=counts.astype(np.int64),
        bins=0 if indexed.bin_tokens is None else indexed.num_bins,
        bin_tokens=indexed.bin_tokens or 0,
    )


def _powers_of_two_above(longest: int) -> NDArray[np.int64]:
    """Bounds of a histogram: 0, 1, 2, 4, ... to the first power above the longest."""
    powers = [1 << exponent for exponent in range(max(longest, 1).bit_length() + 1)]
    return np.array([0, *powers], np.int64)


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
    """The summary as lines of text, with the first tokens decoded where a tokenizer is given."""
    mode = ", multimodal" if summary.multimodal else ""
    form = FORMS[summary.kind]
    shards = f" in {pluralize(summary.shards, 'shard')}" if summary.shards > 1 else ""
    decompressed = ", decompressed" if summary.kind == "zst" else ""
    lines = [
        f"{summary.prefix}: {form}{shards}, {summary.dtype}{mode}",
        f"  documents  {summary.documents:,} ({pluralize(summary.sequences, 'sequence')}, "
        f"{pluralize(summary.empty, 'empty document')})",
        f"  tokens     {summary.tokens:,}",
        f"  .bin       {pluralize(summary.bin_bytes, 'byte')}{decompressed}",
        f"  lengths    shortest {summary.shortest:,}, median {summary.median:,.0f}, "
        f"longest {summary.longest:,} tokens",
        f"  first ids  {' '.join(map(str, summary.first_tokens))}",
    ]
    if summary.bins:
        room = summary.bins * summary.bin_tokens
        padding = 1 - summary.tokens / room
        lines.insert(
            3,
            f"  bins       {summary.bins:,} of {summary.bin_tokens:,} tokens, {padding:.3%} padding",
        )
    if tokenizer:
        lines.append(f"  decoded    {_decoded(summary, tokenizer)!r}")
    lines.append("  document lengths (tokens):")
    lines += _histogram_lines(summary)
    return "\n".join(lines)


def _histogram_lines(summary: Summary) -> list[str]:
    """A bar for each range of lengths."""
    most = max(int(summary.counts.max(initial=0)), 1)
    lines: list[str] = []
    for low, high, count in zip(summary.edges[:-1], summary.edges[1:], summary.counts, strict=True):
        # at least one character for what there is, however much more lies elsewhere
        width = max(round(BAR_WIDTH * int(count) / most), int(count > 0))
        lengths = f"{low:,}–{high - 1:,}"
        lines.append(f"    {lengths:>19} {int(count):>11,} {'█' * width}")
    return lines


def write_plot(summary: Summary, path: str) -> None:
    """The histogram as a PNG. Raises ConfigError when matplotlib is not installed."""
    from streammega.cli.plotting import pyplot

    figure, axes = pyplot().subplots(figsize=(8, 4))
    # a logarithmic axis has no 0
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
            f"{summary.prefix}: token id {summary.highest_first_token} is past the "
            f"{model.vocab_size} ids of {name}; the data was made with another tokenizer"
        )
    return model.decode(summary.first_tokens)


def describe_input(path: str, storage: StorageConfig) -> str:
    """What an input of another format is (text, JSON lines, Parquet, MDS, ...), with its first
    document.

    Raises ObjectNotFoundError, ConvertError.
    """
    from streammega.convert.options import ConvertOptions
    from streammega.convert.read.inputs import find_inputs
    from streammega.convert.read.readers import read_slice
    from streammega.convert.read.slices import Skipped, Slice
    from streammega.convert.read.suffixes import without_queries

    inputs = find_inputs([path], storage)
    sizes_of_format: dict[str, list[int]] = {}
    for item in inputs:
        sizes_of_format.setdefault(item.format, []).append(item.size)
    lines = [redact_urls(without_queries(path))]
    for name, sizes in sorted(sizes_of_format.items()):
        lines.append(
            f"  {name:<10} {pluralize(len(sizes), 'input')}, {pluralize(sum(sizes), 'byte')}"
        )
    documents = read_slice(Slice(input=inputs[0]), ConvertOptions(), storage, Skipped())
    for document in itertools.islice(documents, 1):
        lines.append(f"  first      {_beginning(document)}")
    lines.append("  streammega convert makes shards of it")
    return "\n".join(lines)


def _beginning(document: Item) -> str:
    """How a document begins: a text, the fields of a record, or tokens."""
    from streammega.convert.documents import RawDocument

    if not isinstance(document, RawDocument):
        return f"{document.tokens.dtype} tokens {document.tokens[:SHOWN_TOKENS].tolist()}"
    text = document.data.decode(errors="replace")
    if document.fields is not None:
        text = json.dumps(document.fields, default=str)
    return repr(text[:SHOWN_CHARACTERS])
