"""The distributed optimizer: each rank steps its part of every bucket, in fp32, and the parameters
are gathered after it.

reduced part of a bucket ─► any torch optimizer on fp32 main parts ─► the parameters' dtype ─►
gathered during the next forward
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streammega.errors import ConfigError
from streammega.gradients.buffers import GradBuffer, GradSlot, address_of
from streammega.gradients.collectives import Work, clip, gather_shards, total_norm
from streammega.gradients.data_parallel import BucketedDataParallel
from streammega.gradients.optimizer_state import load_state_dict_into, plain_name, state_dict_of
from streammega.gradients.pieces import Piece


@dataclass
class _Watched:
    """A parameter that lies in a bucket, where it lay, and which version of it the fp32 parameters
    know.
    """

    slot: GradSlot
    gathering: _Gathering
    address: int
    version: int


@dataclass
class _Gathering:
    """One bucket of one buffer.

    `own`: this rank's part of the parameters; `main`: its fp32 copy; None: they are the same.
    """

    params: Tensor
    own: Tensor
    main: Tensor | None
    work: Work | None = None


class ShardedOptimizer:
    """Any elementwise torch optimizer, its state and fp32 main parameters divided among the ranks
    that hold copies::

        model = BucketedDataParallel(model, sharded=True)
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True)
        ...
        model.finish_grad_sync()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    After `step` the parameters are gathered while the next forward begins: a module waits for its
    own before it runs, and so does the model's `state_dict`. Code that uses a parameter in another
    way, or ends the process group, calls `finish_param_sync` first.

    What is written into the model's parameters (`load_state_dict`, in-place operations on them)
    counts from the next step on.

    `state_dict` and `load_state_dict` are for torch.distributed.checkpoint, and for any number of
    ranks::

        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    Args: models: BucketedDataParallel with sharded=True; several for virtual pipeline stages.
        optimizer: the class of the inner optimizer; `defaults` are its settings. settings_of:
        (name, parameter) -> settings of its own, for instance {"weight_decay": 0.0}; parameters of
        equal settings
            form a group.
        overlap: gather during the next forward; else before `step` returns.

    `optimizer.inner` is the torch optimizer: learning-rate schedulers take it. Optimizers that look
    at whole matrices (Muon, Shampoo, LAMB) would see pieces of them, and are not for this.
    """

    def __init__(
        self,
        models: BucketedDataParallel | Sequence[BucketedDataParallel],
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        settings_of: Callable[[str, nn.Parameter], Mapping[str, Any]] | None = None,
        overlap: bool = True,
        **defaults: Any,
    ) -> None:
        self.models = [models] if isinstance(models, BucketedDataParallel) else list(models)
        if any(not model.sharded for model in self.models):
            raise ConfigError(
                "ShardedOptimizer steps parts of buckets: make BucketedDataParallel with sharded=True"
            )
        self._gatherings: list[_Gathering] = []
        self._watched: list[_Watched] = []
        self.pieces: list[Piece] = []
        of_parameter: dict[nn.Parameter, list[_Gathering]] = {}
        for model in self.models:
            for buffer in model.buffers_of_grads:
                self._add_buffer(model, buffer, of_parameter)
        self.slots = [
            (model, slot)
            for model in self.models
            for buffer in model.buffers_of_grads
            for own in buffer.slots
            for slot in own
        ]
        settings = _groups([slot for _, slot in self.slots], settings_of)
        self.group_of = {
            slot: number for number, (_, slots) in enumerate(settings) for slot in slots
        }
        """By the id of a slot, which parameter group it belongs to."""
        groups: list[dict[str, Any]] = [{"params": [], **own} for own, _ in settings]
        for piece in self.pieces:
            groups[self.group_of[id(piece.slot)]]["params"].append(piece.main)
        self.make_inner = functools.partial(optimizer, **defaults)
        self.inner = self.make_inner(groups)
        self.offered: dict[int, dict[str, Any]] = {}
        """By the id of a piece, memory for what it has no state of yet, which a checkpoint is
        filling.
        """
        self._overlap = overlap
        for model in self.models:
            _wait_before_reading(model.module, list(self._of_model(model)))
        if overlap:
            for model in self.models:
                _wait_before_use(model.module, of_parameter)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the inner optimizer: learning rates are set here."""
        return self.inner.param_groups

    @property
    def names_of_groups(self) -> list[list[str]]:
        """The parameters of each group, on all ranks."""
        found: list[list[str]] = [[] for _ in self.inner.param_groups]
        for _, slot in self.slots:
            found[self.group_of[id(slot)]].append(plain_name(slot.name))
        return found

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients to a global norm over all ranks of the layout; returns the norm before."""
        model = self.models[0]
        groups = [model.group, model.model_group]
        norm = total_norm(
            [piece.grad for piece in self.pieces if piece.counts], groups, model.device
        )
        clip([piece.grad for piece in self.pieces], norm, max_norm)
        return norm

    def scale_grads(self, factor: Tensor | float) -> None:
        """Multiply this rank's gradients, for instance by the inverse of a loss scale."""
        if self.pieces:
            torch._foreach_mul_([piece.grad for piece in self.pieces], factor)

    @torch.no_grad()
    def step(self) -> None:
        """Step this rank's parts, and begin to gather the parameters. Call `finish_grad_sync` of
        the models before it.

        Raises ConfigError where a parameter was moved out of its bucket.
        """
        self.finish_param_sync()
        self._take_written()
        for piece in self.pieces:
            piece.main.grad = None if piece.slot.unused else piece.grad
        self.offered.clear()
        self.inner.step()
        for gathering in self._gatherings:
            if gathering.main is not None:
                gathering.own.copy_(gathering.main)
        self.gather()
        if not self._overlap:
            self.finish_param_sync()

    def gather(self) -> None:
        """Begin to gather the parameters from their owners."""
        for model in self.models:
            if model.group is not None:
                for gathering in self._of_model(model):
                    gathering.work = gather_shards(gathering.params, model.group)

    def finish_param_sync(self) -> None:
        """Wait until all parameters are what the last step made them."""
        for gathering in self._gatherings:
            _wait(gathering)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what an unfinished step has added.

        After a step nothing is to be done: the first micro-batch overwrites it.
        """
        for model in self.models:
            model.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """This rank's parts of the state, in memory of the optimizer, in the form and under the
        names of torch's get_optimizer_state_dict: `state` by the names of parameters, and
        `param_groups`.

        torch.distributed.checkpoint saves it, and loads it with any number of ranks, also into a
        torch optimizer on every rank or from one; torch.save keeps the parts of one rank. What was
        never stepped has a step of 0.
        """
        self.finish_param_sync()
        self._take_written()
        return state_dict_of(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that torch.distributed.checkpoint has filled, or of as many ranks, or of
        whole tensors.

        Called on all ranks together: parameters that are narrower than fp32 are made anew of their
        main ones. Where the state has none of these, they are taken from the model. Raises
        StateError for the state of another model, or of other ranks.
        """
        self.finish_param_sync()
        load_state_dict_into(self, state)
        self._take_written()
        self.publish_main()

    @torch.no_grad()
    def reload_main(self) -> None:
        """Take the fp32 main parameters from the model's: after a checkpoint without them was
        loaded.
        """
        for gathering in self._gatherings:
            if gathering.main is not None:
                gathering.main.copy_(gathering.own)
        self._note_versions()

    @torch.no_grad()
    def publish_main(self) -> None:
        """Give the model the fp32 main parameters: after a checkpoint was loaded."""
        for gathering in self._gatherings:
            if gathering.main is not None:
                gathering.own.copy_(gathering.main)
        self.gather()
        self.finish_param_sync()
        self._note_versions()

    @torch.no_grad()
    def _take_written(self) -> None:
        """Take over what was written into parameters since the last step, where it is not the
        rounding of the main ones.
        """
        written: dict[int, _Gathering] = {}
        for watched in self._watched:
            parameter = watched.slot.parameter
            if address_of(parameter) != watched.address:
                raise ConfigError(
                    f"{watched.slot.name} no longer lies in its bucket, so it would not be trained: it was replaced or converted "
                    f"(to(), load_state_dict(assign=True)) after it was wrapped; do that before"
                )
            if parameter._version != watched.version:
                written[id(watched.gathering)] = watched.gathering
        for gathering in written.values():
            if gathering.main is not None:
                same = gathering.own == gathering.main.to(gathering.own.dtype)
                gathering.main.copy_(
                    torch.where(same, gathering.main, gathering.own.to(torch.float32))
                )
        if written:
            self._note_versions()

    def _note_versions(self) -> None:
        for watched in self._watched:
            watched.version = watched.slot.parameter._version

    def _add_buffer(
        self,
        model: BucketedDataParallel,
        buffer: GradBuffer,
        of_parameter: dict[Any, list[_Gathering]],
    ) -> None:
        assert buffer.params is not None
        if buffer.grads.dtype != torch.float32:
            raise ConfigError(
                f"ShardedOptimizer steps in float32: grad_dtype {buffer.grads.dtype} is too narrow"
            )
        for bucket, slots in zip(buffer.buckets, buffer.slots, strict=True):
            low, high = bucket.shard(model.index, model.size)
            own = buffer.params[low:high]
            wide = own.dtype == torch.float32
            main = own if wide else own.to(torch.float32)
            gathering = _Gathering(
                buffer.params[bucket.start : bucket.stop], own, None if wide else main
            )
            self._gatherings.append(gathering)
            for slot in slots:
                of_parameter.setdefault(slot.parameter, []).append(gathering)
                parameter = slot.parameter
                self._watched.append(
                    _Watched(slot, gathering, address_of(parameter), parameter._version)
                )
                start = max(slot.slot.start, low)
                stop = min(slot.slot.stop, high)
                if start < stop:
                    base = slot.slot.start
                    stepped = nn.Parameter(main[start - low : stop - low])
                    grad = buffer.grads[start:stop]
                    self.pieces.append(
                        Piece(slot, start - base, stop - base, stepped, grad, model.counts(slot))
                    )

    def _of_model(self, model: BucketedDataParallel) -> Iterator[_Gathering]:
        first = sum(
            len(buffer.buckets)
            for other in self.models[: self.models.index(model)]
            for buffer in other.buffers_of_grads
        )
        count = sum(len(buffer.buckets) for buffer in model.buffers_of_grads)
        # first layers first: they are needed first
        return iter(self._gatherings[first : first + count][::-1])


class LossScale:
    """The factor that keeps fp16 gradients from vanishing: doubled after `interval` good steps,
    halved after a bad one.

    Multiply the loss by `value`; after the reduction `unscale(optimizer)` says whether the step is
    good, on all ranks alike.
    """

    def __init__(self, value: float = 2.0**16, interval: int = 1000, least: float = 1.0) -> None:
        self.value = value
        self.interval = interval
        self.least = least
        self.good = 0

    def unscale(self, optimizer: ShardedOptimizer, divided_by: float = 1.0) -> bool:
        """Divide the gradients by the scale; False, and a smaller scale, where they are not finite
        on some rank.

        divided_by: what the loss was divided by besides, so that a sum over many tokens keeps
        within fp16.
        """
        grads = [piece.grad for piece in optimizer.pieces]
        device = optimizer.models[0].device
        bad = torch.zeros((), device=device)
        if grads:
            norms = torch.stack([torch.linalg.vector_norm(grad) for grad in grads])
            bad = (~norms.isfinite()).any().float()
        if dist.is_initialized():
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad:
            self.value = max(self.value / 2, self.least)
            self.good = 0
            return False
        optimizer.scale_grads(divided_by / self.value)
        self.good += 1
        if self.good == self.interval:
            self.value = self.value * 2
            self.good = 0
        return True

    def state_dict(self) -> dict[str, float]:
        """What a resume needs."""
        return {"value": self.value, "good": self.good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with a saved scale."""
        self.value, self.good = float(state["value"]), int(state["good"])


def _groups(
    slots: Sequence[GradSlot], settings_of: Callable[[str, nn.Parameter], Mapping[str, Any]] | None
) -> list[tuple[dict[str, Any], list[int]]]:
    """(settings, ids of slots) of each parameter group, the same on all ranks: some of which a rank
    may own nothing.
    """
    found: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for slot in slots:
        settings = settings_of(slot.name, slot.parameter) if settings_of else {}
        found.setdefault(tuple(sorted(settings.items())), []).append(id(slot))
    return [(dict(settings), ids) for settings, ids in found.items()]


def _wait(gathering: _Gathering) -> None:
    work = gathering.work
    gathering.work = None
    if work is not None:
        work.wait()


def _wait_before_use(module: nn.Module, of_parameter: Mapping[Any, Sequence[_Gathering]]) -> None:
    """Every submodule with parameters of its own waits for them before its forward."""
    for submodule in module.modules():
        found = {
            id(g): g
            for parameter in submodule.parameters(recurse=False)
            for g in of_parameter.get(parameter, ())
        }
        if found:
            submodule.register_forward_pre_hook(_waiter(list(found.values())))


def _wait_before_reading(module: nn.Module, gatherings: list[_Gathering]) -> None:
    """The module's state_dict and load_state_dict wait for all of its parameters."""
    wait = _waiter(gatherings)
    module.register_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]


def _waiter(gatherings: list[_Gathering]) -> Callable[..., None]:
    def wait(*_: Any) -> None:
        for gathering in gatherings:
            if gathering.work is not None:
                _wait(gathering)

    return wait
