"""Stores that show another form of stored objects.

The decompressed frames of one, the payloads of an archive's members, or several objects as one.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streammega.errors.redaction import redact_urls
from streammega.kernels.plan import copy_bytes
from streammega.storage.backends.local import LocalStore
from streammega.storage.fork_lock import process_lock
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


class View(Protocol):
    """How bytes of the shown form lie in the stored one."""

    size: int

    def stored(self, start: int, stop: int) -> Span:
        """The stored bytes that hold the shown bytes [start, stop)."""

    def show(self, stored: Sequence[Bytes], spans: Sequence[Span], outs: Sequence[Bytes]) -> None:
        """Fill each of `outs` with the shown bytes of its span, from the stored ones of
        `stored(start, stop)`.
        """


class LateView:
    """A view that is made when bytes are first asked of it.

    Its size is known, and making it costs requests.
    """

    def __init__(self, size: int, make: Callable[[], View]) -> None:
        self.size = size
        self._make = make
        self._view_made: View | None = None
        self._lock = process_lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "make": self._make}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["size"], state["make"])  # type: ignore[misc]

    def stored(self, start: int, stop: int) -> Span:
        """Of the view, which is made now at the latest. Raises FormatError, StorageError."""
        return self._view().stored(start, stop)

    def show(self, stored: Sequence[Bytes], spans: Sequence[Span], outs: Sequence[Bytes]) -> None:
        """By the view."""
        self._view().show(stored, spans, outs)

    def _view(self) -> View:
        if self._view_made is None:
            # Many threads ask for the first bytes of a shard at once, and one is to read its table.
            with self._lock:
                if self._view_made is None:
                    self._view_made = self._make()
        return self._view_made


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

    def over(self, store: Store) -> DerivedStore:
        """The same view of the same object, read by another store."""
        return DerivedStore(store, self._info, self.view)

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
        spans = [(int(start), int(stop)) for start, stop in zip(starts, stops, strict=True)]
        stored_spans = [self._stored(start, stop) for start, stop in spans]
        bodies = self._read_stored(key, stored_spans, etag or self._info.etag)
        outs = [np.empty(stop - start, np.uint8) for start, stop in spans]
        self.view.show(bodies, spans, outs)
        return [out.data for out in outs]

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """Shown bytes; the stored ones are read at once, one request for each span."""
        stored_spans = [self._stored(start, stop) for start, stop in spans]
        # The view was made for that object, and would show another one wrongly.
        etag = etag or self._info.etag
        # What is local is mapped: its stored bytes are looked at where they lie.
        if isinstance(self.store, LocalStore):
            bodies = self._read_stored(key, stored_spans, etag)
        else:
            bodies = [np.empty(stop - start, np.uint8) for start, stop in stored_spans]
            self.store.read_into(key, stored_spans, bodies, etag)
        self.view.show(bodies, spans, outs)

    def _read_stored(self, key: str, spans: Sequence[Span], etag: str) -> list[Bytes]:
        starts = [start for start, _ in spans]
        stops = [stop for _, stop in spans]
        bodies = self.store.read_ranges(key, starts, stops, etag)
        return [np.frombuffer(body, np.uint8) for body in bodies]

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
            url = self.url(self._info.key)
            raise ended_early(url, f"bytes [{start}, {stop}) of {self.view.size}")
        # No bytes lie in no frame, and in no member.
        if start == stop:
            return 0, 0
        return self.view.stored(start, stop)


class Members:
    """The payloads of an archive's members, end to end.

    `shown_begins`, `stored_begins`: where each payload begins in both forms, int64 [members + 1];
    the last of `shown_begins` is the size.
    """

    def __init__(self, shown_begins: Integers, stored_begins: Integers) -> None:
        self._shown = shown_begins
        self._stored = stored_begins
        self.size = int(shown_begins[-1])

    def stored(self, start: int, stop: int) -> Span:
        """From the first payload byte to the last, with the headers between them."""
        first, last = self._members(start, stop)
        final = last - 1
        begin = self._stored[first] + start - self._shown[first]
        end = self._stored[final] + stop - self._shown[final]
        return int(begin), int(end)

    def _members(self, start: int, stop: int) -> tuple[int, int]:
        """Members [first, last) that hold the shown bytes, without empty ones before them."""
        # Without letting go of the GIL, and among integers of Python's, as `FrameBounds.holding`.
        begins = self._shown.data
        first = bisect_right(begins, start) - 1
        last = bisect_left(begins, stop, first)
        return first, last

    def show(self, stored: Sequence[Bytes], spans: Sequence[Span], outs: Sequence[Bytes]) -> None:
        """Copy the payloads, without the GIL."""
        for body, (start, stop), out in zip(stored, spans, outs, strict=True):
            if start < stop:
                self._show(body, start, stop, out)

    def _show(self, stored: Bytes, start: int, stop: int, out: Bytes) -> None:
        begin, end = self.stored(start, stop)
        if len(stored) != end - begin:
            raise ValueError(
                f"{len(stored)} stored bytes do not show [{start}, {stop}), which lies in "
                f"[{begin}, {end})"
            )
        check_room(out, stop - start)
        first, last = self._members(start, stop)
        shown_begins = self._shown[first:last]
        # Of each member, the shown bytes [low, high) are wanted.
        low = np.maximum(shown_begins, start)
        high = np.minimum(self._shown[first + 1 : last + 1], stop)
        source = self._stored[first:last] + (low - shown_begins) - begin
        target = low - start
        copy_bytes(_NOTHING, address_of(stored) + source, high - low, address_of(out) + target)


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
        bodies: list[Buffer] = []
        for start, stop in zip(starts, stops, strict=True):
            pieces = []
            for number, low, high, _ in self._pieces(int(start), int(stop)):
                pieces.append(self._read_part(number, low, high))
            if len(pieces) == 1:
                bodies.append(pieces[0])
            else:
                bodies.append(memoryview(b"".join(pieces)))
        return bodies

    def _read_part(self, number: int, start: int, stop: int) -> Buffer:
        store, info = self.parts[number]
        (body,) = store.read_ranges(info.key, [start], [stop], info.etag)
        return body

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """From the objects that hold them, each compared with its own ETag."""
        # Of each object what is wanted of it, so that it is asked once.
        part_spans: dict[int, list[Span]] = {}
        part_outs: dict[int, list[Bytes]] = {}
        for (start, stop), out in zip(spans, outs, strict=True):
            for number, low, high, offset in self._pieces(start, stop):
                part_spans.setdefault(number, []).append((low, high))
                part_outs.setdefault(number, []).append(out[offset : offset + high - low])
        for number, wanted in part_spans.items():
            store, info = self.parts[number]
            store.read_into(info.key, wanted, part_outs[number], info.etag)

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """The objects."""
        return [info for _, info in self.parts]

    def open_writer(self, key: str) -> ObjectWriter:
        """Not possible."""
        raise TypeError("several objects cannot be written as one")

    def delete(self, key: str) -> None:
        """Not possible."""
        raise TypeError("several objects cannot be removed as one")

    def spans(self, start: int, stop: int) -> Iterator[tuple[tuple[Store, ObjectInfo], int, int]]:
        """(object, start and stop in it) of the bytes [start, stop), in order."""
        for number, low, high, _ in self._pieces(start, stop):
            yield self.parts[number], low, high

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(object, start and stop in it, at which byte of what was asked)."""
        size = self._ends[-1]
        if not 0 <= start <= stop <= size:
            raise ended_early(self._name, f"bytes [{start}, {stop}) of {size}")
        begin = start
        number = bisect_right(self._ends, start)
        while begin < stop:
            part_begin = int(self._ends[number - 1]) if number > 0 else 0
            part_end = int(self._ends[number])
            end = min(stop, part_end)
            # Nothing is asked of an object that is empty.
            if end > begin:
                yield number, begin - part_begin, end - part_begin, begin - start
            begin = end
            number += 1


def _etag_of_all(parts: Sequence[tuple[Store, ObjectInfo]]) -> str:
    """What changes when any of several objects does.

    Empty where one of them says nothing of its version. Sizes are part of it: they say where each
    object begins in the whole. So are URLs: two objects may change places.
    """
    digest = hashlib.blake2b(digest_size=16)
    for store, info in parts:
        if not info.etag:
            return ""
        identity = [store.url(info.key), info.etag, info.size]
        digest.update(json.dumps(identity).encode())
    return digest.hexdigest()


def is_local(store: Any) -> bool:
    """Whether reading a store costs no network."""
    if isinstance(store, ConcatStore):
        return all(is_local(part) for part, _ in store.parts)
    if isinstance(store, DerivedStore):
        return store.local
    return isinstance(store, LocalStore)
