"""The memory of gradients: contiguous buckets, and a view into a bucket for each parameter."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from streammega.errors import ConfigError


@dataclass
class GradSlot:
    """The gradient of one parameter: its place in a bucket, and its progress in this step."""

    name: str
    parameter: nn.Parameter
    main_grad: Tensor
    """A view of the bucket, of the shape of this rank's part of the parameter."""
    is_tied: bool
    """Whether another pipeline stage has the parameter too."""
    count: int = 0
    """Micro-batches added in this step."""
    is_ready: bool = False
    """Whether the last micro-batch of this step was added."""
    is_scaled: bool = False
    """Whether the bucket's values were multiplied by the reducer's scale."""
    is_unused: bool = False
    """Whether no rank used the parameter in the last step. Then it has no gradient, as with torch's DDP."""
    exposed: weakref.ref[Tensor] | None = None
    """The gradient that `expose_grad` set, to recognise one that was set later."""

    @property
    def is_used(self) -> bool:
        """Whether the parameter counts as used in this step. A tied one does, for another stage uses it."""
        return self.count > 0 or self.is_tied

    def expose_grad(self) -> None:
        """Put the reduced gradient where optimizers look; None where no rank used the parameter."""
        grad = None if self.is_unused else as_grad(self.main_grad, self.parameter)
        self.parameter.grad = grad
        self.exposed = None if grad is None else weakref.ref(grad)

    def unreduced_grad(self) -> Tensor | None:
        """A gradient that neither the hook nor `expose_grad` has seen."""
        return None if self._has_exposed_grad() else self.parameter.grad

    def accumulated_grad(self) -> Tensor | None:
        """The gradient of the last step, if it was not zeroed and the parameter is still trained."""
        is_kept = self._has_exposed_grad() and self.parameter.requires_grad
        return self.parameter.grad if is_kept else None

    def _has_exposed_grad(self) -> bool:
        exposed = None if self.exposed is None else self.exposed()
        return self.parameter.grad is exposed


@dataclass
class GradBucket:
    """Gradients that are reduced together, and their progress in this step."""

    grads: Tensor
    """All of them, [elements]."""
    slots: list[GradSlot]
    is_tied: bool
    """Whether gradients of another pipeline stage are added before its collective starts."""
    unready: int
    """Slots whose gradient of this step is incomplete. With 0 the bucket is full."""
    work: dist.Work | None = None
    """The collective under way, if there are other ranks."""
    is_finite: Tensor | None = None
    """bool []: whether this rank's gradients of the step are, before they are summed; None: not checked."""
    streams: set[torch.cuda.Stream] = field(default_factory=set)
    """CUDA streams on which gradients were added in this step."""

    def wait_for_streams(self) -> None:
        """Let the current stream wait for the streams that have added gradients."""
        for stream in self.streams:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)

    def check(self) -> None:
        """Set `is_finite`, which stays on the device: the host would wait for it."""
        # Not by a norm, whose squares may overflow. torch has no largest element of an empty tensor.
        extremes = torch.stack(torch.aminmax(self.grads)) if self.grads.numel() else self.grads
        self.is_finite = extremes.isfinite().all()

    def reset(self) -> None:
        """Begin a step."""
        self.work = None
        self.is_finite = None
        self.streams.clear()
        self.unready = len(self.slots)
        for slot in self.slots:
            slot.count = 0
            slot.is_ready = False
            slot.is_scaled = False


def default_bucket_size(dp: int) -> int:
    """Elements of a bucket that keep a ring of `dp` ranks busy, as Megatron's.

    A ring sends a bucket in `dp` parts. Each part should take longer than its start.
    """
    return max(40_000_000, 1_000_000 * dp)


def make_buckets(
    module: nn.Module,
    bucket_size: int,
    grad_dtype: torch.dtype | None,
    *,
    tied: Collection[str],
) -> list[GradBucket]:
    """Buckets of the parameters that are trained, in the order in which their collectives start.

    The order follows from the order of registration alone, so it is the same on all ranks. Backward
    makes the gradients of the last layers first, so parameters go in reverse; each dtype has buckets
    of its own. A bucket is usually full with the gradient of its parameter that was registered first.

    Args:
        bucket_size: a bucket closes with the parameter that brings it to so many elements.
        grad_dtype: of the buckets; None: the dtype of their parameters, but at least float32.
        tied: names of parameters that another stage has too. Their buckets come last.
    """
    named_parameters = [item for item in module.named_parameters() if item[1].requires_grad]
    if not named_parameters:
        raise ConfigError(
            "the module has no parameters that require gradients; leave it unwrapped, or unfreeze some"
        )
    _check_devices(named_parameters)
    sizes = [local_part(parameter).numel() for _, parameter in named_parameters]
    untied_of_dtype: dict[torch.dtype, list[int]] = {}
    tied_of_dtype: dict[torch.dtype, list[int]] = {}
    for number, (name, parameter) in enumerate(named_parameters):
        of_dtype = tied_of_dtype if name in tied else untied_of_dtype
        of_dtype.setdefault(parameter.dtype, []).append(number)
    untied: list[list[int]] = []
    for numbers in untied_of_dtype.values():
        untied += _divide(numbers, sizes, bucket_size)
    untied.sort(key=min, reverse=True)
    buckets = [
        _make_bucket([named_parameters[n] for n in members], grad_dtype) for members in untied
    ]
    for numbers in tied_of_dtype.values():
        members = [named_parameters[number] for number in reversed(numbers)]
        buckets.append(_make_bucket(members, grad_dtype, is_tied=True))
    return buckets


def _divide(numbers: Sequence[int], sizes: Sequence[int], bucket_size: int) -> list[list[int]]:
    """The parameters of each bucket, from the last registered to the first."""
    buckets: list[list[int]] = [[]]
    filled = 0
    for number in reversed(numbers):
        if filled >= bucket_size:
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += sizes[number]
    return buckets


@torch.no_grad()
def _make_bucket(
    named_parameters: Sequence[tuple[str, nn.Parameter]],
    grad_dtype: torch.dtype | None,
    *,
    is_tied: bool = False,
) -> GradBucket:
    """A bucket of parameters of one dtype, side by side in this order."""
    parts = [local_part(parameter) for _, parameter in named_parameters]
    size = sum(part.numel() for part in parts)
    dtype = grad_dtype or torch.promote_types(parts[0].dtype, torch.float32)
    grads = torch.zeros(size, dtype=dtype, device=parts[0].device)
    slots: list[GradSlot] = []
    start = 0
    for (name, parameter), part in zip(named_parameters, parts, strict=True):
        main_grad = grads[start : start + part.numel()].view(part.shape)
        slots.append(GradSlot(name, parameter, main_grad, is_tied))
        start += part.numel()
    return GradBucket(grads, slots, is_tied, unready=len(slots))


def _check_devices(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise ConfigError for parameters whose gradients one bucket cannot hold."""
    first = named_parameters[0][0]
    device = named_parameters[0][1].device
    for name, parameter in named_parameters:
        if parameter.device != device:
            raise ConfigError(
                f"{first} is on {device} and {name} on {parameter.device}: wrap a module whose "
                f"parameters are on one device, or the parts of one device each"
            )


def is_split(parameter: Tensor) -> bool:
    """Whether ranks have different parts of a parameter."""
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
            "the module's DTensors are on several meshes, or on one of several dimensions, "
            "so norms over them cannot be computed; give ranks=Ranks(layout) instead of group, "
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


def local_grad(parameter: Tensor, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, dense, and distributed like its parameter."""
    if (
        isinstance(grad, DTensor)
        and isinstance(parameter, DTensor)
        and grad.placements != parameter.placements
    ):
        # the gradient of a split embedding still has to be summed over ranks
        grad = grad.redistribute(placements=parameter.placements)
    grad = local_part(grad)
    if grad.layout != torch.strided:
        return grad.to_dense()
    return grad


def as_grad(main: Tensor, parameter: nn.Parameter) -> Tensor:
    """The gradient in a buffer with the dtype of its parameter, and distributed like it."""
    grad = main if main.dtype == parameter.dtype else main.to(parameter.dtype)
    if not isinstance(parameter, DTensor):
        return grad
    distributed: Tensor = DTensor.from_local(
        grad,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,  # which would be a collective for every parameter
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return distributed
