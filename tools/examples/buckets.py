"""A loop of your own with only the buckets: gradients accumulated in fp32 and reduced during
backward, optimizer state divided.

    torchrun --nproc-per-node 2 tools/examples/buckets.py
    torchrun --nproc-per-node 3 tools/examples/buckets.py       # goes on where the first stopped

The model is in bf16; its fp32 main parameters and Adam's moments exist once over all ranks, and are
saved in parts that any number of ranks loads. Remove the folder buckets.ckpt to begin anew.

ShardedOptimizer is right for this model, and wrong for others, which docs/training.md names:
torch's fully_shard will take its place.
"""

import contextlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import streammega as sm

MICRO_BATCHES = 4
STEPS = 20
FOLDER = Path("buckets.ckpt")


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit(
            "this is one rank of several: run torchrun --nproc-per-node 2 tools/examples/buckets.py"
        )
    dist.init_process_group()
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(torch.bfloat16)
    model = sm.BucketedDataParallel(bare, sharded=True)
    optimizer = sm.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if (FOLDER / ".metadata").exists():
        dcp.load(state, checkpoint_id=FOLDER)
    first = state["step"]
    rank = dist.get_rank()
    # each rank draws other samples than the others, and than before the restart
    torch.manual_seed(1000 * first + rank)
    for step in range(first, first + STEPS):
        for micro_batch in range(MICRO_BATCHES):
            loss = add_gradients(model, last=micro_batch == MICRO_BATCHES - 1)
        model.finish_grad_sync()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()  # parameters are gathered while the next forward begins
        if rank == 0 and step % 5 == 4:
            print(f"step {step}: loss {float(loss):.4f}, gradient norm {float(norm):.4f}")
    state["step"] = first + STEPS
    dcp.save(state, checkpoint_id=FOLDER)
    dist.destroy_process_group()


def add_gradients(model: sm.BucketedDataParallel, last: bool) -> torch.Tensor:
    """Forward and backward of a micro-batch; its loss, which is to turn a sample around."""
    samples = torch.randn(32, 64, dtype=torch.bfloat16)
    # gradients are summed in fp32, and go to the other ranks during the last backward only
    exchange = contextlib.nullcontext() if last else model.no_sync()
    with exchange:
        off = model(samples) - samples.flip(1)
        loss = off.float().square().mean()
        (loss / MICRO_BATCHES).backward()
    return loss.detach()


if __name__ == "__main__":
    main()
