"""Checks of gradients: each rank looks at its own before they are summed, and all ranks raise when the
step is reduced.

The host reads the results once a step. Reading them for every bucket would drain the launch queue of a
device each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from streammega.errors import GradientError
from streammega.gradients.buffers import GradBucket, GradSlot

MAX_RANKS = 2**32
ALL_FINITE = 2**62
"""In place of a bad bucket and its rank, which are bucket * MAX_RANKS + rank: larger than any."""

MEND = (
    "check this step's batch and learning rate, and resume from the last checkpoint with a lower rate "
    "or without these samples"
)


def is_finite(grads: Tensor) -> Tensor:
    """Whether all elements are finite, bool []. It stays on the device: the host would wait for it."""
    # Not by a norm, whose squares may overflow. torch has no largest element of an empty tensor.
    extremes = torch.stack(torch.aminmax(grads)) if grads.numel() else grads
    return extremes.isfinite().all()


def check_grads(
    buckets: Sequence[GradBucket],
    are_finite: list[Tensor],
    group: ProcessGroup | None,
    parts_group: ProcessGroup | None,
) -> set[GradSlot]:
    """Raise GradientError on every rank of the layout if a gradient of some rank is not finite. Return
    the gradients that no rank has: their parameters were not used.

    It is one small collective after those of the buckets, and the host reads its result only if that
    may say something new.

    Args:
        are_finite: whether each bucket of this rank is, before it is summed; empty: not checked.
        group: of the ranks that have the buckets.
        parts_group: of those among which a copy of the model is divided, which learn of each
            other's bad gradients.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    slots = [slot for bucket in buckets for slot in bucket.slots]
    # of a tied parameter another stage has a gradient, unless it is frozen now
    unused = [
        int(slot.count == 0 and not (bucket.is_tied and slot.parameter.requires_grad))
        for bucket in buckets
        for slot in bucket.slots
    ]
    # The smallest of all ranks, int64 [1 + parameters]: the first bad bucket and its rank, and 1 for
    # each parameter that no rank used.
    device = buckets[0].grads.device
    values = torch.zeros(1 + len(unused), dtype=torch.int64, device=device)
    values[0] = ALL_FINITE
    if are_finite:
        places = torch.arange(len(buckets), device=device) * MAX_RANKS + rank
        values[0] = torch.where(torch.stack(are_finite), ALL_FINITE, places).min()
    if any(unused):
        # from memory that is not pinned, the copy would wait for all work of the device
        of_host = torch.tensor(unused, pin_memory=device.type == "cuda")
        values[1:].copy_(of_host, non_blocking=True)
    if group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
    if not are_finite and not any(unused):
        return set()
    if are_finite and parts_group is not None:
        dist.all_reduce(values[:1], op=dist.ReduceOp.MIN, group=parts_group)
    place, *are_unused = values.tolist()
    if place == ALL_FINITE:
        return {slot for slot, is_unused in zip(slots, are_unused, strict=True) if is_unused}
    number, bad_rank = divmod(place, MAX_RANKS)
    parameters = ""
    # Other ranks have other parts of the model, and other buckets.
    if bad_rank in ([rank] if group is None else dist.get_process_group_ranks(group)):
        names = [slot.name for slot in buckets[number].slots]
        parameters = f", of {' to '.join(dict.fromkeys([names[0], names[-1]]))},"
    raise GradientError(
        f"rank {bad_rank}: a gradient of bucket {number}{parameters} is not finite; {MEND}"
    )
