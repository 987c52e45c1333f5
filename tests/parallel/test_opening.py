"""Data that ranks open together: who asks the servers, and what each rank sees."""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammega import DataConfig, IndexedDataset, ParallelLayout, StorageConfig, StreamLoader
from streammega.storage import answers as answers_module
from streammega.storage.answers import Answers, are_shared
from tests.support.builders import write_lengths, write_manifest
from tests.support.gang import Gang
from tests.support.rank_programs import (
    error_of_opening,
    open_alone,
    open_and_read,
    open_documents_together,
)
from tools.bench.object_server import Running, running

SIZES: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4}
DATASETS = 10
SHARDS = 10


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
def test_ranks_send_as_many_requests_to_open_as_one(
    gang: Gang, served: tuple[Running, list[str]], config: DataConfig
) -> None:
    server, _ = served
    before = asked(server)
    StreamLoader(config, **SIZES).close()
    alone = asked(server) - before
    before = asked(server)
    results = gang.run(4, open_and_read, ParallelLayout(tp=2, dp=2), config, SIZES, 0)
    together = asked(server) - before
    assert together == alone
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
def test_anything_that_is_opened_together_is_asked_for_once(
    gang: Gang, served: tuple[Running, list[str]], config: DataConfig
) -> None:
    server, (name, *_) = served
    before = asked(server)
    documents = len(IndexedDataset(name, config.storage))
    alone = asked(server) - before
    before = asked(server)
    results = gang.run(3, open_documents_together, name, config.storage)
    assert asked(server) - before <= alone
    assert results == [documents] * 3


@pytest.mark.guarantee("open-together")
def test_an_error_of_the_first_rank_is_that_of_all(gang: Gang, config: DataConfig) -> None:
    wrong = replace(config, blend=["s3://b/missing"])
    first, other = gang.run(2, error_of_opening, ParallelLayout(dp=2), wrong, SIZES)
    assert first.startswith("ObjectNotFoundError: s3://b/missing.bin: no such object")
    assert other.startswith("ObjectNotFoundError: rank 0: s3://b/missing.bin: no such object")


@pytest.mark.guarantee("open-once-per-node")
def test_of_processes_of_a_node_that_open_at_once_one_asks(
    gang: Gang, served: tuple[Running, list[str]], config: DataConfig
) -> None:
    server, _ = served
    before = asked(server)
    StreamLoader(config, **SIZES).close()
    alone = asked(server) - before
    server.behave(latency=0.1, latency_of_all=True)
    try:
        before = asked(server)
        sizes = {"micro_batch_size": 1, "global_batch_size": 4}
        identities = gang.run(4, open_alone, config, sizes, 4)
        together = asked(server) - before
    finally:
        server.behave(latency=0.0, latency_of_all=False)
    assert together <= 1.5 * alone
    assert len({str(identity) for identity in identities}) == 1


def test_answers_are_the_same_again_and_others_are_asked_for(
    served: tuple[Running, list[str]], config: DataConfig
) -> None:
    server, _ = served
    answers = Answers()

    def identity(changed: DataConfig) -> Any:
        with StreamLoader(changed, **SIZES) as loader:
            return loader.state_dict()["order"]

    with answers.shared():
        first = identity(config)
    stored = answers.to_bytes()
    again = Answers.from_bytes(stored)
    before = asked(server)
    with again.shared():
        assert identity(config) == first
        assert asked(server) == before
        assert identity(replace(config, split="55,45,0")) != first, "other pointers are read"
    assert asked(server) > before
    for wrong in (b"", b"x", stored[:-3], zlib.compress(b"[]"), zlib.compress(b"[" * 100_000)):
        with pytest.raises(ValueError, match=r"."):
            Answers.from_bytes(wrong)


def test_answers_that_unpack_to_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "MAX_BYTES", 1000)
    assert Answers.from_bytes(zlib.compress(b"{}".ljust(1000)))
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        Answers.from_bytes(zlib.compress(b"{}".ljust(1001)))


def test_an_answer_of_another_form_is_asked_for() -> None:
    for wrong in ('["info", "key"]', "7", '["bytes", "?"]', '["bytes", 7]'):
        answers = Answers.from_bytes(zlib.compress(f'{{"request": {wrong}}}'.encode()))
        assert answers.ask("request", lambda: 7) == 7


def test_a_process_that_is_forked_meanwhile_asks_by_itself() -> None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    with Answers().shared():
        child = context.Process(target=lambda: sender.send(are_shared()))
        child.start()
        assert are_shared()
    assert receiver.recv() is False
    child.join()
