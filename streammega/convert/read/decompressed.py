"""Compressed files, read from their start: all members (frames, streams) of them, an error where one
is cut short or something else follows it, and every byte that comes before the error.

The libraries' own file objects lose what they had read when they fail, and take what follows a
member of .bz2 and .xz for its end.
"""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard

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
