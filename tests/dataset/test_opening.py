"""Opening datasets: what does not belong together is refused, and few requests are sent."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, IndexedDataset, StorageConfig, StreamLoader
from streammega.config import parse_blend
from streammega.convert.job import ConvertSegment
from streammega.convert.options import ConvertOptions
from streammega.convert.work_dir import WorkDir
from streammega.convert.write.document_order import COMPARED_BYTES, remove_duplicates
from streammega.dataset.manifest import Manifest, Shard, parse_manifest
from streammega.dataset.names import SUFFIXES
from streammega.dataset.opening import find_shards, open_manifests
from streammega.dataset.verify import verify
from streammega.errors import AccessDeniedError, ConfigError, FormatError, MissingShardsError
from streammega.order.stream_order import tree_fractions
from streammega.samples.open import open_source
from streammega.storage.progress import ProgressObserver
from tests.support.builders import KINDS, put_dataset, write_lengths


def open_in(order: Any, name: str, cache: Path) -> None:
    """Open a dataset as a run in that order does."""
    config = DataConfig(
        blend=[name],
        sequence_length=8,
        order=order,
        num_samples=(40, 0, 0),
        storage=StorageConfig(cache_dir=cache),
    )
    StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()


@pytest.mark.guarantee("missing-shard-error")
@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
@pytest.mark.parametrize("size", [-1, -20, 2, 20])
def test_a_bin_of_another_size_than_its_index_says_is_refused_in_every_order(
    tmp_path: Path, order: str, size: int
) -> None:
    write_lengths(str(tmp_path / "a"), [30, 50, 20])
    path = tmp_path / "a.bin"
    data = path.read_bytes()
    path.write_bytes(data[:size] if size < 0 else data + bytes(size))
    with pytest.raises(
        FormatError, match=r"a\.idx.*(200|sequence 2 is at|not whole ones)"
    ) as caught:
        open_in(order, str(tmp_path / "a"), tmp_path)
    assert str(tmp_path / "a.bin") in str(caught.value)
    assert str(len(data) + size) in str(caught.value)


@pytest.mark.parametrize("order", ["stream", "megatron"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", [[30, 50], [30, 50, 20, 40]])
def test_the_index_of_another_dataset_is_refused(
    tmp_path: Path, order: str, kind: Any, other: list[int]
) -> None:
    name = str(tmp_path / "a") + SUFFIXES[kind]
    write_lengths(name, [30, 50, 20])
    write_lengths(str(tmp_path / "b") + SUFFIXES[kind], other)
    (tmp_path / "a.idx").write_bytes((tmp_path / "b.idx").read_bytes())
    with pytest.raises(FormatError, match=r"a\.(idx|tar)"):
        open_in(order, name, tmp_path)


@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_an_index_without_sequences_over_tokens_is_refused(tmp_path: Path, order: str) -> None:
    write_lengths(str(tmp_path / "a"), [30])
    write_lengths(str(tmp_path / "b"), [])
    (tmp_path / "a.idx").write_bytes((tmp_path / "b.idx").read_bytes())
    with pytest.raises(FormatError, match=r"end at byte 0, but .*a\.bin has 60 bytes"):
        open_in(order, str(tmp_path / "a"), tmp_path)


def test_an_index_of_sequences_that_end_before_they_begin_is_refused(tmp_path: Path) -> None:
    write_lengths(str(tmp_path / "a"), [30, 50, 20])
    data = bytearray((tmp_path / "a.idx").read_bytes())
    data[34 + 8 : 34 + 12] = (-1).to_bytes(4, "little", signed=True)
    (tmp_path / "a.idx").write_bytes(data)
    for order in ("stream", "megatron"):
        with pytest.raises(FormatError, match="copy it again, or convert again"):
            open_in(order, str(tmp_path / "a"), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_of_no_sequence_opens(tmp_path: Path, kind: Any) -> None:
    name = str(tmp_path / "a") + SUFFIXES[kind]
    write_lengths(name, [])
    assert len(IndexedDataset(name)) == 0


def test_thousands_of_shards_of_a_manifest_are_few_objects_for_the_collector() -> None:
    """A full collection begins after as many new objects as a quarter of those that there are."""
    shards = [
        Shard(
            name=f"web-{number:05d}", documents=1, sequences=1, tokens=1, bytes=2,
            checksums=["0" * 32], index_bytes=70, index_checksums=["1" * 32],
        )
        for number in range(2000)
    ]  # fmt: skip
    counts: Any = {"documents": 2000, "sequences": 2000, "tokens": 2000}
    raw = Manifest(kind="bin", dtype="uint16", shards=shards, **counts).to_json()
    parse_manifest(raw, "web")  # imports
    gc.collect()
    before = len(gc.get_objects())
    manifest = parse_manifest(raw, "web")
    gc.collect()
    assert len(manifest.shards) == 2000
    # Of each the shard itself. Tuples of checksums are none.
    assert len(gc.get_objects()) - before < 1.5 * 2000


def test_local_datasets_are_opened_without_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To start threads took longer than to open a pair, and their turns several times as long."""
    pair = str(tmp_path / "web")
    write_lengths(pair, [30, 20])
    for number in range(2):
        write_lengths(f"{tmp_path}/set-{number:05d}-of-00002", [30])

    def refused(thread: threading.Thread) -> None:
        raise AssertionError(f"{thread.name} was started")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert len(IndexedDataset(pair)) == 2
    assert len(IndexedDataset(f"{tmp_path}/set-*")) == 2
    config = DataConfig(blend=[pair, f"{tmp_path}/set-*"], sequence_length=8, order="stream")
    assert len(open_source(config, "train", 1).files) == 2


# --- names and blends -----------------------------------------------------------------------------------------------------


def test_mock_datasets_need_no_import_first() -> None:
    program = """
import sys
from streammega.config import StorageConfig
from streammega.storage import open_store
assert "streammega.dataset" not in sys.modules
store, key = open_store("mock://tokens=1000,length=100.bin", StorageConfig())
assert store.info(key).size == 4000
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_shards_that_are_missing_are_known_by_their_error_not_by_its_words(tmp_path: Path) -> None:
    folder = tmp_path / "what are missing"
    write_lengths(str(folder / "a-00000-of-00002"), [30])
    with pytest.raises(MissingShardsError):
        find_shards(str(folder), StorageConfig())
    assert any("a-00001-of-00002" in problem for problem in verify(str(folder)).problems)
    with pytest.raises(FileNotFoundError):  # there is nothing to look at, whatever its name says
        verify(str(folder / "nothing"))


def test_the_first_of_duplicates_is_that_of_the_lowest_unit_also_past_a_million(
    tmp_path: Path,
) -> None:
    sides = np.array([[0], [11], [22]], "<u8")  # number in its unit, and the two halves of its hash
    parts = []
    for unit in (999_999, 1_000_000):
        sides.tofile(tmp_path / f"unit-{unit:06d}-0000.side")
        parts.append(ConvertSegment(name=f"unit-{unit:06d}-0000", documents=1, unit=unit))
    job: Any = SimpleNamespace(
        work_dir=WorkDir(str(tmp_path), StorageConfig()), options=ConvertOptions(dedup=True)
    )
    kept, removed = remove_duplicates(job, parts, 1 << 20, ProgressObserver())
    assert all(part.has_keep for part in kept)
    flags = [np.fromfile(f"{part.prefix(job)}.keep", np.uint8) for part in kept]
    bits = [np.unpackbits(flag, count=1)[0] for flag in flags]
    assert (bits, removed) == ([1, 0], 1)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("num_parts", [1, 10])
def test_duplicates_are_found_within_their_memory(
    tmp_path: Path, num_parts: int, passes: int
) -> None:
    rng = np.random.default_rng(1)
    documents = 60_000 // num_parts
    parts = []
    for unit in range(num_parts):
        sides = rng.integers(0, 1 << 60, (3, documents), np.uint64)
        sides.tofile(tmp_path / f"part-{unit}.side")
        parts.append(ConvertSegment(name=f"part-{unit}", documents=documents, unit=unit))
    job: Any = SimpleNamespace(
        work_dir=WorkDir(str(tmp_path), StorageConfig()), options=ConvertOptions(dedup=True)
    )
    memory_bytes = -(-60_000 * COMPARED_BYTES // passes)
    tracemalloc.start()
    try:
        _, removed = remove_duplicates(job, parts, memory_bytes, ProgressObserver())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert removed == 0
    # a flag for each document of all passes, and what opening a file takes
    assert peak <= memory_bytes + 60_000 + 100_000


@pytest.mark.parametrize("name", ["{}/sets", "{}/sets/", "{}/sets/*", "{}/sets/a?"])
@pytest.mark.parametrize("root", ["file://{here}", "~", "{here}"])
def test_a_folder_or_a_glob_is_opened_by_all_spellings_of_a_local_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, root: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for number in (1, 2):
        write_lengths(str(tmp_path / "sets" / f"a{number}"), [30])
    spelled = name.format(root.format(here=tmp_path))
    expected = [str(tmp_path / "sets" / f"a{number}") for number in (1, 2)]
    assert find_shards(spelled, StorageConfig()) == expected


def test_a_folder_that_cannot_be_listed_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lengths(str(tmp_path / "sets" / "a"), [30])

    def refuse(folder: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", folder)

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(AccessDeniedError, match="sets: Permission denied"):
        find_shards(str(tmp_path / "sets"), StorageConfig())


@pytest.mark.parametrize("weight", [None, 1.0])
def test_a_blend_of_more_datasets_than_an_int16_holds_is_refused(weight: float | None) -> None:
    names = [f"d{number}" for number in range(32_767)]
    blend: Any = names if weight is None else [(name, weight) for name in names]
    with pytest.raises(ConfigError, match="has 32767 datasets; there may be 32766"):
        DataConfig(blend=blend, sequence_length=8)
    assert len(parse_blend(blend[:-1])[0]) == 32_766


def test_large_weights_are_relative_like_others_and_infinite_sums_are_refused(
    tmp_path: Path,
) -> None:
    for factor in (1.0, 1e300, 1e-300):
        np.testing.assert_array_equal(
            tree_fractions([factor * 1.0, factor * 3.0]), tree_fractions([1.0, 3.0])
        )
    blend: Any = [("a", 1e308), ("b", 1e308)]
    with pytest.raises(ConfigError, match="weights of the blend add up"):
        DataConfig(blend=blend, sequence_length=8)


@pytest.mark.parametrize("name", ["web@2", "web@2..5", "web.v00000002"])
def test_a_name_with_a_number_at_its_end_is_a_name(tmp_path: Path, name: str) -> None:
    put_dataset(f"{tmp_path}/web", seed=0)
    put_dataset(f"{tmp_path}/{name}", seed=1)
    plain, named = (np.asarray(IndexedDataset(f"{tmp_path}/{each}")[0]) for each in ("web", name))
    assert not np.array_equal(plain, named)
    assert not verify(f"{tmp_path}/{name}").problems
    open_in("stream", f"{tmp_path}/{name}", tmp_path)


def test_an_index_that_ends_elsewhere_than_the_tokens_is_refused_with_a_manifest_too(
    tmp_path: Path,
) -> None:
    put_dataset(f"{tmp_path}/web", seed=0)
    index = bytearray((tmp_path / "web.idx").read_bytes())
    (manifest,) = open_manifests([f"{tmp_path}/web"], StorageConfig())
    (shard,) = manifest.shards
    at = 34 + 4 * (shard.sequences - 1)  # the length of the last sequence
    index[at : at + 4] = (1).to_bytes(4, "little")
    (tmp_path / "web.idx").write_bytes(index)
    with pytest.raises(FormatError, match=r"web\.idx: its sequences end at byte"):
        open_in("stream", f"{tmp_path}/web", tmp_path)


def test_a_name_without_a_folder_has_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_dataset(f"{tmp_path}/web", seed=0)
    monkeypatch.chdir(tmp_path)
    (manifest,) = open_manifests(["web"], StorageConfig())
    (shard,) = manifest.shards
    assert shard.name == "web"
    assert shard.checksums, "those of the manifest"
