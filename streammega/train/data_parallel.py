"""Gradients in contiguous buckets, summed over ranks while backward goes on.

backward ─► hook of a parameter: main_grad (+)= grad ─► bucket full on the last micro-batch ─► its collective starts
finish_grad_sync: what is left starts ─► all wait ─► normalised gradients in param.grad
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streammega.errors import ConfigError, GradientError
from streammega.ranks import Ranks
from streammega.train.buckets import default_bucket_size
from streammega.train.collectives import clip, reduce_all, reduce_to_shards, total_norm
from streammega.train.grad_buffers import (
    GradBuffer,
    GradSlot,
    as_grad,
    in_order_of_backward,
    is_split,
    local_part,
    make_buffers,
    placed,
    tensor_parallel_group,
)
from streammega.train.start_order import start_order_of


class BucketedDataParallel(nn.Module):
    """A module whose gradients are accumulated in wide contiguous buckets, and reduced bucket by bucket during backward::

        model = BucketedDataParallel(model)
        for n, batch in enumerate(micro_batches):
            with model.no_sync() if n < last else nullcontext():
                (loss(model(batch)) / micro_batches).backward()
        model.finish_grad_sync()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()

    All ranks begin with the parameters of the first. Gradients are averaged over them as by torch's DDP; where
    that adds up micro-batches in the parameters' dtype, this does in `grad_dtype`. Buckets are laid out in reverse registration
    order (see `plan_buckets`), and their collectives start in that order on every rank, whichever gradient is ready first: over
    the parameters of all dtypes, and over all models of a group, the last made first. A model that is stepped apart from another
    overlaps its collectives better in a group of its own.

    Every backward of a step but the last is within `no_sync`: one that meets a gradient whose reduction has begun raises
    GradientError.

    Args:
        module: parameters may be DTensors of one tensor-parallel group; every rank works on its own part.
        group: the ranks that hold copies; None: all.
        ranks: instead of `group`, this rank of a layout: copies are its dp-cp group, and norms are taken over all groups.
        bucket_size: elements; None: max(40M, 1M * ranks).
        grad_dtype: of the buffer.
        average: divide by the number of ranks; else gradients are summed, to be normalised by `finish_grad_sync(num_tokens)`.
        sharded: lay out for ShardedOptimizer: each rank is given its part of every bucket only.
        overlap: start a bucket when it is full, else all at the end.
        tied: names of parameters that the first and last pipeline stage share: summed over `ranks`' embedding group.
        check_gradients: raise GradientError, which names the parameter, for a gradient that is not finite, before it is reduced.
        largest_gradient: with check_gradients, also for an element that is larger.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        ranks: Ranks | None = None,
        bucket_size: int | None = None,
        grad_dtype: torch.dtype = torch.float32,
        average: bool = True,
        sharded: bool = False,
        overlap: bool = True,
        tied: Collection[str] = (),
        check_gradients: bool = True,
        largest_gradient: float | None = None,
    ) -> None:
        super().__init__()
        if ranks is not None and group is not None:
            raise ConfigError("give either group or ranks, not both")
        if bucket_size is not None and bucket_size < 1:
            raise ConfigError(f"bucket_size is {bucket_size}; it counts elements, at least 1")
        self.module, self.ranks = module, ranks
        self.group = ranks.group("dp-cp") if ranks else _world(group)
        self.size = self.group.size() if self.group is not None else 1
        self.index = self.group.rank() if self.group is not None else 0
        self.sharded, self.overlap = sharded, overlap
        self.check_gradients, self.largest_gradient = check_gradients, largest_gradient
        self._split_over = None if ranks is not None else tensor_parallel_group(module)
        self._tied_group = ranks.group("embedding") if ranks and tied else None
        self._tied = set(tied) if self._tied_group is not None else set()
        self._scale = 1.0 / self.size if average else 1.0
        self._sync, self._expected = True, 0
        self.buffers_of_grads = make_buffers(
            module,
            bucket_size or default_bucket_size(self.size),
            grad_dtype,
            tied=self._tied,
            shards=self.size if sharded else 0,
        )
        self._in_order = in_order_of_backward(module, self.buffers_of_grads)
        self._next = 0
        self._order = start_order_of(self.group)
        self._order.add(self)
        self._broadcast()
        for buffer in self.buffers_of_grads:
            for number, slots in enumerate(buffer.slots):
                for slot in slots:
                    slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        self._hook(buffer, number, slot)
                    )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward within it only accumulates."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def expect(self, micro_batches: int) -> Iterator[None]:
        """Within it collectives start with the last of so many backward passes: for pipeline schedules."""
        self._expected = micro_batches
        try:
            yield
        finally:
            self._expected = 0

    def finish_grad_sync(self, num_tokens: Tensor | None = None) -> None:
        """Wait until gradients are reduced, and put them where optimizers look: `param.grad` (with `sharded`, this rank's parts).

        Args:
            num_tokens: unmasked tokens of this step on this rank (0 on all but the last pipeline stage): gradients are divided by
                their number over all data- and context-parallel ranks, at least 1. For losses that are summed over tokens.
        """
        finish_grad_sync([self], num_tokens)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients to a global norm, over all ranks of the layout; returns the norm before. For replicated optimizers."""
        if self.sharded:
            raise ConfigError("sharded gradients are clipped by ShardedOptimizer.clip_grad_norm_")
        tensors = self.grads()
        norm = total_norm(self.grads(once=True), [self.model_group], tensors[0].device)
        clip(tensors, norm, max_norm)
        return norm

    @property
    def model_group(self) -> dist.ProcessGroup | None:
        """The ranks among which one copy of the model is divided: norms are summed over them. None: this rank alone."""
        return self.ranks.group("tp-pp") if self.ranks is not None else self._split_over

    def grads(self, *, once: bool = False) -> list[Tensor]:
        """This rank's parts of all gradients that optimizers will see; `once`: of those that no other rank counts too."""
        every = [slot for slots in self._slots() for slot in slots if not once or self.counts(slot)]
        return [local_part(slot.parameter.grad) for slot in every if slot.parameter.grad is not None]

    def counts(self, slot: GradSlot) -> bool:
        """Whether this rank counts a parameter in a norm, so that each is counted once over tensor and pipeline ranks."""
        if self.ranks is None:
            first = self._split_over is None or self._split_over.rank() == 0
            return first or is_split(slot.parameter)
        replicated = not is_split(slot.parameter) and self.ranks.at["tp"] > 0
        copied = slot.name in self._tied and not self.ranks.is_first_stage
        return not replicated and not copied

    def own_grads(self, buffer: GradBuffer) -> list[Tensor]:
        """The gradients that are valid on this rank after a reduction: everything, or with `sharded` its part of every bucket."""
        if not self.sharded:
            return [buffer.grads]
        return [buffer.grads[slice(*bucket.shard(self.index, self.size))] for bucket in buffer.buckets]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.load_state_dict(*args, **kwargs)

    @torch.no_grad()
    def _broadcast(self) -> None:
        """Begin with the parameters and buffers of the first rank, as torch's DDP does."""
        if self.group is None:
            return
        source = dist.get_process_group_ranks(self.group)[0]
        moved = [buffer.params for buffer in self.buffers_of_grads if buffer.params is not None]
        rest = [parameter for parameter in self.module.parameters() if not (moved and parameter.requires_grad)]
        for tensor in [*moved, *(local_part(own) for own in (*rest, *self.module.buffers()))]:
            dist.broadcast(tensor, source, group=self.group)

    def _slots(self) -> Iterator[list[GradSlot]]:
        for buffer in self.buffers_of_grads:
            yield from buffer.slots

    def _hook(self, buffer: GradBuffer, number: int, slot: GradSlot) -> Any:
        """Runs in backward, when the parameter's gradient of one micro-batch is complete."""
        reference = weakref.ref(self)  # or the parameter would keep this, and its process group, for ever

        @torch.no_grad()
        def accumulate(parameter: Tensor) -> None:
            self = reference()
            if self is None or parameter.grad is None:
                return
            if slot.ready:
                raise GradientError(
                    f"{slot.name} got a second gradient in this step, after the reduction of its first had begun: run every "
                    f"backward of a step but the last within no_sync(), add up the losses of one forward, or call "
                    f"finish_grad_sync() between"
                )
            grad = local_part(placed(parameter.grad, parameter))
            slot.count += 1
            last = slot.count == self._expected if self._expected else self._sync
            main = slot.main_grad
            if (
                slot.count > 1 or grad.data_ptr() == main.data_ptr()
            ):  # the latter: not zeroed since the last step, as torch adds then
                if grad.data_ptr() != main.data_ptr():
                    main.add_(grad)
                if last and self._scale != 1.0:
                    main.mul_(self._scale)
            elif last and self._scale != 1.0 and grad.dtype == main.dtype:
                torch.mul(grad, self._scale, out=main)
            else:
                main.copy_(grad)
                if last and self._scale != 1.0:
                    main.mul_(self._scale)
            parameter.grad = None
            if last:
                slot.ready = True
                buffer.waiting[number] -= 1
                if self.overlap:
                    self._order.start_full()

        return accumulate

    def start_full(self) -> bool:
        """Start the buckets that are full, in their order, up to the first that is not; whether all have started.

        Buckets to which another stage adds first are left to `finish_grad_sync`.
        """
        while self._next < len(self._in_order):
            buffer, number = self._in_order[self._next]
            if not self.overlap or buffer.waiting[number]:
                return False
            self._start(buffer, number)
            self._next += 1
        return True

    def _start(self, buffer: GradBuffer, number: int) -> None:
        bucket = buffer.buckets[number]
        grads = buffer.grads[bucket.start : bucket.stop]
        if self.check_gradients:
            self._check(grads, buffer.slots[number])
        if self.group is not None:
            reduce = reduce_to_shards if self.sharded else reduce_all
            buffer.works.append(reduce(grads, self.group))
        buffer.started[number] = True

    def _complete(self, buffer: GradBuffer) -> None:
        """Complete what backward left: parameters without a gradient, or used in some micro-batches only."""
        for slots, started in zip(buffer.slots, buffer.started, strict=True):
            if started:
                continue
            for slot in slots:
                if slot.count == 0:
                    slot.main_grad.zero_()
                elif not slot.ready and self._scale != 1.0:
                    slot.main_grad.mul_(self._scale)

    def _start_rest(self) -> None:
        """Start what backward did not, in the order in which it would have."""
        for buffer, number in self._in_order[self._next :]:
            self._start(buffer, number)
        self._next = 0

    def _start_tied(self, buffer: GradBuffer) -> None:
        """Start the buckets of shared parameters, to which the other stage has added."""
        for number, bucket in enumerate(buffer.buckets):
            if bucket.waits:
                self._start(buffer, number)

    def _finish(self, buffer: GradBuffer) -> None:
        """Wait for the collectives of a buffer; it is then ready for the next step."""
        for work in buffer.works:
            work.wait()
        buffer.works.clear()
        buffer.started = [False] * len(buffer.buckets)
        buffer.waiting = [len(slots) for slots in buffer.slots]
        for slot in (slot for slots in buffer.slots for slot in slots):
            slot.count, slot.ready = 0, False

    def _add_tied(self, buffer: GradBuffer) -> None:
        """Add to the gradients of shared parameters those of the other stage."""
        for bucket in buffer.buckets:
            if bucket.waits:
                assert self._tied_group is not None
                dist.all_reduce(buffer.grads[bucket.start : bucket.stop], group=self._tied_group)

    def _per_token(self, num_tokens: Tensor) -> Tensor:
        total = num_tokens.detach().to(torch.float32).clone()
        groups = [self.group, self.ranks.group("pp") if self.ranks else None]
        for group in groups:
            if group is not None:
                dist.all_reduce(total, group=group)
        return 1.0 / total.clamp(min=1.0)

    def _check(self, grads: Tensor, slots: Sequence[GradSlot]) -> None:
        norm = torch.linalg.vector_norm(grads, torch.inf if self.largest_gradient is not None else 2)
        limit = self.largest_gradient if self.largest_gradient is not None else float("inf")
        if bool(norm <= limit) and bool(norm.isfinite()):
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        for slot in slots:
            bad = ~torch.isfinite(slot.main_grad)
            if bad.any():
                raise GradientError(
                    f"rank {rank}: the gradient of {slot.name} is not finite in {int(bad.sum())} of {bad.numel()} elements; "
                    f"look at this step's batch and learning rate, resume from the last checkpoint, skip its samples"
                )
            largest = float(slot.main_grad.abs().max())
            if largest > limit:
                raise GradientError(
                    f"rank {rank}: the gradient of {slot.name} has an element of {largest:.4g}, more than {limit:.4g}; look at "
                    f"this step's batch and learning rate, or raise largest_gradient"
                )


@torch.no_grad()
def finish_grad_sync(models: Sequence[BucketedDataParallel], num_tokens: Tensor | None = None) -> None:
    """`finish_grad_sync` of several models that this rank holds, such as virtual pipeline stages.

    Together, since a stage that shares a parameter with another rank's may be the first here and the last there.
    """
    factor = None if num_tokens is None else models[0]._per_token(num_tokens)
    models = models[0]._order.sort(models)
    every = [(model, buffer) for model in models for buffer in model.buffers_of_grads]
    for model, buffer in every:
        model._complete(buffer)
    for model, buffer in every:
        model._add_tied(buffer)
    for model in models:
        model._start_rest()
    for model, buffer in every:
        model._start_tied(buffer)
    for model, buffer in every:
        model._finish(buffer)
    for model, buffer in every:
        if factor is not None:
            for grads in model.own_grads(buffer):
                grads.mul_(factor)
        if not model.sharded:
            for slot in (slot for slots in buffer.slots for slot in slots):
                slot.parameter.grad = as_grad(slot.main_grad, slot.parameter)


def _world(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    return group if group is not None and group.size() > 1 else None
