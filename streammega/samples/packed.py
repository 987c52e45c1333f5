"""Packed datasets: samples are bins of whole documents, without the padding after these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError
from streammega.kernels.documents import count_documents, filled_tokens, list_documents
from streammega.order import Extents
from streammega.samples.token_file import TokenFile, open_indices

Integers = NDArray[np.int64]


def check_packing(bins_of_dataset: Sequence[tuple[str, int | None]], sequence_length: int) -> None:
    """Raise ConfigError unless all datasets are packed into bins of a sample, or none is packed.

    bins_of_dataset: (name, tokens of its bins or None).
    """
    packed = [(name, tokens) for name, tokens in bins_of_dataset if tokens is not None]
    for name, tokens in packed:
        if tokens != sequence_length:
            raise ConfigError(
                f"{name}: is packed into bins of {tokens} tokens, which are its "
                f"samples, and sequence_length is {sequence_length}; set it to {tokens}, or "
                f"convert the dataset again with --pack-length {sequence_length}"
            )
    check_one_kind(bins_of_dataset)


def check_one_kind(bins_of_dataset: Sequence[tuple[str, int | None]]) -> None:
    """Raise ConfigError unless all datasets are packed, or none is."""
    packed = [(name, tokens) for name, tokens in bins_of_dataset if tokens is not None]
    if packed and len(packed) < len(bins_of_dataset):
        name, _ = next(pair for pair in bins_of_dataset if pair[1] is None)
        packed_name, tokens = packed[0]
        raise ConfigError(
            f"{packed_name} is packed into bins and {name} is not; a run "
            f"cannot mix both: convert {name} with --pack-length {tokens} too"
        )


def are_packed(files: Sequence[TokenFile]) -> bool:
    """Whether the files of a source hold bins: all do, or none."""
    return any(file.bin_tokens for file in files)


def trim_padding(extents: Extents, files: Sequence[TokenFile], number_of_file: Integers) -> Extents:
    """Samples that are bins, a row each, without the padding after their documents.

    number_of_file: of each row. Raises FormatError, StorageError for an `.idx`.
    """
    stop = extents.stop.copy()
    for number, file, arrays in open_indices(files, number_of_file):
        of_file = np.flatnonzero(number_of_file == number)
        stop[of_file] = filled_tokens(
            arrays.offsets,
            arrays.lengths,
            file.dtype.itemsize,
            extents.start[of_file],
            extents.stop[of_file],
        )
    return replace(extents, stop=stop)


def one_row_per_document(extents: Extents, file: TokenFile) -> Extents:
    """Samples that are bins without padding, with a row for each document."""
    assert file.index is not None
    arrays = file.index.arrays
    itemsize = file.dtype.itemsize
    where = (arrays.offsets, arrays.bounds, itemsize, extents.start, extents.stop)
    num_documents = count_documents(*where)
    first_row = np.zeros(len(num_documents) + 1, np.int64)
    np.cumsum(num_documents, out=first_row[1:])
    starts = np.empty(first_row[-1], np.int64)
    stops = np.empty(first_row[-1], np.int64)
    list_documents(*where, first_row, starts, stops)
    return Extents(
        row_splits=first_row[extents.row_splits],
        dataset=np.repeat(extents.dataset, num_documents),
        file=np.repeat(extents.file, num_documents),
        start=starts,
        stop=stops,
    )
