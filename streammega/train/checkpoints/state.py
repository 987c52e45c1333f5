"""What a checkpoint holds: boxes of whole tensors, by the names of the whole model, whatever the
layout and the optimizer.

    model.<name>                  a parameter
    optimizer.<name>.<state>      what the optimizer keeps of it (exp_avg, step, ...);
                                  `main`: its fp32 copy, if it is narrower

Replicated, ZeRO and sharded optimizers write the same, and each reads what another wrote, on any
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from streammega.errors import StateError
from streammega.gradients.boxes import Box, Boxes, boxes_of_range, offset_of
from streammega.gradients.buffers import is_split, local_part
from streammega.gradients.sharded_optimizer import ShardedOptimizer
from streammega.parallel import Ranks
from streammega.train.optimizer import Optimizer
from streammega.train.parallel_model import ParallelModel, names_of

MAIN = "main"


@dataclass(frozen=True)
class _Part:
    """What a rank holds of a parameter for its optimizer.

    key: of its state in the optimizer. like: the parameter. span: of elements [start, stop) of this
    rank's part, flat; None: of all of it, in its shape.
    """

    name: str
    key: Tensor
    like: nn.Parameter
    span: tuple[int, int] | None
    saves: bool

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.like.shape

    def boxes(self, tensor: Tensor) -> list[Box]:
        """The boxes of a state tensor that lies like the parameter's part."""
        tensor = local_part(tensor.detach())
        if self.span is None:
            return [(offset_of(self.like), tensor)]
        return boxes_of_range(self.like, *self.span, tensor)


def state_to_save(model: ParallelModel, optimizer: Optimizer) -> dict[str, Boxes]:
    """What this rank writes, by name.

    Each value of the whole state is written by one rank, or by several alike.
    """
    return _parameters_to_save(model) | _optimizer_state_to_save(model, optimizer)


def _parameters_to_save(model: ParallelModel) -> dict[str, Boxes]:
    """Parameters are the same on all data- and context-parallel ranks: the first of them writes."""
    ranks = model.ranks
    has_copies = ranks.group("dp-cp") is not None
    if has_copies and ranks.members("dp-cp")[0] != ranks.rank:
        return {}
    boxes_by_name: dict[str, Boxes] = {}
    for name, parameter in names_of(model).items():
        if _saves(name, parameter, ranks):
            boxes_by_name[f"model.{name}"] = _boxes_of_parameter(parameter)
    return boxes_by_name


def _optimizer_state_to_save(model: ParallelModel, optimizer: Optimizer) -> dict[str, Boxes]:
    inner = inner_optimizer(optimizer)
    boxes_by_name: dict[str, Boxes] = {}
    for part in _parts(model, optimizer):
        if not part.saves:
            continue
        for state_name, value in _values(inner, part):
            name = f"optimizer.{part.name}.{state_name}"
            if isinstance(value, Tensor) and value.dim() > 0:
                _add_boxes(boxes_by_name, name, part, value)
            elif name not in boxes_by_name:
                # Every part of a parameter has the same scalars, such as its step: one is written.
                boxes_by_name[name] = Boxes((), [((), torch.as_tensor(value))])
    return boxes_by_name


def state_to_load(
    model: ParallelModel, optimizer: Optimizer, metadata: Metadata
) -> dict[str, Boxes]:
    """The memory of this rank that a checkpoint with such metadata fills, by name.

    Raises StateError for one of another model.
    """
    stored = metadata.state_dict_metadata
    _check_shapes(_parameters_in(stored), model.all_names)
    parts = list(_parts(model, optimizer))
    to_load = _parameters_to_load(model, stored)
    _load_wide_values_into_main(to_load, parts, stored)
    _add_optimizer_state_to_load(to_load, parts, inner_optimizer(optimizer), stored)
    return to_load


def _parameters_in(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of the parameters of its model, by their names."""
    return {
        name.removeprefix("model."): value
        for name, value in stored.items()
        if name.startswith("model.")
    }


def _parameters_to_load(model: ParallelModel, stored: Mapping[str, Any]) -> dict[str, Boxes]:
    """The memory of the model's parameters."""
    to_load: dict[str, Boxes] = {}
    for name, parameter in names_of(model).items():
        main = f"optimizer.{name}.{MAIN}"
        # The model's own values are the main ones, rounded: a parameter that can hold more takes
        # the main ones.
        takes_main = main in stored and parameter.dtype == torch.float32
        to_load[main if takes_main else f"model.{name}"] = _boxes_of_parameter(parameter)
    return to_load


def _load_wide_values_into_main(
    to_load: dict[str, Boxes], parts: Sequence[_Part], stored: Mapping[str, Any]
) -> None:
    """Of a checkpoint of an fp32 run, whose model is its own main copy: read that into main ones.

    The narrow parameters are made of these (`after_load`), so nothing is read into them.
    """
    refilled: set[str] = set()
    for part in parts:
        name = f"model.{part.name}"
        has_main = f"optimizer.{part.name}.{MAIN}" in stored
        if not _is_main(part) or name not in to_load or has_main or not _is_wide(stored[name]):
            continue
        if name not in refilled:
            to_load[name] = Boxes(part.shape, [])
            refilled.add(name)
        _add_boxes(to_load, name, part, part.key)


def _add_optimizer_state_to_load(
    to_load: dict[str, Boxes],
    parts: Sequence[_Part],
    inner: torch.optim.Optimizer,
    stored: Mapping[str, Any],
) -> None:
    """The memory of the optimizer's state, which is made where the optimizer has none yet."""
    devices = scalar_devices(inner)
    stored_states = _states_of(stored)
    for part in parts:
        for state_name, value in stored_states.get(part.name, {}).items():
            name = f"optimizer.{part.name}.{state_name}"
            dtype = value.properties.dtype
            if state_name == MAIN:
                if _is_main(part):
                    _add_boxes(to_load, name, part, part.key)
                continue
            held = inner.state[part.key]
            if value.size == torch.Size():
                if state_name not in held:
                    held[state_name] = torch.zeros((), dtype=dtype, device=devices[id(part.key)])
                # Read for the first part of a parameter; `after_load` copies it to the others.
                to_load.setdefault(name, Boxes((), [((), held[state_name])]))
            else:
                if state_name not in held:
                    held[state_name] = torch.zeros_like(part.key, dtype=dtype)
                _add_boxes(to_load, name, part, held[state_name])


def after_load(
    model: ParallelModel, optimizer: Optimizer, state: Mapping[str, Boxes], metadata: Metadata
) -> None:
    """Bring what was loaded to where it was not.

    Scalars go to the other parts of a parameter; main parameters go to the model. A sharded
    optimizer does the latter by collectives, so all ranks must choose the same: they look at the
    checkpoint's metadata, since a rank that owns no part of any parameter has loaded no main ones.
    """
    inner = inner_optimizer(optimizer)
    devices = scalar_devices(inner)
    for part in _parts(model, optimizer):
        _copy_scalars(inner.state[part.key], part, state, devices[id(part.key)])
    if not isinstance(optimizer, ShardedOptimizer):
        return
    if _has_wide_values(metadata):
        optimizer.publish_main()
    else:
        optimizer.reload_main()


def _copy_scalars(
    held: dict[str, Any], part: _Part, state: Mapping[str, Boxes], device: torch.device
) -> None:
    """Give one part of a parameter the scalars of its state, such as its step.

    Loading has filled those of one part only. Each part gets a copy: optimizers count steps in
    place, and two parts that shared a step would count it twice.
    """
    for state_name, value in list(held.items()):
        loaded = state.get(f"optimizer.{part.name}.{state_name}")
        if loaded is None or not isinstance(value, Tensor):
            continue
        if loaded.shape == torch.Size():
            _, scalar = loaded.boxes[0]
            held[state_name] = scalar.to(device, copy=True)


def _has_wide_values(metadata: Metadata) -> bool:
    """Whether a checkpoint has fp32 values of parameters.

    They are main copies of narrower ones, or a model that is fp32 itself.
    """
    for name, value in metadata.state_dict_metadata.items():
        if name.endswith(f".{MAIN}"):
            return True
        if name.startswith("model.") and _is_wide(value):
            return True
    return False


def _states_of(stored: Mapping[str, Any]) -> dict[str, dict[str, TensorStorageMetadata]]:
    """What a checkpoint has of optimizers, by parameter and by the name of the state.

    Sorted once for all parts: there may be ten thousands of names.
    """
    states: dict[str, dict[str, TensorStorageMetadata]] = {}
    for full_name, value in stored.items():
        if full_name.startswith("optimizer.") and isinstance(value, TensorStorageMetadata):
            of_optimizer = full_name.removeprefix("optimizer.")
            parameter_name, _, state_name = of_optimizer.rpartition(".")
            states.setdefault(parameter_name, {})[state_name] = value
    return states


def inner_optimizer(optimizer: Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer that holds the state of this rank."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.inner
    # of a ZeroRedundancyOptimizer
    inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def scalar_devices(inner: torch.optim.Optimizer) -> dict[int, torch.device]:
    """By the id of each parameter, where its optimizer looks for the scalars of its state, such as
    its step.

    Fused and capturable kernels read them on the parameter's device, by address; all others on the
    CPU. Source: torch's own Optimizer.load_state_dict, which checkpoints of boxes go around.
    """
    device_of: dict[int, torch.device] = {}
    for group in inner.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            device_of[id(parameter)] = parameter.device if on_device else torch.device("cpu")
    return device_of


def _values(inner: torch.optim.Optimizer, part: _Part) -> Iterator[tuple[str, Any]]:
    """(name, value) of what an optimizer keeps of a part; of narrow parameters the main copy too.

    What is None is not kept, such as the momentum of an SGD that has none.
    """
    for state_name, value in inner.state.get(part.key, {}).items():
        if value is not None:
            yield state_name, value
    if _is_main(part):
        yield MAIN, part.key


def _is_main(part: _Part) -> bool:
    """Whether a part's key is the fp32 copy of a narrower parameter."""
    return part.key.dtype == torch.float32 and part.like.dtype != torch.float32


def _is_wide(stored: Any) -> bool:
    """Whether what a checkpoint has under a name is a tensor in fp32."""
    return isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == torch.float32


def _parts(model: ParallelModel, optimizer: Optimizer) -> Iterator[_Part]:
    """The parts of parameters whose state this rank holds."""
    if isinstance(optimizer, ShardedOptimizer):
        yield from _parts_of_sharded(model, optimizer)
    else:
        yield from _parts_of_torch(model, optimizer)


def _parts_of_sharded(model: ParallelModel, optimizer: ShardedOptimizer) -> Iterator[_Part]:
    name_by_id = _name_by_id(model)
    for piece in optimizer.pieces:
        parameter = piece.slot.parameter
        name = name_by_id[id(parameter)]
        yield _Part(
            name=name,
            key=piece.main,
            like=parameter,
            span=(piece.start, piece.stop),
            saves=_saves(name, parameter, model.ranks),
        )


def _parts_of_torch(model: ParallelModel, optimizer: torch.optim.Optimizer) -> Iterator[_Part]:
    """Of a replicated optimizer the first data-parallel rank writes.

    Of a ZeroRedundancyOptimizer each: its inner optimizer has this rank's parameters alone.
    """
    ranks = model.ranks
    name_by_id = _name_by_id(model)
    inner = inner_optimizer(optimizer)
    is_zero = inner is not optimizer
    writes = is_zero or ranks.members("dp-cp")[0] == ranks.rank
    for group in inner.param_groups:
        for parameter in group["params"]:
            name = name_by_id[id(parameter)]
            yield _Part(
                name=name,
                key=parameter,
                like=parameter,
                span=None,
                saves=writes and _saves(name, parameter, ranks),
            )


def _name_by_id(model: ParallelModel) -> dict[int, str]:
    return {id(parameter): name for name, parameter in names_of(model).items()}


def _saves(name: str, parameter: nn.Parameter, ranks: Ranks) -> bool:
    """Whether this rank is the one, of tensor-parallel and tied copies, that writes a parameter."""
    is_tied_copy = name == "embedding.weight" and not ranks.is_first_stage
    if is_tied_copy:
        return False
    return is_split(parameter) or ranks.at["tp"] == 0


def _boxes_of_parameter(parameter: nn.Parameter) -> Boxes:
    """All that this rank has of a parameter of the model."""
    box = (offset_of(parameter), local_part(parameter.detach()))
    return Boxes(parameter.shape, [box])


def _add_boxes(boxes_by_name: dict[str, Boxes], name: str, part: _Part, tensor: Tensor) -> None:
    """Add the boxes of a state tensor that lies like a part; a parameter may have several parts."""
    boxes = boxes_by_name.setdefault(name, Boxes(part.shape, []))
    boxes.boxes += part.boxes(tensor)


def _check_shapes(theirs: Mapping[str, Any], ours: Mapping[str, torch.Size]) -> None:
    """Raise StateError unless a checkpoint has the parameters of this model, in its shapes."""
    # Sorted: the same name is told on all ranks, and every time.
    for name in sorted(set(theirs) ^ set(ours)):
        if name in theirs:
            raise StateError(f"the checkpoint has a parameter {name}, this model has not")
        raise StateError(f"this model has a parameter {name}, the checkpoint has not")
    for name, shape in ours.items():
        stored_shape = list(theirs[name].size)
        if stored_shape != list(shape):
            raise StateError(
                f"{name} is {stored_shape} in the checkpoint, {list(shape)} in this model"
            )
