"""Data that all ranks open together: one rank asks the servers, and the others have its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from streammega.parallel.groups import has_cpu_backend
from streammega.parallel.rank_sync import RankSync
from streammega.storage.answers import Answers

Opened = TypeVar("Opened")


def open_together(
    open_data: Callable[[], Opened], group: dist.ProcessGroup | None = None
) -> Opened:
    """What `open_data` opens, on every rank of a group at the same place of their programs.

    The first rank opens first. What servers answered it is sent to the other ranks, which open with it
    and send no request. So a job of any size asks as often as one rank. All ranks see the same versions
    of the data. Anything that opens remote data fits: a StreamLoader, StreamingDataset, IndexedDataset.

    Args:
        open_data: called once on every rank. In the first rank it runs in a thread. It calls no
            collectives, and so neither `open_loader` nor this function.
        group: None: all ranks of torch.distributed. A group with NCCL alone, and a single process, open
            without it.

    Raises what `open_data` raises; an error of the first rank on all of them.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None or dist.get_world_size(group) == 1 or not has_cpu_backend(group):
        return open_data()
    sync = RankSync(group)
    opened: list[Opened] = []

    def open_first() -> bytes:
        answers = Answers()
        with answers.shared():
            opened.append(open_data())
        return answers.to_bytes()

    answers_of_first = sync.run_on_first(open_first)
    if opened:
        return opened[0]
    with Answers.from_bytes(answers_of_first).shared():
        return open_data()
