"""The state of a ShardedOptimizer under the names of torch's own optimizer state dicts, in parts of
whole tensors.

    state.<parameter>.<state>   what the inner optimizer keeps (exp_avg, step, ...); `main`: the
                                fp32 copy, if the parameter is narrower
    param_groups                settings; `params`: names of parameters

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
    """What this rank holds of one parameter."""

    name: str
    slot: GradSlot
    piece: Piece | None
    """What this rank steps of it; None: nothing."""
    template: Mapping[str, Any]
    """What the inner optimizer keeps, as it is for some parameter."""
    values: dict[str, Any] = field(default_factory=dict)
    """What it keeps of the piece; where that is not there yet, memory for it."""
    saves: bool = True
    """Whether this rank writes it; False where another has the same."""

    @property
    def is_narrow(self) -> bool:
        return self.slot.parameter.dtype != torch.float32

    def boxed(self, state: str) -> BoxedTensor:
        """A state in boxes of the whole parameter; those of `main` too."""
        whole = self.slot.parameter
        template = torch.empty(1) if state == MAIN else self.template[state]
        is_scalar = template.dim() == 0
        shape = torch.Size() if is_scalar else whole.shape
        piece = self.piece
        if piece is None:
            return BoxedTensor(shape, [], template, self.saves)
        value: Tensor = piece.main.detach() if state == MAIN else self.values[state]
        boxes: list[Box] = [((), value)]
        if not is_scalar:
            boxes = boxes_of_range(whole, piece.start, piece.stop, value)
        return BoxedTensor(shape, boxes, value, self.saves)


def state_dict_of(optimizer: PiecewiseOptimizer) -> dict[str, Any]:
    """The state of this rank's parts, in memory of the optimizer: {"state": ..., "param_groups":
    ...}.
    """
    state = {entry.name: _state_of(entry) for entry in _entries(optimizer)}
    groups: list[dict[str, Any]] = []
    for group, names in zip(optimizer.inner.param_groups, optimizer.names_of_groups, strict=True):
        # sorted: the same on all ranks, and in every layout of the models
        groups.append(_settings(group) | {"params": sorted(names)})
    return {"state": state, "param_groups": groups}


def _state_of(entry: _Entry) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in entry.template.items():
        if isinstance(value, Tensor):
            state[name] = entry.boxed(name)
        elif entry.piece is not None:
            state[name] = entry.values[name]
    if entry.is_narrow:
        state[MAIN] = entry.boxed(MAIN)
    return state


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a parameter group, what is said of its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


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
    inner = optimizer.inner
    inner.state.pop(piece.main, None)
    group_number = optimizer.group_of[id(entry.slot)]
    settings = _settings(inner.param_groups[group_number])
    built = optimizer.make_inner([{"params": [piece.main], **settings}])
    state_when_built = built.state.get(piece.main)
    if state_when_built is not None:
        inner.state[piece.main] = state_when_built


def _entries(optimizer: PiecewiseOptimizer) -> list[_Entry]:
    """Of all parameters, the same names on all ranks."""
    templates = [_template(optimizer, group) for group in optimizer.inner.param_groups]
    piece_of_slot = {id(piece.slot): piece for piece in optimizer.pieces}
    entries: dict[str, _Entry] = {}
    for model, slot in optimizer.slots:
        name = plain_name(slot.name)
        if name in entries:
            raise ConfigError(
                f"two of the models have a parameter {name}: give their modules names of their own"
            )
        piece = piece_of_slot.get(id(slot))
        template = templates[optimizer.group_of[id(slot)]]
        entry = _Entry(name, slot, piece, template, saves=model.is_first_copy(slot))
        if piece is not None:
            entry.values = _values_of(optimizer, piece, template)
        entries[name] = entry
    return list(entries.values())


def _values_of(
    optimizer: PiecewiseOptimizer, piece: Piece, template: Mapping[str, Any]
) -> dict[str, Any]:
    """What the inner optimizer keeps of a piece; where it was never stepped, memory for it.

    That memory stays the same until the next step: a checkpoint fills it after `state_dict` gave
    it, and `load_state_dict` takes it from there.
    """
    values: dict[str, Any] | None = optimizer.inner.state.get(piece.main)
    if values:
        return values
    return optimizer.offered.setdefault(id(piece), _zeros(template, piece.main))


def plain_name(name: str) -> str:
    """The name of a parameter in the bare module: torch.compile puts one of its own before it."""
    return name.replace("_orig_mod.", "")


def _template(optimizer: PiecewiseOptimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """What the inner optimizer keeps of a parameter of a group after a step, shown by one of two
    elements: of one element, a value for each could not be told from a value for all.
    """
    device = optimizer.models[0].device
    probe = nn.Parameter(torch.zeros(2, device=device))
    probe.grad = torch.zeros_like(probe)
    stepped = optimizer.make_inner([{"params": [probe], **_settings(group)}])
    stepped.step()
    template: dict[str, Any] = {}
    for name, value in stepped.state[probe].items():
        if value is None:
            continue
        if isinstance(value, Tensor) and value.dim() and value.shape != probe.shape:
            raise ConfigError(
                f"the optimizer's {name} is no value for each element of a parameter, so it has "
                f"no parts to save"
            )
        template[name] = value
    return template


def _zeros(template: Mapping[str, Any], main: Tensor) -> dict[str, Any]:
    """Memory for a state that is not there yet."""
    zeros: dict[str, Any] = {}
    for name, value in template.items():
        if not isinstance(value, Tensor):
            zeros[name] = type(value)()
        elif value.dim():
            zeros[name] = torch.zeros_like(main, dtype=value.dtype, requires_grad=False)
        else:
            zeros[name] = torch.zeros_like(value)
    return zeros


def _fill(name: str, held: BoxedTensor, given: Any) -> None:
    """Copy a state that lies elsewhere into this rank's boxes: a whole tensor or the same boxes."""
    if tuple(given.shape) != tuple(held.shape):
        raise StateError(
            f"{name} is {list(given.shape)} in the optimizer state, {list(held.shape)} here: "
            f"it is another model's"
        )
    for offsets, box in held.boxes:
        if isinstance(given, BoxedTensor):
            source = _same_box(name, given, offsets, box)
        else:
            place = [
                slice(start, start + size) for start, size in zip(offsets, box.shape, strict=True)
            ]
            source = given[tuple(place)]
        # a checkpoint that was loaded into `state_dict` has filled this memory already
        if source.data_ptr() != box.data_ptr():
            box.copy_(source)


def _same_box(name: str, given: BoxedTensor, offsets: tuple[int, ...], box: Tensor) -> Tensor:
    """The box of a state that has the offsets and the shape of another. Raises StateError without
    one.
    """
    for given_offsets, given_box in given.boxes:
        if given_offsets == offsets and given_box.shape == box.shape:
            return given_box
    raise StateError(
        f"{name} was cut for other ranks: save and load it by torch.distributed.checkpoint, "
        f"for any number"
    )


def _load_settings(
    group: dict[str, Any], names: Sequence[str], given: Sequence[Mapping[str, Any]]
) -> None:
    """The settings of a parameter group from those of the same parameters."""
    # by the parameters: of another layout the groups may have other numbers
    settings = next((other for other in given if set(other["params"]) & set(names)), None)
    if settings is None:
        raise StateError(
            f"the optimizer state has no settings for {sorted(names)[0]}: it is another model's"
        )
    for name, value in settings.items():
        if name in STAY:
            continue
        held = group.get(name)
        if isinstance(held, Tensor):
            # in place: a compiled or captured step reads this very tensor
            held.fill_(float(value))
        else:
            group[name] = float(value) if isinstance(value, Tensor) else value
