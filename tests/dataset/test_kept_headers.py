"""A folder or a blend of many pairs is opened a second time by listings alone, as long as it is the
same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import DataConfig, StorageConfig
from streammega.dataset.headers import (
    MAX_SMALL_REQUESTS,
    content_of,
    read_bodies,
    read_datasets,
    rows_of,
    rows_of_headers,
)
from streammega.dataset.idx import encode_index, parse_header, parse_index
from streammega.dataset.shard import Shard
from streammega.errors import CacheError, FormatError, ObjectNotFoundError
from streammega.order.epoch_layout import FilePart
from streammega.samples.stream_datasets import open_datasets
from streammega.storage import Buffer
from tests.support.builders import write_lengths, write_manifest
from tests.support.kept_files import save_kept
from tools.bench.object_server import Running, running

PAIRS = 12
BLEND = [f"s3://b/web/p{number:02d}" for number in range(PAIRS)]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, Path]]:
    """A folder of a few pairs, which are enough here."""
    monkeypatch.setattr("streammega.dataset.headers.MIN_KEPT_HEADERS", PAIRS)
    folder = tmp_path / "objects" / "b" / "web"
    for number in range(PAIRS):
        write_lengths(str(folder / f"p{number:02d}.bin"), [10 + number, 20])
    with running(tmp_path / "objects") as server:
        yield server, folder


def opened(server: Running, cache: Path) -> tuple[list[tuple[int, int, str]], int]:
    """(sequences, tokens, dtype) of each pair, and how many requests that took, listings apart."""
    before = server.counts()["requests"]
    storage = StorageConfig(storage_options=server.storage_options)
    (pairs,) = read_datasets(["s3://b/web/"], storage.changed(cache_dir=cache))
    bounds = [(pair.num_sequences, pair.num_tokens, str(pair.dtype)) for pair in pairs]
    return bounds, server.counts()["requests"] - before


@pytest.mark.guarantee("8-stream-order")
def test_opened_again_it_takes_a_listing_and_one_look_at_an_etag(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    first, requests = opened(server, tmp_path / "cache")
    assert requests == PAIRS + 3, "one of each index, and of the tokens of the first and the last"
    again, requests = opened(server, tmp_path / "cache")
    assert requests == 1
    assert first == again == [(2, 30 + number, "uint16") for number in range(PAIRS)]


@pytest.mark.guarantee("8-stream-order")
@pytest.mark.parametrize("change", ["another", "one more", "one less"])
def test_a_folder_that_changed_is_read_anew_and_its_former_headers_are_removed(
    served: tuple[Running, Path], tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = served
    monkeypatch.setattr("streammega.dataset.headers.MIN_KEPT_HEADERS", PAIRS - 1)
    before, _ = opened(server, tmp_path / "cache")
    if change == "one less":
        for suffix in (".bin", ".idx"):
            (folder / f"p11{suffix}").unlink()
    else:
        name = "p05" if change == "another" else "p99"
        write_lengths(str(folder / f"{name}.bin"), [7, 8, 9], np.int32)
    after, _ = opened(server, tmp_path / "cache")
    expected = list(before)
    if change == "another":
        expected[5] = (3, 24, "int32")
    elif change == "one more":
        expected.append((3, 24, "int32"))
    else:
        expected.pop()
    assert after == expected
    kept = list((tmp_path / "cache" / "idx").glob("headers-*"))
    assert sorted(path.suffix for path in kept) == [".lock", ".npy"]


@pytest.mark.guarantee("8-stream-order")
def test_headers_that_nobody_used_for_long_are_removed(
    served: tuple[Running, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = served
    monkeypatch.setattr("streammega.dataset.headers.MIN_KEPT_HEADERS", PAIRS - 1)
    idx = tmp_path / "cache" / "idx"
    for names in (BLEND, BLEND[1:]):
        opened_blend(server, tmp_path / "cache", "1,0,0", names)
    kept = sorted(idx.glob("headers-*"))
    assert len(kept) == 4, "both are in use: blends of different runs"
    for path in kept:
        os.utime(path, (0, 0))
    opened_blend(server, tmp_path / "cache", "1,0,0", BLEND)
    assert sorted(idx.glob("headers-*")) == kept, "nothing is looked through without need"
    write_lengths(str(folder / "q.bin"), [7, 8, 9])
    opened(server, tmp_path / "cache")
    left = [path for path in kept if path.exists()]
    assert [path.suffix for path in left] == [".npy"], "what was used just now"
    _, requests = opened_blend(server, tmp_path / "cache", "1,0,0", BLEND)
    assert requests == 1


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


def test_an_empty_index_is_named_like_any_other_that_is_cut_short(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, folder = served
    (folder / "p03.idx").write_bytes(b"")
    with pytest.raises(FormatError, match=r"p03\.idx: 0 bytes are fewer"):
        opened(server, tmp_path / "cache")


@pytest.mark.guarantee("8-stream-order")
def test_of_very_many_indices_only_some_are_in_memory_at_once(
    served: tuple[Running, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = served
    expected, _ = opened(server, tmp_path / "cache")
    expected_parts, _ = opened_blend(server, tmp_path / "cache", "60,40,0")
    read_together = []

    def read(files: Sequence[Shard], readers: int) -> list[Buffer]:
        read_together.append(len(files))
        return read_bodies(files, readers)

    monkeypatch.setattr("streammega.dataset.headers.MAX_SHARDS_AT_ONCE", 5)
    monkeypatch.setattr("streammega.dataset.headers.read_bodies", read)
    assert opened(server, tmp_path / "another") == (expected, PAIRS + 3)
    assert read_together == [5, 5, 2]
    assert opened_blend(server, tmp_path / "third", "60,40,0") == (expected_parts, 2 * PAIRS + 1)
    (folder / "p11.idx").write_bytes((folder / "p11.idx").read_bytes()[:-8])
    with pytest.raises(FormatError, match=r"p11\.idx"):
        opened(server, tmp_path / "another")


@pytest.mark.guarantee("8-stream-order")
def test_of_several_folders_no_more_requests_are_sent_at_once_than_of_one(
    served: tuple[Running, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = served
    for number in range(3):
        shutil.copytree(folder, folder.parent / f"other{number}")
    most_readers = []

    def read(files: Sequence[Shard], readers: int) -> list[Buffer]:
        most_readers.append(readers)
        return read_bodies(files, readers)

    monkeypatch.setattr("streammega.dataset.headers.read_bodies", read)
    names = ["s3://b/web/", *(f"s3://b/other{number}/" for number in range(3))]
    storage = StorageConfig(storage_options=server.storage_options)
    config = DataConfig(
        blend=names,
        sequence_length=4,
        order="stream",
        storage=storage.changed(cache_dir=tmp_path / "cache"),
    )
    open_datasets(names, "1,0,0", "train", config)
    assert sum(most_readers) == MAX_SMALL_REQUESTS
    most_readers.clear()
    open_datasets(
        names[:1],
        "1,0,0",
        "train",
        replace(config, storage=config.storage.changed(cache_dir=tmp_path / "alone")),
    )
    assert most_readers == [MAX_SMALL_REQUESTS]


@pytest.mark.parametrize("are_small", [True, False])
def test_what_was_read_is_not_held_for_pointers_where_it_is_much(
    served: tuple[Running, Path], tmp_path: Path, are_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = served
    if not are_small:  # then headers are read one by one
        monkeypatch.setattr("streammega.dataset.headers.MAX_WHOLE_INDEX_BYTES", 0)
    expected, requests = opened_blend(server, tmp_path / "cache", "60,40,0")
    assert requests == 2 * PAIRS + 1
    monkeypatch.setattr("streammega.dataset.headers.MAX_KEPT_BYTES", -1)
    parts, requests = opened_blend(server, tmp_path / "another", "60,40,0")
    assert parts == expected
    assert requests == 2 * PAIRS + 1 + PAIRS


def test_headers_that_are_not_those_of_the_shards_are_an_error_that_names_the_file(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    opened(server, tmp_path / "cache")
    (kept,) = (tmp_path / "cache" / "idx").glob("headers-*.npy")
    rows: Any = np.load(kept)
    for damaged in (rows[:-1], rows + 1, rows.astype(np.int32)):
        save_kept(kept, damaged)
        with pytest.raises(CacheError, match=kept.name):
            opened(server, tmp_path / "cache")


def test_without_room_for_them_headers_are_read_each_time(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    (tmp_path / "cache").write_text("a file where a folder should be")
    for _ in range(2):
        bounds, requests = opened(server, tmp_path / "cache")
        assert (len(bounds), requests) == (PAIRS, PAIRS + 3)


def opened_blend(
    server: Running, cache: Path, split: str, blend: Sequence[str] = BLEND
) -> tuple[list[Any], int]:
    """The parts of each pair of a blend in a split, and how many requests that took."""
    before = server.counts()["requests"]
    config = DataConfig(
        blend=list(blend),
        split=split,
        sequence_length=4,
        order="stream",
        storage=StorageConfig(storage_options=server.storage_options, cache_dir=cache),
    )
    opened = open_datasets(blend, split, "train", config)
    parts = [(dataset.parts.parts, dataset.parts.itemsize) for dataset in opened]
    return parts, server.counts()["requests"] - before


@pytest.mark.parametrize("split", ["1,0,0", "60,40,0"])
def test_a_blend_of_many_pairs_is_opened_again_without_a_read_of_each(
    served: tuple[Running, Path], tmp_path: Path, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, folder = served
    pointers = 0 if split == "1,0,0" else PAIRS  # each is cut at its second sequence
    first, requests = opened_blend(server, tmp_path / "cache", split)
    assert requests == 2 * PAIRS + 1, "one of each index, and of the tokens of each"
    again, requests = opened_blend(server, tmp_path / "cache", split)
    assert requests == pointers + 1
    assert first == again
    with monkeypatch.context() as unkept:
        unkept.setattr("streammega.dataset.headers.MIN_KEPT_HEADERS", PAIRS + 1)
        assert opened_blend(server, tmp_path / "cache", split)[0] == first
    write_lengths(str(folder / "p05.bin"), [70, 8, 9], np.int32)
    after, _ = opened_blend(server, tmp_path / "cache", split)
    tokens = 87 if split == "1,0,0" else 78
    assert after[5] == ([FilePart(file=0, start=0, tokens=tokens)], 4)
    assert after[:5] + after[6:] == first[:5] + first[6:]


def test_a_folder_is_blended_with_datasets_that_are_opened_in_other_ways(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, folder = served
    write_lengths(str(folder.parent / "own" / "a.bin"), [40, 50])
    write_manifest(folder.parent / "own" / "a", ["a"])
    write_lengths(str(folder.parent / "other" / "b.bin.zst"), [60])
    write_lengths(str(tmp_path / "near" / "c"), [70])
    storage = StorageConfig(storage_options=server.storage_options)
    names = ["s3://b/own/a", "s3://b/web/", "s3://b/other/b.bin.zst", str(tmp_path / "near" / "c")]
    for _ in range(2):
        datasets = read_datasets(names, storage.changed(cache_dir=tmp_path / "cache"))
        assert [sum(shard.num_tokens for shard in shards) for shards in datasets] == [
            90,
            sum(30 + number for number in range(PAIRS)),
            60,
            70,
        ]
        assert len({content_of(shards) for shards in datasets}) == 4


def test_a_blend_with_a_pair_that_is_cut_short_says_so_by_the_dataset(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, folder = served
    tokens = folder / "p03.bin"
    tokens.write_bytes(tokens.read_bytes()[:-8])
    with pytest.raises(FormatError, match=r"p03\.idx: its sequences end at byte"):
        opened_blend(server, tmp_path / "cache", "1,0,0")


def is_sound(body: bytes, token_bytes: int) -> list[int] | None:
    """The row of an `.idx` by the reader of one; None: it says what is wrong."""
    try:
        header = parse_header(body, len(body), "x.idx")
        arrays = parse_index(memoryview(body), "x.idx")
    except FormatError:
        return None
    end = 0
    if header.sequence_count:
        length = int(arrays.sequence_lengths[-1])
        offset = int(arrays.sequence_offsets[-1])
        end = offset + length * header.dtype.itemsize if min(length, offset) >= 0 else -1
    return rows_of_headers([header])[0].tolist() if end == token_bytes else None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_many_indices_looked_at_together_are_sound_or_not_as_one_by_one(
    data: st.DataObject,
) -> None:
    bodies = []
    sizes = []
    for _ in range(data.draw(st.integers(1, 5))):
        lengths = np.array(data.draw(st.lists(st.integers(0, 9), max_size=4)), np.int32)
        dtype: np.dtype[Any] = np.dtype(data.draw(st.sampled_from(["uint16", "int32"])))
        modes = np.zeros(len(lengths), np.int8) if data.draw(st.booleans()) else None
        num_bounds = data.draw(st.sampled_from([len(lengths) + 1, len(lengths) + 1, 0]))
        bounds = np.arange(num_bounds, dtype=np.int64)
        body = bytearray(b"".join(encode_index(dtype, lengths, bounds, modes)))
        for _ in range(data.draw(st.integers(0, 2))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.sampled_from([0, 0, 0, 1, 20]))
        bodies.append(bytes(body[: len(body) - cut]))
        off = data.draw(st.sampled_from([0, 0, 0, 2, -2]))
        sizes.append(max(0, int(lengths.sum()) * dtype.itemsize + off))
    rows, sound = rows_of([memoryview(body) for body in bodies], sizes)
    expected = [is_sound(body, size) for body, size in zip(bodies, sizes, strict=True)]
    assert sound.tolist() == [row is not None for row in expected]
    assert [row for row in expected if row] == rows[sound].tolist()


def test_a_server_that_answers_ranges_with_all_is_read_by_the_other_transport(
    served: tuple[Running, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = served
    expected, _ = opened(server, tmp_path / "cache")
    # s3fs asks for credentials, which no test is to look for on the machine
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    server.behave(plain_200=True)
    found, _ = opened(server, tmp_path / "other")
    assert found == expected


def test_small_indices_are_read_through_faults(
    served: tuple[Running, Path], tmp_path: Path
) -> None:
    server, _ = served
    expected, _ = opened(server, tmp_path / "cache")
    server.behave(error_share=0.2, truncate_share=0.2, reset_share=0.1)
    found, _ = opened(server, tmp_path / "other")
    assert found == expected
