"""What attention costs a sample whose documents do not see each other, by the index alone: known
before a token is read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.balance import add_document_costs
from streammega.samples.documents import DocumentBounds
from streammega.samples.rows import rows_of
from streammega.samples.source import SampleSource, all_files, file_of_rows
from streammega.samples.token_file import TokenFile
from streammega.storage.fetch.threads import each

Integers = NDArray[np.int64]
OPENERS = 32
"""Indices that are opened at once: of a remote dataset each is a download."""


def attention_costs(source: SampleSource, sample_ids: Integers) -> Integers:
    """The squared tokens of the documents of each sample, added up; int64 [samples].

    All else that a sample costs is the same for all of them. Documents are those of the `.idx`; of
    the Megatron order, which shuffles sequences, they are its sequences. Raises FormatError for an
    index whose sequences lie in no order, StorageError.
    """
    extents = source.locate(sample_ids)
    rows = rows_of(extents)
    # The extra token of a sample is a label alone.
    inputs_end = np.minimum(rows.column + rows.size, source.config.sequence_length)
    num_inputs = np.maximum(inputs_end - rows.column, 0)
    files = all_files(source)
    number_of_file = file_of_rows(source, extents)
    costs = np.zeros(len(extents), np.int64)
    in_bounds = np.zeros(len(num_inputs), np.bool_)
    for number, bounds in _opened(files, number_of_file):
        # one file at a time: each has arrays of its own
        of_file = np.flatnonzero(number_of_file == number)
        in_bounds[of_file] = True
        start = extents.start[of_file]
        offsets, first_sequences = bounds.arrays
        add_document_costs(
            offsets, first_sequences, files[number].dtype.itemsize,
            start, start + num_inputs[of_file], rows.sample[of_file], costs,
        )  # fmt: skip
    # rows of the other orders are documents already
    alone = np.flatnonzero(~in_bounds)
    np.add.at(costs, rows.sample[alone], num_inputs[alone] ** 2)
    return costs


def _opened(files: list[TokenFile], used: Integers) -> list[tuple[int, DocumentBounds]]:
    """(number, bounds) of the files used that have any, all of which are open."""
    numbered = []
    for number in np.unique(used).tolist():
        bounds = files[number].documents
        if bounds is not None:
            numbered.append((number, bounds))
    waiting = [bounds for _, bounds in numbered if not bounds.is_open]
    each(lambda bounds: bounds.arrays, waiting, OPENERS)
    return numbered
