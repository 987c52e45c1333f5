"""How runs end that are told to: SIGTERM, Ctrl-C, errors.

One line, the right code, nothing lost, nobody left.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import streammega
from streammega.cli.main import main as command_line
from streammega.train.run_log import read_metrics
from streammega.train.signals import ONE_REQUEST
from streammega.train.trainer import Trainer
from tests.support import elastic, faulty_train
from tests.support.builders import write_small_run
from tests.support.checkpoint_programs import checkpoint_records
from tests.support.processes import Family, launch, python_environment

PACKAGE = Path(streammega.__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
FAULTY = str(Path(__file__).parents[1] / "support" / "faulty_train.py")
PROGRAM = {"command": ["-m", "streammega", "train"], "module": ["-m", "streammega.train"]}


@pytest.fixture
def run_file(tmp_path: Path, pair: str) -> Path:
    endless = {"train_iters": 100_000, "save_interval": 100_000, "eval_interval": 0}
    return Path(write_small_run(tmp_path, pair, **endless))


LAUNCHERS = pytest.mark.parametrize(
    "launcher", ["agent", pytest.param("torchrun", marks=pytest.mark.soak)]
)
"""agent: that of torchrun in a fork, whose ranks are forks too. torchrun: a fork, whose ranks are
interpreters of their own, which import torch for seconds.
"""


def start_torchrun(run_file: Path, launcher: str, fault: str = "") -> Family:
    """A run on two ranks that has trained some steps, or has come to its fault."""
    if launcher == "torchrun":
        program = [FAULTY] if fault else PROGRAM["module"]
        return start_fork(run_file, *TORCHRUN, *program, fault=fault)
    arguments = [str(run_file), "data.order=stream"]
    job = 2, faulty_train.run, arguments, {"FAULT": fault}
    family = elastic.launch_agent(run_file.parent, *job)
    wait_for_steps(run_file, lambda: family.ended(0, within=0)[0], fault)
    return family


def start_fork(run_file: Path, *program: str, fault: str = "") -> Family:
    """A run in a fork that has trained some steps; with `fault` (see faulty_train.py), one that has
    come to it.
    """
    surroundings = {"FAULT": fault, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*program, str(run_file), "data.order=stream"]
    family = launch(run_file.parent, 1, command, surroundings)
    wait_for_steps(run_file, lambda: family.ended(0, within=0)[0], fault)
    return family


def wait_for_steps(run_file: Path, code: Callable[[], int | None], fault: str) -> None:
    metrics = run_file.parent / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (
        run_file.with_suffix(".fault").exists()
        if fault
        else metrics.exists() and len(read_metrics(metrics)) > 3
    ):
        assert code() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def saved_steps(run_file: Path) -> list[str]:
    return [path.stem for path in checkpoint_records(run_file.parent / "run" / "checkpoints")]


@pytest.mark.guarantee("sigterm-ctrl-c")
@pytest.mark.parametrize("program", PROGRAM)
def test_sigterm_saves_and_ends_with_143_and_one_line(run_file: Path, program: str) -> None:
    family = start_fork(run_file, *PROGRAM[program])
    family.signal(signal.SIGTERM, 0)
    codes = family.ended(0, within=60)
    log = family.log(0)
    assert codes == [143], log
    steps = len(read_metrics(run_file.parent / "run" / "metrics.jsonl"))
    assert f"[0] stopped by SIGTERM after step {steps}, which is saved" in log
    assert "Traceback" not in log
    assert [path.stem for path in checkpoint_records(run_file.parent / "run" / "checkpoints")] == [
        f"step-{steps:08d}"
    ]


@pytest.mark.guarantee("sigterm-ctrl-c")
@pytest.mark.parametrize("program", PROGRAM)
def test_ctrl_c_saves_and_says_how_to_go_on(run_file: Path, program: str) -> None:
    family = start_fork(run_file, *PROGRAM[program])
    family.signal(signal.SIGINT, 0)
    assert family.ended(0, within=60) == [130], family.log(0)
    log = family.log(0)
    steps = len(read_metrics(run_file.parent / "run" / "metrics.jsonl"))
    assert "Ctrl-C: ends after the step under way, with a checkpoint; once more: at once\n" in log
    assert log.endswith(
        f"[0] interrupted after step {steps}, which is saved in {run_file.parent}/run; the same command goes on from there\n"
    ), log
    assert "Traceback" not in log
    assert saved_steps(run_file) == [f"step-{steps:08d}"]


@pytest.mark.guarantee("sigterm-ctrl-c")
def test_a_second_ctrl_c_ends_at_once_with_one_line(run_file: Path) -> None:
    """The step under way does not end: its data do not come."""
    family = start_fork(run_file, FAULTY, fault="0:5:hang")
    family.signal(signal.SIGINT, 0)
    time.sleep(ONE_REQUEST / 2)
    family.signal(signal.SIGINT, 0)  # the same once more, from a launcher
    time.sleep(ONE_REQUEST)
    assert family.ended(0, within=0) == [None]
    family.signal(signal.SIGINT, 0)
    codes = family.ended(0, within=60)  # the data never come
    log = family.log(0)
    assert codes == [130], log
    assert log.endswith(
        f"[0] interrupted in step 5; the same command goes on from the last checkpoint in "
        f"{run_file.parent}/run, if there is one\n"
    ), log
    assert "Traceback" not in log


@pytest.mark.guarantee("sigterm-ctrl-c")
@pytest.mark.parametrize("waits", ["full", "log"])
def test_a_second_sigterm_ends_a_run_that_waits_for_space(run_file: Path, waits: str) -> None:
    """full: its save waits. log: its line in metrics.jsonl does."""
    family = start_fork(run_file, FAULTY, fault=f"0:5:{waits}")
    family.signal(signal.SIGTERM, 0)
    time.sleep(2 * ONE_REQUEST)
    assert family.ended(0, within=0) == [None]
    family.signal(signal.SIGTERM, 0)
    codes = family.ended(0, within=20)
    log = family.log(0)
    assert codes == [143], log
    assert log.endswith(
        f"the same command goes on from the last checkpoint in {run_file.parent}/run, if there is one\n"
    ), log
    assert "[0] stopped by SIGTERM in step " in log
    assert "Traceback" not in log
    assert saved_steps(run_file) == []


def test_ctrl_c_while_the_program_imports_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, *PROGRAM["module"], "run.toml"],
        cwd=tmp_path,  # the first place of imports
        capture_output=True,
        text=True,
        env=python_environment(),
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "[0] interrupted\n")


@pytest.mark.guarantee("sigterm-ctrl-c")
def test_ctrl_c_before_the_first_step_ends_at_once_with_one_line(run_file: Path) -> None:
    """The endpoint takes the connection, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        options = f'data.storage.storage_options={{endpoint_url="{endpoint}", anon=true}}'
        command = [*PROGRAM["command"], str(run_file), 'data.blend="s3://bucket/web"', options]
        family = launch(run_file.parent, 1, command)
        listener.settimeout(60)
        connection, _ = listener.accept()
        with connection:
            family.signal(signal.SIGINT, 0)
            began = time.monotonic()
            codes = family.ended(0, within=60)
    assert time.monotonic() - began < 25, "an endpoint is given up after 30 seconds"
    log = family.log(0)
    assert codes == [130], log
    assert re.search(
        r"\[0\] interrupted in step 0; the same command goes on from the last checkpoint in \S+, if there is one\n\Z",
        log,
    ), log
    assert "Traceback" not in log


def ranks_of(torchrun: Family, run_file: Path) -> list[psutil.Process]:
    """The processes that a torchrun has started; those of an agent are children of the server of
    forks.
    """
    ranks: list[psutil.Process] = psutil.Process(torchrun.members[0].pid).children(recursive=True)
    return ranks + [psutil.Process(pid) for pid in elastic.pids_of_ranks(run_file.parent)]


def check_that_torchrun_ends(torchrun: Family, ranks: list[psutil.Process], within: float) -> str:
    """Soon, with an error, and none of its ranks outlives it; returns the log of all."""
    codes = torchrun.ended(0, within=within)
    log = torchrun.log(0)
    assert codes not in ([0], [None]), log[-3000:]
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert f'File "{PACKAGE}/' not in log, log[-3000:]
    return log


@pytest.mark.guarantee("sigterm-ctrl-c")
@LAUNCHERS
def test_ctrl_c_to_torchrun_saves_and_ends_every_rank_with_one_line(
    run_file: Path, launcher: str
) -> None:
    """Terminals signal all processes, and torchrun its ranks once more.

    It says so itself, with a traceback of its own.
    """
    torchrun = start_torchrun(run_file, launcher)
    ranks = ranks_of(torchrun, run_file)
    assert len(ranks) >= 2
    torchrun.signal(signal.SIGINT, 0)
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    log = check_that_torchrun_ends(torchrun, ranks, within=60)
    steps = len(read_metrics(run_file.parent / "run" / "metrics.jsonl"))
    assert saved_steps(run_file) == [f"step-{steps:08d}"]
    for number in range(2):
        assert f"[{number}] interrupted after step {steps}, which is saved in" in log, log[-3000:]


@pytest.mark.guarantee("sigterm-ctrl-c")
@LAUNCHERS
def test_a_second_ctrl_c_to_torchrun_ends_every_rank_at_once(run_file: Path, launcher: str) -> None:
    """Rank 1 waits for data that do not come, rank 0 for rank 1, where Python cannot reach it."""
    torchrun = start_torchrun(run_file, launcher, fault="1:5:hang")
    ranks = ranks_of(torchrun, run_file)
    assert len(ranks) >= 2
    torchrun.signal(signal.SIGINT, 0)
    time.sleep(1.5 * ONE_REQUEST)
    assert all(rank.is_running() for rank in ranks)
    torchrun.signal(signal.SIGINT, 0)
    log = check_that_torchrun_ends(torchrun, ranks, within=25)  # after 30 s torchrun kills them
    assert "[1] interrupted in step 5" in log, log[-3000:]


@pytest.mark.guarantee("no-traceback")
def test_a_defect_ends_a_run_with_one_message_and_its_traceback_is_a_log_record(
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def faulty(self: Trainer) -> object:
        raise ZeroDivisionError("of s3://user:secret@host")

    monkeypatch.setattr(Trainer, "train_step", faulty)
    monkeypatch.setenv("STREAMMEGA_LOG", "DEBUG")
    assert command_line(["train", str(run_file), "data.order=stream"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ZeroDivisionError: of s3://***@host (")
    assert "report it" in error
    tracebacks = [record.exc_text for record in caplog.records if record.exc_text]
    assert "ZeroDivisionError: of s3://***@host" in tracebacks[0], "it had a secret"


@pytest.mark.guarantee("no-traceback")
@LAUNCHERS
def test_torchrun_ends_with_the_one_message_of_what_is_wrong_with_the_settings(
    run_file: Path, launcher: str
) -> None:
    arguments = [str(run_file), "train.micro_batch_size=3"]
    if launcher == "torchrun":
        torchrun = launch(run_file.parent, 1, [*TORCHRUN, *PROGRAM["module"], *arguments])
    else:
        job = 2, faulty_train.run, arguments, {"FAULT": ""}
        torchrun = elastic.launch_agent(run_file.parent, *job)
    assert torchrun.ended(0, within=120) == [1]
    log = torchrun.log(0)
    message = "is not a multiple of micro_batch_size 3 x dp_size 2; change one of the three"
    assert re.findall(r"^error \(rank \d\): .*", log, re.M) == [
        f"error (rank 0): global_batch_size 8 {message}"
    ], log
    assert message in log.rpartition("Root Cause")[2], log
