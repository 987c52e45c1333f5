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

    Args:
        largest: an element that is larger is as bad as one that is not finite; None: only the
            latter.
        at_once: what is bad is looked up before the reduction changes it, so its elements are
            counted: for the CPU, where nothing waits for a look. Else norms stay on the device, one
            for each parameter.
    """

    def __init__(self, largest: float | None, *, at_once: bool) -> None:
        self._largest = largest
        self._at_once = at_once
        self._norms: list[Tensor] = []
        self._names: list[str] = []
        """Of the parameter of each norm."""
        self._first_fault = ""

    def look(self, grads: Tensor, slots: Sequence[GradSlot], note: str = "") -> None:
        """Look at a bucket that is about to be reduced.

        `grads`: all of it; `note`: what to say of it besides its parameter.
        """
        # a largest element of none is an error in torch
        filled = [slot for slot in slots if slot.main_grad.numel()]
        if not filled:
            return
        if not self._at_once:
            self._take_norms(grads, filled, note)
        elif not self._first_fault and not self._is_sound(grads):
            self._first_fault = self._fault_of_first(filled, note)

    def count_bad(self) -> Tensor | float:
        """1 where this rank saw something bad, else 0; on the device, where the norms are."""
        if self._norms:
            return (~self._good()).any().float()
        return 1.0 if self._first_fault else 0.0

    def take(self, *, some_bad: bool) -> str:
        """What was bad of this step on this rank, or nothing; the next step begins.

        `some_bad`: whether any rank saw it.
        """
        fault = self._first_fault
        if self._norms and some_bad:  # else the device would be asked a second time
            fault = self._fault_by_norms()
        self._norms = []
        self._names = []
        self._first_fault = ""
        return fault

    def _take_norms(self, grads: Tensor, slots: Sequence[GradSlot], note: str) -> None:
        """Note a norm of each parameter, on the device: nothing waits for it."""
        # in float32 at least; of infinite order it is the largest element
        dtype = _wide(grads)
        order = 2 if self._largest is None else torch.inf
        of_parameters = [slot.main_grad for slot in slots]
        self._norms += torch._foreach_norm(of_parameters, order, dtype=dtype)
        self._names += [slot.name + note for slot in slots]

    def _fault_by_norms(self) -> str:
        """What is wrong with the first parameter whose norm is bad; nothing where all are good."""
        for name, good in zip(self._names, self._good().tolist(), strict=True):
            if good:
                continue
            if self._largest is None:
                return f"the gradient of {name} is not finite; {MEND}"
            return (
                f"the gradient of {name} is not finite, or has an element above "
                f"{self._largest:.4g}; {MEND}"
            )
        return ""

    def _good(self) -> Tensor:
        """Whether each norm is as it should be, bool [norms]."""
        norms = torch.stack(self._norms)
        if self._largest is None:
            return norms.isfinite()
        # of NaN that is False
        return norms <= self._largest

    def _is_sound(self, grads: Tensor) -> bool:
        """Whether a whole bucket is, in one pass over it: it nearly always is."""
        if self._largest is None:
            norm = torch.linalg.vector_norm(grads, dtype=_wide(grads))
            return bool(norm.isfinite())
        low, high = torch.aminmax(grads)  # a tenth of the time of the largest norm
        # of NaN both are False
        return bool((-low <= self._largest) & (high <= self._largest))

    def _fault_of_first(self, slots: Sequence[GradSlot], note: str) -> str:
        """What is wrong with the first parameter that has a fault."""
        for slot in slots:
            fault = self._fault_of(slot, note)
            if fault:
                return fault
        return ""

    def _fault_of(self, slot: GradSlot, note: str) -> str:
        bad = ~torch.isfinite(slot.main_grad)
        if bad.any():
            return (
                f"the gradient of {slot.name}{note} is not finite in {int(bad.sum())} of "
                f"{bad.numel()} elements; {MEND}"
            )
        if self._largest is None:
            return ""
        largest = float(slot.main_grad.abs().max())
        if largest <= self._largest:
            return ""
        return (
            f"the gradient of {slot.name}{note} has an element of {largest:.4g}, more than "
            f"{self._largest:.4g}; look at this step's batch and learning rate, or raise "
            f"largest_gradient"
        )


class Report:
    """What the ranks of a model tell each other of a step: who saw a bad gradient, and which
    parameters were used.

    One small sum beside those of the buckets, made on the device, and read only where something is
    to be learned. float32 [2 + parameters]: how many ranks saw a bad gradient; the sum of their
    places in the group, which is the place where there is one; how many ranks used each parameter.
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
            # from other memory than pinned the host would wait for all that the device has to do
            sums = torch.tensor([0.0, 0.0, *used], pin_memory=device.type == "cuda")
            self._sums = sums.to(device, non_blocking=True)
        bad = checks.count_bad() if checks is not None else 0.0
        place_in_group = group.rank() if group is not None else 0
        self._sums[0] = bad
        self._sums[1] = bad * place_in_group
        self._ranks = [_this_rank()]
        self._work: Work | None = None
        if group is not None:
            self._ranks = dist.get_process_group_ranks(group)
            # after the buckets of all models: which of them backward has started differs from rank
            # to rank, and a sum among them would meet a bucket of another rank
            self._work = reduce_all(self._sums, group)

    def read(self) -> str:
        """What was bad on any rank, or nothing. Notes which parameters no rank has used."""
        if self._work is not None:
            self._work.wait()
        for slot in self._slots:
            slot.unused = False
        if not self._must_read:
            return ""
        bad_ranks, sum_of_places, *ranks_that_used = self._sums.tolist()
        for slot, ranks in zip(self._slots, ranks_that_used, strict=True):
            slot.unused = ranks == 0
        if self._checks is not None:
            fault = self._checks.take(some_bad=bad_ranks > 0)
            if fault:
                return f"rank {_this_rank()}: {fault}"
        if not bad_ranks:
            return ""
        where = f"{round(bad_ranks)} ranks"
        if bad_ranks == 1:
            where = f"rank {self._ranks[round(sum_of_places)]}"
        return f"{where} got a bad gradient, which its own error names; no rank is to step with it"


def raise_if_bad(reports: Sequence[Report]) -> None:
    """Raise GradientError on every rank where some rank saw a bad gradient, after all of them were
    read.
    """
    # all of them: what is not read is there still when the next step begins
    messages = [report.read() for report in reports]
    for message in messages:
        if message:
            raise GradientError(message)


def clip_finite_grads(module: nn.Module, max_norm: float) -> Tensor:
    """torch's clip_grad_norm_ for gradients that nothing else looks at; returns the norm before.

    Raises GradientError, with the parameter's name, where one is not finite: before clipping, which
    would spread it to all.
    """
    parameters: list[nn.Parameter] = []
    grads: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            parameters.append(parameter)
            grads[name] = parameter.grad
    norm = torch.nn.utils.get_total_norm(list(grads.values()))
    if not norm.isfinite():
        bad = [name for name, grad in grads.items() if not grad.isfinite().all()]
        # of finite gradients the norm may overflow
        what = f"the gradient norm is {float(norm)}"
        if bad:
            what = f"the gradient of {bad[0]} is not finite"
        raise GradientError(f"{what}, averaged over the ranks; {MEND}")
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _wide(grads: Tensor) -> torch.dtype:
    """The dtype of norms: squares of fp16 elements would overflow in their own."""
    return torch.promote_types(grads.dtype, torch.float32)


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
