"""Where gradients are kept: a contiguous buffer for each dtype, a view of it for each parameter."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streammega.errors import ConfigError
from streammega.gradients.buckets import Bucket, Slot, plan_buckets
from streammega.gradients.collectives import Work


@dataclass
class GradSlot:
    """The gradient of one parameter: its place in the buffer, and how many micro-batches it has of
    this step.
    """

    name: str
    parameter: nn.Parameter
    slot: Slot
    main_grad: Tensor
    tied: bool = False
    count: int = 0
    ready: bool = False
    scaled: bool = False
    """Whether what is in the buffer was multiplied by the reducer's scale."""
    unused: bool = False
    """Whether no rank used the parameter in the step that was reduced last: it has no gradient
    then, as with torch's DDP.
    """
    handed: weakref.ref[Tensor] | None = None
    """The gradient that was given to the parameter last, to be told from one that came from
    elsewhere since.
    """

    @property
    def is_used(self) -> bool:
        """Whether this rank counts as one that uses the parameter in this step; a shared one is
        used by another stage too.
        """
        return self.count > 0 or self.tied

    def hand_over(self) -> None:
        """Put the reduced gradient where optimizers look; none where no rank used the parameter."""
        grad = None if self.unused else as_grad(self.main_grad, self.parameter)
        self.parameter.grad = grad
        self.handed = None if grad is None else weakref.ref(grad)

    def left_grad(self) -> Tensor | None:
        """A gradient of the parameter that is none that was handed over, nor came by its hook."""
        grad = self.parameter.grad
        return None if grad is self._handed_over() else grad

    def carried_grad(self) -> Tensor | None:
        """A gradient that was handed over and not zeroed since, of a parameter that is still
        trained.
        """
        grad = self.parameter.grad
        return grad if grad is self._handed_over() and self.parameter.requires_grad else None

    def _handed_over(self) -> Tensor | None:
        return None if self.handed is None else self.handed()


@dataclass
class GradBuffer:
    """Gradients of the parameters of one dtype.

    `params`: with sharding, the parameters themselves in the same places.
    """

    grads: Tensor
    params: Tensor | None
    buckets: list[Bucket]
    slots: list[list[GradSlot]]
    waiting: list[int]
    """Of each bucket, the parameters that are not ready yet."""
    started: list[bool]
    """Of each bucket, whether its collective has started."""
    works: list[Work] = field(default_factory=list)

    def forget(self) -> None:
        """Begin a step: nothing has been added, nothing is under way."""
        self.works.clear()
        self.started = [False] * len(self.buckets)
        self.waiting = [len(slots) for slots in self.slots]
        for slot in (slot for slots in self.slots for slot in slots):
            slot.count = 0
            slot.ready = False
            slot.scaled = False


def make_buffers(
    module: nn.Module,
    bucket_size: int,
    grad_dtype: torch.dtype,
    *,
    tied: Collection[str],
    shards: int,
) -> list[GradBuffer]:
    """One buffer for each dtype of the parameters that are trained, in order of their first one.

    tied: names of parameters whose buckets start last. shards: ranks that each step a part of every
    bucket, whose parameters then move into the buffer; 0: parameters stay where they are.
    """
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
    if not by_dtype:
        raise ConfigError("the module has no parameters that require gradients")
    _check_kinds([named for of_dtype in by_dtype.values() for named in of_dtype])
    return [
        _make_buffer(named, bucket_size, grad_dtype, tied=tied, shards=shards)
        for named in by_dtype.values()
    ]


@torch.no_grad()
def _make_buffer(
    named: Sequence[tuple[str, nn.Parameter]],
    bucket_size: int,
    grad_dtype: torch.dtype,
    *,
    tied: Collection[str],
    shards: int,
) -> GradBuffer:
    local = [local_part(parameter) for _, parameter in named]
    waiting = [number for number, (name, _) in enumerate(named) if name in tied]
    buckets = plan_buckets(
        [tensor.numel() for tensor in local], bucket_size, shards=shards, waiting=waiting
    )
    size = buckets[-1].stop
    device = local[0].device
    grads = torch.zeros(size, dtype=grad_dtype, device=device)
    params = torch.zeros(size, dtype=local[0].dtype, device=device) if shards else None
    slots = []
    for bucket in buckets:
        own = []
        for slot in bucket.slots:
            (name, parameter), tensor = named[slot.parameter], local[slot.parameter]
            # the parameter moves into the buffer, so that gathering fills it in place
            if params is not None:
                place = params[slot.start : slot.stop].view(tensor.shape)
                place.copy_(tensor)
                if isinstance(parameter, DTensor):
                    parameter._local_tensor = place
                else:
                    parameter.data = place
            view = grads[slot.start : slot.stop].view(tensor.shape)
            own.append(GradSlot(name, parameter, slot, view, tied=bucket.waits))
        slots.append(own)
    return GradBuffer(
        grads, params, buckets, slots, [len(own) for own in slots], [False] * len(buckets)
    )


def _check_kinds(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ConfigError for parameters whose gradients a buffer cannot hold."""
    first = named[0][0]
    device = named[0][1].device
    for name, parameter in named:
        if parameter.is_complex():
            raise ConfigError(
                f"{name} is complex, and buckets are real: keep it as torch.view_as_real, of real numbers"
            )
        if parameter.device != device:
            raise ConfigError(
                f"{first} is on {device} and {name} on {parameter.device}: wrap a module whose parameters are on one device, or "
                f"the parts of one device each"
            )


def in_order_of_backward(
    module: nn.Module, buffers: Sequence[GradBuffer]
) -> list[tuple[GradBuffer, int]]:
    """(buffer, bucket) of all buckets that start by themselves, in the order in which backward
    should fill them.

    A bucket is full when the parameter that was registered first of its own has its gradient.
    """
    place = {id(parameter): number for number, parameter in enumerate(module.parameters())}

    def full_after(bucket: tuple[GradBuffer, int]) -> int:
        buffer, number = bucket
        return min(place[id(slot.parameter)] for slot in buffer.slots[number])

    found = [
        (buffer, number)
        for buffer in buffers
        for number, bucket in enumerate(buffer.buckets)
        if not bucket.waits
    ]
    return sorted(found, key=full_after, reverse=True)


def is_split(parameter: Tensor) -> bool:
    """Whether ranks hold different parts of a parameter."""
    return isinstance(parameter, DTensor) and any(
        not placement.is_replicate() for placement in parameter.placements
    )


def tensor_parallel_group(module: nn.Module) -> dist.ProcessGroup | None:
    """The group over which the DTensors of a module are divided; None where it has none.

    Raises ConfigError for DTensors of several meshes or of several dimensions: only a layout says
    which ranks count what.
    """
    meshes = {
        parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)
    }
    if not meshes:
        return None
    if len(meshes) > 1 or next(iter(meshes)).ndim > 1:
        raise ConfigError(
            "the module's DTensors lie on several meshes, or on one of several dimensions, so norms over them are not known; "
            "give ranks=Ranks(layout) instead of group, or split the parameters over one mesh of one dimension"
        )
    return next(iter(meshes)).get_group()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            local: Tensor = tensor.to_local()
            return local
    return tensor


def address_of(parameter: Tensor) -> int:
    """Where this rank's part of a parameter lies."""
    local: Tensor = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return local.data_ptr()


def own_grad(parameter: Tensor, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, dense, and distributed as its parameter is; a split
    embedding's is a sum to be made.
    """
    if (
        isinstance(grad, DTensor)
        and isinstance(parameter, DTensor)
        and grad.placements != parameter.placements
    ):
        grad = grad.redistribute(placements=parameter.placements)
    grad = local_part(grad)
    return grad.to_dense() if grad.layout != torch.strided else grad


def as_grad(main: Tensor, parameter: nn.Parameter) -> Tensor:
    """A buffer's gradient in the form that the parameter takes: of its dtype, and distributed as it
    is.
    """
    grad = main if main.dtype == parameter.dtype else main.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        whole: Tensor = DTensor.from_local(
            grad,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return whole
    return grad
