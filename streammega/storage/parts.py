"""How large the parts of an upload are: object stores take 10,000 of them."""

from __future__ import annotations

from dataclasses import replace

from streammega.config import StorageConfig

PART_BYTES = 32 << 20
MOST_PARTS = 10_000
PARTS_OF_A_SIZE = 2000
"""Parts are doubled after so many.

Objects may then have 1.9 TiB, while what most uploads hold in memory stays small.
"""
MiB = 1 << 20


def part_bytes(sent: int) -> int:
    """The size of a part after so many others, of an upload whose end is not known."""
    doublings = sent // PARTS_OF_A_SIZE
    return int(PART_BYTES << doublings)


def sized_for(storage: StorageConfig, size: int) -> StorageConfig:
    """`storage` with `upload_part_bytes` large enough for an object of about `size` bytes.

    obstore cuts an upload into equal parts, so it has to know beforehand. A tenth of them is left
    for a size that was too low.
    """
    parts_to_fill = MOST_PARTS * 9 // 10
    needed = _divide_up(size, parts_to_fill)
    if needed <= storage.upload_part_bytes:
        return storage
    whole_mib = _divide_up(needed, MiB) * MiB
    return replace(storage, upload_part_bytes=whole_mib)


def _divide_up(size: int, by: int) -> int:
    return -(-size // by)
