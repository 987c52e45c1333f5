"""Parts of tensors as torch.distributed.checkpoint takes them: boxes at offsets of the whole, in
memory of their owner.
"""

from __future__ import annotations

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

_aten = torch.ops.aten
_BOX_BY_BOX = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten._to_copy.default,
}


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
        return Boxes(
            self.shape,
            [(offsets, box.detach().to("cpu", copy=True)) for offsets, box in self.boxes],
        )

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Where the boxes lie in the whole."""
        return [_chunk(offsets, box) for offsets, box in self.boxes]

    def box_at(self, index: MetadataIndex) -> Tensor:
        """The values of the box that begins at an index's offset."""
        return next(box for offsets, box in self.boxes if torch.Size(offsets) == index.offset)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(offsets, box),
                    properties=TensorProperties.create_from_tensor(box),
                    size=self.shape,
                ),
            )
            for number, (offsets, box) in enumerate(self.boxes)
        ]


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
        if function is _aten.new_empty.default:
            return cls(
                args[1],
                [],
                torch.empty(0, dtype=args[0].dtype, **_device(kwargs, args[0])),
                args[0].saves,
            )
        if function not in _BOX_BY_BOX:
            raise NotImplementedError(
                f"{function}: a tensor of which a rank has some boxes can be copied, saved and loaded only"
            )
        own = args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "memory_format"}
        boxes = [(offsets, function(box, *args[1:], **options)) for offsets, box in own.boxes]
        like = function(torch.empty(0, dtype=own.dtype, device=own.device), *args[1:], **options)
        return cls(own.shape, boxes, like, own.saves)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return Boxes(self.shape, self.boxes).__create_write_items__(name, _) if self.saves else []

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
    base = offset_of(whole)
    found: list[Box] = []
    at = 0
    for offsets, sizes in rectangles(local_part(whole).shape, start, stop):
        count = torch.Size(sizes).numel()
        place = tuple(first + offset for first, offset in zip(base, offsets, strict=True))
        found.append((place, values[at : at + count].view(sizes)))
        at += count
    return found


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
    like = boxes[0][1] if boxes else torch.empty(0, dtype=dtype)
    return BoxedTensor(shape, boxes, like, saves)


def _device(kwargs: dict[str, Any] | None, own: Tensor) -> dict[str, Any]:
    return {"device": (kwargs or {}).get("device") or own.device}


def _chunk(offsets: Sequence[int], box: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=box.size())
