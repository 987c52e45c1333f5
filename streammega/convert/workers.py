"""Units and shards done side by side: by threads or processes of this machine, or by a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from streammega.convert.options import ExecutionConfig
from streammega.convert.processes import (
    Done,
    Work,
    do_counted,
    run_in_processes,
    set_library_threads,
)
from streammega.convert.read.source import Input
from streammega.convert.work_dir import WorkDir
from streammega.errors import ConfigError, ConvertError, StreammegaError
from streammega.errors.extras import import_extra
from streammega.errors.logs import get_logger
from streammega.kernels import num_threads
from streammega.storage.open import is_remote
from streammega.storage.progress import Progress
from streammega.storage.thread_pool import thread_state

log = get_logger(__name__)

MAX_DEATHS = 5
"""Times that Ray does a task again whose worker was killed."""
MAX_CHECKED_INPUTS = 1000
"""Inputs that a machine checks at most, spread over all."""
LIBRARY_VARIABLES = ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS")
"""They set how many threads the tokenizers library uses."""

_checked: set[str] = set()
"""Markers of conversions whose files this worker of a cluster has found."""


def run_parallel(
    work: Work,
    numbers: Sequence[int],
    execution: ExecutionConfig,
    progress: Progress,
    *,
    max_threads: int = 1,
    max_at_once: int | None = None,
    in_processes: bool = False,
    may_leave_out: bool = False,
    work_dir: WorkDir | None = None,
    inputs: Sequence[Input] = (),
) -> Iterator[tuple[int, Any]]:
    """(number, result) of each as it is done. Raises what one raised, and stops the others.

    max_threads: up to so many workers are threads of this process, which start at once and share a
    tokenizer's cache. More are processes, and so are all with `in_processes`. may_leave_out: see
    `run_in_processes`. work_dir, inputs: what each machine of a cluster must see.
    """
    if not numbers:
        return
    if execution.backend == "ray":
        with _shared_files(work_dir, inputs) as files:
            yield from _run_on_ray(work, numbers, files, progress, max_at_once)
        return
    wanted = execution.workers or num_threads()
    workers = min(wanted, len(numbers), max_at_once or wanted)
    if in_processes or workers > max_threads:
        yield from run_in_processes(
            work, numbers, workers, progress, library_threads=wanted, may_leave_out=may_leave_out
        )
        return
    # The workers share the threads of the tokenizer's library: all of these are busy while one
    # worker writes, and when only one is left.
    with _library_settings(wanted):
        if workers == 1:
            for number in numbers:
                yield number, work(number, progress)
        else:
            yield from _run_in_threads(work, numbers, workers, progress)


def _run_in_threads(
    work: Work, numbers: Sequence[int], workers: int, progress: Progress
) -> Iterator[tuple[int, Any]]:
    are_given = threading.Event()
    stopped = threading.Event()
    # The caller's function need not be one that threads may call at once.
    lock = threading.Lock()

    def report(size: int, tokens: int) -> None:
        """Report progress of one thread, and end the thread if the conversion was stopped."""
        # Threads cannot be stopped from outside.
        if stopped.is_set():
            raise ConvertError("interrupted")
        with lock:
            progress(size, tokens)

    def do(number: int) -> Any:
        """Do the work of a number, once all are given."""
        # The pool does not wait for a thread that Ctrl-C left half started: it must not work.
        are_given.wait()
        if stopped.is_set():
            raise ConvertError("interrupted")
        thread_state.stop = stopped  # also while it waits for storage or space
        return work(number, report)

    with ThreadPoolExecutor(workers) as pool:
        try:
            running = {pool.submit(do, number): number for number in numbers}
            are_given.set()
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            stopped.set()
            are_given.set()
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _library_settings(threads: int) -> Iterator[None]:
    """Threads of the tokenizers library in this process; the caller's settings come back after."""
    before = {name: os.environ.get(name) for name in LIBRARY_VARIABLES}
    set_library_threads(threads)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- Ray ---


@dataclass(frozen=True, kw_only=True)
class SharedFiles:
    """What every machine of a cluster must see. marker: a file in the work folder, or its URL.

    inputs: (path, bytes) of local ones.
    """

    marker: str
    inputs: tuple[tuple[str, int], ...] = ()

    def check(self) -> None:
        """Raise ConvertError if this machine does not see all of it."""
        missing = self._missing()
        if missing:
            raise ConvertError(
                f"{socket.gethostname()}: this machine of the cluster cannot take part: {missing}"
            )

    def _missing(self) -> str:
        folder = os.path.dirname(self.marker)
        if not is_remote(self.marker) and not os.path.exists(self.marker):
            return (
                f"it does not see the work folder {folder}. Pass --work-dir with a URL, or with a "
                f"folder of a shared file system"
            )
        remedy = "put the inputs where all machines see them"
        for path, size in self.inputs:
            try:
                size_there = os.stat(path).st_size
            except OSError as error:
                return f"the input {path} cannot be read there ({error.strerror}); {remedy}"
            if size_there != size:
                return f"the input {path} has {size_there:,} bytes there, not {size:,}; {remedy}"
        return ""


@contextmanager
def _shared_files(
    work_dir: WorkDir | None, inputs: Sequence[Input]
) -> Iterator[SharedFiles | None]:
    """What the machines of a cluster must see while they work."""
    if work_dir is None:
        yield None
        return
    files = []
    for item in inputs:
        path = os.path.abspath(item.path)
        if not is_remote(item.path) and os.path.isfile(path):
            files.append((path, item.size))
    step = max(1, -(-len(files) // MAX_CHECKED_INPUTS))
    # The name is new each time, so that no machine has such a file from an earlier conversion.
    marker = work_dir.file(f"cluster-{uuid.uuid4().hex}")
    try:
        if not work_dir.is_remote:
            with open(marker, "wb"):
                pass
        yield SharedFiles(marker=marker, inputs=tuple(files[::step]))
    finally:
        if os.path.exists(marker):
            os.unlink(marker)


def _run_on_ray(
    work: Work,
    numbers: Sequence[int],
    files: SharedFiles | None,
    progress: Progress,
    max_at_once: int | None,
) -> Iterator[tuple[int, Any]]:
    """(number, result) of each as it is done. Raises ConfigError without Ray."""
    with _connected() as ray:
        if max_at_once is not None:
            # Each holds memory of its own: as many on every machine as on one.
            max_at_once *= max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
        remote = ray.remote(max_retries=MAX_DEATHS, scheduling_strategy="SPREAD")(_run_on_machine)
        shared = ray.put((work, files))
        waiting = deque(numbers)
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and (max_at_once is None or len(running) < max_at_once):
                    number = waiting.popleft()
                    running[remote.remote(shared, number)] = number
                done, _ = ray.wait(list(running), num_returns=1)
                (reference,) = done
                number = running.pop(reference)
                done_there: Done = _get(ray, reference)
                progress(*done_there.step)
                yield number, done_there.result
        finally:
            # On a cluster that was there before they would go on.
            for reference in running:
                ray.cancel(reference, force=True)


@contextmanager
def _connected() -> Iterator[Any]:
    """Ray, joined or started; what was joined before is left as it is. Raises ConfigError."""
    ray = import_extra("ray", "ray", "the ray backend needs Ray")
    is_joined_here = not ray.is_initialized()
    if is_joined_here:
        address = os.environ.get("RAY_ADDRESS")
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False,
            )
        except (Exception, SystemExit) as error:  # it exits if a cluster does not answer
            where = f"at RAY_ADDRESS={address}" if address else "on this machine"
            raise ConfigError(
                f"Ray cannot be joined or started {where} ({type(error).__name__}: {error}); set "
                f"RAY_ADDRESS to a running cluster, or use --backend local"
            ) from None
    try:
        yield ray
    finally:
        if is_joined_here:
            ray.shutdown()


def _get(ray: Any, reference: Any) -> Any:
    """What a Ray task returned. Raises what it raised, ConvertError if its workers were killed."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, StreammegaError):
            raise error.cause from None
        raise ConvertError(str(error.cause)) from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        raise ConvertError(
            f"workers of the cluster were killed again and again ({type(error).__name__}); see "
            f"Ray's own logs, use less --shuffle-memory"
        ) from None


def _run_on_machine(shared: tuple[Work, SharedFiles | None], number: int) -> Done:
    """Do the work of a number, on a machine of the cluster."""
    work, files = shared
    if files is not None and files.marker not in _checked:
        files.check()
        _checked.add(files.marker)
    set_library_threads(1)  # Ray gives each task one core
    return do_counted(work, number)
