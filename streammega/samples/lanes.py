"""The stream order over stored datasets: the source of its samples, and what identifies it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.errors import ConfigError
from streammega.order import Extents
from streammega.order.epoch_layout import StreamDataset, dataset_samples
from streammega.order.split import SPLITS
from streammega.order.stream_order import STREAM_VERSION, StreamOrder, default_lanes
from streammega.samples.excluded import SkippedTokens, skipped_tokens, skips_identity
from streammega.samples.packed import are_packed, check_bins, without_padding
from streammega.samples.source import all_files, file_of_rows
from streammega.samples.split_blend import SplitBlend, split_blend
from streammega.samples.stream_datasets import open_datasets
from streammega.samples.token_file import TokenFile


class LaneSource:
    """Samples of one split in one stream order, over files that are open.

    Args: config, split: what they are of. files: of each dataset, by its number. order: where
        samples lie in them. skipped: what of them is not seen.
    """

    joined_ids: NDArray[np.int64] | None = None
    """The "dataset_id" of each dataset; None: its number."""

    def __init__(
        self,
        config: DataConfig,
        split: str,
        files: Sequence[Sequence[TokenFile]],
        order: StreamOrder,
        skipped: SkippedTokens | None = None,
    ) -> None:
        self.config = config
        self.split = split
        self.files = files
        self.order = order
        self.skipped = skipped
        self._all_files = all_files(self)
        self._is_packed = are_packed(self._all_files)

    @property
    def num_samples(self) -> int | None:
        """Samples the config asks of this split; None: no end."""
        asked = self.config.num_samples
        return asked[SPLITS.index(self.split)] if asked else None

    @property
    def lanes(self) -> int:
        """Lanes of the order."""
        return self.order.lanes

    def locate(self, sample_ids: NDArray[np.int64]) -> Extents:
        """Where samples lie: one run of tokens each."""
        extents = self.order.locate(sample_ids)
        if not self._is_packed:
            return extents
        return without_padding(extents, self._all_files, file_of_rows(self, extents))

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """The scalars that define the order, and a digest of each dataset with its share.

        Of the blend schedule it holds what began before `consumed`: the future may still be
        changed. None: all of it.
        """
        order = self.order
        begun = [
            (first, shares_of(weights))
            for first, weights in order.schedule
            if first == 0 or consumed is None or first < consumed
        ]
        _, first_shares = begun[0]
        digests = digests_of(order, self.files)
        packed = {"packed": True} if self._is_packed else {}
        return packed | {
            "order": "stream",
            "order_version": STREAM_VERSION,
            "split": self.split,
            "sequence_length": order.sequence_length,
            "add_extra_token": order.extra_token,
            "seed": order.seed,
            "lanes": order.lanes,
            "block_bytes": order.block_bytes,
            "datasets": [
                f"{digest}*{share}" for digest, share in zip(digests, first_shares, strict=True)
            ],
            "schedule": [
                [first, [float(share) for share in shares]] for first, shares in begun[1:]
            ],
        }


class StreamSource(LaneSource):
    """Samples of one split in the stream order. It has no end; `num_samples` of the config ends it,
    where given.

    Raises ConfigError for a split or dataset that holds no sample, StorageError and FormatError for
    the files.
    """

    def __init__(self, config: DataConfig, split: str, global_batch_size: int) -> None:
        check_lanes(config, global_batch_size)
        blend = blend_of(config, split)
        opened = open_datasets(blend.prefixes, blend.shares, split, config)
        check_bins([(dataset.name, dataset.bin_tokens) for dataset in opened], config)
        self._datasets = [dataset.parts for dataset in opened]
        self._weights = blend.weights
        lanes = config.lanes or default_lanes(global_batch_size)
        order = first_order(config, split, self._datasets, self._weights, lanes)
        files = [dataset.files for dataset in opened]
        skipped = skipped_tokens(config, split, blend.prefixes, files)
        super().__init__(config, split, files, order, skipped)

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """That of the order, and what is not seen of the samples."""
        return super().identity(consumed) | skips_identity(self.skipped, consumed)

    def adopt_lanes(self, lanes: int) -> None:
        """Take the lanes of a saved state, unless the config names its own."""
        if self.config.lanes is None and lanes != self.order.lanes:
            self.order = first_order(self.config, self.split, self._datasets, self._weights, lanes)


def check_lanes(config: DataConfig, global_batch_size: int) -> None:
    """Raise ConfigError unless a global batch divides the lanes that a config names."""
    if config.lanes is not None and config.lanes % global_batch_size:
        raise ConfigError(
            f"lanes {config.lanes} is not a multiple of global_batch_size {global_batch_size}; "
            "change one of them"
        )


def blend_of(config: DataConfig, split: str) -> SplitBlend:
    """What a split reads. Raises ConfigError where the config gives it nothing."""
    blend = split_blend(config, split)
    if blend is None:
        missing = "blend_per_split has no blend"
        if config.blend is not None:
            missing = f"split {config.split!r} leaves nothing"
        raise ConfigError(f"{missing} for {split}")
    return blend


def first_order(
    config: DataConfig,
    split: str,
    datasets: Sequence[StreamDataset],
    weights: Sequence[float] | None,
    lanes: int,
) -> StreamOrder:
    """The order from sample 0 on, in so many lanes.

    Raises ConfigError for a dataset that holds no sample.
    """
    order = StreamOrder(
        datasets=datasets,
        schedule=_schedule(config, datasets, weights),
        sequence_length=config.sequence_length,
        extra_token=_has_extra_token(config, datasets),
        seed=config.seed,
        lanes=lanes,
        block_bytes=config.block_bytes,
    )
    try:
        order.check()
    except ConfigError as error:
        raise ConfigError(f"{split}: {error}") from None
    return order


def _has_extra_token(config: DataConfig, datasets: Sequence[StreamDataset]) -> bool:
    """Whether a sample has a token after its last: one that is a bin has none, for the label of
    that would be of another document.
    """
    return config.add_extra_token and not datasets[0].is_packed


def _schedule(
    config: DataConfig, datasets: Sequence[StreamDataset], weights: Sequence[float] | None
) -> list[tuple[int, list[float]]]:
    """(first sample, weights) of each segment: those of `blend_schedule`, and before them the
    blend's own weights, or without any the samples of each dataset.
    """
    segments = [(first, list(weights)) for first, weights in config.blend_schedule or ()]
    if segments:
        first_sample, _ = segments[0]
        if first_sample == 0:
            return segments
    return [(0, weights_of(config, datasets, weights)), *segments]


def weights_of(
    config: DataConfig, datasets: Sequence[StreamDataset], weights: Sequence[float] | None
) -> list[float]:
    """The weights of a blend; of one without any, the samples of each dataset."""
    if weights:
        return [float(weight) for weight in weights]
    extra = int(_has_extra_token(config, datasets))
    return [float(dataset_samples(dataset, config.sequence_length, extra)) for dataset in datasets]


def shares_of(weights: Sequence[float]) -> list[str]:
    """Weights divided by their sum, eight digits: 3 and 7 are the order that 0.3 and 0.7 are."""
    # by the largest first, so that no sum of huge ones is infinite
    largest = max(weights)
    relative = [weight / largest for weight in weights]
    total = sum(relative)
    return [f"{weight / total:.8g}" for weight in relative]


def digests_of(order: StreamOrder, files: Sequence[Sequence[TokenFile]]) -> list[str]:
    """A digest of each dataset of an order, 12 hex digits: of what it holds, and of the token counts
    of its parts and its token width, on which the order depends. files: of each dataset, by its
    number.
    """
    digests = []
    for dataset, number in zip(order.datasets, order.dataset_numbers.tolist(), strict=True):
        sizes = np.array([[part.start, part.tokens] for part in dataset.parts], "<i8")
        content = files[number][0].content
        described = sizes.tobytes() + bytes([dataset.itemsize]) + content.encode()
        digests.append(hashlib.blake2b(described, digest_size=6).hexdigest())
    return digests
