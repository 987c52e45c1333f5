"""Data that all ranks open together: one rank asks the servers, and the others ask nothing."""

from __future__ import annotations

import torch.distributed as dist

from streammega.config import DataConfig
from streammega.parallel.groups import has_cpu_backend
from streammega.parallel.rank_sync import RankSync
from streammega.samples.pinned import pin, read_blend, with_pinned
from streammega.samples.segments import split_data
from streammega.storage.open import is_remote


def open_together(
    config: DataConfig, group: dist.ProcessGroup | None = None, *, split: str = "train"
) -> DataConfig:
    """The config with all that its remote datasets are, on every rank of a group at the same place of their
    programs. What opens data with it asks no server.

    The first rank asks, so a job of any size asks as often as one rank, and all ranks see the same
    versions of the data. Names, order and identity are those of the config.

    Args:
        config: the same on every rank.
        group: None: all ranks of torch.distributed. In a group with NCCL alone each rank asks.
        split: the split whose datasets are meant. Those of a blend are the same in every split.

    Each rank asks about datasets whose names hold credentials. Raises ObjectNotFoundError,
    FormatError, StorageError, on all ranks.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    config = read_blend(config)
    if not any(map(is_remote, split_data(config, split).prefixes)):
        return config
    if group is None or dist.get_world_size(group) == 1 or not has_cpu_backend(group):
        return with_pinned(config, pin(config, split))
    return with_pinned(config, RankSync(group).run_on_first(lambda: pin(config, split)))
