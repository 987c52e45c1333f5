"""Lost and broken `.idx` files, rebuilt from the ends of documents in the tokens; what these do not
tell is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.checksums import HashingWriter
from streammega.dataset.idx import (
    DTYPE_OF_CODE,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    check_end,
    check_index,
    encode_index,
    parse_header,
    token_dtype_named,
)
from streammega.dataset.manifest import MANIFEST, Manifest, Shard
from streammega.dataset.shards import SUFFIXES, split_name
from streammega.dataset.token_file import open_tokens
from streammega.dataset.verify import REMOTE_BYTES, VerifyReport, read_index, shards_of
from streammega.errors import ConfigError, FormatError, ObjectNotFoundError, StreammegaError
from streammega.errors.redaction import redact_urls
from streammega.kernels.check import find_ids
from streammega.storage import ObjectInfo, Store, open_store, save_bytes
from streammega.storage.backends.local import LocalStore
from streammega.storage.moves import exists


def repair_index(
    name: str,
    storage: StorageConfig | None = None,
    *,
    eod_id: int | None = None,
    dtype: str | None = None,
    force: bool = False,
) -> list[str]:
    """Write each `.idx` anew that is lost or broken, from where its tokens hold the end-of-document
    id. Returns what was done.

    What is sound stays as it is; a broken `.idx` is kept as `.idx.former`, a later one as
    `.idx.former-2`. Every document becomes one sequence, tokens after the last end one more
    document. So a dataset whose documents have several sequences, or modes, is refused, and an
    `.idx` that would not be what the manifest says; `force` takes what can be had.

    Raises ConfigError for what is refused, and when the id or the dtype is not known.
    """
    storage = storage or StorageConfig()
    report = VerifyReport(name=redact_urls(name))
    try:
        names, manifest = shards_of(name, storage, report)
    except ObjectNotFoundError:
        names = [split_name(name)[0]]
        manifest = None
    eod_id = eod_id if eod_id is not None else manifest.eod_id if manifest else None
    width = dtype or (manifest.dtype if manifest else None)
    expected: list[Shard | None] = list(manifest.shards) if manifest else [None] * len(names)
    broken = [
        number
        for number, shard in enumerate(names)
        if not _is_sound(shard, expected[number], storage)
    ]
    made = {
        number: _rebuild(
            names[number], expected[number], manifest, storage, eod_id, width, force=force
        )
        for number in broken
    }
    done = [_put_index(names[number], expected[number], made[number], storage) for number in broken]
    if manifest and any(made[number].shard != expected[number] for number in broken):
        shards = [
            made[number].shard if number in made else shard
            for number, shard in enumerate(manifest.shards)
        ]
        counts = {
            what: sum(getattr(shard, what) for shard in shards)
            for what in ("documents", "sequences", "tokens")
        }
        whole = [shard for shard in shards if shard is not None]
        url = name if name.endswith(".json") else split_name(name)[0] + MANIFEST
        multimodal = manifest.multimodal and len(broken) < len(names)
        save_bytes(
            url, replace(manifest, shards=whole, multimodal=multimodal, **counts).to_json(), storage
        )
        done.append(f"{redact_urls(url)}: speaks of the new .idx files now")
    return done


@dataclass(frozen=True, kw_only=True)
class _Rebuilt:
    """An `.idx` made of tokens: its bytes, the documents it tells of, and what a manifest is to say
    of it.
    """

    data: bytes
    documents: int
    shard: Shard | None


def _is_sound(name: str, expected: Shard | None, storage: StorageConfig) -> bool:
    """Whether the `.idx` of a shard is there, is what the manifest speaks of, and
    fits the tokens.
    """
    prefix, kind = split_name(name)
    seen = VerifyReport(name=name)
    try:
        index = read_index(prefix, expected, storage, seen)
        view, key = open_tokens(name, storage)
        size = view.info(key).size
        check_end(check_index(index, size, f"{prefix}.idx", name), size, f"{prefix}.idx", name)
    except (FormatError, ObjectNotFoundError):
        store, key = open_store(prefix + SUFFIXES[kind], storage)
        store.info(key)  # without tokens there is nothing to rebuild it from
        return False
    return not seen.problems


def _rebuild(
    name: str, expected: Shard | None, manifest: Manifest | None, storage: StorageConfig, eod_id: int | None, dtype: str | None,
    *, force: bool,
) -> _Rebuilt:  # fmt: skip
    prefix, kind = split_name(name)
    if kind == "tar":
        raise ConfigError(
            f"{name}: the .idx of a tar cannot be rebuilt from it; convert the tar again"
        )
    if eod_id is None:
        raise ConfigError(
            f"{name}: an .idx is rebuilt from the ends of documents; name their id by --eod-id"
        )
    if not force and _has_sequences(prefix, expected, manifest, storage):
        raise ConfigError(
            f"{redact_urls(prefix)}.idx: its documents have several sequences, or modes, which the tokens do not tell: "
            f"convert again, or copy the .idx from where it is whole (--force makes one sequence of each document, without modes)"
        )
    store, key = open_tokens(name, storage)
    width = token_dtype_named(dtype) if dtype else _dtype_of(prefix, storage)
    info = store.info(key)
    places = np.concatenate([np.zeros(1, np.int64), *_document_ends(store, info, width, eod_id)])
    if places[-1] < info.size // width.itemsize:
        places = np.append(places, info.size // width.itemsize)
    lengths = np.diff(places)
    if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
        raise FormatError(
            f"{name}: {int(lengths.max()):,} tokens without the id {eod_id}; is it the right one?"
        )
    data = b"".join(
        encode_index(width, lengths.astype(np.int32), np.arange(len(lengths) + 1), None)
    )
    check = HashingWriter(None)
    check.write(data)
    if expected is None or (check.size, check.checksums) == (
        expected.index_bytes,
        expected.index_checksums,
    ):
        return _Rebuilt(data=data, documents=len(lengths), shard=expected)
    if not force:
        raise ConfigError(
            f"{redact_urls(prefix)}.idx: what the tokens tell ({len(lengths):,} documents) is not what the manifest says "
            f"({expected.documents:,}); are the tokens whole? copy the shard, or convert again (--force writes it all the same)"
        )
    shard = replace(
        expected, documents=len(lengths), sequences=len(lengths), tokens=int(lengths.sum()), index_bytes=check.size,
        index_checksums=check.checksums,
    )  # fmt: skip
    return _Rebuilt(data=data, documents=len(lengths), shard=shard)


def _has_sequences(
    prefix: str, expected: Shard | None, manifest: Manifest | None, storage: StorageConfig
) -> bool:
    """Whether documents have several sequences, or modes, by the manifest or by what is left of the
    `.idx`.
    """
    if manifest is not None and expected is not None:
        return manifest.multimodal or expected.sequences != expected.documents
    store, key = open_store(f"{prefix}.idx", storage)
    try:
        info = store.info(key)
        head = bytes(store.read_ranges(key, [0], [min(HEADER_BYTES, info.size)], info.etag)[0])
    except ObjectNotFoundError:
        return False
    if len(head) < HEADER_BYTES:
        return False
    magic, _, _, sequences, bounds = HEADER.unpack(head)
    return bool(magic == MAGIC and sequences != bounds - 1)


def _put_index(name: str, expected: Shard | None, made: _Rebuilt, storage: StorageConfig) -> str:
    prefix = split_name(name)[0]
    _keep_former(f"{prefix}.idx", storage)
    save_bytes(f"{prefix}.idx", made.data, storage)
    text = f"{redact_urls(prefix)}.idx: rebuilt, {made.documents:,} documents"
    if expected is None:
        return text
    return (
        f"{text}; it is what it was"
        if made.shard == expected
        else f"{text}; it differs from the first one"
    )


def _document_ends(
    store: Store, info: ObjectInfo, dtype: np.dtype[Any], eod_id: int
) -> Iterator[NDArray[np.int64]]:
    """One past each end, in tokens."""
    whole = info.size // dtype.itemsize * dtype.itemsize
    for at in range(0, whole, REMOTE_BYTES):
        data = store.read_ranges(info.key, [at], [min(at + REMOTE_BYTES, whole)], info.etag)[0]
        ids = np.frombuffer(data, dtype.newbyteorder("<"))
        places = np.empty(len(ids), np.int64)
        count = find_ids(ids, eod_id, places)
        yield places[:count] + at // dtype.itemsize + 1


def _dtype_of(prefix: str, storage: StorageConfig) -> np.dtype[Any]:
    """From what is left of the `.idx`."""
    store, key = open_store(f"{prefix}.idx", storage)
    try:
        info = store.info(key)
        head = bytes(store.read_ranges(key, [0], [min(34, info.size)], info.etag)[0])
        if len(head) >= 18 and head[17] in DTYPE_OF_CODE:
            return DTYPE_OF_CODE[head[17]]
        return parse_header(head, info.size, store.url(key)).dtype
    except StreammegaError:
        raise ConfigError(
            f"{prefix}: the dtype of its tokens is not known; name it by --dtype, such as uint16"
        ) from None


def _keep_former(url: str, storage: StorageConfig) -> None:
    store, key = open_store(url, storage)
    try:
        info = store.info(key)
    except ObjectNotFoundError:
        return
    ending = ".former"
    number = 1
    # of an earlier repair, perhaps the only copy of what was there first
    while exists(url + ending, storage):
        number += 1
        ending = f".former-{number}"
    if isinstance(store, LocalStore):
        os.replace(key, key + ending)
    elif info.size:
        save_bytes(
            url + ending, bytes(store.read_ranges(key, [0], [info.size], info.etag)[0]), storage
        )
