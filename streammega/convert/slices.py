"""What readers share: slices of inputs, what was passed over, opened files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, Tokens
from streammega.convert.inputs import COMPRESSIONS, Input
from streammega.convert.options import ConvertOptions
from streammega.convert.zstd import ZstdReader
from streammega.errors import ConvertError
from streammega.redaction import redact_urls
from streammega.storage.urls import open_file

BUFFER_BYTES = 1 << 20
Item: TypeAlias = "RawDocument | Tokens"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of an input: bytes of a jsonl, row groups of a parquet, documents of a pair; stop -1: all of it."""

    input: Input
    start: int = 0
    stop: int = -1


@dataclass
class Skipped:
    """What was passed over: how many of each kind of fault, and the first of them with their places."""

    counts: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add(self, kind: str, message: str) -> None:
        """Count one."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.messages) < 1000:
            self.messages.append(redact_urls(message))


@contextmanager
def open_stream(path: str, storage: StorageConfig) -> Iterator[Any]:
    """The decompressed bytes of a file, by its suffix; plain ones can be sought in."""
    zstd = path.endswith(".zst")
    gzip = path.endswith(".tgz")
    with open_file(path, storage, None if zstd else "gzip" if gzip else "infer") as file:
        yield io.BufferedReader(ZstdReader(file), BUFFER_BYTES) if zstd else file


@contextmanager
def open_plain(path: str, storage: StorageConfig) -> Iterator[Any]:
    """The stored bytes of a file."""
    with open_file(path, storage) as file:
        yield file


def is_compressed(path: str) -> bool:
    """Whether a file has to be decompressed from its start."""
    return path.endswith((*COMPRESSIONS, ".tgz"))


def fault(options: ConvertOptions, skipped: Skipped, kind: str, message: str) -> None:
    """Raise ConvertError, or note it where faults are passed over."""
    if options.on_error == "stop":
        raise ConvertError(message)
    skipped.add(kind, message)


Reader = Callable[[Slice, ConvertOptions, StorageConfig, Skipped], Iterator[Item]]
