"""What targets of the fuzzer share: their form, files of one input, and checksums that always agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from streammega import StorageConfig
from streammega.storage import open_store

STORAGE = StorageConfig()
new_number = itertools.count().__next__
"""Names are never used twice: the library maps files by their names."""


class Target(NamedTuple):
    """A kind of input. run: opens it. seeds: sound inputs, which the library wrote. is_json: mutations
    change values of the JSON too, and not bytes alone. may_lack_memory: a library under ours allocates
    what a file claims, before it reads: errors of that are no finding, for what is not touched costs
    nothing.
    """

    run: Callable[[bytes], None]
    seeds: list[bytes]
    is_json: bool = False
    may_lack_memory: bool = False


class AnyChecksum:
    """In place of a module or function that computes checksums: each is equal to any other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, *_: Any, **__: Any) -> AnyChecksum:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


@contextmanager
def stored_in(folder: Path, suffix: str, data: bytes, prefix: str = "") -> Iterator[str]:
    """A new file with these bytes; its path. Names are never used twice: files are mapped by name."""
    path = str(folder / f"{prefix or new_number()}{suffix}")
    Path(path).write_bytes(data)
    try:
        yield path
    finally:
        store, key = open_store(path, STORAGE)
        store.delete(key)
