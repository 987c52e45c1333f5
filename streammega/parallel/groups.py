"""The process groups of a layout, and this process's place among them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from streammega.errors import ConfigError
from streammega.loading.ranks import check_alone
from streammega.parallel.layout import ParallelLayout

WORLD = "tp-cp-dp-pp"
"""The group of all ranks."""
GROUPS = ("tp", "cp", "pp", "dp", "dp-cp", "tp-pp", "embedding", WORLD)
"""Names of the groups that are made, as in ParallelLayout.groups."""


class Ranks:
    """This rank of a layout: coordinates, and a process group for every name in GROUPS.

    Every process of the world makes one, at the same place of its program: groups are made
    collectively, once for each set of ranks. Without torch.distributed it is the one rank of a
    world of one.

    Args:
        layout: of all ranks of the world.
        timeout: of the groups' collectives; None: torch's default, half an hour with gloo.

    Raises ConfigError if the world has another size than the layout, or a job of several processes
    has no process group.
    """

    def __init__(self, layout: ParallelLayout, timeout: timedelta | None = None) -> None:
        self.layout = layout
        if not dist.is_initialized():
            check_alone(
                "but torch.distributed has no process group: call init_process_group before Ranks"
            )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != layout.world_size:
            raise ConfigError(
                f"the layout has {layout.world_size} ranks (tp {layout.tp} x cp {layout.cp} x "
                f"dp {layout.dp} x pp {layout.pp}), the world {world}; ParallelLayout.of_world "
                f"fits dp to it"
            )
        self.at = layout.coordinates(self.rank)
        self._members: dict[str, list[int]] = {}
        for name in GROUPS:
            # A stage in the middle has no embedding, and so no others in that group.
            self._members[name] = layout.group_of(self.rank, name) or [self.rank]
        self._groups = _make_groups(layout, self.rank, timeout)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The named group of this rank; None where this rank is alone in it."""
        return self._groups.get(tuple(self.members(name)))

    def members(self, name: str) -> list[int]:
        """Global ranks of this rank's group of that name. Raises ConfigError if GROUPS has no such name."""
        if name not in self._members:
            known = ", ".join(map(repr, GROUPS))
            raise ConfigError(f"Ranks makes no group {name!r}; it has {known}")
        return self._members[name]

    def size(self, name: str) -> int:
        """How many ranks the named group has."""
        return len(self.members(name))

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the first layers."""
        return self.at["pp"] == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.at["pp"] == self.layout.pp - 1

    def all_reduce(
        self, tensor: torch.Tensor, name: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Reduce in place over the named group; returns the tensor. A rank alone keeps its values."""
        group = self.group(name)
        if group is not None:
            dist.all_reduce(tensor, op=op, group=group)
        return tensor


def device_mesh(
    layout: ParallelLayout, device_type: str, names: Sequence[str] = ("pp", "dp", "cp", "tp")
) -> DeviceMesh:
    """A DeviceMesh over all ranks of a layout, with these dimensions.

    `ParallelLayout.from_mesh` goes the other way.
    """
    ranks = torch.from_numpy(layout.grid(names))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(names))


def has_cpu_backend(group: dist.ProcessGroup | None) -> bool:
    """Whether tensors of the CPU can be sent in a group: not with NCCL alone.

    True where the group has no other rank.
    """
    if group is None:
        return True
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:  # torch's way to say that a group has no backend for a device
        return False
    return True


def _make_groups(
    layout: ParallelLayout, rank: int, timeout: timedelta | None
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """By its members, the process group of every set of at least two ranks that this rank is in."""
    groups_of_rank: dict[tuple[int, ...], dist.ProcessGroup] = {}
    sets_with_group: set[tuple[int, ...]] = set()
    for name in GROUPS:
        for ranks in layout.groups(name):
            members = tuple(ranks)
            # Several names may mean the same ranks. They share one group: each group needs connections
            # and, with NCCL, memory of the device.
            if len(members) < 2 or members in sets_with_group:
                continue
            sets_with_group.add(members)
            # torch.distributed wants every rank of the world to make every group, in one order, also
            # those that it is not in. Otherwise ranks wait for each other forever.
            group = dist.new_group(ranks, timeout=timeout)
            if rank in members:
                groups_of_rank[members] = group
    return groups_of_rank
