"""Bins of documents copied into a shard.

A packed shard is a pair whose documents lie in bins of one size, with what a bin has left behind
them; the `.idx` speaks of documents alone. Behind the last bin lies one token more: whoever opens
the shard without its manifest, which tells of the bins, sees that tokens and `.idx` end apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from streammega.convert.documents import bounds_of
from streammega.convert.options import ConvertOptions
from streammega.convert.write.copying import HeldDocuments, gather, read_all
from streammega.convert.write.final_order import Integers, OrderedDocuments
from streammega.convert.write.packing import PackCounts, PackedPieces, pack, windows_of
from streammega.convert.write.shuffling import ragged
from streammega.dataset.writer import IndexedDatasetWriter


def copy_packed(
    documents: OrderedDocuments,
    portions: Iterable[tuple[Integers, Integers]],
    options: ConvertOptions,
    pad_id: int,
    writer: IndexedDatasetWriter,
    counts: PackCounts,
) -> Iterator[tuple[tuple[Integers, Integers], int]]:
    """Write the documents of a shard as bins; adds to `counts`. Yields ((part, document of it) of
    every piece in the order in which they are stored, bytes written), window by window.

    pad_id: what stands where there is no document.
    """
    capacity = options.pack
    assert capacity is not None
    for parts, chosen in windows_of(documents, portions, capacity):
        held = read_all(documents, parts, chosen, writer.dtype)
        sizes = held.sizes // writer.dtype.itemsize
        packed, of_window = pack(sizes, options)
        counts.add(of_window)
        bins = np.full(packed.num_bins * capacity, pad_id, writer.dtype)
        addresses = held.addresses[packed.document] + packed.start * writer.dtype.itemsize
        gather(addresses, packed.size * writer.dtype.itemsize, bins, packed.target)
        # A window is large, whatever memory a conversion may take: it is there twice while bins are
        # filled, once while they are written, and not at all when the next one is read.
        held.tokens.clear()
        _write(bins, held, packed, writer)
        bytes_written = bins.nbytes
        del bins, held
        yield (parts[packed.document], chosen[packed.document]), bytes_written
    tail = np.full(1, pad_id, writer.dtype)
    nothing = np.empty(0, np.int64)
    writer.add_packed(tail.view(np.uint8).data, nothing.astype(np.int32), nothing, nothing, None)


def _write(
    bins: np.ndarray, held: HeldDocuments, packed: PackedPieces, writer: IndexedDatasetWriter
) -> None:
    """Write bins, and tell which sequences lie in them: those of the documents, cut where pieces
    are, without empty ones.
    """
    sequences = ragged(held.first_sequences, held.num_sequences)
    token_bounds = bounds_of(held.lengths[sequences])
    itemsize = writer.dtype.itemsize
    tokens_before_document = bounds_of(held.sizes // itemsize)[:-1]
    # where pieces begin and end, of all documents laid end to end
    first_token = tokens_before_document[packed.document] + packed.start
    end_token = first_token + packed.size
    cuts = np.unique(np.concatenate([token_bounds, first_token, end_token]))
    first_cut = np.searchsorted(cuts, first_token)
    sequences_of_piece = np.searchsorted(cuts, end_token) - first_cut
    taken = ragged(first_cut, sequences_of_piece)
    shift = np.repeat(packed.target - first_token, sequences_of_piece)
    modes = None
    if held.modes is not None:
        # of sequences that begin at one token, the last has tokens
        source = np.searchsorted(token_bounds, cuts[taken], "right") - 1
        modes = held.modes[sequences][source]
    writer.add_packed(
        bins.view(np.uint8).data,
        (cuts[taken + 1] - cuts[taken]).astype(np.int32),
        sequences_of_piece,
        cuts[taken] + shift,
        modes,
    )
