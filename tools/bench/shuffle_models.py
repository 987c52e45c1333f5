"""The stream order, and other systems' shuffles, as published: the order in which each hands out
places 0 .. total - 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.order.epoch_layout import FilePart, StreamDataset
from streammega.order.quality import Places
from streammega.order.stream_order import StreamOrder


def stream(
    tokens: int,
    length: int,
    samples: int,
    *,
    lanes: int,
    shuffle_block_bytes: int,
    seed: int = 1,
    itemsize: int = 2,
) -> Places:
    """Where the first samples of a dataset start, in the stream order."""
    parts = [FilePart(file=0, start=0, tokens=tokens)]
    order = StreamOrder(
        datasets=[StreamDataset(parts=parts, itemsize=itemsize)],
        weights=[1.0],
        sequence_length=length,
        extra_token=True,
        seed=seed,
        lanes=lanes,
        shuffle_block_bytes=shuffle_block_bytes,
    )
    return order.locate(np.arange(samples)).start


def full_shuffle(total: int, rng: np.random.Generator) -> Places:
    """Every order equally likely: the quality to compare with; memory is the whole index and every
    read a small one.
    """
    return rng.permutation(total)


def block_shuffle(total: int, block: int, rng: np.random.Generator) -> Places:
    """Blocks in random order, shuffled inside, one at a time."""
    num_blocks = -(-total // block)
    parts = []
    for number in rng.permutation(num_blocks).tolist():
        first = number * block
        places = np.arange(first, min(first + block, total))
        parts.append(rng.permutation(places))
    return np.concatenate(parts)


def shuffle_buffer(total: int, shard: int, buffer: int, rng: np.random.Generator) -> Places:
    """Shards in random order into a buffer, from which a random sample is handed out (webdataset,
    tf.data).
    """
    source = _shards_in_random_order(total, shard, rng)
    buffer = min(buffer, total)
    held = source[:buffer].copy()
    handed_out = np.empty(total, np.int64)
    picks = rng.integers(0, buffer, total)
    for row in range(total - buffer):
        pick = picks[row]
        handed_out[row] = held[pick]
        held[pick] = source[buffer + row]
    handed_out[total - buffer :] = rng.permutation(held)
    return handed_out


def py1e(total: int, shard: int, block: int, rng: np.random.Generator) -> Places:
    """mosaicml-streaming's py1e: shards in random order, each sample moved by a uniform distance
    within a window of `block`.
    """
    source = _shards_in_random_order(total, shard, rng)
    reach = max(0, block - shard) / 2
    rows = np.arange(total)
    moved_to = rows + rng.uniform(-reach, reach, total)
    # Samples of one shard are shuffled among themselves as well.
    row_in_shard = rng.random(total) * shard
    first_row_of_shard = rows // shard * shard
    moved_to += (first_row_of_shard + row_in_shard) - rows
    return source[np.argsort(moved_to, kind="stable")]


def _shards_in_random_order(total: int, shard: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Places, shard after shard, each in its order."""
    num_shards = -(-total // shard)
    parts = []
    for number in rng.permutation(num_shards).tolist():
        first = number * shard
        parts.append(np.arange(first, min(first + shard, total)))
    return np.concatenate(parts)
