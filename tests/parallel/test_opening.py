"""Data that ranks open together: who asks the servers, and what each rank sees."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammega import (
    DataConfig,
    ParallelLayout,
    StorageConfig,
    StreamLoader,
    open_together,
)
from tests.support.builders import write_lengths, write_manifest
from tests.support.gang import Gang
from tests.support.rank_programs import error_of_opening, open_and_read, open_loaders_together
from tools.bench.object_server import Running, running

SIZES: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4}
DATASETS = 4
SHARDS = 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, list[str]]]:
    """A bucket of datasets of shards, and their names."""
    root = tmp_path_factory.mktemp("served")
    names = [f"d{number}" for number in range(DATASETS)]
    for name in names:
        shards = [f"{name}-{number}" for number in range(SHARDS)]
        for number, shard in enumerate(shards):
            write_lengths(str(root / "b" / shard), [40 + number, 30])
        write_manifest(root / "b" / name, shards)
    with running(root) as server:
        yield server, [f"s3://b/{name}" for name in names]


@pytest.fixture
def config(served: tuple[Running, list[str]], tmp_path: Path) -> DataConfig:
    server, names = served
    return DataConfig(
        blend=names,
        sequence_length=8,
        order="stream",
        split="90,10,0",
        storage=StorageConfig(
            storage_options=server.storage_options, cache_dir=tmp_path / "cache"
        ).tuned(hedge_requests=False),
    )


def asked(server: Running) -> int:
    counts = server.counts()
    return counts["requests"] + counts["lists"]


@pytest.mark.guarantee("open-together")
@pytest.mark.parametrize("names", ["manifests", "pairs", "folder"])
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_ranks_send_as_many_requests_to_open_as_one(
    gang: Gang, served: tuple[Running, list[str]], config: DataConfig, names: str, order: Any
) -> None:
    server, _ = served
    if names == "pairs":
        config = replace(config, blend=[f"s3://b/d{number}-0" for number in range(DATASETS)])
    elif names == "folder":
        config = replace(config, blend="s3://b/")
    config = replace(config, order=order, num_samples=(40, 0, 0))
    before = asked(server)
    StreamLoader(config, **SIZES).close()
    alone = asked(server) - before
    before = asked(server)
    results = gang.run(
        8, open_and_read, ParallelLayout(tp=2, dp=4), config, SIZES | {"micro_batch_size": 1}, 0
    )
    together = asked(server) - before
    assert together <= alone  # the copies of an .idx that one process made are every process's
    assert len({str(result["identity"]) for result in results}) == 1


@pytest.mark.guarantee("open-together")
def test_ranks_that_do_not_read_send_no_request(
    gang: Gang, served: tuple[Running, list[str]], config: DataConfig
) -> None:
    results = gang.run(3, open_and_read, ParallelLayout(pp=3), config, SIZES, 3)
    assert [result["stores_used"] for result in results] == [True, False, True]
    tensor = gang.run(2, open_and_read, ParallelLayout(tp=2), config, SIZES, 3)
    assert [result["stores_used"] for result in tensor] == [True, False]


@pytest.mark.guarantee("open-together")
def test_a_config_that_was_opened_together_asks_nothing(
    gang: Gang, served: tuple[Running, list[str]], config: DataConfig
) -> None:
    server, _ = served
    before = asked(server)
    known = open_together(config)
    alone = asked(server) - before
    assert alone > 0
    StreamLoader(known, **SIZES).close()
    pickled = pickle.loads(pickle.dumps(known))  # noqa: S301  (our own)
    StreamLoader(pickled, **SIZES).close()
    assert asked(server) - before == alone
    before = asked(server)
    results = gang.run(3, open_loaders_together, config, SIZES)
    assert asked(server) - before == alone
    assert results == [results[0]] * 3
    assert config.manifests == {}, "the config of the caller is as it was"


@pytest.mark.guarantee("open-together")
def test_an_error_of_the_first_rank_is_that_of_all(gang: Gang, config: DataConfig) -> None:
    wrong = replace(config, blend=["s3://b/missing"])
    first, other = gang.run(2, error_of_opening, ParallelLayout(dp=2), wrong, SIZES)
    assert first.startswith("ObjectNotFoundError: s3://b/missing.bin: no such object")
    assert other.startswith("ObjectNotFoundError: rank 0: s3://b/missing.bin: no such object")
