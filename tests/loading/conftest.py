"""Fixtures of the tests of loaders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from tests.support.pinned_blocks import PinnedBlocks


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
