"""torchtitan's own Trainer on CPUs: its configs, loop, accumulation and checkpoints. What needs a GPU
is left out: the model is neither run nor stepped.
"""

from __future__ import annotations

import json
import os
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class _Anything(types.ModuleType):
    """A module in which every name is a decorator that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **named: given[0] if given and callable(given[0]) else lambda it: it


class _Cpu:
    """What torchtitan asks of torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *given: None)

    def get_device_properties(self, *given: Any) -> Any:
        return types.SimpleNamespace(total_memory=1 << 30)

    def get_device_name(self, *given: Any) -> str:
        return "cpu"

    def memory_stats(self, *given: Any) -> dict[str, int]:
        return {}

    def current_device(self) -> int:
        return 0


def on_cpus() -> None:
    """Make torchtitan importable, and let it take the CPU for its device."""
    import torch._dynamo
    import torch._inductor.compile_fx  # which would look into the triton that is put here

    try:
        import triton  # noqa: F401
    except ImportError:
        for name in ("triton", "triton.language"):
            stub = _Anything(name)
            stub.__spec__ = ModuleSpec(name, None)
            stub.__path__ = []
            sys.modules[name] = stub
        vars(sys.modules["triton"])["language"] = sys.modules["triton.language"]
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = _Cpu()
    utils.get_local_device = lambda: torch.device("cpu")


def titan_train(rank: int, blend: str, tokenizer: str, folder: Path, steps: int) -> None:
    """Train on as many ranks as there are, from the last checkpoint on, and note each batch."""
    warnings.simplefilter("ignore")
    size = dist.get_world_size() if dist.is_initialized() else 1
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size)})
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    on_cpus()
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import utils as titan_utils
    from torchtitan.trainer import Trainer

    from streammega.integrations.torchtitan import TitanPairs

    begun = len(list(folder.glob("checkpoint/*/.metadata")))
    log = (folder / f"rank-{rank}-of-{size}-run-{int(begun > 0)}").open("w")
    give = TitanPairs.__next__

    def noted(pairs: TitanPairs) -> Any:
        inputs, labels = give(pairs)
        fields = {"labels": labels.tolist(), "shape": list(labels.shape)}
        fields |= {name: value.tolist() for name, value in inputs.items()}
        log.write(json.dumps(fields) + "\n")
        log.flush()
        return inputs, labels

    TitanPairs.__next__ = noted  # type: ignore[method-assign, assignment]
    # of torch 2.14
    titan_utils.set_pg_timeouts = lambda **given: None
    # its attention needs a GPU, or minutes of a compiler
    Trainer.forward_backward_step = lambda trainer, **given: torch.zeros(())
    words = ["--module", "tests.support.titan_config", "--config", "tiny"]
    words += ["--dump_folder", str(folder), "--hf_assets_path", tokenizer]
    words += ["--training.steps", str(steps), "--dataloader.blend", blend]
    trainer = ConfigManager().parse_args(words).build()
    try:
        trainer.train()
    finally:
        TitanPairs.__next__ = give  # type: ignore[method-assign]
        trainer.close()
        log.close()
