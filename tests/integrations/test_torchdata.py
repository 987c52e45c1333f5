"""torchdata: StatefulDataLoader with workers, and a node around a loader."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streammega import DataConfig, StreamLoader
from streammega.errors import StateError
from tests.support.feeds import (
    Feed,
    NodeFeed,
    NoWorkersFeed,
    WorkersFeed,
    check_kills,
    rows_of,
)
from tests.support.gang import Gang

pytest.importorskip("torchdata")
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's
]

PAGE = Path(__file__).parents[2] / "docs" / "torchdata.md"
SIZES: Any = {"micro_batch_size": 4, "global_batch_size": 4}
TOTAL = 7


@pytest.fixture
def stream(config: DataConfig) -> DataConfig:
    return replace(config, order="stream", shuffle_lanes=16, num_samples=None)


@pytest.fixture
def finite(stream: DataConfig) -> DataConfig:
    return replace(stream, num_samples=(4 * TOTAL, 0, 0))


def node_of(loader: StreamLoader) -> Any:
    from torchdata import nodes

    from streammega.integrations.torchdata import stream_node

    return nodes.Mapper(stream_node(loader), rows_of)


@pytest.mark.guarantee("torchdata-statefuldataloader-resumes", "run-under-torchdata")
@pytest.mark.parametrize(
    ("feed", "before", "after"),
    [
        (NodeFeed, 1, 1),
        (NodeFeed, 2, 1),
        (NoWorkersFeed, 2, 1),
        (WorkersFeed, 2, 1),
        (WorkersFeed, 1, 2),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                (NodeFeed, 2, 2),
                (NodeFeed, 1, 2),
                (NoWorkersFeed, 1, 1),
                (NoWorkersFeed, 2, 2),
                (WorkersFeed, 1, 1),
                (WorkersFeed, 2, 2),
            )
        ),
    ],
)
def test_a_killed_run_goes_on_exactly(
    gang: Gang, stream: DataConfig, tmp_path: Path, feed: type[Feed], before: int, after: int
) -> None:
    check_kills(gang, feed, stream, tmp_path / "run", before, after)


@pytest.mark.guarantee("run-under-torchdata")
@pytest.mark.parametrize("ahead", [0, 3])
def test_a_node_resumes_exactly_at_every_batch(finite: DataConfig, ahead: int) -> None:
    from torchdata import nodes

    def pipeline(loader: StreamLoader) -> Any:
        node = node_of(loader)
        return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=ahead) if ahead else node)

    with StreamLoader(finite, **SIZES) as loader:
        reference = [rows_of(batch) for batch in loader]
    assert len(reference) == TOTAL
    for count in range(TOTAL + 1):
        with StreamLoader(finite, **SIZES) as loader:
            batches = iter(pipeline(loader))
            got = [next(batches) for _ in range(count)]
            state = json.loads(json.dumps(batches.loader.state_dict()))
            if ahead:
                batches.root._it._shutdown()
        with StreamLoader(finite, **SIZES) as loader:
            again = pipeline(loader)
            for _ in range(2):  # loading twice is loading once
                again.load_state_dict(state)
            rest = list(again)
            if count < TOTAL:
                got += rest
                assert len(got) == TOTAL
                rest = list(again)
            assert torch.equal(torch.stack(got), torch.stack(reference))
            assert torch.equal(torch.stack(rest), torch.stack(reference)), "then whole passes"
            if ahead:
                again.root._it._shutdown()


@pytest.mark.guarantee("run-under-torchdata")
def test_a_node_begins_where_its_loader_is_and_resets_to_the_first_sample(
    finite: DataConfig,
) -> None:
    with StreamLoader(finite, **SIZES) as loader:
        reference = [rows_of(batch) for batch in loader]
        loader.seek(8)
        node = node_of(loader)
        assert torch.equal(next(node), reference[2])
        state = node.state_dict()
        node.reset()
        assert torch.equal(next(node), reference[0])
        node.reset(state)  # in the middle of a pass
        assert torch.equal(next(node), reference[3])
        for _ in range(TOTAL - 4):
            next(node)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(node)
        end = node.state_dict()
        node.reset(end)
        with pytest.raises(StopIteration):
            next(node)


@pytest.mark.guarantee("run-under-torchdata")
def test_a_node_refuses_states_that_are_not_its_loaders(finite: DataConfig) -> None:
    from streammega.integrations.torchdata import stream_node

    with (
        StreamLoader(finite, **SIZES) as loader,
        StreamLoader(replace(finite, seed=9), **SIZES) as other,
    ):
        node = stream_node(loader)
        first = next(node)["tokens"].clone()
        with pytest.raises(StateError, match="seed"):
            node.reset(other.state_dict())
        with pytest.raises(StateError, match="empty"):
            node.reset({})
        with pytest.raises(StateError, match="lacks"):
            node.reset({"_num_yielded": 3})
        assert loader.consumed_samples == 4, "what is refused changes nothing"
        assert not torch.equal(next(node)["tokens"], first)


@pytest.mark.guarantee("code-page-torchdata")
@pytest.mark.filterwarnings("ignore:torch.distributed is")  # one process by itself
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    names: dict[str, Any] = {"rank": 0, "world": 1, "train_step": lambda batch: None}
    for code in blocks:
        exec(compile(code, str(PAGE), "exec"), names)
    names["loader"].close()
