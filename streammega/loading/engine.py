"""From positions to batches: one thread plans, waits for what was fetched, and gathers; the
transport's threads fetch.

    positions ─► Planner ─► holdings ─► Fetcher (threads) ─► buffers ─► gather_* ─► ready slabs ─►
    the training loop

The order of everything is that of need. Nothing is fetched that the plan does not use.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streammega.errors import StreammegaError
from streammega.kernels.batch import fill_tails
from streammega.kernels.parallel import num_threads
from streammega.kernels.plan import count_down, gather_rows, gather_shifted
from streammega.loading.batch_memory import batch_memory
from streammega.loading.planner import Bounds, PlannedHolding, Span
from streammega.loading.reading_plan import lanes_from, local_addresses, plan_reading
from streammega.loading.slab import Finisher, Slab
from streammega.loading.staging import Stager
from streammega.loading.stats import Stats
from streammega.loading.steps import MicroSteps
from streammega.samples.fields import Batch, derive, plain_mask, torch_dtype
from streammega.samples.token_file import Runs, clear_by_modes, has_modes
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.reads import Holding, Read
from streammega.storage.store import address_of
from streammega.storage.views import is_local

log = logging.getLogger(__name__)

LOOKAHEAD = 8
"""Spans planned ahead at most; memory_bytes is what limits them otherwise."""
SECONDS_AHEAD = 20.0
"""What the caller will take in this time is planned ahead, no more: a slow caller needs its cores
for other things.
"""
READY_SLABS = 4
"""Slabs made ahead at least: with fewer, the two threads wait for each other at every one."""


_live: weakref.WeakSet[Engine] = weakref.WeakSet()


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A slab that is planned: samples [first, last) of a span, and the holdings it is the first to
    need.
    """

    span: Span
    consumed: list[int]
    first: int
    last: int
    holdings: list[Holding]


class Engine:
    """Iterates (consumed, batch) for positions of micro-steps, several batches ahead of its caller.

    An error is raised at the position it belongs to. `close` ends the threads; so does leaving the
    iteration.

    Args: steps: what is read. positions: which of the micro-steps, as values of `consumed`. ahead:
        micro-batches made ahead of the caller. start: where the iteration begins, over all workers.
        worker, workers: the reader is one of several that take micro-batches in turn. ids_only:
        batches are {"ids": [micro_batch_size, S + 1] in the stored dtype, "valid": ids that each
        sample has}, and where
            modes make the loss mask "learned": bool, of each id.
        bounds: with ids_only, equally long tokens [start, stop) of every sample, which are then
        rows of their own. pinned: see `batch_memory`.
    """

    def __init__(
        self, steps: MicroSteps, positions: Iterator[int], ahead: int, *, start: int, worker: int = 0, workers: int = 1,
        ids_only: bool = False, stats: Stats | None = None, bounds: Bounds = (), pinned: bool | None = None,
    ) -> None:  # fmt: skip
        storage = steps.config.storage
        budget = storage.memory_bytes // workers
        # A worker process hands every batch over by itself; elsewhere a few share one kernel call.
        slab = 1 if workers > 1 or worker else None
        self._reader = plan_reading(steps, start, worker, workers, budget, slab=slab, bounds=bounds)
        self._width = bounds[0][1] - bounds[0][0] if bounds else steps.config.sequence_length + 1
        self._rows = steps.micro_batch_size * max(len(bounds), 1)
        self._steps = steps
        self._positions = positions
        self._workers = workers
        self._stride = steps.step_samples * workers
        self._ids_only = ids_only
        self.stats = stats or Stats()
        # shards to be unpacked: work, not waiting
        if all(is_local(file.store) for file in self._reader.files):
            storage = replace(
                storage, max_requests=min(storage.max_requests, num_threads()), hedge=False
            )
        self._fetcher = Fetcher(storage, budget) if self._reader.remote else None
        self.stats.attach(self._fetcher, self._reader.files)
        self._stager: Stager | None = None
        self._allocate = batch_memory(pinned)
        self._has_modes = has_modes(self._reader.files)
        self._holdings: dict[int, Holding] = {}
        self._mapped = local_addresses(self._reader.files, self._reader.table.local)
        slots = self._reader.planner.slots
        slots.address[: len(self._mapped)] = [address for address, _ in self._mapped]
        self._planned: deque[_Pending] = deque()
        self._ahead = 0
        self._next: int | None = None
        self._last: int | None = None
        self._span = 1
        self._pace: float | None = None
        self._exhausted = False
        self._closed = False
        self._at_hand = 0
        self.stats.at_hand = self._is_ready
        self._ready: queue.Queue[Slab | BaseException | None] = queue.Queue(
            max(READY_SLABS, -(-ahead // self._reader.slab))
        )
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        self._thread = threading.Thread(target=self._run, name="streammega-batch", daemon=True)
        _live.add(self)
        self._thread.start()
        if self._reader.scattered and self._steps.config.storage.cache_dir is not None:
            self._stager = self.stats.stager = Stager(
                self._reader.files, self._steps.config.storage
            )
        finish = Finisher(self._steps.config, self._rows, self._allocate)
        asked = time.perf_counter()
        try:
            while True:
                slab = self._ready.get()
                if isinstance(slab, BaseException):
                    raise slab
                if slab is None:
                    return
                given = time.perf_counter()
                self.stats.handed_out(len(slab.consumed), given - asked, self._ready.qsize())
                batches = slab.batches()
                taken = len(slab.consumed)
                del slab
                while batches:
                    if not self._ids_only:
                        finish.complete(batches[0][1])
                    self._at_hand = len(batches) - 1
                    # not referred to here: its memory is free as soon as the caller lets go
                    yield batches.popleft()
                asked = time.perf_counter()
                self.stats.step(asked - given)
                self._keep_pace((asked - given) / taken)
        finally:
            self.close()

    def close(self) -> None:
        """Stop reading; what was never handed out is forgotten."""
        self._closed = True
        if self.stats.at_hand == self._is_ready:
            self.stats.at_hand = None
        if self._fetcher is not None:
            self._fetcher.close()
        if self._stager is not None:
            self._stager.close()
        own = threading.current_thread()  # the collector may run anywhere, in this very thread too
        while self._thread is not None and self._thread is not own and self._thread.is_alive():
            with self._ready.mutex:
                self._ready.queue.clear()
                self._ready.not_full.notify_all()
            self._thread.join(0.01)
        self._ready.queue.clear()
        self._holdings.clear()

    def _is_ready(self) -> bool:
        """Whether the next batch, the end, or the error in its place is there: the caller would not
        wait.
        """
        return self._at_hand > 0 or not self._ready.empty()

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closed:
                self._plan_ahead()
                if not self._planned:
                    break
                pending = self._planned.popleft()
                self._ahead -= len(pending.consumed)
                self._produce(pending)
                del pending
            self._put(None)
        except BaseException as error:
            if not self._closed:
                self._put(error)

    def _put(self, item: Slab | BaseException | None) -> None:
        while not self._closed:
            try:
                return self._ready.put(item, timeout=0.5)
            except queue.Full:
                continue

    def _plan_ahead(self) -> None:
        """Plan while there is nothing to gather, or nothing waits for memory: reads never run out
        of work.
        """
        while not self._exhausted:
            if self._planned and (
                self._fetcher is None or self._fetcher.unadmitted_bytes > 0 or self._far_ahead()
            ):
                return
            self._plan_span()

    def _far_ahead(self) -> bool:
        return self._ahead >= self._most_ahead()

    def _most_ahead(self) -> int:
        """Micro-batches to be planned ahead: by the time that the caller itself needs for one, once
        that is known.
        """
        least = READY_SLABS * self._reader.slab
        most = LOOKAHEAD * self._reader.span
        if self._pace is None:
            return min(2 * least, most)
        return int(min(max(SECONDS_AHEAD / max(self._pace, 1e-9), least), most))

    def _keep_pace(self, seconds: float) -> None:
        self._pace = seconds if self._pace is None else 0.75 * self._pace + 0.25 * seconds

    def _plan_span(self) -> None:
        """Plan the next micro-steps that follow each other: their reads go to the fetcher, their
        slabs to be gathered.
        """
        steps = self._steps
        reader = self._reader
        consumed = self._take(min(self._span, max(reader.slab, self._most_ahead() - self._ahead)))
        if not consumed:
            return
        self._ahead += len(consumed)
        slab = min(reader.slab, self._span)
        # the first batches wait neither for a long plan nor for each other
        self._span = min(reader.span, 2 * self._span)
        ids = np.ascontiguousarray(steps.sample_ids(np.array(consumed, np.int64)).reshape(-1))
        span = reader.planner.plan(ids, steps.samples.locate(ids), slab * steps.micro_batch_size)
        self.stats.useful_bytes += span.useful_bytes
        self.stats.cached_bytes += span.cached_bytes
        self.stats.planned_bytes += (
            sum(holding.size for holding in span.holdings) + span.cached_bytes
        )
        holdings = [self._hold(planned) for planned in span.holdings]
        assert len(reader.planner.slots.uses) == len(reader.planner.slots.address)
        self._cut_into_slabs(span, consumed, holdings, slab)
        if self._fetcher is not None:
            self._fetcher.submit(holdings)

    def _hold(self, planned: PlannedHolding) -> Holding:
        """The reads of a holding that was planned, to be submitted."""
        reads = [self._read(part.file, part.start, part.stop, part.at) for part in planned.parts]
        holding = Holding(planned.size, reads, planned.slot)
        self._holdings[planned.slot] = holding
        return holding

    def _cut_into_slabs(
        self, span: Span, consumed: list[int], holdings: list[Holding], slab: int
    ) -> None:
        """Line up the slabs of a span, each with the holdings that no slab before it needs."""
        rows = np.array([planned.row for planned in span.holdings], np.int64)
        sample_of_holding = np.searchsorted(span.row_splits, rows, side="right") - 1
        for number in range(0, len(consumed), slab):
            of_slab = consumed[number : number + slab]
            first = number * self._rows
            last = first + len(of_slab) * self._rows
            low, high = np.searchsorted(sample_of_holding, [first, last])
            self._planned.append(
                _Pending(
                    span=span, consumed=of_slab, first=first, last=last, holdings=holdings[low:high]
                )
            )

    def _read(self, number: int, start: int, stop: int, at: int) -> Read:
        file = self._reader.files[number]
        return Read(file.store, file.key, file.etag, start, stop, at)

    def _take(self, count: int) -> list[int]:
        """The next positions, as long as each follows the one before it."""
        taken: list[int] = []
        while len(taken) < count:
            if self._next is None:
                self._next = next(self._positions, None)
                if self._next is None:
                    self._exhausted = True
                    break
            if self._last is None or self._next != self._last + self._stride:
                if taken:
                    break
                self._jump(self._next)
            taken.append(self._next)
            self._last = self._next
            self._next = None
        return taken

    def _jump(self, consumed: int) -> None:
        """Positions go on at `consumed`, for one of several workers perhaps in other lanes: what
        was open is forgotten.
        """
        pieces = self._reader.planner.pieces
        if pieces is not None:
            lanes = lanes_from(self._steps, pieces.order, consumed, self._workers)
            self._release(self._reader.planner.jump(lanes))

    def _produce(self, pending: _Pending) -> None:
        """Gather a slab; if a part of it failed, the micro-batches before that part, and then its
        error.
        """
        try:
            slab = self._gather(pending)
        except StreammegaError:
            if len(pending.consumed) == 1 or self._closed:
                raise
            for part in self._one_by_one(pending):
                self._put(self._gather(part))
            return
        self._put(slab)

    def _one_by_one(self, pending: _Pending) -> Iterator[_Pending]:
        """The micro-batches of a slab as slabs of one, each with the holdings that it is the first
        to need.
        """
        span = pending.span
        base = span.row_splits[pending.first]
        first_row_of_slot: dict[int, int] = {}
        for row, slot in enumerate(span.slot[base : span.row_splits[pending.last]].tolist()):
            first_row_of_slot.setdefault(slot, row)
        for number, consumed in enumerate(pending.consumed):
            first = pending.first + number * self._rows
            last = first + self._rows
            low = span.row_splits[first] - base
            high = span.row_splits[last] - base
            holdings = [
                held
                for held in pending.holdings
                if low <= first_row_of_slot.get(held.slot, -1) < high
            ]
            yield _Pending(
                span=span, consumed=[consumed], first=first, last=last, holdings=holdings
            )

    def _gather(self, pending: _Pending) -> Slab:
        if self._fetcher is not None and pending.holdings:
            began = time.perf_counter()
            self._fetcher.wait(pending.holdings)
            self.stats.fetch_wait += time.perf_counter() - began
        slots = self._reader.planner.slots
        for holding in pending.holdings:
            assert holding.buffer is not None
            slots.address[holding.slot] = address_of(holding.buffer)
        slab = self._gather_ids(pending) if self._ids_only else self._gather_fields(pending)
        self._count_down(pending)
        return slab

    def _gather_ids(self, pending: _Pending) -> Slab:
        """Ids in their stored width, and how many of each row are not padding; the rest of a row is
        0.
        """
        samples = pending.last - pending.first
        batches = len(pending.consumed)
        ids = self._allocate((samples, self._width), torch_dtype(self._reader.dtype))
        valid = self._allocate((samples,), torch.int64)
        self._copy_rows(gather_rows, pending, [ids.numpy()], valid.numpy())
        if bool((valid < self._width).any()):
            fill_tails(ids.numpy(), valid.numpy(), 0)
        fields = {
            "ids": ids.view(batches, self._rows, self._width),
            "valid": valid.view(batches, self._rows),
        }
        if self._has_modes:
            learned = self._allocate((samples, self._width), torch.bool)
            learned.numpy().fill(True)
            self._clear_by_modes(pending, learned.numpy(), 0)
            fields["learned"] = learned.view(batches, self._rows, self._width)
        return Slab(consumed=pending.consumed, fields=fields)

    def _gather_fields(self, pending: _Pending) -> Slab:
        """Tokens, labels and what is derived from them, each contiguous."""
        batches = len(pending.consumed)
        shape = (pending.last - pending.first, self._width - 1)
        tokens = self._allocate(shape, torch.int64)
        labels = self._allocate(shape, torch.int64)
        valid = np.empty(shape[0], np.int64)
        self._copy_rows(gather_shifted, pending, [tokens.numpy(), labels.numpy()], valid)
        unsigned = self._reader.dtype.kind == "u"
        derived = derive(
            tokens,
            labels,
            valid,
            self._steps.config,
            unsigned=unsigned,
            allocate=self._allocate,
            rows=self._rows,
        )
        mask = derived.loss_mask
        if self._has_modes:
            mask = plain_mask(shape, self._allocate) if mask is None else mask
            self._clear_by_modes(pending, mask.numpy(), -1)
        made = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": mask,
            "position_ids": derived.position_ids,
        }
        fields = {
            name: field.view(batches, self._rows, -1)
            for name, field in made.items()
            if field is not None
        }
        return Slab(consumed=pending.consumed, fields=fields, cu_seqlens=derived.cu_seqlens)

    def _clear_by_modes(self, pending: _Pending, out: NDArray[Any], shift: int) -> None:
        """Write 0 to `out` for tokens of a slab that are not learned, `shift` columns from where
        each lies in its sample.
        """
        span = pending.span
        splits = span.row_splits[pending.first : pending.last + 1]
        rows = slice(splits[0], splits[-1])
        runs = Runs(
            file=span.file[rows],
            start=span.start[rows],
            size=span.size[rows],
            sample=np.repeat(np.arange(len(splits) - 1), np.diff(splits)),
            column=span.column[rows] + shift,
        )
        clear_by_modes(self._reader.files, runs, out)

    def _copy_rows(
        self, gather: Any, pending: _Pending, out: list[NDArray[Any]], valid: NDArray[np.int64]
    ) -> None:
        """The ids of a slab's samples into `out`, as the kernel `gather` lays them, and how many
        each has into `valid`.
        """
        span = pending.span
        reader = self._reader
        for dtype, kind in reader.kind_of.items():
            good = gather(
                np.empty(0, dtype), kind, reader.kinds, reader.planner.slots.address, span.slot, span.offset, span.size,
                span.file, span.column, span.row_splits[pending.first : pending.last + 1], *out, valid,
            )  # fmt: skip
            if not good:
                raise AssertionError("rows of a sample exceed its width")

    def _count_down(self, pending: _Pending) -> None:
        span = pending.span
        slots = self._reader.planner.slots
        rows = slice(span.row_splits[pending.first], span.row_splits[pending.last])
        freed = np.empty(len(pending.holdings) + len(self._holdings), np.int64)
        made = count_down(slots.uses, span.slot[rows], span.size[rows], freed)
        self._release(freed[:made].tolist())

    def _release(self, freed: list[int]) -> None:
        if freed and self._fetcher is not None:
            self._fetcher.release([self._holdings.pop(slot) for slot in freed])
            self._reader.planner.slots.put_back(freed)


@atexit.register
def _close_all() -> None:
    """End the threads of iterations that were left open: one that is in torch when Python ends
    would abort the process.
    """
    for engine in list(_live):
        # the program has ended: there is nobody left to tell, and others to be closed
        with contextlib.suppress(Exception):
            engine.close()
