"""Rebuild missing and broken `.idx` files from the ends of documents in the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.checksums import checksums_of
from streammega.dataset.idx import (
    MAGIC,
    MAX_TOKENS,
    dtype_of_broken,
    encode_index,
    index_bytes,
    token_dtype_named,
    unchecked_header,
)
from streammega.dataset.manifest import Manifest, ShardEntry, manifest_url, read_manifest
from streammega.dataset.names import MANIFEST, strip_suffix, without_number
from streammega.dataset.shard import Shard
from streammega.dataset.verify import REMOTE_BYTES, ShardCheck, VerifyReport, shards_of
from streammega.errors import AccessDeniedError, ConfigError, FormatError, ObjectNotFoundError
from streammega.errors.redaction import redact_urls
from streammega.storage import Buffer, save_bytes
from streammega.storage.object_ops import exists, move_or_copy
from streammega.storage.progress import ProgressObserver


def repair_index(
    name: str,
    storage: StorageConfig | None = None,
    *,
    eod_id: int | None = None,
    dtype: str | None = None,
    force: bool = False,
    progress: ProgressObserver | None = None,
) -> list[str]:
    """Rebuild each `.idx` that is missing or broken, from the places of the end-of-document id in
    its tokens. Returns a line for each file that was written.

    A sound `.idx` is not touched. A broken one is kept as `.idx.former`, a later one as
    `.idx.former-2`. Every document becomes one sequence; tokens after the last end are one more
    document. So a dataset whose documents have several sequences, or modes, is refused, and so is
    an `.idx` that contradicts the manifest. force: write it nevertheless. progress: receives the
    shards that were looked at, and of bytes of tokens.

    Raises ConfigError for what is refused, and where the id or the dtype is not known.
    """
    storage = storage or StorageConfig()
    progress = progress or ProgressObserver()
    try:
        names, manifest = shards_of(name, storage, VerifyReport(name=redact_urls(name)))
    except ObjectNotFoundError:
        # There is no `.idx` and no manifest of that name, but there may be tokens.
        names = [strip_suffix(name)]
        manifest = None
    expected: list[ShardEntry | None] = [None] * len(names)
    if manifest is None:
        _check_not_packed(names, storage)
    else:
        expected = list(manifest.shards)
        eod_id = manifest.eod_id if eod_id is None else eod_id
        dtype = dtype or manifest.dtype
    # All are made before the first is written: where one is refused, nothing has changed.
    rebuilt: dict[int, _Rebuilt] = {}
    progress.begin("looking at indices", len(names), " shards")
    for number, shard_name in enumerate(names):
        is_packed = manifest is not None and manifest.pack is not None
        report = VerifyReport(name=shard_name)
        check = ShardCheck(shard_name, expected[number], manifest, storage, report)
        if check.check_index() is None or report.problems:
            if is_packed:
                raise _packed(shard_name)
            rebuilt[number] = _rebuild(
                shard_name,
                expected[number],
                manifest,
                storage,
                eod_id,
                dtype,
                progress,
                force=force,
            )
        progress.advance(1)
    differ = any(index.shard != expected[number] for number, index in rebuilt.items())
    done = []
    progress.begin("writing indices", len(rebuilt), " files")
    for number, index in rebuilt.items():
        done.append(_put_index(names[number], expected[number], index, storage))
        progress.advance(1)
    if manifest is not None and differ:
        done.append(_put_manifest(name, manifest, rebuilt, storage))
    return done


def _check_not_packed(names: Sequence[str], storage: StorageConfig) -> None:
    """Raise ConfigError for shards of a packed dataset that were named without their manifest. Their
    sound `.idx` would look broken: it does not have the padding and the token after the last bin.
    """
    of_set = {without_number(strip_suffix(name)): name for name in names}
    for prefix, name in of_set.items():
        # without the right to list, S3 answers 403 for what is not there
        with suppress(ObjectNotFoundError, AccessDeniedError, FormatError):
            if read_manifest(prefix + MANIFEST, storage).pack is not None:
                raise _packed(name)


def _packed(name: str) -> ConfigError:
    return ConfigError(
        f"{redact_urls(name)}: is packed into bins, and tokens do not tell where documents end and "
        "padding begins; copy its .idx again, or convert again"
    )


@dataclass(frozen=True, kw_only=True)
class _Rebuilt:
    """A rebuilt `.idx`: its bytes, how many documents it has, and its shard's entry in a manifest."""

    data: bytes
    documents: int
    shard: ShardEntry | None


def _rebuild(
    name: str,
    expected: ShardEntry | None,
    manifest: Manifest | None,
    storage: StorageConfig,
    eod_id: int | None,
    dtype_name: str | None,
    progress: ProgressObserver,
    *,
    force: bool,
) -> _Rebuilt:
    """Make the `.idx` of a shard from its tokens. Raises ConfigError where that is refused."""
    stored = Shard(name, storage)
    if stored.kind == "tar":
        raise ConfigError(
            f"{name}: the .idx of a tar cannot be rebuilt from it; convert the tar again"
        )
    if eod_id is None:
        raise ConfigError(
            f"{name}: an .idx is rebuilt from the ends of documents; name their id by --eod-id"
        )
    try:
        head = stored.read_head()
    except ObjectNotFoundError:
        head = memoryview(b"")
    if not force and _has_sequences_or_modes(head, stored, expected, manifest):
        raise ConfigError(
            f"{redact_urls(stored.prefix)}.idx: its documents have several sequences, or modes, which "
            "cannot be seen in the tokens: convert again, or copy the .idx from where it is whole "
            "(--force makes one sequence of each document, without modes)"
        )
    dtype = token_dtype_named(dtype_name) if dtype_name else dtype_of_broken(head)
    if dtype is None:
        raise ConfigError(
            f"{stored.prefix}: the dtype of its tokens is not known; name it by --dtype, such as "
            "uint16"
        )
    lengths = _document_lengths(stored, dtype, eod_id, progress)
    bounds = np.arange(len(lengths) + 1)
    data = b"".join(encode_index(dtype, lengths, bounds, None))
    checksums = checksums_of(data)
    if expected is None or checksums == list(expected.index_checksums):
        return _Rebuilt(data=data, documents=len(lengths), shard=expected)
    if not force:
        raise ConfigError(
            f"{redact_urls(stored.prefix)}.idx: by its tokens ({len(lengths):,} documents) it is not "
            f"what the manifest says ({expected.documents:,}); are the tokens whole? copy the "
            "shard, or convert again (--force writes it nevertheless)"
        )
    shard = replace(
        expected,
        documents=len(lengths),
        sequences=len(lengths),
        tokens=int(lengths.sum(dtype=np.int64)),
        index_bytes=len(data),
        index_checksums=checksums,
    )
    return _Rebuilt(data=data, documents=len(lengths), shard=shard)


def _has_sequences_or_modes(
    head: Buffer, shard: Shard, expected: ShardEntry | None, manifest: Manifest | None
) -> bool:
    """Whether documents have several sequences, or modes, by the manifest or by the header and the
    size of the broken `.idx`.
    """
    # The manifest first: the counts of a broken `.idx` may be wrong.
    if manifest is not None and expected is not None:
        return manifest.multimodal or expected.sequences != expected.documents
    header = unchecked_header(head)
    if header is None or header.magic != MAGIC:
        return False
    counts = header.sequence_count, header.document_count
    plain, with_modes = (index_bytes(*counts, multimodal=modes) for modes in (False, True))
    has_modes = plain < shard.index_info.size <= with_modes
    return has_modes or header.sequence_count != header.document_count - 1


def _document_lengths(
    shard: Shard, dtype: np.dtype[Any], eod_id: int, progress: ProgressObserver
) -> NDArray[np.int32]:
    """Tokens of each document of a shard, by their ends. Raises FormatError for a document that is
    too long for an `.idx`.
    """
    store, info = shard.tokens()
    token_bytes = info.size - info.size % dtype.itemsize
    bounds = [np.zeros(1, np.int64)]
    progress.part("tokens read", 0, token_bytes)
    for start in range(0, token_bytes, REMOTE_BYTES):
        span = (start, min(start + REMOTE_BYTES, token_bytes))
        (data,) = store.read(info.key, [span], info.etag)
        ids = np.frombuffer(data, dtype.newbyteorder("<"))
        bounds.append(start // dtype.itemsize + np.flatnonzero(ids == eod_id) + 1)
        progress.part("tokens read", span[1] - span[0])
    num_tokens = token_bytes // dtype.itemsize
    if not bounds[-1].size or bounds[-1][-1] < num_tokens:  # the last document has no end
        bounds.append(np.array([num_tokens]))
    lengths = np.diff(np.concatenate(bounds))
    longest = int(lengths.max(initial=0))
    if longest > MAX_TOKENS:
        raise FormatError(
            f"{shard.url}: {longest:,} tokens without the id {eod_id}; is it the right one?"
        )
    return lengths.astype(np.int32)


def _put_index(
    name: str, expected: ShardEntry | None, index: _Rebuilt, storage: StorageConfig
) -> str:
    """Write a rebuilt `.idx`, and keep the broken one under another name; returns a line about it."""
    url = f"{strip_suffix(name)}.idx"
    if exists(url, storage):
        # What an earlier repair kept may be the only copy of the first `.idx`.
        kept_url = f"{url}.former"
        number = 1
        while exists(kept_url, storage):
            number += 1
            kept_url = f"{url}.former-{number}"
        move_or_copy(url, kept_url, storage)
    save_bytes(url, index.data, storage)
    text = f"{redact_urls(url)}: rebuilt, {index.documents:,} documents"
    if expected is None:
        return text
    if index.shard == expected:
        return f"{text}; it agrees with the manifest"
    return f"{text}; it differs from the manifest"


def _put_manifest(
    name: str, manifest: Manifest, rebuilt: Mapping[int, _Rebuilt], storage: StorageConfig
) -> str:
    """Write the manifest with the entries of rebuilt shards; returns a line about it."""
    shards = list(manifest.shards)
    for number, index in rebuilt.items():
        if index.shard is not None:
            shards[number] = index.shard
    # A rebuilt shard has no modes; the others still have them.
    multimodal = manifest.multimodal and len(rebuilt) < len(shards)
    changed = replace(manifest.with_shards(shards), multimodal=multimodal)
    url = manifest_url(name)
    save_bytes(url, changed.without_ends().to_json(), storage)
    return f"{redact_urls(url)}: describes the new .idx files now"
