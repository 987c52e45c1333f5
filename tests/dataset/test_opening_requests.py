"""How many requests it takes to open a dataset, and what is listed for it."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
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
from streammega.dataset.mock import MockStore
from streammega.dataset.names import MANIFEST, SUFFIXES, shard_name
from streammega.dataset.opening import find_shards, open_manifests, open_with
from streammega.dataset.shard import index_arrays, token_at
from streammega.errors import (
    FormatError,
    ObjectChangedError,
    ObjectNotFoundError,
    StreammegaError,
)
from streammega.storage.backends.obstore import ObstoreStore
from streammega.storage.open import register_scheme
from tests.support.builders import KINDS, write_lengths, write_manifest
from tools.bench.object_server import Running, running

SHARDS = 20
FIRST = shard_name("web", 0, SHARDS)


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


def storage_of(server: Running, cache: Path | None = None, **options: Any) -> StorageConfig:
    # requests are counted: a busy machine would hedge one now and then
    storage = StorageConfig(storage_options=server.storage_options, cache_dir=cache, **options)
    return storage.tuned(hedge_requests=False)


def config_of(server: Running, name: str, order: Any, cache: Path, **options: Any) -> DataConfig:
    return DataConfig(
        blend=[f"s3://b/{name}"],
        sequence_length=8,
        order=order,
        num_samples=(40, 0, 0),
        storage=storage_of(server, cache),
        **options,
    )


def spent(server: Running, before: dict[str, int]) -> tuple[int, int]:
    """(requests of all kinds, objects listed) since."""
    after = server.counts()
    asked = {name: after[name] - before[name] for name in after}
    return asked["requests"] + asked["lists"], asked["listed"]


def asked(server: Running, config: DataConfig) -> tuple[int, int]:
    """The same, that opening takes."""
    before = server.counts()
    StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()
    return spent(server, before)


def pin_here(server: Running, folder: Path, stem: str) -> None:
    """Write a manifest anew, as convert does it in a bucket: with the ETags that are seen there."""
    url = f"s3://b/{folder.name}/{stem}{MANIFEST}"
    (opened,) = open_manifests([url], storage_of(server))
    (folder / f"{stem}{MANIFEST}").write_bytes(opened.to_json())


@pytest.mark.guarantee("8-stream-order")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("split", "pointers"), [("1,0,0", 0), ("90,10,0", 0), ("91,9,0", 1)])
def test_a_manifest_with_etags_is_opened_by_one_request_and_the_pointers_at_its_cuts(
    served: tuple[Running, Path], tmp_path: Path, kind: str, split: str, pointers: int
) -> None:
    server, root = served
    pin_here(server, root / "b" / kind, "web")
    for _ in range(2):  # a cache makes it no cheaper
        config = config_of(server, f"{kind}/web{MANIFEST}", "stream", tmp_path, split=split)
        assert asked(server, config) == (1 + pointers, 0)
    requests, listed = asked(server, config_of(server, f"{kind}/web", "stream", tmp_path))
    assert (requests, listed) == (3, 0), "a look for a pair of that name is beside"


@pytest.mark.guarantee("8-stream-order")
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_copy_each_shard_of_a_manifest_is_compared_with_it(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "b" / "from").mkdir(parents=True)
    write_set(tmp_path / "b" / "from", "web", kind)
    with running(tmp_path) as server:
        pin_here(server, tmp_path / "b" / "from", "web")
        shutil.copytree(tmp_path / "b" / "from", tmp_path / "b" / "to")
        identities = []
        for folder, expected in (("from", 1), ("to", 1 + 2 * SHARDS)):
            config = config_of(server, f"{folder}/web{MANIFEST}", "stream", tmp_path / "cache")
            before = server.counts()
            loader = StreamLoader(config, micro_batch_size=1, global_batch_size=1)
            assert spent(server, before) == (expected, 0)
            identities.append(loader.state_dict()["order"])
            loader.close()
        assert identities[0] == identities[1], "a copy is the same dataset"


@pytest.mark.guarantee("8-stream-order")
def test_a_folder_or_glob_is_opened_by_a_listing_and_small_reads_of_each_shard(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    for name in ("bin/", "bin/web-*", "bin/*"):
        requests, listed = asked(server, config_of(server, name, "stream", tmp_path))
        assert requests == 2 * SHARDS + 2, "the beginnings of each shard; the manifest beside them"
        assert listed <= 2 * SHARDS + 2, "what lies deeper was listed too"


@pytest.mark.guarantee("8-stream-order")
@pytest.mark.parametrize(
    ("tokens", "sequences", "requests"),
    [(100, 10, 3), (20_000, 10, 4), (3000, 3000, 5), (21_000, 3000, 6)],
)
@pytest.mark.parametrize("split", ["1,0,0", "90,10,0", "80,10,10"])
def test_a_pair_takes_three_to_six_requests_in_two_rounds(
    tmp_path: Path, tokens: int, sequences: int, requests: int, split: str
) -> None:
    write_lengths(str(tmp_path / "b" / "web.bin"), [tokens // sequences or 1] * sequences)
    cuts = {"1,0,0": 0}.get(split, 1)
    with running(tmp_path) as server:
        config = config_of(server, "web", "stream", tmp_path / "cache", split=split)
        assert asked(server, config) == (requests + cuts, 0)
        config = config_of(server, "web", "stream", tmp_path / "other", split=split)
        assert asked(server, config) == (requests + cuts, 0), "nothing of it is kept"


@pytest.mark.guarantee("8-stream-order")
@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_every_kind_are_opened_by_the_same_requests_in_every_order(
    tmp_path: Path, kind: Any
) -> None:
    write_lengths(str(tmp_path / "b" / "web") + SUFFIXES[kind], [30] * 20)
    name = "web" if kind == "bin" else f"web{SUFFIXES[kind]}"
    # The manifest, both beginnings; the table of frames, or an .idx in two; both ends; a pointer.
    expected = {"bin": 3, "zst": 3 + 1 + 2, "tar": 3 + 2 + 2}[kind]
    with running(tmp_path) as server:
        config = config_of(server, name, "stream", tmp_path / "cache", split="90,10,0")
        assert asked(server, config) == (expected + 1, 0)
        megatron = config_of(server, name, "megatron", tmp_path / "other", split="90,10,0")
        copy_of_index = 0 if kind == "tar" else 2
        assert asked(server, megatron)[0] <= expected + copy_of_index
        known = megatron.with_manifests(
            dict(
                zip(
                    [f"s3://b/{name}"],
                    open_manifests([f"s3://b/{name}"], config.storage),
                    strict=True,
                )
            )
        )
        assert asked(server, known) == (0, 0), "its .idx was copied, and all else is known"


def test_the_log_says_how_many_requests_it_took_and_what_takes_fewer(
    served: tuple[Running, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.dataset.opening.MANY_REQUESTS", 2 * SHARDS)
    server, _ = served
    with caplog.at_level("INFO", logger="streammega.dataset.opening"):
        open_manifests([f"s3://b/bin/{FIRST}"], storage_of(server))
        assert caplog.messages == ["1 dataset looked up by 3 requests"]
        caplog.clear()
        open_manifests(["s3://b/bin/"], storage_of(server))
    (message,) = caplog.messages
    assert f"by {2 * SHARDS + 2} requests, as they are at every start" in message
    assert "streammega manifest" in message
    assert "open_together" in message


@pytest.mark.parametrize("name", [f"bin/{FIRST}", "bin/", f"bin/web{MANIFEST}"])
def test_a_driver_that_shows_no_headers_asks_once_more_for_each_object(
    served: tuple[Running, Path], name: str
) -> None:
    server, _ = served
    url = f"s3://b/{name}"
    before = server.counts()
    by_obstore = open_manifests([url], storage_of(server))
    requests, listed = spent(server, before)
    before = server.counts()
    by_driver = open_manifests([url], storage_of(server, transport="fsspec"))
    assert by_driver == by_obstore
    more, listed_by_driver = spent(server, before)
    assert more <= 2 * requests + 2, "one look at each object, and what s3fs asks of a missing one"
    assert listed_by_driver <= listed + 1


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path, list[str]]]:
    """A bucket of datasets that are blended, some of which have names that begin another's, with
    much beside them; and their names.
    """
    root = tmp_path_factory.mktemp("blend")
    names = [f"d{number}" for number in range(28)] + ["a", "a-b", "zz/deep", "a.b"]
    for number, name in enumerate(names):
        write_lengths(str(root / "b" / "data" / f"{name}.bin"), [30 + number, 50, 20])
    with running(root) as server:
        yield server, root, [f"s3://b/data/{name}" for name in names]


def blend_of(server: Running, names: list[str], cache: Path, **options: Any) -> DataConfig:
    config = config_of(server, "", "stream", cache, **options)
    return dataclasses.replace(config, blend=names)


@pytest.mark.guarantee("8-stream-order")
def test_the_pairs_of_a_blend_are_opened_together(
    blend: tuple[Running, Path, list[str]], tmp_path: Path
) -> None:
    server, root, names = blend
    config = blend_of(server, names, tmp_path, split="60,40,0")
    requests, listed = asked(server, config)
    assert requests == 4 * len(names), "the look for a manifest, two beginnings, a pointer"
    assert listed == 0
    local = [str(root / "b" / name.removeprefix("s3://b/")) for name in names]
    identities = []
    for same in (config, dataclasses.replace(config, blend=local)):
        loader = StreamLoader(same, micro_batch_size=1, global_batch_size=1)
        identities.append(loader.state_dict()["order"])
    assert identities[0] == identities[1]


@pytest.mark.parametrize("replaced", [".bin", ".idx", "both"])
def test_a_dataset_that_is_replaced_while_it_is_opened_is_the_former_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: str
) -> None:
    read = ObstoreStore.read
    reads: list[str] = []

    def replaced_before(store: ObstoreStore, key: str, spans: Any, etag: str = "") -> Any:
        if key == "d7.bin" and not reads:  # in the second round
            reads.append(key)
            write_lengths(str(tmp_path / "new.bin"), [20_000])
            for suffix in (".bin", ".idx") if replaced == "both" else (replaced,):
                (tmp_path / f"new{suffix}").replace(tmp_path / "b" / f"d7{suffix}")
        return read(store, key, spans, etag)

    names = [f"s3://b/d{number}" for number in range(12)]
    for number in range(12):
        write_lengths(str(tmp_path / "b" / f"d{number}.bin"), [10_000])
    monkeypatch.setattr(ObstoreStore, "read", replaced_before)
    with running(tmp_path) as server:
        storage = storage_of(server, tmp_path / "cache")
        if replaced == "both":
            opened = open_with(names, storage, lambda all_: all_)
            assert [one.tokens for one in opened] == [10_000] * 7 + [20_000] + [10_000] * 4
        elif replaced == ".idx":  # which was read before, and is refused when it is read again
            opened = open_with(names, storage, lambda all_: all_)
            assert [one.tokens for one in opened] == [10_000] * 12
            with pytest.raises(ObjectChangedError, match=r"d7\.idx"):
                index_arrays(opened[7].shards[0], storage)
        else:
            config = DataConfig(blend=names, sequence_length=8, order="stream", storage=storage)
            with pytest.raises(FormatError, match="d7"):
                StreamLoader(config, micro_batch_size=1, global_batch_size=1)


@pytest.mark.parametrize("gone", [".bin", ".idx"])
def test_a_missing_object_of_a_blend_is_named(tmp_path: Path, gone: str) -> None:
    names = [f"d{number}" for number in range(12)]
    for name in names:
        write_lengths(str(tmp_path / "b" / f"{name}.bin"), [30])
    (tmp_path / "b" / f"d7{gone}").unlink()
    with running(tmp_path) as server:
        config = blend_of(server, [f"s3://b/{name}" for name in names], tmp_path / "cache")
        with pytest.raises(ObjectNotFoundError, match=rf"d7\{gone}"):
            StreamLoader(config, micro_batch_size=1, global_batch_size=1).close()


def test_of_very_many_shards_only_some_are_in_memory_at_once(
    served: tuple[Running, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = served
    whole = open_manifests(["s3://b/bin/"], storage_of(server))
    monkeypatch.setattr("streammega.dataset.opening.SHARDS_AT_ONCE", 7)
    assert open_manifests(["s3://b/bin/"], storage_of(server)) == whole


def test_a_server_that_answers_ranges_with_all_is_read_by_fsspec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, length in enumerate((30, 20_000)):
        write_lengths(str(tmp_path / "b" / f"d{number}.bin"), [length])
    names = ["s3://b/d0", "s3://b/d1"]
    # s3fs asks for credentials, which no test is to look for on the machine
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with running(tmp_path) as server:
        expected = open_manifests(names, storage_of(server))
        server.behave(plain_200=True)
        again = open_manifests(names, storage_of(server, transport="fsspec"))
    assert [one.shards[0].ends for one in again] == [one.shards[0].ends for one in expected]


def test_datasets_are_opened_through_faults(served: tuple[Running, Path]) -> None:
    server, _ = served
    expected = open_manifests(["s3://b/bin/"], storage_of(server))
    server.behave(error_share=0.2, truncate_share=0.2, reset_share=0.1)
    try:
        assert open_manifests(["s3://b/bin/"], storage_of(server)) == expected
    finally:
        server.behave(error_share=0, truncate_share=0, reset_share=0)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_what_is_cut_short_is_named(tmp_path: Path, suffix: str) -> None:
    for number in range(12):
        write_lengths(str(tmp_path / "b" / f"d{number}.bin"), [30, 40])
    path = tmp_path / "b" / f"d7{suffix}"
    whole = path.read_bytes()
    with running(tmp_path) as server:
        for cut in (b"", whole[:1], whole[:-8]):
            path.write_bytes(cut)
            config = config_of(server, "", "stream", tmp_path / "cache")
            with pytest.raises(FormatError, match="d7"):
                StreamLoader(config, micro_batch_size=1, global_batch_size=1)


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
    (local,) = open_manifests([str(tmp_path / "b" / "web")], StorageConfig())
    with running(tmp_path) as server:
        storage = storage_of(server, tmp_path / "cache")
        (pair,) = open_manifests(["s3://b/web"], storage)
        numbers = range(0, sequences + 1, 100)
        assert [token_at(pair.shards[0], number, storage) for number in numbers] == [
            token_at(local.shards[0], number, StorageConfig()) for number in numbers
        ]
        assert (pair.sequences, pair.tokens) == (local.sequences, local.tokens)
        assert pair.shards[0].multimodal == (modes and sequences > 0)


def test_the_megatron_order_opened_again_asks_for_no_shard(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    for name in ("bin/web", "zst/", "tar/web.manifest.json"):
        first, _ = asked(server, config_of(server, name, "megatron", tmp_path))
        again, _ = asked(server, config_of(server, name, "megatron", tmp_path))
        assert again <= first - SHARDS, "no copy of an .idx is fetched again"


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
    for number, name in enumerate((f"bin/{FIRST}", "bin/web", "zst/")):
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
    """A mock store whose answers about the beginning of an `.idx` come when as many threads as there
    are shards have asked.
    """

    starts = threading.Barrier(4)

    def read_start(self, key: str, size: int) -> Any:
        if key.endswith(".idx"):
            self.starts.wait(60)
        return super().read_start(key, size)


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
        IndexedDataset(names[0], config.storage)
    assert Counted.most <= 2


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
    opened = IndexedDataset(url, storage_of(server, tmp_path / "c"))
    again = pickle.loads(pickle.dumps(opened))  # noqa: S301  (our own)
    np.testing.assert_array_equal(np.concatenate(opened[30:50]), np.concatenate(local[30:50]))  # type: ignore[arg-type]
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
        found = find_shards("s3://b/w/", storage_of(server))
        assert server.counts()["lists"] == 3
    assert len(found) == 1101


# --- names ----------------------------------------------------------------------------------------------------------------

ODD = ["br[1]", "a?b", "s*r", "[", "[!x]"]


@pytest.mark.parametrize("odd", ODD)
def test_paths_that_are_there_are_no_patterns(tmp_path: Path, odd: str) -> None:
    folder = tmp_path / odd
    write_lengths(str(folder / "one"), [30])
    write_lengths(str(folder / odd), [40])
    write_lengths(str(folder / "bx"), [50])
    assert find_shards(str(folder), StorageConfig()) == sorted(
        str(folder / name) for name in ("bx", odd, "one")
    )
    assert find_shards(str(folder / odd), StorageConfig()) == [str(folder / odd)]
    assert find_shards(f"{folder}/{odd}.bin", StorageConfig()) == [str(folder / odd)]
    assert find_shards(f"{folder}/o*", StorageConfig()) == [str(folder / "one")]
    assert find_shards(f"{folder}/[b]?", StorageConfig()) == [str(folder / "bx")]
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
    assert find_shards(f"{folder}/{odd}", s3_storage) == [f"{folder}/{odd}"]
    assert find_shards(f"{folder}/", s3_storage) == sorted(
        f"{folder}/{name}" for name in ("bx", odd, "one")
    )
    assert find_shards(f"{folder}/[b]?", s3_storage) == [f"{folder}/bx"]
    assert len(IndexedDataset(f"{folder}/{odd}", s3_storage)) == 1
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
