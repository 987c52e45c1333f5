"""Raw token arrays: nanoGPT's and llm.c's `.bin`, and `.npy`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.documents import MOST_TOKENS, one_each
from streammega.convert.options import ConvertOptions
from streammega.convert.read.slices import Item, Skipped, Slice, open_stream
from streammega.convert.read.suffixes import is_compressed
from streammega.errors import ConvertError

SCAN_TOKENS = 4 << 20
LLMC_HEADER_BYTES = 1024
LLMC_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
"""By magic and version: files of GPT-2's ids, and of Llama-3's."""
LLMC_DATES = range(20240101, 20300101)
"""Magics of llm.c are dates: one of these, with nothing in the rest of the header, is a header that
is not known yet.
"""
LEAST_WIDE = 32
"""Ids looked at before an array is taken for one of wider ids."""


def read_raw(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """nanoGPT's (no header) and llm.c's (256 int32 of header) `.bin`."""
    with open_stream(piece.input.url, storage, piece.input.etag) as file:
        head = file.read(LLMC_HEADER_BYTES)
        dtype = options.array_dtype
        words = (
            np.frombuffer(head, "<i4") if len(head) == LLMC_HEADER_BYTES else np.zeros(4, np.int32)
        )
        known = LLMC_DTYPES.get((int(words[0]), int(words[1])))
        if known is None and int(words[0]) in LLMC_DATES and not words[3:].any():
            raise ConvertError(
                f"{piece.input.path}: begins with a header of llm.c, of kind {words[0]} and version {words[1]}; known are "
                f"{', '.join(f'{magic} version {version}' for magic, version in LLMC_DTYPES)}"
            )
        if known is None and options.input_dtype is None:
            _check_width(head, piece.input.path)
        if known is not None:
            expected = int(words[2])
            dtype = known
            head = b""
            actual = (piece.input.size - LLMC_HEADER_BYTES) // dtype.itemsize
            if not is_compressed(piece.input.path) and actual != expected:
                raise ConvertError(
                    f"{piece.input.path}: its header says {expected:,} tokens, it holds {actual:,}; copy it again"
                )
        yield from _split_at_eod(
            _token_chunks(file, head, dtype, piece.input.path), options, piece.input.path
        )


def _check_width(head: bytes, path: str) -> None:
    """Raise ConvertError for ids of 32 bits that would be read as 16: every second number is then
    the upper half of an id.
    """
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<u2")
    lower = numbers[::2]
    upper = numbers[1::2]
    if len(lower) >= LEAST_WIDE and (upper < 16).all() and (lower >= 16).any():
        raise ConvertError(
            f"{path}: every second number of 16 bits is nearly zero, so these are ids of 32 bits, perhaps of a Megatron dataset "
            f"without its .idx; say so by --input-dtype int32 or uint32, or uint16 if not"
        )


def read_npy(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """A one-dimensional array is tokens end to end; the rows of a two-dimensional one are
    documents.
    """
    with open_stream(piece.input.url, storage, piece.input.etag) as file:
        shape, dtype = _npy_header(file, piece.input.path)
        if len(shape) == 1:
            yield from _split_at_eod(
                _token_chunks(file, b"", dtype, piece.input.path), options, piece.input.path
            )
            return
        rows = max(1, SCAN_TOKENS // max(1, shape[1]))
        for first in range(0, shape[0], rows):
            count = min(rows, shape[0] - first)
            data = file.read(count * shape[1] * dtype.itemsize)
            if len(data) != count * shape[1] * dtype.itemsize:
                raise ConvertError(f"{piece.input.path}: the array ends early; copy it again")
            yield one_each(
                np.frombuffer(data, dtype),
                np.full(count, shape[1], np.int32),
                len(data),
                piece.input.path,
            )


def _npy_header(file: Any, path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read(file)
    if fortran or len(shape) not in (1, 2) or not np.issubdtype(dtype, np.integer):
        raise ConvertError(
            f"{path}: holds {dtype} of shape {shape}; token arrays are integers, of one dimension or two (rows)"
        )
    return shape, dtype


def load_npy(file: Any, path: str) -> NDArray[Any]:
    """A whole array of integers."""
    shape, dtype = _npy_header(file, path)
    data = file.read()
    if len(data) != int(np.prod(shape)) * dtype.itemsize:
        raise ConvertError(f"{path}: the array ends early; copy it again")
    return np.frombuffer(data, dtype)


def _token_chunks(
    file: Any, head: bytes, dtype: np.dtype[Any], path: str
) -> Iterator[NDArray[Any]]:
    rest = head
    while True:
        data = file.read(SCAN_TOKENS * dtype.itemsize)
        whole = rest + data
        size = len(whole) // dtype.itemsize * dtype.itemsize
        if size:
            yield np.frombuffer(whole[:size], dtype)
        rest = whole[size:]
        if not data:
            if rest:
                raise ConvertError(
                    f"{path}: ends inside a token of {dtype.itemsize} bytes; see --input-dtype"
                )
            return


def _split_at_eod(
    chunks: Iterator[NDArray[Any]], options: ConvertOptions, path: str
) -> Iterator[Item]:
    """Documents end with eod_id; without one, all is one document."""
    held: list[NDArray[Any]] = []
    count = 0
    for chunk in chunks:
        if options.eod_id is None:
            held.append(chunk)
            count += len(chunk)
            if count > MOST_TOKENS:
                raise ConvertError(
                    f"{path}: a document of over {MOST_TOKENS:,} tokens; name the id that ends documents by --eod-id"
                )
            continue
        ends = np.flatnonzero(chunk == options.eod_id) + 1
        if len(ends):
            tokens = np.concatenate([*held, chunk[: ends[-1]]])
            lengths = np.diff(np.concatenate([[0], ends]))
            lengths[0] += count
            yield one_each(tokens, lengths, tokens.nbytes, path)
            held = []
            count = 0
        tail = chunk[ends[-1] :] if len(ends) else chunk
        if len(tail):
            held.append(tail)
            count += len(tail)
            if count > MOST_TOKENS:
                raise ConvertError(
                    f"{path}: over {MOST_TOKENS:,} tokens without the id {options.eod_id}; is it the right one?"
                )
    if count:
        tokens = np.concatenate(held)
        yield one_each(tokens, np.array([count]), tokens.nbytes, path)
