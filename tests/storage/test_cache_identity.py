"""What is cached belongs to the very objects it was read from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from streammega import DataConfig, IndexedDataset, StorageConfig
from streammega.dataset.names import shard_name
from streammega.storage.backends.local import LocalStore
from streammega.storage.derived_stores import ConcatStore
from streammega.storage.store import ObjectInfo
from tests.support.builders import write_dataset, write_manifest
from tests.support.streams import stream
from tools.bench.object_server import running


def write_shards(root: Path, ids: list[int]) -> None:
    """Shards of one id each, all of the same size, and their manifest."""
    names = [shard_name("web", number, len(ids)) for number in range(len(ids))]
    for name, one in zip(names, ids, strict=True):
        write_dataset(root / "data" / name, [np.full(5000, one)] * 40)
    write_manifest(root / "data" / "web", names)


@pytest.mark.guarantee("cached-pages-belong")
@pytest.mark.parametrize("order", ["megatron", "sequential", "stream"])
def test_shards_that_are_replaced_by_others_of_the_same_size_are_read_anew(
    tmp_path: Path, order: str
) -> None:
    (tmp_path / "data").mkdir()
    write_shards(tmp_path, [5, 6])
    with running(tmp_path) as server:
        storage = StorageConfig(
            storage_options=server.storage_options,
            cache_dir=tmp_path / "cache",
            cache_max_bytes=1 << 30,
        ).tuned(cache_chunk_bytes=1 << 20)
        config = DataConfig(
            blend=["s3://data/web.manifest.json"], sequence_length=64, order=order,  # type: ignore[arg-type]
            num_samples=(3000, 0, 0), storage=storage,
            shuffle_lanes=8 if order == "stream" else None,
        )  # fmt: skip
        assert set(stream(config).unique().tolist()) == {5, 6}
        write_shards(tmp_path, [7, 8])
        got = stream(config)
        assert set(got.unique().tolist()) == {7, 8}
        assert torch.equal(
            got, stream(replace(config, storage=replace(storage, cache_max_bytes=0)))
        )
        if order == "sequential":
            before = server.counts()["bytes"]
            assert torch.equal(stream(config), got)
            assert server.counts()["bytes"] - before < 40_000, (
                "the new ones are cached in turn, but for their ends"
            )


@pytest.mark.guarantee("cached-pages-belong")
def test_the_etag_of_several_objects_is_made_of_all_of_theirs() -> None:
    store = LocalStore()

    def etag_of(*parts: tuple[str, int, str]) -> str:
        infos = [(store, ObjectInfo(key=key, size=size, etag=etag)) for key, size, etag in parts]
        return ConcatStore(infos, "all").info("all").etag

    one = etag_of(("/a", 4, "x"), ("/b", 6, "y"))
    assert one == etag_of(("/a", 4, "x"), ("/b", 6, "y"))
    others = [
        etag_of(("/a", 4, "x"), ("/b", 6, "z")),
        etag_of(("/a", 4, "x"), ("/c", 6, "y")),
        etag_of(("/a", 6, "x"), ("/b", 4, "y")),
        etag_of(("/b", 6, "y"), ("/a", 4, "x")),
    ]
    assert len({one, *others}) == 5
    assert etag_of(("/a", 4, "x"), ("/b", 6, "")) == "", (
        "one of unknown version makes the whole unknown"
    )


def test_a_folder_below_the_home_folder_is_found_by_its_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert str(StorageConfig(cache_dir="~/x").cache_dir) == str(tmp_path / "home" / "x")
    assert str(StorageConfig(cache_dir=Path("~/x")).cache_dir) == str(tmp_path / "home" / "x")
    config = DataConfig(blend=["a"], sequence_length=8, storage=StorageConfig(cache_dir="~/y"))
    assert str(config.storage.cache_dir) == str(tmp_path / "home" / "y")
    (tmp_path / "data").mkdir()
    write_shards(tmp_path, [5, 6])
    with running(tmp_path) as server:
        IndexedDataset(
            "s3://data/web.manifest.json",
            StorageConfig(storage_options=server.storage_options, cache_dir="~/z"),
        )
    assert (tmp_path / "home" / "z").is_dir()
    assert not (tmp_path / "~").exists()
