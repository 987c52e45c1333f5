"""The first weights of a model: on any layout those that one rank alone would draw, without the
whole model in memory.

`torch.manual_seed(seed); GPT(config)` draws numbers for one parameter after the other from one
generator. Here every rank draws the same ones in the same order, into memory for one parameter at a
time, and keeps what is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from streammega.gradients.buffers import local_part
from streammega.train.model import GPT, INITIAL_STD


@torch.no_grad()
def fill_with_first_weights(
    chunks: Sequence[nn.Module], whole: GPT, seed: int, name_of: Callable[[str], str]
) -> None:
    """Give the parameters of some stages their first values.

    Args:
        chunks: modules whose parameters have memory; they may be DTensors.
        whole: the model of which these are stages, on the meta device.
        seed: of the generator.
        name_of: the name in the whole model of a parameter's name in a stage.
    """
    parameters_of: dict[str, list[nn.Parameter]] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameters_of.setdefault(name_of(name), []).append(parameter)
            # Those of norms stay so; all others are drawn below.
            local_part(parameter).fill_(1.0)
    generator = torch.Generator().manual_seed(seed)
    _draw_as_constructors_do(whole, generator)
    for name, shape in _drawn(whole):
        values = torch.empty(shape).normal_(0.0, INITIAL_STD, generator=generator)
        for parameter in parameters_of.get(name_of(name), ()):
            local_part(parameter).copy_(_part_of_this_rank(values, parameter))


def _draw_as_constructors_do(whole: GPT, generator: torch.Generator) -> None:
    """Draw what a model's constructors draw first, which nobody uses: the generator is then where
    it is when one rank alone begins to draw the weights.
    """
    for module in whole.modules():
        if isinstance(module, nn.Embedding):
            torch.empty(module.weight.shape).normal_(generator=generator)
        elif isinstance(module, nn.Linear):
            torch.empty(module.weight.shape).uniform_(generator=generator)


def _drawn(whole: GPT) -> Iterator[tuple[str, torch.Size]]:
    """(name, shape) of what `Module.apply` reaches, in its order.

    One that is shared is drawn twice, and the later counts.
    """
    for name, module in whole.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            yield f"{name}.weight", module.weight.shape


def _part_of_this_rank(values: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of the values of a whole parameter."""
    if not isinstance(parameter, DTensor):
        return values
    sizes, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        values = values.narrow(dim, offset, size)
    return values
