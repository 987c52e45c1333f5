"""Raw token arrays: nanoGPT's and llm.c's `.bin`, and `.npy`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.convert.documents import one_each
from streammega.convert.options import ConvertOptions
from streammega.convert.read.inputs import Input
from streammega.convert.read.open import Item, Skipped, Slice, open_stream
from streammega.convert.read.suffixes import is_compressed
from streammega.dataset.idx import MOST_TOKENS
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
UPPER_HALVES = 16
"""Below this are the upper halves of ids of 32 bits: no vocabulary has 2^20 of them."""


@dataclass(frozen=True)
class _LlmcHeader:
    """What llm.c writes before its ids: int32 words, of which the first three say something."""

    magic: int
    version: int
    tokens: int
    rest_is_zero: bool

    @classmethod
    def of(cls, head: bytes) -> _LlmcHeader:
        """Of the first bytes of a file, which may be no header at all."""
        if len(head) < LLMC_HEADER_BYTES:
            return cls(0, 0, 0, True)
        words = np.frombuffer(head, "<i4")
        magic, version, tokens = words[:3].tolist()
        return cls(magic, version, tokens, not words[3:].any())

    def dtype(self, path: str) -> np.dtype[Any] | None:
        """Of the ids behind it; None: it is no header. Raises ConvertError for an unknown one."""
        known = LLMC_DTYPES.get((self.magic, self.version))
        if known is None and self.magic in LLMC_DATES and self.rest_is_zero:
            kinds = ", ".join(f"{magic} version {version}" for magic, version in LLMC_DTYPES)
            raise ConvertError(
                f"{path}: begins with a header of llm.c, of kind {self.magic} and version "
                f"{self.version}; known are {kinds}"
            )
        return known


def read_raw(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """nanoGPT's (no header) and llm.c's (256 int32 of header) `.bin`."""
    path = piece.input.path
    with open_stream(piece.input.url, storage, piece.input.etag, skipped.note_read) as file:
        head = file.read(LLMC_HEADER_BYTES)
        header = _LlmcHeader.of(head)
        dtype = header.dtype(path)
        if dtype is not None:
            _check_tokens(header, dtype, piece.input)
            begun = b""
        else:
            dtype = options.array_dtype
            begun = head
            if options.input_dtype is None:
                _check_width(head, path)
        yield from _split_at_eod(_token_chunks(file, begun, dtype, path), options, path)


def _check_tokens(header: _LlmcHeader, dtype: np.dtype[Any], file: Input) -> None:
    """Raise ConvertError for a file of another size than its header says."""
    if is_compressed(file.path):  # its size says nothing of its tokens
        return
    actual = (file.size - LLMC_HEADER_BYTES) // dtype.itemsize
    if actual != header.tokens:
        raise ConvertError(
            f"{file.path}: its header says {header.tokens:,} tokens, it holds {actual:,}; copy it "
            f"again"
        )


def _check_width(head: bytes, path: str) -> None:
    """Raise ConvertError for ids of 32 bits that would be read as 16: every second number is then
    the upper half of an id.
    """
    whole_ids = len(head) // 4
    halves = np.frombuffer(head, "<u2", 2 * whole_ids)
    lower = halves[::2]
    upper = halves[1::2]
    if len(lower) < LEAST_WIDE:
        return
    if (upper < UPPER_HALVES).all() and (lower >= UPPER_HALVES).any():
        raise ConvertError(
            f"{path}: every second number of 16 bits is nearly zero, so these are ids of 32 bits, "
            f"perhaps of a Megatron dataset without its .idx; say so by --input-dtype int32 or "
            f"uint32, or uint16 if not"
        )


def read_npy(
    piece: Slice, options: ConvertOptions, storage: StorageConfig, skipped: Skipped
) -> Iterator[Item]:
    """A one-dimensional array is tokens end to end; the rows of a two-dimensional one are
    documents.
    """
    with open_stream(piece.input.url, storage, piece.input.etag, skipped.note_read) as file:
        path = piece.input.path
        shape, dtype = _npy_header(file, path)
        if len(shape) == 1:
            yield from _split_at_eod(_token_chunks(file, b"", dtype, path), options, path)
            return
        rows, row_tokens = shape
        rows_at_once = max(1, SCAN_TOKENS // max(1, row_tokens))
        for first in range(0, rows, rows_at_once):
            count = min(rows_at_once, rows - first)
            size = count * row_tokens * dtype.itemsize
            data = file.read(size)
            whole_rows = len(data) * count // max(1, size)
            ids = np.frombuffer(data, dtype, whole_rows * row_tokens)
            yield one_each(ids, np.full(whole_rows, row_tokens, np.int32), ids.nbytes, path)
            if whole_rows < count:
                raise ConvertError(f"{path}: the array ends early; copy it again")


def _npy_header(file: Any, path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read_header = np.lib.format.read_array_header_1_0
    shape, fortran, dtype = read_header(file)
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
    """The tokens of `head`, which was read already, and of the rest of the file."""
    cut_token = head
    while True:
        data = file.read(SCAN_TOKENS * dtype.itemsize)
        held = cut_token + data
        tokens = len(held) // dtype.itemsize
        if tokens:
            yield np.frombuffer(held, dtype, tokens)
        cut_token = held[tokens * dtype.itemsize :]
        if data:
            continue
        if cut_token:
            raise ConvertError(
                f"{path}: ends inside a token of {dtype.itemsize} bytes; see --input-dtype"
            )
        return


def _split_at_eod(
    chunks: Iterator[NDArray[Any]], options: ConvertOptions, path: str
) -> Iterator[Item]:
    """Documents end with eod_id; without one, all is one document."""
    begun: list[NDArray[Any]] = []
    """Of the document that has not ended yet."""
    begun_tokens = 0
    for chunk in chunks:
        rest = chunk
        if options.eod_id is not None:
            ends = np.flatnonzero(chunk == options.eod_id) + 1
            if len(ends):
                tokens = np.concatenate([*begun, chunk[: ends[-1]]])
                lengths = np.diff(ends, prepend=0)
                lengths[0] += begun_tokens
                yield one_each(tokens, lengths, tokens.nbytes, path)
                begun = []
                begun_tokens = 0
                rest = chunk[ends[-1] :]
        if len(rest):
            begun.append(rest)
            begun_tokens += len(rest)
        if begun_tokens > MOST_TOKENS:
            raise ConvertError(f"{path}: {_too_long(options.eod_id)}")
    if begun_tokens:
        tokens = np.concatenate(begun)
        yield one_each(tokens, np.array([begun_tokens]), tokens.nbytes, path)


def _too_long(eod_id: int | None) -> str:
    if eod_id is None:
        return (
            f"a document of over {MOST_TOKENS:,} tokens; name the id that ends documents by "
            f"--eod-id"
        )
    return f"over {MOST_TOKENS:,} tokens without the id {eod_id}; is it the right one?"
