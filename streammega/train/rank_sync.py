"""Functions that all ranks run at once, each at its own pace. No rank waits for one that has failed,
and none goes on alone.
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
"""Seconds between two polls: what is done within milliseconds is not waited for, an upload of
minutes costs few messages, and a failure is known everywhere within this time.
"""


class RankSync:
    """Calls of a function on every rank of a group that return on all of them, or raise one error
    on all of them: that of the first rank that has one.

    group: with a backend for the CPU; None: a rank by itself.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self._is_cancelled = threading.Event()
        """Of the function that runs now: it has failed on another rank."""
        self._unfinished: _Call | None = None
        """A function that has not ended on this rank though it has failed on another one."""

    def run(self, function: Callable[[], Result]) -> Result:
        """`function()` on every rank, in this thread: for what is quick."""
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
        """`function()` on every rank, however long it takes. An error is known on all within about a
        second.

        A collective alone would make ranks wait for one that failed, and fail where another is merely
        slow. So the function runs in a thread. Ranks poll each other, with the group's timeout.
        """
        if self.group is None:
            return function()
        unfinished = self._unfinished
        is_cancelled = threading.Event()

        def begin() -> Result:
            # A rank that still reads a checkpoint which another one found damaged would write over
            # what is loaded instead.
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
            # In this order: an error is looked for only after it can be there.
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
        """`function()` on the first rank alone, by `run_long`; its result on all ranks."""
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
    """A function that runs in a thread of its own."""

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
            # It holds the call before it, and that one's result.
            del self._function


def _portable(error: BaseException | None) -> BaseException | None:
    """An error that can be sent: a StreammegaError as it is, any other as a StorageError of its text."""
    if error is None or isinstance(error, StreammegaError):
        return error
    if isinstance(error, OSError):
        place = error.filename or "storage"
        return StorageError(f"{place}: {error.strerror or error}")
    return StorageError(f"{type(error).__name__}: {error}")
