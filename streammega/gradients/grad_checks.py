"""Checks of gradients: each rank looks at its own before they are reduced, and all ranks raise when the
step is reduced.

The host reads the results once a step. Reading them for every bucket would drain the launch queue of a
device each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from streammega.gradients.buffers import GradBucket

ALL_FINITE = 2**62
"""In place of the number of a bad gradient: larger than any."""

MEND = (
    "check this step's batch and learning rate, and resume from the last checkpoint with a lower rate "
    "or without these samples"
)


class Report:
    """What ranks tell each other of a step: where a gradient is not finite, and which parameters were
    used.

    It is one small collective after those of the buckets, and the host reads it only if it may say
    something new. int64 [1 + parameters], the smallest of all ranks: the bucket and rank of a bad
    gradient, as bucket * ranks + rank; 1 for each parameter that no rank used.
    """

    def __init__(
        self,
        buckets: Sequence[GradBucket],
        group: ProcessGroup | None,
        parts_group: ProcessGroup | None,
    ) -> None:
        """group: of the ranks that have the buckets. parts_group: of those among which a copy of the
        model is divided, which learn of each other's bad gradients.
        """
        self._buckets = buckets
        self._parts_group = parts_group
        self._slots = [slot for bucket in buckets for slot in bucket.slots]
        device = buckets[0].grads.device
        self._rank, self._world_size = 0, 1
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._ranks = [self._rank] if group is None else dist.get_process_group_ranks(group)
        unused = [not slot.is_used for slot in self._slots]
        if any(unused):
            # from memory that is not pinned, the copy would wait for all work of the device
            values = torch.tensor([ALL_FINITE, *map(int, unused)], pin_memory=device.type == "cuda")
            self._values = values.to(device, non_blocking=True)
        else:  # without a copy to the device
            self._values = torch.zeros(1 + len(unused), dtype=torch.int64, device=device)
            self._values[0] = ALL_FINITE
        are_finite = [bucket.is_finite for bucket in buckets if bucket.is_finite is not None]
        self._is_checked = bool(are_finite)
        self._must_read = self._is_checked or any(unused)
        if are_finite:
            places = torch.arange(len(buckets), device=device) * self._world_size + self._rank
            self._values[0] = torch.where(torch.stack(are_finite), ALL_FINITE, places).min()
        self._work: dist.Work | None = None
        if group is not None:
            self._work = dist.all_reduce(
                self._values, op=dist.ReduceOp.MIN, group=group, async_op=True
            )

    def read(self) -> str:
        """What is wrong on any rank, or an empty text. Notes which parameters no rank has used."""
        if self._work is not None:
            self._work.wait()
        for slot in self._slots:
            slot.is_unused = False
        if not self._must_read:
            return ""
        if self._is_checked and self._parts_group is not None:
            dist.all_reduce(self._values[:1], op=dist.ReduceOp.MIN, group=self._parts_group)
        place, *are_unused = self._values.tolist()
        for slot, is_unused in zip(self._slots, are_unused, strict=True):
            slot.is_unused = bool(is_unused)
        if place == ALL_FINITE:
            return ""
        number, rank = divmod(place, self._world_size)
        parameters = ""
        # Other ranks have other parts of the model, and other buckets.
        if rank in self._ranks:
            names = [slot.name for slot in self._buckets[number].slots]
            parameters = f", of {' to '.join(dict.fromkeys([names[0], names[-1]]))},"
        return f"rank {rank}: a gradient of bucket {number}{parameters} is not finite; {MEND}"
