"""Parts of tensors as torch.distributed.checkpoint takes them: boxes at offsets of the whole, in memory of their owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from streammega.train.buckets import rectangles

Box = tuple[tuple[int, ...], Tensor]

_aten = torch.ops.aten
_BOX_BY_BOX = {_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default}


class BoxedTensor(torch.Tensor):
    """A tensor of which this rank has some boxes. Loading a distributed checkpoint fills them, from any other boxes.

    It takes no part in computations: it can be copied, saved and loaded. Bears torch's protocol for tensors that are written
    in parts, so that the planners of torch.distributed.checkpoint need not know of it.

    Args:
        shape: of the whole tensor.
        boxes: (offsets, values) of this rank, in memory of their owner.
        like: a tensor of the dtype and on the device of the values.
        saves: whether this rank writes its boxes; False where another rank has the same.
    """

    boxes: list[Box]
    saves: bool

    @staticmethod
    def __new__(cls, shape: Sequence[int], boxes: Sequence[Box], like: Tensor, saves: bool = True) -> BoxedTensor:
        """A tensor without memory of its own."""
        self: BoxedTensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)
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
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Copies, box by box; and one without boxes, which torch's background saves give copies of this one's attributes."""
        if function is _aten.new_empty.default:
            return cls(args[1], [], torch.empty(0, dtype=args[0].dtype, **_device(kwargs, args[0])), args[0].saves)
        if function not in _BOX_BY_BOX:
            raise NotImplementedError(f"{function}: a tensor of which a rank has some boxes can be copied, saved and loaded only")
        own = args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "memory_format"}
        boxes = [(offsets, function(box, *args[1:], **options)) for offsets, box in own.boxes]
        like = function(torch.empty(0, dtype=own.dtype, device=own.device), *args[1:], **options)
        return cls(own.shape, boxes, like, own.saves)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        if not self.saves:
            return []
        return [
            WriteItem(
                index=MetadataIndex(name, torch.Size(offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(offsets, box), properties=TensorProperties.create_from_tensor(box), size=self.shape
                ),
            )
            for number, (offsets, box) in enumerate(self.boxes)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(offsets, box) for offsets, box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for offsets, box in self.boxes if torch.Size(offsets) == index.offset)


def boxes_of_range(whole: Tensor, start: int, stop: int, values: Tensor) -> list[Box]:
    """Flat values of elements [start, stop) of this rank's part of a tensor, as boxes of the whole one.

    whole: the tensor, of which a DTensor's part begins somewhere. values: [stop - start]; the boxes are views of it.
    """
    base = offset_of(whole)
    local = whole.to_local().shape if isinstance(whole, DTensor) else whole.shape
    found = []
    at = 0
    for offsets, sizes in rectangles(local, start, stop):
        count = torch.Size(sizes).numel()
        place = tuple(first + offset for first, offset in zip(base, offsets, strict=True))
        found.append((place, values[at : at + count].view(sizes)))
        at += count
    return found


def offset_of(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part of a tensor begins in the whole one."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def _unpickle(shape: tuple[int, ...], boxes: list[Box], dtype: torch.dtype, saves: bool) -> BoxedTensor:
    like = boxes[0][1] if boxes else torch.empty(0, dtype=dtype)
    return BoxedTensor(shape, boxes, like, saves)


def _device(kwargs: dict[str, Any] | None, own: Tensor) -> dict[str, Any]:
    return {"device": (kwargs or {}).get("device") or own.device}


def _chunk(offsets: Sequence[int], box: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=box.size())
