"""Checks of gradients: each rank inspects its own before they are reduced, and all ranks raise when the
step is reduced.

The host reads the results once a step. Reading them for every bucket would drain the launch queue of a
device each time. The scale of fp16 losses follows from gradients that overflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from streammega.errors import GradientError
from streammega.gradients.buffers import GradSlot

MEND = (
    "check this step's batch and learning rate, and resume from the last checkpoint with a lower rate "
    "or without these samples"
)


class GradientChecks:
    """Inspects the gradients of one step on this rank: the largest magnitude of each parameter's, kept
    on its device. It is finite exactly if all elements are; a sum of squares may overflow.
    """

    def __init__(self) -> None:
        self._magnitudes: list[Tensor] = []
        self._names: list[str] = []
        """The parameter of each magnitude."""

    def inspect(self, slots: Sequence[GradSlot], note: str = "") -> None:
        """Inspect the gradients of a bucket that is about to be reduced.

        note: what messages say after the name of a parameter.
        """
        # torch has no largest element of an empty tensor
        filled = [slot for slot in slots if slot.main_grad.numel()]
        grads = [slot.main_grad for slot in filled]
        self._magnitudes += _largest_magnitudes(grads)
        self._names += [slot.name + note for slot in filled]

    def count_bad(self) -> Tensor | float:
        """1 if a gradient of this rank is bad, else 0; on the device of the magnitudes."""
        return (~self._good()).any().float() if self._magnitudes else 0.0

    def collect(self, *, some_bad: bool) -> str:
        """What is wrong with a gradient of this rank, or an empty text. The next step begins.

        some_bad: whether a gradient of any rank is bad. If not, the magnitudes are not read.
        """
        fault = self._first_fault() if self._magnitudes and some_bad else ""
        self._magnitudes = []
        self._names = []
        return fault

    def _first_fault(self) -> str:
        """What is wrong with the first bad gradient; empty if all are good."""
        if all(good := self._good().tolist()):
            return ""
        return f"the gradient of {self._names[good.index(False)]} is not finite; {MEND}"

    def _good(self) -> Tensor:
        """Whether each gradient is good, bool [gradients]."""
        return torch.stack(self._magnitudes).isfinite()


def _largest_magnitudes(grads: list[Tensor]) -> Sequence[Tensor]:
    """The largest magnitude of each gradient, NaN if an element is NaN."""
    if not grads:
        return ()
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    if not grads[0].is_cuda:
        # on a CPU a fifth of the time of the norm of infinite order
        extremes = [torch.aminmax(grad) for grad in grads]
        lowest = torch.stack([extreme.min for extreme in extremes])
        highest = torch.stack([extreme.max for extreme in extremes])
        return torch.maximum(highest, -lowest).to(wide).unbind()
    return torch._foreach_norm(grads, torch.inf, dtype=wide)


class Report:
    """The sum over ranks that says whether any gradient is bad, and which parameters were used.

    It is one small collective after those of the buckets, and the host reads it only if it may say
    something new. float32 [2 + parameters]: how many ranks have a bad gradient; the sum of the
    numbers of these ranks in the group (with one such rank, its number); how many ranks used each
    parameter.
    """

    def __init__(
        self,
        slots: Sequence[GradSlot],
        checks: GradientChecks | None,
        group: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._slots = slots
        self._checks = checks
        used = [slot.is_used for slot in slots]
        self._must_read = checks is not None or not all(used)
        if all(used):  # without a copy to the device
            self._sums = torch.ones(2 + len(slots), device=device)
        else:
            # from memory that is not pinned, the copy would wait for all work of the device
            sums = torch.tensor([0.0, 0.0, *used], pin_memory=device.type == "cuda")
            self._sums = sums.to(device, non_blocking=True)
        bad = checks.count_bad() if checks is not None else 0.0
        self._sums[0] = bad
        self._sums[1] = bad * (group.rank() if group is not None else 0)
        self._ranks = [_this_rank()]
        self._work: dist.Work | None = None
        if group is not None:
            self._ranks = dist.get_process_group_ranks(group)
            self._work = dist.all_reduce(self._sums, group=group, async_op=True)

    def read(self) -> str:
        """What is wrong on any rank, or an empty text. Notes which parameters no rank has used."""
        if self._work is not None:
            self._work.wait()
        for slot in self._slots:
            slot.is_unused = False
        if not self._must_read:
            return ""
        bad_ranks, sum_of_places, *ranks_that_used = self._sums.tolist()
        for slot, ranks in zip(self._slots, ranks_that_used, strict=True):
            slot.is_unused = ranks == 0
        if self._checks is not None:
            fault = self._checks.collect(some_bad=bad_ranks > 0)
            if fault:
                return f"rank {_this_rank()}: {fault}"
        if not bad_ranks:
            return ""
        where = f"{round(bad_ranks)} ranks"
        if bad_ranks == 1:
            where = f"rank {self._ranks[round(sum_of_places)]}"
        return (
            f"{where} got a bad gradient, so no rank may step; the error of that rank names the "
            f"parameter and says what to do"
        )


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class LossScale:
    """The factor that keeps fp16 gradients from vanishing: it doubles after `interval` good steps, and
    halves after one whose gradients overflow.

    Multiply the loss by `value`. After the reduction `unscale` returns whether to step, the same on
    all ranks.
    """

    def __init__(
        self, value: float = 2.0**16, interval: int = 1000, min_value: float = 1.0
    ) -> None:
        self.value = value
        self.interval = interval
        self.min_value = min_value
        self.good = 0

    def unscale(
        self, grads: Sequence[Tensor], device: torch.device, divided_by: float = 1.0
    ) -> bool:
        """Divide the gradients by the scale. If they are not finite on some rank, make the scale smaller
        instead, and return False.

        grads: this rank's parts. device: of the gradients. divided_by: a divisor of the loss, which
        keeps a sum over many tokens within fp16.

        Raises GradientError where they are not finite at the smallest scale.
        """
        bad = torch.zeros((), device=device)
        # Not the 2-norm, whose squares may overflow. torch has no largest element of an empty tensor.
        largest = [
            torch.linalg.vector_norm(grad, torch.inf).float() for grad in grads if grad.numel()
        ]
        if largest:
            bad = (~torch.stack(largest).isfinite()).any().float()
        # over all ranks of the world: they have one scale, so all of them step, or none
        if dist.is_initialized():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad:
            if self.value <= self.min_value:
                raise GradientError(
                    f"gradients are not finite at the least loss scale, {self.min_value:g}: the run has "
                    f"diverged; resume from the last checkpoint with a lower learning rate"
                )
            self.value = max(self.value / 2, self.min_value)
            self.good = 0
            return False
        if grads:
            torch._foreach_mul_(list(grads), divided_by / self.value)
        self.good += 1
        if self.good == self.interval:
            self.value *= 2
            self.good = 0
        return True

    def state_dict(self) -> dict[str, float]:
        """What a resume needs."""
        return {"value": self.value, "good": self.good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue with a saved scale."""
        self.value = float(state["value"])
        self.good = int(state["good"])
