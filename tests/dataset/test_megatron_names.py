"""IndexedDataset under Megatron's own calls, side by side with megatron-core's on
the same files.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import IndexedDataset, IndexedDatasetWriter, StorageConfig
from streammega.errors import ConfigError, FormatError, ObjectNotFoundError
from tests.support import oracle
from tests.support.servers import S3

Open = Callable[[Any, str], Any]

CALLS: dict[str, Open] = {
    "prefix": lambda kind, prefix: kind(prefix),
    "positional": lambda kind, prefix: kind(prefix, False, True),
    "positional, unmapped": lambda kind, prefix: kind(prefix, False, False),
    "keywords": lambda kind, prefix: kind(
        path_prefix=prefix, multimodal=False, mmap=True, object_storage_config=None
    ),
    "as GPTDataset": lambda kind, prefix: kind(
        prefix,
        multimodal=False,
        mmap=False,
        fast_cache_load=False,
        sequences_per_dataset=None,
        dtype_code=None,
    ),
}
WITH_MODES: dict[str, Open] = {
    "positional": lambda kind, prefix: kind(prefix, True),
    "positional, unmapped": lambda kind, prefix: kind(prefix, True, False),
    "keywords": lambda kind, prefix: kind(path_prefix=prefix, multimodal=True, mmap=True),
    "modes unasked for": lambda kind, prefix: kind(prefix, multimodal=False),
}


def write(prefix: str, multimodal: bool, dtype: Any = np.uint16) -> None:
    rng = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, dtype, multimodal) as writer:
        for document in range(12):
            for _ in range(document % 4):
                writer.add_item(
                    rng.integers(0, 99, rng.integers(1, 30)), mode=int(rng.integers(-2, 3))
                )
            writer.end_document()


def same(ours: Any, theirs: Any) -> None:
    """The same arrays in the same lists and tuples."""
    if isinstance(theirs, (tuple, list)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for own, other in zip(ours, theirs, strict=True):
            same(own, other)
    else:
        np.testing.assert_array_equal(ours, theirs)
        assert np.asarray(ours).dtype.kind == np.asarray(theirs).dtype.kind


def compare(ours: Any, theirs: Any) -> None:
    count = len(theirs)
    assert len(ours) == count
    for number in [0, 1, count - 1, -1, np.int64(3), np.int32(2)]:
        same(ours[number], theirs[number])
        same(ours.get(number), theirs.get(number))
        same(ours.get(number, 1), theirs.get(number, offset=1))
        same(ours.get(number, 0, 1), theirs.get(number, 0, length=1))
        same(tuple(ours.index[number]), tuple(theirs.index[number]))
    for part in (slice(None), slice(2, 7), slice(-3, None), slice(5, 6)):
        same(ours[part], theirs[part])
    for name in ("sequence_lengths", "document_indices"):
        same(getattr(ours, name), getattr(theirs, name))
    for name in (
        "sequence_lengths",
        "sequence_pointers",
        "document_indices",
        "sequence_count",
        "document_count",
        "dtype_size",
    ):
        same(getattr(ours.index, name), getattr(theirs.index, name))
    assert ours.index.dtype == theirs.index.dtype
    assert (ours.index.sequence_modes is None) == (theirs.index.sequence_modes is None)
    if theirs.index.sequence_modes is not None:
        same(ours.index.sequence_modes, theirs.index.sequence_modes)
    assert len(ours.index) == len(theirs.index)
    same(ours.get_document_indices(), theirs.get_document_indices())
    for name in ("path_prefix", "multimodal", "mmap", "object_storage_config"):
        assert getattr(ours, name) == getattr(theirs, name)
    for wrong, kind in ((slice(0, 4, 2), ValueError), ("1", TypeError), (count, IndexError)):
        for dataset in (ours, theirs):
            with pytest.raises(kind):
                dataset[wrong]


@pytest.mark.guarantee("indexeddataset-writer-gptdataset")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("call", CALLS)
def test_megatrons_calls_give_what_megatron_gives(tmp_path: Path, call: str, dtype: Any) -> None:
    write(str(tmp_path / "pair"), multimodal=False, dtype=dtype)
    ours, theirs = (
        CALLS[call](kind, str(tmp_path / "pair"))
        for kind in (IndexedDataset, oracle.IndexedDataset)
    )
    compare(ours, theirs)
    compare(pickle.loads(pickle.dumps(ours)), theirs)  # noqa: S301


@pytest.mark.guarantee("indexeddataset-writer-gptdataset")
@pytest.mark.parametrize("call", WITH_MODES)
def test_megatrons_calls_of_multimodal_files_do_too(tmp_path: Path, call: str) -> None:
    write(str(tmp_path / "pair"), multimodal=True)
    ours, theirs = (
        WITH_MODES[call](kind, str(tmp_path / "pair"))
        for kind in (IndexedDataset, oracle.IndexedDataset)
    )
    compare(ours, theirs)
    compare(pickle.loads(pickle.dumps(ours)), theirs)  # noqa: S301


def test_existence_is_told_alike(tmp_path: Path) -> None:
    write(str(tmp_path / "pair"), multimodal=False)
    (tmp_path / "half.idx").write_bytes(b"")
    (tmp_path / "other.bin").write_bytes(b"")
    for name in ("pair", "half", "other", "none"):
        prefix = str(tmp_path / name)
        assert (
            IndexedDataset.exists(prefix)
            == oracle.IndexedDataset.exists(prefix)
            == (name == "pair")
        )


def test_modes_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    write(str(tmp_path / "pair"), multimodal=False)
    with pytest.raises(FormatError, match="pair: has no modes"):
        IndexedDataset(str(tmp_path / "pair"), multimodal=True)


def test_without_megatrons_arguments_a_file_with_modes_gives_pairs(tmp_path: Path) -> None:
    write(str(tmp_path / "pair"), multimodal=True)
    read = IndexedDataset(str(tmp_path / "pair"))
    assert read.multimodal
    assert [len(item) for item in read[:3]] == [2, 2, 2]
    np.testing.assert_array_equal(read.get(0), read[0][0])


@pytest.mark.parametrize(
    "settings", [{"fast_cache_load": True}, {"sequences_per_dataset": (1, 1)}, {"dtype_code": 4}]
)
def test_what_has_no_meaning_here_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    write(str(tmp_path / "pair"), multimodal=False)
    with pytest.raises(ConfigError, match="fast_cache_load"):
        IndexedDataset(str(tmp_path / "pair"), **settings)
    with pytest.raises(ConfigError, match="path_to_idx_cache"):
        IndexedDataset(str(tmp_path / "pair"), object_storage_config=object())
    with pytest.raises(ConfigError, match="the name of a dataset"):
        IndexedDataset()


@pytest.mark.parametrize("s3", ["moto"], indirect=True)
def test_object_storage_is_read_by_megatrons_config(
    tmp_path: Path, s3: S3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    write(f"s3://{bucket}/pair", multimodal=False)
    write(str(tmp_path / "pair"), multimodal=False)
    from megatron.core.datasets.object_storage_utils import ObjectStorageConfig

    where = ObjectStorageConfig(path_to_idx_cache=str(tmp_path / "idx"))
    read = IndexedDataset(
        f"s3://{bucket}/pair", multimodal=False, mmap=False, object_storage_config=where
    )
    theirs = oracle.IndexedDataset(str(tmp_path / "pair"))
    same(read[:], theirs[:])
    assert list((tmp_path / "idx").rglob("*.idx"))
    named = IndexedDataset(
        f"s3://{bucket}/pair",
        storage=StorageConfig(cache_dir=tmp_path / "named"),
        object_storage_config=where,
    )
    assert named.storage.cache_dir == tmp_path / "named"
    assert list((tmp_path / "named").rglob("*.idx"))
    assert IndexedDataset.exists(f"s3://{bucket}/pair")
    assert not IndexedDataset.exists(f"s3://{bucket}/other")


def test_our_own_calls_mean_what_they_did(tmp_path: Path) -> None:
    write(str(tmp_path / "pair"), multimodal=False)
    storage = StorageConfig().tuned(max_retries=1)
    for read in (
        IndexedDataset(str(tmp_path / "pair"), storage),
        IndexedDataset(str(tmp_path / "pair"), storage=storage),
        IndexedDataset(prefix=str(tmp_path / "pair"), storage=storage),
    ):
        assert read.storage == storage
        assert len(read) == len(oracle.IndexedDataset(str(tmp_path / "pair")))
    with pytest.raises(ObjectNotFoundError):
        IndexedDataset(str(tmp_path / "none"))


@pytest.mark.guarantee("indexeddataset-writer-gptdataset")
def test_megatrons_samples_come_out_of_our_dataset(tmp_path: Path) -> None:
    """Megatron's GPTDataset reads through ours what it reads through its own."""
    write(str(tmp_path / "pair"), multimodal=False)
    config = oracle.gpt_config(None, 16, 7)
    samples = []
    for indexed in (
        IndexedDataset(str(tmp_path / "pair")),
        oracle.IndexedDataset(str(tmp_path / "pair")),
    ):
        ids = np.arange(len(indexed), dtype=np.int32)
        dataset = oracle.GPTDataset(
            indexed, str(tmp_path / "pair"), ids, 40, oracle.Split.train, config
        )
        samples.append([dataset[number]["tokens"].tolist() for number in range(40)])
    assert samples[0] == samples[1]


@pytest.mark.guarantee("indexeddataset-writer-gptdataset")
def test_the_writer_takes_the_paths_of_megatrons_builder(tmp_path: Path) -> None:
    import torch

    for kind, name in ((IndexedDatasetWriter, "ours"), (oracle.IndexedDatasetBuilder, "theirs")):
        builder: Any = kind(str(tmp_path / f"{name}.bin"), dtype=np.uint16, multimodal=False)
        builder.add_item(torch.tensor([1, 2, 3]), 0)
        builder.add_document(np.array([4, 5]), [1, 1])
        oracle.finalize(builder, str(tmp_path / f"{name}.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (
            tmp_path / f"theirs{suffix}"
        ).read_bytes()
