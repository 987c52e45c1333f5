"""Which pieces of the stream order a reader has open: what lets a piece be fetched whole and freed
after its last sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.lane_pieces import follow_pieces, piece_runs
from streammega.order.lanes import StreamOrder

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class NewPieces:
    """Pieces that open in a stretch of samples, and the runs of tokens they consist of, end to end
    in this order.

    slot, uses, row [pieces]: where its samples will be looked for, how many there will be, the
    first row that needs it; piece, dataset (its number), file, start, stop [runs], in tokens.
    """

    slot: Integers
    uses: Integers
    row: Integers
    piece: Integers
    dataset: Integers
    file: Integers
    start: Integers
    stop: Integers


class OpenPieces:
    """Follows the samples of a reader that takes whole lanes, in order, and says when pieces open.

    Args: order: the stream. lanes: the lanes that the reader takes every sample of; `close_all`
        names others, as many. whole: bool [datasets]: whose pieces are followed. Only datasets with
        one lane to a run may be. itemsizes: bytes of a token in each dataset.
    """

    def __init__(
        self, order: StreamOrder, lanes: Integers, whole: NDArray[np.bool_], itemsizes: Integers
    ) -> None:
        self.order = order
        self.whole = whole
        self.itemsizes = itemsizes
        self._local = self._number(lanes)
        # Of each lane and dataset, the piece that is open: its first sample and epoch, its slot
        # (-1: none is open), and how many of its samples are still to come.
        shape = (len(lanes), len(order.datasets))
        self._piece = np.full(shape, -1, np.int64)
        self._epoch = np.full(shape, -1, np.int64)
        self._slot = np.full(shape, -1, np.int64)
        self._left = np.zeros(shape, np.int64)

    def follow(self, sample_ids: Integers, free: Integers) -> tuple[Integers, Integers, NewPieces]:
        """(slot of each sample, or -1; byte offset of each within its piece; pieces that open).

        `free` holds as many unused slots as there are samples; new pieces take the first of them.
        """
        order = self.order
        geometry = order.geometry
        count = len(sample_ids)
        slot = np.empty(count, np.int64)
        offset = np.zeros(count, np.int64)
        # Every sample may open a piece.
        dataset = np.empty(count, np.int64)
        epoch = np.empty(count, np.int64)
        first = np.empty(count, np.int64)
        size = np.empty(count, np.int64)
        uses = np.empty(count, np.int64)
        row = np.empty(count, np.int64)
        opened = follow_pieces(
            order.within(sample_ids),
            order.lanes,
            *order.drawing,
            order.dataset_numbers,
            order.first_epochs,
            geometry.sizes,
            geometry.blocks,
            geometry.groups,
            geometry.first_parts,
            geometry.before,
            order.sequence_length,
            order.width,
            self.itemsizes,
            self.whole,
            self._local,
            self._piece,
            self._epoch,
            self._slot,
            self._left,
            free,
            slot,
            offset,
            dataset,
            epoch,
            first,
            size,
            uses,
            row,
        )
        if opened < 0:
            sample = sample_ids[-1 - opened]
            raise AssertionError(
                f"sample {sample} lies in lane {order.lane_of(sample)}, which this reader does "
                "not follow"
            )
        pieces = _runs_of(
            order,
            dataset[:opened],
            epoch[:opened],
            first[:opened],
            size[:opened],
            slot=free[:opened],
            uses=uses[:opened],
            row=row[:opened],
        )
        return slot, offset, pieces

    def close_all(self, lanes: Integers) -> tuple[Integers, Integers]:
        """Forget all open pieces: their slots, and the uses of each that will not come.

        `lanes` are followed from now on.
        """
        self._local = self._number(lanes)
        is_open = self._slot >= 0
        slots = self._slot[is_open]
        left = self._left[is_open]
        self._slot[:] = -1
        return slots, left

    def _number(self, lanes: Integers) -> Integers:
        """The number of each lane among those followed, int64 [lanes of the order]; -1 for the
        others.
        """
        local = np.full(self.order.lanes, -1, np.int64)
        local[lanes] = np.arange(len(lanes))
        return local


def _runs_of(
    order: StreamOrder,
    dataset: Integers,
    epoch: Integers,
    first: Integers,
    size: Integers,
    *,
    slot: Integers,
    uses: Integers,
    row: Integers,
) -> NewPieces:
    """Pieces with the runs that they consist of. `first`, `size`: in samples of the permuted
    dataset; all others as in NewPieces.
    """
    geometry = order.geometry
    key = order.drawing[0]
    # A run holds at least one sample; the kernel asks for room for one more of each piece.
    room = int(size.sum()) + len(size)
    piece = np.empty(room, np.int64)
    file = np.empty(room, np.int64)
    start = np.empty(room, np.int64)
    stop = np.empty(room, np.int64)
    count = piece_runs(
        key,
        order.dataset_numbers,
        dataset,
        epoch,
        first,
        size,
        geometry.first_parts,
        geometry.files,
        geometry.starts,
        geometry.slacks,
        geometry.before,
        geometry.ends,
        order.sequence_length,
        order.width,
        piece,
        file,
        start,
        stop,
    )
    piece = piece[:count]
    return NewPieces(
        slot=slot,
        uses=uses,
        row=row,
        piece=piece,
        dataset=order.dataset_numbers[dataset[piece]],
        file=file[:count],
        start=start[:count],
        stop=stop[:count],
    )
