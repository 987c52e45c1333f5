"""What is known of a conversion before its first document: inputs, tokenizer, metadata. Whatever can
fail fails here: rights, buckets, disks, tokenizers.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.conversion import Conversion
from streammega.convert.options import ConvertOptions, Runner
from streammega.convert.read.folders import PassedOver
from streammega.convert.read.inputs import PROBE, Input, OwnOutput, find_inputs
from streammega.convert.read.stdin import check_output
from streammega.convert.read.suffixes import TEXT_FORMATS
from streammega.convert.tokenize.encode import BatchEncoder, share_tokenizer
from streammega.convert.tokenize.template_loader import as_option, find_template
from streammega.convert.tokenize.tokenizers import Tokenizer, load_tokenizer
from streammega.convert.work_dir import can_resume, work_folder
from streammega.convert.write.manifest_metadata import labels_of
from streammega.dataset.shard import split_name
from streammega.dataset.versions import check_not_grown
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    ConvertError,
    ObjectNotFoundError,
    StorageError,
)
from streammega.errors.redaction import redact_urls
from streammega.storage import Store, open_store
from streammega.storage.open import is_remote, local_path
from streammega.storage.progress import ProgressObserver
from streammega.storage.store import atomic_writer

log = logging.getLogger(__name__)


def plan(
    inputs: Sequence[str],
    output: str,
    *,
    options: ConvertOptions | None = None,
    runner: Runner | None = None,
    overwrite: bool = False,
    storage: StorageConfig | None = None,
    input_storage: StorageConfig | None = None,
    progress: ProgressObserver | None = None,
    **settings: Any,
) -> Conversion:
    """A conversion that has not begun. Arguments and errors are those of `convert`."""
    options, runner = merge_settings(options, runner, settings)
    storage = storage or StorageConfig()
    input_storage = input_storage or storage
    check_output(output)
    prefix, kind_named = split_name(output)
    # Of `web.bin.zst` the suffix says the form; `web` and `web.idx` leave it to the options.
    if prefix != output and not output.endswith(".idx"):
        options = replace(options, kind=kind_named)
    tokenizer = None
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer, **options.tokenizer_settings)
        share_tokenizer(tokenizer, options)
    if options.chat_template is not None:
        # All of it, for workers elsewhere, and so that another one is another conversion.
        template = find_template(options.chat_template, options.tokenizer, options.template_vars)
        options = replace(options, chat_template=as_option(template))
    skipped_files = PassedOver()
    own = OwnOutput(prefix=prefix, work=work_folder(prefix, runner.work))
    found = find_inputs(inputs, input_storage, options, skipped_files, own)
    metadata = labels_of(found, options, tokenizer, input_storage)
    if tokenizer is None and options.eod_id is None:
        # What is cut keeps the end of its document.
        options = replace(options, eod_id=metadata["eod_id"])
    if options.modes is not None:
        # The sequence with the end may be one of those left out.
        metadata = metadata | {"eod_id": None}
    check_encoder(found, tokenizer, options, input_storage)
    # A cluster of this machine alone sees its folders.
    is_cluster = runner.engine == "ray" and os.environ.get("RAY_ADDRESS", "local") != "local"
    if is_cluster and runner.work is None and is_remote(prefix):
        raise ConfigError(
            f"{prefix}: the machines of a Ray cluster need a work folder that all of them can "
            f"write; name one by --work, a URL beside the output for instance"
        )
    return Conversion(
        prefix=prefix,
        work=own.work,
        inputs=found,
        skipped_files=skipped_files,
        options=options,
        runner=runner,
        storage=storage,
        input_storage=input_storage,
        tokenizer=tokenizer,
        metadata=metadata,
        overwrite=overwrite,
        progress=progress or ProgressObserver(),
    )


def merge_settings(
    options: ConvertOptions | None, runner: Runner | None, settings: dict[str, Any]
) -> tuple[ConvertOptions, Runner]:
    """Put fields of options and runner that were given by name in their places."""
    of_options = dict(settings)
    if "key" in of_options:
        of_options["keys"] = (of_options.pop("key"),)
    of_runner = {}
    for name in settings:
        if name in Runner.__dataclass_fields__:
            of_runner[name] = of_options.pop(name)
    options = replace(options or ConvertOptions(), **of_options)
    runner = replace(runner or Runner(), **of_runner)
    return options, runner


def check_output_is_free(conversion: Conversion) -> None:
    """Raise what would fail in the end, while the output is locked."""
    prefix = conversion.prefix
    overwrite = conversion.overwrite
    conversion.publisher.check(conversion.inputs, overwrite=overwrite)
    # What is done already takes room, and is not done again.
    if not (os.path.isdir(conversion.work) and can_resume(conversion.work)):
        warn_of_little_room(prefix, conversion.inputs)
    check_not_grown(prefix, conversion.storage, overwrite=overwrite)
    check_writable(prefix, conversion.storage, replaces=overwrite)
    if is_remote(conversion.work):
        check_writable(conversion.work, conversion.storage, is_work=True)


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
        with atomic_writer(store, key) as writer:
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
