"""A folder of many pairs is opened a second time by a listing alone, as long as it is the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import StorageConfig
from streammega.dataset.headers import read_dataset
from streammega.errors import CacheError, FormatError, ObjectNotFoundError
from tests.dataset.test_opening import write
from tools.bench.object_server import Running, running

PAIRS = 12


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, Path]]:
    """A folder of a few pairs, which are enough here."""
    monkeypatch.setattr("streammega.dataset.kept_headers.KEEP_SHARDS", PAIRS)
    folder = tmp_path / "objects" / "b" / "web"
    for number in range(PAIRS):
        write(str(folder / f"p{number:02d}.bin"), [10 + number, 20])
    with running(tmp_path / "objects") as server:
        yield server, folder


def opened(server: Running, cache: Path) -> tuple[list[tuple[int, int, str]], int]:
    """(sequences, tokens, dtype) of each pair, and how many requests that took, listings apart."""
    before = server.counts()["requests"]
    storage = StorageConfig(storage_options=server.storage_options)
    pairs = read_dataset("s3://b/web/", storage, cache)
    bounds = [(pair.num_sequences, pair.num_tokens, str(pair.dtype)) for pair in pairs]
    return bounds, server.counts()["requests"] - before


def test_opened_again_it_takes_a_listing_and_one_look_at_an_etag(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    first, requests = opened(server, tmp_path / "cache")
    assert requests == PAIRS + 1
    again, requests = opened(server, tmp_path / "cache")
    assert requests == 1
    assert first == again == [(2, 30 + number, "uint16") for number in range(PAIRS)]


@pytest.mark.parametrize("change", ["another", "one more", "one less"])
def test_a_folder_that_changed_is_read_anew_and_its_former_headers_are_removed(
    served: tuple[Running, Path], tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = served
    monkeypatch.setattr("streammega.dataset.kept_headers.KEEP_SHARDS", PAIRS - 1)
    before, _ = opened(server, tmp_path / "cache")
    if change == "one less":
        for suffix in (".bin", ".idx"):
            (folder / f"p11{suffix}").unlink()
    else:
        name = "p05" if change == "another" else "p99"
        write(str(folder / f"{name}.bin"), [7, 8, 9], np.int32)
    after, _ = opened(server, tmp_path / "cache")
    expected = list(before)
    if change == "another":
        expected[5] = (3, 24, "int32")
    elif change == "one more":
        expected.append((3, 24, "int32"))
    else:
        expected.pop()
    assert after == expected
    kept = list((tmp_path / "cache" / "idx").glob("headers-*.npy"))
    assert len(kept) == (1 if change == "another" else 2), "those of other names may be another's"


def test_what_is_cut_short_is_an_error_each_time_and_keeps_nothing(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, folder = served
    tokens = folder / "p03.bin"
    tokens.write_bytes(tokens.read_bytes()[:-8])
    for _ in range(2):
        with pytest.raises(FormatError, match=r"p03\.idx: its sequences end at byte"):
            opened(server, tmp_path / "cache")
    tokens.unlink()
    with pytest.raises(ObjectNotFoundError, match="p03"):
        opened(server, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "idx").glob("*.npy"))


def test_headers_that_are_not_those_of_the_shards_are_an_error_that_names_the_file(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    opened(server, tmp_path / "cache")
    (kept,) = (tmp_path / "cache" / "idx").glob("headers-*.npy")
    rows: Any = np.load(kept)
    for damaged in (rows[:-1], rows + 1, rows.astype(np.int32)):
        np.save(kept, damaged)
        with pytest.raises(CacheError, match=kept.name):
            opened(server, tmp_path / "cache")


def test_without_room_for_them_headers_are_read_each_time(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    (tmp_path / "cache").write_text("a file where a folder should be")
    for _ in range(2):
        bounds, requests = opened(server, tmp_path / "cache")
        assert (len(bounds), requests) == (PAIRS, PAIRS + 1)
