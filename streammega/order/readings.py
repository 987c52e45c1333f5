"""The stream order backwards: which samples read given tokens of a file. In closed form: no sample
is looked through, and no log of a run is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError
from streammega.kernels.lanes_back import read_by
from streammega.order.lanes import StreamOrder
from streammega.order.phases import PhasedOrder

Integers = NDArray[np.int64]
EPOCHS_AT_ONCE = 4096
"""Epochs whose readings are asked for by one call of the kernel: bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Which samples read tokens that were asked for, and which of these; int64 [readings] each.

    sample: ids, ascending. start, stop: tokens from the beginning of the file.
    """

    sample: Integers
    start: Integers
    stop: Integers

    def __len__(self) -> int:
        return len(self.sample)


def stream_readings(
    order: StreamOrder, dataset: int, file: int, start: int, stop: int, end: int
) -> Readings:
    """All readings of tokens [start, stop) of a file before sample `end`, in the order of samples.
    Of a phase: those of its own samples. `dataset`: its place among those of the order.

    The inverse of `order.locate`: of a sample's tokens, with the extra one, those that lie within
    [start, stop). Tokens between the samples of an epoch are read in none of it. Cost: some ten
    microseconds an epoch, and as much for each sample that the tokens touch.
    """
    parts = []
    epochs = num_epochs(order, dataset, end)
    for first in range(0, epochs, EPOCHS_AT_ONCE):
        last = min(epochs, first + EPOCHS_AT_ONCE)
        parts.append(_read_in(order, dataset, (file, start, stop), (first, last), end))
    sample, begin, finish = np.concatenate(parts, axis=1) if parts else np.empty((3, 0), np.int64)
    # One that reads two parts of a file comes once for each of them.
    by_sample = np.lexsort((begin, sample))
    return Readings(sample=sample[by_sample], start=begin[by_sample], stop=finish[by_sample])


def phased_readings(
    order: PhasedOrder, dataset: int, file: int, start: int, stop: int, end: int
) -> Readings:
    """The same over all phases of a run. `dataset`: its number over all of them.

    Raises ConfigError where samples before `end` are of the rest of an epoch that was cut anew.
    """
    parts = [np.empty((3, 0), np.int64)]
    for phase, phase_end in zip(order.phases, order.ends, strict=True):
        columns = np.flatnonzero(phase.dataset_numbers == dataset)
        phase_end = end if phase_end is None else min(end, phase_end)
        if len(columns) and phase.first_sample < phase_end:
            if phase.rests[int(columns[0])] is not None:
                raise ConfigError(
                    f"from sample {phase.first_sample} on, what an epoch had left is read in samples "
                    "of another length or in other lanes, where tokens are not looked for; ask for "
                    f"those before it: end={phase.first_sample}"
                )
            found = stream_readings(phase, int(columns[0]), file, start, stop, phase_end)
            parts.append(np.array([found.sample, found.start, found.stop]))
    sample, begin, finish = np.concatenate(parts, axis=1)
    return Readings(sample=sample, start=begin, stop=finish)


def num_epochs(order: StreamOrder, dataset: int, end: int) -> int:
    """How many epochs of a dataset have begun before sample `end`, since it began anew; of one that
    is not drawn, 0.
    """
    draws = order.counts(max(0, end - order.first_sample))[:, dataset]
    return order.epochs_of(draws, dataset)


def _read_in(
    order: StreamOrder,
    dataset: int,
    tokens: tuple[int, int, int],
    epochs: tuple[int, int],
    end: int,
) -> Integers:
    """(sample, start, stop) of all readings of (file, start, stop) in epochs [first, last), int64
    [3, readings].
    """
    geometry = order.geometry
    room = 0
    while True:
        found = np.empty((3, room), np.int64)
        readings = read_by(
            dataset,
            order.dataset_numbers[dataset],
            order.first_epochs[dataset],
            *tokens,
            *epochs,
            end - order.first_sample,
            order.lanes,
            *order.drawing,
            geometry.sizes[dataset],
            geometry.blocks[dataset],
            geometry.groups[dataset],
            geometry.first_parts,
            geometry.files,
            geometry.starts,
            geometry.slacks,
            geometry.before,
            geometry.ends,
            order.sequence_length,
            order.width,
            *found,
        )
        if readings <= room:
            found[0] += order.first_sample
            return found[:, :readings]
        # counted, and now there is room for them
        room = readings
