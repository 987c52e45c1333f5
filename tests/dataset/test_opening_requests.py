"""How many requests it takes to open a dataset, and what is listed for it."""

from __future__ import annotations

import dataclasses
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from streammega import DataConfig, IndexedDataset, IndexedDatasetWriter, StorageConfig, StreamLoader
from streammega.cli.main import main
from streammega.convert.read.inputs import find_inputs
from streammega.dataset.headers import read_datasets
from streammega.dataset.mock import MockStore
from streammega.dataset.names import MANIFEST, SUFFIXES, shard_name
from streammega.dataset.resolve import find_pairs, resolve
from streammega.errors import FormatError, ObjectNotFoundError, StreammegaError
from streammega.storage import ObjectInfo
from streammega.storage.backends.obstore import ObstoreStore
from streammega.storage.open import register_scheme
from tests.support.builders import KINDS, write_lengths, write_manifest
from tools.bench.object_server import Running, running

SHARDS = 60


def write_set(folder: Path, stem: str, kind: Any, count: int = SHARDS) -> None:
    """So many equal shards, and their manifest."""
    write_lengths(str(folder / "one") + SUFFIXES[kind], [30, 50, 20])
    tokens, index = ((folder / f"one{suffix}").read_bytes() for suffix in (SUFFIXES[kind], ".idx"))
    names = [shard_name(stem, number, count) for number in range(count)]
    for name in names:
        (folder / f"{name}{SUFFIXES[kind]}").write_bytes(tokens)
        (folder / f"{name}.idx").write_bytes(index)
    write_manifest(folder / stem, names, kind)
    for suffix in (SUFFIXES[kind], ".idx"):
        (folder / f"one{suffix}").unlink()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """A bucket `b` of sets of shards of every kind, and a deep tree beside them."""
    root = tmp_path_factory.mktemp("served")
    for kind in KINDS:
        (root / "b" / kind).mkdir(parents=True)
        write_set(root / "b" / kind, "web", kind)
    deep = root / "b" / "bin" / "deep" / "deeper"
    deep.mkdir(parents=True)
    for number in range(1200):
        (deep / f"{number}.idx").touch()
    with running(root) as server:
        yield server, root


def config_of(server: Running, name: str, order: Any, cache: Path, **options: Any) -> DataConfig:
    # requests are counted: a busy machine would hedge one now and then
    storage = StorageConfig(storage_options=server.storage_options).tuned(hedge_requests=False)
    return DataConfig(
        blend=[f"s3://b/{name}"],
        sequence_length=8,
        order=order,
        num_samples=(40, 0, 0),
        storage=storage.changed(cache_dir=cache),
        **options,
    )


def asked(server: Running, config: DataConfig) -> tuple[int, int]:
    """(requests of all kinds, objects listed) that opening takes."""
    before = server.counts()
    StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()
    after = server.counts()
    spent = {name: after[name] - before[name] for name in after}
    return spent["requests"] + spent["lists"], spent["listed"]


@pytest.mark.guarantee("8-stream-order")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["1,0,0", "90,10,0"])
def test_a_manifest_is_opened_without_a_request_for_each_shard(
    served: tuple[Running, Path], tmp_path: Path, kind: str, split: str
) -> None:
    server, _ = served
    for name in (f"{kind}/web.manifest.json", f"{kind}/web"):
        requests, listed = asked(server, config_of(server, name, "stream", tmp_path, split=split))
        tokens = {"bin": 2, "zst": 4, "tar": 6}[kind]
        assert requests <= -(-2 * SHARDS // 1000) + 9 + tokens, (
            "the manifest, a listing, one look at an ETag, a pointer of the split, and tokens of the "
            "first and the last shard"
        )
        assert listed <= 2 * SHARDS + 2


@pytest.mark.guarantee("8-stream-order")
def test_a_folder_or_glob_is_opened_by_one_small_read_of_each_shard_and_no_head(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    for name in ("bin/", "bin/web-*", "bin/*"):
        requests, listed = asked(server, config_of(server, name, "stream", tmp_path))
        assert requests <= SHARDS + 6
        assert listed <= 2 * SHARDS + 2, "what lies deeper was listed too"


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path, list[str]]]:
    """A bucket of datasets that are blended, some of which have names that begin another's, with
    much beside them; and their names.
    """
    root = tmp_path_factory.mktemp("blend")
    names = [f"d{number}" for number in range(28)] + ["a", "a-b", "zz/deep", "a.b"]
    for number, name in enumerate(names):
        write_lengths(str(root / "b" / "data" / f"{name}.bin"), [30 + number, 50, 20])
    others = root / "b" / "data" / "zzz"
    others.mkdir()
    for number in range(1200):
        (others / f"{number}.idx").touch()
    with running(root) as server:
        yield server, root, [f"s3://b/data/{name}" for name in names]


def blend_of(server: Running, names: list[str], cache: Path, **options: Any) -> DataConfig:
    config = config_of(server, "", "stream", cache, **options)
    return dataclasses.replace(config, blend=names)


@pytest.mark.guarantee("8-stream-order")
def test_a_blend_is_opened_by_a_listing_and_one_small_read_of_each_dataset(
    blend: tuple[Running, Path, list[str]], tmp_path: Path
) -> None:
    server, _, names = blend
    requests, _ = asked(server, blend_of(server, names, tmp_path, split="90,10,0"))
    assert requests <= 2 * len(names) + 2, (
        "one listing, one look at an ETag, one read of each index and of the tokens of each"
    )


def test_a_blend_is_the_same_by_listings_and_without(
    blend: tuple[Running, Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, root, names = blend
    listed = blend_of(server, names, tmp_path, split="60,40,0")
    local = [str(root / "b" / name.removeprefix("s3://b/")) for name in names]
    identities = []
    for config in (listed, dataclasses.replace(listed, blend=local)):
        loader = StreamLoader(config, micro_batch_size=1, global_batch_size=1)
        identities.append(loader.state_dict()["order"])
    monkeypatch.setattr(ObstoreStore, "list_between", lambda *arguments: None)
    loader = StreamLoader(listed, micro_batch_size=1, global_batch_size=1)
    assert [loader.state_dict()["order"]] * 2 == identities


def test_where_too_much_lies_between_datasets_they_are_looked_up(
    blend: tuple[Running, Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, names = blend
    monkeypatch.setattr("streammega.dataset.resolve.MAX_OBJECTS", 10)
    requests, listed = asked(server, blend_of(server, names, tmp_path))
    assert requests >= 4 * len(names)
    assert listed <= 1000, "more than one answer was asked for in vain"


def test_a_dataset_that_was_replaced_after_the_listing_is_opened_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    list_between = ObstoreStore.list_between
    listings: list[Any] = []

    def replaced_after(*arguments: Any) -> Any:
        listings.append(list_between(*arguments))
        if len(listings) == 1:
            write_lengths(str(tmp_path / "b" / "d7.bin"), [30])
        return listings[-1]

    monkeypatch.setattr(ObstoreStore, "list_between", replaced_after)
    names = [f"s3://b/d{number}" for number in range(12)]
    for number in range(12):
        write_lengths(str(tmp_path / "b" / f"d{number}.bin"), [20])
    with running(tmp_path) as server:
        storage = StorageConfig(storage_options=server.storage_options)
        pairs = read_datasets(names, storage.changed(cache_dir=tmp_path / "cache"))
        assert len(listings) == 2
        assert [pair.num_tokens for (pair,) in pairs] == [20] * 7 + [30] + [20] * 4


def test_an_object_that_was_removed_after_the_listing_is_no_error_of_others(
    blend: tuple[Running, Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _, names = blend
    info = ObstoreStore.info
    looks: list[str] = []

    def removed_at_first(store: ObstoreStore, key: str) -> ObjectInfo:
        looks.append(key)
        if len(looks) == 1:
            raise ObjectNotFoundError(f"{key}: was removed")
        return info(store, key)

    monkeypatch.setattr(ObstoreStore, "info", removed_at_first)
    requests, _ = asked(server, blend_of(server, names, tmp_path))
    assert requests > 3 * len(names), "every dataset is looked up by itself then"


@pytest.mark.parametrize("gone", [".bin", ".idx"])
def test_a_missing_object_of_a_listed_blend_is_named(tmp_path: Path, gone: str) -> None:
    names = [f"d{number}" for number in range(12)]
    for name in names:
        write_lengths(str(tmp_path / "b" / f"{name}.bin"), [30])
    (tmp_path / "b" / f"d7{gone}").unlink()
    with running(tmp_path) as server:
        config = blend_of(server, [f"s3://b/{name}" for name in names], tmp_path / "cache")
        with pytest.raises(ObjectNotFoundError, match=rf"d7\{gone}"):
            StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()


@pytest.mark.parametrize("documents", ["each", "one"])
@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("sequences", [0, 1, 500, 1000])
def test_pairs_of_any_size_of_index_are_bounded_alike(
    tmp_path: Path, documents: str, modes: bool, sequences: int
) -> None:
    with IndexedDatasetWriter(str(tmp_path / "b" / "web"), np.uint16, multimodal=modes) as writer:
        for number in range(sequences):
            writer.add_item(np.arange(1 + number % 7), mode=1 if modes else 0)
            if documents == "each":
                writer.end_document()
        if documents == "one":
            writer.end_document()
    ((local,),) = read_datasets([str(tmp_path / "b" / "web")], StorageConfig())
    with running(tmp_path) as server:
        storage = StorageConfig(storage_options=server.storage_options)
        ((pair,),) = read_datasets(["s3://b/web"], storage.changed(cache_dir=tmp_path / "cache"))
        numbers = range(0, sequences + 1, 100)
        assert [pair.token_at(number) for number in numbers] == [
            local.token_at(number) for number in numbers
        ]
        assert (pair.num_sequences, pair.num_tokens) == (local.num_sequences, local.num_tokens)


def test_the_megatron_order_opened_again_asks_for_no_shard(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    for name in ("bin/web", "zst/", "tar/web.manifest.json"):
        first, _ = asked(server, config_of(server, name, "megatron", tmp_path))
        again, _ = asked(server, config_of(server, name, "megatron", tmp_path))
        assert first <= 3 * SHARDS + 9
        assert again <= (9 if name != "zst/" else SHARDS + 9), (
            "without a manifest the tables of frames are read"
        )


@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_one_client_serves_all_of_an_opening(
    served: tuple[Running, Path], tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    open_client = ObstoreStore._open_client

    def counted(store: ObstoreStore, policy: Any) -> Any:
        made.append(store.root)  # not the store, which would keep its client
        return open_client(store, policy)

    monkeypatch.setattr(ObstoreStore, "_open_client", counted)
    server, _ = served
    for number, name in enumerate(("bin/web-00000-of-00060", "bin/web", "zst/")):
        config = config_of(server, name, order, tmp_path)
        # Settings of its own: whoever has a dataset open by the same ones shares their client.
        storage = replace(config.storage, request_timeout=40.0 + number)
        config = replace(config, storage=storage)
        StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()
        assert len(made) == number + 1, "connections are made anew for each part of it"


def noting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """The function, with the arguments of its calls noted."""

    def noted(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return noted


def test_copies_of_indices_are_kept_without_a_look_through_their_folder(
    served: tuple[Running, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    for owner, name in ((os, "scandir"), (os, "listdir")):
        monkeypatch.setattr(owner, name, noting(getattr(owner, name), looks))
    server, _ = served
    asked(server, config_of(server, "bin/web", "megatron", tmp_path / "own"))
    assert len(list((tmp_path / "own" / "idx").glob("*.idx"))) == SHARDS
    assert len(looks) < SHARDS / 2, "a look for each shard is quadratic"


class Together(MockStore):
    """A mock store whose answers about an `.idx` and its header come when as many threads as there
    are shards have asked.
    """

    looks = threading.Barrier(4)
    reads = threading.Barrier(4)

    def info(self, key: str) -> ObjectInfo:
        if key.endswith(".idx"):
            self.looks.wait(60)
        return super().info(key)

    def fetch(self, key: str, spans: Any, etag: str = "") -> Any:
        if [stop for _, stop in spans] == [34]:
            self.reads.wait(60)
        return super().fetch(key, spans, etag)


def test_shards_and_datasets_are_looked_up_at_once() -> None:
    register_scheme("together", Together)
    names = [f"together://tokens=100,length=10,seed={number}" for number in range(4)]
    blend = DataConfig(blend=names, sequence_length=8, order="stream")
    StreamLoader(blend, micro_batch_size=1, global_batch_size=1).close()
    with ThreadPoolExecutor(4) as pool:
        assert [len(found) for found in pool.map(IndexedDataset, names)] == [10] * 4


class Counted(MockStore):
    """A mock store that counts how many requests it answers at once."""

    lock = threading.Lock()
    running: ClassVar[list[None]] = []
    most: ClassVar[int] = 0

    def fetch(self, key: str, spans: Any, etag: str = "") -> Any:
        with self.lock:
            self.running.append(None)
            Counted.most = max(Counted.most, len(self.running))
        time.sleep(0.002)
        try:
            return super().fetch(key, spans, etag)
        finally:
            with self.lock:
                self.running.pop()


@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_openings_keep_to_the_most_requests_at_once(tmp_path: Path, order: Any) -> None:
    register_scheme("counted", Counted)
    Counted.most = 0
    names = [f"counted://tokens=40000,length=10,seed={number}" for number in range(12)]
    config = DataConfig(
        blend=names,
        sequence_length=8,
        order=order,
        num_samples=(100, 0, 0),
        storage=StorageConfig(max_concurrent_requests=2, cache_dir=tmp_path),
    )
    if order == "stream":
        StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()
    else:
        IndexedDataset(names[0], config.storage.changed(cache_dir=tmp_path))
    assert Counted.most <= 2


class Beside(MockStore):
    """A mock store that answers the first look at a manifest and the two objects of a pair when all
    three have been asked for.
    """

    looks = threading.Barrier(3)
    seen: ClassVar[set[str]] = set()

    def info(self, key: str) -> ObjectInfo:
        if key not in self.seen:
            self.seen.add(key)
            self.looks.wait(60)
        return super().info(key)


def test_a_lone_pair_and_a_manifest_of_its_name_are_looked_up_side_by_side() -> None:
    register_scheme("beside", Beside)
    lone = DataConfig(blend=["beside://tokens=100,length=10"], sequence_length=8, order="stream")
    StreamLoader(lone, micro_batch_size=1, global_batch_size=1).close()
    assert len(Beside.seen) == 3


@pytest.mark.guarantee("derived-stores-read")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_what_was_opened_by_a_manifest_reads_the_same_tokens(
    served: tuple[Running, Path], tmp_path: Path, kind: str, order: str
) -> None:
    server, root = served
    found = []
    for config in (
        config_of(server, f"{kind}/web", order, tmp_path / "a", split="70,30,0"),
        config_of(server, f"{kind}/", order, tmp_path / "b", split="70,30,0"),
    ):
        with StreamLoader(config, micro_batch_size=4, global_batch_size=4) as loader:
            batches = [
                batch["tokens"].numpy().tobytes()
                for _, batch in zip(range(10), loader, strict=False)
            ]
            found.append((batches, loader.state_dict()["order"]))
    local = IndexedDataset(str(root / "b" / kind / "web"))
    url = f"s3://b/{kind}/web"
    opened = IndexedDataset(
        url, StorageConfig(storage_options=server.storage_options, cache_dir=tmp_path / "c")
    )
    again = pickle.loads(pickle.dumps(opened))  # noqa: S301  (our own)
    np.testing.assert_array_equal(np.concatenate(opened[100:130]), np.concatenate(local[100:130]))  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.concatenate(again[7:9]), np.concatenate(local[7:9]))  # type: ignore[arg-type]
    assert found[0] == found[1]


@pytest.mark.guarantee("missing-shard-error")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["tokens cut", "index cut", "tokens gone", "index gone"])
def test_shards_that_are_not_the_manifests_are_refused(
    tmp_path: Path, kind: Any, change: str
) -> None:
    (tmp_path / "b").mkdir()
    write_set(tmp_path / "b", "web", kind, 10)
    what, how = change.split()
    path = next(
        (tmp_path / "b").glob(f"web-00004*{SUFFIXES[kind] if what == 'tokens' else '.idx'}")
    )
    path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:-8])
    with running(tmp_path) as server:
        for order in ("stream", "megatron"):
            for name in (str(tmp_path / "b" / "web"), "s3"):
                config = config_of(server, "web", order, tmp_path / "cache")
                config = config if name == "s3" else DataConfig(**{**vars(config), "blend": [name]})
                with pytest.raises(StreammegaError, match="web-00004"):
                    StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()


@pytest.mark.guarantee("missing-shard-error")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_an_index_that_is_not_the_manifests_is_refused_also_where_it_ends_at_the_same_byte(
    tmp_path: Path, order: Any
) -> None:
    write_lengths(str(tmp_path / "web"), [20, 30, 50], np.int32)
    write_lengths(str(tmp_path / "other"), [40, 60, 100], np.uint16)
    write_manifest(tmp_path / "web", ["web"])
    (tmp_path / f"web{MANIFEST}").rename(tmp_path / "kept")
    (tmp_path / "other.idx").rename(tmp_path / "web.idx")
    config = DataConfig(
        blend=[str(tmp_path / "web")],
        sequence_length=8,
        order=order,
        num_samples=(9, 0, 0),
        storage=StorageConfig(cache_dir=tmp_path / "c"),
    )
    # nothing tells them apart
    StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()
    (tmp_path / "kept").rename(tmp_path / f"web{MANIFEST}")
    with pytest.raises(
        FormatError, match=r"web\.idx: has uint16 as dtype, its manifest says int32"
    ):
        StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()


def test_the_cache_of_the_config_is_used_for_tars_in_the_stream_order_too(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    config = config_of(server, "tar/", "stream", tmp_path / "own")
    StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()
    assert len(list((tmp_path / "own" / "idx").glob("*.idx"))) == SHARDS
    assert not (tmp_path / "xdg-cache").exists()


def test_listings_of_more_than_a_thousand_objects_are_whole(tmp_path: Path) -> None:
    (tmp_path / "b" / "w").mkdir(parents=True)
    for number in range(1101):
        (tmp_path / "b" / "w" / f"{number:04d}.idx").write_bytes(b"x")
        (tmp_path / "b" / "w" / f"{number:04d}.bin").write_bytes(b"x")
    with running(tmp_path) as server:
        storage = StorageConfig(storage_options=server.storage_options)
        (found,) = resolve(["s3://b/w/"], storage)
        assert server.counts()["lists"] == 3
    assert len(found) == 1101
    assert all(shard.version and shard.index_version for shard in found)


# --- names ----------------------------------------------------------------------------------------------------------------

ODD = ["br[1]", "a?b", "s*r", "[", "[!x]"]


@pytest.mark.parametrize("odd", ODD)
def test_paths_that_are_there_are_no_patterns(tmp_path: Path, odd: str) -> None:
    folder = tmp_path / odd
    write_lengths(str(folder / "one"), [30])
    write_lengths(str(folder / odd), [40])
    write_lengths(str(folder / "bx"), [50])
    assert find_pairs(str(folder), StorageConfig()) == sorted(
        str(folder / name) for name in ("bx", odd, "one")
    )
    assert find_pairs(str(folder / odd), StorageConfig()) == [str(folder / odd)]
    assert find_pairs(f"{folder}/{odd}.bin", StorageConfig()) == [str(folder / odd)]
    assert find_pairs(f"{folder}/o*", StorageConfig()) == [str(folder / "one")]
    assert find_pairs(f"{folder}/[b]?", StorageConfig()) == [str(folder / "bx")]
    assert len(IndexedDataset(str(folder / odd)).sequence_lengths) == 1
    for order in ("stream", "megatron"):
        config = DataConfig(
            blend=[str(folder / odd)],
            sequence_length=8,
            order=order,
            num_samples=(4, 0, 0),
            storage=StorageConfig(cache_dir=tmp_path),
        )
        StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()


@pytest.mark.parametrize("odd", ODD[:3])
def test_keys_that_are_there_are_no_patterns(
    s3_storage: StorageConfig, bucket: str, odd: str, tmp_path: Path
) -> None:
    for name in (odd, "bx", "one"):
        with IndexedDatasetWriter(
            f"s3://{bucket}/{odd}/{name}", np.uint16, storage=s3_storage
        ) as writer:
            writer.add_document(np.arange(30), [30])
    folder = f"s3://{bucket}/{odd}"
    assert find_pairs(f"{folder}/{odd}", s3_storage) == [f"{folder}/{odd}"]
    assert find_pairs(f"{folder}/", s3_storage) == sorted(
        f"{folder}/{name}" for name in ("bx", odd, "one")
    )
    assert find_pairs(f"{folder}/[b]?", s3_storage) == [f"{folder}/bx"]
    assert (
        len(IndexedDataset(f"{folder}/{odd}", s3_storage.changed(cache_dir=tmp_path / "cache")))
        == 1
    )
    (found,) = find_inputs([f"{folder}/{odd}"], s3_storage)
    assert (found.path, found.format) == (f"{folder}/{odd}.idx", "megatron")


def test_commands_take_odd_names_and_mock_datasets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lengths(str(tmp_path / "br[1]" / "a[1]"), [30])
    for name in (tmp_path / "br[1]" / "a[1]", tmp_path / "br[1]"):
        assert main(["describe", str(name)]) == 0
        assert "tokens: 30\n" in capsys.readouterr().out
        assert main(["verify", str(name)]) == 0
        assert "sound" in capsys.readouterr().out
    assert main(["describe", "mock://tokens=1000,length=100"]) == 0
    assert "documents: 10\n" in capsys.readouterr().out
    assert (
        main(
            [
                "convert",
                str(tmp_path / "br[1]" / "a[1]"),
                str(tmp_path / "br[1]" / "out[p]"),
                "--shard-size",
                "20",
            ]
        )
        == 0
    )
    assert len(IndexedDataset(str(tmp_path / "br[1]" / "out[p]"))) == 1
