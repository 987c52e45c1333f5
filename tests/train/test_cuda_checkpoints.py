"""What only a CUDA device can show of checkpoints: values are those of the moment, whatever is
computed while they are copied.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streammega.gradients.buffers import local_part
from streammega.train.checkpoints.staging import HostStaging
from streammega.train.config import load_run
from streammega.train.trainer import Trainer
from tests.support.checkpoint_programs import train_slowly
from tests.support.cuda_support import NEEDS_CUDA
from tests.support.gang import Gang
from tests.train.test_checkpoints import write_run

pytestmark = NEEDS_CUDA

CYCLES = 500_000_000
"""Of a kernel that takes a quarter of a second and more."""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    return write_run(tmp_path)


def test_copies_are_of_the_moment_and_the_host_waits_for_nothing() -> None:
    values = {f"v{n}": torch.full((1 << 18,), float(n), device="cuda") for n in range(8)}
    step = torch.tensor(3.0)
    staging = HostStaging(torch.device("cuda"))
    state = values | {"step": step}
    staging.stage(state)  # makes the buffer
    staging.before_change()
    staging.wait()
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)  # the values are "computed" behind this
    for value in values.values():
        value.add_(1)
    begin = torch.cuda.Event()
    begin.record()
    copies = staging.stage(state)
    assert not begin.query(), "the host has not waited for the device"
    assert copies["v0"].is_pinned()
    staging.before_change()
    for value in values.values():
        value.fill_(-1)
    step.fill_(9)
    staging.wait()
    for number in range(8):
        assert bool((copies[f"v{number}"] == number + 1).all()), number
    assert float(copies["step"]) == 3.0


@pytest.mark.parametrize(
    "overrides",
    [[], ["parallel.optimizer=sharded", "train.dtype=bfloat16"]],
    ids=["replicated", "sharded"],
)
def test_background_checkpoints_of_a_gpu_resume_there_and_on_a_cpu(
    run_file: str, overrides: list[str]
) -> None:
    config = load_run(run_file, overrides)
    trainer = Trainer(config, torch.device("cuda"))
    truth = {}
    for step in range(1, 4):
        trainer.train_step()
        trainer.step = step
        if step == 2:
            truth = {
                name: local_part(value.detach()).cpu().clone()
                for name, value in trainer.model.chunks[0].named_parameters()
            }
            trainer.save(background=True)  # and the third step changes everything meanwhile
    trainer.checkpoints.wait()
    losses = [trainer.train_step()[0]["loss"]]
    trainer.close()
    for device in ("cuda", "cpu"):
        again = Trainer(config, torch.device(device))
        again.resume()
        assert again.step == 2
        for name, value in again.model.chunks[0].named_parameters():
            assert torch.equal(local_part(value.detach()).cpu(), truth[name]), (device, name)
        again.train_step()
        assert again.train_step()[0]["loss"] == pytest.approx(
            losses[0], rel=2e-2 if overrides else 1e-4
        )
        again.close()


def test_a_gpu_run_that_is_killed_during_a_background_save_resumes(
    gang: Gang, run_file: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    assert gang.run_until(begun.exists, 1, train_slowly, run_file, [], 0.05, str(begun), "cuda")
    again = Trainer(load_run(run_file), torch.device("cuda"))
    again.resume()
    assert again.step == 2
    again.run()
    assert again.checkpoints.store.steps() == [2, 4, 6]
