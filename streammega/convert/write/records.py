"""Small files of the work folder, written whole. A record that cannot be read counts as none, so
that what it speaks of is made again.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from streammega.config import StorageConfig
from streammega.errors import StorageError
from streammega.storage import open_store, save_bytes
from streammega.storage.store import Bytes


def load_bytes(url: str, storage: StorageConfig) -> Bytes:
    """A small file of the work folder. Raises StorageError."""
    store, key = open_store(url, storage)
    info = store.info(key)
    (stored,) = store.read(key, [(0, info.size)], info.etag)
    return np.frombuffer(stored, np.uint8)


def load_json(url: str, storage: StorageConfig) -> dict[str, Any] | None:
    """A record of the work folder; None where there is none that can be read."""
    try:
        stored = load_bytes(url, storage)
        record: Any = json.loads(bytes(stored))
    except (StorageError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def save_json(url: str, value: Any, storage: StorageConfig) -> None:
    """Write a record, at once."""
    text = json.dumps(value, indent=1)
    save_bytes(url, text.encode(), storage)
