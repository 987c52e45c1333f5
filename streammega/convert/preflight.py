"""What would fail in the end is tried before the first document is read: rights, buckets, disks,
tokenizers.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence

from streammega.config import StorageConfig
from streammega.convert.options import ConvertOptions
from streammega.convert.read.inputs import PROBE, Input
from streammega.convert.read.suffixes import TEXT_FORMATS
from streammega.convert.tokenize.encode import BatchEncoder
from streammega.convert.tokenize.tokenizers import Tokenizer
from streammega.errors import AccessDeniedError, ConvertError, ObjectNotFoundError, StorageError
from streammega.errors.redaction import redact_urls
from streammega.storage import Store, open_store
from streammega.storage.open import is_remote, local_path
from streammega.storage.store import written_whole

log = logging.getLogger(__name__)


def check_encoder(
    inputs: Sequence[Input],
    tokenizer: Tokenizer | None,
    options: ConvertOptions,
    storage: StorageConfig,
) -> None:
    """Raise what encoding would raise at the first text: no tokenizer, a dtype that is too narrow,
    a package that is missing.
    """
    if not any(item.format in TEXT_FORMATS for item in inputs):
        return
    if tokenizer is None:
        raise ConvertError(
            "the inputs hold text, so a tokenizer is needed: --tokenizer tokenizer.json (or `bytes`)"
        )
    BatchEncoder(tokenizer, options, storage)


def check_writable(
    prefix: str, storage: StorageConfig, *, replaces: bool = False, is_work: bool = False
) -> None:
    """Raise ConvertError if nothing can be written where the output goes: an object is put there,
    and removed.

    replaces: whether what is there is to be replaced; is_work: whether this is no output but a work
    folder. Both need the right to delete as well; else a warning tells of that.
    """
    folder, slash, stem = prefix.rpartition("/")
    store, key = open_store(f"{folder}{slash}.{stem}{PROBE}", storage)
    place = redact_urls(prefix)
    try:
        with written_whole(store, key) as writer:
            writer.write(b"streammega convert tries whether it can write here")
    except ObjectNotFoundError:
        reason = "there is no such folder"
        if is_remote(prefix):
            reason = "there is no such bucket; create it, or check its name"
        raise ConvertError(f"{place}: cannot be written: {reason}") from None
    except StorageError as error:
        if error.transient:
            raise
        raise ConvertError(f"{place}: cannot be written: {error}") from None
    why_delete = "a work folder is removed in the end" if is_work else ""
    if replaces:
        why_delete = "--overwrite removes what it replaced"
    _remove_probe(store, key, place, why_delete)


def check_may_write(prefix: str, storage: StorageConfig) -> None:
    """Raise ConvertError if nothing can be written where the output goes, as far as that can be
    told without writing.
    """
    place = redact_urls(prefix)
    if is_remote(prefix):
        folder, _, _ = prefix.rpartition("/")
        store, key = open_store(f"{folder}/", storage)
        try:
            store.list(key, recursive=False)
        except ObjectNotFoundError:
            raise ConvertError(
                f"{place}: cannot be written: there is no such bucket; create it, or check its name"
            ) from None
        except AccessDeniedError:
            pass  # who may not list may still write
        return
    # Folders that are missing are made; what has to be writable is the first that is there.
    folder = os.path.dirname(os.path.abspath(prefix))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise ConvertError(f"{place}: cannot be written: {folder} is a file, not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConvertError(f"{place}: cannot be written: check the owner and mode of {folder}")


def warn_of_little_room(prefix: str, inputs: Sequence[Input]) -> None:
    """Warn where the disk of the output cannot be thought to hold it.

    Text becomes tokens of about half its bytes, which lie in the work folder and then in shards. A
    quarter of the inputs' bytes, as they are stored, is less than nearly all conversions need.
    """
    if is_remote(prefix):
        return
    folder = os.path.dirname(local_path(prefix))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free
    stored = sum(item.size for item in inputs)
    if stored // 4 > free:
        log.warning(
            "%s: its disk has %.1f GB left, which will hardly do for inputs of %.1f GB",
            prefix,
            free / 1e9,
            stored / 1e9,
        )


def _remove_probe(store: Store, key: str, place: str, why_delete: str) -> None:
    """Raise ConvertError, saying why, where deleting is not allowed but needed."""
    try:
        store.delete(key)
    except StorageError as error:
        if error.transient:
            raise
        if why_delete:
            raise ConvertError(
                f"{place}: {why_delete}, and so needs the right to delete: {error}"
            ) from None
        log.warning(
            "%s: %s was left there, for want of the right to delete (%s)",
            place,
            key.rpartition("/")[2],
            error,
        )


def make_work_folder(work: str) -> None:
    """Raise ConvertError if the work folder cannot be made."""
    try:
        os.makedirs(work, exist_ok=True)
    except OSError as error:
        raise ConvertError(
            f"{work}: the work folder cannot be made ({error.strerror}); name another by --work, a "
            f"folder or a URL"
        ) from None
