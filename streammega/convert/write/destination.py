"""Where a conversion writes: the names of its files, the dataset that is there now, and in a bucket
the reservation of the plain names.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Sequence
from typing import Any

from streammega.config import StorageConfig
from streammega.config.validate import parse_json
from streammega.convert.read.source import Input
from streammega.convert.read.stdin import is_pipe
from streammega.dataset.manifest import read_manifest
from streammega.dataset.names import MANIFEST, SUFFIXES, Kind, strip_suffix, with_mark
from streammega.dataset.provenance import ENDING
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    ConvertError,
    FormatError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from streammega.errors.redaction import redact_urls
from streammega.errors.words import is_utf8
from streammega.storage import join_url, open_store, save_bytes
from streammega.storage.object_ops import delete, exists, find_etag, read_if_exists
from streammega.storage.open import is_remote, local_path
from streammega.storage.store import atomic_writer, create_object, replace_object

log = logging.getLogger(__name__)

PROBE = ".streammega-writable"
"""Ends the name of the object by which a conversion tries its rights. The file is hidden, so it is
never an input.
"""
CLAIM = ".streammega-claim"
"""Ends the name of the object by which a conversion reserves names in a bucket."""
MAX_SINGLE_LOOKUPS = 8
"""Up to so many objects are looked up one by one; for more, the folder is listed."""
UNREADABLE = {"job": "unknown"}
"""The holder of a reservation that cannot be read: no conversion has such a digest."""
READ_ATTEMPTS = 5
READ_PAUSE = 0.1
"""Seconds between attempts to read a reservation. On a server without conditional writes, tasks of
one conversion may overwrite it at the same moment.
"""


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

    def shard_names(self, plain_names: Sequence[str], mark: str) -> list[str]:
        """The names of shards, with a mark unless it is empty."""
        return [with_mark(name, self.stem, mark) for name in plain_names]

    def manifest(self) -> bytes | None:
        """The stored manifest."""
        return read_if_exists(self.manifest_url, self.storage)

    def manifest_version(self) -> str:
        """The ETag of the manifest; "" if it is missing."""
        return find_etag(self.manifest_url, self.storage)

    def find_existing(self) -> tuple[list[str], str, str]:
        """The dataset that is there: (files, version of its manifest, version). Raises ConvertError if
        its manifest cannot be read.

        files: each `.idx` first, which is the order to delete them in. Versions are ETags, and "" for
        what is missing; that of a dataset without a manifest is the ETag of its `.idx`.
        """
        # The versions are read first: after a change in between, they do not match any more.
        manifest_version = self.manifest_version()
        index_version = find_etag(self.index_url, self.storage)
        files = []
        if manifest_version:
            try:
                manifest = read_manifest(self.manifest_url, self.storage)
                # It may not say whether there are origins; a missing file is deleted in no time.
                endings = (".idx", SUFFIXES[manifest.kind], ENDING)  # type: ignore[index]
                prefixes = [self.url(shard.name) for shard in manifest.shards]
                # Each `.idx` before all tokens: tokens without an `.idx` are no dataset.
                files = [prefix + ending for ending in endings for prefix in prefixes]
            except ObjectNotFoundError:
                manifest_version = ""
            except FormatError as error:
                raise ConvertError(
                    f"{self.prefix}: cannot be replaced, since which shards belong to "
                    f"it is not known: {error}; remove that dataset by hand, or choose another "
                    f"output"
                ) from None
        if index_version:
            # `.bin` first: that is what a reader of the `.idx` opens.
            tokens = (self.prefix + suffix for suffix in SUFFIXES.values())
            of_index = [url for url in tokens if exists(url, self.storage)][:1]
            pair = [self.index_url, *of_index, self.prefix + ENDING]
            files += [url for url in pair if url not in files]
        return files, manifest_version, manifest_version or index_version

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


class Reservation:
    """The plain names of an output in a bucket, reserved for one job by one small object.

    A first conversion writes its tokens under their final names, so two of them must not do so at
    once. The first one creates the object, which holds its job's digest; the end of the conversion
    removes it. After a crash the same job goes on, on any machine: it writes the same bytes.

    The object says too whether `.idx` files of that job may be there: others are never replaced.
    """

    def __init__(self, destination: Destination, job: str) -> None:
        folder, slash, stem = destination.prefix.rpartition("/")
        self._prefix = destination.prefix
        self._storage = destination.storage
        self._url = f"{folder}{slash}.{stem}{CLAIM}"
        self._job = job

    def take(self) -> bool:
        """Reserve the names; False if another job has. The holder may take them again."""
        holder = self._read()
        if holder is not None and holder["job"]:
            return bool(holder["job"] == self._job)
        store, key = open_store(self._url, self._storage)
        data = json.dumps(
            {
                "job": self._job,
                "host": socket.gethostname(),
                "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
                "is_publishing": False,
            }
        ).encode()
        if holder is None:
            create_object(store, key, data)
        else:
            replace_object(store, key, data, find_etag(self._url, self._storage))
        # Another job may have been first, or last on a server without conditional writes.
        return self.is_ours()

    def is_ours(self) -> bool:
        """Whether this job has reserved the names."""
        return self._own() is not None

    def is_publishing(self) -> bool:
        """Whether this job has reserved the names and may have put an `.idx` there."""
        reservation = self._own()
        return reservation is not None and bool(reservation.get("is_publishing"))

    def begin_publishing(self) -> bool:
        """Note that `.idx` files are put from now on; False if this job has not the names."""
        before = find_etag(self._url, self._storage)
        reservation = self._own()
        if reservation is None:
            return False
        if not reservation.get("is_publishing"):
            store, key = open_store(self._url, self._storage)
            data = json.dumps(reservation | {"is_publishing": True}).encode()
            replace_object(store, key, data, before)
        return self.is_ours()

    def conflict(self) -> str | None:
        """Why this job cannot reserve the names: a message; None if it can."""
        holder = self._read()
        if holder is None or holder["job"] in ("", self._job):
            return None
        return (
            f"{self._prefix}: another conversion, of other inputs or options, writes there (started on "
            f"{holder.get('host')}, {holder.get('began')}). Wait for it, or choose another output. "
            f"If it was killed: 'streammega gc {self._prefix} --remove' removes what it left; or pass "
            f"--overwrite, which writes under other names"
        )

    def release(self) -> None:
        """Free the names, if this job has them. A failure is logged: the conversion has ended."""
        try:
            if not self.is_ours():
                return
            try:
                delete(self._url, self._storage)
            except AccessDeniedError:
                # Without the right to delete, an empty job frees them too.
                save_bytes(self._url, b'{"job": ""}', self._storage)
        except StorageError as error:
            log.warning(
                "%s: was left there (%s); streammega gc removes it", redact_urls(self._url), error
            )

    def _own(self) -> dict[str, Any] | None:
        """The stored reservation, if it is this job's."""
        holder = self._read()
        return holder if holder is not None and holder["job"] == self._job else None

    def _read(self) -> dict[str, Any] | None:
        """The stored reservation, if there is one."""
        for _ in range(READ_ATTEMPTS):
            try:
                data = read_if_exists(self._url, self._storage)
                if data is None:
                    return None
                stored = parse_json(data)
                if isinstance(stored, dict) and isinstance(stored.get("job"), str):
                    return stored
            except (ObjectChangedError, ValueError):
                pass
            time.sleep(READ_PAUSE)
        return UNREADABLE


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


def check_writable(prefix: str, storage: StorageConfig, *, why_delete: str = "") -> None:
    """Raise ConvertError if nothing can be written where the output goes: an object is put there,
    and removed.

    why_delete: why the right to delete is needed; without a reason, a warning tells of its lack.
    """
    folder, slash, stem = prefix.rpartition("/")
    store, key = open_store(f"{folder}{slash}.{stem}{PROBE}", storage)

    def is_outage(error: Exception) -> bool:
        """Whether an endpoint fails, which says nothing of the right to write."""
        return is_remote(prefix) and isinstance(error, StorageError) and error.transient

    try:
        with atomic_writer(store, key) as writer:
            writer.write(b"streammega convert tries whether it can write here")
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
            redact_urls(prefix),
            key.rpartition("/")[2],
            error,
        )


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
