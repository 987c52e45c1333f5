"""Who does the work: processes of this machine, or a Ray cluster.

The tasks are the same, and so is what they make.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from streammega.convert.cluster import SharedFiles, check_answer, connected
from streammega.convert.options import Runner
from streammega.errors import ConvertError, StreammegaError
from streammega.kernels.parallel import num_threads

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
Task = Callable[[Any, int, Progress], Any]
"""(what all tasks share, number of the task, progress(bytes, tokens)) -> its result."""
DEATHS = 5
"""Times that workers may be killed under a run before it gives up."""
POLL = 0.2


@dataclass(frozen=True, kw_only=True)
class TaskList:
    """Tasks to be done: `function(shared, number, progress)` for each number.

    threads: as many of them do well as threads of one process, since they spend their time outside
    of the GIL. Threads share what they load, a tokenizer's cache for instance, and those of this
    process start at once. files: what each machine of a cluster must see; those that join it later
    are asked too.
    """

    function: Task
    shared: Any
    numbers: Sequence[int]
    threads: int = 1
    files: SharedFiles = field(default_factory=SharedFiles)


def run_tasks(
    work: TaskList, runner: Runner, progress: Progress, most_at_once: int | None = None
) -> Iterator[tuple[int, Any]]:
    """(number, result) as tasks are done. Raises what a task raised; the others are given up."""
    if not work.numbers:
        return
    if runner.engine == "ray":
        yield from _on_ray(work, runner, progress, most_at_once)
        return
    wanted = runner.workers or num_threads()
    workers = min(wanted, len(work.numbers), most_at_once or len(work.numbers))
    with _library_settings(max(1, wanted // workers)):
        if workers == 1:
            for number in work.numbers:
                yield number, work.function(work.shared, number, progress)
        elif workers <= work.threads:
            yield from _on_threads(work, workers, progress)
        else:
            yield from _on_processes(work, workers, progress)


@contextmanager
def _library_settings(threads: int) -> Iterator[None]:
    """The environment of `_prepare` while tasks run in this process; the caller's own comes back
    after them.
    """
    before = {
        name: os.environ.get(name) for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")
    }
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
    lock = threading.Lock()

    def note(size: int, tokens: int) -> None:
        if stopped.is_set():
            raise ConvertError("interrupted")
        with lock:
            progress(size, tokens)

    with ThreadPoolExecutor(workers) as pool:
        running = {
            pool.submit(work.function, work.shared, number, note): number for number in work.numbers
        }
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _prepare(threads: int) -> None:
    """How many threads the tokenizers library may use: what the tasks leave idle."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))


_shared: Any = None
_counters: Any = None


def _start(function_shared: Any, counters: Any) -> None:
    global _shared, _counters
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # a worker does not outlive its parent
    _prepare(1)
    _shared = function_shared
    _counters = counters


def _tasks(function: Task, numbers: Sequence[int], threads: int) -> list[tuple[int, Any]]:
    """Some tasks, a few at a time, in a worker process."""

    def progress(size: int, tokens: int) -> None:
        with _counters.get_lock():
            _counters[0] += size
            _counters[1] += tokens

    with ThreadPoolExecutor(threads) as pool:
        return list(
            zip(
                numbers,
                pool.map(lambda number: function(_shared, number, progress), numbers),
                strict=True,
            )
        )


def _on_processes(work: TaskList, workers: int, progress: Progress) -> Iterator[tuple[int, Any]]:
    # clients and thread pools of this process do not survive a fork
    context = multiprocessing.get_context("spawn")
    processes = -(-workers // work.threads)
    left = list(work.numbers)
    deaths = 0
    while left:
        counters = context.Array("q", 2)
        pool = ProcessPoolExecutor(
            processes, mp_context=context, initializer=_start, initargs=(work.shared, counters)
        )
        try:
            for number, result in _results(pool, work, left, processes, counters, progress):
                left.remove(number)
                yield number, result
        except BrokenExecutor:
            deaths += 1
            if deaths > DEATHS:
                raise ConvertError(
                    "workers were killed again and again (out of memory?); use fewer --workers, or less --memory"
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
    counters: Any,
    progress: Progress,
) -> Iterator[tuple[int, Any]]:
    """(number, result) of the tasks `left`, as groups of them are done. counters: bytes and tokens,
    which all workers add to.
    """
    # A worker's threads begin the next task of a group while the last ones of it still run, so a
    # group has two for each.
    group_size = 1 if work.threads == 1 else 2 * work.threads
    groups = iter([left[at : at + group_size] for at in range(0, len(left), group_size)])
    # For each process one at work and one that waits for it, and one to spare: who is done finds
    # the next there at once.
    most_running = 2 * processes + 1
    running: set[Future[Any]] = set()
    told = [0, 0]
    while True:
        for numbers in islice(groups, most_running - len(running)):
            running.add(pool.submit(_tasks, work.function, numbers, work.threads))
        if not running:
            return
        # Not longer than POLL, since what is counted is to be seen while tasks run.
        done, running = wait(running, timeout=POLL, return_when=FIRST_COMPLETED)
        told = _tell(told, list(counters), progress)
        for future in done:
            yield from future.result()


def _tell(told: list[int], counted: list[int], progress: Progress) -> list[int]:
    """Tell `progress` what has been counted since; returns what it knows now."""
    size = counted[0] - told[0]
    tokens = counted[1] - told[1]
    if size or tokens:
        progress(size, tokens)
    return counted


def _end(pool: ProcessPoolExecutor) -> None:
    """Stop the workers now: what they have not finished is nothing."""
    for process in list((getattr(pool, "_processes", None) or {}).values()):
        process.terminate()
    pool.shutdown(wait=True, cancel_futures=True)


def _on_ray(
    work: TaskList, runner: Runner, progress: Progress, most_at_once: int | None
) -> Iterator[tuple[int, Any]]:
    with connected() as ray:
        # each holds memory of its own: of every machine as many as of one, and spread over them
        if most_at_once is not None:
            most_at_once *= max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
        spread = "DEFAULT" if most_at_once is None else "SPREAD"
        remote = ray.remote(max_retries=DEATHS, scheduling_strategy=spread)(_ray_task)
        shared = ray.put((work.function, work.shared, work.files))
        left = list(work.numbers)[::-1]
        running: dict[Any, int] = {}
        try:
            while left or running:
                while left and (most_at_once is None or len(running) < most_at_once):
                    number = left.pop()
                    running[remote.remote(shared, number)] = number
                done, _ = ray.wait(list(running), num_returns=1)
                number = running.pop(done[0])
                result, size, tokens = _ray_result(ray, done[0])
                progress(size, tokens)
                yield number, result
        finally:
            for reference in running:  # on a cluster of somebody else's they would go on
                ray.cancel(reference, force=True)


def _ray_result(ray: Any, reference: Any) -> Any:
    """What a task returned.

    Raises what it raised, ConvertError if its workers were killed too often.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise (
            error.cause
            if isinstance(error.cause, StreammegaError)
            else ConvertError(str(error.cause))
        ) from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        raise ConvertError(
            f"workers of the cluster were killed again and again ({type(error).__name__}); see Ray's own logs, use less --memory"
        ) from None


def _ray_task(work: tuple[Task, Any, SharedFiles], number: int) -> tuple[Any, int, int]:
    function, shared, files = work
    check_answer(socket.gethostname(), files.lacking_marker())
    done = [0, 0]

    def progress(size: int, tokens: int) -> None:
        done[0] += size
        done[1] += tokens

    _prepare(1)
    result = function(shared, number, progress)
    return result, done[0], done[1]
