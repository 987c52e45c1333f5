"""Reads of objects in other processes. They import nothing slow."""

from __future__ import annotations

from typing import Any

from streammega import StorageConfig
from streammega.storage import open_store


def read_part(url: str, options: dict[str, Any]) -> tuple[str, bytes]:
    """The transport that reads, and the bytes 5 to 7 of an object."""
    store, key = open_store(url, StorageConfig(storage_options=options))
    return store.transport, bytes(store.read(key, [(5, 8)])[0])


def answer_with_part(url: str, config: StorageConfig, answers: Any) -> None:
    """Put the size of an object and its bytes 1 to 3, or 0 and an error, into a queue."""
    try:
        store, key = open_store(url, config)
        answers.put((store.info(key).size, bytes(store.read(key, [(1, 4)])[0])))
    except Exception as error:
        answers.put((0, repr(error)))
