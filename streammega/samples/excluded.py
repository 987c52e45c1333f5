"""Documents that training does not see from some sample on: which columns of samples they have.

The order of samples does not change: eod_id replaces the tokens of such documents, and there is no
loss on them. What is excluded from a sample depends on its number, on the lists that begin at or before it,
and on where documents are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig, ExcludedList, StorageConfig
from streammega.dataset.document_lookup import ShardDocuments
from streammega.errors import ConfigError
from streammega.kernels.fields import FILE_STRIDE, fill_ranges, find_excluded
from streammega.samples.document_names import DocumentName, DocumentNames
from streammega.samples.token_file import Runs, TokenFile
from streammega.storage.object_ops import read_if_exists

Integers = NDArray[np.int64]
ROOM = 64
"""Room for ranges before they are counted: a batch rarely has more."""
NEVER = 1 << 62
"""The first sample of a range that no list excludes."""
DIGITS = 12
"""Hex digits of a list's digest."""


class ExclusionMask:
    """Columns [low, high) of rows of a batch that hold tokens of excluded documents.

    ranges int64 [3, ranges]: row, low, high.
    """

    def __init__(self, ranges: Integers) -> None:
        self.ranges = ranges

    def overwrite(self, ids: NDArray[Any], eod_id: int) -> None:
        """Write eod_id for those tokens of ids [rows, width]."""
        fill_ranges(self.ranges, 0, 0, eod_id, ids)

    def clear(self, values: NDArray[Any]) -> None:
        """Write False to values [rows, S + 1] for ids of such documents and for the id after them,
        whose label would follow on them.
        """
        fill_ranges(self.ranges, 0, 1, False, values)


class ExcludedRanges(NamedTuple):
    """Tokens [start, stop) that a list excludes from a sample on; files are laid FILE_STRIDE apart.

    documents: {dataset: (how many documents, a digest of where they are)}.
    """

    first_sample: int
    starts: Integers
    stops: Integers
    documents: dict[int, tuple[int, str]]


class ExcludedTokens:
    """Tokens of files that are not seen from some samples on.

    starts, stops, since int64 [ranges]: see `find_excluded`. Ranges ascend, and touch only if they
    begin in different samples.
    """

    def __init__(self, lists: Sequence[ExcludedRanges]) -> None:
        self._lists = lists
        ends = [column for ranges in lists for column in (ranges.starts, ranges.stops)]
        bounds = np.unique(np.concatenate([np.empty(0, np.int64), *ends]))
        since = np.full(max(len(bounds) - 1, 0), NEVER)
        # the latest first: earlier ones overwrite it
        for ranges in sorted(lists, key=lambda ranges: -ranges.first_sample):
            opened = np.bincount(np.searchsorted(bounds, ranges.starts), minlength=len(bounds))
            opened -= np.bincount(np.searchsorted(bounds, ranges.stops), minlength=len(bounds))
            since[np.cumsum(opened)[:-1] > 0] = ranges.first_sample
        # ranges that touch and begin in one sample are merged
        changes = np.flatnonzero(np.diff(since, prepend=NEVER, append=NEVER))
        low, high = changes[:-1], changes[1:]
        is_excluded = since[low] != NEVER
        self.starts: Integers = bounds[low[is_excluded]]
        self.stops: Integers = bounds[high[is_excluded]]
        self.since: Integers = since[low[is_excluded]]

    def mask(self, runs: Runs, sample_ids: Integers) -> ExclusionMask | None:
        """Where the tokens of runs are excluded; None: nowhere. sample_ids: the sample of each row
        of the batch.
        """
        ranges = np.empty((3, ROOM), np.int64)
        sample = sample_ids[runs.sample]
        while True:
            count = find_excluded(
                self.starts, self.stops, self.since,
                runs.file, runs.start, runs.size, runs.sample_start, runs.sample, sample, ranges,
            )  # fmt: skip
            if count <= ranges.shape[1]:
                return ExclusionMask(np.ascontiguousarray(ranges[:, :count])) if count else None
            ranges = np.empty((3, count), np.int64)

    def excluded_from(self, file: int, start: int) -> int | None:
        """The sample from which on a token of a file is excluded; None: it never is."""
        token = file * FILE_STRIDE + start
        number = int(np.searchsorted(self.stops, token, side="right"))
        if number == len(self.starts) or self.starts[number] > token:
            return None
        return int(self.since[number])

    def ranges(self) -> Iterator[tuple[int, int, int, int]]:
        """(file, start, stop, first sample that does not see these tokens) of each range, in order."""
        columns = (self.starts, self.stops, self.since)
        for start, stop, since in zip(*(column.tolist() for column in columns), strict=True):
            file = start // FILE_STRIDE
            shift = file * FILE_STRIDE
            yield file, start - shift, stop - shift, since

    def identity(self, consumed: int | None, datasets: Collection[int] | None) -> dict[str, Any]:
        """The entry for an identity: for each list its first sample, how many documents it has, and
        a digest of where they are. Empty without lists.

        consumed: only lists that began before this sample; None: all. datasets: only documents of
        these; None: of all.
        """
        entries: list[list[Any]] = []
        for ranges in self._lists:
            if consumed is not None and ranges.first_sample >= max(consumed, 1):
                continue
            chosen = [
                (dataset, *documents)
                for dataset, documents in sorted(ranges.documents.items())
                if datasets is None or dataset in datasets
            ]
            if chosen:
                count = sum(documents for _, documents, _ in chosen)
                text = json.dumps([[dataset, digest] for dataset, _, digest in chosen])
                digest = hashlib.blake2b(text.encode(), digest_size=DIGITS // 2).hexdigest()
                entries.append([ranges.first_sample, f"{count} documents, {digest}"])
        return {"exclude_documents": entries} if entries else {}


def excluded_tokens(
    config: DataConfig,
    split: str,
    prefixes: Sequence[str],
    files: Sequence[Sequence[TokenFile]],
) -> ExcludedTokens | None:
    """The tokens that a split does not see; None: it sees all.

    prefixes, files: of each dataset. One file for several shards has them end to end. Raises
    ConfigError for names that no document has, and for too many or too long files; StorageError and
    FormatError for the files.
    """
    lists_of_names = config.exclusions_of(split)
    if not lists_of_names:
        return None
    assert config.eod_id is not None
    check_limits(files)
    names = DocumentNames(prefixes, config.storage, config.manifests)
    documents_of_first: dict[int, set[DocumentName]] = {}
    for excluded in lists_of_names:
        documents = documents_of_first.setdefault(excluded.first_sample, set())
        documents.update(_documents_of_list(excluded, names, config.storage))
    lists = [
        _ranges_of(first, documents, names.all_shards, files)
        for first, documents in sorted(documents_of_first.items())
    ]
    _check_eod_fits([ranges.starts for ranges in lists], files, config.eod_id)
    return ExcludedTokens(lists)


def _names_of_list(excluded: ExcludedList, storage: StorageConfig) -> list[str]:
    """The names of a list, each once."""
    if not isinstance(excluded.names, str):
        return list(dict.fromkeys(excluded.names))
    data = read_if_exists(excluded.names, storage)
    if data is None:
        raise ConfigError(
            f"exclude_documents: there is no file {excluded.names}; write one name a line into it, or give a few "
            "names as a list"
        )
    try:
        # Not by splitlines: names may hold characters at which it cuts, such as U+2028.
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ConfigError(
            f"exclude_documents: {excluded.names} is not UTF-8 text; save it as such"
        ) from None
    stripped = [line.strip() for line in lines]
    return list(dict.fromkeys(name for name in stripped if name))


def _documents_of_list(
    excluded: ExcludedList, names: DocumentNames, storage: StorageConfig
) -> Iterator[DocumentName]:
    """The documents of a list. Raises ConfigError for names that no document has."""
    wanted = _names_of_list(excluded, storage)
    try:
        documents_of_name = names.find_all(wanted, excluded.dataset)
        missing = [name for name in wanted if name not in documents_of_name]
        if missing:
            raise ConfigError(names.describe_missing(missing, excluded.dataset))
    except ConfigError as error:
        raise ConfigError(f"exclude_documents: {error}") from None
    return chain.from_iterable(documents_of_name.values())


def _ranges_of(
    first_sample: int,
    documents: Collection[DocumentName],
    shards: Sequence[Sequence[ShardDocuments]],
    files: Sequence[Sequence[TokenFile]],
) -> ExcludedRanges:
    """The ranges of a list's documents: one for each sequence of a document.

    States of runs hold the digests: the hashed bytes must never change.
    """
    files_of_dataset = [len(of_dataset) for of_dataset in files]
    first_files = np.cumsum([0, *files_of_dataset]).tolist()
    starts = [np.empty(0, np.int64)]
    stops = [np.empty(0, np.int64)]
    hashers: dict[int, Any] = {}
    counts: dict[int, int] = {}
    # name[:2] is (dataset, shard), by which names sort.
    for (dataset, shard), of_shard in groupby(sorted(documents), lambda name: name[:2]):
        numbers = np.array([name.document for name in of_shard], np.int64)
        begin, end = shards[dataset][shard].tokens_of_all(numbers)
        # The first token of the shard, as tokens of the dataset are numbered here.
        shard_start = shard * FILE_STRIDE
        if files_of_dataset[dataset] < len(shards[dataset]):
            # Megatron reads all shards of a dataset as one file
            shard_start = sum(other.num_tokens for other in shards[dataset][:shard])
        # without the dataset's number, which the identity has
        hasher = hashers.setdefault(dataset, hashlib.blake2b(digest_size=DIGITS // 2))
        for column in (begin + shard_start, end + shard_start):
            hasher.update(np.ascontiguousarray(column, "<i8").data)
        counts[dataset] = counts.get(dataset, 0) + len(numbers)
        shift = first_files[dataset] * FILE_STRIDE + shard_start
        starts.append(begin + shift)
        stops.append(end + shift)
    digests = {dataset: (count, hashers[dataset].hexdigest()) for dataset, count in counts.items()}
    return ExcludedRanges(first_sample, np.concatenate(starts), np.concatenate(stops), digests)


MAX_FILES = (1 << 63) // FILE_STRIDE
"""Files, laid FILE_STRIDE apart, whose tokens can be numbered by int64."""


def check_limits(files: Sequence[Sequence[TokenFile]]) -> None:
    """Raise ConfigError if there are too many files, or one is too long, to number their tokens."""
    count = sum(map(len, files))
    if count > MAX_FILES:
        raise ConfigError(
            f"exclude_documents: the blend has {count:,} files, and documents are excluded in at most "
            f"{MAX_FILES:,}; merge shards into larger ones (streammega convert PREFIX OUT --shard-size 4G), "
            "or leave exclude_documents out"
        )
    for file in chain.from_iterable(files):
        # a range up to the last number would touch the next file's first one
        if file.num_tokens >= FILE_STRIDE:
            raise ConfigError(
                f"exclude_documents: {file.url}: has {file.num_tokens:,} tokens, and documents are excluded "
                f"in files of less than {FILE_STRIDE:,}; write it in smaller shards (streammega convert "
                "PREFIX OUT --shard-size 4G); in the Megatron order, which joins those of a dataset, name "
                "each in the blend"
            )


def _check_eod_fits(
    starts: Sequence[NDArray[np.int64]], files: Sequence[Sequence[TokenFile]], eod_id: int
) -> None:
    """Raise ConfigError if eod_id does not fit the dtype of a file with excluded tokens.

    starts: the first tokens of the ranges of each list.
    """
    all_files = [file for of_dataset in files for file in of_dataset]
    used = np.unique(np.concatenate(starts) // FILE_STRIDE)
    for number in used.tolist():
        file = all_files[number]
        if eod_id > np.iinfo(file.dtype).max:
            raise ConfigError(
                f"{file.url}: stores ids as {file.dtype}, and eod_id {eod_id} does not fit, so it "
                "cannot replace documents that are excluded; set eod_id to that of the data's tokenizer"
            )
