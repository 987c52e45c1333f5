"""The stream order backwards: which samples read given tokens is what a scan of all samples finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega.kernels.keyed import keyed
from streammega.kernels.stream import choose, row_of_draw
from streammega.order.epoch_layout import FilePart, StreamDataset
from streammega.order.stream_inverse import epochs_between, samples_using_tokens
from streammega.order.stream_order import StreamOrder, tree_fractions
from tests.order.test_phases import PhasedOrder, chain_of
from tests.order.test_stream_order import orders


def scanned(
    order: PhasedOrder, dataset: int, file: int, start: int, stop: int, end: int
) -> list[tuple[int, int, int]]:
    """The same by looking at every sample."""
    extents = order.locate(np.arange(end))
    low = np.maximum(extents.start, start)
    high = np.minimum(extents.stop, stop)
    of_file = (extents.dataset == dataset) & (extents.file == file)
    sample = np.flatnonzero(of_file & (low < high))
    columns = (sample, low[sample], high[sample])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def found(
    order: PhasedOrder, dataset: int, file: int, start: int, stop: int, end: int
) -> list[tuple[int, int, int]]:
    readings = order.uses(dataset, file, start, stop, end)
    columns = (readings.sample, readings.start, readings.stop)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@st.composite
def scheduled(draw: st.DrawFn) -> PhasedOrder:
    """Blends whose weights change, some to zero and back."""
    count = draw(st.integers(1, 5))
    order = draw(orders(count=count))
    weight = st.sampled_from([0.0, 1e-3, 0.2, 1.0, 7.0])
    later = []
    first = 0
    for _ in range(draw(st.integers(0, 3))):
        first += draw(st.integers(1, 300))
        weights = [draw(weight) for _ in range(count)]
        if any(weights):
            phase = {
                "first_sample": first,
                "numbers": range(count),
                "datasets": order.datasets,
                "weights": weights,
            }
            later.append(phase)
    return chain_of(order, later)


@pytest.mark.guarantee("steps-document-seen")
@given(order=scheduled(), data=st.data())
def test_the_samples_that_read_tokens_are_those_a_scan_finds(
    order: PhasedOrder, data: st.DataObject
) -> None:
    end = data.draw(st.integers(0, 3000), label="end")
    dataset = data.draw(st.integers(0, len(order.phases[0].datasets) - 1), label="dataset")
    part = data.draw(st.sampled_from(list(order.phases[0].datasets[dataset].parts)), label="part")
    start = data.draw(st.integers(0, part.start + part.tokens + 3), label="start")
    stop = start + data.draw(st.integers(0, 40) | st.just(1000), label="tokens")
    place = (dataset, part.file, start, stop, end)
    assert found(order, *place) == scanned(order, *place)


@pytest.mark.guarantee("steps-document-seen")
def test_every_token_that_a_sample_has_leads_back_to_it() -> None:
    """In a large order, of samples anywhere: as many epochs as there are come back, this one too."""
    parts = [FilePart(file=n, start=n, tokens=3_000_000 + 77 * n) for n in range(3)]
    datasets = [StreamDataset(parts=parts, itemsize=2) for _ in range(7)]
    first = StreamOrder(
        datasets=datasets,
        weights=[1, 5, 0.01, 2, 2, 3, 1e-4],
        sequence_length=128,
        extra_token=False,
        seed=5,
        lanes=1024,
    )
    later = {
        "first_sample": 10**6,
        "numbers": range(7),
        "datasets": datasets,
        "weights": [1, 0, 0.01, 4, 2, 3, 1e-4],
    }
    order = chain_of(first, [later])
    samples = np.random.default_rng(0).integers(0, 10**7, 300)
    extents = order.locate(samples)
    rows = zip(samples, extents.dataset, extents.file, extents.start, extents.stop, strict=True)
    for sample, dataset, file, start, stop in rows:
        middle = (int(start) + int(stop)) // 2
        readings = order.uses(int(dataset), int(file), middle, middle + 1, int(sample) + 1)
        assert readings.sample[-1] == sample
        phase = order.phases[order.phase_at(int(sample))]
        _, epochs = epochs_between(phase, int(dataset), int(sample) + 1)
        # once an epoch, and in some none: what lies between its samples
        assert epochs - 2 <= len(readings) <= epochs


@pytest.mark.guarantee("steps-document-seen")
def test_ten_billion_samples_over_a_thousand_datasets_are_no_more_to_look_at() -> None:
    """A scan of them would take hours; every reading that is named is one by `locate`."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(10**8 * 2, 10**9, (1000, 4))
    datasets = []
    for files in sizes.tolist():
        parts = [FilePart(file=n, start=0, tokens=tokens) for n, tokens in enumerate(files)]
        datasets.append(StreamDataset(parts=parts, itemsize=2))
    order = StreamOrder(
        datasets=datasets,
        weights=(rng.random(1000) + 0.5).tolist(),
        sequence_length=4096,
        extra_token=True,
        seed=1,
        lanes=1024,
    )
    end = 10**10
    start = 10**8
    stop = start + 20_000
    readings = samples_using_tokens(order, 417, 2, start, stop, end)
    _, epochs = epochs_between(order, 417, end)
    assert epochs > 5
    # six samples an epoch touch as many tokens, and all but the last epochs are whole
    assert len(readings) >= 5 * (epochs - 2)
    extents = order.locate(readings.sample)
    assert set(extents.dataset.tolist()) == {417}
    assert set(extents.file.tolist()) == {2}
    assert (np.maximum(extents.start, start) == readings.start).all()
    assert (np.minimum(extents.stop, stop) == readings.stop).all()
    assert readings.sample[-1] < end


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-9, 1e-4, 0.3, 1.0, 50.0]), min_size=1, max_size=9),
    row=st.integers(0, 2**40),
    lane=st.integers(0, 2000),
)
def test_the_row_of_a_draw_is_the_row_that_makes_it(
    weights: list[float], row: int, lane: int
) -> None:
    if not any(weights):
        weights = [*weights, 1.0]
    key = np.uint64(keyed(np.uint64(3), 0, 1, 8))
    fractions = tree_fractions(weights)
    dataset, draw = choose(row, lane, 0, fractions, len(weights), key)
    assert row_of_draw(draw, dataset, lane, 0, fractions, len(weights), key) == row


@pytest.mark.parametrize("draw", [0, 1, 2**40])
def test_a_dataset_without_weight_is_never_drawn(draw: int) -> None:
    fractions = tree_fractions([1.0, 0.0, 0.0])
    key = np.uint64(1)
    assert row_of_draw(draw, 0, 0, 0, fractions, 3, key) == draw
    assert row_of_draw(draw, 1, 0, 0, fractions, 3, key) == -1
    assert row_of_draw(draw, 2, 0, 0, fractions, 3, key) == -1
