"""How kernels are compiled: once per machine, without the GIL, wherever the package lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def kernel(function: Callable[..., Any]) -> Any:
    """`numba.njit` with the result cached on disk: beside the source, or in the user's cache when
    the install is read-only.

    numba writes cache entries under temporary names and renames them, so several processes may
    compile at once. Where nothing can be written at all, the kernel is compiled anew by each
    process.

    An entry is believed while the kernel's own file is as it was. Whoever changes one that kernels
    of other files call (keys, draws) removes `kernels/__pycache__` before believing a test.
    """
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:  # no folder for the cache
        return numba.njit(function, nogil=True)
