"""From positions to batches: one thread plans, waits for what was fetched, and gathers; the
transport's threads fetch; the caller's thread makes the fields of what it takes.

    positions ─► Lookahead ─► buffers ─► Fetcher (threads) ─► bytes ─► Gatherer ─► ready groups
    ─► Assembler ─► the training loop

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
from collections.abc import Iterator
from dataclasses import replace

from streammega.config import StorageConfig
from streammega.errors import StreammegaError
from streammega.kernels import num_threads
from streammega.loading.buffers import RecycledMemory, batch_memory
from streammega.loading.gather import Assembler, Batches, Gatherer, ReadyGroup
from streammega.loading.lookahead import Lookahead
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.planner import WHOLE, GatherGroup, KeptColumns
from streammega.loading.read_plan import local_addresses, plan_reading
from streammega.loading.staging import Stager
from streammega.loading.stats import Stats
from streammega.samples.derived_fields import Batch
from streammega.samples.token_file import TokenFile
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.flow_control import BATCH_REQUESTS

log = logging.getLogger(__name__)

LOOK_UP = 0.5
"""Seconds after which a thread that waits looks up. That which waits for room looks whether it was
closed: `close` wakes it at once, unless it is called in this very thread, by the collector. That
which waits for batches hears of signals.
"""
JOIN = 0.01
"""Seconds between two wakings of a thread that is to end: it may fill the queue once more."""

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Iterates (consumed, batch) for positions of micro-steps, several batches ahead of its caller.

    An error is raised at the position it belongs to. `close` ends the threads; so does leaving the
    iteration.

    Args:
        steps: what is read.
        positions: which of the micro-steps, as values of `consumed`.
        ahead: micro-batches made ahead of the caller.
        start: where the iteration begins.
        ids_only: batches are {"ids": [micro_batch_size, S + 1] in the stored dtype, "valid": ids
            that each sample has}, and where modes make the loss mask "learned": bool, of each id.
        kept: with ids_only, which tokens of every sample are read, each part as a row of its own.
        pinned: see `batch_memory`.
    """

    def __init__(
        self,
        steps: MicroSteps,
        positions: Iterator[int],
        ahead: int,
        *,
        start: int,
        ids_only: bool = False,
        stats: Stats | None = None,
        kept: KeptColumns = WHOLE,
        pinned: bool | None = None,
    ) -> None:
        self.steps = steps
        self.ids_only = ids_only
        self.stats = stats or Stats()
        storage = steps.config.storage
        plan = plan_reading(
            steps, start, storage.memory_bytes, ahead=ahead, kept=kept, ids_only=ids_only
        )
        memory = plan.memory
        self._plan = plan
        self._storage = storage
        self._fetcher: Fetcher | None = None
        if plan.is_remote:
            self._fetcher = _fetcher_for(storage, plan.files, memory.fetch_bytes)
        self.stats.attach(self._fetcher, plan.files)
        self._stager: Stager | None = None
        # kept as long as kernels may follow the addresses
        self._mapped = local_addresses(plan.files, plan.table.local)
        plan.planner.table.map_files([address for address, _ in self._mapped])
        self._lookahead = Lookahead(steps, plan, positions, fetcher=self._fetcher, stats=self.stats)
        # What is handed out may be pinned; ids that fields are made of stay here.
        handed_out = batch_memory(memory.ready_bytes, pinned)
        ids_memory = handed_out if ids_only else RecycledMemory(memory.ready_bytes).take
        self._gatherer = Gatherer(steps, plan, ids_memory)
        self._assembler = Assembler(steps, plan, None if ids_only else handed_out)
        self._closed = False
        self._at_hand = 0  # batches that are gathered, of the group that is being handed out
        self.stats.at_hand = self.is_ready
        self._ready: queue.Queue[ReadyGroup | BaseException | None] = queue.Queue(
            memory.ready_groups
        )
        self.stats.field_bytes = memory.field_bytes
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        self._begin()
        try:
            while True:
                asked = time.perf_counter()
                group = self._next_group()
                if isinstance(group, BaseException):
                    try:
                        raise group
                    finally:
                        del group  # else its traceback and this frame would refer to each other
                if group is None:
                    return
                away = 0.0
                first = 0
                num_batches = len(group.consumed)
                while first < num_batches:
                    batches = self._assemble(group, first)
                    first += len(batches)
                    if first == num_batches:
                        self.stats.release_ready(group.nbytes)
                        del group
                    given = time.perf_counter()
                    self.stats.batches_delivered(len(batches), given - asked, self._ready.qsize())
                    while batches:
                        self._at_hand = num_batches - first + len(batches) - 1
                        # not referred to here: its memory is free as soon as the caller lets go
                        yield batches.popleft()
                    asked = time.perf_counter()
                    self.stats.step(asked - given)
                    away += asked - given
                self._lookahead.keep_pace(away / num_batches)
        finally:
            self.close()

    def _assemble(self, group: ReadyGroup, first: int) -> Batches:
        """The next micro-batches of a group, from its `first` on: all of those that are made together,
        or up to one that has an error.
        """
        last = min(first + self._plan.memory.field_batches, len(group.consumed))
        try:
            return self._assembler.assemble(group, first, last)
        except StreammegaError:
            # raised by the micro-batch that has it, when that is asked for
            return self._assembler.assemble(group, first, first + 1)

    def _next_group(self) -> ReadyGroup | BaseException | None:
        """Wait for the next group. Polls, because a blocking `queue.get` delays Ctrl-C."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._ready.get(timeout=LOOK_UP)

    def _begin(self) -> None:
        """Start the threads."""
        thread = threading.Thread(target=self._run, name="streammega-batch", daemon=True)
        self._thread = thread
        _live.add(self)
        thread.start()
        if self._plan.is_scattered and self._storage.cache_dir is not None:
            stager = Stager(self._plan.files, self._storage)
            self._stager = stager
            self.stats.stager = stager

    def close(self) -> None:
        """Stop reading; what was never handed out is forgotten."""
        if self._closed:
            return  # an iteration left open is closed as the program ends, and when it is dropped
        self._closed = True
        if self.stats.at_hand == self.is_ready:
            self.stats.at_hand = None
        if self._fetcher is not None:
            self._fetcher.close()
        if self._stager is not None:
            self._stager.close()
        self._end_thread()
        self._ready.queue.clear()
        self.stats.release_all_ready()
        self._plan.planner.table.clear()
        self._unmap()

    def _unmap(self) -> None:
        """Let go of local files. No kernel follows their addresses any more."""
        if self._thread is threading.current_thread():
            return  # the collector called: a kernel may run below on this stack
        self._mapped = []
        for file in self._plan.files:
            file.store.unmap()

    def _end_thread(self) -> None:
        """Wait until the thread has ended, making room for what it still hands over."""
        thread = self._thread
        # the collector may run anywhere, in that very thread too
        if thread is None or thread is threading.current_thread():
            return
        while thread.is_alive():
            with self._ready.mutex:
                self._ready.queue.clear()
                self._ready.not_full.notify_all()
            thread.join(JOIN)

    def is_ready(self) -> bool:
        """Whether the next batch, the end, or the error in its place is there: the caller would not
        wait.
        """
        return self._at_hand > 0 or not self._ready.empty()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while not self._closed:
                self._lookahead.plan()
                group = self._lookahead.take_group()
                if group is None:
                    break
                self._produce(group)
                del group  # its buffers are free when they are released
            self._put(None)
        except BaseException as error:
            # raised by the caller's thread, in place of the batch
            if not self._closed:
                self._put(error)

    def _put(self, item: ReadyGroup | BaseException | None) -> None:
        """Hand over to the caller's thread, as soon as it has room."""
        while not self._closed:
            try:
                return self._ready.put(item, timeout=LOOK_UP)
            except queue.Full:
                continue

    def _produce(self, group: GatherGroup) -> None:
        """Gather a group; if a part of it failed, the micro-batches before that part, and then its
        error.
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
        """Wait for the bytes of a group, gather it, and free what it was the last to need."""
        fetcher = self._fetcher
        table = self._plan.planner.table
        if fetcher is not None and group.buffers:
            began = time.perf_counter()
            fetcher.wait(group.buffers)
            self.stats.fetch_wait += time.perf_counter() - began
        for buffer in group.buffers:
            table.fill(buffer)
        gathered = self._gatherer.gather(group)
        self.stats.hold_ready(gathered.nbytes)
        window = group.window
        rows = group.rows
        released = table.release_rows(window.slot[rows], window.size[rows])
        if released and fetcher is not None:
            fetcher.release(released)
        return gathered


def _fetcher_for(storage: StorageConfig, files: list[TokenFile], budget: int) -> Fetcher:
    """What fetches files.

    Where all of them are on local disks, what is fetched is unpacked from them: that is work, not
    waiting, so there are as many threads as cores, and nothing is read a second time because it
    takes long.
    """
    if not all(file.store.is_local for file in files):
        return Fetcher(storage, budget)
    threads = min(storage.max_concurrent_requests, num_threads())
    # A thread takes whole jobs: one read at a time, it would wait for the GIL after each.
    requests = threads * BATCH_REQUESTS
    return Fetcher(
        replace(storage, max_concurrent_requests=requests, hedge_requests=False), budget, threads
    )


@atexit.register
def _close_all() -> None:
    """End the threads of iterations that were left open: one that is in torch when Python ends
    would abort the process.
    """
    for engine in list(_live):
        # the program has ended: no caller is left for the error, and other engines must be closed
        with contextlib.suppress(Exception):
            engine.close()
