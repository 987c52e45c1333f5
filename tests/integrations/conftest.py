"""The data of the tests that run other people's trainers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streammega import DataConfig, StorageConfig
from tests.support.builders import write_random_pair
from tests.support.trainer_programs import EOD, GLOBAL_BATCH, STEPS, VOCABULARY


@pytest.fixture
def endless(tmp_path: Path) -> DataConfig:
    """A stream without an end."""
    write_random_pair(str(tmp_path / "pair"), vocab=VOCABULARY)
    return DataConfig(
        blend=[str(tmp_path / "pair")],
        sequence_length=16,
        order="stream",
        split="80,20,0",
        eod_id=EOD,
        storage=StorageConfig(cache_dir=tmp_path / "cache"),
    )


@pytest.fixture
def sized(endless: DataConfig) -> DataConfig:
    """A pass of STEPS global batches, and two of validation."""
    return replace(endless, num_samples=(GLOBAL_BATCH * STEPS, 16, 0))
