"""The memory of gradients: contiguous buckets, and a view into a bucket for each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streammega.errors import ConfigError


@dataclass(eq=False)
class GradSlot:
    """The place of one parameter's gradient in a bucket."""

    name: str
    parameter: nn.Parameter
    main_grad: Tensor
    """A view of the bucket, of the shape of this rank's part of the parameter."""
    count: int = 0
    """Gradients added in this step, one for each backward."""


@dataclass(eq=False)
class GradBucket:
    """Gradients that one collective sums, and their progress in this step."""

    grads: Tensor
    """All of them, [elements]: Megatron's `grad_data`."""
    slots: list[GradSlot]
    is_tied: bool
    """Whether gradients of another pipeline stage are added before its collective starts."""
    ready: set[GradSlot] = field(default_factory=set)
    """Those whose last gradient of this step was added."""
    streams: set[torch.cuda.Stream] = field(default_factory=set)
    """CUDA streams on which gradients were added in this step."""

    @property
    def is_full(self) -> bool:
        """Whether backward has completed all gradients of this step."""
        return len(self.ready) == len(self.slots)

    def wait_for_streams(self) -> None:
        """Let the current stream wait for the streams that have added gradients."""
        for stream in self.streams:
            current = torch.cuda.current_stream(stream.device)
            if stream != current:
                current.wait_stream(stream)

    def reset(self) -> None:
        """Begin a step."""
        self.ready.clear()
        self.streams.clear()
        for slot in self.slots:
            slot.count = 0


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
    tied: Sequence[str],
) -> list[GradBucket]:
    """Buckets of the parameters that are trained, in the order in which their collectives start.

    The order follows from the order of registration and `tied` alone, so it is the same on all ranks.
    Backward makes the gradients of the last layers first, so parameters go in reverse; each dtype has
    buckets of its own. A bucket is usually full with the gradient of its parameter that was registered
    first.

    Args:
        bucket_size: a bucket closes with the parameter that brings it to so many elements.
        grad_dtype: of the buckets; None: the dtype of their parameters, but at least float32.
        tied: names of parameters that another stage has too, in the order in which it names its own.
            Their buckets come last.
    """
    trained = [item for item in module.named_parameters() if item[1].requires_grad]
    if not trained:
        raise ConfigError(
            "the module has no parameters that require gradients; leave it unwrapped, or unfreeze some"
        )
    _check_devices(trained)
    buckets: list[list[int]] = []
    unfilled: dict[tuple[bool, torch.dtype], tuple[list[int], int]] = {}
    numbers = {name: number for number, (name, _) in enumerate(trained)}
    untied = [number for name, number in numbers.items() if name not in tied]
    for number in (*reversed(untied), *(numbers[name] for name in tied if name in numbers)):
        name, parameter = trained[number]
        kind = (name in tied, parameter.dtype)
        members, filled = unfilled.pop(kind, ([], 0))
        if not members:
            buckets.append(members)
        members.append(number)
        filled += local_part(parameter).numel()
        if filled < bucket_size:
            unfilled[kind] = (members, filled)
    # Those of tied parameters stay in their order, at the end.
    buckets.sort(key=lambda members: 1 if trained[members[0]][0] in tied else -members[-1])
    return [_make_bucket([trained[n] for n in members], grad_dtype, tied) for members in buckets]


@torch.no_grad()
def _make_bucket(
    named_parameters: Sequence[tuple[str, nn.Parameter]],
    grad_dtype: torch.dtype | None,
    tied: Sequence[str],
) -> GradBucket:
    """A bucket of parameters of one dtype, side by side in this order."""
    parts = [local_part(parameter) for _, parameter in named_parameters]
    dtype = grad_dtype or torch.promote_types(parts[0].dtype, torch.float32)
    sizes = [part.numel() for part in parts]
    grads = torch.zeros(sum(sizes), dtype=dtype, device=parts[0].device)
    views = torch.split(grads, sizes)
    slots: list[GradSlot] = []
    for (name, parameter), part, view in zip(named_parameters, parts, views, strict=True):
        slots.append(GradSlot(name, parameter, view.view(part.shape)))
    return GradBucket(grads, slots, is_tied=slots[0].name in tied)


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
    """Whether ranks have different parts of a parameter: one of a DTensor, or of a layer of Megatron, which
    marks it.
    """
    if not isinstance(parameter, DTensor):
        return bool(getattr(parameter, "tensor_model_parallel", False))
    return any(not placement.is_replicate() for placement in parameter.placements)


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
