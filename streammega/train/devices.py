"""Which device and which transport the ranks of a run take: one choice for all of them, made where
all are known.
"""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed import Store

from streammega.errors import ConfigError
from streammega.train.config import ParallelConfig, TrainConfig

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""What torchrun, srun, Open MPI, and MPICH and Intel MPI call the number of a
process on its host.
"""
TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""How many processes were started together, and by what."""


@dataclass(frozen=True)
class ProcessPlace:
    """This process among those of the job; local_rank: on its host, None where nothing says so."""

    rank: int
    world: int
    local_rank: int | None


@dataclass(frozen=True)
class Seat:
    """What a rank could take: a GPU by its index and its unique id; None where it sees none.

    problem: why it cannot say which of several GPUs is its own.
    """

    rank: int
    host: str
    index: int | None = None
    gpu: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class DeviceChoice:
    """Of all ranks. device: "cpu" or "cuda"; backend: as init_process_group takes it; said: what a
    user should know.
    """

    device: str
    backend: str
    said: str | None = None


def place_of(environment: Mapping[str, str]) -> ProcessPlace:
    """The place that torchrun, srun or mpirun gave this process.

    Raises ConfigError where several processes were started without saying so to torch: each would
    train the whole run.
    """
    world = _number(environment, "WORLD_SIZE", 1)
    for name, launcher in TASKS.items():
        tasks = _number(environment, name, 1)
        if "WORLD_SIZE" not in environment and tasks > 1:
            raise ConfigError(
                f"{launcher} started {tasks} processes, but WORLD_SIZE is not set: each would train the run by itself; set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process, or let torchrun start them"
            )
    local = next(
        (_number(environment, name, 0) for name in LOCAL_RANKS if environment.get(name)), None
    )
    return ProcessPlace(_number(environment, "RANK", 0), world, local)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """A variable that counts from 0; `default` where it is not set, or empty."""
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(
            f"{name} is {text!r} in the environment; it must be a whole number, at least 0"
        )
    return int(text)


def seat_of(place: ProcessPlace) -> Seat:
    """The GPU that is meant for this process. Makes no context on any."""
    host = socket.gethostname()
    if not torch.cuda.is_available():
        return Seat(place.rank, host)
    count = torch.cuda.device_count()
    local = place.local_rank
    if local is None and place.world > 1 and count > 1:
        others = ", ".join(LOCAL_RANKS[1:])
        problem = (
            f"LOCAL_RANK is not set, and none of {others}, "
            f"so it cannot tell which of {count} GPUs is its own"
        )
        return Seat(place.rank, host, problem=problem)
    # a launcher may show each rank its own GPU only; ranks that share one are found by its id
    index = (local or 0) % count
    unique = str(getattr(torch.cuda.get_device_properties(index), "uuid", index))
    return Seat(place.rank, host, index, unique)


def choose(seats: Sequence[Seat], train: TrainConfig, *, nccl: bool) -> DeviceChoice:
    """The device and backend of a job of these seats. nccl: whether torch has it.

    "auto" takes CUDA where every rank has a GPU to itself, and the CPU where none has, or where
    there are more ranks than GPUs. Raises ConfigError for what cannot work.
    """
    if train.device == "cpu":
        return DeviceChoice("cpu", "gloo")
    without = [seat for seat in seats if seat.gpu is None]
    if (
        without
        and train.device == "auto"
        and len(without) == len(seats)
        and not any(seat.problem for seat in seats)
    ):
        return DeviceChoice("cpu", "gloo")
    if without:
        raise ConfigError(_why_no_gpu(without, seats, train))
    shared = _shared(seats)
    if shared and train.device == "auto" and train.backend != "nccl":
        return DeviceChoice(
            "cpu",
            "gloo",
            f"{shared}: training on the CPU; start as many ranks as there are GPUs, or set train.device",
        )
    if shared and train.backend != "gloo":
        raise ConfigError(
            f"{shared}, and NCCL takes one rank for each: start as many ranks as there are GPUs, or set train.backend = gloo "
            "(slow: for tests), or train.device = cpu"
        )
    if train.backend == "gloo" or not nccl:
        return DeviceChoice("cuda", "gloo", shared)
    return DeviceChoice("cuda", "cpu:gloo,cuda:nccl")


def agree(store: Store, seat: Seat, world: int, train: TrainConfig) -> DeviceChoice:
    """The same choice on all ranks: rank 0 makes it.

    Collective; waits as long as the store does. Raises ConfigError on all.
    """
    store.set(f"seat/{seat.rank}", json.dumps(asdict(seat)))
    if seat.rank == 0:
        names = [f"seat/{rank}" for rank in range(world)]
        store.wait(names)
        seats = [Seat(**json.loads(value)) for value in store.multi_get(names)]
        try:
            verdict = asdict(choose(seats, train, nccl=dist.is_nccl_available()))
        except ConfigError as error:
            verdict = {"error": str(error)}
        store.set("choice", json.dumps(verdict))
    found = json.loads(store.get("choice"))
    if "error" in found:
        raise ConfigError(found["error"])
    return DeviceChoice(**found)


def take(choice: DeviceChoice, seat: Seat) -> torch.device:
    """The device of this rank, which is torch's current one from here on."""
    if choice.device == "cpu":
        return torch.device("cpu")
    assert seat.index is not None
    device = torch.device("cuda", seat.index)
    torch.cuda.set_device(device)
    return device


def check_backend(choice: DeviceChoice, parallel: ParallelConfig) -> None:
    """Raise ConfigError for what gloo cannot do with CUDA's memory: it would read
    it as the host's.
    """
    if choice.device == "cuda" and choice.backend == "gloo" and max(parallel.tp, parallel.pp) > 1:
        raise ConfigError(
            f"train.backend = gloo on CUDA reduces and broadcasts only: parallel.tp {parallel.tp} and parallel.pp {parallel.pp} "
            "must be 1; set train.backend = nccl, or train.device = cpu"
        )


def _why_no_gpu(without: Sequence[Seat], seats: Sequence[Seat], train: TrainConfig) -> str:
    unclear = next((seat for seat in without if seat.problem), None)
    if unclear is not None:
        return f"rank {unclear.rank} on {unclear.host}: {unclear.problem}; export LOCAL_RANK for every process, or use torchrun"
    if len(without) < len(seats):
        names = ", ".join(str(seat.rank) for seat in without[:8]) + (
            ", ..." if len(without) > 8 else ""
        )
        who = f"{_ranks(len(without))} ({names}; host {without[0].host})"
        return f"{who} see no GPU, others do: mend that host, or set train.device = cpu"
    where = f"torch.cuda.is_available() is False on {without[0].host}"
    return f"train.device = {train.device}, but {where}: set train.device = cpu or auto"


def _shared(seats: Sequence[Seat]) -> str | None:
    """In words, the first GPU host with more ranks than GPUs."""
    on_host: dict[str, list[Seat]] = defaultdict(list)
    for seat in seats:
        on_host[seat.host].append(seat)
    for host, own in on_host.items():
        gpus = len({seat.gpu for seat in own})
        if gpus < len(own):
            return f"{_ranks(len(own))} on {host} have {gpus} GPU{'s' if gpus > 1 else ''}"
    return None


def _ranks(count: int) -> str:
    return f"{count} ranks" if count > 1 else "1 rank"
