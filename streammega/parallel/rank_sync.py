"""Functions that all ranks run at the same time, each at its own pace. If one fails, all raise: no rank
waits for it, and none goes on alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from streammega.errors import StorageError, StreammegaError

Result = TypeVar("Result")
MIN_PAUSE = 0.005
MAX_PAUSE = 1.0
"""Seconds between two polls, from MIN_PAUSE on: quick functions wait for little, an upload of minutes
sends few messages, and all ranks know a failure within MAX_PAUSE.
"""


class RankSync:
    """Calls a function on every rank of a group. The call returns on all of them, or raises the error
    of the first rank that has one on all of them.

    group: with a backend for the CPU; None: a single rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self._is_cancelled = threading.Event()
        """Set when the function that runs now has failed on another rank."""
        self._unfinished: _Call | None = None
        """A call that still runs on this rank, after it has failed on another one."""

    def run(self, function: Callable[[], Result]) -> Result:
        """`function()` on every rank, in this thread. For quick functions."""
        if self.group is None:
            return function()
        result: Any = None
        error: Exception | None = None
        try:
            result = function()
        except Exception as raised:
            error = raised
        self._raise_first(error)
        return result  # type: ignore[no-any-return]

    def run_long(self, function: Callable[[], Result]) -> Result:
        """`function()` on every rank, however long it takes. All ranks know an error within about a
        second.

        With a collective alone, ranks would wait for one that has failed, and fail where one is just
        slow. So the function runs in a thread, and ranks poll each other.
        """
        if self.group is None:
            return function()
        unfinished = self._unfinished
        is_cancelled = threading.Event()

        def begin() -> Result:
            # A rank may still read a checkpoint that another one found damaged. It must not write
            # over what is loaded next.
            if unfinished is not None:
                unfinished.join()
            # Until then the unfinished call looks at its own event.
            self._is_cancelled = is_cancelled
            return function()

        call = _Call(begin)
        pause = MIN_PAUSE
        while True:
            call.join(pause)
            pause = min(2 * pause, MAX_PAUSE)
            # In this order: `error` is set before the thread ends.
            is_done = not call.is_alive()
            has_failed = is_done and call.error is not None
            counts = torch.tensor([int(not is_done), int(has_failed)])
            dist.all_reduce(counts, group=self.group)
            num_running, num_failed = counts.tolist()
            if num_failed:
                is_cancelled.set()
            if num_failed or not num_running:
                break
        self._unfinished = None if is_done else call
        self._raise_first(call.error if is_done else None)
        return call.result  # type: ignore[no-any-return]

    def run_on_first(self, function: Callable[[], Result]) -> Result:
        """Run `function()` on the first rank, by `run_long`; all ranks return its result."""
        result = self.run_long(function if self.rank == 0 else lambda: None)
        if self.group is None:
            return result  # type: ignore[return-value]
        results = [result]
        first = dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(results, src=first, group=self.group)
        return results[0]  # type: ignore[return-value]

    def check(self) -> None:
        """Raise StorageError if the function that runs has failed on another rank."""
        if self._is_cancelled.is_set():
            raise StorageError("it failed on another rank")

    def _raise_first(self, error: BaseException | None) -> None:
        """Raise the error of the first rank that has one, on all ranks."""
        errors: list[BaseException | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(errors, _portable(error), group=self.group)
        for rank, error_of_rank in enumerate(errors):
            if error_of_rank is None:
                continue
            if error is not None and rank == self.rank:
                raise error
            error_of_rank.args = (f"rank {rank}: {error_of_rank}", *error_of_rank.args[1:])
            raise error_of_rank


class _Call(threading.Thread):
    """A function in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="streammega-rank-sync", daemon=True)
        self._function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        finally:
            # It refers to the call before it, and so to its result.
            del self._function


def _portable(error: BaseException | None) -> BaseException | None:
    """An error that can be sent to other ranks: any but a StreammegaError becomes a StorageError."""
    if error is None or isinstance(error, StreammegaError):
        return error
    if isinstance(error, OSError):
        place = error.filename or "storage"
        return StorageError(f"{place}: {error.strerror or error}")
    return StorageError(f"{type(error).__name__}: {error}")
