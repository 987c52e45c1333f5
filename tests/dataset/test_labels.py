"""Tokens of different tokenizers are never merged, blended or given another name unless somebody
says so.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

from streammega import (
    DataConfig,
    ParallelLayout,
    Ranks,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
    get_batch,
)
from streammega.convert import convert
from streammega.dataset.manifest import read_manifest
from streammega.errors import ConfigError, ConvertError, FormatError
from streammega.train.config import ModelConfig, RunConfig, load_run
from streammega.train.trainer import Trainer
from tests.support.builders import (
    convert_bytes,
    data_config,
    write_dataset,
    write_jsonl,
    write_run_file,
)


def tokenizer(path: Path, words: list[str]) -> str:
    model = Tokenizer(
        models.WordLevel(
            {word: n for n, word in enumerate(["<|endoftext|>", "[UNK]", *words])},
            unk_token="[UNK]",
        )
    )
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save(str(path))
    return str(path)


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, str]:
    text = tmp_path / "in.jsonl"
    text.write_text(
        "".join(json.dumps({"text": "one two three four five"}) + "\n" for _ in range(60))
    )
    made = {"text": str(text)}
    for name, words in {"first": ["one", "two"], "second": ["two", "one"]}.items():
        made[f"{name}.json"] = tokenizer(tmp_path / f"{name}.json", words)
        made[name] = str(tmp_path / name)
        convert([str(text)], made[name], tokenizer=made[f"{name}.json"], workers=1, shard_bytes=256)
    return made


@pytest.mark.guarantee("tokens-different-tokenizers")
def test_a_merge_of_two_tokenizers_is_refused_and_names_both(
    sets: dict[str, str], tmp_path: Path
) -> None:
    inputs = [f"{sets[name]}.manifest.json" for name in ("first", "second")]
    with pytest.raises(
        ConvertError, match=r"first.*first\.json.*second.*second\.json.*--allow-mixed-tokenizers"
    ):
        convert(inputs, str(tmp_path / "out" / "mixed"), workers=1)
    assert not list(tmp_path.glob("out/*"))
    convert(inputs, str(tmp_path / "mixed"), workers=1, allow_mixed_tokenizers=True)
    assert read_manifest(str(tmp_path / "mixed.manifest.json"), StorageConfig()).tokenizer == {}
    # a dataset of an unknown tokenizer before them hides neither
    unknown = Path(f"{sets['first']}.manifest.json")
    manifest = json.loads(unknown.read_text()) | {"tokenizer": {}}
    write_unknown = tmp_path / "unknown.manifest.json"
    write_unknown.write_text(json.dumps(manifest))
    with pytest.raises(ConvertError, match=r"first.*first\.json.*second.*second\.json"):
        convert([str(write_unknown), *inputs], str(tmp_path / "three"), workers=1)


@pytest.mark.parametrize("shard_bytes", [None, 256])
def test_shards_with_a_mark_have_the_labels_of_their_manifest(
    shard_bytes: int | None, sets: dict[str, str], tmp_path: Path
) -> None:
    """As a dataset in a bucket is after `--overwrite`."""
    folder = tmp_path / "marked"
    options: dict[str, Any] = {"tokenizer": sets["first.json"], "shard_bytes": shard_bytes}
    convert([sets["text"]], str(folder / "web"), workers=1, **options)
    path = folder / "web.manifest.json"
    manifest = json.loads(path.read_text())
    for shard in manifest["shards"]:
        name = shard["name"]
        shard["name"] = f"web-gen0123456789ab{name.removeprefix('web')}"
        for suffix in (".bin", ".idx"):
            (folder / f"{name}{suffix}").rename(folder / f"{shard['name']}{suffix}")
    path.write_text(json.dumps(manifest))
    labels = ("tokenizer", "eod_id", "vocab_size")
    for number, name in enumerate((str(folder), f"{folder}/*.idx", f"{folder}/web")):
        out = tmp_path / f"out-{number}"
        convert([name], str(out), workers=1)
        made = json.loads(Path(f"{out}.manifest.json").read_text())
        assert {key: made[key] for key in labels} == {key: manifest[key] for key in labels}


@pytest.mark.guarantee("tokens-different-tokenizers")
def test_tokens_do_not_take_the_name_of_another_tokenizer(
    sets: dict[str, str], tmp_path: Path
) -> None:
    name = f"{sets['first']}.manifest.json"
    with pytest.raises(ConvertError, match=r"second\.json.*first\.json"):
        convert([name], str(tmp_path / "renamed"), tokenizer=sets["second.json"], workers=1)
    convert([name, sets["text"]], str(tmp_path / "same"), tokenizer=sets["first.json"], workers=1)
    own = read_manifest(str(tmp_path / "same.manifest.json"), StorageConfig())
    assert own.tokenizer == read_manifest(name, StorageConfig()).tokenizer
    # by the names of their shards
    convert([str(tmp_path / "first-*.idx")], str(tmp_path / "shards"), workers=1)
    assert (
        read_manifest(str(tmp_path / "shards.manifest.json"), StorageConfig()).tokenizer
        == own.tokenizer
    )


@pytest.mark.guarantee("tokens-different-tokenizers")
@pytest.mark.parametrize("order", ["megatron", "stream", "sequential"])
@pytest.mark.parametrize("by", ["{}", "{}-*"])
def test_a_blend_of_two_tokenizers_is_refused_and_names_both(
    sets: dict[str, str], tmp_path: Path, order: Any, by: str
) -> None:
    settings: dict[str, Any] = {
        "sequence_length": 4,
        "num_samples": (8, 0, 0),
        "order": order,
        "storage": StorageConfig(cache_dir=tmp_path / "c"),
    }
    blend = [(by.format(sets[name]), 0.5) for name in ("first", "second")]
    sizes = {"micro_batch_size": 2, "global_batch_size": 4}
    with pytest.raises(
        ConfigError, match=r"first.*first\.json.*second.*second\.json.*allow_mixed_tokenizers"
    ):
        StreamLoader(DataConfig(blend=blend, **settings), **sizes)  # type: ignore[arg-type]
    for config in (
        DataConfig(blend=blend, allow_mixed_tokenizers=True, **settings),
        DataConfig(blend=blend[:1], **settings),
    ):
        with StreamLoader(config, **sizes) as loader:  # type: ignore[arg-type]
            assert next(iter(loader))["tokens"].shape == (2, 4)


def label(sets: dict[str, str], name: str) -> str:
    """A dataset's tokenizer as messages name it."""
    tokenizer = read_manifest(f"{sets[name]}.manifest.json", StorageConfig()).tokenizer
    return f"{tokenizer['name']} ({tokenizer['digest'][:12]})"


@pytest.mark.guarantee("tokens-different-tokenizers")
@pytest.mark.parametrize("order", ["megatron", "stream", "sequential"])
def test_a_refused_blend_lists_the_datasets_of_each_tokenizer(
    sets: dict[str, str], tmp_path: Path, order: Any
) -> None:
    convert([sets["text"]], str(tmp_path / "third"), tokenizer=sets["first.json"], workers=1)
    write_dataset(tmp_path / "raw", [np.arange(40)])
    names = [sets["first"], sets["second"], str(tmp_path / "raw"), str(tmp_path / "third")]
    config = DataConfig(
        blend=[(name, 0.25) for name in names],
        sequence_length=4,
        num_samples=(8, 0, 0),
        order=order,
        storage=StorageConfig(cache_dir=str(tmp_path / "c")),
    )
    with pytest.raises(ConfigError) as refused:
        StreamLoader(config, micro_batch_size=2, global_batch_size=4)
    message = str(refused.value)
    assert f"{names[0]}, {names[3]}: tokenizer {label(sets, 'first')}; " in message
    assert f"{names[1]}: tokenizer {label(sets, 'second')}; " in message
    assert f"{names[2]}: no manifest names it; " in message


@pytest.mark.guarantee("tokens-different-tokenizers")
def test_a_refused_merge_lists_the_datasets_of_each_tokenizer(
    sets: dict[str, str], tmp_path: Path
) -> None:
    convert([sets["text"]], str(tmp_path / "third"), tokenizer=sets["first.json"], workers=1)
    names = [sets["first"], sets["second"], str(tmp_path / "third")]
    with pytest.raises(ConvertError) as refused:
        convert([f"{name}.manifest.json" for name in names], str(tmp_path / "all"), workers=1)
    message = str(refused.value)
    assert f"{names[0]}, {names[2]}: tokenizer {label(sets, 'first')}; " in message
    assert f"{names[1]}: tokenizer {label(sets, 'second')}; " in message
    with pytest.raises(ConvertError) as refused:
        convert(
            [f"{names[1]}.manifest.json", sets["text"]],
            str(tmp_path / "all"),
            tokenizer=sets["first.json"],
            workers=1,
        )
    mine = f"--tokenizer {sets['first.json']}: tokenizer {label(sets, 'first')}; "
    assert mine in str(refused.value)
    assert f"{names[1]}: tokenizer {label(sets, 'second')}; " in str(refused.value)


def test_a_merge_warns_of_inputs_whose_tokenizer_no_manifest_names(
    sets: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("raw", "other"):
        write_dataset(tmp_path / name, [np.arange(40, dtype=np.uint16)])
    np.save(tmp_path / "more.npy", np.arange(40, dtype=np.uint16))
    raw, other, more = (str(tmp_path / name) for name in ("raw", "other", "more.npy"))
    first = f"{sets['first']}.manifest.json"
    for inputs, unknown in (
        ([first], None),
        ([raw], None),
        ([more], None),
        ([first, raw], raw),
        ([raw, other], f"{raw}, {other}: "),
        ([first, more], more),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            convert(inputs, str(tmp_path / "out"), workers=1, overwrite=True, dtype="uint16")
        warned = [line for line in caplog.messages if "no manifest names the tokenizer" in line]
        assert len(warned) == (unknown is not None), (inputs, caplog.messages)
        assert all(str(unknown) in line for line in warned), (inputs, warned)


SIZES: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4}


@pytest.mark.guarantee("vocabulary-of-manifest")
@pytest.mark.parametrize("order", ["megatron", "stream", "sequential"])
def test_a_vocabulary_below_the_manifests_is_refused_before_a_token_is_read(
    tmp_path: Path, order: Any
) -> None:
    folder = tmp_path / "folder"
    prefix = str(folder / "web")
    convert_bytes(prefix, write_jsonl(tmp_path / "in.jsonl", ["some text"] * 40), shard_bytes=256)
    write_dataset(tmp_path / "raw", [np.arange(400) % 300])

    def open_of(blend: Any, vocab_size: int, **settings: Any) -> None:
        config = data_config(blend, tmp_path, order=order, vocab_size=vocab_size, **settings)
        StreamLoader(config, **SIZES).close()

    for name in (prefix, str(folder), f"{prefix}.manifest.json"):
        for blend in ([name], [(name, 0.5), (str(tmp_path / "raw"), 0.5)]):
            message = (
                rf"^{re.escape(name)}: its manifest has vocab_size 257, and the config 200, .*"
                "set vocab_size to 257 or more"
            )
            for mixed in (False, True):
                with pytest.raises(ConfigError, match=message):
                    open_of(blend, 200, allow_mixed_tokenizers=mixed)
            for padded in (257, 320):
                open_of(blend, padded)
    for size in (0, -1):
        with pytest.raises(ConfigError, match=r"vocab_size is .*; it must be at least 1"):
            open_of([prefix], size)


@pytest.mark.guarantee("vocabulary-of-manifest")
def test_a_model_with_fewer_ids_than_the_data_is_refused_before_its_first_step(
    tmp_path: Path,
) -> None:
    prefix = convert_bytes(
        tmp_path / "web", write_jsonl(tmp_path / "in.jsonl", ["some text"] * 400)
    ).prefix
    path = write_run_file(
        tmp_path, data={"blend": [prefix], "order": "stream"}, train={"train_iters": 2}
    )
    message = "its manifest has vocab_size 257, and the config 200, .*model.vocab_size of a run"
    for config in (
        load_run(path, ["model.vocab_size=200"]),
        RunConfig(
            data=data_config([prefix], tmp_path, order="stream"),
            model=ModelConfig(vocab_size=200),
            train=load_run(path).train,
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(config, torch.device("cpu"))


@pytest.mark.guarantee("vocabulary-of-manifest")
def test_a_run_without_a_vocabulary_has_that_of_the_manifests_and_is_the_same_run(
    tmp_path: Path,
) -> None:
    texts = write_jsonl(tmp_path / "in.jsonl", ["some text"] * 400)
    prefix = convert_bytes(tmp_path / "web", texts).prefix
    path = write_run_file(
        tmp_path,
        data={"blend": [prefix], "order": None},
        model={"vocab_size": None},
        train={"train_iters": 2, "save_interval": 2},
    )
    runs: tuple[list[str], ...] = (
        [],
        ["model.vocab_size=257", "train.train_iters=4"],
        ["train.train_iters=6"],
    )
    for number, overrides in enumerate(runs):
        trainer = Trainer(load_run(path, overrides), torch.device("cpu"))
        trainer.resume()
        assert trainer.step == 2 * number
        assert trainer.config.model.vocab_size == 257
        trainer.run()
    for name, size in (("data.vocab_size", 320), ("model.vocab_size", 300)):
        padded = load_run(path, [f"{name}={size}", f"train.out_dir={tmp_path}/{size}"])
        trainer = Trainer(padded, torch.device("cpu"))
        assert trainer.config.model.vocab_size == size
        trainer.close()


@pytest.mark.guarantee("vocabulary-of-manifest")
def test_a_run_whose_vocabulary_nothing_says_is_refused(tmp_path: Path) -> None:
    raw = write_dataset(tmp_path / "raw", [np.arange(400) % 300 for _ in range(20)])
    path = write_run_file(
        tmp_path,
        data={"blend": [raw], "order": None},
        model={"vocab_size": None},
        train={"train_iters": 2},
    )
    with pytest.raises(ConfigError, match=r"not all manifests .* set model\.vocab_size"):
        Trainer(load_run(path), torch.device("cpu"))


def read_by(way: str, config: DataConfig) -> None:
    """Read some batches. way: who reads, and where the ids are looked at."""
    if way == "loader":
        with StreamLoader(config, **SIZES) as loader:
            for _, _ in zip(range(8), loader, strict=False):
                pass
    elif way == "position":
        for number in range(8):
            StreamingDataset(config, **SIZES).batch(2 * number)
    elif way == "worker":
        batches = DataLoader(StreamingDataset(config, **SIZES), batch_size=None, num_workers=1)
        for _, _ in zip(range(8), batches, strict=False):
            pass
    else:
        with StreamLoader(config, **SIZES, ids_only=True) as loader:
            for _ in range(8):
                get_batch(loader, Ranks(ParallelLayout()))


@pytest.mark.usefixtures("workers_end_soon")
@pytest.mark.parametrize("order", ["megatron", "stream", "sequential"])
@pytest.mark.parametrize("way", ["loader", "position", "worker", "get_batch"])
def test_ids_outside_of_the_vocabulary_name_their_dataset_and_its_tokenizer(
    sets: dict[str, str], tmp_path: Path, way: str, order: Any
) -> None:
    raw = str(tmp_path / "raw")
    write_dataset(raw, [np.arange(n % 3, 9, dtype=np.uint16) for n in range(60)])
    settings: dict[str, Any] = {
        "sequence_length": 4,
        "num_samples": (40, 0, 0),
        "split": "1,0,0",
        "order": order,
        "storage": StorageConfig(cache_dir=tmp_path / "c"),
    }
    blend: list[tuple[str, float]] = [(sets["first"], 0.5), (raw, 0.5)]
    with pytest.raises(FormatError) as wrong:
        read_by(way, DataConfig(blend=blend, vocab_size=7, **settings))
    assert re.search(
        rf"{raw}, whose tokenizer no manifest names: token ids? (7|8|7, 8) (is|are) outside of "
        "the vocabulary of 7; ",
        str(wrong.value),
    )
    manifest = Path(f"{sets['first']}.manifest.json")
    manifest.write_text(manifest.read_text().replace('"vocab_size": 4', '"vocab_size": 3'))
    with pytest.raises(FormatError) as wrong:
        read_by(way, DataConfig(blend=blend[:1], vocab_size=3, **settings))
    expected = f"{sets['first']}, made with tokenizer {label(sets, 'first')}: token id 3 is outside"
    assert expected in str(wrong.value)
