"""Where each parameter's gradient lies: contiguous buckets, filled in about the order in which
backward makes them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a box in each dimension of an array."""

PARAMETER_ALIGNMENT = 64
"""Elements: with sharding, parameters start on multiples of it."""
SHARD_ALIGNMENT = 128
"""Elements: with sharding, buckets end on multiples of it (and of the number of shards)."""


@dataclass(frozen=True)
class Slot:
    """One parameter in a buffer: elements [start, stop)."""

    parameter: int
    """Its number in the order of registration."""
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of a buffer that are reduced together, padding included."""

    start: int
    stop: int
    slots: tuple[Slot, ...]
    waits: bool = False
    """Whether other ranks add to it first: its collective starts last."""

    def shard(self, rank: int, count: int) -> tuple[int, int]:
        """[start, stop) of the `rank`-th of `count` equal parts."""
        size = (self.stop - self.start) // count
        return self.start + rank * size, self.start + (rank + 1) * size


def default_bucket_size(dp: int) -> int:
    """Elements of a bucket that keep a ring of `dp` ranks busy, as Megatron's: a ring sends a
    bucket in `dp` parts, each of which is to take longer than it takes to be sent off.
    """
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
    # Backward makes the gradients of the last layers first, so these lie in front.
    backward_order = list(reversed(range(len(sizes))))
    by_themselves = [number for number in backward_order if number not in waiting]
    waiting_last = [number for number in backward_order if number in waiting]
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    begin = 0
    end = 0

    def close(*, waits: bool) -> None:
        """End the bucket that is open, if it holds a parameter; `waits`: as in Bucket."""
        nonlocal begin, end, slots
        if not slots:
            return
        if shards:
            end = _round_up(end, math.lcm(shards, SHARD_ALIGNMENT))
        buckets.append(Bucket(begin, end, tuple(slots), waits))
        begin = end
        slots = []

    def place(number: int) -> None:
        """Put a parameter behind the others of the open bucket."""
        nonlocal end
        if shards:
            end = _round_up(end, PARAMETER_ALIGNMENT)
        slots.append(Slot(number, end, end + sizes[number]))
        end += sizes[number]

    for number in by_themselves:
        place(number)
        if end - begin >= bucket_size:
            close(waits=False)
    close(waits=False)
    for number in waiting_last:
        place(number)
    close(waits=True)
    return buckets


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """The boxes (offsets, sizes) that elements [start, stop) of a row-major array make up, in their
    order; at most 2 * dims - 1.

    What lets a flat range of a parameter be saved as parts of the parameter, and loaded with any
    other sharding.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row_size = math.prod(shape[1:])
    first_row = start // row_size
    last_row = (stop - 1) // row_size
    if first_row == last_row:
        return _within_row(shape, first_row, start, stop)
    boxes: list[Rectangle] = []
    first_whole = _divide_up(start, row_size)
    whole_stop = stop // row_size
    if first_whole > first_row:
        boxes += _within_row(shape, first_row, start, first_whole * row_size)
    if first_whole < whole_stop:
        within_row = (0,) * (len(shape) - 1)
        boxes.append(((first_whole, *within_row), (whole_stop - first_whole, *shape[1:])))
    if whole_stop <= last_row:
        boxes += _within_row(shape, last_row, whole_stop * row_size, stop)
    return boxes


def _within_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Rectangle]:
    """`rectangles` of elements that all lie in one row of the first dimension."""
    row_start = row * math.prod(shape[1:])
    return [
        ((row, *offsets), (1, *sizes))
        for offsets, sizes in rectangles(shape[1:], start - row_start, stop - row_start)
    ]


def _divide_up(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _round_up(value: int, multiple: int) -> int:
    return _divide_up(value, multiple) * multiple
