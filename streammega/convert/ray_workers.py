"""Tasks done by a Ray cluster. Each task first checks that its machine sees the shared files."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from streammega.convert.read.inputs import Input
from streammega.errors import ConfigError, ConvertError, StreammegaError
from streammega.storage.open import is_remote
from streammega.storage.progress import Progress

Task = Callable[[Any, int, Progress], Any]
"""(what all tasks share, number of the task, progress(bytes, tokens)) -> its result."""
DEATHS = 5
"""Times that workers may be killed under a run before it fails."""
MAX_CHECKED_INPUTS = 1000
"""Of more inputs, so many spread over all are checked."""

_checked: set[str] = set()
"""In a worker: the markers of conversions whose files this process has found."""


@dataclass(frozen=True, kw_only=True)
class SharedFiles:
    """What every machine must see. marker: a file in the work folder, or its URL.

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
                f"it does not see the work folder {folder}. Pass --work with a URL, or with a "
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
def shared_files(work: str, inputs: Sequence[Input]) -> Iterator[SharedFiles]:
    """What the machines of a cluster must see, while a conversion runs."""
    files = []
    for item in inputs:
        path = os.path.abspath(item.path)
        if not is_remote(item.path) and os.path.isfile(path):
            files.append((path, item.size))
    step = max(1, -(-len(files) // MAX_CHECKED_INPUTS))
    # The name is new each time, so that no machine has such a file from an earlier conversion.
    marker = f"{work}/cluster-{uuid.uuid4().hex}"
    try:
        if not is_remote(work):
            with open(marker, "wb"):
                pass
        yield SharedFiles(marker=marker, inputs=tuple(files[::step]))
    finally:
        if os.path.exists(marker):
            os.unlink(marker)


def run_on_ray(
    function: Task,
    shared: Any,
    numbers: Sequence[int],
    files: SharedFiles | None,
    progress: Progress,
    max_at_once: int | None,
) -> Iterator[tuple[int, Any]]:
    """(number, result) as tasks are done."""
    with _connected() as ray:
        if max_at_once is not None:
            # Each holds memory of its own: as many on every machine as on one.
            max_at_once *= max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
        remote = ray.remote(max_retries=DEATHS, scheduling_strategy="SPREAD")(_ray_task)
        arguments = ray.put((function, shared, files))
        waiting = deque(numbers)
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and (max_at_once is None or len(running) < max_at_once):
                    number = waiting.popleft()
                    running[remote.remote(arguments, number)] = number
                done, _ = ray.wait(list(running), num_returns=1)
                (reference,) = done
                number = running.pop(reference)
                result, size, tokens = _get(ray, reference)
                progress(size, tokens)
                yield number, result
        finally:
            # On a cluster that was there before they would go on.
            for reference in running:
                ray.cancel(reference, force=True)


@contextmanager
def _connected() -> Iterator[Any]:
    """Ray, joined or started; what was joined before is left as it is. Raises ConfigError."""
    try:
        import ray
    except ImportError:
        raise ConfigError("the ray engine needs Ray: pip install 'streammega[ray]'") from None
    is_joined_here = not ray.is_initialized()
    if is_joined_here:
        ray.init(
            address=os.environ.get("RAY_ADDRESS"),
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False,
        )
    try:
        yield ray
    finally:
        if is_joined_here:
            ray.shutdown()


def _get(ray: Any, reference: Any) -> Any:
    """What a task returned. Raises what it raised, ConvertError if its workers were killed."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, StreammegaError):
            raise error.cause from None
        raise ConvertError(str(error.cause)) from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        raise ConvertError(
            f"workers of the cluster were killed again and again ({type(error).__name__}); see "
            f"Ray's own logs, use less --memory"
        ) from None


def _ray_task(arguments: tuple[Task, Any, SharedFiles | None], number: int) -> tuple[Any, int, int]:
    """(result, bytes, tokens) of a task, on a machine of the cluster."""
    function, shared, files = arguments
    if files is not None and files.marker not in _checked:
        files.check()
        _checked.add(files.marker)
    bytes_done = 0
    tokens_done = 0

    def count(size: int, tokens: int) -> None:
        """Add to what this task has done."""
        nonlocal bytes_done, tokens_done
        bytes_done += size
        tokens_done += tokens

    # Ray gives a task one core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    result = function(shared, number, count)
    return result, bytes_done, tokens_done
