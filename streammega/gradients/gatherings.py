"""Parameters that several ranks step a part of each: gathered from them while the next forward
begins, and waited for where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streammega.gradients.collectives import Group, Work, gather_shards


@dataclass(eq=False)
class Gathering:
    """The parameters of one bucket, of which this rank steps a part."""

    params: Tensor
    """All of them, [elements]: a view of the buffer in which the model's parameters lie."""
    part: Tensor
    """This rank's part of them, a view."""
    main: Tensor | None
    """The fp32 copy of the part; None: its dtype is fp32, and it is stepped itself."""
    work: Work | None = None

    def start(self, group: Group) -> None:
        """Begin to gather the parts of all ranks."""
        self.work = gather_shards(self.params, group)

    def wait(self) -> None:
        """Wait for those that are under way."""
        """Wait until all parts are there."""
        work = self.work
        self.work = None
        if work is not None:
            work.wait()

    def round_main(self) -> None:
        """Make the part from its fp32 copy."""
        if self.main is not None:
            self.part.copy_(self.main)

    def widen_part(self) -> None:
        """Make the fp32 copy from the part."""
        if self.main is not None:
            self.main.copy_(self.part)

    def widen_what_differs(self) -> None:
        """Make the fp32 copy from the part where that is not its rounding: there something was
        written. Elsewhere the copy keeps the bits that the part lacks.
        """
        if self.main is None:
            return
        is_rounding = self.part == self.main.to(self.part.dtype)
        widened = self.part.to(torch.float32)
        self.main.copy_(torch.where(is_rounding, self.main, widened))


def wait_before_use(
    module: nn.Module, gatherings_of: Mapping[nn.Parameter, Sequence[Gathering]]
) -> None:
    """Every submodule with parameters of its own waits for them before its forward."""
    for submodule in module.modules():
        gatherings: dict[int, Gathering] = {}
        for parameter in submodule.parameters(recurse=False):
            for gathering in gatherings_of.get(parameter, ()):
                gatherings[id(gathering)] = gathering
        if gatherings:
            submodule.register_forward_pre_hook(_waiter(gatherings.values()))


def wait_before_reading(module: nn.Module, gatherings: Iterable[Gathering]) -> None:
    """The module's state_dict and load_state_dict wait for all of its parameters."""
    wait = _waiter(gatherings)
    module.register_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(wait)  # type: ignore[no-untyped-call]


def _waiter(gatherings: Iterable[Gathering]) -> Callable[..., None]:
    waited_for = list(gatherings)

    def wait(*_: Any) -> None:
        for gathering in waited_for:
            if gathering.work is not None:
                gathering.wait()

    return wait
