"""What all ranks do at once, each at its own pace: none waits for one that has failed, and none
goes on alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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


class AllRanks:
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
        """Of the function that runs now: set where it has failed on another rank."""
        self._left_over: _Call | None = None
        """A function that has not ended on this rank though it has failed on another one."""

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
        unwanted = threading.Event()
        call = _Call(self._after_left_over(function, unwanted))
        done, meeting = self._wait_for_all(call, watched=watched)
        if meeting.failed or meeting.impatient:
            unwanted.set()
        self._left_over = None if done else call
        if meeting.impatient and not meeting.failed:
            # Known to all ranks by the same message: nothing has to be told.
            raise self._tired()
        error = call.error if done else None
        result: Result = self._settle(error, call.result)
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
        result_of_first = [mine]
        first = dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(result_of_first, src=first, group=self.group)
        return result_of_first[0]  # type: ignore[return-value]

    def _after_left_over(
        self, function: Callable[[], Result], unwanted: threading.Event
    ) -> Callable[[], Result]:
        """`function`, once what an earlier failure left behind on this rank has ended.

        Otherwise both would run: a rank that still reads a checkpoint which another one found
        damaged would write over what is loaded instead.
        """
        left_over = self._left_over

        def begin() -> Result:
            """The function, once what is left over of a former call has ended."""
            if left_over is not None:
                left_over.join(self._patience)
                if left_over.is_alive():
                    raise self._tired()
            # Not before: until then what is left over looks at the event of its own call.
            self._unwanted = unwanted
            return function()

        return begin

    def _tired(self) -> StorageError:
        return StorageError(
            f"nothing was read or written for {self._patience:.0f} s (train.timeout)"
        )

    def _wait_for_all(self, call: _Call, *, watched: bool) -> tuple[bool, _Meeting]:
        """Meet until all are done, or one has failed or lost patience.

        Whether this rank was done by then, and what the last meeting found.
        """
        last_progress: int | None = None
        moved_at = time.monotonic()
        pause = FIRST_PAUSE
        while True:
            call.join(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            # In this order: an error is looked for only after it can be there.
            done = not call.is_alive()
            failed = done and call.error is not None
            impatient = watched and time.monotonic() - moved_at > self._patience
            meeting = self._meet(done=done, failed=failed, impatient=impatient)
            if meeting.failed or meeting.impatient or not meeting.at_work:
                return done, meeting
            if meeting.progress != last_progress:
                last_progress = meeting.progress
                moved_at = time.monotonic()

    def _meet(self, *, done: bool, failed: bool, impatient: bool) -> _Meeting:
        counts = torch.tensor([int(not done), int(failed), int(impatient), self._progress])
        dist.all_reduce(counts, group=self.group)
        return _Meeting(*counts.tolist())

    def _settle(self, error: BaseException | None, result: Result) -> Result:
        """This rank's result, or on all ranks the error of the first that has one."""
        if self.group is None:
            return result
        errors: list[BaseException | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(errors, _portable(error), group=self.group)
        for rank, error_of_rank in enumerate(errors):
            if error_of_rank is None:
                continue
            if error is not None and rank == self.rank:
                raise error
            raise _told_elsewhere(rank, error_of_rank)
        return result


@dataclass(frozen=True)
class _Meeting:
    """How many ranks are at work, have failed, and have lost patience; and the progress of all."""

    at_work: int
    failed: int
    impatient: int
    progress: int


class _Call(threading.Thread):
    """A function that runs in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="streammega-all-ranks", daemon=True)
        self._function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Keep the function's result or error."""
        try:
            self.result = self._function()
        except BaseException as error:
            # Of a thread: `work` raises it where it was called, on every rank.
            self.error = error
        finally:
            # It holds the call before it, and that one's result.
            del self._function


def _portable(error: BaseException | None) -> BaseException | None:
    """An error that can be sent: ours as they are, those of the system in words."""
    if error is None or isinstance(error, StreammegaError):
        return error
    if isinstance(error, OSError):
        place = error.filename or "storage"
        return StorageError(f"{place}: {error.strerror or error}")
    return StorageError(f"{type(error).__name__}: {error}")


def _told_elsewhere(rank: int, error: BaseException) -> BaseException:
    """The error of another rank, saying of which."""
    error.args = (f"rank {rank}: {error}", *error.args[1:])
    return error
