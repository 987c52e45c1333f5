"""One model's gradients on their way: from hooks in backward to buckets, over the ranks, to where
optimizers look.

hook of a parameter: main_grad (+)= grad ─► bucket full on the last micro-batch ─► its collective
starts finish_grad_sync: what is left starts ─► all wait ─► normalised gradients in param.grad
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streammega.errors import ConfigError, GradientError
from streammega.gradients.buffers import GradBuffer, GradSlot, in_order_of_backward, own_grad
from streammega.gradients.checks import GradientChecks, Report
from streammega.gradients.collectives import Group, reduce_all, reduce_to_shards
from streammega.gradients.start_order import start_order_of


class GradReducer:
    """The state of a model's reduction from the first micro-batch of a step to its end.

    Args:
        module: whose parameters' gradients are taken.
        buffers: where they are kept.
        group: the ranks over which they are summed; None: this one alone.
        tied_group: the ranks that add to the buckets that wait.
        checks: what looks at them before; None: nothing does.
        scale: by which this rank's gradients are multiplied before they are summed.
        sharded, overlap, main_grad: as of BucketedDataParallel.
    """

    def __init__(
        self,
        module: nn.Module,
        buffers: list[GradBuffer],
        *,
        group: Group | None,
        tied_group: Group | None,
        checks: GradientChecks | None,
        scale: float,
        sharded: bool,
        overlap: bool,
        main_grad: bool,
    ) -> None:
        self.buffers = buffers
        self.group = group
        self.checks = checks
        self.sharded = sharded
        self.overlap = overlap
        self.main_grad = main_grad
        self.device = buffers[0].grads.device
        self.sync = True
        """Whether a backward is the last of its step."""
        self.expected = 0
        """If not zero, which micro-batch is the last of its step instead."""
        self._scale = scale
        self._tied_group = tied_group
        self._averages = group is None or scale * group.size() == 1.0
        self._left_out = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
        ]
        self._in_order = in_order_of_backward(module, buffers)
        self._next = 0
        self._holds_last = False
        self.order = start_order_of(group)
        self.order.add(self)
        for buffer in buffers:
            for number, slots in enumerate(buffer.slots):
                for slot in slots:
                    self._attach(buffer, number, slot)

    def _attach(self, buffer: GradBuffer, number: int, slot: GradSlot) -> None:
        """Take the parameter's gradients from now on."""
        if self.main_grad:
            slot.parameter.main_grad = slot.main_grad  # type: ignore[attr-defined]
            slot.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        # or the parameter would keep this, and its process group, for ever
        reference = weakref.ref(self)

        @torch.no_grad()
        def take(parameter: nn.Parameter) -> None:
            self = reference()
            if self is not None:
                self._take(buffer, number, slot)

        slot.parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _take(self, buffer: GradBuffer, number: int, slot: GradSlot) -> None:
        """Runs in backward, when the parameter's gradient of one micro-batch is complete."""
        parameter = slot.parameter
        if parameter.grad is None:
            raise GradientError(
                f"{slot.name} has no gradient any more when it is to be reduced: another BucketedDataParallel has the parameter "
                f"too, or a hook of another kind took it; wrap the modules that share it as one"
            )
        grad = own_grad(parameter, parameter.grad)
        parameter.grad = None
        if slot.ready:
            raise GradientError(
                f"{slot.name} got a second gradient in this step, after the reduction of its first had begun: run every "
                f"backward of a step but the last within no_sync(), add up the losses of one forward, or call "
                f"finish_grad_sync() between; of activation checkpoints use_reentrant=False gives one gradient a backward"
            )
        slot.count += 1
        last = slot.count == self.expected if self.expected else self.sync
        self._add(slot, grad, last=last)
        if last:
            self._scale_once(slot)
            slot.ready = True
            buffer.waiting[number] -= 1
            if self.overlap and buffer.waiting[number] == 0:
                self.order.start_full()

    def _add(self, slot: GradSlot, grad: Tensor, *, last: bool = False) -> None:
        """Add one micro-batch to the buffer; `last`: none comes after it."""
        main = slot.main_grad
        if self.main_grad and self._holds_last:
            raise GradientError(
                "with main_grad the buffers are added to: call zero_grad() before the first backward of a step"
            )
        if self.main_grad and slot.parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
            slot.parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        elif grad.data_ptr() == main.data_ptr():
            pass  # not zeroed since the last step: autograd has added to it
        elif slot.count > 1 or self.main_grad:
            main.add_(grad, alpha=self._scale if slot.scaled else 1.0)
        elif (
            self._scale != 1.0 and grad.dtype == main.dtype and (last or self._scales_exactly(main))
        ):
            torch.mul(grad, self._scale, out=main)
            slot.scaled = True
        else:
            main.copy_(grad)

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
            for own in buffer.slots:
                yield from own

    def own_grads(self, buffer: GradBuffer) -> list[Tensor]:
        """The gradients that are valid on this rank after a reduction: everything, or with
        `sharded` its part of every bucket.
        """
        if not self.sharded or self.group is None:
            return [buffer.grads]
        index = self.group.rank()
        size = self.group.size()
        return [buffer.grads[slice(*bucket.shard(index, size))] for bucket in buffer.buckets]

    def forget(self) -> None:
        """Begin a step anew.

        Raises GradientError where the reduction of this one has begun, in which other ranks take
        part.
        """
        if self._next > 0:
            raise GradientError(
                "zero_grad was called while gradients are being reduced: call finish_grad_sync first, or run a backward whose "
                "gradients are not wanted within no_sync()"
            )
        for buffer in self.buffers:
            buffer.forget()
            if self.main_grad:  # kernels add to what is there
                buffer.grads.zero_()
        self._holds_last = False

    @property
    def has_begun(self) -> bool:
        """Whether there are gradients of a step that is not finished."""
        return any(slot.count for slot in self.slots())

    def start_full(self) -> bool:
        """Start the buckets that are full, in their order, up to the first that is not; whether all
        have started.

        Buckets to which another stage adds first are left to `finish_grad_sync`.
        """
        while self._next < len(self._in_order):
            buffer, number = self._in_order[self._next]
            if not self.overlap or buffer.waiting[number]:
                return False
            self._look(buffer, number)
            self._start(buffer, number)
            self._next += 1
        return True

    def _look(self, buffer: GradBuffer, number: int, note: str = "") -> None:
        bucket = buffer.buckets[number]
        if self.checks is not None:
            self.checks.look(buffer.grads[bucket.start : bucket.stop], buffer.slots[number], note)

    def _start(self, buffer: GradBuffer, number: int) -> None:
        bucket = buffer.buckets[number]
        if self.group is not None:
            reduce = reduce_to_shards if self.sharded else reduce_all
            buffer.works.append(reduce(buffer.grads[bucket.start : bucket.stop], self.group))
        buffer.started[number] = True

    # The steps of `finish_grad_sync`, which takes each over all models before the next.

    def complete(self) -> None:
        """Complete what backward left: parameters without a gradient, used in some micro-batches
        only, or given one by hand.
        """
        for name, parameter in self._left_out:
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when it was wrapped and is trained now; wrap the module after unfreezing it"
                )
        for buffer in self.buffers:
            for slots, started in zip(buffer.slots, buffer.started, strict=True):
                for slot in slots:
                    self._complete_slot(slot, started)

    def _complete_slot(self, slot: GradSlot, started: bool) -> None:
        left = slot.left_grad()
        if left is not None and slot.ready:
            raise GradientError(
                f"{slot.name} was given a gradient by hand after that of backward began to be reduced"
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
            slot.main_grad.zero_()
        elif not slot.ready:
            self._scale_once(slot)

    def add_tied(self) -> None:
        """Add to the gradients of shared parameters those of the other stage."""
        for buffer, number in self._tied_buckets():
            assert self._tied_group is not None
            self._look(buffer, number)  # before, so that what is bad is named where it came from
            bucket = buffer.buckets[number]
            dist.all_reduce(buffer.grads[bucket.start : bucket.stop], group=self._tied_group)
            self._look(buffer, number, ", with what another stage added,")

    def start_rest(self) -> None:
        """Start what backward did not, in the order in which it would have."""
        for buffer, number in self._in_order[self._next :]:
            self._look(buffer, number)
            self._start(buffer, number)
        self._next = 0

    def start_tied(self) -> None:
        """Start the buckets of shared parameters, to which the other stage has added."""
        for buffer, number in self._tied_buckets():
            self._start(buffer, number)

    def report(self) -> Report:
        """Begin to tell the other ranks of this step."""
        return Report(list(self.slots()), self.checks, self.group, self.device)

    def wait(self) -> None:
        """Wait for the collectives; all is then ready for the next step."""
        for buffer in self.buffers:
            for work in buffer.works:
                work.wait()
            buffer.forget()
        self._holds_last = self.main_grad

    def hand_over(self, factor: Tensor | None) -> None:
        """Scale the reduced gradients, and put them where optimizers look."""
        for buffer in self.buffers:
            if factor is not None:
                for grads in self.own_grads(buffer):
                    grads.mul_(factor)
            if not self.sharded:
                for slot in (slot for slots in buffer.slots for slot in slots):
                    slot.hand_over()

    def _tied_buckets(self) -> Iterator[tuple[GradBuffer, int]]:
        for buffer in self.buffers:
            yield from (
                (buffer, number) for number, bucket in enumerate(buffer.buckets) if bucket.waits
            )
