"""Atomic checkpoints: torch.distributed.checkpoint for tensors, JSON for the position.

A checkpoint is a folder `step-00000100`. It is written as `step-00000100.partial` and renamed when every rank is done,
so what bears the final name is whole. The loader's state lies inside as `position.json`: readable, the same on every rank.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from streammega.errors import StateError

_NAME = re.compile(r"step-(\d{8})")


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, position: dict[str, Any], keep: int
) -> Path:
    """Write one checkpoint, collectively, and drop all but the last `keep`."""
    final = folder / f"step-{step:08d}"
    partial = final.with_suffix(".partial")
    if _rank() == 0:
        for stale in folder.glob("step-*.partial"):  # of runs that were killed while saving
            shutil.rmtree(stale)
        partial.mkdir(parents=True)
    _barrier()
    weights, moments = get_state_dict(model, optimizer)
    with _single_process_is_meant():
        state_dict_saver.save({"model": weights, "optimizer": moments}, checkpoint_id=partial, no_dist=not dist.is_initialized())
    if _rank() == 0:
        _write_json(partial / "position.json", position)
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    _barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load tensors into a model and optimizer, on any number of ranks. Raises StateError for another model's."""
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    try:
        with _single_process_is_meant():
            state_dict_loader.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except (CheckpointException, Exception) as error:  # the first is no Exception; all kinds mean the same here
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise StateError(
            f"{path}: does not fit this model and optimizer ({reason[-1]}); restore [model], or start a new out_dir"
        ) from None
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def load_position(path: Path) -> dict[str, Any]:
    """The step and the loader's state of a checkpoint."""
    try:
        position = json.loads((path / "position.json").read_text(encoding="utf-8"))
        return {"step": int(position["step"]), "data": dict(position["data"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path}/position.json: cannot be read ({error}); remove this checkpoint to resume from the one before"
        ) from None


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """torch warns when one process saves by itself, which one rank without torchrun rightly does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
