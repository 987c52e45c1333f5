"""What the phases before one leave to it: where lanes go on in each dataset, and in what.

A dataset that is drawn in the same samples and lanes as before goes on from the draws that lanes
have made. One whose samples or lanes change is read on from the rest of its epochs in progress (see
rests.py), and then by whole epochs, whose numbers in keys are new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from streammega.order.extents import Extents, merge_extents
from streammega.order.rests import Grid, Rest, rest_of

Integers = NDArray[np.int64]


class PhaseOrder(Protocol):
    """What is asked of the order of a phase. StreamOrder is the one there is, and says more."""

    @property
    def sequence_length(self) -> int:
        """Tokens from one sample to the next."""

    @property
    def width(self) -> int:
        """Tokens of a sample, with the extra one."""

    @property
    def lanes(self) -> int:
        """How many the phase has."""

    @property
    def first_sample(self) -> int:
        """Where the phase begins."""

    @property
    def restart(self) -> frozenset[int]:
        """Numbers of datasets that begin a new epoch in it."""

    @property
    def dataset_numbers(self) -> Integers:
        """The number of each dataset over all phases."""

    @property
    def rests(self) -> Sequence[Rest | None]:
        """What earlier phases have left of each dataset."""

    @property
    def first_epochs(self) -> Integers:
        """The number in keys of the first epoch of each dataset since it began anew."""

    def lane_of(self, sample_ids: Integers) -> Integers:
        """The lane in which each sample lies."""

    def grid(self, column: int) -> Grid:
        """A dataset in the samples and lanes of the phase."""

    def counts_up_to(self, end: int) -> Integers:
        """Draws of each lane from each dataset before a sample, [lanes, datasets]."""

    def epochs_of(self, draws: Integers, dataset: int) -> int:
        """How many epochs of a dataset have begun after so many draws of each lane."""


class FormerPhases:
    """The phases before one, as that one sees them. `column`: a dataset's place in its order.

    Args: order: of the phase that goes on in their place. earlier: theirs, from the first on.
    """

    def __init__(self, order: PhaseOrder, earlier: Sequence[PhaseOrder]) -> None:
        self._order = order
        self._earlier = earlier
        self._ends = [phase.first_sample for phase in (*earlier, order)][1:]
        """The end of each of them."""

    def draws(self) -> Integers:
        """Draws of each lane from each dataset in the phases before, since it began anew, [lanes,
        datasets].
        """
        numbers = self._order.dataset_numbers
        draws = np.zeros((self._order.lanes, len(numbers)), np.int64)
        for column, number in enumerate(numbers.tolist()):
            former = self._former(number)
            if former is not None and self._goes_on(column, *former):
                draws[:, column] = self._drawn_in(*former)
        return draws

    def rests(self) -> list[Rest | None]:
        """What earlier phases have left of each dataset, in samples and lanes of their own; None of
        one that goes on, or is new, or begins a new epoch.
        """
        numbers = self._order.dataset_numbers
        if not self._earlier:
            return [None] * len(numbers)
        rests: list[Rest | None] = []
        for column, number in enumerate(numbers.tolist()):
            former = self._former(number)
            if former is None or number in self._order.restart:
                rests.append(None)
            elif self._goes_on(column, *former):
                phase, place = former
                rests.append(self._earlier[phase].rests[place])
            else:
                rests.append(self._left_of(*former))
        return rests

    def left_before(self, column: int) -> tuple[Rest | None, bool]:
        """What earlier phases left of a dataset that begins anew in this one, and whether it is
        read here: a restart passes it over. (None, True) of one that goes on, or is new.
        """
        number = int(self._order.dataset_numbers[column])
        former = self._former(number)
        if former is None or self._goes_on(column, *former):
            return None, True
        if number in self._order.restart:
            return self._left_of(*former), False
        return self._order.rests[column], True

    def first_epochs(self) -> Integers:
        """The number in keys of the first epoch of each dataset since it began anew: those of the
        epochs before are not used again. int64 [datasets].
        """
        numbers = self._order.dataset_numbers
        first = np.zeros(len(numbers), np.int64)
        for column, number in enumerate(numbers.tolist()):
            former = self._former(number)
            if former is None:
                continue
            phase, place = former
            order = self._earlier[phase]
            first[column] = order.first_epochs[place]
            if not self._goes_on(column, phase, place):
                draws = self._drawn_in(phase, place)
                rest = order.rests[place]
                if rest is not None:
                    draws = np.maximum(draws - rest.shares, 0)
                first[column] += order.epochs_of(draws, place)
        return first

    def _goes_on(self, column: int, phase: int, place: int) -> bool:
        """Whether a dataset is drawn as in an earlier phase: in the same samples and lanes."""
        order = self._order
        before = self._earlier[phase]
        same_shape = (before.sequence_length, before.lanes) == (order.sequence_length, order.lanes)
        return same_shape and int(order.dataset_numbers[column]) not in order.restart

    def _left_of(self, phase: int, place: int) -> Rest | None:
        """What a dataset has left at the end of an earlier phase, in samples and lanes of this."""
        order = self._earlier[phase]
        return rest_of(
            order.grid(place),
            order.rests[place],
            self._drawn_in(phase, place),
            length=self._order.sequence_length,
            lanes=self._order.lanes,
        )

    def _drawn_in(self, phase: int, place: int) -> Integers:
        """Draws of each lane from a dataset up to the end of an earlier phase, since it began in
        its samples and lanes; int64 [lanes of that phase].
        """
        draws: Integers = self._earlier[phase].counts_up_to(self._ends[phase])[:, place]
        return draws

    def _former(self, number: int) -> tuple[int, int] | None:
        """(phase, place in it) of a dataset in the last phase before that has it."""
        for phase in range(len(self._earlier) - 1, -1, -1):
            places = np.flatnonzero(self._earlier[phase].dataset_numbers == number)
            if len(places):
                return phase, int(places[0])
        return None


def with_rests(
    order: PhaseOrder, sample_ids: Integers, column: NDArray[np.int32], found: Extents
) -> Extents:
    """Where samples lie, with those that are of the rest of former epochs: of these `found` has no
    file, and as start how many draws the lane is before its own. column: of each sample's dataset.
    """
    of_rests = np.flatnonzero(found.file < 0)
    if not len(of_rests):  # as soon as all lanes are past them
        return found
    own = np.flatnonzero(found.file >= 0)
    parts = [(own, _one_run_each(found, own))]
    for place in np.unique(column[of_rests]).tolist():
        rest = order.rests[place]
        assert rest is not None
        samples = of_rests[column[of_rests] == place]
        lane = order.lane_of(np.asarray(sample_ids, np.int64)[samples])
        draw = found.start[samples] + rest.shares[lane]
        of_sample, file, start, stop = rest.rows(
            rest.firsts[lane] + draw, order.width - order.sequence_length
        )
        splits = np.searchsorted(of_sample, np.arange(len(samples) + 1))
        extents = Extents(
            row_splits=splits.astype(np.int64),
            dataset=np.full(len(file), order.dataset_numbers[place], np.int32),
            file=file.astype(np.int32),
            start=start,
            stop=stop,
        )
        parts.append((samples, extents))
    return merge_extents(parts)


def _one_run_each(found: Extents, samples: Integers) -> Extents:
    """Some samples of `found`, in which each is one run of tokens."""
    return Extents(
        row_splits=np.arange(len(samples) + 1, dtype=np.int64),
        dataset=found.dataset[samples],
        file=found.file[samples],
        start=found.start[samples],
        stop=found.stop[samples],
    )
