"""Texts by lanes of shards: ranks read their own alone, and take the same global batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega.errors import ConfigError, StateError
from streammega.integrations.webdataset import TextStream, join_states
from tests.support.examples import examples
from tests.support.feeds import LanedTextFeed, check_kills
from tests.support.gang import Gang
from tests.support.texts import FIELDS, corpus, encode, rows, samples_of, stream_of


def laned_of(shards: dict[str, list[str]], lanes: int = 4, **given: Any) -> TextStream:
    defaults: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 4}
    texts: Callable[[str], list[str]] = shards.__getitem__
    return TextStream(list(shards), encode, FIELDS, texts=texts, lanes=lanes, **(defaults | given))


def laned_samples(shards: dict[str, list[str]], lanes: int, count: int) -> list[list[int]]:
    """What the lanes give in turn, made at once."""
    names = list(shards)
    each = []
    for lane in range(lanes):
        own = {name: shards[name] for name in names[lane::lanes]}
        passes = 1
        while len(samples_of(own, passes)) < count:
            passes *= 2
        each.append(samples_of(own, passes))
    return [each[number % lanes][number // lanes] for number in range(count)]


@pytest.mark.guarantee("lanes-rank-reads")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(
    counts=st.lists(st.integers(1, 12), min_size=4, max_size=9),
    resumes=st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 4])), min_size=1, max_size=4
    ),
    lanes=st.sampled_from([4, 8]),
    micro=st.sampled_from([1, 2]),
)
def test_ranks_of_lanes_take_the_same_global_batches_through_any_resumes(
    counts: list[int], resumes: list[tuple[int, int]], lanes: int, micro: int
) -> None:
    """From the states of all ranks any number of them goes on."""
    shards = corpus([*counts, 3, 3, 3, 3])
    got: list[list[int]] = []
    state = None
    for steps, size in resumes:
        ranks = [
            laned_of(
                shards,
                lanes,
                micro_batch_size=micro,
                global_batch_size=8,
                dp_rank=rank,
                dp_size=size,
            )
            for rank in range(size)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for _ in range(steps * 8 // (micro * size)):
            batches = [rows(next(rank)) for rank in ranks]
            got += [batches[n % size][n // size] for n in range(micro * size)]
        state = json.loads(json.dumps(join_states(rank.state_dict() for rank in ranks)))
        for rank in ranks:
            rank.close()
    assert got == laned_samples(shards, lanes, len(got))


@pytest.mark.guarantee("lanes-rank-reads")
def test_a_run_goes_on_with_another_global_batch_on_other_ranks() -> None:
    """Whose ranks then begin at lanes that are not those of their numbers."""
    shards = corpus([20] * 4)
    with laned_of(shards, global_batch_size=3) as one:
        got = [rows(next(one))[0] for _ in range(3)]
        state = one.state_dict()
    ranks = [laned_of(shards, dp_rank=rank, dp_size=2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    for _ in range(6):
        got += [row for rank in ranks for row in rows(next(rank))]
    for rank in ranks:
        rank.close()
    assert got == laned_samples(shards, 4, len(got))


@pytest.mark.guarantee("lanes-rank-reads")
def test_a_rank_reads_and_tokenises_its_own_lanes_alone() -> None:
    shards = corpus([9] * 8)
    for rank in range(2):
        opened: set[str] = set()

        def texts(name: str, opened: set[str] = opened) -> list[str]:
            opened.add(name)
            return shards[name]

        sizes: Any = {"micro_batch_size": 2, "global_batch_size": 4, "dp_rank": rank, "dp_size": 2}
        stream = TextStream(list(shards), encode, FIELDS, texts=texts, lanes=4, **sizes)
        with stream:
            for _ in range(60):
                next(stream)
        assert opened == {f"shard-{number}" for number in range(8) if number % 2 == rank}


@pytest.mark.guarantee("lanes-rank-reads")
def test_states_of_lanes_that_do_not_fit_are_refused_and_change_nothing() -> None:
    shards = corpus([9] * 8)
    ranks = [laned_of(shards, dp_rank=rank, dp_size=2, micro_batch_size=2) for rank in range(2)]
    for rank in ranks:
        for _ in range(5):
            next(rank)
    states = [rank.state_dict() for rank in ranks]
    next(ranks[1])
    whole = join_states(states)
    with laned_of(shards) as stream:
        before = stream.state_dict()
        for state, words in (
            ({}, "the data state is empty"),
            (states[0], "lacks 2 of 4 lanes of this rank, the first of them 1"),
            (whole | {"positions": "["}, "it is damaged"),
            (whole | {"positions": '{"0": [-1, 0, 0, ""]}'}, "it is damaged"),
            (whole | {"positions": '{"0": [0, 0, 0, 3]}'}, "it is damaged"),
            (whole | {"positions": '{"0": [0, 0]}'}, "it is damaged"),
            (laned_of(shards, 8).state_dict(), "lanes: the checkpoint has 8, this run 4"),
            (stream_of(shards).state_dict(), "lanes: the checkpoint has 1, this run 4"),
        ):
            with pytest.raises(StateError, match=words):
                stream.load_state_dict(state)
        assert stream.state_dict() == before
        for _ in range(2):
            stream.load_state_dict(whole)
        assert join_states([stream.state_dict()]) == whole
    for joined, words in (
        ([states[0], ranks[1].state_dict()], "differ in consumed_samples: they"),
        ([whole, stream_of(shards).state_dict()], "differ in .*order"),
        ([{"consumed_samples": 3}], "join_states takes"),
        ([], "no state to join"),
    ):
        with pytest.raises(StateError, match=words):
            join_states(joined)
    for given_, words in (
        ({"lanes": 3, "dp_rank": 0, "dp_size": 2}, "a multiple of dp_size, which is 2"),
        ({"lanes": 9}, "at most the number of shards, 8"),
        ({"passes": 2}, "With several lanes it must be None"),
    ):
        with pytest.raises(ConfigError, match=words):
            laned_of(shards, **given_)
    for rank in ranks:
        rank.close()


@pytest.mark.guarantee("lanes-rank-reads")
@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), *(pytest.param(*pair, marks=pytest.mark.soak) for pair in ((1, 1), (2, 2), (1, 2)))],
)
def test_a_killed_run_goes_on_exactly(gang: Gang, tmp_path: Path, before: int, after: int) -> None:
    check_kills(
        gang,
        LanedTextFeed,
        corpus([20] * 8),
        tmp_path / "run",
        before,
        after,
        reference=LanedTextFeed,
    )
