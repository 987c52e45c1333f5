"""The distributed optimizer: each rank steps its part of every bucket, in fp32, and the parameters
are gathered after it.

reduced part of a bucket ─► any torch optimizer on fp32 main parts ─► the parameters' dtype ─►
gathered during the next forward
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streammega.errors import ConfigError
from streammega.gradients.buffers import GradBucket, GradBuffer, GradSlot, address_of
from streammega.gradients.collectives import clip, total_norm
from streammega.gradients.data_parallel import BucketedDataParallel
from streammega.gradients.gatherings import Gathering, wait_before_reading, wait_before_use
from streammega.gradients.optimizer_state import load_state_dict_into, plain_name, state_dict_of
from streammega.gradients.pieces import Piece


@dataclass
class _Watched:
    """A parameter that lies in a bucket, as it was when the fp32 parameters last followed it."""

    slot: GradSlot
    gathering: Gathering
    address: int
    """Of its first element: another one means that it has left the bucket."""
    version: int
    """torch's count of the operations that wrote to it."""


class ShardedOptimizer:
    """Do not train a loop of your own with it: use torch.distributed.fsdp.fully_shard, which will
    take its place (docs/training.md says what goes wrong, without an error).

    Any elementwise torch optimizer, its state and fp32 main parameters divided among the ranks
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

    What is loaded into the model's parameters counts from the next step on; so do in-place
    operations on them, but not those on their `data`.

    `state_dict` and `load_state_dict` are for torch.distributed.checkpoint, and for any number of
    ranks::

        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    Args:
        models: BucketedDataParallel with sharded=True; several for virtual pipeline stages.
        optimizer: the class of the inner optimizer; `defaults` are its settings.
        settings_of: (name, parameter) -> settings of its own, for instance {"weight_decay": 0.0};
            parameters of equal settings form a group.
        overlap: gather during the next forward; else before `step` returns.

    `optimizer.inner` is the torch optimizer: learning-rate schedulers take it. Optimizers that take
    norms or look at whole matrices (Adafactor, Muon, Shampoo, LAMB) would see pieces of them, and
    are not for this.
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
                "ShardedOptimizer steps parts of buckets: make BucketedDataParallel with "
                "sharded=True"
            )
        self._gatherings: list[Gathering] = []
        self._gatherings_of_models: list[list[Gathering]] = []
        self._watched: list[_Watched] = []
        self.pieces: list[Piece] = []
        self.slots: list[tuple[BucketedDataParallel, GradSlot]] = []
        for model in self.models:
            self._add_model(model)
        self.group_of: dict[int, int] = {}
        """By the id of a slot, which parameter group it belongs to."""
        groups = self._make_groups(settings_of)
        self.make_inner = functools.partial(optimizer, **defaults)
        self.inner = self.make_inner(groups)
        self.offered: dict[int, dict[str, Any]] = {}
        """By the id of a piece, memory for what it has no state of yet, which a checkpoint is
        filling.
        """
        self._overlap = overlap
        self._wait_where_parameters_are_used()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the inner optimizer: learning rates are set here."""
        return self.inner.param_groups

    @property
    def names_of_groups(self) -> list[list[str]]:
        """The parameters of each group, on all ranks."""
        names: list[list[str]] = [[] for _ in self.inner.param_groups]
        for _, slot in self.slots:
            group = self.group_of[id(slot)]
            names[group].append(plain_name(slot.name))
        return names

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip gradients to a global norm over all ranks of the layout; returns the norm before."""
        model = self.models[0]
        # a rank's pieces are a part of its model's, which is a part of the whole one
        groups = [model.group, model.model_group]
        counted = [piece.grad for piece in self.pieces if piece.counts]
        norm = total_norm(counted, groups, model.device)
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
            gathering.round_main()
        self.gather()
        if not self._overlap:
            self.finish_param_sync()

    def gather(self) -> None:
        """Begin to gather the parameters from their owners."""
        for model, gatherings in zip(self.models, self._gatherings_of_models, strict=True):
            if model.group is None:
                continue
            # Buckets are laid out as backward goes: from the last, since the first layers are
            # needed first.
            for gathering in reversed(gatherings):
                gathering.start(model.group)

    def finish_param_sync(self) -> None:
        """Wait until all parameters are what the last step made them."""
        for gathering in self._gatherings:
            gathering.wait()

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
            gathering.widen_part()
        self._note_versions()

    @torch.no_grad()
    def publish_main(self) -> None:
        """Give the model the fp32 main parameters: after a checkpoint was loaded."""
        for gathering in self._gatherings:
            gathering.round_main()
        self.gather()
        self.finish_param_sync()
        self._note_versions()

    @torch.no_grad()
    def _take_written(self) -> None:
        """Take over what was written into parameters since the last step, where it is not the
        rounding of the main ones.
        """
        written: dict[int, Gathering] = {}
        for watched in self._watched:
            parameter = watched.slot.parameter
            if address_of(parameter) != watched.address:
                raise ConfigError(
                    f"{watched.slot.name} no longer lies in its bucket, so it would not be "
                    f"trained: it was replaced or converted (to(), load_state_dict(assign=True)) "
                    f"after it was wrapped; do that before"
                )
            if parameter._version != watched.version:
                written[id(watched.gathering)] = watched.gathering
        for gathering in written.values():
            gathering.widen_what_differs()
        if written:
            self._note_versions()

    def _note_versions(self) -> None:
        for watched in self._watched:
            watched.version = watched.slot.parameter._version

    def _add_model(self, model: BucketedDataParallel) -> None:
        """Take the buckets of a model, and this rank's piece of each of its parameters."""
        gatherings: list[Gathering] = []
        for buffer in model.buffers_of_grads:
            if buffer.grads.dtype != torch.float32:
                is_wider = buffer.grads.dtype.itemsize > torch.float32.itemsize
                raise ConfigError(
                    f"ShardedOptimizer steps in float32: gradients in {buffer.grads.dtype} are "
                    f"too {'wide' if is_wider else 'narrow'}"
                )
            for bucket in buffer.buckets:
                gatherings.append(self._add_bucket(model, buffer, bucket))
        self._gatherings += gatherings
        self._gatherings_of_models.append(gatherings)

    def _add_bucket(
        self, model: BucketedDataParallel, buffer: GradBuffer, bucket: GradBucket
    ) -> Gathering:
        assert buffer.params is not None
        # of the buffer's elements, as the slots below
        part_start, part_stop = bucket.place.shard(model.index, model.size)
        part = buffer.params[part_start:part_stop]
        is_wide = part.dtype == torch.float32
        main = part if is_wide else part.to(torch.float32)
        params = buffer.params[bucket.place.start : bucket.place.stop]
        gathering = Gathering(params, part, None if is_wide else main)
        for slot in bucket.slots:
            parameter = slot.parameter
            self.slots.append((model, slot))
            self._watched.append(
                _Watched(slot, gathering, address_of(parameter), parameter._version)
            )
            start = max(slot.slot.start, part_start)
            stop = min(slot.slot.stop, part_stop)
            if start >= stop:
                continue  # another rank's
            stepped = nn.Parameter(main[start - part_start : stop - part_start])
            piece = Piece(
                slot=slot,
                start=start - slot.slot.start,
                stop=stop - slot.slot.start,
                main=stepped,
                grad=buffer.grads[start:stop],
                counts=model.counts(slot),
            )
            self.pieces.append(piece)
        return gathering

    def _make_groups(
        self, settings_of: Callable[[str, nn.Parameter], Mapping[str, Any]] | None
    ) -> list[dict[str, Any]]:
        """Parameter groups for the inner optimizer, of this rank's pieces.

        The same on all ranks, also where one owns nothing of a group: schedulers know groups by
        their numbers.
        """
        groups: list[dict[str, Any]] = []
        group_of_settings: dict[tuple[tuple[str, Any], ...], int] = {}
        for _, slot in self.slots:
            settings = settings_of(slot.name, slot.parameter) if settings_of else {}
            # sorted: who gives the same settings in another order means the same group
            items = tuple(sorted(settings.items()))
            if items not in group_of_settings:
                group_of_settings[items] = len(groups)
                groups.append({"params": [], **dict(items)})
            self.group_of[id(slot)] = group_of_settings[items]
        for piece in self.pieces:
            group = self.group_of[id(piece.slot)]
            groups[group]["params"].append(piece.main)
        return groups

    def _wait_where_parameters_are_used(self) -> None:
        for model, gatherings in zip(self.models, self._gatherings_of_models, strict=True):
            wait_before_reading(model.module, reversed(gatherings))
        if not self._overlap:
            return
        gatherings_of: dict[nn.Parameter, list[Gathering]] = {}
        for watched in self._watched:
            gatherings_of.setdefault(watched.slot.parameter, []).append(watched.gathering)
        for model in self.models:
            wait_before_use(model.module, gatherings_of)
