"""A loop of your own with torch's fully_shard: parameters, gradients and Adam's state divided over
ranks, bf16 in the computation, fp32 in all that is kept.

    torchrun --nproc-per-node 2 tools/examples/fully_shard.py
    torchrun --nproc-per-node 3 tools/examples/fully_shard.py       # goes on where the first stopped

Any number of ranks loads the checkpoint. Remove the folder fully_shard.ckpt to begin anew.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

MICRO_BATCHES = 4
STEPS = 20
FOLDER = Path("fully_shard.ckpt")


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit(
            "this is one rank of several: run torchrun --nproc-per-node 2 tools/examples/fully_shard.py"
        )
    dist.init_process_group()
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # of a model of many layers: each layer first, then the model
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    first = load(model, optimizer)
    rank = dist.get_rank()
    # each rank draws other samples than the others, and than before the restart
    torch.manual_seed(1000 * first + rank)
    for step in range(first, first + STEPS):
        for micro_batch in range(MICRO_BATCHES):
            loss = add_gradients(model, is_last=micro_batch == MICRO_BATCHES - 1)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            total = norm.full_tensor()  # on all ranks: it is summed over them
            if rank == 0:
                print(f"step {step}: loss {float(loss):.4f}, gradient norm {float(total):.4f}")
    save(model, optimizer, first + STEPS)
    dist.destroy_process_group()


def add_gradients(model: nn.Module, is_last: bool) -> torch.Tensor:
    """Run forward and backward of a micro-batch; its loss. The model learns to reverse a sample."""
    assert isinstance(model, FSDPModule)
    # gradients go to the other ranks, and gathered parameters are freed, in the last backward only
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)
    samples = torch.randn(32, 64)
    off = model(samples) - samples.flip(1)
    loss = off.float().square().mean()
    (loss / MICRO_BATCHES).backward()
    return loss.detach()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, checkpoint_id=FOLDER)


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one; the step to go on from.

    It has learning rate and decay too. If you have regrouped the parameters since, set these again
    afterwards: torch takes those of any saved group that shares one parameter.
    """
    if not (FOLDER / ".metadata").exists():
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=FOLDER)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return int(state["step"])


if __name__ == "__main__":
    main()
