"""How a rank reads: from which files, how much at a time, and within its memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.loading.memory_plan import BatchSize, BlockSize, MemoryPlan, plan_memory
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.planner import WHOLE, FileTable, KeptColumns, Planner
from streammega.order.open_blocks import OpenBlocks
from streammega.order.stream_order import StreamOrder
from streammega.samples.derived_fields import bytes_of_field
from streammega.samples.packed import are_packed
from streammega.samples.source import all_files, field_names, masks_by_files
from streammega.samples.token_file import TokenFile
from streammega.storage.cache import PAGE_BYTES, PageCache, open_cached
from streammega.storage.cache.chunk_file import whole_pages
from streammega.storage.cache.page_cache import MIN_PAGED_BYTES, CachedStore
from streammega.storage.etags import warn_unversioned
from streammega.storage.store import address_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    """How one reader reads.

    files: all datasets' files end to end. dtype: the widest of theirs.
    """

    files: list[TokenFile]
    table: FileTable
    dtype: np.dtype[Any]
    memory: MemoryPlan
    planner: Planner
    is_scattered: bool
    """Whether some reads are so small that only whole files fetched in the background would fill a
    cache.
    """

    @cached_property
    def dtype_numbers(self) -> dict[np.dtype[Any], int]:
        """A number for each dtype of the files."""
        dtypes = {file.dtype for file in self.files}
        return {dtype: number for number, dtype in enumerate(dtypes)}

    @cached_property
    def dtype_of_file(self) -> NDArray[np.int64]:
        """The number of each file's dtype, int64 [files]."""
        return np.array([self.dtype_numbers[file.dtype] for file in self.files], np.int64)

    @property
    def is_remote(self) -> bool:
        """Whether anything has to be fetched."""
        return not self.table.local.all()


def plan_reading(
    steps: MicroSteps,
    start: int,
    memory_bytes: int,
    *,
    ahead: int = 0,
    kept: KeptColumns = WHOLE,
    ids_only: bool = False,
) -> ReadPlan:
    """How the micro-batches of a rank are read, of an iteration from `start` on.

    memory_bytes: all that the reader may hold. ahead: micro-batches that are to be ready. kept: which
    tokens of every sample are read. ids_only: ids are handed out as they are stored. Raises
    ConfigError for a memory that cannot hold a micro-batch.
    """
    config = steps.config
    storage = config.storage
    files = all_files(steps.samples.files)
    if storage.cache_dir is not None:
        cache = PageCache(
            storage.cache_dir,
            storage.cache_max_bytes,
            storage.cache_chunk_bytes,
            storage.request_timeout,
        )
        files = [_cached(file, cache) for file in files]
    table = _table_of(files, steps)
    dtype = np.result_type(*(file.dtype for file in files))
    blocks: list[BlockSize] = []
    lanes = np.empty(0, np.int64)
    # of a bin that ends early some kept parts are empty
    if not (kept.bounds and are_packed(files)):
        blocks, lanes = _blocks_to_prefetch(steps, table, start)
    memory = plan_memory(
        memory_bytes,
        _batch_size(steps, dtype, int(table.itemsize.max()), kept, ids_only=ids_only),
        blocks,
        len(lanes),
        ahead=ahead,
        coalesce_gap_bytes=storage.coalesce_gap_bytes,
        is_remote=not table.local.all(),
    )
    if memory.unfit:
        _warn_low_memory(memory, memory_bytes)
    prefetched = None
    smallest = min((block.stored for block in blocks), default=0)
    if memory.whole:
        order = steps.samples.segment_at(start).order
        assert order is not None
        itemsizes = table.itemsize[table.firsts[order.dataset_numbers]]
        is_whole = np.isin(np.arange(len(itemsizes)), memory.whole)
        prefetched = OpenBlocks(order, lanes, is_whole, itemsizes)
    return ReadPlan(
        files=files,
        table=table,
        dtype=dtype,
        memory=memory,
        planner=Planner(
            table, memory.coalesce_gap_bytes, storage.max_request_bytes, prefetched, kept
        ),
        is_scattered=config.order != "sequential"
        and (prefetched is None or not prefetched.is_followed.all() or smallest < MIN_PAGED_BYTES),
    )


def _batch_size(
    steps: MicroSteps, dtype: np.dtype[Any], itemsize: int, kept: KeptColumns, *, ids_only: bool
) -> BatchSize:
    """The sizes of a micro-batch. dtype: of its ids; itemsize: of those in its files, at most."""
    config = steps.config
    sample_tokens = config.sequence_length + 1
    rows = steps.micro_batch_size * kept.rows_of_sample
    ids = rows * kept.width(sample_tokens)
    learned_bytes = ids if masks_by_files(steps.samples) else 0
    fields: tuple[int, ...] = ()
    if not ids_only:
        names = field_names(steps.samples)
        fields = tuple(rows * bytes_of_field(name, config.sequence_length) for name in names)
    return BatchSize(
        samples=steps.micro_batch_size,
        sample_tokens=sample_tokens,
        stored=steps.micro_batch_size * sample_tokens * itemsize,
        ids=(ids * dtype.itemsize, rows * np.dtype(np.int64).itemsize, learned_bytes),
        fields=fields,
    )


def _blocks_to_prefetch(
    steps: MicroSteps, table: FileTable, start: int
) -> tuple[list[BlockSize], NDArray[np.int64]]:
    """The datasets whose blocks are worth fetching whole, those that are drawn most first, and the
    lanes that this reader takes every sample of.
    """
    order = steps.samples.segment_at(start).order
    nothing: tuple[list[BlockSize], NDArray[np.int64]] = [], np.empty(0, np.int64)
    if order is None:
        return nothing
    if order.lanes % steps.step_samples:
        # this rank shares its lanes with others: a block would be fetched by each of them
        return nothing
    if steps.config.balance_attention_cost and not _balances_whole_lanes(steps, order):
        return nothing
    itemsizes = table.itemsize[table.firsts[order.dataset_numbers]]
    # samples of a block lie end to end, the last with the token after it
    bytes_of_block = (order.block_samples * order.sequence_length + order.extra) * itemsizes
    most_drawn_first = np.argsort(-np.array(order.weights, np.float64), kind="stable").tolist()
    blocks = [
        BlockSize(dataset=dataset, stored=int(bytes_of_block[dataset]))
        for dataset in most_drawn_first
        if _can_be_whole(dataset, order, table)
    ]
    return blocks, lanes_from(steps, order, start)


def _balances_whole_lanes(steps: MicroSteps, order: StreamOrder) -> bool:
    """Whether a reader whose samples go by what they cost takes every lane, in its order."""
    if steps.dp_size > 1:
        return False
    # A lane of which a batch has two samples may give the later one first. A state brings along its
    # lanes, and may be resumed with more samples in a batch than those.
    largest = max(size for _, size in steps.schedule.stages)
    return largest <= order.lanes


def _can_be_whole(dataset: int, order: StreamOrder, table: FileTable) -> bool:
    """Whether blocks of a dataset are worth it: remote, of one token width, of no two lanes at once,
    and of several samples.
    """
    files = table.files_of(int(order.dataset_numbers[dataset]))
    itemsizes = table.itemsize[files]
    one_width = bool((itemsizes == itemsizes[0]).all())
    remote = not table.local[files].any()
    of_one_lane = order.lanes_per_run[dataset] == 1
    of_several_samples = order.block_samples[dataset] >= 2
    return bool(one_width and remote and of_one_lane and of_several_samples)


def lanes_from(steps: MicroSteps, order: StreamOrder, consumed: int) -> NDArray[np.int64]:
    """The lanes that a rank takes every sample of, which begins at `consumed`.

    There are as many wherever it begins, if the lanes are a multiple of what the ranks take in a
    micro-step.
    """
    if steps.config.balance_attention_cost:
        return np.arange(order.lanes)  # the only reader takes all of them, in whatever order
    micro_steps = consumed + np.arange(0, order.lanes, steps.step_samples)
    lanes: NDArray[np.int64] = np.unique(order.lane_of(steps.sample_ids(micro_steps)))
    return lanes


def _warn_low_memory(memory: MemoryPlan, memory_bytes: int) -> None:
    """Say that blocks are read sample by sample for want of memory, and what would hold them."""
    log.warning(
        "memory_bytes %s has no room for the open blocks of %d of the datasets: their samples are "
        "read one by one, in many small requests, which is several times slower. Set memory_bytes "
        "of the storage to at least %s; less would do with fewer shuffle_lanes or a smaller shuffle_block_bytes, "
        "which are another order",
        f"{memory_bytes:,}",
        memory.unfit,
        f"{memory.enough_bytes:,}",
    )


# The files.


def _table_of(files: list[TokenFile], steps: MicroSteps) -> FileTable:
    """What the planner and its kernels have to know of the files."""
    files_of_dataset = [len(files) for files in steps.samples.files]
    addresses = np.array([_addresses_in_cache(file) for file in files], np.int64).reshape(-1, 2)
    return FileTable(
        firsts=np.cumsum([0, *files_of_dataset]),
        itemsize=np.array([file.dtype.itemsize for file in files], np.int64),
        num_tokens=np.array([file.num_tokens for file in files], np.int64),
        local=np.array([file.store.local_path(file.key) is not None for file in files], np.bool_),
        names=[file.url for file in files],
        verified_at=np.ascontiguousarray(addresses[:, 0]),
        mapped_at=np.ascontiguousarray(addresses[:, 1]),
        page_bytes=PAGE_BYTES,
        chunk_bytes=whole_pages(steps.config.storage.cache_chunk_bytes),
    )


def _addresses_in_cache(file: TokenFile) -> tuple[int, int]:
    """Where the states of a file's cached pages and the addresses of its chunks lie; (0, 0) for one
    that is not cached.
    """
    if not isinstance(file.store, CachedStore):
        return 0, 0
    cached = file.store.cached
    return address_of(cached.verified), address_of(cached.address.view(np.uint8))


def _cached(file: TokenFile, cache: PageCache) -> TokenFile:
    """A file behind the cache; as it is where it is local, empty, or finds no room."""
    size = file.num_tokens * file.dtype.itemsize
    if size == 0 or file.store.is_local:
        return file
    if not file.etag:  # old pages could not be told from new ones
        warn_unversioned(file.url)
        return file
    cached = open_cached(cache, file.url, file.etag, size)
    return replace(file, store=CachedStore(file.store, cached)) if cached else file


def local_addresses(files: list[TokenFile], local: NDArray[np.bool_]) -> list[tuple[int, Any]]:
    """(address, what keeps it mapped) of each local file; (0, None) for the others.

    Kernels believe addresses, so what is mapped is what was opened, or ObjectChangedError.
    """
    mapped: list[tuple[int, Any]] = []
    for file, is_mapped in zip(files, local.tolist(), strict=True):
        content = None
        if is_mapped:
            view = file.store.view(file.key, file.etag)
            if len(view) or file.num_tokens:  # one that is empty cannot be mapped
                content = np.frombuffer(view, np.uint8)
                file.check_bytes(len(content))
        mapped.append((0, None) if content is None else (address_of(content), content))
    return mapped
