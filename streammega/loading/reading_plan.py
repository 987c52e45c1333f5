"""How a rank reads: what from, how much at a time, within its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import StorageConfig
from streammega.errors import ConfigError
from streammega.loading.kept_parts import WHOLE, KeptParts
from streammega.loading.open_files import table_of, through_cache
from streammega.loading.planner import Planner
from streammega.loading.spans import FileTable
from streammega.loading.steps import MicroSteps
from streammega.loading.whole_pieces import WholePieces, tell_without_room, whole_pieces
from streammega.samples.packed import are_packed
from streammega.samples.source import all_files
from streammega.samples.token_file import TokenFile
from streammega.storage.cache.store import SMALL
from streammega.storage.fetch.buffer_pool import rounded

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
    files = through_cache(all_files(steps.samples), storage)
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
