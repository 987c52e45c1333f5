"""What only a CUDA device can show of buckets: no waiting in backward."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from streammega import BucketedDataParallel
from streammega.errors import GradientError
from tests.support.cuda_support import NEEDS_CUDA

pytestmark = NEEDS_CUDA


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


def test_a_bad_bucket_is_named_by_checks_that_stayed_on_the_device() -> None:
    torch.manual_seed(3)
    last = nn.Linear(16, 8)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), last).cuda()
    model = BucketedDataParallel(module, bucket_size=100)
    last.weight.register_hook(
        lambda grad: grad.index_fill(0, torch.tensor([2], device="cuda"), float("nan"))
    )
    model(torch.ones(4, 8, device="cuda")).square().mean().backward()
    with pytest.raises(GradientError, match=r"of bucket 0, of 2\.bias to 2\.weight, is not finite"):
        model.finish_grad_sync()
