"""Which data-parallel rank a loader reads for, by what it was given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streammega.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def data_parallel(
    dp_rank: int | None, dp_size: int | None, mesh: DeviceMesh | None
) -> tuple[int, int]:
    """(rank, size), of both numbers or of a mesh; one rank where neither is given.

    Raises ConfigError for half of them, for both at once, and for a mesh that does not say which
    of its dimensions is the data-parallel one.
    """
    if mesh is None:
        if (dp_rank is None) != (dp_size is None):
            raise ConfigError(
                "dp_rank and dp_size go together: give both, or a mesh, "
                "or neither for a single rank"
            )
        return (0, 1) if dp_rank is None or dp_size is None else (dp_rank, dp_size)
    if dp_rank is not None or dp_size is not None:
        raise ConfigError("give either a mesh or dp_rank and dp_size, not both")
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "dp" not in names:
        raise ConfigError(
            f"the mesh has dimensions {names or mesh.ndim}; name the data-parallel one 'dp'"
        )
    dim = names.index("dp") if "dp" in names else 0
    return mesh.get_local_rank(dim), mesh.size(dim)
