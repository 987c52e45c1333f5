"""Documents out of a slice of an input, whichever its format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument
from streammega.convert.options import ConvertOptions
from streammega.convert.read.arrays import read_npy, read_raw
from streammega.convert.read.json import (
    BYTE_ORDER_MARK,
    HEAD_BYTES,
    holds_lines,
    read_values,
)
from streammega.convert.read.mds_litdata import read_litdata, read_mds
from streammega.convert.read.megatron import read_pair
from streammega.convert.read.open import (
    Item,
    LongLine,
    Reader,
    Skipped,
    Slice,
    fault,
    open_stream,
    read_lines,
    skip_line,
    too_large,
    unreadable,
)
from streammega.convert.read.suffixes import is_compressed, may_hold_values
from streammega.convert.read.tables import read_arrow, read_csv, read_parquet
from streammega.convert.read.tar import read_tar
from streammega.errors import ConvertError, ObjectNotFoundError, StreammegaError
from streammega.errors.words import pluralize
from streammega.storage.object_file import expect_end
from streammega.storage.open import is_remote

TEXT_READ_BYTES = 1 << 20
COUNTED_BYTES = 4 << 20
"""Of lines that are counted, at a time."""
OPENINGS = (b"[", b"{", b"[{")
"""First lines of what is JSON, but no lines of it."""


def read_slice(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """The documents of a slice, in order.

    Raises ConvertError that names the file; with `on_error="skip"` what cannot be read is noted
    instead, with the number of documents that were read before it: these are kept.
    """
    path = piece.input.path
    # whose secrets are in no message
    storage_options = dict(storage.storage_options) if is_remote(path) else {}
    read = READERS[piece.input.format]
    last: Item | None = None
    documents = 0
    try:
        for item in read(piece, options, storage, skipped):
            if isinstance(item, RawDocument):
                if max(len(item.data), item.size) > options.max_record_bytes:
                    _refuse_large(item, options, storage, skipped)
                    continue
                documents += 1
            else:
                documents += len(item.documents)
            last = item
            yield item
    except FileNotFoundError:
        raise ObjectNotFoundError(f"{path}: no such file or object; check the path") from None
    except StreammegaError as error:
        # storage that fails makes no file unreadable: it would be left out for good
        if options.on_error == "stop" or not isinstance(error, ConvertError):
            raise
        skipped.add("unreadable file", f"{error}{_read_before(documents)}")
    except Exception as error:  # the libraries under it raise whatever they like
        message = unreadable(path, error, storage_options, _end_of(last))
        if options.on_error == "stop":
            raise ConvertError(message) from None
        skipped.add("unreadable file", f"{message}{_read_before(documents)}")


def _refuse_large(
    document: RawDocument, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> None:
    if options.on_error == "stop":
        document = with_line(document, storage)
    fault(options, skipped, "too large", too_large(document.where, options))


def _read_before(documents: int) -> str:
    return f"; {pluralize(documents, 'document')} of it, read before that, kept"


def _end_of(last: Item | None) -> str:
    """Where the last document ends that could be read, for a message."""
    if not isinstance(last, RawDocument):
        return ""
    if last.offset >= 0:
        return f" behind the line that begins at byte {last.offset:,}"
    return f" behind line {last.line:,}" if last.line else f" behind {last.path!r}"


def _text(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    path = piece.input.path
    if piece.input.size > options.max_record_bytes and not is_compressed(path):
        yield RawDocument(data=b"", path=path, size=piece.input.size)
        return
    with open_stream(piece.input.url, storage, piece.input.etag, skipped.note_read) as file:
        parts: list[bytes] = []
        left = options.max_record_bytes + 1  # one byte more tells that the text is too large
        while left and (data := file.read(min(left, TEXT_READ_BYTES))):
            parts.append(data)
            left -= len(data)
    yield RawDocument(data=b"".join(parts).removeprefix(BYTE_ORDER_MARK), path=path)


def _lines(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    with open_stream(piece.input.url, storage, piece.input.etag, skipped.note_read) as file:
        yield from _documents_of_lines(file, b"", piece, options)


def _jsonl(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    path = piece.input.path
    with open_stream(piece.input.url, storage, piece.input.etag, skipped.note_read) as file:
        head = b""
        if piece.stop < 0 and may_hold_values(path):  # of a part, it is known
            head = file.read(HEAD_BYTES)
            if not holds_lines(head):
                yield from read_values(head, file, path, options)
                return
        yield from _documents_of_lines(file, head, piece, options)


def _documents_of_lines(
    file: Any, head: bytes, piece: Slice, options: ConvertOptions
) -> Iterator[Item]:
    """The documents of the lines that begin within a slice. head: what was read of it already."""
    if piece.stop >= 0:  # another worker reads what is behind it
        expect_end(file, piece.stop)
    position = piece.start
    if piece.start:  # a line belongs to the slice in which it starts
        # the byte before the slice tells whether a line starts with it
        before = piece.start - 1
        file.seek(before)
        left = piece.stop - before if piece.stop >= 0 else None
        passed, behind = skip_line(file, left)
        if behind is None:
            return
        position = before + passed
        head = behind
    path = piece.input.path
    is_json = piece.input.format == "jsonl"
    is_first_slice = piece.start == 0
    line = 0
    offset = -1
    for data in read_lines(head, file, options.max_record_bytes):
        if 0 <= piece.stop <= position:
            return
        # The number of a line in a later slice is counted when somebody asks for it: see
        # `with_line`.
        if is_first_slice:
            line += 1
        else:
            offset = position
        if isinstance(data, LongLine):
            yield RawDocument(data=b"", path=path, line=line, offset=offset, size=data.size)
            position += data.size
            continue
        if not is_json:
            text = data.removesuffix(b"\n").removesuffix(b"\r")
            if position == 0:
                text = text.removeprefix(BYTE_ORDER_MARK)
            yield RawDocument(data=text, path=path, line=line, offset=offset, size=len(data))
            position += len(data)
            continue
        if line == 1 and options.on_error == "stop" and data.strip() in OPENINGS:
            raise ConvertError(
                f"{path}:1: is no record; an array, or records over several lines? call the file "
                f".json, which is told by what it holds"
            )
        if data.strip():
            yield RawDocument(data=data, path=path, line=line, offset=offset, record=True)
        position += len(data)


def with_line(document: RawDocument, storage: StorageConfig) -> RawDocument:
    """The document with the number of its line, where only its byte is known: the lines before it
    are counted.
    """
    if document.offset < 0:
        return document
    line = 1
    left = document.offset
    try:
        with open_stream(document.path, storage) as file:
            while left > 0:
                data = file.read(min(left, COUNTED_BYTES))
                if not data:
                    break
                line += data.count(b"\n")
                left -= len(data)
    except Exception:  # of whatever library: its byte tells the place as well
        return document
    return replace(document, line=line, offset=-1)


READERS: dict[str, Reader] = {
    "text": _text,
    "lines": _lines,
    "jsonl": _jsonl,
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
