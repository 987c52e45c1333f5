"""obstore as this process may use it: a forked child has a copy of its own.

obstore waits for the network in a runtime that lives in its extension module. A fork copies that
runtime without its threads: whatever asks it in the child waits for ever. Nor does a second import
help, for a file that is loaded already is not loaded again. So the child loads a copy of that
file, which lies in memory under a name of its own: it has a runtime that nobody has begun yet.

Nothing of the parent's copy is touched in the child. Its clients are never let go there either:
freeing one wakes the runtime, whose locks may be held by threads that the child does not have.
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
"""What the copy is called in lists of mapped files, such as /proc/self/maps."""


@dataclass
class _ProcessState:
    """What this process has of obstore.

    library: None where it is not known yet, or there is none.
    """

    library: Any = obstore
    settled: bool = True
    """Whether it is known."""
    forks: int = 0
    """Forks between this process and the one that imported obstore."""
    used: bool = False
    """Whether this process, or one before it, has opened a client."""


_state = _ProcessState()
_clients: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By their ids, for clients have no hash."""
_lock = process_lock()


def library() -> Any:
    """The package `obstore` that this process may use, with its `store` and `exceptions`.

    None where it may use none: it was forked after obstore had been used, and cannot load a copy.
    """
    if not _state.settled:
        with _lock:
            if not _state.settled:
                _state.library = _for_child()
                _state.settled = True
    return _state.library


def opened(client: Any) -> Any:
    """The client, which is noted: no child that inherits it will ever free it."""
    _clients[id(client)] = client
    _state.used = True
    return client


def _for_child() -> Any:
    try:
        return _load_copy()
    except Exception as error:
        # No memory files here (they are Linux's), no /proc, or a policy against running them.
        log.debug("a forked process cannot load a copy of obstore: %s", error)
        return None if _state.used else obstore


def _load_copy() -> ModuleType:
    """obstore once more, with an extension module that no process has used."""
    memory_file = os.memfd_create(COPIED)
    try:
        shutil.copyfile(obstore._obstore.__file__, f"/proc/self/fd/{memory_file}")
        # The loader takes a file of a known name for the one it has. The parent's copy may have
        # had this very number, so that the name also tells how many forks ago it was loaded.
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
    """obstore is not imported within, and what was imported before is again afterwards.

    So the program's own objects of obstore keep the classes that they were made of.
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
        # For ever: also when Python frees everything at the end of the child.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    _clients.clear()
    _state.library = None
    _state.settled = False
    _state.forks += 1


os.register_at_fork(after_in_child=_after_fork)
