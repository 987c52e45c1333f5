"""Which blocks of the stream order a reader has open, so that a block is fetched whole and freed
after its last sample. A lane reads the part of a block that is in its run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.stream import OPEN_BLOCK, OPENED_BLOCK, RUN, assign_blocks, block_runs
from streammega.order.epoch_layout import Integers, Records
from streammega.order.stream_order import StreamOrder


@dataclass(frozen=True, kw_only=True)
class OpenedBlocks:
    """Blocks that open in a stretch of samples, and the runs of tokens that they consist of, end to
    end in this order.

    slot, uses, row [blocks]: the slot, how many samples will use it, and the first row that does.
    block, dataset (its number), file, start, stop [runs]: in tokens.
    """

    slot: Integers
    uses: Integers
    row: Integers
    block: Integers
    dataset: Integers
    file: Integers
    start: Integers
    stop: Integers


class OpenBlocks:
    """Follows the samples of a reader that takes whole lanes, in order, and says when blocks open.

    Args:
        order: the stream.
        lanes: the reader takes every sample of them; `release_all` names others, as many.
        is_followed: bool [datasets]; only datasets with one lane to a run may be followed.
        itemsizes: bytes of a token in each dataset.
    """

    def __init__(
        self,
        order: StreamOrder,
        lanes: Integers,
        is_followed: NDArray[np.bool_],
        itemsizes: Integers,
    ) -> None:
        self.order = order
        self.is_followed = is_followed
        self._itemsizes = np.where(is_followed, itemsizes, 0)
        self._local = self._number(lanes)
        self._blocks = np.empty((len(lanes), len(order.datasets)), OPEN_BLOCK)
        self._blocks["slot"] = -1

    def assign(
        self, sample_ids: Integers, free: Integers
    ) -> tuple[Integers, Integers, OpenedBlocks]:
        """(slot of each sample, or -1; byte offset of each within its block; blocks that open).

        `free` holds as many unused slots as there are samples; new blocks take the first of them.
        """
        order = self.order
        count = len(sample_ids)
        slot = np.empty(count, np.int64)
        offset = np.zeros(count, np.int64)
        opened = np.empty(count, OPENED_BLOCK)  # every sample may open a block
        num_opened = assign_blocks(
            order.within_phase(sample_ids),
            order.tree,
            *order.layout,
            order.extra,
            self._itemsizes,
            self._local,
            self._blocks,
            free,
            slot,
            offset,
            opened,
        )
        if num_opened < 0:
            sample = sample_ids[-1 - num_opened]
            raise AssertionError(
                f"sample {sample} is in lane {order.lane_of(sample)}, which this reader does "
                "not follow"
            )
        opened = opened[:num_opened]
        runs = self._runs(opened)
        blocks = OpenedBlocks(
            slot=free[:num_opened],
            uses=opened["uses"],
            row=opened["row"],
            block=runs["item"],
            dataset=order.dataset_numbers[opened["dataset"][runs["item"]]],
            file=runs["file"],
            start=runs["start"],
            stop=runs["stop"],
        )
        return slot, offset, blocks

    def _runs(self, opened: Records) -> Records:
        """The runs of tokens that blocks consist of."""
        runs = np.empty(int(opened["count"].sum()), RUN)  # a run has at least one sample
        return runs[: block_runs(*self.order.layout, self.order.extra, opened, runs)]

    def release_all(self, lanes: Integers) -> tuple[Integers, Integers]:
        """Forget all open blocks: their slots, and the uses of each that will not come.

        `lanes` are followed from now on.
        """
        self._local = self._number(lanes)
        released = self._blocks[self._blocks["slot"] >= 0]
        self._blocks["slot"] = -1
        return released["slot"], released["uses"]

    def _number(self, lanes: Integers) -> Integers:
        """The number of each lane among those followed, int64 [lanes of the order]; -1 for the
        others.
        """
        local = np.full(self.order.lanes, -1, np.int64)
        local[lanes] = np.arange(len(lanes))
        return local
