"""The read plan of a rank: its files, how its memory is divided, and which blocks it fetches whole."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config import ORDERS, StorageConfig
from streammega.config.fields import FIELDS
from streammega.dataset.local_cache import cache_folder
from streammega.errors.logs import get_logger
from streammega.kernels.addresses import address_of
from streammega.loading.memory_plan import (
    BatchSize,
    BlockSize,
    MemoryPlan,
    ResidentSize,
    plan_memory,
)
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.planner import Planner, Resident
from streammega.loading.ready import Form
from streammega.order.epoch_layout import MIN_RUN_SAMPLES
from streammega.order.open_blocks import OpenBlocks
from streammega.order.stream_order import StreamOrder
from streammega.samples.columns import files_of
from streammega.samples.rows import WHOLE, FileTable, KeptParts
from streammega.samples.source import all_files
from streammega.samples.token_file import TokenFile
from streammega.storage.cache import PAGE_BYTES, PageCache, open_cached
from streammega.storage.cache.chunk_file import whole_pages
from streammega.storage.cache.page_cache import MIN_PAGED_BYTES, CachedStore
from streammega.storage.etags import warn_unversioned
from streammega.storage.fetch.flow_control import NEAR_BYTES
from streammega.storage.open import is_remote
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

NO_TOKENS_KEPT = (
    "%s: keeps copies of .idx files and built orders; set cache_max_bytes too for it to keep tokens"
)
SAMPLES_OF_COLUMN = (
    "column %s: a sample is one request of %s bytes, for its blocks have no room in memory_bytes, which "
    "would have it from %s on"
)
SMALL_REQUEST = 64 << 10
"""Requests of fewer bytes cost more than their bytes."""


class FilesPlan(NamedTuple):
    """How the files of ids, or of one stored column, are read. table: those of all datasets."""

    table: FileTable
    planner: Planner


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """What one reader needs to read its micro-batches.

    files: of ids, then of each stored column. columns: the names of these.
    """

    files: Sequence[FilesPlan]
    columns: Sequence[str]
    memory: MemoryPlan
    is_scattered: bool
    """Whether some reads are so small that they would not fill a cache.

    Then whole files are fetched into the cache in the background.
    """

    @property
    def table(self) -> FileTable:
        """The files of ids."""
        return self.files[0].table

    @property
    def planner(self) -> Planner:
        """The planner of ids."""
        return self.files[0].planner

    @property
    def all_files(self) -> list[TokenFile]:
        """The files of ids and columns."""
        return [file for files in self.files for file in files.table.files]

    @property
    def is_remote(self) -> bool:
        """Whether some file has to be fetched."""
        return not all(files.table.local.all() for files in self.files)


def plan_reading(
    steps: MicroSteps,
    start: int,
    memory_bytes: int,
    *,
    ahead: int = 0,
    kept: KeptParts = WHOLE,
    kept_of_columns: KeptParts | None = None,
    form: Form = "fields",
) -> ReadPlan:
    """Plan how a rank reads its micro-batches in an iteration that begins at `start`.

    memory_bytes: the limit of all memory of the reader. ahead: micro-batches to keep ready. kept:
    which tokens of every sample are read. kept_of_columns: the same for columns; None: as `kept`. form:
    what batches are.

    Raises ConfigError if the memory cannot hold a micro-batch.
    """
    config = steps.config
    storage = config.storage
    columns = list(steps.samples.segments[0].stored_columns)
    tables = _tables(steps.samples.files, columns, storage)
    of_columns = kept if kept_of_columns is None else kept_of_columns
    order = steps.samples.segment_at(start).order
    lanes = _lanes_of_reader(steps, order, start)
    of_each = [
        _files_to_read(
            steps, start, table, of_columns if number else kept, has_lanes=len(lanes) > 0
        )
        for number, table in enumerate(tables)
    ]
    # The memory plan numbers the datasets of ids, then those of each column.
    count = len(steps.samples.files) if order is None else len(order.datasets)
    sample_tokens = steps.sequence_length_at(start) + 1
    memory = plan_memory(
        memory_bytes,
        _batch_size(steps, tables, kept, of_columns, form),
        [
            block._replace(dataset=block.dataset + number * count)
            for number, files in enumerate(of_each)
            for block in files.blocks
        ],
        len(lanes),
        resident=[
            ResidentSize(
                one.dataset + number * count, one.bytes_in_memory(files.table, sample_tokens)
            )
            for number, files in enumerate(of_each)
            for one in files.small
        ],
        ahead=ahead,
        coalesce_gap_bytes=storage.tuning.coalesce_gap_bytes,
        in_flight_bytes=storage.tuning.max_in_flight_bytes,
        near_bytes=min(storage.tuning.max_in_flight_bytes, NEAR_BYTES),
        is_remote=not all(table.local.all() for table in tables),
        only_blocks=all(_reads_only(order, files) for files in of_each),
    )
    plans = []
    is_scattered = False
    in_small_requests = 0
    for number, files in enumerate(of_each):
        here = range(number * count, (number + 1) * count)
        resident = {one - here.start for one in memory.resident_datasets if one in here}
        in_blocks = {one - here.start for one in memory.block_datasets if one in here}
        sample_bytes = sample_tokens * int(files.table.itemsize.max())
        _warn_of_samples_alone(files.small, files.table, resident, sample_bytes)
        without_room = len({block.dataset for block in files.blocks} - in_blocks - resident)
        if number == 0 or sample_bytes < SMALL_REQUEST:
            in_small_requests += without_room
        elif without_room:
            log.info(
                SAMPLES_OF_COLUMN,
                columns[number - 1],
                f"{sample_bytes:,}",
                f"{memory.enough_bytes:,}",
            )
        is_scattered |= files.are_scattered(in_blocks)
        blocks_here = None
        if in_blocks:
            assert order is not None
            assert files.token_bytes is not None
            is_whole = np.isin(np.arange(count), list(in_blocks))
            blocks_here = OpenBlocks(order, lanes, is_whole, files.token_bytes)
        stays = [one for one in files.small if one.dataset in resident]
        planner = Planner(
            files.table,
            memory.coalesce_gap_bytes,
            storage.tuning.max_request_bytes,
            blocks_here,
            files.kept,
            _resident(stays, files.table, sample_tokens) if stays else None,
        )
        plans.append(FilesPlan(files.table, planner))
    if in_small_requests:
        _warn_low_memory(memory, memory_bytes, in_small_requests, with_columns=bool(columns))
    return ReadPlan(
        files=plans,
        columns=columns,
        memory=memory,
        is_scattered=ORDERS[config.order].is_shuffled and is_scattered,
    )


def _files_to_read(
    steps: MicroSteps, start: int, table: FileTable, kept: KeptParts, *, has_lanes: bool
) -> _FilesToRead:
    """What may be kept of some files, and which blocks are worth fetching whole."""
    order = steps.samples.segment_at(start).order
    token_bytes = None if order is None else _token_bytes(order, table)
    blocks: list[BlockSize] = []
    # If samples are packed bins, a kept part may be empty. Then a slot would wait for rows that have no
    # tokens, so such parts are never read from blocks.
    is_cut_bin = kept.bounds and steps.samples.segments[0].is_packed
    if order is not None and token_bytes is not None and has_lanes and not is_cut_bin:
        blocks = _blocks_to_prefetch(order, table, token_bytes)
    small = _small_datasets(steps, table, start, steps.config.storage.tuning.resident_bytes)
    return _FilesToRead(table, kept, small, blocks, token_bytes)


def _tables(
    files: Sequence[Sequence[TokenFile]], columns: Sequence[str], storage: StorageConfig
) -> list[FileTable]:
    """The files of ids and of each column, through the cache if it keeps tokens."""
    of_each = [files, *(files_of(name, files) for name in columns)]
    if storage.cache_max_bytes:
        cache = PageCache(
            cache_folder(storage),
            storage.cache_max_bytes,
            storage.tuning.cache_chunk_bytes,
        )
        of_each = [
            [[_cached(file, cache) for file in of_dataset] for of_dataset in one] for one in of_each
        ]
    elif storage.cache_dir is not None and not all(
        file.store.is_local for file in all_files(files)
    ):
        warn_once(
            log, str(storage.cache_dir), NO_TOKENS_KEPT, storage.cache_dir, level=logging.INFO
        )
    return [_table_of(one, storage) for one in of_each]


def _batch_size(
    steps: MicroSteps,
    tables: Sequence[FileTable],
    kept: KeptParts,
    kept_of_columns: KeptParts,
    form: Form,
) -> BatchSize:
    """The sizes of a micro-batch. tables: of ids, then of each stored column."""
    config = steps.config
    segment = steps.samples.segments[0]
    sample_tokens = config.sequence_length + 1
    rows = steps.micro_batch_size * kept.rows_of_sample
    ids = rows * kept.width(sample_tokens)
    cut = kept_of_columns
    of_columns = steps.micro_batch_size * cut.rows_of_sample * cut.width(sample_tokens)
    fields: list[int] = []
    if form != "ids":
        table = {**FIELDS, **segment.column_fields}
        names = [*segment.field_names, *segment.column_fields]
        fields = [rows * table[name].nbytes(config.sequence_length) for name in names]
    stored = [sample_tokens * int(table.itemsize.max()) for table in tables]
    return BatchSize(
        samples=steps.micro_batch_size,
        sample_tokens=sample_tokens,
        stored=steps.micro_batch_size * sum(stored),
        ids=(
            ids * tables[0].dtype.itemsize,
            rows * np.dtype(np.int64).itemsize,
            *(
                (ids if column.make else of_columns) * column.token_bytes
                for column in segment.columns.values()
            ),
        ),
        fields=tuple(fields),
        files=len(tables),
    )


def _token_bytes(order: StreamOrder, table: FileTable) -> NDArray[np.int64]:
    """Bytes of a token of each dataset of an order, int64: the most in its files."""
    return np.array(
        [
            table.itemsize[_files_of(order, dataset, table)].max()
            for dataset in range(len(order.datasets))
        ],
        np.int64,
    )


def _lanes_of_reader(steps: MicroSteps, order: StreamOrder | None, start: int) -> NDArray[np.int64]:
    """The lanes whose samples this reader takes. None, if it does not take every sample of a lane, in the
    lane's order: a block is fetched when its first sample is due and freed after its last sample.
    """
    # An order of built indices has no lanes. Where ranks share lanes, each would fetch the same blocks.
    if order is None or order.lanes % steps.step_samples:
        return np.empty(0, np.int64)
    return lanes_from(steps, order, start)


def _blocks_to_prefetch(
    order: StreamOrder, table: FileTable, token_bytes: NDArray[np.int64]
) -> list[BlockSize]:
    """The datasets whose blocks are worth fetching whole, the most drawn first."""
    # A block is its samples end to end and one extra token. Each further shard that it continues in
    # adds another: memory_plan.py has room for these.
    bytes_of_block = (order.block_samples * order.sequence_length + order.extra) * token_bytes
    most_drawn_first = np.argsort(-np.array(order.weights, np.float64), kind="stable").tolist()
    return [
        BlockSize(dataset=dataset, stored=int(bytes_of_block[dataset]))
        for dataset in most_drawn_first
        if _is_worth_prefetching(dataset, order, table)
    ]


def _reads_only(order: StreamOrder | None, files: _FilesToRead) -> bool:
    """Whether all that is fetched stays in memory or is in blocks: all remote datasets of this segment,
    and no samples of epochs that earlier segments left unread.
    """
    if order is None or order.has_remainders:
        return False
    chosen = {block.dataset for block in files.blocks} | {one.dataset for one in files.small}
    return all(
        dataset in chosen or files.table.local[_files_of(order, dataset, files.table)].all()
        for dataset in range(len(order.datasets))
    )


class _SmallDataset(NamedTuple):
    """A dataset that may stay in memory: bytes [start, stop) of some files.

    dataset: its place in the order. samples_alone: without room its samples are read one by one.
    """

    dataset: int
    files: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    samples_alone: bool

    def bytes_in_memory(self, table: FileTable, sample_tokens: int) -> int:
        """Bytes of the buffers that hold it."""
        pieces = _resident([self], table, sample_tokens)
        return sum(map(pieces.bytes_in_memory, self.files.tolist()))


def _small_datasets(
    steps: MicroSteps, table: FileTable, start: int, resident_bytes: int
) -> list[_SmallDataset]:
    """The remote datasets that may stay in memory, the most drawn first: those of few bytes, and those
    whose lanes share a run, which have no blocks, if few enough ranks read them: each reads them whole.
    A dataset is left out if a rank draws few samples of it until the end: requests for them cost less.
    """
    segment = steps.samples.segment_at(start)
    order = segment.order
    sample_tokens = steps.sequence_length_at(start) + 1
    if not ORDERS[steps.config.order].is_shuffled or not resident_bytes:
        return []
    small = []
    num_datasets = len(steps.samples.files) if order is None else len(order.datasets)
    shares = np.zeros(num_datasets)
    if order is None:
        shares[segment.dataset_numbers] = segment.shares
    else:  # divided by the largest first: the sum of huge weights would be infinite
        weights = np.array(order.weights) / max(order.weights)
        shares[:] = weights / weights.sum()
    num_samples = math.inf if steps.num_samples is None else steps.num_samples - start
    for dataset in range(num_datasets):
        if order is None:
            files = np.arange(table.firsts[dataset], table.firsts[dataset + 1])
            first, last = np.zeros(len(files), np.int64), table.num_tokens[files]
        else:
            files = _files_of(order, dataset, table)
            first, last = _bounds_in_files(order, dataset)
        if table.local[files].any():
            continue
        itemsize = table.itemsize[files]
        begin, end = first * itemsize, last * itemsize
        cost_of_sample = max(sample_tokens * int(itemsize.max()), SMALL_REQUEST)
        if num_samples * shares[dataset] / steps.dp_size * cost_of_sample < (end - begin).sum():
            continue
        is_alone = order is not None and order.lanes_per_run[dataset] > 1
        # all samples of a rank, one by one, against all bytes
        saves = is_alone and sample_tokens * int(itemsize.max()) * steps.dp_size <= SMALL_REQUEST
        if saves or (end - begin).sum() <= resident_bytes:
            small.append(_SmallDataset(dataset, files, begin, end, bool(is_alone)))
    return sorted(small, key=lambda one: -shares[one.dataset])


class _FilesToRead(NamedTuple):
    """The files of ids, or of one stored column, before memory is divided.

    kept: which tokens of every sample are read. small: the datasets that may stay in memory. blocks:
    those whose blocks are worth fetching whole. token_bytes: of each dataset of the stream order, int64;
    0 where it has no such column.
    """

    table: FileTable
    kept: KeptParts
    small: Sequence[_SmallDataset]
    blocks: Sequence[BlockSize]
    token_bytes: NDArray[np.int64] | None

    def are_scattered(self, in_blocks: Collection[int]) -> bool:
        """Whether some reads are too small to fill a cache. in_blocks: datasets that have room for it."""
        if not self.table.itemsize.any():
            return False  # nothing is read
        if self.token_bytes is None or not in_blocks:
            return True
        are_whole = {*np.flatnonzero(self.token_bytes).tolist()} <= {*in_blocks}
        return not are_whole or min(block.stored for block in self.blocks) < MIN_PAGED_BYTES


def _bounds_in_files(
    order: StreamOrder, dataset: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens [first, last) of each file of a dataset between which its parts are."""
    parts = order.datasets[dataset].parts
    _, place = np.unique([part.file for part in parts], return_inverse=True)
    first = np.full(place.max() + 1, np.iinfo(np.int64).max)
    last = np.zeros(len(first), np.int64)
    np.minimum.at(first, place, [part.start for part in parts])
    np.maximum.at(last, place, [part.start + part.tokens for part in parts])
    return first, last


def _resident(small: Sequence[_SmallDataset], table: FileTable, sample_tokens: int) -> Resident:
    """The bytes of small datasets, by file."""
    start = np.zeros(len(table.itemsize), np.int64)
    stop = start.copy()
    for one in small:
        start[one.files] = one.start
        stop[one.files] = one.stop
    return Resident(start=start, stop=stop, row_bytes=sample_tokens * table.itemsize)


def _is_worth_prefetching(dataset: int, order: StreamOrder, table: FileTable) -> bool:
    """Whether it pays to fetch the blocks of a dataset whole.

    Its files have to be remote and of one token width. A run must belong to a single lane, and a
    block must have several samples.
    """
    files = _files_of(order, dataset, table)
    itemsizes = table.itemsize[files]
    one_width = bool((itemsizes == itemsizes[0]).all() and itemsizes[0])  # not without the column
    is_remote = not table.local[files].any()
    has_one_lane = order.lanes_per_run[dataset] == 1
    has_several_samples = order.block_samples[dataset] >= 2
    return bool(one_width and is_remote and has_one_lane and has_several_samples)


def _files_of(order: StreamOrder, dataset: int, table: FileTable) -> NDArray[np.int64]:
    """The numbers of the files that a dataset of an order has parts of."""
    first = table.firsts[order.dataset_numbers[dataset]]
    files: NDArray[np.int64] = first + np.unique(
        [part.file for part in order.datasets[dataset].parts]
    )
    return files


def lanes_from(steps: MicroSteps, order: StreamOrder, consumed: int) -> NDArray[np.int64]:
    """The lanes whose samples a rank takes if it begins at `consumed`, int64 [lanes of the rank].

    The number of lanes must be a multiple of the samples in a micro-step of all ranks. Then each rank
    takes every sample of its lanes, and the number of its lanes is the same wherever it begins.
    """
    micro_steps = consumed + np.arange(0, order.lanes, steps.step_samples)
    lanes: NDArray[np.int64] = np.unique(order.lane_of(steps.sample_ids(micro_steps)))
    return lanes


def _warn_of_samples_alone(
    small: Sequence[_SmallDataset],
    table: FileTable,
    resident: Collection[int],
    sample_bytes: int,
) -> None:
    """Warn of remote datasets without blocks that have no room in memory, where samples are small
    requests. resident: the datasets that have room.
    """
    alone = [
        one
        for one in small
        if one.samples_alone
        and one.dataset not in resident
        and any(is_remote(table.files[number].url) for number in one.files)
    ]
    if alone and sample_bytes < SMALL_REQUEST:
        log.warning(
            "%d of the datasets have fewer than %d samples for each lane, so they have no blocks, and no "
            "room in memory_bytes: their samples are read one by one, in requests of %s bytes. Set "
            "memory_bytes of the storage to a few times the %s bytes of these datasets",
            len(alone),
            MIN_RUN_SAMPLES,
            f"{sample_bytes:,}",
            f"{sum(int((one.stop - one.start).sum()) for one in alone):,}",
        )


def _warn_low_memory(
    memory: MemoryPlan, memory_bytes: int, without_room: int, *, with_columns: bool
) -> None:
    """Warn that memory is too small for some blocks, and say how much would be enough. without_room:
    datasets, and columns of datasets, that are read in small requests then.
    """
    log.warning(
        "memory_bytes %s has no room for the open blocks of %d of the datasets%s: their samples are "
        "read one by one, in many small requests, which is several times slower. Set memory_bytes "
        "of the storage to at least %s; less would do with fewer shuffle_lanes or a smaller shuffle_block_bytes, "
        "which are another order",
        f"{memory_bytes:,}",
        without_room,
        " and columns" if with_columns else "",
        f"{memory.enough_bytes:,}",
    )


# The files.


def _table_of(files: Sequence[Sequence[TokenFile]], storage: StorageConfig) -> FileTable:
    """The table of the files for the planner and its kernels."""
    table = FileTable.of(files)
    addresses = np.array([_addresses_in_cache(file) for file in table.files], np.int64)
    verified_at, mapped_at = np.ascontiguousarray(addresses.reshape(-1, 2).T)
    return replace(
        table,
        verified_at=verified_at,
        mapped_at=mapped_at,
        page_bytes=PAGE_BYTES,
        chunk_bytes=whole_pages(storage.tuning.cache_chunk_bytes),
    )


def _addresses_in_cache(file: TokenFile) -> tuple[int, int]:
    """The memory addresses of the states of a file's cached pages and of its chunks' addresses.

    (0, 0) if the file is not cached.
    """
    if not isinstance(file.store, CachedStore):
        return 0, 0
    cached = file.store.cached
    return address_of(cached.verified), address_of(cached.address.view(np.uint8))


def _cached(file: TokenFile, cache: PageCache) -> TokenFile:
    """The file with its reads through the cache.

    Returns the file unchanged if it is local or without an ETag, or if the disk of the cache cannot be
    used.
    """
    if file.store.is_local or not file.dtype.itemsize:
        return file
    if not file.etag:  # pages of an old object and of a new one would look alike
        warn_unversioned(file.url)
        return file
    size = file.num_tokens * file.dtype.itemsize
    cached = open_cached(cache, file.url, file.etag, size)
    return replace(file, store=CachedStore(file.store, cached)) if cached else file


def map_local_files(table: FileTable) -> list[NDArray[np.uint8] | None]:
    """The bytes of each local file, which keep it mapped; None for the others.

    Kernels read as many as the file has tokens. So this raises ObjectChangedError if a file is not
    the one that was opened, and ShortReadError if the file is too short for its tokens.
    """
    mapped: list[NDArray[np.uint8] | None] = []
    for file, is_mapped in zip(table.files, table.local.tolist(), strict=True):
        content = None
        if is_mapped:
            view = file.store.view(file.key, file.etag)
            if len(view) or file.num_tokens:  # an empty file cannot be mapped
                content = np.frombuffer(view, np.uint8)
                file.check_bytes(len(content))
        mapped.append(content)
    return mapped
