"""Gradients in contiguous buckets, summed over ranks while backward goes on."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streammega.errors import ConfigError
from streammega.errors.logs import get_logger
from streammega.gradients.buffers import (
    GradSlot,
    default_bucket_size,
    is_split,
    local_part,
    make_buckets,
)
from streammega.gradients.collectives import bucket_group, clip, inverse_of_tokens, total_norm
from streammega.gradients.reducer import GradReducer
from streammega.parallel import Ranks

log = get_logger(__name__)

STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Modules whose buffers change in every forward, apart on each rank."""


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

    All ranks begin with the parameters and buffers of the first; ConfigError says where their
    modules differ. Buffers are sent this once: what a forward changes in them (statistics of
    BatchNorm) stays each rank's own, unlike with torch's DDP. torch.nn.SyncBatchNorm makes them
    equal. Gradients are averaged over ranks as by torch's DDP; where that adds up micro-batches in
    the parameters' dtype, this does in `grad_dtype`.

    The words are those of Megatron's DistributedDataParallel: buckets hold a `main_grad` for each
    parameter, to which a hook adds every micro-batch; in the last, outside `no_sync`, a full bucket is
    scaled and its all-reduce starts; `finish_grad_sync` waits for all. What differs, and why:

    - Reduced gradients are put into `param.grad`, for any optimizer of torch. Megatron's optimizers
      read `main_grad`, which parameters have here with `main_grad=True` only.
    - The first micro-batch overwrites a bucket, so there is no `zero_grad_buffer` in each step, but
      with `main_grad=True`, where kernels add to the bucket: there `zero_grad` clears it.
    - Buckets start in one order on every rank, whichever gradient is ready first (see
      `make_buckets`), so ranks may use different parameters. Megatron's wants a gradient of each.
    - Division by tokens and the sum of tied embeddings, in Megatron a part of
      `finalize_model_grads`, belong to `finish_grad_sync`, which also checks gradients in one go.
    - There is no distributed optimizer, and no reduce-scatter: torch's fully_shard is for that.

    The buckets have a process group of their own of the same ranks, so they meet no other collective
    of the program. Wrappers of one process group reduce one after the other; a second one that begins
    meanwhile raises GradientError.

    Run every backward of a step but the last within `no_sync`: one that adds to a gradient whose
    reduction has begun raises GradientError. A parameter that no rank used, or that was frozen
    meanwhile, has no gradient after the reduction, so optimizers leave it alone. `zero_grad` of this
    module drops what an abandoned backward has added. Averaged gradients that are not zeroed add up
    over steps as with torch's DDP; sums (`average=False`, `num_tokens`, `tied`) need a `zero_grad`
    every step.

    Args:
        module: all that one backward goes through. Its parameters may be DTensors of one
            tensor-parallel group, or with `ranks` those of Megatron's layers; every rank works on its
            own part. Several modules, such as the virtual pipeline stages of this rank, are one
            nn.ModuleList, and are called directly.
        group: the ranks that hold copies; None: all.
        ranks: instead of `group`, this rank of a layout: copies are its dp-cp group, and norms are
            taken over all groups.
        bucket_size: elements; None: max(40M, 1M * ranks).
        grad_dtype: of the buckets; None: that of their parameters, but float32 at least.
        average: divide by the number of ranks; else gradients are summed, to be normalised by
            `finish_grad_sync(num_tokens)`.
        overlap: start a bucket when it is full, else all at the end.
        tied: names of parameters that the first and last pipeline stage share, in the same order on
            both: summed over `ranks`' embedding group.
        check_gradients: `finish_grad_sync` raises GradientError on every rank if a gradient of some
            rank is not finite, and names that rank and its bucket. Set it to False with
            torch.amp.GradScaler, which skips such steps by itself, and in a CUDA graph, where every
            rank must use all parameters.
        main_grad: every parameter has `main_grad`, its view of the bucket, and
            `grad_added_to_main_grad`, which kernels set that add to it themselves (Transformer
            Engine's fuse_wgrad_accumulation). `zero_grad` begins every step then. Off by default,
            as such parameters keep their bucket alive.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        ranks: Ranks | None = None,
        bucket_size: int | None = None,
        grad_dtype: torch.dtype | None = None,
        average: bool = True,
        overlap: bool = True,
        tied: Sequence[str] = (),
        check_gradients: bool = True,
        main_grad: bool = False,
    ) -> None:
        super().__init__()
        if ranks is not None and group is not None:
            raise ConfigError("give either group or ranks, not both")
        if bucket_size is not None and bucket_size < 1:
            raise ConfigError(f"bucket_size is {bucket_size}; it counts elements, at least 1")
        self.module = module
        self.ranks = ranks
        trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
        self.device = next(trained, torch.empty(0)).device
        copies = ranks.group("dp-cp") if ranks else _world(group)
        self.group = None if copies is None else bucket_group(copies, self.device)
        self.size = self.group.size() if self.group is not None else 1
        self.average = average
        # the ranks over which parameters are divided, and those that have one copy of the model together
        tp_group = ranks.group("tp") if ranks else tensor_parallel_group(module)
        self._parts_group = ranks.group("tp-pp") if ranks else tp_group
        self._is_first_part = tp_group is None or tp_group.rank() == 0
        self._check_group(tp_group)
        self._check_modules()
        tied_group = ranks.group("embedding") if ranks and tied else None
        if isinstance(tied, Set):
            raise ConfigError(
                "tied is a set, which has no order: give a list, in the same order on both stages"
            )
        # other stages than the first and the last have no group, and none of these parameters
        self._tied = tuple(tied) if tied_group is not None else ()
        names = {name for name, _ in module.named_parameters()}
        for name in self._tied:
            if name not in names:
                raise ConfigError(
                    f"tied names {name!r}, and the module has no such parameter: its copies would not be "
                    f"summed; give the names that the module's named_parameters have on this stage"
                )
        buckets = make_buckets(
            module, bucket_size or default_bucket_size(self.size), grad_dtype, tied=self._tied
        )
        self._frozen = {
            name: parameter
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad
        }
        # else ranks that were seeded apart would stay apart
        self._broadcast_params()
        self.reducer = GradReducer(
            buckets,
            group=self.group,
            tied_group=tied_group,
            parts_group=self._parts_group,
            checks=check_gradients,
            gradient_scaling_factor=1.0 / self.size if average else 1.0,
            overlap=overlap,
            main_grad=main_grad,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward within it only accumulates: no bucket starts. Run all backward passes of a step but
        the last within it.
        """
        before = self.reducer.is_last_micro_batch
        self.reducer.is_last_micro_batch = False
        try:
            yield
        finally:
            self.reducer.is_last_micro_batch = before

    @contextlib.contextmanager
    def expect(self, micro_batches: int) -> Iterator[None]:
        """Within it collectives start with the last of so many backward passes: for pipeline
        schedules, which go forward and backward in one call, so that no_sync cannot be around some.
        """
        self.reducer.micro_batches = micro_batches
        try:
            yield
        finally:
            self.reducer.micro_batches = 0

    @torch.no_grad()
    def finish_grad_sync(self, num_tokens: Tensor | None = None) -> None:
        """Start the buckets that are left, wait until all are reduced, and put gradients where
        optimizers look: into `param.grad`. Call it after the last backward of a step, on all ranks.

        Raises GradientError on every rank if a gradient of some rank is not finite.

        Args:
            num_tokens: unmasked tokens of this step on this rank (0 on all but the last pipeline
                stage): gradients are divided by their number over all data- and context-parallel
                ranks, at least 1. For losses that are summed over tokens, with average=False.
        """
        if num_tokens is not None and self.average:
            raise ConfigError(
                "finish_grad_sync(num_tokens) divides sums of gradients by tokens, and these are "
                "averages over ranks: make BucketedDataParallel with average=False"
            )
        self._check_frozen()
        self.reducer.start_rest()
        factor = None
        if num_tokens is not None:
            # After the buckets: how many of those started in backward differs from rank to rank.
            # Only the last stage counts tokens: the others have zeros, and need the number too.
            stages = self.ranks.group("pp") if self.ranks is not None else None
            factor = inverse_of_tokens(num_tokens, [self.group, stages], self.device)
        self.reducer.finish_grad_sync(factor)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients to a global norm, over all ranks of the layout; returns the norm before."""
        grads: list[Tensor] = []
        counted: list[Tensor] = []
        for slot in self.reducer.slots:
            if slot.parameter.grad is not None:
                grad = local_part(slot.parameter.grad)
                grads.append(grad)
                # what tensor-parallel ranks and stages have copies of would count twice
                if self._is_first_copy(slot):
                    counted.append(grad)
        norm = total_norm(counted, [self._parts_group], self.device)
        clip(grads, norm, max_norm)
        return norm

    def _is_first_copy(self, slot: GradSlot) -> bool:
        """Whether no other tensor or pipeline rank counts the parameter in a norm."""
        # of a tied parameter the first stage counts its copy, and the last does not
        if self.ranks and slot.name in self._tied and not self.ranks.is_first_stage:
            return False
        return self._is_first_part or is_split(slot.parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those that micro-batches of an unfinished step have added.

        Raises GradientError where their reduction has begun: other ranks wait for it in
        `finish_grad_sync`.
        """
        self.reducer.reset()
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
    def _broadcast_params(self) -> None:
        """Begin with the parameters and buffers of the first rank, as torch's DDP does."""
        if self.group is None:
            return
        source = dist.get_process_group_ranks(self.group)[0]
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            part = local_part(tensor)
            # Collectives send memory in its order, which need not be that of the first rank.
            sent = part.contiguous()
            dist.broadcast(sent, source, group=self.group)
            if sent is not part:
                part.copy_(sent)
        for name, submodule in self.module.named_modules():
            if isinstance(submodule, STATISTICS) and submodule.track_running_stats:
                log.warning(
                    "each rank keeps its own %s.running_mean and running_var, which are sent to "
                    "no other: torch.nn.SyncBatchNorm.convert_sync_batchnorm makes them equal",
                    name,
                )
                break

    def _check_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """Raise ConfigError if gradients would be summed over ranks that have different parts of
        parameters.
        """
        if tp_group is None or not any(map(is_split, self.module.parameters())):
            return
        ranks_of_parts = set(dist.get_process_group_ranks(tp_group))
        both = ranks_of_parts.intersection(self.ranks_of_copies)
        if len(both) > 1:
            raise ConfigError(
                f"the module's DTensors are split over ranks {sorted(both)}, and gradients would "
                f"be summed over the same ranks: give group= the ranks that hold copies, "
                f"or ranks=Ranks(layout)"
            )

    def _check_modules(self) -> None:
        """Raise ConfigError on every rank where their modules differ: collectives would else abort,
        or add up gradients of different parameters.
        """
        if self.group is None:
            return
        parts = _describe(self.module)
        digest = hashlib.sha256("\n".join(parts).encode()).digest()
        digest_of_rank = torch.tensor(list(digest), dtype=torch.uint8, device=self.device)
        digests = [torch.empty_like(digest_of_rank) for _ in range(self.size)]
        dist.all_gather(digests, digest_of_rank, group=self.group)
        if bool((torch.stack(digests) == digest_of_rank).all()):
            return
        parts_of_ranks: list[list[str]] = [[] for _ in range(self.size)]
        dist.all_gather_object(parts_of_ranks, parts, group=self.group)
        first, *others = self.ranks_of_copies
        for rank, theirs in zip(others, parts_of_ranks[1:], strict=True):
            for one, other in itertools.zip_longest(parts_of_ranks[0], theirs, fillvalue="nothing"):
                if one != other:
                    raise ConfigError(
                        f"the ranks wrap different modules: rank {first} has {one}; "
                        f"rank {rank} has {other}; make the same parameters and buffers, in the "
                        f"same order, on every rank"
                    )

    def _check_frozen(self) -> None:
        """Raise ConfigError for a parameter that was frozen when it was wrapped, and is trained."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name} was frozen when it was wrapped and is trained now; wrap the module "
                    f"after unfreezing it"
                )

    @property
    def ranks_of_copies(self) -> list[int]:
        """Global ranks that hold copies."""
        if self.group is None:
            return [dist.get_rank() if dist.is_initialized() else 0]
        return dist.get_process_group_ranks(self.group)


def _describe(module: nn.Module) -> list[str]:
    """What must be the same on all ranks of a module, a line for each parameter and buffer."""
    parts: list[str] = []
    for name, parameter in module.named_parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        parts.append(f"{name}: {_form(parameter)}, {kind}")
    for name, buffer in module.named_buffers():
        parts.append(f"buffer {name}: {_form(buffer)}")
    return parts


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(local_part(tensor).shape)}"


def tensor_parallel_group(module: nn.Module) -> dist.ProcessGroup | None:
    """The group over which the DTensors of a module are divided; None where it has none.

    Raises ConfigError for DTensors of several meshes or of several dimensions: only a layout says
    which ranks count what.
    """
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    if not meshes:
        return None
    mesh = meshes.pop()
    if meshes or mesh.ndim > 1:
        raise ConfigError(
            "the module's DTensors are on several meshes, or on one of several dimensions, "
            "so norms over them cannot be computed; give ranks=Ranks(layout) instead of group, "
            "or split the parameters over one mesh of one dimension"
        )
    return mesh.get_group()


def _world(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group, or that of all ranks; None where a rank would be alone in it."""
    if not dist.is_initialized():
        return None
    group = group or dist.group.WORLD
    return group if group is not None and group.size() > 1 else None
