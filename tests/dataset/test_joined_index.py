"""The joined index of several shards: one file a node, of which no process has a copy."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from streammega import IndexedDataset, IndexedDatasetWriter, StorageConfig
from streammega.dataset import concat_index
from streammega.dataset.idx import encode_index
from streammega.errors import CacheError
from tests.support.builders import write_random_pair
from tests.support.kept_files import CHECKSUM_BYTES, write_kept
from tests.support.typed import all_tokens

SHARDS = 3


@pytest.fixture(autouse=True)
def _keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small ones."""
    monkeypatch.setattr("streammega.dataset.indexed.KEEP_BYTES", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(SHARDS):
        write_random_pair(
            str(tmp_path / "data" / f"x-{number:05d}-of-{SHARDS:05d}"),
            count=50 + number,
            seed=number,
        )
    return tmp_path / "data"


def open_dataset(folder: Path) -> IndexedDataset:
    return IndexedDataset(f"{folder}/", storage=StorageConfig(cache_dir=folder.parent / "cache"))


def files(folder: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_ino for path in (folder.parent / "cache" / "idx").glob("*.idx")
    }


def same_arrays(a: IndexedDataset, b: IndexedDataset) -> None:
    for name in ("sequence_lengths", "sequence_offsets", "document_indices", "sequence_modes"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a.dtype == b.dtype
    for one, other in zip(all_tokens(a), all_tokens(b), strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_is_that_of_the_shards_merged_and_mapped_from_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = open_dataset(folder)
    monkeypatch.setattr("streammega.dataset.indexed.KEEP_BYTES", 1 << 40)
    same_arrays(kept, open_dataset(folder))
    mapped = Path("/proc/self/maps").read_text()
    assert all(name in mapped for name in files(folder))
    for name in ("sequence_lengths", "sequence_offsets", "document_indices"):
        assert not getattr(kept, name).flags.writeable


@pytest.mark.parametrize("multimodal", [False, True])
def test_modes_and_dtypes_are_kept(
    tmp_path: Path, multimodal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        with IndexedDatasetWriter(
            str(tmp_path / "data" / f"{number}"), np.int64, multimodal
        ) as writer:
            for k in range(4):
                writer.add_item(np.arange(number + k), k - 1)
            writer.end_document()
    kept = IndexedDataset(
        f"{tmp_path / 'data'}/", storage=StorageConfig(cache_dir=tmp_path / "cache")
    )
    assert kept.dtype == np.int64
    assert (kept.sequence_modes is not None) == multimodal
    if multimodal:
        assert kept[6][1] == 1


AGAIN = """
import sys
from pathlib import Path
import streammega.dataset.indexed as reader
from tests.dataset.test_joined_index import files, open_dataset
reader.KEEP_BYTES = 0
reader.parse_index = None  # no .idx is read
dataset = open_dataset(Path(sys.argv[1]))
print(len(dataset), int(dataset.sequence_lengths.sum()), sorted(files(Path(sys.argv[1])).items()))
"""


@pytest.mark.guarantee("index-many-shards")
def test_a_second_process_maps_the_files_of_the_first(folder: Path) -> None:
    first = open_dataset(folder)
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(folder)], capture_output=True, text=True, check=False
    )
    assert (
        done.stdout.strip()
        == f"{len(first)} {int(first.sequence_lengths.sum())} {sorted(files(folder).items())}"
    ), done.stderr


def test_a_changed_shard_makes_it_anew_and_the_former_is_removed(folder: Path) -> None:
    before = open_dataset(folder)
    names = set(files(folder))
    write_random_pair(str(folder / f"x-00001-of-{SHARDS:05d}"), count=77, seed=9)
    again = open_dataset(folder)
    assert len(again) == len(before) - 51 + 77
    assert len(files(folder)) == len(names)
    assert not names & set(files(folder))
    np.testing.assert_array_equal(
        again[60], IndexedDataset(str(folder / f"x-00001-of-{SHARDS:05d}"))[10]
    )


def test_a_damaged_file_is_named_and_one_that_cannot_be_kept_is_done_without(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = open_dataset(folder)
    (path,) = (folder.parent / "cache" / "idx").glob("joined-*.idx")
    body = path.read_bytes()[:-CHECKSUM_BYTES]
    for damaged in (body[:-8], body[:10], b"x" + body):
        write_kept(path, damaged)
        with pytest.raises(CacheError, match=rf"{path.name}: .*remove the file"):
            open_dataset(folder)
    blocked = folder.parent / "blocked"
    blocked.write_bytes(b"a file where the cache should be")
    same_arrays(IndexedDataset(f"{folder}/", storage=StorageConfig(cache_dir=blocked)), kept)
    assert "joins the indices of 3 shards in its memory" in caplog.text


@pytest.mark.guarantee("index-many-shards")
def test_joining_takes_little_memory(tmp_path: Path) -> None:
    count = 1_000_000
    (tmp_path / "data").mkdir()
    for number in range(SHARDS):
        prefix = tmp_path / "data" / f"{number}"
        prefix.with_suffix(".idx").write_bytes(
            b"".join(
                encode_index(
                    np.dtype(np.uint8), np.ones(count, np.int32), np.arange(count + 1), None
                )
            )
        )
        prefix.with_suffix(".bin").write_bytes(bytes(count))
    tracemalloc.start()
    dataset = open_dataset(tmp_path / "data")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset) == SHARDS * count > 10 * concat_index.ROWS
    assert int(dataset.sequence_offsets[-1]) == SHARDS * count - 1
    assert int(dataset.document_indices[-1]) == SHARDS * count
    held = 20 * SHARDS * count
    assert peak < held / 4, f"{peak >> 20} MiB for an index of {held >> 20} MiB"


def test_small_indices_need_no_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streammega.dataset.indexed.KEEP_BYTES", 16 << 20)
    assert len(open_dataset(folder)) == sum(50 + number for number in range(SHARDS))
    assert not os.path.exists(folder.parent / "cache")
