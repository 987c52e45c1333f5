"""What attention costs a sample whose documents do not see each other, by the index alone: known
before a token is read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streammega.kernels.balance import add_document_costs
from streammega.samples.documents import open_bounds
from streammega.samples.rows import rows_of
from streammega.samples.source import SampleSource, all_files, file_of_rows

Integers = NDArray[np.int64]


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
    documents_of_file = [file.documents for file in files]
    for number, bounds in open_bounds(documents_of_file, number_of_file):
        # one file at a time: each has arrays of its own
        of_file = np.flatnonzero(number_of_file == number)
        in_bounds[of_file] = True
        start = extents.start[of_file]
        arrays = bounds.arrays
        add_document_costs(
            arrays.offsets, arrays.bounds, files[number].dtype.itemsize,
            start, start + num_inputs[of_file], rows.sample[of_file], costs,
        )  # fmt: skip
    # rows of the other orders are documents already
    alone = np.flatnonzero(~in_bounds)
    np.add.at(costs, rows.sample[alone], num_inputs[alone] ** 2)
    return costs
