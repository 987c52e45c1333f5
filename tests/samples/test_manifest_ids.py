"""Ids that a config leaves to the manifests of its data: the end of a document, and the vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streammega import DataConfig, StreamLoader, batch_fields, write_manifest
from streammega.errors import ConfigError, FormatError
from tests.support.builders import convert_bytes, data_config, write_dataset, write_jsonl

EOD = 256
SIZES: dict[str, Any] = {"micro_batch_size": 4, "global_batch_size": 8}
NEEDING: dict[str, dict[str, Any]] = {
    "reset_position_ids": {"reset_position_ids": True},
    "reset_attention_mask": {"reset_attention_mask": True},
    "eod_mask_loss": {"eod_mask_loss": True},
    "exclude_documents": {"exclude_documents": ["web#3", "web#4"]},
    "pad_id": {"pad_id": EOD},
}
"""Settings that go by the end of a document."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ids")
    texts = write_jsonl(root / "in.jsonl", [f"text {n} " * (n % 5 + 1) for n in range(120)])
    for name in ("web", "code"):
        convert_bytes(root / "data" / name, texts)
    write_dataset(root / "raw", [np.arange(90) for _ in range(40)])
    return root


def with_ids(folder: Path, copy: Path, **ids: int | None) -> str:
    """A copy of `code` whose manifest says something else of its ids."""
    for suffix in (".bin", ".idx", ".manifest.json"):
        shutil.copy(folder / f"data/code{suffix}", f"{copy}{suffix}")
    path = Path(f"{copy}.manifest.json")
    manifest = json.loads(path.read_text()) | ids
    manifest["shards"][0]["name"] = copy.name
    path.write_text(json.dumps(manifest))
    return str(copy)


def named(folder: Path, _: Path) -> Any:
    return [f"{folder}/data/web", f"{folder}/data/code"]


def in_a_folder(folder: Path, _: Path) -> Any:
    return f"{folder}/data/"


def pinned(folder: Path, own: Path) -> Any:
    config = DataConfig(blend=[f"{folder}/data/"], sequence_length=16)
    write_manifest(config, f"{own}/blend.json")
    return f"{own}/blend.json"


def batches_of(config: DataConfig, state: Any = None) -> tuple[list[Any], Any]:
    """Some batches, and the state after the first of them."""
    with StreamLoader(config, **SIZES) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = [next(loader)]
        state = json.loads(json.dumps(loader.state_dict()))
        batches += [next(loader) for _ in range(5)]
    return batches, state


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.guarantee("ids-of-manifest")
@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
@pytest.mark.parametrize("setting", NEEDING)
def test_the_end_of_documents_is_that_of_the_manifests_and_the_run_the_same(
    folder: Path, tmp_path: Path, setting: str, order: Any
) -> None:
    config = data_config(named(folder, tmp_path), tmp_path, order=order, **NEEDING[setting])
    told = replace(config, eod_id=EOD, vocab_size=257)
    batches, state = batches_of(config)
    expected, state_of_told = batches_of(told)
    assert equal(batches, expected)
    assert state == state_of_told
    assert equal(batches_of(config, state_of_told)[0], batches_of(told, state)[0])


@pytest.mark.guarantee("ids-of-manifest")
@pytest.mark.parametrize("blend_of", [named, in_a_folder, pinned])
def test_a_folder_and_a_written_blend_know_the_ids_of_their_datasets(
    folder: Path, tmp_path: Path, blend_of: Callable[[Path, Path], Any]
) -> None:
    blend = blend_of(folder, tmp_path)
    config = data_config(blend, tmp_path, order="stream", reset_position_ids=True)
    with StreamLoader(config, **SIZES) as loader:
        assert (loader.dataset.config.eod_id, loader.dataset.config.vocab_size) == (EOD, 257)
        tokens, positions = next(loader)["tokens"], loader.dataset.batch(0)["position_ids"]
    after = tokens[:, :-1] == EOD
    assert bool(after.any())
    assert bool((positions[:, 1:][after] == 0).all())


REFUSED: dict[str, tuple[Any, str]] = {
    "none": (["raw"], "no manifest of the data names it; set eod_id"),
    "some": (
        ["data/web", "raw"],
        r"not the same one \(.*web: 256; .*raw: no manifest names it\); set eod_id",
    ),
    "others": (
        ["data/web", "other", "silent"],
        r"not the same one \(.*web: 256; .*other: 3; .*silent: no manifest names it\); set eod_id",
    ),
}
"""What data is without one end of documents, and what is said of it."""


@pytest.mark.guarantee("ids-of-manifest")
@pytest.mark.parametrize("order", ["stream", "megatron"])
@pytest.mark.parametrize("case", REFUSED)
def test_data_without_one_end_of_documents_is_refused_where_it_is_needed(
    folder: Path, tmp_path: Path, case: str, order: Any
) -> None:
    with_ids(folder, folder / "other", eod_id=3)
    with_ids(folder, folder / "silent", eod_id=None)
    names, message = REFUSED[case]
    config = data_config([f"{folder}/{name}" for name in names], tmp_path, order=order)
    with StreamLoader(config, **SIZES) as loader:
        assert loader.dataset.config.eod_id is None, "nothing needs it"
    for setting in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        needing = replace(config, **NEEDING[setting])
        with pytest.raises(ConfigError, match=rf"need eod_id, .*; .*{message}"):
            StreamLoader(needing, **SIZES)
        StreamLoader(replace(needing, eod_id=3), **SIZES).close()


@pytest.mark.guarantee("ids-of-manifest")
def test_a_validation_split_has_the_ids_of_its_own_datasets(folder: Path, tmp_path: Path) -> None:
    other = with_ids(folder, tmp_path / "other", eod_id=3)
    config = DataConfig(
        blend_per_split=([f"{folder}/data/web"], [other], None),
        sequence_length=16,
        reset_position_ids=True,
    )
    for split, eod_id in (("train", EOD), ("valid", 3)):
        with StreamLoader(config, split=split, **SIZES) as loader:
            assert loader.dataset.config.eod_id == eod_id


@pytest.mark.guarantee("vocabulary-of-manifest")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_ids_past_the_vocabulary_of_the_manifest_are_an_error(
    folder: Path, tmp_path: Path, order: Any
) -> None:
    wrong = with_ids(folder, tmp_path / "wrong", eod_id=None, vocab_size=100)
    with (
        StreamLoader(data_config([wrong], tmp_path, order=order), **SIZES) as loader,
        pytest.raises(FormatError, match=r"token ids 101, .* are outside of the vocabulary of 100"),
    ):
        next(loader)


def test_a_blend_of_data_without_a_manifest_is_of_an_unknown_vocabulary(
    folder: Path, tmp_path: Path
) -> None:
    blend = [f"{folder}/data/web", f"{folder}/raw"]
    with StreamLoader(data_config(blend, tmp_path, order="stream"), **SIZES) as loader:
        assert loader.dataset.config.vocab_size is None


def test_ids_from_elsewhere_have_no_manifest() -> None:
    config = DataConfig(blend="web", sequence_length=4, reset_position_ids=True)
    with pytest.raises(ConfigError, match=r"need eod_id, .*; ids do not tell it; set eod_id"):
        batch_fields(np.zeros((1, 5), np.int64), None, config)
