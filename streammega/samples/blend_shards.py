"""The shards of a blend, and the documents in them: by numbers, names and places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.dataset.document_lookup import ShardDocuments, open_documents
from streammega.dataset.provenance import DocumentOrigin, OriginNames
from streammega.dataset.shard import strip_suffix
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.samples.skipped_names import NamedShards
from streammega.samples.traced import DocumentName

Integers = NDArray[np.int64]


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
