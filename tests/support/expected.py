"""What batches must be, by NumPy and the files alone. Of the package it asks where samples are stored
(`locate`), which of them a rank reads, and what the config says; it reads, masks, excludes and pads
by itself, one sample after the other.
"""

from __future__ import annotations

import glob
import io
import os
import tarfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard

from streammega import Column, StreamingDataset

DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
NEVER = 1 << 60
Columns = Mapping[str, Column]
"""The stored columns of batches, by name, with their `missing`."""
Excluded = Mapping[tuple[str, int], int]
"""By (shard, document), the first sample that does not see it."""


class Tokens(NamedTuple):
    """Of each stored token: its id, mode and document, and whether a sequence begins with it."""

    ids: Any
    mode: Any
    document: Any
    begins: Any


@cache
def tokens_of(prefix: str) -> Tokens:
    """A shard: a pair, or its zstd or tar form."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:17] == b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little")
    dtype = DTYPES[index[17]]
    sequences, bounds = np.frombuffer(index, "<i8", 2, 18).tolist()
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    first_of_document = np.frombuffer(index, "<i8", bounds, 34 + 12 * sequences)
    modes = np.frombuffer(index, "<i1", -1, 34 + 12 * sequences + 8 * bounds)
    ids = stored_ids(prefix, dtype)
    places = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences) // ids.itemsize
    if os.path.exists(f"{prefix}.tar"):  # whose places are those of bytes between headers
        places = np.cumsum(lengths) - lengths
    mode = np.zeros(len(ids), np.int8)
    document = np.full(len(ids), -1)
    begins = np.zeros(len(ids), bool)
    of_sequence = np.repeat(np.arange(bounds - 1), np.diff(first_of_document))
    for number in np.flatnonzero(lengths):
        part = slice(places[number], places[number] + lengths[number])
        mode[part] = modes[number] if len(modes) else 0
        document[part] = of_sequence[number]
        begins[places[number]] = True
    return Tokens(ids.astype(np.int64), mode, document, begins)


def stored_ids(prefix: str, dtype: str) -> Any:
    if os.path.exists(f"{prefix}.bin"):
        return np.fromfile(f"{prefix}.bin", dtype)
    if os.path.exists(f"{prefix}.bin.zst"):
        packed = io.BytesIO(Path(f"{prefix}.bin.zst").read_bytes())
        reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        return np.frombuffer(reader.read(), dtype)
    with tarfile.open(f"{prefix}.tar") as tar:
        members = [tar.extractfile(member) for member in tar if member.name.endswith(".npy")]
        arrays = [np.load(io.BytesIO(member.read())) for member in members if member]
        return np.concatenate(arrays)


@cache
def column_of(shard: str, name: str, size: int) -> Any:
    """The bytes of the values of each token of a shard, [tokens, size]; None: it has no such column."""
    path = Path(f"{shard}.col-{name}")
    return np.fromfile(path, np.uint8).reshape(-1, size) if path.exists() else None


def bytes_of(value: Any, column: Column) -> Any:
    """The bytes of a token whose values are all this one."""
    values = torch.tensor([value] * (column.width or 1), dtype=torch.float64)
    return values.to(getattr(torch, column.dtype)).view(torch.uint8).numpy()


def shards_of(url: str) -> list[str]:
    """The shards of what a source names: one of them, or a dataset whose shards are end to end."""
    prefix = url
    if prefix.endswith("/*"):
        prefix = prefix[:-1]
    for suffix in (".bin", ".bin.zst", ".tar"):
        prefix = prefix.removesuffix(suffix)
    if os.path.exists(f"{prefix}.idx"):
        return [prefix]
    found = glob.glob(f"{prefix.rstrip('/')}/*.idx") or glob.glob(f"{prefix}-*-of-*.idx")
    return sorted(name.removesuffix(".idx") for name in found)


def sample_of(
    segment: Any,
    number: int,
    excluded: Excluded,
    learned: set[int] | None,
    local: Callable[[str], str],
    written: Columns,
) -> dict[str, Any]:
    """The fields of one sample."""
    config = segment.config
    length, pad, eod = config.sequence_length, config.effective_pad_id, config.eod_id
    found = segment.locate(np.array([number]))
    is_packed = segment.files[0][0].bin_tokens is not None
    rows: list[Any] = []
    values: dict[str, list[Any]] = {name: [] for name in written}
    places = list(zip(found.dataset, found.file, found.start, found.stop, strict=True))
    for dataset, file, start, stop in places[:1] if is_packed else places:
        for shard in shards_of(local(segment.files[dataset][file].url)):
            stored = tokens_of(shard)
            part = np.arange(len(stored.ids))[max(start, 0) : max(stop, 0)]
            if is_packed and len(part):  # all of the bin that is of a document
                part = np.arange(length) + start // length * length
                part = part[stored.document[part] >= 0]
            since = [excluded.get((shard, at), NEVER) for at in stored.document[part].tolist()]
            is_gone = np.array(since, np.int64) <= number
            for name, column in written.items():
                fill = bytes_of(column.fill or 0, column)
                of_file = column_of(shard, name, len(fill))
                if of_file is None:
                    there = np.repeat(bytes_of(column.missing, column)[None], len(part), 0)
                else:
                    there = of_file[part].copy()
                there[is_gone] = fill
                values[name].append(there)
            rows.append((*(column[part] for column in stored), is_gone))
            start, stop = start - len(stored.ids), stop - len(stored.ids)
    if not rows:  # a sample after the last one is padding
        rows = [tuple(np.empty(0, kind) for kind in (int, int, int, bool, bool))]
    columns: Any = [np.concatenate(column) for column in zip(*rows, strict=True)]
    ids, mode, document, begins, gone = columns
    if is_packed:  # bins are of documents, whatever sequences these have
        begins = np.diff(document, prepend=-1) != 0
    count = min(len(ids), length + 1)
    whole = np.full(length + 1, pad)
    whole[:count] = np.where(gone, eod, ids)[:count]
    has_loss = np.zeros(length + 1, bool)
    has_loss[:count] = (
        ~gone[:count] if learned is None else ~gone[:count] & np.isin(mode[:count], [*learned])
    )
    has_loss[1:count] &= ~gone[: count - 1]
    tokens, labels = whole[:-1].copy(), whole[1:].copy()
    mask = has_loss[1:] & (labels != pad)
    if config.eod_mask_loss:
        mask &= tokens != eod
    is_end = tokens == eod if eod is not None else np.zeros(length, bool)
    is_first = np.concatenate([[True], is_end[:-1]])
    if config.inter_document_masking:
        is_first[1:] = False  # padding belongs to the last document
        is_first[1:count] = begins[1 : min(count, length)]
    numbers = np.arange(length)
    restarts = config.reset_position_ids or config.inter_document_masking
    restart = np.maximum.accumulate(np.where(is_first, numbers, 0)) if restarts else 0
    ends = np.flatnonzero(is_first if config.inter_document_masking else np.append(False, is_end))
    document_of = np.cumsum(is_first) if config.reset_attention_mask else np.zeros(length)
    of_columns = {}
    for name, column in written.items():
        fill = bytes_of(column.fill or 0, column)
        row = np.repeat(fill[None], length + 1, 0)
        row[:count] = np.concatenate([np.empty((0, len(fill)), np.uint8), *values[name]])[:count]
        of_columns[name] = row[:-1] if column.align == "tokens" else row[1:]
    return of_columns | {
        "tokens": np.where(tokens == pad, 0, tokens),
        "labels": np.where(labels == pad, 0, labels),
        "loss_mask": mask.astype(np.float32),
        "position_ids": numbers - restart,
        "cu_seqlens": np.unique([0, *ends, length]).astype(np.int32),
        "max_seqlen": np.diff(np.unique([0, *ends, length])).max(),
        "attention_mask": [(numbers > numbers[:, None]) | (document_of[:, None] != document_of)],
        "dataset_id": int(found.dataset_of_sample[0]),
    }


def checked_batch(dataset: StreamingDataset, consumed: int, **truth: Any) -> dict[str, Any]:
    """A batch by its position alone, which other batches are compared with: it is what it must be.

    truth: see `check_batch`.
    """
    batch = dataset.batch(consumed)
    check_batch(batch, dataset, consumed, **truth)
    return batch


def check_batch(
    batch: Mapping[str, Any],
    dataset: StreamingDataset,
    consumed: int,
    *,
    excluded: Excluded | None = None,
    learned: set[int] | None = None,
    local: Callable[[str], str] = str,
    kept: Any = slice(None),
    columns: Columns | None = None,
) -> None:
    """Compare a batch of a rank with what it must be. local: the local name of a file that is remote.
    kept: the tokens that a context-parallel rank keeps.
    """
    segment = dataset.samples.segment_at(consumed)
    numbers = dataset.sample_ids(consumed).tolist()
    stored = columns or {}
    rows = [
        sample_of(segment, number, excluded or {}, learned, local, stored) for number in numbers
    ]
    assert {*stored} <= {*batch}
    for name in batch:
        if name in stored:
            shape = (
                *batch["tokens"].shape,
                *([width] if (width := stored[name].width or 1) > 1 else []),
            )
            assert (batch[name].dtype, batch[name].shape) == (
                getattr(torch, stored[name].dtype),
                shape,
            )
            bits = batch[name].contiguous().view(torch.uint8).numpy()
            values = np.stack([row[name] for row in rows])[:, kept]
            np.testing.assert_array_equal(bits.reshape(values.shape), values, name)
            continue
        wanted = [row[name.removesuffix("_whole")] for row in rows]
        got = batch[name].numpy()
        if name.startswith("cu_seqlens"):
            fill = segment.config.sequence_length
            width = max(map(len, wanted))
            wanted = [np.pad(row, (0, width - len(row)), constant_values=fill) for row in wanted]
            if segment.config.inter_document_masking:  # in Megatron's form, with empty pieces too
                assert got.shape[1] == fill + 1
                rest = [np.unique(row) for row in got]
                got = np.array(
                    [np.pad(row, (0, width - len(row)), constant_values=fill) for row in rest]
                )
        expected = np.stack(wanted)
        if expected.ndim > 1 and name not in ("cu_seqlens", "cu_seqlens_whole"):
            expected = expected[..., kept, :] if name == "attention_mask" else expected[:, kept]
        np.testing.assert_array_equal(got, expected, f"{name} of samples {numbers}")
