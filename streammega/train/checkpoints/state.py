"""What a checkpoint holds: tensors by their names in the whole model, on any layout and with any optimizer.

model.<name>                  a parameter
optimizer.<name>.<state>      what the optimizer keeps of it (exp_avg, step, ...)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from streammega.errors import StateError
from streammega.train.parallel_model import ParallelModel, named_parameters
from streammega.train.stages import canonical


def state_to_save(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The live tensors that this rank has to write. A DTensor is a part of a whole tensor.

    The first replica writes for all. Of a tensor that tensor-parallel ranks or pipeline stages share,
    the planner picks one rank to write it.
    """
    is_first_replica = model.ranks.members("dp-cp")[0] == model.ranks.rank
    if not model.is_sharded and not is_first_replica:
        return {}
    state = _model_state(model)
    # torch would step an optimizer without state to make some, and that would count as a step.
    if optimizer.state:
        state |= _optimizer_state(model, optimizer)
    return state


def state_to_load(
    model: ParallelModel, optimizer: torch.optim.Optimizer, metadata: Metadata
) -> dict[str, Tensor]:
    """The live tensors of this rank that a checkpoint with such metadata fills.

    Raises StateError for one of another model or optimizer.
    """
    shapes: dict[str, list[int]] = {}
    stored_states: dict[str, set[str]] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            shapes[name] = list(stored.size)
            if name.startswith("optimizer."):
                parameter_name, _, state_name = name.removeprefix("optimizer.").rpartition(".")
                stored_states.setdefault(parameter_name, set()).add(state_name)
    names = {name.removeprefix("model.") for name in shapes if name.startswith("model.")}
    # Sorted: all ranks name the same one.
    for name in sorted(names ^ set(model.parameter_shapes)):
        if name in names:
            raise StateError(f"the checkpoint has a parameter {name}, this model does not")
        raise StateError(f"this model has a parameter {name}, the checkpoint does not")
    state = _model_state(model)
    of_optimizer = _optimizer_state(model, optimizer)
    for name, parameter in named_parameters(model).items():
        if name not in stored_states:
            # It was never stepped, and must not count as stepped.
            optimizer.state.pop(parameter, None)
            continue
        state_names = set(optimizer.state.get(parameter, ()))
        if state_names != stored_states[name]:
            raise StateError(
                f"the optimizer keeps {sorted(stored_states[name])} of {name} in the checkpoint, "
                f"{sorted(state_names)} in this run"
            )
        for state_name in sorted(state_names):
            full_name = f"optimizer.{name}.{state_name}"
            state[full_name] = of_optimizer[full_name]
    for name, tensor in state.items():
        if shapes[name] != list(tensor.shape):
            raise StateError(
                f"{name} is {shapes[name]} in the checkpoint, {list(tensor.shape)} in this model"
            )
    return state


def _model_state(model: ParallelModel) -> dict[str, Tensor]:
    of_stages: dict[str, Any] = get_model_state_dict(nn.ModuleList(model.chunks))
    return {f"model.{_name_in_model(name)}": tensor for name, tensor in of_stages.items()}


def _optimizer_state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All state of an optimizer. torch makes it if there is no state yet."""
    of_stages: dict[str, Any] = get_optimizer_state_dict(nn.ModuleList(model.chunks), optimizer)
    state: dict[str, Tensor] = {}
    for name, values in of_stages["state"].items():
        for state_name, value in values.items():
            state[f"optimizer.{_name_in_model(name)}.{state_name}"] = value
    return state


def _name_in_model(name: str) -> str:
    """The name of a parameter without the number of its stage in a list of stages."""
    _, _, name_in_stage = name.partition(".")
    return canonical(name_in_stage)
