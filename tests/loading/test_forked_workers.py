"""DataLoader workers that read from an object store: forked from a process that reads itself."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from streammega import DataConfig, StreamingDataset, StreamLoader
from streammega.errors import StateError
from streammega.loading import engine
from tests.support.expected import checked_batch
from tests.support.processes import in_child, launch
from tests.support.streams import FAULTS, config_of, storage_of
from tools.bench.object_server import Running

SAMPLES = 160
BATCH = 4


@pytest.fixture
def config(server: Running, tmp_path: Path) -> DataConfig:
    return config_of("stream", "s3:/", tmp_path, storage_of(server, "auto"), samples=SAMPLES)


def dataset_of(config: DataConfig) -> StreamingDataset:
    return StreamingDataset(config, micro_batch_size=BATCH, global_batch_size=2 * BATCH)


def forked(dataset: StreamingDataset, workers: int, **options: Any) -> Any:
    if workers:
        options["multiprocessing_context"] = "fork"
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def check_same(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same batches: names in their order, types and every bit."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert list(one) == list(other)
        for name, field in one.items():
            assert field.dtype == other[name].dtype
            assert torch.equal(field, other[name])


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {
        "eod_id": 7,
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "fields": [..., "attention_mask"],
    },
}


@pytest.mark.guarantee("batches-forked-workers")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than there are cores
@pytest.mark.parametrize("mode", list(MODES))
def test_batches_are_the_same_by_any_number_of_forked_workers_and_the_parent_reads_on(
    server: Running, config: DataConfig, mode: str
) -> None:
    def local(url: str) -> str:
        return url.replace("s3:/", str(server.root))

    dataset = dataset_of(replace(config, **MODES[mode]))
    expected = [checked_batch(dataset, consumed, local=local) for consumed in dataset.positions()]
    for workers in (0, 1, 3):
        check_same(list(forked(dataset, workers)), expected)
    check_same([dataset.batch(0)], expected[:1])


@pytest.mark.guarantee("batches-forked-workers")
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_twice_in_a_row_under_a_parent_that_reads_meanwhile(
    config: DataConfig, persistent: bool
) -> None:
    dataset = dataset_of(config)
    expected = [dataset.batch(consumed) for consumed in dataset.positions()]
    workers = forked(dataset, 1, persistent_workers=persistent)
    for _ in range(2):
        got = []
        for number, batch in enumerate(workers):
            got.append(batch)
            check_same([dataset.batch(2 * BATCH * (number // 2))], [expected[number // 2 * 2]])
        check_same(got, expected)


def _loaded(config: DataConfig, rank: int) -> list[Any]:
    """What a rank takes from a loader of its own."""
    sizes: Any = {"micro_batch_size": BATCH, "global_batch_size": 2 * BATCH}
    with StreamLoader(config, **sizes, dp_rank=rank, dp_size=2) as loader:
        return [batch["tokens"].tolist() for batch in loader]


@pytest.mark.guarantee("batches-forked-workers")
def test_a_rank_that_is_forked_reads_as_its_parent(config: DataConfig) -> None:
    for rank in range(2):
        assert in_child(_loaded, config, rank) == _loaded(config, rank)


@pytest.mark.guarantee("batches-forked-workers")
def test_a_worker_that_is_killed_is_an_error_and_the_run_resumes_exactly(
    config: DataConfig,
) -> None:
    dataset = dataset_of(config)
    expected = [dataset.batch(consumed) for consumed in dataset.positions()]
    batches = iter(forked(dataset, 2))
    taken = list(itertools.islice(batches, 7))
    state = dataset.state_dict(num_batches=7)
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"):
        taken += list(batches)
    del batches
    check_same(taken, expected[: len(taken)])
    resumed = dataset_of(config)
    resumed.load_state_dict(state)
    check_same(list(forked(resumed, 2)), expected[7:])


@pytest.mark.guarantee("batches-forked-workers")
def test_faults_that_forked_workers_meet_change_no_bit(server: Running, config: DataConfig) -> None:
    dataset = dataset_of(config)
    expected = [dataset.batch(consumed) for consumed in dataset.positions()]
    before = server.counts()["faults"]
    server.behave(**FAULTS["mixture"])
    got = list(forked(dataset, 2))
    server.behave()
    assert server.counts()["faults"] > before
    check_same(got, expected)


def _close_all(pipe: Any) -> None:
    engine._close_all()  # what Python does of itself at the end of a child that does not say os._exit
    pipe.send("closed")


@pytest.mark.guarantee("batches-forked-workers")
def test_a_child_ends_iterations_that_it_inherited_whatever_the_parents_threads_held(
    config: DataConfig,
) -> None:
    """A fork finds the lock of a loader's reads held now and then: here it does for certain."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with StreamLoader(config, micro_batch_size=BATCH, global_batch_size=2 * BATCH) as loader:
        batches = iter(loader)
        next(batches)
        locks = [live._fetcher._lock for live in engine._live if live._fetcher is not None]
        assert locks
        child = context.Process(target=_close_all, args=(theirs,))
        with contextlib.ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            child.start()
        try:
            assert ours.poll(30), "the child hangs"
        finally:
            child.kill()
            child.join()
        assert len(list(batches)) == SAMPLES // BATCH - 1, "the parent reads on"


def _read_on(loader: StreamLoader, held: Any) -> list[Any]:
    with pytest.raises(StateError, match="forked while it ran"):
        next(held)
    return [next(loader)["tokens"].tolist() for _ in range(5)]


@pytest.mark.guarantee("batches-forked-workers")
def test_a_child_reads_on_with_a_loader_whose_threads_are_its_parents(config: DataConfig) -> None:
    """It waited for ever for them. The parent's iterator is an error, for its batches are there."""
    with StreamLoader(config, micro_batch_size=BATCH, global_batch_size=2 * BATCH) as loader:
        expected = [loader.dataset.batch(consumed) for consumed in loader.dataset.positions()]
        batches = iter(loader)
        check_same([next(batches) for _ in range(3)], expected[:3])
        read = in_child(_read_on, loader, batches)
        assert read == [batch["tokens"].tolist() for batch in expected[3:8]]
        assert loader.consumed_samples == 3 * BATCH
        check_same(list(batches), expected[3:])


CTRL_C = """
import sys, time
from torch.utils.data import DataLoader
from streammega import DataConfig, StorageConfig, StreamingDataset
storage = StorageConfig(storage_options={"anon": True, "endpoint_url": sys.argv[1]})
config = DataConfig(
    blend=["s3://data/web"], sequence_length=64, order="stream", num_samples=(100_000, 0, 0),
    shuffle_lanes=16, storage=storage.changed(cache_dir=sys.argv[2]),
)
dataset = StreamingDataset(config, micro_batch_size=4, global_batch_size=8)
batches = iter(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"))
next(batches)
print(*(worker.pid for worker in batches._workers), "are workers.", flush=True)
while True:
    next(batches)
    time.sleep(0.01)
"""


@pytest.mark.guarantee("batches-forked-workers")
def test_ctrl_c_ends_a_run_and_its_forked_workers(server: Running, tmp_path: Path) -> None:
    run = launch(tmp_path, 1, ["-c", CTRL_C, server.endpoint, str(tmp_path)])
    run.wait_for("workers.\n", 0)
    (line,) = re.findall(r"^(.*) are workers\.$", run.log(0), re.M)
    workers = [int(pid) for pid in line.split()]
    assert len(workers) == 2
    run.signal(signal.SIGINT, 0)
    for pid in workers:  # as a terminal sends it to all; a run that has ended has ended its workers
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    assert run.ended(0, within=60) == [1]
    assert "KeyboardInterrupt" in run.log(0)
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker outlives its run"
        time.sleep(0.01)
