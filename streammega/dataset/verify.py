"""Is a dataset what it should be?

Structure, sizes, checksums, the range of ids, and an end at every document.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import xxhash

from streammega.config import StorageConfig
from streammega.dataset.checksums import ChecksummedWriter
from streammega.dataset.find import find_pairs
from streammega.dataset.growing.names import GrowingName, appended_shards, named_version
from streammega.dataset.idx import IndexArrays, check_bins, check_end, check_index, parse_index
from streammega.dataset.index_file import IndexFile
from streammega.dataset.manifest import (
    Manifest,
    Shard,
    manifest_url,
    read_manifest,
    shard_names,
)
from streammega.dataset.provenance import ENDING
from streammega.dataset.shards import SUFFIXES, KnownShard, split_name, strip_suffix
from streammega.dataset.token_file import open_tokens
from streammega.dataset.verify_bytes import TokenChecks, check_shown, check_stored
from streammega.dataset.verify_report import VerifyReport
from streammega.errors import FormatError, MissingShardsError, ObjectNotFoundError
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize
from streammega.storage import Store, open_store
from streammega.storage.object_ops import read_whole
from streammega.storage.open import is_remote
from streammega.storage.progress import ProgressObserver


def verify(
    name: str,
    storage: StorageConfig | None = None,
    *,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    progress: ProgressObserver | None = None,
) -> VerifyReport:
    """Check a dataset: a prefix, a manifest, a folder or a glob. Every byte is read once, by all
    cores.

    Args:
        vocab_size: ids must be below it; default: what the manifest says.
        eod_id: every document must end with it; default: what the manifest says.
        progress: is told how many bytes there are, and of the bytes just looked at.

    Raises ObjectNotFoundError when nothing is there, StorageError when it cannot be read; what is
    wrong with it is in the report.
    """
    storage = storage or StorageConfig()
    progress = progress or ProgressObserver()
    began = time.monotonic()
    report = VerifyReport(name=redact_urls(name))
    names, manifest = shards_of(name, storage, report)
    report.checksums = manifest is not None
    if manifest is not None:
        vocab_size = manifest.vocab_size if vocab_size is None else vocab_size
        eod_id = manifest.eod_id if eod_id is None else eod_id
    if eod_id is None:
        report.notes.append(
            "the ends of documents are not checked: name the id that ends them by --eod-id"
        )
    asked = _Asked(
        storage=storage,
        manifest=manifest,
        vocab_size=vocab_size,
        eod_id=eod_id,
        progress=progress,
    )
    progress.begin("verifying", _stored_bytes(names, manifest, storage))
    for number, shard_name in enumerate(names):
        expected = manifest.shards[number] if manifest is not None else None
        try:
            _check_shard(shard_name, expected, asked, report)
            if manifest is not None and manifest.origins is not None:
                _check_origins(shard_name, manifest.origins[number], storage)
        except ObjectNotFoundError as error:
            if manifest is None and len(names) == 1 and not report.problems:
                raise  # there is nothing to check, nor a manifest that is damaged
            report.problems.append(str(error))
        except FormatError as error:
            report.problems.append(str(error))
        report.shards += 1
    # Where a shard has a problem, the sums differ because of it.
    if manifest is not None and not report.problems:
        _compare_sums(manifest, report)
    report.seconds = time.monotonic() - began
    return report


def _stored_bytes(
    names: list[str], manifest: Manifest | None, storage: StorageConfig
) -> int | None:
    """Of shards together; None where that takes a request for each of many."""
    if manifest is not None:
        return sum(shard.bytes for shard in manifest.shards)
    if len(names) > 1 and any(is_remote(name) for name in names):
        return None
    size = 0
    for name in names:
        prefix, kind = split_name(name)
        store, key = open_store(prefix + SUFFIXES[kind], storage)
        with contextlib.suppress(ObjectNotFoundError):  # which is said when it is looked at
            size += store.info(key).size
    return size


def shards_of(
    name: str, storage: StorageConfig, report: VerifyReport
) -> tuple[list[str], Manifest | None]:
    """The shards of a dataset, and its manifest if there is one; a damaged one, or missing shards,
    are noted.

    Raises ObjectNotFoundError, StorageError, FormatError for a damaged one that was named itself.
    """
    appended = appended_shards(name, storage)
    if appended is not None:
        return [shard.name for shard in appended], _appended_part(name, len(appended), storage)
    name = named_version(name, storage)
    url = manifest_url(name)
    try:
        manifest = read_manifest(url, storage)
    except ObjectNotFoundError:
        if url == name:
            raise
        try:
            return find_pairs(name, storage), None
        except MissingShardsError as error:
            report.problems.append(str(error))
            return [], None
    except FormatError as error:
        report.problems.append(str(error))
        # What can be had without it is still looked at: a pair of the very name.
        return find_pairs(strip_suffix(name), storage), None
    return shard_names(manifest, url), manifest


def _appended_part(name: str, shards: int, storage: StorageConfig) -> Manifest:
    """What the manifest of `web@2..5` would be: that of version 5 without what version 2 has.
    shards: how many are left.
    """
    growing = GrowingName.parse(name)
    assert growing is not None
    assert growing.after is not None
    whole = read_manifest(named_version(f"{growing.prefix}@{growing.number}", storage), storage)
    before = read_manifest(named_version(f"{growing.prefix}@{growing.after}", storage), storage)
    first = len(whole.shards) - shards
    return replace(
        whole,
        shards=whole.shards[first:],
        origins=None if whole.origins is None else whole.origins[first:],
        documents=whole.documents - before.documents,
        sequences=whole.sequences - before.sequences,
        tokens=whole.tokens - before.tokens,
    )


def read_index(index: IndexFile, expected: Shard | None, report: VerifyReport) -> IndexArrays:
    """The arrays of an `.idx`, not checked; that it is not the manifest's is noted.

    Raises FormatError, ObjectNotFoundError.
    """
    # Before its header: of a damaged one, both faults are to be told.
    data = index.data()
    if expected is not None:
        stored = ChecksummedWriter(None)
        stored.write(data)
        found = (stored.size, stored.checksums)
        if found != (expected.index_bytes, expected.index_checksums):
            report.problems.append(
                f"{index.url}: is not the .idx that the manifest speaks of; --repair rebuilds it"
            )
    return parse_index(data, index.url)


def _check_origins(shard: str, expected: str, storage: StorageConfig) -> None:
    """Raise FormatError unless what tells where a shard's documents came from is as it was
    written.
    """
    url = strip_suffix(shard) + ENDING
    stored = read_whole(url, storage)
    if stored is None or xxhash.xxh3_128_hexdigest(stored) != expected:
        how = "is gone" if stored is None else "is not the one that the manifest speaks of"
        raise FormatError(f"{redact_urls(url)}: {how}; convert again with --origins")


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What all shards of a dataset are compared with."""

    storage: StorageConfig
    manifest: Manifest | None
    vocab_size: int | None
    eod_id: int | None
    progress: ProgressObserver

    @property
    def bin_tokens(self) -> int | None:
        """Tokens of the bins that documents are packed into, if they are."""
        return None if self.manifest is None else self.manifest.bin_tokens


@dataclass(frozen=True, kw_only=True)
class _SoundIndex:
    """An `.idx` that fits its tokens, and the store that shows them as one array."""

    arrays: IndexArrays
    view: Store
    view_key: str
    token_bytes: int


def _check_shard(name: str, expected: Shard | None, asked: _Asked, report: VerifyReport) -> None:
    """Note all that is wrong with a shard. `expected`: what the manifest says of it.

    Raises ObjectNotFoundError without its tokens, FormatError.
    """
    prefix, kind = split_name(name)
    store, key = open_store(prefix + SUFFIXES[kind], asked.storage)
    stored = store.info(key)
    url = store.url(key)
    # Of bytes that are too few or too many, no checksum could be right: that is said once.
    same_size = expected
    if expected is not None and stored.size != expected.bytes:
        report.problems.append(
            f"{url}: has {stored.size:,} bytes, the manifest says {expected.bytes:,}; copy it again"
        )
        same_size = None
    index = _open_index(name, expected, same_size, asked, report, url)
    tokens = None
    if index is not None:
        tokens = TokenChecks(
            index.arrays,
            url,
            report,
            vocab_size=asked.vocab_size,
            eod_id=asked.eod_id,
            bin_tokens=asked.bin_tokens,
        )
    check_stored(
        store,
        stored,
        report,
        checksums=same_size.checksums if same_size is not None else None,
        # The stored bytes of all other kinds are no tokens.
        tokens=tokens if kind == "bin" else None,
        progress=asked.progress.advance,
    )
    report.checked_bytes += stored.size
    if index is None or tokens is None:
        return
    if kind != "bin":
        check_shown(index.view, index.view_key, index.token_bytes, tokens)
    _add_counts(index, url, report, packed=asked.bin_tokens is not None)


def _open_index(
    name: str,
    expected: Shard | None,
    same_size: Shard | None,
    asked: _Asked,
    report: VerifyReport,
    url: str,
) -> _SoundIndex | None:
    """The `.idx` of a shard; None where it is lost or leads outside of the tokens, which is noted.

    `same_size`: `expected`, if the tokens are as many as the manifest says.
    """
    index = IndexFile(KnownShard(name=name), asked.storage)
    index_url = f"{index.prefix}.idx"
    try:
        arrays = read_index(index, same_size, report)
        # Also of tokens of another size: the .idx alone may be the wrong one.
        if asked.manifest is not None and expected is not None:
            for problem in _differences(arrays, expected, asked.manifest):
                report.problems.append(f"{redact_urls(index_url)}: {problem}")
        view, view_key = open_tokens(name, asked.storage)
        token_bytes = view.info(view_key).size
        end = check_index(arrays, token_bytes, index_url, url)
        if asked.bin_tokens is not None:
            check_bins(arrays, asked.bin_tokens, index_url)
    except (FormatError, ObjectNotFoundError) as error:
        report.problems.append(str(error))
        return None
    try:
        if asked.bin_tokens is None:
            check_end(end, token_bytes, index_url, url)
    except FormatError as error:
        report.problems.append(str(error))  # what the .idx speaks of is still looked at
    return _SoundIndex(arrays=arrays, view=view, view_key=view_key, token_bytes=token_bytes)


def _differences(arrays: IndexArrays, expected: Shard, manifest: Manifest) -> Iterator[str]:
    """What an `.idx` holds and the manifest says otherwise."""
    modes = {True: "modes", False: "no modes"}
    has_modes = arrays.sequence_modes is not None
    pairs = [
        (f"tokens of {arrays.dtype}", f"tokens of {manifest.dtype}"),
        (modes[has_modes], modes[manifest.multimodal]),
        (pluralize(arrays.num_documents, "document"), pluralize(expected.documents, "document")),
        (pluralize(arrays.num_sequences, "sequence"), pluralize(expected.sequences, "sequence")),
    ]
    if manifest.pack is None:  # else the tokens of bins count too, which are no sequence's
        pairs.append((pluralize(arrays.num_tokens, "token"), pluralize(expected.tokens, "token")))
    for found, said in pairs:
        if found != said:
            yield f"has {found}, the manifest says {said}; copy both again, or convert again"


def _add_counts(index: _SoundIndex, url: str, report: VerifyReport, *, packed: bool) -> None:
    arrays = index.arrays
    report.documents += arrays.num_documents
    report.sequences += arrays.num_sequences
    if packed:
        report.tokens += index.token_bytes // arrays.dtype.itemsize
        return
    covered = arrays.num_tokens * arrays.dtype.itemsize
    # A note, no problem: an .idx may name parts of a .bin.
    if covered < index.token_bytes:
        unused = index.token_bytes - covered
        report.notes.append(f"{url}: {unused:,} bytes belong to no sequence")
    report.tokens += arrays.num_tokens


def _compare_sums(manifest: Manifest, report: VerifyReport) -> None:
    """Note where the shards are together not what the manifest says of all of them."""
    found = (report.documents, report.sequences, report.tokens)
    if found == (manifest.documents, manifest.sequences, manifest.tokens):
        return
    report.problems.append(
        f"{report.name}: the manifest says {manifest.documents} documents, {manifest.sequences} "
        f"sequences and {manifest.tokens} tokens in all, there are {report.documents}, "
        f"{report.sequences} and {report.tokens}; copy the manifest again, or convert again"
    )
