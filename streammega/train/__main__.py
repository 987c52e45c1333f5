"""`torchrun -m streammega.train run.toml [section.name=value ...]`: the training program."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from streammega.errors import StreammegaError
from streammega.train.config import load_run
from streammega.train.loop import Trainer


def run(path: str, overrides: Sequence[str]) -> None:
    """Train as the TOML file says, on the ranks that torchrun started (one, without it). Resumes by itself."""
    config = load_run(path, overrides)
    device = _start_ranks()
    try:
        trainer = Trainer(config, device)
        trainer.resume()
        trainer.run()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _start_ranks() -> torch.device:
    """Join torchrun's process group (NCCL where CUDA is, else gloo); the device of this rank."""
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    return device


def main(arguments: Sequence[str]) -> int:
    """The command line. Known errors are one message on every rank that has them, not a traceback."""
    rank = os.environ.get("RANK", "0")
    level = logging.INFO if rank == "0" else logging.WARNING
    logging.basicConfig(level=level, format=f"[{rank}] %(message)s", stream=sys.stderr)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: torchrun --nproc-per-node N -m streammega.train run.toml [section.name=value ...]\n\n{__doc__}")
        return 0 if arguments else 2
    try:
        run(arguments[0], arguments[1:])
    except StreammegaError as error:
        print(f"error (rank {rank}): {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
