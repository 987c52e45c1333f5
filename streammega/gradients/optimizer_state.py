"""The state of a ShardedOptimizer under the names of torch's own optimizer state dicts, in parts of
whole tensors.

    state.<parameter>.<state>      what the inner optimizer keeps (exp_avg, step, ...); `main`: the fp32 copy, if the parameter is
                                   narrower
    param_groups                   settings; `params`: names of parameters

That is the form of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, so what one
writes the other reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streammega.errors import ConfigError, StateError
from streammega.gradients.boxes import Box, BoxedTensor, boxes_of_range
from streammega.gradients.buffers import GradSlot
from streammega.gradients.pieces import Piece, PiecewiseOptimizer

MAIN = "main"
STAY = ("params", "foreach", "fused", "capturable", "differentiable")
"""Settings of a parameter group that say how this process computes, and not what: a checkpoint does
not change them.
"""


@dataclass
class _Entry:
    """What this rank holds of one parameter.

    `values`: of its piece, where new ones are made for what is not there yet.
    """

    name: str
    slot: GradSlot
    piece: Piece | None
    template: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    saves: bool = True

    @property
    def is_narrow(self) -> bool:
        return self.slot.parameter.dtype != torch.float32

    def boxed(self, state: str) -> BoxedTensor:
        """A state in boxes of the whole parameter; those of `main` too."""
        whole = self.slot.parameter
        template = torch.empty(1) if state == MAIN else self.template[state]
        scalar = template.dim() == 0
        shape = torch.Size() if scalar else whole.shape
        if self.piece is None:
            return BoxedTensor(shape, [], template, self.saves)
        value: Tensor = self.piece.main.detach() if state == MAIN else self.values[state]
        boxes: list[Box] = (
            [((), value)]
            if scalar
            else boxes_of_range(whole, self.piece.start, self.piece.stop, value)
        )
        return BoxedTensor(shape, boxes, value, self.saves)


def state_dict_of(optimizer: PiecewiseOptimizer) -> dict[str, Any]:
    """The state of this rank's parts, in memory of the optimizer: {"state": ..., "param_groups":
    ...}.
    """
    state: dict[str, dict[str, Any]] = {}
    for entry in _entries(optimizer):
        own: dict[str, Any] = {}
        for name, value in entry.template.items():
            if isinstance(value, Tensor):
                own[name] = entry.boxed(name)
            elif entry.piece is not None:
                own[name] = entry.values[name]
        if entry.is_narrow:
            own[MAIN] = entry.boxed(MAIN)
        state[entry.name] = own
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        | {"params": sorted(names)}
        for group, names in zip(
            optimizer.inner.param_groups, optimizer.names_of_groups, strict=True
        )
    ]
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def load_state_dict_into(optimizer: PiecewiseOptimizer, state: Mapping[str, Any]) -> None:
    """Take a state: one that `state_dict_of` made and a checkpoint has filled, of as many ranks, or
    of whole tensors.
    """
    for entry in _entries(optimizer):
        given = state["state"].get(entry.name)
        if given is None:
            raise StateError(
                f"the optimizer state has no parameter {entry.name}: it is another model's"
            )
        if entry.piece is not None:
            _load_entry(optimizer, entry, entry.piece, given)
    optimizer.offered.clear()
    for group, names in zip(optimizer.inner.param_groups, optimizer.names_of_groups, strict=True):
        _load_settings(group, names, state["param_groups"])


def _load_entry(
    optimizer: PiecewiseOptimizer, entry: _Entry, piece: Piece, given: Mapping[str, Any]
) -> None:
    for name, value in entry.template.items():
        if name not in given:
            raise StateError(
                f"the optimizer state of {entry.name} has no {name}: it is another optimizer's"
            )
        if isinstance(value, Tensor):
            _fill(f"{entry.name}.{name}", entry.boxed(name), given[name])
        else:
            entry.values[name] = type(value)(given[name])
    if entry.is_narrow and MAIN in given:
        _fill(f"{entry.name}.{MAIN}", entry.boxed(MAIN), given[MAIN])
    if is_fresh(entry.values):
        _begin_anew(optimizer, entry, piece)
    else:
        optimizer.inner.state[piece.main] = entry.values


def is_fresh(values: Mapping[str, Any]) -> bool:
    """Whether a state is that of a parameter that was never stepped: the optimizer makes it anew,
    as it makes its first.
    """
    return "step" in values and float(values["step"]) == 0


def _begin_anew(optimizer: PiecewiseOptimizer, entry: _Entry, piece: Piece) -> None:
    """Drop the state of a piece; what an optimizer makes when it is built, as Adagrad did up to
    torch 2.12, is made again.
    """
    state = optimizer.inner.state
    state.pop(piece.main, None)
    group = optimizer.inner.param_groups[optimizer.group_of[id(entry.slot)]]
    settings = {name: value for name, value in group.items() if name != "params"}
    built = optimizer.make_inner([{"params": [piece.main], **settings}])
    if piece.main in built.state:
        state[piece.main] = built.state[piece.main]


def _entries(optimizer: PiecewiseOptimizer) -> list[_Entry]:
    """Of all parameters, the same names on all ranks."""
    inner = optimizer.inner
    templates = [_template(optimizer, group) for group in inner.param_groups]
    pieces = {id(piece.slot): piece for piece in optimizer.pieces}
    entries: dict[str, _Entry] = {}
    for model, slot in optimizer.slots:
        name = plain_name(slot.name)
        if name in entries:
            raise ConfigError(
                f"two of the models have a parameter {name}: give their modules names of their own"
            )
        piece = pieces.get(id(slot))
        template = templates[optimizer.group_of[id(slot)]]
        entry = _Entry(name, slot, piece, template, saves=model.is_first_copy(slot))
        if piece is not None:
            held = inner.state.get(piece.main)
            entry.values = (
                held
                if held
                else optimizer.offered.setdefault(id(piece), _zeros(template, piece.main))
            )
        entries[name] = entry
    return list(entries.values())


def plain_name(name: str) -> str:
    """The name of a parameter in the bare module: torch.compile puts one of its own before it."""
    return name.replace("_orig_mod.", "")


def _template(optimizer: PiecewiseOptimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What the inner optimizer keeps of a parameter of a group after a step, shown by one of two
    elements.
    """
    device = optimizer.models[0].device
    probe = nn.Parameter(torch.zeros(2, device=device))
    probe.grad = torch.zeros_like(probe)
    settings = {name: value for name, value in group.items() if name != "params"}
    shown = optimizer.make_inner([{"params": [probe], **settings}])
    shown.step()
    template = {name: value for name, value in shown.state[probe].items() if value is not None}
    for name, value in template.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != probe.shape:
            raise ConfigError(
                f"the optimizer's {name} is no value for each element of a parameter, so it has no parts to save"
            )
    return template


def _zeros(template: Mapping[str, Any], main: Tensor) -> dict[str, Any]:
    """Memory for a state that is not there yet."""
    made: dict[str, Any] = {}
    for name, value in template.items():
        if not isinstance(value, Tensor):
            made[name] = type(value)()
        elif value.dim():
            made[name] = torch.zeros_like(main, dtype=value.dtype, requires_grad=False)
        else:
            made[name] = torch.zeros_like(value)
    return made


def _fill(name: str, own: BoxedTensor, given: Any) -> None:
    """Copy a state that lies elsewhere into this rank's boxes."""
    if tuple(given.shape) != tuple(own.shape):
        raise StateError(
            f"{name} is {list(given.shape)} in the optimizer state, {list(own.shape)} here: it is another model's"
        )
    theirs = (
        {(offsets, box.shape): box for offsets, box in given.boxes}
        if isinstance(given, BoxedTensor)
        else None
    )
    for offsets, box in own.boxes:
        if theirs is None:
            source = given[
                tuple(
                    slice(first, first + size)
                    for first, size in zip(offsets, box.shape, strict=True)
                )
            ]
        elif (offsets, box.shape) in theirs:
            source = theirs[offsets, box.shape]
        else:
            raise StateError(
                f"{name} was cut for other ranks: save and load it by torch.distributed.checkpoint, for any number"
            )
        if source.data_ptr() != box.data_ptr():
            box.copy_(source)


def _load_settings(
    group: dict[str, Any], names: Sequence[str], given: Sequence[Mapping[str, Any]]
) -> None:
    """The settings of a parameter group from those of the same parameters."""
    found = next((other for other in given if set(other["params"]) & set(names)), None)
    if found is None:
        raise StateError(
            f"the optimizer state has no settings for {sorted(names)[0]}: it is another model's"
        )
    for name, value in found.items():
        if name in STAY:
            continue
        held = group.get(name)
        if isinstance(held, Tensor):
            held.fill_(float(value))
        else:
            group[name] = float(value) if isinstance(value, Tensor) else value
