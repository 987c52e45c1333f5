"""The digest of a shard's first and last tokens in its manifest: what it spares, and when it is not
believed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, IndexedDataset, IndexedDatasetWriter, StorageConfig, StreamLoader
from streammega.cli.main import main
from streammega.dataset.headers import read_ends
from streammega.dataset.manifest import read_manifest
from streammega.dataset.names import MANIFEST, SUFFIXES
from streammega.dataset.shard import Shard
from streammega.dataset.token_ends import ends_of_hex
from streammega.errors import FormatError
from streammega.storage import open_store
from tests.support.builders import KINDS, write_lengths
from tools.bench.object_server import Running, running

SHARDS = 12


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    """A bucket `b` with a converted dataset of shards."""
    write_lengths(str(tmp_path / "in"), [1000] * SHARDS)
    (tmp_path / "b").mkdir()
    words = ["--shard-size", "2000", "--work-dir", str(tmp_path / "work")]
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "b" / "web"), *words]) == 0
    with running(tmp_path) as server:
        yield server, tmp_path / "b"


def opened(server: Running, cache: Path) -> tuple[Any, int]:
    """(identity, requests) of a loader that is opened."""
    storage = StorageConfig(storage_options=server.storage_options).tuned(hedge_requests=False)
    store, key = open_store(f"s3://b/web{MANIFEST}", storage)
    store.info(key)  # so that missing objects are no reason to look for the bucket
    config = DataConfig(
        blend=["s3://b/web"],
        sequence_length=8,
        order="stream",
        storage=storage.changed(cache_dir=cache),
    )
    before = server.counts()
    with StreamLoader(config, micro_batch_size=1, global_batch_size=1) as loader:
        after = server.counts()
        asked = sum(after[name] - before[name] for name in ("requests", "lists"))
        return loader.state_dict()["order"], asked


def identity_on_disk(name: Path) -> Any:
    """That of the same dataset by its files, whose tokens are always read."""
    config = DataConfig(blend=[str(name)], sequence_length=8, order="stream")
    with StreamLoader(config, micro_batch_size=1, global_batch_size=1) as loader:
        return loader.state_dict()["order"]


def without_ends(manifest: Path) -> None:
    """Rewrite a manifest as earlier versions wrote it; its objects stay older."""
    lines = manifest.read_text().splitlines(keepends=True)
    kept = "".join(line for line in lines if '"ends"' not in line)
    manifest.write_text(kept.replace("],\n  }", "]\n  }"))


@pytest.mark.guarantee("manifest-ends")
def test_a_manifest_with_ends_spares_the_reads_of_tokens_and_keeps_the_identity(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, bucket = served
    identity, requests = opened(server, tmp_path / "c1")
    without_ends(bucket / f"web{MANIFEST}")
    former_identity, former_requests = opened(server, tmp_path / "c2")
    assert identity == former_identity
    assert former_requests - requests == 2, "tokens of the first and of the last shard"
    assert identity_on_disk(bucket / "web") == identity


@pytest.mark.guarantee("manifest-ends")
@pytest.mark.parametrize("number", [0, SHARDS - 1])
def test_tokens_that_are_newer_than_their_manifest_are_read(
    served: tuple[Running, Path], tmp_path: Path, number: int
) -> None:
    server, bucket = served
    identity, requests = opened(server, tmp_path / "c1")
    path = sorted(bucket.glob("web-*.bin"))[number]
    later = (bucket / f"web{MANIFEST}").stat().st_mtime + 2
    os.utime(path, (later, later))
    same, more_requests = opened(server, tmp_path / "c2")
    assert same == identity
    assert more_requests == requests + 1
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, (later, later))
    changed, _ = opened(server, tmp_path / "c3")
    assert changed != identity, "other tokens of the same size were not noticed"


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
        shard = Shard(name, StorageConfig())
        read_ends([shard], 1)
        assert shard.ends == ends_of_hex(writer.ends)


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
