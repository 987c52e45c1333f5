"""From extents to token ids: the reads of a few samples, coalesced and concurrent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.errors import ShortReadError
from streammega.kernels.fields import gather_runs
from streammega.kernels.plan import coalesce_rows
from streammega.order import Extents
from streammega.samples.token_file import TokenFile

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """size, sample, column [rows]: the tokens of a row, its sample, and the token of the sample at
    which it begins. valid [samples]: the tokens of each sample. int64.
    """

    size: Integers
    sample: Integers
    column: Integers
    valid: Integers


def rows_of(extents: Extents) -> SampleRows:
    """The rows of samples, end to end in each. Cost: a few numpy operations on the rows."""
    size = extents.stop - extents.start
    # one entry more than rows: the last is the end of the last sample
    tokens_before_row = np.zeros(len(size) + 1, np.int64)
    np.cumsum(size, out=tokens_before_row[1:])
    tokens_before_sample = tokens_before_row[extents.row_splits]
    sample = np.repeat(np.arange(len(extents)), np.diff(extents.row_splits))
    return SampleRows(
        size=size,
        sample=sample,
        column=tokens_before_row[:-1] - tokens_before_sample[sample],
        valid=np.diff(tokens_before_sample),
    )


@dataclass(frozen=True, kw_only=True)
class SharedRequests:
    """file, start, stop [requests], in the unit of the rows; of_row [rows]: the request that holds
    a row.
    """

    file: Integers
    start: Integers
    stop: Integers
    of_row: Integers

    def __len__(self) -> int:
        return len(self.file)


def coalesce(
    file: Integers,
    start: Integers,
    stop: Integers,
    by_place: Integers,
    *,
    gap: int,
    largest: int,
) -> SharedRequests:
    """Requests that cover the rows [start, stop) of files, which `by_place` sorts by file and
    start; in tokens, or all in bytes.

    Rows with at most `gap` between them share a request until it would pass `largest` (a single row
    may be larger). A row is in one request. Cost: one scan of the rows.
    """
    rows = len(file)
    of_row = np.empty(rows, np.int64)
    # as many requests as rows at most
    request_start = np.empty(rows, np.int64)
    request_stop = np.empty(rows, np.int64)
    request_file = np.empty(rows, np.int64)
    count = coalesce_rows(
        file, start, stop, by_place, gap, largest, of_row, request_start, request_stop, request_file
    )
    return SharedRequests(
        file=request_file[:count],
        start=request_start[:count],
        stop=request_stop[:count],
        of_row=of_row,
    )


Ids = NDArray[Any]


def fetch_ids(
    files: Sequence[TokenFile],
    file_of_row: Integers,
    extents: Extents,
    width: int,
    storage: StorageConfig,
) -> tuple[Ids, Integers]:
    """Token ids of the samples of `extents`, [samples, width] in the widest stored dtype, and how
    many each has, int64 [samples].

    file_of_row: int64 [rows], the number among `files` of the file of each row. width: at least the
    tokens of any sample; zeros fill up shorter ones. Raises StorageError.
    """
    samples = len(extents)
    rows = rows_of(extents)
    used_files = np.unique(file_of_row)
    dtype: Any = np.int64
    if len(used_files):
        dtype = np.result_type(*(files[number].dtype for number in used_files))
    ids = np.zeros((samples, width), dtype)
    # the kernel copies runs between two flat arrays
    flat_ids = ids.reshape(-1)
    place_of_row = rows.sample * width + rows.column
    for number in used_files:
        of_file = np.flatnonzero(file_of_row == number)
        starts = extents.start[of_file]
        stops = extents.stop[of_file]
        source, begins = read_runs(files[number], starts, stops, storage)
        gather_runs(source, begins, rows.size[of_file], flat_ids, place_of_row[of_file])
    return ids, rows.valid


def read_runs(
    file: TokenFile, starts: Integers, stops: Integers, storage: StorageConfig
) -> tuple[Ids, Integers]:
    """An array that holds the runs [starts[i], stops[i]) of a file, and where in it each begins.

    In tokens. Raises ShortReadError for a run that the file does not hold, StorageError.
    """
    first = int(starts.min())
    stop = int(stops.max())
    # the kernel that copies runs does not check them
    if first < 0 or stop > file.num_tokens:
        raise ShortReadError(
            f"{file.url}: has {file.num_tokens} tokens, and its .idx names tokens from {first} to {stop}; "
            "compare both by 'streammega verify', and write the dataset again"
        )
    if file.store.local_path(file.key) is not None:
        mapped = file.store.view(file.key, file.etag)
        file.check_bytes(len(mapped))
        return np.frombuffer(mapped, file.dtype, file.num_tokens), starts
    return _fetch_runs(file, starts, stops, storage)


def _fetch_runs(
    file: TokenFile, starts: Integers, stops: Integers, storage: StorageConfig
) -> tuple[Ids, Integers]:
    """`read_runs` of a file that is not local."""
    itemsize = file.dtype.itemsize
    requests = coalesce(
        np.zeros(len(starts), np.int64),  # all of one file
        starts,
        stops,
        np.argsort(starts, kind="stable"),
        gap=storage.tuning.coalesce_gap_bytes // itemsize,
        largest=storage.tuning.max_request_bytes // itemsize,
    )
    start_bytes = (requests.start * itemsize).tolist()
    stop_bytes = (requests.stop * itemsize).tolist()
    buffers = file.store.read(file.key, list(zip(start_bytes, stop_bytes, strict=True)), file.etag)
    tokens = np.concatenate([np.frombuffer(buffer, file.dtype) for buffer in buffers])
    # the buffers are end to end, without the gaps between requests
    size_of_request = requests.stop - requests.start
    tokens_before_request = np.cumsum(size_of_request) - size_of_request
    shift_of_request = tokens_before_request - requests.start
    return tokens, starts + shift_of_request[requests.of_row]
