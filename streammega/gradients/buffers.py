"""Where gradients are kept: a contiguous buffer for each dtype, a view of it for each parameter."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from streammega.errors import ConfigError
from streammega.gradients.buckets import Bucket, Slot, plan_buckets
from streammega.gradients.collectives import Work


@dataclass
class GradSlot:
    """The gradient of one parameter: its place in the buffer, and how far it is in this step."""

    name: str
    parameter: nn.Parameter
    slot: Slot
    main_grad: Tensor
    """Its place: a view of the buffer, of the shape of this rank's part of the parameter."""
    tied: bool = False
    """Whether another pipeline stage has the parameter too."""
    count: int = 0
    """Micro-batches that were added in this step."""
    ready: bool = False
    """Whether none is to come in this step."""
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
        is_ours = grad is self._handed_over()
        return grad if is_ours and self.parameter.requires_grad else None

    def _handed_over(self) -> Tensor | None:
        return None if self.handed is None else self.handed()


@dataclass
class GradBucket:
    """Gradients that are reduced together, and how far their reduction is in this step."""

    place: Bucket
    grads: Tensor
    """All of them, [elements]: a view of the buffer."""
    slots: list[GradSlot]
    unready: int
    """Parameters whose gradients of this step are not complete: at 0 the bucket is full."""
    work: Work | None = None
    """The collective that is under way, where the model has a group."""
    streams: set[torch.cuda.Stream] = field(default_factory=set)
    """On which gradients were added to it in this step, on CUDA."""

    def wait_for_streams(self) -> None:
        """Let the current stream wait for those that have added gradients."""
        for stream in self.streams:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)

    def forget(self) -> None:
        """Begin a step: nothing has been added, nothing is under way."""
        self.work = None
        self.streams.clear()
        self.unready = len(self.slots)
        for slot in self.slots:
            slot.count = 0
            slot.ready = False
            slot.scaled = False


@dataclass
class GradBuffer:
    """Gradients of the parameters of one dtype, [elements of all buckets]."""

    grads: Tensor
    buckets: list[GradBucket]

    def slots(self) -> Iterator[GradSlot]:
        """Its parameters, bucket by bucket."""
        for bucket in self.buckets:
            yield from bucket.slots


def make_buffers(
    module: nn.Module,
    bucket_size: int,
    grad_dtype: torch.dtype | None,
    *,
    tied: Collection[str],
) -> list[GradBuffer]:
    """One buffer for each dtype of the parameters that are trained, in order of their first one.

    grad_dtype: of the buffers; None: that of their parameters, but float32 at least.
    tied: names of parameters whose buckets start last.
    """
    by_dtype: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append((name, parameter))
    if not by_dtype:
        raise ConfigError("the module has no parameters that require gradients")
    _check_kinds(list(itertools.chain.from_iterable(by_dtype.values())))
    buffers = []
    for dtype, named in by_dtype.items():
        of_buffer = grad_dtype or torch.promote_types(dtype, torch.float32)
        buffers.append(_make_buffer(named, bucket_size, of_buffer, tied=tied))
    return buffers


@torch.no_grad()
def _make_buffer(
    named: Sequence[tuple[str, nn.Parameter]],
    bucket_size: int,
    grad_dtype: torch.dtype,
    *,
    tied: Collection[str],
) -> GradBuffer:
    """The buffer of parameters of one dtype, given in registration order."""
    parts = [local_part(parameter) for _, parameter in named]
    sizes = [part.numel() for part in parts]
    waiting = [number for number, (name, _) in enumerate(named) if name in tied]
    places = plan_buckets(sizes, bucket_size, waiting=waiting)
    buffer_size = places[-1].stop
    device = parts[0].device
    grads = torch.zeros(buffer_size, dtype=grad_dtype, device=device)
    buckets = []
    for place in places:
        slots = []
        for slot in place.slots:
            name, parameter = named[slot.parameter]
            shape = parts[slot.parameter].shape
            main_grad = grads[slot.start : slot.stop].view(shape)
            slots.append(GradSlot(name, parameter, slot, main_grad, tied=place.waits))
        of_bucket = grads[place.start : place.stop]
        buckets.append(GradBucket(place, of_bucket, slots, unready=len(slots)))
    return GradBuffer(grads, buckets)


def _check_kinds(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ConfigError for parameters whose gradients a buffer cannot hold."""
    first = named[0][0]
    device = named[0][1].device
    for name, parameter in named:
        if parameter.is_complex():
            raise ConfigError(
                f"{name} is complex, and buckets are real: keep it as torch.view_as_real, "
                f"of real numbers"
            )
        if parameter.device != device:
            raise ConfigError(
                f"{first} is on {device} and {name} on {parameter.device}: wrap a module whose "
                f"parameters are on one device, or the parts of one device each"
            )


def in_order_of_backward(module: nn.Module, buffers: Sequence[GradBuffer]) -> list[GradBucket]:
    """All buckets that start by themselves, in the order in which backward should fill them.

    The same on all ranks, since it follows from the order of registration alone. A bucket is full
    when the parameter that was registered first of its own has its gradient.
    """
    number_of = {id(parameter): number for number, parameter in enumerate(module.parameters())}

    def filled_by(bucket: GradBucket) -> int:
        return min(number_of[id(slot.parameter)] for slot in bucket.slots)

    buckets = [bucket for buffer in buffers for bucket in buffer.buckets if not bucket.place.waits]
    # backward goes from the parameters that were registered last to the first
    return sorted(buckets, key=filled_by, reverse=True)


def is_split(parameter: Tensor) -> bool:
    """Whether ranks hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    return any(not placement.is_replicate() for placement in parameter.placements)


def tensor_parallel_group(module: nn.Module) -> dist.ProcessGroup | None:
    """The group over which the DTensors of a module are divided; None where it has none.

    Raises ConfigError for DTensors of several meshes or of several dimensions: only a layout says
    which ranks count what.
    """
    meshes: set[DeviceMesh] = set()
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            meshes.add(parameter.device_mesh)
    if not meshes:
        return None
    mesh = meshes.pop()
    if meshes or mesh.ndim > 1:
        raise ConfigError(
            "the module's DTensors lie on several meshes, or on one of several dimensions, "
            "so norms over them are not known; give ranks=Ranks(layout) instead of group, "
            "or split the parameters over one mesh of one dimension"
        )
    return mesh.get_group()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            local: Tensor = tensor.to_local()
            return local
    return tensor


def own_grad(parameter: Tensor, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, dense, and distributed as its parameter is."""
    if (
        isinstance(grad, DTensor)
        and isinstance(parameter, DTensor)
        and grad.placements != parameter.placements
    ):
        # that of a split embedding is a sum over ranks that is still to be made
        grad = grad.redistribute(placements=parameter.placements)
    grad = local_part(grad)
    if grad.layout != torch.strided:
        return grad.to_dense()
    return grad


def as_grad(main: Tensor, parameter: nn.Parameter) -> Tensor:
    """A buffer's gradient in the form that the parameter takes: of its dtype, and distributed as it
    is.
    """
    grad = main if main.dtype == parameter.dtype else main.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return grad
    whole: Tensor = DTensor.from_local(
        grad,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,  # which would be a collective for every parameter
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return whole
