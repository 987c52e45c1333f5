"""The place that a conversion publishes to: what its files are called, and what lies there now."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from streammega.config import StorageConfig
from streammega.dataset.manifest import MANIFEST, Manifest, read_manifest
from streammega.dataset.provenance import ENDING
from streammega.dataset.shards import SUFFIXES, Kind, marked
from streammega.errors import ConvertError, FormatError, ObjectNotFoundError, StorageError
from streammega.errors.redaction import redact_urls
from streammega.storage import join_url, open_store
from streammega.storage.object_ops import exists, read_whole, version
from streammega.storage.open import is_remote

ASKED_ONE_BY_ONE = 8
"""Objects are asked for one by one up to so many; of more, a listing of their folder tells at
once.
"""


@dataclass(frozen=True, kw_only=True)
class Former:
    """What is there under the output's name: its files, every `.idx` first, and its version;
    nothing: [] and "".
    """

    files: list[str] = field(default_factory=list)
    version: str = ""


class Output:
    """A dataset's place: a prefix, and the kind of shards that go there.

    is_remote: whether it is no file system, so that nothing there can be renamed. suffix: of the
    tokens. Methods raise StorageError.
    """

    def __init__(self, prefix: str, kind: Kind, storage: StorageConfig) -> None:
        folder, slash, stem = prefix.rpartition("/")
        self.prefix = prefix
        self.stem = stem
        self.storage = storage
        self.suffix = SUFFIXES[kind]
        self.is_remote = is_remote(prefix)
        self.manifest_url = f"{prefix}{MANIFEST}"
        self.index_url = f"{prefix}.idx"
        self.tokens_url = f"{prefix}{self.suffix}"
        self._folder = folder if slash else "."

    def url(self, name: str) -> str:
        """Of a file of its folder."""
        return join_url(self._folder, name)

    def shard_names(self, plain_names: Sequence[str], mark: str) -> list[str]:
        """The names of shards, with a mark if there is one."""
        return [marked(name, self.stem, mark) for name in plain_names]

    def manifest(self) -> bytes | None:
        """The manifest that is there, as it is stored."""
        return read_whole(self.manifest_url, self.storage)

    def manifest_version(self) -> str:
        """What changes with the manifest; "" where there is none."""
        return version(self.manifest_url, self.storage)

    def index_version(self) -> str:
        """What changes with an `.idx` of the output's very name; "" where there is none."""
        return version(self.index_url, self.storage)

    def former(self) -> Former:
        """The dataset that is there under the output's name.

        Raises ConvertError if its manifest does not say what it is.
        """
        pair = self._pair()
        try:
            manifest = read_manifest(self.manifest_url, self.storage)
        except ObjectNotFoundError:
            if not pair:
                return Former()
            return Former(files=pair, version=self.index_version())
        except FormatError as error:
            raise ConvertError(
                f"{redact_urls(self.prefix)}: cannot be replaced, since which shards belong to it "
                f"is not known: {error}; remove that dataset by hand, or choose another output"
            ) from None
        files = self._files_of(manifest)
        files += [url for url in pair if url not in files]
        return Former(files=files, version=self.manifest_version())

    def sizes(self, urls: Sequence[str]) -> dict[str, int]:
        """Bytes of those files of its folder that are there."""
        if len(urls) > ASKED_ONE_BY_ONE:
            listed = self._listed_sizes()
            if listed is not None:
                return listed
        sizes = {}
        for url in urls:
            store, key = open_store(url, self.storage)
            try:
                sizes[url] = store.info(key).size
            except ObjectNotFoundError:
                continue
        return sizes

    def _listed_sizes(self) -> dict[str, int] | None:
        """Bytes of everything in its folder; None where it cannot be listed."""
        store, key = open_store(f"{self._folder}/", self.storage)
        try:
            listed = store.list(key, recursive=False)
        except StorageError as error:
            if error.transient:
                raise
            # Who may not list may still ask for objects by their names.
            return None
        return {self.url(os.path.basename(info.key)): info.size for info in listed}

    def _files_of(self, manifest: Manifest) -> list[str]:
        """Every `.idx` before all tokens: files are removed in this order, and tokens without an
        `.idx` are no dataset.
        """
        suffix = SUFFIXES[manifest.kind]  # type: ignore[index]
        prefixes = [self.url(shard.name) for shard in manifest.shards]
        indices = [f"{prefix}.idx" for prefix in prefixes]
        tokens = [prefix + suffix for prefix in prefixes]
        # Whether there are any, the manifest does not say; removing what is not there is nothing.
        origins = [prefix + ENDING for prefix in prefixes]
        return indices + tokens + origins

    def _pair(self) -> list[str]:
        """The `.idx` of the output's very name and the tokens beside it, if they are there."""
        if not exists(self.index_url, self.storage):
            return []
        # `.bin` first: with that an `.idx` is opened.
        for suffix in SUFFIXES.values():
            if exists(self.prefix + suffix, self.storage):
                return [self.index_url, self.prefix + suffix, self.prefix + ENDING]
        return [self.index_url]
