"""Which device and transport a run takes: on machines without GPUs, with fewer than ranks, and with
enough.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from streammega.errors import ConfigError
from streammega.train.config import RunConfig, load_run
from streammega.train.devices import ProcessInfo, pick_device, pick_devices, process_info
from streammega.train.program import main as train_main
from tests.support.builders import write_small_run

NCCL = "cpu:gloo,cuda:nccl"
ALONE = ProcessInfo(0, 1, None, 1)
FIRST, SECOND = ProcessInfo(0, 2, 0, 2), ProcessInfo(1, 2, 1, 2)
WITHOUT_LOCAL_RANK = ProcessInfo(1, 2, None, 1)
OWN_HOST = ProcessInfo(1, 2, 0, 1)
SHOWN_ITS_OWN = ProcessInfo(3, 4, 3, 1)
"""A launcher that is not torchrun shows it one GPU."""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    return write_small_run(tmp_path, "unused")


def run_with(run_file: str, *settings: str) -> RunConfig:
    return load_run(run_file, ["train.device=auto", *settings])


def see_gpus(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, host: str = "a", *, has_nccl: bool = True
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr("socket.gethostname", lambda: host)


@pytest.mark.guarantee("ranks-take-device")
@pytest.mark.parametrize(
    ("process", "num_gpus", "settings", "device", "backend"),
    [
        (ALONE, 0, [], "cpu", "gloo"),
        (ALONE, 2, [], "cuda:0", NCCL),
        (SECOND, 0, [], "cpu", "gloo"),
        (SECOND, 2, [], "cuda:1", NCCL),
        (OWN_HOST, 1, [], "cuda:0", NCCL),
        (SHOWN_ITS_OWN, 1, [], "cuda:0", NCCL),
        (SHOWN_ITS_OWN, 4, [], "cuda:3", NCCL),
        (SECOND, 2, ["train.backend=nccl"], "cuda:1", NCCL),
        (SECOND, 2, ["train.backend=gloo"], "cuda:1", "gloo"),
        (SECOND, 2, ["train.device=cpu"], "cpu", "gloo"),
        (SECOND, 2, ["parallel.tp=2"], "cuda:1", NCCL),
        (SECOND, 1, [], "cpu", "gloo"),
        (SECOND, 1, ["train.device=cuda", "train.backend=gloo"], "cuda:0", "gloo"),
        (SECOND, 0, ["parallel.pp=2"], "cpu", "gloo"),
        (WITHOUT_LOCAL_RANK, 2, ["train.device=cpu"], "cpu", "gloo"),
        (WITHOUT_LOCAL_RANK, 1, [], "cuda:0", NCCL),
    ],
)
def test_a_job_takes_one_device_and_one_transport(
    process: ProcessInfo,
    num_gpus: int,
    settings: list[str],
    device: str,
    backend: str,
    run_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see_gpus(monkeypatch, num_gpus)
    assert pick_device(process, run_with(run_file, *settings)) == (torch.device(device), backend)


def test_without_nccl_cuda_takes_gloo(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 2, has_nccl=False)
    assert pick_device(FIRST, run_with(run_file)) == (torch.device("cuda", 0), "gloo")


@pytest.mark.parametrize("settings", [[], ["parallel.tp=2"]])
def test_nccl_that_was_asked_for_and_is_missing_is_named(
    settings: list[str], run_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(monkeypatch, 2, has_nccl=False)
    with pytest.raises(ConfigError, match=r"train.backend = nccl, but this torch has no NCCL"):
        pick_device(FIRST, run_with(run_file, "train.backend=nccl", *settings))


def test_more_ranks_than_gpus_train_on_the_cpu_with_one_warning(
    run_file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    see_gpus(monkeypatch, 1)
    for process in (FIRST, SECOND):
        pick_device(process, run_with(run_file))
    [record] = caplog.records
    assert "2 ranks on a have 1 GPU: training on the CPU; start as many" in record.message


@pytest.mark.guarantee("ranks-take-device")
@pytest.mark.parametrize(
    ("process", "num_gpus", "settings", "message"),
    [
        (
            SECOND,
            1,
            ["train.device=cuda"],
            r"2 ranks on a have 1 GPU, and NCCL takes one rank for each: start as many ranks as there",
        ),
        (SECOND, 1, ["train.backend=nccl"], r"2 ranks on a have 1 GPU"),
        (SECOND, 0, ["train.backend=nccl"], r"train.backend = nccl, but a has no GPU: set"),
        (SECOND, 0, ["train.device=cuda"], r"torch.cuda.is_available\(\) is False on a"),
        (
            WITHOUT_LOCAL_RANK,
            2,
            [],
            r"rank 1 on a: LOCAL_RANK is not set, .* export LOCAL_RANK for every process, or use torchrun",
        ),
        (
            SECOND,
            2,
            ["train.backend=gloo", "parallel.tp=2"],
            r"parallel\.tp 2 and parallel\.pp 1 must be 1",
        ),
        (
            SECOND,
            2,
            ["train.backend=gloo", "parallel.optimizer=sharded"],
            r"parallel\.optimizer not sharded",
        ),
    ],
)
def test_what_cannot_work_is_one_line(
    process: ProcessInfo,
    num_gpus: int,
    settings: list[str],
    message: str,
    run_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see_gpus(monkeypatch, num_gpus)
    with pytest.raises(ConfigError, match=message) as error:
        pick_device(process, run_with(run_file, *settings))
    assert "\n" not in str(error.value)


def test_settings_that_contradict_each_other_are_named(run_file: str) -> None:
    for settings, message in (
        (["train.device=cpu", "train.backend=nccl"], "goes with GPUs"),
        (["train.device=gpu"], "must be one of auto, cpu, cuda"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_with(run_file, *settings)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1, None)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": ""}, (3, 4, None)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"},
            (3, 4, None),
        ),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, (0, 1, None)),
    ],
)
def test_the_place_of_a_process_is_that_of_torchs_variables(
    environment: dict[str, str], place: tuple[int, int, int | None]
) -> None:
    found = process_info(environment)
    assert (found.rank, found.world_size, found.local_rank) == place


@pytest.mark.guarantee("ranks-take-device")
@pytest.mark.parametrize(
    ("name", "launcher"), [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")]
)
def test_processes_that_do_not_know_of_each_other_are_refused(name: str, launcher: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{launcher} started 4 processes, but WORLD_SIZE is not set: each would train the run",
    ):
        process_info({name: "4"})


@pytest.mark.guarantee("settings-run-cannot")
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"WORLD_SIZE": "two"},
            "WORLD_SIZE is 'two' in the environment; it must be a whole number",
        ),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is '-1' in the environment"),
        (
            {"WORLD_SIZE": "2"},
            "environment variable RANK expected, but not set): set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"},
            "port must have value from 0",
        ),
    ],
)
def test_ranks_that_cannot_meet_say_what_is_missing(
    variables: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train_main([write_small_run(tmp_path, "unused")]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.guarantee("ranks-take-device")
def test_all_ranks_are_told_the_same(run_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask one after the other: the store answers when all have asked."""
    config = run_with(run_file)
    assert told(monkeypatch, config, [1, 1]) == ["cuda:0", "cuda:0"]
    first, second = told(monkeypatch, config, [1, 0])
    assert first == second
    assert (
        "rank 1 would train on the CPU, the others on GPUs: mend the hosts that see no GPU" in first
    )
    first, second = told(monkeypatch, run_with(run_file, "train.device=cuda"), [0, 1])
    assert first == second
    assert "torch.cuda.is_available() is False on host 0" in first


def told(monkeypatch: pytest.MonkeyPatch, config: RunConfig, gpus_of_ranks: list[int]) -> list[str]:
    """The device of every rank, or why it has none, of ranks on hosts of their own."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    answers: dict[int, str] = {}

    def ask(rank: int) -> None:
        process = ProcessInfo(rank, len(gpus_of_ranks), 0, 1)
        try:
            device, _ = pick_devices(store, process, config)
            answers[rank] = str(device)
        except ConfigError as error:
            answers[rank] = str(error)

    threads = []
    for rank, num_gpus in enumerate(gpus_of_ranks):
        see_gpus(monkeypatch, num_gpus, f"host {rank}")
        threads.append(threading.Thread(target=ask, args=(rank,)))
        threads[-1].start()
        store.wait([str(rank)])
    for thread in threads:
        thread.join()
    return [answers[rank] for rank in range(len(gpus_of_ranks))]
