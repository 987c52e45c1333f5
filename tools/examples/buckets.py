"""A loop of your own with only the buckets: gradients accumulated in fp32 and reduced during backward, optimizer state divided.

    torchrun --nproc-per-node 2 tools/examples/buckets.py

The model is in bf16; its fp32 main parameters and Adam's moments exist once over all ranks.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

import streammega as sm

MICRO_BATCHES = 4


def main() -> None:
    dist.init_process_group()
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(torch.bfloat16)
    model = sm.BucketedDataParallel(bare, sharded=True)
    optimizer = sm.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(20):
        for micro in range(MICRO_BATCHES):
            x = torch.randn(32, 64, dtype=torch.bfloat16)
            with model.no_sync() if micro < MICRO_BATCHES - 1 else contextlib.nullcontext():
                loss = (model(x) - x.flip(1)).float().square().mean()
                (loss / MICRO_BATCHES).backward()
        model.finish_grad_sync()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()  # parameters are gathered while the next forward begins
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step}: loss {float(loss.detach()):.4f}, gradient norm {float(norm):.4f}")
    optimizer.finish_param_sync()  # before anything that is no forward: the end, or saving
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
