"""Reading columns: the stored values of any tokens of a dataset, and these as numbers of NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.dataset.columns import ColumnFile, StoredColumn, column_named
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


def _float8_tables() -> dict[str, NDArray[np.float32]]:
    """The value of each byte of the dtypes that NumPy does not have."""
    byte = np.arange(256)
    exponent = byte >> 3 & 15
    fraction = (byte & 7) / 8
    value = np.where(exponent, (1 + fraction) * 2.0 ** (exponent - 7), fraction * 2.0**-6)
    value[byte & 127 == 127] = np.nan
    return {
        "float8_e4m3fn": np.where(byte < 128, value, -value).astype(np.float32),
        # The upper half of a float16.
        "float8_e5m2": (byte.astype(np.uint16) << 8).view(np.float16).astype(np.float32),
    }


_FLOAT8 = _float8_tables()


def as_numbers(stored: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Stored values, uint8 [..., bytes of a token], as numbers [..., width]: those of bfloat16 and
    float8 as float32.
    """
    if dtype == "bfloat16":
        return (stored.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in _FLOAT8:
        return _FLOAT8[dtype][stored]
    return stored.view(np.dtype(dtype).newbyteorder("<"))


def stored_value(dtype: str, value: float) -> bytes:
    """A number as it is stored: the nearest one that the dtype has, of two the even one."""
    if dtype not in ("bfloat16", *_FLOAT8):
        return np.asarray(value, np.dtype(dtype).newbyteorder("<")).tobytes()
    if dtype == "bfloat16":
        bits = int(np.asarray(value, np.float32).view(np.uint32))
        if not math.isnan(value):  # whose bits could round to another value
            bits += 0x7FFF + (bits >> 16 & 1)
        return (bits >> 16).to_bytes(2, "little")
    table = _FLOAT8[dtype]
    if math.isnan(value):
        return b"\x7f"
    with np.errstate(invalid="ignore"):
        away = np.where(table == value, 0, np.abs(table - np.float32(value)))
    byte = np.arange(256)
    has_other_sign = np.signbit(table) != (math.copysign(1, value) < 0)
    return bytes([int(np.lexsort((byte % 2, has_other_sign, away))[0])])
