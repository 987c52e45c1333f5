"""Documents out of a slice of an input, whichever its format."""

from __future__ import annotations

import re
from collections.abc import Iterator

from streammega.config import StorageConfig
from streammega.convert.archives import read_tar
from streammega.convert.arrays import read_npy, read_raw
from streammega.convert.columns import read_arrow, read_parquet
from streammega.convert.documents import RawDocument
from streammega.convert.foreign import read_litdata, read_mds
from streammega.convert.options import ConvertOptions
from streammega.convert.pairs import read_pair
from streammega.convert.slices import Item, Reader, Skipped, Slice, open_stream
from streammega.errors import ConvertError, ObjectNotFoundError, StreammegaError
from streammega.redaction import redact
from streammega.storage.urls import is_remote


def read_slice(piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped) -> Iterator[Item]:
    """The documents of a slice, in order.

    Raises ConvertError that names the file; with `on_error="skip"` what cannot be read is noted instead, and what comes before
    it is kept.
    """
    path, own = piece.input.path, dict(storage.storage_options) if is_remote(piece.input.path) else {}
    try:
        yield from READERS[piece.input.format](piece, options, storage, skipped)
    except FileNotFoundError:
        raise ObjectNotFoundError(f"{path}: no such file or object; check the path") from None
    except StreammegaError as error:
        if options.on_error == "stop" or not isinstance(error, ConvertError):
            raise
        skipped.add("unreadable file", str(error))
    except Exception as error:  # the libraries under it raise whatever they like
        reason = redact(f"{type(error).__name__}: {error}", own)
        message = f"{path}: cannot be read ({reason}); is the file whole, and its suffix true?"
        if options.on_error == "stop":
            raise ConvertError(message) from None
        skipped.add("unreadable file", message)


def _text(piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped) -> Iterator[Item]:
    with open_stream(piece.input.path, storage) as file:
        yield RawDocument(data=file.read(), path=piece.input.path)


def _jsonl(piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped) -> Iterator[Item]:
    path = piece.input.path
    with open_stream(path, storage) as file:
        position = piece.start
        if position:  # a line belongs to the slice in which it starts
            file.seek(position - 1)
            position += len(file.readline()) - 1
        line = 0 if not piece.start else -1
        for data in file:
            if 0 <= piece.stop <= position:
                return
            line += 1 if line >= 0 else 0
            if data.strip():
                # The number of a line in a later slice is counted when somebody asks for it: see `resolve_lines`.
                yield RawDocument(data=data, path=path if line > 0 else f"{path}@{position}", line=max(line, 0), record=True)
            position += len(data)


def resolve_lines(message: str, storage: StorageConfig) -> str:
    """Turn the `path@byte` of a message into `path:line`, by counting the lines before it."""
    found = re.search(r"^(.+?)@(\d+)(?=: |$)", message)
    if not found:
        return message
    path, at, line = found[1], int(found[2]), 1
    try:
        with open_stream(path, storage) as file:
            left = at
            while left > 0 and (data := file.read(min(left, 64 << 20))):
                line += data.count(b"\n")
                left -= len(data)
    except OSError:
        return message
    return f"{path}:{line}{message[found.end() :]}"


READERS: dict[str, Reader] = {
    "text": _text, "jsonl": _jsonl, "parquet": read_parquet, "arrow": read_arrow, "tar": read_tar, "megatron": read_pair,
    "raw": read_raw, "npy": read_npy, "mds": read_mds, "litdata": read_litdata,
}  # fmt: skip
