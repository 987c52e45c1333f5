"""What one reader (a rank, or a worker of it) reads: its files, its lanes, and which pieces it may fetch whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.errors import ConfigError
from streammega.order.pieces import OpenPieces
from streammega.order.stream import StreamOrder
from streammega.samples.fetch import TokenFile
from streammega.samples.stream import StreamSource
from streammega.storage.base import address_of
from streammega.storage.cache.layout import whole_pages
from streammega.storage.cached_store import SMALL, CachedStore
from streammega.storage.derived import is_local
from streammega.storage.local import LocalStore
from streammega.storage.memory import rounded
from streammega.storage.page_cache import PAGE_BYTES, CachedObject, PageCache
from streammega.storage.versions import tell_unversioned
from streammega.stream.planner import Bounds, FileTable, Planner

if TYPE_CHECKING:
    from streammega.stream.dataset import StreamingDataset

SLAB_BYTES = 4 << 20
"""Bytes of int64 ids that one kernel call gathers: few enough to stay in the cache until they are used."""
SPAN_BYTES = 64 << 20
SPAN_SAMPLES = 4096


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The shape of a reader.

    files: all datasets' files end to end. slab: micro-batches gathered together. span: most micro-batches planned together.
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
        """Whether some reads are so small that only whole files fetched in the background would fill a cache."""
        pieces = self.planner.pieces
        return self.order != "sequential" and (pieces is None or not pieces.whole.all() or self.piece_bytes < SMALL)

    @property
    def remote(self) -> bool:
        """Whether anything has to be fetched."""
        return not self.table.local.all()


def open_reader(
    dataset: StreamingDataset, worker: int, workers: int, budget: int, slab: int | None = None, bounds: Bounds = ()
) -> Reader:
    """The reader of every `workers`-th micro-batch of a rank, or of the tokens of its samples that `bounds` name.

    Raises ConfigError for a budget that cannot hold a micro-batch.
    """
    source, storage = dataset.samples, dataset.config.storage
    files = _through_cache([file for own in source.files for file in own], storage)
    table = FileTable(
        firsts=np.cumsum([0, *(len(own) for own in source.files)]),
        itemsize=np.array([file.dtype.itemsize for file in files], np.int64),
        num_tokens=np.array([file.num_tokens for file in files], np.int64),
        local=np.array([isinstance(file.store, LocalStore) for file in files], np.bool_),
        names=[file.url for file in files],
        verified_at=np.array([address_of(c.verified) if c else 0 for c in map(_cached, files)], np.int64),
        mapped_at=np.array([c.address.__array_interface__["data"][0] if c else 0 for c in map(_cached, files)], np.int64),
        page_bytes=PAGE_BYTES,
        chunk_bytes=whole_pages(storage.chunk_bytes),
    )
    width = dataset.config.sequence_length + 1
    batch_tokens = dataset.micro_batch_size * width
    slab = slab or int(np.clip(SLAB_BYTES // (8 * batch_tokens), 1, 64))
    widest = int(table.itemsize.max())
    reader = Reader(
        files=files,
        table=table,
        dtype=np.result_type(*(file.dtype for file in files)),
        slab=slab,
        span=SPAN_SAMPLES // dataset.micro_batch_size or 1,
        planner=Planner(table, storage.coalesce_bytes, storage.part_bytes, None, bounds),
        order=dataset.config.order,
    )
    if not reader.remote:
        return reader
    least = _held(batch_tokens * widest)
    if least > budget:
        raise ConfigError(
            f"memory_bytes {budget:,} of this reader cannot hold one micro-batch; it needs at least {least * workers:,} "
            f"({dataset.micro_batch_size} samples of {width} tokens, {workers} readers)"
        )
    pieces, open_bytes, piece_bytes = _whole_pieces(dataset, table, worker, workers, budget, slab)
    room = budget - open_bytes
    fits = max(1, int(room // 4 // _held(batch_tokens * widest)))
    if pieces is None and _held(slab * batch_tokens * widest) * 2 > budget:
        slab = max(1, budget // 2 // _held(batch_tokens * widest))
    span = min(reader.span, max(slab, fits), max(slab, SPAN_BYTES // (batch_tokens * widest)))
    tight = _held(slab * batch_tokens * widest) * 2 > room
    planner = Planner(table, 0 if tight else storage.coalesce_bytes, storage.part_bytes, pieces, bounds)
    return replace(reader, slab=slab, span=max(span, slab), planner=planner, piece_bytes=piece_bytes)


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
    """An upper bound of what holdings of `size` bytes together take of the budget."""
    return rounded(size + size // 4) + 8192


def _whole_pieces(
    dataset: StreamingDataset, table: FileTable, worker: int, workers: int, budget: int, slab: int
) -> tuple[OpenPieces | None, int, int]:
    """(the open pieces, bytes that they take at most, bytes of the smallest); datasets drawn most first, while memory lasts."""
    source = dataset.samples
    if not isinstance(source, StreamSource):
        return None, 0, 0
    order = source.order
    stride = dataset.step_samples * workers
    if order.lanes % stride:
        return None, 0, 0  # this reader shares its lanes with other workers: a piece would be fetched by each of them
    lanes = lanes_from(dataset, order, dataset.consumed_samples + worker * dataset.step_samples, workers)
    itemsizes = np.array([table.itemsize[a] for a in table.firsts[:-1]], np.int64)
    uniform = np.array([len(np.unique(table.itemsize[a:b])) == 1 for a, b in zip(table.firsts, table.firsts[1:], strict=False)])
    remote = np.array([not table.local[a:b].any() for a, b in zip(table.firsts, table.firsts[1:], strict=False)])
    extra = order.width - order.sequence_length
    piece = (order.block_samples * order.sequence_length + extra) * itemsizes
    sizes = np.array([rounded(int(size)) + 4096 for size in piece], np.int64)
    weights = np.array(order.schedule[0][1], np.float64)
    whole = np.zeros(len(sizes), np.bool_)
    total = largest = 0
    limit = budget * 3 // 4
    for d in np.argsort(-weights, kind="stable"):
        if not (uniform[d] and remote[d]) or order.geometry["groups"][d] != 1 or order.block_samples[d] < 2:
            continue
        bound = total + len(lanes) * int(sizes[d]) + slab * dataset.micro_batch_size * max(largest, int(sizes[d]))
        if bound <= limit:
            whole[d], total, largest = True, total + len(lanes) * int(sizes[d]), max(largest, int(sizes[d]))
    if not whole.any():
        return None, 0, 0
    return OpenPieces(order, lanes, whole, itemsizes), total + slab * dataset.micro_batch_size * largest, int(piece[whole].min())


def lanes_from(dataset: StreamingDataset, order: StreamOrder, consumed: int, workers: int) -> NDArray[np.int64]:
    """The lanes that a reader takes every sample of, which begins at `consumed` and takes every `workers`-th micro-step.

    There are as many wherever it begins, if the lanes are a multiple of what the workers take in turn.
    """
    starts = consumed + np.arange(0, order.lanes, dataset.step_samples * workers)
    lanes: NDArray[np.int64] = np.unique(dataset.sample_ids(starts) % order.lanes)
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
