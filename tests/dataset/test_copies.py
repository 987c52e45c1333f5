"""Stretches of files copied into one by several threads: the bytes and checksums of one writer, or
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import IndexedDataset
from streammega.convert import ProgressObserver, convert
from streammega.dataset import checksums
from streammega.dataset.checksums import ChecksummedWriter, checksums_of
from streammega.errors import ObjectChangedError, ShortReadError, StorageError
from streammega.storage.backends import local
from streammega.storage.backends.local import FileRange, LocalStore, LocalWriter
from streammega.storage.seekable_zstd import FrameWriter
from streammega.storage.store import Bytes
from tests.support.builders import write_random_pair

PART = 1000
"""Bytes of a checksum, and so of what one thread copies, in these tests."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "CHECK_BYTES", PART)
    monkeypatch.setattr(checksums, "WRITE_BACK_BYTES", PART // 2)
    monkeypatch.setattr(local, "COPY_BYTES", 300)


def file_of(path: Path, size: int) -> bytes:
    content = np.random.default_rng(size).bytes(size)
    path.write_bytes(content)
    return content


def whole(path: Path, etag: str = "") -> FileRange:
    return FileRange(path=str(path), start=0, stop=path.stat().st_size, etag=etag)


def writer_of(path: Path) -> ChecksummedWriter:
    return ChecksummedWriter(LocalStore().open_writer(str(path)))


def copying_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "streammega-copy" in thread.name]


ranges_of_files = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2500), st.integers(0, 2500)), max_size=6
)


@pytest.mark.guarantee("several-threads-copy")
@given(
    before=st.integers(0, 2 * PART),
    ranges=ranges_of_files,
    behind=st.integers(0, 2 * PART),
    threads=st.integers(1, 3),
)
@settings(max_examples=40)
def test_files_copied_by_threads_are_the_bytes_and_checksums_of_one_writer(
    before: int, ranges: list[tuple[int, int, int]], behind: int, threads: int
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        contents = [file_of(folder / f"source{number}", 5000) for number in range(3)]
        first = b"<" * before
        last = b">" * behind
        writer = writer_of(folder / "out")
        writer.write(first)
        wanted = []
        expected = first
        for number, start, size in ranges:
            path = str(folder / f"source{number}")
            wanted.append(FileRange(path=path, start=start, stop=start + size))
            expected += contents[number][start : start + size]
        assert sum(writer.write_files(wanted, threads)) == len(expected) - before
        writer.write(last)
        expected += last
        writer.commit()
        assert (folder / "out").read_bytes() == expected
    assert (writer.size, writer.checksums) == (len(expected), checksums_of(expected))


@pytest.mark.parametrize("count", [0, 1, PART])
def test_items_of_several_bytes_are_counted_in_bytes(tmp_path: Path, count: int) -> None:
    items = np.arange(count, dtype="<i4")
    writer = writer_of(tmp_path / "out")
    writer.write(b"<")
    writer.write(items.data)
    compressed = FrameWriter(LocalStore().open_writer(str(tmp_path / "frames")))
    compressed.write(items.data)
    expected = b"<" + items.tobytes()
    assert (writer.size, writer.checksums) == (len(expected), checksums_of(expected))
    assert checksums_of(items.data) == checksums_of(items.tobytes())
    writer.commit()
    assert (tmp_path / "out").read_bytes() == expected
    compressed.abort()
    bare = LocalStore().open_writer(str(tmp_path / "bare"))
    bare.write(items.data)
    assert bare.reserve(0) == items.nbytes
    bare.abort()


@pytest.mark.guarantee("several-threads-copy")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_that_fails_or_is_given_up_leaves_no_file_and_no_thread(
    tmp_path: Path, threads: int
) -> None:
    file_of(tmp_path / "source", 20 * PART)
    opened = LocalStore().info(str(tmp_path / "source")).etag
    sound = whole(tmp_path / "source", opened)

    def copied(wanted: FileRange) -> Iterator[int]:
        (tmp_path / "out").mkdir(exist_ok=True)
        return writer_of(tmp_path / "out" / "file").write_files([sound, wanted], threads)

    given_up = copied(sound)
    next(given_up)
    with closing(given_up):  # type: ignore[type-var]
        pass
    ended = FileRange(path=sound.path, start=0, stop=sound.stop + 1)
    with pytest.raises(ShortReadError, match="source"):
        list(copied(ended))
    with pytest.raises(ObjectChangedError, match="source"):
        list(copied(FileRange(path=sound.path, start=0, stop=1, etag="of another")))
    with pytest.raises(StorageError, match="missing"):
        list(copied(FileRange(path=str(tmp_path / "missing"), start=0, stop=1)))
    assert list((tmp_path / "out").iterdir()) == []
    assert copying_threads() == []


@pytest.mark.guarantee("several-threads-copy")
def test_a_full_disk_is_told_by_whichever_thread_met_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(tmp_path / "source", 20 * PART)

    def full(self: LocalWriter, offset: int, data: object) -> None:
        raise StorageError("no space left on the device")

    monkeypatch.setattr(LocalWriter, "write_at", full)
    with pytest.raises(StorageError, match="no space"):
        list(writer_of(tmp_path / "out").write_files([whole(tmp_path / "source")], 2))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.guarantee("several-threads-copy")
def test_a_merge_by_several_threads_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [str(tmp_path / f"in{number}") for number in range(3)]
    for number, name in enumerate(names):
        write_random_pair(name, seed=number)
    convert([names[0]], str(tmp_path / "several"), shard_bytes=3000, workers=1)
    inputs = [*names, str(tmp_path / "several")]
    convert(inputs, str(tmp_path / "one"), workers=1)
    placed = []
    write_at = LocalWriter.write_at

    def noting(self: LocalWriter, offset: int, data: Bytes) -> None:
        placed.append(threading.current_thread().name)
        write_at(self, offset, data)

    monkeypatch.setattr(LocalWriter, "write_at", noting)
    convert(inputs, str(tmp_path / "many"), workers=3)
    assert len(placed) > 10
    for suffix in (".bin", ".idx"):
        one = (tmp_path / f"one{suffix}").read_bytes()
        assert (tmp_path / f"many{suffix}").read_bytes() == one
    manifests = [(tmp_path / f"{name}.manifest.json").read_text() for name in ("one", "many")]
    assert manifests[0].replace('"one"', '"many"') == manifests[1]


@pytest.mark.guarantee("several-threads-copy")
def test_a_merge_that_is_interrupted_while_threads_copy_leaves_nothing_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    write_random_pair(str(tmp_path / "in"), count=500)
    (tmp_path / "out").mkdir()
    calls = 0

    class Interrupt(ProgressObserver):
        def advance(self, size: int, tokens: int = 0) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(
            [str(tmp_path / "in")], str(tmp_path / "out" / "o"), workers=3, progress=Interrupt()
        )
    assert copying_threads() == []
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    convert([str(tmp_path / "in")], str(tmp_path / "out" / "o"), workers=3)
    assert len(IndexedDataset(str(tmp_path / "out" / "o"))) == len(
        IndexedDataset(str(tmp_path / "in"))
    )
