"""Token arrays: nanoGPT's `.bin` of uint16, llm.c's, and `.npy`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.convert.documents import Tokens, one_per_document
from streammega.convert.read.compression import PieceReader
from streammega.convert.read.source import READ_BYTES, Source
from streammega.dataset.idx import MAX_TOKENS
from streammega.errors import ConvertError

SCAN_TOKENS = 4 << 20
RAW_DTYPE: np.dtype[Any] = np.dtype("<u2")
"""The dtype of ids without a header. Others are saved as .npy."""
LLMC_HEADER_BYTES = 1024
LLMC_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
"""dtypes by magic and version: files of GPT-2's ids, and of Llama-3's."""
LLMC_DATES = range(20240101, 20300101)
"""Magics of llm.c are dates: one of these, with nothing in the rest of the header, is a header that
is not known yet.
"""
MIN_WIDE = 32
"""Ids looked at before an array is taken for one of wider ids."""
UPPER_HALVES = 16
"""Below this are the upper halves of ids of 32 bits: no vocabulary has 2^20 of them."""


def read_raw(source: Source) -> Iterator[Tokens]:
    """nanoGPT's (no header) and llm.c's (256 int32 of header) `.bin`."""
    path = source.path
    with source.open() as file:
        head = file.read(LLMC_HEADER_BYTES)
        dtype, expected = _raw_layout(head, path)
        begun = head if expected is None else b""
        yield from _split_at_eod(_token_chunks(file, begun, dtype, expected, path), source)


def _raw_layout(head: bytes, path: str) -> tuple[np.dtype[Any], int | None]:
    """The dtype of a file's tokens, and how many there are by llm.c's header; None: the file begins
    with tokens.

    The header is int32 words: a magic, a version, the number of tokens, and zeros. Raises
    ConvertError for an unknown header, and for ids of 32 bits that would be read as 16.
    """
    words = np.frombuffer(head, "<i4", len(head) // 4)
    if len(head) == LLMC_HEADER_BYTES:
        magic, version, num_tokens = words[:3].tolist()
        if (magic, version) in LLMC_DTYPES:
            return LLMC_DTYPES[magic, version], num_tokens
        if magic in LLMC_DATES and not words[3:].any():
            kinds = " or ".join(f"{magic} version {version}" for magic, version in LLMC_DTYPES)
            raise ConvertError(
                f"{path}: begins with a header of llm.c, {magic} version {version}, which is not "
                f"known; write it as {kinds}"
            )
    lower, upper = words.view("<u2").reshape(-1, 2).T
    if len(words) >= MIN_WIDE and (upper < UPPER_HALVES).all() and (lower >= UPPER_HALVES).any():
        raise ConvertError(
            f"{path}: every second number of 16 bits is nearly zero, so these are ids of 32 bits, "
            f"perhaps of a Megatron dataset without its .idx; save them as .npy, which says so: "
            f"np.save(NAME, np.fromfile({path!r}, np.int32))"
        )
    return RAW_DTYPE, None


def read_npy(source: Source) -> Iterator[Tokens]:
    """A one-dimensional array is tokens end to end; the rows of a two-dimensional one are
    documents.
    """
    path = source.path
    with source.open() as stored:
        # Its reads take memory for what is there, and not for what a header says.
        file = PieceReader(iter(lambda: stored.read(READ_BYTES), b""))
        shape, dtype = _npy_header(file, path)
        if len(shape) == 1:
            yield from _split_at_eod(_token_chunks(file, b"", dtype, shape[0], path), source)
            return
        rows, row_tokens = shape
        rows_at_once = max(1, SCAN_TOKENS // max(1, row_tokens))
        for first in range(0, rows, rows_at_once):
            count = min(rows_at_once, rows - first)
            size = count * row_tokens * dtype.itemsize
            data = file.read(size)
            whole_rows = len(data) * count // max(1, size)
            ids = np.frombuffer(data, dtype, whole_rows * row_tokens)
            yield one_per_document(ids, np.full(whole_rows, row_tokens, np.int32), ids.nbytes, path)
            if whole_rows < count:
                raise ConvertError(f"{path}: the array ends early; copy it again")
        if file.read(1):
            raise ConvertError(f"{path}: goes on after its array; save one array a file")


def _npy_header(file: Any, path: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read_header = np.lib.format.read_array_header_1_0
    shape, fortran, dtype = read_header(file)
    if fortran or len(shape) not in (1, 2) or dtype.kind not in "iu" or min(shape) < 0:
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
    file: Any, head: bytes, dtype: np.dtype[Any], expected: int | None, path: str
) -> Iterator[NDArray[Any]]:
    """The tokens of `head`, which was read already, and of the rest of the file.

    expected: how many tokens the header says. Raises ConvertError where there are others.
    """
    cut_token = b""
    count = 0
    rest = iter(lambda: file.read(SCAN_TOKENS * dtype.itemsize), b"")
    for data in itertools.chain([head], rest):
        data = cut_token + data
        tokens = len(data) // dtype.itemsize
        if tokens:
            yield np.frombuffer(data, dtype, tokens)
        count += tokens
        cut_token = data[tokens * dtype.itemsize :]
    if expected not in (None, count):
        raise ConvertError(
            f"{path}: its header says {expected:,} tokens, it holds {count:,}; copy it again"
        )
    if cut_token:
        raise ConvertError(
            f"{path}: ends inside a token of {dtype.itemsize} bytes; is it whole, and are its ids "
            f"{dtype}? Others are read from .npy"
        )


def _split_at_eod(chunks: Iterator[NDArray[Any]], source: Source) -> Iterator[Tokens]:
    """Documents end with eod_id; without one, all is one document."""
    path = source.path
    eod_id = source.options.eod_id
    begun: list[NDArray[Any]] = []
    """Parts of the document that has not ended yet."""
    begun_tokens = 0
    for chunk in chunks:
        rest = chunk
        if eod_id is not None:
            ends = np.flatnonzero(chunk == eod_id) + 1
            if len(ends):
                tokens = np.concatenate([*begun, chunk[: ends[-1]]])
                lengths = np.diff(ends, prepend=0)
                lengths[0] += begun_tokens
                yield one_per_document(tokens, lengths, tokens.nbytes, path)
                begun = []
                begun_tokens = 0
                rest = chunk[ends[-1] :]
        if len(rest):
            begun.append(rest)
            begun_tokens += len(rest)
        if begun_tokens > MAX_TOKENS:
            advice = "name the id that ends documents by --eod-id"
            if eod_id is not None:
                advice = f"is the id {eod_id}, which ends documents (--eod-id), the right one?"
            raise ConvertError(f"{path}: a document of over {MAX_TOKENS:,} tokens; {advice}")
    if begun_tokens:
        tokens = np.concatenate(begun)
        yield one_per_document(tokens, np.array([begun_tokens]), tokens.nbytes, path)
