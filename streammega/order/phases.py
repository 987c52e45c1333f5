"""Phases: a run whose datasets, weights and batch sizes change at some samples.

A phase is a stream order of its own that goes on where those before it ended. What is in it is a
function of the phases that begin at or before it: one that follows changes nothing. A run of one
phase is the stream order as it is.

In a phase, row and lane of a sample count from its first one, and the blend is a tree over the
phase's own datasets. How many draws each lane has made from a dataset before the phase is summed in
closed form, whether it was in the phase before or only in an earlier one: so every lane goes on in
its run at the place where it was, and nothing is read twice within an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError
from streammega.order.extents import Extents, merge_extents
from streammega.order.lane_geometry import StreamDataset
from streammega.order.lanes import StreamOrder

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class LaterPhase:
    """What holds from global sample `first_sample` on.

    numbers: which datasets it draws from, by their places in the order in which they first appear.
    restart: those of them that begin a new epoch. sequence_length, lanes: None, as before.
    """

    first_sample: int
    numbers: Sequence[int]
    datasets: Sequence[StreamDataset]
    weights: Sequence[float]
    restart: frozenset[int] = frozenset()
    sequence_length: int | None = None
    lanes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PhasedOrder:
    """The orders of all phases of a run, one after the other, the first at sample 0."""

    phases: Sequence[StreamOrder]

    def locate(self, sample_ids: Integers) -> Extents:
        """Where samples lie. `dataset` numbers them over all phases, by first appearance."""
        phase_of_sample = np.searchsorted(self._firsts, sample_ids, side="right") - 1
        phases = np.unique(phase_of_sample)
        if len(phases) == 1:  # as nearly always: a phase is many thousands of steps
            return self.phases[int(phases[0])].locate(sample_ids)
        parts = []
        for phase in phases.tolist():
            of_phase = np.flatnonzero(phase_of_sample == phase)
            parts.append((of_phase, self.phases[phase].locate(sample_ids[of_phase])))
        return merge_extents(parts)

    def phase_at(self, sample: int) -> int:
        """The number of the phase that holds a sample."""
        return int(np.searchsorted(self._firsts, sample, side="right")) - 1

    @property
    def ends(self) -> list[int | None]:
        """The sample before which each phase ends; None of the last, which has no end."""
        return [*self._firsts[1:].tolist(), None]

    @cached_property
    def _firsts(self) -> Integers:
        return np.array([order.first_sample for order in self.phases], np.int64)


def phased_order(first: StreamOrder, later: Sequence[LaterPhase]) -> PhasedOrder:
    """The order of a first phase and those that follow it.

    Raises ConfigError for a dataset that holds no sample.
    """
    phases = [first]
    for phase in later:
        before = phases[-1]
        order = replace(
            first,
            datasets=phase.datasets,
            schedule=[(phase.first_sample, phase.weights)],
            sequence_length=phase.sequence_length or before.sequence_length,
            lanes=phase.lanes or before.lanes,
            first_sample=phase.first_sample,
            numbers=phase.numbers,
            earlier=tuple(phases),
            restart=phase.restart,
        )
        try:
            order.check()
        except ConfigError as error:
            raise ConfigError(f"phase {len(phases)}: {error}") from None
        phases.append(order)
    return PhasedOrder(phases=phases)
