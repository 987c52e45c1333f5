"""Which pieces of the stream order a rank may fetch whole: of which lanes and datasets, as far as
there is memory.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.loading.spans import FileTable
from streammega.loading.steps import MicroSteps
from streammega.order.lane_pieces import OpenPieces
from streammega.order.lanes import StreamOrder
from streammega.samples.lanes import LaneSource
from streammega.storage.fetch.buffer_pool import rounded

log = logging.getLogger(__name__)

FOR_WHOLE_PIECES = 3 / 4
"""Share of the budget for pieces that are fetched whole. The rest stays for what is read sample by
sample, and for pieces that are about to be opened.
"""
PIECE_SLACK = 4096
"""Bytes added to an estimate, for buffers that are rounded up by themselves (a buffer takes 4096
bytes at least), and for pieces that lie across shards: they have one more token for each.
"""


@dataclass(frozen=True, kw_only=True)
class WholePieces:
    """The pieces that are fetched whole.

    `open_bytes`: what they take of memory at most; `piece_bytes`: of the smallest. `without_room`:
    datasets whose pieces would be, if there were memory; `wanted_bytes`: what all would take.
    """

    pieces: OpenPieces | None = None
    open_bytes: int = 0
    piece_bytes: int = 0
    without_room: int = 0
    wanted_bytes: int = 0

    def of_same_datasets(self, other: WholePieces) -> bool:
        """Whether pieces of the same datasets are fetched whole."""
        if self.pieces is None or other.pieces is None:
            return self.pieces is other.pieces
        return bool((self.pieces.whole == other.pieces.whole).all())


def whole_pieces(
    steps: MicroSteps,
    table: FileTable,
    start: int,
    budget: int,
    slab_samples: int,
) -> WholePieces:
    """Which datasets' pieces are fetched whole: those of the datasets drawn most first, as long as
    memory lasts.
    """
    source = steps.samples
    if not isinstance(source, LaneSource):
        return WholePieces()
    order = source.order
    if order.lanes % steps.step_samples:
        # this rank shares its lanes with others: a piece would be fetched by each of them
        return WholePieces()
    if steps.config.balance_batches and not _balances_whole_lanes(steps, order):
        return WholePieces()
    lanes = lanes_from(steps, order, start)
    numbers = order.dataset_numbers
    itemsizes = table.itemsize[table.firsts[numbers]]
    # samples of a block lie end to end, the last with the token after it
    extra_tokens = order.width - order.sequence_length
    piece_bytes = (order.block_samples * order.sequence_length + extra_tokens) * itemsizes
    held_of_piece = [rounded(int(size)) + PIECE_SLACK for size in piece_bytes]
    whole = np.zeros(len(piece_bytes), np.bool_)
    open_bytes = 0
    largest = 0
    wanted_bytes = 0
    largest_wanted = 0
    without_room = 0
    _, shares = order.schedule[0]
    most_drawn_first = np.argsort(-np.array(shares, np.float64), kind="stable")
    for dataset in most_drawn_first.tolist():
        if not _can_be_whole(dataset, order, table):
            continue
        wanted_bytes += len(lanes) * held_of_piece[dataset]
        largest_wanted = max(largest_wanted, held_of_piece[dataset])
        open_with_it = open_bytes + len(lanes) * held_of_piece[dataset]
        largest_with_it = max(largest, held_of_piece[dataset])
        # Each sample of a slab may close a piece and open another, before the first is given back.
        if open_with_it + slab_samples * largest_with_it <= budget * FOR_WHOLE_PIECES:
            whole[dataset] = True
            open_bytes = open_with_it
            largest = largest_with_it
        else:
            without_room += 1
    found = WholePieces(
        without_room=without_room, wanted_bytes=wanted_bytes + slab_samples * largest_wanted
    )
    if not whole.any():
        return found
    return replace(
        found,
        pieces=OpenPieces(order, lanes, whole, itemsizes),
        open_bytes=open_bytes + slab_samples * largest,
        piece_bytes=int(piece_bytes[whole].min()),
    )


def _balances_whole_lanes(steps: MicroSteps, order: StreamOrder) -> bool:
    """Whether a reader whose samples go by what they cost takes every lane, in its order."""
    if steps.dp_size > 1:
        return False
    # A lane of which a batch has two samples may give the later one first. A state brings along its
    # lanes, and may be resumed with more samples in a batch than those.
    largest = max(size for _, size in steps.schedule.stages)
    return largest <= order.lanes


def _can_be_whole(dataset: int, order: StreamOrder, table: FileTable) -> bool:
    """Whether pieces of a dataset are worth it: remote, of one token width, of no two lanes at
    once, and of several samples.
    """
    files = table.files_of(int(order.dataset_numbers[dataset]))
    itemsizes = table.itemsize[files]
    one_width = bool((itemsizes == itemsizes[0]).all())
    remote = not table.local[files].any()
    of_one_lane = order.geometry.groups[dataset] == 1
    of_several_samples = order.block_samples[dataset] >= 2
    return bool(one_width and remote and of_one_lane and of_several_samples)


def lanes_from(steps: MicroSteps, order: StreamOrder, consumed: int) -> NDArray[np.int64]:
    """The lanes that a rank takes every sample of, which begins at `consumed`.

    There are as many wherever it begins, if the lanes are a multiple of what the ranks take in a
    micro-step.
    """
    if steps.config.balance_batches:
        return np.arange(order.lanes)  # the only reader takes all of them, in whatever order
    micro_steps = consumed + np.arange(0, order.lanes, steps.step_samples)
    lanes: NDArray[np.int64] = np.unique(order.lane_of(steps.sample_ids(micro_steps)))
    return lanes


def tell_without_room(whole: WholePieces, storage: StorageConfig) -> None:
    """Say that pieces are read sample by sample for want of memory, and what would hold them."""
    enough = math.ceil(whole.wanted_bytes / FOR_WHOLE_PIECES)
    log.warning(
        "memory_bytes %s has no room for the open pieces of %d of the datasets: their samples are "
        "read one by one, in many small requests, which is several times slower. Set memory_bytes "
        "of the storage to at least %s; less would do with fewer lanes or a smaller block_bytes, "
        "which are another order",
        f"{storage.memory_bytes:,}",
        whole.without_room,
        f"{enough:,}",
    )
