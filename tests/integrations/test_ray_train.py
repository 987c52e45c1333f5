"""The example of Ray Train, by Ray itself: a worker is killed, Ray begins its workers again, and a later
run goes on with another number of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streammega import DataConfig, StreamLoader

ROOT = Path(__file__).parents[2]
PREFIX = "mock://tokens=1000000,vocab=1000"
STEPS = 6
GLOBAL_BATCH = 16
PATIENCE = 500.0
"""Seconds that a run may take: Ray starts a dozen processes, each of which imports torch."""


def start(folder: Path, workers: int) -> subprocess.Popen[bytes]:
    surroundings = {
        **os.environ,
        "OUT": str(folder),
        "STEPS": str(STEPS),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHONWARNINGS": "ignore",
        # Ray's workers are nice by 15 otherwise, and starve beside other tests
        "RAY_worker_niceness": "0",
    }
    command = [sys.executable, str(ROOT / "tools/examples/ray_train.py"), PREFIX, str(workers)]
    with (folder / f"log-{workers}").open("wb") as log:
        return subprocess.Popen(command, env=surroundings, stdout=log, stderr=log)


@contextmanager
def ended(run: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A run that is ended with the processes that it started, whatever becomes of the test."""
    try:
        yield run
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(60)


def printed(folder: Path, workers: int) -> str:
    """The end of what a run wrote."""
    return (folder / f"log-{workers}").read_text()[-3000:]


def lines_of(folder: Path, rank: int, workers: int) -> list[dict[str, Any]]:
    path = folder / f"rank-{rank}-of-{workers}.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def taken(folder: Path, workers: int) -> dict[int, list[int]]:
    """By the sample after it, each global batch; one that was taken twice was the same."""
    whole: dict[int, list[int]] = {}
    for rank in range(workers):
        of_rank: dict[int, list[int]] = {}
        for line in lines_of(folder, rank, workers):
            assert of_rank.setdefault(line["sample"], line["taken"]) == line["taken"]
        for sample, checksums in of_rank.items():
            whole[sample] = sorted(whole.get(sample, []) + checksums)
    return whole


@pytest.mark.guarantee("ray-train-worker")
@pytest.mark.soak
@pytest.mark.timeout(3 * PATIENCE)
def test_rays_workers_are_killed_and_go_on_exactly(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="needs ray[train]", exc_type=ImportError)
    with ended(start(tmp_path, 2)) as run:
        deadline = time.monotonic() + PATIENCE
        while len(lines_of(tmp_path, 1, 2)) < 2:
            assert time.monotonic() < deadline, printed(tmp_path, 2)
            assert run.poll() is None, printed(tmp_path, 2)
            time.sleep(0.05)
        killed = lines_of(tmp_path, 1, 2)[-1]["process"]
        os.kill(killed, signal.SIGKILL)
        assert run.wait(PATIENCE) == 0, printed(tmp_path, 2)
    assert {line["process"] for line in lines_of(tmp_path, 1, 2)} > {killed}, "begun again"
    with ended(start(tmp_path, 1)) as run:
        assert run.wait(PATIENCE) == 0, printed(tmp_path, 1)
    data = DataConfig(blend=[PREFIX], sequence_length=64, order="stream", vocab_size=1000)
    with StreamLoader(data, micro_batch_size=16, global_batch_size=GLOBAL_BATCH) as loader:
        batches = [loader.take()["tokens"] for _ in range(2 * STEPS)]
    expected = [sorted(zlib.crc32(sample.numpy()) for sample in batch) for batch in batches]
    whole = taken(tmp_path, 2) | taken(tmp_path, 1)
    assert [whole[GLOBAL_BATCH * (step + 1)] for step in range(2 * STEPS)] == expected
