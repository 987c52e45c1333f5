"""Runs that write columns whose value at a token is a hash of the token's place, and what must be in the
objects of shards afterwards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from streammega import Column, ColumnWriter, DataConfig, IndexedDataset, StreamLoader
from streammega.config.fields import ITEMSIZES
from streammega.dataset.manifest import Manifest
from streammega.dataset.opening import open_manifests
from streammega.errors import ConfigError, StateError
from streammega.storage import open_store
from streammega.storage.object_ops import read_object
from tests.support.columns import hashed

Columns = Mapping[str, Column]


def starts_of(config: DataConfig) -> NDArray[np.int64]:
    """The token with which each sample begins, by the `.idx` alone: in bins, that of its bin."""
    (name,) = config.blend  # type: ignore[misc]
    indexed = IndexedDataset(str(name), config.storage)
    if indexed.bin_tokens is not None:
        return indexed.bin_offsets() // indexed.dtype.itemsize
    tokens = int(indexed.sequence_lengths.sum(dtype=np.int64)) - config.add_extra_token
    return np.arange(tokens // config.sequence_length) * config.sequence_length


def values_of(
    column: Column, samples: NDArray[np.int64], starts: NDArray[np.int64], length: int
) -> torch.Tensor:
    """What a teacher gives for samples, [samples, length, width]: that of the token which is the label,
    also where there is none.
    """
    shift = 0 if column.align == "tokens" else 1
    first = np.append(starts, np.zeros(1000, np.int64))[samples]
    place = first[:, None] + np.arange(length) + shift
    return torch.from_numpy(hashed(place, column)).view(getattr(torch, column.dtype))


def written_tokens(config: DataConfig, align: str | None) -> NDArray[np.bool_]:
    """Whether each token of a dataset is one whose value a writer stores, by the `.idx` alone."""
    (name,) = config.blend  # type: ignore[misc]
    indexed = IndexedDataset(str(name), config.storage)
    is_listed = np.zeros(sum(shard.tokens for shard in indexed.manifest.shards) + 1, bool)
    offsets = indexed.sequence_offsets // indexed.dtype.itemsize
    for start, size in zip(offsets.tolist(), indexed.sequence_lengths.tolist(), strict=True):
        is_listed[start : start + size] = True
    has_extra = config.add_extra_token and indexed.bin_tokens is None
    is_written = np.zeros(len(is_listed), bool)
    for start in starts_of(config).tolist():
        first = start + (align != "tokens")
        is_written[first : start + config.sequence_length + (has_extra and align != "tokens")] = (
            True
        )
    return (is_listed & is_written)[:-1]


def check_published(config: DataConfig, columns: Columns) -> Manifest:
    """Compare all objects of columns with hashes; returns the manifest."""
    (name,) = config.blend  # type: ignore[misc]
    (manifest,) = open_manifests([str(name)], config.storage, columns=[*columns], looks_again=True)
    by_name = {column.name: column for column in manifest.columns}
    for name, column in columns.items():
        stored = by_name[name]
        assert (stored.dtype, stored.width) == (column.dtype, column.width or 1)
        assert stored.align == (column.align or "labels")
        place = np.arange(sum(shard.tokens for shard in manifest.shards))
        wanted = hashed(place, column)
        fill = torch.tensor([column.fill or 0], dtype=torch.float64)
        if "int" in column.dtype:
            fill = torch.from_numpy(np.array([column.fill or 0], column.dtype))
        as_bytes = fill.to(getattr(torch, column.dtype)).view(torch.uint8).numpy()
        is_written = written_tokens(config, column.align)
        assert is_written.any()
        wanted[~is_written] = np.tile(as_bytes, column.width or 1)
        begin = 0
        for shard, file in zip(manifest.shards, stored.files, strict=True):
            assert file is not None
            data = object_of(file.name, config)
            assert len(data) == shard.tokens * (column.width or 1) * ITEMSIZES[column.dtype]
            part = np.frombuffer(data, np.uint8).reshape(shard.tokens, -1)
            np.testing.assert_array_equal(part, wanted[begin : begin + shard.tokens])
            begin += shard.tokens
    return manifest


def object_of(url: str, config: DataConfig) -> bytes:
    store, key = open_store(url, config.storage)
    return read_object(store, key)[0]


class Run:
    """Ranks of a run in one process, which know nothing of each other: each step is made by one after
    the other. `state` is the one that all of them have saved last.
    """

    def __init__(
        self, config: DataConfig, columns: Columns, global_batch_size: int, save_every: int = 1
    ) -> None:
        self.config = config
        self.columns = columns
        self.global_batch_size = global_batch_size
        self.save_every = save_every
        self.starts = starts_of(config)
        self.state: dict[str, Any] | None = None

    @contextmanager
    def open(self, ranks: int, **options: Any) -> Iterator[list[tuple[StreamLoader, ColumnWriter]]]:
        """The loader and the writer of each rank, at the state."""
        opened = []
        for rank in range(ranks):
            loader = StreamLoader(
                self.config,
                micro_batch_size=1,
                global_batch_size=self.global_batch_size,
                dp_rank=rank,
                dp_size=ranks,
                last="pad",
            )
            writer = ColumnWriter(loader, self.columns, **options)
            if self.state is not None:
                writer.load_state_dict(json.loads(json.dumps(self.state)))
            opened.append((loader, writer))
        try:
            yield opened
        finally:
            for loader, _ in opened:
                loader.close()

    def write_step(self, loader: StreamLoader, writer: ColumnWriter) -> bool:
        """Take a batch and write its values; False at the end of the data."""
        position = loader.consumed_samples
        if next(loader, None) is None:
            return False
        length = self.config.sequence_length
        samples = loader.dataset.sample_ids(position)
        writer.write(
            {
                name: values_of(one, samples, self.starts, length)
                for name, one in self.columns.items()
            }
        )
        return True

    def go(self, ranks: int, steps: int = 1 << 30, **options: Any) -> bool:
        """Write so many steps, or all and publish; whether it was published."""
        with self.open(ranks, **options) as opened:
            for _ in range(steps):
                if not all(self.write_step(*one) for one in opened):
                    for _, writer in reversed(opened):
                        writer.publish()
                    return True
                batches, offset = divmod(opened[0][0].consumed_samples, self.global_batch_size)
                if not offset and batches % self.save_every == 0:
                    states = [writer.state_dict() for _, writer in opened]
                    assert states == [states[0]] * ranks
                    self.state = states[0]
        return False


def write_on_ranks(
    rank: int, config: DataConfig, columns: Columns, sizes: dict[str, Any], checkpoint: str
) -> None:
    """One rank of a real job: goes on from the state in a file, saves after each global batch, publishes."""
    run = Run(config, columns, 0)
    loader = StreamLoader(config, dp_rank=rank, dp_size=dist.get_world_size(), last="pad", **sizes)
    with closing(loader):
        writer = ColumnWriter(loader, columns)
        path = Path(checkpoint)
        if path.exists():
            writer.load_state_dict(json.loads(path.read_text()))
        dist.barrier()
        while run.write_step(loader, writer):
            if loader.consumed_samples % loader.dataset.global_batch_size == 0:
                state = writer.state_dict()
                dist.barrier()
                if rank == 0:
                    path.with_suffix(".new").write_text(json.dumps(state))
                    os.replace(path.with_suffix(".new"), path)
        writer.publish()
        writer.publish()


def write_on_some(rank: int, config: DataConfig, columns: Columns, *, early: bool) -> str:
    """Ranks 1 and 2 of three are the data-parallel ones; "" or the error of a rank. early: one of them
    publishes before the end.
    """
    group = dist.new_group([1, 2])
    if rank == 0:
        return ""
    options: Any = {"micro_batch_size": 1, "global_batch_size": 4, "dp_size": 2, "last": "pad"}
    with StreamLoader(config, dp_rank=rank - 1, **options) as loader:
        with pytest.raises(ConfigError, match="3 ranks"):
            ColumnWriter(loader, columns)
        writer = ColumnWriter(loader, columns, group=group)
        run = Run(config, columns, 4)
        while not (early and rank == 2 and loader.consumed_samples) and run.write_step(
            loader, writer
        ):
            pass
        try:
            writer.publish()
        except StateError as error:
            return str(error)
    return ""


def write_alone(rank: int, config: DataConfig, columns: Columns) -> None:
    """One of several ranks writes, as the one that has a tensor-parallel group's logits."""
    if rank == 1:
        loader = StreamLoader(
            config, micro_batch_size=2, global_batch_size=4, dp_size=1, last="pad"
        )
        with loader:
            writer = ColumnWriter(loader, columns)
            run = Run(config, columns, 4)
            while run.write_step(loader, writer):
                pass
            writer.publish()


def write_other_columns(rank: int, config: DataConfig) -> str:
    """Each rank has a fill of its own; the error of a rank."""
    options: Any = {"micro_batch_size": 1, "global_batch_size": 4, "last": "pad"}
    with StreamLoader(config, dp_rank=rank, dp_size=2, **options) as loader:
        columns = {"x": Column("int32", fill=rank)}
        with pytest.raises(ConfigError) as raised:
            Run(config, columns, 4).write_step(loader, ColumnWriter(loader, columns))
    return str(raised.value)
