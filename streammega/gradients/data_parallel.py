"""Gradients in contiguous buckets, summed over ranks while backward goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streammega.errors import ConfigError
from streammega.gradients.buckets import default_bucket_size
from streammega.gradients.buffers import (
    GradSlot,
    is_split,
    local_part,
    make_buffers,
    tensor_parallel_group,
)
from streammega.gradients.checks import GradientChecks
from streammega.gradients.collectives import clip, total_norm
from streammega.gradients.reducer import GradReducer
from streammega.gradients.sync import finish_grad_sync
from streammega.parallel import Ranks

__all__ = ["BucketedDataParallel", "finish_grad_sync"]


class BucketedDataParallel(nn.Module):
    """A module whose gradients are accumulated in wide contiguous buckets, and reduced bucket by
    bucket during backward::

        model = BucketedDataParallel(model)
        for number, batch in enumerate(micro_batches, 1):
            is_last = number == len(micro_batches)
            with nullcontext() if is_last else model.no_sync():
                (loss(model(batch)) / len(micro_batches)).backward()
        model.finish_grad_sync()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()

    All ranks begin with the parameters of the first. Gradients are averaged over them as by torch's
    DDP; where that adds up micro-batches in the parameters' dtype, this does in `grad_dtype`.
    Buckets are laid out in reverse registration order (see `plan_buckets`), and their collectives
    start in that order on every rank, whichever gradient is ready first: over the parameters of all
    dtypes, and over all models of a group, the last made first. Models of one group overlap their
    collectives with backward where `streammega.finish_grad_sync` is called with all of them; a
    model that is stepped apart from another overlaps in a group of its own.

    Every backward of a step but the last is within `no_sync`: one that meets a gradient whose
    reduction has begun raises GradientError. A parameter that no rank used, or that was frozen
    meanwhile, has no gradient after the reduction, so optimizers leave it alone. What an abandoned
    backward has added goes with `zero_grad` of this module. Averaged gradients that are not zeroed
    add up over steps as with torch's DDP; sums (`average=False`, `num_tokens`, `tied`) need a
    `zero_grad` every step.

    Args:
        module: parameters may be DTensors of one tensor-parallel group; every rank works on its own
            part.
        group: the ranks that hold copies; None: all.
        ranks: instead of `group`, this rank of a layout: copies are its dp-cp group, and norms are
            taken over all groups.
        bucket_size: elements; None: max(40M, 1M * ranks).
        grad_dtype: of the buffer.
        average: divide by the number of ranks; else gradients are summed, to be normalised by
            `finish_grad_sync(num_tokens)`.
        sharded: lay out for ShardedOptimizer: each rank is given its part of every bucket only.
        overlap: start a bucket when it is full, else all at the end.
        tied: names of parameters that the first and last pipeline stage share: summed over `ranks`'
            embedding group.
        check_gradients: `finish_grad_sync` raises GradientError on every rank, before anything is
            stepped, where a gradient of some rank is not finite; that rank's error names the
            parameter.
        largest_gradient: with check_gradients, also for an element that is larger.
        main_grad: every parameter has `main_grad`, its place in the buffer, and
            `grad_added_to_main_grad`, which kernels set that add to it themselves (Transformer
            Engine's fuse_wgrad_accumulation). `zero_grad` begins every step then.
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
        main_grad: bool = False,
    ) -> None:
        super().__init__()
        if ranks is not None and group is not None:
            raise ConfigError("give either group or ranks, not both")
        if bucket_size is not None and bucket_size < 1:
            raise ConfigError(f"bucket_size is {bucket_size}; it counts elements, at least 1")
        self.module = module
        self.ranks = ranks
        self.group = ranks.group("dp-cp") if ranks else _world(group)
        self.size = self.group.size() if self.group is not None else 1
        self.index = self.group.rank() if self.group is not None else 0
        self.sharded = sharded
        self._split_over = None if ranks is not None else tensor_parallel_group(module)
        self._check_group()
        tied_group = ranks.group("embedding") if ranks and tied else None
        self._tied = set(tied) if tied_group is not None else set()
        self.buffers_of_grads = make_buffers(
            module,
            bucket_size or default_bucket_size(self.size),
            grad_dtype,
            tied=self._tied,
            shards=self.size if sharded else 0,
        )
        self.device = self.buffers_of_grads[0].grads.device
        # else ranks that were seeded apart would stay apart
        self._broadcast()
        checks = None
        if check_gradients:
            # a look on the CPU waits for nothing; a device's launch queue would drain
            at_once = self.device.type == "cpu"
            checks = GradientChecks(largest_gradient, at_once=at_once)
        self.reducer = GradReducer(
            module,
            self.buffers_of_grads,
            group=self.group,
            tied_group=tied_group,
            checks=checks,
            scale=1.0 / self.size if average else 1.0,
            sharded=sharded,
            overlap=overlap,
            main_grad=main_grad,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward within it only accumulates: no bucket starts."""
        before = self.reducer.sync
        self.reducer.sync = False
        try:
            yield
        finally:
            self.reducer.sync = before

    @contextlib.contextmanager
    def expect(self, micro_batches: int) -> Iterator[None]:
        """Within it collectives start with the last of so many backward passes: for pipeline
        schedules, which go forward and backward in one call, so that no_sync cannot be around some.
        """
        self.reducer.expected = micro_batches
        try:
            yield
        finally:
            self.reducer.expected = 0

    def finish_grad_sync(self, num_tokens: Tensor | None = None) -> None:
        """Wait until gradients are reduced, and put them where optimizers look: `param.grad` (with
        `sharded`, this rank's parts).

        Args:
            num_tokens: unmasked tokens of this step on this rank (0 on all but the last pipeline
                stage): gradients are divided by their number over all data- and context-parallel
                ranks, at least 1. For losses that are summed over tokens.
        """
        finish_grad_sync([self], num_tokens)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients to a global norm, over all ranks of the layout; returns the norm before.

        For replicated optimizers.
        """
        if self.sharded:
            raise ConfigError("sharded gradients are clipped by ShardedOptimizer.clip_grad_norm_")
        # what tensor-parallel ranks and stages have copies of would count twice
        counted = self.grads(once=True)
        norm = total_norm(counted, [self.model_group], self.device)
        clip(self.grads(), norm, max_norm)
        return norm

    @property
    def model_group(self) -> dist.ProcessGroup | None:
        """The ranks among which one copy of the model is divided: norms are summed over them.

        None: this rank alone.
        """
        return self.ranks.group("tp-pp") if self.ranks is not None else self._split_over

    def grads(self, *, once: bool = False) -> list[Tensor]:
        """This rank's parts of all gradients that optimizers will see; `once`: of those that no
        other rank counts too.
        """
        grads: list[Tensor] = []
        for slot in self.reducer.slots():
            grad = slot.parameter.grad
            if grad is not None and (not once or self.counts(slot)):
                grads.append(local_part(grad))
        return grads

    def counts(self, slot: GradSlot) -> bool:
        """Whether this rank counts a parameter in a norm, so that each is counted once over tensor
        and pipeline ranks.
        """
        if not self.is_first_copy(slot):
            return False
        # of a tied parameter the first stage counts its copy, and the last does not
        return self.ranks is None or slot.name not in self._tied or self.ranks.is_first_stage

    def is_first_copy(self, slot: GradSlot) -> bool:
        """Whether no tensor-parallel rank before this one has the same elements of a parameter."""
        if is_split(slot.parameter):
            return True
        if self.ranks is not None:
            return self.ranks.at["tp"] == 0
        return self._split_over is None or self._split_over.rank() == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that micro-batches of an unfinished step have added.

        Raises GradientError where their reduction has begun: other ranks wait for it in
        `finish_grad_sync`.
        """
        self.reducer.forget()
        super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """The module's own; never with `assign`, which would put other tensors in place of those
        whose gradients are kept.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) replaces parameters that are wrapped already: "
                "load before wrapping"
            )
        return self.module.load_state_dict(state_dict, strict)

    @torch.no_grad()
    def _broadcast(self) -> None:
        """Begin with the parameters and buffers of the first rank, as torch's DDP does."""
        if self.group is None:
            return
        source = dist.get_process_group_ranks(self.group)[0]
        tensors: list[Tensor] = []
        for buffer in self.buffers_of_grads:
            if buffer.params is not None:
                tensors.append(buffer.params)
        # what was moved into buffers is sent by these; all else by itself
        in_buffers = bool(tensors)
        for parameter in self.module.parameters():
            if not (in_buffers and parameter.requires_grad):
                tensors.append(local_part(parameter))
        tensors += [local_part(buffer) for buffer in self.module.buffers()]
        for tensor in tensors:
            dist.broadcast(tensor, source, group=self.group)

    def _check_group(self) -> None:
        """Raise ConfigError where the ranks that hold copies are said to be those among which
        parameters are split.
        """
        if self.group is None or self._split_over is None:
            return
        if not any(is_split(parameter) for parameter in self.module.parameters()):
            return
        ranks_of_copies = set(dist.get_process_group_ranks(self.group))
        ranks_of_parts = set(dist.get_process_group_ranks(self._split_over))
        both = ranks_of_copies & ranks_of_parts
        if len(both) > 1:
            raise ConfigError(
                f"the module's DTensors are split over ranks {sorted(both)}, and gradients would "
                f"be summed over the same ranks: give group= the ranks that hold copies, "
                f"or ranks=Ranks(layout)"
            )

    def inverse_of_tokens(self, num_tokens: Tensor) -> Tensor:
        """1 / the sum of num_tokens over data-parallel ranks and pipeline stages, which is taken as
        at least 1; float32 [].
        """
        tokens = num_tokens.detach().to(self.device, torch.float32, copy=True)
        if self.group is not None:
            dist.all_reduce(tokens, group=self.group)
        # only the last stage counts them: the others have zeros, and need the number too
        stages = self.ranks.group("pp") if self.ranks is not None else None
        if stages is not None:
            dist.all_reduce(tokens, group=stages)
        # a step without a token to learn from has no gradient, rather than NaN
        return 1.0 / tokens.clamp(min=1.0)


def _world(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group, or that of all ranks; None where a rank would be alone in it."""
    if not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    return group if group is not None and group.size() > 1 else None
