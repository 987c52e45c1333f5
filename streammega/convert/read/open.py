"""What readers share: slices of inputs, what was skipped, opened and decompressed files, and their lines.

Compressed files are read from their start: all members (frames, streams) of them, an error where one
is cut short or something else follows it, and every byte that comes before the error. The libraries'
own file objects lose what they had read when they fail, and take what follows a member of .bz2 and
.xz for its end.
"""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import zstandard
from fsspec.utils import infer_compression

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, Tokens
from streammega.convert.options import ConvertOptions
from streammega.convert.read.inputs import Input
from streammega.convert.read.suffixes import split_query, suffix_of, without_queries
from streammega.errors import ConvertError, StreammegaError
from streammega.errors.redaction import redact, redact_urls
from streammega.errors.words import in_one_line, without_controls
from streammega.storage.open import file_system, open_file

BUFFER_BYTES = 1 << 20
READ_BY_FSSPEC = {".lz4": "lz4", ".snappy": "python-snappy"}
"""Suffixes, and the packages that they need."""
MOST_MESSAGES = 1000
"""Of what was passed over, in a report: a corpus may have millions of broken lines."""
MOST_KINDS = 100
"""Of members of archives: names may end in anything."""
Item: TypeAlias = "RawDocument | Tokens"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of an input: bytes of a jsonl, row groups of a parquet, documents of a pair; stop -1:
    all of it.
    """

    input: Input
    start: int = 0
    stop: int = -1
    stored_bytes: int | None = None
    """About how many bytes of the input it is, as they are stored; None: not known."""


@dataclass
class Skipped:
    """What was passed over: how many of each kind of fault, and the first of them with their
    places; and how many members of archives, by what they are.
    """

    counts: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    errors: int = 0
    """How many faults; other documents may be left out without being one."""
    members: dict[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    """Of the inputs, as they are stored: readers note them for the progress."""

    def note_read(self, size: int) -> None:
        """Count bytes that were read."""
        self.bytes_read += size

    def add(self, kind: str, message: str, count: int = 1) -> None:
        """Count a fault, of so many documents."""
        self.counts[kind] = self.counts.get(kind, 0) + count
        self.errors += count
        if len(self.messages) < MOST_MESSAGES:
            self.messages.append(without_controls(redact_urls(message)))

    def add_member(self, kind: str) -> None:
        """Count a member of an archive that is no document."""
        if kind not in self.members and len(self.members) == MOST_KINDS:
            kind = "others"
        self.members[kind] = self.members.get(kind, 0) + 1


@contextmanager
def open_stream(
    path: str,
    storage: StorageConfig,
    etag: str = "",
    note: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """The decompressed bytes of a file, by its suffix; plain ones can be sought in.

    etag: of the object that was found when the conversion began; "": whichever is there now. note:
    called with the number of stored bytes that were just read. Raises
    ConvertError if the bytes cannot be had, ObjectChangedError if the object is another one.
    """
    name, _ = split_query(path)
    suffix = suffix_of(name)
    with open_file(path, storage, _compression(name, suffix), etag, note) as file:
        if suffix in DECOMPRESSORS:
            yield PieceReader(decompressed(file, suffix))
        elif suffix == ".zip":
            member = _zip(file, name)
            yield PieceReader(iter(lambda: member.read1(BUFFER_BYTES), b""))
        else:
            yield file


def _compression(name: str, suffix: str) -> str | None:
    """As fsspec calls that of a few kinds; None: fsspec is to read the stored bytes.

    Raises ConvertError where a package is missing.
    """
    if suffix not in READ_BY_FSSPEC:
        return None
    compression: str | None = infer_compression(name)
    # fsspec knows only what is installed
    if compression is None:
        raise ConvertError(
            f"{name}: {suffix} needs the package {READ_BY_FSSPEC[suffix]}: pip install "
            f"{READ_BY_FSSPEC[suffix]}, or decompress it"
        )
    return compression


def _zip(file: Any, name: str) -> Any:
    archive = zipfile.ZipFile(file)
    names = [info.filename for info in archive.infolist() if not info.is_dir()]
    if len(names) != 1:
        raise ConvertError(
            f"{name}: holds {len(names)} files; of a .zip one is read: unpack it, or name it with "
            f"--exclude"
        )
    return archive.open(names[0])


@contextmanager
def open_plain(path: str, storage: StorageConfig, etag: str = "") -> Iterator[Any]:
    """The stored bytes of a file; `etag` as for `open_stream`."""
    with open_file(path, storage, etag=etag) as file:
        yield file


def read_head(path: str, storage: StorageConfig, size: int) -> bytes:
    """The first stored bytes of a file, and no more than these.

    Raises ConvertError if they cannot be read.
    """
    try:
        system, name = file_system(path, storage)
        return bytes(system.cat_file(name, start=0, end=size))[:size]
    except StreammegaError:
        raise
    except Exception as error:  # clients raise whatever they like
        told = without_queries(f"{type(error).__name__}: {error}")
        reason = redact(told, dict(storage.storage_options))
        shown, _ = split_query(path)
        raise ConvertError(f"{shown}: cannot be read ({reason})") from None


def fault(
    options: ConvertOptions, skipped: Skipped, kind: str, message: str, count: int = 1
) -> None:
    """Raise ConvertError, or note it where faults are passed over."""
    if options.on_error == "stop":
        raise ConvertError(message)
    skipped.add(kind, message, count)


def escapes_folder(name: str) -> bool:
    """Whether a name of an archive or index leads out of the folder that it belongs to."""
    return name.startswith("/") or ".." in name.split("/")


def too_large(where: str, options: ConvertOptions) -> str:
    """The message for a record that is larger than records may be."""
    return (
        f"{where}: the record is larger than max_record_bytes (--max-record-bytes), "
        f"{options.max_record_bytes:,}; raise it if there is memory, or skip such records by "
        f"--on-error skip"
    )


def unreadable(
    path: str, error: Exception, storage_options: dict[str, Any], where: str = ""
) -> str:
    """The message for a file that a library could not read. where: the place in it, after a blank."""
    if isinstance(error, PermissionError):
        return f"{path}: permission denied; make it readable, or leave it out by --exclude"
    message = without_queries(f"{type(error).__name__}: {error}")
    reason = redact(message, storage_options)
    return f"{in_one_line(path)}: cannot be read{where} ({reason}); is the file whole, and its suffix true?"


Reader = Callable[[Slice, ConvertOptions, StorageConfig, Skipped], Iterator[Item]]


CHUNK_BYTES = 16 << 10
"""Compressed bytes at a time: of what is damaged, as many before the damage may be lost."""
PIECE_BYTES = 1 << 20
"""Bytes that bzip2 and xz give at once, at most: a few of theirs may stand for very many."""
GZIP = 16 + zlib.MAX_WBITS
"""Tells zlib that there is a gzip header."""


def _gzip() -> Any:
    return zlib.decompressobj(GZIP)


def _zstd() -> Any:
    return zstandard.ZstdDecompressor().decompressobj()


DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": _gzip,
    ".tgz": _gzip,
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".lzma": lzma.LZMADecompressor,
    ".zst": _zstd,
}
"""By suffix, what decompresses one member."""


def decompressed(file: Any, suffix: str) -> Iterator[bytes]:
    """The bytes of a compressed file, a piece at a time.

    Raises EOFError where it is cut short, OSError where it is damaged.
    """
    data = file.read(CHUNK_BYTES)
    while data:
        decompressor = DECOMPRESSORS[suffix]()
        while not decompressor.eof:
            # zlib and zstd give all at once, the others are asked again
            needs_input = getattr(decompressor, "needs_input", True)
            if needs_input and not data:
                data = file.read(CHUNK_BYTES)
                if not data:
                    raise EOFError("it is cut short")
            limit = (PIECE_BYTES,) if hasattr(decompressor, "needs_input") else ()
            try:
                yield decompressor.decompress(data, *limit)
            except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
                raise OSError(str(error)) from None
            data = b""
        # zeros pad a file, to whole blocks for instance
        data = decompressor.unused_data.lstrip(b"\0")
        while not data and (data := file.read(CHUNK_BYTES)):
            data = data.lstrip(b"\0")


class PieceReader(io.RawIOBase):
    """A file whose bytes come in pieces.

    An error that a piece raises is raised by the next read, when all before it has been read.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._ready = memoryview(b"")
        self._error: Exception | None = None

    def readable(self) -> bool:
        """True."""
        return True

    def read(self, size: int | None = -1) -> bytes:
        """As many bytes as asked for; fewer at the end, and before an error."""
        left = sys.maxsize if size is None or size < 0 else size
        found: list[memoryview] = []
        while left and (self._ready or self._has_more()):
            piece = self._ready[:left]
            self._ready = self._ready[left:]
            left -= len(piece)
            found.append(piece)
        if not found and left and self._error is not None:
            raise self._error
        return b"".join(found)

    def readinto(self, buffer: Any) -> int:
        """As `read`."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _has_more(self) -> bool:
        while not self._ready and self._error is None:
            try:
                self._ready = memoryview(next(self._pieces))
            except StopIteration:
                return False
            except Exception as error:  # of whatever library
                self._error = error
        return bool(self._ready)


READ_BYTES = 1 << 20


class LongLine(NamedTuple):
    """A line that is longer than lines may be, and was skipped. Its bytes include the line feed."""

    size: int


def read_lines(begun: bytes, file: Any, max_bytes: int) -> Iterator[bytes | LongLine]:
    """The lines of a file of which `begun` was read already.

    A line of more than `max_bytes` is skipped, and only its size is given.
    """
    held = begun
    while True:
        end = held.rfind(b"\n") + 1
        yield from io.BytesIO(held[:end])
        held = held[end:]
        if len(held) > max_bytes:
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
