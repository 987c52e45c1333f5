"""The stream order over stored datasets: they are opened once, and each segment has an order of its
own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from streammega.config import DataConfig, Segment
from streammega.errors import ConfigError
from streammega.errors.logs import get_logger
from streammega.order import Extents
from streammega.order.epoch_layout import Records, StreamDataset, dataset_samples
from streammega.order.megatron import normalized
from streammega.order.stream_order import (
    LANES_LIMIT,
    STREAM_VERSION,
    USAGE,
    StreamOrder,
    default_block_bytes,
    default_lanes,
    usage_of,
)
from streammega.samples.excluded import ExcludedTokens, excluded_tokens
from streammega.samples.packed import check_one_kind, check_packing, trim_padding
from streammega.samples.segments import SplitData
from streammega.samples.source import (
    Integers,
    SampleSource,
    SegmentSource,
    Span,
)
from streammega.samples.stream_datasets import open_datasets
from streammega.samples.token_file import TokenFile, with_vocabulary
from streammega.storage.open import resolved

log = get_logger(__name__)


class StreamSegment(SegmentSource):
    """Samples of one stream order over files that are open."""

    has_file_per_shard = True

    def __init__(
        self,
        config: DataConfig,
        data: SplitData,
        files: Sequence[Sequence[TokenFile]],
        order: StreamOrder,
        excluded: ExcludedTokens | None = None,
    ) -> None:
        self.config = config
        self._data = data
        self.split = data.split
        self.prefixes = data.prefixes
        self.files = files
        self.order: StreamOrder = order
        self.first_sample = order.first_sample
        self.excluded = excluded
        self.dataset_numbers = order.dataset_numbers
        # divided by the largest first: the sum of huge weights would be infinite
        largest = max(order.weights)
        self.shares = normalized([weight / largest for weight in order.weights])
        self.tokens_per_epoch = [dataset.tokens for dataset in order.datasets]

    @property
    def num_samples(self) -> int | None:
        """Samples that the config asks of this split; None: no end."""
        return self._data.num_samples

    def locate(self, sample_ids: Integers) -> Extents:
        """Where samples are stored: one run of tokens each, or several where a sample joins what
        earlier segments left unread.
        """
        extents = self.order.locate(sample_ids)
        if not self.is_packed:
            return extents
        table = self.file_table
        return trim_padding(extents, table.files, table.file_of_rows(extents))

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """The scalars that define the order, and a digest of each dataset with its share."""
        order = self.order
        packed = {"packed": True} if self.is_packed else {}
        return packed | {
            "order": "stream",
            "order_version": STREAM_VERSION,
            "split": self.split,
            "sequence_length": order.sequence_length,
            "add_extra_token": order.extra_token,
            "seed": order.seed,
            "shuffle_lanes": order.lanes,
            "shuffle_block_bytes": order.shuffle_block_bytes,
            "datasets": self._described_datasets(),
        }

    def later_identity(self) -> dict[str, Any]:
        """What defines a later segment: each dataset is "number:digest*share"."""
        order = self.order
        numbers = order.dataset_numbers.tolist()
        datasets = zip(numbers, self._described_datasets(), strict=True)
        return {
            "first_sample": order.first_sample,
            "sequence_length": order.sequence_length,
            "shuffle_lanes": order.lanes,
            "datasets": [f"{number}:{dataset}" for number, dataset in datasets],
        }

    def _described_datasets(self) -> list[str]:
        """A digest of each of its datasets, and its share in eight digits: weights 3 and 7 are the
        order of 0.3 and 0.7.
        """
        files = [self.files[number] for number in self.order.dataset_numbers.tolist()]
        digests = _digests_of(self.order.datasets, files)
        pairs = zip(digests, self.shares, strict=True)
        return [f"{digest}*{share:.8g}" for digest, share in pairs]

    def usage(self, spans: Sequence[Span]) -> Records:
        """Counted from the order alone: no sample is located."""
        return usage_of(self.order, spans)


class EpochSegment(StreamSegment):
    """Every sample of all datasets once: one epoch of a dataset that is all of them, end to end.

    order: of that dataset, whose files are those of all datasets. one_by_one: each dataset.
    """

    def __init__(
        self,
        config: DataConfig,
        data: SplitData,
        files: Sequence[Sequence[TokenFile]],
        order: StreamOrder,
        one_by_one: Sequence[StreamDataset],
    ) -> None:
        super().__init__(config, data, files, order)
        self._one_by_one = one_by_one
        self._first_files = np.cumsum([0, *(len(of_dataset) for of_dataset in files)])
        self.dataset_numbers = np.arange(len(files))
        self.tokens_per_epoch = [dataset.tokens for dataset in one_by_one]
        self.shares = normalized([float(tokens) for tokens in self.tokens_per_epoch])

    @property
    def num_samples(self) -> int:
        """All samples of an epoch. The first ids are those of the first epoch: every lane has as
        many as its run, and runs are equal, the longer ones first.
        """
        return int(self.order.layout.datasets["size"][0])

    def locate(self, sample_ids: Integers) -> Extents:
        """Where samples are stored: one run of tokens each."""
        extents = super().locate(sample_ids)
        number = np.searchsorted(self._first_files, extents.file, side="right") - 1
        file = extents.file - self._first_files[number]
        return replace(extents, dataset=number.astype(np.int32), file=file.astype(np.int32))

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """As of any stream, without end: other samples come at other places."""
        return super().identity(consumed) | {"epochs": 1}

    def _described_datasets(self) -> list[str]:
        return _digests_of(self._one_by_one, self.files)

    def usage(self, spans: Sequence[Span]) -> Records:
        """Counted by locating all samples."""
        usage = np.zeros(len(self.files), USAGE)
        for start, stop in spans:
            dataset = self.locate(np.arange(start, stop)).dataset
            usage["samples"] += np.bincount(dataset, minlength=len(usage))
        return usage


class StreamSource(SampleSource):
    """Samples of one split in the stream order. Those of training end only if the config has
    `num_samples`; without it, those of other splits are one epoch.

    Args:
        data: the datasets and segments of the split.
        global_batch_size: chooses the lanes, unless the config names them.

    Raises ConfigError for lanes that a global batch does not divide, for a dataset that holds
    nothing, for a file with two names in two segments, and as `with_vocabulary`. Raises StorageError
    and FormatError for the files.
    """

    def __init__(self, config: DataConfig, data: SplitData, global_batch_size: int) -> None:
        self._data = data
        self._global_batch_size = global_batch_size
        lanes = _chosen_lanes(data.segments, config.shuffle_block_bytes, global_batch_size)
        self._datasets = open_datasets(data, config)
        files = [dataset.files for dataset in self._datasets]
        _check_apart(data, files)
        bins = [(dataset.name, dataset.files[0].bin_tokens) for dataset in self._datasets]
        for segment in data.segments:
            check_packing([bins[number] for number in segment.numbers], segment.sequence_length)
        check_one_kind(bins)
        manifests = [(one.name, one.manifest) for one in self._datasets]
        config = config.with_manifests(dict(manifests))
        self.config = with_vocabulary(config, data.split, manifests)
        self._excluded = excluded_tokens(self.config, data.split, data.prefixes, files)
        super().__init__(self.config, self._segments_in(lanes))

    def with_lanes(self, lanes: int) -> StreamSource:
        """The same datasets in the lanes of a saved state, unless the config names its own."""
        if self.config.shuffle_lanes is not None or lanes in (0, self.lanes):
            return self
        # not an error: the phase may have begun, and its samples must stay where they are
        shared = _shared_lanes(self._data.segments, lanes, self._global_batch_size)
        if shared is not None:
            log.warning("in the lanes of the checkpoint ranks read some bytes twice: %s", shared)
        source = copy.copy(self)
        source.segments = tuple(self._segments_in(lanes))
        return source

    def _segments_in(self, lanes: int) -> list[StreamSegment]:
        """The segments in so many lanes, unless they name their own.

        Raises ConfigError for a dataset that holds no sample.
        """
        config, data = self.config, self._data
        block_bytes = config.shuffle_block_bytes or default_block_bytes(lanes)
        if data.split != "train" and data.num_samples is None:
            return [self._epoch(lanes, block_bytes)]
        files = [dataset.files for dataset in self._datasets]
        orders: list[StreamOrder] = []
        segments: list[StreamSegment] = []
        for segment in data.segments:
            datasets = [self._datasets[number].parts for number in segment.numbers]
            # a bin has no extra token: that would be of another document
            extra_token = config.add_extra_token and not datasets[0].is_packed
            length = segment.sequence_length
            order = StreamOrder(
                datasets=datasets,
                weights=segment.weights
                or [float(dataset_samples(one, length, int(extra_token))) for one in datasets],
                sequence_length=length,
                extra_token=extra_token,
                seed=config.seed,
                lanes=segment.lanes or lanes,
                shuffle_block_bytes=block_bytes,
                first_sample=segment.first_sample,
                numbers=segment.numbers if orders else None,
                earlier=tuple(orders),
            )
            try:
                order.check()
            except ConfigError as error:
                where = f"phase {len(orders)}" if orders else data.split
                raise ConfigError(f"{where}: {error}") from None
            orders.append(order)
            if length != config.sequence_length:
                config = replace(config, sequence_length=length)
            segments.append(StreamSegment(config, data, files, order, self._excluded))
        return segments

    def _epoch(self, lanes: int, block_bytes: int) -> EpochSegment:
        """Every sample of the split once, for evaluation. Raises ConfigError for a split without any."""
        files = [dataset.files for dataset in self._datasets]
        datasets = [dataset.parts for dataset in self._datasets]
        first_files = np.cumsum([0, *map(len, files)]).tolist()
        everything = StreamDataset(
            parts=[
                replace(part, file=first_file + part.file)
                for first_file, dataset in zip(first_files, datasets, strict=False)
                for part in dataset.parts
            ],
            itemsize=max(dataset.itemsize for dataset in datasets),
            is_packed=datasets[0].is_packed,
            name=f"the {self._data.split} split",
        )
        config = self.config
        order = StreamOrder(
            datasets=[everything],
            weights=[1.0],
            sequence_length=config.sequence_length,
            extra_token=config.add_extra_token and not everything.is_packed,
            seed=config.seed,
            lanes=lanes,
            shuffle_block_bytes=block_bytes,
        )
        order.check()
        return EpochSegment(config, self._data, files, order, datasets)


def _chosen_lanes(
    segments: Sequence[Segment], block_bytes: int | None, global_batch_size: int
) -> int:
    """The lanes of the first segment. Raises ConfigError for lanes that a global batch does not
    divide.
    """
    lanes = segments[0].lanes
    if lanes is not None and lanes % global_batch_size:
        raise ConfigError(
            f"shuffle_lanes {lanes} is not a multiple of global_batch_size "
            f"{global_batch_size}; change one of them"
        )
    lanes = lanes or default_lanes(global_batch_size, block_bytes)
    max_lanes = max(lanes, *(segment.lanes or 0 for segment in segments))
    if max_lanes > LANES_LIMIT:
        raise ConfigError(
            f"global_batch_size {global_batch_size:,}, or shuffle_lanes, needs {max_lanes:,} lanes; the "
            f"stream order has at most {LANES_LIMIT:,}: lower it"
        )
    shared = _shared_lanes(segments, lanes, global_batch_size)
    if shared is not None:
        raise ConfigError(shared)
    return lanes


def _digests_of(
    datasets: Sequence[StreamDataset], files: Sequence[Sequence[TokenFile]]
) -> list[str]:
    """A digest of each dataset, 12 hex digits: of what it holds, of where its parts are, and of its
    token width. files: of each.
    """
    digests = []
    for dataset, of_dataset in zip(datasets, files, strict=True):
        sizes = np.array([[part.start, part.tokens] for part in dataset.parts], "<i8")
        content = of_dataset[0].content
        described = sizes.tobytes() + bytes([dataset.itemsize]) + content.encode()
        first_file = dataset.parts[0].file
        if first_file:  # a split that begins in another shard, whose parts may have the same sizes
            described += f" {first_file}".encode()
        digests.append(hashlib.blake2b(described, digest_size=6).hexdigest())
    return digests


def _shared_lanes(segments: Sequence[Segment], lanes: int, global_batch_size: int) -> str | None:
    """An error message if the global batch of a phase does not divide its lanes, so that ranks
    would share them; else None.
    """
    for number, segment in enumerate(segments[1:], 1):
        size = segment.global_batch_size or global_batch_size
        lanes = segment.lanes or lanes
        if lanes % size:
            divided = -(-lanes // size) * size
            return (
                f"phase {number}: global_batch_size {size} does not divide its {lanes} lanes; take "
                f"one that does, give the phase shuffle_lanes = {divided}, or begin the run with "
                "`shuffle_lanes` that every batch size divides"
            )
    return None


def _check_apart(data: SplitData, files: Sequence[Sequence[TokenFile]]) -> None:
    """Raise ConfigError if datasets of different phases share a file, such as a folder and a shard in
    it: the order would take them for two datasets, and read the file in each phase.

    Datasets of the same phases may overlap, as in any blend. files: of each dataset.
    """
    phases_of_prefix: dict[str, set[int]] = {prefix: set() for prefix in data.prefixes}
    for number, segment in enumerate(data.segments):
        for prefix in segment.datasets:
            phases_of_prefix[prefix].add(number)
    prefix_of_file: dict[str, str] = {}
    for prefix, own_files in zip(data.prefixes, files, strict=True):
        for file in own_files:
            # whichever name its dataset has
            url = resolved(file.store.url(file.key))
            other = prefix_of_file.setdefault(url, prefix)
            if phases_of_prefix[other] != phases_of_prefix[prefix]:
                raise ConfigError(
                    f"{other} and {prefix} share the file {url}, "
                    "so phases would read it twice; use the same name in every phase. New shards are "
                    "another dataset of the blend"
                )
