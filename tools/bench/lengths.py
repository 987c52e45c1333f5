"""Lengths of documents as they are found, for benches of what depends on them alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from streammega.dataset import IndexedDatasetWriter
from tools.bench import corpus

LOGNORMAL_MEAN = 1810
LOGNORMAL_SIGMA = 1.3
"""Tokens of a document of the web, and how their logarithms spread."""
EOD = 0
SOURCES = 6000
"""Python files that are looked at, spread over all."""
AT_ONCE = 64
"""Files that are tokenised together: what the library holds of a text is many times its size."""


@cache
def of_sources() -> NDArray[np.int64]:
    """Tokens of Python files of this installation, with the one that ends each."""
    lengths: NDArray[np.int64] = np.load(corpus.made(corpus.FOLDER / "lengths.npy", _count))
    return lengths


def _count(path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(corpus.tokenizer())
    texts = corpus.sources()
    texts = texts[:: max(1, len(texts) // SOURCES)]
    lengths = []
    for first in range(0, len(texts), AT_ONCE):
        encodings = tokenizer.encode_batch_fast(texts[first : first + AT_ONCE])
        lengths += [len(encoding) + 1 for encoding in encodings]
    with open(path, "wb") as file:
        np.save(file, np.array(lengths, np.int64))


def of_web(documents: int, seed: int = 0) -> NDArray[np.int64]:
    """Lognormal lengths."""
    rng = np.random.default_rng(seed)
    center = np.log(LOGNORMAL_MEAN) - LOGNORMAL_SIGMA**2 / 2
    lengths = rng.lognormal(center, LOGNORMAL_SIGMA, documents)
    return np.maximum(2, lengths.astype(np.int64))


def sample(name: str, documents: int, seed: int = 0) -> NDArray[np.int64]:
    """Lengths of so many documents of "sources" or of "lognormal", shuffled."""
    if name == "lognormal":
        return of_web(documents, seed)
    # each file as often as the others, to within one
    rng = np.random.default_rng(seed)
    lengths = of_sources()
    times = -(-documents // len(lengths))
    return rng.permutation(np.tile(lengths, times))[:documents]


def write(prefix: str, lengths: NDArray[np.int64], vocab_size: int = 1000) -> None:
    """A pair of random documents of these lengths, each ended by EOD."""
    rng = np.random.default_rng(1)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for part in np.array_split(lengths, max(1, len(lengths) // 4096)):
            tokens = rng.integers(1, vocab_size, int(part.sum()), dtype=np.uint16)
            tokens[np.cumsum(part) - 1] = EOD
            ones = np.ones(len(part), np.int64)
            writer.add_documents(tokens.view(np.uint8).data, part.astype(np.int32), ones)
