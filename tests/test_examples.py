"""The examples run as they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "tools" / "examples"


def run(folder: Path, name: str, ranks: int, *arguments: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["batches.py", "buckets.py"])
def test_an_example_of_several_ranks_says_so_where_it_is_run_as_one(tmp_path: Path, name: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.fullmatch(rf"this is one rank of several: run torchrun --nproc-per-node \d tools/examples/{name}\n", done.stderr)


def test_only_the_loader_goes_on_where_it_stopped_on_other_ranks(tmp_path: Path) -> None:
    first = run(tmp_path, "loader.py", 1)
    second = run(tmp_path, "loader.py", 2)
    samples = [int(number) for number in re.findall(r"sample (\d+)", first + second)]
    assert samples == [16 * (n + 1) for n in range(10)]


def test_only_get_batch_gives_every_rank_its_part(tmp_path: Path) -> None:
    lines = run(tmp_path, "batches.py", 2).splitlines()
    assert len(lines) == 6
    assert all(line.endswith("(2, 64) tokens, from position 0") for line in lines), "tensor-parallel ranks have the same"


def test_the_buckets_go_on_where_they_stopped_on_other_ranks(tmp_path: Path) -> None:
    lines = run(tmp_path, "buckets.py", 2) + run(tmp_path, "buckets.py", 3)
    steps = [int(value) for value in re.findall(r"step (\d+)", lines)]
    losses = [float(value) for value in re.findall(r"loss (\S+),", lines)]
    assert steps == list(range(4, 40, 5))
    assert losses[3] < losses[0]
    assert losses[4] < losses[3] * 1.2, "of the parameters and moments that were saved"
    assert losses[-1] < losses[3]
