"""Columns in the commands: what verify finds in them, and what describe, cat, view and gc show."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import Column, IndexedDataset
from streammega.apps.view_data import Dataset
from streammega.cli.main import main
from streammega.config import StorageConfig
from streammega.dataset.checksums import checksums_of
from streammega.dataset.column_reader import as_numbers
from streammega.dataset.columns import stored_value
from streammega.dataset.verify import verify
from tests.support.builders import write_dataset
from tests.support.columns import add_column, change_entry, hashed

COLUMNS = {"weight": Column("float16"), "teacher_ids": Column("uint16", 4, align="tokens")}


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    """A pair with two columns, one of them with checksums."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 90, 40).tolist() for _ in range(5)]
    prefix = str(write_dataset(tmp_path / "web", documents))
    for name, column in COLUMNS.items():
        add_column(prefix, name, column)
    path = Path(f"{prefix}.col-weight")
    files = [{"name": path.name, "checksums": checksums_of(path.read_bytes())}]
    change_entry(prefix, "weight", {"files": files})
    return prefix


def test_verify_reads_columns_if_it_is_told_to(dataset: str) -> None:
    report = verify(dataset, columns=True)
    assert (report.problems, report.columns) == ([], ["weight", "teacher_ids"])
    assert report.checked_bytes == 200 * (2 + 2 + 8)
    Path(f"{dataset}.col-weight").unlink()
    report = verify(dataset)
    assert (report.problems, report.columns, report.checked_bytes) == ([], [], 200 * 2)


@pytest.mark.guarantee("columns-of-commands")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], r"col-weight: has 399 bytes, and 200 tokens with 2 bytes each"),
        (lambda data: data + b"x", r"col-weight: has 401 bytes"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], r"bytes \[0, 400\) are damaged"),
        (lambda data: None, r"col-weight: no such object, which column 'weight' needs"),
    ],
)
def test_verify_names_what_is_wrong_with_a_column(
    dataset: str, change: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(f"{dataset}.col-weight")
    changed = change(path.read_bytes())
    path.unlink()
    if changed is not None:
        path.write_bytes(changed)
    (problem,) = verify(dataset, columns=True).problems
    assert re.search(message, problem)
    assert main(["verify", dataset, "--columns"]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"{dataset}: damaged: {problem}"
    assert main(["verify", dataset]) == 0


def test_verify_refuses_checksums_of_another_size(dataset: str) -> None:
    files = [{"name": "web.col-weight", "checksums": ["0" * 32] * 2}]
    change_entry(dataset, "weight", {"files": files})
    (problem,) = verify(dataset, columns=True).problems
    assert "the manifest has 2" in problem


def test_verify_says_that_a_folder_names_no_columns(dataset: str) -> None:
    (note,) = [note for note in verify(f"{dataset}*", columns=True).notes if "columns" in note]
    assert "name each dataset by itself" in note


@pytest.mark.guarantee("columns-of-commands")
def test_describe_lists_columns(dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_column(dataset, "scores", Column("float32", fill=-math.inf))
    assert main(["describe", dataset, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)["columns"]
    assert described == [
        {"name": "weight", "dtype": "float16", "width": 1, "align": "labels", "fill": 0,
         "bytes_a_token": 2},
        {"name": "teacher_ids", "dtype": "uint16", "width": 4, "align": "tokens", "fill": 0,
         "bytes_a_token": 8},
        {"name": "scores", "dtype": "float32", "width": 1, "align": "labels", "fill": "-inf",
         "bytes_a_token": 4},
    ]  # fmt: skip
    assert main(["describe", dataset]) == 0
    assert "teacher_ids" in capsys.readouterr().out
    blend = str(Path(dataset).parent / "blend.json")
    assert main(["manifest", dataset, blend]) == 0
    capsys.readouterr()
    assert main(["describe", blend, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["datasets"]
    assert row["columns"] == ["weight", "teacher_ids", "scores"]


@pytest.mark.guarantee("columns-of-commands")
def test_cat_shows_the_values_of_each_token(
    dataset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cat", f"{dataset}#1..2", "--ids", "--columns", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for document, report in zip((1, 2), shown, strict=True):
        places = np.arange(40 * document, 40 * (document + 1))
        stored = hashed(places, COLUMNS["teacher_ids"])
        assert report["columns"]["teacher_ids"] == stored.view("<u2").tolist()
        weights = hashed(places, COLUMNS["weight"]).view("<f2")[:, 0]
        assert report["columns"]["weight"] == weights.tolist()
    assert main(["cat", f"{dataset}#0", "--ids", "--columns"]) == 0
    _, weight, ids = capsys.readouterr().out.splitlines()
    assert weight.startswith("weight: ")
    assert len(weight.split()) == 41
    assert ids.startswith("teacher_ids: [")
    assert ids.count("[") == 40


def test_values_that_are_not_finite_are_shown_as_text(
    dataset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.full(200, -np.inf, np.float16)
    Path(f"{dataset}.col-weight").write_bytes(values.tobytes())
    assert main(["cat", f"{dataset}#0", "--ids", "--columns", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["columns"]["weight"] == ["-inf"] * 40


def test_cat_says_that_there_are_no_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "plain", [[1, 2, 3]])
    assert main(["cat", f"{tmp_path}/plain#0", "--ids", "--columns"]) != 0
    assert "has no columns" in capsys.readouterr().err


def test_a_column_that_changed_since_it_was_opened_is_refused(dataset: str) -> None:
    indexed = IndexedDataset(dataset, columns=["weight"])
    reader = indexed.column("weight")
    path = Path(f"{dataset}.col-weight")
    path.with_suffix(".new").write_bytes(b"\0" * 400)
    path.with_suffix(".new").replace(path)
    with pytest.raises(Exception, match=r"web\.col-weight"):
        reader.read([(0, 3)])


@pytest.mark.guarantee("columns-of-commands")
def test_view_names_columns(dataset: str) -> None:
    shown = Dataset(dataset, StorageConfig(), None)
    assert shown.columns == ["weight (float16)", "teacher_ids (uint16 x 4)"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_that_numpy_lacks_are_as_torch_has_them(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    torch_dtype = getattr(torch, dtype)
    size = torch.empty(0, dtype=torch_dtype).element_size()
    stored = np.arange(256**size).astype(f"<u{size}").view(np.uint8).reshape(-1, size)
    values = torch.from_numpy(stored.copy()).view(torch_dtype).float().numpy()
    assert np.array_equal(as_numbers(stored, dtype), values, equal_nan=True)
    rng = np.random.default_rng(0)
    finite = values[np.isfinite(values)]
    numbers = [*rng.normal(0, 1, 200), *rng.choice(finite, 200), 0.0, -0.0, 1e-9]
    if dtype != "float8_e4m3fn":
        numbers += [math.inf, -math.inf]
    for number in np.array(numbers, np.float32):
        expected = torch.tensor([number]).to(torch_dtype).view(torch.uint8).numpy().tobytes()
        assert stored_value(dtype, float(number)) == expected, number
    nan = np.frombuffer(stored_value(dtype, math.nan), np.uint8)
    assert np.isnan(as_numbers(nan, dtype)).all()


def age(*paths: Path, hours: float) -> None:
    for path in paths:
        moment = time.time() - 3600 * hours
        os.utime(path, (moment, moment))


def left(folder: Path, prefix: str, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert main(["gc", prefix, "--json", *words]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    return [str(Path(row["file"]).relative_to(folder)) for row in files]


@pytest.mark.guarantee("columns-of-commands")
def test_gc_removes_columns_and_pieces_that_no_manifest_lists(
    dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert left(tmp_path, dataset, capsys) == []
    add_column(dataset, "weight", COLUMNS["weight"], digest="0ab1")
    (tmp_path / ".web.col-weight.0123456789ab.partial").write_bytes(b"x")
    (tmp_path / "web.col-notes").write_bytes(b"x")
    old = ["web.col-weight", "web.col-notes", ".web.col-weight.0123456789ab.partial"]
    for job in ("job-00", "job-01"):
        (tmp_path / f"web.col-{job}").mkdir()
        for piece in ("0-64-0of2", "64-128-0of2"):
            (tmp_path / f"web.col-{job}" / piece).write_bytes(b"x")
            old.append(f"web.col-{job}/{piece}")
    age(*(tmp_path / name for name in old), hours=30)
    # A job that goes on needs its first pieces too.
    age(tmp_path / "web.col-job-01" / "64-128-0of2", hours=1)
    assert sorted(left(tmp_path, dataset, capsys)) == sorted(old)
    removed = left(tmp_path, dataset, capsys, "--remove")
    assert sorted(removed) == sorted(name for name in old if "job-01" not in name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "web.bin", "web.col-job-01", "web.col-teacher_ids", "web.col-weight.0ab1", "web.idx",
        "web.manifest.json",
    ]  # fmt: skip
    assert verify(dataset, columns=True).problems == []


def test_gc_keeps_columns_that_the_manifest_of_another_dataset_lists(
    dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(f"{dataset}.manifest.json", tmp_path / "all.manifest.json")
    assert left(tmp_path, dataset, capsys) == []
    (tmp_path / "all.manifest.json").write_text("{")
    assert main(["gc", dataset]) != 0
    assert "all.manifest.json" in capsys.readouterr().err
    (tmp_path / "all.manifest.json").unlink()
    assert left(tmp_path, dataset, capsys) == ["web.col-teacher_ids", "web.col-weight"]
