"""A run of real ranks that takes in what is appended while it is killed and resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from streammega.cli.main import app
from streammega.dataset.append import append
from streammega.samples.auto_append import recorded
from streammega.train.config import load_run
from streammega.train.run_log import read_metrics
from streammega.train.trainer import Trainer
from tests.support.builders import put_dataset, write_run_file
from tests.support.run_hashes import loader_hashes
from tests.train.test_train import train_on


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    web = put_dataset(f"{tmp_path}/web", seed=0)
    append(web, [put_dataset(f"{tmp_path}/web-a", seed=1)])
    code = put_dataset(f"{tmp_path}/code", seed=2)
    data: dict[str, Any] = {
        "blend": [f"{web}@1", code],
        "split": "1,0,0",
        "order": "stream",
        "shuffle_lanes": 8,
        "shuffle_block_bytes": 256,
    }
    return write_run_file(
        tmp_path,
        data=data,
        **{"data.follow": {"check_every_samples": 20}},
        model={"vocab_size": 60_000, "dim": 8},
        train={"train_iters": 14, "save_interval": 6, "log_interval": 4},
    )


@pytest.mark.guarantee("datasets-grow-under", "ranks-killed-between")
def test_ranks_that_are_killed_repeat_what_they_took_in(run_file: str, tmp_path: Path) -> None:
    """Two ranks, SIGKILL before their first checkpoint, one rank, SIGKILL, two ranks to the end; a
    producer appends in between.
    """
    web = f"{tmp_path}/web"
    for name, ranks, kill_at in (("b", 2, 5), ("c", 1, 9), ("d", 2, None)):
        append(web, [put_dataset(f"{web}-{name}", seed=ord(name))])
        train_on(run_file, ranks, kill_at, {})
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    config = load_run(run_file)
    data = recorded(config.data)
    blends = [phase.blend for phase in data.phases]
    firsts = [phase.first_sample for phase in data.phases]
    assert firsts[0] == 24, "at the end of the step that holds sample 20"
    assert blends[0] == [f"{web}@1", f"{tmp_path}/code", f"{web}@1..2"], "as it was chosen first"
    joined = [name for blend in blends for name in blend or ()]
    assert f"{web}@2..3" in joined
    by_hand = replace(config, data=replace(data, follow=None))
    expected = loader_hashes(by_hand)
    assert {record["step"] for record in records} == set(range(1, 15))
    for record in records:
        assert record["batch_hash"] == expected[record["step"] - 1], record
    assert set(records[-1]["source_loss"]) == {"web@1", "code"}, "what joined is of its source"
    # not what a killed rank had under way
    written = sorted((tmp_path / "run" / "follow").glob("*.json"))
    assert json.loads(written[1].read_text())["segments"][0]["datasets"][-1] == f"{web}@1..2"


@pytest.mark.guarantee("ranks-killed-between")
def test_a_run_says_what_it_takes_in(
    run_file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    web = f"{tmp_path}/web"
    append(web, [put_dataset(f"{web}-b", seed=3)])
    caplog.set_level("INFO", "streammega")  # tests of commands may have set it
    Trainer(load_run(run_file, ["train.train_iters=6"]), torch.device("cpu")).run()
    assert f"from sample 24 on: {web}@1..2 joined" in caplog.text
    described = CliRunner().invoke(app, ["describe", run_file, "--last-step", "6", "--json"])
    phases = json.loads(described.output)["phases"]
    assert [phase["first_sample"] for phase in phases] == [0, 24]
    datasets = [dataset["dataset"] for dataset in phases[1]["datasets"]]
    assert datasets == [f"{web}@1", f"{tmp_path}/code", f"{web}@1..2"]
    traced = CliRunner().invoke(app, ["trace", run_file, "--step", "6"])
    assert traced.exit_code == 0
    assert f"{web}@1..2" in traced.output
