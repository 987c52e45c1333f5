"""How torch.distributed.checkpoint writes and reads boxes: what is saved is looked up among them, and
what is loaded fills them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from streammega.errors import StateError


class SavePlanner(DefaultSavePlanner):
    """Finds what is written among boxes."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of one box."""
        return self.state_dict[index.fqn].box_at(index)


class LoadPlanner(DefaultLoadPlanner):
    """Reads what fills boxes, from whatever boxes were written."""

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
        for name, boxes in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata) or stored.size != boxes.shape:
                what = "another thing" if stored else "missing"
                raise StateError(f"{name} is {what} in the checkpoint")
            items += create_read_items_for_chunk_list(name, stored, boxes.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The memory of one box."""
        box: Tensor = self.state_dict[index.fqn].box_at(index)
        return box
