"""Stores that show another form of stored objects: decompressed, the members of an archive, or several
objects as one.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streammega.errors.redaction import redact_urls
from streammega.kernels.addresses import check_room, copy_stretches
from streammega.storage.backends.local import FileRange
from streammega.storage.fork_lock import process_lock
from streammega.storage.http_errors import truncated
from streammega.storage.store import (
    Buffer,
    Bytes,
    ObjectInfo,
    Span,
    Store,
    WrapperStore,
)

Integers = NDArray[np.int64]


class View(Protocol):
    """How the bytes that are shown are made of those that are stored."""

    size: int

    def stored_range(self, start: int, stop: int) -> Span:
        """The stored bytes that hold the shown bytes [start, stop)."""

    def decode(self, stored: Sequence[Bytes], spans: Sequence[Span], outs: Sequence[Bytes]) -> None:
        """Fill each of `outs` with the shown bytes of its span.

        stored: the bytes of `stored_range(start, stop)` of each span.
        """


class LazyView:
    """A view that is made at the first read, since making it costs requests. Its size is known."""

    def __init__(self, size: int, make: Callable[[], View]) -> None:
        self.size = size
        self._make = make
        self._view_made: View | None = None
        self._lock = process_lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "make": self._make}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["size"], state["make"])  # type: ignore[misc]

    def stored_range(self, start: int, stop: int) -> Span:
        """As of the view. Raises FormatError, StorageError."""
        return self._view().stored_range(start, stop)

    def decode(self, stored: Sequence[Bytes], spans: Sequence[Span], outs: Sequence[Bytes]) -> None:
        """As of the view."""
        self._view().decode(stored, spans, outs)

    def _view(self) -> View:
        if self._view_made is None:
            # Many threads read the first bytes of a shard at once. One of them reads its table.
            with self._lock:
                if self._view_made is None:
                    self._view_made = self._make()
        return self._view_made


class DerivedStore(WrapperStore):
    """One object, as a view shows it. Keys are those of the object."""

    def __init__(self, store: Store, info: ObjectInfo, view: View) -> None:
        super().__init__(store)
        self._view = view
        self._info = info

    def info(self, key: str) -> ObjectInfo:
        """The decoded size, and the object's ETag."""
        return ObjectInfo(key=self._info.key, size=self._view.size, etag=self._info.etag)

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """Decoded bytes, of one request for each span."""
        return self._decoded(self.inner.fetch(key, self._stored(spans), self._etag(etag)), spans)

    def fetch_into(
        self, key: str, spans: Sequence[Span], outs: Iterable[Bytes], etag: str = ""
    ) -> None:
        """Decoded bytes, of one request for each span."""
        bodies = self.inner.fetch(key, self._stored(spans), self._etag(etag))
        self._decode(bodies, spans, list(outs))

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """Decoded bytes. The inner store reads the stored ones."""
        return self._decoded(self.inner.read(key, self._stored(spans), self._etag(etag)), spans)

    get = Store.get  # by `info` and `read` above
    read_start = Store.read_start

    def _etag(self, etag: str) -> str:
        # The view was made for this version and would decode another one wrongly.
        return etag or self._info.etag

    def _decoded(self, bodies: Sequence[Buffer], spans: Sequence[Span]) -> list[Buffer]:
        outs = [np.empty(stop - start, np.uint8) for start, stop in spans]
        self._decode(bodies, spans, outs)
        return [out.data for out in outs]

    def _decode(
        self, bodies: Sequence[Buffer], spans: Sequence[Span], outs: Sequence[Bytes]
    ) -> None:
        stored = [np.frombuffer(body, np.uint8) for body in bodies]
        self._view.decode(stored, spans, outs)

    def _stored(self, spans: Sequence[Span]) -> list[Span]:
        stored = []
        for start, stop in spans:
            if not 0 <= start <= stop <= self._view.size:
                url = self.url(self._info.key)
                raise truncated(url, f"bytes [{start}, {stop}) of {self._view.size}")
            # An empty span is in no frame and in no member.
            stored.append(self._view.stored_range(start, stop) if start < stop else (0, 0))
        return stored


def parts_between(begins: Integers, start: int, stop: int) -> tuple[int, int]:
    """Parts [first, last) that hold bytes [start, stop), without empty ones before them.

    begins: where each part begins, and where the last one ends.
    """
    # `searchsorted` lets go of the GIL and then waits for it, among threads that all decompress: that
    # took a quarter of the time of one. A memoryview gives integers of Python: with those of numpy
    # the search takes two and a half times as long.
    edges = begins.data
    first = bisect_right(edges, start) - 1
    return first, bisect_left(edges, stop, first)


class Members:
    """The payloads of an archive's members, one after the other.

    `shown_begins`, `stored_begins`: where each payload begins in both forms, int64 [members + 1].
    The last of `shown_begins` is the size.
    """

    def __init__(self, shown_begins: Integers, stored_begins: Integers) -> None:
        self._shown = shown_begins
        self._stored = stored_begins
        self.size = int(shown_begins[-1])

    def stored_range(self, start: int, stop: int) -> Span:
        """From the first payload byte to the last, with the headers between them."""
        first, last = parts_between(self._shown, start, stop)
        final = last - 1
        begin = self._stored[first] + start - self._shown[first]
        end = self._stored[final] + stop - self._shown[final]
        return int(begin), int(end)

    def decode(self, stored: Sequence[Bytes], spans: Sequence[Span], outs: Sequence[Bytes]) -> None:
        """Copy the payloads, without the GIL."""
        for body, (start, stop), out in zip(stored, spans, outs, strict=True):
            if start < stop:
                self._show(body, start, stop, out)

    def _show(self, stored: Bytes, start: int, stop: int, out: Bytes) -> None:
        begin, end = self.stored_range(start, stop)
        if len(stored) != end - begin:
            raise ValueError(
                f"{len(stored)} stored bytes do not hold [{start}, {stop}), which is stored in "
                f"[{begin}, {end})"
            )
        check_room(out, stop - start)
        first, last = parts_between(self._shown, start, stop)
        shown_begins = self._shown[first:last]
        # Of each member, the shown bytes [low, high) are wanted.
        low = np.maximum(shown_begins, start)
        high = np.minimum(self._shown[first + 1 : last + 1], stop)
        source = np.asarray(self._stored[first:last] + (low - shown_begins) - begin, np.int64)
        target = low - start
        number = np.zeros(last - first, np.int64)
        copy_stretches([stored], number, source, high - low, out, target)


class ConcatStore(Store):
    """Objects of several stores, one after the other, as one object to read."""

    def __init__(self, parts: Sequence[tuple[Store, ObjectInfo]], name: str) -> None:
        self.parts = parts
        self._name = redact_urls(name)
        self._ends = np.cumsum([info.size for _, info in parts])
        self._etag = _etag_of_all(parts)

    @property
    def is_local(self) -> bool:
        """Whether all objects are local."""
        return all(store.is_local for store, _ in self.parts)

    def url(self, key: str) -> str:
        """The dataset's name, without credentials."""
        return self._name

    def info(self, key: str) -> ObjectInfo:
        """The sum of the sizes, and a digest of the objects' versions."""
        return ObjectInfo(key=key, size=int(self._ends[-1]), etag=self._etag)

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """Copies from the objects that hold them, each compared with its own ETag."""
        outs = [np.empty(stop - start, np.uint8) for start, stop in spans]
        self.fetch_into(key, spans, outs, etag)
        return [out.data for out in outs]

    def fetch_into(
        self, key: str, spans: Sequence[Span], outs: Iterable[Bytes], etag: str = ""
    ) -> None:
        """From the objects that hold them, each compared with its own ETag."""
        # Grouped by object, so that each is read by one call.
        part_spans: dict[int, list[Span]] = {}
        part_outs: dict[int, list[Bytes]] = {}
        for (start, stop), out in zip(spans, outs, strict=True):
            for number, low, high, offset in self._pieces(start, stop):
                part_spans.setdefault(number, []).append((low, high))
                part_outs.setdefault(number, []).append(out[offset : offset + high - low])
            check_room(out, stop - start)
        for number, wanted in part_spans.items():
            store, info = self.parts[number]
            store.fetch_into(info.key, wanted, part_outs[number], info.etag)

    def read(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """As `fetch`, with the stores' retries. Bytes of one object are not copied."""
        bodies: list[Buffer] = []
        for start, stop in spans:
            pieces = []
            for (store, info), low, high in self.spans(int(start), int(stop)):
                pieces += store.read(info.key, [(low, high)], info.etag)
            bodies.append(pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces)))
        return bodies

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """The objects."""
        return [info for _, info in self.parts]

    def spans(self, start: int, stop: int) -> Iterator[tuple[tuple[Store, ObjectInfo], int, int]]:
        """(object, start and stop in it) of the bytes [start, stop), in order."""
        for number, low, high, _ in self._pieces(start, stop):
            yield self.parts[number], low, high

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(object, start and stop in it, offset in the span)."""
        size = self._ends[-1]
        if not 0 <= start <= stop <= size:
            raise truncated(self._name, f"bytes [{start}, {stop}) of {size}")
        begin = start
        number = bisect_right(self._ends, start)
        while begin < stop:
            part_begin = int(self._ends[number - 1]) if number > 0 else 0
            part_end = int(self._ends[number])
            end = min(stop, part_end)
            # Empty objects are left out.
            if end > begin:
                yield number, begin - part_begin, end - part_begin, begin - start
            begin = end
            number += 1


def _etag_of_all(parts: Sequence[tuple[Store, ObjectInfo]]) -> str:
    """A digest that changes when any of several objects does; empty where one has no ETag.

    It covers sizes, which say where each object begins, and URLs, since objects may change places.
    """
    digest = hashlib.blake2b(digest_size=16)
    for store, info in parts:
        if not info.etag:
            return ""
        identity = [store.url(info.key), info.etag, info.size]
        digest.update(json.dumps(identity).encode())
    return digest.hexdigest()


def file_ranges(store: Store, key: str, start: int, stop: int, etag: str) -> list[FileRange] | None:
    """The ranges of local files that hold bytes [start, stop) of an object, in order.

    None where some of them are not in local files, or stored in another form.
    """
    if not isinstance(store, ConcatStore):
        path = store.local_path(key)
        return None if path is None else [FileRange(path=path, start=start, stop=stop, etag=etag)]
    ranges = []
    for (part, info), low, high in store.spans(start, stop):
        path = part.local_path(info.key)
        if path is None:
            return None
        ranges.append(FileRange(path=path, start=low, stop=high, etag=info.etag))
    return ranges
