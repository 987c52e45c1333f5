"""Where each parameter's gradient lies: contiguous buckets, filled in about the order in which
backward makes them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

PARAMETER_ALIGNMENT = 64
"""Elements: with sharding, parameters start on multiples of it."""
SHARD_ALIGNMENT = 128
"""Elements: with sharding, buckets end on multiples of it (and of the number of shards)."""


@dataclass(frozen=True)
class Slot:
    """One parameter in a buffer: elements [start, stop)."""

    parameter: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of a buffer that are reduced together, padding included.

    `waits`: its collective starts last.
    """

    start: int
    stop: int
    slots: tuple[Slot, ...]
    waits: bool = False

    def shard(self, rank: int, count: int) -> tuple[int, int]:
        """[start, stop) of the `rank`-th of `count` equal parts."""
        size = (self.stop - self.start) // count
        return self.start + rank * size, self.start + (rank + 1) * size


def default_bucket_size(dp: int) -> int:
    """Elements of a bucket that keep a ring of `dp` ranks busy."""
    return max(40_000_000, 1_000_000 * dp)


def plan_buckets(
    sizes: Sequence[int], bucket_size: int, *, shards: int = 0, waiting: Collection[int] = ()
) -> list[Bucket]:
    """Buckets of parameters of `sizes` elements, given in registration order and laid out in
    reverse.

    A bucket closes when it holds bucket_size elements, the crossing parameter included. With
    `shards` > 0 parameters start on multiples of 64 and buckets end on multiples of lcm(shards,
    128), so that each divides into equal, aligned parts. `waiting`: parameters that other ranks
    must add to first; they come last, in a bucket of their own.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    at = begin = 0

    def close(waits: bool) -> None:
        nonlocal at, begin, slots
        if slots:
            at = _up(at, math.lcm(shards, SHARD_ALIGNMENT)) if shards else at
            buckets.append(Bucket(begin, at, tuple(slots), waits))
            begin = at
            slots = []

    reverse = list(range(len(sizes)))[::-1]
    for waits in (False, True):
        for number in reverse:
            if (number in waiting) is not waits:
                continue
            at = _up(at, PARAMETER_ALIGNMENT) if shards else at
            slots.append(Slot(number, at, at + sizes[number]))
            at += sizes[number]
            if at - begin >= bucket_size and not waits:
                close(waits)
        close(waits)
    return buckets


def rectangles(
    shape: Sequence[int], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes (offsets, sizes) that elements [start, stop) of a row-major array make up, in their
    order; at most 2 * dims - 1.

    What lets a flat range of a parameter be saved as parts of the parameter, and loaded with any
    other sharding.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    first = -(-start // row)
    last = stop // row
    if first > last or (
        first == last and start % row and stop % row and start // row == stop // row
    ):
        at = start // row  # within one row
        return [
            ((at, *offsets), (1, *sizes))
            for offsets, sizes in rectangles(shape[1:], start - at * row, stop - at * row)
        ]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if start < first * row:
        at = first - 1
        boxes += [((at, *o), (1, *s)) for o, s in rectangles(shape[1:], start - at * row, row)]
    if first < last:
        boxes.append(((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if stop > last * row:
        boxes += [((last, *o), (1, *s)) for o, s in rectangles(shape[1:], 0, stop - last * row)]
    return boxes


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
