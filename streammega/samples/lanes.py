"""The stream order over stored datasets: headers and a few pointers are all that is read before the
first sample.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.dataset.find import told_of_prefixes
from streammega.dataset.headers import PairBounds, known_pairs, read_dataset
from streammega.dataset.labels import tokenizers_of
from streammega.dataset.listing import Told
from streammega.dataset.token_file import ShardFiles
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
from streammega.samples.documents import DocumentBounds
from streammega.samples.modes import modes_of_pairs
from streammega.samples.packed import are_packed, check_bins, without_padding
from streammega.samples.skipped import SkippedTokens, skipped_tokens, skips_identity
from streammega.samples.source import OPENERS, all_files, file_of_rows
from streammega.samples.split_blend import SplitBlend, split_blend
from streammega.samples.token_file import TokenFile
from streammega.samples.tokenizers import check_tokenizers
from streammega.storage import open_store
from streammega.storage.fetch.threads import each

log = logging.getLogger(__name__)

TOLD_AT_ONCE = 128
"""Pairs of a blend that are opened at once where listings told of them: each waits for an answer or
two from far away, and holds next to nothing meanwhile.
"""

MANY_SEQUENCES = 1 << 40
"""Of which a split with a share has some: one that begins or ends within a dataset shows it."""


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
        """The scalars that define the order, and a digest of sizes and dtype of each dataset with
        its share.

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
                f"{digest_of(dataset)}*{share}"
                for dataset, share in zip(order.datasets, first_shares, strict=True)
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


@dataclass(frozen=True, kw_only=True)
class OpenDataset:
    """The files of a dataset, the parts of them that belong to a split, the pairs, and the tokens of
    its bins where it is packed.
    """

    name: str
    files: list[TokenFile]
    parts: StreamDataset
    pairs: list[PairBounds]
    bin_tokens: int | None


def open_datasets(
    prefixes: Sequence[str],
    shares: str,
    split: str,
    config: DataConfig,
    known: Sequence[OpenDataset] = (),
) -> list[OpenDataset]:
    """Datasets, each cut by `shares`, of which a split has its part. known: some that are open.

    Raises ConfigError for one that leaves nothing for the split, or that is of another tokenizer
    than the others, StorageError and FormatError for the files.
    """
    opened_of_name = {dataset.name: dataset for dataset in known}
    missing = [name for name in prefixes if name not in opened_of_name]
    # Held until all is open, so that what is listed first does not end with its client.
    _stores = [open_store(name, config.storage) for name in missing]
    told = told_of_prefixes(missing, config.storage)
    files_of_pair = known_pairs(missing, told, config.storage, config.index_cache_dir)
    openers = _openers(missing, told, files_of_pair, shares, split)
    at_once = min(openers, config.storage.max_requests)
    beside = min(at_once, max(1, len(missing)))

    def open_one(name: str) -> OpenDataset:
        pairs = read_dataset(
            name, config.storage, config.index_cache_dir, told, beside, files_of_pair.get(name)
        )
        return _open_dataset(name, pairs, shares, split, config)

    newly_opened = iter(each(open_one, missing, at_once))
    opened = [opened_of_name.get(name) or next(newly_opened) for name in prefixes]
    if len(opened) > 1 and not config.mix_tokenizers:
        _check_one_tokenizer(prefixes, opened, config)
    return opened


def _openers(
    prefixes: Sequence[str],
    told: Told,
    files_of_pair: Mapping[str, ShardFiles],
    shares: str,
    split: str,
) -> int:
    """Datasets that are opened at once."""
    is_whole = split_bounds(shares, MANY_SEQUENCES)[split] == (0, MANY_SEQUENCES)
    if is_whole and len(files_of_pair) == len(set(prefixes)):
        return 1  # nothing is asked: threads would only take turns
    all_told = len(told.prefixes) == len(set(prefixes))
    return TOLD_AT_ONCE if all_told else OPENERS


def _open_dataset(
    name: str, pairs: list[PairBounds], share: str, split: str, config: DataConfig
) -> OpenDataset:
    """A dataset whose pairs, all end to end, are cut as a whole by `share`: by sequences, or by the
    bins of one that is packed.
    """
    bin_tokens = _bin_tokens(name, pairs)
    units = [_num_units(pair, bin_tokens) for pair in pairs]
    bounds = split_bounds(share, sum(units))[split]
    if bounds is None or bounds[0] == bounds[1]:
        kind = "sequences" if bin_tokens is None else "bins"
        raise ConfigError(
            f"{name}: split {share!r} leaves nothing of its {sum(units)} {kind} for {split}"
        )
    modes_of_pair = modes_of_pairs(name, pairs, config)
    files = [
        TokenFile(
            store=pair.store,
            key=pair.bin_info.key,
            dtype=pair.dtype,
            num_tokens=pair.num_tokens,
            etag=pair.bin_info.etag,
            modes=modes,
            documents=_documents_of(pair, config),
        )
        for pair, modes in zip(pairs, modes_of_pair, strict=True)
    ]
    parts = _parts_of(pairs, units, bin_tokens, *bounds)
    for pair in pairs:
        pair.files.index.forget()
    if bin_tokens is None:
        _warn_of_short(name, parts, len(pairs), config)
    # in bytes, blocks are as long as the widest tokens make them
    itemsize = max(pair.dtype.itemsize for pair in pairs)
    dataset = StreamDataset(parts=parts, itemsize=itemsize, is_packed=bin_tokens is not None)
    return OpenDataset(name=name, files=files, parts=dataset, pairs=pairs, bin_tokens=bin_tokens)


def _bin_tokens(name: str, pairs: Sequence[PairBounds]) -> int | None:
    """Tokens of the bins of a dataset; None where documents lie end to end."""
    lengths = {pair.bin_tokens for pair in pairs}
    if len(lengths) > 1:
        raise ConfigError(f"{name}: its shards differ in their bins; make a blend of them")
    return lengths.pop()


def _num_units(pair: PairBounds, bin_tokens: int | None) -> int:
    """Of what splits are cut by: bins, or sequences."""
    return pair.num_sequences if bin_tokens is None else pair.num_tokens // bin_tokens


def _token_at(pair: PairBounds, unit: int, bin_tokens: int | None) -> int:
    """Where one of them begins, or the last ends."""
    return pair.token_at(unit) if bin_tokens is None else unit * bin_tokens


def _documents_of(pair: PairBounds, config: DataConfig) -> DocumentBounds | None:
    """Where the documents of a file lie, if anything depends on it."""
    if pair.bin_tokens is None and not config.balance_batches:
        return None
    return DocumentBounds(index=pair.files.index, bin_tokens=pair.bin_tokens)


def _parts_of(
    pairs: Sequence[PairBounds],
    units_of_pair: Sequence[int],
    bin_tokens: int | None,
    begin: int,
    end: int,
) -> list[FilePart]:
    """What sequences or bins [begin, end) of pairs end to end are of each file; files without any
    have no part.
    """
    parts = []
    units_before = 0
    for number, (pair, units) in enumerate(zip(pairs, units_of_pair, strict=True)):
        first = max(0, begin - units_before)
        stop = min(units, end - units_before)
        if first < stop:
            start = _token_at(pair, first, bin_tokens)
            tokens = _token_at(pair, stop, bin_tokens) - start
            parts.append(FilePart(file=number, start=start, tokens=tokens))
        units_before += units
    return parts


def _check_one_tokenizer(
    prefixes: Sequence[str], opened: Sequence[OpenDataset], config: DataConfig
) -> None:
    """Raise ConfigError if datasets of a blend are of different tokenizers."""
    tokenizers = []
    for name, dataset in zip(prefixes, opened, strict=True):
        shards = [pair.files for pair in dataset.pairs]
        tokenizers.append((name, tokenizers_of(shards, name)))
    check_tokenizers(tokenizers, config)


def _warn_of_short(name: str, parts: Sequence[FilePart], shards: int, config: DataConfig) -> None:
    """Samples lie within a file: one that is shorter gives none, which nobody would notice."""
    length = config.sequence_length
    extra = int(config.add_extra_token)
    short = [
        part.tokens for part in parts if part.tokens and not samples_of(part.tokens, length, extra)
    ]
    if short:
        log.warning(
            "%s: %d of its %d shards have fewer than the %d tokens of a sample; "
            "their %d tokens are never read in the stream order "
            "(merge the shards with 'streammega convert', or lower sequence_length)",
            redact_urls(name),
            len(short),
            shards,
            length + extra,
            sum(short),
        )


def shares_of(weights: Sequence[float]) -> list[str]:
    """Weights divided by their sum, eight digits: 3 and 7 are the order that 0.3 and 0.7 are."""
    # by the largest first, so that no sum of huge ones is infinite
    largest = max(weights)
    relative = [weight / largest for weight in weights]
    total = sum(relative)
    return [f"{weight / total:.8g}" for weight in relative]


def digest_of(dataset: StreamDataset) -> str:
    """Of the token counts of a dataset's parts and its token width: what its order depends on.

    12 hex digits.
    """
    sizes = np.array([[part.start, part.tokens] for part in dataset.parts], "<i8")
    return hashlib.blake2b(sizes.tobytes() + bytes([dataset.itemsize]), digest_size=6).hexdigest()
