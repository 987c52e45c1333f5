"""The real megatron-core, as a test oracle: its own datasets, built over the same files."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
    warnings.simplefilter("ignore")  # it warns of optional packages at import
    # torch.compile, which decorates what tests never call, would import its compiler for a second
    patch.setenv("TORCHDYNAMO_DISABLE", "1")
    from megatron.core import parallel_state
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
    from megatron.core.datasets.utils import Split

SPLITS = {"train": Split.train, "valid": Split.valid, "test": Split.test}

__all__ = [
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Split",
    "gpt_config",
    "gpt_dataset",
    "parallel_state",
    "write_pair",
]


class Tokenizer(SimpleNamespace):
    """What Megatron asks of a tokenizer."""

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "test"}


def gpt_config(cache: Path | None, sequence_length: int, seed: int, **options: Any) -> Any:
    tokenizer = Tokenizer(
        eod=options.pop("eod", 0),
        pad=options.pop("pad", -1),
        vocab_size=options.pop("vocab_size", 1000),
    )
    defaults: dict[str, Any] = {
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "blend": (["unused"], None),
        "split": "1,0,0",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GPTDatasetConfig(
            random_seed=seed,
            sequence_length=sequence_length,
            path_to_cache=str(cache) if cache else None,
            tokenizer=tokenizer,
            **(defaults | options),
        )


def config_fields() -> set[str]:
    """The settings that the installed version has."""
    return {field.name for field in dataclasses.fields(GPTDatasetConfig)}


def gpt_dataset(
    prefix: str, ids: np.ndarray, num_samples: int | None, split: str, config: Any
) -> Any:
    indexed = IndexedDataset(prefix, multimodal=False, mmap=True)
    return GPTDataset(indexed, prefix, ids.astype(np.int32), num_samples, SPLITS[split], config)


def write_pair(
    prefix: str, sequences: list[np.ndarray], dtype: Any, documents: list[int] | None = None
) -> None:
    """A pair written by Megatron: a document per sequence, or bounds after the given sequence
    numbers.
    """
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    import torch

    for number, sequence in enumerate(sequences):
        builder.add_item(torch.from_numpy(sequence.astype(np.int64)))
        if documents is None or number + 1 in documents:
            builder.end_document()
    finalize(builder, f"{prefix}.idx")


def finalize(builder: Any, index_path: str) -> None:
    """Finish a pair; Megatron leaves its files to the collector, whose warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder.finalize(index_path)
        builder.__dict__.clear()
        gc.collect()


def merge_pairs(prefixes: list[str], output: str, dtype: Any) -> None:
    """Megatron's own merge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = IndexedDatasetBuilder(f"{output}.bin", dtype=np.dtype(dtype).type)
        for prefix in prefixes:
            builder.add_index(prefix)
    finalize(builder, f"{output}.idx")
