"""What packing leaves empty, and what laying documents end to end cuts.

    python tools/bench/packing.py [--documents 100000]

Documents as long as Python's sources are (as tokens) and lognormal ones with a mean of 1,810
tokens, in the windows in which conversions pack them. Padding: the share of tokens of bins that
belong to no document. Cut: of documents that fit a sample, the share that is in two, if all are
laid end to end and cut at every sample; and the share of tokens that follow such a cut in their
document, which are trained on without what came before them. First fit in the order of the
documents, which is what collators that pack a batch as it comes do, for comparison.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from streammega.convert.options import ConvertOptions
from streammega.convert.write.packing import WINDOW_BINS, WINDOW_TOKENS, PackingStats, pack
from tools.bench import corpus, harness

CAPACITIES = (2048, 4096, 8192, 32768)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--documents", type=int, default=100_000)
    chosen = parser.parse_args()
    harness.table(
        "documents", "tokens of a bin", "padding", "with 8 documents at most", "as they come",
        "documents a bin", "documents cut end to end", "tokens behind a cut", "M tokens/s",
    )  # fmt: skip
    for name in ("sources", "lognormal"):
        sizes = corpus.sample_lengths(name, chosen.documents)
        for capacity in CAPACITIES:
            pack_all(sizes[:1000], ConvertOptions(pack_length=capacity))  # compiles
            began = time.perf_counter()
            counts = pack_all(sizes, ConvertOptions(pack_length=capacity))
            seconds = time.perf_counter() - began
            few = pack_all(sizes, ConvertOptions(pack_length=capacity, pack_max_documents=8))
            cut, behind = cuts(sizes, capacity)
            harness.row(
                name,
                f"{capacity:,}",
                f"{padding_of(counts, capacity):.3%}",
                f"{padding_of(few, capacity):.3%}",
                f"{padding_as_they_come(sizes, capacity):.1%}",
                f"{counts.pieces / counts.bins:.1f}, {counts.most_pieces} at most",
                f"{cut:.1%}",
                f"{behind:.1%}",
                f"{sizes.sum() / seconds / 1e6:,.0f}",
            )


def padding_of(counts: PackingStats, capacity: int) -> float:
    return counts.padding / (counts.bins * capacity)


def pack_all(sizes: NDArray[np.int64], options: ConvertOptions) -> PackingStats:
    """As a conversion does: window by window."""
    assert options.pack_length is not None
    window = max(WINDOW_TOKENS, WINDOW_BINS * options.pack_length)
    ends = np.cumsum(sizes)
    counts = PackingStats()
    first = 0
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + window, "right")))
        _, of_window = pack(sizes[first:last], options)
        counts.add(of_window)
        first = last
    return counts


def padding_as_they_come(sizes: NDArray[np.int64], capacity: int) -> float:
    """The padding of bins that take documents in their order while they fit. Longer ones are split."""
    tokens = 0
    bins = 1
    room = capacity
    for size in sizes.tolist():
        tokens += size
        bins += size // capacity
        size %= capacity
        if size > room:
            bins += 1
            room = capacity
        room -= size
    return 1 - tokens / (bins * capacity)


def cuts(sizes: NDArray[np.int64], length: int) -> tuple[float, float]:
    """(share of the documents that fit a sample and are cut, share of all tokens behind a cut)."""
    ends = np.cumsum(sizes)
    starts = ends - sizes
    is_cut = starts // length != (ends - 1) // length
    fits = sizes <= length
    first_cut = (starts // length + 1) * length
    behind = np.where(is_cut & fits, ends - first_cut, 0).sum()
    return float(np.mean(is_cut[fits])), float(behind / ends[-1])


if __name__ == "__main__":
    main()
