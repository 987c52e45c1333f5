"""The stream order over stored datasets: headers and a few pointers are all that is read before the
first sample.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.dataset.headers import PairBounds, read_dataset
from streammega.dataset.labels import tokenizers_of
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.order import Extents
from streammega.order.lanes import (
    STREAM_VERSION,
    FilePart,
    StreamDataset,
    StreamOrder,
    dataset_samples,
    default_lanes,
    samples_of,
)
from streammega.order.split import SPLITS, split_bounds
from streammega.samples.modes import modes_of_pairs
from streammega.samples.source import OPENERS
from streammega.samples.split_blend import split_blend
from streammega.samples.token_file import TokenFile
from streammega.samples.tokenizers import check_tokenizers
from streammega.storage.fetch.threads import each

log = logging.getLogger(__name__)


class StreamSource:
    """Samples of one split in the stream order. It has no end; `num_samples` of the config ends it,
    where given.

    Raises ConfigError for a split or dataset that holds no sample, StorageError and FormatError for
    the files.
    """

    def __init__(self, config: DataConfig, split: str, global_batch_size: int) -> None:
        self.config = config
        self.split = split
        if config.lanes is not None and config.lanes % global_batch_size:
            raise ConfigError(
                f"lanes {config.lanes} is not a multiple of global_batch_size {global_batch_size}; change one of them"
            )
        blend = split_blend(config, split)
        if blend is None:
            missing = (
                f"split {config.split!r} leaves nothing"
                if config.blend is not None
                else "blend_per_split has no blend"
            )
            raise ConfigError(f"{missing} for {split}")
        shares = blend.shares
        opened = each(
            lambda name: _open_dataset(name, shares, split, config), blend.prefixes, OPENERS
        )
        self.files: Sequence[Sequence[TokenFile]] = [files for files, _, _ in opened]
        self._datasets = [dataset for _, dataset, _ in opened]
        if len(opened) > 1 and not config.mix_tokenizers:
            shards = [
                (name, [pair.files for pair in pairs])
                for name, (_, _, pairs) in zip(blend.prefixes, opened, strict=True)
            ]
            check_tokenizers([(name, tokenizers_of(files, name)) for name, files in shards], config)
        self._weights = blend.weights
        self.order = self._with_lanes(config.lanes or default_lanes(global_batch_size))

    @property
    def num_samples(self) -> int | None:
        """Samples the config asks of this split; None: no end."""
        return (
            self.config.num_samples[SPLITS.index(self.split)] if self.config.num_samples else None
        )

    def adopt_lanes(self, lanes: int) -> None:
        """Take the lanes of a saved state, unless the config names its own."""
        if self.config.lanes is None and lanes != self.order.lanes:
            self.order = self._with_lanes(lanes)

    def locate(self, sample_ids: NDArray[np.int64]) -> Extents:
        """Where samples lie: one run of tokens each."""
        return self.order.locate(sample_ids)

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """The scalars that define the order, and a digest of sizes and dtype of each dataset with
        its share.

        Of the blend schedule it holds what began before `consumed`: the future may still be
        changed. None: all of it.
        """
        order = self.order
        schedule = [
            (first, w)
            for first, w in order.schedule
            if first == 0 or consumed is None or first < consumed
        ]
        digests = [_digest(dataset) for dataset in order.datasets]
        shares = [_shares(weights) for _, weights in schedule]
        return {
            "order": "stream",
            "order_version": STREAM_VERSION,
            "split": self.split,
            "sequence_length": order.sequence_length,
            "add_extra_token": order.extra_token,
            "seed": order.seed,
            "lanes": order.lanes,
            "block_bytes": order.block_bytes,
            "datasets": [
                f"{digest}*{share}" for digest, share in zip(digests, shares[0], strict=True)
            ],
            "schedule": [
                [first, [float(w) for w in own]]
                for (first, _), own in zip(schedule[1:], shares[1:], strict=True)
            ],
        }

    def _with_lanes(self, lanes: int) -> StreamOrder:
        config = self.config
        extra = int(self.config.add_extra_token)
        own = [
            dataset_samples(dataset, config.sequence_length, extra) for dataset in self._datasets
        ]
        weights = [float(weight) for weight in (self._weights or own)]
        later = [(first, list(segment)) for first, segment in config.blend_schedule or ()]
        order = StreamOrder(
            datasets=self._datasets,
            schedule=later if later and later[0][0] == 0 else [(0, weights), *later],
            sequence_length=config.sequence_length,
            extra_token=config.add_extra_token,
            seed=config.seed,
            lanes=lanes,
            block_bytes=config.block_bytes,
        )
        try:
            order.check()
        except ConfigError as error:
            raise ConfigError(f"{self.split}: {error}") from None
        return order


def _open_dataset(
    name: str, share: str, split: str, config: DataConfig
) -> tuple[list[TokenFile], StreamDataset, list[PairBounds]]:
    """The files of a dataset, the parts of them that belong to a split (all pairs end to end, cut
    as a whole), and the pairs.
    """
    pairs = read_dataset(name, config.storage, config.index_cache_dir)
    counts = [pair.num_sequences for pair in pairs]
    bounds = split_bounds(share, sum(counts))[split]
    if bounds is None or bounds[0] == bounds[1]:
        raise ConfigError(
            f"{name}: split {share!r} leaves nothing of its {sum(counts)} sequences for {split}"
        )
    modes = modes_of_pairs(name, pairs, config)
    files = [
        TokenFile(
            store=pair.store,
            key=pair.bin_info.key,
            dtype=pair.dtype,
            num_tokens=pair.num_tokens,
            etag=pair.bin_info.etag,
            modes=own,
        )
        for pair, own in zip(pairs, modes, strict=True)
    ]
    itemsizes = {pair.dtype.itemsize for pair in pairs}
    parts = []
    first = 0
    for number, (pair, count) in enumerate(zip(pairs, counts, strict=True)):
        part = _part(pair, number, max(0, bounds[0] - first), min(count, bounds[1] - first))
        parts += [part] if part else []
        first += count
    _warn_of_short(name, parts, len(pairs), config)
    return files, StreamDataset(parts=parts, itemsize=max(itemsizes)), pairs


def _warn_of_short(name: str, parts: Sequence[FilePart], shards: int, config: DataConfig) -> None:
    """Samples lie within a file: one that is shorter gives none, which nobody would notice."""
    extra = int(config.add_extra_token)
    short = [
        part.tokens
        for part in parts
        if part.tokens and not samples_of(part.tokens, config.sequence_length, extra)
    ]
    if short:
        log.warning(
            "%s: %d of its %d shards have fewer than the %d tokens of a sample; their %d tokens are never read in the "
            "stream order (merge the shards with 'streammega convert', or lower sequence_length)",
            redact_urls(name),
            len(short),
            shards,
            config.sequence_length + extra,
            sum(short),
        )


def _part(pair: PairBounds, file: int, begin: int, end: int) -> FilePart | None:
    if begin >= end:
        return None
    start = pair.token_at(begin)
    return FilePart(file=file, start=start, tokens=pair.token_at(end) - start)


def _shares(weights: Sequence[float]) -> list[str]:
    """Weights divided by their sum, eight digits: 3 and 7 are the order that 0.3 and 0.7 are."""
    largest = max(weights)  # first, so that no sum of huge ones is infinite
    total = sum(weight / largest for weight in weights)
    return [f"{weight / largest / total:.8g}" for weight in weights]


def _digest(dataset: StreamDataset) -> str:
    """Of the token counts of a dataset's parts and its token width: what its order depends on.

    12 hex digits.
    """
    sizes = np.array([[part.start, part.tokens] for part in dataset.parts], "<i8")
    return hashlib.blake2b(sizes.tobytes() + bytes([dataset.itemsize]), digest_size=6).hexdigest()
