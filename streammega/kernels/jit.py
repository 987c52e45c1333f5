"""How kernels are compiled: once per machine, without the GIL, also in a read-only install."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba

# numba asks for it at the first call of a function: a child that is forked in the middle of this import
# would wait for its end for ever
import numpy.ma  # noqa: F401
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime.nrt import rtsys

from streammega.config.validate import user_caches
from streammega.errors import CacheError
from streammega.errors.logs import get_logger

log = get_logger(__name__)

IS_CHECKED = os.environ.get("STREAMMEGA_CHECKED") == "1"
"""Whether every index of a kernel is compared with its array, by the environment: an IndexError in
place of a crash or of wrong tokens. Kernels take several times as long then.
"""
ARRAY_MODULE = "numba.np.arrayobj"
"""What numba imports when it first loads machine code that handles arrays."""
KERNELS: list[Any] = []
"""All kernels of the modules that were imported."""


class _KernelCache(FunctionCache):
    """numba's cache on disk, but the code of a kernel is loaded by itself.

    numba's own cache first registers all functions that numba can compile. That takes half a second of
    each process, and machine code needs none of them. A kernel that has to be compiled has them still.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel for these types of arguments. None: it is not in the cache."""
        rtsys.initialize(target_context)  # allocates the arrays that kernels make
        return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]


@contextmanager
def loading_ahead() -> Iterator[None]:
    """Load what the first kernels need, a tenth of a second, while the body waits for storage.

    It has ended when the body has: a child that is forked meanwhile would wait for the import for ever.
    """

    def load() -> None:
        with suppress(Exception):  # the first kernel tries again, and raises it to the caller
            rtsys.initialize(KERNELS[0].targetctx)
            importlib.import_module(ARRAY_MODULE)

    thread = None
    if KERNELS and ARRAY_MODULE not in sys.modules:
        thread = threading.Thread(target=load, name="streammega-kernels", daemon=True)
        thread.start()
    try:
        yield
    finally:
        if thread is not None:
            thread.join()


def kernel(function: Callable[..., Any]) -> Any:
    """`numba.njit` with a cache on disk: in NUMBA_CACHE_DIR, else next to the source, or in the
    user's cache if the install is read-only.

    numba writes cache entries under temporary names and renames them, so several processes may
    compile at once. If nothing can be written at all, each process compiles the kernel.

    An entry is valid while the kernel's own file is unchanged, whatever happens to other files that
    it calls. So a file that calls another has a comment with that file's digest, which changes with
    it; test_kernels.py checks these comments.
    """
    folder = _cache_folder(Path(function.__code__.co_filename))
    config: Any = numba.config
    of_all_functions = config.CACHE_DIR
    config.CACHE_DIR = folder
    try:
        compiled = numba.njit(function, nogil=True, boundscheck=IS_CHECKED)
        if folder:
            # in place of `cache=True`, which sets numba's own
            compiled._cache = _KernelCache(function)  # type: ignore[no-untyped-call]
    finally:
        config.CACHE_DIR = of_all_functions
    KERNELS.append(compiled)
    return compiled


@functools.cache
def _cache_folder(source: Path) -> str:
    """The folder for what this numba compiles of this file; "" if none can be written.

    After an upgrade numba writes the new index of a kernel before its code. In one folder for all
    versions, another process could find old code by the new index. Entries do not tell either
    whether they check indices.
    """
    try:
        version = blake2b(numba.__version__.encode() + source.read_bytes(), digest_size=4)
    except OSError:  # installed without sources
        return ""
    name = f"{'checked-kernels' if IS_CHECKED else 'kernels'}/{source.stem}-{version.hexdigest()}"
    config: Any = numba.config
    caches = [source.parent / "__pycache__"]
    with suppress(CacheError):
        caches.append(user_caches() / "streammega")
    for cache in [config.CACHE_DIR, *caches] if config.CACHE_DIR else caches:
        folder = Path(cache) / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:  # read-only, for instance
            continue
        return str(folder)
    return ""


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
# A fork waits for threads that compile: their lock would never be free in the child.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)
