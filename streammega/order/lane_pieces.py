"""Which pieces of the stream order a reader has open: what lets a piece be fetched whole and freed
after its last sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.lanes import follow_pieces, piece_runs
from streammega.order.lanes import StreamOrder

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class NewPieces:
    """Pieces that open in a stretch of samples, and the runs of tokens they consist of, end to end
    in this order.

    slot, uses, row [pieces]: where its samples will be looked for, how many there will be, the
    first row that needs it; piece, dataset, file, start, stop [runs], in tokens.
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
        shape = (len(lanes), len(order.datasets))
        self._piece, self._epoch = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
        self._slot, self._left = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)

    def follow(self, sample_ids: Integers, free: Integers) -> tuple[Integers, Integers, NewPieces]:
        """(slot of each sample, or -1; byte offset of each within its piece; pieces that open).

        `free` holds as many unused slots as there are samples; new pieces take the first of them.
        """
        order = self.order
        count = len(sample_ids)
        slot = np.empty(count, np.int64)
        offset = np.zeros(count, np.int64)
        dataset, epoch, first, size, uses, row = (np.empty(count, np.int64) for _ in range(6))
        g = order.geometry
        made = follow_pieces(
            sample_ids, order.lanes, *order.drawing, g["sizes"], g["blocks"], g["groups"], g["firsts"], g["before"],
            order.sequence_length, order.width, self.itemsizes, self.whole, self._local, self._piece, self._epoch, self._slot,
            self._left, free, slot, offset, dataset, epoch, first, size, uses, row,
        )  # fmt: skip
        if made < 0:
            sample = int(sample_ids[-1 - made])
            raise AssertionError(
                f"sample {sample} lies in lane {sample % order.lanes}, which this reader does not follow"
            )
        dataset = dataset[:made]
        epoch = epoch[:made]
        first = first[:made]
        size = size[:made]
        piece, file, start, stop = (np.empty(int(size.sum()) + made, np.int64) for _ in range(4))
        runs = piece_runs(
            order.drawing[0], dataset, epoch, first, size, g["firsts"], g["files"], g["starts"], g["slacks"], g["before"],
            g["ends"], order.sequence_length, order.width, piece, file, start, stop,
        )  # fmt: skip
        piece = piece[:runs]
        made_pieces = NewPieces(
            slot=free[:made],
            uses=uses[:made],
            row=row[:made],
            piece=piece,
            dataset=dataset[piece],
            file=file[:runs],
            start=start[:runs],
            stop=stop[:runs],
        )
        return slot, offset, made_pieces

    def close_all(self, lanes: Integers) -> tuple[Integers, Integers]:
        """Forget all open pieces: their slots, and the uses of each that will not come.

        `lanes` are followed from now on.
        """
        self._local = self._number(lanes)
        at = np.nonzero(self._slot >= 0)
        slots = self._slot[at]
        left = self._left[at]
        self._slot[:] = -1
        return slots, left

    def _number(self, lanes: Integers) -> Integers:
        """The number of each lane among those followed, int64 [lanes of the order]; -1 for the
        others.
        """
        local = np.full(self.order.lanes, -1, np.int64)
        local[lanes] = np.arange(len(lanes))
        return local
