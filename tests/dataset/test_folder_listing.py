"""A folder that was listed before is listed by parts side by side: it is what one listing tells,
whatever is kept of the last time.
"""

from __future__ import annotations

import bisect
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.dataset.folder_listing import PART, WHOLE_DAYS, list_folder
from streammega.dataset.mock import MockStore
from streammega.storage import ObjectInfo, open_store
from streammega.storage.store import NotListedBetween
from tools.bench.object_server import running

FOLDER = "data/web/"
OBJECTS = 2 * PART + 80


class Listings(MockStore):
    """Keys of a bucket; counts listings of parts, and of all."""

    def __init__(self, names: set[str]) -> None:
        others = ["data/w", "data/web", "data/web.bin", "data/web0", "data/webs/x", "data/zz"]
        self.keys = sorted([*(FOLDER + name for name in names), *others])
        self.parts = 0
        self.plain = 0
        self.tells_none = False

    def list_between(self, after: str, until: str, most: int) -> list[ObjectInfo] | None:
        """As of `ListsBetween`."""
        self.parts += 1
        if self.tells_none:
            return None
        found = self._between(after, until)
        if len(found) > most:
            raise NotListedBetween
        return found

    def _between(self, after: str, until: str) -> list[ObjectInfo]:
        keys = self.keys[bisect.bisect_right(self.keys, after) :]
        return [ObjectInfo(key=key, size=1, etag=key) for key in keys if key < until]

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """All of a folder."""
        assert not recursive
        self.plain += 1
        found = [info for info in self._between(prefix, "z") if info.key.startswith(prefix)]
        return [info for info in found if "/" not in info.key[len(prefix) :]]


NAMES = st.text(alphabet="ab/09.-\u00e9\U0001f600\U0010ffff", min_size=1, max_size=5)
SETS = st.sets(NAMES.filter(lambda name: not name.startswith("/")), max_size=60)


@settings(max_examples=100, deadline=None)
@given(before=SETS, names=SETS, part=st.integers(1, 9))
def test_whatever_a_folder_was_before_all_of_it_is_listed(
    tmp_path_factory: pytest.TempPathFactory, before: set[str], names: set[str], part: int
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streammega.dataset.folder_listing.PART", part)
        patch.setattr("streammega.dataset.folder_listing.MOST_IN_PART", 30)
        for there in (before, names, names, names | {"new", "zz"}):
            store = Listings(there)
            assert list_folder(store, FOLDER, cache) == store.list(FOLDER, recursive=False)


@pytest.mark.parametrize(
    "kept",
    [
        b"",
        b"[",
        b'{"a": 1}',
        b"[1, null, {}]",
        b'["data/web/b", "data/web/a", "data/web/a", "data/web/", "data/other/x", "data/web/d/e"]',
        b"\xff\xfe",
        json.dumps(["data/web/a"] * 20_000).encode(),
        b"[" * 100_000,
    ],
)
def test_bounds_that_are_damaged_hide_nothing(tmp_path: Path, kept: bytes) -> None:
    names = {f"{letter}{number}" for letter in "abc" for number in range(900)}
    expected = Listings(names).list(FOLDER, recursive=False)
    list_folder(Listings(names), FOLDER, tmp_path)
    (path,) = (tmp_path / "idx").glob("listing-*.json")
    sound = path.read_bytes()
    path.write_bytes(kept)
    for _ in range(2):
        assert list_folder(Listings(names), FOLDER, tmp_path) == expected
    assert path.read_bytes() == sound


def test_folders_within_are_tried_once(tmp_path: Path) -> None:
    names = {f"a{number:04d}" for number in range(OBJECTS)}
    list_folder(Listings(names), FOLDER, tmp_path)
    counts = []
    for _ in range(3):
        store = Listings(names | {"a0500/deeper"})
        assert len(list_folder(store, FOLDER, tmp_path)) == OBJECTS
        counts.append((store.parts, store.plain))
    assert counts == [(3, 1), (0, 1), (0, 1)]


def listings(tmp_path: Path, names: set[str], *, tells_none: bool = False) -> tuple[int, int]:
    """Listings of parts, and of all, that an open of a folder takes; it is all there is."""
    store = Listings(names)
    store.tells_none = tells_none
    listed = list_folder(store, FOLDER, tmp_path)
    counts = (store.parts, store.plain)
    assert listed == store.list(FOLDER, recursive=False)
    return counts


def test_a_store_that_told_nothing_once_is_asked_for_parts_again(tmp_path: Path) -> None:
    names = {f"a{number:04d}" for number in range(OBJECTS)}
    assert listings(tmp_path, names) == (0, 1)
    parts, whole = listings(tmp_path, names, tells_none=True)  # as in a forked process
    assert parts
    assert whole == 1
    assert listings(tmp_path, names) == (3, 0)


def test_a_folder_that_was_a_page_for_a_while_is_listed_by_parts_again(tmp_path: Path) -> None:
    names = {f"a{number:04d}" for number in range(OBJECTS)}
    listings(tmp_path, names)
    for there in ({"a0001"}, names | {"a0500/deeper"}, {"a0001"}):
        listings(tmp_path, there)
        listings(tmp_path, there)
    assert listings(tmp_path, names) == (0, 1)
    assert listings(tmp_path, names) == (3, 0)


def test_parts_that_did_not_serve_are_tried_again_after_days(tmp_path: Path) -> None:
    names = {f"a{number:04d}" for number in range(OBJECTS)}
    for there in (names, names | {"a0500/deeper"}):
        listings(tmp_path, there)
    (path,) = (tmp_path / "idx").glob("listing-*.json")
    assert path.read_text() == "[]"
    assert listings(tmp_path, names) == (0, 1)
    some_days = 86_400 * WHOLE_DAYS - 60
    os.utime(path, (0, time.time() - some_days))
    assert listings(tmp_path, names) == (0, 1)
    os.utime(path, (0, path.stat().st_mtime - 120))
    assert listings(tmp_path, names) == (0, 1)
    assert listings(tmp_path, names) == (3, 0)


def test_of_a_small_folder_nothing_is_kept(tmp_path: Path) -> None:
    list_folder(Listings({"a", "b"}), FOLDER, tmp_path)
    assert not (tmp_path / "idx").exists()


def test_without_room_for_bounds_a_folder_is_listed_as_ever(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    store = Listings({f"a{number:04d}" for number in range(OBJECTS)})
    for _ in range(2):
        assert len(list_folder(store, FOLDER, tmp_path / "cache")) == OBJECTS


def test_bounds_that_nobody_used_for_long_are_removed(tmp_path: Path) -> None:
    names = {f"a{number:04d}" for number in range(OBJECTS)}
    list_folder(Listings(names), FOLDER, tmp_path)
    (path,) = (tmp_path / "idx").glob("listing-*.json")
    os.utime(path, (0, 0))
    list_folder(Listings(names), FOLDER, tmp_path)
    assert path.stat().st_mtime > 0, "it was used"
    os.utime(path, (0, 0))
    store = Listings(set())
    store.keys = [f"other/{name}" for name in sorted(names)]
    list_folder(store, "other/", tmp_path)
    assert not path.exists()


@pytest.mark.parametrize("change", ["nothing", "a folder", "an empty object", "more", "another"])
def test_a_folder_of_a_bucket_is_listed_alike(tmp_path: Path, change: str) -> None:
    folder = tmp_path / "objects" / "b" / "web"
    folder.mkdir(parents=True)
    for number in range(OBJECTS):
        (folder / f"p{number:05d}.bin").write_bytes(b"x" * (1 + number % 3))
    (tmp_path / "objects" / "b" / "web.bin").write_bytes(b"x")
    with running(tmp_path / "objects") as server:
        storage: Any = StorageConfig(storage_options=server.storage_options)
        store, key = open_store("s3://b/web/", storage)
        assert list_folder(store, key, tmp_path) == store.list(key, recursive=False)
        if change == "a folder":
            (folder / "p00700").mkdir()
            (folder / "p00700" / "x.bin").write_bytes(b"x")
        elif change == "an empty object":
            (folder / "p01200.idx").touch()
        elif change == "more":
            for number in range(90):
                (folder / f"p00960.{number}").write_bytes(b"x")
        elif change == "another":
            (folder / "p00960.bin").write_bytes(b"another")
        before = server.counts()["lists"]
        listed = list_folder(store, key, tmp_path)
        lists = server.counts()["lists"] - before
        assert lists == {"nothing": 3, "another": 3, "more": 4}.get(change, 6)
        assert listed == store.list(key, recursive=False)
        server.behave(error_share=0.1)
        assert list_folder(store, key, tmp_path) == listed
