"""What a manifest says of its shards: what it spares when a dataset is opened, and what it refuses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs

from streammega import DataConfig, IndexedDataset, IndexedDatasetWriter, StorageConfig, StreamLoader
from streammega.cli.main import main
from streammega.convert import convert
from streammega.dataset.manifest import read_manifest
from streammega.dataset.names import MANIFEST, SUFFIXES
from streammega.dataset.opening import open_manifests
from streammega.errors import FormatError, ObjectChangedError
from streammega.storage.backends.remote import RemoteStore
from tests.support.builders import KINDS, write_lengths
from tools.bench.object_server import Running, running

SHARDS = 6
SIZES: Any = {"micro_batch_size": 1, "global_batch_size": 1}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    """A bucket `b` with a converted dataset of shards, whose manifest has their ETags."""
    write_lengths(str(tmp_path / "in"), [1000] * SHARDS)
    (tmp_path / "b").mkdir()
    words = ["--shard-size", "2000", "--work-dir", str(tmp_path / "work")]
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "b" / "web"), *words]) == 0
    with running(tmp_path) as server:
        (manifest,) = open_manifests(["s3://b/web"], storage_of(server))
        (tmp_path / "b" / f"web{MANIFEST}").write_bytes(manifest.to_json())
        yield server, tmp_path / "b"


def storage_of(server: Running) -> StorageConfig:
    return StorageConfig(storage_options=server.storage_options).tuned(hedge_requests=False)


def config_of(name: str, storage: StorageConfig, order: Any = "stream") -> DataConfig:
    counts = (8, 0, 0) if order != "stream" else None
    return DataConfig(
        blend=[name], sequence_length=8, order=order, num_samples=counts, storage=storage
    )


def opened(server: Running, name: str) -> tuple[Any, int]:
    """(identity, requests) of a loader that is opened."""
    before = server.counts()
    with StreamLoader(config_of(name, storage_of(server)), **SIZES) as loader:
        after = server.counts()
        asked = sum(after[name] - before[name] for name in ("requests", "lists"))
        return loader.state_dict()["order"], asked


@pytest.mark.guarantee("manifest-ends")
def test_a_manifest_with_etags_is_all_that_is_asked_for(served: tuple[Running, Path]) -> None:
    server, bucket = served
    identity, requests = opened(server, f"s3://b/web{MANIFEST}")
    assert requests == 1
    assert opened(server, "s3://b/web") == (identity, 3), "a pair of that name is looked for beside"
    local = shutil.copytree(bucket, bucket.parent / "local")
    with StreamLoader(config_of(str(local / "web"), StorageConfig()), **SIZES) as loader:
        assert loader.state_dict()["order"] == identity, "a copy is the same dataset"


@pytest.mark.guarantee("manifest-ends")
def test_convert_writes_the_etags_of_what_it_puts_into_a_bucket(
    tmp_path: Path, s3_storage: StorageConfig, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    send = RemoteStore._once

    def noted(store: RemoteStore, key: str, request: Any) -> Any:
        asked.append(key)
        return send(store, key, request)

    monkeypatch.setattr(RemoteStore, "_once", noted)
    write_lengths(str(tmp_path / "in"), [1000] * SHARDS)
    url = f"s3://{bucket}/web"
    for _ in range(2):  # one that replaces another as well
        convert([str(tmp_path / "in")], url, storage=s3_storage, overwrite=True, shard_bytes=2000)
        asked.clear()
        with StreamLoader(config_of(f"{url}{MANIFEST}", s3_storage), **SIZES) as loader:
            assert {key.rpartition("/")[2] for key in asked} == {f"web{MANIFEST}"}
            next(iter(loader))


@pytest.mark.guarantee("manifest-ends")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_copy_made_by_the_server_is_the_same_dataset_and_resumes(
    tmp_path: Path, s3_storage: StorageConfig, bucket: str, order: str
) -> None:
    write_lengths(str(tmp_path / "in"), [1000] * SHARDS)
    convert([str(tmp_path / "in")], f"s3://{bucket}/web", storage=s3_storage, shard_bytes=2000)
    options = dict(s3_storage.storage_options)
    files = s3fs.S3FileSystem(**options, skip_instance_cache=True)
    for path in files.ls(f"{bucket}/", refresh=True):
        files.copy(path, path.replace("/web", "/copies/web"))
    state: Any = None
    tokens = []
    for name in (f"s3://{bucket}/web", f"s3://{bucket}/copies/web", f"s3://{bucket}/web"):
        with StreamLoader(config_of(name, s3_storage, order), **SIZES) as loader:
            if state is not None:
                loader.load_state_dict(state)
            tokens += [next(iter(loader))["tokens"].numpy().tobytes() for _ in range(2)]
            state = loader.state_dict()
    with StreamLoader(config_of(f"s3://{bucket}/web", s3_storage, order), **SIZES) as loader:
        whole = [
            batch["tokens"].numpy().tobytes() for _, batch in zip(range(6), loader, strict=False)
        ]
    assert tokens == whole


@pytest.mark.guarantee("manifest-ends")
@pytest.mark.parametrize("number", [0, 3, SHARDS - 1])
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_shard_that_was_replaced_by_one_of_its_size_is_refused_by_its_name(
    served: tuple[Running, Path], number: int, order: str
) -> None:
    server, bucket = served
    local = shutil.copytree(bucket, bucket.parent / "local")
    for folder, storage, error in (
        (str(local), StorageConfig(), FormatError),
        ("s3://b", storage_of(server), ObjectChangedError),
    ):
        place = local if error is FormatError else bucket
        path = sorted(place.glob("web-*.bin"))[number]
        path.write_bytes(bytes(path.stat().st_size))
        with (
            pytest.raises(error, match=path.name),
            StreamLoader(config_of(f"{folder}/web", storage, order), **SIZES) as loader,
        ):
            for _ in zip(range(SHARDS * 250), loader, strict=False):
                pass


@pytest.mark.guarantee("manifest-ends")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[0], [3], [300, 300], [700, 800], [9000, 2, 7], [40_000]])
def test_a_writer_has_the_ends_that_a_reader_reads(
    tmp_path: Path, kind: Any, lengths: list[int]
) -> None:
    rng = np.random.default_rng(3)
    prefix = str(tmp_path / "web") + SUFFIXES[kind]
    writers = []
    with IndexedDatasetWriter(prefix, np.uint16, kind=kind) as writer:
        for length in lengths:
            writer.add_document(rng.integers(0, 60_000, length).astype(np.uint16), [length])
    writers.append((prefix, writer))
    for name in ("copy", "copies"):
        merged = str(tmp_path / name) + SUFFIXES[kind]
        with IndexedDatasetWriter(merged, np.uint16, kind=kind) as writer:
            for _ in range(1 if name == "copy" else 3):
                writer.add_index(prefix)
        writers.append((merged, writer))
    for name, writer in writers:
        (manifest,) = open_manifests([name], StorageConfig())
        assert [shard.ends for shard in manifest.shards] == [writer.ends]


def test_ends_of_no_digest_are_a_damaged_manifest(tmp_path: Path) -> None:
    write_lengths(str(tmp_path / "in"), [30])
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "web")]) == 0
    path = tmp_path / f"web{MANIFEST}"
    (entry,) = read_manifest(str(path), StorageConfig()).shards
    whole = path.read_text()
    for wrong in ('"12"', "7", "null", f'"{entry.ends.upper()}x"'):
        path.write_text(whole.replace(f'"{entry.ends}"', wrong))
        with pytest.raises(FormatError, match="damaged manifest"):
            read_manifest(str(path), StorageConfig())


def test_a_manifest_is_read_by_one_request(served: tuple[Running, Path]) -> None:
    server, _ = served
    before = server.counts()["requests"]
    storage = StorageConfig(storage_options=server.storage_options)
    manifest = read_manifest(f"s3://b/web{MANIFEST}", storage)
    assert server.counts()["requests"] == before + 1
    assert len(manifest.shards) == SHARDS
    assert len(IndexedDataset("s3://b/web", storage)) == SHARDS
