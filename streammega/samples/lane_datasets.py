"""Datasets of lanes, opened: their files, and the parts of these that belong to a split.

Of many at once, by listings; headers and the pointers at a split's bounds are
all that is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streammega.config import DataConfig
from streammega.dataset.headers import ShardBounds, content_of, known_pairs, read_dataset
from streammega.dataset.manifest_metadata import tokenizers_of
from streammega.dataset.resolve import Listing, list_datasets
from streammega.dataset.shard import Shard
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.order.lane_geometry import FilePart, StreamDataset, samples_of
from streammega.order.split import split_bounds
from streammega.samples.documents import DocumentBounds
from streammega.samples.modes import modes_of_pairs
from streammega.samples.source import OPENERS
from streammega.samples.token_file import TokenFile
from streammega.samples.tokenizer_checks import check_tokenizers
from streammega.storage import open_store
from streammega.storage.thread_pool import parallel_map

log = logging.getLogger(__name__)

LISTED_AT_ONCE = 128
"""Pairs of a blend that are opened at once where a listing has them: each waits for an answer or
two from far away, and holds next to nothing meanwhile.
"""
MANY_SEQUENCES = 1 << 40
"""Of which a split with a share has some: one that begins or ends within a dataset shows it."""


@dataclass(frozen=True, kw_only=True)
class OpenDataset:
    """The files of a dataset, the parts of them that belong to a split, the pairs, and the tokens of
    its bins where it is packed.
    """

    name: str
    files: list[TokenFile]
    parts: StreamDataset
    pairs: list[ShardBounds]
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
    listing = list_datasets(missing, config.storage)
    files_of_pair = known_pairs(missing, listing, config.storage, config.index_cache_dir)
    openers = _openers(missing, listing, files_of_pair, shares, split)
    at_once = min(openers, config.storage.max_requests)
    beside = min(at_once, max(1, len(missing)))

    def open_one(name: str) -> OpenDataset:
        pairs = read_dataset(
            name, config.storage, config.index_cache_dir, listing, beside, files_of_pair.get(name)
        )
        return _open_dataset(name, pairs, shares, split, config)

    newly_opened = iter(parallel_map(open_one, missing, at_once))
    opened = [opened_of_name.get(name) or next(newly_opened) for name in prefixes]
    if len(opened) > 1 and not config.mix_tokenizers:
        _check_one_tokenizer(prefixes, opened, config)
    return opened


def _openers(
    prefixes: Sequence[str],
    listing: Listing,
    files_of_pair: Mapping[str, Shard],
    shares: str,
    split: str,
) -> int:
    """Datasets that are opened at once."""
    is_whole = split_bounds(shares, MANY_SEQUENCES)[split] == (0, MANY_SEQUENCES)
    if is_whole and len(files_of_pair) == len(set(prefixes)):
        return 1  # nothing is asked: threads would only take turns
    has_all = len(listing.prefixes) == len(set(prefixes))
    return LISTED_AT_ONCE if has_all else OPENERS


def _open_dataset(
    name: str, pairs: list[ShardBounds], share: str, split: str, config: DataConfig
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
    content = content_of(pairs)
    files = [
        TokenFile(
            store=pair.store,
            key=pair.bin_info.key,
            dtype=pair.dtype,
            num_tokens=pair.num_tokens,
            etag=pair.bin_info.etag,
            modes=modes,
            documents=_documents_of(pair, config),
            content=content,
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


def _bin_tokens(name: str, pairs: Sequence[ShardBounds]) -> int | None:
    """Tokens of the bins of a dataset; None where documents lie end to end."""
    lengths = {pair.bin_tokens for pair in pairs}
    if len(lengths) > 1:
        raise ConfigError(f"{name}: its shards differ in their bins; make a blend of them")
    return lengths.pop()


def _num_units(pair: ShardBounds, bin_tokens: int | None) -> int:
    """Of what splits are cut by: bins, or sequences."""
    return pair.num_sequences if bin_tokens is None else pair.num_tokens // bin_tokens


def _token_at(pair: ShardBounds, unit: int, bin_tokens: int | None) -> int:
    """Where one of them begins, or the last ends."""
    return pair.token_at(unit) if bin_tokens is None else unit * bin_tokens


def _documents_of(pair: ShardBounds, config: DataConfig) -> DocumentBounds | None:
    """Where the documents of a file lie, if anything depends on it."""
    if pair.bin_tokens is None and not config.balance_batches:
        return None
    return DocumentBounds(index=pair.files.index, bin_tokens=pair.bin_tokens)


def _parts_of(
    pairs: Sequence[ShardBounds],
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
