"""Fixtures of the tests of loaders."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from tests.support.pinned_blocks import PinnedBlocks


@pytest.fixture
def workers_end_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test left of DataLoaders is collected here, and not in the middle of a later one."""
    # s that torch waits for a worker of a loader that was left, and then ends it
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[PinnedBlocks]:
    """This process believes that it has CUDA, as far as host memory goes."""
    blocks = PinnedBlocks()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(torch, "empty", blocks.allocate)
        yield blocks
