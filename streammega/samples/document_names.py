"""The documents of a blend, by the names that people give them: to exclude them from training, and
to trace them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from streammega.config import StorageConfig
from streammega.dataset.document_lookup import ShardDocuments
from streammega.dataset.manifest import Manifest
from streammega.dataset.names import strip_suffix
from streammega.dataset.opening import open_manifests
from streammega.errors import ConfigError
from streammega.errors.cached_property import cached_property
from streammega.errors.logs import get_logger
from streammega.storage.open import resolved
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

MAX_SHOWN = 8
"""Names that a message shows, of all that it is about."""


class DocumentName(NamedTuple):
    """A document of a blend, by numbers: its dataset in the blend, its shard in the dataset, and
    its place in the shard's `.idx`. They sort by these.
    """

    dataset: int
    shard: int
    document: int


class DocumentNames:
    """Finds documents of a blend by any of these names:

    - `NAME#NUMBER` or `NAME:NUMBER`: the number, from 0, in a dataset or in one shard. NAME is the
      whole name of either, or its end (`web` for `s3://bucket/web`).
    - an id or URL, or the place where the document came from (`corpus.jsonl:12`), if its
      shard keeps these.

    Args:
        prefixes: the names of the datasets, by number.
        storage: how the shards are opened. known: manifests by name, which are not opened again.
    """

    def __init__(
        self, prefixes: Sequence[str], storage: StorageConfig, known: Mapping[str, Manifest]
    ) -> None:
        self.prefixes = prefixes
        self._storage = storage
        self._known = known
        self._shards: dict[int, list[ShardDocuments]] = {}

    @cached_property
    def _manifests(self) -> list[Manifest]:
        return open_manifests(self.prefixes, self._storage, self._known)

    def manifest(self, dataset: int) -> Manifest:
        """What a dataset is."""
        return self._manifests[dataset]

    def shards(self, dataset: int) -> list[ShardDocuments]:
        """The shards of a dataset."""
        if dataset not in self._shards:
            self._shards[dataset] = [
                ShardDocuments(shard, self._storage) for shard in self._manifests[dataset].shards
            ]
        return self._shards[dataset]

    @cached_property
    def all_shards(self) -> list[list[ShardDocuments]]:
        """The shards of every dataset."""
        return [self.shards(dataset) for dataset in range(len(self.prefixes))]

    def find(self, name: str) -> list[DocumentName]:
        """The documents of one name, as `find_all` finds them; none where no document has it."""
        return self.find_all([name]).get(name, [])

    def find_all(
        self, names: Sequence[str], prefix: str | None = None
    ) -> dict[str, list[DocumentName]]:
        """{name: its documents, in their order}, without names that no document has. Documents may
        share an id, and a blend may have a shard several times.

        prefix: only documents of the dataset of that name. Raises ConfigError if there is no such
        dataset, and for names that may mean different documents.
        """
        datasets = self._datasets_called(prefix)
        by_number, in_full = self._by_number(names, datasets)
        # All origins are read, so only for names that need them.
        by_origin = self._by_origin([name for name in names if name not in in_full], datasets)
        places_of_name = {
            name: self._in_all_places(documents) for name, documents in by_number.items()
        }
        for name, documents in by_origin.items():
            places = self._in_all_places(documents)
            if places_of_name.setdefault(name, places) != places:
                raise ConfigError(
                    f"{name!r} is the number of one document, and the origin of another; "
                    "write it as NAME#NUMBER with the whole name of the dataset, or give another name "
                    "of the document"
                )
        return {name: sorted(places) for name, places in places_of_name.items()}

    def describe_missing(self, names: Sequence[str], prefix: str | None = None) -> str:
        """Why no document has these names, for a message."""
        datasets = self._datasets_called(prefix)
        shown = ", ".join(repr(name) for name in names[:MAX_SHOWN])
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        without_origins = [
            self.prefixes[dataset]
            for dataset in datasets
            if all(shard.origins is None for shard in self.all_shards[dataset])
        ]
        known = self._known_names(datasets)
        counts = {
            full: max(self._count(*place) for place in places)
            for name in names[:MAX_SHOWN]
            for _, prefix_of_number, _ in _numbered(name)
            for full, places in known.get(prefix_of_number, {}).items()
        }
        if counts:
            hint = ", ".join(f"{full} has {count} documents" for full, count in counts.items())
            hint += ", numbered from 0"
        elif without_origins:
            hint = (
                f"{', '.join(without_origins[:MAX_SHOWN])} keep no origins (convert --provenance), "
                "so documents there go by NAME#NUMBER alone"
            )
        else:
            prefixes = [self.prefixes[dataset] for dataset in datasets[:MAX_SHOWN]]
            hint = f"is one mistyped, or of another dataset? There are {', '.join(prefixes)}"
        return f"no document is called {shown}{more}; {hint}"

    def _datasets_called(self, prefix: str | None) -> Sequence[int]:
        """The datasets of that name; None: all."""
        numbers = range(len(self.prefixes))
        if prefix is None:
            return numbers
        chosen = [n for n in numbers if _plain(prefix) in _tails(_plain(self.prefixes[n]))]
        if not chosen:
            raise ConfigError(
                f"{prefix} is no dataset here; there are {', '.join(self.prefixes[:MAX_SHOWN])}"
            )
        return chosen

    def _known_names(
        self, datasets: Sequence[int]
    ) -> dict[str, dict[str, list[tuple[int, int | None]]]]:
        """{name or its end: {the name in full: (dataset, shard or None for all of it)}}."""
        known: dict[str, dict[str, list[tuple[int, int | None]]]] = {}
        for dataset in datasets:
            called: list[tuple[str, int | None]] = [(self.prefixes[dataset], None)]
            called += [(shard.name, n) for n, shard in enumerate(self.all_shards[dataset])]
            for name, shard in called:
                full = _plain(name)
                for tail in _tails(full):
                    known.setdefault(tail, {}).setdefault(full, []).append((dataset, shard))
        return known

    def _by_number(
        self, names: Sequence[str], datasets: Sequence[int]
    ) -> tuple[dict[str, set[DocumentName]], set[str]]:
        """The documents of NAME#NUMBER and NAME:NUMBER; and the names with # and a full NAME, which
        can mean nothing else.
        """
        known = self._known_names(datasets)
        documents_of_name: dict[str, set[DocumentName]] = {}
        in_full: set[str] = set()
        for name in names:
            for sign, prefix, number in _numbered(name):
                meanings = known.get(prefix, {})
                if len(meanings) > 1 and prefix not in meanings:
                    raise ConfigError(
                        f"{name!r}: {prefix} may be {' or '.join(meanings)}; name it in full"
                    )
                for dataset, shard in meanings.get(prefix, next(iter(meanings.values()), [])):
                    document = self._numbered(dataset, shard, number)
                    if document is not None:
                        documents_of_name.setdefault(name, set()).add(document)
                        if sign == "#" and prefix in meanings:
                            in_full.add(name)
        return documents_of_name, in_full

    def _numbered(self, dataset: int, shard: int | None, number: int) -> DocumentName | None:
        """A document by its number in a shard, or over all shards of a dataset; None: not found."""
        for place, documents in enumerate(self.all_shards[dataset]):
            if shard is not None and place != shard:
                continue
            if number < documents.num_documents:
                return DocumentName(dataset, place, number)
            number -= documents.num_documents
        return None

    def _by_origin(
        self, names: Sequence[str], datasets: Sequence[int]
    ) -> dict[str, set[DocumentName]]:
        """The documents of ids and places, in shards that keep them."""
        documents_of_name: dict[str, set[DocumentName]] = {}
        if not names:
            return documents_of_name
        without = []
        for dataset in datasets:
            for shard, documents in enumerate(self.all_shards[dataset]):
                if documents.origins is None:
                    without.append(documents.name)
                    continue
                for name, document in documents.origins.find(names):
                    place = DocumentName(dataset, shard, document)
                    documents_of_name.setdefault(name, set()).add(place)
        if documents_of_name and without:
            # once: training, validation and reports of one process open the same datasets
            warn_once(
                log,
                f"{hash(tuple(names))} {without[0]}",
                "%d names are ids or places; they name no document of %s, since %d shards have no "
                "origins (convert --provenance) that may be read",
                len(documents_of_name),
                ", ".join(without[:MAX_SHOWN]),
                len(without),
            )
        return documents_of_name

    def _in_all_places(self, documents: Collection[DocumentName]) -> set[DocumentName]:
        """Documents, in each place of the blend that has their shard."""
        return {
            DocumentName(dataset, shard, name.document)
            for name in documents
            for dataset, shard in self._same_shards[name.dataset, name.shard]
        }

    @cached_property
    def _same_shards(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """For each shard all places of the blend with the same stored shard: `web` and `./web`
        have the same documents.
        """
        places_of_url: dict[str, list[tuple[int, int]]] = {}
        for dataset, shards in enumerate(self.all_shards):
            for number, documents in enumerate(shards):
                url = resolved(documents.shard.url)
                places_of_url.setdefault(url, []).append((dataset, number))
        return {place: places for places in places_of_url.values() for place in places}

    def _count(self, dataset: int, shard: int | None) -> int:
        """The documents of a shard; None: of all shards of the dataset."""
        shards = self.all_shards[dataset]
        return sum(one.num_documents for one in (shards if shard is None else [shards[shard]]))


def _numbered(name: str) -> Iterator[tuple[str, str, int]]:
    """(sign, dataset or shard, number) of a name that is written so."""
    for sign in "#:":
        prefix, _, number = name.rpartition(sign)
        # as numbers are written: without zeros before them, and few enough for an int64
        if prefix and re.fullmatch(r"0|[1-9][0-9]{0,17}", number):
            yield sign, _plain(prefix), int(number)


def _plain(name: str) -> str:
    """A name without the suffix of a file and the slash of a folder."""
    return strip_suffix(name).rstrip("/")


def _tails(name: str) -> list[str]:
    """A name, and the name without its first folders, one by one."""
    tails = [name]
    while "/" in tails[-1]:
        tails.append(tails[-1].partition("/")[2])
    return [tail for tail in tails if tail]
