"""How the processes of a run start: which device each takes, one process group of all, and torch's
switches for how they compute.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from streammega.errors import ConfigError, StreammegaError
from streammega.errors.logs import get_logger
from streammega.errors.words import pluralize
from streammega.loading.ranks import WORLD_SIZE, count_in, launched_tasks
from streammega.train.config import RunConfig, TrainConfig
from streammega.train.config_check import name_ranks

log = get_logger(__name__)

START_TIMEOUT = 300.0
"""Seconds that ranks may start apart."""
LOCAL_RANK = "LOCAL_RANK"
SET_VARIABLES = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process, or let torchrun start them"
MAX_PORT = 65535
WORKSPACE = ":4096:8"
"""The workspace of cuBLAS: eight buffers of 4 MiB. It is one of the two values with which cuBLAS always
sums in one order.
Source: NVIDIA's cuBLAS documentation, "Results reproducibility".
"""


class ProcessInfo(NamedTuple):
    """This process among those of the job. local_rank: on its host; None where nothing says it.
    local_world_size: processes on its host, if torchrun started them; else 1.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int


def start_ranks(config: RunConfig) -> torch.device:
    """Join the job's process group, if there is more than one rank: the device of this rank, which
    is torch's current one from here on.

    Raises ConfigError for what cannot work.
    """
    train = config.train
    process = process_info(os.environ)
    if process.world_size == 1:
        device, _ = pick_device(process, config)
        _use(device)
        return device
    timeout = timedelta(seconds=max(train.collective_timeout, START_TIMEOUT))
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        # The store outlives a restart: what was written there before is void.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"attempt-{attempt}", store)
        device, backend = pick_devices(PrefixStore("devices", store), process, config)
        _use(device)
        dist.init_process_group(
            backend,
            store=PrefixStore("default", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    except StreammegaError:
        raise
    except (ValueError, RuntimeError) as error:
        # A variable is missing or wrong; the address is taken, or a rank does not come.
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"the ranks cannot meet ({reason}): {SET_VARIABLES}") from None
    return device


def process_info(environment: Mapping[str, str]) -> ProcessInfo:
    """The place that torch's variables give this process.

    Raises ConfigError where several processes were started without saying so to torch: each would
    train the whole run.
    """
    launched = None if WORLD_SIZE in environment else launched_tasks(environment)
    if launched is not None:
        launcher, tasks = launched
        raise ConfigError(
            f"{launcher} started {tasks} processes, but WORLD_SIZE is not set: each would "
            f"train the run by itself; {SET_VARIABLES}"
        )
    return ProcessInfo(
        rank=count_in(environment, "RANK", 0),
        world_size=count_in(environment, WORLD_SIZE, 1),
        local_rank=count_in(environment, LOCAL_RANK, 0) if environment.get(LOCAL_RANK) else None,
        local_world_size=count_in(environment, "LOCAL_WORLD_SIZE", 1),
    )


def metrics_port_of(first_port: int | None, process: ProcessInfo) -> int | None:
    """The port of this rank, if its machine's ranks have ports from `first_port` on.

    Raises ConfigError for a port that is too large.
    """
    if first_port is None:
        return None
    # without a launcher that numbers the processes of a host, all ranks may be on this one
    port = first_port + (process.rank if process.local_rank is None else process.local_rank)
    if port > MAX_PORT:
        raise ConfigError(
            f"train.metrics_port is {first_port}, and rank {process.rank} would serve on {port}; "
            f"the largest port is {MAX_PORT}: choose a lower one"
        )
    return port


def pick_device(process: ProcessInfo, config: RunConfig) -> tuple[torch.device, str]:
    """The device of this rank, and the backend of the job as init_process_group takes it.

    "auto" takes CUDA where there is a GPU for every rank of the host, else the CPU. Only torchrun
    says how many ranks a host has. Those of srun and mpirun may share a GPU, which NCCL refuses.
    Raises ConfigError for what cannot work.
    """
    train = config.train
    parallel = config.parallel
    on_cpu = torch.device("cpu"), "gloo"
    host = socket.gethostname()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if train.device == "cpu" or (train.device == "auto" and num_gpus == 0):
        if train.backend == "nccl":
            raise ConfigError(
                f"train.backend = nccl, but {host} has no GPU: set train.backend = auto"
            )
        return on_cpu
    if num_gpus == 0:
        raise ConfigError(
            f"train.device = cuda, but torch.cuda.is_available() is False on {host}: "
            f"set train.device = cpu or auto"
        )
    if process.local_rank is None and process.world_size > 1 and num_gpus > 1:
        raise ConfigError(
            f"rank {process.rank} on {host}: LOCAL_RANK is not set, so it cannot tell which of "
            f"{num_gpus} GPUs is its own; export LOCAL_RANK for every process, or use torchrun"
        )
    if process.local_world_size > num_gpus and train.backend != "gloo":
        ranks = pluralize(process.local_world_size, "rank")
        shared = f"{ranks} on {host} have {pluralize(num_gpus, 'GPU')}"
        if train.device == "cuda" or train.backend == "nccl":
            raise ConfigError(
                f"{shared}, and NCCL takes one rank for each: start as many ranks as there are "
                f"GPUs, or set train.backend = gloo (slow: for tests), or train.device = cpu"
            )
        if process.local_rank == 0:
            mend = "start as many ranks as there are GPUs, or set train.device"
            log.warning("%s: training on the CPU; %s", shared, mend)
        return on_cpu
    # A launcher may show each rank its own GPU only.
    device = torch.device("cuda", (process.local_rank or 0) % num_gpus)
    if train.backend != "gloo" and dist.is_nccl_available():
        # gloo too: messages about checkpoints are in the host's memory.
        return device, "cpu:gloo,cuda:nccl"
    if train.backend == "nccl":
        raise ConfigError(
            f"train.backend = nccl, but this torch has no NCCL on {host}: install one that has, or "
            f"set train.backend = auto"
        )
    # with CUDA tensors gloo does broadcast and all_reduce only: torch.distributed's table of backends
    is_sharded = parallel.optimizer == "sharded"
    if process.world_size > 1 and (max(parallel.tp, parallel.pp) > 1 or is_sharded):
        raise ConfigError(
            f"train.backend = gloo on CUDA reduces and broadcasts only: parallel.tp {parallel.tp} "
            f"and parallel.pp {parallel.pp} must be 1, and parallel.optimizer not sharded; "
            f"set train.backend = nccl, or train.device = cpu"
        )
    return device, "gloo"


def pick_devices(store: Store, process: ProcessInfo, config: RunConfig) -> tuple[torch.device, str]:
    """`pick_device` on every rank. Waits for all ranks as long as the store does.

    Raises ConfigError on all of them where one has no device, or not all have the same kind.
    """
    try:
        device, backend = pick_device(process, config)
        answer = device.type
    except ConfigError as error:
        answer = str(error)
    store.set(str(process.rank), answer)
    names = [str(rank) for rank in range(process.world_size)]
    store.wait(names)
    answers = [value.decode() for value in store.multi_get(names)]
    for answer in answers:
        if answer not in ("cpu", "cuda"):
            raise ConfigError(answer)
    on_cpu = [rank for rank, answer in enumerate(answers) if answer == "cpu"]
    if 0 < len(on_cpu) < len(answers):
        raise ConfigError(
            f"{name_ranks(on_cpu)} would train on the CPU, the others on GPUs: mend the hosts that "
            f"see no GPU, or have too few, or set train.device = cpu"
        )
    return device, backend


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def set_numerics(train: TrainConfig) -> None:
    """Set torch's switches for determinism. Call before the first matrix product: cuBLAS looks at its
    variable then.

    A setting that is off leaves what the process has chosen by itself.
    """
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
        torch.use_deterministic_algorithms(True)
        # What is not initialised is never read here, and filling it takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class DeviceTimer:
    """How long a device needs for the work of a `with` block: by the host's clock, or by CUDA events.

    Nothing waits for the device. Read `seconds` after the host has waited for the block's work.
    """

    def __init__(self, device: torch.device) -> None:
        count = 2 if device.type == "cuda" else 0
        self._events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(count)
        ]
        self._times = [0.0, 0.0]

    def __enter__(self) -> None:
        self._mark(0)

    def __exit__(self, *_: object) -> None:
        self._mark(1)

    def _mark(self, index: int) -> None:
        self._times[index] = time.perf_counter()
        if self._events:
            self._events[index].record()

    @property
    def seconds(self) -> float:
        """The time from the begin to the end of the last block."""
        begin, end = self._times
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._events else end - begin
