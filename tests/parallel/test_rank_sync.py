"""Work that all ranks do at once ends alike on all of them, and leaves nothing behind that goes on."""

from __future__ import annotations

import time

import pytest

from streammega.errors import StorageError
from streammega.parallel.rank_sync import RankSync
from tests.support.gang import Gang


@pytest.mark.guarantee("damaged-checkpoint-bit")
def test_what_failed_elsewhere_has_ended_before_the_next_work_begins(gang: Gang) -> None:
    """Else a rank that still reads a checkpoint which another rank found damaged would write over
    the one that is loaded instead.
    """
    for events in gang.run(2, fail_on_rank_0_then_work):
        assert events.index("the first has ended") < events.index("the second")


def fail_on_rank_0_then_work(rank: int) -> list[str]:
    """What happened on a rank, in order."""
    import torch.distributed as dist

    rank_sync = RankSync(dist.group.WORLD)
    events: list[str] = []

    def first() -> None:
        try:
            if rank == 0:
                raise StorageError("damaged")
            for _ in range(3):  # a read of seconds, of which each part may take a while
                time.sleep(0.7)
                rank_sync.check()
        finally:
            events.append("the first has ended")

    try:
        rank_sync.run_long(first)
    except StorageError:
        events.append("raised")
    rank_sync.run_long(lambda: events.append("the second"))
    time.sleep(1.0)
    return events
