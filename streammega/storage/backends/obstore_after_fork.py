"""obstore as this process may use it: a forked child has its own copy.

obstore waits for the network in a runtime within its extension module. A fork copies that runtime
without its threads, so calls in the child never return. A second import does not help, for a file is
loaded only once. So the child loads a copy of that file, in memory and under another name, which has
a fresh runtime.

The child never touches the parent's copy, and never frees the parent's clients: freeing one wakes
the runtime, whose locks may be held by threads that the child does not have.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import os
import shutil
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import Any

import obstore
import obstore.exceptions
import obstore.store

from streammega.storage.fork_lock import process_lock

log = logging.getLogger(__name__)

PACKAGE = "obstore"
EXTENSION = "obstore._obstore"
COPIED = "streammega-obstore"
"""The name of the copy in lists of mapped files, such as /proc/self/maps."""


@dataclass
class _ProcessState:
    """The state of obstore in this process. library: None if it is unknown or cannot be used."""

    library: Any = obstore
    settled: bool = True
    """Whether `library` is known."""
    forks: int = 0
    """Forks between this process and the one that imported obstore."""
    used: bool = False
    """Whether this process, or a parent, has opened a client."""


_state = _ProcessState()
_clients: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Open clients by their ids, for they have no hash."""
_lock = process_lock()


def library() -> Any:
    """The package `obstore` that this process may use, with its `store` and `exceptions`.

    None if it was forked after obstore had been used, and cannot load a copy.
    """
    if not _state.settled:
        with _lock:
            if not _state.settled:
                _state.library = _for_child()
                _state.settled = True
    return _state.library


def opened(client: Any) -> Any:
    """Register a client and return it: no child that inherits it will ever free it."""
    _clients[id(client)] = client
    _state.used = True
    return client


def _for_child() -> Any:
    try:
        return _load_copy()
    except Exception as error:
        # There are no memory files (only Linux has them), no /proc, or a policy forbids running them.
        log.debug("a forked process cannot load a copy of obstore: %s", error)
        return None if _state.used else obstore


def _load_copy() -> ModuleType:
    """obstore once more, with an extension module that no process has used."""
    memory_file = os.memfd_create(COPIED)
    try:
        shutil.copyfile(obstore._obstore.__file__, f"/proc/self/fd/{memory_file}")
        # The loader does not load a name twice. The parent's copy may have had the same descriptor,
        # so the number of forks makes the name unique.
        copied_path = f"/proc/self/fd/{'./' * _state.forks}{memory_file}"
        with _without_package():
            _load_extension(copied_path)
            library = importlib.import_module(PACKAGE)
            importlib.import_module(f"{PACKAGE}.store")
            importlib.import_module(f"{PACKAGE}.exceptions")
            return library
    finally:
        os.close(memory_file)  # what is mapped stays


def _load_extension(path: str) -> None:
    loader = ExtensionFileLoader(EXTENSION, path)
    spec = importlib.util.spec_from_file_location(EXTENSION, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[EXTENSION] = module
    loader.exec_module(module)


@contextmanager
def _without_package() -> Iterator[None]:
    """Within, obstore counts as not imported. Afterwards the modules from before are back.

    So the program's own objects of obstore keep their classes.
    """
    before = {name: sys.modules[name] for name in _imported_names()}
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in _imported_names():
            del sys.modules[name]
        sys.modules.update(before)


def _imported_names() -> list[str]:
    return [name for name in list(sys.modules) if name.partition(".")[0] == PACKAGE]


def _after_fork() -> None:
    for client in list(_clients.values()):
        # Never freed, not even at the end of the child.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    _clients.clear()
    _state.library = None
    _state.settled = False
    _state.forks += 1


os.register_at_fork(after_in_child=_after_fork)
