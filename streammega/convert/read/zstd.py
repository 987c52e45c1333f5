"""Reading `.zst` files whole: all frames of them, and an error where one is cut short.

zstandard's own stream reader stops at the first frame by default, and takes a truncated frame for
the end of the file.
"""

from __future__ import annotations

import io
from typing import Any

import zstandard

READ_BYTES = 1 << 20


class ZstdReader(io.RawIOBase):
    """Decompressed bytes of a file object. Raises EOFError if the last frame is incomplete."""

    def __init__(self, compressed: Any) -> None:
        self._compressed = compressed
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        self._ready = b""

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with decompressed bytes; 0 at the end."""
        while not self._ready:
            data = b""
            if self._frame.eof:
                # what was read behind the end of a frame begins the next one
                data = self._frame.unused_data
            if not data:
                data = self._compressed.read(READ_BYTES)
            if not data:
                self._check_end()
                return 0
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._begun = True
            self._ready = self._decompress(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _check_end(self) -> None:
        if self._begun and not self._frame.eof:
            raise EOFError("the last zstd frame is incomplete")

    def _decompress(self, data: bytes) -> bytes:
        try:
            return self._frame.decompress(data)
        except zstandard.ZstdError as error:
            # what gzip and bz2 raise for damaged data
            raise OSError(str(error)) from None
