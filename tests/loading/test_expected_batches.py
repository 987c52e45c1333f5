"""Batches of every feature at once are those that NumPy reads from the files by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from streammega import Column, DataConfig, PhaseConfig, StorageConfig, StreamLoader
from streammega.convert import convert
from streammega.dataset import IndexedDatasetWriter
from streammega.dataset.names import Kind
from streammega.errors import ConfigError
from streammega.order.sharding import zigzag_bounds
from streammega.parallel.broadcast import samples_of
from streammega.parallel.fields import rank_fields
from tests.support.builders import write_manifest
from tests.support.columns import add_column
from tests.support.examples import examples
from tests.support.expected import check_batch, shards_of

LENGTH = 24
EOD = 3
LEARNED = {1, 2}
"""Where no manifest names modes: all but 0."""
GLOBAL = 4
KINDS: tuple[Kind, ...] = ("bin", "zst", "tar")
COLUMNS = {
    "teacher": Column("uint16", 3, fill=9),
    "weight": Column("bfloat16", align="tokens", fill=-1.5, missing=1.0),
}
"""Those of `web`; `code` has no weights."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two shards with modes and documents of several sequences, in
    each kind of shards, and packed; another of one shard.
    """
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(11)
    for kind in KINDS:
        for name, shards in (
            ("web", ("web-00000-of-00002", "web-00001-of-00002")),
            ("code", ("code",)),
        ):
            (folder / kind / name).mkdir(parents=True)
            paths = [str(folder / kind / name / shard) for shard in shards]
            for path in paths:
                with IndexedDatasetWriter(path, np.uint16, multimodal=True, kind=kind) as writer:
                    for _ in range(60):
                        lengths = rng.integers(1, 20, rng.integers(1, 4))
                        ids = rng.integers(4, 500, lengths.sum())
                        modes = rng.integers(0, 3, len(lengths)).tolist()
                        writer.add_document(np.append(ids, EOD), [*lengths, 1], [*modes, 0])
            write_manifest(folder / kind / name / name, shards, kind)
    for name in ("web", "code"):
        source = str(folder / "bin" / name / name)
        packed = str(folder / "packed" / name / name)
        convert([f"{source}.manifest.json"], packed, pack_length=LENGTH, eod_id=EOD, workers=1)
    for form in (*KINDS, "packed"):
        for name, written in (("web", [*COLUMNS]), ("code", ["teacher"])):
            for number, column in enumerate(written):
                add_column(folder / form / name / name, column, COLUMNS[column], shards=[number, 7])
    return folder


FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@pytest.mark.many_examples
@pytest.mark.guarantee("batches-by-numpy", "columns-values-of-tokens")
@settings(max_examples=examples(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    order=st.sampled_from(["stream", "megatron", "sequential"]),
    kind=st.sampled_from([*KINDS, "packed"]),
    flags=st.sets(st.sampled_from(FLAGS)),
    fields=st.sampled_from([None, [..., "dataset_id"]]),
    masked_by_mode=st.booleans(),
    pad_id=st.sampled_from([None, 7, 600]),
    add_extra_token=st.booleans(),
    by_documents=st.booleans(),
    gone=st.sets(st.integers(0, 50), max_size=20),
    since=st.sampled_from([0, 9, 20]),
    ranks=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2, 3]),
    changes=st.booleans(),
    columns=st.sampled_from([[], ["teacher"], ["weight", "teacher"]]),
)
def test_batches_of_any_features_are_those_of_the_files(
    data: Path, tmp_path_factory: pytest.TempPathFactory, order: Any, kind: str, flags: set[str],
    fields: Any, masked_by_mode: bool, pad_id: int | None, add_extra_token: bool, by_documents: bool,
    gone: set[int], since: int, ranks: int, cp: int, changes: bool, columns: list[str],
) -> None:  # fmt: skip
    folder = data / kind
    names = [str(folder / name / name) for name in ("web", "code")]
    documents = [f"{names[1]}#{number}" for number in sorted(gone)]
    if by_documents:  # which the stream order cannot, and which resets do by ids
        order = "megatron" if order == "stream" else order
        flags -= {"reset_position_ids", "reset_attention_mask"}
    chosen: Any = dict.fromkeys(flags, True)
    try:
        config = DataConfig(
            blend=[(names[0], 0.7), (names[1], 0.3)],
            sequence_length=LENGTH,
            order=order,
            num_samples=(48, 0, 0),
            eod_id=EOD,
            pad_id=pad_id,
            add_extra_token=add_extra_token,
            mask_loss_by_mode=masked_by_mode,
            inter_document_masking=by_documents,
            fields=fields,
            columns={name: Column(missing=COLUMNS[name].missing) for name in columns},
            exclude_documents=[(since, documents)] if gone else (),
            storage=StorageConfig(cache_dir=tmp_path_factory.getbasetemp() / "orders"),
            **chosen,
        )
        if order == "stream" and changes:  # of the weights, in the middle of what is read below
            other = [(names[0], 0.2), (names[1], 0.8)]
            config = replace(config, phases=[PhaseConfig(first_sample=12, blend=other)])
        sizes: Any = {"micro_batch_size": 2, "global_batch_size": GLOBAL, "dp_size": ranks}
        loaders = [StreamLoader(config, dp_rank=rank, **sizes) for rank in range(ranks)]
    except ConfigError as error:
        event(str(error)[:60])
        assume(False)
    shard = shards_of(names[1])[0]
    truth: Any = {
        "excluded": {(shard, number): since for number in gone},
        "learned": LEARNED if masked_by_mode else None,
        "columns": {name: COLUMNS[name] for name in columns},
    }
    for loader in loaders:
        with loader:
            for consumed in islice(loader.dataset.positions(), 8):
                check_batch(next(loader), loader.dataset, consumed, **truth)
                check_batch(loader.dataset.batch(consumed), loader.dataset, consumed, **truth)
    if by_documents:  # whose bounds ids do not tell
        return
    for rank in range(cp):
        bounds = zigzag_bounds(LENGTH, rank, cp)
        kept = np.concatenate([np.arange(*part) for part in bounds])
        with StreamLoader(
            config, **sizes, dp_rank=0, ids_only=True, cp_rank=rank, cp_size=cp
        ) as loader:
            for consumed in islice(loader.dataset.positions(), 8):
                raw = next(loader)
                segment = loader.dataset.samples.segment_at(consumed)
                assert [*raw] == ["ids", "valid", *segment.columns, "dataset_id"]
                batch = rank_fields(samples_of(raw), config, bounds, columns=segment.column_fields)
                if cp > 1:  # of the kept tokens: cut where the parts meet too
                    batch.pop("cu_seqlens", None)
                check_batch(batch, loader.dataset, consumed, **truth, kept=kept)
