"""GPT samples of one dataset: the Megatron order over a `.bin/.idx` pair, or its sequences in
stored order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from streammega.config import ORDERS, DataConfig
from streammega.config.validate import plain
from streammega.dataset import IndexedDataset, cached_arrays
from streammega.dataset.local_cache import SharedFolder, cache_folder, corrupt_cache_error
from streammega.errors import ConfigError, FormatError
from streammega.errors.cached_property import cached_property
from streammega.errors.logs import get_logger
from streammega.order import Extents
from streammega.order.epoch_layout import Records
from streammega.order.extents import merge_extents, without_tokens
from streammega.order.megatron import (
    INT32_MAX,
    GptIndices,
    GptShape,
    build_gpt_indices,
    gpt_shape,
    index_kinds,
    locate_gpt,
)
from streammega.order.stream_order import USAGE
from streammega.samples.columns import joined, open_columns
from streammega.samples.field_inputs import Batch, check_mask_is_there
from streammega.samples.file_index import FileIndex
from streammega.samples.gather import read_fields
from streammega.samples.loss_masks import learned_modes_of
from streammega.samples.packed import check_packing, one_row_per_document, trim_padding
from streammega.samples.source import SegmentSource, Span
from streammega.samples.token_file import TokenFile

log = get_logger(__name__)

ORDER_VERSION = 1
"""In every identity. It changes when the order changes, so that a state of the old order is
refused.
"""
INDEX_NAMES = ("document_index", "sample_index", "shuffle_index")
"""Megatron's names of the arrays, and those of the cached files."""


def order_dir(config: DataConfig) -> Path:
    """Where this node keeps the arrays of orders that were built."""
    return cache_folder(config.storage) / "order"


def shared_folder(config: DataConfig) -> SharedFolder | None:
    """Where indices may have been published, if the config names a place."""
    if not config.index_publish_url:
        return None
    return SharedFolder(url=config.index_publish_url, storage=config.storage)


def num_units_of(indexed: IndexedDataset) -> int:
    """How many units are shuffled and split: sequences, or the bins of a packed dataset.

    Raises ConfigError if they are more than Megatron's int32 can number.
    """
    num_units = len(indexed) if indexed.bin_tokens is None else indexed.num_bins
    if num_units > INT32_MAX:
        raise ConfigError(
            f"{indexed.prefix}: has {num_units:,} sequences, and the Megatron order numbers "
            f"them by 32 bits ({INT32_MAX:,} at most); use order='stream', or a blend of parts of the "
            "dataset"
        )
    return num_units


def _checked_ids(
    indexed: IndexedDataset, num_units: int, ids: NDArray[np.int32]
) -> NDArray[np.int32]:
    """`ids` as int32. All are checked, for kernels use them as indices."""
    array = np.asarray(ids)
    values = ""
    if array.size == 0:
        fits = array.ndim == 1
    else:
        lowest = array.min()
        highest = array.max()
        values = f" from {lowest} to {highest}"
        fits = array.ndim == 1 and np.issubdtype(array.dtype, np.integer)
        fits = fits and int(lowest) >= 0 and int(highest) < num_units
    if fits:
        return array.astype(np.int32, copy=False)
    raise ConfigError(
        f"{indexed.prefix}: sequence_ids are a row of integers in [0, {num_units}), "
        f"not {array.dtype} {list(array.shape)}{values}"
    )


class GPTDataset(SegmentSource, torch.utils.data.Dataset[Batch]):
    """Samples of `sequence_length` tokens from one split of a dataset, in Megatron's order.

    `dataset[k]` is sample k as {"tokens", "labels", "loss_mask", "position_ids"}, each of shape
    [S]; `dataset[None]` is padding for a batch: the tokens of sample 0 without loss. The three
    indices are built once per node and memory-mapped from `cache_dir` afterwards.

    Every sample has a loss mask of its own. Megatron caches the mask of the sample that is read first,
    with the zeros of its padding, so later masks depend on what was read before.

    Args:
        indexed: the open pair.
        sequence_ids: ids of the split's sequences, int32 [ids]; None: all.
        num_samples: samples asked; as many epochs as they need. None: one epoch.
        config: sequence_length, seed, fields; `order="sequential"` leaves everything unshuffled.
        split: "train", "valid" or "test".

    Raises ConfigError if the split holds no sample, and for the stream order; CacheError if the indices cannot be kept.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_ids: NDArray[np.int32] | None,
        num_samples: int | None,
        config: DataConfig,
        split: str = "train",
    ) -> None:
        self.indexed = indexed
        self.prefixes: Sequence[str] = [indexed.name]
        self.config = config
        self.split = split
        if not ORDERS[config.order].has_indices:
            raise ConfigError(
                f"the {config.order} order builds no datasets of numbered samples: set "
                'order="megatron", or read by a StreamLoader'
            )
        config.check_eod_id(split)
        check_packing([(indexed.prefix, indexed.bin_tokens)], config.sequence_length)
        self.is_packed = indexed.bin_tokens is not None
        num_units = num_units_of(indexed)
        self.sequence_ids: NDArray[np.int32] = np.arange(num_units, dtype=np.int32)
        if sequence_ids is not None:
            self.sequence_ids = _checked_ids(indexed, num_units, sequence_ids)
        if len(self.sequence_ids) == 0:
            raise ConfigError(
                f"{indexed.prefix}: the {split} split holds no sequences; give it a larger share"
            )
        try:
            self.shape: GptShape = gpt_shape(
                self._lengths,
                self.sequence_ids,
                plain(num_samples),
                config.sequence_length,
                self.has_extra_token,
                split != "valid" or config.drop_last_partial_validation_sequence,
            )
        except ConfigError as error:
            raise ConfigError(f"{indexed.prefix} ({split}): {error}") from None
        self.shares = [1.0]
        self.tokens_per_epoch = [self.shape.tokens_per_epoch]
        learned = learned_modes_of(indexed, config.mask_loss_by_mode)
        needs_index = self.is_packed or learned is not None
        info = indexed.bin_info
        columns = open_columns(indexed.name, indexed.manifest, config)
        file = TokenFile(
            store=indexed.store,
            key=indexed.bin_key,
            dtype=indexed.dtype.newbyteorder("<"),
            num_tokens=info.size // indexed.dtype.itemsize,
            etag=info.etag,
            index=FileIndex(source=indexed) if needs_index else None,
            bin_tokens=indexed.bin_tokens,
            learned=learned,
            content=indexed.content,
            columns=joined(columns, indexed.prefix),
        )
        self.files: Sequence[Sequence[TokenFile]] = [[file]]

    def __len__(self) -> int:
        return self.shape.num_rows

    def __getitem__(self, index: int | None) -> Batch:
        number = 0 if index is None else index
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.indexed} ({self.split})")
        batch = read_fields(self, np.array([number], np.int64))
        fields = {name: field[0] for name, field in batch.items()}
        if index is None:
            remove_loss(fields)
        return fields

    @property
    def num_samples(self) -> int:
        """Samples of all epochs: often a few more than were asked."""
        return len(self)

    @property
    def document_index(self) -> NDArray[np.int32]:
        """Sequence ids in shuffled order, all epochs (Megatron calls them documents); int32."""
        return self.indices.document_index

    @property
    def sample_index(self) -> NDArray[np.int32] | NDArray[np.int64]:
        """(position in document_index, token offset) where each row starts, [rows + 1, 2]."""
        return self.indices.sample_index

    @property
    def shuffle_index(self) -> NDArray[np.uint32] | NDArray[np.int64]:
        """Sample -> row of sample_index."""
        return self.indices.shuffle_index

    @property
    def datasets(self) -> list[GPTDataset]:
        """Itself, as a blend has several."""
        return [self]

    def locate(self, sample_ids: NDArray[np.int64]) -> Extents:
        """The token runs of samples, int64 [n]. Those past the end have none: they are padding of a batch.

        Raises CacheError if a cached index is damaged.
        """
        is_there = sample_ids < len(self)
        if not is_there.all():
            past_end = np.flatnonzero(~is_there)
            located = np.flatnonzero(is_there), self.locate(sample_ids[is_there])
            return merge_extents([located, (past_end, without_tokens(len(past_end)))])
        # empty sequences are bounds of documents too; bins are never empty
        masks_sequences = self.config.inter_document_masking
        try:
            extents = locate_gpt(
                self.indices,
                self._lengths,
                self._offsets,
                self.indexed.dtype.itemsize,
                sample_ids,
                self.shape,
                with_empty=masks_sequences and not self.is_packed,
            )
        except FormatError as error:
            folder = order_dir(self.config)
            raise corrupt_cache_error(f"{folder / self._files_key}-{error}") from None
        if not self.is_packed:
            return extents
        ((file,),) = self.files
        numbers = np.zeros(len(extents.start), np.int64)
        filled = trim_padding(extents, [file], numbers)
        return one_row_per_document(filled, file) if masks_sequences else filled

    def usage(self, spans: Sequence[Span]) -> Records:
        """All samples are of this dataset."""
        usage = np.zeros(1, USAGE)
        usage["samples"] = sum(stop - start for start, stop in spans)
        return usage

    @cached_property
    def _lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence, or bin."""
        if not self.is_packed:
            return self.indexed.sequence_lengths
        return np.full(num_units_of(self.indexed), self.config.sequence_length, np.int32)

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        """Where each of them begins, in bytes."""
        return self.indexed.bin_offsets() if self.is_packed else self.indexed.sequence_offsets

    @cached_property
    def digest(self) -> str:
        """A digest of what the order depends on in this dataset, wherever it is: dtype and sequence
        lengths.
        """
        hasher = hashlib.blake2b(str(self.indexed.dtype).encode(), digest_size=8)
        hasher.update(np.ascontiguousarray(self._lengths).data)
        return hasher.hexdigest()

    @cached_property
    def key(self) -> str:
        """A digest of everything that defines this order, 32 hex digits."""
        digest_of_ids = hashlib.blake2b(self.sequence_ids.tobytes()).hexdigest()
        description = json.dumps([self.order_identity(), digest_of_ids], sort_keys=True)
        return hashlib.blake2b(description.encode(), digest_size=16).hexdigest()

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """The scalars that define this order, for the state of a loader."""
        return self.order_identity() | {"dataset": self.identity_key(self.digest)}

    def identity_key(self, order_digest: str) -> str:
        """A digest of the order's digest and of what the dataset holds, 16 hex digits."""
        described = f"{order_digest} {self.indexed.content}"
        return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()

    def order_identity(self) -> dict[str, Any]:
        """The scalars that define this order: what built indices depend on."""
        ids = self.sequence_ids
        packed = {"packed": True} if self.is_packed else {}
        return packed | {
            "order": self.config.order,
            "order_version": ORDER_VERSION,
            "split": self.split,
            "sequence_length": self.config.sequence_length,
            "seed": self.config.seed,
            "num_samples": self.shape.num_samples,
            "add_extra_token": self.has_extra_token,
            "drop_last": self.shape.drop_last,
            "sequences": [int(ids[0]), int(ids[-1]) + 1, len(ids)],
            "dataset": self.digest,
        }

    @cached_property
    def indices(self) -> GptIndices:
        """All three arrays, of the cache or built now."""
        if not ORDERS[self.config.order].is_shuffled:
            return self._build(shuffled=False)
        arrays: dict[str, Any] = cached_arrays(
            order_dir(self.config),
            self._files_key,
            index_kinds(self.shape, len(self.sequence_ids)),
            lambda: vars(self._build(shuffled=True)),
            shared_folder(self.config),
        )
        return GptIndices(**arrays)

    @property
    def _files_key(self) -> str:
        """What the names of the cached files begin with."""
        return f"{self.key}-GPTDataset-{self.split}"

    def index_files(self) -> list[Path]:
        """The cached files of the three indices, built or fetched now if they are not there. None for
        samples that are not shuffled: each process builds their indices in memory.
        """
        if not ORDERS[self.config.order].is_shuffled:
            return []
        _ = self.indices
        folder = order_dir(self.config)
        return [folder / f"{self._files_key}-{name}.npy" for name in INDEX_NAMES]

    def _build(self, *, shuffled: bool) -> GptIndices:
        log.info(
            "building the %s order of %s: %d samples",
            self.split,
            self.indexed.prefix,
            len(self),
        )
        seed = self.config.seed if shuffled else None
        return build_gpt_indices(self._lengths, self.sequence_ids, self.shape, seed)

    def __getstate__(self) -> dict[str, Any]:
        """Without the indices: each process maps the cached files by itself."""
        mapped = ("indices", "_lengths", "_offsets")
        return {name: value for name, value in self.__dict__.items() if name not in mapped}


def remove_loss(fields: Batch) -> None:
    """Make a sample padding of a batch. Raises ConfigError where it has no mask to say so."""
    check_mask_is_there(list(fields))
    if "loss_mask" in fields:
        fields["loss_mask"] = torch.zeros_like(fields["loss_mask"])
