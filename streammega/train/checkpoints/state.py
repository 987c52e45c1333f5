"""What a checkpoint holds: parts of whole tensors, by the names of the whole model, whatever the
layout and the optimizer.

    model.<name>                  a parameter
    optimizer.<name>.<state>      what the optimizer keeps of it (exp_avg, step, ...)

Replicated, ZeRO and sharded optimizers write the same, and each reads what another wrote, on any
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from streammega.errors import StateError
from streammega.gradients.buffers import local_part
from streammega.train.parallel_model import ParallelModel, names_of


@dataclass(frozen=True)
class Chunk:
    """The part of a tensor that this rank has.

    values: in memory of their owner, which loading fills.
    """

    shape: torch.Size
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    values: Tensor

    def storage(self) -> ChunkStorageMetadata:
        """Where the part lies in the whole."""
        return ChunkStorageMetadata(torch.Size(self.offsets), self.values.size())

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        data = TensorWriteData(
            self.storage(), TensorProperties.create_from_tensor(self.values), self.shape
        )
        index = MetadataIndex(name, torch.Size(self.offsets))
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]


def chunk_of(tensor: Tensor) -> Chunk:
    """What this rank has of a tensor: all of it, but for a DTensor."""
    values = local_part(tensor.detach())
    offsets = (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    return Chunk(tensor.shape, tuple(offsets), values)


class SavePlanner(DefaultSavePlanner):
    """Finds what is written among chunks."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of one chunk."""
        return self.state_dict[index.fqn].values


class LoadPlanner(DefaultLoadPlanner):
    """Reads what fills chunks."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Nothing has to be flattened, or made anew."""
        self.state_dict = state_dict
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Raises StateError for what the checkpoint lacks, or has in another shape."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, chunk in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata) or stored.size != chunk.shape:
                what = "another thing" if stored else "missing"
                raise StateError(f"{name} is {what} in the checkpoint")
            items += create_read_items_for_chunk_list(name, stored, [chunk.storage()])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The memory of one chunk."""
        values: Tensor = self.state_dict[index.fqn].values
        return values


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
