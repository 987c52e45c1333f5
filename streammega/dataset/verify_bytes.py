"""Every byte of a shard, looked at once by all cores: checksums, the range of ids, the ends of
documents.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.dataset.checksums import CHECK_BYTES
from streammega.dataset.idx import IndexArrays
from streammega.dataset.verify_report import VerifyReport
from streammega.errors import FormatError
from streammega.kernels.check import id_range, wrong_ends
from streammega.kernels.parallel import num_threads
from streammega.storage import ObjectInfo, Store
from streammega.storage.backends.local import LocalStore, local_error

READ_BYTES = 1 << 20
"""Looked at together: it stays in the processor's cache between its reading, its checksum and its
tokens.
"""
REMOTE_BYTES = 8 << 20
"""Of one request, or one stretch of decompressed tokens. Each core holds one of them."""
Progress = Callable[[int], None]


class TokenChecks:
    """Looks at the tokens of a shard, a stretch at a time and by any thread, and notes what is
    wrong in the report.

    Args:
        index: of the shard; every sequence lies within its tokens.
        url: of the tokens, for messages.
        vocab_size: ids must be below it; None: any are taken.
        eod_id: every document must end with it; None: ends are not looked at.
        bin_tokens: documents that fill a bin may be pieces of longer ones, which need not; None:
            there are no bins.
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
    ) -> None:
        self._report = report
        self._url = url
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._lock = threading.Lock()
        self.dtype = index.dtype.newbyteorder("<")
        self._last_tokens, self._documents = _last_tokens(index, bin_tokens)

    def look(self, data: NDArray[np.uint8], start: int) -> None:
        """At whole tokens, of which the first is at byte `start`."""
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
            # int64: a vocabulary may be larger than the stored dtype can say.
            outside = (ids < 0) | (ids.astype(np.int64) >= self._vocab_size)
            what = f"outside of the {self._vocab_size} ids"
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
            "--eod-id, or let --repair rebuild the .idx"
        )


def check_stored(
    store: Store,
    stored: ObjectInfo,
    report: VerifyReport,
    *,
    checksums: Sequence[str] | None,
    tokens: TokenChecks | None,
    progress: Progress,
) -> None:
    """Compare stored bytes with their checksums, and look at them as tokens, where they are.

    Stretches of CHECK_BYTES, by all cores. `progress` is called with the bytes just looked at, by
    any thread.
    """

    def check_stretch(start: int) -> str | None:
        """What is wrong with the bytes from `start` on, if their checksum is."""
        hasher = xxhash.xxh3_128()
        stop = min(start + CHECK_BYTES, stored.size)
        for place, data in _pieces(store, stored, start, stop):
            if checksums is not None:
                hasher.update(data.data)
            if tokens is not None:
                whole = data.nbytes - data.nbytes % tokens.dtype.itemsize
                tokens.look(data[:whole], place)
            progress(data.nbytes)
        if checksums is None or hasher.hexdigest() == checksums[start // CHECK_BYTES]:
            return None
        return (
            f"{store.url(stored.key)}: bytes [{start}, {stop}) are damaged: their checksum is not "
            "the manifest's; copy them again"
        )

    starts = range(0, stored.size, CHECK_BYTES)
    with ThreadPoolExecutor(num_threads()) as pool:
        for problem in pool.map(check_stretch, starts):
            if problem is not None:
                report.problems.append(problem)


def check_shown(store: Store, key: str, token_bytes: int, tokens: TokenChecks) -> None:
    """Look at tokens that are stored in another form, as a store shows them; by all cores."""

    def look_at(start: int) -> None:
        stop = min(start + REMOTE_BYTES, token_bytes)
        data = store.read_ranges(key, [start], [stop])[0]
        tokens.look(np.frombuffer(data, np.uint8), start)

    starts = range(0, token_bytes, REMOTE_BYTES)
    with ThreadPoolExecutor(num_threads()) as pool:
        for _ in pool.map(look_at, starts):
            pass  # errors of the threads are raised here


def _last_tokens(
    index: IndexArrays, bin_tokens: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(the last token of each document that ends with one, in tokens of the `.bin` and rising; the
    documents' numbers).
    """
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
    # They are searched, so they must rise; an .idx made by hand may name sequences in any order.
    # Sorting takes as much memory again, and what writers make needs none.
    if (np.diff(last_tokens) < 0).any():
        by_place = np.argsort(last_tokens, kind="stable")
        last_tokens = last_tokens[by_place]
        documents = documents[by_place]
    return last_tokens.astype(np.int64), documents


def _pieces(
    store: Store, stored: ObjectInfo, start: int, stop: int
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(byte, data) of a stretch, in order; data is good until the next one is asked for."""
    if isinstance(store, LocalStore):
        yield from _local_pieces(stored.key, start, stop)
        return
    for piece_start in range(start, stop, REMOTE_BYTES):
        piece_stop = min(piece_start + REMOTE_BYTES, stop)
        body = store.read_ranges(stored.key, [piece_start], [piece_stop], stored.etag)[0]
        yield piece_start, np.frombuffer(body, np.uint8)


def _local_pieces(path: str, start: int, stop: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Of a file, read into one buffer again and again. Raises FormatError, StorageError."""
    buffer = np.empty(READ_BYTES, np.uint8)
    try:
        # Not by its map: what a disk cannot read would end the process there (SIGBUS).
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                size = min(READ_BYTES, stop - start)
                _fill(file, buffer.data[:size], path)
                yield start, buffer[:size]
                start += size
    except OSError as error:
        raise local_error(path, error) from None


def _fill(file: FileIO, room: memoryview, path: str) -> None:
    """Read until there is no room left: a read may give less than was asked for."""
    filled = 0
    while filled < len(room):
        count = file.readinto(room[filled:])
        if not count:
            raise FormatError(
                f"{path}: became shorter while it was read; verify it when nothing writes there "
                "any more"
            )
        filled += count
