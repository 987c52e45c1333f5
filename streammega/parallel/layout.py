"""Where a rank stands among tensor, context, expert, data and pipeline parallelism: sizes <->
coordinates <-> groups.

Integers only. The order string names the dimensions from the fastest to the slowest: in the
default, `tp-cp-ep-dp-pp`, rank = tp + tp_size * (cp + cp_size * (dp + dp_size * pp)). Experts are a
second grid over the same ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config.validate import whole_number
from streammega.errors import ConfigError
from streammega.errors.cached_property import cached_property

ORDER = "tp-cp-ep-dp-pp"
NAMES = ("tp", "cp", "ep", "dp", "pp")
"""What an order may name."""
DIMENSIONS = ("tp", "cp", "dp", "pp")
"""Dimensions of the ranks."""
EXPERT_DIMENSIONS = ("etp", "ep", "edp", "pp")
"""Dimensions of the same ranks where they compute experts."""
EXPERT_NAMES = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
"""Names of an order, as dimensions of experts."""


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of all kinds of parallelism, and the order in which they number the ranks.

    A group is a list of ranks, its fastest dimension first. Raises ConfigError for sizes that fit
    no world.

    Args:
        tp, cp, dp, pp: ranks of tensor, context, data and pipeline parallelism; the world has
            tp * cp * dp * pp ranks.
        ep: ranks that share the experts of a layer. They number the ranks of one pipeline stage a
            second time: etp * ep * edp = tp * cp * dp, where edp is what the others leave.
        etp: tensor parallelism of experts; None: tp.
        order: the dimensions from the fastest to the slowest; those left out must have size 1.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    etp: int | None = None
    order: str = ORDER

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_order()
        self._check_experts()

    @classmethod
    def of_world(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        pp: int = 1,
        etp: int | None = None,
        order: str = ORDER,
    ) -> ParallelLayout:
        """The layout of a world; dp is what tp, cp and pp leave. Experts are on the same ranks, so ep
        and etp leave no less.

        Raises ConfigError if tp * cp * pp does not divide the world, or experts do not fit it.
        """
        world_size = whole_number("world_size", world_size)
        # Checks these sizes before they divide anything.
        one_copy = cls(tp=tp, cp=cp, pp=pp, order=order)
        dp, rest = divmod(world_size, one_copy.world_size)
        if world_size < 1 or rest:
            raise ConfigError(
                f"{world_size} ranks are not a multiple of tp {tp} x cp {cp} x pp {pp} = "
                f"{one_copy.world_size}; start another number of ranks, or change one of the sizes"
            )
        return replace(one_copy, dp=dp, ep=ep, etp=etp)

    @classmethod
    def from_mesh(cls, mesh: Any) -> ParallelLayout:
        """The layout of a torch DeviceMesh over all ranks, whose dimensions are named among tp, cp,
        dp, pp.

        Raises ConfigError for other names, or a mesh that numbers its ranks in no order of
        dimensions.
        """
        names = tuple(mesh.mesh_dim_names or ())
        if len(names) != mesh.ndim or not set(names) <= set(DIMENSIONS):
            raise ConfigError(
                f"the mesh has dimensions {names or mesh.ndim}; "
                f"name each of them one of tp, cp, dp, pp"
            )
        ranks = np.asarray(mesh.mesh.tolist(), np.int64)
        sizes = dict(zip(names, ranks.shape, strict=True))
        left_out = [name for name in ORDER.split("-") if name not in names]
        strides = {
            name: 0 if size == 1 else int(ranks.take(1, axis).flat[0] - ranks.flat[0])
            for axis, (name, size) in enumerate(zip(names, ranks.shape, strict=True))
        }
        # Reversed, since the last dimension of an array is the fastest. `sorted` keeps this order among
        # dimensions of size 1, whose strides say nothing.
        last_first = names[::-1]
        order = "-".join([*sorted(last_first, key=strides.__getitem__), *left_out])
        layout = cls(**sizes, order=order)
        if not np.array_equal(layout.grid(names), ranks):
            raise ConfigError(
                "the mesh does not number the ranks 0, 1, ... along its dimensions, in any order of "
                "them; make it by device_mesh(layout, ...) or torch's init_device_mesh"
            )
        return layout

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold copies of the same experts."""
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank by the names "tp", "cp", "dp", "pp", and among experts "etp", "ep",
        "edp".
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} is not in [0, {self.world_size}), the world of tp x cp x dp x pp"
            )
        coordinates: dict[str, int] = {}
        # Both grids have pp. If there are no experts, and pp is not last in the order, their stages
        # differ. Then those of the grid of ranks are right: they come last, and replace the others.
        for grid, axes in ((self._expert_grid, self._expert_axes), (self._grid, self._axes)):
            place = np.unravel_index(rank, grid.shape)
            coordinates |= {name: int(index) for name, index in zip(axes, place, strict=True)}
        return coordinates

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at coordinates. Raises ConfigError outside of the layout."""
        coordinates = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        for name, index in coordinates.items():
            size = getattr(self, name)
            if not 0 <= index < size:
                raise ConfigError(f"{name} coordinate {index} is not in [0, {size})")
        place = tuple(coordinates[name] for name in self._axes)
        return int(self._grid[place])

    def groups(self, name: str) -> list[list[int]]:
        """All groups that differ in the named dimensions only: "tp", "dp-cp", "tp-pp", ..., of
        experts "ep", "edp", "etp-ep".

        Also "embedding": first and last pipeline stage, which hold the tied embedding, and
        "position-embedding": the first.
        """
        if name == "embedding":
            return [sorted({ranks[0], ranks[-1]}) for ranks in self.groups("pp")]
        if name == "position-embedding":
            return [ranks[:1] for ranks in self.groups("pp")]
        dimensions = name.lower().split("-")
        if len(set(dimensions)) == len(dimensions):
            if set(dimensions) <= set(DIMENSIONS):
                return _groups_along(self._grid, self._axes, dimensions)
            if set(dimensions) <= set(EXPERT_DIMENSIONS):
                return _groups_along(self._expert_grid, self._expert_axes, dimensions)
        raise ConfigError(
            f"no group is named {name!r}; join some of {', '.join(DIMENSIONS)}, "
            f"or of {', '.join(EXPERT_DIMENSIONS)}, by '-', "
            f"or ask for 'embedding' or 'position-embedding'"
        )

    def group_of(self, rank: int, name: str) -> list[int]:
        """The named group that a rank belongs to; empty for embeddings where it has none."""
        self.coordinates(rank)  # raises ConfigError for a rank outside of the world
        return next((group for group in self.groups(name) if rank in group), [])

    def grid(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Ranks as an array with an axis for each of tp, cp, dp, pp that is named, in that order;
        the others have size 1.
        """
        missing = [name for name in DIMENSIONS if name not in names and getattr(self, name) > 1]
        if missing or not set(names) <= set(DIMENSIONS):
            raise ConfigError(
                f"a mesh of this layout cannot have the dimensions {tuple(names)}; name some of "
                f"{', '.join(DIMENSIONS)}, and each whose size is above 1"
                + (f": add {', '.join(missing)}" if missing else "")
            )
        named_axes = [self._axes.index(name) for name in names]
        other_axes = [axis for axis in range(self._grid.ndim) if axis not in named_axes]
        named_first = self._grid.transpose([*named_axes, *other_axes])
        sizes = [getattr(self, name) for name in names]
        return named_first.reshape(sizes)

    def _check_sizes(self) -> None:
        sizes = {name: getattr(self, name) for name in NAMES}
        if self.etp is not None:
            sizes["etp"] = self.etp
        for name, size in sizes.items():
            # the way to set a field of what is frozen
            object.__setattr__(self, name, whole_number(name, size, 1))

    def _check_order(self) -> None:
        dimensions = self.order.lower().split("-")
        unknown = [name for name in dimensions if name not in NAMES]
        if unknown or len(set(dimensions)) != len(dimensions):
            raise ConfigError(
                f"order {self.order!r}: name each of tp, cp, ep, dp, pp at most once, "
                f"joined by '-', as in {ORDER!r}"
            )
        for name in NAMES:
            size = getattr(self, name)
            if name not in dimensions and size != 1:
                raise ConfigError(
                    f"order {self.order!r} does not name {name}, whose size is {size}; add it"
                )

    def _check_experts(self) -> None:
        stage_ranks = self.tp * self.cp * self.dp
        if stage_ranks % (self.expert_tp * self.ep):
            raise ConfigError(
                f"ep {self.ep} x etp {self.expert_tp} does not divide the {stage_ranks} ranks of a "
                f"pipeline stage (tp {self.tp} x cp {self.cp} x dp {self.dp}); change one of them"
            )
        has_experts = self.ep > 1 or self.expert_tp != self.tp
        # The experts of a layer are on the ranks of its stage.
        stages = _ranks_of_stages(self._grid, self._axes)
        expert_stages = _ranks_of_stages(self._expert_grid, self._expert_axes)
        if has_experts and stages != expert_stages:
            raise ConfigError(
                f"order {self.order!r} gives a pipeline stage other ranks than its experts; "
                f"put pp last in the order"
            )

    def _slowest_first(self) -> list[str]:
        """All dimensions, from the slowest to the fastest: the axes of an array of ranks."""
        dimensions = self.order.lower().split("-")
        # As Megatron appends them. Their size is 1, so their place matters to experts only, whose
        # dp is what their other sizes leave.
        left_out = [name for name in ("tp", "pp", "dp", "ep", "cp") if name not in dimensions]
        return [*dimensions, *left_out][::-1]

    @cached_property
    def _axes(self) -> tuple[str, ...]:
        """Dimensions of `_grid`: experts are not among them."""
        return tuple(name for name in self._slowest_first() if name != "ep")

    @cached_property
    def _expert_axes(self) -> tuple[str, ...]:
        """Dimensions of `_expert_grid`: experts have no context parallelism. Its ranks are in edp."""
        return tuple(EXPERT_NAMES[name] for name in self._slowest_first() if name in EXPERT_NAMES)

    @cached_property
    def _grid(self) -> NDArray[np.int64]:
        """All ranks, with an axis for each of `_axes`."""
        sizes = [getattr(self, name) for name in self._axes]
        return np.arange(self.world_size, dtype=np.int64).reshape(sizes)

    @cached_property
    def _expert_grid(self) -> NDArray[np.int64]:
        """All ranks, with an axis for each of `_expert_axes`."""
        size_of = {"etp": self.expert_tp, "ep": self.ep, "edp": self.expert_dp, "pp": self.pp}
        sizes = [size_of[name] for name in self._expert_axes]
        return np.arange(self.world_size, dtype=np.int64).reshape(sizes)


def _groups_along(
    grid: NDArray[np.int64], axes: Sequence[str], dimensions: Sequence[str]
) -> list[list[int]]:
    """The ranks of a grid in groups that differ in the named dimensions only."""
    # Sorted: the grid says which dimension of a group is the fastest, and not the group's name.
    within = sorted(axes.index(name) for name in dimensions)
    between = [axis for axis in range(grid.ndim) if axis not in within]
    group_size = math.prod(grid.shape[axis] for axis in within)
    group_by_group = grid.transpose([*between, *within])
    groups: list[list[int]] = group_by_group.reshape(-1, group_size).tolist()
    return groups


def _ranks_of_stages(grid: NDArray[np.int64], axes: Sequence[str]) -> list[list[int]]:
    """The ranks of each pipeline stage, in rising order."""
    by_stage = np.moveaxis(grid, axes.index("pp"), 0)
    stages: list[list[int]] = np.sort(by_stage.reshape(len(by_stage), -1)).tolist()
    return stages
