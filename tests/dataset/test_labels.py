"""Tokens of different tokenizers are never merged, blended or given another name unless somebody
says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from streammega import DataConfig, StorageConfig, StreamLoader
from streammega.convert import convert
from streammega.dataset.manifest import read_manifest
from streammega.errors import ConfigError, ConvertError


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
        "index_cache_dir": tmp_path / "c",
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
