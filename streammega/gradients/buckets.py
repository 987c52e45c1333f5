"""Where each parameter's gradient lies: contiguous buckets, filled in about the order in which
backward makes them. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One parameter in a buffer: elements [start, stop)."""

    parameter: int
    """Its number in the order of registration."""
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of a buffer that are reduced together."""

    start: int
    stop: int
    slots: tuple[Slot, ...]
    waits: bool = False
    """Whether other ranks add to it first: its collective starts last."""


def default_bucket_size(dp: int) -> int:
    """Elements of a bucket that keep a ring of `dp` ranks busy, as Megatron's: a ring sends a
    bucket in `dp` parts, each of which is to take longer than it takes to be sent off.
    """
    return max(40_000_000, 1_000_000 * dp)


def plan_buckets(
    sizes: Sequence[int], bucket_size: int, *, waiting: Collection[int] = ()
) -> list[Bucket]:
    """Buckets of parameters of `sizes` elements, given in registration order and laid out in
    reverse.

    A bucket closes when it holds bucket_size elements, the crossing parameter included. `waiting`:
    parameters that other ranks must add to first; they come last, in a bucket of their own.
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
        buckets.append(Bucket(begin, end, tuple(slots), waits))
        begin = end
        slots = []

    def place(number: int) -> None:
        """Put a parameter behind the others of the open bucket."""
        nonlocal end
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
