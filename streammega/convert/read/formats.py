"""The formats of inputs: by which suffixes, or first bytes, each is known, how it is read, and how
large files of it are divided.

A new format is a function `read_x(source)` that yields documents, in a file of this folder, and its
line in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from streammega.config import StorageConfig
from streammega.convert.documents import RawDocument, Tokens
from streammega.convert.options import ConvertOptions
from streammega.convert.read.arrays import read_npy, read_raw
from streammega.convert.read.compression import format_suffix
from streammega.convert.read.mds_litdata import keep_folder, read_litdata, read_mds
from streammega.convert.read.megatron import cut_documents, read_pair
from streammega.convert.read.source import (
    Input,
    Skipped,
    Slice,
    Source,
    too_large,
    unreadable,
    with_line,
)
from streammega.convert.read.tables import cut_row_groups, read_arrow, read_csv, read_parquet
from streammega.convert.read.tar import read_tar
from streammega.convert.read.text import (
    JSON_SUFFIXES,
    cut_lines,
    read_json,
    read_text,
)
from streammega.errors import ConvertError, ObjectNotFoundError, StreammegaError
from streammega.errors.words import pluralize
from streammega.storage.open import is_of_this_process

Reader = Callable[[Source], Iterator[RawDocument | Tokens]]
Cutter = Callable[[Input, int, int, StorageConfig], Iterator[Slice]]
"""Divides an input: (input, wanted bytes of a slice, most bytes of one, storage) -> its slices."""


def keep_whole(
    item: Input, _slice_bytes: int, _max_slice_bytes: int, _storage: StorageConfig
) -> Iterator[Slice]:
    """All of an input, as one slice."""
    yield Slice(input=item, stored_bytes=item.size)


class Format(NamedTuple):
    """A format of inputs.

    signature: (byte, bytes) by which a stream is known. has_text: whether it holds text and nothing
    else. package: what reads it, of the extra `convert`. is_native: whether a library reads it that may
    end the process, which is then one of its own.
    """

    read: Reader
    suffixes: tuple[str, ...] = ()
    cut: Cutter = keep_whole
    signature: tuple[int, bytes] | None = None
    has_text: bool = False
    package: str = ""
    is_native: bool = False


FORMATS = {
    "text": Format(read_text, (".txt", ".text"), has_text=True),
    "jsonl": Format(read_json, JSON_SUFFIXES, cut_lines, has_text=True),
    "csv": Format(read_csv, (".csv", ".tsv"), has_text=True),
    "parquet": Format(
        read_parquet, (".parquet",), cut_row_groups, (0, b"PAR1"), package="pyarrow", is_native=True
    ),
    "arrow": Format(
        read_arrow,
        (".arrow", ".feather", ".ipc"),
        signature=(0, b"ARROW1"),
        package="pyarrow",
        is_native=True,
    ),
    # POSIX and GNU begin alike at that byte of the first header
    "tar": Format(read_tar, (".tar", ".tgz"), signature=(257, b"ustar")),
    # a .bin with an .idx of the same name, which `inputs.py` finds
    "megatron": Format(read_pair, cut=cut_documents),
    "raw": Format(read_raw, (".bin",)),
    "npy": Format(read_npy, (".npy",)),
    # folders, which `inputs.py` finds by their index.json
    "mds": Format(read_mds, cut=keep_folder),
    "litdata": Format(read_litdata, cut=keep_folder, is_native=True),  # its rows are Arrow
}
BY_SUFFIX = {suffix: name for name, known in FORMATS.items() for suffix in known.suffixes}


def format_of(path: str) -> str:
    """The format that a path's suffix tells; "" where it tells none."""
    return BY_SUFFIX.get(format_suffix(path), "")


def needs_process(item: Input) -> bool:
    """Whether an input is read by a process of its own. What only this process can open is not."""
    return FORMATS[item.format].is_native and not is_of_this_process(item.path)


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
    if not source.begins():
        return
    try:
        for item in FORMATS[piece.input.format].read(source):
            if isinstance(item, Tokens):
                documents += len(item.documents)
                skipped.records += len(item.documents)
                last = (
                    item.with_origins(path) if options.provenance and item.origins is None else item
                )
                yield last
                continue
            if max(len(item.data), item.size) > options.max_record_bytes and _is_too_large(
                item, options
            ):
                document = with_line(item, storage) if options.on_error == "stop" else item
                source.fault("too large", too_large(document.where, options))
                continue
            documents += 1
            skipped.records += 1
            last = item
            yield item
    except FileNotFoundError:
        raise ObjectNotFoundError(f"{path}: no such file or object; check the path") from None
    except Exception as error:  # the libraries under it raise whatever they like
        message = str(error)
        if not isinstance(error, StreammegaError):
            message = unreadable(path, error, _end_of(last))
        elif options.on_error == "stop" or not isinstance(error, ConvertError):
            # storage that fails makes no file unreadable: it would be left out for good
            raise
        if options.on_error == "stop":
            raise ConvertError(message) from None
        kept = f"{pluralize(documents, 'document')} of it, read before that, kept"
        source.fault("unreadable file", f"{message}; {kept}")


def _is_too_large(document: RawDocument, options: ConvertOptions) -> bool:
    """The ending of a line is not part of its record."""
    data = document.data
    if document.is_record:
        data = data.removesuffix(b"\n").removesuffix(b"\r")
    return (len(data) or document.size) > options.max_record_bytes


def _end_of(last: RawDocument | Tokens | None) -> str:
    """Where the last document ends that could be read, for a message."""
    if not isinstance(last, RawDocument):
        return ""
    if last.offset >= 0:
        return f" behind the line that begins at byte {last.offset:,}"
    return f" behind line {last.line:,}" if last.line else f" behind {last.path!r}"
