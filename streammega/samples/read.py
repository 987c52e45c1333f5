"""From extents to token ids: the reads of a few samples, coalesced and concurrent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.errors import ShortReadError
from streammega.kernels.batch import gather_runs
from streammega.kernels.plan import coalesce_rows
from streammega.order import Extents
from streammega.samples.token_file import TokenFile
from streammega.storage.backends.local import LocalStore

Ids = NDArray[Any]


def fetch_ids(
    files: Sequence[TokenFile],
    file_ids: NDArray[np.int64],
    extents: Extents,
    width: int,
    storage: StorageConfig,
) -> tuple[Ids, NDArray[np.int64]]:
    """Token ids of the samples of `extents`, [samples, width] in the widest stored dtype, and how
    many each has.

    `file_ids` int64 [rows] says which of `files` each row lies in. Raises StorageError.
    """
    sizes = extents.stop - extents.start
    ends = np.cumsum(sizes)
    before = np.concatenate([np.zeros(1, np.int64), ends])[extents.row_splits]
    valid = np.diff(before)
    sample = np.repeat(np.arange(len(extents)), np.diff(extents.row_splits))
    out_starts = sample * width + (ends - sizes) - before[:-1][sample]
    used = np.unique(file_ids)
    ids = np.zeros(
        (len(extents), width),
        np.result_type(*(files[f].dtype for f in used)) if len(used) else np.int64,
    )
    for f in used:
        rows = np.flatnonzero(file_ids == f)
        source, at = read_runs(files[f], extents.start[rows], extents.stop[rows], storage)
        gather_runs(source, at, sizes[rows], ids.reshape(-1), out_starts[rows])
    return ids, valid


def read_runs(
    file: TokenFile, starts: NDArray[np.int64], stops: NDArray[np.int64], storage: StorageConfig
) -> tuple[Ids, NDArray[np.int64]]:
    """An array that holds the runs [starts[i], stops[i]) of a file, and where in it each begins.

    In tokens.
    """
    if int(stops.max()) > file.num_tokens or int(starts.min()) < 0:
        raise ShortReadError(
            f"{file.url}: tokens up to {int(stops.max())} were asked for, the file has {file.num_tokens}"
        )
    if isinstance(file.store, LocalStore):
        mapped = file.store.view(file.key, file.etag)
        file.check_bytes(len(mapped))
        return np.frombuffer(mapped, file.dtype, file.num_tokens), starts
    size = file.dtype.itemsize
    low, high, request = coalesce(
        starts, stops, storage.coalesce_bytes // size, storage.part_bytes // size
    )
    buffers = file.store.read_ranges(
        file.key, (low * size).tolist(), (high * size).tolist(), file.etag
    )
    arena = np.concatenate([np.frombuffer(buffer, file.dtype) for buffer in buffers])
    base = np.cumsum(high - low) - (high - low)
    return arena, base[request] + starts - low[request]


def coalesce(
    starts: NDArray[np.int64], stops: NDArray[np.int64], gap: int, largest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Requests that cover all runs: (low, high, request of each run).

    Runs with at most `gap` between them share a request until it would pass `largest` (a single run
    may be larger). A run lies whole in its request. Cost: one sort.
    """
    order = np.argsort(starts, kind="stable")
    rows = len(starts)
    one_file = np.zeros(rows, np.int64)
    request = np.empty(rows, np.int64)
    low = np.empty(rows, np.int64)
    high = np.empty(rows, np.int64)
    of_file = np.empty(rows, np.int64)
    made = coalesce_rows(one_file, starts, stops, order, gap, largest, request, low, high, of_file)
    return low[:made], high[:made], request
