"""Datasets without files: `mock://tokens=1000000,vocab=50257` is a pair whose bytes are computed when
they are read.

For dry runs and tests. Every document has `length` tokens, and the last one is `eod`. The others are a
keyed hash of their place, in [0, vocab) without the eod. The same name always has the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.idx import (
    DOCUMENT_BOUND,
    HEADER_BYTES,
    LENGTH,
    OFFSET,
    encode_header,
    index_bytes,
)
from streammega.errors import ConfigError, ObjectNotFoundError
from streammega.kernels.keyed import GOLDEN, mix
from streammega.storage import Buffer, ObjectInfo
from streammega.storage.open import register_scheme
from streammega.storage.store import Span, Store

DTYPE = np.dtype("<i4")
"""The dtype of mock tokens: any vocabulary fits."""
MAX_COUNT = 2**31 - 1
"""Documents, tokens of a document, ids: as much as the index and int32 tokens can hold."""
MAX_MOCK_TOKENS = 2**60
"""Their offsets in bytes fit into int64."""


@dataclass(frozen=True, kw_only=True)
class MockSettings:
    """What a name may set: all numbers, `tokens` in all, `length` of them a document."""

    tokens: int = 10_000_000
    vocab: int = 50_257
    length: int = 1_000
    eod: int = 0
    seed: int = 0

    @property
    def documents(self) -> int:
        """Whole documents. Tokens that are left over are dropped."""
        return self.tokens // self.length


SETTINGS = tuple(field.name for field in fields(MockSettings))


class MockStore(Store):
    """Computed pairs, for reading."""

    def url(self, key: str) -> str:
        """mock:// and the name."""
        return f"mock://{key}"

    def info(self, key: str) -> ObjectInfo:
        """Sizes follow from the name."""
        settings = self._settings(key)
        if key.endswith(".idx"):
            size = index_bytes(settings.documents, settings.documents + 1, multimodal=False)
        else:
            size = settings.documents * settings.length * DTYPE.itemsize
        # One ETag for all: a name always means the same bytes.
        return ObjectInfo(key=key, size=size, etag="mock")

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """Bytes computed on the spot."""
        settings = self._settings(key)
        compute = _index if key.endswith(".idx") else _tokens
        return [compute(settings, int(start), int(stop)) for start, stop in spans]

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """There is nothing to list."""
        return []

    def _settings(self, key: str) -> MockSettings:
        """What a name sets. Raises ConfigError, ObjectNotFoundError."""
        name, dot, suffix = key.rpartition(".")
        if dot + suffix not in (".bin", ".idx"):
            raise ObjectNotFoundError(f"{self.url(key)}: a mock dataset has a .bin and an .idx")
        named: dict[str, int] = {}
        for pair in name.split(","):
            if not pair:
                continue
            setting, _, value = pair.partition("=")
            if setting not in SETTINGS or not value.isdecimal():
                raise ConfigError(
                    f"{self.url(name)}: {pair!r} is not one of {', '.join(SETTINGS)}, followed by "
                    "= and a number"
                )
            limit = MAX_MOCK_TOKENS if setting == "tokens" else MAX_COUNT
            if len(value) > 20 or int(value) > limit:
                raise ConfigError(f"{self.url(name)}: {setting} must be at most {limit:,}")
            named[setting] = int(value)
        settings = MockSettings(**named)
        if not 0 < settings.length <= settings.tokens or settings.vocab < 2:
            raise ConfigError(
                f"{self.url(name)}: needs 0 < length <= tokens, and a vocab of at least 2"
            )
        if settings.documents > MAX_COUNT:
            raise ConfigError(
                f"{self.url(name)}: {settings.documents:,} documents are more than {MAX_COUNT:,}; "
                f"set a larger length"
            )
        return settings


def _index(settings: MockSettings, start: int, stop: int) -> Buffer:
    """The bytes [start, stop) of the `.idx`: after the header come three arithmetic sequences."""
    documents = settings.documents
    header = encode_header(DTYPE, documents, documents + 1)
    parts = [header[start:stop]]
    sequence_bytes = settings.length * DTYPE.itemsize
    array_start = HEADER_BYTES
    for dtype, count, first_value, step in (
        (LENGTH, documents, settings.length, 0),
        (OFFSET, documents, 0, sequence_bytes),
        (DOCUMENT_BOUND, documents + 1, 0, 1),
    ):
        begin = max(start - array_start, 0)
        end = min(stop - array_start, count * dtype.itemsize)
        if begin < end:
            first = begin // dtype.itemsize
            last = -(-end // dtype.itemsize)
            values = first_value + step * np.arange(first, last)
            first_byte = first * dtype.itemsize
            parts.append(values.astype(dtype).tobytes()[begin - first_byte : end - first_byte])
        array_start += count * dtype.itemsize
    return memoryview(b"".join(parts))


def _tokens(settings: MockSettings, start: int, stop: int) -> Buffer:
    """The bytes [start, stop) of the `.bin`, which need not be those of whole tokens."""
    itemsize = DTYPE.itemsize
    eod = settings.eod
    first = start // itemsize
    last = -(-stop // itemsize)
    place = np.arange(first, last, dtype=np.uint64)
    # Drawn from one id less, then ids from the eod on move up by one: none is the eod.
    num_others = np.uint64(settings.vocab - 1)
    ids = _hash(place, settings.seed) % num_others
    tokens: NDArray[np.int32] = ids.astype(DTYPE)
    tokens += tokens >= eod
    place_in_document = place % np.uint64(settings.length)
    is_last = place_in_document == settings.length - 1
    tokens[is_last] = eod
    data = memoryview(tokens.tobytes())
    first_byte = first * itemsize
    return data[start - first_byte : stop - first_byte]


def _hash(place: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64 of places."""
    return mix((place + np.uint64(seed + 1)) * GOLDEN)


register_scheme("mock", MockStore)
