"""States stay small for any number of datasets, and a mismatch still says what differs."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import DataConfig, PhaseConfig, StorageConfig, StreamLoader
from streammega.config import ORDERS, Order
from streammega.errors import StateError
from streammega.order.state import SavedState, describe_differences, make_state, parse_state

MAX_BYTES = 1023


def identity_of(datasets: int, phases: int = 0, **other: Any) -> dict[str, Any]:
    names = [f"{number:012x}*{1 / datasets:.8g}" for number in range(datasets)]
    identity: dict[str, Any] = {
        "order": "stream",
        "order_version": 1,
        "split": "train",
        "sequence_length": 4096,
        "add_extra_token": True,
        "seed": 1234,
        "shuffle_lanes": 1024,
        "shuffle_block_bytes": 262144,
        "datasets": names,
        "exclude_samples": [[1000 * number, 10] for number in range(20)],
        "exclude_documents": [
            [number, [[0, f"3 documents, {number:032x}"]]] for number in range(4)
        ],
    }
    if phases:
        phase = {"sequence_length": 4096, "shuffle_lanes": 1024, "datasets": names}
        identity["phases"] = {
            str(number): {"first_sample": 1000 * number} | phase for number in range(1, phases + 1)
        }
    return identity | other


def saved(identity: dict[str, Any]) -> SavedState:
    state = make_state(identity, 10**12, 999, global_batch_size=2**20)
    assert len(json.dumps(state)) <= MAX_BYTES
    return parse_state(json.loads(json.dumps(state)))


def refused(identity: dict[str, Any], other: dict[str, Any]) -> str:
    with pytest.raises(StateError) as caught:
        saved(identity).check(other)
    return str(caught.value)


@pytest.mark.guarantee("state-under-1", "later-phase-never")
@pytest.mark.parametrize(
    ("datasets", "phases"),
    [(1, 0), (20, 0), (30, 1), (1, 8), (1, 20), (1000, 0), (1000, 20), (32766, 1)],
)
def test_a_state_is_under_a_kilobyte_for_any_number_of_datasets_and_phases(
    datasets: int, phases: int
) -> None:
    identity = identity_of(datasets, phases)
    saved(identity).check(identity)


@pytest.mark.guarantee("states-many-datasets")
@settings(max_examples=40)
@given(count=st.integers(1, 60), data=st.data())
def test_any_single_difference_is_found_and_placed(count: int, data: st.DataObject) -> None:
    """With the value of both where an identity is short, else as one of an eighth of the list."""
    identity = identity_of(count)
    is_short = data.draw(st.booleans())
    if is_short:
        identity = {"order": "stream", "datasets": identity["datasets"][:20]}
        count = min(count, 20)
    number = data.draw(st.integers(0, count - 1))
    other = [*identity["datasets"]]
    other[number] = f"{'f' * 12}*1"
    text = refused(identity, {**identity, "datasets": other})
    if f"datasets[{number}]: the checkpoint has" in text:
        assert is_short or count < 8
        return
    assert not is_short
    where = text.split(f"datasets: of {count} items, ")[1]
    bounds = [int(word) for word in where.split() if word.isdigit()]
    assert bounds[0] <= number <= bounds[-1]
    assert bounds[-1] - bounds[0] < count // 8 + 1


@pytest.mark.guarantee("later-phase-never")
@given(data=st.data())
def test_a_phase_that_was_edited_is_named(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    identity = identity_of(data.draw(st.sampled_from([1, 40])), count)
    phases = identity["phases"]
    edited = data.draw(st.integers(1, count))
    other = {**phases, str(edited): {**phases[str(edited)], "first_sample": 5}}
    text = refused(identity, {**identity, "phases": other})
    assert (
        f"phases: of {count} items, number {edited} differs" in text
        or f"phases.{edited}.first_sample: the checkpoint has {edited}000, this run 5" in text
    )
    fewer = {name: phase for name, phase in phases.items() if name != str(count)}
    assert "phases" in refused(identity, {**identity, "phases": fewer})
    # a state of the first phase has no entry of phases
    assert "phases.1: the checkpoint has null" in refused(identity_of(1), identity)


@pytest.mark.guarantee("states-many-datasets")
def test_a_mismatch_names_the_setting_and_both_values() -> None:
    identity = identity_of(1000)
    other = identity["datasets"][:-1]
    heavier = [text.replace("*0.001", "*0.002") for text in identity["datasets"]]
    one = [*identity["datasets"][:999], "abc*0.001"]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 9}, "seed: the checkpoint has 1234, this run 9"),
        ({"seed": None}, "seed: the checkpoint has 1234, this run null"),
        ({"split": "valid"}, 'split: the checkpoint has "train", this run "valid"'),
        ({"datasets": other}, "datasets: the checkpoint has 1000 items, this run 999 items"),
        ({"datasets": ["a*1"]}, 'datasets: the checkpoint has 1000 items, this run ["a*1"]'),
        ({"datasets": None}, "datasets: the checkpoint has 1000 items, this run null"),
        ({"datasets": heavier}, "datasets: of 1000 items, some of 0 to 999 ('web') differ"),
        ({"datasets": one}, "datasets: of 1000 items, some of 875 to 999 ('web') differ"),
        ({"exclude_samples": []}, "exclude_samples: the checkpoint has 20 items, this run []"),
        ({"more": {}}, "more: the checkpoint has null, this run {}"),
    ]
    for changed, message in changes:
        with pytest.raises(StateError) as caught:
            saved(identity).check(identity | changed, {"datasets[999]": "web"})
        lines = str(caught.value).splitlines()
        assert lines[1:-1] == [f"  {message}"]


def test_a_short_identity_stays_whole() -> None:
    identity = {"order": "megatron", "seed": 1, "datasets": ["a*0.5", "b*0.5"]}
    assert saved(identity).order == identity


IDENTITY = {
    "order": "megatron",
    "seed": 1,
    "sequence_length": 64,
    "datasets": [{"digest": "aa", "weight": 0.3}],
}


@given(consumed=st.integers(0, 10**12))
def test_a_state_survives_json_and_says_where_to_go_on(consumed: int) -> None:
    saved = parse_state(json.loads(json.dumps(make_state(IDENTITY, consumed, global_batch_size=1))))
    saved.check(IDENTITY)
    assert (saved.consumed, saved.offset) == (consumed, 0)


@pytest.mark.guarantee("refused-differs-another")
def test_a_state_of_another_order_is_refused_and_lists_what_differs() -> None:
    state = make_state(IDENTITY, 7, global_batch_size=1)
    other = {**IDENTITY, "seed": 2, "datasets": [{"digest": "bb", "weight": 0.3}]}
    with pytest.raises(StateError) as caught:
        parse_state(state).check(other)
    text = str(caught.value)
    assert "seed: the checkpoint has 1, this run 2" in text
    assert 'datasets[0].digest: the checkpoint has "aa", this run "bb"' in text
    assert "sequence_length" not in text
    assert "weight" not in text


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "empty"),
        ({"version": 1}, "lacks"),
        ({**make_state(IDENTITY, 3, global_batch_size=1), "version": 99}, "version 99"),
        ({**make_state(IDENTITY, 3, global_batch_size=1), "consumed_samples": -1}, "not a count"),
        ({**make_state(IDENTITY, 3, global_batch_size=1), "consumed_samples": "3"}, "not a count"),
        (
            {**make_state(IDENTITY, 3, global_batch_size=1), "global_batch_size": None},
            "global_batch_size of the data state is None, not a count",
        ),
        ({**make_state(IDENTITY, 3, global_batch_size=1), "fingerprint": "00"}, "damaged"),
        ({**make_state(IDENTITY, 3, global_batch_size=1), "order": []}, "damaged"),
        ({**make_state(IDENTITY, 3, global_batch_size=1), "order": "{"}, "damaged"),
        ({**make_state(IDENTITY, 3, global_batch_size=1), "batch_offset": 4}, "more than its 3"),
        ({**make_state(IDENTITY, 3, global_batch_size=1), "order": "[" * 100_000}, "damaged"),
        (
            {**make_state(IDENTITY, 3, global_batch_size=1), "consumed_samples": 10**30},
            "not a count",
        ),
        ([1, 2], "is a list"),
    ],
)
def test_states_that_are_none_are_refused(state: dict[str, object], message: str) -> None:
    with pytest.raises(StateError, match=message):
        parse_state(state)


@pytest.mark.parametrize(
    "digests", ["0 items: {0}", "500 items: {0}", f"{'9' * 5000} items: {{0}}"]
)
def test_a_signed_state_with_forged_digests_is_refused(digests: str) -> None:
    forged = {**IDENTITY, "datasets": digests.format(f"{'a' * 32} 12345")}
    current = {**IDENTITY, "datasets": list(range(500))}
    with pytest.raises(StateError, match="datasets: "):
        parse_state(make_state(forged, 3, global_batch_size=1)).check(current)
    with pytest.raises(StateError, match="datasets: "):
        parse_state(make_state(forged, 3, global_batch_size=1)).check({**IDENTITY, "datasets": []})


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
        storage=StorageConfig(cache_dir=tmp_path),
    )

    def opened(rank: int, ranks: int) -> StreamLoader:
        return StreamLoader(
            config, micro_batch_size=2, global_batch_size=8, dp_rank=rank, dp_size=ranks
        )

    with opened(0, 1) as alone:
        alone.seek(16)
        state = alone.state_dict()
        expected = alone.dataset.batch(16)["tokens"]
    assert len(json.dumps(state)) <= MAX_BYTES
    with opened(0, 2) as first, opened(1, 2) as second:
        for loader in (first, second):
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.state_dict() == state
        assert first.dataset.batch(16)["tokens"][0].equal(expected[0])
        assert second.consumed_samples == 16
    fewer = replace(config, blend=[(name, 1.0) for name in names])
    with (
        StreamLoader(fewer, micro_batch_size=2, global_batch_size=8) as loader,
        pytest.raises(StateError, match=r"datasets: of .* items, some of 0 .* differ"),
    ):
        loader.load_state_dict(state)


WEB, CODE = "mock://tokens=4000", "mock://tokens=3000,seed=2"
OF_EVERY_ORDER: dict[str, Any] = {
    "blend": [(WEB, 0.5), (CODE, 0.5)],
    "sequence_length": 32,
    "split": "60,20,20",
    "seed": 5,
    "add_extra_token": False,
}
OF_AN_ORDER: dict[Order, dict[str, Any]] = {
    "stream": {
        "shuffle_lanes": 32,
        "shuffle_block_bytes": 512,
        "phases": [PhaseConfig(first_sample=8, sequence_length=32)],
    },
    "megatron": {"num_samples": (48, 0, 0), "mid_level_dataset_surplus": 0.3},
    "sequential": {"num_samples": (48, 0, 0)},
}
NOTICED_IN_OTHER_TESTS = {"order", "blend_per_split", "exclude_documents"}
MAY_CHANGE = {
    # what batches hold of their tokens
    *("eod_id", "pad_id", "allow_ambiguous_pad_tokens", "eod_mask_loss", "reset_position_ids"),
    *("reset_attention_mask", "inter_document_masking"),
    *("mask_loss_by_mode", "fields", "columns"),
    # what is checked, and where data and indices are
    *("vocab_size", "allow_mixed_tokenizers", "index_publish_url"),
    *("storage", "storage_by_prefix", "_manifests"),
    # validation, and what is passed over
    *("drop_last_partial_validation_sequence", "full_validation", "multiple_validation_sets"),
    "exclude_samples",
}


def test_of_every_setting_it_is_said_whether_a_resume_may_change_it() -> None:
    """What chooses tokens is part of `identity`, in the classes of samples/ that have one."""
    noticed = {*OF_EVERY_ORDER}.union(*OF_AN_ORDER.values())
    assert not (noticed | NOTICED_IN_OTHER_TESTS) & MAY_CHANGE
    names = {item.name for item in fields(DataConfig)}
    assert names == noticed | NOTICED_IN_OTHER_TESTS | MAY_CHANGE, "does it choose tokens?"


@pytest.mark.guarantee("state-under-1")
@pytest.mark.parametrize(
    ("order", "name"),
    [(order, name) for order in ORDERS for name in OF_EVERY_ORDER | OF_AN_ORDER[order]],
)
def test_a_state_notices_every_setting_that_chooses_tokens(
    order: Order, name: str, tmp_path: Path
) -> None:
    config = DataConfig(
        blend=[(WEB, 0.7), (CODE, 0.3)],
        sequence_length=16,
        split="80,10,10",
        order=order,
        num_samples=(64, 0, 0),
        shuffle_lanes=16 if ORDERS[order].has_lanes else None,
        storage=StorageConfig(cache_dir=tmp_path),
    )
    other = (OF_EVERY_ORDER | OF_AN_ORDER[order])[name]
    sizes: dict[str, Any] = {"micro_batch_size": 8, "global_batch_size": 8}
    with StreamLoader(config, **sizes) as loader:
        loader.seek(16)
        state = loader.state_dict()
    with (
        StreamLoader(replace(config, **{name: other}), **sizes) as loader,
        pytest.raises(StateError),
    ):
        loader.load_state_dict(state)


def test_of_a_dataset_it_is_said_what_differs() -> None:
    saved = {"order": "stream", "datasets": ["29a5f65dbf8b*0.5", "e37d14975277*0.5"]}

    def lines(**current: Any) -> list[str]:
        names = {"datasets[0]": "web", "datasets[1]": "code"}
        return describe_differences(saved, saved | current, names)

    assert lines(datasets=["8eb98eed00f2*0.5", "e37d14975277*0.5"]) == [
        'datasets[0] (\'web\'): the checkpoint has "29a5f65dbf8b*0.5", this run "8eb98eed00f2*0.5": '
        "other data of this name; was it replaced, or is the split another?"
    ]
    (line,) = lines(datasets=["29a5f65dbf8b*0.5", "e37d14975277*0.7"])
    assert line.endswith("the same data, with another weight")
    (line,) = lines(datasets=["8eb98eed00f2*0.2", "e37d14975277*0.5"])
    assert line.endswith('this run "8eb98eed00f2*0.2"')


def test_nothing_is_said_of_data_where_a_setting_differs_too() -> None:
    """Digests of a blend in the Megatron order have its seed in them."""
    saved = {"order": "megatron", "seed": 1, "datasets": ["29a5f65dbf8b*0.5"]}
    current = {"order": "megatron", "seed": 2, "datasets": ["5d6e21e9b4ba*0.5"]}
    assert not [line for line in describe_differences(saved, current) if "replaced" in line]


def test_of_another_order_nothing_else_is_listed() -> None:
    saved = {"order": "stream", "order_version": 2, "datasets": ["29a5f65dbf8b*0.5"]}
    current = {"order": "megatron", "order_version": 1, "datasets": ["5d6e21e9b4ba*0.5"]}
    (line,) = describe_differences(saved, current)
    assert line == 'order: the checkpoint has "stream", this run "megatron"'
