"""The inverse of the stream order: which samples read given tokens of a file. In closed form: it
scans no samples, and needs no log of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streammega.kernels.stream import RUN, lane_draw_counts, samples_of_draws, samples_using
from streammega.order.epoch_layout import Integers, Records
from streammega.order.stream_order import StreamOrder

EPOCHS_AT_ONCE = 4096
"""Epochs of one call of the kernel: bounds the memory."""


@dataclass(frozen=True)
class TokenUses:
    """Samples that read some tokens, and the tokens that each reads; int64 [uses] each.

    sample: ids, ascending. start, stop: counted from the beginning of what was asked about: a file, a
    sequence, or a document.
    """

    sample: Integers
    start: Integers
    stop: Integers

    def __len__(self) -> int:
        return len(self.sample)


def samples_using_tokens(
    order: StreamOrder, dataset: int, file: int, start: int, stop: int, end: int
) -> TokenUses:
    """The samples of a phase before `end` that read tokens [start, stop) of a file, and which of
    these tokens, in the order of samples. `dataset`: its number over all phases.

    The inverse of `order.locate`, with the extra token of a sample. Where a sample joins runs of
    tokens, each run is a use. Tokens between the samples of an epoch are not read in it. Cost: some
    ten microseconds an epoch, and as much for each sample that the tokens touch.
    """
    columns = np.flatnonzero(order.dataset_numbers == dataset)
    if not len(columns) or order.first_sample >= end:
        return concatenate_uses([])
    column = int(columns[0])
    parts = [np.empty(0, RUN)]
    first_epoch, last_epoch = epochs_between(order, column, end)
    for first in range(first_epoch, last_epoch, EPOCHS_AT_ONCE):
        last = min(last_epoch, first + EPOCHS_AT_ONCE)
        parts.append(_uses_in_epochs(order, column, (file, start, stop), (first, last), end))
    runs = np.concatenate(parts)
    # A sample that reads two parts of a file comes once for each.
    uses = [TokenUses(runs["item"] + order.first_sample, runs["start"], runs["stop"])]
    uses.append(_uses_of_remainder(order, column, (file, start, stop), end))
    return concatenate_uses(uses)


def concatenate_uses(uses: Sequence[TokenUses]) -> TokenUses:
    """Several in one, in the order of samples."""
    parts = [np.empty((3, 0), np.int64)]
    parts += [np.array([part.sample, part.start, part.stop]) for part in uses]
    sample, start, stop = np.concatenate(parts, axis=1)
    order = np.lexsort((stop, start, sample))
    return TokenUses(sample[order], start[order], stop[order])


def _uses_of_remainder(
    order: StreamOrder, column: int, tokens: tuple[int, int, int], end: int
) -> TokenUses:
    """The uses of tokens (file, start, stop) before `end` by samples of a dataset's remainder."""
    remainder = order.remainders[column]
    if remainder is None:
        return concatenate_uses([])
    file, start, stop = tokens
    # a sample also reads the extra token after its last
    numbers = remainder.samples_with(file, start - order.extra, stop)
    lane, draw = remainder.lane_of(numbers)
    samples = np.empty(len(numbers), np.int64)
    # draws of a lane count from its first one after the remainder
    samples_of_draws(lane, draw - remainder.lane_counts[lane], column, order.tree, samples)
    samples += order.first_sample
    # This also drops NEVER, and draws that earlier phases have made.
    samples = np.unique(samples[(samples >= order.first_sample) & (samples < end)])
    extents = order.locate(samples)
    low = np.maximum(extents.start, start)
    high = np.minimum(extents.stop, stop)
    reads = (extents.file == file) & (low < high)
    sample = np.repeat(samples, np.diff(extents.row_splits))
    return TokenUses(sample[reads], low[reads], high[reads])


def epochs_between(order: StreamOrder, column: int, end: int) -> tuple[int, int]:
    """The epochs [first, last) of a dataset that the samples of a phase before `end` are of,
    without its remainder. Epochs count from 0 where draws begin.

    column: the place of the dataset among those of this phase, not its number over all phases.
    """
    first = np.empty(order.lanes, np.int64)
    last = np.empty(order.lanes, np.int64)
    lane_draw_counts(0, column, order.tree, first)
    lane_draw_counts(max(0, end - order.first_sample), column, order.tree, last)
    # A negative count is of draws of the remainder that are left: such a lane has yet to begin epoch 0.
    in_progress = order.layout.epochs_of_draws(np.maximum(first, 0), column).min()
    return int(in_progress), order.layout.epochs_begun(last, column)


def _uses_in_epochs(
    order: StreamOrder,
    dataset: int,
    tokens: tuple[int, int, int],
    epochs: tuple[int, int],
    end: int,
) -> Records:
    """All uses of tokens (file, start, stop) in epochs [first, last): RUN records, whose `item` is
    the sample, counted from the first of the phase.
    """
    runs = np.empty(0, RUN)
    end -= order.first_sample
    while True:
        count = samples_using(
            dataset, *tokens, *epochs, end, order.tree, *order.layout, order.extra, runs
        )
        if count <= len(runs):
            return runs[:count]
        # now that they are counted, with room for all
        runs = np.empty(count, RUN)
