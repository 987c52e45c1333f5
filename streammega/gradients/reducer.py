"""One model's gradients on their way: from hooks in backward to buckets, over the ranks, to where
optimizers look.

    hook of a parameter: main_grad (+)= grad ─► bucket full on the last micro-batch ─► its
    collective starts (`bucket_starts.py`)

    finish_grad_sync: what is left starts ─► all wait ─► normalised gradients in param.grad
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from streammega.errors import ConfigError, GradientError
from streammega.gradients.bucket_starts import BucketStarts
from streammega.gradients.buffers import GradBucket, GradBuffer, GradSlot, own_grad
from streammega.gradients.checks import GradientChecks, Report
from streammega.gradients.collectives import Group
from streammega.gradients.start_order import StartOrder


class GradReducer:
    """The state of a model's reduction from the first micro-batch of a step to its end.

    Args:
        module: whose parameters' gradients are taken.
        buffers: where they are kept.
        order: in which the buckets of all models of a group start, and that group.
        tied_group: the ranks that add to the buckets that wait.
        checks: what looks at them before; None: nothing does.
        scale: by which this rank's gradients are multiplied before they are summed.
        overlap, main_grad: as of BucketedDataParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        buffers: list[GradBuffer],
        *,
        order: StartOrder,
        tied_group: Group | None,
        checks: GradientChecks | None,
        scale: float,
        overlap: bool,
        main_grad: bool,
    ) -> None:
        self.buffers = buffers
        self.order = order
        self.group = order.group
        self.main_grad = main_grad
        self.device = buffers[0].grads.device
        self.sync = True
        """Whether a backward is the last of its step."""
        self.expected = 0
        """If not zero, which micro-batch is the last of its step instead."""
        self.starts = BucketStarts(
            module,
            buffers,
            group=self.group,
            tied_group=tied_group,
            checks=checks,
            overlap=overlap,
        )
        order.add(self)
        self._overlap = overlap
        self._scale = scale
        self._averages = self.group is None or scale * self.group.size() == 1.0
        self._holds_last = False
        """With main_grad, whether the buffers hold the gradients of the step before."""
        self._left_out: list[tuple[str, nn.Parameter]] = []
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                self._left_out.append((name, parameter))
        hooks: list[RemovableHandle] = []
        for buffer in buffers:
            for bucket in buffer.buckets:
                for slot in bucket.slots:
                    hooks.append(self._attach(bucket, slot))
        # or the parameters would keep their places in these buffers
        weakref.finalize(self, _remove, hooks).atexit = False

    def _attach(self, bucket: GradBucket, slot: GradSlot) -> RemovableHandle:
        """Take the parameter's gradients from now on."""
        if self.main_grad:
            slot.parameter.main_grad = slot.main_grad  # type: ignore[attr-defined]
            slot.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        # or the parameter would keep this, and its process group, for ever
        reference = weakref.ref(self)

        @torch.no_grad()
        def take(parameter: nn.Parameter) -> None:
            """Take the gradient, while there is a reducer."""
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
                f"{slot.name} has no gradient any more when it is to be reduced: another "
                f"BucketedDataParallel has the parameter too, or a hook of another kind took it; "
                f"wrap the modules that share it as one"
            )
        grad = own_grad(parameter, parameter.grad)
        # the buffer has it: two copies would be twice the memory
        parameter.grad = None
        if slot.ready:
            raise GradientError(
                f"{slot.name} got a second gradient in this step, after the reduction of its first "
                f"had begun: run every backward of a step but the last within no_sync(), add up "
                f"the losses of one forward, or call finish_grad_sync() between; of activation "
                f"checkpoints use_reentrant=False gives one gradient a backward"
            )
        slot.count += 1
        last = slot.count == self.expected if self.expected else self.sync
        self._add(slot, grad, last=last)
        if self.device.type == "cuda":
            bucket.streams.add(torch.cuda.current_stream(self.device))
        if last:
            self._scale_once(slot)
            slot.ready = True
            bucket.unready -= 1
            if self._overlap and bucket.unready == 0:
                self.order.start_full()

    def _add(self, slot: GradSlot, grad: Tensor, *, last: bool = False) -> None:
        """Add one micro-batch to the buffer; `last`: none comes after it."""
        main = slot.main_grad
        if self.main_grad:
            self._add_to_main_grad(slot, grad)
        elif grad.data_ptr() == main.data_ptr():
            pass  # not zeroed since the last step: autograd has added to it
        elif slot.count > 1:
            main.add_(grad, alpha=self._scale if slot.scaled else 1.0)
        elif self._scales_at_once(grad, main, last):
            # one pass over memory instead of two: the copy and the scaling
            torch.mul(grad, self._scale, out=main)
            slot.scaled = True
        else:
            # the first of a step overwrites what is there: a bucket is never zeroed
            main.copy_(grad)

    def _add_to_main_grad(self, slot: GradSlot, grad: Tensor) -> None:
        """With main_grad kernels may have added a micro-batch by themselves, to buffers that were
        zeroed; then autograd's gradient says nothing.
        """
        if self._holds_last:
            raise GradientError(
                "with main_grad the buffers are added to: call zero_grad() before the first "
                "backward of a step"
            )
        if slot.parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
            slot.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        elif grad.data_ptr() != slot.main_grad.data_ptr():
            slot.main_grad.add_(grad)

    def _scales_at_once(self, grad: Tensor, main: Tensor, last: bool) -> bool:
        """Whether the first micro-batch may be scaled while it is copied: where no other is added
        to it, or the sum is the same.
        """
        if self._scale == 1.0 or grad.dtype != main.dtype:
            return False
        return last or self._scales_exactly(main)

    def _scales_exactly(self, main: Tensor) -> bool:
        """Whether a sum of scaled gradients has the bits of the scaled sum: then scaling costs no
        pass over memory of its own.

        So it is for powers of two, but for elements near the least that a float32 can hold; float16
        has a least of 6e-8.
        """
        return math.frexp(self._scale)[0] == 0.5 and main.dtype != torch.float16

    def _scale_once(self, slot: GradSlot) -> None:
        """Multiply what is in the buffer by the scale, unless that is done."""
        if self._scale != 1.0 and not slot.scaled:
            slot.main_grad.mul_(self._scale)
        slot.scaled = True

    def slots(self) -> Iterator[GradSlot]:
        """All of them, in the order of the buffers."""
        for buffer in self.buffers:
            yield from buffer.slots()

    def forget(self) -> None:
        """Begin a step anew.

        Raises GradientError where the reduction of this one has begun, in which other ranks take
        part.
        """
        if self.starts.has_started:
            raise GradientError(
                "zero_grad was called while gradients are being reduced: call finish_grad_sync "
                "first, or run a backward whose gradients are not wanted within no_sync()"
            )
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.forget()
            if self.main_grad:
                # kernels add to what is there
                buffer.grads.zero_()
        self._holds_last = False

    @property
    def has_begun(self) -> bool:
        """Whether there are gradients of a step that is not finished."""
        return any(slot.count for slot in self.slots())

    def start_full(self) -> bool:
        """Start the buckets that are full and next; whether all that may start in backward have."""
        return self.starts.start_full()

    # The steps of `finish_grad_sync`, which takes each over all models before the next.

    def complete(self) -> None:
        """Complete what backward left: parameters without a gradient, used in some micro-batches
        only, or given one by hand.
        """
        for name, parameter in self._left_out:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when it was wrapped and is trained now; wrap the module "
                    f"after unfreezing it"
                )
        for slot in self.slots():
            self._complete_slot(slot)

    def _complete_slot(self, slot: GradSlot) -> None:
        left = slot.left_grad()
        if left is not None and slot.ready:
            raise GradientError(
                f"{slot.name} was given a gradient by hand after that of backward began to be "
                f"reduced"
            )
        if left is None and slot.count == 0 and self._averages:
            # others may add to theirs: a sum without this rank's would be a part of it
            left = slot.carried_grad()
        # by hand: as pipeline schedules do that take the gradients of weights by themselves
        if left is not None:
            slot.count += 1
            self._add(slot, own_grad(slot.parameter, left))
            slot.parameter.grad = None
        if slot.count == 0:
            # what the bucket sums here are zeros, not the gradient of the step before
            slot.main_grad.zero_()
        elif not slot.ready:
            self._scale_once(slot)

    def report(self) -> Report:
        """Begin to tell the other ranks of this step."""
        return Report(list(self.slots()), self.starts.checks, self.group, self.device)

    def wait(self) -> None:
        """Wait for the collectives; all is then ready for the next step."""
        self.starts.wait()
        self._holds_last = self.main_grad

    def hand_over(self, factor: Tensor | None) -> None:
        """Scale the reduced gradients, and put them where optimizers look."""
        if factor is not None:
            for buffer in self.buffers:
                buffer.grads.mul_(factor)
        for slot in self.slots():
            slot.hand_over()


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
