"""From extents to token ids: the reads of a few samples, coalesced and concurrent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.errors import ShortReadError
from streammega.kernels.batch import gather_runs
from streammega.order import Extents
from streammega.samples.coalesce import coalesce
from streammega.samples.rows import rows_of
from streammega.samples.token_file import TokenFile

Ids = NDArray[Any]
Integers = NDArray[np.int64]


def fetch_ids(
    files: Sequence[TokenFile],
    file_ids: Integers,
    extents: Extents,
    width: int,
    storage: StorageConfig,
) -> tuple[Ids, Integers]:
    """Token ids of the samples of `extents`, [samples, width] in the widest stored dtype, and how
    many each has.

    `file_ids` int64 [rows] says which of `files` each row lies in. Raises StorageError.
    """
    samples = len(extents)
    rows = rows_of(extents)
    place_in_ids = rows.sample * width + rows.column
    used_files = np.unique(file_ids)
    dtype: Any = np.int64
    if len(used_files):
        dtype = np.result_type(*(files[number].dtype for number in used_files))
    # a sample that ends early is followed by zeros: `valid` says that they are padding
    ids = np.zeros((samples, width), dtype)
    flat_ids = ids.reshape(-1)
    for number in used_files:
        of_file = np.flatnonzero(file_ids == number)
        starts = extents.start[of_file]
        stops = extents.stop[of_file]
        source, begins = read_runs(files[number], starts, stops, storage)
        gather_runs(source, begins, rows.size[of_file], flat_ids, place_in_ids[of_file])
    return ids, rows.valid


def read_runs(
    file: TokenFile, starts: Integers, stops: Integers, storage: StorageConfig
) -> tuple[Ids, Integers]:
    """An array that holds the runs [starts[i], stops[i]) of a file, and where in it each begins.

    In tokens. Raises ShortReadError for a run that the file does not hold, StorageError.
    """
    last_stop = int(stops.max())
    # the kernel that copies runs looks no further
    if last_stop > file.num_tokens or int(starts.min()) < 0:
        raise ShortReadError(
            f"{file.url}: tokens up to {last_stop} were asked for, the file has {file.num_tokens}"
        )
    if file.store.local_path(file.key) is not None:
        mapped = file.store.view(file.key, file.etag)
        file.check_bytes(len(mapped))
        return np.frombuffer(mapped, file.dtype, file.num_tokens), starts
    return _fetch_runs(file, starts, stops, storage)


def _fetch_runs(
    file: TokenFile, starts: Integers, stops: Integers, storage: StorageConfig
) -> tuple[Ids, Integers]:
    """The same of a file that is no local one."""
    itemsize = file.dtype.itemsize
    requests = coalesce(
        np.zeros(len(starts), np.int64),  # all of one file
        starts,
        stops,
        np.argsort(starts, kind="stable"),
        gap=storage.coalesce_bytes // itemsize,
        largest=storage.part_bytes // itemsize,
    )
    start_bytes = (requests.start * itemsize).tolist()
    stop_bytes = (requests.stop * itemsize).tolist()
    buffers = file.store.read(file.key, list(zip(start_bytes, stop_bytes, strict=True)), file.etag)
    tokens = np.concatenate([np.frombuffer(buffer, file.dtype) for buffer in buffers])
    # the answers lie end to end, without the gaps between requests
    size_of_request = requests.stop - requests.start
    tokens_before_request = np.cumsum(size_of_request) - size_of_request
    shift_of_request = tokens_before_request - requests.start
    return tokens, starts + shift_of_request[requests.of_row]
