"""How kernels are compiled: once per machine, without the GIL, wherever the package lies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import event

log = logging.getLogger(__name__)

KERNELS: list[Any] = []
"""All kernels of the modules that were imported."""


def kernel(function: Callable[..., Any]) -> Any:
    """`numba.njit` with the result cached on disk: beside the source, or in the user's cache when
    the install is read-only.

    numba writes cache entries under temporary names and renames them, so several processes may
    compile at once. Where nothing can be written at all, the kernel is compiled anew by each
    process.

    An entry is valid while the kernel's own file is unchanged, so kernels that call each other are
    in one file. `intrinsics` is called from other files and never changes: whoever does change it
    removes `kernels/__pycache__` before believing a test.
    """
    try:
        compiled = numba.njit(function, cache=True, nogil=True)
    except RuntimeError:  # no folder for the cache
        compiled = numba.njit(function, nogil=True)
    KERNELS.append(compiled)
    return compiled


class _FirstCompilation(event.Listener):
    """Says once that kernels are compiled, if the cache has none."""

    def __init__(self) -> None:
        self._is_first = True

    def on_start(self, event: Any) -> None:
        """A function begins to be compiled, which was not in the cache."""
        if not self._is_first or event.data["dispatcher"] not in KERNELS:
            return
        self._is_first = False
        folder = event.data["dispatcher"].stats.cache_path
        if folder is None or not any(Path(folder).glob("*.nbc")):
            log.warning(
                "compiling kernels, which takes up to a minute, once on this machine; "
                "'streammega warmup' does it ahead, for an image for instance"
            )

    def on_end(self, event: Any) -> None:
        """It was compiled."""


event.register("numba:compile", _FirstCompilation())  # type: ignore[no-untyped-call]
