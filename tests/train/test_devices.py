"""Which device and transport a run takes: on machines without GPUs, with fewer than ranks, and with
enough.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from streammega.errors import ConfigError
from streammega.train.__main__ import main as train_main
from streammega.train.config import ParallelConfig, TrainConfig
from streammega.train.devices import (
    DeviceChoice,
    Seat,
    agree,
    check_backend,
    choose,
    place_of,
    seat_of,
    take,
)
from tests.support.builders import write_small_run

NCCL = "cpu:gloo,cuda:nccl"
BLIND = [Seat(0, "a"), Seat(1, "a")]
ONE_GPU = [Seat(0, "a", 0, "x"), Seat(1, "a", 0, "x")]
TWO_GPUS = [Seat(0, "a", 0, "x"), Seat(1, "a", 1, "y")]
TWO_HOSTS = [Seat(0, "a", 0, "x"), Seat(1, "b", 0, "x")]
MIXED = [Seat(0, "a", 0, "x"), Seat(1, "b")]
UNCLEAR = [
    Seat(0, "a", problem="LOCAL_RANK is not set"),
    Seat(1, "a", problem="LOCAL_RANK is not set"),
]


def settings(**chosen: Any) -> TrainConfig:
    return TrainConfig(iters=1, micro_batch_size=1, global_batch_size=1, out_dir="out", **chosen)


@pytest.mark.guarantee("ranks-take-device")
@pytest.mark.parametrize(
    ("seats", "chosen", "device", "backend"),
    [
        (BLIND, {}, "cpu", "gloo"),
        (TWO_GPUS, {}, "cuda", NCCL),
        (TWO_HOSTS, {}, "cuda", NCCL),
        (TWO_GPUS, {"backend": "nccl"}, "cuda", NCCL),
        (TWO_GPUS, {"backend": "gloo"}, "cuda", "gloo"),
        (TWO_GPUS, {"device": "cpu"}, "cpu", "gloo"),
        (MIXED, {"device": "cpu"}, "cpu", "gloo"),
        (ONE_GPU, {}, "cpu", "gloo"),
        (ONE_GPU, {"device": "cuda", "backend": "gloo"}, "cuda", "gloo"),
        (UNCLEAR, {"device": "cpu"}, "cpu", "gloo"),
    ],
)
def test_a_job_takes_one_device_and_one_transport(
    seats: Sequence[Seat], chosen: dict[str, Any], device: str, backend: str
) -> None:
    choice = choose(seats, settings(**chosen), nccl=True)
    assert (choice.device, choice.backend) == (device, backend)
    assert (choice.said is not None) == (seats is ONE_GPU)


def test_without_nccl_cuda_takes_gloo() -> None:
    assert choose(TWO_GPUS, settings(), nccl=False).backend == "gloo"


@pytest.mark.guarantee("ranks-take-device")
@pytest.mark.parametrize(
    ("seats", "chosen", "message"),
    [
        (
            ONE_GPU,
            {"device": "cuda"},
            r"2 ranks on a have 1 GPU, and NCCL takes one rank for each: start as many ranks as there are",
        ),
        (ONE_GPU, {"backend": "nccl"}, r"2 ranks on a have 1 GPU"),
        (BLIND, {"device": "cuda"}, r"torch.cuda.is_available\(\) is False on a"),
        (MIXED, {}, r"1 rank \(1; host b\) see no GPU, others do"),
        (
            UNCLEAR,
            {},
            r"rank 0 on a: LOCAL_RANK is not set; export LOCAL_RANK for every process, or use torchrun",
        ),
    ],
)
def test_what_cannot_work_is_one_line(
    seats: Sequence[Seat], chosen: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        choose(seats, settings(**chosen), nccl=True)
    assert "\n" not in str(error.value)


def test_settings_that_contradict_each_other_are_named() -> None:
    with pytest.raises(ConfigError, match="goes with GPUs"):
        settings(device="cpu", backend="nccl")
    with pytest.raises(ConfigError, match="must be one of auto, cpu, cuda"):
        settings(device="gpu")
    with pytest.raises(ConfigError, match=r"parallel\.tp 2 and parallel\.pp 1 must be 1"):
        check_backend(DeviceChoice("cuda", "gloo"), ParallelConfig(tp=2))
    with pytest.raises(ConfigError, match=r"parallel\.optimizer not sharded"):
        check_backend(DeviceChoice("cuda", "gloo"), ParallelConfig(optimizer="sharded"))
    check_backend(DeviceChoice("cuda", NCCL), ParallelConfig(tp=2))
    check_backend(DeviceChoice("cpu", "gloo"), ParallelConfig(pp=2))


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1, None)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, (3, 4, 1)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"},
            (3, 4, 1),
        ),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "4",
            },
            (3, 4, 2),
        ),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, None)),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}, (0, 1, 0)),
    ],
)
def test_the_local_rank_is_the_launchers(
    environment: dict[str, str], place: tuple[int, int, int | None]
) -> None:
    found = place_of(environment)
    assert (found.rank, found.world, found.local_rank) == place


@pytest.mark.guarantee("ranks-take-device")
@pytest.mark.parametrize(
    ("name", "launcher"), [("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")]
)
def test_processes_that_do_not_know_of_each_other_are_refused(name: str, launcher: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{launcher} started 4 processes, but WORLD_SIZE is not set: each would train the run",
    ):
        place_of({name: "4"})


def agreed(seats: Sequence[Seat], train: TrainConfig) -> list[DeviceChoice | str]:
    """What every rank is told; they ask one after the other, rank 0 last."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    told: dict[int, DeviceChoice | str] = {}

    def ask(seat: Seat) -> None:
        try:
            told[seat.rank] = agree(store, seat, len(seats), train)
        except ConfigError as error:
            told[seat.rank] = str(error)

    threads = [threading.Thread(target=ask, args=(seat,)) for seat in reversed(seats)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [told[seat.rank] for seat in seats]


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
def test_all_ranks_are_told_the_same() -> None:
    assert len(set(agreed(TWO_HOSTS, settings()))) == 1
    first, second = agreed(MIXED, settings())
    assert first == second
    assert "see no GPU" in str(first)


def test_a_machine_without_gpus_trains_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    seat = seat_of(place_of({}))
    assert seat.gpu is None
    assert take(choose([seat], settings(), nccl=True), seat).type == "cpu"


def test_ranks_find_the_gpu_that_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may show each rank all GPUs, or its own alone: then every rank's is number 0, and
    the ids differ.
    """
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties",
        lambda index: type("Gpu", (), {"uuid": f"gpu-{index}"})(),
    )
    for count, local, index in ((4, "3", 3), (1, "3", 0), (2, "3", 1), (1, None, 0)):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        environment = {"RANK": "3", "WORLD_SIZE": "4"} | (
            {} if local is None else {"LOCAL_RANK": local}
        )
        assert seat_of(place_of(environment)).index == index
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "LOCAL_RANK is not set" in str(
        seat_of(place_of({"RANK": "3", "WORLD_SIZE": "4"})).problem
    )
