"""How kernels are compiled: once per machine, without the GIL, also in a read-only install."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import event

log = logging.getLogger(__name__)

IS_CHECKED = os.environ.get("STREAMMEGA_CHECKED") == "1"
"""Whether every index of a kernel is compared with its array, by the environment: an IndexError in
place of a crash or of wrong tokens. Kernels take several times as long then.
"""
if IS_CHECKED:
    # A cache of their own, since entries do not tell how they were compiled. It is that of all
    # functions of numba in this process.
    _folder = Path(__file__).parent / "__pycache__"
    if not os.access(_folder, os.W_OK):
        _folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streammega"
    numba.config.CACHE_DIR = str(_folder / "checked-kernels")  # type: ignore[attr-defined]
KERNELS: list[Any] = []
"""All kernels of the modules that were imported."""


def kernel(function: Callable[..., Any]) -> Any:
    """`numba.njit` with a cache on disk: next to the source, or in the user's cache if the install
    is read-only.

    numba writes cache entries under temporary names and renames them, so several processes may
    compile at once. If nothing can be written at all, each process compiles the kernel.

    An entry is valid while the kernel's own file is unchanged, whatever happens to other files that
    it calls. So a file that calls another has a comment with that file's digest, which changes with
    it; test_kernels.py checks these comments.
    """
    try:
        compiled = numba.njit(function, cache=True, nogil=True, boundscheck=IS_CHECKED)
    except RuntimeError:  # no folder for the cache
        compiled = numba.njit(function, nogil=True, boundscheck=IS_CHECKED)
    KERNELS.append(compiled)
    return compiled


class _FirstCompilation(event.Listener):
    """Logs once that kernels are compiled, if the cache has none."""

    def __init__(self) -> None:
        self._is_first = True

    def on_start(self, event: Any) -> None:
        """The compilation of a function begins that was not in the cache."""
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
        """The compilation ends."""


event.register("numba:compile", _FirstCompilation())  # type: ignore[no-untyped-call]
