"""The lines of a file, those that are too long to be held in pieces."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

READ_BYTES = 1 << 20


class LongLine:
    """A line that is not held. begun: its first bytes, without its end; `size`: its
    bytes so far.
    """

    def __init__(self, begun: bytes, file: Any) -> None:
        self.size = 0
        self.behind: bytes | None = None
        """What was read of the lines behind it, once it was read to its end."""
        self.pieces = self._read(begun, file)

    def _read(self, begun: bytes, file: Any) -> Iterator[bytes]:
        held = io.BytesIO(begun)
        while True:
            data = held.read(READ_BYTES) or file.read(READ_BYTES)
            if not data:
                self.behind = b""
                return
            end = data.find(b"\n") + 1
            piece = data[:end] if end else data
            self.size += len(piece)
            yield piece
            if end:
                self.behind = data[end:]
                return

    def finish(self) -> bool:
        """Read on to its end; False if that could not be reached, as whoever read its pieces was
        told.
        """
        for _ in self.pieces:
            pass
        return self.behind is not None


def read_lines(begun: bytes, file: Any, most: int | None) -> Iterator[bytes | LongLine]:
    """The lines of a file of which `begun` was read already; of more than `most` bytes, where that
    is given, a LongLine.

    What is left of a LongLine is read over; where it ended by an error, nothing comes after it.
    """
    held = begun
    while True:
        end = held.rfind(b"\n") + 1
        yield from io.BytesIO(held[:end])
        held = held[end:]
        if most is not None and len(held) > most:
            line = LongLine(held, file)
            yield line
            if not line.finish() or line.behind is None:
                return
            held = line.behind
            continue
        # as much again: a line that is held is copied a few times, not often
        size = max(READ_BYTES, len(held))
        if most is not None:  # one byte more tells that the line is a long one
            size = min(size, most + 1 - len(held))
        data = file.read(size)
        if not data:
            break
        held += data
    if held:
        yield held


def read_over_line(file: Any, left: int | None) -> tuple[int, bytes | None]:
    """(bytes to the end of a line, what was read behind it); None if there is no end within the
    next `left` bytes.
    """
    passed = 0
    while left is None or passed < left:
        data = file.read(READ_BYTES)
        if not data:
            break
        end = data.find(b"\n") + 1
        if end:
            return passed + end, data[end:]
        passed += len(data)
    return passed, None
