"""Ray Train with a StreamLoader: workers share global batches, and go on exactly when one has died.

    pip install 'streammega[ray-train]'
    python tools/examples/ray_train.py [PREFIX] [WORKERS]

Run it again, with another number of workers if you like: it goes on where the last run stopped.
Each worker notes in the folder "ray-run" what it trained on: a checksum of every sample.
"""

import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import streammega as sm

OUT = Path(os.environ.get("OUT", "ray-run")).absolute()
STEPS = int(os.environ.get("STEPS", "10"))
"""Of this run."""
GLOBAL_BATCH = 16
MICRO_BATCH = 2


def open_loader(prefix: str, rank: int, world: int) -> sm.StreamLoader:
    data = sm.DataConfig(blend=[prefix], sequence_length=64, vocab_size=1000)
    return sm.StreamLoader(
        data,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=GLOBAL_BATCH,
        dp_rank=rank,
        dp_size=world,
    )


def train_worker(options: dict[str, Any]) -> None:
    context = train.get_context()
    rank = context.get_world_rank()
    world = context.get_world_size()
    loader = open_loader(options["prefix"], rank, world)
    model = prepare_model(nn.Sequential(nn.Embedding(1000, 32), nn.Linear(32, 1000)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    module = model.module if hasattr(model, "module") else model
    trained = {"model": module, "optimizer": optimizer}
    checkpoint = train.get_checkpoint()  # of this run, when Ray restarts its workers
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            load(Path(folder), trained, loader)
    elif (OUT / "last" / "data.json").exists():  # of the run before
        load(OUT / "last", trained, loader)
    log = (OUT / f"rank-{rank}-of-{world}.jsonl").open("a")
    micro_batches = GLOBAL_BATCH // (MICRO_BATCH * world)
    while loader.consumed_samples < options["stop"]:
        taken = []
        for _ in range(micro_batches):
            batch = loader.take()
            logits = model(batch["tokens"]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, batch["labels"].flatten())
            (loss / micro_batches).backward()
            taken += [zlib.crc32(sample.numpy()) for sample in batch["tokens"]]
        optimizer.step()
        optimizer.zero_grad()
        seen = {"sample": loader.consumed_samples, "process": os.getpid(), "taken": taken}
        log.write(json.dumps(seen) + "\n")
        log.flush()
        report(rank, trained, loader, float(loss))
    loader.close()


def load(folder: Path, trained: dict[str, Any], loader: sm.StreamLoader) -> None:
    saved = torch.load(folder / "trained.pt", weights_only=True)
    for name, part in trained.items():
        part.load_state_dict(saved[name])
    loader.load_state_dict(json.loads((folder / "data.json").read_text()))


def report(rank: int, trained: dict[str, Any], loader: sm.StreamLoader, loss: float) -> None:
    """One checkpoint a step, by rank 0: the loader's state is the same on all ranks."""
    metrics = {"sample": loader.consumed_samples, "loss": loss}
    if rank:
        train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        states = {name: part.state_dict() for name, part in trained.items()}
        torch.save(states, Path(folder) / "trained.pt")
        (Path(folder) / "data.json").write_text(json.dumps(loader.state_dict()))
        train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    prefix = sys.argv[1] if len(sys.argv) > 1 else "mock://tokens=1000000,vocab=1000"
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    OUT.mkdir(parents=True, exist_ok=True)
    last = OUT / "last" / "data.json"
    begun = json.loads(last.read_text())["consumed_samples"] if last.exists() else 0
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"prefix": prefix, "stop": begun + STEPS * GLOBAL_BATCH},
        # a small share of a core: the model of this example is tiny
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name=f"from-{begun}",
            storage_path=str(OUT),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    result.checkpoint.to_directory(str(OUT / "last"))
    print(f"sample {result.metrics['sample']}, loss {result.metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
