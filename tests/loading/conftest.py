"""Fixtures of the tests of loaders."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def workers_end_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test left of DataLoaders is collected here, and not in the middle of a later one."""
    # s that torch waits for a worker of a loader that was left, and then ends it
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    yield
    gc.collect()
