"""Where the documents of a shard came from: a Parquet file in its folder, `NAME.origins`.

It has a row for each document, in their order, and row groups of ROW_GROUP rows. Columns: `path` of
the input file, `kind` of the place, `place`, and `id` ("" where a document has none). The key-value
metadata holds a checksum of each row group and of the footer. A document is found by reading the
footer and one row group.
"""

from __future__ import annotations

import functools
import io
import json
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.config.validate import parse_json
from streammega.errors import AccessDeniedError, FormatError, ObjectNotFoundError
from streammega.errors.cached_property import cached_property
from streammega.errors.extras import import_extra
from streammega.storage import Store, open_store
from streammega.storage.object_ops import exists

if TYPE_CHECKING:  # pyarrow takes 0.1 s to import: only what reads or writes provenance does
    import pyarrow as pa
    import pyarrow.parquet as pq

ENDING = ".origins"
VERSION = 1
ROW_GROUP = 1 << 12
"""Documents of a row group, which is read as a whole to find one of them."""
CACHED_ROW_GROUPS = 64
"""Row groups of a file that are kept in memory."""
MAX_ROW_GROUP_BYTES = 1 << 28
"""The largest row group, decompressed. One that claims to be larger is damaged."""
MAX_ID = 1024
"""Characters of an id that are kept."""
ZSTD_LEVEL = 3
METADATA_KEY = b"streammega.provenance"
MAGIC = b"PAR1"
TRAILER = struct.Struct("<I4s")
"""The last bytes of a Parquet file: bytes of the footer, and the magic."""
TAIL_BYTES = 1 << 16
"""What is read first: the whole footer of most files."""
_FOOTER_CHECKSUM = re.compile(rb'"footer": "([0-9a-f]{16})"')
_NO_CHECKSUM = b'"footer": "' + b"0" * 16 + b'"'
"""The footer's checksum is computed with this in its place."""

FILE = 0
LINE = 1
BYTE = 2
DOCUMENT = 3
"""Kinds of a place: FILE, the document is all of the file; LINE, the number of a line or row, from 1;
BYTE, where it begins, in files whose lines are not counted; DOCUMENT, its number in an .idx, from 0.
"""
SEPARATORS = {LINE: ":", BYTE: "@", DOCUMENT: "#"}
"""The character between a path and a place."""
MAX_DIGITS = 18
"""Digits of the number of a document or line: an int64 has no more."""


@dataclass(frozen=True, kw_only=True)
class DocumentOrigin:
    """Where one document came from. kind: what `place` is; id: its id or URL, "" without one."""

    path: str
    kind: int
    place: int
    id: str

    @property
    def location(self) -> str:
        """For people: `corpus.jsonl:12`, `corpus.jsonl@52428800`, `web#7`, or the file alone."""
        separator = SEPARATORS.get(self.kind)
        return self.path if separator is None else f"{self.path}{separator}{self.place}"


class OriginNames:
    """Ids and locations that are looked for among the origins of many documents."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)

    @cached_property
    def places(self) -> dict[str, dict[int, dict[int, str]]]:
        """{path: {kind of place: {place: name}}} of the names that may be locations. The place of a
        whole file is 0.
        """
        places: dict[str, dict[int, dict[int, str]]] = {}
        for name in self.names:
            places.setdefault(name, {})[FILE] = {0: name}
            for kind, separator in SEPARATORS.items():
                path, _, number = name.rpartition(separator)
                if is_number(number):
                    of_kind = places.setdefault(path, {}).setdefault(kind, {})
                    of_kind[int(number)] = name
        return places


def is_number(text: str) -> bool:
    """Whether a text is a whole number without leading zeros, of at most MAX_DIGITS digits."""
    has_no_zeros_before = text == "0" or not text.startswith("0")
    is_decimal = text.isascii() and text.isdecimal()
    return is_decimal and has_no_zeros_before and len(text) <= MAX_DIGITS


@dataclass(frozen=True, kw_only=True)
class DocumentOrigins:
    """Where some documents came from, in their order.

    paths: all paths, once each. path: int32 [documents], the index in `paths`. kind: uint8, place:
    int64 [documents], as in `DocumentOrigin`. ids: one for each document.
    """

    paths: tuple[str, ...]
    path: NDArray[np.int32]
    kind: NDArray[np.uint8]
    place: NDArray[np.int64]
    ids: list[str]

    def __len__(self) -> int:
        return len(self.place)

    def __getitem__(self, row: int) -> DocumentOrigin:
        return DocumentOrigin(
            path=self.paths[self.path[row]],
            kind=int(self.kind[row]),
            place=int(self.place[row]),
            id=self.ids[row],
        )

    def find(self, names: OriginNames) -> Iterator[tuple[str, int]]:
        """(name, row) of each row whose id or location is one of the names."""
        for row, text in enumerate(self.ids):
            if text and text in names.names:
                yield text, row
        for number, path in enumerate(self.paths):
            for kind, name_of_place in names.places.get(path, {}).items():
                rows = np.flatnonzero((self.path == number) & (self.kind == kind))
                # The place of a whole file does not matter.
                places = self.place[rows] if kind != FILE else np.zeros(len(rows), np.int64)
                for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                    if place in name_of_place:
                        yield name_of_place[place], row

    def take(self, rows: NDArray[Any]) -> DocumentOrigins:
        """Some of them, int [rows], in that order."""
        return DocumentOrigins(
            paths=self.paths,
            path=self.path[rows],
            kind=self.kind[rows],
            place=self.place[rows],
            ids=[self.ids[row] for row in rows.tolist()],
        )


def collect_origins(origins: Iterable[DocumentOrigin]) -> DocumentOrigins:
    """The same origins as columns."""
    rows = list(origins)
    number_of: dict[str, int] = {}
    path = [number_of.setdefault(row.path, len(number_of)) for row in rows]
    return DocumentOrigins(
        paths=tuple(number_of),
        path=np.array(path, np.int32),
        kind=np.array([row.kind for row in rows], np.uint8),
        place=np.array([row.place for row in rows], np.int64),
        ids=[row.id for row in rows],
    )


def concat_origins(parts: Sequence[DocumentOrigins]) -> DocumentOrigins:
    """The origins of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    number_of: dict[str, int] = {}
    path = [np.empty(0, np.int32)]
    kind = [np.empty(0, np.uint8)]
    place = [np.empty(0, np.int64)]
    ids: list[str] = []
    for part in parts:
        numbers = [number_of.setdefault(name, len(number_of)) for name in part.paths]
        path.append(np.array(numbers, np.int32)[part.path])
        kind.append(part.kind)
        place.append(part.place)
        ids += part.ids
    return DocumentOrigins(
        paths=tuple(number_of),
        path=np.concatenate(path),
        kind=np.concatenate(kind),
        place=np.concatenate(place),
        ids=ids,
    )


# --- writing --------------------------------------------------------------------------------------


class ProvenanceWriter:
    """Makes the file of a shard, whose documents are added in order. Its bytes do not depend on how
    many documents are added at once.
    """

    def __init__(self) -> None:
        import pyarrow.parquet as pq

        self._pending: list[DocumentOrigins] = []
        self._num_pending = 0
        self._sink = io.BytesIO()
        self._writer = pq.ParquetWriter(
            self._sink,
            _schema(),
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            use_dictionary=["path"],
            column_encoding={"place": "DELTA_BINARY_PACKED"},
            write_statistics=False,
            write_page_checksum=True,
            store_schema=False,
        )
        self._row_groups: list[tuple[int, int]] = []
        """(bytes, xxh3-64) of each row group so far."""
        self.num_ids = 0
        """Documents so far that have an id."""

    def add(self, origins: DocumentOrigins) -> None:
        """Append documents."""
        self._pending.append(origins)
        self._num_pending += len(origins)
        self.num_ids += len(origins.ids) - origins.ids.count("")
        if self._num_pending >= ROW_GROUP:
            self._write_row_groups(ROW_GROUP)

    def finish(self) -> bytes:
        """The whole file."""
        self._write_row_groups(1)
        end_of_rows = self._sink.tell()
        if not self._row_groups:  # the magic alone
            self._note_row_group(0)
        described = {"version": VERSION, "row_groups": self._row_groups, "footer": "0" * 16}
        self._writer.add_key_value_metadata({METADATA_KEY: json.dumps(described).encode()})
        self._writer.close()
        stored = self._sink.getvalue()
        footer = stored[end_of_rows : -TRAILER.size]
        checksum = xxhash.xxh3_64_hexdigest(footer).encode()
        signed = footer.replace(_NO_CHECKSUM, _NO_CHECKSUM.replace(b"0" * 16, checksum))
        return stored[:end_of_rows] + signed + stored[-TRAILER.size :]

    def _write_row_groups(self, min_rows: int) -> None:
        """Write the pending documents, a row group at a time, while there are `min_rows`."""
        if self._num_pending < min_rows:
            return
        pending = concat_origins(self._pending)
        start = 0
        while len(pending) - start >= min_rows:
            stop = min(start + ROW_GROUP, len(pending))
            # The first one begins with the magic.
            begin = self._sink.tell() if self._row_groups else 0
            self._writer.write_table(_to_table(pending.take(np.arange(start, stop))), ROW_GROUP)
            self._note_row_group(begin)
            start = stop
        rest = pending.take(np.arange(start, len(pending)))
        self._pending = [rest] if len(rest) else []
        self._num_pending = len(rest)

    def _note_row_group(self, begin: int) -> None:
        stored = self._sink.getbuffer()[begin:]
        self._row_groups.append((len(stored), xxhash.xxh3_64_intdigest(stored)))


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("path", pa.string(), nullable=False),
            pa.field("kind", pa.uint8(), nullable=False),
            pa.field("place", pa.int64(), nullable=False),
            pa.field("id", pa.string(), nullable=False),
        ]
    )


def _to_table(origins: DocumentOrigins) -> pa.Table:
    import pyarrow as pa

    paths = [origins.paths[number] for number in origins.path.tolist()]
    columns = [_strings(paths), pa.array(origins.kind), pa.array(origins.place)]
    return pa.Table.from_arrays([*columns, _strings(origins.ids)], schema=_schema())


def _strings(texts: list[str]) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # such as a file name that is not UTF-8
        escaped = [text.encode("utf-8", "backslashreplace").decode() for text in texts]
        return pa.array(escaped, pa.string())


# --- reading --------------------------------------------------------------------------------------


class ProvenanceReader:
    """The origins of a shard's documents. Row groups are read when they are needed.

    Raises FormatError for a file that is damaged or of another format; StorageError.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._info = store.info(key)
        self.url = store.url(key)
        import_extra("pyarrow.parquet", "convert", f"{self.url}: reading it needs pyarrow")
        self._footer_start, self._footer = self._read_footer()
        self._metadata, self._bounds, self._checksums = self._parse_footer()
        self.documents: int = self._metadata.num_rows
        self._read_row_group = functools.lru_cache(CACHED_ROW_GROUPS)(self._decode_row_group)

    def __getitem__(self, document: int) -> DocumentOrigin:
        if not 0 <= document < self.documents:
            raise FormatError(
                f"{self.url}: has the origins of {self.documents} documents, and no number {document}; "
                f"it belongs to another dataset: convert again"
            )
        number, row = divmod(document, ROW_GROUP)
        return self._read_row_group(number)[row]

    def between(self, first: int, stop: int) -> DocumentOrigins:
        """Those of documents [first, stop)."""
        if not 0 <= first <= stop <= self.documents:
            raise self._damaged(f"has {self.documents} documents, and not [{first}, {stop})")
        parts = [collect_origins([])]
        for number in range(first // ROW_GROUP, -(-stop // ROW_GROUP)):
            origins = self._read_row_group(number)
            begin = number * ROW_GROUP
            low = max(0, first - begin)
            high = min(len(origins), stop - begin)
            parts.append(origins.take(np.arange(low, high)))
        return concat_origins(parts)

    def find(self, names: OriginNames) -> Iterator[tuple[str, int]]:
        """(name, document) of each document whose id or location is one of the names, in one pass."""
        for number in range(len(self._checksums)):
            for name, row in self._read_row_group(number).find(names):
                yield name, number * ROW_GROUP + row

    def _read_footer(self) -> tuple[int, bytes]:
        """(where the footer begins, its bytes). They have their checksum."""
        size = self._info.size
        if size < len(MAGIC) + TRAILER.size:
            raise self._damaged("is cut short")
        tail_start = max(0, size - TAIL_BYTES)
        tail = self._read(tail_start, size)
        footer_bytes, magic = TRAILER.unpack(tail[-TRAILER.size :])
        start = size - TRAILER.size - footer_bytes
        if magic != MAGIC or start < len(MAGIC):
            raise self._damaged("does not end as a Parquet file does")
        footer = tail[max(0, start - tail_start) : -TRAILER.size]
        if start < tail_start:
            footer = self._read(start, size - TRAILER.size)
        checksums = _FOOTER_CHECKSUM.findall(footer)
        if len(checksums) != 1:
            raise self._damaged("its footer has no checksum")
        unsigned = _FOOTER_CHECKSUM.sub(_NO_CHECKSUM, footer)
        if xxhash.xxh3_64_hexdigest(unsigned).encode() != checksums[0]:
            raise self._damaged("its footer is not what was written")
        return start, footer

    def _parse_footer(self) -> tuple[pq.FileMetaData, list[int], list[int]]:
        """(metadata, the bounds of row groups in bytes, their checksums)."""
        import pyarrow.parquet as pq

        try:
            trailer = TRAILER.pack(len(self._footer), MAGIC)
            metadata = pq.read_metadata(io.BytesIO(MAGIC + self._footer + trailer))
            described = parse_json(metadata.metadata[METADATA_KEY])
            version = described["version"]
            sizes = [size for size, _ in described["row_groups"]]
            checksums = [checksum for _, checksum in described["row_groups"]]
            bounds = np.cumsum([0, *sizes], dtype=np.int64).tolist()
            has_schema = metadata.schema.to_arrow_schema().equals(_schema())
        except (ValueError, KeyError, TypeError, OSError, OverflowError) as error:
            raise self._damaged(f"its footer cannot be read ({error})") from None
        if version != VERSION:
            raise FormatError(
                f"{self.url}: has version {version}, and this library reads version {VERSION}; "
                "update the library"
            )
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        is_full = all(count == ROW_GROUP for count in rows[:-1])
        has_all = bounds[-1] == self._footer_start and len(checksums) == max(1, len(rows))
        if not (has_schema and is_full and has_all and sum(rows) == metadata.num_rows):
            raise self._damaged("its footer contradicts itself")
        return metadata, bounds, checksums[: len(rows)]

    def _decode_row_group(self, number: int) -> DocumentOrigins:
        import pyarrow.parquet as pq

        start, stop = self._bounds[number : number + 2]
        stored = self._read(start, stop)
        if xxhash.xxh3_64_intdigest(stored) != self._checksums[number]:
            raise self._damaged(f"row group {number} is not what was written")
        # Checked before memory of that size is allocated.
        if not 0 <= self._metadata.row_group(number).total_byte_size <= MAX_ROW_GROUP_BYTES:
            raise self._damaged(f"row group {number} claims to be larger than any is")
        try:
            # By this thread alone: a thread of pyarrow that still lets go of a Python object when the
            # interpreter ends aborts the process.
            file = pq.ParquetFile(
                _FilePart(stored, start),
                metadata=self._metadata,
                read_dictionary=["path"],
                pre_buffer=False,
            )
            table = file.read_row_group(number, use_threads=False).combine_chunks()
            # Forged ones may have nulls, or numbers of paths that are not there.
            table.validate(full=True)
            if any(column.null_count for column in table.columns):
                raise ValueError("it has nulls")
            path = table["path"].combine_chunks()
            origins = DocumentOrigins(
                paths=tuple(path.dictionary.to_pylist()),
                path=path.indices.to_numpy().astype(np.int32),
                kind=table["kind"].to_numpy(),
                place=table["place"].to_numpy(),
                ids=table["id"].to_pylist(),
            )
        except (ValueError, OSError, NotImplementedError) as error:  # those of pyarrow too
            raise self._damaged(f"row group {number} cannot be read ({error})") from None
        if len(origins) != self._metadata.row_group(number).num_rows:
            raise self._damaged(f"row group {number} has {len(origins)} documents")
        return origins

    def _read(self, start: int, stop: int) -> bytes:
        (body,) = self._store.read(self._key, [(start, stop)], self._info.etag)
        return bytes(body)

    def _damaged(self, what: str) -> FormatError:
        return FormatError(f"{self.url}: {what}; remove it, or convert again with --provenance")


class _FilePart(io.BytesIO):
    """A file that has only its bytes from `start` on."""

    def __init__(self, part: bytes, start: int) -> None:
        super().__init__(part)
        self._start = start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        shift = self._start if whence == io.SEEK_SET else 0
        return super().seek(offset - shift, whence) + self._start

    def tell(self) -> int:
        return super().tell() + self._start


def open_provenance(prefix: str, storage: StorageConfig) -> ProvenanceReader | None:
    """The provenance of a shard; None where it was not kept."""
    store, key = open_store(prefix + ENDING, storage)
    # Without the right to list, S3 answers 403 for what is not there.
    try:
        return ProvenanceReader(store, key)
    except (ObjectNotFoundError, AccessDeniedError):
        return None


def has_provenance(prefix: str, storage: StorageConfig) -> bool:
    """Whether there is a file of provenance of a shard; False without the right to look. Raises
    StorageError.
    """
    with suppress(AccessDeniedError):
        return exists(prefix + ENDING, storage)
    return False
