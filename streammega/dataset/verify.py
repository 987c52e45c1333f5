"""Check a dataset: structure, sizes, checksums, the range of ids, and the end of every document. All
cores read every byte once.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.checksums import CHECK_BYTES, checksums_of
from streammega.dataset.columns import (
    ColumnFile,
    StoredColumn,
    check_column_size,
    missing_column,
)
from streammega.dataset.idx import IndexArrays, check_bins, check_end, check_index, parse_index
from streammega.dataset.labels import TokenizerLabel
from streammega.dataset.manifest import (
    Manifest,
    Shard,
    columns_at,
    manifest_url,
    read_manifest,
    shard_names,
)
from streammega.dataset.names import SUFFIXES, split_name, strip_suffix, with_suffix
from streammega.dataset.opening import find_shards, place_of
from streammega.dataset.provenance import ENDING
from streammega.dataset.shard import map_index, token_view
from streammega.errors import (
    FormatError,
    MissingShardsError,
    ObjectNotFoundError,
    ShortReadError,
)
from streammega.errors.cached_property import cached_property
from streammega.errors.redaction import redact_urls
from streammega.errors.words import pluralize
from streammega.kernels import num_threads
from streammega.kernels.documents import id_range, wrong_ends
from streammega.storage import ObjectInfo, Store, open_store
from streammega.storage.backends.local import FileRange, copy_buffer, read_files
from streammega.storage.derived_stores import DerivedStore
from streammega.storage.etags import same_version
from streammega.storage.object_ops import read_if_exists
from streammega.storage.open import is_remote
from streammega.storage.progress import ProgressObserver
from streammega.storage.thread_pool import Pool


@dataclass(kw_only=True)
class VerifyReport:
    """What was checked, and every problem, each with its place."""

    name: str
    shards: int = 0
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    checked_bytes: int = 0
    seconds: float = 0.0
    checksums: bool = False
    lowest_id: int | None = None
    highest_id: int | None = None
    columns: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_ids(self, lowest: int, highest: int) -> None:
        """Widen the range of ids. Not for several threads at once."""
        if self.lowest_id is None or lowest < self.lowest_id:
            self.lowest_id = lowest
        if self.highest_id is None or highest > self.highest_id:
            self.highest_id = highest


REMOTE_BYTES = 8 << 20
"""Bytes of one request, or of tokens that are decompressed together. Each core has one at a time."""
Progress = Callable[[int], None]


class TokenChecks:
    """Checks the tokens of a shard, a part at a time and in any thread, and adds problems to the
    report.

    Args:
        index: of the shard; every sequence is within its tokens.
        url: of the tokens, for messages.
        vocab_size: ids must be below it; None: all ids are valid.
        eod_id: every document must end with it; None: ends are not checked.
        bin_tokens: tokens of a bin. A document that fills one may be a piece of a longer document,
            and need not end with eod_id. None: there are no bins.
        tokenizer: of the dataset, for messages; empty: it is not known.
    """

    def __init__(
        self,
        index: IndexArrays,
        url: str,
        report: VerifyReport,
        *,
        vocab_size: int | None,
        eod_id: int | None,
        bin_tokens: int | None = None,
        tokenizer: str = "",
    ) -> None:
        self._report = report
        self._url = url
        self._vocab_size = vocab_size
        self._made_with = f" of tokenizer {tokenizer}" if tokenizer else ""
        self._eod_id = eod_id
        self._lock = threading.Lock()
        self.dtype = index.dtype.newbyteorder("<")
        self._last_tokens, self._documents = _last_tokens(index, bin_tokens)

    def check(self, data: NDArray[np.uint8], start: int) -> None:
        """Check whole tokens. start: the byte of the first."""
        ids = data.view(self.dtype)
        if len(ids) == 0 or not np.issubdtype(self.dtype, np.integer):
            return
        first_token = start // self.dtype.itemsize
        place = f"bytes [{start}, {start + data.nbytes})"
        lowest, highest = id_range(ids)
        with self._lock:  # both ends of the range are compared and replaced
            self._report.add_ids(int(lowest), int(highest))
        too_high = self._vocab_size is not None and highest >= self._vocab_size
        if lowest < 0 or too_high:
            self._note_ids_outside(ids, first_token, place)
        if self._eod_id is not None:
            self._check_ends(ids, first_token, self._eod_id, place)

    def _note_ids_outside(self, ids: NDArray[np.integer], first_token: int, place: str) -> None:
        if self._vocab_size is None:
            outside = ids < 0
            what = "below zero"
        else:
            # int64: the vocabulary size may not fit into the stored dtype.
            outside = (ids < 0) | (ids.astype(np.int64) >= self._vocab_size)
            what = f"outside of the {self._vocab_size} ids{self._made_with}"
        rows = np.flatnonzero(outside)
        first_row = int(rows[0])
        self._report.problems.append(
            f"{self._url}: token {first_token + first_row} is {int(ids[first_row])}, {what} "
            f"({len(rows)} such in {place}); was it made by another tokenizer, or damaged? copy it "
            "again, or convert again"
        )

    def _check_ends(
        self, ids: NDArray[np.integer], first_token: int, eod_id: int, place: str
    ) -> None:
        bounds = np.searchsorted(self._last_tokens, [first_token, first_token + len(ids)])
        ends_here = slice(*bounds)
        wrong, first_wrong = wrong_ends(ids, first_token, self._last_tokens[ends_here], eod_id)
        if not wrong:
            return
        document = int(self._documents[ends_here][first_wrong])
        self._report.problems.append(
            f"{self._url}: document {document} does not end with {eod_id} ({wrong} such in "
            f"{place}); was it cut, or is the .idx another's? copy both again, name another id by "
            "--eod-id, or convert again"
        )


def check_bytes(
    store: Store,
    info: ObjectInfo,
    report: VerifyReport,
    *,
    checksums: Sequence[str] | None = None,
    tokens: TokenChecks | None = None,
    progress: Progress | None = None,
) -> None:
    """Read an object once, by all cores; compare it with its checksums, and check its tokens.

    `progress` is called with the number of bytes just read, by any thread.
    """

    def check_part(start: int) -> str | None:
        """Check the part from byte `start` on; a message if its checksum is wrong."""
        hasher = xxhash.xxh3_128()
        stop = min(start + part_bytes, info.size)
        for place, data in _pieces(store, info, start, stop):
            if checksums is not None:
                hasher.update(data.data)
            if tokens is not None:
                token_bytes = data.nbytes - data.nbytes % tokens.dtype.itemsize
                tokens.check(data[:token_bytes], place)
            if progress is not None:
                progress(data.nbytes)
        if checksums is None or hasher.hexdigest() == checksums[start // CHECK_BYTES]:
            return None
        return (
            f"{store.url(info.key)}: bytes [{start}, {stop}) are damaged: their checksum is not "
            "the manifest's; copy them again"
        )

    # Smaller parts keep all cores busy, but one thread computes each checksum.
    part_bytes = REMOTE_BYTES if checksums is None else CHECK_BYTES
    pool = Pool(num_threads(), "streammega-verify", idle_timeout=0.0)
    for problem in pool.map(check_part, range(0, info.size, part_bytes)):
        if problem is not None:
            report.problems.append(problem)


def _last_tokens(
    index: IndexArrays, bin_tokens: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(place of the last token of each document that has one, rising; the documents' numbers)."""
    bounds = index.document_indices
    documents = np.flatnonzero(bounds[1:] > bounds[:-1])
    last_sequences = bounds[1:][documents] - 1
    lengths = index.sequence_lengths[last_sequences]
    starts = index.sequence_offsets[last_sequences] // index.dtype.itemsize
    ends_with_token = lengths > 0
    if bin_tokens is not None:
        first_tokens = index.sequence_offsets[bounds[documents]] // index.dtype.itemsize
        ends_with_token &= starts + lengths - first_tokens < bin_tokens
    documents = documents[ends_with_token]
    last_tokens = (starts + lengths - 1)[ends_with_token]
    # A binary search needs rising places, and an .idx made by hand may have sequences in any order.
    # Sorting takes the same memory again: what writers make is sorted already.
    if (np.diff(last_tokens) < 0).any():
        by_place = np.argsort(last_tokens, kind="stable")
        last_tokens = last_tokens[by_place]
        documents = documents[by_place]
    return last_tokens.astype(np.int64), documents


def _pieces(
    store: Store, info: ObjectInfo, start: int, stop: int
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(byte, data) of a part, in order. Each piece is valid until the next one."""
    path = store.local_path(info.key)
    if path is None:
        for piece_start in range(start, stop, REMOTE_BYTES):
            span = (piece_start, min(piece_start + REMOTE_BYTES, stop))
            (body,) = store.read(info.key, [span], info.etag)
            yield piece_start, np.frombuffer(body, np.uint8)
        return
    # Not mapped: a disk that cannot read a mapped page ends the process (SIGBUS).
    for data in read_files([FileRange(path=path, start=start, stop=stop)], copy_buffer()):
        yield start, data
        start += len(data)


def verify(
    name: str,
    storage: StorageConfig | None = None,
    *,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    columns: bool = False,
    progress: ProgressObserver | None = None,
    known: Manifest | None = None,
) -> VerifyReport:
    """Check a dataset: a prefix, a manifest, a folder or a glob.

    Args:
        known: what it was when a blend was written, to be compared.
        vocab_size: ids must be below it; default: the manifest's.
        eod_id: every document must end with it; default: the manifest's.
        columns: whether the columns that the manifest lists are read too.
        progress: receives the number of all bytes, and of those just checked.

    Problems are in the report. Raises ObjectNotFoundError where there is no dataset, StorageError
    where it cannot be read.
    """
    storage = storage or StorageConfig()
    progress = progress or ProgressObserver()
    began = time.monotonic()
    report = VerifyReport(name=redact_urls(name))
    manifest = known
    if known is None:
        names, manifest = shards_of(name, storage, report)
    else:
        names = [with_suffix(shard.name, shard.kind) for shard in known.shards]
    report.checksums = manifest is not None and all(shard.checksums for shard in manifest.shards)
    if manifest is not None:
        vocab_size = manifest.vocab_size if vocab_size is None else vocab_size
        eod_id = manifest.eod_id if eod_id is None else eod_id
    if eod_id is None:
        report.notes.append(
            "the ends of documents were not checked: pass the id that ends them by --eod-id"
        )
    progress.begin("verifying", _stored_bytes(names, manifest, storage))
    for number, shard_name in enumerate(names):
        expected = manifest.shards[number] if manifest is not None else None
        try:
            check = ShardCheck(shard_name, expected, manifest, storage, report)
            check.check_all(vocab_size, eod_id, progress)
        except ObjectNotFoundError as error:
            if manifest is None and len(names) == 1 and not report.problems:
                raise  # there is nothing to check
            report.problems.append(str(error))
        except (FormatError, ShortReadError) as error:
            report.problems.append(str(error))
        report.shards += 1
    if manifest is not None and manifest.origins is not None:
        progress.begin("verifying origins", len(names), " files")
        for shard_name, digest in zip(names, manifest.origins, strict=True):
            try:
                _check_origins(shard_name, digest, storage)
            except FormatError as error:
                report.problems.append(str(error))
            progress.advance(1)
    # With a problem in a shard, the sums differ because of that.
    if manifest is not None and not report.problems:
        _compare_sums(manifest, report)
    if columns and manifest is not None:
        listed = manifest.columns if known else columns_at(manifest, manifest_url(name))
        _check_columns(listed, manifest, names, storage, report, progress)
    elif columns:
        report.notes.append(
            "no columns were checked: no manifest has this name; name each dataset by itself"
        )
    report.seconds = time.monotonic() - began
    return report


def _stored_bytes(
    names: list[str], manifest: Manifest | None, storage: StorageConfig
) -> int | None:
    """The bytes of all shards that are checked: as they are stored, and then of packed ones as
    tokens. None where each of many would take a request.
    """
    if manifest is not None:
        stored = sum(shard.bytes for shard in manifest.shards)
        if manifest.kind == "bin":
            return stored
        itemsize = manifest.token_dtype.itemsize
        return stored + sum(shard.tokens * itemsize for shard in manifest.shards)
    if len(names) > 1 and any(is_remote(name) for name in names):
        return None
    size = 0
    for name in names:
        with contextlib.suppress(ObjectNotFoundError, FormatError):  # its check will say so
            shard = StoredShard(name, storage)
            size += shard.info.size
            if shard.kind != "bin":
                size += shard.tokens()[1].size
    return size


def shards_of(
    name: str, storage: StorageConfig, report: VerifyReport
) -> tuple[list[str], Manifest | None]:
    """The shards of a dataset, and its manifest if there is one. A damaged manifest and missing
    shards are problems in the report.

    Raises ObjectNotFoundError, StorageError, and FormatError for a damaged manifest that was named
    itself.
    """
    url = manifest_url(name)
    if name == url:
        manifest = read_manifest(url, storage)
        return shard_names(manifest, url), manifest
    try:
        manifest = read_manifest(url, storage)
    except ObjectNotFoundError:
        try:
            return find_shards(name, storage), None
        except MissingShardsError as error:
            report.problems.append(str(error))
            return [], None
    except FormatError as error:
        report.problems.append(str(error))
        # A pair of the very name can be checked without it.
        return [with_suffix(*split_name(name))], None
    return shard_names(manifest, url), manifest


def _check_columns(
    columns: Sequence[StoredColumn],
    manifest: Manifest,
    shards: Sequence[str],
    storage: StorageConfig,
    report: VerifyReport,
    progress: ProgressObserver,
) -> None:
    """Read every object of columns, whose files have full names. shards: their full names."""
    token_bytes = sum(column.token_bytes for column in columns)
    progress.begin("verifying columns", manifest.tokens * token_bytes)
    for column in columns:
        report.columns.append(column.name)
        for file, shard, name in zip(column.files, manifest.shards, shards, strict=True):
            if file is None:
                continue  # of a folder, where other datasets have none
            is_in_place = manifest.seen_at == place_of(name, storage)
            try:
                _check_column_file(column, file, shard, storage, report, progress, is_in_place)
            except (ObjectNotFoundError, FormatError, ShortReadError) as error:
                report.problems.append(str(error))


def _check_column_file(
    column: StoredColumn,
    file: ColumnFile,
    shard: Shard,
    storage: StorageConfig,
    report: VerifyReport,
    progress: ProgressObserver,
    is_in_place: bool,
) -> None:
    """is_in_place: whether its ETag was seen where it is now.

    Raises ObjectNotFoundError, FormatError for an object that is not the one that was written.
    """
    store, key = open_store(file.name, storage)
    url = store.url(key)
    try:
        info = store.info(key)
    except ObjectNotFoundError:
        raise ObjectNotFoundError(missing_column(url, column.name)) from None
    check_column_size(url, info.size, shard.tokens, column)
    if file.etag and is_in_place and not same_version(info.etag, file.etag):
        report.problems.append(
            f"{url}: was replaced after the manifest was written; if it is right, write the manifest "
            "again ('streammega manifest', or write the column again)"
        )
    num_checksums = max(1, -(-info.size // CHECK_BYTES))
    if file.checksums and len(file.checksums) != num_checksums:
        raise FormatError(
            f"{url}: has {num_checksums} checksums of {CHECK_BYTES >> 20} MiB each, the manifest has "
            f"{len(file.checksums)}; copy the manifest again, or write the column again"
        )
    checksums = file.checksums or None
    check_bytes(store, info, report, checksums=checksums, progress=progress.advance)
    report.checked_bytes += info.size


def _check_origins(shard: str, expected: str, storage: StorageConfig) -> None:
    """Raise FormatError unless the file of provenance of a shard is as it was written."""
    url = strip_suffix(shard) + ENDING
    stored = read_if_exists(url, storage)
    if stored is None or xxhash.xxh3_128_hexdigest(stored) != expected:
        how = "is missing" if stored is None else "has another checksum than the manifest says"
        raise FormatError(f"{url}: {how}; convert again with --provenance")


class StoredShard:
    """The two objects of a shard, whatever they hold. Raises ObjectNotFoundError without tokens."""

    def __init__(self, name: str, storage: StorageConfig) -> None:
        self._storage = storage
        prefix, self.kind = split_name(name)
        self.store, key = open_store(prefix + SUFFIXES[self.kind], storage)
        self.info = self.store.info(key)
        self.url = self.store.url(key)
        self._index_store, self._index_key = open_store(f"{prefix}.idx", storage)
        self.index_url = self._index_store.url(self._index_key)

    @cached_property
    def index(self) -> memoryview:
        """All of its `.idx`. Raises ObjectNotFoundError, CacheError, StorageError."""
        try:
            info = self._index_store.info(self._index_key)
        except ObjectNotFoundError:
            raise ObjectNotFoundError(
                f"{self.index_url}: no such .idx, which {self.url} needs; was its conversion "
                "interrupted? convert again"
            ) from None
        return map_index(self._index_store, info, self._storage)

    def tokens(self) -> tuple[Store, ObjectInfo]:
        """The store that shows the tokens as one array, and its size. Raises FormatError, StorageError."""
        if self.kind == "bin":
            return self.store, self.info
        view = token_view(
            self.kind, self.store, self.info, lambda: parse_index(self.index, self.index_url)
        )
        shown = DerivedStore(self.store, self.info, view)
        return shown, shown.info(self.info.key)


class SoundIndex(NamedTuple):
    """An `.idx` that fits its tokens, and the store and size of the tokens as one array."""

    arrays: IndexArrays
    store: Store
    tokens: ObjectInfo


class ShardCheck:
    """Compares one shard with its `.idx` and its manifest, and adds all problems to a report.

    expected: what the manifest says of the shard; None: there is no manifest.
    """

    def __init__(
        self,
        name: str,
        expected: Shard | None,
        manifest: Manifest | None,
        storage: StorageConfig,
        report: VerifyReport,
    ) -> None:
        self._name = name
        self._storage = storage
        self._expected = expected
        self._manifest = manifest
        self._report = report
        self._bin_tokens = None if manifest is None else manifest.bin_tokens
        self._tokenizer = ""
        if manifest is not None and manifest.tokenizer:
            self._tokenizer = str(TokenizerLabel(*manifest.tokenizer_label))

    def check_all(
        self, vocab_size: int | None, eod_id: int | None, progress: ProgressObserver
    ) -> None:
        """Read and check every byte. Raises ObjectNotFoundError without tokens, FormatError."""
        shard = self._shard = StoredShard(self._name, self._storage)
        expected = self._expected
        checksums = None if expected is None else expected.checksums or None
        # With too few or too many bytes no checksum can be right. One problem is enough.
        if self._expected is not None and shard.info.size != self._expected.bytes:
            checksums = None
            self._report.problems.append(
                f"{shard.url}: has {shard.info.size:,} bytes, the manifest says "
                f"{self._expected.bytes:,}; copy it again"
            )
        if self._is_replaced(shard):
            self._report.problems.append(
                f"{shard.url}: was replaced after the manifest was written; if it is right, write "
                "the manifest again ('streammega manifest', or convert again)"
            )
        index = self._check_index()
        tokens = None
        if index is not None:
            tokens = TokenChecks(
                index.arrays,
                shard.url,
                self._report,
                vocab_size=vocab_size,
                eod_id=eod_id,
                bin_tokens=self._bin_tokens,
                tokenizer=self._tokenizer,
            )
        check_bytes(
            shard.store,
            shard.info,
            self._report,
            checksums=checksums,
            # Shards of other kinds do not store tokens as they are.
            tokens=tokens if shard.kind == "bin" else None,
            progress=progress.advance,
        )
        self._report.checked_bytes += shard.info.size
        if index is None:
            return
        if shard.kind != "bin":
            check_bytes(
                index.store, index.tokens, self._report, tokens=tokens, progress=progress.advance
            )
        self._add_counts(index)

    def _is_replaced(self, shard: StoredShard) -> bool:
        """Whether it has another ETag than was seen in the same place."""
        expected = self._expected
        if expected is None or self._manifest is None or not expected.etag:
            return False
        is_in_place = self._manifest.seen_at == place_of(shard.url, self._storage)
        return is_in_place and not same_version(shard.info.etag, expected.etag)

    def _check_index(self) -> SoundIndex | None:
        """The `.idx`; None where it is missing or leads outside of the tokens, which is a problem in
        the report. Raises ObjectNotFoundError without tokens.
        """
        shard = self._shard
        index_url = shard.index_url
        problems = self._report.problems
        try:
            # Before its header is parsed: both may be problems.
            data = shard.index
            checksums = () if self._expected is None else self._expected.index_checksums
            if checksums and checksums_of(data) != list(checksums):
                problems.append(
                    f"{index_url}: has another checksum than the manifest says; copy it again"
                )
            arrays = parse_index(data, index_url)
            # Also where the size of the tokens is wrong: the .idx may be wrong too.
            if self._manifest is not None and self._expected is not None:
                for difference in _differences(arrays, self._expected, self._manifest):
                    problems.append(f"{index_url}: {difference}")
            store, tokens = shard.tokens()
            end = check_index(arrays, tokens.size, index_url, shard.url)
            if self._bin_tokens is not None:
                check_bins(arrays, self._bin_tokens, index_url)
        except (FormatError, ObjectNotFoundError) as error:
            problems.append(str(error))
            return None
        try:
            # Padding, and the token after the last bin, belong to no sequence.
            if self._bin_tokens is None:
                check_end(end, tokens.size, index_url, shard.url)
        except FormatError as error:
            problems.append(str(error))  # the tokens of its documents are still checked
        return SoundIndex(arrays=arrays, store=store, tokens=tokens)

    def _add_counts(self, index: SoundIndex) -> None:
        arrays = index.arrays
        itemsize = arrays.dtype.itemsize
        self._report.documents += arrays.num_documents
        self._report.sequences += arrays.num_sequences
        if self._bin_tokens is not None:
            self._report.tokens += index.tokens.size // itemsize
            return
        self._report.tokens += arrays.num_tokens
        unused = index.tokens.size - arrays.num_tokens * itemsize
        if unused > 0:  # this is allowed: an .idx may name parts of a .bin
            self._report.notes.append(f"{self._shard.url}: {unused:,} bytes belong to no sequence")


def _differences(arrays: IndexArrays, expected: Shard, manifest: Manifest) -> Iterator[str]:
    """What an `.idx` has and the manifest says otherwise."""
    modes = {True: "modes", False: "no modes"}
    has_modes = arrays.sequence_modes is not None
    pairs = [
        (f"tokens of {arrays.dtype}", f"tokens of {manifest.dtype}"),
        (modes[has_modes], modes[manifest.multimodal]),
        (pluralize(arrays.num_documents, "document"), pluralize(expected.documents, "document")),
        (pluralize(arrays.num_sequences, "sequence"), pluralize(expected.sequences, "sequence")),
    ]
    if manifest.pack is None:  # else the padding of bins counts too
        pairs.append((pluralize(arrays.num_tokens, "token"), pluralize(expected.tokens, "token")))
    for stored, expected_text in pairs:
        if stored != expected_text:
            yield f"has {stored}, the manifest says {expected_text}; copy both again, or convert again"


def _compare_sums(manifest: Manifest, report: VerifyReport) -> None:
    """Report a problem if the shards together have other counts than the manifest says."""
    sums = (report.documents, report.sequences, report.tokens)
    if sums == (manifest.documents, manifest.sequences, manifest.tokens):
        return
    report.problems.append(
        f"{report.name}: the manifest says {manifest.documents} documents, {manifest.sequences} "
        f"sequences and {manifest.tokens} tokens in all, there are {report.documents}, "
        f"{report.sequences} and {report.tokens}; copy the manifest again, or convert again"
    )
