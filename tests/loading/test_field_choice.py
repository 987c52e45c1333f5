"""Which fields batches have: those of any choice are as in batches with all fields, wherever batches
are made, and nothing else is made, sent or held.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streammega import (
    DataConfig,
    ParallelLayout,
    Ranks,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
    batch_fields,
    get_batch,
)
from streammega.errors import ConfigError
from streammega.parallel import open_loader
from streammega.samples.fields import Batch
from streammega.train.config import load_run
from tests.support.builders import write_dataset, write_run_file
from tests.support.examples import examples
from tests.support.gang import on_ranks

EOD = 7
SIZES: Any = {"micro_batch_size": 2, "global_batch_size": 4}
LENGTH = 16
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"order": "stream"},
    "eod": {"order": "stream", "eod_mask_loss": True},
    "documents": {"order": "stream", **DOCUMENTS},
    "sequences": {"inter_document_masking": True},
}
NAMES = ["tokens", "labels", "loss_mask", "position_ids"]
EXTRAS = {
    "documents": ["cu_seqlens", "attention_mask"],
    "sequences": ["cu_seqlens", "max_seqlen", "dataset_id"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("fields")
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 50, rng.integers(5, 90)).astype(np.uint16) for _ in range(60)]
    write_dataset(folder / "d", documents)
    return DataConfig(
        blend=[str(folder / "d")],
        sequence_length=LENGTH,
        num_samples=(96, 0, 0),
        eod_id=EOD,
        storage=StorageConfig(cache_dir=folder / "cache"),
    )


def chosen(config: DataConfig, names: Sequence[str]) -> DataConfig:
    """The config with these fields, if they are enough for it."""
    try:
        return replace(config, fields=tuple(names))
    except ConfigError as error:
        why = str(error)
    needed = {"loss_mask", "position_ids", "cu_seqlens", "attention_mask"} - set(names)
    assert not names or any(name in why for name in needed)
    reject()


def check_fields(got: Batch, whole: Batch, names: Sequence[str]) -> None:
    assert list(got) == [name for name in whole if name in names]
    for name, field in got.items():
        assert torch.equal(field, whole[name]), name
        assert field.is_contiguous()


@pytest.mark.many_examples
@pytest.mark.guarantee("fields-chosen")
@settings(max_examples=examples(20))
@given(kind=st.sampled_from(sorted(CONFIGS)), data=st.data())
def test_any_choice_of_fields_is_as_in_the_whole_batch(
    base: DataConfig, kind: str, data: st.DataObject
) -> None:
    """By the loader, by the dataset itself, to a device, and from ids of anywhere."""
    made = NAMES + EXTRAS.get(kind, [])
    whole_config = replace(base, **CONFIGS[kind], fields=made)
    names = data.draw(st.lists(st.sampled_from(made), unique=True))
    config = chosen(whole_config, names)
    with (
        StreamLoader(whole_config, **SIZES) as all_fields,
        StreamLoader(config, **SIZES) as some_fields,
    ):
        for number, (whole, got) in enumerate(zip(all_fields, some_fields, strict=True)):
            check_fields(got, whole, names)
            if number < 2:
                check_fields(some_fields.dataset.batch(2 * number), whole, names)
    with StreamLoader(config, **SIZES) as loader:
        assert set(next(loader.prefetch_to("meta"))) == set(names)
    if kind == "sequences":
        return
    ids = np.random.default_rng(1).integers(0, 50, (3, LENGTH + 1)).astype(np.uint16)
    expected = batch_fields(ids, None, whole_config, bounds=True)
    check_fields(batch_fields(ids, None, config, bounds=True), expected, names)


MASKS_OR_RESTARTS: dict[str, dict[str, Any]] = {
    "eod_mask_loss": {"eod_mask_loss": True},
    "pad_id": {"pad_id": 49},
    "add_extra_token": {"add_extra_token": False},
    "reset_position_ids": {"reset_position_ids": True},
    "exclude_documents": {"exclude_documents": ["d#3"]},
}


@pytest.mark.guarantee("fields-default")
@pytest.mark.parametrize("split", ["train", "valid"])
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        pytest.param({}, ["tokens", "labels"], id="plain"),
        pytest.param(
            {"reset_attention_mask": True, "fields": [..., "dataset_id"]},
            ["tokens", "labels", "cu_seqlens", "dataset_id"],
            id="added",
        ),
        *(pytest.param(each, NAMES, id=name) for name, each in MASKS_OR_RESTARTS.items()),
        pytest.param({"order": "megatron"}, NAMES, id="megatron"),
        pytest.param({"order": "sequential"}, NAMES, id="sequential"),
    ],
)
def test_stream_batches_have_no_mask_of_ones_and_no_plain_positions(
    base: DataConfig, settings: dict[str, Any], names: list[str], split: str
) -> None:
    """By default, in every split and wherever batches are made."""
    config = replace(base, **{"order": "stream", "split": "1,1,0", **settings})
    config = replace(config, num_samples=(16, 16, 0))
    whole = replace(config, fields=[*NAMES, *(name for name in names if name not in NAMES)])
    dataset: Any = StreamingDataset(config, split=split, **SIZES)
    expected = StreamingDataset(whole, split=split, **SIZES).batch(0)
    check_fields(dataset.batch(0), expected, names)
    with StreamLoader(config, split=split, **SIZES) as loader:
        check_fields(next(loader), expected, names)
    if split == "train":
        workers = DataLoader(
            dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"
        )
        check_fields(next(iter(workers)), expected, names)


@pytest.mark.guarantee("fields-default", "get-batch-fields")
def test_ranks_and_ids_from_elsewhere_have_all_fields(base: DataConfig) -> None:
    """A rank of context parallelism has positions that do not count up."""
    config = replace(base, order="stream")
    ids = np.random.default_rng(1).integers(0, 50, (3, LENGTH + 1)).astype(np.uint16)
    assert list(batch_fields(ids, None, config)) == NAMES
    ranks = Ranks(ParallelLayout())
    with open_loader(config, ranks, **SIZES) as loader:
        assert set(get_batch(loader, ranks)) == set(NAMES)


CHOICES: list[tuple[str, ...]] = [("tokens",), ("tokens", "labels"), ("labels", "loss_mask")]


@pytest.mark.guarantee("fields-chosen")
@pytest.mark.parametrize("names", CHOICES, ids="-".join)
@pytest.mark.parametrize("looked_at", [False, True])
def test_workers_send_the_chosen_fields_alone(
    base: DataConfig, names: tuple[str, ...], looked_at: bool
) -> None:
    config = replace(base, order="stream", fields=names)
    dataset: Any = StreamingDataset(config, **SIZES)
    expected = [
        StreamingDataset(replace(config, fields=NAMES), **SIZES).batch(4 * n) for n in (0, 1)
    ]
    collate: dict[str, Any] = {"collate_fn": lambda batch: batch} if looked_at else {}
    loader = DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="fork", **collate
    )
    got = list(itertools.islice(loader, 0, 3, 2))
    for batch, whole in zip(got, expected, strict=True):
        check_fields(batch, whole, names)


@pytest.mark.guarantee("fields-chosen", "get-batch-fields")
@pytest.mark.parametrize("cp", [1, 2])
@on_ranks(4)
def test_ranks_have_the_chosen_fields_of_their_stage(rank: int, base: DataConfig, cp: int) -> None:
    layout = ParallelLayout(tp=2 // cp, cp=cp, pp=2)
    ranks = Ranks(layout)
    stage = ("tokens", "position_ids") if ranks.is_first_stage else ("labels", "loss_mask")
    for names in [*CHOICES, ("tokens", "position_ids", "labels", "loss_mask")]:
        config = replace(base, order="stream", fields=names)
        whole_config = replace(config, fields=None)
        with (
            open_loader(config, ranks, **SIZES) as loader,
            open_loader(whole_config, ranks, **SIZES) as whole_loader,
        ):
            for _ in range(3):
                got = get_batch(loader, ranks)
                whole = get_batch(whole_loader, ranks)
                assert set(got) == set(names) & set(stage)
                check_fields(got, whole, names)
            reads = bool(set(names) & set(stage)) and ranks.at["tp"] == 0
            assert (loader.stats()["batches"] > 0) == reads, "a stage without fields reads nothing"


@pytest.mark.guarantee("fields-chosen")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_fields_beyond_the_default_ones_are_named_with_these(
    base: DataConfig, tmp_path: Path, order: Any
) -> None:
    """By `...` in Python, and by "default" in a run file and on the command line."""
    default = replace(base, order=order)
    config = replace(default, fields=[..., "dataset_id"])
    names = ["default", "dataset_id"]
    run = write_run_file(
        tmp_path, data={"blend": base.blend, "fields": names}, train={"train_iters": 1}
    )
    overrides = [f"data.fields={json.dumps(names)}", f"data.order={order}"]
    for written in (load_run(run), load_run(run, overrides)):
        assert replace(default, fields=written.data.fields) == config
    whole = replace(config, fields=[*NAMES, "attention_mask", "dataset_id"])
    for more in (["dataset_id"], ["attention_mask", "dataset_id"], ["loss_mask"]):
        config = replace(default, fields=[*more, ...])
        with (
            StreamLoader(default, **SIZES) as default_loader,
            StreamLoader(whole, **SIZES) as whole_loader,
            StreamLoader(config, **SIZES) as loader,
        ):
            for _ in range(3):
                batch = next(whole_loader)
                check_fields(next(loader), batch, [*next(default_loader), *more])
        ranks = Ranks(ParallelLayout())
        with open_loader(config, ranks, **SIZES) as reader, StreamLoader(whole, **SIZES) as loader:
            check_fields(get_batch(reader, ranks), next(loader), [*NAMES, *more])


def test_a_choice_of_fields_has_one_form(base: DataConfig) -> None:
    assert replace(base, fields=["default"]) == replace(base, fields=[...]) == base
    named = replace(base, fields=["dataset_id", "labels", ..., "dataset_id"])
    assert named == replace(base, fields=("default", "labels", "dataset_id"))
    assert "Ellipsis" not in repr(named)
    assert pickle.loads(pickle.dumps(named)) == named  # noqa: S301


@pytest.mark.guarantee("fields-chosen")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fields": ["tokens", "lables"]}, "did you mean 'labels'?"),
        ({"fields": [..., "dataset_ids"]}, "did you mean 'dataset_id'?"),
        ({"fields": ["defaults", "dataset_id"]}, "did you mean 'default'?"),
        ({"fields": [..., "max_seqlen"]}, "set inter_document_masking"),
        ({"fields": ["images"]}, "which batches never have"),
        ({"fields": []}, "fields is empty"),
        (
            {"fields": ["tokens", "cu_seqlens"]},
            "set reset_attention_mask or inter_document_masking",
        ),
        ({"fields": ["tokens", "labels"], "eod_mask_loss": True}, "by eod_mask_loss some labels"),
        ({"fields": ["tokens", "labels"], "add_extra_token": False}, "by add_extra_token=False"),
        ({"fields": ["tokens"], "reset_position_ids": True}, "add 'position_ids' to fields"),
        ({"fields": ["tokens"], "reset_attention_mask": True}, "add 'cu_seqlens' to fields"),
    ],
)
def test_choices_that_cannot_be_are_refused(
    base: DataConfig, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        replace(base, **settings)


@pytest.mark.guarantee("fields-chosen")
def test_padding_without_a_mask_is_refused_where_it_is_found(tmp_path: Path) -> None:
    """Nobody knows before whether a file has any; batches before it are handed out."""
    pad = 49
    tokens = np.arange(LENGTH * 40 + 1, dtype=np.uint16) % 40
    tokens[LENGTH * 20 + 3] = pad
    write_dataset(tmp_path / "d", [tokens])
    config = DataConfig(
        blend=[str(tmp_path / "d")],
        sequence_length=LENGTH,
        order="sequential",
        pad_id=pad,
        fields=("tokens", "labels"),
        storage=StorageConfig(cache_dir=tmp_path),
    )
    with StreamLoader(config, **SIZES) as loader:
        for _ in range(10):
            next(loader)
        with pytest.raises(ConfigError, match="add 'loss_mask' to fields"):
            next(loader)


@pytest.mark.guarantee("fields-chosen", "memory-budget-never")
@pytest.mark.parametrize("order", ["megatron", "stream"])
def test_what_is_left_out_takes_no_memory(base: DataConfig, order: Any) -> None:
    """Counted in bytes of what is ready: ids of two bytes, and the fields of a few micro-batches."""
    config = replace(base, order=order, num_samples=(96 * 20, 0, 0))
    held = {}
    for names in (tuple(NAMES), ("tokens", "labels"), ("tokens",)):
        with StreamLoader(replace(config, fields=names), **SIZES) as loader:
            for _ in loader:
                pass
            held[names] = loader.stats()["most_held_bytes"]
    assert held[tuple(NAMES)] > held["tokens", "labels"] > held["tokens",] > 0
    with StreamLoader(config, **SIZES, ids_only=True) as loader:
        for _ in loader:
            pass
        assert held["tokens",] > loader.stats()["most_held_bytes"] > 0
