"""How much each phase of a stream order takes from each of its datasets: summed in closed form, for
any number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streammega.order.lanes import StreamOrder
from streammega.order.rests import Rest

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DealtPhase:
    """What samples of one phase take from each of its datasets; int64 [datasets] each.

    samples: how many. of_rests: of these, those of what former epochs had left, cut anew. joined:
    of these, those that join several runs of tokens. first_epoch, last_epoch: all others are of
    epochs [first, last), by their numbers, which are not used again when a dataset begins anew;
    equal where there are none. taken_over: tokens that former epochs had left, where this phase
    cuts them anew; too_short: of these, those that make no sample and wait for the next change.
    passed_over: tokens that former epochs had left and a restart passes over.
    """

    samples: Integers
    of_rests: Integers
    joined: Integers
    first_epoch: Integers
    last_epoch: Integers
    taken_over: Integers
    too_short: Integers
    passed_over: Integers


def dealt_by(order: StreamOrder, spans: Sequence[tuple[int, int]]) -> DealtPhase:
    """What [start, stop) spans of samples of a phase, in their order, take from its datasets.

    Cost: two walks of the blending tree in each lane for every span, whatever their length.
    """
    columns = len(order.datasets)
    samples = np.zeros(columns, np.int64)
    of_rests = np.zeros(columns, np.int64)
    joined = np.zeros(columns, np.int64)
    for start, stop in spans:
        before = order.counts(start - order.first_sample)
        after = order.counts(stop - order.first_sample)
        samples += (after - before).sum(axis=0)
        for column, rest in enumerate(order.rests):
            if rest is not None:
                numbers = _dealt_between(rest, before[:, column], after[:, column])
                of_rests[column] += (numbers[1] - numbers[0]).sum()
                joined[column] += _count_between(rest.joined, *numbers)
    first_epoch, last_epoch = _epochs_of(order, spans)
    taken_over, too_short, passed_over = _left_before(order)
    return DealtPhase(
        samples=samples,
        of_rests=of_rests,
        joined=joined,
        first_epoch=first_epoch,
        last_epoch=last_epoch,
        taken_over=taken_over,
        too_short=too_short,
        passed_over=passed_over,
    )


def _dealt_between(rest: Rest, before: Integers, after: Integers) -> tuple[Integers, Integers]:
    """The numbers [first, stop) of samples of a rest that each lane draws, between two counts of its
    draws; int64 [lanes] each.
    """
    first = rest.firsts + np.minimum(before, rest.shares)
    stop = rest.firsts + np.minimum(after, rest.shares)
    return first, stop


def _count_between(ascending: Integers, first: Integers, stop: Integers) -> int:
    """How many of some numbers lie in any of the ranges [first, stop)."""
    return int((np.searchsorted(ascending, stop) - np.searchsorted(ascending, first)).sum())


def _epochs_of(order: StreamOrder, spans: Sequence[tuple[int, int]]) -> tuple[Integers, Integers]:
    """The epochs [first, last) of each dataset that spans of samples read of, without rests."""
    first_epoch = order.first_epochs.copy()
    last_epoch = order.first_epochs.copy()
    if not spans:
        return first_epoch, last_epoch
    before = order.counts(spans[0][0] - order.first_sample)
    after = order.counts(spans[-1][1] - order.first_sample)
    for column, rest in enumerate(order.rests):
        shares: Integers | int = 0 if rest is None else rest.shares
        own_before = np.maximum(before[:, column] - shares, 0)
        own_after = np.maximum(after[:, column] - shares, 0)
        draws = own_after > own_before
        if draws.any():
            first_epoch[column] += order.geometry.epochs_of_draws(own_before, column)[draws].min()
            last_epoch[column] += order.epochs_of(np.where(draws, own_after, 0), column)
    return first_epoch, last_epoch


def _left_before(order: StreamOrder) -> tuple[Integers, Integers, Integers]:
    """Tokens that former epochs had left of each dataset that begins anew in a phase: those that
    it cuts anew, those of them that are too short, and those that a restart passes over.
    """
    taken_over = np.zeros(len(order.datasets), np.int64)
    too_short = np.zeros(len(order.datasets), np.int64)
    passed_over = np.zeros(len(order.datasets), np.int64)
    for column in range(len(order.datasets)):
        rest, is_read = order.left_before(column)
        if rest is None:
            continue
        if is_read:
            taken_over[column] = rest.tokens
            too_short[column] = rest.tokens - rest.samples * rest.length
        else:
            passed_over[column] = rest.tokens
    return taken_over, too_short, passed_over
