"""Datasets that do not exist: `mock://tokens=1000000,vocab=50257` is a pair whose bytes are
computed when they are read.

For dry runs and tests of everything above. Every document has `length` tokens, the last of them
`eod`; the others are a keyed hash of their place in [0, vocab), without the eod. The same name
always holds the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.idx import HEADER_BYTES, encode_index
from streammega.errors import ConfigError, ObjectNotFoundError, StorageError
from streammega.kernels.mix import GOLDEN, mix
from streammega.storage import Buffer, ObjectInfo, ObjectWriter
from streammega.storage.open import register_scheme
from streammega.storage.store import Bytes, Span, fill

DEFAULTS = {"tokens": 10_000_000, "vocab": 50_257, "length": 1_000, "eod": 0, "seed": 0}
ITEMSIZE = 4


class MockStore:
    """Computed pairs. Implements `storage.store.Store`, for reading."""

    def url(self, key: str) -> str:
        """mock:// and the name."""
        return f"mock://{key}"

    def info(self, key: str) -> ObjectInfo:
        """Sizes follow from the name."""
        settings = self._settings(key)
        documents = settings["tokens"] // settings["length"]
        size = documents * settings["length"] * ITEMSIZE
        if key.endswith(".idx"):
            size = HEADER_BYTES + 12 * documents + 8 * (documents + 1)
        return ObjectInfo(key=key, size=size, etag="mock")

    def read_ranges(
        self, key: str, starts: Sequence[int], stops: Sequence[int], etag: str = ""
    ) -> list[Buffer]:
        """Bytes computed on the spot."""
        settings = self._settings(key)
        if key.endswith(".idx"):
            whole = memoryview(_index(settings))
            return [whole[a:b] for a, b in zip(starts, stops, strict=True)]
        return [_tokens(settings, int(a), int(b)) for a, b in zip(starts, stops, strict=True)]

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        """Bytes computed on the spot."""
        fill(
            self.url(key),
            spans,
            self.read_ranges(key, [a for a, _ in spans], [b for _, b in spans]),
            outs,
        )

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Nothing lies there."""
        return []

    def open_writer(self, key: str) -> ObjectWriter:
        """Refused."""
        raise StorageError(f"{self.url(key)}: mock datasets are computed and cannot be written")

    def delete(self, key: str) -> None:
        """Refused."""
        raise StorageError(f"{self.url(key)}: mock datasets are computed and cannot be removed")

    def _settings(self, key: str) -> dict[str, int]:
        name = key[:-4]
        if not key.endswith((".bin", ".idx")):
            raise ObjectNotFoundError(f"{self.url(key)}: a mock dataset has a .bin and an .idx")
        settings = dict(DEFAULTS)
        for pair in filter(None, name.split(",")):
            setting, _, value = pair.partition("=")
            if setting not in DEFAULTS or not value.isdigit():
                raise ConfigError(
                    f"{self.url(name)}: {pair!r} is not one of {', '.join(DEFAULTS)}, followed by = and a number"
                )
            settings[setting] = int(value)
        if not 0 < settings["length"] <= settings["tokens"] or settings["vocab"] < 2:
            raise ConfigError(
                f"{self.url(name)}: needs 0 < length <= tokens, and a vocab of at least 2"
            )
        return settings


def _index(settings: dict[str, int]) -> bytes:
    documents = settings["tokens"] // settings["length"]
    length = settings["length"]
    lengths = np.full(documents, length, np.int32)
    return b"".join(encode_index(np.dtype(np.int32), lengths, np.arange(documents + 1), None))


def _tokens(settings: dict[str, int], start: int, stop: int) -> Buffer:
    first = start // ITEMSIZE
    last = -(-stop // ITEMSIZE)
    place = np.arange(first, last, dtype=np.uint64)
    tokens: NDArray[np.int32] = (
        _hash(place, settings["seed"]) % np.uint64(settings["vocab"] - 1)
    ).astype("<i4")
    tokens += tokens >= settings["eod"]
    tokens[place % np.uint64(settings["length"]) == settings["length"] - 1] = settings["eod"]
    return memoryview(tokens.tobytes())[start - first * ITEMSIZE : stop - first * ITEMSIZE]


def _hash(place: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64 of places."""
    return mix((place + np.uint64(seed + 1)) * GOLDEN)


register_scheme("mock", MockStore)
