"""Columns as manifests list them: written, read again, and looked up where they will be read."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import Column, StorageConfig
from streammega.config.columns import read_columns
from streammega.dataset.manifest import manifest_url, read_manifest
from streammega.dataset.opening import content_of, open_manifests
from streammega.errors import ConfigError, FormatError, ObjectNotFoundError, StreammegaError
from tests.support.builders import write_dataset
from tests.support.columns import add_column, change_entry

STORAGE = StorageConfig()


@pytest.fixture
def pair(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    return str(
        write_dataset(tmp_path / "web", [rng.integers(1, 90, 40).tolist() for _ in range(5)])
    )


@pytest.mark.guarantee("columns-in-no-state")
def test_a_pair_gets_a_manifest_by_its_first_column_and_stays_what_it_was(pair: str) -> None:
    (before,) = open_manifests([pair], STORAGE)
    add_column(pair, "weight", Column("float16"))
    add_column(pair, "teacher_ids", Column("uint16", 16))
    (after,) = open_manifests([pair], STORAGE)
    assert content_of(after) == content_of(before)
    assert [column.name for column in after.columns] == ["weight", "teacher_ids"]
    assert [column.token_bytes for column in after.columns] == [2, 32]


@pytest.mark.guarantee("columns-values-of-tokens")
@pytest.mark.parametrize("fill", [-math.inf, math.inf, 0, -1.5])
def test_a_fill_is_read_as_it_was_written(pair: str, fill: float) -> None:
    add_column(pair, "scores", Column("float32", 3, fill=fill, align="tokens"))
    manifest = read_manifest(manifest_url(pair), STORAGE)
    (column,) = manifest.columns
    assert (column.fill, column.align, column.width) == (fill, "tokens", 3)


@pytest.mark.guarantee("columns-not-fetched-unasked")
def test_only_columns_that_are_wanted_are_looked_up(pair: str) -> None:
    add_column(pair, "weight", Column("float16"))
    add_column(pair, "teacher_ids", Column("uint16", 16))
    Path(f"{pair}.col-teacher_ids").unlink()
    (manifest,) = open_manifests([pair], STORAGE, columns=["weight"])
    etags = {
        column.name: [file and file.etag for file in column.files] for column in manifest.columns
    }
    assert etags["weight"][0]
    assert not etags["teacher_ids"][0]
    with pytest.raises(
        ObjectNotFoundError, match=r"web\.col-teacher_ids: no such object, which column"
    ):
        open_manifests([pair], STORAGE, columns=["teacher_ids"])


@pytest.mark.guarantee("columns-refused-by-name")
@pytest.mark.parametrize("change", [-1, 1])
def test_a_column_of_another_length_than_the_tokens_is_refused(pair: str, change: int) -> None:
    add_column(pair, "weight", Column("float16"))
    path = Path(f"{pair}.col-weight")
    path.write_bytes((path.read_bytes() + b"x")[: path.stat().st_size + change])
    with pytest.raises(
        FormatError, match=r"col-weight: has \d+ bytes, and 200 tokens with 2 bytes"
    ):
        open_manifests([pair], STORAGE, columns=["weight"])


@pytest.mark.guarantee("columns-refused-by-name")
@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "float12"}, {"width": 0}, {"width": 1.5}, {"align": "left"}, {"fill": "x"}, {"files": []},
     {"files": [{"name": "../web.col-weight"}]}, {"files": [{}]}, {"name": "Weight"}, {"more": 1},
     {"dtype": "uint8", "fill": 256}, {"dtype": "uint8", "fill": 10**400}, {"files": None},
     {"files": [{"name": "a", "checksums": [1]}]}],
)  # fmt: skip
def test_a_damaged_entry_is_an_error_of_the_manifest(pair: str, wrong: dict[str, Any]) -> None:
    add_column(pair, "weight", Column("float16"))
    change_entry(pair, "weight", wrong)
    with pytest.raises(FormatError, match=r"web\.manifest\.json"):
        read_manifest(manifest_url(pair), STORAGE)


def test_a_folder_has_the_columns_of_its_datasets(pair: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "code", [[1, 2, 3]])
    add_column(pair, "weight", Column("float16"))
    (manifest,) = open_manifests([f"{tmp_path}/"], STORAGE, columns=["weight"])
    (column,) = manifest.columns
    assert [file is not None for file in column.files] == [False, True]
    add_column(tmp_path / "code", "weight", Column("float16"))
    (manifest,) = open_manifests([f"{tmp_path}/"], STORAGE, columns=["weight"])
    assert all(file and file.etag for file in manifest.columns[0].files)


def test_a_copy_has_its_columns(pair: str, tmp_path: Path) -> None:
    add_column(pair, "weight", Column("float16"), digest="0ab1")
    (tmp_path / "copy").mkdir()
    for path in tmp_path.glob("web*"):
        shutil.copy(path, tmp_path / "copy" / path.name)
    (manifest,) = open_manifests([f"{tmp_path}/copy/web"], STORAGE, columns=["weight"])
    assert [file and file.name for file in manifest.columns[0].files] == [
        f"{tmp_path}/copy/web.col-weight.0ab1"
    ]


@pytest.mark.guarantee("columns-refused-by-name")
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("weight", "takes a list of names"),
        (["Weight"], "small letters"),
        (["tokens"], "is a field of batches"),
        (["valid"], "is a field of batches"),
        ([["a"]], "small letters"),
        ([3], "small letters"),
        (["input_ids"], "is a field of batches"),
        (["n" * 65], "small letters"),
        ({"weight": {"dtype": np.uint8}}, "must be text"),
        ({"weight": 3}, "must be a Column"),
        ({"weight": {"dtype": "float12"}}, "must be one of uint8"),
        ({"weight": {"widht": 2}}, "did you mean width"),
        ({"weight": {"dtype": "uint8", "missing": -1}}, "cannot hold"),
        ({"weight": {"dtype": "uint8", "missing": 0.5}}, "cannot hold"),
        ({"weight": {"dtype": "float64", "fill": 10**400}}, "cannot hold"),
        ({"weight": {"dtype": "float16", "fill": 1e6}}, "cannot hold"),
        ({"weight": {"dtype": "float8_e4m3fn", "fill": -math.inf}}, "cannot hold"),
        ({"weight": {"stage": "first"}}, "must be one of last, both"),
    ],
)
def test_wrong_columns_are_refused(columns: Any, message: str) -> None:
    with pytest.raises(StreammegaError, match=message):
        read_columns(columns)
    with pytest.raises(ConfigError):
        read_columns(columns)
