"""Documents that training does not see from some sample on: which columns of samples those are.

The order of samples stays as it is: eod_id stands for tokens of such documents, and there is no loss
on them. What is skipped in a sample is a function of its number, of the lists that begin at or before
it, and of where documents lie.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig, SkippedList, SkippedNames, StorageConfig
from streammega.dataset.document_lookup import ShardDocuments
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.kernels.batch import FILE_STRIDE, fill_columns, find_skipped
from streammega.samples.document_names import DocumentName, DocumentNames
from streammega.samples.token_file import Runs, TokenFile
from streammega.storage.object_ops import read_whole

Integers = NDArray[np.int64]
ROOM = 64
"""Stretches for which there is room before they are counted: a slab rarely has any."""
NEVER = 1 << 62
"""The first sample in which a stretch is skipped, of one that is in none."""
DIGITS = 12
"""Of a digest of a list, in hex."""


class SkippedColumns:
    """Columns [low, high) of rows of a batch that hold tokens of skipped documents.

    found int64 [3, stretches]: row, low, high.
    """

    def __init__(self, found: Integers) -> None:
        self.found = found

    def joined(self) -> Integers:
        """The same without those that touch: stretches begin in different samples, which no longer
        matters.
        """
        row, low, high = self.found
        touches = np.zeros(len(row) + 1, np.bool_)
        touches[1:-1] = (row[1:] == row[:-1]) & (low[1:] == high[:-1])
        first = np.flatnonzero(~touches[:-1])
        last = np.flatnonzero(~touches[1:])
        return np.stack([row[first], low[first], high[last]])

    def overwrite(self, ids: NDArray[Any], eod_id: int) -> None:
        """Write eod_id for those tokens of ids [rows, width]."""
        fill_columns(self.found, 0, 0, eod_id, ids)

    def overwrite_labels(self, labels: NDArray[Any], eod_id: int) -> None:
        """The same of labels [rows, S], which lie one column before their tokens."""
        fill_columns(self.found, 1, -1, eod_id, labels)

    def clear_loss(self, mask: NDArray[Any]) -> None:
        """Write 0 to mask [rows, S] where the token or the label is one of them."""
        fill_columns(self.found, 1, 0, 0, mask)

    def clear_learned(self, learned: NDArray[Any]) -> None:
        """The same of what is said of ids [rows, S + 1], each of which is a label of the one before:
        the id behind the last counts as one of them.
        """
        fill_columns(self.found, 0, 1, False, learned)


@dataclass(frozen=True, kw_only=True)
class _ListIdentity:
    """A list as identities have it. of_dataset: {dataset: (documents, digest of where they lie)}."""

    first_sample: int
    of_dataset: dict[int, tuple[int, str]]


class SkippedTokens:
    """Tokens of files that are not seen in samples from some on.

    starts, stops, since int64 [stretches]: see `find_skipped`.
    """

    def __init__(
        self, starts: Integers, stops: Integers, since: Integers, lists: Sequence[_ListIdentity]
    ) -> None:
        self.starts = starts
        self.stops = stops
        self.since = since
        self._lists = lists

    def columns(self, runs: Runs, sample_ids: Integers) -> SkippedColumns | None:
        """Where the tokens of runs are skipped; None: nowhere. sample_ids: of each row of the batch,
        the number of its sample.
        """
        found = np.empty((3, ROOM), np.int64)
        sample = sample_ids[runs.sample]
        while True:
            count = find_skipped(
                self.starts, self.stops, self.since,
                runs.file, runs.start, runs.size, runs.column, runs.sample, sample, found,
            )  # fmt: skip
            if count <= found.shape[1]:
                return SkippedColumns(np.ascontiguousarray(found[:, :count])) if count else None
            found = np.empty((3, count), np.int64)

    def since_of(self, file: int, start: int) -> int | None:
        """The sample from which on a token of a file is skipped; None: it is in none."""
        token = file * FILE_STRIDE + start
        number = int(np.searchsorted(self.stops, token, side="right"))
        if number == len(self.starts) or self.starts[number] > token:
            return None
        return int(self.since[number])

    def stretches(self) -> Iterator[tuple[int, int, int, int]]:
        """(file, first token, token behind the last, first sample that does not see them) of each,
        in their order.
        """
        columns = (self.starts, self.stops, self.since)
        for start, stop, since in zip(*(column.tolist() for column in columns), strict=True):
            file = start // FILE_STRIDE
            shift = file * FILE_STRIDE
            yield file, start - shift, stop - shift, since

    def identity(self, consumed: int | None, datasets: Collection[int] | None) -> list[list[Any]]:
        """[first sample, documents and a digest of where they lie] of each list that began before
        `consumed` (None: all), of these datasets alone (None: all).
        """
        entries: list[list[Any]] = []
        for skipped in self._lists:
            first = skipped.first_sample
            if first and consumed is not None and first >= consumed:
                continue
            chosen = {
                dataset: said
                for dataset, said in skipped.of_dataset.items()
                if datasets is None or dataset in datasets
            }
            if chosen:
                documents = sum(count for count, _ in chosen.values())
                text = json.dumps([[dataset, said[1]] for dataset, said in sorted(chosen.items())])
                digest = hashlib.blake2b(text.encode(), digest_size=DIGITS // 2).hexdigest()
                entries.append([first, f"{documents} documents, {digest}"])
        return entries


@dataclass(frozen=True, kw_only=True)
class SkippedStretches:
    """Tokens [start, stop) of files laid FILE_STRIDE apart, which a list skips."""

    first_sample: int
    starts: Integers
    stops: Integers


def skipped_tokens(
    config: DataConfig,
    split: str,
    prefixes: Sequence[str],
    files: Sequence[Sequence[TokenFile]],
) -> SkippedTokens | None:
    """What a split does not see of its datasets; None: it sees all of it.

    prefixes, files: of each dataset. A dataset of one file for several shards has them end to end.
    Raises ConfigError for names that no document has, and for more or longer files than there is room
    for; StorageError and FormatError for the files.
    """
    skips = config.skips_of(split)
    if not skips:
        return None
    assert config.eod_id is not None
    check_room(files)
    names = DocumentNames(prefixes, config)
    documents_of_first: dict[int, set[DocumentName]] = {}
    for skipped in skips:
        documents = documents_of_first.setdefault(skipped.first_sample, set())
        documents.update(_documents_of_list(skipped, names, config.storage))
    lists = []
    stretches = []
    for first in sorted(documents_of_first):
        identity, found = _lay_out(first, documents_of_first[first], names.all_shards, files)
        lists.append(identity)
        stretches.append(found)
    check_ids([found.starts for found in stretches], files, config.eod_id)
    return SkippedTokens(*disjoint_stretches(stretches), lists)


def with_names_read(config: DataConfig, split: str) -> DataConfig:
    """The config with the names themselves where it has files of them, of a split, so that all that
    is opened by it skips the same. Raises ConfigError for a file that is not there.
    """
    lists: list[tuple[int, SkippedNames]] = []
    for skipped in config.skips_of(split):
        names = _names_of_list(skipped, config.storage)
        of_dataset = {} if skipped.dataset is None else {skipped.dataset: names}
        lists.append((skipped.first_sample, of_dataset or names))
    if not lists:
        return config
    phases = [replace(phase, skip_documents=()) for phase in config.phases]
    return replace(config, skip_documents=lists, phases=phases)


def _names_of_list(skipped: SkippedList, storage: StorageConfig) -> list[str]:
    """The names of a list, each once."""
    if not isinstance(skipped.names, str):
        return list(dict.fromkeys(skipped.names))
    data = read_whole(skipped.names, storage)
    where = redact_urls(skipped.names)
    if data is None:
        raise ConfigError(
            f"skip_documents: there is no file {where}; it has a name a line. A few names may be "
            "given as a list instead"
        )
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"skip_documents: {where} is no text in UTF-8") from None
    stripped = [line.strip() for line in lines]
    return list(dict.fromkeys(name for name in stripped if name))


def _documents_of_list(
    skipped: SkippedList, names: DocumentNames, storage: StorageConfig
) -> Iterator[DocumentName]:
    """The documents of a list. Raises ConfigError for names that no document has."""
    wanted = _names_of_list(skipped, storage)
    try:
        found = names.find_all(wanted, skipped.dataset)
        missing = [name for name in wanted if name not in found]
        if missing:
            raise ConfigError(names.describe_missing(missing, skipped.dataset))
    except ConfigError as error:
        raise ConfigError(f"skip_documents: {error}") from None
    return chain.from_iterable(found.values())


def _lay_out(
    first_sample: int,
    documents: Collection[DocumentName],
    shards: Sequence[Sequence[ShardDocuments]],
    files: Sequence[Sequence[TokenFile]],
) -> tuple[_ListIdentity, SkippedStretches]:
    """Where the documents of a list lie, and what an identity says of them."""
    files_of_dataset = [len(of_dataset) for of_dataset in files]
    first_files = np.cumsum([0, *files_of_dataset]).tolist()
    starts = [np.empty(0, np.int64)]
    stops = [np.empty(0, np.int64)]
    hashers: dict[int, Any] = {}
    counts: dict[int, int] = {}
    for (dataset, shard), of_shard in groupby(sorted(documents), lambda name: name[:2]):
        numbers = np.array([name.document for name in of_shard], np.int64)
        begin, end = shards[dataset][shard].tokens_of_all(numbers)
        in_dataset = shard * FILE_STRIDE
        if files_of_dataset[dataset] < len(shards[dataset]):
            # Megatron reads all shards of a dataset as one file
            in_dataset = sum(other.num_tokens for other in shards[dataset][:shard])
        # of the dataset alone: which of a blend it is stands in the identity
        hasher = hashers.setdefault(dataset, hashlib.blake2b(digest_size=DIGITS // 2))
        for column in (begin + in_dataset, end + in_dataset):
            hasher.update(np.ascontiguousarray(column, "<i8").data)
        counts[dataset] = counts.get(dataset, 0) + len(numbers)
        shift = first_files[dataset] * FILE_STRIDE + in_dataset
        starts.append(begin + shift)
        stops.append(end + shift)
    of_dataset = {dataset: (counts[dataset], hashers[dataset].hexdigest()) for dataset in counts}
    found = SkippedStretches(
        first_sample=first_sample, starts=np.concatenate(starts), stops=np.concatenate(stops)
    )
    return _ListIdentity(first_sample=first_sample, of_dataset=of_dataset), found


def disjoint_stretches(lists: Sequence[SkippedStretches]) -> tuple[Integers, Integers, Integers]:
    """(starts, stops, since) of the tokens of all lists, each from the first list on that has it;
    stretches rise, and do not touch unless they begin in different samples.
    """
    ends = [column for skipped in lists for column in (skipped.starts, skipped.stops)]
    bounds = np.unique(np.concatenate(ends))
    since = np.full(max(len(bounds) - 1, 0), NEVER)
    # the latest first, so that earlier ones are written over it
    for skipped in sorted(lists, key=lambda skipped: -skipped.first_sample):
        opened = np.bincount(np.searchsorted(bounds, skipped.starts), minlength=len(bounds))
        opened -= np.bincount(np.searchsorted(bounds, skipped.stops), minlength=len(bounds))
        since[np.cumsum(opened)[:-1] > 0] = skipped.first_sample
    # what begins in one sample, and touches, is one stretch
    changes = np.flatnonzero(np.diff(since, prepend=NEVER, append=NEVER))
    low = changes[:-1]
    high = changes[1:]
    is_skipped = since[low] != NEVER
    return bounds[low[is_skipped]], bounds[high[is_skipped]], since[low[is_skipped]]


def skips_identity(
    skipped: SkippedTokens | None,
    consumed: int | None,
    datasets: Collection[int] | None = None,
) -> dict[str, Any]:
    """What an identity has of lists that began before `consumed` (None: of all), of these datasets
    (None: of all); nothing where there are none.
    """
    entries = [] if skipped is None else skipped.identity(consumed, datasets)
    return {"skip_documents": entries} if entries else {}


MOST_FILES = (1 << 63) // FILE_STRIDE
"""Files whose tokens, laid FILE_STRIDE apart, have numbers that are int64."""


def check_room(files: Sequence[Sequence[TokenFile]]) -> None:
    """Raise ConfigError for more files, or longer ones, than there are numbers of tokens for.

    files: of each dataset.
    """
    count = sum(map(len, files))
    if count > MOST_FILES:
        raise ConfigError(
            f"skip_documents: the blend has {count:,} files, and documents are skipped in at most "
            f"{MOST_FILES:,}; merge shards into larger ones (streammega convert PREFIX OUT --shard-size 4G), "
            "or leave skip_documents out"
        )
    for file in chain.from_iterable(files):
        # a stretch up to the last number would touch the next file's first one
        if file.num_tokens >= FILE_STRIDE:
            raise ConfigError(
                f"skip_documents: {file.url}: has {file.num_tokens:,} tokens, and documents are skipped "
                f"in files of less than {FILE_STRIDE:,}; write it in smaller shards (streammega convert "
                "PREFIX OUT --shard-size 4G); in the Megatron order, which joins those of a dataset, name "
                "each in the blend"
            )


def check_ids(
    starts: Sequence[NDArray[np.int64]], files: Sequence[Sequence[TokenFile]], eod_id: int
) -> None:
    """Raise ConfigError where eod_id is no id of a file that has tokens to be skipped.

    starts: the first tokens of what is skipped, of each list.
    """
    all_files = [file for of_dataset in files for file in of_dataset]
    used = np.unique(np.concatenate(starts) // FILE_STRIDE)
    for number in used.tolist():
        file = all_files[number]
        if eod_id > np.iinfo(file.dtype).max:
            raise ConfigError(
                f"{file.url}: stores ids as {file.dtype}, which eod_id {eod_id} is not, so it "
                "cannot stand for documents that are skipped; is it the tokenizer's?"
            )
