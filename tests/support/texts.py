"""Texts of shards that are made up, and what a stream of them gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from streammega import FieldsConfig
from streammega.integrations.webdataset import TextStream

EOD = 256
FIELDS = FieldsConfig(sequence_length=8, eod_id=EOD)


def encode(text: str) -> list[int]:
    return list(text.encode())


def corpus(counts: Sequence[int], seed: int = 0) -> dict[str, list[str]]:
    """So many texts in each of several shards, of 0 to 40 letters."""
    rng = np.random.default_rng(seed)
    return {
        f"shard-{number}": ["x" * int(rng.integers(0, 40)) + str(rng.integers(9)) for _ in range(n)]
        for number, n in enumerate(counts)
    }


def stream_of(shards: dict[str, list[str]], **given: Any) -> TextStream:
    defaults: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4, "passes": 1}
    texts: Callable[[str], list[str]] = shards.__getitem__
    return TextStream(list(shards), encode, FIELDS, texts=texts, **(defaults | given))


def samples_of(shards: dict[str, list[str]], passes: int = 1) -> list[list[int]]:
    """What a stream in order gives, made at once."""
    ids = [i for texts in shards.values() for text in texts for i in [*encode(text), EOD]] * passes
    return [ids[start : start + 9] for start in range(0, len(ids) - 8, 8)]


def rows(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """Samples with the id after them."""
    return torch.cat([batch["tokens"], batch["labels"][:, -1:]], 1).tolist()
