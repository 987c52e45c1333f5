"""How the processes of a run start: device and transport, one choice for all ranks; the ranks of the
layout; and torch's switches for how it computes.
"""

from __future__ import annotations

import json
import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from streammega.errors import ConfigError
from streammega.errors.words import pluralize
from streammega.parallel import Ranks
from streammega.parallel.layout import ParallelLayout
from streammega.train.config import ParallelConfig, RunConfig, TrainConfig

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""What torchrun, srun, Open MPI, and MPICH and Intel MPI call the number of a process on a host."""
TASKS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""How many processes were started together, and by what."""
NAMED = 8
"""Ranks that a message names."""


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
    """Of all ranks.

    device: "cpu" or "cuda". backend: as init_process_group takes it. said: what a user should know.
    """

    device: str
    backend: str
    said: str | None = None


ON_CPU = DeviceChoice("cpu", "gloo")


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
                f"{launcher} started {tasks} processes, but WORLD_SIZE is not set: each would "
                f"train the run by itself; set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
                f"for every process, or let torchrun start them"
            )
    rank = _number(environment, "RANK", 0)
    return ProcessPlace(rank, world, _local_rank(environment))


def _local_rank(environment: Mapping[str, str]) -> int | None:
    """The number of this process on its host; None where no launcher says it."""
    for name in LOCAL_RANKS:
        if environment.get(name):
            return _number(environment, name, 0)
    return None


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
        return ON_CPU
    without = [seat for seat in seats if seat.gpu is None]
    none_has_one = len(without) == len(seats)
    is_clear = not any(seat.problem for seat in seats)
    if without and train.device == "auto" and none_has_one and is_clear:
        return ON_CPU
    if without:
        raise ConfigError(_why_no_gpu(without, seats, train))
    shared = _shared(seats)
    if shared and train.device == "auto" and train.backend != "nccl":
        mend = "start as many ranks as there are GPUs, or set train.device"
        return replace(ON_CPU, said=f"{shared}: training on the CPU; {mend}")
    if shared and train.backend != "gloo":
        raise ConfigError(
            f"{shared}, and NCCL takes one rank for each: start as many ranks as there are GPUs, "
            f"or set train.backend = gloo (slow: for tests), or train.device = cpu"
        )
    if train.backend == "gloo" or not nccl:
        return DeviceChoice("cuda", "gloo", shared)
    # Beside NCCL: what ranks say of checkpoints and the like lies on the host.
    return DeviceChoice("cuda", "cpu:gloo,cuda:nccl")


def agree(store: Store, seat: Seat, world: int, train: TrainConfig) -> DeviceChoice:
    """The same choice on all ranks: rank 0 makes it.

    Collective; waits as long as the store does. Raises ConfigError on all.
    """
    store.set(f"seat/{seat.rank}", json.dumps(asdict(seat)))
    if seat.rank == 0:
        store.set("choice", json.dumps(_verdict(_all_seats(store, world), train)))
    verdict = json.loads(store.get("choice"))
    if "error" in verdict:
        raise ConfigError(verdict["error"])
    return DeviceChoice(**verdict)


def _all_seats(store: Store, world: int) -> list[Seat]:
    names = [f"seat/{rank}" for rank in range(world)]
    store.wait(names)
    return [Seat(**json.loads(value)) for value in store.multi_get(names)]


def _verdict(seats: Sequence[Seat], train: TrainConfig) -> dict[str, Any]:
    """The fields of a DeviceChoice, or {"error": why there is none}: all ranks are told either."""
    try:
        choice = choose(seats, train, nccl=dist.is_nccl_available())
    except ConfigError as error:
        return {"error": str(error)}
    return asdict(choice)


def take(choice: DeviceChoice, seat: Seat) -> torch.device:
    """The device of this rank, which is torch's current one from here on."""
    if choice.device == "cpu":
        return torch.device("cpu")
    assert seat.index is not None
    device = torch.device("cuda", seat.index)
    torch.cuda.set_device(device)
    return device


def check_backend(choice: DeviceChoice, parallel: ParallelConfig) -> None:
    """Raise ConfigError for what gloo cannot do with CUDA's memory: it would read it as the
    host's.
    """
    gloo_on_cuda = choice.device == "cuda" and choice.backend == "gloo"
    is_sharded = parallel.optimizer == "sharded"
    if gloo_on_cuda and (max(parallel.tp, parallel.pp) > 1 or is_sharded):
        raise ConfigError(
            f"train.backend = gloo on CUDA reduces and broadcasts only: parallel.tp {parallel.tp} "
            f"and parallel.pp {parallel.pp} must be 1, and parallel.optimizer not sharded; "
            f"set train.backend = nccl, or train.device = cpu"
        )


def _why_no_gpu(without: Sequence[Seat], seats: Sequence[Seat], train: TrainConfig) -> str:
    """In words, what keeps ranks from having GPUs."""
    for seat in without:
        if seat.problem:
            return (
                f"rank {seat.rank} on {seat.host}: {seat.problem}; "
                f"export LOCAL_RANK for every process, or use torchrun"
            )
    host = without[0].host
    if len(without) < len(seats):
        names = ", ".join(str(seat.rank) for seat in without[:NAMED])
        if len(without) > NAMED:
            names += ", ..."
        who = f"{pluralize(len(without), 'rank')} ({names}; host {host})"
        return f"{who} see no GPU, others do: mend that host, or set train.device = cpu"
    where = f"torch.cuda.is_available() is False on {host}"
    return f"train.device = {train.device}, but {where}: set train.device = cpu or auto"


def _shared(seats: Sequence[Seat]) -> str | None:
    """In words, the first GPU host with more ranks than GPUs."""
    seats_on: dict[str, list[Seat]] = defaultdict(list)
    for seat in seats:
        seats_on[seat.host].append(seat)
    for host, seats_of_host in seats_on.items():
        ranks = len(seats_of_host)
        gpus = len({seat.gpu for seat in seats_of_host})
        if gpus < ranks:
            return f"{pluralize(ranks, 'rank')} on {host} have {pluralize(gpus, 'GPU')}"
    return None


NCCL_MARGIN = 60.0
"""Seconds: NCCL's own watchdog aborts the process without saying which rank was missing, so it must
come after the watch.
"""


def make_ranks(config: RunConfig, device: torch.device) -> Ranks:
    """The ranks of a run's layout, in the world that there is. Raises ConfigError."""
    parallel = config.parallel
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout = ParallelLayout.of_world(
        world, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, order=parallel.order
    )
    check_pipeline(config, layout)
    margin = NCCL_MARGIN if device.type == "cuda" else 0.0
    return Ranks(layout, timedelta(seconds=config.train.timeout + margin))


def check_pipeline(config: RunConfig, layout: ParallelLayout) -> None:
    """Raise ConfigError for steps of too few micro-batches to keep the pipeline's stages busy."""
    step_samples = config.train.micro_batch_size * layout.dp
    is_interleaved = config.parallel.virtual_stages > 1
    for _, batch_samples in config.schedule.stages:
        micro_batches = batch_samples // step_samples
        too_few = micro_batches < layout.pp
        # The interleaved schedule goes through its stages in rounds of pp micro-batches.
        uneven = is_interleaved and micro_batches % layout.pp != 0
        if too_few or uneven:
            needs = "a multiple of" if is_interleaved else "at least"
            raise ConfigError(
                f"a step of {batch_samples} samples has {micro_batches} micro-batches on each "
                f"rank; parallel.pp {layout.pp} needs {needs} {layout.pp}: "
                f"change train.global_batch_size or micro_batch_size"
            )


WORKSPACE = ":4096:8"
"""Of cuBLAS: eight buffers of 4 MiB, one of the two values with which it always sums in one order.
Source: NVIDIA's cuBLAS documentation, "Results reproducibility".
"""


def set_numerics(train: TrainConfig) -> None:
    """Set torch's switches for TF32 and determinism. Call before the first matrix product: cuBLAS
    looks at its variable then.

    A setting that is off leaves what the process has chosen by itself.
    """
    if train.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
        torch.use_deterministic_algorithms(True)
        # What is not initialised is never read here, and filling it takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
