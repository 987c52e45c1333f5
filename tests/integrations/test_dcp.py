"""torch's distributed checkpoints: one key, one text, any number of ranks to any other."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from streammega import DataConfig, StreamLoader
from streammega.errors import StateError
from streammega.integrations.dcp import DataState, load
from tests.support.feeds import AsyncDcpFeed, DcpFeed, Feed, check_kills
from tests.support.gang import Gang, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")  # one process by itself

PAGE = Path(__file__).parents[2] / "docs" / "torchdata.md"
SIZES: Any = {"micro_batch_size": 4, "global_batch_size": 8}


@pytest.fixture
def stream(config: DataConfig) -> DataConfig:
    return replace(config, order="stream", shuffle_lanes=16, num_samples=None)


@pytest.mark.guarantee("datastate-entry-distributed")
@pytest.mark.parametrize(
    ("feed", "before", "after"),
    [
        (DcpFeed, 2, 1),
        (DcpFeed, 2, 4),
        (AsyncDcpFeed, 2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((DcpFeed, 1, 1), (DcpFeed, 1, 2), (DcpFeed, 2, 2), (AsyncDcpFeed, 2, 1))
        ),
    ],
)
def test_a_killed_run_goes_on_exactly_on_any_number_of_ranks(
    gang: Gang, stream: DataConfig, tmp_path: Path, feed: type[Feed], before: int, after: int
) -> None:
    check_kills(gang, feed, stream, tmp_path / "run", before, after)


def save(folder: Path, **state: Any) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.guarantee("datastate-entry-distributed")
def test_the_state_is_one_entry_of_json_beside_the_others(
    stream: DataConfig, tmp_path: Path
) -> None:
    with StreamLoader(stream, **SIZES) as loader:
        loader.take()
        save(tmp_path / "a", model={"w": torch.ones(3)}, data=DataState(loader))
        stored = FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
        assert sorted(stored) == ["data.streammega_state", "model.w"]
        state = DataState(loader).state_dict()
        assert json.loads(state["streammega_state"]) == loader.state_dict()
    weights = {"w": torch.zeros(3)}
    with StreamLoader(stream, **SIZES) as again:
        for _ in range(2):  # loading twice is loading once
            load(
                {"model": weights, "data": DataState(again)},
                checkpoint_id=tmp_path / "a",
                no_dist=True,
            )
        assert again.consumed_samples == 4
        assert weights["w"].sum() == 3


@pytest.mark.guarantee("checkpoint-without-data")
def test_a_checkpoint_of_a_bare_loader_is_loaded_too(stream: DataConfig, tmp_path: Path) -> None:
    with StreamLoader(stream, **SIZES) as loader:
        expected = [loader.take()["tokens"].clone() for _ in range(3)]
        loader.seek(8)
        save(tmp_path / "flat", data=loader, app={"data": loader.state_dict()})
    with StreamLoader(stream, **SIZES) as again:
        held = iter(again)
        next(held)
        load({"data": DataState(again)}, checkpoint_id=tmp_path / "flat", no_dist=True)
        with pytest.raises(StateError, match="load_state_dict moved its loader"):
            next(held)
        assert torch.equal(again.take()["tokens"], expected[2])
        inner: dict[str, Any] = {"app": {"data": DataState(again).state_dict()}}
        load(inner, checkpoint_id=tmp_path / "flat", no_dist=True)
        assert inner["app"]["data"]["consumed_samples"] == 8, "within a state of the caller too"


@pytest.mark.guarantee("checkpoint-without-data")
def test_missing_and_foreign_states_are_refused_in_words(
    stream: DataConfig, tmp_path: Path
) -> None:
    foreign = {"dp_rank_0": b"...", "world_size": 2}
    save(tmp_path / "none", model={"w": torch.ones(3)})
    save(tmp_path / "foreign", model={"w": torch.ones(3)}, data=foreign)
    with (
        StreamLoader(stream, **SIZES) as loader,
        StreamLoader(replace(stream, seed=9), **SIZES) as other,
    ):
        loader.take()
        for folder, words in (
            ("none", r"no data state under 'data': it has nothing there, and model at the top\."),
            ("foreign", r"it has only data\.dp_rank_0, data\.world_size there"),
        ):
            with pytest.raises(StateError, match=words):
                load({"data": DataState(loader)}, checkpoint_id=tmp_path / folder, no_dist=True)
        save(tmp_path / "seed", data=DataState(other))
        with pytest.raises(StateError, match="seed: the checkpoint has 9"):
            load({"data": DataState(loader)}, checkpoint_id=tmp_path / "seed", no_dist=True)
        for state, words in (
            ({}, r"has no 'streammega_state' \(it has: nothing\)"),
            (foreign, r"it has: dp_rank_0, world_size"),
            ({"streammega_state": 7}, "has no 'streammega_state'"),
            ({"streammega_state": "{"}, "is damaged"),
            ({"streammega_state": "[" * 100_000}, "is damaged"),
            ({"streammega_state": "[]"}, "is damaged"),
            ({"streammega_state": "{}"}, "the data state is empty"),
        ):
            with pytest.raises(StateError, match=words):
                DataState(loader).load_state_dict(state)
        assert loader.consumed_samples == 4, "what is refused changes nothing"


@pytest.mark.guarantee("checkpoint-without-data")
@on_ranks(2)
def test_every_rank_is_told_of_a_checkpoint_without_data(
    rank: int, stream: DataConfig, tmp_path: Path
) -> None:
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "none")
    with (
        StreamLoader(stream, **SIZES, dp_rank=rank, dp_size=2) as loader,
        pytest.raises(StateError, match="the checkpoint has no data state under 'data'"),
    ):
        load({"data": DataState(loader)}, checkpoint_id=tmp_path / "none")


@pytest.mark.guarantee("checkpoint-without-data")
def test_other_errors_of_dcp_are_its_own(stream: DataConfig, tmp_path: Path) -> None:
    with StreamLoader(stream, **SIZES) as loader:
        save(tmp_path / "a", data=DataState(loader))
        asked: Any = {"data": DataState(loader), "model": {"w": torch.ones(3)}}
        with pytest.raises(dcp.CheckpointException, match=r"model\.w"):
            load(asked, checkpoint_id=tmp_path / "a", no_dist=True)


@pytest.mark.guarantee("code-page-torchdata")
def test_the_code_of_the_page_names_what_is_there() -> None:
    text = PAGE.read_text()
    assert set(re.findall(r"integrations\.dcp import ([\w, ]+)", text)) == {"DataState, load"}
