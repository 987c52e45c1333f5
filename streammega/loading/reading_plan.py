"""What one reader (a rank, or a worker of it) reads: its files, its lanes, and which pieces it may
fetch whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.errors import ConfigError
from streammega.loading.planner import Bounds, FileTable, Planner
from streammega.loading.steps import MicroSteps
from streammega.order.lane_pieces import OpenPieces
from streammega.order.lanes import StreamOrder
from streammega.samples.lanes import StreamSource
from streammega.samples.token_file import TokenFile
from streammega.storage.backends.local import LocalStore
from streammega.storage.cache import PAGE_BYTES, CachedObject, PageCache
from streammega.storage.cache.layout import whole_pages
from streammega.storage.cache.store import SMALL, CachedStore
from streammega.storage.fetch.memory import rounded
from streammega.storage.store import address_of
from streammega.storage.versions import tell_unversioned
from streammega.storage.views import is_local

SLAB_BYTES = 4 << 20
"""Bytes of int64 ids that one kernel call gathers: few enough to stay in the cache until they are
used.
"""
SPAN_BYTES = 64 << 20
SPAN_SAMPLES = 4096


@dataclass(frozen=True, kw_only=True)
class ReadingPlan:
    """How one reader reads: what from, how much at a time, and what of it whole.

    files: all datasets' files end to end. slab: micro-batches gathered together. span: most
    micro-batches planned together.
    """

    files: list[TokenFile]
    table: FileTable
    dtype: np.dtype[Any]
    slab: int
    span: int
    planner: Planner
    order: str
    piece_bytes: int = 0

    @cached_property
    def kind_of(self) -> dict[np.dtype[Any], int]:
        """A number for each dtype of the files."""
        return {dtype: number for number, dtype in enumerate({file.dtype for file in self.files})}

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """The number of each file's dtype, int64 [files]."""
        return np.array([self.kind_of[file.dtype] for file in self.files], np.int64)

    @property
    def scattered(self) -> bool:
        """Whether some reads are so small that only whole files fetched in the background would
        fill a cache.
        """
        pieces = self.planner.pieces
        return self.order != "sequential" and (
            pieces is None or not pieces.whole.all() or self.piece_bytes < SMALL
        )

    @property
    def remote(self) -> bool:
        """Whether anything has to be fetched."""
        return not self.table.local.all()


def plan_reading(
    steps: MicroSteps,
    start: int,
    worker: int,
    workers: int,
    budget: int,
    slab: int | None = None,
    bounds: Bounds = (),
) -> ReadingPlan:
    """How every `workers`-th micro-batch of a rank from `start` on is read, or the tokens of its
    samples that `bounds` name.

    budget: bytes that its fetched data may take. slab: micro-batches gathered together; None: as
    many as serve. Raises ConfigError for a budget that cannot hold a micro-batch.
    """
    storage = steps.config.storage
    files = _through_cache([file for files in steps.samples.files for file in files], storage)
    table = _table_of(files, steps)
    width = steps.config.sequence_length + 1
    batch_tokens = steps.micro_batch_size * width
    slab = slab or int(np.clip(SLAB_BYTES // (8 * batch_tokens), 1, 64))
    plan = ReadingPlan(
        files=files,
        table=table,
        dtype=np.result_type(*(file.dtype for file in files)),
        slab=slab,
        span=SPAN_SAMPLES // steps.micro_batch_size or 1,
        planner=Planner(table, storage.coalesce_bytes, storage.part_bytes, None, bounds),
        order=steps.config.order,
    )
    if not plan.remote:
        return plan
    batch_bytes = batch_tokens * int(table.itemsize.max())
    least = _held(batch_bytes)
    if least > budget:
        raise ConfigError(
            f"memory_bytes {budget:,} of this reader cannot hold one micro-batch; it needs at least {least * workers:,} "
            f"({steps.micro_batch_size} samples of {width} tokens, {workers} readers)"
        )
    whole = _whole_pieces(steps, table, start, worker, workers, budget, slab)
    room = budget - whole.open_bytes
    # A span takes a quarter of the room at most: others are under way while it is gathered.
    fitting = max(1, int(room // 4 // _held(batch_bytes)))
    if whole.pieces is None and _held(slab * batch_bytes) * 2 > budget:
        slab = max(1, budget // 2 // _held(batch_bytes))
    span = min(plan.span, max(slab, fitting), max(slab, SPAN_BYTES // batch_bytes))
    # Where two slabs hardly fit, what neighbours would bring beside what is used has no room.
    coalesce = 0 if _held(slab * batch_bytes) * 2 > room else storage.coalesce_bytes
    planner = Planner(table, coalesce, storage.part_bytes, whole.pieces, bounds)
    return replace(
        plan, slab=slab, span=max(span, slab), planner=planner, piece_bytes=whole.piece_bytes
    )


def _table_of(files: list[TokenFile], steps: MicroSteps) -> FileTable:
    """What the planner and its kernels have to know of the files."""
    cached = [_cached(file) for file in files]
    return FileTable(
        firsts=np.cumsum([0, *(len(own) for own in steps.samples.files)]),
        itemsize=np.array([file.dtype.itemsize for file in files], np.int64),
        num_tokens=np.array([file.num_tokens for file in files], np.int64),
        local=np.array([isinstance(file.store, LocalStore) for file in files], np.bool_),
        names=[file.url for file in files],
        verified_at=np.array([address_of(one.verified) if one else 0 for one in cached], np.int64),
        mapped_at=np.array(
            [one.address.__array_interface__["data"][0] if one else 0 for one in cached], np.int64
        ),
        page_bytes=PAGE_BYTES,
        chunk_bytes=whole_pages(steps.config.storage.chunk_bytes),
    )


def _through_cache(files: list[TokenFile], storage: StorageConfig) -> list[TokenFile]:
    """Remote files behind the page cache, where the config has one."""
    if storage.cache_dir is None:
        return files
    cache = PageCache(storage.cache_dir, storage.cache_bytes, storage.chunk_bytes, storage.timeout)
    found = []
    for file in files:
        size = file.num_tokens * file.dtype.itemsize
        cached = None
        remote = size > 0 and not is_local(file.store)
        if remote and file.etag:
            cached = cache.open(file.url, file.etag, size)
        elif remote:  # old pages could not be told from new ones
            tell_unversioned(file.url)
        found.append(replace(file, store=CachedStore(file.store, cached)) if cached else file)
    return found


def _cached(file: TokenFile) -> CachedObject | None:
    return file.store.cached if isinstance(file.store, CachedStore) else None


def _held(size: int) -> int:
    """An upper bound of what holdings of `size` bytes together take of the budget: a quarter more
    for what coalescing adds.
    """
    return rounded(size + size // 4) + 8192


@dataclass(frozen=True, kw_only=True)
class WholePieces:
    """The pieces that are fetched whole.

    `open_bytes`: what they take of memory at most; `piece_bytes`: of the smallest.
    """

    pieces: OpenPieces | None = None
    open_bytes: int = 0
    piece_bytes: int = 0


def _whole_pieces(
    steps: MicroSteps,
    table: FileTable,
    start: int,
    worker: int,
    workers: int,
    budget: int,
    slab: int,
) -> WholePieces:
    """Which datasets' pieces are fetched whole: those of the datasets drawn most first, as long as
    memory lasts.
    """
    source = steps.samples
    if not isinstance(source, StreamSource):
        return WholePieces()
    order = source.order
    if order.lanes % (steps.step_samples * workers):
        # this reader shares its lanes with other workers: a piece would be fetched by each of them
        return WholePieces()
    lanes = lanes_from(steps, order, start + worker * steps.step_samples, workers)
    itemsizes = np.array([table.itemsize[first] for first in table.firsts[:-1]], np.int64)
    tokens = order.block_samples * order.sequence_length + order.width - order.sequence_length
    piece_bytes = tokens * itemsizes
    held = np.array([rounded(int(size)) + 4096 for size in piece_bytes], np.int64)
    shares = np.array(order.schedule[0][1], np.float64)
    whole = np.zeros(len(held), np.bool_)
    open_bytes = largest = 0
    # A quarter of the budget stays for what is read sample by sample, and for pieces that are about
    # to be opened.
    limit = budget * 3 // 4
    slab_samples = slab * steps.micro_batch_size
    for dataset in np.argsort(-shares, kind="stable"):
        if not _can_be_whole(dataset, order, table):
            continue
        with_it = open_bytes + len(lanes) * int(held[dataset])
        largest_with_it = max(largest, int(held[dataset]))
        # Each sample of a slab may close a piece and open another, before the first is given back.
        if with_it + slab_samples * largest_with_it <= limit:
            whole[dataset] = True
            open_bytes = with_it
            largest = largest_with_it
    if not whole.any():
        return WholePieces()
    return WholePieces(
        pieces=OpenPieces(order, lanes, whole, itemsizes),
        open_bytes=open_bytes + slab_samples * largest,
        piece_bytes=int(piece_bytes[whole].min()),
    )


def _can_be_whole(dataset: int, order: StreamOrder, table: FileTable) -> bool:
    """Whether pieces of a dataset are worth it: remote, of one token width, of no two lanes at
    once, and of several samples.
    """
    files = slice(table.firsts[dataset], table.firsts[dataset + 1])
    one_width = len(np.unique(table.itemsize[files])) == 1
    remote = not table.local[files].any()
    return bool(
        one_width
        and remote
        and order.geometry["groups"][dataset] == 1
        and order.block_samples[dataset] >= 2
    )


def lanes_from(
    steps: MicroSteps, order: StreamOrder, consumed: int, workers: int
) -> NDArray[np.int64]:
    """The lanes that a reader takes every sample of, which begins at `consumed` and takes every
    `workers`-th micro-step.

    There are as many wherever it begins, if the lanes are a multiple of what the workers take in
    turn.
    """
    starts = consumed + np.arange(0, order.lanes, steps.step_samples * workers)
    lanes: NDArray[np.int64] = np.unique(steps.sample_ids(starts) % order.lanes)
    return lanes


def local_addresses(files: list[TokenFile], local: NDArray[np.bool_]) -> list[tuple[int, Any]]:
    """(address, what keeps it mapped) of each local file; (0, None) for the others.

    Kernels believe addresses, so what is mapped is what was opened, or ObjectChangedError.
    """
    found: list[tuple[int, Any]] = []
    for file, own in zip(files, local.tolist(), strict=True):
        if not own:
            found.append((0, None))
            continue
        assert isinstance(file.store, LocalStore)
        mapped = file.store.view(file.key, file.etag)
        if len(mapped) == 0 and file.num_tokens == 0:
            found.append((0, None))
            continue
        view = np.frombuffer(mapped, np.uint8)
        file.check_bytes(len(view))
        found.append((int(view.__array_interface__["data"][0]), view))
    return found
