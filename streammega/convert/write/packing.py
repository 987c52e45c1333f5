"""Documents packed into bins of one size, uncut, with little padding.

A packed shard is a pair whose documents are in bins, with padding at the end of each; the `.idx`
lists documents alone. One more token follows the last bin: a reader that opens the shard without its
manifest, which describes the bins, sees that the sizes of tokens and `.idx` differ.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from streammega.convert.documents import concat_ranges, gather, offsets_of
from streammega.convert.options import ConvertOptions
from streammega.convert.write.copy import LoadedDocuments, load_documents
from streammega.convert.write.document_order import DocumentOrder, Integers, Portion
from streammega.dataset.writer import IndexedDatasetWriter
from streammega.kernels.documents import best_fit

WINDOW_TOKENS = 1 << 23
"""Tokens that are packed together, and held in memory: of more, what the last bins leave empty would
be a smaller share, but it is a few thousandths already.
"""
WINDOW_BINS = 256
"""Bins that are packed together at least, however long they are: with few, some stay half empty."""
WINDOW_DOCUMENTS = 1 << 20
"""Documents that are packed together at most, however short: each takes a dozen numbers."""
NO_LIMIT = 1 << 62


@dataclass(kw_only=True)
class PackingStats:
    """What packing made of documents. padding: tokens that belong to none. pieces: documents as they
    are stored; a document that is longer than a bin is several pieces.
    """

    bins: int = 0
    padding: int = 0
    pieces: int = 0
    most_pieces: int = 0
    split: int = 0
    dropped: int = 0

    def add(self, other: PackingStats) -> None:
        """Count what was made elsewhere too."""
        self.bins += other.bins
        self.padding += other.padding
        self.pieces += other.pieces
        self.most_pieces = max(self.most_pieces, other.most_pieces)
        self.split += other.split
        self.dropped += other.dropped


@dataclass(frozen=True, kw_only=True)
class PackedPieces:
    """Pieces of documents in the order in which they are stored, bin by bin. document: which of the
    window's; start, size: tokens of it; target: its first token in all bins; int64 [pieces] each.
    """

    num_bins: int
    document: Integers
    start: Integers
    size: Integers
    target: Integers


def windows_of(
    documents: DocumentOrder, portions: Iterable[Portion], capacity: int
) -> Iterator[Portion]:
    """The documents that are packed together: as many as follow each other and fit a window, at
    least one. Documents without tokens are left out.

    Where portions end changes nothing: how large they are depends on the machine.
    """
    max_tokens = max(WINDOW_TOKENS, WINDOW_BINS * capacity)
    held: list[Portion] = []
    held_tokens = 0
    held_documents = 0
    for parts, chosen in portions:
        sizes = documents.sizes((parts, chosen))
        is_something = sizes > 0
        parts = parts[is_something]
        chosen = chosen[is_something]
        ends = np.cumsum(sizes[is_something])
        low = 0
        while low < len(chosen):
            tokens_before = int(ends[low - 1]) if low else 0
            room = max_tokens - held_tokens
            high = int(np.searchsorted(ends, tokens_before + room, "right"))
            high = min(high, low + WINDOW_DOCUMENTS - held_documents)
            if not held:
                high = max(high, low + 1)
            if high > low:
                held.append((parts[low:high], chosen[low:high]))
                held_tokens += int(ends[high - 1]) - tokens_before
                held_documents += high - low
            if high < len(chosen):
                yield _joined(held)
                held = []
                held_tokens = 0
                held_documents = 0
            low = high
    if held:
        yield _joined(held)


def _joined(held: list[Portion]) -> Portion:
    parts = np.concatenate([parts for parts, _ in held])
    chosen = np.concatenate([chosen for _, chosen in held])
    return parts, chosen


def pack(sizes: Integers, options: ConvertOptions) -> tuple[PackedPieces, PackingStats]:
    """Put the documents of a window into bins of `options.pack_length` tokens.

    sizes: their tokens, int64 [documents], none empty. A bin has its documents in their order, and
    bins are in the order of the first of them.
    """
    capacity = options.pack_length
    assert capacity is not None
    numbers = np.arange(len(sizes))
    is_long = sizes > capacity
    if options.pack_overflow == "drop":
        numbers = numbers[~is_long]
    document, start, size = _pieces(numbers, sizes[numbers], capacity)
    bins = np.empty(len(size), np.int64)
    largest_first = np.argsort(-size, kind="stable")
    num_bins = best_fit(size, largest_first, capacity, options.pack_max_documents or NO_LIMIT, bins)
    # Bins are in the order of their first pieces: then neighbours are as near as they were before.
    first_piece = np.full(num_bins, len(bins), np.int64)
    np.minimum.at(first_piece, bins, np.arange(len(bins)))
    place_of_bin = np.empty(num_bins, np.int64)
    place_of_bin[np.argsort(first_piece)] = np.arange(num_bins)
    place = place_of_bin[bins]
    order = np.argsort(place, kind="stable")
    place = place[order]
    size = size[order]
    pieces_of_bin = np.bincount(place, minlength=num_bins)
    tokens_before = offsets_of(size)[:-1]
    first_of_bin = offsets_of(pieces_of_bin)[:-1]
    within_bin = tokens_before - tokens_before[first_of_bin][place]
    packed = PackedPieces(
        num_bins=num_bins,
        document=document[order],
        start=start[order],
        size=size,
        target=place * capacity + within_bin,
    )
    num_long = int(np.count_nonzero(is_long))
    drops = options.pack_overflow == "drop"
    counts = PackingStats(
        bins=num_bins,
        padding=num_bins * capacity - int(size.sum()),
        pieces=len(size),
        most_pieces=int(pieces_of_bin.max(initial=0)),
        split=0 if drops else num_long,
        dropped=num_long if drops else 0,
    )
    return packed, counts


def _pieces(
    numbers: Integers, sizes: Integers, capacity: int
) -> tuple[Integers, Integers, Integers]:
    """(document, first token of it, tokens) of pieces that fit a bin: documents as they are. A
    longer document is cut into pieces that fill a bin, and one of the rest.
    """
    num_pieces = -(-sizes // capacity)
    document = np.repeat(numbers, num_pieces)
    first_piece = np.repeat(offsets_of(num_pieces)[:-1], num_pieces)
    start = (np.arange(len(document)) - first_piece) * capacity
    size = np.minimum(np.repeat(sizes, num_pieces) - start, capacity)
    return document, start, size


def write_packed(
    documents: DocumentOrder,
    portions: Iterable[Portion],
    options: ConvertOptions,
    pad_id: int,
    writer: IndexedDatasetWriter,
    counts: PackingStats,
    stored_order: list[Portion],
) -> Generator[int, None, None]:
    """Write the documents of a shard as bins. Yields bytes as they are written, window by window.

    pad_id: the token of padding. Adds to `counts`, and with provenance to `stored_order` the
    document of every piece.
    """
    capacity = options.pack_length
    assert capacity is not None
    for parts, chosen in windows_of(documents, portions, capacity):
        held = load_documents(documents, (parts, chosen), writer.dtype)
        sizes = held.sizes // writer.dtype.itemsize
        packed, of_window = pack(sizes, options)
        counts.add(of_window)
        bins = np.full(packed.num_bins * capacity, pad_id, writer.dtype)
        itemsize = writer.dtype.itemsize
        starts = held.start[packed.document] + packed.start * itemsize
        parts_of_pieces = held.part[packed.document]
        gather(held.tokens, parts_of_pieces, starts, packed.size * itemsize, bins, packed.target)
        # A window is large, whatever memory a conversion may take: it is there twice while bins are
        # filled, once while they are written, and not at all when the next one is read.
        held.tokens.clear()
        _write(bins, held, packed, writer)
        bytes_written = bins.nbytes
        del bins, held
        if options.provenance:
            stored_order.append((parts[packed.document], chosen[packed.document]))
        yield bytes_written
    tail = np.full(1, pad_id, writer.dtype)
    nothing = np.empty(0, np.int64)
    writer.add_documents(
        tail.view(np.uint8).data, nothing.astype(np.int32), nothing, starts=nothing
    )


def _write(
    bins: np.ndarray, held: LoadedDocuments, packed: PackedPieces, writer: IndexedDatasetWriter
) -> None:
    """Write bins, and say which sequences are in them: those of the documents, cut where pieces
    are, without empty ones.
    """
    sequences = concat_ranges(held.first_sequences, held.num_sequences)
    token_bounds = offsets_of(held.lengths[sequences])
    itemsize = writer.dtype.itemsize
    tokens_before_document = offsets_of(held.sizes // itemsize)[:-1]
    # where pieces begin and end, of all documents laid end to end
    first_token = tokens_before_document[packed.document] + packed.start
    end_token = first_token + packed.size
    cuts = np.unique(np.concatenate([token_bounds, first_token, end_token]))
    first_cut = np.searchsorted(cuts, first_token)
    sequences_of_piece = np.searchsorted(cuts, end_token) - first_cut
    taken = concat_ranges(first_cut, sequences_of_piece)
    shift = np.repeat(packed.target - first_token, sequences_of_piece)
    modes = None
    if held.modes is not None:
        # of sequences that begin at one token, the last has tokens
        source = np.searchsorted(token_bounds, cuts[taken], "right") - 1
        modes = held.modes[sequences][source]
    writer.add_documents(
        bins.view(np.uint8).data,
        (cuts[taken + 1] - cuts[taken]).astype(np.int32),
        sequences_of_piece,
        modes,
        starts=cuts[taken] + shift,
    )
