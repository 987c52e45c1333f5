"""Training on a CUDA device, beside the same on the CPU: losses, hashes, layouts, checkpoints,
failures, compilation.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from streammega import (
    DataConfig,
    ParallelLayout,
    RankBatches,
    Ranks,
    StorageConfig,
    StreamingDataset,
)
from streammega.parallel import open_loader
from streammega.train.config import ModelConfig, load_run
from streammega.train.devices import DeviceTimer
from streammega.train.model import GPT
from streammega.train.run_log import read_metrics
from streammega.train.trainer import Trainer
from tests.support.builders import write_dataset, write_layout_run
from tests.support.cuda_support import DEVICES, NEEDS_CUDA, NEEDS_TWO, on_cuda
from tests.support.gang import Gang
from tests.support.processes import python_environment
from tests.support.rank_programs import train
from tests.train.test_elastic import check_history, ended, failed, torchrun

SHARDED = ["parallel.optimizer=sharded"]
NARROW = [*SHARDED, "train.dtype=bfloat16"]
TRAINED_ON = [pytest.param("cpu", marks=pytest.mark.soak), on_cuda("cuda")]
"""Whole runs of one rank: on the CPU, test_train.py and test_training_layouts.py have them too."""
LOSS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Relative: the kernels of a GPU add in another order, and round to the dtype at other places."""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return Path(write_layout_run(tmp_path, layers=2, device=None, collective_timeout=20.0))


def trained(
    run_file: Path,
    name: str,
    device: str,
    overrides: list[str],
    steps: int,
    *,
    resume: bool = False,
) -> list[dict[str, Any]]:
    """The records of so many steps of a run of one rank, which is saved after them."""
    out = f"train.out_dir={run_file.parent / name}"
    trainer = Trainer(load_run(str(run_file), [out, *overrides]), torch.device(device))
    if resume:
        trainer.resume()
        assert trainer.step > 0
    records = []
    for _ in range(steps):
        records.append(trainer.train_step()[0])
        trainer.step += 1
    trainer.save()
    trainer.close()
    return records


def assert_alike(got: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float) -> None:
    assert [record["batch_hash"] for record in got] == [record["batch_hash"] for record in wanted]
    assert [record["loss"] for record in got] == pytest.approx(
        [record["loss"] for record in wanted], rel=tolerance
    )


@pytest.mark.parametrize("device", TRAINED_ON)
@pytest.mark.parametrize(
    ("before", "after"),
    [(NARROW, NARROW), (SHARDED, []), ([], SHARDED)],
    ids=["bf16", "to-replicated", "to-sharded"],
)
def test_a_run_goes_on_with_the_same_losses_from_the_checkpoint_of_another_optimizer(
    run_file: Path, device: str, before: list[str], after: list[str]
) -> None:
    """Fused and sharded optimizers keep their step on the device, replicated ones on the host."""
    tolerance = LOSS["bfloat16" if before is NARROW else "float32"]
    whole = trained(run_file, "whole", device, before, 4)
    first = trained(run_file, "parts", device, before, 2)
    second = trained(run_file, "parts", device, after, 2, resume=True)
    assert_alike([*first, *second], whole, tolerance)


@pytest.mark.parametrize("dtype", LOSS)
@pytest.mark.parametrize("device", TRAINED_ON)
def test_losses_are_those_of_the_cpu_and_hashes_are_equal(
    run_file: Path, device: str, dtype: str
) -> None:
    options = [*SHARDED, f"train.dtype={dtype}"]
    wanted = trained(run_file, "host", "cpu", SHARDED, 6)
    assert_alike(trained(run_file, "device", device, options, 6), wanted, LOSS[dtype])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        SHARDED,
        ["parallel.cp=2"],
    ],
    ids=["replicated", "sharded", "cp"],
)
@pytest.mark.parametrize("device", ["cpu", on_cuda("cuda:0")])
def test_two_gloo_ranks_on_one_device_have_the_loss_of_one_rank(
    gang: Gang, run_file: Path, device: str, overrides: list[str]
) -> None:
    if device == "cpu" and overrides != SHARDED:
        pytest.skip("tests/train/test_training_layouts.py has it for the CPU")
    if device != "cpu" and overrides == SHARDED:
        pytest.skip("gloo on CUDA cannot gather parameters, and is refused")
    wanted = trained(run_file, "alone", "cpu", [], 6)
    out = f"train.out_dir={run_file.parent / 'two'}"
    assert_alike(
        gang.run(2, train, str(run_file), [out, *overrides], 6, device)[0],
        wanted,
        LOSS["float32"],
    )


@pytest.mark.parametrize(
    "overrides",
    [SHARDED, NARROW, ["parallel.tp=2"], ["parallel.cp=2"], ["parallel.pp=2"]],
    ids=["sharded", "bf16", "tp", "cp", "pp"],
)
@pytest.mark.parametrize("backend", [pytest.param("nccl", marks=NEEDS_TWO)])
def test_two_gpus_have_the_loss_of_one_rank(
    run_file: Path, backend: str, overrides: list[str]
) -> None:
    wanted = trained(run_file, "alone", "cpu", [], 20)
    code, log = ended(
        torchrun(run_file, 2, "train.device=cuda", f"train.backend={backend}", *overrides)
    )
    assert code == 0, log[-3000:]
    records = read_metrics(run_file.parent / "run" / "metrics.jsonl")
    assert_alike(records, wanted, LOSS["bfloat16" if overrides is NARROW else "float32"])


@pytest.mark.parametrize("device", [on_cuda("cuda")])
def test_the_wait_for_gradients_is_timed_on_the_device_and_the_host_does_not_wait(
    device: str,
) -> None:
    timer = DeviceTimer(torch.device(device))
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1_000_000_000)  # a backward that goes on: not counted
        with timer:
            torch.cuda._sleep(10_000_000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    short = timer.seconds
    with timer:
        torch.cuda._sleep(200_000_000)
    torch.cuda.synchronize()
    assert 0 < 4 * short < timer.seconds


FAULTS = {
    "kill": (r"Signal 9 \(SIGKILL\) received by PID", 50.0),
    "stop": (r"another rank has ended, or did not come|Watchdog caught collective", 80.0),
    "storage": (r"error \(rank 1\): s3://bucket/web.bin: 503 SlowDown", 50.0),
}
"""What the log says of a fault, and within how many seconds of it the job has ended. The other rank waits
for `train.collective_timeout` of 20 s for one that is stopped, and torchrun sends SIGKILL 30 s after SIGTERM
to one that is stopped or waits in NCCL.
"""
GPU = ["train.device=cuda", "train.backend=gloo"]
GPUS = ["train.device=cuda", "train.backend=nccl"]


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], marks=pytest.mark.soak, id="cpu"),
        pytest.param(GPU, marks=NEEDS_CUDA, id="one-gpu"),
        pytest.param(GPUS, marks=NEEDS_TWO, id="two-gpus"),
    ],
)
def test_a_job_ends_with_the_cause_in_its_log_within_seconds_and_a_restart_resumes(
    run_file: Path, options: list[str], kind: str
) -> None:
    cause, within = FAULTS[kind]
    options = ["train.save_interval=2", *options]
    seconds, log = failed(run_file, torchrun(run_file, 2, *options, fault=f"1:5:{kind}"))
    assert re.search(cause, log), log[-3000:]
    assert seconds < within, log[-3000:]
    code, log = ended(torchrun(run_file, 2, *options, fault=f"1:5:{kind}"))
    assert code == 0, log[-3000:]
    assert "resumed from step" in log
    check_history(run_file, 20)


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer, of the CUDA toolkit"
)
@pytest.mark.parametrize("device", [on_cuda("cuda")])
def test_no_kernel_of_a_run_reads_outside_of_its_memory(run_file: Path, device: str) -> None:
    """Saved and resumed, since that is where an optimizer's state is put together anew."""
    command = [
        "compute-sanitizer",
        "--error-exitcode",
        "7",
        sys.executable,
        "-m",
        "streammega.train",
        str(run_file),
        *NARROW,
    ]
    for iters in (2, 4):
        options = [f"train.train_iters={iters}", "train.save_interval=2", f"train.device={device}"]
        done = subprocess.run(
            [*command, *options],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env=python_environment(),
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_model_computes_what_the_plain_one_does(device: str) -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=128, dim=32, layers=2, heads=2)).to(device)
    model.init_weights(0)
    tokens = torch.randint(0, 128, (2, 33), device=device)
    positions = torch.arange(32, device=device).expand(2, -1)

    def gradients(run: Any) -> list[torch.Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(
            run(tokens[:, :-1], positions).flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        loss.backward()
        return [
            loss.detach(),
            *(
                parameter.grad.clone()
                for parameter in model.parameters()
                if parameter.grad is not None
            ),
        ]

    plain = gradients(model)
    compiled = gradients(torch.compile(model, backend="inductor" if device == "cuda" else "eager"))
    for a, b in zip(plain, compiled, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


FLAGS: list[dict[str, Any]] = [
    {},
    {"reset_position_ids": True},
    {"eod_mask_loss": True},
    {"reset_attention_mask": True},
    {"fields": [..., "attention_mask"]},
    {
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "fields": [..., "attention_mask"],
    },
]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("device", DEVICES)
def test_rank_batches_of_a_device_are_those_of_the_cpu(
    tmp_path: Path, device: str, dtype: Any
) -> None:
    write_dataset(
        tmp_path / "d",
        [np.random.default_rng(3).integers(0, 100, 700).astype(dtype) for _ in range(40)],
        dtype,
    )
    for number, flags in enumerate(FLAGS):
        config = DataConfig(
            blend=[str(tmp_path / "d")],
            sequence_length=64,
            num_samples=(64, 0, 0),
            eod_id=7,
            storage=StorageConfig(cache_dir=tmp_path / "c"),
            **flags,
        )
        micro = 1 if number % 2 else 4
        sizes: Any = {"micro_batch_size": micro, "global_batch_size": 4}
        truth = StreamingDataset(config, **sizes)
        ranks = Ranks(ParallelLayout())
        batches = RankBatches(open_loader(config, ranks, **sizes), ranks, device)
        for consumed in range(0, 64, micro):
            got = next(batches)
            expected = truth.batch(consumed)
            assert set(got) == set(expected)
            for name, field in expected.items():
                assert got[name].device.type == device
                assert torch.equal(got[name].cpu(), field), (name, flags)
        batches.close()
