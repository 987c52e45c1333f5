"""The modes of a chat dataset are its loss mask wherever it is trained on: in every order, with
every field, on every reader.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streammega import DataConfig, IndexedDataset, ParallelLayout, StorageConfig, StreamLoader
from streammega.config import Order
from streammega.convert import convert
from streammega.dataset.manifest import read_manifest
from streammega.errors import ConfigError, FormatError
from streammega.loading import StreamingDataset
from streammega.samples.build import build_datasets
from streammega.train.config import load_run
from streammega.train.parallel_model import ParallelModel
from streammega.train.trainer import Trainer
from tests.support.builders import write_jsonl, write_small_run
from tests.support.gang import Gang
from tests.support.rank_programs import read_batches
from tests.support.typed import first_prefix, map_style

LENGTH = 32
MICRO = 2
GLOBAL = 8
STEPS = 6
SIZES: dict[str, Any] = {"micro_batch_size": MICRO, "global_batch_size": GLOBAL}
ORDERS: tuple[Order, ...] = ("megatron", "stream", "sequential")


def chats(path: Path, count: int) -> str:
    rng = np.random.default_rng(5)
    records = []
    for _ in range(count):
        turns = [("user", "asks "), ("assistant", "tells ")] * int(rng.integers(1, 4))
        records.append(
            {
                "messages": [
                    {"role": role, "content": text * int(rng.integers(0, 9))}
                    for role, text in turns
                ]
            }
        )
    return write_jsonl(path, records)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat")
    convert(
        [chats(folder / "chat.jsonl", 200)],
        str(folder / "chat"),
        tokenizer="bytes",
        chat=True,
        workers=1,
    )
    return str(folder / "chat")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plain")
    texts = write_jsonl(folder / "text.jsonl", [f"plain {n} " * 9 for n in range(200)])
    convert([texts], str(folder / "plain"), tokenizer="bytes", workers=1)
    return str(folder / "plain")


@pytest.fixture
def config(chat: str, tmp_path: Path) -> DataConfig:
    return DataConfig(
        blend=[chat],
        sequence_length=LENGTH,
        num_samples=(GLOBAL * STEPS, 0, 0),
        storage=StorageConfig(cache_dir=tmp_path / "cache"),
    )


def learned_tokens(prefix: str) -> np.ndarray:
    """For each token of a dataset whether its sequence is of mode 1."""
    indexed = IndexedDataset(prefix)
    assert indexed.sequence_modes is not None
    return np.repeat(indexed.sequence_modes == 1, indexed.sequence_lengths)


def expected_masks(dataset: StreamingDataset, steps: int, learned: list[np.ndarray]) -> np.ndarray:
    """loss_mask [steps, samples, S], by where samples lie."""
    ids = np.arange(steps * MICRO, dtype=np.int64)
    extents = dataset.samples.locate(ids)
    rows = []
    for sample in range(len(ids)):
        own = range(extents.row_splits[sample], extents.row_splits[sample + 1])
        runs = [learned[int(extents.dataset[r])][extents.start[r] : extents.stop[r]] for r in own]
        rows.append(np.concatenate(runs)[1:])
    return np.array(rows, np.float32).reshape(steps, MICRO, -1)


def test_the_manifest_of_a_chat_dataset_says_which_modes_are_learned(chat: str, plain: str) -> None:
    assert read_manifest(f"{chat}.manifest.json", StorageConfig()).loss_modes == [1]
    assert "loss_modes" not in json.loads(Path(f"{plain}.manifest.json").read_text())


@pytest.mark.guarantee("modes-chat-dataset")
@pytest.mark.parametrize("order", ORDERS)
def test_loss_is_on_answers_alone_in_every_order(config: DataConfig, chat: str, order: Any) -> None:
    config = replace(config, order=order)
    dataset = StreamingDataset(config, **SIZES)
    expected = expected_masks(dataset, 3 * STEPS, [learned_tokens(chat)])
    with StreamLoader(config, **SIZES) as loader:
        masks = np.stack([batch["loss_mask"].numpy() for batch in islice(loader, 3 * STEPS)])
    assert np.array_equal(masks, expected)
    assert 0.2 < masks.mean() < 0.8
    assert np.array_equal(dataset.batch(0)["loss_mask"].numpy(), expected[0])


@pytest.mark.parametrize("order", ORDERS)
def test_with_other_fields_the_mask_is_the_product_and_all_else_stays(
    config: DataConfig, chat: str, order: Any
) -> None:
    fields: Any = {
        "eod_mask_loss": True,
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "fields": [..., "attention_mask"],
    }
    config = replace(config, order=order, eod_id=256, **fields)
    with (
        StreamLoader(config, **SIZES) as ours,
        StreamLoader(replace(config, mask_loss_by_mode=False), **SIZES) as without,
    ):
        pairs = list(islice(zip(ours, without, strict=True), STEPS))
    expected = expected_masks(StreamingDataset(config, **SIZES), STEPS, [learned_tokens(chat)])
    for (batch, whole), mask in zip(pairs, expected, strict=True):
        assert set(batch) == set(whole)
        assert all(torch.equal(batch[name], whole[name]) for name in batch if name != "loss_mask")
        assert np.array_equal(batch["loss_mask"].numpy(), whole["loss_mask"].numpy() * mask)


def test_map_style_samples_have_the_mask(config: DataConfig, chat: str) -> None:
    dataset = map_style(build_datasets(config)[0])
    expected = expected_masks(
        StreamingDataset(config, **SIZES), STEPS, [learned_tokens(chat)]
    ).reshape(-1, LENGTH)
    assert np.array_equal(
        np.stack([dataset[n]["loss_mask"].numpy() for n in range(STEPS * MICRO)]), expected
    )


@pytest.mark.parametrize("order", ["megatron", "stream"])
def test_in_a_blend_plain_datasets_are_learned_whole(
    config: DataConfig, chat: str, plain: str, order: Any
) -> None:
    config = replace(config, blend=[(chat, 0.5), (plain, 0.5)], order=order)
    every = np.ones(int(IndexedDataset(plain).sequence_lengths.sum()), np.bool_)
    expected = expected_masks(
        StreamingDataset(config, **SIZES), 2 * STEPS, [learned_tokens(chat), every]
    )
    with StreamLoader(config, **SIZES) as loader:
        assert np.array_equal(
            np.stack([b["loss_mask"].numpy() for b in islice(loader, 2 * STEPS)]), expected
        )


@pytest.mark.parametrize("kind", ["bin", "zst", "tar"])
def test_reshaped_and_merged_datasets_keep_the_mark(chat: str, tmp_path: Path, kind: Any) -> None:
    convert([chat, chat], str(tmp_path / "both"), format=kind, shard_bytes=1 << 14, workers=1)
    for name in ("both", "", "both-*"):  # a prefix, a folder and a glob
        config = DataConfig(
            blend=[str(tmp_path / name) + ("/" if not name else "")],
            sequence_length=LENGTH,
            order="stream",
        )
        with StreamLoader(config, **SIZES) as loader:
            masks = np.stack([batch["loss_mask"].numpy() for batch in islice(loader, STEPS)])
        learned = learned_tokens(str(tmp_path / "both"))
        assert 0.2 < masks.mean() < 0.8
        assert abs(masks.mean() - learned.mean()) < 0.15


def test_the_mask_is_the_same_from_a_bucket(
    config: DataConfig, chat: str, s3_storage: StorageConfig, bucket: str
) -> None:
    convert([chat], f"s3://{bucket}/chat", storage=s3_storage, workers=1)
    for order in ("megatron", "stream"):
        with StreamLoader(replace(config, order=order), **SIZES) as loader:
            here = [batch["loss_mask"] for batch in islice(loader, STEPS)]
        remote = replace(config, blend=[f"s3://{bucket}/chat"], order=order, storage=s3_storage)
        with StreamLoader(remote, **SIZES) as loader:
            there = [batch["loss_mask"] for batch in islice(loader, STEPS)]
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_the_mask_is_the_same_in_worker_processes(config: DataConfig) -> None:
    config = replace(config, order="stream")
    with StreamLoader(config, **SIZES) as loader:
        here = [batch["loss_mask"] for batch in islice(loader, STEPS)]
    dataset = StreamingDataset(config, **SIZES)
    workers = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="forkserver"
    )
    there = [batch["loss_mask"] for batch in islice(workers, STEPS)]
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.guarantee("modes-chat-dataset")
@pytest.mark.parametrize("changes", [{}, {"reset_position_ids": True}], ids=["parts", "whole"])
def test_ranks_of_a_layout_get_the_mask_of_their_parts(
    gang: Gang, config: DataConfig, changes: dict[str, Any]
) -> None:
    config = replace(config, order="stream", shuffle_lanes=GLOBAL, eod_id=256, **changes)
    layout = ParallelLayout(tp=2, cp=2)
    expected = expected_masks(
        StreamingDataset(config, **SIZES), STEPS, [learned_tokens(first_prefix(config))]
    )
    for result in gang.run(layout.world_size, read_batches, layout, config, SIZES, STEPS, 1, False):
        cp = result["at"]["cp"]
        quarter = LENGTH // 4
        kept = np.concatenate([np.arange(n * quarter, (n + 1) * quarter) for n in (cp, 3 - cp)])
        masks = np.stack([batch["loss_mask"] for batch in result["batches"]])
        assert np.array_equal(masks, expected[:, :, kept])


def test_modes_that_no_manifest_speaks_of_are_a_mask_where_that_is_asked_for(
    config: DataConfig, chat: str, plain: str
) -> None:
    manifest = Path(f"{chat}.manifest.json")
    said = manifest.read_text()
    manifest.unlink()
    try:
        with StreamLoader(config, **SIZES) as loader:
            assert next(iter(loader))["loss_mask"].min() == 1
        for order in ORDERS:
            asked = replace(config, order=order, mask_loss_by_mode=True)
            with StreamLoader(asked, **SIZES) as loader:
                mask = next(iter(loader))["loss_mask"].numpy()
            assert np.array_equal(
                mask, expected_masks(StreamingDataset(asked, **SIZES), 1, [learned_tokens(chat)])[0]
            )
    finally:
        manifest.write_text(said)
    for order in ORDERS:
        with pytest.raises(ConfigError, match="has no modes"):
            StreamLoader(
                replace(config, blend=[plain], order=order, mask_loss_by_mode=True), **SIZES
            )


@pytest.mark.guarantee("modes-chat-dataset")
@pytest.mark.parametrize("template", [None, "chatml"])
def test_a_run_on_a_chat_dataset_learns_its_answers_alone(
    chat: str, template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if template is not None:
        source = chats(tmp_path / "chat.jsonl", 200)
        chat = str(tmp_path / "chat")
        convert([source], chat, tokenizer="bytes", chat=True, chat_template=template, workers=1)
    write_small_run(tmp_path, chat)
    settings = [
        "train.train_iters=3",
        "train.log_interval=1",
        "train.eval_interval=0",
        "data.order=stream",
        "data.split=1,0,0",
    ]
    trained: list[float] = []
    forward_backward = ParallelModel.forward_backward

    def noted(self: ParallelModel, *arguments: Any) -> Any:
        losses = forward_backward(self, *arguments)
        trained.append(float(losses.tokens.sum()))
        return losses

    monkeypatch.setattr(ParallelModel, "forward_backward", noted)
    config = load_run(str(tmp_path / "run.toml"), settings)
    Trainer(config, torch.device("cpu")).run()
    dataset = StreamingDataset(config.data, **SIZES)
    masks = expected_masks(dataset, 3 * GLOBAL // MICRO, [learned_tokens(chat)])
    assert trained == masks.reshape(3, -1).sum(1).tolist()
    assert 0 < sum(trained) < 0.8 * masks.size


def test_an_index_in_no_order_is_refused_by_name(chat: str, tmp_path: Path) -> None:
    prefix = str(tmp_path / "swapped")
    for suffix in (".bin", ".idx"):
        shutil.copy(chat + suffix, prefix + suffix)
    count = len(IndexedDataset(chat))
    index = Path(f"{prefix}.idx")
    stored = bytearray(index.read_bytes())
    first = 34 + 4 * count  # behind the header and the lengths
    offsets = np.frombuffer(stored, "<i8", count, first).copy()
    offsets[[3, 4]] = offsets[[4, 3]]
    stored[first : first + 8 * count] = offsets.tobytes()
    index.write_bytes(stored)
    config = DataConfig(
        blend=[prefix],
        sequence_length=LENGTH,
        order="stream",
        mask_loss_by_mode=True,
        storage=StorageConfig(cache_dir=tmp_path),
    )
    with (
        StreamLoader(config, **SIZES) as loader,
        pytest.raises(FormatError, match=r"swapped\.idx: its sequences are not in ascending order"),
    ):
        loader.take()
