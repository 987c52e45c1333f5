"""Where a rank stands among tensor, context, expert, data and pipeline parallelism: sizes <->
coordinates <-> groups.

Integers only. The order string names the dimensions from the fastest to the slowest: in the
default, `tp-cp-ep-dp-pp`, rank = tp + tp_size * (cp + cp_size * (dp + dp_size * pp)). Experts are a
second grid over the same ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError

ORDER = "tp-cp-ep-dp-pp"
DIMENSIONS = ("tp", "cp", "dp", "pp")
EXPERT_DIMENSIONS = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of all kinds of parallelism, and the order in which they number the ranks.

    tp, cp, dp, pp: ranks of tensor, context, data and pipeline parallelism; the world has tp * cp *
    dp * pp ranks. ep: ranks that share the experts of a layer. It re-reads the ranks of one
    pipeline stage: etp * ep * edp = tp * cp * dp, where etp (default tp) is the tensor parallelism
    of experts and edp is what is left. order: the dimensions from the fastest to the slowest; those
    left out must have size 1.

    A group is a list of ranks, its fastest dimension first. Raises ConfigError for sizes that fit
    no world.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    etp: int | None = None
    order: str = ORDER

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "ep", "dp", "pp", "etp"):
            value = getattr(self, name)
            if name == "etp" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"{name} is {value!r}; a parallel size is a whole number of at least 1"
                )
        named = self.order.lower().split("-")
        unknown = [name for name in named if name not in ("tp", "cp", "ep", "dp", "pp")]
        if unknown or len(set(named)) != len(named):
            raise ConfigError(
                f"order {self.order!r}: name each of tp, cp, ep, dp, pp at most once, joined by '-', as in {ORDER!r}"
            )
        for name in ("tp", "cp", "ep", "dp", "pp"):
            if name not in named and getattr(self, name) != 1:
                raise ConfigError(
                    f"order {self.order!r} does not name {name}, whose size is {getattr(self, name)}; add it"
                )
        stage = self.tp * self.cp * self.dp
        if stage % (self.expert_tp * self.ep):
            raise ConfigError(
                f"ep {self.ep} x etp {self.expert_tp} does not divide the {stage} ranks of a pipeline stage (tp {self.tp} x cp "
                f"{self.cp} x dp {self.dp}); change one of them"
            )
        if (self.ep > 1 or self.expert_tp != self.tp) and self._stages(self._grid) != self._stages(
            self._expert_grid
        ):
            raise ConfigError(
                f"order {self.order!r} puts experts and pipeline stages on other ranks; with both, let pp come last"
            )

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
        """The layout of a world; dp is what the other sizes leave.

        Raises ConfigError if they do not divide it.
        """
        model = cls(tp=tp, cp=cp, pp=pp, order=order).world_size
        if world_size < 1 or world_size % model:
            raise ConfigError(
                f"{world_size} ranks are not a multiple of tp {tp} x cp {cp} x pp {pp} = {model}; start another number of ranks, "
                f"or change one of the sizes"
            )
        return cls(tp=tp, cp=cp, ep=ep, dp=world_size // model, pp=pp, etp=etp, order=order)

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
                f"the mesh has dimensions {names or mesh.ndim}; name each of them one of tp, cp, dp, pp"
            )
        ranks = np.asarray(mesh.mesh.tolist(), np.int64)
        sizes = dict(zip(names, ranks.shape, strict=True))
        fastest_first = sorted(
            names, key=lambda name: (_stride(ranks, names.index(name)), -names.index(name))
        )
        rest = [name for name in ORDER.split("-") if name not in names]
        layout = cls(**sizes, order="-".join([*fastest_first, *rest]))
        if not np.array_equal(layout.grid(names), ranks):
            raise ConfigError(
                "the mesh does not number the ranks 0, 1, ... along its dimensions, in any order of them"
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
        """{"tp", "cp", "dp", "pp"} of a rank, and of its place among the experts {"etp", "ep",
        "edp"}.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank {rank} is not in [0, {self.world_size}), the world of tp x cp x dp x pp"
            )
        found: dict[str, int] = {}
        for grid, names in ((self._expert_grid, self._expert_order), (self._grid, self._order)):
            at = np.argwhere(grid == rank)[0]
            found |= dict(zip(reversed(names), at.tolist(), strict=True))
        return found

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at coordinates. Raises ConfigError outside of the layout."""
        at = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        for name, value in at.items():
            if not 0 <= value < getattr(self, name):
                raise ConfigError(f"{name} coordinate {value} is not in [0, {getattr(self, name)})")
        return int(self._grid[tuple(at[name] for name in reversed(self._order))])

    def groups(self, name: str) -> list[list[int]]:
        """All groups that differ in the named dimensions only: "tp", "dp-cp", "tp-pp", ..., of
        experts "ep", "edp", "etp-ep".

        Also "embedding": first and last pipeline stage, which hold the tied embedding, and
        "position-embedding": the first.
        """
        if name == "embedding":
            return [list(dict.fromkeys((ranks[0], ranks[-1]))) for ranks in self.groups("pp")]
        if name == "position-embedding":
            return [ranks[:1] for ranks in self.groups("pp")]
        named = name.lower().split("-")
        for grid, order, known in (
            (self._grid, self._order, DIMENSIONS),
            (self._expert_grid, self._expert_order, EXPERT_DIMENSIONS),
        ):
            if set(named) <= set(known) and len(set(named)) == len(named):
                axes = [order[::-1].index(part) for part in named]
                rest = [axis for axis in range(grid.ndim) if axis not in axes]
                size = int(np.prod([grid.shape[axis] for axis in axes]))
                ranks: list[list[int]] = (
                    grid.transpose([*rest, *sorted(axes)]).reshape(-1, size).tolist()
                )
                return ranks
        raise ConfigError(
            f"no group is named {name!r}; join some of {', '.join(DIMENSIONS)}, or of {', '.join(EXPERT_DIMENSIONS)}, by '-', "
            f"or ask for 'embedding' or 'position-embedding'"
        )

    def group_of(self, rank: int, name: str) -> list[int]:
        """The named group that a rank belongs to; for embeddings an empty list
        where it has none.
        """
        self.coordinates(rank)
        return next((group for group in self.groups(name) if rank in group), [])

    def grid(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Ranks as an array with an axis for each of tp, cp, dp, pp that is named, in that order;
        the others have size 1.
        """
        wrong = [name for name in names if name not in DIMENSIONS]
        left_out = [name for name in DIMENSIONS if name not in names and getattr(self, name) > 1]
        if wrong or left_out:
            raise ConfigError(
                f"a mesh of dimensions {tuple(names)}: {', '.join(wrong + left_out)} cannot be named, or left out"
            )
        axes = [self._order[::-1].index(name) for name in names]
        rest = [axis for axis in range(4) if axis not in axes]
        return self._grid.transpose([*axes, *rest]).reshape([getattr(self, name) for name in names])

    def reads(self, rank: int) -> bool:
        """Whether a rank reads data: tensor-parallel rank 0 of the first and of the last pipeline
        stage.
        """
        at = self.coordinates(rank)
        return at["tp"] == 0 and at["pp"] in (0, self.pp - 1)

    def _stages(self, grid: NDArray[np.int64]) -> list[list[int]]:
        """The ranks of every pipeline stage in one of the two grids."""
        order = self._order if grid is self._grid else self._expert_order
        ranks: list[list[int]] = np.sort(
            np.moveaxis(grid, order[::-1].index("pp"), 0).reshape(self.pp, -1)
        ).tolist()
        return ranks

    @cached_property
    def _order(self) -> tuple[str, ...]:
        return self._complete(lambda name: None if name == "ep" else name)

    @cached_property
    def _expert_order(self) -> tuple[str, ...]:
        return self._complete(
            lambda name: {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}.get(name)
        )

    def _complete(self, rename: Any) -> tuple[str, ...]:
        named = self.order.lower().split("-")
        full = named + [name for name in ("tp", "pp", "dp", "ep", "cp") if name not in named]
        return tuple(new for name in full if (new := rename(name)) is not None)

    @cached_property
    def _grid(self) -> NDArray[np.int64]:
        sizes = [getattr(self, name) for name in reversed(self._order)]
        return np.arange(self.world_size, dtype=np.int64).reshape(sizes)

    @cached_property
    def _expert_grid(self) -> NDArray[np.int64]:
        of = {"etp": self.expert_tp, "ep": self.ep, "edp": self.expert_dp, "pp": self.pp}
        return np.arange(self.world_size, dtype=np.int64).reshape(
            [of[name] for name in reversed(self._expert_order)]
        )


def _stride(ranks: NDArray[np.int64], axis: int) -> int:
    """How far apart neighbours along an axis are numbered; 0 where it has one only."""
    if ranks.shape[axis] == 1:
        return 0
    return int(np.diff(np.take(ranks, [0, 1], axis=axis), axis=axis).flat[0])
