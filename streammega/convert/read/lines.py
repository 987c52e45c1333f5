"""The lines of a file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

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
