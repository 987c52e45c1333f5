"""What a checkpoint holds: parts of whole tensors, by the names of the whole model, whatever the
layout and the optimizer.

    model.<name>                  a parameter
    optimizer.<name>.<state>      what the optimizer keeps of it (exp_avg, step, ...)

Replicated, ZeRO and sharded optimizers write the same, and each reads what another wrote, on any
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from streammega.errors import StateError
from streammega.train.checkpoints.chunks import Chunk, chunk_of
from streammega.train.parallel_model import ParallelModel, names_of


def state_to_save(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Chunk]:
    """What this rank writes, by name. Each value of the whole state is written by one rank."""
    inner = inner_optimizer(optimizer)
    is_first = model.is_sharded or model.ranks.members("dp-cp")[0] == model.ranks.rank
    is_zero = inner is not optimizer
    chunks: dict[str, Chunk] = {}
    for name, parameter in names_of(model).items():
        if not model.is_first_copy(name, parameter):
            continue
        if is_first:
            chunks[f"model.{name}"] = chunk_of(parameter)
        # of a ZeroRedundancyOptimizer each rank has the state of some parameters
        if is_first or is_zero:
            for state_name, value in _tensors_of(inner, parameter):
                chunks[f"optimizer.{name}.{state_name}"] = chunk_of(value)
    # Of a small parameter a rank may have nothing.
    return {name: chunk for name, chunk in chunks.items() if chunk.values.numel()}


def state_to_load(
    model: ParallelModel, optimizer: torch.optim.Optimizer, metadata: Metadata
) -> dict[str, Chunk]:
    """The memory of this rank that a checkpoint with such metadata fills, by name. State that the
    optimizer lacks is made.

    Raises StateError for one of another model.
    """
    stored = metadata.state_dict_metadata
    _check_shapes(_parameters_in(stored), model.all_names)
    inner = inner_optimizer(optimizer)
    devices = scalar_devices(inner)
    stored_states = _states_of(stored)
    chunks: dict[str, Chunk] = {}
    for name, parameter in names_of(model).items():
        chunks[f"model.{name}"] = chunk_of(parameter)
        if id(parameter) not in devices:
            continue  # another rank of a ZeroRedundancyOptimizer steps it
        state = inner.state[parameter]
        for state_name, value in stored_states.get(name, {}).items():
            dtype = value.properties.dtype
            if state_name not in state and value.size == torch.Size():
                state[state_name] = torch.zeros((), dtype=dtype, device=devices[id(parameter)])
            elif state_name not in state:
                state[state_name] = torch.zeros_like(parameter, dtype=dtype)
            chunks[f"optimizer.{name}.{state_name}"] = chunk_of(state[state_name])
    return {name: chunk for name, chunk in chunks.items() if chunk.values.numel()}


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds the state of this rank: a ZeroRedundancyOptimizer has one within."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def scalar_devices(inner: torch.optim.Optimizer) -> dict[int, torch.device]:
    """By the id of each parameter, where its optimizer looks for the scalars of its state, such as
    its step.

    Fused and capturable kernels read them on the parameter's device, by address; all others on the
    CPU. Source: torch's own Optimizer.load_state_dict, which these checkpoints go around.
    """
    device_of: dict[int, torch.device] = {}
    for group in inner.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            device_of[id(parameter)] = parameter.device if on_device else torch.device("cpu")
    return device_of


def _tensors_of(
    inner: torch.optim.Optimizer, parameter: nn.Parameter
) -> Iterator[tuple[str, Tensor]]:
    """(name, value) of what an optimizer keeps of a parameter.

    What is None is not kept, such as the momentum of an SGD that has none.
    """
    for state_name, value in inner.state.get(parameter, {}).items():
        if value is not None:
            yield state_name, torch.as_tensor(value)


def _parameters_in(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of the parameters of its model, by their names."""
    return {
        name.removeprefix("model."): value
        for name, value in stored.items()
        if name.startswith("model.")
    }


def _states_of(stored: Mapping[str, Any]) -> dict[str, dict[str, TensorStorageMetadata]]:
    """What a checkpoint has of optimizers, by parameter and by the name of the state.

    Sorted once for all parameters: there may be ten thousands of names.
    """
    states: dict[str, dict[str, TensorStorageMetadata]] = {}
    for full_name, value in stored.items():
        if full_name.startswith("optimizer.") and isinstance(value, TensorStorageMetadata):
            of_optimizer = full_name.removeprefix("optimizer.")
            parameter_name, _, state_name = of_optimizer.rpartition(".")
            states.setdefault(parameter_name, {})[state_name] = value
    return states


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
