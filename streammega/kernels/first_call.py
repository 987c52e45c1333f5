"""numba's own first call, ahead of need, on a thread."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import threading
from contextlib import suppress

import numpy as np
from numba.core.compiler_lock import global_compiler_lock

from streammega.kernels.collector import take_as_old
from streammega.kernels.plan import copy_bytes

MOST_SECONDS = 10.0
"""What a fork waits for the thread: a fork while modules are imported may hold what the thread
waits for, and a child that cannot compile is better than a parent that hangs.
"""
MODULES = (
    "numba.core.typing.cffi_utils",
    "numba.core.typing.setdecl",
    "numba.core.typing.dictdecl",
    "numba.cpython.charseq",
    "numba.np.linalg",
    "numba.np.arraymath",
    "numba.np.random.generator_methods",
    "numba.np.random.legacy",
    "numba.np.polynomial.polynomial_functions",
    "numba.typed.typeddict",
    "numba.typed.typedlist",
    "numba.np.npyimpl",
    "numba.misc.cffiimpl",
)
"""Of those that the call imports, the ones that take longest. Imported before it one by one, so
that a program which ends meanwhile waits for one of them, and not for all that the call does.
"""


@functools.cache
def begin() -> None:
    """Make the first call, once in a process. Whoever calls a kernel meanwhile waits for it.

    With the first kernel, whichever it is, numba imports and registers modules of its own for a
    fifth of a second. Begun when a program imports the loader, that is over when it has found its
    data.
    """
    ends = threading.Event()
    # A daemon: Python waits for all other threads before it calls what `atexit` has.
    thread = threading.Thread(target=_prepare, args=(ends,), name="numba-first-call", daemon=True)

    def end() -> None:
        ends.set()
        # What is within LLVM when Python ends could end the process by a signal.
        thread.join()

    atexit.register(end)
    # A child that was forked meanwhile would find numba's lock held by a thread that it has not.
    os.register_at_fork(before=lambda: thread.join(MOST_SECONDS))
    thread.start()


def _prepare(ends: threading.Event) -> None:
    """Make the call, unless the program ends before it."""
    take_as_old()
    for module in MODULES:
        if ends.is_set():
            return
        # Two that import modules which import each other may see half of one: numba has this lock
        # while it imports them for another thread's call. Other versions may lack a module.
        with global_compiler_lock, suppress(ImportError):
            importlib.import_module(module)
    if not ends.is_set():
        _call()


def _call() -> None:
    no_bytes = np.empty(0, np.uint8)
    none = np.empty(0, np.int64)
    copy_bytes(no_bytes, none, none, none)
