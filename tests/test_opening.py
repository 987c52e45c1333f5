"""Opening datasets: what does not belong together is refused, and few requests are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, IndexedDataset, IndexedDatasetWriter, StreamLoader
from streammega.errors import FormatError
from streammega.index.shards import SUFFIXES

KINDS = ["bin", "zst", "tar"]


def write(name: str, lengths: list[int], dtype: Any = np.uint16) -> None:
    """A shard of sequences of so many tokens, one document each."""
    with IndexedDatasetWriter(name, dtype) as writer:
        for length in lengths:
            writer.add_item(np.arange(length) % 1000)
            writer.end_document()


def open_in(order: Any, name: str, cache: Path) -> None:
    """Open a dataset as a run in that order does."""
    config = DataConfig(blend=[name], sequence_length=8, order=order, num_samples=(40, 0, 0), index_cache_dir=cache)
    StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()


@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
@pytest.mark.parametrize("size", [-1, -20, 2, 20])
def test_a_bin_of_another_size_than_its_index_says_is_refused_in_every_order(tmp_path: Path, order: str, size: int) -> None:
    write(str(tmp_path / "a"), [30, 50, 20])
    path = tmp_path / "a.bin"
    data = path.read_bytes()
    path.write_bytes(data[:size] if size < 0 else data + bytes(size))
    with pytest.raises(FormatError, match=r"a\.idx.*200|a\.idx.*sequence 2 lies") as caught:
        open_in(order, str(tmp_path / "a"), tmp_path)
    assert str(tmp_path / "a.bin") in str(caught.value)
    assert str(len(data) + size) in str(caught.value)


@pytest.mark.parametrize("order", ["stream", "megatron"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", [[30, 50], [30, 50, 20, 40]])
def test_the_index_of_another_dataset_is_refused(tmp_path: Path, order: str, kind: Any, other: list[int]) -> None:
    name = str(tmp_path / "a") + SUFFIXES[kind]
    write(name, [30, 50, 20])
    write(str(tmp_path / "b") + SUFFIXES[kind], other)
    (tmp_path / "a.idx").write_bytes((tmp_path / "b.idx").read_bytes())
    with pytest.raises(FormatError, match=r"a\.(idx|tar)"):
        open_in(order, name, tmp_path)


@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_an_index_without_sequences_over_tokens_is_refused(tmp_path: Path, order: str) -> None:
    write(str(tmp_path / "a"), [30])
    write(str(tmp_path / "b"), [])
    (tmp_path / "a.idx").write_bytes((tmp_path / "b.idx").read_bytes())
    with pytest.raises(FormatError, match=r"end at byte 0, but .*a\.bin has 60 bytes"):
        open_in(order, str(tmp_path / "a"), tmp_path)


def test_an_index_of_sequences_that_end_before_they_begin_is_refused(tmp_path: Path) -> None:
    write(str(tmp_path / "a"), [30, 50, 20])
    data = bytearray((tmp_path / "a.idx").read_bytes())
    data[34 + 8 : 34 + 12] = (-1).to_bytes(4, "little", signed=True)
    (tmp_path / "a.idx").write_bytes(data)
    for order in ("stream", "megatron"):
        with pytest.raises(FormatError, match=r"rebuild the \.idx"):
            open_in(order, str(tmp_path / "a"), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_of_no_sequence_opens(tmp_path: Path, kind: Any) -> None:
    name = str(tmp_path / "a") + SUFFIXES[kind]
    write(name, [])
    assert len(IndexedDataset(name)) == 0
