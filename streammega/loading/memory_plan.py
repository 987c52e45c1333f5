"""How the memory of a loader is divided: between what is fetched and what is ready, and between blocks
that are fetched whole and everything else. Pure: sizes in, sizes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streammega.errors import ConfigError
from streammega.storage.fetch.buffer_pool import rounded

GROUP_BYTES = 16 << 20
"""Ids that one kernel call gathers, and fields that one call makes. Each group costs a plan and a
hand-over between two threads: groups of 2 MiB take a fifth more CPU time than those of 16 MiB.
"""
SMALL_GROUP_BYTES = 2 << 20
"""The same where more blocks fit beside smaller groups: those save far more."""
MAX_GROUP_BATCHES = 64
"""Micro-batches of a group at most: the first of them is handed out when all are gathered."""
READY_GROUPS = 4
"""Groups made ahead at least: with fewer, the two threads wait for each other at every one."""
MAX_FIELD_BATCHES = 8
"""Micro-batches at most whose fields are made together, when the first of them is handed out."""
FIELDS_HELD = 2
"""How often they are there: those of what is handed out, and those of what was handed out before."""
BLOCK_SHARE = 3 / 4
"""Share of what is fetched for blocks that are fetched whole. The rest stays for what is read sample
by sample, and for blocks that are about to be opened.
"""
BLOCK_SLACK = 4096
"""Bytes added to a block, for its buffer (4096 bytes at least), and for one that lies across shards:
it has one more token for each.
"""
BATCH_SLACK = 8192
"""Bytes added to a micro-batch, for the buffers that it is fetched into, of 4096 bytes at least."""
GROUPS_FETCHED = 2
"""Groups whose bytes have to fit: one is gathered while the next is fetched."""
WINDOWS_FETCHED = 4
"""Windows that fit beside open blocks: others are fetched while one is gathered."""
WINDOW_BYTES = 64 << 20
WINDOW_SAMPLES = 4096
"""Bytes and samples of a window at most: the thread that plans it gathers nothing meanwhile."""


class BatchSize(NamedTuple):
    """Sizes of one micro-batch."""

    samples: int
    sample_tokens: int
    stored: int
    """Bytes in its files."""
    ids: tuple[int, ...]
    """Bytes of its gathered ids, and of each array that goes with them."""
    fields: tuple[int, ...]
    """Bytes of each of its fields; empty: ids are what is handed out."""

    def fetched(self, batches: int) -> int:
        """The most that so many micro-batches take of what is fetched: a quarter more for what
        coalescing adds (`planner.MAX_WASTE`).
        """
        size = batches * self.stored
        return rounded(size + size // 4) + BATCH_SLACK


class BlockSize(NamedTuple):
    """Blocks of a dataset that may be fetched whole, of `stored` bytes."""

    dataset: int
    stored: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What each part of `memory_bytes` is for.

        fetch_bytes     what is fetched and not gathered yet
          open_bytes      of it for blocks that are fetched whole: every lane has one of each dataset
                          open, and each sample of a group may open another before one is freed
        ready_bytes     what is gathered and not handed out: groups of ids in the stored dtype, and the
                          fields of the few micro-batches that are handed out next
          field_bytes     of it for fields

    group_batches: micro-batches gathered together. field_batches: those whose fields are made
    together. ready_groups: groups made ahead. window_batches: most micro-batches planned together.
    whole: datasets whose blocks are fetched whole. unfit: how many others would be with `enough_bytes`
    of memory.
    """

    group_batches: int
    field_batches: int
    ready_groups: int
    ready_bytes: int
    field_bytes: int
    fetch_bytes: int
    window_batches: int
    coalesce_gap_bytes: int
    whole: tuple[int, ...] = ()
    open_bytes: int = 0
    unfit: int = 0
    enough_bytes: int = 0


class _Groups(NamedTuple):
    """Groups of some size: what is ready of them takes `ready_bytes`, of which `field_bytes` are for
    fields.
    """

    group_batches: int
    field_batches: int
    ready_groups: int
    ready_bytes: int
    field_bytes: int


def _held(sizes: tuple[int, ...], batches: int) -> int:
    """Bytes of arrays that have `sizes` for each of so many micro-batches."""
    return sum(rounded(batches * size) for size in sizes if size)


def _groups_of(batch: BatchSize, batches: int, ahead: int, group_bytes: int) -> _Groups:
    """Groups of so many micro-batches: `ahead` micro-batches are ready, and four groups at least.
    group_bytes: of fields that are made together.
    """
    field_batches = min(group_bytes // max(1, sum(batch.fields)), MAX_FIELD_BATCHES, batches)
    field_batches = max(1, field_batches)
    ready = max(READY_GROUPS, math.ceil(ahead / batches))
    field_bytes = FIELDS_HELD * _held(batch.fields, field_batches)
    # of ids those that are ready, one that is being gathered, and one that is being handed out
    ids_bytes = (ready + 2) * _held(batch.ids, batches)
    return _Groups(batches, field_batches, ready, ids_bytes + field_bytes, field_bytes)


def _groups_of_bytes(batch: BatchSize, group_bytes: int, ahead: int) -> _Groups:
    """Groups of about so many bytes: a multiple of the micro-batches whose fields are made together,
    so that memory of one size serves all fields.
    """
    batches = max(1, min(group_bytes // sum(batch.ids), MAX_GROUP_BATCHES))
    together = _groups_of(batch, batches, ahead, group_bytes).field_batches
    return _groups_of(batch, batches - batches % together, ahead, group_bytes)


class _Blocks(NamedTuple):
    """What of `MemoryPlan` is of blocks."""

    whole: tuple[int, ...]
    open_bytes: int
    unfit: int
    enough_bytes: int


def _blocks_beside(
    groups: _Groups, memory_bytes: int, batch: BatchSize, blocks: Sequence[BlockSize], lanes: int
) -> _Blocks:
    """The blocks that fit beside groups, of the datasets that are drawn most: each saves a request
    for every sample.
    """
    room = (memory_bytes - groups.ready_bytes) * BLOCK_SHARE
    group_samples = groups.group_batches * batch.samples
    whole: list[int] = []
    lane_bytes = wanted_lane_bytes = 0
    largest = wanted_largest = 0
    for dataset, stored in blocks:
        held = rounded(stored) + BLOCK_SLACK
        wanted_lane_bytes += lanes * held
        wanted_largest = max(wanted_largest, held)
        if lane_bytes + lanes * held + group_samples * max(largest, held) <= room:
            whole.append(dataset)
            lane_bytes += lanes * held
            largest = max(largest, held)
    wanted_bytes = wanted_lane_bytes + group_samples * wanted_largest
    return _Blocks(
        whole=tuple(whole),
        open_bytes=lane_bytes + group_samples * largest,
        unfit=len(blocks) - len(whole),
        enough_bytes=groups.ready_bytes + math.ceil(wanted_bytes / BLOCK_SHARE),
    )


def plan_memory(
    memory_bytes: int,
    batch: BatchSize,
    blocks: Sequence[BlockSize],
    lanes: int,
    *,
    ahead: int,
    coalesce_gap_bytes: int,
    is_remote: bool = True,
) -> MemoryPlan:
    """Divide `memory_bytes`.

    blocks: of the datasets whose blocks are worth fetching whole, those drawn most first; lanes: in
    which each has one open. ahead: micro-batches that are to be ready. is_remote: whether anything
    is fetched.

    Raises ConfigError where there is no room for one micro-batch.
    """
    # What is ready comes first: it is little.
    groups = _groups_of_bytes(batch, GROUP_BYTES, ahead)
    held = _blocks_beside(groups, memory_bytes, batch, blocks, lanes)
    if held.unfit:
        small = _groups_of_bytes(batch, SMALL_GROUP_BYTES, ahead)
        beside_small = _blocks_beside(small, memory_bytes, batch, blocks, lanes)
        if len(beside_small.whole) > len(held.whole):
            groups, held = small, beside_small
    # Without blocks, groups become smaller until the next one can be fetched while one is gathered.
    while not held.whole and groups.group_batches > 1:
        fetched = GROUPS_FETCHED * batch.fetched(groups.group_batches) if is_remote else 0
        if groups.ready_bytes + fetched <= memory_bytes:
            break
        groups = _groups_of(batch, groups.group_batches // 2, ahead, GROUP_BYTES)
    least = groups.ready_bytes + (batch.fetched(1) if is_remote else 0)
    if least > memory_bytes:
        raise ConfigError(
            f"memory_bytes {memory_bytes:,} cannot hold micro-batches of {batch.samples} samples of "
            f"{batch.sample_tokens} tokens: it needs at least {least:,} bytes, of which "
            f"{groups.ready_bytes:,} are for those that are ready; set memory_bytes of the storage"
        )
    # What is left is for windows. Where groups hardly fit, what coalescing adds has no room.
    fetch_bytes = memory_bytes - groups.ready_bytes
    left = fetch_bytes - held.open_bytes
    fitting = max(1, left // WINDOWS_FETCHED // batch.fetched(1))
    window_batches = min(WINDOW_SAMPLES // batch.samples, fitting, WINDOW_BYTES // batch.stored)
    if GROUPS_FETCHED * batch.fetched(groups.group_batches) > left:
        coalesce_gap_bytes = 0
    return MemoryPlan(
        **groups._asdict(),
        **held._asdict(),
        fetch_bytes=fetch_bytes,
        window_batches=max(groups.group_batches, window_batches),  # a group is of one window
        coalesce_gap_bytes=coalesce_gap_bytes,
    )
