"""Folders that other libraries write are read by `convert` as those libraries read them.

`make integrations` installs datasets and deltalake, `make bench-peers` mosaicml-streaming and litdata.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from streammega.errors import ConvertError
from tests.support.builders import convert_bytes, stored_texts

pytestmark = [  # files that these libraries leave open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
TEXTS = [f"text {number} " + "x" * (number % 7) for number in range(100)]


def library(name: str) -> Any:
    """A module of another library; skips where it is not installed, or cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name}: {type(error).__name__}: {error}")


def texts_of(folder: Path, item: Path) -> list[str]:
    """The texts of an input, in the order in which `convert` stores them."""
    convert_bytes(folder / "out", str(item), overwrite=True)
    return stored_texts(folder / "out")


def write_saved(folder: Path, **options: Any) -> Any:
    datasets = library("datasets")
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})
    saved.save_to_disk(str(folder), **options)
    return datasets.load_from_disk(str(folder))


def test_datasets_saved_in_shards(tmp_path: Path) -> None:
    read = write_saved(tmp_path / "in", num_shards=3)
    assert texts_of(tmp_path, tmp_path / "in") == list(read["text"]) == TEXTS


def test_datasets_that_were_mapped_after_they_were_saved(tmp_path: Path) -> None:
    """`map` leaves its results beside the data, as caches."""
    read = write_saved(tmp_path / "in", num_shards=2)
    read.map(lambda row: {"text": row["text"].upper()})
    assert any(path.name.startswith("cache-") for path in (tmp_path / "in").iterdir())
    assert texts_of(tmp_path, tmp_path / "in") == TEXTS


def test_datasets_of_several_splits(tmp_path: Path) -> None:
    datasets = library("datasets")
    whole = datasets.Dataset.from_dict({"text": TEXTS})
    whole.train_test_split(test_size=10, seed=1).save_to_disk(str(tmp_path / "in"))
    read = datasets.load_from_disk(str(tmp_path / "in"))
    for split in ("train", "test"):
        assert texts_of(tmp_path, tmp_path / "in" / split) == list(read[split]["text"])


@pytest.mark.parametrize("compression", [None, "zstd", "gz", "snappy", "br"])
def test_mds_of_one_folder(tmp_path: Path, compression: str | None) -> None:
    streaming = library("streaming")
    write_mds(streaming, tmp_path / "in", TEXTS, compression=compression)
    read = read_mds(streaming, tmp_path / "in")
    if compression in ("snappy", "br"):
        with pytest.raises(ConvertError, match=rf"{compression}"):
            texts_of(tmp_path, tmp_path / "in")
        return
    assert texts_of(tmp_path, tmp_path / "in") == read == TEXTS


def test_mds_whose_indices_were_merged(tmp_path: Path) -> None:
    """The indices of the parts stay where they are."""
    streaming = library("streaming")
    for part, texts in (("00", TEXTS[:40]), ("01", TEXTS[40:])):
        write_mds(streaming, tmp_path / "in" / part, texts)
    library("streaming.base.util").merge_index(str(tmp_path / "in"))
    assert sorted(path.name for path in (tmp_path / "in").rglob("index.json")) == ["index.json"] * 3
    assert texts_of(tmp_path, tmp_path / "in") == read_mds(streaming, tmp_path / "in") == TEXTS


def write_mds(streaming: Any, folder: Path, texts: list[str], **options: Any) -> None:
    columns = {"text": "str", "number": "int"}
    with streaming.MDSWriter(
        out=str(folder), columns=columns, size_limit=1 << 10, **options
    ) as writer:
        for number, text in enumerate(texts):
            writer.write({"text": text, "number": number})


def read_mds(streaming: Any, folder: Path) -> list[str]:
    read = streaming.StreamingDataset(local=str(folder), shuffle=False, batch_size=1)
    return [read[number]["text"] for number in range(len(read))]


def test_litdata_of_texts(tmp_path: Path) -> None:
    litdata = library("litdata")
    litdata.optimize(
        fn=text_of_number,
        inputs=list(range(len(TEXTS))),
        output_dir=str(tmp_path / "in"),
        chunk_bytes="1KB",
        num_workers=1,
    )
    read = litdata.StreamingDataset(str(tmp_path / "in"), shuffle=False)
    assert texts_of(tmp_path, tmp_path / "in") == [row["text"] for row in read] == TEXTS


def text_of_number(number: int) -> dict[str, Any]:
    return {"text": TEXTS[number], "number": number}


@pytest.mark.parametrize("below", [False, True])
def test_a_table_of_delta_lake_with_a_deleted_row_is_refused(tmp_path: Path, below: bool) -> None:
    """Its files have the row still."""
    deltalake = library("deltalake")
    import pyarrow as pa

    root = tmp_path / "in" / "table" if below else tmp_path / "in"
    deltalake.write_deltalake(str(root), pa.table({"text": TEXTS}))
    deltalake.DeltaTable(str(root)).delete("text = 'text 3 xxx'")
    read = deltalake.DeltaTable(str(root)).to_pyarrow_table()["text"].to_pylist()
    assert len(read) == len(TEXTS) - 1
    with pytest.raises(ConvertError, match="Delta Lake"):
        texts_of(tmp_path, tmp_path / "in")
    library("pyarrow.parquet").write_table(pa.table({"text": read}), str(tmp_path / "live.parquet"))
    assert sorted(texts_of(tmp_path, tmp_path / "live.parquet")) == sorted(read)
