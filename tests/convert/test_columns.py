"""Columns of datasets that are converted: inputs know them, and what cannot be carried is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import Column, IndexedDataset
from streammega.cli.main import main
from streammega.convert import convert
from streammega.convert.read.inputs import find_inputs
from streammega.convert.read.selection import SkippedFiles
from streammega.errors import ConvertError, FormatError, ObjectNotFoundError
from tests.support.builders import write_dataset
from tests.support.columns import add_column, change_entry

COLUMNS = {"weight": Column("float16", fill=-math.inf), "teacher": Column("uint16", 3)}
ROOM = 1 << 16
"""Ids of a dataset: token t of dataset d has the id d * ROOM + t + 1."""


def put(prefix: Path, number: int, sizes: list[int], columns: Any = COLUMNS) -> str:
    """A pair of documents of so many tokens, each with an id of its own, and its columns."""
    first = number * ROOM + 1
    ends = np.cumsum(sizes)
    ids = [
        np.arange(first + end - size, first + end) for size, end in zip(sizes, ends, strict=True)
    ]
    write_dataset(prefix, ids, np.int32)
    for name, column in columns.items():
        add_column(prefix, name, column, shards=[number])
    return str(prefix)


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return put(tmp_path / "in" / "web", 0, [5, 7, 3])


@pytest.mark.parametrize("name", ["in/", "in/web*", "in/web", "in/web.idx", "in/web.manifest.json"])
def test_columns_belong_to_their_shards(pair: str, tmp_path: Path, name: str) -> None:
    add_column(pair, "old", COLUMNS["weight"], digest="0ab1")
    job = tmp_path / "in" / "web.col-job-1"
    job.mkdir()
    (job / "0-8-0of1").write_bytes(b"x")
    skipped = SkippedFiles()
    (item,) = find_inputs(f"{tmp_path}/{name}", skipped=skipped)
    assert item.format == "megatron"
    assert not skipped.counts.keys() & {"of unknown suffix", "columns without their shards"}
    if name.endswith(("/", "*")):
        assert {Path(part).name for part in item.parts} > {"web.col-weight", "web.col-old.0ab1"}


def test_columns_without_their_shards_are_counted(pair: str, tmp_path: Path) -> None:
    (tmp_path / "in" / "lost.col-weight").write_bytes(b"x")
    skipped = SkippedFiles()
    find_inputs(f"{tmp_path}/in/", skipped=skipped)
    assert skipped.names == {"of unknown suffix": [f"{tmp_path}/in/lost.col-weight"]}


@pytest.mark.parametrize("words", [[], ["--shuffle"], ["--format", "zst"]])
def test_columns_are_left_out_if_that_is_asked_for(
    pair: str, tmp_path: Path, words: list[str]
) -> None:
    output = str(tmp_path / "out")
    assert main(["convert", pair, output, "--drop-columns", *words]) == 0
    assert not IndexedDataset(output + ("" if "zst" not in words else ".bin.zst")).columns


def test_a_merge_of_datasets_of_which_one_lacks_a_column_names_it(
    pair: str, tmp_path: Path
) -> None:
    other = put(tmp_path / "in" / "code", 1, [4], {"teacher": COLUMNS["teacher"]})
    with pytest.raises(ConvertError, match=r"code: has no column 'weight', and .*web has it"):
        convert([pair, other], tmp_path / "out")
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ConvertError, match=r"text\.txt: has no column 'weight'"):
        convert([pair, str(tmp_path / "text.txt")], tmp_path / "out", tokenizer="bytes")
    convert([pair, other], tmp_path / "out", drop_columns=True)
    assert not list(tmp_path.glob("out*.col-*"))


@pytest.mark.parametrize(
    "other", [Column("float32"), Column("float16", 2), Column("float16", align="tokens")]
)
def test_a_merge_of_columns_that_differ_names_both(
    pair: str, tmp_path: Path, other: Column
) -> None:
    columns = {"weight": other, "teacher": COLUMNS["teacher"]}
    code = put(tmp_path / "in" / "code", 1, [4], columns)
    with pytest.raises(ConvertError, match=r"code: its column 'weight' is float.*that of .*web is"):
        convert([pair, code], tmp_path / "out")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_column_of_another_length_than_the_tokens_is_refused(
    pair: str, tmp_path: Path, change: int
) -> None:
    path = Path(f"{pair}.col-weight")
    path.write_bytes((path.read_bytes() + b"x")[: path.stat().st_size + change])
    with pytest.raises(FormatError, match=r"col-weight: has \d+ bytes, and 15 tokens"):
        convert([pair], tmp_path / "out")
    path.unlink()
    with pytest.raises(ObjectNotFoundError, match=r"col-weight: no such object"):
        convert([pair], tmp_path / "out")


def test_a_damaged_entry_is_no_reason_to_drop_columns(pair: str, tmp_path: Path) -> None:
    change_entry(pair, "weight", {"width": 0})
    with pytest.raises(FormatError, match="damaged manifest"):
        convert([pair], tmp_path / "out")
