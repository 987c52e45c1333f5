"""The data-parallel rank of a process: what its caller says, and how many processes a launcher started.

A process that says nothing is the only rank. Where a launcher started several, each of them would
then read the same batches, so that is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from streammega.config.validate import whole_number
from streammega.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WORLD_SIZE = "WORLD_SIZE"
"""The processes of a job, as torchrun says it, and others for `init_process_group`."""
TASKS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
}
"""The processes that other launchers started. SLURM_NTASKS is not among them: it is that of the job,
also in its batch script and in an interactive shell, which are one process.
"""
RANK_UNKNOWN = (
    "and nothing says which rank reads here: every process would read the same batches. Give dp_rank= "
    "and dp_size=, or mesh=; or dp_size=1, if each process is to read everything"
)


def data_parallel(
    dp_rank: int | None, dp_size: int | None, mesh: DeviceMesh | None = None
) -> tuple[int, int]:
    """(rank, size) from the two numbers or from a mesh; (0, 1) for dp_size=1 alone, or without any.

    Raises ConfigError without any of them in a job of several processes. So it does if one of the
    numbers is missing, if numbers and a mesh are given, or if the mesh has several dimensions and none
    is named "dp".
    """
    if mesh is None:
        if dp_rank is None and dp_size is None:
            check_alone()
            return 0, 1
        if dp_size is None or (dp_rank is None and dp_size != 1):
            raise ConfigError(
                "dp_rank and dp_size go together: give both, or a mesh, or dp_size=1 alone for a "
                "single rank"
            )
        rank = 0 if dp_rank is None else whole_number("dp_rank", dp_rank)
        return rank, whole_number("dp_size", dp_size, 1)
    if dp_rank is not None or dp_size is not None:
        raise ConfigError("give either a mesh or dp_rank and dp_size, not both")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "dp" not in names:
        raise ConfigError(
            f"the mesh has dimensions {names or mesh.ndim}; name the data-parallel one 'dp'"
        )
    dim = names.index("dp") if "dp" in names else 0
    return mesh.get_local_rank(dim), mesh.size(dim)


def check_alone(problem: str = RANK_UNKNOWN, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError with a problem if this process, which said nothing of its rank, is one of
    several.
    """
    source = ""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        source = f"torch.distributed has {dist.get_world_size()} ranks"
    elif WORLD_SIZE in environment:
        if (count := count_in(environment, WORLD_SIZE, 1)) > 1:
            source = f"{WORLD_SIZE} is {count} in the environment"
    elif launched := launched_tasks(environment):
        source = "{} started {} processes".format(*launched)
    if source:
        raise ConfigError(f"{source}, {problem}")


def launched_tasks(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """(launcher, processes) where srun or mpirun started several; else None."""
    for name, launcher in TASKS.items():
        if (tasks := count_in(environment, name, 1)) > 1:
            return launcher, tasks
    return None


def count_in(environment: Mapping[str, str], name: str, default: int) -> int:
    """A variable that counts from 0; `default` where it is not set, or empty."""
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(
            f"{name} is {text!r} in the environment; it must be a whole number, at least 0"
        )
    return int(text)
