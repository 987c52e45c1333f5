"""How a rank reads: what from, how much at a time, within its memory."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.errors import ConfigError
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.planner import Planner
from streammega.loading.rank_args import WHOLE, KeptParts
from streammega.loading.spans import FileTable
from streammega.order.open_blocks import OpenBlocks
from streammega.order.stream_order import StreamOrder
from streammega.samples.packed import are_packed
from streammega.samples.source import all_files
from streammega.samples.token_file import TokenFile
from streammega.storage.cache import PAGE_BYTES, PageCache
from streammega.storage.cache.chunk_file import whole_pages
from streammega.storage.cache.page_cache import SMALL, CachedStore
from streammega.storage.etags import tell_unversioned
from streammega.storage.fetch.buffer_pool import rounded
from streammega.storage.store import address_of


def table_of(files: list[TokenFile], steps: MicroSteps) -> FileTable:
    """What the planner and its kernels have to know of the files."""
    of_cache = [_addresses_of_cache(file) for file in files]
    verified_at = [verified for verified, _ in of_cache]
    mapped_at = [mapped for _, mapped in of_cache]
    itemsizes = [file.dtype.itemsize for file in files]
    num_tokens = [file.num_tokens for file in files]
    is_local = [file.store.local_path(file.key) is not None for file in files]
    files_of_dataset = [len(files) for files in steps.samples.files]
    return FileTable(
        firsts=np.cumsum([0, *files_of_dataset]),
        itemsize=np.array(itemsizes, np.int64),
        num_tokens=np.array(num_tokens, np.int64),
        local=np.array(is_local, np.bool_),
        names=[file.url for file in files],
        verified_at=np.array(verified_at, np.int64),
        mapped_at=np.array(mapped_at, np.int64),
        page_bytes=PAGE_BYTES,
        chunk_bytes=whole_pages(steps.config.storage.chunk_bytes),
    )


def _addresses_of_cache(file: TokenFile) -> tuple[int, int]:
    """Where the states of a file's cached pages and the addresses of its chunks lie; (0, 0) for one
    that is not cached.
    """
    if not isinstance(file.store, CachedStore):
        return 0, 0
    cached = file.store.cached
    return address_of(cached.verified), address_of(cached.address.view(np.uint8))


def through_cache(files: list[TokenFile], storage: StorageConfig) -> list[TokenFile]:
    """Remote files behind the page cache, where the config has one."""
    if storage.cache_dir is None:
        return files
    cache = PageCache(storage.cache_dir, storage.cache_bytes, storage.chunk_bytes, storage.timeout)
    return [_cached(file, cache) for file in files]


def _cached(file: TokenFile, cache: PageCache) -> TokenFile:
    """A file behind the cache; as it is where it is local, empty, or finds no room."""
    size = file.num_tokens * file.dtype.itemsize
    if size == 0 or file.store.is_local:
        return file
    if not file.etag:  # old pages could not be told from new ones
        tell_unversioned(file.url)
        return file
    cached = cache.open(file.url, file.etag, size)
    return replace(file, store=CachedStore(file.store, cached)) if cached else file


def local_addresses(files: list[TokenFile], local: NDArray[np.bool_]) -> list[tuple[int, Any]]:
    """(address, what keeps it mapped) of each local file; (0, None) for the others.

    Kernels believe addresses, so what is mapped is what was opened, or ObjectChangedError.
    """
    mapped = []
    for file, is_mapped in zip(files, local.tolist(), strict=True):
        content = _map(file) if is_mapped else None
        mapped.append((0, None) if content is None else (address_of(content), content))
    return mapped


def _map(file: TokenFile) -> NDArray[np.uint8] | None:
    """The bytes of a local file; None of one that is empty, which cannot be mapped."""
    view = file.store.view(file.key, file.etag)
    if len(view) == 0 and file.num_tokens == 0:
        return None
    content = np.frombuffer(view, np.uint8)
    file.check_bytes(len(content))
    return content


log = logging.getLogger(__name__)

FOR_WHOLE_PIECES = 3 / 4
"""Share of the budget for pieces that are fetched whole. The rest stays for what is read sample by
sample, and for pieces that are about to be opened.
"""
PIECE_SLACK = 4096
"""Bytes added to an estimate, for buffers that are rounded up by themselves (a buffer takes 4096
bytes at least), and for pieces that lie across shards: they have one more token for each.
"""


@dataclass(frozen=True, kw_only=True)
class WholePieces:
    """The pieces that are fetched whole.

    `open_bytes`: what they take of memory at most; `piece_bytes`: of the smallest. `without_room`:
    datasets whose pieces would be, if there were memory; `wanted_bytes`: what all would take.
    """

    pieces: OpenBlocks | None = None
    open_bytes: int = 0
    piece_bytes: int = 0
    without_room: int = 0
    wanted_bytes: int = 0

    def of_same_datasets(self, other: WholePieces) -> bool:
        """Whether pieces of the same datasets are fetched whole."""
        if self.pieces is None or other.pieces is None:
            return self.pieces is other.pieces
        return bool((self.pieces.whole == other.pieces.whole).all())


def whole_pieces(
    steps: MicroSteps,
    table: FileTable,
    start: int,
    budget: int,
    slab_samples: int,
) -> WholePieces:
    """Which datasets' pieces are fetched whole: those of the datasets drawn most first, as long as
    memory lasts.
    """
    order = steps.samples.segment_at(start).order
    if order is None:
        return WholePieces()
    if order.lanes % steps.step_samples:
        # this rank shares its lanes with others: a piece would be fetched by each of them
        return WholePieces()
    if steps.config.balance_batches and not _balances_whole_lanes(steps, order):
        return WholePieces()
    lanes = lanes_from(steps, order, start)
    numbers = order.dataset_numbers
    itemsizes = table.itemsize[table.firsts[numbers]]
    # samples of a block lie end to end, the last with the token after it
    extra_tokens = order.extra
    piece_bytes = (order.block_samples * order.sequence_length + extra_tokens) * itemsizes
    held_of_piece = [rounded(int(size)) + PIECE_SLACK for size in piece_bytes]
    whole = np.zeros(len(piece_bytes), np.bool_)
    open_bytes = 0
    largest = 0
    wanted_bytes = 0
    largest_wanted = 0
    without_room = 0
    _, shares = order.schedule[0]
    most_drawn_first = np.argsort(-np.array(shares, np.float64), kind="stable")
    for dataset in most_drawn_first.tolist():
        if not _can_be_whole(dataset, order, table):
            continue
        wanted_bytes += len(lanes) * held_of_piece[dataset]
        largest_wanted = max(largest_wanted, held_of_piece[dataset])
        open_with_it = open_bytes + len(lanes) * held_of_piece[dataset]
        largest_with_it = max(largest, held_of_piece[dataset])
        # Each sample of a slab may close a piece and open another, before the first is given back.
        if open_with_it + slab_samples * largest_with_it <= budget * FOR_WHOLE_PIECES:
            whole[dataset] = True
            open_bytes = open_with_it
            largest = largest_with_it
        else:
            without_room += 1
    found = WholePieces(
        without_room=without_room, wanted_bytes=wanted_bytes + slab_samples * largest_wanted
    )
    if not whole.any():
        return found
    return replace(
        found,
        pieces=OpenBlocks(order, lanes, whole, itemsizes),
        open_bytes=open_bytes + slab_samples * largest,
        piece_bytes=int(piece_bytes[whole].min()),
    )


def _balances_whole_lanes(steps: MicroSteps, order: StreamOrder) -> bool:
    """Whether a reader whose samples go by what they cost takes every lane, in its order."""
    if steps.dp_size > 1:
        return False
    # A lane of which a batch has two samples may give the later one first. A state brings along its
    # lanes, and may be resumed with more samples in a batch than those.
    largest = max(size for _, size in steps.schedule.stages)
    return largest <= order.lanes


def _can_be_whole(dataset: int, order: StreamOrder, table: FileTable) -> bool:
    """Whether pieces of a dataset are worth it: remote, of one token width, of no two lanes at
    once, and of several samples.
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
    if steps.config.balance_batches:
        return np.arange(order.lanes)  # the only reader takes all of them, in whatever order
    micro_steps = consumed + np.arange(0, order.lanes, steps.step_samples)
    lanes: NDArray[np.int64] = np.unique(order.lane_of(steps.sample_ids(micro_steps)))
    return lanes


def tell_without_room(whole: WholePieces, storage: StorageConfig) -> None:
    """Say that pieces are read sample by sample for want of memory, and what would hold them."""
    enough = math.ceil(whole.wanted_bytes / FOR_WHOLE_PIECES)
    log.warning(
        "memory_bytes %s has no room for the open pieces of %d of the datasets: their samples are "
        "read one by one, in many small requests, which is several times slower. Set memory_bytes "
        "of the storage to at least %s; less would do with fewer lanes or a smaller block_bytes, "
        "which are another order",
        f"{storage.memory_bytes:,}",
        whole.without_room,
        f"{enough:,}",
    )


SLAB_BYTES = 16 << 20
"""Bytes of ids that one kernel call gathers: each slab costs a hand-over between two threads, and
batches that wait for it.
"""
LEAST_SLAB_BYTES = 4 << 20
"""As many where memory is short."""
SLABS_OF_BUDGET = 32
"""A slab holds at most this part of the budget: tokens and labels of some six slabs are in memory
beside it.
"""
MOST_SLAB_BATCHES = 64
"""Micro-batches of a slab at most: the first of them is handed out when all are gathered."""
SPAN_BYTES = 64 << 20
SPAN_SAMPLES = 4096
"""Bytes and samples of a span at most: the thread that plans it gathers nothing meanwhile."""
SPANS_IN_MEMORY = 4
"""Spans that fit into the room for them: others are under way while one is gathered."""
SLABS_IN_MEMORY = 2
"""Slabs that have to fit: one is gathered while the next is fetched."""
BATCH_SLACK = 8192
"""Bytes added to an estimate, for buffers that are rounded up by themselves: a buffer takes 4096
bytes at least.
"""


@dataclass(frozen=True, kw_only=True)
class ReadingPlan:
    """How one reader reads: what from, how much at a time, and what of it whole.

    files: all datasets' files end to end. dtype: the widest of theirs. slab_batches: micro-batches
    gathered together. span_batches: most micro-batches planned together. piece_bytes: of the
    smallest pieces that are fetched whole; 0: none are.
    """

    files: list[TokenFile]
    table: FileTable
    dtype: np.dtype[Any]
    slab_batches: int
    span_batches: int
    planner: Planner
    order: str
    piece_bytes: int = 0

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
    def scattered(self) -> bool:
        """Whether some reads are so small that only whole files fetched in the background would
        fill a cache.
        """
        if self.order == "sequential":
            return False
        pieces = self.planner.pieces
        return pieces is None or not pieces.whole.all() or self.piece_bytes < SMALL

    @property
    def remote(self) -> bool:
        """Whether anything has to be fetched."""
        return not self.table.local.all()


def plan_reading(
    steps: MicroSteps,
    start: int,
    budget: int,
    *,
    kept: KeptParts = WHOLE,
    ids_only: bool = False,
) -> ReadingPlan:
    """How the micro-batches of a rank are read, of an iteration from `start` on.

    budget: bytes that fetched data may take. kept: which tokens of every sample are read. ids_only:
    batches hold ids as they are stored. Raises ConfigError for a budget that cannot hold a micro-batch.
    """
    storage = steps.config.storage
    files = through_cache(all_files(steps.samples.files), storage)
    table = table_of(files, steps)
    sample_tokens = steps.config.sequence_length + 1
    batch_tokens = steps.micro_batch_size * sample_tokens
    stored_dtype = np.result_type(*(file.dtype for file in files))
    slab_dtype = stored_dtype if ids_only else np.dtype(np.int64)
    slab_bytes = min(SLAB_BYTES, max(LEAST_SLAB_BYTES, budget // SLABS_OF_BUDGET))
    least_slab = _slab_batches(LEAST_SLAB_BYTES, batch_tokens, np.dtype(np.int64))
    largest_slab = _slab_batches(slab_bytes, batch_tokens, slab_dtype)
    plan = ReadingPlan(
        files=files,
        table=table,
        dtype=stored_dtype,
        slab_batches=largest_slab,
        span_batches=max(1, SPAN_SAMPLES // steps.micro_batch_size),
        planner=Planner(table, storage.coalesce_bytes, storage.part_bytes, None, kept),
        order=steps.config.order,
    )
    if not plan.remote:
        return plan
    batch_bytes = batch_tokens * int(table.itemsize.max())
    held_of_batch = _held(batch_bytes)
    if held_of_batch > budget:
        raise ConfigError(
            f"memory_bytes {budget:,} cannot hold one micro-batch; "
            f"it needs at least {held_of_batch:,} "
            f"({steps.micro_batch_size} samples of {sample_tokens} tokens)"
        )

    def pieces_beside(slab_batches: int) -> WholePieces:
        """The pieces that there is memory for beside slabs of so many micro-batches."""
        if kept.bounds and are_packed(files):
            return WholePieces()  # of a bin that ends early some kept parts are empty
        slab_samples = slab_batches * steps.micro_batch_size
        return whole_pieces(steps, table, start, budget, slab_samples)

    whole = pieces_beside(largest_slab)
    beside_least = pieces_beside(least_slab)
    if not whole.of_same_datasets(beside_least):
        # more slabs cost far less than pieces that are fetched sample by sample
        plan = replace(plan, slab_batches=least_slab)
        whole = beside_least
    if whole.without_room:
        tell_without_room(beside_least, storage)
    return _within_memory(plan, whole, storage, budget, batch_bytes)


def _slab_batches(slab_bytes: int, batch_tokens: int, dtype: np.dtype[Any]) -> int:
    """Micro-batches of so many tokens that are gathered together, as ids of a dtype."""
    fitting = slab_bytes // (dtype.itemsize * batch_tokens)
    return int(np.clip(fitting, 1, MOST_SLAB_BATCHES))


def _within_memory(
    plan: ReadingPlan, whole: WholePieces, storage: StorageConfig, budget: int, batch_bytes: int
) -> ReadingPlan:
    """A plan with slabs and spans that fit the budget, beside the pieces that are held whole.

    batch_bytes: stored bytes of a micro-batch.
    """
    room = budget - whole.open_bytes
    held_of_batch = _held(batch_bytes)
    held_of_slabs = SLABS_IN_MEMORY * _held(plan.slab_batches * batch_bytes)
    slab_batches = plan.slab_batches
    if whole.pieces is None and held_of_slabs > budget:
        slab_batches = max(1, budget // SLABS_IN_MEMORY // held_of_batch)
        held_of_slabs = SLABS_IN_MEMORY * _held(slab_batches * batch_bytes)
    fitting_batches = max(1, room // SPANS_IN_MEMORY // held_of_batch)
    span_batches = min(
        plan.span_batches,
        max(slab_batches, fitting_batches),
        max(slab_batches, SPAN_BYTES // batch_bytes),
    )
    # Where the slabs hardly fit, what neighbours would bring beside what is used has no room.
    coalesce_bytes = 0 if held_of_slabs > room else storage.coalesce_bytes
    planner = Planner(
        plan.table, coalesce_bytes, storage.part_bytes, whole.pieces, plan.planner.kept
    )
    return replace(
        plan,
        slab_batches=slab_batches,
        # a slab is of one span
        span_batches=max(span_batches, slab_batches),
        planner=planner,
        piece_bytes=whole.piece_bytes,
    )


def _held(size: int) -> int:
    """An upper bound of what holdings of `size` bytes together take of the budget: a quarter more
    for what coalescing adds (`MOST_WASTE`).
    """
    return rounded(size + size // 4) + BATCH_SLACK
