"""A loop of your own with only the buckets: gradients accumulated in fp32 and reduced during
backward.

    torchrun --nproc-per-node 2 tools/examples/buckets.py
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import streammega as sm

MICRO_BATCHES = 4
STEPS = 20


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit(
            "this is one rank of several: run torchrun --nproc-per-node 2 tools/examples/buckets.py"
        )
    dist.init_process_group()
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = sm.BucketedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    rank = dist.get_rank()
    torch.manual_seed(rank)  # each rank draws other samples than the others
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            loss = add_gradients(model, last=micro_batch == MICRO_BATCHES - 1)
        model.finish_grad_sync()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()
        if rank == 0 and step % 5 == 4:
            print(f"step {step}: loss {float(loss):.4f}, gradient norm {float(norm):.4f}")
    dist.destroy_process_group()


def add_gradients(model: sm.BucketedDataParallel, last: bool) -> torch.Tensor:
    """Run forward and backward of a micro-batch; its loss. The model learns to reverse a sample."""
    samples = torch.randn(32, 64)
    # gradients are summed in fp32, and go to the other ranks during the last backward only
    exchange = contextlib.nullcontext() if last else model.no_sync()
    with exchange:
        off = model(samples) - samples.flip(1)
        loss = off.square().mean()
        (loss / MICRO_BATCHES).backward()
    return loss.detach()


if __name__ == "__main__":
    main()
