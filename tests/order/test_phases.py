"""Phases of the stream order: a chain of them is what each lane would draw one after the other, so
no token is read twice in an epoch, none is lost, and what comes later changes nothing before it.
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega.config import PhaseConfig, Segment
from streammega.errors import ConfigError
from streammega.kernels.stream import choose, has_spread_runs
from streammega.order.epoch_layout import FilePart, StreamDataset
from streammega.order.epoch_remainder import EpochRemainder, remainder_of
from streammega.order.extents import Extents, merge_extents
from streammega.order.quality import place_shares
from streammega.order.schedule import TrainingSchedule
from streammega.order.stream_order import StreamOrder, usage_of
from tests.support.examples import examples

LENGTH = 5
LONGEST = 12
"""Tokens of a sample in any phase."""
Row = tuple[int, int, int, int]


class PhasedOrder:
    """The orders of all phases of a run, one after the other."""

    def __init__(self, phases: Sequence[StreamOrder]) -> None:
        self.phases = phases
        self.firsts = [order.first_sample for order in phases]
        self.ends: list[int | None] = [*self.firsts[1:], None]

    def phase_at(self, sample: int) -> int:
        return bisect_right(self.firsts, sample) - 1

    def locate(self, sample_ids: np.ndarray) -> Extents:
        parts = []
        phases = np.searchsorted(self.firsts, sample_ids, side="right") - 1
        for number in np.unique(phases).tolist():
            here = np.flatnonzero(phases == number)
            parts.append((here, self.phases[number].locate(sample_ids[here])))
        return merge_extents(parts)


def chain_of(first: StreamOrder, later: Sequence[dict[str, Any]]) -> PhasedOrder:
    """The orders of a first phase and of those that follow it. later: what changes in each."""
    orders = [first]
    for changes in later:
        orders.append(replace(orders[-1], earlier=tuple(orders), **changes))
    return PhasedOrder(orders)


def rows(extents: Extents) -> list[Row]:
    columns = (extents.dataset, extents.file, extents.start, extents.stop)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@st.composite
def some_datasets(draw: st.DrawFn, count: int) -> list[StreamDataset]:
    """Datasets of a few samples to a few hundred, in one to three files."""
    found = []
    for _ in range(count):
        tokens = draw(st.lists(st.integers(LONGEST + 1, 300), min_size=1, max_size=3))
        parts = [FilePart(file=n, start=3 * n, tokens=t) for n, t in enumerate(tokens)]
        found.append(StreamDataset(parts=parts, itemsize=2))
    return found


@st.composite
def chains(draw: st.DrawFn, cut_anew: bool = False) -> PhasedOrder:
    """Up to five phases over up to four datasets, any of which may come, go and come back. With
    `cut_anew` samples and lanes change at any time; else only for datasets that are new.
    """
    datasets = draw(some_datasets(4))
    lanes = draw(st.sampled_from([1, 2, 6, 8, 12]))
    weights = st.sampled_from([1e-3, 0.1, 0.3, 0.9, 5.0])
    blends = []
    for _ in range(draw(st.integers(1, 5))):
        members = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
        blends.append([(member, draw(weights)) for member in members])
    first = StreamOrder(
        datasets=[datasets[member] for member, _ in blends[0]],
        weights=[weight for _, weight in blends[0]],
        sequence_length=LENGTH,
        extra_token=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        lanes=lanes,
        shuffle_block_bytes=draw(st.integers(1, 100)),
    )
    first_sample = 0
    later = []
    shape = (LENGTH, lanes)
    shapes = {member: shape for member, _ in blends[0]}
    for drawn in blends[1:]:
        # in the middle of a row as well: a global batch is a part of it
        first_sample += draw(st.integers(1, 12 * lanes))
        shape = draw(st.sampled_from([shape, shape, (3, 6), (LENGTH, 12)]))
        if cut_anew and draw(st.booleans()):
            shape = (draw(st.integers(1, LONGEST)), draw(st.sampled_from([1, 3, 4, 12])))
        if not cut_anew:
            known = [shapes[member] for member, _ in drawn if member in shapes]
            shape = known[0] if known else shape
        blend = [pair for pair in drawn if cut_anew or shapes.get(pair[0], shape) == shape]
        shapes |= {member: shape for member, _ in blend}
        numbered = list(shapes)
        later.append(
            {
                "first_sample": first_sample,
                "numbers": [numbered.index(member) for member, _ in blend],
                "datasets": [datasets[member] for member, _ in blend],
                "weights": [weight for _, weight in blend],
                "sequence_length": shape[0],
                "lanes": shape[1],
            }
        )
    return chain_of(first, later)


class Lanes:
    """What every lane of a chain draws, one sample after the other: slow, and without any sum.

    A lane that draws from a dataset for the c-th time takes what it would take in row c if it had that
    dataset alone.
    """

    def __init__(self, order: PhasedOrder) -> None:
        self.order = order
        self.phase = -1
        self.drawn: Counter[tuple[int, int]] = Counter()
        self.alone: dict[int, StreamOrder] = {}

    def draw(self, sample: int) -> tuple[int, int, int]:
        """(number of the dataset, lane, which of its draws) of the next sample."""
        number = max(n for n, p in enumerate(self.order.phases) if p.first_sample <= sample)
        while self.phase < number:
            self.phase += 1
            self._begin(self.order.phases[self.phase])
        phase = self.order.phases[number]
        row, lane = divmod(sample - phase.first_sample, phase.lanes)
        tree = phase.tree
        assert tree.segment == number
        column, _ = choose(row, lane, number, tree.fractions, len(phase.datasets), tree.key)
        dataset = int(phase.dataset_numbers[column])
        draw = self.drawn[dataset, lane]
        self.drawn[dataset, lane] += 1
        return dataset, lane, draw

    def place(self, dataset: int, lane: int, draw: int) -> tuple[int, int, int]:
        """(run, epoch, samples of the run) of a draw."""
        alone = self.alone[dataset]
        group = int(alone.lanes_per_run[0])
        size = int(alone.layout.datasets["size"][0])
        run = lane // group
        members = range(run * group, (run + 1) * group)
        length = sum(size // alone.lanes + (member < size % alone.lanes) for member in members)
        return run, (draw * group + lane % group) // length, length

    def _begin(self, phase: StreamOrder) -> None:
        for number, dataset in zip(phase.dataset_numbers.tolist(), phase.datasets, strict=True):
            alone = replace(
                phase,
                datasets=[dataset],
                weights=[1.0],
                numbers=[number],
                first_sample=0,
                earlier=(),
            )
            self.alone.setdefault(number, alone)

    def locate(self, total: int) -> list[Row]:
        """Where the next samples lie."""
        draws = [self.draw(sample) for sample in range(total)]
        places = []
        for dataset in dict.fromkeys(dataset for dataset, _, _ in draws):
            alone = self.alone[dataset]
            mine = [place for place, draw in enumerate(draws) if draw[0] == dataset]
            ids = [draws[place][2] * alone.lanes + draws[place][1] for place in mine]
            places += list(zip(mine, rows(alone.locate(np.array(ids))), strict=True))
        return [row for _, row in sorted(places)]


def length_of(order: PhasedOrder) -> int:
    """Samples up to a few rows into the last phase."""
    last = order.phases[-1]
    return last.first_sample + 7 * last.lanes + last.lanes // 2


@pytest.mark.guarantee("phases-lane-goes")
def test_a_phase_may_follow_hundreds_of_others() -> None:
    datasets = [
        StreamDataset(parts=[FilePart(file=0, start=0, tokens=9_000 + number)], itemsize=2)
        for number in range(2)
    ]
    first = StreamOrder(
        datasets=datasets, weights=[1.0, 1.0], sequence_length=8, extra_token=True,
        seed=1, lanes=4, shuffle_block_bytes=64,
    )  # fmt: skip
    later = [
        {
            "first_sample": 8 * number, "numbers": [0, 1], "datasets": datasets, "weights": [1.0, number],
            "sequence_length": 8 + number // 300,
        }
        for number in range(1, 601)
    ]  # fmt: skip
    last = np.arange(4800, 4816)
    found = chain_of(first, later).locate(last)
    in_turn = chain_of(first, later)
    in_turn.locate(np.arange(4800))
    assert rows(found) == rows(in_turn.locate(last))


def test_threads_that_read_phases_do_not_wait_for_each_other() -> None:
    """What a phase needs of earlier ones is computed when it is first asked for, in any thread."""
    dataset = StreamDataset(parts=[FilePart(file=0, start=0, tokens=5_000)], itemsize=2)
    first = StreamOrder(
        datasets=[dataset], weights=[1.0], sequence_length=8, extra_token=True,
        seed=1, lanes=8, shuffle_block_bytes=64,
    )  # fmt: skip
    later = [
        {
            "first_sample": 64 * number, "numbers": [0], "datasets": [dataset], "weights": [1.0],
            "sequence_length": 8 + 8 * (number % 2),
        }
        for number in range(1, 6)
    ]  # fmt: skip
    asked = ("progress", "remainders")
    orders = [(chain_of(first, later).phases[-1], name) for _ in range(20) for name in asked]
    _ = chain_of(first, later).phases[-1].remainders  # compiles the kernels
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=getattr, args=(order, name), daemon=True)
            for order, name in orders
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.guarantee("phases-lane-goes")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(order=chains())
def test_every_lane_goes_on_in_each_dataset_where_it_was(order: PhasedOrder) -> None:
    total = length_of(order)
    assert rows(order.locate(np.arange(total))) == Lanes(order).locate(total)


def check_ids_and_past(
    order: PhasedOrder, data: st.DataObject, read: Callable[[Extents], list[Any]]
) -> None:
    """Any ids are located as among all, and the samples of the first phases as without others."""
    total = length_of(order)
    whole = read(order.locate(np.arange(total)))
    ids = np.array(data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=30)))
    assert read(order.locate(ids)) == [whole[sample] for sample in ids.tolist()]
    begun = data.draw(st.integers(1, len(order.phases)))
    past = PhasedOrder(order.phases[:begun])
    end = total if begun == len(order.phases) else order.phases[begun].first_sample
    assert read(past.locate(np.arange(end))) == whole[:end]


@pytest.mark.guarantee("later-phase-never")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(order=chains(), data=st.data())
def test_a_sample_is_a_function_of_its_id_and_of_the_phases_up_to_it(
    order: PhasedOrder, data: st.DataObject
) -> None:
    check_ids_and_past(order, data, rows)


@pytest.mark.guarantee("data-come-go", "phases-lane-goes", "phase-samples-may")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(order=chains())
def test_no_sample_comes_twice_in_an_epoch_and_none_is_left_out(order: PhasedOrder) -> None:
    """Over all phases: of each dataset and run, the draws of an epoch are so many different samples
    as the run has, as soon as its lanes are past it.
    """
    last = order.phases[-1]
    total = last.first_sample + 40 * last.lanes
    lanes = Lanes(order)
    seen: dict[tuple[int, int, int], list[Row]] = {}
    for sample, row in enumerate(rows(order.locate(np.arange(total)))):
        dataset, lane, draw = lanes.draw(sample)
        run, epoch, length = lanes.place(dataset, lane, draw)
        found = seen.setdefault((dataset, run, epoch), [])
        found.append(row)
        assert len(set(found)) == len(found) <= length
    for (dataset, run, epoch), found in seen.items():
        group = int(lanes.alone[dataset].lanes_per_run[0])
        members = range(run * group, (run + 1) * group)
        ends = [lanes.place(dataset, lane, lanes.drawn[dataset, lane]) for lane in members]
        if all(reached > epoch for _, reached, _ in ends):
            assert len(found) == ends[0][2]


@pytest.mark.guarantee("phases-lane-goes")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(order=chains(), samples=st.integers(0, 400))
def test_counts_are_what_is_drawn_and_keep_to_the_weights(order: PhasedOrder, samples: int) -> None:
    for number, phase in enumerate(order.phases):
        counts = phase.counts(samples) - phase.counts(0)
        ids = phase.first_sample + np.arange(samples)
        located = phase.locate(ids).dataset
        drawn = np.zeros_like(counts)
        columns = [phase.dataset_numbers.tolist().index(dataset) for dataset in located]
        np.add.at(drawn, (phase.lane_of(ids), np.array(columns, np.int64)), 1)
        np.testing.assert_array_equal(counts, drawn)
        weights = phase.weights
        target = np.array(weights) / sum(weights) * counts.sum(axis=1, keepdims=True)
        levels = math.ceil(math.log2(max(2, len(weights))))
        assert np.abs(counts - target).max() <= levels + 1e-6
        if number == 0:
            np.testing.assert_array_equal(phase.counts(samples), counts)


@pytest.mark.guarantee("ranks-micro-batches")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(order=chains())
def test_ranks_own_their_lanes_in_every_phase(order: PhasedOrder) -> None:
    for phase in order.phases:
        ids = phase.first_sample + np.arange(3 * phase.lanes)
        for ranks in (ranks for ranks in range(1, phase.lanes + 1) if phase.lanes % ranks == 0):
            owners = set(zip(phase.lane_of(ids).tolist(), (ids % ranks).tolist(), strict=True))
            assert len(owners) == phase.lanes


def golden_order() -> StreamOrder:
    """A dataset of more than four blocks a lane, one of fewer, and one whose lanes share a run."""
    large = [FilePart(file=0, start=0, tokens=9_013), FilePart(file=1, start=7, tokens=3_331)]
    spread = [FilePart(file=0, start=3, tokens=3_456)]
    small = [FilePart(file=0, start=7, tokens=333)]
    order = StreamOrder(
        datasets=[StreamDataset(parts=parts, itemsize=2) for parts in (large, spread, small)],
        weights=[0.6, 0.3, 0.1],
        sequence_length=10,
        extra_token=True,
        seed=1234,
        lanes=8,
        shuffle_block_bytes=700,
    )
    assert order.block_samples.tolist() == [35, 35, 1]
    assert [has_spread_runs(row) for row in order.layout.datasets] == [False, True, False]
    assert order.lanes_per_run.tolist() == [1, 1, 8]
    return order


def test_golden_phases() -> None:
    """Changing these numbers is a breaking change: bump STREAM_VERSION, and say so first in the
    CHANGELOG.
    """
    first = golden_order()
    large, spread, small = first.datasets
    later = [
        {"first_sample": 400, "numbers": [3, 1, 2], "datasets": [large, spread, small], "weights": [0.5, 0.4, 0.1]},
        {"first_sample": 808, "numbers": [0, 1], "datasets": [large, spread], "weights": [0.7, 0.3]},
        {"first_sample": 1608, "numbers": [0, 1, 2], "datasets": [large, spread, small],
         "weights": [0.6, 0.3, 0.1], "sequence_length": 16},
        {"first_sample": 2408, "numbers": [1, 2], "datasets": [spread, small], "weights": [0.8, 0.2],
         "lanes": 12},
    ]  # fmt: skip
    found = chain_of(first, later).locate(np.arange(4000))
    digests = []
    for column in (found.row_splits, found.dataset, found.file, found.start, found.stop):
        stored = np.ascontiguousarray(column, "<i8").tobytes()
        digests.append(hashlib.blake2b(stored, digest_size=8).hexdigest())
    assert digests == GOLDEN_DIGESTS


GOLDEN_DIGESTS = [
    "4880296d09591576",
    "e198ea5c515993ac",
    "d88a42d94e0a4555",
    "81745ed5629e0bfc",
    "931dd7b66a4b2da1",
]


def some_remainders() -> Iterator[EpochRemainder]:
    """What is left of a dataset whose lanes are up to three epochs apart, cut into other samples."""
    rng = np.random.default_rng(8)
    for tokens in (901, 2906, 3500, 4222, 6001, 9444):
        parts = [FilePart(file=0, start=0, tokens=tokens), FilePart(file=1, start=7, tokens=333)]
        order = StreamOrder(
            datasets=[StreamDataset(parts=parts, itemsize=2)],
            weights=[1.0],
            sequence_length=10,
            extra_token=True,
            seed=1234,
            lanes=8,
            shuffle_block_bytes=100,
        )
        layout = order.layout.of_dataset(0)
        samples = layout.datasets["size"][0]
        for most in (2, samples // 10, samples // 8, samples // 3):
            drawn = np.sort(rng.integers(0, most + 1, 8))[:: rng.choice([-1, 1])].copy()
            drawn[0] += 1
            rest = remainder_of(layout, None, drawn, length=7, lanes=3)
            assert rest is not None
            yield rest


def test_golden_remainders() -> None:
    """Changing this is a breaking change: bump STREAM_VERSION, and say so first in the CHANGELOG."""
    digest = hashlib.sha256()
    for rest in some_remainders():
        for column in ("item", "file", "start", "stop"):
            runs = rest.runs(np.arange(rest.samples), 1)
            digest.update(np.ascontiguousarray(runs[column], "<i8").tobytes())
    assert digest.hexdigest() == GOLDEN_REMAINDERS


GOLDEN_REMAINDERS = "5297f6cb5822781ceac4aef00610586f7154c9e930bc65e5677189a6cdf5bc3c"


def tokens_of(extents: Extents, extra: bool, number: int) -> Counter[tuple[int, int]]:
    """How often each token (file, place) of a dataset is read, as an input."""
    stop = extents.stop.copy()
    stop[extents.row_splits[1:] - 1] -= int(extra)
    found: Counter[tuple[int, int]] = Counter()
    for row in np.flatnonzero(extents.dataset == number).tolist():
        file = int(extents.file[row])
        found.update((file, token) for token in range(int(extents.start[row]), int(stop[row])))
    return found


def tokens_of_epoch(order: StreamOrder, column: int, epoch: int) -> Counter[tuple[int, int]]:
    """Those of one epoch of a dataset, in the samples and lanes of an order."""
    alone = replace(
        order,
        datasets=[order.datasets[column]],
        weights=[1.0],
        numbers=[int(order.dataset_numbers[column])],
        first_sample=0,
        earlier=(),
    )
    alone.__dict__["first_epochs"] = np.array([epoch])
    number = int(order.dataset_numbers[column])
    return tokens_of(
        alone.locate(np.arange(int(alone.layout.datasets["size"][0]))), order.extra_token, number
    )


@pytest.mark.guarantee("data-come-go", "phase-samples-may")
@given(order=chains(cut_anew=True))
@settings(deadline=None, max_examples=15)
def test_what_epochs_have_left_is_read_once_in_samples_of_another_length(
    order: PhasedOrder,
) -> None:
    """What was read and what is left are the epochs that have begun, each token once in each."""
    total = length_of(order)
    found = order.locate(np.arange(total))
    sizes = np.add.reduceat(found.stop - found.start, found.row_splits[:-1])
    phase_of_sample = [order.phase_at(sample) for sample in range(total)]
    assert sizes.tolist() == [
        order.phases[phase].sequence_length + order.phases[phase].extra for phase in phase_of_sample
    ]
    extra = order.phases[0].extra_token
    ends = [end or total for end in order.ends]
    for number in set(found.dataset.tolist()):
        expected: Counter[tuple[int, int]] = Counter()
        eras: dict[tuple[int, int, int], tuple[StreamOrder, int, int]] = {}
        for phase, end in zip(order.phases, ends, strict=True):
            for column in np.flatnonzero(phase.dataset_numbers == number).tolist():
                shape = (int(phase.first_epochs[column]), phase.sequence_length, phase.lanes)
                eras.pop(shape, None)  # the last stays last
                eras[shape] = (phase, column, end)
        for phase, column, end in eras.values():
            draws = phase.counts(end - phase.first_sample)[:, column]
            rest = phase.remainders[column]
            own = draws if rest is None else np.maximum(draws - rest.lane_counts, 0)
            if rest is not None:
                assert rest.lane_counts.max() - rest.lane_counts.min() <= 1
                assert rest.tokens - rest.samples * rest.length < phase.sequence_length
            for epoch in range(phase.layout.epochs_begun(own, column)):
                first_epoch = int(phase.first_epochs[column])
                expected += tokens_of_epoch(phase, column, first_epoch + epoch)
        left = remainder_of(
            phase.layout.of_dataset(column), phase.remainders[column], draws, length=1, lanes=1
        )
        assert left is not None or expected == tokens_of(found, extra, number)
        seen = tokens_of(found, extra, number)
        if left is not None:
            runs = left.runs(np.arange(left.tokens), 0)
            seen += Counter(zip(runs["file"].tolist(), runs["start"].tolist(), strict=True))
        assert seen == expected


@pytest.mark.guarantee("phase-samples-may")
@given(order=chains(cut_anew=True), data=st.data())
@settings(deadline=None, max_examples=15)
def test_a_joined_sample_is_a_function_of_its_id_and_of_the_phases_up_to_it(
    order: PhasedOrder, data: st.DataObject
) -> None:
    check_ids_and_past(order, data, samples_of_extents)


def samples_of_extents(extents: Extents) -> list[list[Row]]:
    found = rows(extents)
    splits = extents.row_splits.tolist()
    return [found[first:stop] for first, stop in zip(splits, splits[1:], strict=False)]


# --- batch sizes ---


def schedule_of(
    size: int, rampup_batch_size: tuple[int, int, int] | None, changes: list[tuple[int, int | None]]
) -> TrainingSchedule:
    """changes: (first sample, global batch size) of later phases."""
    segments = [Segment(first_sample=0, datasets=(), weights=None, sequence_length=4)]
    for first_sample, changed in changes:
        phase = PhaseConfig(first_sample=first_sample, global_batch_size=changed)
        segments.append(segments[-1].followed_by(phase))
    return TrainingSchedule(
        global_batch_size=size, rampup_batch_size=rampup_batch_size, segments=segments
    )


def test_a_batch_size_holds_from_its_phase_on() -> None:
    schedule = schedule_of(8, None, [(40, None), (64, 16), (128, 4)])
    assert schedule.stages == [(0, 8), (64, 16), (128, 4)]
    assert [schedule.size_at(at) for at in (0, 63, 64, 127, 128)] == [8, 8, 16, 16, 4]
    assert schedule.samples_after(10) == 96
    schedule.check(2, 0, 2)
    resumed = replace(schedule, origin=64)  # a step of 16 began at 64
    assert resumed.stages == [(64, 16), (128, 4)]
    assert (resumed.offset_at(72), resumed.offset_at(30), resumed.size_at(30)) == (8, 6, 8)


def test_steps_before_a_resume_have_the_size_of_their_phase() -> None:
    resumed = replace(schedule_of(8, None, [(40, 12)]), origin=52)
    assert [resumed.offset_at(at) for at in (10, 30)] == [2, 6]
    assert [resumed.size_at(at) for at in (39, 40)] == [8, 12]


@pytest.mark.parametrize("rampup", [(0, 4, 40), (4, 0, 40), (4, 4, 0), (16, 4, 40)])
def test_a_ramp_up_of_sizes_that_cannot_be_is_refused(rampup: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="takes three positive numbers, and the first is at most"):
        schedule_of(12, rampup, [])


def test_a_phase_ends_the_ramp_up_that_it_finds() -> None:
    schedule = schedule_of(12, (4, 4, 40), [(28, 6)])
    assert schedule.stages == [(0, 4), (20, 8), (28, 6)]
    assert schedule_of(12, (4, 4, 40), [(28, None)]).stages == [(0, 4), (20, 8), (44, 12)]


def test_a_phase_within_a_step_is_refused_with_what_would_do() -> None:
    schedule = schedule_of(8, None, [(40, 16), (60, None)])
    with pytest.raises(
        ConfigError, match=r"phase 2 begins at sample 60, 4 samples into.* 56 or at 72"
    ):
        schedule.check(1, 0, 1)


# --- what each phase takes from its datasets ---


@pytest.mark.guarantee("describe-order-report")
@pytest.mark.parametrize("cut_anew", [False, True])
@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_what_phases_take_from_datasets_is_what_a_scan_counts(
    cut_anew: bool, data: st.DataObject
) -> None:
    order = data.draw(chains(cut_anew=cut_anew))
    ends = [end or length_of(order) for end in order.ends]
    for phase, end in zip(order.phases, ends, strict=True):
        size = end - phase.first_sample
        cuts = sorted(data.draw(st.integers(0, size)) for _ in range(4))
        first, second, third, last = (phase.first_sample + cut for cut in cuts)
        ids = np.concatenate([np.arange(first, second), np.arange(third, last)])
        dealt = usage_of(phase, [(first, second), (third, last)])
        located = phase.locate(ids)
        number = located.dataset[located.row_splits[:-1]]
        for column, dataset in enumerate(phase.dataset_numbers.tolist()):
            assert dealt["samples"][column] == (number == dataset).sum()
            assert dealt["from_remainder"][column] <= dealt["samples"][column]
            rest = phase.carried_over(column)
            assert dealt["carried_tokens"][column] == (0 if rest is None else rest.tokens)
            assert dealt["unused_tokens"][column] < phase.sequence_length
        if not cut_anew:
            assert not dealt["from_remainder"].any()


@pytest.mark.guarantee("small-data-shuffled")
@pytest.mark.parametrize(
    ("tokens", "length", "batch", "before", "lanes"),
    [
        (6_029_072, 128, 8, 512, 1024),
        (6_029_072, 128, 64, 64, 512),
        (20_000_000, 512, 16, 16, 512),
        (20_000_000, 512, 8, 512, 4096),
        (60_000_000, 1024, 8, 512, 4096),
        (400_000_000, 2048, 8, 512, 4096),
    ],
)
def test_what_an_epoch_has_left_is_mixed_as_well_in_other_lanes(
    tokens: int, length: int, batch: int, before: int, lanes: int
) -> None:
    """Places of one and eight batches right after the change, beside a full shuffle."""
    at = 10 * batch
    first = StreamOrder(
        datasets=[
            StreamDataset(parts=[FilePart(file=0, start=0, tokens=tokens)], itemsize=2),
        ],
        weights=[1.0],
        sequence_length=length,
        extra_token=True,
        seed=7,
        lanes=before,
    )
    changed = replace(first, lanes=lanes, first_sample=at, earlier=(first,))
    found = changed.locate(at + np.arange(32 * batch))
    samples = found.start[found.row_splits[:-1]] // length
    dataset = np.zeros(len(samples), np.int64)
    sizes, of_place = np.array([tokens // length]), np.array([(1 << 17) // length])
    assert place_shares(samples, dataset, sizes, of_place, (batch, 8 * batch)).min() >= 0.9
