"""What all ranks do at once, each at its own pace: none waits for one that has failed, and none
goes on alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from streammega.errors import StorageError, StreammegaError

Result = TypeVar("Result")
FIRST_PAUSE = 0.005
LONGEST_PAUSE = 1.0
"""Seconds between two meetings of ranks: what is done within milliseconds is not waited for, an
upload of minutes costs few messages, and a failure is known everywhere within this time.
"""


class Together:
    """Calls of a function on every rank of a group that return on all of them, or raise one error
    on all of them.

    A collective by itself would make ranks wait for one that failed, and fail them when another is
    merely slow. So the function runs in a thread, and the ranks meet now and then to say whether
    they are done: each meeting has the timeout of the group, the work has none but `patience`.

    Args:
        group: with a backend for the CPU; None: a rank by itself.
        patience: seconds for which `work` may go on while no rank calls `progress`.
    """

    def __init__(self, group: dist.ProcessGroup | None, patience: float) -> None:
        self.group = group
        self._patience = patience
        self.rank = dist.get_rank(group) if group is not None else 0
        self._progress = 0
        self._unwanted = threading.Event()

    def progress(self) -> None:
        """Say that the work goes on.

        Raises StorageError if it is not wanted any more, since it has failed on another rank.
        """
        self._progress += 1
        if self._unwanted.is_set():
            raise StorageError("it failed on another rank")

    def work(self, function: Callable[[], Result], *, watched: bool = False) -> Result:
        """`function()` on every rank, however long it takes; `watched`: as long as it calls
        `progress`.

        Raises the error of the first rank that has one, on all ranks, within about a second.
        """
        if self.group is None:
            return function()
        self._unwanted = threading.Event()
        call = _Call(function)
        since = time.monotonic()
        last = -1
        pause = FIRST_PAUSE
        while True:
            call.join(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            done = not call.is_alive()  # first: an error is looked for only after it can be there
            failed = done and call.error is not None
            tired = watched and time.monotonic() - since > self._patience
            state = torch.tensor([int(not done), int(failed), int(tired), self._progress])
            dist.all_reduce(state, group=self.group)
            at_work, failures, impatient, progress = state.tolist()
            if failures or impatient or not at_work:
                break
            if progress != last:
                since = time.monotonic()
                last = progress
        if failures or impatient:
            self._unwanted.set()
        if impatient and not failures:  # known to all ranks by the same message
            raise StorageError(
                f"nothing was read or written for {self._patience:.0f} s (train.timeout)"
            )
        result: Result = self._settle(call.error if done else None, call.result)
        return result

    def call(self, function: Callable[[], Result]) -> Result:
        """`function()` on every rank, in this thread: for what is quick.

        Raises the error of the first rank that has one.
        """
        error: BaseException | None = None
        result: Any = None
        try:
            result = function()
        except Exception as raised:
            if self.group is None:
                raise
            error = raised
        settled: Result = self._settle(error, result)
        return settled

    def from_first(self, function: Callable[[], Result]) -> Result:
        """`function()` on the first rank alone, by `work`; its result on all ranks."""
        mine = self.work(function if self.rank == 0 else lambda: None)
        if self.group is None:
            return mine  # type: ignore[return-value]
        box = [mine]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
        return box[0]  # type: ignore[return-value]

    def _settle(self, error: BaseException | None, result: Result) -> Result:
        if self.group is None:
            return result
        errors: list[BaseException | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(errors, _portable(error), group=self.group)
        first = next((rank for rank, found in enumerate(errors) if found is not None), None)
        if first is None:
            return result
        if error is not None and first == self.rank:
            raise error
        raise _told_elsewhere(first, errors[first])  # type: ignore[arg-type]


class _Call(threading.Thread):
    """A function that runs in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="streammega-together", daemon=True)
        self._function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Keep the function's result or error."""
        try:
            self.result = self._function()
        except (
            BaseException
        ) as error:  # of a thread: `work` raises it where it was called, on every rank
            self.error = error


def _portable(error: BaseException | None) -> BaseException | None:
    """An error that can be sent: ours as they are, those of the system in words."""
    if error is None or isinstance(error, StreammegaError):
        return error
    if isinstance(error, OSError):
        return StorageError(f"{error.filename or 'storage'}: {error.strerror or error}")
    return StorageError(f"{type(error).__name__}: {error}")


def _told_elsewhere(rank: int, error: BaseException) -> BaseException:
    """The error of another rank, saying of which."""
    error.args = (f"rank {rank}: {error}", *error.args[1:])
    return error
