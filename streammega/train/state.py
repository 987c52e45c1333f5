"""What a checkpoint holds: boxes of whole tensors, by the names of the whole model, whatever the
layout and the optimizer.

    model.<name>                  a parameter
    optimizer.<name>.<state>      what the optimizer keeps of it (exp_avg, step, ...); `main`: its fp32 copy, if it is narrower

Replicated, ZeRO and sharded optimizers write the same, and each reads what another wrote, on any
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from streammega.errors import StateError
from streammega.gradients.boxes import Box, Boxes, boxes_of_range, offset_of
from streammega.gradients.buffers import is_split, local_part
from streammega.gradients.sharded_optimizer import ShardedOptimizer
from streammega.parallel import Ranks
from streammega.train.parallel import Optimizer, ParallelModel, names_of

MAIN = "main"


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
                raise StateError(
                    f"{name} is {'another thing' if stored else 'missing'} in the checkpoint"
                )
            items += create_read_items_for_chunk_list(name, stored, boxes.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The memory of one box."""
        box: Tensor = self.state_dict[index.fqn].box_at(index)
        return box


@dataclass(frozen=True)
class _Part:
    """What a rank holds of a parameter for its optimizer.

    key: of its state in the optimizer. like: the parameter. span: of elements [start, stop) of this
    rank's part, flat; None: of all of it, in its shape.
    """

    name: str
    key: Tensor
    like: nn.Parameter
    span: tuple[int, int] | None
    saves: bool

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.like.shape

    def boxes(self, tensor: Tensor) -> list[Box]:
        """The boxes of a state tensor that lies like the parameter's part."""
        tensor = local_part(tensor.detach())
        if self.span is None:
            return [(offset_of(self.like), tensor)]
        return boxes_of_range(self.like, *self.span, tensor)


def state_to_save(model: ParallelModel, optimizer: Optimizer) -> dict[str, Boxes]:
    """What this rank writes: each value of the whole state is written by one rank, or by several
    alike.
    """
    ranks = model.ranks
    found: dict[str, Boxes] = {}
    if ranks.group("dp-cp") is None or ranks.members("dp-cp")[0] == ranks.rank:
        for name, parameter in names_of(model).items():
            if _saves(name, parameter, ranks):
                found[f"model.{name}"] = Boxes(
                    parameter.shape, [(offset_of(parameter), local_part(parameter.detach()))]
                )
    inner = inner_optimizer(optimizer)
    by_key: dict[str, list[Box]] = {}
    shapes: dict[str, torch.Size] = {}
    for part in _parts(model, optimizer):
        if not part.saves:
            continue
        for state, value in _values(inner, part):
            key = f"optimizer.{part.name}.{state}"
            whole = isinstance(value, Tensor) and value.dim() > 0
            shapes[key] = part.shape if whole else torch.Size()
            by_key.setdefault(key, []).extend(
                part.boxes(value) if whole else [((), torch.as_tensor(value))]
            )
    return found | {
        key: Boxes(shapes[key], boxes if shapes[key] else boxes[:1])
        for key, boxes in by_key.items()
    }


def state_to_load(
    model: ParallelModel, optimizer: Optimizer, metadata: Metadata
) -> dict[str, Boxes]:
    """The memory of this rank that a checkpoint with such metadata fills.

    Raises StateError for one of another model.
    """
    stored = metadata.state_dict_metadata
    theirs = {
        name.removeprefix("model."): value
        for name, value in stored.items()
        if name.startswith("model.")
    }
    _check_shapes(theirs, model.all_names)
    found: dict[str, Boxes] = {}
    inner = inner_optimizer(optimizer)
    devices = scalar_devices(inner)
    parts = list(_parts(model, optimizer))
    for name, parameter in names_of(model).items():
        main = f"optimizer.{name}.{MAIN}"
        key = main if main in stored and parameter.dtype == torch.float32 else f"model.{name}"
        found[key] = Boxes(
            parameter.shape, [(offset_of(parameter), local_part(parameter.detach()))]
        )
    for part in parts:
        key = f"model.{part.name}"
        if (
            _is_main(part)
            and key in found
            and f"optimizer.{part.name}.{MAIN}" not in stored
            and _is_wide(stored[key])
        ):
            # A wide run's own values are the main parameters. The narrow copies are made of them,
            # so they are not read.
            held = [] if found[key].boxes[0][1].dtype != torch.float32 else found[key].boxes
            found[key] = Boxes(part.shape, [*held, *part.boxes(part.key)])
    states = _states_of(stored)
    for part in parts:
        for state, value in states.get(part.name, {}).items():
            key = f"optimizer.{part.name}.{state}"
            if state == MAIN:
                if _is_main(part):
                    _add(found, key, part, part.key)
            elif value.size == torch.Size():
                scalar = torch.zeros((), dtype=value.properties.dtype, device=devices[id(part.key)])
                held = inner.state[part.key].setdefault(state, scalar)
                found[key] = Boxes((), [((), held)]) if key not in found else found[key]
            else:
                held = inner.state[part.key].setdefault(
                    state, torch.zeros_like(part.key, dtype=value.properties.dtype)
                )
                _add(found, key, part, held)
    return found


def after_load(
    model: ParallelModel, optimizer: Optimizer, state: Mapping[str, Boxes], metadata: Metadata
) -> None:
    """Bring what was loaded to where it was not: scalars to the other parts of a parameter, main
    parameters to the model.

    Of the checkpoint's metadata, so that all ranks do the same: one that owns no part of any
    parameter loads no main ones.
    """
    inner = inner_optimizer(optimizer)
    devices = scalar_devices(inner)
    for part in _parts(model, optimizer):
        for key, held in list(inner.state[part.key].items()):
            boxes = state.get(f"optimizer.{part.name}.{key}")
            if boxes is not None and boxes.shape == torch.Size() and isinstance(held, Tensor):
                inner.state[part.key][key] = boxes.boxes[0][1].to(devices[id(part.key)], copy=True)
    if isinstance(optimizer, ShardedOptimizer):
        stored = metadata.state_dict_metadata
        if any(
            key.endswith(f".{MAIN}") or (key.startswith("model.") and _is_wide(value))
            for key, value in stored.items()
        ):
            optimizer.publish_main()
        else:
            optimizer.reload_main()


def _states_of(stored: Mapping[str, Any]) -> dict[str, dict[str, TensorStorageMetadata]]:
    """By parameter and by state, what a checkpoint has of optimizers: looked up once, there may be
    ten thousands.
    """
    found: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, value in stored.items():
        if key.startswith("optimizer.") and isinstance(value, TensorStorageMetadata):
            name, _, state = key.removeprefix("optimizer.").rpartition(".")
            found.setdefault(name, {})[state] = value
    return found


def inner_optimizer(optimizer: Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer that holds the state of this rank."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.inner
    # of a ZeroRedundancyOptimizer
    inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
    return inner


def scalar_devices(inner: torch.optim.Optimizer) -> dict[int, torch.device]:
    """By the id of each parameter, where its optimizer looks for the scalars of its state, such as
    its step.

    Fused and capturable kernels read them on the parameter's device, by address; all others on the
    CPU. Source: torch's own Optimizer.load_state_dict, which checkpoints of boxes go around.
    """
    found = {}
    for group in inner.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            found[id(parameter)] = parameter.device if on_device else torch.device("cpu")
    return found


def _values(inner: torch.optim.Optimizer, part: _Part) -> Iterator[tuple[str, Any]]:
    yield from (
        (name, value) for name, value in inner.state.get(part.key, {}).items() if value is not None
    )
    if _is_main(part):
        yield MAIN, part.key


def _is_main(part: _Part) -> bool:
    """Whether a part's key is the fp32 copy of a narrower parameter."""
    return part.key.dtype == torch.float32 and part.like.dtype != torch.float32


def _is_wide(stored: Any) -> bool:
    return isinstance(stored, TensorStorageMetadata) and stored.properties.dtype == torch.float32


def _parts(model: ParallelModel, optimizer: Optimizer) -> Iterator[_Part]:
    """The parts of parameters whose state this rank holds."""
    names = {id(parameter): name for name, parameter in names_of(model).items()}
    ranks = model.ranks
    if isinstance(optimizer, ShardedOptimizer):
        for piece in optimizer.pieces:
            parameter = piece.slot.parameter
            name = names[id(parameter)]
            yield _Part(
                name,
                piece.main,
                parameter,
                (piece.start, piece.stop),
                _saves(name, parameter, ranks),
            )
        return
    inner = inner_optimizer(optimizer)
    first = ranks.members("dp-cp")[0] == ranks.rank or inner is not optimizer
    for group in inner.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            yield _Part(name, parameter, parameter, None, first and _saves(name, parameter, ranks))


def _saves(name: str, parameter: nn.Parameter, ranks: Ranks) -> bool:
    """Whether this rank is the one, of tensor-parallel and tied copies, that writes a parameter."""
    copied = name == "embedding.weight" and not ranks.is_first_stage
    return not copied and (is_split(parameter) or ranks.at["tp"] == 0)


def _add(found: dict[str, Boxes], key: str, part: _Part, tensor: Tensor) -> None:
    if key in found:
        found[key].boxes += part.boxes(tensor)
    else:
        found[key] = Boxes(part.shape, part.boxes(tensor))


def _check_shapes(theirs: Mapping[str, Any], ours: Mapping[str, torch.Size]) -> None:
    for name in sorted(set(theirs) ^ set(ours)):
        where, other = (
            ("the checkpoint", "this model") if name in theirs else ("this model", "the checkpoint")
        )
        raise StateError(f"{where} has a parameter {name}, {other} has not")
    for name, shape in ours.items():
        if tuple(theirs[name].size) != tuple(shape):
            raise StateError(
                f"{name} is {list(theirs[name].size)} in the checkpoint, {list(shape)} in this model"
            )
