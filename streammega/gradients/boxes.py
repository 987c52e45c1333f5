"""Parts of tensors as torch.distributed.checkpoint takes them: boxes at offsets of the whole, in
memory of their owner.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from streammega.gradients.buckets import rectangles
from streammega.gradients.buffers import local_part

Box = tuple[tuple[int, ...], Tensor]
"""(offsets in the whole tensor, values)."""

_aten = torch.ops.aten
_BOX_BY_BOX = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
}
"""Operations that give each element by itself, so that they may be done box by box."""


class Boxes:
    """A tensor of which this rank has some boxes. torch.distributed.checkpoint writes them, and
    fills them from any others.

    shape: of the whole tensor. boxes: (offsets, values), in memory of their owner: loading fills
    it.
    """

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        self.shape = torch.Size(shape)
        self.boxes = list(boxes)

    def copied(self) -> Boxes:
        """The same values in memory of their own, on the host."""
        boxes: list[Box] = []
        for offsets, box in self.boxes:
            boxes.append((offsets, box.detach().to("cpu", copy=True)))
        return Boxes(self.shape, boxes)

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Where the boxes lie in the whole."""
        return [_chunk(offsets, box) for offsets, box in self.boxes]

    def box_at(self, index: MetadataIndex) -> Tensor:
        """The values of the box that begins at an index's offset."""
        return next(box for offsets, box in self.boxes if torch.Size(offsets) == index.offset)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        items: list[WriteItem] = []
        for number, (offsets, box) in enumerate(self.boxes):
            values = TensorWriteData(
                chunk=_chunk(offsets, box),
                properties=TensorProperties.create_from_tensor(box),
                size=self.shape,
            )
            index = MetadataIndex(name, torch.Size(offsets), number)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=values))
        return items


class BoxedTensor(torch.Tensor):
    """`Boxes` that torch takes for a tensor: for states that torch's own planners save and load,
    with no planner of ours.

    It takes no part in computations: it can be copied, saved and loaded. Bears torch's protocol for
    tensors that are written in parts, so that the planners of torch.distributed.checkpoint need not
    know of it.

    Args:
        shape: of the whole tensor.
        boxes: (offsets, values) of this rank, in memory of their owner.
        like: a tensor of the dtype and on the device of the values.
        saves: whether this rank writes its boxes; False where another rank has the same.
    """

    boxes: list[Box]
    saves: bool

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], boxes: Sequence[Box], like: Tensor, saves: bool = True
    ) -> BoxedTensor:
        """A tensor without memory of its own."""
        self: BoxedTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=like.dtype, device=like.device
        )
        self.boxes = list(boxes)
        self.saves = saves
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        places = [(offsets, tuple(box.shape)) for offsets, box in self.boxes]
        return f"BoxedTensor({tuple(self.shape)}, {places}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickle, (tuple(self.shape), self.boxes, self.dtype, self.saves)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Copies, box by box; and one without boxes, which torch's background saves give copies of
        this one's attributes.
        """
        source, *others = args
        options = dict(kwargs or {})
        if function is _aten.new_empty.default:
            (shape,) = others
            device = options.get("device") or source.device
            like = torch.empty(0, dtype=source.dtype, device=device)
            return cls(shape, [], like, source.saves)
        if function not in _BOX_BY_BOX:
            raise NotImplementedError(
                f"{function}: a tensor of which a rank has some boxes can be copied, saved and "
                f"loaded only"
            )
        # refused for `like`, which has one dimension: channels_last, for instance
        options.pop("memory_format", None)
        boxes = [(offsets, function(box, *others, **options)) for offsets, box in source.boxes]
        empty = torch.empty(0, dtype=source.dtype, device=source.device)
        like = function(empty, *others, **options)
        return cls(source.shape, boxes, like, source.saves)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        if not self.saves:
            return []
        return Boxes(self.shape, self.boxes).__create_write_items__(name, _)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return Boxes(self.shape, self.boxes).chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return Boxes(self.shape, self.boxes).box_at(index)


def boxes_of_range(whole: Tensor, start: int, stop: int, values: Tensor) -> list[Box]:
    """Flat values of elements [start, stop) of this rank's part of a tensor, as boxes of the whole
    one.

    whole: the tensor, of which a DTensor's part begins somewhere. values: [stop - start]; the boxes
    are views of it.
    """
    part_offsets = offset_of(whole)
    part_shape = local_part(whole).shape
    boxes: list[Box] = []
    taken = 0
    for offsets, sizes in rectangles(part_shape, start, stop):
        elements = math.prod(sizes)
        offsets_in_whole = tuple(map(operator.add, part_offsets, offsets))
        boxes.append((offsets_in_whole, values[taken : taken + elements].view(sizes)))
        taken += elements
    return boxes


def offset_of(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part of a tensor begins in the whole one."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset)


def _unpickle(
    shape: tuple[int, ...], boxes: list[Box], dtype: torch.dtype, saves: bool
) -> BoxedTensor:
    if boxes:
        _, like = boxes[0]
    else:
        like = torch.empty(0, dtype=dtype)
    return BoxedTensor(shape, boxes, like, saves)


def _chunk(offsets: Sequence[int], box: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=box.size())
