"""What a reader gets: a slice of an input as a `Source`, which opens it and counts its faults."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument
from streammega.convert.options import ConvertOptions
from streammega.convert.read.compression import open_stream
from streammega.dataset.columns import StoredColumn
from streammega.errors import ConvertError
from streammega.errors.redaction import redact, without_queries
from streammega.errors.words import in_one_line, without_controls
from streammega.storage.file_system import open_file

GLOB_CHARS = "*?["
"""What makes a pattern of a name, if nothing is called just that."""
MAX_MESSAGES = 1000
"""Messages of skipped records in a report: a corpus may have millions."""
MAX_KINDS = 100
"""Kinds of archive members in a report: names may end in anything."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input file (of mds and litdata, one folder). format: its name in `formats.py`. size: in
    bytes. etag: its version, which changes when a file of it does.

    path: for messages and records too; `query` of a URL, which may be a secret, is not in it.
    identity: the same for all names of what it holds. parts: files that belong to it. versions:
    of the files of a folder, by their names. manifest: that which lists it, as far as it was found;
    "": none. columns: of its tokens, with the objects of its shards. split: the one that a list of its
    writer says; "": there is none.
    """

    path: str
    format: str
    size: int
    etag: str
    query: str = field(default="", repr=False)
    identity: Any = field(default=None, repr=False)
    parts: tuple[str, ...] = field(default=(), repr=False)
    versions: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    manifest: str = ""
    columns: tuple[StoredColumn, ...] = field(default=(), repr=False, hash=False)
    split: str = ""

    @property
    def url(self) -> str:
        """Where it is read."""
        return self.path + self.query


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of an input: bytes of lines, row groups of a Parquet file, documents of a pair. stop
    -1: all of it. version: of a pair, that of its files when it was divided.
    """

    input: Input
    start: int = 0
    stop: int = -1
    version: str = ""
    stored_bytes: int | None = None
    """About how many stored bytes of the input it is; None: not known."""


@dataclass
class Skipped:
    """Counts of documents that are skipped or changed, by reason, and the first messages."""

    counts: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    errors: int = 0
    """How many faults; other documents may be left out without being one."""
    records: int = 0
    """All records that were read, with those that were skipped."""
    members: dict[str, int] = field(default_factory=dict)
    """Members of archives that are not documents, by what they are."""
    eod_in_texts: int = 0
    """End-of-document tokens that texts spell, as `<|endoftext|>`: each ends a document of its own."""
    bytes_read: int = 0
    """Stored bytes of the inputs that were read, for the progress."""

    def note_read(self, size: int) -> None:
        """Count bytes that were read."""
        self.bytes_read += size

    def add(self, kind: str, message: str, count: int = 1) -> None:
        """Count a fault, of so many documents."""
        self.leave_out(kind, count)
        self.errors += count
        if len(self.messages) < MAX_MESSAGES:
            self.messages.append(without_controls(redact(message)))

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count documents that are left out."""
        if count:
            self.counts[reason] = self.counts.get(reason, 0) + count

    def add_member(self, kind: str) -> None:
        """Count a member of an archive that is not a document."""
        if kind not in self.members and len(self.members) == MAX_KINDS:
            kind = "others"
        self.members[kind] = self.members.get(kind, 0) + 1


class Place(NamedTuple):
    """A part of an input; "": all of it, or of a slice."""

    path: str
    part: str = ""

    def __str__(self) -> str:
        return f"{self.path}, {self.part}" if self.part else self.path


@dataclass
class NativeReads:
    """What a worker process reads, for native libraries may end it. tell: called before each part.
    fatal: parts that have ended processes before, with the message.
    """

    tell: Callable[[Place], None] | None = None
    fatal: Mapping[Place, str] = field(default_factory=dict)


native_reads = NativeReads()
"""That of this process. Threads of the conversion itself tell nothing."""


@dataclass(frozen=True)
class Source:
    """A slice of an input for its reader: the bytes, the options, and the faults."""

    piece: Slice
    options: ConvertOptions
    storage: StorageConfig
    skipped: Skipped

    @property
    def path(self) -> str:
        """The input's name for messages."""
        return self.piece.input.path

    def begins(self, part: str = "", rows: int = 1) -> bool:
        """Say what of the input is read next. False: a fault of so many rows, since it ends the process."""
        place = Place(self.path, part)
        if place in native_reads.fatal:
            self.fault("unreadable row", native_reads.fatal[place], rows)
            return False
        if native_reads.tell is not None:
            native_reads.tell(place)
        return True

    def open(self) -> AbstractContextManager[Any]:
        """The decompressed bytes; the stored bytes that are read are counted."""
        item = self.piece.input
        return open_stream(item.url, self.storage, item.etag, self.skipped.note_read)

    def open_stored(self) -> AbstractContextManager[Any]:
        """The stored bytes, to seek in. They are not counted: `note_read` does that."""
        return open_file(self.piece.input.url, self.storage, etag=self.piece.input.etag)

    def fault(self, kind: str, message: str, count: int = 1) -> None:
        """Raise ConvertError, or count a fault of so many documents with `on_error="skip"`."""
        if self.options.on_error == "stop":
            raise ConvertError(message)
        self.skipped.records += count
        self.skipped.add(kind, message, count)


def too_large(where: str, options: ConvertOptions) -> str:
    """The message for a record that is larger than max_record_bytes."""
    return (
        f"{where}: the record is larger than max_record_bytes (--max-record-bytes), "
        f"{options.max_record_bytes:,}; raise it if there is memory, or skip such records by "
        f"--on-error skip"
    )


def unreadable(path: str, error: Exception, where: str = "") -> str:
    """The message for a library's error. where: the place in the file, after a blank."""
    if isinstance(error, PermissionError):
        return f"{path}: permission denied; make it readable, or leave it out by --exclude"
    reason = without_queries(f"{type(error).__name__}: {error}")
    return f"{in_one_line(path)}: cannot be read{where} ({reason}); check that the file is whole and its suffix right"


READ_BYTES = 1 << 20
"""Bytes of one read."""
COUNTED_BYTES = 4 << 20
"""Bytes in which lines are counted at a time."""


class LongLine(NamedTuple):
    """A line that was skipped because it is too long. Its bytes include the line feed."""

    size: int


def read_lines(begun: bytes, file: Any, max_bytes: int) -> Iterator[bytes | LongLine]:
    """The lines of a file, with their endings. begun: its beginning, which was read already.

    A line of more than `max_bytes` without its ending is skipped, as a LongLine, unless its end
    was read already. Then it is yielded, and `read_slice` refuses it.
    """
    held = begun
    while True:
        end = held.rfind(b"\n") + 1
        yield from io.BytesIO(held[:end])
        held = held[end:]
        # the last byte may be the carriage return of an ending
        if len(held) > max_bytes + 1:
            size, behind = skip_line(file, None)
            yield LongLine(len(held) + size)
            held = behind or b""
            continue
        # as much again: a line that is held is copied a few times, not often
        data = file.read(max(READ_BYTES, len(held)))
        if not data:
            break
        held += data
    if held:
        yield held


def skip_line(file: Any, max_bytes: int | None) -> tuple[int, bytes | None]:
    """(bytes up to the end of a line, what was read after it). None: the line does not end within
    the next `max_bytes` bytes, or within the file.
    """
    skipped = 0
    while max_bytes is None or skipped < max_bytes:
        data = file.read(READ_BYTES)
        if not data:
            break
        end = data.find(b"\n") + 1
        if end:
            return skipped + end, data[end:]
        skipped += len(data)
    return skipped, None


def with_line(document: RawDocument, storage: StorageConfig) -> RawDocument:
    """The document with the number of its line, where only its byte is known: the lines before it
    are counted.
    """
    if document.offset < 0:
        return document
    line = 1
    unread_bytes = document.offset
    try:
        with open_stream(document.path, storage) as file:
            while unread_bytes > 0:
                data = file.read(min(unread_bytes, COUNTED_BYTES))
                if not data:
                    break
                line += data.count(b"\n")
                unread_bytes -= len(data)
    except Exception:  # of whatever library: its byte tells the place as well
        return document
    return replace(document, line=line, offset=-1)
