"""States stay small for any number of datasets, and a mismatch still says what differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import DataConfig, StreamLoader
from streammega.errors import StateError
from streammega.order.state import (
    keep_readable,
    make_state,
    parse_state,
    with_readable,
)

MOST_BYTES = 1023


def identity_of(datasets: int, segments: int = 0, **other: Any) -> dict[str, Any]:
    shares = [1.0 / datasets] * datasets
    return {
        "order": "stream",
        "order_version": 1,
        "split": "train",
        "sequence_length": 4096,
        "add_extra_token": True,
        "seed": 1234,
        "lanes": 1024,
        "block_bytes": 262144,
        "datasets": [f"{number:012x}*{shares[0]:.8g}" for number in range(datasets)],
        "schedule": [[1000 * number, shares] for number in range(1, segments + 1)],
    } | other


def refused(state: Any, identity: dict[str, Any], readable: Any = None) -> str:
    saved = parse_state(with_readable(json.loads(json.dumps(state)), readable))
    with pytest.raises(StateError) as caught:
        saved.check(identity)
    return str(caught.value)


@pytest.mark.guarantee("state-under-1")
@pytest.mark.parametrize("segments", [0, 5])
@pytest.mark.parametrize("datasets", [1, 20, 30, 1000, 32766])
def test_a_state_is_under_a_kilobyte_for_any_number_of_datasets(
    datasets: int, segments: int
) -> None:
    if datasets * segments > 100_000:
        segments = 1
    identity = identity_of(datasets, segments)
    state = make_state(identity, 10**12, 999)
    assert len(json.dumps(state)) <= MOST_BYTES
    parse_state(json.loads(json.dumps(state))).check(identity)


@pytest.mark.guarantee("states-many-datasets")
@settings(max_examples=40)
@given(count=st.integers(1, 60), data=st.data())
def test_any_single_difference_is_found_and_placed(count: int, data: st.DataObject) -> None:
    identity = identity_of(count)
    number = data.draw(st.integers(0, count - 1))
    other = list(identity["datasets"])
    other[number] = f"{'f' * 12}*{1.0 / count:.8g}"
    state = make_state(identity, 7)
    text = refused(state, {**identity, "datasets": other})
    if "datasets[" in text:  # the identity is short, and stays whole
        assert f"datasets[{number}]: the checkpoint has" in text
        return
    assert "datasets: their contents differ" in text
    assert "weights" not in text
    where = text.split("of number")[1].split("(")[0].removeprefix("s")
    bounds = [int(word) for word in where.split() if word.isdigit()]
    assert bounds[0] <= number <= bounds[-1]
    assert bounds[-1] - bounds[0] < count // 8 + 1


def phases_of(count: int, datasets: int) -> dict[str, Any]:
    return {
        str(number): {
            "first_sample": 1000 * number,
            "sequence_length": 4096,
            "lanes": 1024,
            "datasets": [f"{n}:{n:012x}*{1 / datasets:.8g}" for n in range(datasets)],
        }
        for number in range(1, count + 1)
    }


@pytest.mark.guarantee("later-phase-never")
@pytest.mark.parametrize("count", [1, 8, 20])
@pytest.mark.parametrize("datasets", [1, 1000])
def test_a_state_is_under_a_kilobyte_for_any_number_of_phases(count: int, datasets: int) -> None:
    identity = identity_of(datasets, 1, phases=phases_of(count, datasets))
    state = make_state(identity, 10**12, 999)
    assert len(json.dumps(state)) <= MOST_BYTES
    parse_state(json.loads(json.dumps(state))).check(identity)


@pytest.mark.guarantee("later-phase-never")
@given(data=st.data())
def test_a_phase_that_was_edited_is_named(data: st.DataObject) -> None:
    """Whole or as a chain, with what is kept beside the state or without it."""
    count = data.draw(st.integers(1, 12))
    datasets = data.draw(st.sampled_from([1, 40]))
    phases = phases_of(count, datasets)
    identity = identity_of(datasets, phases=phases)
    state = make_state(identity, 7)
    edited = data.draw(st.integers(1, count))
    other = {**phases, str(edited): {**phases[str(edited)], "first_sample": 5}}
    text = refused(state, {**identity, "phases": other})
    if keep_readable(state, identity) is None:
        assert f"phases.{edited}.first_sample: the checkpoint has {edited}000, this run 5" in text
    elif edited > max(1, count - 8 + 1):
        assert f"phases.{edited}: the checkpoint has another one than this run" in text
    else:
        assert "phases.1" in text
    told = refused(state, {**identity, "phases": other}, keep_readable(state, identity))
    assert f"phases.{edited}.first_sample: the checkpoint has {edited}000, this run 5" in told
    fewer = {name: phase for name, phase in phases.items() if name != str(count)}
    assert f"phases.{count}: " in refused(
        state, {**identity, "phases": fewer} if fewer else identity_of(datasets)
    )
    more = phases_of(count + 1, datasets)
    assert f"phases.{count + 1}: " in refused(state, {**identity, "phases": more})
    # one that has none yet is a state of the first phase
    assert "phases.1: " in refused(make_state(identity_of(datasets), 7), identity)


@pytest.mark.guarantee("states-many-datasets")
def test_a_mismatch_of_a_folded_state_names_the_field() -> None:
    identity = identity_of(1000, segments=2)
    state = make_state(identity, 7)
    assert "seed: the checkpoint has 1234, this run 9" in refused(state, {**identity, "seed": 9})
    assert 'split: the checkpoint has "train", this run "valid"' in refused(
        state, {**identity, "split": "valid"}
    )
    shorter = identity["datasets"][:-1]
    assert "datasets: the checkpoint has 1000 of them, this run 999" in refused(
        state, {**identity, "datasets": shorter}
    )
    assert "datasets: the checkpoint has 1000 of them, this run null" in refused(
        state, {"order": "sequential"}
    )
    heavier = [text.replace("*0.001", "*0.002") for text in identity["datasets"]]
    text = refused(state, {**identity, "datasets": heavier})
    assert "datasets: their weights differ, of numbers 0 to 999 (of 0 to 999)" in text
    assert "contents" not in text
    later = [identity["schedule"][0], [5000, identity["schedule"][1][1]]]
    text = refused(state, {**identity, "schedule": later})
    assert "schedule: their items differ, of number 1 (of 0 to 1)" in text
    assert "datasets" not in text


@pytest.mark.guarantee("states-many-datasets")
def test_what_is_kept_beside_a_state_says_what_differs() -> None:
    identity = identity_of(1000)
    state = make_state(identity, 7)
    readable = json.loads(json.dumps(keep_readable(state, identity)))
    other = list(identity["datasets"])
    other[700] = "abc*0.001"
    current = {**identity, "datasets": other}
    expected = 'datasets[700]: the checkpoint has "0000000002bc*0.001", this run "abc*0.001"'
    assert expected in refused(state, current, readable)
    # what is not of this state is not believed
    foreign_ones: list[Any] = [identity_of(1000, seed=5), identity_of(3), [], "x", {"datasets": 1}]
    for foreign in foreign_ones:
        assert "numbers 625 to 749" in refused(state, current, foreign)
    parse_state(with_readable(state, {"seed": 1})).check(identity)


def test_a_state_that_is_small_is_whole_as_ever() -> None:
    identity = identity_of(2)
    state = make_state(identity, 7)
    assert json.loads(state["identity"]) == identity
    assert keep_readable(state, identity) is None


@pytest.mark.guarantee("states-many-datasets")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_many_datasets_resume_on_other_ranks_by_a_small_state(order: Any, tmp_path: Path) -> None:
    datasets = 100 if order == "stream" else 40
    names = [f"mock://tokens={4000 + 1000 * (number % 7)}" for number in range(datasets)]
    config = DataConfig(
        blend=[(name, 1.0 + number % 3) for number, name in enumerate(names)],
        sequence_length=16,
        order=order,
        num_samples=(960, 0, 0),
        split="1,0,0",
        index_cache_dir=tmp_path,
    )

    def opened(rank: int, ranks: int) -> StreamLoader:
        return StreamLoader(
            config, micro_batch_size=2, global_batch_size=8, dp_rank=rank, dp_size=ranks
        )

    with opened(0, 1) as alone:
        alone.seek(16)
        state = alone.state_dict()
        expected = alone.dataset.batch(16)["tokens"]
    assert len(json.dumps(state)) <= MOST_BYTES
    with opened(0, 2) as first, opened(1, 2) as second:
        for loader in (first, second):
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.state_dict() == state
        assert first.dataset.batch(16)["tokens"][0].equal(expected[0])
        assert second.consumed_samples == 16
    fewer = replace(config, blend=[(name, 1.0) for name in names])
    with (
        StreamLoader(fewer, micro_batch_size=2, global_batch_size=8) as loader,
        pytest.raises(StateError, match="datasets: their weights differ"),
    ):
        loader.load_state_dict(state)
