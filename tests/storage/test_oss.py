"""oss:// by both transports against a server of OSS's dialect of S3: the stores' contract, then what
is particular to OSS.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import StorageConfig
from streammega.convert import convert
from streammega.convert.read.compression import open_stream
from streammega.convert.read.inputs import find_inputs
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    UnsupportedOperation,
)
from streammega.storage import Store, open_store
from streammega.storage.backends.oss import OssS3fsStore, OssStore
from streammega.storage.backends.remote import PART_BYTES, part_bytes
from streammega.storage.store import create_object, put_if
from tests.storage.test_storage import StoreContract, put
from tests.support.oss_server import DOMAIN, KEY, SECRET, Oss
from tests.support.read_programs import answer_with_part
from tests.support.servers import S3

TRANSPORTS = ("obstore", "fsspec")


class OssContract(StoreContract):
    """The contract of every store, and the parts of it that need a bucket."""

    @pytest.fixture
    def conditions(self) -> set[str]:
        return {"if_absent"}

    @pytest.mark.guarantee("oss-read-written", "sent-bodies-signed")
    def test_large_uploads_are_multipart_and_whole(self, store: Store, key: str, oss: Oss) -> None:
        part = bytes(range(256)) * 4096
        writer = store.open_writer(key)
        for _ in range(66):
            writer.write(part)
        writer.commit()
        assert store.info(key).size == 66 << 20
        assert re.search(r'-[23]"$', store.info(key).etag), "an ETag of several parts"
        at = PART_BYTES - 128
        assert bytes(store.read(key, [(at, at + 256)])[0]) == part[-128:] + part[:128]
        assert not [
            request
            for request in oss.take_log()
            if any("copy-source" in name for name in request["headers"])
        ]

    def test_an_aborted_multipart_upload_leaves_no_parts_behind(
        self, store: Store, key: str, oss: Oss
    ) -> None:
        before = oss.counts()["uploads"]
        writer = store.open_writer(key)
        for _ in range(70):
            writer.write(b"x" * (1 << 20))
        writer.abort()
        assert oss.counts()["uploads"] == before
        with pytest.raises(ObjectNotFoundError):
            store.info(key)

    @pytest.mark.guarantee("oss-read-written")
    def test_a_listing_of_several_pages_is_whole(self, store: Store, key: str, oss: Oss) -> None:
        bucket = f"bucket-{oss.buckets}"
        oss.fill(bucket, 2345)
        prefix = "many/"
        found = store.list(prefix)
        assert [item.key for item in found] == [f"{prefix}{i:05d}" for i in range(2345)]
        assert {(item.size, item.etag) for item in found} == {
            (1, store.info(f"{prefix}00000").etag)
        }

    @pytest.mark.guarantee("oss-read-written")
    def test_a_read_of_another_object_than_was_opened_is_refused(
        self, store: Store, key: str
    ) -> None:
        put(store, key, b"0123456789")
        opened = store.info(key).etag
        spans = [(0, 4), (6, 10)]
        outs = [np.empty(4, np.uint8), np.empty(4, np.uint8)]
        store.fetch_into(key, spans, outs, opened)
        assert [bytes(out) for out in outs] == [b"0123", b"6789"]
        put(store, key, b"9876543210")
        with pytest.raises(ObjectChangedError, match="was replaced"):
            store.fetch_into(key, spans, outs, opened)

    @pytest.mark.guarantee("oss-read-written")
    def test_of_many_that_create_an_object_one_does(self, store: Store, key: str) -> None:
        barrier = threading.Barrier(6)

        def create(number: int) -> bool:
            barrier.wait(60)
            return put_if(store, key, f"{number}".encode(), if_absent=True)

        with ThreadPoolExecutor(6) as pool:
            created = list(pool.map(create, range(6)))
        assert sum(created) == 1
        assert bytes(store.read(key, [(0, 1)])[0]) == f"{created.index(True)}".encode()

    def test_there_is_no_condition_for_objects_that_exist(self, store: Store, key: str) -> None:
        put(store, key, b"first")
        with pytest.raises(UnsupportedOperation):
            put_if(store, key, b"second", if_match=store.info(key).etag)
        assert bytes(store.read(key, [(0, 5)])[0]) == b"first"

    def test_names_are_encoded_once(self, store: Store, key: str) -> None:
        name = f"{key} with +%20=&?ü"
        put(store, name, b"abc")
        assert store.info(name).size == 3
        assert [item.key for item in store.list(name[:-3])] == [name]
        store.delete(name)
        assert store.list(name) == []


class TestOss(OssContract):
    @pytest.fixture(params=[OssStore, OssS3fsStore])
    def store(self, request: pytest.FixtureRequest, oss: Oss) -> Store:
        storage = StorageConfig(storage_options=oss.options).tuned(max_retries=2)
        store: Store = request.param("oss", oss.new_bucket(), storage)
        return store

    @pytest.fixture
    def key(self) -> str:
        return "folder/object"


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Any:
    return request.param


def config_of(oss: Oss, transport: Any, **options: Any) -> StorageConfig:
    return StorageConfig(
        transport=transport, storage_options=oss.options | options, request_timeout=10
    ).tuned(max_retries=1)


def opened(oss: Oss, transport: Any, name: str = "dir/object", **options: Any) -> tuple[Store, str]:
    return open_store(f"oss://{oss.new_bucket()}/{name}", config_of(oss, transport, **options))


@pytest.mark.guarantee("buckets-named-host")
def test_buckets_are_named_by_the_host(oss: Oss, transport: Any) -> None:
    store, key = opened(oss, transport)
    put(store, key, b"abc")
    assert bytes(store.read(key, [(0, 3)])[0]) == b"abc"
    hosts = {request["host"] for request in oss.take_log()}
    assert hosts == {f"bucket-{oss.buckets}.s3.{DOMAIN}"}


def test_the_server_refuses_path_style_bad_signatures_and_chunked_bodies(oss: Oss) -> None:
    """What the other tests rely on: that the server would notice."""
    bucket = oss.new_bucket(public=True)
    proxied = urllib.request.build_opener(urllib.request.ProxyHandler({"http": oss.proxy}))
    with pytest.raises(urllib.error.HTTPError) as caught:
        proxied.open(f"http://{DOMAIN}/{bucket}/key", timeout=10)
    assert b"SecondLevelDomainForbidden" in caught.value.read()
    for transport in TRANSPORTS:
        store, key = open_store(
            f"oss://{bucket}/key", config_of(oss, transport, secret="another-secret")
        )
        # s3fs has the server's message without its code.
        with pytest.raises(
            AccessDeniedError, match=r"SignatureDoesNotMatch|signature we calculated"
        ):
            store.read(key, [(0, 3)])
        with pytest.raises(AccessDeniedError) as denied:
            store.info(key)
        assert "another-secret" not in str(denied.value)


@pytest.mark.guarantee("sent-bodies-signed")
def test_what_is_sent_is_what_oss_takes(oss: Oss, transport: Any) -> None:
    """Bodies signed whole; objects removed one by one; by s3fs, ranges that may reach past the end."""
    store, key = opened(oss, transport)
    put(store, key, b"abc")
    writer = store.open_writer(key)
    for _ in range(60):
        writer.write(bytes(1 << 20))
    writer.commit()
    store.read(key, [(0, 3)])
    store.delete(key)
    log = [(request["method"], request["headers"]) for request in oss.take_log()]
    bodies = [headers for method, headers in log if method == "PUT"]
    assert len(bodies) == 3, "a small object, and two parts of a large one"
    for headers in bodies:
        assert re.fullmatch("[0-9a-f]{64}", headers["x-amz-content-sha256"]), (
            "not in chunks, nor unsigned"
        )
    ranges = [headers for method, headers in log if method == "GET" and "range" in headers]
    assert ranges
    assert transport == "obstore" or {headers["x-oss-range-behavior"] for headers in ranges} == {
        "standard"
    }
    assert [method for method, _ in log].count("DELETE") == 1


def test_a_bucket_with_versioning_ignores_the_condition_for_new_objects(
    oss: Oss, transport: Any
) -> None:
    """As OSS documents it. `convert` and `doctor` notice by trying it."""
    store, key = open_store(
        f"oss://{oss.new_bucket(versioned=True)}/key", config_of(oss, transport)
    )
    assert create_object(store, key, b"first")
    assert store.put(key, b"second", if_absent=True)


@pytest.mark.parametrize(
    ("versioned", "overwrite", "warnings"), [(False, False, 0), (False, True, 1), (True, False, 1)]
)
def test_convert_says_where_oss_has_no_condition(
    oss: Oss,
    transport: Any,
    versioned: bool,
    overwrite: bool,
    warnings: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "some text"}\n')
    target = f"oss://{oss.new_bucket(versioned=versioned)}/web"
    arguments = ([str(tmp_path / "in.jsonl")], target)
    settings: Any = {"tokenizer": "bytes", "storage": config_of(oss, transport), "workers": 1}
    if overwrite:
        convert(*arguments, **settings)
    convert(*arguments, **settings, overwrite=overwrite)
    assert caplog.text.count("no conditional writes") == warnings


@pytest.mark.guarantee("fixed-read-again")
def test_credentials_are_read_again_before_an_upload_by_obstore(oss: Oss) -> None:
    """It cannot be repeated with another key. s3fs asks for the key with every request, and what
    was refused is sent again.
    """
    calls: list[int] = []

    def provide() -> dict[str, Any]:
        calls.append(1)
        return {"key": KEY, "secret": SECRET}

    options = {"endpoint": oss.endpoint, "credentials_provider": provide}
    store, key = open_store(f"oss://{oss.new_bucket()}/key", StorageConfig(storage_options=options))
    put(store, key, b"first")
    before = len(calls)
    put(store, key, b"second")
    assert len(calls) == before + 1


def test_the_internal_endpoint_serves_both_transports(oss: Oss, transport: Any) -> None:
    store, key = opened(oss, transport, endpoint=f"http://{DOMAIN.replace('.', '-internal.', 1)}")
    put(store, key, b"abc")
    assert store.info(key).size == 3
    assert all("-internal.aliyuncs.com" in request["host"] for request in oss.take_log())


@pytest.mark.guarantee("anonymous-reads-environment")
def test_the_environment_alone_is_enough(
    oss: Oss, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    oss.know(STSkey={"secret": "sts-secret", "token": "sts-token", "expires": time.time() + 600})
    monkeypatch.setenv("OSS_ENDPOINT", oss.endpoint)
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "STSkey")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "sts-secret")
    monkeypatch.setenv("OSS_SESSION_TOKEN", "sts-token")
    store, key = open_store(f"oss://{oss.new_bucket()}/key", StorageConfig(transport=transport))
    put(store, key, b"abc")
    assert store.info(key).size == 3


@pytest.mark.guarantee("credentials-cloud-never")
def test_nothing_of_aws_reaches_oss(
    oss: Oss, transport: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (
        "ACCESS_KEY_ID",
        "SECRET_ACCESS_KEY",
        "SESSION_TOKEN",
        "ROLE_ARN",
        "DEFAULT_REGION",
        "REGION",
        "PROFILE",
        "CA_BUNDLE",
    ):
        monkeypatch.setenv(f"AWS_{name}", "aws-marker")
    settings = tmp_path / "config"
    settings.write_text("[default]\nregion = aws-marker\ns3 =\n  addressing_style = path\n")
    for name in ("CONFIG_FILE", "SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(f"AWS_{name}", str(settings))
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://aws-marker.example")
    for name in (
        "AWS_SKIP_SIGNATURE",
        "AWS_REQUEST_PAYER",
        "AWS_UNSIGNED_PAYLOAD",
        "AWS_S3_EXPRESS",
        "AWS_USE_DUALSTACK_ENDPOINT",
        "AWS_USE_FIPS_ENDPOINT",
    ):
        monkeypatch.setenv(name, "true")
    store, key = opened(oss, transport)
    put(store, key, b"abc" * 100)
    store.read(key, [(0, 3), (5, 9)])
    store.list(key)
    store.delete(key)
    log = oss.take_log()
    assert len(log) >= 5
    assert "aws-marker" not in json.dumps(log)
    assert not any("request-payer" in name for request in log for name in request["headers"])
    assert all(KEY in request["headers"]["authorization"] for request in log)


@pytest.mark.guarantee("anonymous-reads-environment")
def test_public_buckets_are_read_without_a_signature(oss: Oss, transport: Any) -> None:
    bucket = oss.new_bucket(public=True)
    store, key = open_store(f"oss://{bucket}/key", config_of(oss, transport))
    put(store, key, b"abc")
    oss.take_log()
    anonymous = StorageConfig(
        transport=transport, storage_options={"endpoint": oss.endpoint, "anon": True}
    )
    store, key = open_store(f"oss://{bucket}/key", anonymous)
    assert bytes(store.read(key, [(0, 3)])[0]) == b"abc"
    assert not any("authorization" in request["headers"] for request in oss.take_log())


@pytest.mark.guarantee("sent-bodies-signed")
def test_an_endpoint_of_no_known_region_is_signed_for_any(oss: Oss, transport: Any) -> None:
    """An accelerate endpoint names none."""
    store, key = opened(oss, transport, endpoint="http://oss-accelerate.aliyuncs.com")
    put(store, key, b"abc")
    put(store, "named like ?uploads&x=1", b"abc")
    assert [item.size for item in store.list("")] == [3, 3]
    scopes = {request["headers"]["authorization"].split("/")[2] for request in oss.take_log()}
    assert scopes == {"us-east-1"}


@pytest.mark.guarantee("oss-read-written")
def test_a_range_past_the_end_is_told_without_reading_the_whole_object(
    oss: Oss, transport: Any
) -> None:
    store, key = opened(oss, transport)
    put(store, key, b"x" * (8 << 20))
    for start, stop in (((8 << 20) - 4, (8 << 20) + 4), (9 << 20, (9 << 20) + 4)):
        began = time.monotonic()
        with pytest.raises(ShortReadError, match="dir/object"):
            store.read(key, [(start, stop)])
        assert time.monotonic() - began < 5


def test_temporary_credentials_that_expire_are_replaced_while_reading(
    oss: Oss, transport: Any, tmp_path: Path
) -> None:
    """The file is renewed by somebody else, as agents do; the server refuses the former key from
    then on.
    """
    first, second, third = (
        {"AccessKeyId": f"STS.{n}", "AccessKeySecret": f"secret-{n}", "SecurityToken": f"token-{n}"}
        for n in (1, 2, 3)
    )
    known = {f"STS.{n}": {"secret": f"secret-{n}", "token": f"token-{n}"} for n in (1, 2, 3)}
    path = tmp_path / "sts.json"
    path.write_text(json.dumps(first))
    oss.know(**known)
    options = {"endpoint": oss.endpoint, "credentials_file": str(path)}
    config = StorageConfig(transport=transport, storage_options=options).tuned(max_retries=1)
    store, key = open_store(f"oss://{oss.new_bucket()}/key", config)
    put(store, key, b"abcdef")
    known["STS.1"]["expires"] = time.time() - 1  # type: ignore[assignment]
    oss.know(**known)
    with pytest.raises(AccessDeniedError, match="SecurityTokenExpired") as caught:
        store.read(key, [(0, 3)])
    assert caught.value.transient, "it is waited for, as long as max_retries allows"
    path.write_text(json.dumps(second))
    got = store.read(key, [(0, 3), (1, 4), (2, 5), (3, 6)])
    assert [bytes(part) for part in got] == [b"abc", b"bcd"[:3], b"cde", b"def"]
    assert store.info(key).size == 6
    assert [item.size for item in store.list("key" if transport == "obstore" else key)] == [6]
    known["STS.2"]["expires"] = time.time() - 1  # type: ignore[assignment]
    oss.know(**known)
    path.write_text(json.dumps(third))
    put(store, key, b"abc")
    assert store.info(key).size == 3


@pytest.mark.guarantee("credentials-expire-read")
def test_a_provider_is_asked_now_and_then_not_with_every_request(oss: Oss, transport: Any) -> None:
    calls: list[int] = []

    def provide() -> dict[str, Any]:
        calls.append(1)
        return {"key": KEY, "secret": SECRET}

    options = {"endpoint": oss.endpoint, "credentials_provider": provide}
    config = StorageConfig(transport=transport, storage_options=options)
    store, key = open_store(f"oss://{oss.new_bucket()}/key", config)
    put(store, key, b"0123456789")
    for _ in range(20):
        store.read(key, [(0, 3), (3, 9)])
    assert len(calls) <= 3


@pytest.mark.guarantee("forked-spawned-workers")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_a_process_that_has_read_read_too(
    oss: Oss, transport: Any, method: str
) -> None:
    """A forked child by s3fs."""
    store, key = opened(oss, transport, "key")
    put(store, key, b"0123456789")
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(
        target=answer_with_part,
        args=(f"oss://bucket-{oss.buckets}/key", config_of(oss, transport), answers),
    )
    child.start()
    assert answers.get(timeout=60) == (10, b"123")
    child.join()


def test_parts_grow_so_that_ten_thousand_hold_the_largest_shards() -> None:
    assert [part_bytes(sent) for sent in (0, 1999, 2000)] == [
        PART_BYTES,
        PART_BYTES,
        2 * PART_BYTES,
    ]
    assert sum(map(part_bytes, range(10_000))) > 1900 << 30


@pytest.mark.guarantee("address-endpoint-addressed")
@pytest.mark.parametrize("s3", ["moto"], indirect=True)
def test_an_address_as_endpoint_is_addressed_by_path(s3: S3, transport: Any) -> None:
    """Private gateways; moto stands for one, and looks at no signature."""
    options = {"endpoint": s3.endpoint, "key": KEY, "secret": SECRET}
    config = StorageConfig(transport=transport, storage_options=options)
    store, key = open_store(f"oss://{s3.new_bucket()}/dir/key", config)
    put(store, key, b"0123456789")
    assert store.info(key).size == 10
    assert bytes(store.read(key, [(2, 5)])[0]) == b"234"


@pytest.mark.guarantee("corpora-datasets-oss")
def test_inputs_of_convert_are_found_and_read_as_files(oss: Oss, transport: Any) -> None:
    """By folder, glob and name; larger than one read, and sought in."""
    data = bytes(range(256)) * (40 << 10)
    config = config_of(oss, transport)
    root = f"oss://{oss.new_bucket()}"
    for name in ("in/a.txt", "in/deep/b.txt", "other/c.txt"):
        store, key = open_store(f"{root}/{name}", config)
        put(store, key, data if name == "in/a.txt" else b"abc")
    found = find_inputs([f"{root}/in"], config)
    assert [(item.path, item.size) for item in found] == [
        (f"{root}/in/a.txt", 10 << 20),
        (f"{root}/in/deep/b.txt", 3),
    ]
    assert all(item.etag.startswith('"') for item in found)
    assert [item.path for item in find_inputs([f"{root}/*/*.txt"], config)] == [
        f"{root}/in/a.txt",
        f"{root}/other/c.txt",
    ]
    with open_stream(f"{root}/in/a.txt", config) as file:
        file.seek(9_000_001)
        assert file.read(3) == data[9_000_001:9_000_004]
        file.seek(0)
        assert file.read() == data
    with pytest.raises(ObjectNotFoundError, match="no such object, folder or match"):
        find_inputs([f"{root}/none"], config)
    with pytest.raises(ConfigError, match="no endpoint"):
        find_inputs(
            [f"{root}/in"],
            StorageConfig(transport=transport, storage_options={"key": KEY, "secret": SECRET}),
        )
    denied = config_of(oss, transport, secret="another-secret")
    with pytest.raises(AccessDeniedError):
        find_inputs([f"{root}/in"], denied)


@pytest.mark.guarantee("buckets-named-host")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_s3_buckets_by_virtual_host_are_read_and_written(oss: Oss, transport: Any) -> None:
    """s3:// with addressing_style 'virtual', at a server that takes buckets by no other way."""
    bucket = oss.new_bucket()
    options = {
        "key": KEY,
        "secret": SECRET,
        "endpoint_url": f"http://s3.{DOMAIN}",
        "config_kwargs": {
            "s3": {"addressing_style": "virtual"},
            "request_checksum_calculation": "when_required",
        },
        "client_kwargs": {"region_name": "cn-nowhere"},
    }
    store, key = open_store(
        f"s3://{bucket}/dir/key",
        StorageConfig(transport=transport, storage_options=options).tuned(max_retries=1),
    )
    put(store, key, b"0123456789")
    assert store.info(key).size == 10
    assert [bytes(part) for part in store.read(key, [(0, 2), (4, 9)])] == [b"01", b"45678"]
    assert {request["host"] for request in oss.take_log()} == {f"{bucket}.s3.{DOMAIN}"}
