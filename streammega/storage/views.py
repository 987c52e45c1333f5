"""Stores that show another form of one stored object: decompressed frames, or the payloads of an
archive's members.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

from streammega.errors import FormatError
from streammega.errors.redaction import redact_urls
from streammega.kernels.plan import copy_bytes
from streammega.storage.backends.local import LocalStore
from streammega.storage.frames import FOOTER, parse_table, table_bytes
from streammega.storage.store import (
    Buffer,
    Bytes,
    ObjectInfo,
    ObjectWriter,
    Span,
    Store,
    address_of,
    check_room,
    ended_early,
)

Integers = NDArray[np.int64]
_NOTHING = np.empty(0, np.uint8)
_of_thread = threading.local()
TABLE_GUESS = 1 << 14
"""Bytes read at once from the end of a small zstd object, in which its table lies."""


class View(Protocol):
    """How bytes of the shown form lie in the stored one."""

    size: int

    def stored(self, start: int, stop: int) -> Span:
        """The stored bytes that hold the shown bytes [start, stop)."""

    def show(self, stored: Bytes, start: int, stop: int, out: Bytes) -> None:
        """Fill `out` with the shown bytes, from the stored ones of `stored(start, stop)`."""


class LateView:
    """A view that is made when bytes are first asked of it: its size is known, and making it costs
    requests.
    """

    def __init__(self, size: int, make: Callable[[], View]) -> None:
        self.size = size
        self._make = make
        self._made: View | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "make": self._make}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["size"], state["make"])  # type: ignore[misc]

    def stored(self, start: int, stop: int) -> Span:
        """Of the view, which is made now at the latest. Raises FormatError, StorageError."""
        return self._view().stored(start, stop)

    def show(self, stored: Bytes, start: int, stop: int, out: Bytes) -> None:
        """By the view."""
        self._view().show(stored, start, stop, out)

    def _view(self) -> View:
        if self._made is None:
            with self._lock:  # many threads ask for the first bytes of a shard at once
                if self._made is None:
                    self._made = self._make()
        return self._made


class DerivedStore:
    """One object, as its view shows it.

    Implements `storage.store.Store` for reading; keys are those of the object.
    """

    def __init__(self, store: Store, info: ObjectInfo, view: View) -> None:
        self.store = store
        self.view = view
        self._info = info

    @property
    def local(self) -> bool:
        """Whether the object itself is a local file."""
        return isinstance(self.store, LocalStore)

    def url(self, key: str) -> str:
        """That of the object itself."""
        return self.store.url(key)

    def info(self, key: str) -> ObjectInfo:
        """The shown size, and the object's ETag."""
        return ObjectInfo(key=self._info.key, size=self.view.size, etag=self._info.etag)

    def read_ranges(
        self, key: str, starts: Sequence[int], stops: Sequence[int], etag: str = ""
    ) -> list[Buffer]:
        """Shown bytes; the stored ones are read as the store reads ranges, of the object that was
        opened.
        """
        spans = [self._stored(int(a), int(b)) for a, b in zip(starts, stops, strict=True)]
        outs = [np.empty(int(b) - int(a), np.uint8) for a, b in zip(starts, stops, strict=True)]
        bodies = self.store.read_ranges(
            key, [a for a, _ in spans], [b for _, b in spans], etag or self._info.etag
        )
        for body, a, b, out in zip(bodies, starts, stops, outs, strict=True):
            self.view.show(np.frombuffer(body, np.uint8), int(a), int(b), out)
        return [out.data for out in outs]

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """Shown bytes; the stored ones are read at once, one request for each span."""
        stored = [self._stored(a, b) for a, b in spans]
        # the view was made for that object, and would show another one wrongly
        etag = etag or self._info.etag
        if isinstance(self.store, LocalStore):
            views = self.store.read_ranges(
                key, [a for a, _ in stored], [b for _, b in stored], etag
            )
            bodies = [np.frombuffer(view, np.uint8) for view in views]
        else:
            bodies = [np.empty(b - a, np.uint8) for a, b in stored]
            self.store.read_into(key, stored, bodies, etag or self._info.etag)
        for body, (a, b), out in zip(bodies, spans, outs, strict=True):
            self.view.show(body, a, b, out)

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """From the store."""
        return self.store.list(prefix, recursive)

    def open_writer(self, key: str) -> ObjectWriter:
        """From the store."""
        return self.store.open_writer(key)

    def delete(self, key: str) -> None:
        """From the store."""
        self.store.delete(key)

    def _stored(self, start: int, stop: int) -> Span:
        if not 0 <= start <= stop <= self.view.size:
            raise ended_early(
                self.url(self._info.key), f"bytes [{start}, {stop}) of {self.view.size}"
            )
        return self.view.stored(start, stop) if stop > start else (0, 0)


class Frames:
    """The decompressed bytes of a seekable zstd file.

    `compressed`, `decompressed`: bounds of frames, int64 [frames + 1].
    """

    def __init__(self, url: str, compressed: Integers, decompressed: Integers) -> None:
        self.url = url
        self._compressed = compressed
        self._decompressed = decompressed
        self.size = int(decompressed[-1])

    def stored(self, start: int, stop: int) -> Span:
        """Whole frames."""
        first, last = self._frames(start, stop)
        return int(self._compressed[first]), int(self._compressed[last])

    def _frames(self, start: int, stop: int) -> tuple[int, int]:
        first = int(np.searchsorted(self._decompressed, start, "right")) - 1
        return first, int(np.searchsorted(self._decompressed, stop, "left"))

    def show(self, stored: Bytes, start: int, stop: int, out: Bytes) -> None:
        """Decompress; frees the GIL. Raises FormatError that names a damaged frame."""
        if stop <= start:
            return
        first, last = self._frames(start, stop)
        bounds = self._compressed[first : last + 1]
        shown = self._decompressed[first : last + 1]
        segments = np.stack([bounds[:-1] - bounds[0], np.diff(bounds)], 1).astype("<u8").tobytes()
        try:  # one call: every return from it would wait for the GIL
            found = _decompressor().multi_decompress_to_buffer(
                zstandard.BufferWithSegments(stored.data, segments),
                decompressed_sizes=np.diff(shown).astype("<u8").tobytes(),
                threads=0,
            )
        except (
            zstandard.ZstdError,
            ValueError,
            AttributeError,
        ):  # or this zstandard is one without the call
            inside = (bounds - bounds[0]).tolist()
            frames = [stored[a:b] for a, b in zip(inside, inside[1:], strict=False)]
            # which says what is damaged
            found = [self._one(frame, number) for number, frame in enumerate(frames, first)]
        edges = shown.tolist()
        for number in range(last - first):
            low = edges[number]
            high = edges[number + 1]
            begin = max(low, start)
            end = min(high, stop)
            out[begin - start : end - start] = np.frombuffer(found[number], np.uint8)[
                begin - low : end - low
            ]

    def _one(self, frame: Bytes, number: int) -> bytes:
        size = int(self._decompressed[number + 1] - self._decompressed[number])
        try:
            shown: bytes = _decompressor().decompress(frame.data, max_output_size=size)
        except zstandard.ZstdError as error:
            raise self._damaged(number, str(error)) from None
        if len(shown) != size:
            raise self._damaged(number, f"{len(shown)} bytes instead of {size}")
        return shown

    def _damaged(self, number: int, reason: str) -> FormatError:
        low = int(self._compressed[number])
        high = int(self._compressed[number + 1])
        return FormatError(
            f"{self.url}: frame {number}, bytes [{low}, {high}), is damaged ({reason}); copy or convert it again"
        )


def _decompressor() -> Any:
    """That of this thread."""
    if not hasattr(_of_thread, "decompressor"):
        _of_thread.decompressor = zstandard.ZstdDecompressor()
    return _of_thread.decompressor


class Members:
    """The payloads of an archive's members end to end: shown[i] and at[i] are where payload i
    begins in both forms.

    Both int64 [members + 1]; the last of `shown` is the size.
    """

    def __init__(self, shown: Integers, at: Integers) -> None:
        self._shown = shown
        self._at = at
        self.size = int(shown[-1])

    def stored(self, start: int, stop: int) -> Span:
        """From the first payload byte to the last, with the headers between them."""
        first, last = self._members(start, stop)
        return int(self._at[first] + start - self._shown[first]), int(
            self._at[last - 1] + stop - self._shown[last - 1]
        )

    def _members(self, start: int, stop: int) -> tuple[int, int]:
        first = int(np.searchsorted(self._shown, start, "right")) - 1
        return first, int(np.searchsorted(self._shown, stop, "left"))

    def show(self, stored: Bytes, start: int, stop: int, out: Bytes) -> None:
        """Copy the payloads, without the GIL."""
        if stop <= start:
            return
        begin, end = self.stored(start, stop)
        if len(stored) != end - begin:
            raise ValueError(
                f"{len(stored)} stored bytes do not show [{start}, {stop}), which lies in [{begin}, {end})"
            )
        check_room(out, stop - start)
        first, last = self._members(start, stop)
        low = np.maximum(self._shown[first:last], start)
        high = np.minimum(self._shown[first + 1 : last + 1], stop)
        base = self._at[first] + start - self._shown[first]
        source = self._at[first:last] + (low - self._shown[first:last]) - base
        copy_bytes(_NOTHING, address_of(stored) + source, high - low, address_of(out) + low - start)


class ConcatStore:
    """Objects of several stores end to end, as one.

    Implements `storage.store.Store` for reading.
    """

    def __init__(self, parts: Sequence[tuple[Store, ObjectInfo]], name: str) -> None:
        self.parts = parts
        self._name = redact_urls(name)
        self._ends = np.cumsum([info.size for _, info in parts])
        self._etag = _etag_of_all(parts)

    def url(self, key: str) -> str:
        """The dataset's name, without credentials."""
        return self._name

    def info(self, key: str) -> ObjectInfo:
        """All sizes together, and a digest of which objects these are."""
        return ObjectInfo(key=key, size=int(self._ends[-1]), etag=self._etag)

    def read_ranges(
        self, key: str, starts: Sequence[int], stops: Sequence[int], etag: str = ""
    ) -> list[Buffer]:
        """From the objects that hold them, each compared with its own ETag; bytes of two objects
        are copied together.
        """
        found: list[Buffer] = []
        for start, stop in zip(starts, stops, strict=True):
            pieces = [
                self._read_part(number, low, high)
                for number, low, high, _ in self._pieces(int(start), int(stop))
            ]
            found.append(pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)))
        return found

    def _read_part(self, number: int, start: int, stop: int) -> Buffer:
        store, info = self.parts[number]
        return store.read_ranges(info.key, [start], [stop], info.etag)[0]

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """From the objects that hold them, each compared with its own ETag."""
        jobs: dict[int, tuple[list[Span], list[Bytes]]] = {}
        for (start, stop), out in zip(spans, outs, strict=True):
            for number, low, high, at in self._pieces(start, stop):
                own = jobs.setdefault(number, ([], []))
                own[0].append((low, high))
                own[1].append(out[at : at + high - low])
        for number, (own_spans, own_outs) in jobs.items():
            store, info = self.parts[number]
            store.read_into(info.key, own_spans, own_outs, info.etag)

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """The objects."""
        return [info for _, info in self.parts]

    def open_writer(self, key: str) -> ObjectWriter:
        """Not possible."""
        raise TypeError("several objects cannot be written as one")

    def delete(self, key: str) -> None:
        """Not possible."""
        raise TypeError("several objects cannot be removed as one")

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(object, start and stop in it, at which byte of what was asked)."""
        if not 0 <= start <= stop <= self._ends[-1]:
            raise ended_early(self._name, f"bytes [{start}, {stop}) of {self._ends[-1]}")
        at = start
        number = int(np.searchsorted(self._ends, start, "right"))
        while at < stop:
            first = int(self._ends[number - 1]) if number else 0
            end = min(stop, int(self._ends[number]))
            if end > at:
                yield number, at - first, end - first, at - start
            at = end
            number = number + 1


def _etag_of_all(parts: Sequence[tuple[Store, ObjectInfo]]) -> str:
    """What changes when any of several objects does; "" where one of them says nothing of its
    version.

    Sizes are part of it: they say where each object begins in the whole. So are URLs: two objects
    may change places.
    """
    digest = hashlib.blake2b(digest_size=16)
    for store, info in parts:
        if not info.etag:
            return ""
        digest.update(json.dumps([store.url(info.key), info.etag, info.size]).encode())
    return digest.hexdigest()


def read_frames(store: Store, info: ObjectInfo) -> Frames:
    """How the bytes of a seekable zstd object lie: one read of its end, seldom two.

    Raises FormatError, StorageError.
    """
    url = store.url(info.key)
    size = info.size
    # A frame of 32 KiB is 8 bytes of the table, and most are stored in more than 8 KiB.
    low = size - min(size, max(TABLE_GUESS, size // 1024))
    end = bytes(store.read_ranges(info.key, [low], [size], info.etag)[0])
    first = size - table_bytes(end[-FOOTER.size :], size, url)
    if first < low:
        end = bytes(store.read_ranges(info.key, [first], [low], info.etag)[0]) + end
        low = first
    return Frames(url, *parse_table(end[first - low :], size, url))


def is_local(store: Any) -> bool:
    """Whether reading a store costs no network."""
    if isinstance(store, ConcatStore):
        return all(is_local(part) for part, _ in store.parts)
    return isinstance(store, LocalStore) or (isinstance(store, DerivedStore) and store.local)
