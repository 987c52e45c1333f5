"""What a checkpoint holds: tensors by their names in the whole model, on any layout and with any optimizer.

model.<name>                  a parameter
optimizer.<name>.<state>      what the optimizer keeps of it (exp_avg, step, ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from streammega.errors import StateError
from streammega.train.parallel_model import ParallelModel, names_of
from streammega.train.stages import canonical


def state_to_save(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state that this rank has to write: live tensors, of which DTensors are parts of a whole.

    Of replicas the first one writes. What tensor-parallel ranks and pipeline stages have in common
    is left to the planner, which lets one of them write it.
    """
    inner = _inner_optimizer(optimizer)
    is_first_replica = model.ranks.members("dp-cp")[0] == model.ranks.rank
    state: dict[str, Tensor] = {}
    if model.is_sharded or is_first_replica:
        state |= _model_state(model)
    # Each rank of a ZeroRedundancyOptimizer has the state of some parameters.
    has_state_of_its_own = model.is_sharded or is_first_replica or inner is not optimizer
    # torch would step an optimizer that has no state yet, which counts as a step of the run.
    if has_state_of_its_own and inner.state:
        state |= _optimizer_state(model, inner)
    return state


def state_to_load(
    model: ParallelModel, optimizer: torch.optim.Optimizer, metadata: Metadata
) -> dict[str, Tensor]:
    """The live tensors of this rank that a checkpoint with such metadata fills.

    Raises StateError for one of another model or optimizer.
    """
    shapes: dict[str, list[int]] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            shapes[name] = list(stored.size)
    _check_parameters(shapes, model.all_names)
    inner = _inner_optimizer(optimizer)
    of_optimizer = _optimizer_state(model, inner)
    state = _model_state(model)
    for name, parameter in names_of(model).items():
        names = [f"optimizer.{name}.{state_name}" for state_name in inner.state.get(parameter, ())]
        if any(full_name in shapes for full_name in names):
            state |= {full_name: of_optimizer[full_name] for full_name in names}
        else:
            # It was never stepped, and must not be counted as if it was.
            inner.state.pop(parameter, None)
    for name, tensor in state.items():
        if name not in shapes:
            raise StateError(f"{name} is missing in the checkpoint")
        if shapes[name] != list(tensor.shape):
            raise StateError(
                f"{name} is {shapes[name]} in the checkpoint, {list(tensor.shape)} in this run"
            )
    return state


def _model_state(model: ParallelModel) -> dict[str, Tensor]:
    of_stages: dict[str, Any] = get_model_state_dict(nn.ModuleList(model.chunks))
    return {f"model.{_name_in_model(name)}": tensor for name, tensor in of_stages.items()}


def _optimizer_state(model: ParallelModel, inner: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All state of an optimizer, which torch makes where there is none."""
    of_stages: dict[str, Any] = get_optimizer_state_dict(nn.ModuleList(model.chunks), inner)
    state: dict[str, Tensor] = {}
    for name, values in of_stages["state"].items():
        for state_name, value in values.items():
            state[f"optimizer.{_name_in_model(name)}.{state_name}"] = value
    return state


def _name_in_model(name: str) -> str:
    """Of a parameter in a list of stages, which numbers them."""
    _, _, name_in_stage = name.partition(".")
    return canonical(name_in_stage)


def _inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds the state of this rank: a ZeroRedundancyOptimizer has one within."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def _check_parameters(
    stored_shapes: Mapping[str, list[int]], shapes: Mapping[str, torch.Size]
) -> None:
    """Raise StateError unless a checkpoint has the parameters of this model, in its shapes."""
    stored = {
        name.removeprefix("model."): shape
        for name, shape in stored_shapes.items()
        if name.startswith("model.")
    }
    # Sorted: all ranks name the same one.
    for name in sorted(set(stored) ^ set(shapes)):
        if name in stored:
            raise StateError(f"the checkpoint has a parameter {name}, this model has not")
        raise StateError(f"this model has a parameter {name}, the checkpoint has not")
    for name, shape in shapes.items():
        if stored[name] != list(shape):
            raise StateError(
                f"{name} is {stored[name]} in the checkpoint, {list(shape)} in this model"
            )
