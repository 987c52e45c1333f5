"""A loop of your own with only get_batch: each rank of tensor and context parallelism gets the fields and
tokens that it needs.

    torchrun --nproc-per-node 4 tools/examples/batches.py [PREFIX]

Tensor-parallel rank 0 reads, and sends the ids to its group as one message of two bytes a token. Each rank
makes labels, masks and positions of them.
"""

import os
import sys

import torch.distributed as dist

import streammega as sm

PREFIX = sys.argv[1] if len(sys.argv) > 1 else "mock://tokens=1000000,vocab=1000"


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit(
            "this is one rank of several: run torchrun --nproc-per-node 4 tools/examples/batches.py"
        )
    dist.init_process_group()
    world = dist.get_world_size()
    # Two ranks are enough for tensor parallelism, and four for context parallelism too.
    tp = 2 if world % 2 == 0 else 1
    cp = 2 if world % 4 == 0 else 1
    ranks = sm.Ranks(sm.ParallelLayout.of_world(world, tp=tp, cp=cp))
    data = sm.DataConfig(blend=[PREFIX], sequence_length=64)
    with sm.open_loader(data, ranks, micro_batch_size=2, global_batch_size=8) as loader:
        for step in range(3):
            # or iterate sm.RankBatches(loader, ranks, device): one batch ahead
            batch = sm.get_batch(loader, ranks)
            shape = tuple(batch["tokens"].shape)
            first_position = int(batch["position_ids"][0, 0])
            line = f"step {step}: {ranks.at}: {shape} tokens, from position {first_position}"
            lines = [""] * world
            dist.all_gather_object(lines, line)
            if dist.get_rank() == 0:
                print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
