"""The part of a tensor that a rank has, and how torch.distributed.checkpoint writes it, and fills
it from whatever parts were written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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
