"""Whether the trainer computes deterministically is a setting; and nothing is computed that it does not
use.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streammega.train.config import load_run
from streammega.train.devices import set_numerics
from streammega.train.trainer import Trainer
from tests.support.builders import write_small_run

CPU = torch.device("cpu")


@pytest.fixture
def run_file(tmp_path: Path, pair: str) -> str:
    return write_small_run(tmp_path, pair)


@pytest.fixture
def _switches_as_before() -> Iterator[None]:
    """torch's own switches belong to the process: give them back."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    switches: Any = torch.utils.deterministic
    fill = switches.fill_uninitialized_memory
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(deterministic)
    switches.fill_uninitialized_memory = fill
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if workspace is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace


@pytest.mark.guarantee("train-deterministic")
@pytest.mark.usefixtures("_switches_as_before")
def test_determinism_is_what_the_setting_says(
    run_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_numerics(load_run(run_file).train)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    set_numerics(load_run(run_file, ["train.deterministic=true"]).train)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.guarantee("train-deterministic")
@pytest.mark.usefixtures("_switches_as_before")
def test_a_caller_who_chose_determinism_keeps_it(
    run_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True)
    set_numerics(load_run(run_file).train)
    assert torch.are_deterministic_algorithms_enabled()
    set_numerics(load_run(run_file, ["train.deterministic=true"]).train)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.usefixtures("_switches_as_before")
def test_a_deterministic_run_trains_as_another(run_file: str, tmp_path: Path) -> None:
    records = []
    for settings in ([], ["train.deterministic=true"]):
        trainer = Trainer(
            load_run(run_file, [*settings, f"train.out_dir={tmp_path / str(len(settings))}"]), CPU
        )
        records.append([trainer.train_step()[0]["loss"] for _ in range(3)])
        trainer.close()
    assert torch.are_deterministic_algorithms_enabled()
    assert records[0] == records[1]


@pytest.mark.guarantee("trainer-makes-attention")
def test_fields_that_the_trainer_does_not_use_are_not_made(run_file: str) -> None:
    trainer = Trainer(load_run(run_file, ['data.fields=["default", "attention_mask"]']), CPU)
    batch = next(trainer.batches)
    trainer.close()
    assert set(batch) == {"tokens", "labels", "loss_mask"}
