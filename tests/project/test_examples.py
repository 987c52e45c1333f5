"""The examples run as they say."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from streammega.convert import convert
from streammega.storage import save_bytes
from tests.support import elastic
from tests.support.builders import write_dataset
from tests.support.processes import launch
from tests.support.servers import S3

EXAMPLES = Path(__file__).parents[2] / "tools" / "examples"


def run(
    folder: Path, name: str, ranks: int, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> str:
    """What an example prints on so many ranks, in forks."""
    monkeypatch.chdir(folder)
    logs = folder / f"logs-{ranks}"
    logs.mkdir()
    command = [str(EXAMPLES / name), *arguments]
    family = launch(logs, ranks, command, {"PYTHONWARNINGS": "ignore"})
    codes = family.ended(*range(ranks), within=120)
    printed = "".join(family.log(rank) for rank in range(ranks))
    family.close()
    assert codes == [0] * ranks, printed[-3000:]
    return printed


@pytest.mark.guarantee("examples-several-ranks")
@pytest.mark.parametrize("name", ["batches.py", "buckets.py", "fully_shard.py"])
def test_an_example_of_several_ranks_says_so_where_it_is_run_as_one(
    tmp_path: Path, name: str
) -> None:
    family = launch(tmp_path, 1, [str(EXAMPLES / name)])
    assert family.ended(0, within=60) == [1], family.log(0)
    assert re.fullmatch(
        rf"this is one rank of several: run torchrun --nproc-per-node \d tools/examples/{name}\n",
        family.log(0),
    )


@pytest.mark.guarantee("examples-run-themselves")
def test_only_the_loader_goes_on_where_it_stopped_on_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path, "loader.py", 1, monkeypatch)
    second = run(tmp_path, "loader.py", 2, monkeypatch)
    samples = [int(number) for number in re.findall(r"sample (\d+)", first + second)]
    assert samples == [16 * (n + 1) for n in range(10)]


@pytest.mark.guarantee("examples-run-themselves")
def test_only_the_loader_takes_data_of_any_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "mock://tokens=100000,vocab=8000"
    assert "sample 80" in run(tmp_path, "loader.py", 1, monkeypatch, data, "8000")
    family = launch(tmp_path, 1, [str(EXAMPLES / "loader.py"), data])
    assert family.ended(0, within=60) == [1]
    assert family.log(0) == "usage: python tools/examples/loader.py PREFIX VOCAB_SIZE\n"


def test_the_demo_leaves_no_process_when_it_is_terminated(tmp_path: Path) -> None:
    """A launcher in the place of torchrun starts a rank that leads a session of its own."""
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\nsetsid sleep 600 &\necho $! > {tmp_path}/rank\nwait\n")
    launcher.chmod(0o755)
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(EXAMPLES.parent)!r})
import demo
sys.executable = {str(launcher)!r}
demo.run_demo = lambda arguments, work, server: demo.train(work, ranks=1, kill_at=None)
sys.argv = ["demo", "--work", {str(tmp_path / "work")!r}]
sys.exit(demo.main())
"""
    family = launch(tmp_path, 1, ["-c", program])
    deadline = time.monotonic() + 60
    while not (tmp_path / "rank").exists() or not (tmp_path / "rank").read_text():
        assert time.monotonic() < deadline, family.log(0)
        time.sleep(0.05)
    rank = psutil.Process(int((tmp_path / "rank").read_text()))
    family.signal(signal.SIGTERM, 0)
    codes = family.ended(0, within=30)
    _, alive = psutil.wait_procs([rank], timeout=60)
    for process in alive:
        process.kill()
    assert codes == [128 + signal.SIGTERM], family.log(0)
    assert not alive


@pytest.mark.guarantee("examples-run-themselves")
def test_only_get_batch_gives_every_rank_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by torchrun's agent."""
    monkeypatch.chdir(tmp_path)
    outcome = elastic.run(
        tmp_path,
        2,
        elastic.run_script,
        [str(EXAMPLES / "batches.py")],
        {"PYTHONWARNINGS": "ignore"},
    )
    assert outcome.good, outcome.log[-3000:]
    # gloo of torch 2.10 prints as well
    lines = [line for line in outcome.printed.splitlines() if not line.startswith("[Gloo]")]
    assert len(lines) == 6
    assert all(line.endswith("(2, 64) tokens, from position 0") for line in lines), (
        "tensor-parallel ranks have the same"
    )


@pytest.mark.guarantee("examples-run-themselves")
def test_the_buckets_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = run(tmp_path, "buckets.py", 2, monkeypatch)
    losses = [float(value) for value in re.findall(r"loss (\S+),", lines)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


@pytest.mark.guarantee("examples-run-themselves", "optimizer-state-goes")
def test_a_sharded_loop_goes_on_where_it_stopped_on_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = run(tmp_path, "fully_shard.py", 2, monkeypatch) + run(
        tmp_path, "fully_shard.py", 3, monkeypatch
    )
    steps = [int(value) for value in re.findall(r"step (\d+)", lines)]
    losses = [float(value) for value in re.findall(r"loss (\S+),", lines)]
    assert steps == list(range(4, 40, 5))
    assert losses[3] < losses[0]
    assert losses[4] < losses[3] * 1.2, "of the parameters and moments that were saved"
    assert losses[-1] < losses[3]


def distill(
    folder: Path,
    what: list[str],
    ranks: int,
    environment: dict[str, str],
    kill_after: str | None = None,
) -> str:
    """What a run of the example prints on rank 0; killed on all ranks after it has printed a text."""
    number = len(list(folder.glob("logs-*")))
    logs = folder / f"logs-{number}"
    logs.mkdir()
    command = [str(EXAMPLES / "distill.py"), *what]
    family = launch(logs, ranks, command, {"PYTHONWARNINGS": "ignore", **environment})
    everyone = range(ranks)
    if kill_after is not None:
        family.wait_for(kill_after, 0, timeout=120)
        family.signal(signal.SIGKILL, *everyone)
    codes = family.ended(*everyone, within=120)
    printed = family.log(0)
    family.close()
    wanted = 0 if kill_after is None else -signal.SIGKILL
    assert codes == [wanted] * ranks, [family.log(rank)[-3000:] for rank in everyone]
    return printed


def losses_of(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", printed)}


@pytest.mark.guarantee("distillation-equals-online")
def test_a_student_learns_from_stored_logits_what_it_learns_online(
    tmp_path: Path, moto: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher writes to a bucket on two ranks and is killed; the student is killed, and goes on on
    another number of ranks.
    """
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 200, rng.integers(5, 120)).astype(np.uint16) for _ in range(300)]
    convert(
        [str(write_dataset(tmp_path / "raw", documents))],
        str(tmp_path / "bins"),
        pack_length=64,
        eod_id=0,
    )
    bucket = moto.new_bucket()
    for path in tmp_path.glob("bins*"):
        save_bytes(f"s3://{bucket}/{path.name}", path.read_bytes(), moto.storage)
    data = [f"s3://{bucket}/bins", "200"]
    environment = moto.environment | {"STEPS": "12"}
    teacher = environment | {"STATE": str(tmp_path / "teacher.json")}
    distill(tmp_path, ["teach", *data], 2, teacher, kill_after="written: 64 samples")
    (tmp_path / "teacher.json").unlink()  # as if it was killed before its first state
    distill(tmp_path, ["teach", *data], 2, teacher, kill_after="written: 64 samples")
    assert "published" in distill(tmp_path, ["teach", *data], 1, teacher)
    student = environment | {"STATE": str(tmp_path / "student.pt")}
    before = distill(tmp_path, ["learn", *data], 1, student, kill_after="step 7:")
    after = distill(tmp_path, ["learn", *data], 2, student)
    online = environment | {"STATE": str(tmp_path / "online.pt")}
    expected = losses_of(distill(tmp_path, ["online", *data], 1, online))
    losses = losses_of(before) | losses_of(after)
    assert [*losses] == [*expected] == [*range(12)]
    assert min(losses_of(after)) in (4, 8), "it goes on after its last state"
    np.testing.assert_allclose([*losses.values()], [*expected.values()], rtol=2e-3)


@pytest.mark.guarantee("columns-weights-of-one")
def test_weights_of_one_give_the_plain_loss_and_others_leave_tokens_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {}
    for column in ("plain", "ones", "selected"):
        (tmp_path / column).mkdir()
        printed = run(tmp_path / column, "weights.py", 1, monkeypatch, column)
        losses[column] = list(losses_of(printed).values())
        assert len(losses[column]) == 4, printed
    assert losses["ones"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["selected"][-1] < losses["plain"][-1] / 10, "noise has no weight"
