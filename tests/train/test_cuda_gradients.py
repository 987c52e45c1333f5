"""What only a CUDA device can show of buckets and the sharded optimizer: no waiting in backward,
and states that go on there.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from streammega import BucketedDataParallel, ShardedOptimizer
from streammega.errors import GradientError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA device: torch.cuda.is_available() is False",
    ),
]

SETTINGS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "foreach": {"foreach": True},
}


def make(
    device: str, dtype: torch.dtype, **settings: Any
) -> tuple[BucketedDataParallel, ShardedOptimizer]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(device, dtype)
    model = BucketedDataParallel(module, sharded=True, bucket_size=100)
    return model, ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, **settings)


def step(model: BucketedDataParallel, optimizer: ShardedOptimizer, number: int) -> None:
    parameter = next(model.parameters())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(
        parameter.device, parameter.dtype
    )
    model(x).float().square().mean().backward()
    model.finish_grad_sync()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


@pytest.mark.parametrize("uses_all", [True, False])
def test_backward_asks_the_device_nothing_and_the_end_of_a_step_once(uses_all: bool) -> None:
    module = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]).cuda()
    model = BucketedDataParallel(module, bucket_size=100)
    first, second = module
    used = [first, second] if uses_all else [first]
    loss = torch.stack([layer(torch.ones(4, 8, device="cuda")) for layer in used]).square().mean()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with warnings.catch_warnings(record=True) as asked:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            model.finish_grad_sync()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in asked if "synchroniz" in str(warning.message)]
    assert len(waits) <= 1


@pytest.mark.parametrize("largest", [None, 1e3])
def test_a_bad_gradient_is_named_by_norms_that_stayed_on_the_device(largest: float | None) -> None:
    torch.manual_seed(3)
    last = nn.Linear(16, 8)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), last).cuda()
    model = BucketedDataParallel(module, bucket_size=100, largest_gradient=largest)
    last.weight.register_hook(
        lambda grad: grad.index_fill(0, torch.tensor([2], device="cuda"), float("nan"))
    )
    model(torch.ones(4, 8, device="cuda")).square().mean().backward()
    with pytest.raises(GradientError, match=r"the gradient of 2\.weight is not finite"):
        model.finish_grad_sync()


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_goes_on_to_the_bit(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model, optimizer = make("cuda", dtype, **SETTINGS[kind])
    for number in range(3):
        step(model, optimizer, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process by itself
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
        again, its = make("cuda", dtype, **SETTINGS[kind])
        dcp.load({"model": again, "optimizer": its}, checkpoint_id=tmp_path, no_dist=True)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(again, its, number)
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("saves", "loads"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_state_goes_on_between_cuda_and_the_cpu(tmp_path: Path, saves: str, loads: str) -> None:
    model, optimizer = make(saves, torch.float32, fused=True)
    for number in range(3):
        step(model, optimizer, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
        again, its = make(loads, torch.float32, fused=True)
        dcp.load({"model": again, "optimizer": its}, checkpoint_id=tmp_path, no_dist=True)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(again, its, number)
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.allclose(ours.cpu(), theirs.cpu(), atol=1e-5)
