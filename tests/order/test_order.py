"""Rank arithmetic and the cursor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega.errors import ConfigError, StateError
from streammega.order.sharding import check_batch_sizes, check_resume, rank_samples


@pytest.mark.guarantee("stream-layout-global", "2-micro-steps")
@given(
    ranks=st.integers(1, 12),
    micro=st.integers(1, 5),
    steps=st.integers(1, 4),
    contiguous=st.booleans(),
    start=st.integers(0, 50),
)
def test_ranks_tile_the_global_batch_exactly_once(
    ranks: int, micro: int, steps: int, contiguous: bool, start: int
) -> None:
    size = ranks * micro
    ids = [
        rank_samples(start + step * size, micro, rank, ranks, contiguous=contiguous)
        for step in range(steps)
        for rank in range(ranks)
    ]
    assert sorted(np.concatenate(ids).tolist()) == list(range(start, start + steps * size))


@pytest.mark.guarantee("2-micro-steps")
@given(ranks=st.integers(1, 12), micro=st.integers(1, 5), start=st.integers(0, 200))
def test_strided_ranks_own_their_samples_for_good(ranks: int, micro: int, start: int) -> None:
    for rank in range(ranks):
        ids = rank_samples(start, micro, rank, ranks, contiguous=False)
        assert (ids % ranks == rank).all()


@pytest.mark.guarantee("2-micro-steps")
def test_contiguous_ranks_are_megatrons_single_sampler() -> None:
    # By hand: mbs 2, dp 3, 6 samples a micro-step; rank 1 takes the second pair of each run.
    assert [rank_samples(c, 2, 1, 3, contiguous=True).tolist() for c in (0, 6)] == [[2, 3], [8, 9]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((10, 3, 0, 2), "not a multiple"), ((8, 0, 0, 2), "micro_batch_size is 0")],
)
def test_sizes_that_do_not_divide_are_refused(
    sizes: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_batch_sizes(*sizes)


def test_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="dp_rank 2"):
        check_batch_sizes(8, 1, 2, 2)


def test_half_a_global_batch_resumes_only_where_the_rest_divides() -> None:
    check_resume(4, 2, 2)
    with pytest.raises(StateError, match="4 samples into a global batch"):
        check_resume(4, 3, 2)
