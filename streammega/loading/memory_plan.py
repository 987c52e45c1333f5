"""The memory plan divides the memory of a loader between fetched bytes and ready batches.

Of the fetched bytes a part is for blocks that are fetched whole. This module only computes sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streammega.errors import ConfigError
from streammega.storage.fetch.buffer_pool import rounded

GROUP_BYTES = 4 << 20
"""Bytes of the ids that one kernel call gathers. Each group costs a plan and a hand-over between two
threads. Larger ones, or more of them, were tried: no fewer waits, and more page faults.
"""
FIELD_BYTES = 16 << 20
"""Bytes of the fields that one kernel call makes."""
MAX_GROUP_BATCHES = 64
"""Most micro-batches of a group. The first of them is handed out when all are gathered."""
READY_GROUPS = 3
"""Fewest groups made ahead. With fewer, the two threads wait for each other at every group."""
MAX_FIELD_BATCHES = 8
"""Most micro-batches whose fields are made together, when the first of them is handed out."""
FIELD_COPIES = 2
"""Copies of fields in memory: one that is being handed out, and one that was handed out before."""
RESIDENT_SHARE = 1 / 2
"""Largest share of the memory beyond ready and fetched groups that small datasets may take, to stay."""
BLOCK_SHARE = 3 / 4
"""Largest share of the memory without ready batches that open blocks may take. The rest is for samples
that are read one by one, and for blocks that open next.
"""
OPENING_BYTES = 8 << 20
"""A group ends before its samples open more bytes of blocks than this, unless its first micro-batch
opens more: they are needed at once, in addition to all blocks that are open.
"""
BLOCK_SLACK = 4096
"""Bytes added to a block: a buffer has at least 4096, and a block has one more token for each shard
that it continues in.
"""
BATCH_SLACK = 8192
"""Bytes added to a micro-batch, because each of its buffers has at least 4096."""
GROUPS_FETCHED = 2
"""Groups whose bytes have to fit: one is gathered while the next is fetched."""
WINDOWS_FETCHED = 4
"""Windows that have to fit in addition to open blocks: one is gathered while others are fetched."""
WINDOW_BYTES = 64 << 20
WINDOW_SAMPLES = 4096
"""Most bytes and samples of a window: the thread gathers nothing while it plans a window."""


class BatchSize(NamedTuple):
    """Sizes of one micro-batch."""

    samples: int
    sample_tokens: int
    stored: int
    """Bytes of its tokens in the files, with their columns."""
    ids: tuple[int, ...]
    """Bytes of its gathered ids, and of each array that belongs to them."""
    fields: tuple[int, ...]
    """Bytes of each of its fields; empty: batches consist of ids."""
    files: int = 1
    """What is read for it by requests of its own: ids, and each stored column."""

    def fetched(self, batches: int) -> int:
        """Most bytes that these micro-batches take while they are fetched.

        They include a quarter more for what coalescing adds (`planner.MAX_WASTE`).
        """
        size = batches * self.stored
        return rounded(size + size // 4) + self.files * BATCH_SLACK


class ResidentSize(NamedTuple):
    """The bytes in memory (`stored`) of a dataset, or of a column of it, that may stay there. dataset: its
    number among both.
    """

    dataset: int
    stored: int


class BlockSize(NamedTuple):
    """The bytes (`stored`) of a block of a dataset, or of a column of it, whose blocks may be fetched
    whole. dataset: as of `ResidentSize`.
    """

    dataset: int
    stored: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The purpose of each part of `memory_bytes`.

        fetch_bytes     bytes that are fetched and not gathered yet, for storage that is near; up to
                        max_fetch_bytes as the caller or far storage need (lookahead.py)
          resident_bytes  their part for small datasets, which stay in memory
          open_bytes      their part for blocks that are fetched whole: each lane has a block of each
                          dataset open, and a group opens more (`opening_bytes`) before one is freed
        ready_bytes     batches that are gathered and not handed out: groups of ids in the stored
                          dtype, and the fields of the micro-batches that are handed out next
          field_bytes     their part for fields

    group_batches: micro-batches gathered together. field_batches: micro-batches whose fields are made
    together. ready_groups: groups made ahead. window_batches: most micro-batches planned together.
    opening_bytes: most bytes that a group of several micro-batches adds to those in memory.
    resident_datasets: datasets that stay in memory. block_datasets: datasets whose blocks are fetched
    whole. num_without_room: how many more datasets
    could have their blocks fetched whole if the memory had `enough_bytes`.
    """

    group_batches: int
    field_batches: int
    ready_groups: int
    ready_bytes: int
    field_bytes: int
    fetch_bytes: int
    max_fetch_bytes: int
    window_batches: int
    opening_bytes: int
    coalesce_gap_bytes: int
    resident_datasets: tuple[int, ...]
    resident_bytes: int
    block_datasets: tuple[int, ...]
    open_bytes: int
    num_without_room: int
    enough_bytes: int


class _Groups(NamedTuple):
    """The size of groups. All ready groups take `ready_bytes`, which include `field_bytes`."""

    group_batches: int
    field_batches: int
    ready_groups: int
    ready_bytes: int
    field_bytes: int


def _bytes_of_arrays(sizes: tuple[int, ...], batches: int) -> int:
    """Bytes of some arrays of several micro-batches. sizes: the bytes that each has per micro-batch."""
    return sum(rounded(batches * size) for size in sizes if size)


def _groups_of(batch: BatchSize, batches: int, ahead: int) -> _Groups:
    """Groups of `batches` micro-batches. At least `ahead` micro-batches and READY_GROUPS groups are
    ready.
    """
    field_batches = min(FIELD_BYTES // max(1, sum(batch.fields)), MAX_FIELD_BATCHES, batches)
    field_batches = max(1, field_batches)
    ready = max(READY_GROUPS, math.ceil(ahead / batches))
    field_bytes = FIELD_COPIES * _bytes_of_arrays(batch.fields, field_batches)
    # two more groups than the ready ones: one is being gathered, one is being handed out
    ids_bytes = (ready + 2) * _bytes_of_arrays(batch.ids, batches)
    return _Groups(batches, field_batches, ready, ids_bytes + field_bytes, field_bytes)


def _largest_groups(batch: BatchSize, ahead: int) -> _Groups:
    """Groups of about GROUP_BYTES.

    The micro-batches of a group are a multiple of those whose fields are made together. So memory of
    one size serves all fields.
    """
    batches = max(1, min(GROUP_BYTES // sum(batch.ids), MAX_GROUP_BATCHES))
    together = _groups_of(batch, batches, ahead).field_batches
    return _groups_of(batch, batches - batches % together, ahead)


class _Blocks(NamedTuple):
    """The fields of `MemoryPlan` that describe blocks."""

    block_datasets: tuple[int, ...]
    open_bytes: int
    opening_bytes: int
    num_without_room: int
    enough_bytes: int


def _fitting_blocks(
    groups: _Groups, memory_bytes: int, batch: BatchSize, blocks: Sequence[BlockSize], lanes: int
) -> _Blocks:
    """Choose the datasets whose open blocks fit into the memory that groups leave.

    `blocks` lists the most drawn datasets first: there a block saves the most requests.
    """
    room = (memory_bytes - groups.ready_bytes) * BLOCK_SHARE

    def opening(largest: int) -> int:
        one_batch = batch.samples * largest
        return max(one_batch, min(OPENING_BYTES, groups.group_batches * one_batch))

    block_datasets: list[int] = []
    lane_bytes = wanted_lane_bytes = 0
    largest = wanted_largest = 0
    for dataset, stored in blocks:
        block_bytes = rounded(stored) + BLOCK_SLACK
        wanted_lane_bytes += lanes * block_bytes
        wanted_largest = max(wanted_largest, block_bytes)
        if lane_bytes + lanes * block_bytes + opening(max(largest, block_bytes)) <= room:
            block_datasets.append(dataset)
            lane_bytes += lanes * block_bytes
            largest = max(largest, block_bytes)
    wanted_bytes = wanted_lane_bytes + opening(wanted_largest)
    return _Blocks(
        block_datasets=tuple(block_datasets),
        open_bytes=lane_bytes + opening(largest),
        opening_bytes=opening(largest) or OPENING_BYTES,
        num_without_room=len(blocks) - len(block_datasets),
        enough_bytes=groups.ready_bytes + math.ceil(wanted_bytes / BLOCK_SHARE),
    )


def _fitting_resident(room: int, datasets: Sequence[ResidentSize]) -> tuple[tuple[int, ...], int]:
    """The datasets that stay in memory, and their bytes. datasets: the most drawn first."""
    chosen: list[int] = []
    total = 0
    for dataset, stored in datasets:
        if total + stored <= room * RESIDENT_SHARE:
            chosen.append(dataset)
            total += stored
    return tuple(chosen), total


def plan_memory(
    memory_bytes: int,
    batch: BatchSize,
    blocks: Sequence[BlockSize],
    lanes: int,
    *,
    resident: Sequence[ResidentSize] = (),
    ahead: int,
    coalesce_gap_bytes: int,
    in_flight_bytes: int = 0,
    near_bytes: int = 0,
    is_remote: bool = True,
    only_blocks: bool = False,
) -> MemoryPlan:
    """Divide `memory_bytes`, or as much of it as the reader can use.

    resident: the datasets that may stay in memory, the most drawn first. blocks: the datasets whose
    blocks are worth fetching whole, the most drawn first, and columns after ids; without those that stay in
    memory. lanes: the number
    of lanes of the reader; each has a block of each dataset open. ahead: micro-batches to keep ready.
    in_flight_bytes: most bytes of requests in flight. near_bytes: the most where storage is near.
    is_remote: whether some file is fetched.
    only_blocks: whether all that is fetched is in `resident` and `blocks`, if they fit.

    Raises ConfigError if there is no room for one micro-batch.
    """
    # Ready groups come first: they take little.
    groups = _largest_groups(batch, ahead)
    needed = groups.ready_bytes + GROUPS_FETCHED * batch.fetched(groups.group_batches)
    resident_datasets, resident_bytes = _fitting_resident(memory_bytes - needed, resident)
    all_bytes = memory_bytes
    memory_bytes -= resident_bytes
    in_blocks = [block for block in blocks if block.dataset not in resident_datasets]
    block_plan = _fitting_blocks(groups, memory_bytes, batch, in_blocks, lanes)
    stay = {one.dataset for one in resident}
    others = [block for block in blocks if block.dataset not in stay]
    stay_bytes = sum(one.stored for one in resident)
    enough_bytes = max(
        _fitting_blocks(groups, 0, batch, others, lanes).enough_bytes + stay_bytes,
        needed + math.ceil(stay_bytes / RESIDENT_SHARE),
    )
    # Without blocks, groups become smaller until the next one can be fetched while one is gathered.
    while not block_plan.block_datasets and groups.group_batches > 1:
        fetched = GROUPS_FETCHED * batch.fetched(groups.group_batches) if is_remote else 0
        if groups.ready_bytes + fetched <= memory_bytes:
            break
        groups = _groups_of(batch, groups.group_batches // 2, ahead)
    min_bytes = groups.ready_bytes + (batch.fetched(1) if is_remote else 0)
    if min_bytes > memory_bytes:
        raise ConfigError(
            f"memory_bytes {all_bytes:,} cannot hold micro-batches of {batch.samples} samples of "
            f"{batch.sample_tokens} tokens. It needs at least {min_bytes:,} bytes; ready batches take "
            f"{groups.ready_bytes:,} of them. Set memory_bytes of the storage"
        )
    # The rest is for windows. If groups hardly fit, there is no room for what coalescing adds.
    window_room = memory_bytes - groups.ready_bytes - block_plan.open_bytes
    fitting = max(1, window_room // WINDOWS_FETCHED // batch.fetched(1))
    window_batches = min(WINDOW_SAMPLES // batch.samples, fitting, WINDOW_BYTES // batch.stored)
    # More memory would only hold bytes that are needed later.
    windows_bytes = 0
    if not only_blocks or block_plan.num_without_room or len(resident_datasets) < len(resident):
        windows_bytes = WINDOWS_FETCHED * batch.fetched(max(groups.group_batches, window_batches))
    max_window_room = min(window_room, windows_bytes + in_flight_bytes)
    window_room = min(window_room, windows_bytes + near_bytes)
    if GROUPS_FETCHED * batch.fetched(groups.group_batches) > window_room:
        coalesce_gap_bytes = 0
    return MemoryPlan(
        **groups._asdict(),
        **block_plan._replace(enough_bytes=enough_bytes)._asdict(),
        resident_datasets=resident_datasets,
        resident_bytes=resident_bytes,
        fetch_bytes=resident_bytes + block_plan.open_bytes + window_room,
        max_fetch_bytes=resident_bytes + block_plan.open_bytes + max_window_room,
        window_batches=max(groups.group_batches, window_batches),  # a group is within one window
        coalesce_gap_bytes=coalesce_gap_bytes,
    )
