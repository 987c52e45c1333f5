"""A loop of your own with only the loader: any model, torch's own data parallelism.

    python tools/examples/loader.py
    torchrun --nproc-per-node 2 tools/examples/loader.py s3://bucket/web 50304

The number is the size of the vocabulary: every token id of the data is below it.

Run it twice: the second run goes on where the first stopped, on any number of ranks.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import streammega as sm

ARGUMENTS = sys.argv[1:] or ["mock://tokens=1000000,vocab=1000", "1000"]
STATE = Path(os.environ.get("STATE", "loader-state.json"))
STEPS = 5
GLOBAL_BATCH = 16
MICRO_BATCH = 4


def main() -> None:
    if len(ARGUMENTS) != 2:
        sys.exit("usage: python tools/examples/loader.py PREFIX VOCAB_SIZE")
    prefix, vocab_size = ARGUMENTS[0], int(ARGUMENTS[1])
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group()
    rank = dist.get_rank() if distributed else 0
    world = dist.get_world_size() if distributed else 1
    data = sm.DataConfig(blend=[prefix], sequence_length=64, vocab_size=vocab_size)
    loader = sm.StreamLoader(
        data,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=GLOBAL_BATCH,
        dp_rank=rank,
        dp_size=world,
    )
    if STATE.exists():
        loader.load_state_dict(json.loads(STATE.read_text()))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Embedding(vocab_size, 32), nn.Linear(32, vocab_size))
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = iter(loader)
    # of each rank and step: the ranks share a global batch, however many they are
    micro_batches = GLOBAL_BATCH // (MICRO_BATCH * world)
    for step in range(STEPS):
        for _ in range(micro_batches):
            batch = next(batches)
            logits = model(batch["tokens"]).flatten(0, 1)
            # every label of plain data has a loss; others come with batch["loss_mask"]
            loss = nn.functional.cross_entropy(logits, batch["labels"].flatten())
            (loss / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: sample {loader.consumed_samples}, loss {float(loss):.3f}")
    if rank == 0:
        # of what was handed out, never of what was read ahead
        STATE.write_text(json.dumps(loader.state_dict()))
    loader.close()
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
