"""Ranks, coordinates and groups: a bijection, a partition, and those of Megatron itself."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega import ParallelLayout, Ranks
from streammega.errors import ConfigError
from streammega.order.sharding import zigzag_bounds
from tests.support.oracle import parallel_state

SIZES = st.sampled_from([1, 2, 3, 4])
ORDERS = st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join)


@pytest.mark.guarantee("parallellayout-coordinates-ranks")
@given(tp=SIZES, cp=SIZES, dp=SIZES, pp=SIZES, order=ORDERS)
def test_groups_are_megatrons(tp: int, cp: int, dp: int, pp: int, order: str) -> None:
    layout = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    oracle = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    for count in (1, 2, 3):
        for name in map("-".join, itertools.combinations(["tp", "cp", "dp", "pp"], count)):
            assert layout.groups(name) == oracle.get_ranks(name), name
    assert layout.groups("dp-cp") == layout.groups("cp-dp") == oracle.get_ranks("dp-cp")
    pipelines = oracle.get_ranks("pp")
    assert layout.groups("embedding") == [
        parallel_state.default_embedding_ranks(ranks) for ranks in pipelines
    ]
    assert layout.groups("position-embedding") == [
        parallel_state.default_position_embedding_ranks(ranks) for ranks in pipelines
    ]


@pytest.mark.guarantee("parallellayout-coordinates-ranks")
@given(tp=SIZES, cp=SIZES, ep=SIZES, dp=SIZES, pp=SIZES)
def test_groups_of_experts_are_megatrons(tp: int, cp: int, ep: int, dp: int, pp: int) -> None:
    if (cp * dp) % ep:
        with pytest.raises(ConfigError, match="does not divide"):
            ParallelLayout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp)
        return
    layout = ParallelLayout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp)
    oracle = parallel_state.RankGenerator(
        tp=tp, ep=ep, dp=cp * dp // ep, pp=pp, cp=1, order="tp-cp-ep-dp-pp"
    )
    assert layout.groups("ep") == oracle.get_ranks("ep")
    assert layout.groups("edp") == oracle.get_ranks("dp")
    assert layout.groups("etp-ep") == oracle.get_ranks("tp-ep")
    assert layout.groups("etp-ep-pp") == oracle.get_ranks("tp-ep-pp")


@pytest.mark.guarantee("parallellayout-coordinates-ranks")
@given(tp=SIZES, cp=SIZES, dp=SIZES, pp=SIZES, order=ORDERS)
def test_coordinates_are_a_bijection_and_every_group_partitions_the_world(
    tp: int, cp: int, dp: int, pp: int, order: str
) -> None:
    layout = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    everyone = list(range(layout.world_size))
    for rank in everyone:
        at = layout.coordinates(rank)
        assert layout.rank_of(tp=at["tp"], cp=at["cp"], dp=at["dp"], pp=at["pp"]) == rank
        assert rank in layout.group_of(rank, "tp-pp")
    for name in ("tp", "dp-cp", "tp-cp", "tp-pp", "tp-cp-dp-pp", "ep"):
        assert sorted(itertools.chain.from_iterable(layout.groups(name))) == everyone


def test_the_default_order_is_the_documented_formula() -> None:
    layout = ParallelLayout(tp=2, cp=3, dp=4, pp=5)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        assert rank == at["tp"] + 2 * (at["cp"] + 3 * (at["dp"] + 4 * at["pp"]))


@pytest.mark.guarantee("parallellayout-coordinates-ranks")
@given(
    tp=SIZES,
    cp=SIZES,
    dp=SIZES,
    pp=SIZES,
    order=ORDERS,
    names=st.permutations(["tp", "cp", "dp", "pp"]),
)
def test_meshes_go_both_ways(
    tp: int, cp: int, dp: int, pp: int, order: str, names: list[str]
) -> None:
    layout = ParallelLayout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    mesh = SimpleNamespace(mesh_dim_names=tuple(names), ndim=4, mesh=layout.grid(names))
    again = ParallelLayout.from_mesh(mesh)
    assert (again.tp, again.cp, again.dp, again.pp) == (tp, cp, dp, pp)
    assert np.array_equal(again.grid(names), layout.grid(names))
    for name in ("tp", "dp-cp", "pp"):
        assert sorted(again.groups(name)) == sorted(layout.groups(name))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp is 0; it must be a whole number, at least 1"),
        ({"dp": 2.0}, "dp is 2.0"),
        ({"order": "tp-cp-dp"}, None),
        ({"pp": 2, "order": "tp-cp-dp"}, "does not name pp"),
        ({"order": "tp-xp"}, "name each of"),
        ({"order": "tp-tp"}, "name each of"),
        ({"ep": 3, "dp": 4}, "does not divide the 4 ranks"),
        (
            {"ep": 2, "cp": 2, "dp": 2, "pp": 2, "order": "tp-cp-pp-ep-dp"},
            "put pp last in the order",
        ),
    ],
)
def test_impossible_sizes_are_named(sizes: dict[str, object], message: str | None) -> None:
    if message is None:
        assert ParallelLayout(**sizes).world_size == 1  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=message):
        ParallelLayout(**sizes)  # type: ignore[arg-type]


def test_a_group_that_is_not_made_is_named_with_those_that_are() -> None:
    ranks = Ranks(ParallelLayout())
    for ask in (ranks.group, ranks.members, ranks.size):
        with pytest.raises(ConfigError, match=r"no group 'ep'.*'dp-cp'"):
            ask("ep")


@pytest.mark.guarantee("parallellayout-coordinates-ranks")
def test_a_world_says_what_does_not_divide_it() -> None:
    assert ParallelLayout.of_world(16, tp=2, pp=2).dp == 4
    with pytest.raises(ConfigError, match="10 ranks are not a multiple of tp 2 x cp 1 x pp 2 = 4"):
        ParallelLayout.of_world(10, tp=2, pp=2)
    layout = ParallelLayout(tp=2)
    for wrong in (
        lambda: layout.coordinates(2),
        lambda: layout.rank_of(dp=1),
        lambda: layout.groups("xp"),
        lambda: layout.grid(["dp"]),
    ):
        with pytest.raises(ConfigError):
            wrong()
    with pytest.raises(ConfigError, match="name each of them"):
        ParallelLayout.from_mesh(SimpleNamespace(mesh_dim_names=("x",), ndim=1, mesh=np.arange(2)))
    with pytest.raises(ConfigError, match="does not number the ranks"):
        ParallelLayout.from_mesh(
            SimpleNamespace(mesh_dim_names=("dp",), ndim=1, mesh=np.array([1, 0]))
        )


@pytest.mark.guarantee("parts-r-2")
@given(cp=st.integers(1, 8), part=st.integers(1, 9))
def test_zigzag_parts_tile_the_sequence_and_cost_every_rank_the_same(cp: int, part: int) -> None:
    length = 2 * cp * part
    kept = [
        position
        for rank in range(cp)
        for start, stop in zigzag_bounds(length, rank, cp)
        for position in range(start, stop)
    ]
    assert sorted(kept) == list(range(length))
    costs = {
        sum(k + 1 for a, b in zigzag_bounds(length, rank, cp) for k in range(a, b))
        for rank in range(cp)
    }
    assert len(costs) == 1, "causal attention costs k + 1 at position k"


def test_a_sequence_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(ConfigError, match="not a multiple of 2 x cp"):
        zigzag_bounds(10, 0, 2)
