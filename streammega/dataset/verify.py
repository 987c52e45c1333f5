"""Is a dataset what it should be?

Structure, sizes, checksums, the range of ids, and an end at every document.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.checksums import CHECK_BYTES, HashingWriter
from streammega.dataset.find import find_pairs
from streammega.dataset.idx import (
    IndexArrays,
    check_end,
    check_index,
    parse_index,
)
from streammega.dataset.manifest import MANIFEST, Manifest, Shard, read_manifest
from streammega.dataset.node_cache import default_cache_dir, local_view
from streammega.dataset.shards import SUFFIXES, named, split_name
from streammega.dataset.token_file import open_tokens
from streammega.errors import FormatError, MissingShardsError, ObjectNotFoundError
from streammega.errors.redaction import redact_urls
from streammega.kernels.check import id_range, wrong_ends
from streammega.kernels.parallel import num_threads
from streammega.storage import ObjectInfo, Store, join_url, open_store, parent_url
from streammega.storage.backends.local import LocalStore

READ_BYTES = 1 << 20
"""Looked at together: it stays in the processor's cache between its reading, its checksum and its
tokens.
"""
REMOTE_BYTES = 8 << 20
Progress = Callable[[int], None]


@dataclass(kw_only=True)
class VerifyReport:
    """What was looked at, and every problem found, each with its place."""

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
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_text(self) -> str:
        """For a terminal."""
        lines = [f"  {problem}" for problem in self.problems] + [
            f"  note: {note}" for note in self.notes
        ]
        state = f"{len(self.problems)} problems" if self.problems else "sound"
        ids = f", ids {self.lowest_id} to {self.highest_id}" if self.highest_id is not None else ""
        sums = "with checksums" if self.checksums else "no checksums known"
        speed = self.checked_bytes / 1e6 / max(self.seconds, 1e-9)
        lines.append(
            f"{self.name}: {state}; {self.shards} shards, {self.documents:,} documents, {self.tokens:,} tokens{ids}, {sums}; "
            f"{self.checked_bytes / 1e6:,.1f} MB at {speed:,.0f} MB/s"
        )
        return "\n".join(lines)


def verify(
    name: str, storage: StorageConfig | None = None, *, vocab_size: int | None = None, eod_id: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:  # fmt: skip
    """Check a dataset: a prefix, a manifest, a folder or a glob. Every byte is read once, by all
    cores.

    Args:
        vocab_size: ids must be below it; default: what the manifest says.
        eod_id: every document must end with it; default: what the manifest says.
        progress: called with the bytes just looked at.

    Raises ObjectNotFoundError when nothing is there, StorageError when it cannot be read; what is
    wrong with it is in the report.
    """
    storage = storage or StorageConfig()
    began = time.monotonic()
    report = VerifyReport(name=redact_urls(name))
    names, manifest = shards_of(name, storage, report)
    vocab_size = vocab_size if vocab_size is not None else manifest.vocab_size if manifest else None
    eod_id = eod_id if eod_id is not None else manifest.eod_id if manifest else None
    report.checksums = manifest is not None
    if eod_id is None:
        report.notes.append(
            "the ends of documents are not checked: name the id that ends them by --eod-id"
        )
    for number, shard in enumerate(names):
        expected = manifest.shards[number] if manifest else None
        try:
            _check_shard(
                shard, expected, manifest, storage, report, vocab_size, eod_id, progress or _none
            )
        except (FormatError, ObjectNotFoundError) as error:
            if isinstance(error, ObjectNotFoundError) and manifest is None and len(names) == 1:
                raise  # there is nothing to check
            report.problems.append(str(error))
        report.shards += 1
    found = (report.documents, report.sequences, report.tokens)
    if (
        manifest
        and not report.problems
        and found != (manifest.documents, manifest.sequences, manifest.tokens)
    ):
        report.problems.append(
            f"{report.name}: the manifest says {manifest.documents} documents, {manifest.sequences} sequences and "
            f"{manifest.tokens} tokens in all, there are {found[0]}, {found[1]} and {found[2]}; copy the manifest again, or "
            f"convert again"
        )
    report.seconds = time.monotonic() - began
    return report


def shards_of(
    name: str, storage: StorageConfig, report: VerifyReport
) -> tuple[list[str], Manifest | None]:
    """The shards of a dataset, and its manifest if there is one."""
    url = name if name.endswith(".json") else split_name(name)[0] + MANIFEST
    try:
        manifest = read_manifest(url, storage)
    except ObjectNotFoundError:
        if name.endswith(".json"):
            raise
        try:
            return find_pairs(name, storage), None
        except MissingShardsError as error:
            report.problems.append(str(error))
            return [], None
    except FormatError as error:
        report.problems.append(str(error))
        return find_pairs(split_name(name)[0], storage), None
    folder = parent_url(url) if "/" in url else "."
    urls = []
    for shard in manifest.shards:
        file = named(shard.name, manifest.kind)  # type: ignore[arg-type]
        urls.append(join_url(folder, file))
    return urls, manifest


def _check_shard(
    name: str, expected: Shard | None, manifest: Manifest | None, storage: StorageConfig, report: VerifyReport,
    vocab_size: int | None, eod_id: int | None, progress: Progress,
) -> None:  # fmt: skip
    prefix, kind = split_name(name)
    store, key = open_store(prefix + SUFFIXES[kind], storage)
    stored = store.info(key)
    entry = expected
    if expected is not None and stored.size != expected.bytes:
        report.problems.append(
            f"{store.url(key)}: has {stored.size:,} bytes, the manifest says {expected.bytes:,}; copy it again"
        )
        expected = None
    try:
        found = read_index(prefix, expected, storage, report)
        _compare(found, entry, manifest, f"{prefix}.idx", report)
        view, view_key = open_tokens(name, storage)
        size = view.info(view_key).size
        end = check_index(found, size, f"{prefix}.idx", store.url(key))
        index: IndexArrays | None = found
    except (FormatError, ObjectNotFoundError) as error:
        report.problems.append(str(error))
        index = None
    else:
        _note_end(end, size, f"{prefix}.idx", store.url(key), report)
    look = (
        _Tokens(
            index, vocab_size, eod_id, report, store.url(key), progress if kind == "bin" else _none
        )
        if index
        else None
    )
    own = look if kind == "bin" else None
    _check_bytes(
        store,
        stored,
        expected.checksums if expected else None,
        report,
        _none if own else progress,
        own,
    )
    report.checked_bytes += stored.size
    if index is None or look is None:
        return
    if kind != "bin":
        with ThreadPoolExecutor(num_threads()) as pool:
            list(
                pool.map(
                    lambda at: _look(view, view_key, at, min(at + REMOTE_BYTES, size), look),
                    range(0, size, REMOTE_BYTES),
                )
            )
    covered = int(index.sequence_lengths.sum(dtype=np.int64)) * index.dtype.itemsize
    if covered < size:
        report.notes.append(f"{store.url(key)}: {size - covered:,} bytes belong to no sequence")
    report.documents += len(index.document_indices) - 1
    report.sequences += len(index.sequence_lengths)
    report.tokens += int(index.sequence_lengths.sum(dtype=np.int64))


def _compare(
    index: IndexArrays,
    expected: Shard | None,
    manifest: Manifest | None,
    name: str,
    report: VerifyReport,
) -> None:
    """Note what an `.idx` holds and the manifest says otherwise."""
    if manifest is None or expected is None:
        return
    modes = {True: "modes", False: "no modes"}
    counts = (
        len(index.document_indices) - 1,
        len(index.sequence_lengths),
        int(index.sequence_lengths.sum(dtype=np.int64)),
    )
    pairs = [
        (str(index.dtype), manifest.dtype, "tokens of {}"),
        (modes[index.sequence_modes is not None], modes[manifest.multimodal], "{}"),
        (counts[0], expected.documents, "{} documents"),
        (counts[1], expected.sequences, "{} sequences"),
        (counts[2], expected.tokens, "{} tokens"),
    ]
    for found, said, what in pairs:
        if found != said:
            report.problems.append(
                f"{redact_urls(name)}: has {what.format(found)}, the manifest says {what.format(said)}; copy both "
                f"again, or convert again"
            )


def _note_end(end: int, size: int, index: str, tokens: str, report: VerifyReport) -> None:
    try:
        check_end(end, size, index, tokens)
    except FormatError as error:
        report.problems.append(str(error))  # what the .idx speaks of is still looked at


def _none(size: int) -> None:
    pass


def read_index(
    prefix: str, expected: Shard | None, storage: StorageConfig, report: VerifyReport
) -> IndexArrays:
    """The arrays of a shard's `.idx`; that it is not the manifest's is noted.

    Raises FormatError, ObjectNotFoundError.
    """
    store, key = open_store(f"{prefix}.idx", storage)
    info = store.info(key)
    if isinstance(store, LocalStore):
        data = store.view(key, info.etag)
    else:
        data = local_view(store, info, default_cache_dir(), storage.part_bytes)
    if expected is not None:
        check = HashingWriter(None)
        check.write(data)
        if (check.size, check.checksums) != (expected.index_bytes, expected.index_checksums):
            report.problems.append(
                f"{store.url(key)}: is not the .idx that the manifest speaks of; --repair rebuilds it"
            )
    return parse_index(data, store.url(key))


class _Tokens:
    """Looks at tokens, wherever they come from, and notes what is wrong."""

    def __init__(
        self,
        index: IndexArrays,
        vocab_size: int | None,
        eod_id: int | None,
        report: VerifyReport,
        url: str,
        progress: Progress,
    ) -> None:
        self._report = report
        self._url = url
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._lock = threading.Lock()
        self.dtype = index.dtype.newbyteorder("<")
        self.progress = progress
        documents = index.document_indices
        lengths = index.sequence_lengths
        full = np.flatnonzero(documents[1:] > documents[:-1])
        last = documents[1:][full] - 1
        ends = index.sequence_offsets[last] // index.dtype.itemsize + lengths[last] - 1
        ends = ends[lengths[last] > 0]
        full = full[lengths[last] > 0]
        order = (
            np.argsort(ends, kind="stable")
            if len(ends) and (np.diff(ends) < 0).any()
            else slice(None)
        )
        self._ends, self._documents = ends[order].astype(np.int64), full[order]

    def look(self, data: NDArray[np.uint8], start: int) -> None:
        """At whole tokens, of which the first is at byte `start`."""
        ids = data.view(self.dtype)
        if not len(ids) or not np.issubdtype(self.dtype, np.integer):
            return
        low, high = id_range(ids)
        report = self._report
        with self._lock:
            report.lowest_id = (
                int(low) if report.lowest_id is None else min(report.lowest_id, int(low))
            )
            report.highest_id = (
                int(high) if report.highest_id is None else max(report.highest_id, int(high))
            )
        if low < 0 or (self._vocab_size is not None and high >= self._vocab_size):
            bad = np.flatnonzero(
                (ids < 0) | (ids.astype(np.int64) >= (self._vocab_size or np.iinfo(np.int64).max))
            )
            at = start // self.dtype.itemsize + int(bad[0])
            outside = (
                "below zero"
                if self._vocab_size is None
                else f"outside of the {self._vocab_size} ids"
            )
            report.problems.append(
                f"{self._url}: token {at} is {int(ids[bad[0]])}, {outside} ({len(bad)} such in bytes [{start}, "
                f"{start + data.nbytes})); was it made by another tokenizer, or damaged? copy it again, or convert again"
            )
        if self._eod_id is not None:
            first = start // self.dtype.itemsize
            span = slice(*np.searchsorted(self._ends, [first, first + len(ids)]))
            wrong, place = wrong_ends(ids, first, self._ends[span], self._eod_id)
            if wrong:
                document = int(self._documents[span][place])
                report.problems.append(
                    f"{self._url}: document {document} does not end with {self._eod_id} ({wrong} such in bytes "
                    f"[{start}, {start + data.nbytes})); was it cut, or is the .idx another's? "
                    f"copy both again, name another id by --eod-id, or let --repair rebuild the .idx"
                )
        self.progress(data.nbytes)


def _check_bytes(
    store: Store, stored: ObjectInfo, checksums: Sequence[str] | None, report: VerifyReport, progress: Progress,
    tokens: _Tokens | None,
) -> None:  # fmt: skip
    """Compare stored bytes with their checksums, and look at them as tokens; stretches of
    CHECK_BYTES by all cores.
    """

    def stretch(start: int) -> str | None:
        """What is wrong with the bytes from `start` on, if their checksum is."""
        hasher = xxhash.xxh3_128() if checksums else None
        stop = min(start + CHECK_BYTES, stored.size)
        for at, data in _pieces(store, stored, start, stop):
            if hasher is not None:
                hasher.update(data.data)
            if tokens is not None:
                tokens.look(
                    data[: data.nbytes // tokens.dtype.itemsize * tokens.dtype.itemsize], at
                )
            progress(data.nbytes)
        if (
            hasher is not None
            and checksums is not None
            and hasher.hexdigest() != checksums[start // CHECK_BYTES]
        ):
            where = f"{store.url(stored.key)}: bytes [{start}, {stop})"
            return f"{where} are damaged: their checksum is not the manifest's; copy them again"
        return None

    with ThreadPoolExecutor(num_threads()) as pool:
        report.problems += [
            problem for problem in pool.map(stretch, range(0, stored.size, CHECK_BYTES)) if problem
        ]


def _pieces(
    store: Store, stored: ObjectInfo, start: int, stop: int
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(byte, data) of a stretch: local files are read into one buffer, again and again."""
    if isinstance(store, LocalStore):
        buffer = np.empty(READ_BYTES, np.uint8)
        with open(stored.key, "rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                wanted = min(READ_BYTES, stop - start)
                got = 0
                while got < wanted:
                    more = file.readinto(buffer.data[got:wanted])
                    if not more:
                        raise FormatError(f"{stored.key}: became shorter while it was read")
                    got += more
                yield start, buffer[:got]
                start += got
        return
    for at in range(start, stop, REMOTE_BYTES):
        body = store.read_ranges(stored.key, [at], [min(at + REMOTE_BYTES, stop)], stored.etag)[0]
        yield at, np.frombuffer(body, np.uint8)


def _look(view: Store, key: str, start: int, stop: int, tokens: _Tokens) -> None:
    tokens.look(np.frombuffer(view.read_ranges(key, [start], [stop])[0], np.uint8), start)
