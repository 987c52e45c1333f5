"""Where the documents of a shard came from: a Parquet file in its folder, `NAME.origins`.

It has a row for each document, in their order, and row groups of ROW_GROUP rows. Columns: `path` of
the input file, `kind` of the place, `place`, and `id` ("" where a document has none). A document is
found by reading the footer and one row group.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.errors import AccessDeniedError, FormatError, ObjectNotFoundError, StorageError
from streammega.errors.extras import import_extra
from streammega.storage import Store, open_store
from streammega.storage.object_file import open_object
from streammega.storage.object_ops import exists

if TYPE_CHECKING:  # pyarrow takes 0.1 s to import: only what reads or writes provenance does
    import pyarrow as pa

ENDING = ".origins"
ROW_GROUP = 1 << 12
"""Documents of a row group, which is read as a whole to find one of them."""
CACHED_ROW_GROUPS = 64
"""Row groups of a file that are kept in memory."""
MAX_ROW_GROUP_BYTES = 1 << 28
"""The largest row group, decompressed. One that claims to be larger is damaged."""
MAX_ID = 1024
"""Characters of an id that are kept."""
ZSTD_LEVEL = 3

FILE = 0
LINE = 1
BYTE = 2
DOCUMENT = 3
"""Kinds of a place: FILE, the document is all of the file; LINE, the number of a line or row, from 1;
BYTE, where it begins, in files whose lines are not counted; DOCUMENT, its number in an .idx, from 0.
"""
SEPARATORS = {LINE: ":", BYTE: "@", DOCUMENT: "#"}
"""The character between a path and a place."""


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
        is_file = self.kind == FILE
        return self.path if is_file else f"{self.path}{SEPARATORS.get(self.kind, '')}{self.place}"


@dataclass(frozen=True)
class DocumentOrigins:
    """Where some documents came from, in their order: a row of `table` for each, with the fields of
    `DocumentOrigin` as columns.
    """

    table: pa.Table

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, row: int) -> DocumentOrigin:
        (fields,) = self.table.slice(row, 1).to_pylist()
        return DocumentOrigin(**fields)

    @property
    def num_ids(self) -> int:
        """Documents that have an id."""
        import pyarrow.compute as pc

        return int(np.count_nonzero(pc.binary_length(self.table["id"])))

    def take(self, rows: NDArray[Any]) -> DocumentOrigins:
        """Some of them, int [rows], in that order."""
        return DocumentOrigins(self.table.take(rows))

    def find(self, names: Collection[str], paths: Set[str]) -> Iterator[tuple[str, int]]:
        """(name, row) of each row whose id or location is one of the names. paths: those that a name
        may begin with; locations in other ones are not looked at.
        """
        columns = [self.table["id"]]
        if not paths.isdisjoint(self.table["path"].unique().to_pylist()):
            columns.append(self._locations())
        for column in columns:
            texts = enumerate(column.to_pylist())
            yield from [(text, row) for row, text in texts if text in names]

    def _locations(self) -> pa.ChunkedArray:
        """`DocumentOrigin.location` of each."""
        import pyarrow as pa
        import pyarrow.compute as pc

        path, kind, place, _ = self.table.columns
        separators = pa.array([SEPARATORS.get(number, "") for number in range(256)])
        number = pc.if_else(pc.equal(kind, FILE), "", place.cast(pa.string()))
        texts = [path.cast(pa.string()), separators.take(kind), number]
        return pc.binary_join_element_wise(*texts, "")


def origins_of(
    path: list[str], kind: NDArray[Any], place: NDArray[Any], id: list[str]
) -> DocumentOrigins:
    """Origins by their columns, of one length."""
    import pyarrow as pa

    # Neither a file's name nor an id in JSON needs to be UTF-8.
    texts = [[text.encode("utf-8", "backslashreplace") for text in column] for column in (path, id)]
    table = pa.table([texts[0], kind, place, texts[1]], names=_schema().names)
    return DocumentOrigins(table.cast(_schema()))


def collect_origins(origins: Iterable[DocumentOrigin]) -> DocumentOrigins:
    """The same origins as columns."""
    rows = list(origins)
    return origins_of(
        [row.path for row in rows],
        np.array([row.kind for row in rows], np.uint8),
        np.array([row.place for row in rows], np.int64),
        [row.id for row in rows],
    )


def concat_origins(parts: Iterable[DocumentOrigins]) -> DocumentOrigins:
    """The origins of all parts, in order."""
    import pyarrow as pa

    tables = [_schema().empty_table(), *(part.table for part in parts)]
    return DocumentOrigins(pa.concat_tables(tables).unify_dictionaries().combine_chunks())


class ProvenanceWriter:
    """Makes the file of a shard, whose documents are added in order. Its bytes do not depend on how
    many documents are added at once.
    """

    def __init__(self) -> None:
        import pyarrow.parquet as pq

        self._rest = concat_origins([])
        """Documents that fill no row group yet."""
        self._sink = io.BytesIO()
        self._writer = pq.ParquetWriter(
            self._sink,
            _stored_schema(),
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            use_dictionary=["path"],
            column_encoding={"place": "DELTA_BINARY_PACKED"},
            write_statistics=False,
            write_page_checksum=True,
            store_schema=False,
        )
        self.num_ids = 0
        """Documents so far that have an id."""

    def add(self, origins: DocumentOrigins) -> None:
        """Append documents."""
        self.num_ids += origins.num_ids
        rows = concat_origins([self._rest, origins]).table
        in_full = len(rows) - len(rows) % ROW_GROUP
        self._write(rows[:in_full])
        self._rest = DocumentOrigins(rows[in_full:])

    def finish(self) -> bytes:
        """The whole file."""
        self._write(self._rest.table)
        self._writer.close()
        return self._sink.getvalue()

    def _write(self, rows: pa.Table) -> None:
        if len(rows):
            # In one chunk: a page may end where a chunk does.
            stored = rows.combine_chunks().cast(_stored_schema())
            self._writer.write_table(stored, ROW_GROUP)


class ProvenanceReader:
    """The origins of a shard's documents. Row groups are read when they are needed.

    Raises FormatError for a file that is damaged or of another format; StorageError.
    """

    def __init__(self, store: Store, key: str) -> None:
        file = open_object(store, store.info(key))
        self.url = store.url(key)
        parquet = import_extra(
            "pyarrow.parquet", "convert", f"{self.url}: reading it needs pyarrow"
        )
        with self._reading("its footer"):
            # By this thread alone: a thread of pyarrow that still lets go of a Python object when the
            # interpreter ends aborts the process.
            self._file = parquet.ParquetFile(
                file, read_dictionary=["path"], pre_buffer=False, page_checksum_verification=True
            )
            metadata = self._file.metadata
            schema = metadata.schema.to_arrow_schema()
            if not schema.equals(_stored_schema()):
                raise ValueError(f"its columns are {schema.names}")
            rows = [
                metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)
            ]
            self._bounds = np.cumsum([0, *rows])
        self.documents = int(self._bounds[-1])
        self._row_group = functools.lru_cache(CACHED_ROW_GROUPS)(self._read_row_group)

    def __getitem__(self, document: int) -> DocumentOrigin:
        return self.between(document, document + 1)[0]

    def between(self, first: int, stop: int) -> DocumentOrigins:
        """Those of documents [first, stop)."""
        if not 0 <= first <= stop <= self.documents:
            raise FormatError(
                f"{self.url}: has the origins of {self.documents} documents, and not of [{first}, "
                f"{stop}); it belongs to another dataset: convert again"
            )
        low = int(np.searchsorted(self._bounds, first, side="right")) - 1
        high = int(np.searchsorted(self._bounds, stop))
        parts = concat_origins(self._row_group(number) for number in range(low, high))
        begin = first - int(self._bounds[low])
        return DocumentOrigins(parts.table.slice(begin, stop - first))

    def find(self, names: Collection[str]) -> Iterator[tuple[str, int]]:
        """(name, document) of each document whose id or location is one of the names, in one pass."""
        known = frozenset(names) - {""}
        heads = (name.rpartition(sign)[0] for name in known for sign in SEPARATORS.values())
        paths = known.union(heads)
        for number, first in enumerate(self._bounds[:-1].tolist()):
            for name, row in self._row_group(number).find(known, paths):
                yield name, first + row

    def _read_row_group(self, number: int) -> DocumentOrigins:
        with self._reading(f"row group {number}"):
            described = self._file.metadata.row_group(number)
            # Checked before memory of that size is allocated.
            if not 0 <= described.total_byte_size <= MAX_ROW_GROUP_BYTES:
                raise ValueError("it claims to be larger than any is")
            table = self._file.read_row_group(number, use_threads=False)
            table.validate(full=True)
            if len(table) != described.num_rows:
                raise ValueError(f"it has {len(table)} documents")
            return DocumentOrigins(table.cast(_schema()))

    @contextmanager
    def _reading(self, part: str) -> Iterator[None]:
        """Errors of pyarrow as a FormatError."""
        try:
            yield
        except StorageError:
            raise
        except (ValueError, OSError, LookupError, NotImplementedError) as error:
            raise FormatError(
                f"{self.url}: {part} cannot be read ({error}); copy it again, or convert again with "
                "--provenance"
            ) from None


def _schema() -> pa.Schema:
    """The columns of origins in memory."""
    import pyarrow as pa

    path = pa.dictionary(pa.int32(), pa.string())
    fields = {"path": path, "kind": pa.uint8(), "place": pa.int64(), "id": pa.large_string()}
    return pa.schema(fields)


def _stored_schema() -> pa.Schema:
    """The columns of the file."""
    import pyarrow as pa

    fields = {"path": pa.string(), "kind": pa.uint8(), "place": pa.int64(), "id": pa.string()}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields.items()])


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
