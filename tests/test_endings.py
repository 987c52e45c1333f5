"""How runs end that are told to: SIGTERM, Ctrl-C, errors. One line, the right code, nothing lost, nobody left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from streammega.errors import GradientError
from streammega.train.__main__ import main as train_main
from streammega.train.checkpoint import checkpoints
from streammega.train.loop import Trainer
from streammega.train.metrics import read_metrics
from tests.test_train import TOML

PROGRAM = {"command": ["-m", "streammega", "train"], "module": ["-m", "streammega.train"]}


@pytest.fixture
def run_file(tmp_path: Path, pair: str) -> Path:
    path = tmp_path / "run.toml"
    text = TOML.format(prefix=pair, folder=tmp_path).replace("iters = 16", "iters = 100000")
    path.write_text(text.replace("save_interval = 2", "save_interval = 100000").replace("eval_interval = 8", "eval_interval = 0"))
    return path


def launch(run_file: Path, *program: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, *program, str(run_file), "data.order=stream"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics, deadline = run_file.parent / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and len(read_metrics(metrics)) > 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("program", PROGRAM)
def test_sigterm_saves_and_ends_with_143_and_one_line(run_file: Path, program: str) -> None:
    process = launch(run_file, *PROGRAM[program])
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 143, log
    steps = len(read_metrics(run_file.parent / "run" / "metrics.jsonl"))
    assert f"[0] stopped by SIGTERM after step {steps}, which is saved" in log
    assert "Traceback" not in log
    assert [path.name for path in checkpoints(run_file.parent / "run" / "checkpoints")] == [f"step-{steps:08d}"]


@pytest.mark.parametrize("program", PROGRAM)
def test_ctrl_c_ends_with_130_and_one_line(run_file: Path, program: str) -> None:
    process = launch(run_file, *PROGRAM[program])
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 130, log
    assert re.search(
        rf"\[0\] interrupted in step \d+; the same command goes on from the last checkpoint in {run_file.parent}/run\n\Z", log
    )
    assert "Traceback" not in log


def test_ctrl_c_to_torchrun_ends_every_rank_with_one_line(run_file: Path) -> None:
    """torchrun says so itself, with a traceback of its own."""
    process = launch(run_file, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "streammega.train")
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=60)
    assert process.returncode != 0
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive, "no rank outlives torchrun"
    assert re.search(r"\[0\] interrupted in step \d+; the same command goes on", log), log[-3000:]
    assert not re.search(r'File ".*/streammega/', log), log[-3000:]


def test_what_tensorboard_kept_back_is_written_when_a_run_ends_by_an_error(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    step = Trainer.train_step

    def faulty(self: Trainer) -> object:
        if self.step == 5:
            raise GradientError("rank 0: the gradient of embedding.weight is not finite")
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", faulty)
    assert train_main([str(run_file), "data.order=stream", "train.tensorboard=true"]) == 1
    [events] = (run_file.parent / "run" / "tensorboard").glob("events*")
    assert {event.step for event in EventFileLoader(str(events)).Load() if event.HasField("summary")} == {1, 2, 3, 4, 5}
