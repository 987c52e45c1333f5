"""Whether gradients are sound: looked at before they are reduced, told to all ranks, and raised
when the step is reduced.

A device is asked once a step, and not for every bucket: its launch queue would drain each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streammega.errors import GradientError
from streammega.gradients.buffers import GradSlot
from streammega.gradients.collectives import Group, Work, reduce_all

MEND = (
    "look at this step's batch and learning rate, resume from the last checkpoint, skip its samples"
)


class GradientChecks:
    """Looks at the gradients of one step on this rank.

    Args: largest: an element that is larger is as bad as one that is not finite; None: only the
        latter. at_once: what is bad is looked up before the reduction changes it, so its elements
        are counted: for the CPU, where
            nothing waits for a look. Else norms stay on the device, one for each parameter.
    """

    def __init__(self, largest: float | None, *, at_once: bool) -> None:
        self._largest = largest
        self._at_once = at_once
        self._norms: list[Tensor] = []
        self._names: list[str] = []
        self._found = ""

    def look(self, grads: Tensor, slots: Sequence[GradSlot], note: str = "") -> None:
        """Look at a bucket that is about to be reduced.

        `grads`: all of it; `note`: what to say of it besides its parameter.
        """
        if not self._at_once:
            # a largest element of none is an error in torch
            filled = [slot for slot in slots if slot.main_grad.numel()]
            order = 2 if self._largest is None else torch.inf
            self._norms += torch._foreach_norm(
                [slot.main_grad for slot in filled], order, dtype=_wide(grads)
            )
            self._names += [slot.name + note for slot in filled]
        elif not self._found and not self._sound(grads):
            self._found = next(
                (fault for slot in slots if (fault := self._fault_of(slot, note))), ""
            )

    def count_bad(self) -> Tensor | float:
        """1 where this rank saw something bad, else 0; on the device, where the norms are."""
        if self._norms:
            return (~self._good()).any().float()
        return float(bool(self._found))

    def take(self, *, some_bad: bool) -> str:
        """What was bad of this step on this rank, or nothing; the next step begins.

        `some_bad`: whether any rank saw it.
        """
        found = self._found
        if self._norms and some_bad:  # else the device would be asked a second time
            worst = [
                name
                for name, good in zip(self._names, self._good().tolist(), strict=True)
                if not good
            ]
            what = (
                "is not finite"
                if self._largest is None
                else f"is not finite, or has an element above {self._largest:.4g}"
            )
            found = f"the gradient of {worst[0]} {what}; {MEND}" if worst else ""
        self._norms = []
        self._names = []
        self._found = ""
        return found

    def _good(self) -> Tensor:
        norms = torch.stack(self._norms)
        # of NaN that is False
        return norms.isfinite() if self._largest is None else norms <= self._largest

    def _sound(self, grads: Tensor) -> bool:
        if self._largest is None:
            return bool(torch.linalg.vector_norm(grads, dtype=_wide(grads)).isfinite())
        low, high = torch.aminmax(grads)  # a tenth of the time of the largest norm
        return bool((-low <= self._largest) & (high <= self._largest))

    def _fault_of(self, slot: GradSlot, note: str) -> str:
        bad = ~torch.isfinite(slot.main_grad)
        if bad.any():
            return f"the gradient of {slot.name}{note} is not finite in {int(bad.sum())} of {bad.numel()} elements; {MEND}"
        if self._largest is None or not bad.numel():
            return ""
        largest = float(slot.main_grad.abs().max())
        if largest <= self._largest:
            return ""
        return (
            f"the gradient of {slot.name}{note} has an element of {largest:.4g}, more than {self._largest:.4g}; look at this "
            f"step's batch and learning rate, or raise largest_gradient"
        )


class Report:
    """What the ranks of a model tell each other of a step: who saw a bad gradient, and which
    parameters were used.

    One small sum beside those of the buckets. It is made on the device, and read only where
    something is to be learned.
    """

    def __init__(
        self,
        slots: Sequence[GradSlot],
        checks: GradientChecks | None,
        group: Group | None,
        device: torch.device,
    ) -> None:
        self._slots = slots
        self._checks = checks
        used = [slot.is_used for slot in slots]
        self._must_read = checks is not None or not all(used)
        if all(used):  # nothing has to be copied to the device
            self._sums = torch.ones(2 + len(slots), device=device)
        else:
            self._sums = torch.tensor([0.0, 0.0, *used], device=device)
        index = group.rank() if group is not None else 0
        bad = checks.count_bad() if checks is not None else 0.0
        self._sums[0] = bad
        self._sums[1] = bad * index
        self._ranks = dist.get_process_group_ranks(group) if group is not None else [_this_rank()]
        self._work: Work | None = reduce_all(self._sums, group) if group is not None else None

    def read(self) -> str:
        """What was bad on any rank, or nothing. Notes which parameters no rank has used."""
        if self._work is not None:
            self._work.wait()
        for slot in self._slots:
            slot.unused = False
        if not self._must_read:
            return ""
        bad, index, *used = self._sums.tolist()
        for slot, count in zip(self._slots, used, strict=True):
            slot.unused = count == 0
        own = self._checks.take(some_bad=bad > 0) if self._checks is not None else ""
        if own:
            return f"rank {_this_rank()}: {own}"
        if not bad:
            return ""
        where = f"rank {self._ranks[round(index)]}" if bad == 1 else f"{round(bad)} ranks"
        return f"{where} got a bad gradient, which its own error names; no rank is to step with it"


def raise_if_bad(reports: Sequence[Report]) -> None:
    """Raise GradientError on every rank where some rank saw a bad gradient, after all of them were
    read.
    """
    found = [message for message in [report.read() for report in reports] if message]
    if found:
        raise GradientError(found[0])


def clip_finite_grads(module: nn.Module, max_norm: float) -> Tensor:
    """torch's clip_grad_norm_ for gradients that nothing else looks at; returns the norm before.

    Raises GradientError, with the parameter's name, where one is not finite: before clipping, which
    would spread it to all.
    """
    named = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    ]
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for _, parameter in named if parameter.grad is not None]
    )
    if not norm.isfinite():
        bad = [
            name
            for name, parameter in named
            if parameter.grad is not None and not parameter.grad.isfinite().all()
        ]
        what = (
            f"the gradient of {bad[0]} is not finite"
            if bad
            else f"the gradient norm is {float(norm)}"
        )
        raise GradientError(f"{what}, averaged over the ranks; {MEND}")
    torch.nn.utils.clip_grads_with_norm_([parameter for _, parameter in named], max_norm, norm)
    return norm


def _wide(grads: Tensor) -> torch.dtype:
    """The dtype of norms: squares of fp16 elements would overflow in their own."""
    return torch.promote_types(grads.dtype, torch.float32)


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
