"""Compressions of files: by suffix, how each begins and what decompresses it.

Compressed files are read to the end of all their members. A file that is cut short, or is followed
by something else, gives every byte before that and then an error; the libraries' own file objects
lose what they had read, or take what follows a member of .bz2 and .xz for its end.
"""

from __future__ import annotations

import bz2
import lzma
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import zstandard
from fsspec.utils import infer_compression

from streammega.config import StorageConfig
from streammega.errors import ConvertError
from streammega.errors.redaction import split_query
from streammega.storage.file_system import open_file
from streammega.storage.open import is_hidden_member

CHUNK_BYTES = 16 << 10
"""Compressed bytes at a time: of what is damaged, as many before the damage may be lost."""
ZSTD_CHUNK_BYTES = 2 << 10
"""The same for zstd, which gives all of a chunk at once: up to 64 MiB of this one. A larger chunk would
be a tenth to a third faster; tokenizing takes far longer.
"""
PIECE_BYTES = 1 << 20
"""Bytes that bzip2 and xz give at once, at most: a few compressed ones may become very many."""
BUFFER_BYTES = 1 << 20
MAX_XZ_BYTES = 1 << 29
"""Memory for the dictionary of .xz: `xz -9` needs 65 MiB, and a header may claim 4 GiB."""
MAX_ZSTD_BYTES = 1 << 31
"""Memory for the window of .zst: the longest that zstd itself makes (`--long=31`, as of some public
dumps), and a header may claim 4 TiB. The library alone would read windows of 128 MiB at most.
"""
LIMITS = {
    "Memory usage limit exceeded": (
        f"its dictionary needs more than {MAX_XZ_BYTES >> 20} MiB; decompress it"
    ),
    "Frame requires too much memory": (
        f"its window needs more than {MAX_ZSTD_BYTES >> 20} MiB; compress it again with --long=31 "
        f"or less"
    ),
}
"""What the libraries say of memory beyond these limits, and what we say: such a file is whole."""


class Compression(NamedTuple):
    """How files of a suffix are decompressed.

    start: makes what decompresses one member. signature: how such a file begins. package: of the
    library by which fsspec decompresses it.
    """

    start: Callable[[], Any] | None = None
    signature: bytes = b""
    package: str = ""


_start_xz = partial(lzma.LZMADecompressor, memlimit=MAX_XZ_BYTES)


def _start_zstd() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_BYTES).decompressobj()


COMPRESSIONS = {
    # 16 tells zlib that there is a gzip header
    ".gz": Compression(partial(zlib.decompressobj, 16 + zlib.MAX_WBITS), rb"\x1f\x8b"),
    ".bz2": Compression(bz2.BZ2Decompressor, rb"BZh\d(1AY&SY|\x17rE8P\x90)"),
    ".xz": Compression(_start_xz, rb"\xfd7zXZ"),
    ".lzma": Compression(_start_xz, rb"\x5d\0\0\x80"),
    ".zst": Compression(_start_zstd, rb"\x28\xb5\x2f\xfd"),
    ".zip": Compression(),
    ".lz4": Compression(package="lz4"),
    ".snappy": Compression(package="python-snappy"),
}


def suffix_of(path: str) -> str:
    """The last suffix of a path, in small letters; "" without one."""
    _, suffix = os.path.splitext(path)
    return suffix.lower()


def compression_of(path: str) -> str:
    """The suffix of a file's compression, by which it is in COMPRESSIONS; "" of a plain file."""
    suffix = suffix_of(path)
    if suffix == ".tgz":
        return ".gz"
    return suffix if suffix in COMPRESSIONS else ""


def compression_of_bytes(head: bytes) -> str:
    """The suffix of the compression of a file that begins so; "" where none does."""
    for suffix, compression in COMPRESSIONS.items():
        if compression.signature and re.match(compression.signature, head, re.DOTALL):
            return suffix
    return ""


def bare_name(path: str) -> str:
    """A path without the suffix of its compression."""
    bare, suffix = os.path.splitext(path)
    return bare if suffix.lower() in COMPRESSIONS else path


def format_suffix(path: str) -> str:
    """The last suffix that names no compression, in small letters."""
    return suffix_of(bare_name(path))


@contextmanager
def open_stream(
    path: str,
    storage: StorageConfig,
    etag: str = "",
    note: Callable[[int], None] | None = None,
) -> Iterator[Any]:
    """The decompressed bytes of a file, by its suffix; plain files can be sought in.

    etag: of the object that the conversion found; "": of the one that is there now. note: called
    with the number of stored bytes that were just read. Raises ConvertError for a missing package
    and a .zip of several files, ObjectChangedError if the object is another one. Errors of
    libraries pass through.
    """
    name, _ = split_query(path)
    suffix = compression_of(name)
    compression = COMPRESSIONS.get(suffix, Compression())
    name_in_fsspec = None
    if compression.package:
        name_in_fsspec = infer_compression(name)
        if name_in_fsspec is None:  # it knows only what is installed
            raise ConvertError(
                f"{name}: {suffix} needs the package {compression.package}: pip install "
                f"{compression.package}, or decompress it"
            )
    with open_file(path, storage, name_in_fsspec, etag, note) as file:
        if compression.start is not None:
            yield PieceReader(decompress(file, suffix, name))
        elif suffix == ".zip":
            member = _only_member(file, name)
            yield PieceReader(iter(lambda: member.read1(BUFFER_BYTES), b""))
        else:
            yield file


def _only_member(file: Any, name: str) -> Any:
    """Open the only file of a .zip. Raises ConvertError for another number of files.

    Errors of zipfile pass through: `read_slice` names the file for these.
    """
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise ConvertError(f"{name}: is no whole .zip ({error}); copy it again") from None
    names = [info.filename for info in archive.infolist() if not info.is_dir()]
    names = [member for member in names if not is_hidden_member(member)]
    if len(names) != 1:
        raise ConvertError(
            f"{name}: holds {len(names)} files; of a .zip one is read: unpack it, or name it with "
            f"--exclude"
        )
    # zipfile gives at once what others than these make of a piece, and that may be gigabytes
    if archive.getinfo(names[0]).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ConvertError(f"{name}: its file is compressed otherwise than by deflate; unpack it")
    return archive.open(names[0])


def decompress(file: Any, suffix: str, name: str) -> Iterator[bytes]:
    """The bytes of a compressed file, a piece at a time.

    suffix: of the compression. name: of the file, for messages. Raises EOFError where it is cut
    short, OSError where it is damaged, ConvertError where it needs too much memory.
    """
    start = COMPRESSIONS[suffix].start
    assert start is not None, suffix
    chunk_bytes = ZSTD_CHUNK_BYTES if suffix == ".zst" else CHUNK_BYTES
    data = file.read(chunk_bytes)
    while data:
        decompressor = start()
        while not decompressor.eof:
            # zlib and zstd give all at once, the others a piece
            needs_input = getattr(decompressor, "needs_input", True)
            if needs_input and not data:
                data = file.read(chunk_bytes)
                if not data:
                    raise EOFError("it is cut short")
            limit = (PIECE_BYTES,) if hasattr(decompressor, "needs_input") else ()
            try:
                yield decompressor.decompress(data, *limit)
            except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
                for reason, message in LIMITS.items():
                    if reason in str(error):
                        raise ConvertError(f"{name}: {message}") from None
                raise OSError(str(error)) from None
            data = b""
        # zeros pad a file, to whole blocks for instance
        data = decompressor.unused_data.lstrip(b"\0")
        while not data and (data := file.read(chunk_bytes)):
            data = data.lstrip(b"\0")


class PieceReader:
    """A file whose bytes come in pieces.

    An error that a piece raises is raised by the next read, when all before it has been read.
    """

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._ready = memoryview(b"")
        self._error: Exception | None = None

    def read(self, size: int | None = -1) -> bytes:
        """`size` bytes; fewer at the end, and before an error."""
        missing = sys.maxsize if size is None or size < 0 else size
        pieces: list[memoryview] = []
        while missing and (self._ready or self._has_more()):
            piece = self._ready[:missing]
            self._ready = self._ready[missing:]
            missing -= len(piece)
            pieces.append(piece)
        if not pieces and missing and self._error is not None:
            # An error that is kept would keep, by its traceback, the decompressor and all readers.
            error, self._error = self._error, EOFError("its reading ended with an error")
            try:
                raise error
            finally:
                del error
        return b"".join(pieces)

    def _has_more(self) -> bool:
        while not self._ready and self._error is None:
            try:
                self._ready = memoryview(next(self._pieces))
            except StopIteration:
                return False
            except Exception as error:  # of whatever library
                self._error = error
        return bool(self._ready)
