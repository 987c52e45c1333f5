"""One contract for every store, then what is particular to each."""

from __future__ import annotations

import errno
import os
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest

from streammega import IndexedDataset, StorageConfig
from streammega.config.storage import Tuning
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    EndpointError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    StorageError,
    UnsupportedOperation,
)
from streammega.errors.redaction import redact, remember_secrets
from streammega.errors.words import without_controls
from streammega.storage import Store, open_store
from streammega.storage import open as storage_open
from streammega.storage.backends.fsspec import FsspecStore
from streammega.storage.backends.local import LocalStore, PreadStore
from streammega.storage.backends.obstore import ObstoreStore
from streammega.storage.backends.oss import OssStore
from streammega.storage.backends.remote import (
    MAX_PARTS,
    PART_BYTES,
    part_bytes,
    with_part_bytes_for,
)
from streammega.storage.backends.s3_options import s3_arguments
from streammega.storage.derived_stores import ConcatStore
from streammega.storage.etags import version_of
from streammega.storage.file_system import open_place
from streammega.storage.open import SCHEMES, BucketStore
from streammega.storage.store import (
    ObjectInfo,
    WrapperStore,
    create_object,
    replace_object,
)
from tests.support.servers import KEY, S3, SECRET, http_server
from tools.bench.object_server import running


def put(store: Store, key: str, data: bytes) -> None:
    writer = store.open_writer(key)
    writer.write(data)
    writer.commit()


class StoreContract:
    """What every store does; subclasses give `store` and `key`, a key that does not exist yet."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    @pytest.fixture
    def key(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def conditions(self) -> set[str]:
        """Those of `put` that the store or its server keeps."""
        return {"if_absent", "if_match"}

    def test_reads_back_the_ranges_asked_in_their_order(self, store: Store, key: str) -> None:
        data = bytes(range(256)) * 40
        put(store, key, data)
        few = [(500, 900), (0, 1), (10_239, 10_240), (7, 7), (0, 10_240)]
        many = [(start, start + 50) for start in range(0, 3900, 39)]
        for spans in (few, many):
            got = store.read(key, spans)
            assert [bytes(part) for part in got] == [data[a:b] for a, b in spans]

    @pytest.mark.parametrize("others", [[], [(0, 1), (1, 2)]], ids=["alone", "with others"])
    def test_a_range_that_ends_before_it_begins_is_an_error(
        self, store: Store, key: str, others: list[tuple[int, int]]
    ) -> None:
        put(store, key, b"0123456789")
        with pytest.raises(ShortReadError, match=key.rsplit("/", 1)[-1]):
            store.read(key, [*others, (5, 3)])

    def test_info_tells_size_and_an_etag_that_changes_with_the_bytes(
        self, store: Store, key: str
    ) -> None:
        put(store, key, b"one")
        first = store.info(key)
        put(store, key, b"three")
        second = store.info(key)
        assert (first.size, second.size) == (3, 5)
        assert first.etag != second.etag

    @pytest.mark.guarantee("11-bytes-used")
    def test_a_read_of_another_object_than_was_opened_is_an_error(
        self, store: Store, key: str
    ) -> None:
        put(store, key, b"one")
        opened = store.info(key)
        put(store, key, b"two")
        for spans in ([(0, 3)], [(0, 1), (1, 3)]):
            with pytest.raises(ObjectChangedError, match=key.rsplit("/", 1)[-1]):
                store.read(key, spans, opened.etag)
        with pytest.raises(ObjectChangedError, match=key.rsplit("/", 1)[-1]):
            store.fetch_into(key, [(0, 3)], [np.empty(3, np.uint8)], opened.etag)
        assert bytes(store.read(key, [(0, 3)], store.info(key).etag)[0]) == b"two"

    def test_a_read_past_the_end_is_an_error_never_fewer_bytes(
        self, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("streammega.storage.retry.FIRST_PAUSE", 0.01)
        put(store, key, b"0123456789")
        for start, stop in ((5, 15), (20, 30)):
            with pytest.raises(ShortReadError) as caught:
                store.read(key, [(start, stop)])
            assert key.rsplit("/", 1)[-1] in str(caught.value)

    def test_a_missing_object_is_named(self, store: Store, key: str) -> None:
        for call in (lambda: store.info(key), lambda: store.read(key, [(0, 4)])):
            with pytest.raises(ObjectNotFoundError, match=key.rsplit("/", 1)[-1]):
                call()

    @pytest.mark.guarantee("5-shows-under")
    def test_nothing_shows_before_commit_nor_after_abort(self, store: Store, key: str) -> None:
        writer = store.open_writer(key)
        writer.write(b"x" * 100_000)
        with pytest.raises(ObjectNotFoundError):
            store.info(key)
        writer.abort()
        with pytest.raises(ObjectNotFoundError):
            store.info(key)

    @pytest.mark.guarantee("5-shows-under")
    def test_an_aborted_overwrite_keeps_what_was_there(self, store: Store, key: str) -> None:
        put(store, key, b"old")
        writer = store.open_writer(key)
        writer.write(b"newer")
        writer.abort()
        assert bytes(store.read(key, [(0, 3)])[0]) == b"old"

    def test_list_finds_by_prefix_in_name_order(self, store: Store, key: str) -> None:
        names = [f"{key}-2", f"{key}-1", f"{key}-dir/3"]
        for name in names:
            put(store, name, name.encode())
        found = store.list(f"{key}-")
        assert [item.key.lstrip("/") for item in found] == [
            name.lstrip("/") for name in sorted(names)
        ]
        assert [item.size for item in found] == [len(name) for name in sorted(names)]
        assert store.list(f"{key}-nothing") == []

    def test_list_finds_folders_and_objects_whose_names_begin_alike(
        self, store: Store, key: str
    ) -> None:
        names = [f"{key}{rest}" for rest in ("-2/b/c", "-2/d", "-2.bin", "-22/e", "-1/f")]
        for name in names:
            put(store, name, b"x")
        found = store.list(f"{key}-2")
        assert [item.key.lstrip("/") for item in found] == [
            name.lstrip("/") for name in sorted(names[:4])
        ]

    def test_list_leaves_out_what_lies_deeper_if_asked(self, store: Store, key: str) -> None:
        for name in ("dir/2", "dir/1", "dir/deep/3", "dir/deep/er/4"):
            put(store, f"{key}-{name}", name.encode())
        found = store.list(f"{key}-dir/", recursive=False)
        assert [item.key.lstrip("/") for item in found] == [
            f"{key}-dir/{number}".lstrip("/") for number in (1, 2)
        ]
        assert [item.size for item in found] == [5, 5]
        assert [item.etag for item in found if item.etag] in (
            [],
            [store.info(item.key).etag for item in found],
        )
        assert store.list(f"{key}-nothing/", recursive=False) == []

    def test_an_object_is_created_only_where_none_is(
        self, store: Store, key: str, conditions: set[str]
    ) -> None:
        assert create_object(store, key, b"first")
        if "if_absent" in conditions:
            assert not create_object(store, key, b"second")
            assert bytes(store.read(key, [(0, 5)])[0]) == b"first"

    def test_an_object_is_replaced_only_if_it_is_the_one_that_was_seen(
        self, store: Store, key: str, conditions: set[str]
    ) -> None:
        put(store, key, b"first")
        seen = store.info(key).etag
        assert replace_object(store, key, b"second", seen)
        assert bytes(store.read(key, [(0, 6)])[0]) == b"second"
        if "if_match" in conditions:
            assert not replace_object(store, key, b"third", seen)
            assert bytes(store.read(key, [(0, 6)])[0]) == b"second"
            store.delete(key)
            assert not replace_object(store, key, b"fourth", seen)
            assert store.list(key) == []

    def test_delete_removes_and_forgives(self, store: Store, key: str) -> None:
        put(store, key, b"x")
        store.delete(key)
        store.delete(key)
        with pytest.raises(ObjectNotFoundError):
            store.info(key)

    @pytest.mark.guarantee("7-stores-datasets")
    def test_a_store_that_was_pickled_reads_the_same(self, store: Store, key: str) -> None:
        put(store, key, b"abc")
        assert bytes(pickle.loads(pickle.dumps(store)).read(key, [(0, 3)])[0]) == b"abc"  # noqa: S301


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return LocalStore()

    @pytest.fixture
    def key(self, tmp_path: Path) -> str:
        return str(tmp_path / "folder" / "object")

    @pytest.fixture
    def conditions(self) -> set[str]:
        return {"if_absent"}

    def test_a_writer_that_fails_leaves_no_temporary_files(self, store: Store, key: str) -> None:
        writer = store.open_writer(key)
        writer.write(b"x")
        writer.abort()
        assert list(Path(key).parent.iterdir()) == []

    @pytest.mark.parametrize("recursive", [True, False])
    def test_files_that_go_while_they_are_listed_are_left_out(
        self, key: str, recursive: bool
    ) -> None:
        class Removing(LocalStore):
            """Another process removes each file but the first before it is looked at."""

            def info(self, key: str) -> ObjectInfo:
                if not key.endswith("-1"):
                    os.unlink(key)
                return super().info(key)

        names = [f"{key}-{number}" for number in (1, 2, 3)]
        for name in names:
            put(LocalStore(), name, b"x")
        assert [item.key for item in Removing().list(f"{key}-", recursive)] == names[:1]

    @pytest.mark.parametrize("recursive", [True, False])
    def test_a_folder_that_cannot_be_listed_is_an_error_that_names_it(
        self, store: Store, key: str, recursive: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(store, key, b"x")

        def refuse(folder: str) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", folder)

        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(AccessDeniedError, match="folder: Permission denied"):
            store.list(key, recursive)

    def test_of_many_that_create_a_file_one_does(self, store: Store, key: str) -> None:
        barrier = threading.Barrier(8)

        def create(number: int) -> bool:
            barrier.wait(60)
            return create_object(store, key, f"{number}".encode() * 1000)

        with ThreadPoolExecutor(8) as pool:
            created = list(pool.map(create, range(8)))
        (winner,) = [number for number, is_first in enumerate(created) if is_first]
        (path,) = Path(key).parent.iterdir()
        assert path.read_bytes() == f"{winner}".encode() * 1000

    @pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
    def test_without_hard_links_there_are_no_conditions_and_objects_are_looked_up(
        self, store: Store, key: str, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: str) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", refuse)
        with pytest.raises(UnsupportedOperation, match=r"object: .*no hard links"):
            store.put(key, b"x", if_absent=True)
        assert create_object(store, key, b"first")
        assert not create_object(store, key, b"second")
        assert [path.read_bytes() for path in Path(key).parent.iterdir()] == [b"first"]


class TestLocalByReads(TestLocalStore):
    @pytest.fixture
    def store(self) -> Store:
        return PreadStore(StorageConfig().tuned(local_io="pread"))


class TestMemoryThroughFsspec(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return FsspecStore("memory", "", StorageConfig())

    @pytest.fixture
    def key(self, request: pytest.FixtureRequest) -> str:
        return f"{request.node.name}/object"

    @pytest.fixture
    def conditions(self) -> set[str]:
        return {"if_absent"}  # looked up

    @pytest.fixture(autouse=True)
    def _always_look(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Drivers that tell no ETag with a body are asked for it now and then; here each time."""
        monkeypatch.setattr("streammega.storage.backends.fsspec.RECHECK", 0.0)


class S3Contract(StoreContract):
    @pytest.fixture
    def key(self, bucket: str) -> str:
        return "folder/object"

    @pytest.fixture
    def conditions(self, s3: S3, store: Store) -> set[str]:
        if s3.name == "rclone":
            return set()
        return {"if_absent"} if isinstance(store, FsspecStore) else {"if_absent", "if_match"}

    def test_large_uploads_are_multipart_and_whole(self, store: Store, key: str, s3: S3) -> None:
        part = bytes(range(256)) * 4096
        writer = store.open_writer(key)
        for _ in range(66):
            writer.write(part)
        writer.commit()
        assert store.info(key).size == 66 << 20
        assert s3.name != "moto" or "-" in store.info(key).etag, "an ETag of several parts"
        at = PART_BYTES - 128
        assert bytes(store.read(key, [(at, at + 256)])[0]) == part[-128:] + part[:128]

    def test_an_aborted_multipart_upload_leaves_no_parts_behind(
        self, store: Store, key: str, bucket: str, s3: S3
    ) -> None:
        writer = store.open_writer(key)
        for _ in range(70):
            writer.write(b"x" * (1 << 20))
        writer.abort()
        assert not s3.client().list_multipart_uploads(Bucket=bucket).get("Uploads")
        assert not s3.client().list_objects_v2(Bucket=bucket).get("Contents")


@pytest.mark.parametrize("s3", ["moto"], indirect=True)  # obstore reads no ranges of rclone's
class TestS3ThroughObstore(S3Contract):
    @pytest.fixture
    def store(self, s3: S3, bucket: str) -> Store:
        return open_store(f"s3://{bucket}/key", s3.storage)[0]


class TestS3ThroughFsspec(S3Contract):
    @pytest.fixture
    def store(self, s3: S3) -> Store:
        return FsspecStore("s3", "", StorageConfig(storage_options=s3.options))

    @pytest.fixture
    def key(self, bucket: str) -> str:
        return f"{bucket}/folder/object"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3:/bucket/web", "two slashes after its scheme: s3://bucket/web"),
        ("gcs:/bucket/web", "two slashes after its scheme: gcs://bucket/web"),
        ("s33://bucket/web", "no storage has this scheme; did you mean s3://"),
        ("nowhere://bucket/web", "no storage has this scheme; fsspec has no driver"),
    ],
)
def test_mistyped_schemes_are_named(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        store, key = open_store(url, StorageConfig())
        store.info(key)


@pytest.mark.parametrize("name", ["file:///%00", "we\0b", "we\ud800b"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no file has such a name"):
        open_store(name, StorageConfig())
    with pytest.raises(ConfigError, match="no file has such a name"):
        IndexedDataset(name)


def test_a_name_of_a_file_url_may_hold_any_sign(tmp_path: Path) -> None:
    (tmp_path / "a#1?b c").write_bytes(b"abc")
    store, key = open_store(f"file://{tmp_path}/a#1?b%20c", StorageConfig())
    assert bytes(store.read(key, [(0, 3)])[0]) == b"abc"


def test_uploads_may_be_tried_for_ever(moto: S3) -> None:
    options = StorageConfig(storage_options=moto.options, retry_timeout=float("inf"))
    store, key = open_store(f"s3://{moto.new_bucket()}/key", options)
    put(store, key, b"abc")
    assert bytes(store.read(key, [(0, 3)])[0]) == b"abc"


@pytest.mark.parametrize(
    ("kind", "name"), [(StorageConfig, "request_timeout"), (Tuning, "read_timeout")]
)
def test_one_request_cannot_take_for_ever(kind: type, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is inf; it must be more than 0 and at most"):
        kind(**{name: float("inf")})


def test_an_upload_of_more_parts_than_a_server_takes_ends_there_and_says_what_to_do(
    moto: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.storage.backends.obstore.MAX_PARTS", 2)
    bucket = moto.new_bucket()
    config = StorageConfig(storage_options=moto.options).tuned(multipart_part_bytes=5 << 20)
    store, key = open_store(f"s3://{bucket}/large", config)
    writer = store.open_writer(key)
    with pytest.raises(StorageError, match=r"large: an upload holds .* \(2 parts\).*--shard-size"):
        writer.write(bytes(16 << 20))
    writer.abort()
    with pytest.raises(ObjectNotFoundError):
        store.info(key)


def test_parts_grow_so_that_ten_thousand_hold_any_object() -> None:
    assert part_bytes(0) == PART_BYTES
    assert all(part_bytes(number) <= part_bytes(number + 1) for number in range(MAX_PARTS))
    assert sum(part_bytes(number) for number in range(MAX_PARTS)) > 1.89 * 2**40
    assert part_bytes(MAX_PARTS - 1) <= 5 << 30, "no store takes larger ones"
    plain = StorageConfig()
    assert with_part_bytes_for(plain, 280 << 30) is plain, "most uploads hold what they always did"
    for size in (313 << 30, 5 << 40):
        assert (
            size
            < with_part_bytes_for(plain, size).tuning.multipart_part_bytes * MAX_PARTS
            <= 1.2 * size
        )


@pytest.mark.parametrize("fixed", [False, True])
def test_parts_of_s3fs_grow_too(moto: S3, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streammega.storage.backends.remote.PART_BYTES", 5 << 20)
    monkeypatch.setattr("streammega.storage.backends.remote.PARTS_OF_A_SIZE", 1)
    bucket = moto.new_bucket()
    options = {**moto.options, "default_block_size": 5 << 20, "fixed_upload_size": fixed}
    store, key = open_store(
        f"s3://{bucket}/large", StorageConfig(transport="fsspec", storage_options=options)
    )
    writer = store.open_writer(key)
    for _ in range(40):
        writer.write(bytes(1 << 20))
    writer.commit()
    info = store.info(key)
    assert info.size == 40 << 20
    assert info.etag.strip('"').endswith("-8" if fixed else "-4"), (
        "parts of 5, 10 and 20 MiB, and the rest"
    )


@pytest.mark.parametrize("room", [3, 5, 0])
@pytest.mark.parametrize("size", [4, 0])
def test_objects_end_to_end_fill_no_array_of_another_size(
    tmp_path: Path, room: int, size: int
) -> None:
    store = LocalStore()
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"0123456789")
    parts = [(store, store.info(str(tmp_path / name))) for name in ("a", "b")]
    joined = ConcatStore(parts, "both")
    out = np.zeros(room, np.uint8)
    if room == size:
        joined.fetch_into("", [(8, 8 + size)], [out])
        return
    with pytest.raises(ValueError, match="bytes are to be written to an array of"):
        joined.fetch_into("", [(8, 8 + size)], [out])


def test_a_wrapper_forwards_all_that_a_store_can_do() -> None:
    """Else a default of `Store` would hide what the wrapped store has."""
    not_forwarded = {"local_path", "view"}
    public = {name for name in vars(Store) if not name.startswith("_")}
    assert public - set(vars(WrapperStore)) == not_forwarded


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_a_bucket_that_does_not_exist_is_named_whatever_is_asked_of_it(
    transport: Any, s3: S3
) -> None:
    config = StorageConfig(transport=transport, storage_options=s3.options)

    def write(size: int) -> None:
        store, key = open_store("s3://no-such-bucket/key", config)
        writer = store.open_writer(key)
        try:
            writer.write(bytes(size))
            writer.commit()
        except BaseException:
            writer.abort()
            raise

    store, key = open_store("s3://no-such-bucket/key", config)
    calls = [
        lambda: store.info(key),
        lambda: store.read(key, [(0, 4)]),
        lambda: write(3),
        lambda: write(65 << 20),
    ]
    for call in calls:
        with pytest.raises(
            ObjectNotFoundError, match="the bucket s3://no-such-bucket does not exist"
        ) as caught:
            call()
        assert "prefix has no" not in str(caught.value)


def test_an_object_that_is_not_there_costs_a_client_one_request(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "empty").touch()
    with running(tmp_path) as server:
        config = StorageConfig(storage_options=server.storage_options)
        store, key = open_store("s3://bucket/missing", config)
        for requests in (1, 2):
            with pytest.raises(ObjectNotFoundError):
                store.info(key)
            assert server.counts()["requests"] == requests
        other, _ = open_store("s3://bucket/empty", config.tuned(read_timeout=7.0))
        assert other.info("empty").size == 0


KEYS = (
    "lead", "trail", "trail ", " trail", "p q", "p+q", "p%20q", "p%2Bq", "100%", "%zz", "a%2Fb",
    "caf\u00e9", "cafe\u0301", "\u65e5/\u672c",
    "q", "q?x=1", "q#f", "x\\y", "star*", "br[1]", "{a}", "~t", "a:b", "a&b=c;d", "\"'", "dot.", "..x", "a/...", "a/ /b", "<|^`>",
)  # fmt: skip
WRITTEN_KEYS = ("trail ", "p+q", "p%20q", "a//b")
ODD_KEYS = ("/lead", "a//b", "a/./b", "a/../b", "tab\t", "a/b\r", "del\x7f")


@pytest.fixture(scope="module")
def named_objects(moto: S3) -> tuple[S3, str]:
    """A bucket whose objects hold their names."""
    bucket = moto.new_bucket()
    client = moto.client()
    for key in (*KEYS, *ODD_KEYS, "a/b", "a/b/", "b"):
        client.put_object(Bucket=bucket, Key=key, Body=key.encode())
    return moto, bucket


@pytest.mark.guarantee("object-name-read")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_an_object_of_any_name_is_the_one_that_is_read_and_written_or_an_error_names_it(
    transport: Any, named_objects: tuple[S3, str]
) -> None:
    server, bucket = named_objects
    client = server.client()
    config = StorageConfig(transport=transport, storage_options=server.options)
    for key in (*KEYS, *ODD_KEYS):
        url = f"s3://{bucket}/{key}"
        if transport == "obstore" and key in ODD_KEYS:
            with pytest.raises(ConfigError, match="transport='fsspec'") as caught:
                open_store(url, config)
            assert without_controls(url) in str(caught.value)
            continue
        store, own = open_store(url, config)
        info = store.info(own)
        assert bytes(store.read(own, [(0, info.size)], info.etag)[0]) == key.encode()
        if key in WRITTEN_KEYS:
            put(store, own, b"new")
            assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == b"new"
            put(store, own, key.encode())


@pytest.mark.guarantee("object-name-read")
def test_a_version_in_a_name_is_no_other_object(moto: S3) -> None:
    """s3fs reads the object before the mark."""
    bucket = moto.new_bucket()
    key = "a.jsonl?versionId=1"
    moto.objects(bucket).update({"a.jsonl": b"the newest", key: b"of this name"})
    url = f"s3://{bucket}/{key}"
    store, own = open_store(url, StorageConfig(storage_options=moto.options))
    assert bytes(store.read(own, [(0, 12)])[0]) == b"of this name"
    store, own = open_store(url, StorageConfig(transport="fsspec", storage_options=moto.options))
    for call in (store.info, partial(store.read, spans=[(0, 1)]), partial(put, store, data=b"x")):
        with pytest.raises(ConfigError, match=r"versionId=1: fsspec's driver takes '\?versionId='"):
            call(own)
    with pytest.raises(ConfigError, match=r"takes '\?versionid='"):
        open_place("abfs://container/a.jsonl?versionid=1", StorageConfig())


@pytest.mark.parametrize("url", ["s3://bucket/", "oss://bucket/"])
def test_a_name_that_no_object_can_have_is_refused_before_a_request(url: str) -> None:
    """obstore panics at an address of more than 64 KiB."""
    options = {"key": KEY, "secret": SECRET, "endpoint_url": "http://127.0.0.1:1"}
    store, key = open_store(url + "k" * 70_000, StorageConfig(storage_options=options))
    for call in (store.info, store.list, partial(store.read, spans=[(0, 1)])):
        with pytest.raises(ConfigError, match=r"70000 bytes, .* at most 1024; give a shorter one"):
            call(key)


def test_a_url_of_http_may_be_longer_than_the_name_of_an_object() -> None:
    url = "http://127.0.0.1:1/"
    config = StorageConfig().tuned(max_retries=0)
    store, key = open_store(url + "k" * 2000, config)
    with pytest.raises(EndpointError, match="Connection refused"):
        store.read(key, [(0, 1)])
    store, key = open_store(url + "%" * 70_000, config)
    with pytest.raises(ConfigError, match=r"70000 bytes, .* at most 16384; give a shorter one"):
        store.read(key, [(0, 1)])


@pytest.mark.guarantee("object-name-read")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_a_name_that_ends_in_a_slash_is_a_folders_and_never_read_as_the_object_without_it(
    transport: Any, named_objects: tuple[S3, str]
) -> None:
    server, bucket = named_objects
    store, key = open_store(
        f"s3://{bucket}/a/b/", StorageConfig(transport=transport, storage_options=server.options)
    )
    calls = [
        lambda: store.info(key),
        lambda: store.read(key, [(0, 3)]),
        lambda: store.open_writer(key),
    ]
    for call in [*calls, lambda: store.delete(key)]:
        with pytest.raises(ConfigError, match="a/b/: a name that ends in a slash is a folder"):
            call()


@pytest.mark.guarantee("object-name-read")
@pytest.mark.parametrize("has_root", [True, False])
def test_listings_of_http_by_fsspec_have_sizes_and_keys_that_can_be_read(has_root: bool) -> None:
    page = b"".join(b'<a href="%s">x</a>' % name for name in (b"a%20b.bin", b"d%2541.bin", b"sub/"))
    objects = {
        "/deep": page,
        "/deep/": page,
        "/deep/a%20b.bin": b"12345",
        "/deep/d%2541.bin": b"678",
    }
    with http_server(objects) as server:
        config = StorageConfig(transport="fsspec")
        store, prefix = open_store(f"{server.url}/deep/", config)
        if has_root:  # as where obstore fails
            store, prefix = FsspecStore("http", server.url.partition("://")[2], config), "deep/"
        listed = store.list(prefix, recursive=False)
        names = ["a b.bin", "d%41.bin"] if has_root else ["a%20b.bin", "d%2541.bin"]
        assert [(info.key, info.size) for info in listed] == [
            (prefix + names[0], 5),
            (prefix + names[1], 3),
        ]
        read = [bytes(store.read(info.key, [(0, 3)], info.etag)[0]) for info in listed]
        assert read == [b"123", b"678"]


def test_listings_by_obstore_hold_objects_and_no_markers_of_folders(moto: S3) -> None:
    bucket = moto.new_bucket()
    objects = {
        "lead": b"1",
        "/lead": b"22",
        "d/": b"",
        "d/sub/": b"",
        "d/sub/x": b"333",
        "d/sub": b"4444",
        "d/none/": b"",
        "d/empty": b"",
    }
    client = moto.client()
    for name, body in objects.items():
        client.put_object(Bucket=bucket, Key=name, Body=body)
    store, key = open_store(f"s3://{bucket}/", StorageConfig(storage_options=moto.options))
    found = {item.key: item.size for item in store.list(key)}
    assert found == {"lead": 1, "d/sub": 4, "d/sub/x": 3, "d/empty": 0}
    client.put_object(Bucket=bucket, Key="d//x", Body=b"")
    with pytest.raises(StorageError, match=r"transport='fsspec'.*d//x"):
        store.list("d/")


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_urls_of_http_may_be_quoted(transport: Any) -> None:
    with http_server({"/a%20b%25": b"0123456789"}) as server:
        for name in ("a b%25", "a%20b%25"):
            store, key = server.open(
                f"{server.url}/{name}", transport=transport, storage_options={}
            )
            assert bytes(store.read(key, [(2, 5)])[0]) == b"234"


@pytest.mark.guarantee("scheme-goes-transport")
@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("s3://b/k", ObstoreStore),
        ("gs://b/k", ObstoreStore),
        ("az://b/k", ObstoreStore),
        ("https://h/k", ObstoreStore),
        ("oss://b/k", OssStore),
        ("memory://b/k", FsspecStore),
        ("/tmp/k", LocalStore),
        ("file:///tmp/k", LocalStore),
        ("file://localhost/tmp/k", LocalStore),
    ],
)
def test_auto_transport_by_scheme(url: str, kind: type) -> None:
    store, _ = open_store(url, StorageConfig())
    served_by = store.inner if isinstance(store, BucketStore) else store
    assert isinstance(served_by, kind)


@pytest.mark.parametrize(
    ("url", "settings", "words"),
    [
        ("s3:///key", {}, "no bucket"),
        ("hdfs://b/k", {"transport": "obstore"}, "'auto' or 'fsspec'"),
        ("s3://b/k", {"transport": "boto"}, "transport is 'boto'"),
        ("file://data/k", {}, "file:///data/"),
        ("gs://bucket/../b", {}, "transport='fsspec'"),
        ("az://container/a//b", {}, "transport='fsspec'"),
        ("oss://bucket//lead", {}, "transport='fsspec'"),
        ("http://host/a//b", {}, "transport='fsspec'"),
        ("s3://bucket//", {}, "transport='fsspec'"),
    ],
)
def test_urls_that_no_store_or_not_this_transport_can_serve_are_refused(
    url: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_store(url, StorageConfig(**settings))


@pytest.mark.guarantee("errors-say-how")
def test_secrets_show_nowhere(s3_storage: StorageConfig, s3: S3) -> None:
    store, key = open_store("s3://no-such-bucket/key", s3_storage)
    texts = [
        repr(store),
        repr(s3_storage),
        str(s3_storage),
        store.url(key),
        repr(s3_storage.tuned(max_retries=1)),
    ]
    with pytest.raises(StorageError) as caught:
        store.read(key, [(0, 1)])
    texts += [str(caught.value), repr(caught.value), repr(caught.value.__cause__)]
    assert not [text for text in texts if SECRET in text or KEY in text]


def test_redact_hides_passwords_and_signatures_in_urls() -> None:
    text = "https://user:hunter22@host/k?X-Amz-Signature=abcdef&x=1 token=tokenvalue"
    remember_secrets(
        {"token": "tokenvalue", "client_kwargs": {"aws_secret_access_key": "deepsecret"}}
    )
    clean = redact(text)
    assert "hunter22" not in clean
    assert "abcdef" not in clean
    assert "tokenvalue" not in clean
    assert "x=1" in clean
    assert "deepsecret" not in redact("deepsecret")


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_an_endpoint_that_denies_is_told_apart(transport: Any) -> None:
    with http_server({}) as server:
        server.status = 403
        store, key = server.open(transport=transport, _tuning=Tuning(max_retries=1))
        for call in (lambda: store.info(key), lambda: store.read(key, [(0, 4)])):
            with pytest.raises(AccessDeniedError, match="s3://bucket/key: access denied"):
                call()


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_no_credentials_at_all_say_how_to_give_some(transport: Any, s3: S3) -> None:
    options = {"endpoint_url": s3.endpoint}
    store, key = open_store(
        "s3://bucket/key",
        StorageConfig(transport=transport, storage_options=options).tuned(max_retries=1),
    )
    with pytest.raises(AccessDeniedError, match="credentials"):
        store.info(key)


def test_anonymous_access_sends_no_signature() -> None:
    with http_server({"/public/key": b"abc"}) as server:
        options = {"anon": True, "endpoint_url": server.url}
        store, key = server.open("s3://public/key", storage_options=options)
        assert bytes(store.read(key, [(0, 3)])[0]) == b"abc"


@pytest.mark.guarantee("both-transports-find")
def test_the_credential_chain_is_used_when_no_key_is_given(
    s3: S3, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    for transport in ("obstore", "fsspec"):
        store, key = open_store(f"s3://{bucket}/{transport}", StorageConfig(transport=transport))
        put(store, key, b"abc")
        assert store.info(key).size == 3


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_an_endpoint_of_the_environment_is_the_one_of_the_day(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of the one before is still in use, as one that a reader holds."""
    storage = StorageConfig(transport=transport, storage_options={"key": KEY, "secret": SECRET})
    stores = []
    for data in (b"abc", b"def"):
        with http_server({"/bucket/key": data}) as server:
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
            store, key = open_store("s3://bucket/key", storage)
            assert bytes(store.read(key, [(0, 3)])[0]) == data
            stores.append(store)
            assert open_store("s3://bucket/key", storage)[0] is store


VARIABLES = [
    ("s3", "AWS_ENDPOINT_URL_S3"),
    ("s3", "AWS_REGION"),
    ("s3", "AWS_DEFAULT_REGION"),
    ("s3", "AWS_PROFILE"),
    ("s3", "AWS_DEFAULT_PROFILE"),
    ("s3", "AWS_CONFIG_FILE"),
    ("s3", "AWS_SHARED_CREDENTIALS_FILE"),
    ("s3", "AWS_SECRET_ACCESS_KEY"),
    ("s3", "https_proxy"),
    ("oss", "OSS_ENDPOINT"),
    ("oss", "OSS_REGION"),
    ("oss", "ALIBABA_CLOUD_ACCESS_KEY_ID"),
    ("az", "AZURE_STORAGE_ACCOUNT_NAME"),
    ("az", "AZURE_STORAGE_CONNECTION_STRING"),
    ("gs", "GOOGLE_APPLICATION_CREDENTIALS"),
    ("gs", "STORAGE_EMULATOR_HOST"),
]


def test_every_scheme_of_buckets_has_variables_of_its_clients() -> None:
    named = {scheme for scheme, _ in VARIABLES}
    buckets = {scheme for scheme, known in SCHEMES.items() if known.is_bucket}
    assert named == buckets, "VARIABLES: where they lead elsewhere, stores are not shared"


@pytest.mark.parametrize(("scheme", "name"), VARIABLES)
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_stores_are_not_shared_where_the_environment_leads_elsewhere(
    transport: Any, scheme: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the environment is held in clear by what tells stores apart."""
    storage = StorageConfig(transport=transport)
    monkeypatch.delenv(name, raising=False)
    without, _ = open_store(f"{scheme}://bucket/key", storage)
    monkeypatch.setenv(name, "the-former")
    former, _ = open_store(f"{scheme}://bucket/key", storage)
    monkeypatch.setenv(name, "the-latter")
    latter, _ = open_store(f"{scheme}://bucket/key", storage)
    monkeypatch.setenv("UNRELATED", "1")
    assert len({id(without), id(former), id(latter)}) == 3
    assert open_store(f"{scheme}://bucket/other", storage)[0] is latter
    monkeypatch.setenv(name, "the-former")
    assert open_store(f"{scheme}://bucket/key", storage)[0] is former
    assert "the-former" not in repr(list(storage_open._stores))


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_settings_of_the_cache_make_no_client_of_their_own(transport: Any, tmp_path: Path) -> None:
    storage = StorageConfig(transport=transport)
    shared, _ = open_store("s3://bucket/key", storage)
    for cache in (
        storage.changed(cache_dir=tmp_path),
        storage.changed(cache_dir=tmp_path, cache_max_bytes=1 << 30),
    ):
        assert open_store("s3://bucket/key", cache)[0] is shared
    assert open_store("s3://bucket/key", replace(storage, request_timeout=7.0))[0] is not shared


def test_virtual_host_addressing_puts_the_bucket_in_the_host() -> None:
    options: dict[str, Any] = {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": "https://oss-cn-hangzhou.aliyuncs.com",
    }
    options |= {
        "config_kwargs": {"s3": {"addressing_style": "virtual"}},
        "client_kwargs": {"region_name": "cn-hangzhou"},
    }
    made = s3_arguments("web", StorageConfig(storage_options=options))["config"]
    assert made["endpoint"] == "https://web.oss-cn-hangzhou.aliyuncs.com"
    assert made["virtual_hosted_style_request"] is True
    assert made["region"] == "cn-hangzhou"


def test_config_kwargs_that_obstore_does_not_follow_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {
        "key": KEY,
        "secret": SECRET,
        "config_kwargs": {
            "signature_version": "s3v4",
            "s3": {"addressing_style": "path", "payload_signing_enabled": True},
        },
    }
    for bucket in ("web", "books"):
        s3_arguments(bucket, StorageConfig(storage_options=options))
    (message,) = caplog.messages
    assert "hold s3.payload_signing_enabled, signature_version, which the obstore" in message


def test_virtual_host_requests_carry_the_bucket_as_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_server({"/key": b"abc"}) as server:  # as a proxy, which stands in for DNS
        monkeypatch.setenv("http_proxy", server.url)
        options = {"key": KEY, "secret": SECRET, "endpoint_url": "http://oss.test"}
        options |= {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}  # type: ignore[dict-item]
        store, key = open_store(
            "s3://web/key", StorageConfig(storage_options=options).tuned(max_retries=0)
        )
        assert bytes(store.read(key, [(0, 3)])[0]) == b"abc"
        assert server.hosts == ["web.oss.test"]


def test_an_endpoint_that_is_given_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with http_server({"/web/key": b"abc"}) as server:
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        store, key = server.open("s3://web/key", _tuning=Tuning(max_retries=0))
        assert bytes(store.read(key, [(0, 3)])[0]) == b"abc"


def test_region_and_endpoint_of_a_profile_are_taken_without_botocores_handlers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are for clients, and to register them took longer than to open a store."""
    endpoint = "http://127.0.0.1:1"
    (tmp_path / "config").write_text(
        f"[profile far]\nregion = eu-north-1\nendpoint_url = {endpoint}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setattr("botocore.session.Session.register", lambda *_: pytest.fail("registered"))
    options = {"key": KEY, "secret": SECRET, "profile": "far"}
    made = s3_arguments("web", StorageConfig(storage_options=options))["config"]
    assert made["region"] == "eu-north-1"
    assert made["endpoint"] == endpoint


@pytest.mark.parametrize("options", [{"anon": True}, {"key": KEY, "secret": SECRET}])
def test_what_options_and_environment_tell_is_not_asked_of_botocore(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    monkeypatch.setitem(sys.modules, "botocore.session", None)  # importing it would fail
    options = {**options, "endpoint_url": "http://127.0.0.1:1"}
    made = s3_arguments("b", StorageConfig(storage_options=options))
    assert made["config"]["endpoint"] == "http://127.0.0.1:1"
    assert made["config"]["region"] == ("us-east-1" if "anon" in options else "eu-west-3")


def test_misspelled_and_half_given_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="endpoint_ulr"):
        s3_arguments("b", StorageConfig(storage_options={"endpoint_ulr": "x"}))
    with pytest.raises(ConfigError, match="both 'key' and 'secret'"):
        s3_arguments("b", StorageConfig(storage_options={"key": "AKIAonly"}))


def test_explicit_session_tokens_are_not_mixed_with_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stale")
    made = s3_arguments("b", StorageConfig(storage_options={"key": "k" * 8, "secret": "s" * 8}))
    assert made["credential_provider"]()["token"] is None


@pytest.mark.guarantee("local-file-written")
def test_full_disk_while_writing_is_named_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    writer = LocalStore().open_writer(str(tmp_path / "out"))
    writer.write(b"x")
    with pytest.raises(StorageError, match="no space left"):
        writer.commit()
    assert list(tmp_path.glob("*out*")) == []


def test_errors_are_told_by_their_status_not_by_digits_in_a_name() -> None:
    with http_server({}) as server:
        server.status = 500
        store, key = server.open("s3://bucket-403/416-key", _tuning=Tuning(max_retries=0))
        with pytest.raises(EndpointError, match="the server could not answer it now"):
            store.info(key)


@pytest.mark.guarantee("10-transports-try")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_a_transport_tries_once(transport: Any) -> None:
    """All further tries are the one policy's."""
    with http_server({"/bucket/key": b"abcdef"}) as server:
        store, key = server.open(transport=transport, _tuning=Tuning(max_retries=0))
        etag = store.info(key).etag
        out = np.empty(3, np.uint8)
        for status in (500, 503):
            server.status = status
            for call in (
                lambda: store.info(key),
                lambda: store.read(key, [(0, 3)], etag),
                lambda: store.fetch_into(key, [(0, 3)], [out], etag),
            ):
                before = len(server.requests)
                with pytest.raises(EndpointError):
                    call()
                assert len(server.requests) - before == 1


@pytest.mark.guarantee("several-reads-last")
def test_the_last_of_several_reads_goes_out_after_the_others_and_its_etag_vouches_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """obstore tells no ETag of several reads: an object that is replaced among them must show in
    the answer that has one.
    """
    get_ranges = obstore.get_ranges
    with http_server({"/bucket/key": b"0123456789"}) as server:
        store, key = server.open(_tuning=Tuning(max_retries=0))
        etag = store.info(key).etag

        def replaced(*arguments: Any, **named: Any) -> Any:
            server.objects["/bucket/key"] = b"9876543210"
            server.etags["/bucket/key"] = "2"
            return get_ranges(*arguments, **named)

        monkeypatch.setattr(obstore, "get_ranges", replaced)
        outs = [np.empty(2, np.uint8) for _ in range(3)]
        with pytest.raises(ObjectChangedError, match="was replaced"):
            store.fetch_into(key, [(0, 2), (4, 6), (8, 10)], outs, etag)


@pytest.mark.guarantee("several-reads-last")
def test_drivers_that_tell_no_etag_are_asked_for_it_every_thirty_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FsspecStore("memory", "", StorageConfig())
    now = [1000.0]
    asked = []
    put(store, "recheck/object", b"0123")
    etag = store.info("recheck/object").etag
    info = FsspecStore.info

    def noted(self: FsspecStore, key: str) -> Any:
        asked.append(key)
        return info(self, key)

    monkeypatch.setattr(FsspecStore, "info", noted)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for seconds, looks in ((0.0, 1), (29.0, 1), (1.0, 2), (29.9, 2), (0.1, 3)):
        now[0] += seconds
        store.read("recheck/object", [(0, 2)], etag)
        assert len(asked) == looks


def test_an_object_is_not_created_in_a_bucket_that_is_not_there(s3_storage: StorageConfig) -> None:
    with pytest.raises(ObjectNotFoundError):
        create_object(*open_store("s3://no-such-bucket/a", s3_storage), b"x")


def test_an_object_that_was_stored_with_a_checksum_is_read_in_ranges(
    s3: S3, s3_storage: StorageConfig, bucket: str
) -> None:
    """By botocore, which stores one by default; rclone sends it with every range."""
    s3.client().put_object(Bucket=bucket, Key="a", Body=b"0123456789")
    store, key = open_store(f"s3://{bucket}/a", s3_storage)
    assert bytes(store.read(key, [(2, 5)])[0]) == b"234"


def test_an_object_without_an_etag_is_replaced_all_the_same(
    bucket: str, s3_storage: StorageConfig
) -> None:
    store, key = open_store(f"s3://{bucket}/a", s3_storage)
    put(store, key, b"first")
    seen = version_of(None, datetime.now(UTC))
    assert replace_object(store, key, b"second", seen), "a time is no condition for a server"
    assert bytes(store.read(key, [(0, 6)])[0]) == b"second"
