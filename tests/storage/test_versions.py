"""Which version of an object was read: ETags, times, neither; and servers that tell them with some
answers only.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from streammega import DataConfig, IndexedDataset, IndexedDatasetWriter, StorageConfig, StreamLoader
from streammega.config import Transport
from streammega.errors import ObjectChangedError
from streammega.storage import open_store
from streammega.storage.etags import check_version, version_like, version_of
from tests.support.servers import HttpObjects, http_server

TIME = datetime(2026, 11, 21, tzinfo=UTC)
LATER = datetime(2026, 11, 22, tzinfo=UTC)
NEVER = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.guarantee("versions-objects-compared")
@pytest.mark.parametrize(
    ("opened", "answer", "changed"),
    [
        (('"a"', TIME), ('"a"', LATER), False),
        (('"a"', TIME), ('"b"', TIME), True),
        (('"a"', TIME), ("a", None), False),
        (('"a"', TIME), ('W/"a"', None), False),
        (('W/"a"', TIME), ('"b"', None), True),
        (('"a"', TIME), (None, LATER), False),
        ((None, TIME), ('"a"', TIME), False),
        ((None, TIME), ('"a"', LATER), True),
        ((None, TIME), (None, TIME), False),
        ((None, TIME), (None, LATER), True),
        ((None, NEVER), ('"a"', LATER), False),
        ((None, None), (None, LATER), False),
    ],
)
def test_versions_are_compared_with_their_own_kind(
    opened: tuple[str | None, datetime | None],
    answer: tuple[str | None, datetime | None],
    changed: bool,
) -> None:
    expected = version_of(*opened)
    found = version_like(expected, *answer)
    if changed:
        with pytest.raises(ObjectChangedError, match="was replaced"):
            check_version("http://host/x", expected, found)
    else:
        check_version("http://host/x", expected, found)


def put_pair(server: HttpObjects, folder: Path, token: int) -> None:
    with IndexedDatasetWriter(str(folder / "p"), np.uint16) as writer:
        writer.add_item(np.full(4000, token))
        writer.end_document()
    for suffix in (".bin", ".idx"):
        server.objects[f"/p{suffix}"] = (folder / f"p{suffix}").read_bytes()


@pytest.mark.guarantee("versions-objects-compared")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    "left_out", [{("GET", "ETag")}, {("HEAD", "ETag")}, {("GET", "ETag"), ("GET", "Last-Modified")}]
)
def test_an_object_whose_answers_tell_different_things_is_read(
    tmp_path: Path, left_out: set[tuple[str, str]], transport: Transport
) -> None:
    with http_server({}) as server:
        put_pair(server, tmp_path, 5)
        server.left_out = left_out
        store, key = open_store(
            f"{server.url}/p.bin", StorageConfig(transport=transport).tuned(max_retries=0)
        )
        info = store.info(key)
        assert bytes(store.read(info.key, [(0, 4), (8, 12)], info.etag)[1]) == bytes([5, 0, 5, 0])


def test_a_weak_etag_is_that_of_the_strong_one(tmp_path: Path) -> None:
    with http_server({}) as server:
        put_pair(server, tmp_path, 5)
        store, key = open_store(f"{server.url}/p.bin", StorageConfig().tuned(max_retries=0))
        info = store.info(key)
        server.etags["/p.bin"] = 'W/"1"'
        assert bytes(store.read(info.key, [(0, 2)], info.etag)[0]) == bytes([5, 0])
        server.etags["/p.bin"] = 'W/"2"'
        with pytest.raises(ObjectChangedError, match="was replaced"):
            store.read(info.key, [(0, 2)], info.etag)


def test_a_replaced_object_without_etag_is_noticed_by_its_time(tmp_path: Path) -> None:
    with http_server({}) as server:
        put_pair(server, tmp_path, 5)
        server.left_out = {(method, "ETag") for method in ("HEAD", "GET")}
        store, key = open_store(f"{server.url}/p.bin", StorageConfig().tuned(max_retries=0))
        info = store.info(key)
        assert bytes(store.read(info.key, [(0, 2)], info.etag)[0]) == bytes([5, 0])
        with pytest.raises(ObjectChangedError, match="was replaced"):
            store.read(info.key, [(0, 2)], version_of(None, LATER))


@pytest.mark.guarantee("versions-objects-compared")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_what_has_no_version_is_kept_in_no_cache(
    tmp_path: Path, order: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the pages nor the .idx of an object that was replaced by one of the same size are
    used again.
    """
    with http_server({}) as server:
        server.left_out = {
            (method, name) for method in ("HEAD", "GET") for name in ("ETag", "Last-Modified")
        }
        storage = StorageConfig(
            transport=transport,  # type: ignore[arg-type]
            cache_dir=tmp_path / "cache",
            cache_max_bytes=1 << 30,
        ).tuned(max_retries=0)
        config = DataConfig(
            blend=[f"{server.url}/p"], sequence_length=16, order=order, num_samples=(64, 0, 0), storage=storage,  # type: ignore[arg-type]
            shuffle_lanes=8 if order == "stream" else None,
        )  # fmt: skip
        for token in (5, 7):
            put_pair(server, tmp_path, token)
            with StreamLoader(config, micro_batch_size=2, global_batch_size=4) as loader:
                for batch in loader:
                    assert batch["tokens"].unique().tolist() == [token]
                    if loader.consumed_samples >= 64:
                        break
        assert not list((tmp_path / "cache").glob("idx/*.idx"))
        told = [
            record.message
            for record in caplog.records
            if "neither ETag nor Last-Modified" in record.message
        ]
        assert len(told) == len(set(told))
        assert any("p.bin" in message for message in told)


def test_urls_of_http_by_fsspec_have_one_scheme(tmp_path: Path) -> None:
    with http_server({}) as server:
        put_pair(server, tmp_path, 5)
        indexed = IndexedDataset(
            f"{server.url}/p", StorageConfig(transport="fsspec", cache_dir=tmp_path / "indices")
        )
        assert repr(indexed).startswith(f"IndexedDataset('{server.url}/p'")


def test_answers_that_cannot_be_compared_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with http_server({"/a": b"0123456789", "/b": b"0123456789"}) as server:
        server.left_out = {("GET", "ETag"), ("GET", "Last-Modified")}
        for name in ("a", "b", "a"):
            store, key = open_store(f"{server.url}/{name}", StorageConfig())
            assert bytes(store.read(key, [(2, 5)], store.info(key).etag)[0]) == b"234"
    assert (
        len(
            [
                record
                for record in caplog.records
                if "noticed only if it became shorter" in record.getMessage()
            ]
        )
        == 1
    )
