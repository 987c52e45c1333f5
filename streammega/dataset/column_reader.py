"""Reading columns: the stored values of any tokens of a dataset, and these as numbers of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.columns import FLOAT8, ColumnFile, StoredColumn, column_named
from streammega.storage import ObjectInfo, open_store
from streammega.storage.derived_stores import ConcatStore
from streammega.storage.store import Span, Store


class ColumnReader:
    """The values of a column, by tokens of the dataset: of all its shards, end to end.

    Args:
        column: complete, with ETags, as `open_manifests` gives it.
        tokens: of each shard.
        dataset: its name, for messages.

    Raises FormatError where only some of its shards have the column.
    """

    def __init__(
        self, column: StoredColumn, tokens: Sequence[int], storage: StorageConfig, dataset: str
    ) -> None:
        column_named([column], column.name, dataset)
        self.column = column
        parts = []
        # Not mapped: what is read once would stay in memory.
        storage = storage.tuned(local_io="pread")
        for file, count in zip(column.files, tokens, strict=True):
            assert isinstance(file, ColumnFile)
            store, key = open_store(file.name, storage)
            info = ObjectInfo(key=key, size=count * column.token_bytes, etag=file.etag)
            parts.append((store, info))
        self._store: Store
        self._store, info = parts[0]
        if len(parts) > 1:
            self._store = ConcatStore(parts, f"{dataset}, column {column.name}")
            info = self._store.info("")
        self._key = info.key
        self._etag = info.etag

    def read(self, spans: Sequence[Span]) -> list[NDArray[np.uint8]]:
        """The stored values of tokens [start, stop) of each span, uint8 [tokens, bytes of a token].

        Raises ObjectChangedError for an object that changed since it was looked up, StorageError.
        """
        size = self.column.token_bytes
        spans = [(start * size, stop * size) for start, stop in spans]
        bodies = self._store.read(self._key, spans, self._etag)
        return [np.frombuffer(body, np.uint8).reshape(-1, size) for body in bodies]


def as_numbers(stored: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Stored values, uint8 [..., bytes of a token], as numbers [..., width]: those of bfloat16 and
    float8 as float32.
    """
    if dtype == "bfloat16":
        return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in FLOAT8:
        return FLOAT8[dtype][stored]
    return stored.view(np.dtype(dtype).newbyteorder("<"))
