"""What readers share: slices of inputs, what was passed over, opened files."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fsspec.utils import infer_compression

from streammega.config import StorageConfig
from streammega.convert.documents import LongRecord, LongText, RawDocument, Tokens
from streammega.convert.options import ConvertOptions
from streammega.convert.read.inputs import Input
from streammega.convert.read.suffixes import COMPRESSIONS, split_query, suffix_of, without_queries
from streammega.convert.read.zstd import ZstdReader
from streammega.errors import ConvertError, StreammegaError
from streammega.errors.redaction import redact, redact_urls
from streammega.storage.open import file_system, open_file

BUFFER_BYTES = 1 << 20
MOST_MESSAGES = 1000
"""Of what was passed over, in a report: a corpus may have millions of broken lines."""
Item: TypeAlias = "RawDocument | LongText | LongRecord | Tokens"


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of an input: bytes of a jsonl, row groups of a parquet, documents of a pair; stop -1:
    all of it.
    """

    input: Input
    start: int = 0
    stop: int = -1


@dataclass
class Skipped:
    """What was passed over: how many of each kind of fault, and the first of them with their
    places.
    """

    counts: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add(self, kind: str, message: str) -> None:
        """Count one."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.messages) < MOST_MESSAGES:
            self.messages.append(redact_urls(message))


@contextmanager
def open_stream(path: str, storage: StorageConfig, etag: str = "") -> Iterator[Any]:
    """The decompressed bytes of a file, by its suffix; plain ones can be sought in.

    etag: of the object that was found when the conversion began; "": whichever is there now. Raises
    ConvertError if the bytes cannot be had, ObjectChangedError if the object is another one.
    """
    name, _ = split_query(path)
    suffix = suffix_of(name)
    own_reader = OWN_READERS.get(suffix)
    if own_reader is not None:
        with open_file(path, storage, etag=etag) as file:
            yield own_reader(file, name)
        return
    with open_file(path, storage, _compression(name, suffix), etag) as file:
        yield file


def _compression(name: str, suffix: str) -> str | None:
    """As fsspec calls it; None: the file is plain. Raises ConvertError where a package is missing."""
    if suffix == ".tgz":
        return "gzip"
    compression: str | None = infer_compression(name)
    # of what fsspec could read it knows only what is installed
    if compression is None and suffix in COMPRESSIONS:
        raise ConvertError(
            f"{name}: {suffix} is read with a package that is not installed; decompress it, or "
            f"install it"
        )
    return compression


def _zstd(file: Any, name: str) -> Any:
    return io.BufferedReader(ZstdReader(file), BUFFER_BYTES)


def _zip(file: Any, name: str) -> Any:
    archive = zipfile.ZipFile(file)
    names = [info.filename for info in archive.infolist() if not info.is_dir()]
    if len(names) != 1:
        raise ConvertError(
            f"{name}: holds {len(names)} files; of a .zip one is read: unpack it, or name it with "
            f"--exclude"
        )
    return archive.open(names[0])


OWN_READERS: dict[str, Callable[[Any, str], Any]] = {".zst": _zstd, ".zip": _zip}
"""Where fsspec's would take the first frame, or the first file, for all."""


@contextmanager
def open_plain(path: str, storage: StorageConfig, etag: str = "") -> Iterator[Any]:
    """The stored bytes of a file; `etag` as for `open_stream`."""
    with open_file(path, storage, etag=etag) as file:
        yield file


def read_head(path: str, storage: StorageConfig, size: int) -> bytes:
    """The first stored bytes of a file, and no more than these.

    Raises ConvertError if they cannot be read.
    """
    try:
        system, name = file_system(path, storage)
        return bytes(system.cat_file(name, start=0, end=size))[:size]
    except StreammegaError:
        raise
    except Exception as error:  # clients raise whatever they like
        told = without_queries(f"{type(error).__name__}: {error}")
        reason = redact(told, dict(storage.storage_options))
        shown, _ = split_query(path)
        raise ConvertError(f"{shown}: cannot be read ({reason})") from None


def fault(options: ConvertOptions, skipped: Skipped, kind: str, message: str) -> None:
    """Raise ConvertError, or note it where faults are passed over."""
    if options.on_error == "stop":
        raise ConvertError(message)
    skipped.add(kind, message)


Reader = Callable[[Slice, ConvertOptions, StorageConfig, Skipped], Iterator[Item]]
