"""The shards of a blend and the documents in them, by the names, numbers and places that people give:
those that training must not see, and those that a trace asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig, SkippedList, SkippedNames, StorageConfig
from streammega.dataset.document_lookup import ShardDocuments, open_documents
from streammega.dataset.names import strip_suffix
from streammega.dataset.provenance import DocumentOrigin, OriginNames, is_number
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.storage.object_ops import read_whole

log = logging.getLogger(__name__)

Integers = NDArray[np.int64]
SHOWN = 8
"""Names that an error tells of, of all that it is about."""


class ShardPlace(NamedTuple):
    """A shard of a dataset, by their numbers."""

    dataset: int
    shard: int


Found = dict[str, set[tuple[ShardPlace, int]]]
"""{name: the (place, number) of each document it is of}."""


@dataclass(frozen=True, kw_only=True)
class DocumentName:
    """A document of a blend, by numbers: of the dataset within the blend, of the shard within the
    dataset, and its own in the shard's `.idx`.
    """

    dataset: int
    shard: int
    document: int


@dataclass(frozen=True, kw_only=True)
class NamedShards:
    """The shards of some datasets, by the names people give them.

    prefixes: of each dataset. shards: of each, in their order.
    """

    prefixes: Sequence[str]
    shards: Sequence[Sequence[ShardDocuments]]

    def only(self, prefix: str | None) -> list[int]:
        """The datasets of that name; None: all. Raises ConfigError where there is none."""
        numbers = range(len(self.prefixes))
        if prefix is None:
            return list(numbers)
        chosen = [n for n in numbers if _plain(prefix) in _tails(_plain(self.prefixes[n]))]
        if not chosen:
            raise ConfigError(
                f"skip_documents names {redact_urls(prefix)}, which is no dataset of training; it "
                f"has {redact_urls(', '.join(self.prefixes[:SHOWN]))}"
            )
        return chosen

    def names(self, datasets: Iterable[int]) -> dict[str, dict[str, list[tuple[int, int | None]]]]:
        """{name: {what it stands for, in full: (dataset, shard or None for all of it)}}: datasets
        and shards go by their names and by the ends of these, such as `web` for `s3://bucket/web`.
        """
        names: dict[str, dict[str, list[tuple[int, int | None]]]] = {}
        for dataset in datasets:
            called: list[tuple[str, int | None]] = [(self.prefixes[dataset], None)]
            called += [(shard.name, number) for number, shard in enumerate(self.shards[dataset])]
            for name, shard in called:
                full = _plain(name)
                for tail in _tails(full):
                    names.setdefault(tail, {}).setdefault(full, []).append((dataset, shard))
        return names

    def called(self, name: str) -> dict[str, list[tuple[int, int | None]]]:
        """What a name stands for, as `names` says it, among all datasets."""
        return self.names(range(len(self.prefixes))).get(_plain(name), {})


def documents_of_list(
    skipped: SkippedList, named: NamedShards, storage: StorageConfig
) -> dict[ShardPlace, Integers]:
    """The numbers of the documents of a list, rising, in each shard that has any.

    Raises ConfigError for names that no document has, and for those of several meanings.
    """
    words = _words(skipped, storage)
    datasets = named.only(skipped.dataset)
    by_number, in_full = _by_number(words, named, datasets)
    # origins are read from the first to the last: not for names that need none
    by_origin = _by_origin([word for word in words if word not in in_full], named, datasets)
    for word in by_number.keys() & by_origin.keys():
        if by_number[word] != by_origin[word]:
            raise ConfigError(
                f"skip_documents has {word!r}, which is the number of a document and where another "
                "came from; write it as PREFIX#NUMBER with the whole of the prefix, or give another "
                "name of the document"
            )
    found = by_number | by_origin
    unknown = [word for word in words if word not in found]
    if unknown:
        raise ConfigError(_unknown(unknown, named, datasets))
    numbers: dict[ShardPlace, list[int]] = {}
    for places in found.values():
        for place, number in places:
            numbers.setdefault(place, []).append(number)
    return {place: np.unique(np.array(numbers[place], np.int64)) for place in sorted(numbers)}


def with_names_read(config: DataConfig, split: str) -> DataConfig:
    """The config with the names themselves where it has files of them, of a split, so that all that
    is opened by it skips the same. Raises ConfigError for a file that is not there.
    """
    lists: list[tuple[int, SkippedNames]] = []
    for skipped in config.skips_of(split):
        words = _words(skipped, config.storage)
        of_dataset = {} if skipped.dataset is None else {skipped.dataset: words}
        lists.append((skipped.first_sample, of_dataset or words))
    if not lists:
        return config
    phases = [replace(phase, skip_documents=()) for phase in config.phases]
    return replace(config, skip_documents=lists, phases=phases)


def _words(skipped: SkippedList, storage: StorageConfig) -> list[str]:
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
    words = [line.strip() for line in lines]
    return list(dict.fromkeys(word for word in words if word))


def _by_number(
    words: Sequence[str], named: NamedShards, datasets: Sequence[int]
) -> tuple[Found, set[str]]:
    """What PREFIX#NUMBER and PREFIX:NUMBER stand for, and those with # whose prefix is a name in
    full: they mean nothing else.
    """
    names = named.names(datasets)
    found: Found = {}
    in_full: set[str] = set()
    for word in words:
        for sign, name, number in _numbered(word):
            known = names.get(name)
            if known is None:
                continue
            if len(known) > 1 and name not in known:
                raise ConfigError(
                    f"skip_documents has {word!r}, and {redact_urls(name)} may be "
                    f"{redact_urls(' or '.join(known))}; name it in full"
                )
            meant = known[name] if name in known else next(iter(known.values()))
            for dataset, shard in meant:
                document = _document(named.shards[dataset], dataset, shard, number)
                if document is not None:
                    found.setdefault(word, set()).add(document)
                    if sign == "#" and name in known:
                        in_full.add(word)
    return found, in_full


def _numbered(word: str) -> Iterator[tuple[str, str, int]]:
    """(sign, name, number) of a word, if it is written so."""
    for sign in "#:":
        name, _, number = word.rpartition(sign)
        if name and is_number(number):
            yield sign, _plain(name), int(number)


def _document(
    shards: Sequence[ShardDocuments], dataset: int, shard: int | None, number: int
) -> tuple[ShardPlace, int] | None:
    """A document of a shard, or of a dataset by its number over all shards; None: there is none."""
    if shard is not None:
        is_there = number < shards[shard].num_documents
        return (ShardPlace(dataset, shard), number) if is_there else None
    for place, documents in enumerate(shards):
        if number < documents.num_documents:
            return ShardPlace(dataset, place), number
        number -= documents.num_documents
    return None


def _by_origin(words: Sequence[str], named: NamedShards, datasets: Sequence[int]) -> Found:
    """What ids and places stand for, in shards that keep them."""
    found: Found = {}
    if not words:
        return found
    wanted = OriginNames(words)
    without = []
    for dataset in datasets:
        for shard, documents in enumerate(named.shards[dataset]):
            if documents.origins is None:
                without.append(documents.name)
                continue
            place = ShardPlace(dataset, shard)
            for word, document in documents.origins.find(wanted):
                found.setdefault(word, set()).add((place, document))
    if found and without:
        # they may have documents of the same names
        _warn_of_shards_without_origins(tuple(words), len(found), without)
    return found


_warned_of: set[tuple[tuple[str, ...], str]] = set()
"""Lists of names, and the first shard in which they were not looked for."""


def _warn_of_shards_without_origins(
    words: tuple[str, ...], num_found: int, without: Sequence[str]
) -> None:
    """Warn once for a list of names: a run opens its datasets again whenever a version joins."""
    if (words, without[0]) in _warned_of:
        return
    _warned_of.add((words, without[0]))
    log.warning(
        "skip_documents: %d names are ids or places, by which no document of %s is skipped: "
        "of %d shards there are no origins (convert --origins) that may be read",
        num_found,
        redact_urls(", ".join(without[:SHOWN])),
        len(without),
    )


def _unknown(words: Sequence[str], named: NamedShards, datasets: Sequence[int]) -> str:
    """A message for names that no document has."""
    shown = ", ".join(repr(word) for word in words[:SHOWN])
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    without = []
    for dataset in datasets:
        if all(shard.origins is None for shard in named.shards[dataset]):
            without.append(named.prefixes[dataset])
    hint = "; is one mistyped, or of another dataset?"
    if without:
        hint = (
            f"; {redact_urls(', '.join(without[:SHOWN]))} kept no origins (convert --origins), so "
            "documents there go by PREFIX#NUMBER alone, counted from 0"
        )
    return f"skip_documents: no document of training is called {shown}{more}{hint}"


def _plain(name: str) -> str:
    """A name without the suffix of a file and the slash of a folder."""
    return strip_suffix(name).rstrip("/")


def _tails(name: str) -> list[str]:
    """A name, and what is left of it without its first folders."""
    tails = [name]
    while "/" in tails[-1]:
        tails.append(tails[-1].partition("/")[2])
    return [tail for tail in tails if tail]


class BlendShards:
    """The shards of a blend's datasets, each opened when it is first asked for.

    Args: datasets: their names, by number. config: where they lie, and how they are read.
    """

    def __init__(self, datasets: Sequence[str], config: DataConfig) -> None:
        self.datasets = datasets
        self._config = config
        self._opened: dict[int, list[ShardDocuments]] = {}
        self._bounds: dict[int, Integers] = {}

    def of(self, dataset: int) -> list[ShardDocuments]:
        """The shards of a dataset, opened once."""
        if dataset not in self._opened:
            config = self._config
            prefix = self.datasets[dataset]
            self._opened[dataset] = open_documents(prefix, config.storage, config.index_cache_dir)
        return self._opened[dataset]

    def dataset_name(self, dataset: int) -> str:
        """A dataset as the config names it, without secrets."""
        return redact_urls(self.datasets[dataset])

    def token_bounds(self, dataset: int) -> Integers:
        """The token of a dataset at which each of its shards begins; int64 [shards + 1]."""
        if dataset not in self._bounds:
            sizes = [shard.num_tokens for shard in self.of(dataset)]
            self._bounds[dataset] = np.cumsum([0, *sizes])
        return self._bounds[dataset]

    def origin(self, name: DocumentName) -> DocumentOrigin | None:
        """Where a document came from; None where its shard does not say."""
        stored = self.of(name.dataset)[name.shard].origins
        return None if stored is None else stored[name.document]

    def documents_from(self, words: str) -> list[DocumentName]:
        """The documents of that id or URL, or of that place, in all datasets: see Provenance."""
        found = []
        names = OriginNames([words])
        for dataset in range(len(self.datasets)):
            for shard, documents in enumerate(self.of(dataset)):
                if documents.origins is None:
                    continue
                matches = documents.origins.find(names)
                for document in sorted({document for _, document in matches}):
                    found.append(DocumentName(dataset=dataset, shard=shard, document=document))
        return found

    def find(self, name: str, number: int) -> list[DocumentName]:
        """The documents of that number in a dataset or shard, by the name of either: see
        Provenance.
        """
        found = []
        for dataset, prefix in enumerate(self.datasets):
            if strip_suffix(prefix) == strip_suffix(name):
                found.append(self._numbered(dataset, number))
                continue
            # Only datasets that may have it are opened.
            if not _may_be_shard(name, prefix):
                continue
            for shard, documents in enumerate(self.of(dataset)):
                if strip_suffix(documents.name) == strip_suffix(name):
                    _ = documents.tokens_of(number)  # that there is one
                    found.append(DocumentName(dataset=dataset, shard=shard, document=number))
        return found or self._ending_with(name, number)

    def _ending_with(self, name: str, number: int) -> list[DocumentName]:
        """`find`, by the end of a name. All datasets are opened."""
        shards = [self.of(dataset) for dataset in range(len(self.datasets))]
        known = NamedShards(prefixes=self.datasets, shards=shards).called(name)
        if not known:
            raise ConfigError(
                f"{redact_urls(name)} is no dataset of this split, and no shard of one; it has "
                f"{redact_urls(', '.join(self.datasets[:8]))}"
            )
        if len(known) > 1:
            raise ConfigError(
                f"{redact_urls(name)} may be {redact_urls(' or '.join(known))}; name it in full"
            )
        (meant,) = known.values()
        found = []
        for dataset, shard in meant:
            if shard is None:
                found.append(self._numbered(dataset, number))
            else:
                _ = shards[dataset][shard].tokens_of(number)  # that there is one
                found.append(DocumentName(dataset=dataset, shard=shard, document=number))
        # a dataset of one shard is called as that is
        return list(dict.fromkeys(found))

    def _numbered(self, dataset: int, number: int) -> DocumentName:
        """A document by its number in the whole dataset."""
        left = number
        for shard, documents in enumerate(self.of(dataset)):
            if 0 <= left < documents.num_documents:
                return DocumentName(dataset=dataset, shard=shard, document=left)
            left -= documents.num_documents
        name = self.dataset_name(dataset)
        raise IndexError(f"document {number} of {name}, which has {number - left}")


def _may_be_shard(name: str, prefix: str) -> bool:
    """Whether a shard of that name may belong to a dataset: its folder is the dataset's."""
    folder, _, _ = prefix.rpartition("/")
    return name.startswith(folder)
