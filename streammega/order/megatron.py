"""The Megatron order of one dataset: document, sample and shuffle index, bit for bit.

Integers in, integers out: lengths, ids, counts and a seed give three arrays; the arrays give, for
any sample, its runs of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from streammega.errors import ConfigError, FormatError
from streammega.kernels.blending import blend_exhaustive, blend_weighted
from streammega.kernels.sample_index import (
    BAD_DOCUMENT_INDEX,
    BAD_SAMPLE_INDEX,
    BAD_SHUFFLE_INDEX,
    build_sample_index,
    sample_pieces,
)
from streammega.kernels.shuffle import LegacyShuffler
from streammega.order.extents import Extents

INT32_MAX = 2**31 - 1
IDS_AT_ONCE = 1 << 20
"""Ids that are compared with a range at once: bounds the memory."""
_ARRAY_OF_DAMAGE = {
    BAD_DOCUMENT_INDEX: "document_index",
    BAD_SAMPLE_INDEX: "sample_index",
    BAD_SHUFFLE_INDEX: "shuffle_index",
}


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """How many tokens an epoch of a split has, and which samples are made of it."""

    tokens_per_epoch: int
    sequence_length: int
    num_samples: int | None
    """Samples asked for; None: one epoch."""
    extra_token: bool
    drop_last: bool
    """Drop the last, partial sample (train and test always do)."""

    @property
    def extra(self) -> int:
        """1 if samples carry one extra token, else 0."""
        return int(self.extra_token)

    @property
    def num_epochs(self) -> int:
        """The least E with E * T >= N * S + extra; 1 when no number of samples is asked."""
        if self.num_samples is None:
            return 1
        wanted = self.num_samples * self.sequence_length + self.extra
        return max(1, -(-wanted // self.tokens_per_epoch))

    @property
    def tokens(self) -> int:
        """Tokens of all epochs that can start a sample."""
        return self.num_epochs * self.tokens_per_epoch - self.extra

    @property
    def num_rows(self) -> int:
        """How many samples there are. With a partial last one it is a ceil in float32, as in Megatron,
        whose inexactness is part of the order.
        """
        if self.drop_last:
            return self.tokens // self.sequence_length
        return int(np.ceil(np.float32(self.tokens) / self.sequence_length))

    @property
    def samples_sans_final_epoch(self) -> int:
        """Samples of all epochs but the last."""
        return ((self.num_epochs - 1) * self.tokens_per_epoch - self.extra) // self.sequence_length

    @property
    def separate_final_epoch(self) -> bool:
        """Whether the last epoch is shuffled on its own: when less than 80 % of it will be used."""
        if self.num_epochs == 1 or self.num_samples is None:
            return False
        last = self.num_samples - self.samples_sans_final_epoch
        per_epoch = (self.tokens_per_epoch - self.extra) // self.sequence_length
        if last > per_epoch + 1:
            raise ConfigError(
                f"{self.num_samples} samples of {self.sequence_length} tokens need {last} samples of the "
                f"last epoch, which has {per_epoch}: an epoch of {self.tokens_per_epoch} tokens is too "
                "small; lower sequence_length, or give the split more data"
            )
        return last < int(0.80 * per_epoch)


@dataclass(frozen=True, kw_only=True)
class GptIndices:
    """document_index int32 [positions]: sequence ids (Megatron's name for them); sample_index int32
    or int64 [samples + 1, 2]: (position, token offset); shuffle_index uint32 or int64 [samples]:
    sample -> sample_index row.
    """

    document_index: NDArray[np.int32]
    sample_index: NDArray[np.int32] | NDArray[np.int64]
    shuffle_index: NDArray[np.uint32] | NDArray[np.int64]


def index_kinds(
    shape: GptShape, num_sequences: int
) -> dict[str, tuple[tuple[DTypeLike, ...], tuple[int, ...]]]:
    """What each of the three arrays must be, for a split of so many sequences: the dtypes it may
    have, and its shape.
    """
    return {
        "document_index": ((np.int32,), (shape.num_epochs * num_sequences,)),
        "sample_index": ((np.int32, np.int64), (shape.num_rows + 1, 2)),
        "shuffle_index": ((_shuffle_dtype(shape),), (shape.num_rows,)),
    }


def gpt_shape(
    lengths: NDArray[np.int32],
    sequence_ids: NDArray[np.int32],
    num_samples: int | None,
    sequence_length: int,
    extra_token: bool = True,
    drop_last: bool = True,
) -> GptShape:
    """The shape of a split. Raises ConfigError when it holds no whole sample."""
    tokens = int(_lengths_of(lengths, sequence_ids).sum(dtype=np.int64))
    shape = GptShape(
        tokens_per_epoch=tokens,
        sequence_length=sequence_length,
        num_samples=num_samples,
        extra_token=extra_token,
        drop_last=drop_last,
    )
    if tokens == 0 or shape.num_rows < 1:
        raise ConfigError(
            f"a split of {len(sequence_ids)} sequences with {tokens} tokens holds no sample of "
            f"{sequence_length} (+{shape.extra}) tokens; lower sequence_length, or give the split "
            "more data"
        )
    return shape


def build_gpt_indices(
    lengths: NDArray[np.int32], sequence_ids: NDArray[np.int32], shape: GptShape, seed: int | None
) -> GptIndices:
    """The three indices. One generator serves the documents first, then the samples.

    Args:
        lengths: tokens of every sequence of the file, int32 [sequences].
        sequence_ids: the split's sequences, int32 [ids].
        seed: in [0, 2**32); None: nothing is shuffled: sequences keep their stored order.
    """
    shuffler = None if seed is None else LegacyShuffler(seed)
    document_index = _document_index(np.asarray(sequence_ids, np.int32), shape, shuffler)
    longest_sequence = int(_lengths_of(lengths, sequence_ids).max())
    # Its entries are positions in the document index and offsets within a sequence.
    largest = max(len(document_index), longest_sequence)
    dtype = np.int32 if largest <= INT32_MAX else np.int64
    sample_index = build_sample_index(
        lengths, document_index, shape.num_rows, shape.sequence_length, shape.extra, dtype
    )
    shuffle_index = _shuffle_index(shape, shuffler)
    return GptIndices(
        document_index=document_index, sample_index=sample_index, shuffle_index=shuffle_index
    )


def _lengths_of(lengths: NDArray[np.int32], ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """lengths[ids], without a copy when the ids are a range; in bounded memory."""
    first_id = int(ids[0]) if len(ids) else 0
    for start in range(0, len(ids), IDS_AT_ONCE):
        rows = ids[start : start + IDS_AT_ONCE]
        expected = np.arange(first_id + start, first_id + start + len(rows))
        if not np.array_equal(rows, expected):
            return lengths[ids]
    return lengths[first_id : first_id + len(ids)]


def _document_index(
    ids: NDArray[np.int32], shape: GptShape, shuffler: LegacyShuffler | None
) -> NDArray[np.int32]:
    index = np.tile(ids, shape.num_epochs)
    if shuffler is None:
        return index
    if shape.separate_final_epoch:
        final_epoch = len(index) - len(ids)
        shuffler.shuffle(index[:final_epoch])
        shuffler.shuffle(index[final_epoch:])
    else:
        shuffler.shuffle(index)
    return index


def _shuffle_dtype(shape: GptShape) -> type[np.uint32] | type[np.int64]:
    # The bound is Megatron's: the two dtypes are files of other bytes.
    return np.uint32 if shape.num_rows < 2**32 - 2 else np.int64


def _shuffle_index(
    shape: GptShape, shuffler: LegacyShuffler | None
) -> NDArray[np.uint32] | NDArray[np.int64]:
    total = shape.num_rows
    final_epoch = shape.samples_sans_final_epoch if shape.separate_final_epoch else total
    index: NDArray[Any] = np.arange(total, dtype=_shuffle_dtype(shape))
    if shuffler is None:
        return index
    shuffler.shuffle(index[:final_epoch])
    if final_epoch < total:
        shuffler.shuffle(index[final_epoch:])
    return index


def locate_gpt(
    indices: GptIndices,
    lengths: NDArray[np.int32],
    byte_offsets: NDArray[np.int64],
    itemsize: int,
    samples: NDArray[np.int64],
    shape: GptShape,
    *,
    with_empty: bool = False,
) -> Extents:
    """The token runs of `samples`, int64 [n], each in [0, len(shuffle_index)).

    `byte_offsets`: where each sequence starts in its file, int64 [sequences]; `itemsize`: bytes of
    a token; `with_empty`: sequences without tokens have a run as well. Raises FormatError, which
    begins with `<array>.npy`, if one of the indices holds what cannot be.
    """
    rows = indices.shuffle_index[samples].astype(np.int64)
    damage, splits, sequence, start, stop = sample_pieces(
        indices.document_index,
        indices.sample_index,
        lengths,
        rows,
        shape.extra,
        shape.sequence_length + shape.extra,
        with_empty,
    )
    if damage:
        raise FormatError(
            f"{_ARRAY_OF_DAMAGE[damage]}.npy: holds a value that leads outside of the data"
        )
    base = byte_offsets[sequence] // itemsize
    zeros = np.zeros(len(sequence), np.int32)
    return Extents(
        row_splits=splits, dataset=zeros, file=zeros, start=base + start, stop=base + stop
    )


BlendIndices = tuple[NDArray[np.int16], NDArray[np.int64]]


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights divided by their NumPy sum, as Megatron does (the rounding is part of the order)."""
    array = np.array(weights, np.float64)
    # NumPy's sum is pairwise: added one after the other, some weights round differently.
    shares = array / np.sum(array)
    return [float(share) for share in shares]


def samples_asked(weights: Sequence[float], size: int, surplus: float) -> list[int]:
    """Samples to build of each dataset for a blend of `size`: ceil(ceil(size * w) * (1 + surplus)),
    w normalised.
    """
    counts = []
    for weight in weights:
        drawn = math.ceil(size * weight)
        # Rounded up twice, as Megatron does: one more sample is another order.
        counts.append(math.ceil(drawn * (1 + surplus)))
    return counts


def blend_indices(
    weights: Sequence[float], size: int | None, lengths: Sequence[int]
) -> BlendIndices:
    """(dataset_index int16, dataset_sample_index int64) of a blend.

    `weights` with a `size`: as `normalized` gives them (once more would round again). Without:
    sizes of the datasets, all of whose samples are taken. Raises ConfigError when the blend takes
    more of a dataset than its length.
    """
    if size is None:
        indices = blend_exhaustive(np.array(weights, np.int64))
    else:
        indices = blend_weighted(np.array(weights, np.float64), size)
    dataset_index, _ = indices
    taken = np.bincount(dataset_index, minlength=len(weights)).tolist()
    for number, (wanted, length) in enumerate(zip(taken, lengths, strict=True)):
        if wanted > length:
            raise ConfigError(
                f"the blend takes {wanted} samples of dataset {number}, which has {length}; raise "
                "mid_level_dataset_surplus, ask for fewer samples, or give the dataset a lower weight"
            )
    return indices
