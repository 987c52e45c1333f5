"""Ranks that die, hang or lose their storage; jobs that come back on other ranks, as if nothing had
happened.
"""

from __future__ import annotations

import functools
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from streammega.train import devices
from streammega.train import program as train_program
from streammega.train.config import load_run
from streammega.train.run_log import read_metrics
from tests.support import elastic, faulty_train
from tests.support.builders import write_layout_run
from tests.support.checkpoint_programs import checkpoint_records
from tests.support.gang import Gang
from tests.support.processes import launch, python_environment
from tests.support.rank_programs import train
from tests.support.run_hashes import loader_hashes

FAULTY = str(Path(__file__).parents[1] / "support" / "faulty_train.py")
LONGEST_JOB = 240.0
"""Seconds after which a job is taken to hang: on a machine with much to do, five interpreters that
import torch one after another take more than a minute. How soon a job ends is asserted apart.
"""
PATIENT = "train.collective_timeout=60"
"""Where no rank waits for one that is gone: ranks of a machine with much to do are more than 4 s
apart now and then.
"""


NOT_COME = (
    r"error \(rank 0\): in step 5: another rank has ended, or did not come within "
    r"train\.collective_timeout = 4 s"
)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return Path(write_layout_run(tmp_path, layers=2, collective_timeout=4.0, save_interval=2))


def torchrun(
    run_file: Path, ranks: int, *overrides: str, fault: str = "", restarts: int = 0
) -> subprocess.Popen[str]:
    """A job by torchrun. fault: see faulty_train.py."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]
    command += [
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
        FAULTY,
        str(run_file),
        *overrides,
    ]
    return subprocess.Popen(
        command,
        env=python_environment(FAULT=fault, OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, log = process.communicate(timeout=LONGEST_JOB)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    return process.returncode, log


def run_on(
    run_file: Path, ranks: int, *overrides: str, fault: str = ""
) -> tuple[list[int | None], str]:
    """A job of the same program without torchrun: how its ranks end, and what they say."""
    family = launch(run_file.parent, ranks, [FAULTY, str(run_file), *overrides], {"FAULT": fault})
    codes = family.ended(*range(ranks), within=LONGEST_JOB)
    family.close()
    return codes, "".join(family.log(rank) for rank in range(ranks))


def failed(run_file: Path, process: subprocess.Popen[str]) -> tuple[float, str]:
    """Of a job with a fault: the seconds from the fault until the job has ended, and its log."""
    marker = run_file.with_suffix(".fault")
    deadline = time.monotonic() + 120
    while not marker.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    began = time.monotonic()
    code, log = ended(process)
    assert code != 0
    return time.monotonic() - began, log


def kill(process: subprocess.Popen[str]) -> str:
    """SIGKILL to torchrun and all of its ranks; the log."""
    for member in [
        *psutil.Process(process.pid).children(recursive=True),
        psutil.Process(process.pid),
    ]:
        member.send_signal(signal.SIGKILL)
    return process.communicate()[1]


def check_history(run_file: Path, steps: int) -> set[int]:
    """Every step was trained, and each time on the same global batch; returns the
    worlds that did.
    """
    records = read_metrics(run_file.parent / "run" / "metrics.jsonl")
    wanted = loader_hashes(load_run(str(run_file)))
    assert {record["step"] for record in records} == set(range(1, steps + 1))
    for record in records:
        assert record["batch_hash"] == wanted[record["step"] - 1], record
    return {record["ranks"] for record in records}


@pytest.mark.guarantee("rank-fails-says")
@pytest.mark.parametrize(
    ("kind", "cause", "within"),
    [
        pytest.param("kill", r"Signal 9 \(SIGKILL\) received by PID", 20.0, marks=pytest.mark.soak),
        pytest.param("stop", NOT_COME, 60.0, marks=pytest.mark.soak),
        pytest.param("hang", NOT_COME, 60.0, marks=pytest.mark.soak),
        ("storage", r"error \(rank 1\): s3://bucket/web.bin: 503 SlowDown", 15.0),
    ],
    ids=["kill", "stop", "hang", "storage"],
)
def test_a_rank_that_fails_ends_the_job_with_its_cause_and_a_restart_resumes(
    run_file: Path, kind: str, cause: str, within: float
) -> None:
    """within: seconds from the fault to the end of the job, without torchrun to the end of its last
    rank: the agent takes some more on a machine with much to do. Others wait for what is hung or stopped
    for `train.collective_timeout` of 4 s; it ends by SIGKILL, which torchrun sends 30 s after the other
    rank has ended.
    """
    if kind == "storage":
        outcome = elastic.run(
            run_file.parent,
            2,
            faulty_train.run,
            [str(run_file)],
            {"FAULT": f"1:5:{kind}"},
            all_end_alone=True,
        )
        assert not outcome.good
        log = outcome.log
        seconds = outcome.said_last - run_file.with_suffix(".fault").stat().st_mtime
    else:
        seconds, log = failed(run_file, torchrun(run_file, 2, fault=f"1:5:{kind}"))
    assert seconds < within, log[-3000:]
    assert re.search(cause, log), log[-3000:]
    assert not re.search(r'File ".*/streammega/', log), log[:3000]
    if kind != "storage":  # the others come back alike
        return
    codes, log = run_on(run_file, 2, fault=f"1:5:{kind}")
    assert codes == [0, 0], log[-3000:]
    assert "resumed from" in log
    check_history(run_file, 20)


@pytest.mark.guarantee("rank-fails-says")
def test_a_rank_that_hangs_ends_the_others_at_the_collective_timeout(run_file: Path) -> None:
    family = launch(run_file.parent, 2, [FAULTY, str(run_file)], {"FAULT": "1:5:hang"})
    assert family.ended(0, within=LONGEST_JOB) == [1], family.log(0)[-3000:]
    family.close()
    seconds = family.said_last(0) - run_file.with_suffix(".fault").stat().st_mtime
    assert 3 < seconds < 30, family.log(0)
    assert re.search(NOT_COME, family.log(0)), family.log(0)
    assert "Traceback" not in family.log(0)


@pytest.mark.guarantee("without-torchrun-others")
def test_without_torchrun_the_others_end_soon_when_rank_0_dies_with_the_jobs_store(
    run_file: Path,
) -> None:
    family = launch(run_file.parent, 2, [FAULTY, str(run_file)], {"FAULT": "0:5:kill"})
    family.ended(0, within=LONGEST_JOB)
    codes = family.ended(0, 1, within=60)
    family.close()
    log = family.log(1)
    assert codes == [-signal.SIGKILL, 1], log[-3000:]
    seconds = family.said_last(1) - run_file.with_suffix(".fault").stat().st_mtime
    assert seconds < 30, log
    assert re.search(
        r"error \(rank 1\): in step 5: another rank has ended, or did not come", log
    ), log
    assert "Traceback" not in log


@pytest.mark.guarantee("without-torchrun-others")
def test_a_rank_that_never_joins_is_waited_for_no_longer_than_ranks_may_start_apart(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in job.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(devices, "START_TIMEOUT", 1.0)
    began = time.monotonic()
    assert train_program.main([str(run_file), "train.collective_timeout=1"]) == 1
    assert time.monotonic() - began < 20
    assert "the ranks cannot meet (" in capsys.readouterr().err


KILLED_AND_SHARDED = ("parallel.optimizer=sharded", "0:7:kill")


@pytest.mark.guarantee("rank-fails-says")
def test_torchruns_agent_restarts_the_job_by_itself(run_file: Path) -> None:
    override, fault = KILLED_AND_SHARDED
    arguments = [str(run_file), override]
    outcome = elastic.run(
        run_file.parent, 2, faulty_train.run, arguments, {"FAULT": fault}, restarts=1
    )
    assert outcome.good, outcome.log[-3000:]
    assert "resumed from" in outcome.log
    check_history(run_file, 20)


@pytest.mark.guarantee("rank-fails-says")
@pytest.mark.soak
def test_torchrun_restarts_the_job_by_itself(run_file: Path) -> None:
    override, fault = KILLED_AND_SHARDED
    code, log = ended(torchrun(run_file, 2, override, fault=fault, restarts=1))
    assert code == 0, log[-3000:]
    check_history(run_file, 20)


@pytest.mark.guarantee("sigterm-ctrl-c")
def test_sigterm_saves_and_a_restart_goes_on(run_file: Path) -> None:
    """A signal to one rank; all end after the same step."""
    codes, log = run_on(run_file, 2, "train.save_interval=0", PATIENT, fault="1:4:term")
    assert codes == [128 + signal.SIGTERM] * 2
    assert "stopped by SIGTERM after step 4, which is saved" in log, log[-3000:]
    assert [path.stem for path in checkpoint_records(run_file.parent / "run" / "checkpoints")] == [
        "step-00000004"
    ]
    codes, log = run_on(run_file, 1, "train.save_interval=0", PATIENT)
    assert codes == [0], log[-3000:]
    records = read_metrics(run_file.parent / "run" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 21)), (
        "no step is lost or done twice"
    )
    check_history(run_file, 20)


LAYOUTS = [
    (2, ["parallel.pp=2", "parallel.optimizer=sharded"]),
    (4, ["parallel.cp=2"]),
    (1, []),
    (4, ["parallel.tp=2", "parallel.optimizer=sharded", "train.micro_batch_size=4"]),
    (2, ["parallel.optimizer=sharded"]),
    (4, ["parallel.cp=2", "parallel.pp=2", "train.micro_batch_size=4"]),
]


@pytest.mark.guarantee("run-may-change")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 10))]
)
def test_five_resumes_on_other_layouts_after_kills_at_random_see_the_same_batches(
    gang: Gang, run_file: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    metrics = run_file.parent / "run" / "metrics.jsonl"
    done = 0
    killed = 0
    *before, last = rng.permutation(len(LAYOUTS)).tolist()
    for choice in before:
        ranks, overrides = LAYOUTS[choice]
        target = min(done + int(rng.integers(1, 4)), 18)
        pause = float(rng.uniform(0, 0.1))
        due = functools.partial(reached, metrics, target, pause)
        killed += gang.run_until(due, ranks, train, str(run_file), [*overrides, PATIENT], None)
        done = max(record["step"] for record in read_metrics(metrics))
    assert killed == 5
    ranks, overrides = LAYOUTS[last]
    gang.run(ranks, train, str(run_file), [*overrides, PATIENT], None)
    assert len(check_history(run_file, 20)) >= 2


def reached(metrics: Path, step: int, pause: float) -> bool:
    """Whether a step is in the metrics; then, after a pause."""
    if not metrics.exists() or all(record["step"] < step for record in read_metrics(metrics)):
        return False
    time.sleep(pause)
    return True
