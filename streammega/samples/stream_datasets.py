"""Opens the datasets of the stream order: their files, and the parts of these that belong to a
split.

Of their `.idx`, only the beginnings and ends are read, and the pointers at a split's bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streammega.config import DataConfig, StorageConfig
from streammega.dataset.manifest import Manifest
from streammega.dataset.opening import MAX_REQUESTS, content_of, open_with
from streammega.dataset.shard import check_last_end, open_tokens, token_at
from streammega.errors import ConfigError
from streammega.errors.logs import get_logger
from streammega.order.epoch_layout import FilePart, StreamDataset, samples_of
from streammega.order.split import split_bounds
from streammega.samples.columns import open_columns
from streammega.samples.file_index import FileIndex
from streammega.samples.loss_masks import learned_modes_by_manifest
from streammega.samples.segments import SplitData
from streammega.samples.token_file import TokenFile, check_tokenizers
from streammega.storage.open import is_remote
from streammega.storage.thread_pool import parallel_map

log = get_logger(__name__)

MANY_SEQUENCES = 1 << 40
"""More than any dataset has: a split that is all of so many is all of every dataset."""


@dataclass(frozen=True, kw_only=True)
class OpenDataset:
    """The files of a dataset. parts: those that belong to a split."""

    name: str
    manifest: Manifest
    files: list[TokenFile]
    parts: StreamDataset


def open_datasets(data: SplitData, config: DataConfig) -> list[OpenDataset]:
    """The datasets of a split by their numbers, each with its parts that belong to the split.

    Raises ConfigError if a dataset has nothing for the split, or another tokenizer than the others;
    StorageError and FormatError for the files.
    """

    def open_all(manifests: list[Manifest]) -> list[OpenDataset]:
        datasets = list(zip(data.prefixes, manifests, strict=True))
        is_whole = split_bounds(data.shares, MANY_SEQUENCES)[data.split] == (0, MANY_SEQUENCES)
        # whole datasets need no pointers: threads would not help
        requests = min(MAX_REQUESTS, config.storage.max_concurrent_requests)
        return parallel_map(
            lambda dataset: _cut_dataset(*dataset, data, config),
            datasets,
            1 if is_whole else requests,
            is_local=not any(map(is_remote, data.prefixes)),
        )

    opened = open_with(
        data.prefixes, config.storage, open_all, config.manifests, columns=config.columns
    )
    if len(opened) > 1 and not config.allow_mixed_tokenizers:
        check_tokenizers((dataset.name, dataset.manifest.tokenizers) for dataset in opened)
    return opened


def _cut_dataset(name: str, manifest: Manifest, data: SplitData, config: DataConfig) -> OpenDataset:
    """The part of a dataset that belongs to a split. Its shards, end to end, are cut by sequences, or
    by bins if it is packed.
    """
    shards = manifest.shards
    bin_tokens = manifest.bin_tokens
    if bin_tokens is None:
        for shard in shards:
            check_last_end(shard, config.storage)
    # splits are cut by sequences, or by bins
    units = [
        shard.sequences if bin_tokens is None else shard.tokens // bin_tokens for shard in shards
    ]
    bounds = split_bounds(data.shares, sum(units))[data.split]
    if bounds is None or bounds[0] == bounds[1]:
        kind = "sequences" if bin_tokens is None else "bins"
        raise ConfigError(
            f"{name}: split {data.shares!r} leaves nothing of its {sum(units)} {kind} for {data.split}"
        )
    learned = learned_modes_by_manifest(name, manifest, config.mask_loss_by_mode)
    needs_index = bin_tokens is not None or learned is not None
    content = content_of(manifest)
    files = []
    columns = open_columns(name, manifest, config)
    for shard, of_shard in zip(shards, columns, strict=True):
        store, info = open_tokens(shard, config.storage)
        files.append(
            TokenFile(
                store=store,
                key=info.key,
                dtype=shard.token_dtype,
                num_tokens=shard.tokens,
                etag=shard.etag,
                index=FileIndex(source=(shard, config.storage)) if needs_index else None,
                bin_tokens=bin_tokens,
                learned=learned,
                content=content,
                columns=of_shard,
            )
        )
    parts = _parts_of(manifest, units, *bounds, config.storage)
    if bin_tokens is None:
        extra = int(config.add_extra_token)
        _warn_of_short(name, parts, len(shards), config.sequence_length, extra)
    # blocks are sized in bytes, by the widest tokens
    itemsize = max(shard.token_dtype.itemsize for shard in shards)
    dataset = StreamDataset(
        parts=parts, itemsize=itemsize, is_packed=bin_tokens is not None, name=name
    )
    return OpenDataset(name=name, manifest=manifest, files=files, parts=dataset)


def _parts_of(
    manifest: Manifest,
    units_of_shard: Sequence[int],
    begin: int,
    end: int,
    storage: StorageConfig,
) -> list[FilePart]:
    """The parts of the files that have units [begin, end) of shards end to end."""
    known = {(number, sequence): token for number, sequence, token in manifest.pointers}

    def token_of(number: int, unit: int) -> int:
        """Where a unit of a shard begins; for the number of units, where the last ends."""
        if manifest.bin_tokens is not None:
            return unit * manifest.bin_tokens
        if (number, unit) in known:
            return known[number, unit]
        return token_at(manifest.shards[number], unit, storage)

    parts = []
    units_before = 0
    for number, units in enumerate(units_of_shard):
        first = max(0, begin - units_before)
        stop = min(units, end - units_before)
        if first < stop:
            start = token_of(number, first)
            tokens = token_of(number, stop) - start
            parts.append(FilePart(file=number, start=start, tokens=tokens))
        units_before += units
    return parts


def _warn_of_short(
    name: str, parts: Sequence[FilePart], count: int, length: int, extra: int
) -> None:
    """Warn of files that are too short for a sample: they are never read."""
    short = [
        part.tokens for part in parts if part.tokens and not samples_of(part.tokens, length, extra)
    ]
    if short:
        log.warning(
            "%s: %d of its %d shards have fewer than the %d tokens of a sample; "
            "their %d tokens are never read in the stream order "
            "(merge the shards with 'streammega convert', or lower sequence_length)",
            name,
            len(short),
            count,
            length + extra,
            sum(short),
        )
