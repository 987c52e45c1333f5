"""Global batches dealt out by cost: whole, the same for all, and as even as promised."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega.kernels.documents import add_document_costs
from streammega.order.sharding import balanced_places
from tools.bench.balance import longest_rank, pace


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """(costs of a global batch, micro_batch_size, dp_size)."""
    rows = draw(st.integers(1, 4))
    ranks = draw(st.sampled_from([1, 2, 3, 8]))
    steps = draw(st.integers(1, 5))
    size = rows * ranks * steps
    # few different costs: many are equal
    largest = draw(st.sampled_from([1, 3, 1 << 40]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    return rng.integers(0, largest + 1, size), rows, ranks


@pytest.mark.guarantee("balance-batches-global")
@given(batches())
def test_every_sample_is_dealt_once_and_always_alike(batch: tuple[np.ndarray, int, int]) -> None:
    costs, rows, ranks = batch
    places = balanced_places(costs, rows, ranks)
    assert places.shape == (len(costs) // (rows * ranks), ranks, rows)
    assert sorted(places.reshape(-1).tolist()) == list(range(len(costs)))
    assert np.array_equal(places, balanced_places(costs.copy(), rows, ranks))


@pytest.mark.guarantee("whole-documents-equal", "ranks-differ-sample")
@given(batches())
def test_ranks_differ_by_one_sample_at_most(batch: tuple[np.ndarray, int, int]) -> None:
    costs, rows, ranks = batch
    dealt = costs[balanced_places(costs, rows, ranks)]
    range_of_costs = int(costs.max() - costs.min())
    mean = costs.sum() / ranks
    assert pace(dealt) <= mean + range_of_costs
    totals = dealt.sum(axis=(0, 2))
    assert totals.max() - totals.min() <= range_of_costs
    assert longest_rank(dealt) <= mean + range_of_costs
    for of_step in dealt:
        micro_batches = of_step.sum(axis=1)
        assert micro_batches.max() - micro_batches.min() <= of_step.max() - of_step.min()


@pytest.mark.guarantee("ranks-differ-sample")
@given(batches())
def test_alone_in_a_micro_batch_samples_are_never_slower_than_as_they_come(
    batch: tuple[np.ndarray, int, int],
) -> None:
    costs, rows, ranks = batch
    size = rows * ranks
    as_they_come = costs.reshape(-1, size, 1)
    assert pace(costs[balanced_places(costs, 1, size)]) <= pace(as_they_come)


@pytest.mark.guarantee("balanced-batch-finished")
@given(batches())
def test_what_was_read_before_a_position_does_not_depend_on_the_ranks(
    batch: tuple[np.ndarray, int, int],
) -> None:
    costs, rows, ranks = batch
    one_by_one = balanced_places(costs, 1, 1).reshape(-1)
    dealt = balanced_places(costs, rows, ranks)
    for step in range(len(dealt) + 1):
        read = dealt[:step].reshape(-1)
        assert set(read) == set(one_by_one[: step * rows * ranks])


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """(tokens of each sequence of each document, rows of tokens [start, stop))."""
    lengths = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8))
    total = sum(map(sum, lengths))
    bounds = st.integers(0, total)
    pairs = draw(st.lists(st.tuples(bounds, bounds), min_size=1, max_size=4))
    return lengths, [(min(pair), max(pair)) for pair in pairs]


@pytest.mark.guarantee("costs-bounds-batch")
@given(documents())
def test_costs_are_the_squares_of_documents(
    drawn: tuple[list[list[int]], list[tuple[int, int]]],
) -> None:
    lengths, rows = drawn
    document_of_token = [
        number for number, of_document in enumerate(lengths) for _ in range(sum(of_document))
    ]
    expected = []
    for start, stop in rows:
        groups = itertools.groupby(document_of_token[start:stop])
        expected.append(sum(len(list(group)) ** 2 for _, group in groups))
    sequences = [length for of_document in lengths for length in of_document]
    offsets = np.cumsum([0, *sequences])[:-1].astype(np.int64) * 2
    bounds = np.cumsum([0, *map(len, lengths)]).astype(np.int64)
    start_stop = np.array(rows, np.int64)
    costs = np.zeros(len(rows), np.int64)
    add_document_costs(
        offsets, bounds, 2, start_stop[:, 0].copy(), start_stop[:, 1].copy(), np.arange(len(rows)), costs
    )  # fmt: skip
    assert costs.tolist() == expected
