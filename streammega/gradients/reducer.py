"""How gradients go from hooks in backward into buckets, over the ranks, and to `param.grad`.

hook of a parameter: main_grad (+)= grad ─► bucket full on the last micro-batch, and its turn
─► its collective starts

finish_grad_sync: what is left starts ─► all wait ─► normalised gradients in param.grad
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from streammega.errors import GradientError
from streammega.gradients.buffers import GradBucket, GradSlot, local_grad
from streammega.gradients.grad_checks import Report

_reducing: weakref.WeakValueDictionary[ProcessGroup, GradReducer] = weakref.WeakValueDictionary()
"""By process group: the reducer that has begun a reduction there and not finished it."""


class GradReducer:
    """Reduces gradients, from the first micro-batch of a step to its end.

    All ranks start the collectives in the order of `buckets`. In a process group, the n-th collective
    of a rank meets the n-th of the others. So the order must not depend on which gradient is ready
    first, since a rank may not use some parameters. For the same reason only one reducer at a time
    uses a group.

    Args:
        buckets: where gradients are kept.
        group: of the ranks over which they are summed, for buckets alone; None: this rank alone.
        tied_group: the ranks that add to tied buckets first.
        parts_group: the ranks among which a copy of the model is divided, for one check of all.
        checks: whether gradients are checked before they are summed.
        scale: a factor of this rank's gradients before they are summed.
        overlap, main_grad: as of BucketedDataParallel.
    """

    def __init__(
        self,
        buckets: Sequence[GradBucket],
        *,
        group: ProcessGroup | None,
        tied_group: ProcessGroup | None,
        parts_group: ProcessGroup | None,
        checks: bool,
        scale: float,
        overlap: bool,
        main_grad: bool,
    ) -> None:
        self.buckets = buckets
        self.slots = [slot for bucket in buckets for slot in bucket.slots]
        self.device = buckets[0].grads.device
        self.is_last = True
        """Whether a backward is the last of its step."""
        self.micro_batches = 0
        """If not zero, the number of the backward that is the last of its step, instead of `is_last`."""
        self._group = group
        self._tied_group = tied_group
        self._parts_group = parts_group
        self._checks = checks
        self._scale = scale
        self._averages = group is None or scale * group.size() == 1.0
        self._overlap = overlap
        self._main_grad = main_grad
        self._has_reduced = False
        """With main_grad: whether the buckets still have the gradients of the last step."""
        self._next = 0
        """The bucket that starts next."""
        self._report: Report | None = None
        hooks = [self._attach(bucket, slot) for bucket in buckets for slot in bucket.slots]
        # otherwise the parameters would keep the buckets alive
        weakref.finalize(self, _remove, hooks).atexit = False

    def _attach(self, bucket: GradBucket, slot: GradSlot) -> RemovableHandle:
        """Take the parameter's gradients from now on."""
        if self._main_grad:
            slot.parameter.main_grad = slot.main_grad  # type: ignore[attr-defined]
            slot.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        # otherwise the parameter would keep the reducer and its process group alive
        reference = weakref.ref(self)

        @torch.no_grad()
        def take(parameter: nn.Parameter) -> None:
            self = reference()
            if self is not None:
                self._take(bucket, slot)

        hook: RemovableHandle = slot.parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        return hook

    def _take(self, bucket: GradBucket, slot: GradSlot) -> None:
        """Runs in backward, when the parameter's gradient of one micro-batch is complete."""
        parameter = slot.parameter
        if parameter.grad is None:
            raise GradientError(
                f"{slot.name} has no gradient left to reduce: another "
                f"BucketedDataParallel has the parameter too, or a hook of another kind took it; "
                f"wrap the modules that share it as one"
            )
        grad = local_grad(parameter, parameter.grad)
        # the bucket has it now: do not keep a second copy
        parameter.grad = None
        if slot.is_ready:
            raise GradientError(
                f"{slot.name} got a second gradient in this step, after the reduction of its first "
                f"had begun: run every backward of a step but the last within no_sync(), add up "
                f"the losses of one forward, or call finish_grad_sync() between; of activation "
                f"checkpoints use_reentrant=False gives one gradient a backward"
            )
        slot.count += 1
        is_last = slot.count == self.micro_batches if self.micro_batches else self.is_last
        self._add(slot, grad, is_last=is_last)
        if self.device.type == "cuda":
            bucket.streams.add(torch.cuda.current_stream(self.device))
        if is_last:
            self._scale_once(slot)
            slot.is_ready = True
            bucket.unready -= 1
            if self._overlap:
                self.claim_group()
                self._launch_ready()

    def _add(self, slot: GradSlot, grad: Tensor, *, is_last: bool = False) -> None:
        """Add one micro-batch to the bucket. is_last: it is the last of the step."""
        main = slot.main_grad
        if self._main_grad:
            self._add_to_main_grad(slot, grad)
        elif grad.data_ptr() == main.data_ptr():
            pass  # not zeroed since the last step: autograd has added to it in place
        elif slot.count > 1:
            main.add_(grad, alpha=self._scale if slot.is_scaled else 1.0)
        elif self._can_scale_first(grad, main, is_last):
            # copy and scale at once: memory is read once
            torch.mul(grad, self._scale, out=main)
            slot.is_scaled = True
        else:
            # the first micro-batch of a step overwrites the last step, so buckets are not zeroed
            main.copy_(grad)

    def _add_to_main_grad(self, slot: GradSlot, grad: Tensor) -> None:
        """With main_grad, kernels may have added the micro-batch to the bucket by themselves. Then the
        gradient of autograd is meaningless.
        """
        if self._has_reduced:
            raise GradientError(
                "with main_grad the buckets are added to: call zero_grad() before the first "
                "backward of a step"
            )
        if slot.parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
            slot.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        elif grad.data_ptr() != slot.main_grad.data_ptr():
            slot.main_grad.add_(grad)

    def _can_scale_first(self, grad: Tensor, main: Tensor, is_last: bool) -> bool:
        """Whether the first micro-batch may be scaled while it is copied. It may if it is also the
        last, or if the sum of scaled gradients has the same bits as the scaled sum.

        That holds for powers of two, except for elements near the smallest float32. In float16 the
        smallest element is 6e-8, so gradients come near it.
        """
        if self._scale == 1.0 or grad.dtype != main.dtype:
            return False
        is_power_of_two = math.frexp(self._scale)[0] == 0.5
        return is_last or (is_power_of_two and main.dtype != torch.float16)

    def _scale_once(self, slot: GradSlot) -> None:
        """Multiply the gradient in the bucket by the scale, unless that is done already."""
        if self._scale != 1.0 and not slot.is_scaled:
            slot.main_grad.mul_(self._scale)
        slot.is_scaled = True

    def reset(self) -> None:
        """Begin a new step. Raises GradientError where the reduction of the last one has begun, in which
        other ranks take part.
        """
        if self._next > 0:
            raise GradientError(
                "zero_grad was called while gradients are being reduced: call finish_grad_sync "
                "first, or run a backward whose gradients are not wanted within no_sync()"
            )
        for bucket in self.buckets:
            bucket.reset()
            if self._main_grad:
                # kernels add to the bucket
                bucket.grads.zero_()
        self._has_reduced = False
        self._release_group()

    def _launch_ready(self) -> None:
        """Start the buckets that are full and next. Tied ones wait for the end of the step."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.is_tied or bucket.unready:
                break
            self._launch(bucket)

    def launch_rest(self) -> None:
        """Complete all gradients, and start all buckets that have not started."""
        for slot in self.slots:
            self._complete(slot)
        for bucket in self.buckets:
            if bucket.is_tied:
                self._reduce_tied(bucket)
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        # After the buckets: ranks may have started different numbers of them in backward.
        self._report = Report(self.buckets, self._group, self._parts_group)

    def _complete(self, slot: GradSlot) -> None:
        """Complete a gradient that backward has not completed: there was none, one of only some
        micro-batches, or one that was set by hand.
        """
        grad = slot.unreduced_grad()
        if grad is not None and slot.is_ready:
            raise GradientError(
                f"{slot.name}.grad was set by hand after the reduction of its gradient had begun; set "
                f"it before the last backward, or after finish_grad_sync()"
            )
        if grad is None and slot.count == 0 and self._averages:
            # Other ranks may add to their gradient of the last step: this rank's belongs to the sum.
            grad = slot.accumulated_grad()
        # set by hand, as by pipeline schedules that compute the gradients of weights separately
        if grad is not None:
            slot.count += 1
            self._add(slot, local_grad(slot.parameter, grad))
            slot.parameter.grad = None
        if slot.count == 0:
            # this rank adds zeros, and not the gradient of the last step
            slot.main_grad.zero_()
        elif not slot.is_ready:
            self._scale_once(slot)

    def _reduce_tied(self, bucket: GradBucket) -> None:
        """Add the gradients of the other stage to those of tied parameters."""
        self._check(bucket)
        dist.all_reduce(bucket.grads, group=self._tied_group)

    def _launch(self, bucket: GradBucket) -> None:
        # parts of a model, and so their hooks, may run on other streams
        bucket.wait_for_streams()
        if not bucket.is_tied:
            self._check(bucket)
        if self._group is not None:
            bucket.work = dist.all_reduce(bucket.grads, group=self._group, async_op=True)
        self._next += 1

    def _check(self, bucket: GradBucket) -> None:
        """Before the sum, after which a bad gradient would be that of every rank."""
        if self._checks:
            bucket.check()

    def wait(self) -> str:
        """Wait for the collectives, and prepare the next step. Returns what is wrong with a gradient of
        any rank of the layout, or an empty text.
        """
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.reset()
        self._next = 0
        self._has_reduced = self._main_grad
        self._release_group()
        assert self._report is not None
        return self._report.read()

    def expose(self, factor: Tensor | None) -> None:
        """Scale the reduced gradients, and set `param.grad`."""
        for bucket in self.buckets:
            if factor is not None:
                bucket.grads.mul_(factor)
            for slot in bucket.slots:
                slot.expose_grad()

    def claim_group(self) -> None:
        """Reserve the group until the step is finished. Raises GradientError where another reducer has
        reserved it.
        """
        if self._group is not None and _reducing.setdefault(self._group, self) is not self:
            raise GradientError(
                "another BucketedDataParallel has begun to reduce gradients in this process group: "
                "wrap the modules of one backward together, as an nn.ModuleList, "
                "finish the other first, or give each a process group of its own"
            )

    def _release_group(self) -> None:
        if self._group is not None and _reducing.get(self._group) is self:
            del _reducing[self._group]


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
