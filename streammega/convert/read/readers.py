"""The reader of each format, and what is common to all of them: limits, faults, origins.

A new format is a function `read_x(source)` that yields documents, a line in `READERS`, and its
suffixes in `formats.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, Tokens
from streammega.convert.options import ConvertOptions
from streammega.convert.read.arrays import read_npy, read_raw
from streammega.convert.read.formats import Format
from streammega.convert.read.mds_litdata import read_litdata, read_mds
from streammega.convert.read.megatron import read_pair
from streammega.convert.read.source import (
    Skipped,
    Slice,
    Source,
    too_large,
    unreadable,
    with_line,
)
from streammega.convert.read.tables import read_arrow, read_csv, read_parquet
from streammega.convert.read.tar import read_tar
from streammega.convert.read.text import read_json, read_text, read_text_lines
from streammega.errors import ConvertError, ObjectNotFoundError, StreammegaError
from streammega.errors.words import pluralize

Reader = Callable[[Source], Iterator[RawDocument | Tokens]]
READERS: dict[Format, Reader] = {
    "text": read_text,
    "lines": read_text_lines,
    "jsonl": read_json,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "tar": read_tar,
    "megatron": read_pair,
    "raw": read_raw,
    "npy": read_npy,
    "mds": read_mds,
    "litdata": read_litdata,
}


def read_slice(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[RawDocument | Tokens]:
    """The documents of a slice, in order.

    Raises ConvertError that names the file; with `on_error="skip"` what cannot be read is noted
    instead, with the number of documents that were read before it: these are kept.
    """
    path = piece.input.path
    source = Source(piece, options, storage, skipped)
    last: RawDocument | Tokens | None = None
    documents = 0
    try:
        for item in READERS[piece.input.format](source):
            if isinstance(item, Tokens):
                documents += len(item.documents)
                last = item.with_origins(path) if options.origins and item.origins is None else item
                yield last
                continue
            if max(len(item.data), item.size) > options.max_record_bytes and _is_too_large(
                item, options
            ):
                document = with_line(item, storage) if options.on_error == "stop" else item
                source.fault("too large", too_large(document.where, options))
                continue
            documents += 1
            last = item
            yield item
    except FileNotFoundError:
        raise ObjectNotFoundError(f"{path}: no such file or object; check the path") from None
    except Exception as error:  # the libraries under it raise whatever they like
        message = str(error)
        if not isinstance(error, StreammegaError):
            message = unreadable(path, error, storage, _end_of(last))
        elif options.on_error == "stop" or not isinstance(error, ConvertError):
            # storage that fails makes no file unreadable: it would be left out for good
            raise
        if options.on_error == "stop":
            raise ConvertError(message) from None
        kept = f"{pluralize(documents, 'document')} of it, read before that, kept"
        skipped.add("unreadable file", f"{message}; {kept}")


def _is_too_large(document: RawDocument, options: ConvertOptions) -> bool:
    """The ending of a line is not part of its record."""
    data = document.data
    if document.record:
        data = data.removesuffix(b"\n").removesuffix(b"\r")
    return (len(data) or document.size) > options.max_record_bytes


def _end_of(last: RawDocument | Tokens | None) -> str:
    """Where the last document ends that could be read, for a message."""
    if not isinstance(last, RawDocument):
        return ""
    if last.offset >= 0:
        return f" behind the line that begins at byte {last.offset:,}"
    return f" behind line {last.line:,}" if last.line else f" behind {last.path!r}"
