"""Tasks done by threads and processes of this machine, or by a Ray cluster."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)  # fmt: skip
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.context import SpawnContext
from typing import Any

from streammega.convert.options import Runner
from streammega.convert.ray_workers import DEATHS, SharedFiles, Task, run_on_ray
from streammega.errors import ConvertError
from streammega.kernels.parallel import num_threads
from streammega.storage.progress import Progress

log = logging.getLogger(__name__)

POLL = 0.2
"""Seconds between two looks at what processes have done: often enough for a progress bar."""
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends."""


LIBRARY_VARIABLES = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")
"""They set how many threads the tokenizers library uses."""


@dataclass(frozen=True, kw_only=True)
class TaskList:
    """Tasks to be done: `function(shared, number, progress)` for each number.

    threads: as many of them do well as threads of one process, since they spend their time outside
    of the GIL. Threads share what they load, a tokenizer's cache for instance, and those of this
    process start at once. files: what each machine of a cluster must see.
    """

    function: Task
    shared: Any
    numbers: Sequence[int]
    threads: int = 1
    files: SharedFiles | None = None


def run_tasks(
    work: TaskList, runner: Runner, progress: Progress, max_at_once: int | None = None
) -> Iterator[tuple[int, Any]]:
    """(number, result) as tasks are done. Raises what a task raised; the others are given up."""
    if not work.numbers:
        return
    if runner.engine == "ray":
        yield from run_on_ray(
            work.function, work.shared, work.numbers, work.files, progress, max_at_once
        )
        return
    wanted = runner.workers or num_threads()
    workers = min(wanted, len(work.numbers))
    if max_at_once is not None:
        workers = min(workers, max_at_once)
    as_threads = workers <= work.threads
    # Threads of one process share the threads of the tokenizer's library, as many as there are
    # workers: so these are busy while one worker writes, and when only one is left. Processes
    # inherit what is set here, each for its own threads.
    with _library_settings(wanted if as_threads else work.threads):
        if workers == 1:
            for number in work.numbers:
                yield number, work.function(work.shared, number, progress)
        elif as_threads:
            yield from _on_threads(work, workers, progress)
        else:
            yield from _on_processes(work, workers, progress)


@contextmanager
def _library_settings(threads: int) -> Iterator[None]:
    """The environment of `_prepare` while tasks run in this process; the caller's own comes back
    after them.
    """
    before = {name: os.environ.get(name) for name in LIBRARY_VARIABLES}
    _prepare(threads)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _on_threads(work: TaskList, workers: int, progress: Progress) -> Iterator[tuple[int, Any]]:
    stopped = threading.Event()
    # The caller's function need not be one that threads may call at once.
    lock = threading.Lock()

    def note(size: int, tokens: int) -> None:
        """Tell progress for one thread, which ends here where the conversion was stopped."""
        # Threads cannot be stopped from outside; each ends at the next thing that it tells.
        if stopped.is_set():
            raise ConvertError("interrupted")
        with lock:
            progress(size, tokens)

    with ThreadPoolExecutor(workers) as pool:
        running: dict[Future[Any], int] = {}
        try:
            # Ctrl-C comes here too: the first threads are at work before the last task is given.
            for number in work.numbers:
                future = pool.submit(work.function, work.shared, number, note)
                running[future] = number
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _prepare(threads: int) -> None:
    """How many threads the tokenizers library may use in this process, for all of its tasks."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))


class _SharedCount:
    """Bytes and tokens that were done: workers add to them, their parent reports them."""

    def __init__(self, context: SpawnContext) -> None:
        self._lock = context.Lock()
        self._bytes = context.RawValue("q", 0)
        self._tokens = context.RawValue("q", 0)
        self._bytes_reported = 0
        self._tokens_reported = 0

    def add(self, size: int, tokens: int) -> None:
        """As `Progress`, in a worker."""
        with self._lock:
            self._bytes.value += size
            self._tokens.value += tokens

    def report(self, progress: Progress) -> None:
        """Report what was added since the last call."""
        # Without the lock: a worker that was killed while it had that would keep it for ever.
        size = self._bytes.value - self._bytes_reported
        tokens = self._tokens.value - self._tokens_reported
        self._bytes_reported += size
        self._tokens_reported += tokens
        if size or tokens:
            progress(size, tokens)


_shared: Any = None
"""In a worker process: what all tasks share, sent there once."""
_count: _SharedCount | None = None
"""In a worker process: what it adds to."""


def _start(shared: Any, count: _SharedCount, threads: int) -> None:
    """Begin a worker process, of so many threads."""
    global _shared, _count
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    if sys.platform == "linux":
        # A worker does not outlive its parent, however that ends.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prepare(threads)
    _shared = shared
    _count = count


def _do_group(function: Task, numbers: Sequence[int], threads: int) -> list[tuple[int, Any]]:
    """Some tasks, a few at a time, in a worker process."""
    assert _count is not None
    progress = _count.add

    def do(number: int) -> tuple[int, Any]:
        return number, function(_shared, number, progress)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(do, numbers))


def _on_processes(work: TaskList, workers: int, progress: Progress) -> Iterator[tuple[int, Any]]:
    # Clients and thread pools of this process do not survive a fork.
    context = multiprocessing.get_context("spawn")
    processes = -(-workers // work.threads)
    left = list(work.numbers)
    deaths = 0
    while left:
        # A new one for each pool: a worker that was killed may have held the lock.
        count = _SharedCount(context)
        pool = ProcessPoolExecutor(
            processes,
            mp_context=context,
            initializer=_start,
            initargs=(work.shared, count, work.threads),
        )
        try:
            for number, result in _results(pool, work, left, processes, count, progress):
                left.remove(number)
                yield number, result
        except BrokenExecutor:
            deaths += 1
            if deaths > DEATHS:
                raise ConvertError(
                    "workers were killed again and again (out of memory?); use fewer --workers, or "
                    "less --memory"
                ) from None
            log.warning(
                "a worker was killed; what it was doing is done again (%d of at most %d times)",
                deaths,
                DEATHS,
            )
        finally:
            _end(pool)


def _results(
    pool: ProcessPoolExecutor,
    work: TaskList,
    left: Sequence[int],
    processes: int,
    count: _SharedCount,
    progress: Progress,
) -> Iterator[tuple[int, Any]]:
    """(number, result) of the tasks `left`, as groups of them are done."""
    # A worker's threads begin the next task of a group while the last ones of it still run, so a
    # group has two for each.
    group_size = 1 if work.threads == 1 else 2 * work.threads
    groups = iter([left[at : at + group_size] for at in range(0, len(left), group_size)])
    # For each process one at work and one that waits for it, and one to spare: who is done finds
    # the next there at once.
    most_running = 2 * processes + 1
    running: set[Future[Any]] = set()
    while True:
        for numbers in islice(groups, most_running - len(running)):
            running.add(pool.submit(_do_group, work.function, numbers, work.threads))
        if not running:
            return
        # Not longer than POLL, since what is counted is to be seen while tasks run.
        done, running = wait(running, timeout=POLL, return_when=FIRST_COMPLETED)
        count.report(progress)
        for future in done:
            yield from future.result()


def _end(pool: ProcessPoolExecutor) -> None:
    """Stop the workers now: what they have not finished is nothing."""
    # The pool has no call for this before Python 3.14; without it, running tasks are waited for.
    processes = getattr(pool, "_processes", None) or {}
    for process in list(processes.values()):
        process.terminate()
    pool.shutdown(wait=True, cancel_futures=True)
