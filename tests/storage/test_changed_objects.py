"""Whatever reads an object reads the one that was opened: map-style reads, merges, downloads and
pointers, as streams do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import (
    BlendedDataset,
    DataConfig,
    GPTDataset,
    IndexedDataset,
    IndexedDatasetWriter,
    StorageConfig,
    StreamingDataset,
    build_datasets,
)
from streammega.dataset.local_cache import SharedFolder, cached_arrays, map_local_copy
from streammega.dataset.opening import open_manifests
from streammega.dataset.shard import token_at
from streammega.errors import ObjectChangedError
from streammega.storage import ObjectInfo, Store, open_store
from tests.support.kept_files import save_kept
from tools.bench.object_server import Running, running

TOKENS = 64


def write_pair(prefix: Path, token: int, documents: int = 50) -> None:
    with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
        for _ in range(documents):
            writer.add_item(np.full(TOKENS, token, np.uint16))
            writer.end_document()


@dataclass
class Place:
    """A served folder with two pairs of the same shape: `web` of fives; `replace` puts sevens in
    its place.
    """

    root: Path
    endpoint: Running
    storage: StorageConfig

    def replace(self, suffix: str = ".bin") -> None:
        write_pair(self.root / "made", 7)
        os.replace(f"{self.root}/made{suffix}", f"{self.root}/data/web{suffix}")

    def config(self, order: str, blend: list[Any]) -> DataConfig:
        return DataConfig(
            blend=blend,
            sequence_length=16,
            order=order,  # type: ignore[arg-type]
            num_samples=(96, 0, 0),
            storage=self.storage.changed(cache_dir=self.root / "cache"),
        )


@pytest.fixture(params=["obstore", "fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    for name in ("web", "code"):
        write_pair(tmp_path / "data" / name, 5)
    with running(tmp_path) as endpoint:
        storage = StorageConfig(transport=request.param, storage_options=endpoint.storage_options)
        yield Place(tmp_path, endpoint, storage)


def indexed(place: Place) -> Callable[[], Any]:
    dataset = IndexedDataset("s3://data/web", place.storage.changed(cache_dir=place.root / "cache"))
    return lambda: dataset[3]


def indexed_slice(place: Place) -> Callable[[], Any]:
    dataset = IndexedDataset("s3://data/web", place.storage.changed(cache_dir=place.root / "cache"))
    return lambda: dataset[3:9]


def gpt(place: Place) -> Callable[[], Any]:
    dataset = build_datasets(place.config("megatron", ["s3://data/web"]))[0]
    assert isinstance(dataset, GPTDataset)
    return lambda: dataset[0]["tokens"]


def blended(place: Place) -> Callable[[], Any]:
    dataset = build_datasets(
        place.config("megatron", [("s3://data/web", 0.9), ("s3://data/code", 0.1)])
    )[0]
    assert isinstance(dataset, BlendedDataset)
    return lambda: [dataset[k]["tokens"] for k in range(10)]


def shards(place: Place) -> Callable[[], Any]:
    dataset = build_datasets(place.config("megatron", ["s3://data/"]))[0]
    assert isinstance(dataset, GPTDataset)
    return lambda: [dataset[k]["tokens"] for k in range(96)]


def one_batch(place: Place) -> Callable[[], Any]:
    dataset = StreamingDataset(
        place.config("stream", ["s3://data/web"]), micro_batch_size=2, global_batch_size=2
    )
    return lambda: dataset.batch(0)["tokens"]


READS = [indexed, indexed_slice, gpt, blended, shards, one_batch]


@pytest.mark.guarantee("11-bytes-used")
@pytest.mark.parametrize("opened", READS)
def test_map_style_reads_notice_an_object_that_was_replaced(
    place: Place, opened: Callable[[Place], Any]
) -> None:
    read = opened(place)
    read()
    place.replace()
    with pytest.raises(ObjectChangedError, match=r"web\.bin: the object was replaced"):
        read()


@pytest.mark.guarantee("11-bytes-used")
def test_a_merge_notices_that_its_source_was_replaced(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Replaced(IndexedDataset):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            place.replace()

    monkeypatch.setattr("streammega.dataset.writer.IndexedDataset", Replaced)
    writer = IndexedDatasetWriter(str(tmp_path / "merged"), np.uint16, storage=place.storage)
    with writer, pytest.raises(ObjectChangedError, match=r"web\.bin"):
        writer.add_index("s3://data/web")


@pytest.mark.guarantee("11-bytes-used")
def test_an_index_replaced_between_its_head_and_its_download_is_not_cached(
    place: Place, tmp_path: Path
) -> None:
    store, key = open_store("s3://data/web.idx", place.storage)
    info = store.info(key)
    place.replace(".idx")
    with pytest.raises(ObjectChangedError, match=r"web\.idx"):
        map_local_copy(store, info, tmp_path / "idx-cache", 1 << 20)
    assert not list((tmp_path / "idx-cache").rglob("*.idx"))


def test_pointers_are_read_from_the_index_that_was_opened(place: Place) -> None:
    (manifest,) = open_manifests(["s3://data/web"], place.storage)
    (shard,) = manifest.shards
    assert token_at(shard, 2, place.storage) == 2 * TOKENS
    place.replace(".idx")
    with pytest.raises(ObjectChangedError, match=r"web\.idx"):
        token_at(shard, 2, place.storage)


@pytest.mark.guarantee("11-bytes-used")
def test_order_arrays_of_a_shared_folder_are_those_that_were_found(
    place: Place, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = SharedFolder(url="s3://data/order", storage=place.storage)
    save_kept(place.root / "made.npy", np.arange(100))
    (place.root / "data" / "order").mkdir()
    target = place.root / "data" / "order" / "key-rows.npy"
    target.write_bytes((place.root / "made.npy").read_bytes())
    kind: Any = type(open_store("s3://data/x", place.storage)[0])
    info_of = kind.info

    def replaced_after(store: Store, key: str) -> ObjectInfo:
        info: ObjectInfo = info_of(store, key)
        np.save(place.root / "made.npy", np.arange(100)[::-1])
        os.replace(place.root / "made.npy", target)
        return info

    monkeypatch.setattr(kind, "info", replaced_after)
    with pytest.raises(ObjectChangedError, match=r"key-rows\.npy"):
        cached_arrays(tmp_path / "cache", "key", {"rows": ((np.int64,), (None,))}, dict, folder)
