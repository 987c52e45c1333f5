"""Where a conversion writes: the names of its files, the dataset that is there now, and what has to
be possible there.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Literal

from streammega.config import StorageConfig
from streammega.convert.read.source import Input
from streammega.convert.read.stdin import is_pipe
from streammega.dataset.manifest import read_manifest
from streammega.dataset.names import (
    MANIFEST,
    SUFFIXES,
    Kind,
    strip_suffix,
    tokenizer_name,
    with_mark,
)
from streammega.dataset.provenance import ENDING
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    ConvertError,
    FormatError,
    ObjectNotFoundError,
    StorageError,
    UnsupportedOperation,
)
from streammega.errors.logs import get_logger
from streammega.errors.words import is_utf8
from streammega.storage import join_url, open_store
from streammega.storage.object_ops import exists, find_etag, read_if_exists
from streammega.storage.open import is_remote, local_path
from streammega.storage.store import Store, atomic_writer, put_if
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

PROBE = ".streammega-writable"
"""Ends the name of the object by which a conversion tries its rights. The file is hidden, so it is
never an input.
"""
PROBED = b"streammega convert tries whether it can write here"
NO_ETAG = f'"{"0" * 32}"'
"""The ETag of no object."""
PUTS = 3
Condition = Literal["if_absent", "if_match"]
"""How a manifest is put: where there is none, or over one that has not changed."""
NO_CONDITIONS = (
    "%s: this storage has no conditional writes; if two conversions to this name end at the same "
    "moment, both succeed, and the last one's dataset is there"
)
MAX_SINGLE_LOOKUPS = 8
"""Up to so many objects are looked up one by one; for more, the folder is listed."""


class Destination:
    """The place of a dataset: its prefix, and the names of its files. Methods raise StorageError.

    is_remote: whether it is a bucket, where nothing can be renamed. suffix: that of the tokens.
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
        """The URL of a file in the output's folder."""
        return join_url(self._folder, name)

    def tokenizer_url(self, digest: str) -> str:
        """The URL of the copy of a tokenizer of this digest."""
        return tokenizer_name(self.prefix, digest)

    def shard_names(self, plain_names: Sequence[str], mark: str) -> list[str]:
        """The names of shards, with a mark unless it is empty."""
        return [with_mark(name, self.stem, mark) for name in plain_names]

    def manifest(self) -> bytes | None:
        """The stored manifest."""
        return read_if_exists(self.manifest_url, self.storage)

    def manifest_version(self) -> str:
        """The ETag of the manifest; "" if it is missing."""
        return find_etag(self.manifest_url, self.storage)

    def find_existing(self) -> tuple[list[str], str]:
        """The dataset that is there: (files, version of its manifest). Raises ConvertError if its
        manifest cannot be read.

        files: each `.idx` first, which is the order to delete them in. The version is an ETag, and ""
        where there is no manifest.
        """
        # Read first: after a change in between, it does not match any more.
        version = self.manifest_version()
        files = []
        if version:
            try:
                manifest = read_manifest(self.manifest_url, self.storage)
                # It may not say whether there are origins; a missing file is deleted in no time.
                endings = (".idx", SUFFIXES[manifest.kind], ENDING)  # type: ignore[index]
                prefixes = [self.url(shard.name) for shard in manifest.shards]
                # Each `.idx` before all tokens: tokens without an `.idx` are no dataset.
                files = [prefix + ending for ending in endings for prefix in prefixes]
                of_columns = [file for column in manifest.columns for file in column.files]
                files += [self.url(file.name) for file in of_columns if file]
                _, digest = manifest.tokenizer_label
                files += [self.tokenizer_url(digest)] if digest else []
            except ObjectNotFoundError:
                version = ""
            except FormatError as error:
                raise ConvertError(
                    f"{self.prefix}: cannot be replaced, since which shards belong to "
                    f"it is not known: {error}; remove that dataset by hand, or choose another "
                    f"output"
                ) from None
        if exists(self.index_url, self.storage):
            # `.bin` first: that is what a reader of the `.idx` opens.
            tokens = (self.prefix + suffix for suffix in SUFFIXES.values())
            of_index = [url for url in tokens if exists(url, self.storage)][:1]
            pair = [self.index_url, *of_index, self.prefix + ENDING]
            files += [url for url in pair if url not in files]
        return files, version

    def sizes(self, urls: Sequence[str]) -> dict[str, int]:
        """The bytes of those files that exist."""
        if len(urls) > MAX_SINGLE_LOOKUPS:
            store, key = open_store(f"{self._folder}/", self.storage)
            # A local path has lost its slash; the key of a bucket's root is empty.
            below = f"{key.rstrip('/')}/" if key else ""
            try:
                listed = store.list(below, recursive=False)
                return {self.url(os.path.basename(info.key)): info.size for info in listed}
            except StorageError as error:
                if error.transient:
                    raise
                # Without the right to list, single objects may still be looked up.
        sizes = {}
        for url in urls:
            store, key = open_store(url, self.storage)
            try:
                sizes[url] = store.info(key).size
            except ObjectNotFoundError:
                continue
        return sizes


def check_output(output: str) -> None:
    """Raise ConfigError for an output that is a pipe, or that has no name: `$UNSET`, a folder."""
    if is_pipe(output):
        raise ConfigError(
            f"{output}: a dataset is several files (tokens, their .idx and a manifest), which a "
            f"pipe cannot take; give a prefix, out/web for instance"
        )
    if not is_utf8(output):
        raise ConfigError(f"{output!a}: is not UTF-8; give the dataset another name")
    _, scheme, path = output.partition("://")
    if scheme and "/" not in path.rstrip("/") and is_remote(output):
        raise ConfigError(
            f"{output!r}: is a bucket; give a name in it, {output.rstrip('/')}/web for instance"
        )
    if output.endswith(MANIFEST):
        raise ConfigError(
            f"{output!r}: is the name of a manifest; give the prefix {output.removesuffix(MANIFEST)!r}"
        )
    if os.path.isdir(output):
        raise ConfigError(
            f"{output!r}: is a folder; give a name in it, {os.path.join(output, 'web')} for instance"
        )
    if strip_suffix(output).rpartition("/")[2] in ("", ".", ".."):
        raise ConfigError(
            f"{output!r}: cannot be the name of a dataset: its files would be hidden; "
            f"give a prefix, out/web for instance"
        )


def check_writable(
    prefix: str, storage: StorageConfig, *, why_delete: str = "", commits: Condition | None = None
) -> None:
    """Raise ConvertError if nothing can be written where the output goes: an object is put there,
    and removed.

    why_delete: why the right to delete is needed; without a reason, a warning tells of its lack.
    commits: how a manifest will be put there; a warning tells where the store does not know that.
    """
    folder, slash, stem = prefix.rpartition("/")
    store, key = open_store(f"{folder}{slash}.{stem}{PROBE}", storage)

    def is_outage(error: Exception) -> bool:
        """Whether an endpoint fails, which says nothing of the right to write."""
        return is_remote(prefix) and isinstance(error, StorageError) and error.transient

    try:
        with atomic_writer(store, key) as writer:
            writer.write(PROBED)
        if commits is not None and not _knows(commits, store, key):
            warn_once(log, f"no conditions {prefix}", NO_CONDITIONS, prefix)
    except ObjectNotFoundError:
        reason = "there is no such folder; create it"
        if is_remote(prefix):
            reason = "there is no such bucket; create it, or check its name"
        raise ConvertError(f"{prefix}: cannot be written: {reason}") from None
    except (OSError, StorageError) as error:
        if is_outage(error):
            raise
        raise ConvertError(f"{prefix}: cannot be written: {error}") from None
    try:
        store.delete(key)
    except (OSError, StorageError) as error:
        if is_outage(error):
            raise
        if why_delete:
            raise ConvertError(
                f"{prefix}: {why_delete}, and so needs the right to delete: {error}"
            ) from None
        log.warning(
            "%s: %s was left there, for want of the right to delete (%s)",
            prefix,
            key.rpartition("/")[2],
            error,
        )


def _knows(condition: Condition, store: Store, key: str) -> bool:
    """Whether a store refuses what such a condition forbids: to put an object that exists, or to
    replace one that has another ETag. Some servers put it all the same.
    """
    try:
        if condition == "if_match":
            return not put_if(store, key, PROBED, if_match=NO_ETAG)
        # More than once: another conversion may remove the object in between.
        return any(not put_if(store, key, PROBED, if_absent=True) for _ in range(PUTS))
    except UnsupportedOperation:
        return False


def check_may_write(prefix: str, storage: StorageConfig) -> None:
    """Raise ConvertError if nothing can be written where the output goes, as far as that can be
    known without writing.
    """
    if is_remote(prefix):
        folder, _, _ = prefix.rpartition("/")
        store, key = open_store(f"{folder}/", storage)
        try:
            store.list(key, recursive=False)
        except ObjectNotFoundError:
            raise ConvertError(
                f"{prefix}: cannot be written: there is no such bucket; create it, or check its name"
            ) from None
        except AccessDeniedError:
            pass  # who may not list may still write
        return
    # Folders that are missing are made; what has to be writable is the first that is there.
    folder = _existing_folder(prefix)
    if not os.path.isdir(folder):
        raise ConvertError(f"{prefix}: cannot be written: {folder} is a file, not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConvertError(f"{prefix}: cannot be written: check the owner and mode of {folder}")


def warn_of_little_room(prefix: str, inputs: Sequence[Input]) -> None:
    """Warn where the disk of the output has too little room for it.

    Text becomes tokens of about half its bytes, which are stored in the work folder and then in
    shards. Nearly all conversions need more than a quarter of the stored bytes of their inputs.
    """
    if is_remote(prefix):
        return
    free = shutil.disk_usage(_existing_folder(prefix)).free
    stored = sum(item.size for item in inputs)
    if stored // 4 > free:
        log.warning(
            "%s: its disk has %.1f GB left, which will hardly do for inputs of %.1f GB; free some, or "
            "choose another output",
            prefix,
            free / 1e9,
            stored / 1e9,
        )


def _existing_folder(prefix: str) -> str:
    """The nearest folder above a local output that is there."""
    folder = os.path.dirname(local_path(prefix))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder
