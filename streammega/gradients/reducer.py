"""How gradients go from hooks in backward into buckets, over the ranks, and to `param.grad`.

hook of a parameter: main_grad (+)= grad ─► bucket full on the last micro-batch, and its turn
─► start_grad_sync: checked, scaled, its collective starts

finish_grad_sync: what is left starts ─► all wait ─► normalised gradients in param.grad
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from streammega.errors import GradientError
from streammega.gradients.buffers import GradBucket, GradSlot, as_grad, local_grad
from streammega.gradients.grad_checks import check_grads, is_finite

_reducing: weakref.WeakValueDictionary[ProcessGroup, GradReducer] = weakref.WeakValueDictionary()
"""By process group: the reducer that has begun a reduction there and not finished it."""


class GradReducer:
    """Reduces gradients, from the first micro-batch of a step to its end, as Megatron's bucket groups
    do: a hook adds each to `main_grad`, `_register_grad_ready` notes the last of a step,
    `_start_grad_sync` starts a full bucket, and `finish_grad_sync` waits.

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
        gradient_scaling_factor: of this rank's gradients, before they are summed.
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
        gradient_scaling_factor: float,
        overlap: bool,
        main_grad: bool,
    ) -> None:
        self.buckets = buckets
        self.slots = [slot for bucket in buckets for slot in bucket.slots]
        self.device = buckets[0].grads.device
        self.is_last_micro_batch = True
        """Whether a backward is the last of its step."""
        self.micro_batches = 0
        """If not zero, the number of the backward that is the last, instead of `is_last_micro_batch`."""
        self._group = group
        self._tied_group = tied_group
        self._parts_group = parts_group
        self._checks = checks
        self._gradient_scaling_factor = gradient_scaling_factor
        self._overlap = overlap
        self._main_grad = main_grad
        self._has_reduced = False
        """Whether the buckets still have the gradients of the last step."""
        self._works: list[dist.Work | None] = []
        """The collective of each bucket that has started in this step; None without other ranks."""
        self._are_finite: list[Tensor] = []
        """Whether this rank's gradients of each such bucket are, before they are summed, bool []."""
        self._param_to_bucket = {
            slot.parameter: (bucket, slot) for bucket in buckets for slot in bucket.slots
        }
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Take the gradients of all parameters from now on."""
        # otherwise the parameters would keep the buckets and the process group alive
        reference = weakref.ref(self)

        def hook(parameter: nn.Parameter) -> None:
            self = reference()
            if self is not None:
                self._backward_post_hook(parameter)

        for slot in self.slots:
            if self._main_grad:
                slot.parameter.main_grad = slot.main_grad  # type: ignore[attr-defined]
                slot.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
            slot.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _backward_post_hook(self, parameter: nn.Parameter) -> None:
        """Runs in backward, when the parameter's gradient of one micro-batch is complete."""
        bucket, slot = self._param_to_bucket[parameter]
        if parameter.grad is None:
            raise GradientError(
                f"{slot.name} has no gradient left to reduce: another "
                f"BucketedDataParallel has the parameter too, or a hook of another kind took it; "
                f"wrap the modules that share it as one"
            )
        if slot in bucket.ready:
            parameter.grad = None
            raise GradientError(
                f"{slot.name} got a second gradient in this step, after the reduction of its first "
                f"had begun: run every backward of a step but the last within no_sync(), add up "
                f"the losses of one forward, or call finish_grad_sync() between; of activation "
                f"checkpoints use_reentrant=False gives one gradient a backward"
            )
        self._add(slot, parameter.grad)
        if self.device.type == "cuda":
            bucket.streams.add(torch.cuda.current_stream(self.device))
        is_last = self.is_last_micro_batch
        if self.micro_batches:
            is_last = slot.count == self.micro_batches
        if is_last:
            self._register_grad_ready(bucket, slot)

    def _add(self, slot: GradSlot, grad: Tensor) -> None:
        """Add one micro-batch to the bucket, and drop it."""
        parameter, main_grad = slot.parameter, slot.main_grad
        grad = local_grad(parameter, grad)
        # the bucket has it now: do not keep a second copy
        parameter.grad = None
        if self._main_grad and self._has_reduced:
            raise GradientError(
                "with main_grad the buckets are added to: call zero_grad() before the first "
                "backward of a step"
            )
        if self._main_grad and parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
            # A kernel has added it by itself, and the gradient of autograd is meaningless.
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        elif grad.data_ptr() == main_grad.data_ptr():
            pass  # not zeroed since the last step: autograd has added to it in place
        elif slot.count == 0 and not self._main_grad:
            # the first micro-batch of a step overwrites the last step, so buckets are not zeroed
            main_grad.copy_(grad)
        else:
            main_grad.add_(grad)
        slot.count += 1

    def _register_grad_ready(self, bucket: GradBucket, slot: GradSlot) -> None:
        """Note that the gradient has the last micro-batch, and start the buckets that are full and next.
        Tied ones wait for the end of the step.
        """
        bucket.ready.add(slot)
        if not self._overlap:
            return
        self._claim_group()
        for following in self.buckets[len(self._works) :]:
            if following.is_tied or not following.is_full:
                break
            self._start_grad_sync(following)

    def _start_grad_sync(self, bucket: GradBucket) -> None:
        """Start the collective of the bucket that is next."""
        # parts of a model, and so their hooks, may run on other streams
        bucket.wait_for_streams()
        if self._checks:
            # before the sum, after which a bad gradient would be that of every rank
            self._are_finite.append(is_finite(bucket.grads))
        if self._gradient_scaling_factor != 1.0:
            # also before the sum, which in float16 may overflow
            bucket.grads.mul_(self._gradient_scaling_factor)
        if bucket.is_tied:
            dist.all_reduce(bucket.grads, group=self._tied_group)
        work = None
        if self._group is not None:
            work = dist.all_reduce(bucket.grads, group=self._group, async_op=True)
        self._works.append(work)

    def start_rest(self) -> None:
        """Complete all gradients, and start all buckets that have not started."""
        self._claim_group()
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._complete(slot, is_ready=slot in bucket.ready)
        for bucket in self.buckets[len(self._works) :]:
            self._start_grad_sync(bucket)

    def _complete(self, slot: GradSlot, *, is_ready: bool) -> None:
        """Complete a gradient that backward has not completed: there was none, or one of only some
        micro-batches.
        """
        grad = slot.parameter.grad
        if grad is not None and slot.parameter.requires_grad:
            if is_ready:
                raise GradientError(
                    f"{slot.name}.grad was set by hand after the reduction of its gradient had "
                    f"begun; set it before the last backward, or after finish_grad_sync()"
                )
            # It is that of the last step, if it was not zeroed: other ranks may add to theirs. Or it was
            # set by hand, as by pipeline schedules that compute the gradients of weights separately.
            self._add(slot, grad)
        if slot.count == 0:
            # this rank adds zeros, and not the gradient of the last step
            slot.main_grad.zero_()

    def finish_grad_sync(self, factor: Tensor | None) -> None:
        """Wait for the collectives, scale by `factor`, set `param.grad`, and prepare the next step.

        Raises GradientError where a gradient of some rank is not finite.
        """
        for work in self._works:
            if work is not None:
                work.wait()
        try:
            # After the buckets: ranks may have started different numbers of them in backward.
            unused = check_grads(self.buckets, self._are_finite, self._group, self._parts_group)
        finally:
            # a step whose gradients were bad is over too
            self._has_reduced = True
            self._begin_step()
        for bucket in self.buckets:
            if factor is not None:
                bucket.grads.mul_(factor)
            for slot in bucket.slots:
                # as with torch's DDP, a parameter that no rank used has no gradient
                is_unused = slot in unused
                slot.parameter.grad = None if is_unused else as_grad(slot.main_grad, slot.parameter)

    def reset(self) -> None:
        """Begin a new step. Raises GradientError where the reduction of the last one has begun, in which
        other ranks take part.
        """
        if self._works:
            raise GradientError(
                "zero_grad was called while gradients are being reduced: call finish_grad_sync "
                "first, or run a backward whose gradients are not wanted within no_sync()"
            )
        self._begin_step()
        self._has_reduced = False
        if self._main_grad:
            for bucket in self.buckets:
                bucket.grads.zero_()

    def _begin_step(self) -> None:
        self._works = []
        self._are_finite = []
        for bucket in self.buckets:
            bucket.reset()
        if self._group is not None and _reducing.get(self._group) is self:
            del _reducing[self._group]

    def _claim_group(self) -> None:
        """Reserve the group until the step is finished. Raises GradientError where another reducer has
        reserved it.
        """
        if self._group is not None and _reducing.setdefault(self._group, self) is not self:
            raise GradientError(
                "another BucketedDataParallel has begun to reduce gradients in this process group: "
                "wrap the modules of one backward together, as an nn.ModuleList, "
                "finish the other first, or give each a process group of its own"
            )
