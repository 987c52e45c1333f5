"""A checkpoint as one file that other programs read: of safetensors, or of torch."""

from __future__ import annotations

import io
import json
from pathlib import PurePath
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from streammega.config import StorageConfig
from streammega.errors import ConfigError
from streammega.errors.extras import import_extra
from streammega.parallel.rank_sync import RankSync
from streammega.storage import open_store
from streammega.storage.store import atomic_writer
from streammega.train.checkpoints.files import REQUEST_BYTES, read_tensors
from streammega.train.checkpoints.store import find_checkpoint

__all__ = ["Exported", "export_checkpoint"]

SAFETENSORS = ".safetensors"
TORCH = (".pt", ".pth")
EMBEDDING = "embedding.weight"
HEAD = "head.weight"
"""It is the embedding's, which a checkpoint holds once."""


class Exported(NamedTuple):
    """What a file of `export_checkpoint` holds: the step, and how many tensors in how many bytes."""

    step: int
    tensors: int
    bytes: int


def export_checkpoint(
    url: str, out: str, storage: StorageConfig | None = None, *, optimizer: bool = False
) -> Exported:
    """Write a checkpoint of any layout as one file, which appears whole.

    Its tensors have the names of the whole model, and `GPT.load_state_dict` takes them. The head's weight is
    the embedding's, under both names. This process holds all of them twice.

    Args:
        url: of the checkpoint, as `train.resume_from` names it.
        out: a path or URL, `.safetensors`, or `.pt` or `.pth` for `torch.load`. A file of safetensors has
            the step and the sizes of the model in its metadata.
        storage: how both are reached.
        optimizer: write its state too, by the names optimizer.<parameter>.<state>.

    Raises ConfigError for another suffix, a missing package or a checkpoint that is not there, StateError
    for a damaged one, StorageError.
    """
    storage = storage or StorageConfig()
    suffix = PurePath(out).suffix
    if suffix == SAFETENSORS:
        # First: a missing package is known before minutes of reading.
        safetensors = import_extra("safetensors.torch", "export", f"{out}: needs safetensors")
    elif suffix not in TORCH:
        raise ConfigError(
            f"{out}: the file to write must end in {SAFETENSORS}, or in {TORCH[0]} for torch.load"
        )
    place, step = find_checkpoint(url, storage)
    saved, metadata = place.read_metadata(step)
    state: dict[str, Tensor] = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        if optimizer or name.startswith("model."):
            state[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    read_tensors(place.files(saved.name), metadata, state, RankSync(None))
    tensors = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    tensors[HEAD] = tensors[EMBEDDING]
    if suffix == SAFETENSORS:
        # Its files have no two names of one tensor.
        tensors[HEAD] = tensors[HEAD].clone()
        sizes = json.dumps(saved.position.get("model", {}))
        details = {"format": "pt", "step": str(step), "model": sizes}
        data = memoryview(safetensors.save(tensors, details))
    else:
        # In memory: where the disk is full, torch's own writer of files ends the process.
        file = io.BytesIO()
        torch.save(tensors, file)
        data = memoryview(file.getvalue())
    store, key = open_store(out, storage)
    with atomic_writer(store, key) as writer:
        for start in range(0, len(data), REQUEST_BYTES):
            writer.write(data[start : start + REQUEST_BYTES])
    return Exported(step, len(tensors), len(data))
