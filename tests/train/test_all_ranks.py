"""Work that all ranks do at once ends alike on all of them, and leaves nothing behind that goes on."""

from __future__ import annotations

import time

import pytest

from streammega.errors import StorageError
from streammega.train.all_ranks import AllRanks
from tests.support.gang import Gang


@pytest.mark.guarantee("damaged-checkpoint-bit")
def test_what_failed_elsewhere_has_ended_before_the_next_work_begins(gang: Gang) -> None:
    """Else a rank that still reads a checkpoint which another rank found damaged would write over
    the one that is loaded instead.
    """
    for events in gang.run(2, fail_on_rank_0_then_work):
        assert events.index("the first has ended") < events.index("the second")


def test_work_that_never_ends_is_not_waited_for_longer_than_the_patience(gang: Gang) -> None:
    messages = gang.run(2, hang_on_rank_1_then_work)
    assert all("nothing was read or written for 1 s" in message for message in messages)


def fail_on_rank_0_then_work(rank: int) -> list[str]:
    """What happened on a rank, in order."""
    import torch.distributed as dist

    all_ranks = AllRanks(dist.group.WORLD, patience=60.0)
    events: list[str] = []

    def first() -> None:
        try:
            if rank == 0:
                raise StorageError("damaged")
            for _ in range(3):  # a read of seconds, of which each part may take a while
                time.sleep(0.7)
                all_ranks.progress()
        finally:
            events.append("the first has ended")

    try:
        all_ranks.work(first)
    except StorageError:
        events.append("raised")
    all_ranks.work(lambda: events.append("the second"))
    time.sleep(1.0)
    return events


def hang_on_rank_1_then_work(rank: int) -> str:
    """What the second work raises."""
    import torch.distributed as dist

    all_ranks = AllRanks(dist.group.WORLD, patience=1.0)

    def first() -> None:
        if rank == 0:
            raise StorageError("damaged")
        time.sleep(30.0)

    try:
        all_ranks.work(first)
    except StorageError:
        pass
    try:
        all_ranks.work(lambda: None)
    except StorageError as error:
        return str(error)
    return ""
