"""Opens the datasets of the stream order: their files, and the parts of these that belong to a
split.

Many are opened at once, by listings. Only headers, and the pointers at a split's bounds, are read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from streammega.config import DataConfig
from streammega.dataset.headers import MAX_HEADER_REQUESTS, content_of, read_datasets
from streammega.dataset.local_cache import open_once_per_node
from streammega.dataset.manifest_metadata import TokenizerLabel, tokenizers_of
from streammega.dataset.resolve import MAX_LOOKED_UP
from streammega.dataset.shard import Shard
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.order.epoch_layout import FilePart, StreamDataset, samples_of
from streammega.order.split import split_bounds
from streammega.samples.file_index import FileIndex
from streammega.samples.loss_masks import learned_modes_of_shards
from streammega.samples.token_file import TokenFile, check_tokenizers, check_vocabulary
from streammega.storage.open import is_remote
from streammega.storage.thread_pool import parallel_map

log = logging.getLogger(__name__)

MANY_SEQUENCES = 1 << 40
"""More than any dataset has: a split that is all of so many is all of every dataset."""


@dataclass(frozen=True, kw_only=True)
class OpenDataset:
    """The files of a dataset. parts: those that belong to a split. tokenizers: empty if nothing asks
    for them.
    """

    name: str
    files: list[TokenFile]
    parts: StreamDataset
    tokenizers: set[TokenizerLabel]


def open_datasets(
    prefixes: Sequence[str],
    shares: str,
    split: str,
    config: DataConfig,
) -> list[OpenDataset]:
    """The datasets of these prefixes, in their order, each with its parts that belong to a split.

    shares: the split string, which cuts every dataset by itself. Raises ConfigError if a dataset has
    nothing for the split, more ids than the config's vocabulary, or another tokenizer than the
    others; StorageError and FormatError for the files.
    """
    compares_tokenizers = not config.allow_mixed_tokenizers and len(prefixes) > 1
    needs_tokenizers = compares_tokenizers or config.vocab_size is not None

    def open_all() -> list[OpenDataset]:
        shards_of = read_datasets(prefixes, config.storage)

        def cut(dataset: tuple[str, list[Shard]]) -> OpenDataset:
            name, shards = dataset
            opened = _cut_dataset(name, shards, shares, split, config)
            if not needs_tokenizers:
                return opened
            tokenizers = tokenizers_of(shards, name)
            check_vocabulary(name, tokenizers, config)
            return replace(opened, tokenizers=tokenizers)

        datasets = list(zip(prefixes, shards_of, strict=True))
        is_whole = split_bounds(shares, MANY_SEQUENCES)[split] == (0, MANY_SEQUENCES)
        # whole datasets need no pointers: threads would not help
        requests = min(MAX_HEADER_REQUESTS, config.storage.max_concurrent_requests)
        at_once = 1 if is_whole else requests
        are_local = all(shard.store.is_local for shards in shards_of for shard in shards)
        return parallel_map(cut, datasets, at_once, is_local=are_local)

    # For fewer, a file costs more than it saves.
    if sum(map(is_remote, prefixes)) > MAX_LOOKED_UP:
        opened = open_once_per_node(prefixes, config.storage, open_all)
    else:
        opened = open_all()
    if compares_tokenizers:
        check_tokenizers((dataset.name, dataset.tokenizers) for dataset in opened)
    return opened


def _cut_dataset(
    name: str, shards: list[Shard], shares: str, split: str, config: DataConfig
) -> OpenDataset:
    """The part of a dataset that belongs to a split. Its shards, end to end, are cut by sequences, or
    by bins if it is packed.
    """
    if len({shard.bin_tokens for shard in shards}) > 1:
        raise ConfigError(
            f"{name}: some of its shards have other bins than others, so they have no samples of one "
            "length; convert it again with --pack-length, or name shards of equal bins in a blend"
        )
    bin_tokens = shards[0].bin_tokens
    # splits are cut by sequences, or by bins
    units = [
        shard.num_sequences if bin_tokens is None else shard.num_tokens // bin_tokens
        for shard in shards
    ]
    bounds = split_bounds(shares, sum(units))[split]
    if bounds is None or bounds[0] == bounds[1]:
        kind = "sequences" if bin_tokens is None else "bins"
        raise ConfigError(
            f"{name}: split {shares!r} leaves nothing of its {sum(units)} {kind} for {split}"
        )
    learned = learned_modes_of_shards(name, shards, config)
    needs_index = bin_tokens is not None or learned is not None
    content = content_of(shards)
    files = [
        TokenFile(
            store=shard.tokens()[0],
            key=shard.key,
            dtype=shard.dtype,
            num_tokens=shard.num_tokens,
            etag=shard.stored.etag,
            index=FileIndex(source=shard) if needs_index else None,
            bin_tokens=bin_tokens,
            learned=learned,
            content=content,
        )
        for shard in shards
    ]
    parts = _parts_of(shards, units, bin_tokens, *bounds)
    for shard in shards:
        shard.index_body = None  # only the bounds of the split need it, and there are thousands
    if bin_tokens is None:
        _warn_of_short(name, parts, len(shards), config)
    # blocks are sized in bytes, by the widest tokens
    itemsize = max(shard.dtype.itemsize for shard in shards)
    dataset = StreamDataset(
        parts=parts, itemsize=itemsize, is_packed=bin_tokens is not None, name=name
    )
    return OpenDataset(name=name, files=files, parts=dataset, tokenizers=set())


def _token_at(shard: Shard, unit: int, bin_tokens: int | None) -> int:
    """Where a unit begins; for the number of units, where the last ends."""
    return shard.token_at(unit) if bin_tokens is None else unit * bin_tokens


def _parts_of(
    shards: Sequence[Shard],
    units_of_shard: Sequence[int],
    bin_tokens: int | None,
    begin: int,
    end: int,
) -> list[FilePart]:
    """The parts of the files that have units [begin, end) of shards end to end."""
    parts = []
    units_before = 0
    for number, (shard, units) in enumerate(zip(shards, units_of_shard, strict=True)):
        first = max(0, begin - units_before)
        stop = min(units, end - units_before)
        if first < stop:
            start = _token_at(shard, first, bin_tokens)
            tokens = _token_at(shard, stop, bin_tokens) - start
            parts.append(FilePart(file=number, start=start, tokens=tokens))
        units_before += units
    return parts


def _warn_of_short(name: str, parts: Sequence[FilePart], count: int, config: DataConfig) -> None:
    """Warn of files that are too short for a sample: they are never read."""
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
            count,
            length + extra,
            sum(short),
        )
