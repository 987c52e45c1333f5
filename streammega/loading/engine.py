"""The engine turns positions into batches. Its own thread plans windows, waits for fetched bytes and
gathers ids. The fetcher's threads fetch. The caller's thread makes the fields of the batches it takes.

    positions ─► Lookahead ─► buffers ─► Fetcher (threads) ─► bytes ─► Gatherer ─► ready groups
    ─► Assembler ─► the training loop

Every queue is in the order in which batches need its items. Only bytes that the plan uses are fetched.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from streammega.config import StorageConfig
from streammega.errors import StreammegaError
from streammega.errors.logs import get_logger
from streammega.kernels import num_threads
from streammega.loading.buffers import RecycledMemory, batch_memory
from streammega.loading.lookahead import Lookahead
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.planner import GatherGroup
from streammega.loading.read_plan import map_local_files, plan_reading
from streammega.loading.ready import Assembler, Batches, Form, ReadyGroup
from streammega.loading.staging import Stager
from streammega.loading.stats import NO_GROUP, Stats, TakenGroup
from streammega.samples.gather import Gatherer
from streammega.samples.rows import WHOLE, KeptParts, Memory, PlacedFiles
from streammega.samples.token_file import TokenFile
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.flow_control import BATCH_REQUESTS

log = get_logger(__name__)

POLL_SECONDS = 0.5
"""Seconds between two checks of a waiting thread.

The engine's thread, when it waits for room, checks whether the engine was closed. `close` wakes it
at once, unless the garbage collector calls `close` in this same thread. The caller's thread, when it
waits for a batch, handles signals such as Ctrl-C.
"""
JOIN_POLL_SECONDS = 0.01
"""Seconds between two attempts to end the thread: it may fill the queue again in between."""

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Iterates (consumed, batch) for positions of micro-steps, several batches ahead of its caller.

    An error is raised at the position where it occurred. The threads end when `close` is called or
    the iteration is left.

    Args:
        steps: the micro-steps of this rank.
        positions: the micro-steps to read, as values of `consumed`.
        ahead: micro-batches made ahead of the caller.
        start: the value of `consumed` at which the iteration begins.
        form: what batches are. "ids": {"ids": [micro_batch_size, S + 1] in the stored dtype, "valid":
            the number of ids of each sample, columns, "dataset_id"}. "both": (fields, `Samples`).
        kept: of the form "ids", which tokens of every sample are read. Each part becomes a
            row. kept_of_columns: the same for columns.
        pinned: see `batch_memory`.
    """

    def __init__(
        self,
        steps: MicroSteps,
        positions: Iterator[int],
        ahead: int,
        *,
        start: int,
        form: Form = "fields",
        stats: Stats | None = None,
        kept: KeptParts = WHOLE,
        kept_of_columns: KeptParts = WHOLE,
        pinned: bool | None = None,
    ) -> None:
        self.steps = steps
        self.stats = stats or Stats()
        storage = steps.config.storage
        plan = plan_reading(
            steps,
            start,
            storage.memory_bytes,
            ahead=ahead,
            kept=kept,
            kept_of_columns=kept_of_columns,
            form=form,
        )
        memory = plan.memory
        self._plan = plan
        self._storage = storage
        self._fetcher: Fetcher | None = None
        if plan.is_remote:
            self._fetcher = _fetcher_for(storage, plan.all_files, memory.fetch_bytes)
        self.stats.attach(self._fetcher, plan.all_files)
        self._stager: Stager | None = None
        # keeps the files mapped as long as kernels may follow their addresses
        self._mapped = [map_local_files(files.table) for files in plan.files]
        for files, mapped in zip(plan.files, self._mapped, strict=True):
            files.planner.table.map_files(mapped)
        self._lookahead = Lookahead(steps, plan, positions, fetcher=self._fetcher, stats=self.stats)
        # Batches that are handed out may be pinned. Ids from which fields are made stay here.
        handed_out = batch_memory(memory.ready_bytes, pinned)
        ids_memory = handed_out if form == "ids" else RecycledMemory(memory.ready_bytes).take
        self._gatherer = Gatherer(steps.samples.segments[0], kept, kept_of_columns, ids_memory)
        self._assembler = Assembler(steps, form, handed_out)
        self._closed = False
        self._process = os.getpid()
        self._taken = NO_GROUP
        # the last id of a row is a label alone
        self._rows_of_sample = kept.rows_of_sample
        self._tokens_of_row = kept.width(steps.config.sequence_length + 1) - 1
        self.stats.is_batch_ready = self.is_ready
        self._ready: queue.Queue[ReadyGroup | BaseException | None] = queue.Queue(
            memory.ready_groups
        )
        self.stats.field_bytes = memory.field_bytes
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        self._begin()
        try:
            while True:
                group, waited = self._next_group()
                if isinstance(group, BaseException):
                    try:
                        raise group
                    finally:
                        del group  # else its traceback and this frame would refer to each other
                if group is None:
                    return
                arrived = time.perf_counter()
                num_batches = len(group.consumed)
                assert group.samples.dataset_id is not None
                dataset_of_row = group.samples.dataset_id.numpy().repeat(self._rows_of_sample)
                taken = TakenGroup(
                    dataset_of_row, self._tokens_of_row, num_batches, at_hand=num_batches
                )
                self._taken = taken
                self.stats.group_delivered(taken, waited)
                first = 0
                while first < num_batches:
                    step_began = time.perf_counter()
                    batches = self._assemble(group, first)
                    first += len(batches)
                    self.stats.ready = self._ready.qsize()
                    if first == num_batches:
                        self.stats.release_ready(group.samples.nbytes)
                        del group
                    while batches:
                        taken.at_hand = num_batches - first + len(batches) - 1
                        # this frame holds no reference: the caller alone decides when memory is free
                        yield batches.popleft()
                    self.stats.step(time.perf_counter() - step_began)
                busy = time.perf_counter() - arrived
                self._lookahead.record_pace(busy / num_batches, waited / num_batches)
        finally:
            self.close()

    def _assemble(self, group: ReadyGroup, first: int) -> Batches:
        """Make the next micro-batches of a group, from its micro-batch `first` on.

        Returns up to `field_batches` of them. If one of them has an error, returns the first alone.
        """
        last = min(first + self._plan.memory.field_batches, len(group.consumed))
        try:
            return self._assembler.assemble(group, first, last)
        except StreammegaError:
            # the error is raised when its own micro-batch is the first
            with self.steps.naming_datasets(group.consumed[first]):
                return self._assembler.assemble(group, first, first + 1)

    def _next_group(self) -> tuple[ReadyGroup | BaseException | None, float]:
        """The next group, and the seconds waited for it: 0 if it was ready.

        Polls, because a blocking `queue.get` delays Ctrl-C.
        """
        with contextlib.suppress(queue.Empty):
            return self._ready.get_nowait(), 0.0
        began = time.perf_counter()
        self.stats.wait_began(began)
        try:
            while True:
                with contextlib.suppress(queue.Empty):
                    return self._ready.get(timeout=POLL_SECONDS), time.perf_counter() - began
        finally:
            self.stats.wait_ended(time.perf_counter())

    def _begin(self) -> None:
        """Start the threads."""
        thread = threading.Thread(target=self._run, name="streammega-batch", daemon=True)
        self._thread = thread
        _live.add(self)
        thread.start()
        if self._plan.is_scattered and self._storage.cache_max_bytes:
            stager = Stager(self._plan.all_files, self._storage)
            self._stager = stager
            self.stats.stager = stager

    def close(self) -> None:
        """Stop reading and drop the batches that were not handed out."""
        if self._closed:
            return  # the iteration, the collector and the end of the program may each call `close`
        self._closed = True
        if os.getpid() != self._process:
            return  # a forked child has none of the threads, but may have a lock that one holds
        if self.stats.is_batch_ready == self.is_ready:
            self.stats.is_batch_ready = None
        if self._fetcher is not None:
            self._fetcher.close()
        if self._stager is not None:
            self._stager.close()
        self._end_thread()
        self._ready.queue.clear()
        self.stats.release_all_ready()
        for files in self._plan.files:
            files.planner.table.clear()
        self._unmap()

    def _unmap(self) -> None:
        """Unmap local files. No kernel may follow their addresses after this."""
        if self._thread is threading.current_thread():
            return  # the garbage collector called this: a kernel may still run on this stack
        for files in self._plan.files:
            files.planner.table.unmap()
        self._mapped = []
        for file in self._plan.all_files:
            file.store.unmap()

    def _end_thread(self) -> None:
        """Wait until the thread has ended. Empty the queue meanwhile, so that its last put returns."""
        thread = self._thread
        # the garbage collector may call this in any thread, in the engine's too
        if thread is None or thread is threading.current_thread():
            return
        while thread.is_alive():
            with self._ready.mutex:
                self._ready.queue.clear()
                self._ready.not_full.notify_all()
            thread.join(JOIN_POLL_SECONDS)

    def is_ready(self) -> bool:
        """Whether the caller would not wait: the next batch, its error, or the end is there."""
        return self._taken.at_hand > 0 or not self._ready.empty()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._closed:
                self._lookahead.plan()
                group = self._lookahead.take_group()
                if group is None:
                    break
                self._produce(group)
                del group  # else its buffers would stay in memory after their release
            self._put(None)
        except BaseException as error:
            # the caller's thread raises it in place of the batch
            if not self._closed:
                self._put(error)

    def _put(self, item: ReadyGroup | BaseException | None) -> None:
        """Put an item into the queue of the caller's thread, as soon as it has room."""
        while not self._closed:
            try:
                return self._ready.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue

    def _produce(self, group: GatherGroup) -> None:
        """Gather a group and hand it over.

        If a micro-batch fails, hand over those before it one by one, then raise its error.
        """
        try:
            gathered = self._gather(group)
        except StreammegaError:
            if len(group.consumed) == 1 or self._closed:
                raise
            for batch in group.single_batches():
                self._put(self._gather(batch))
            return
        self._put(gathered)

    def _gather(self, group: GatherGroup) -> ReadyGroup:
        """Wait for the bytes of a group, gather it, and free the buffers that no later row needs."""
        fetcher = self._fetcher
        needed = group.all_buffers
        if fetcher is not None and needed:
            began = time.perf_counter()
            fetcher.wait(needed)
            self.stats.fetch_wait += time.perf_counter() - began
        placed = []
        for files, window, buffers in zip(
            self._plan.files, group.windows, group.buffers, strict=True
        ):
            table = files.planner.table
            for buffer in buffers:
                table.fill(buffer)
            memory = Memory(table.addresses, table.room, table.zero)
            placed.append(PlacedFiles(window, memory, files.table))
        ids, *of_columns = placed
        stored = dict(zip(self._plan.columns, of_columns, strict=True))
        samples = self._gatherer.gather(ids, stored, group.first, group.last)
        self.stats.hold_ready(samples.nbytes)
        released = []
        for files, window in zip(self._plan.files, group.windows, strict=True):
            rows = window.rows_of(group.first, group.last)
            table = files.planner.table
            released += table.release_rows(window.slot[rows], window.size[rows])
        if released and fetcher is not None:
            fetcher.release(released)
        return ReadyGroup(group.consumed, samples)


def _fetcher_for(storage: StorageConfig, files: Sequence[TokenFile], budget: int) -> Fetcher:
    """The fetcher of some files, which may hold `budget` bytes.

    If all files are on local disks, fetching means to decompress them, which needs a core and does
    not wait. There are then as many threads as cores, and slow reads are not hedged.
    """
    if not all(file.store.is_local for file in files):
        return Fetcher(storage, budget)
    threads = min(storage.max_concurrent_requests, num_threads())
    # A thread takes several requests at once. With one at a time it would wait for the GIL after each.
    requests = threads * BATCH_REQUESTS
    storage = replace(storage, max_concurrent_requests=requests).tuned(hedge_requests=False)
    return Fetcher(storage, budget, threads)


@atexit.register
def _close_all() -> None:
    """End the threads of open iterations. A thread inside torch when Python ends aborts the process."""
    for engine in list(_live):
        # no caller is there to receive an error, and the other engines have to be closed too
        with contextlib.suppress(Exception):
            engine.close()
