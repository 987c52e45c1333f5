"""What tests of the trainer share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """A sharded run of one rank in this process makes a group of its own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
