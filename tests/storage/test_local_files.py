"""Local files that change under a run: what is read is what was opened, or an error that names the
file. Never a crash.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import io
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import (
    DataConfig,
    IndexedDataset,
    IndexedDatasetWriter,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
    build_datasets,
)
from streammega.errors import ConfigError, ObjectChangedError, StorageError
from streammega.storage import open_store, retry
from streammega.storage.backends import local
from streammega.storage.backends.local import (
    WRITE_BACK_BYTES,
    LocalStore,
    PreadStore,
    file_system_of,
    map_file,
)
from streammega.storage.object_ops import move_or_copy
from streammega.storage.store import copy_into
from tests.support.processes import launch
from tests.support.typed import map_style, tokens

CHANGES: dict[str, Callable[[Path], object]] = {
    "made smaller": lambda path: replace(path, path.read_bytes()[: path.stat().st_size // 3]),
    "emptied": lambda path: path.write_bytes(b""),
    "made anew with the same size": lambda path: replace(path, bytes(path.stat().st_size)),
}


def replace(path: Path, data: bytes) -> None:
    """As converters do: a file of its own, renamed over the old one."""
    beside = path.with_suffix(".beside")
    beside.write_bytes(data)
    os.utime(beside, ns=(0, path.stat().st_mtime_ns + 1_000_000))  # however coarse the clock is
    os.replace(beside, path)


def write_shard(name: Path | str, value: int, tokens: int = 40_000) -> str:
    with IndexedDatasetWriter(str(name), np.uint16) as writer:
        for _ in range(20):
            writer.add_item(np.full(tokens // 20, value, np.uint16))
            writer.end_document()
    return str(name)


def outcome(code: str, folder: Path, *arguments: str) -> str:
    """What a process of its own printed; a crash of it is told apart from an error."""
    family = launch(folder, 1, ["-c", code, str(folder), *arguments])
    codes = family.ended(0, within=120)
    printed = family.log(0)
    family.close()
    assert codes == [0], f"rc {codes}: {printed[-2000:]}"
    return printed.strip()


CHANGED_BEFORE_THE_FIRST_BATCH = """
import sys
from pathlib import Path
from streammega import DataConfig, StreamLoader
from streammega.errors import StorageError
from tests.storage.test_local_files import CHANGES, write_shard

folder, order = Path(sys.argv[1]), sys.argv[2]
for suffix in ("", ".tar", ".bin.zst"):
    for number, (name, change) in enumerate(CHANGES.items()):
        shard = write_shard(folder / f"shard{number}{suffix}", 5)
        config = DataConfig(blend=[shard], sequence_length=512, order=order, num_samples=(60, 0, 0))
        loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8, dp_rank=0, dp_size=1)
        stored = Path(shard if suffix else f"{shard}.bin")
        change(stored)
        try:
            for batch in loader:
                assert (batch["tokens"] == 5).all(), "memory that is none of the file's"
            print(name, "no error")
        except StorageError as error:
            print(name, type(error).__name__, stored.name in str(error))
"""


@pytest.mark.guarantee("mapped-file-opened")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_file_that_changed_before_it_is_mapped_is_an_error_that_names_it(
    tmp_path: Path, order: str
) -> None:
    printed = outcome(CHANGED_BEFORE_THE_FIRST_BATCH, tmp_path, order)
    changed = [f"{name} ObjectChangedError True" for name in CHANGES]
    assert printed.splitlines() == changed * 3


def test_a_loader_made_later_in_the_same_process_reads_the_file_that_is_there_then(
    tmp_path: Path,
) -> None:
    for value in (5, 7):
        shard = write_shard(tmp_path / "shard", value)
        config = DataConfig(blend=[shard], sequence_length=64, order="stream")
        with StreamLoader(
            config, micro_batch_size=2, global_batch_size=2, dp_rank=0, dp_size=1
        ) as loader:
            assert (next(iter(loader))["tokens"] == value).all()


def test_a_worker_that_maps_the_file_anew_notices_that_it_changed(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "shard", 5)
    config = DataConfig(blend=[shard], sequence_length=64, order="stream")
    dataset = StreamingDataset(
        config, micro_batch_size=2, global_batch_size=2, dp_rank=0, dp_size=1
    )
    assert (next(iter(dataset))["tokens"] == 5).all()
    sent = pickle.dumps(dataset)
    CHANGES["made smaller"](Path(f"{shard}.bin"))
    with pytest.raises(ObjectChangedError, match=r"shard\.bin"):
        next(iter(pickle.loads(sent)))  # noqa: S301


MORE_SHARDS_THAN_DESCRIPTORS = """
import resource, sys
from pathlib import Path
from streammega import DataConfig, StorageConfig, StreamLoader
from tests.storage.test_local_files import write_shard

for number in range(150):
    write_shard(Path(sys.argv[1]) / "data" / f"{number:03d}", number, tokens=400)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
for order in ("stream", "megatron"):
    config = DataConfig(blend=[f"{sys.argv[1]}/data/"], sequence_length=16, order=order, num_samples=(3000, 0, 0),
                        storage=StorageConfig(cache_dir=Path(sys.argv[1]) / "cache"))
    with StreamLoader(config, micro_batch_size=100, global_batch_size=100, dp_rank=0, dp_size=1) as loader:
        print(order, len({int(token) for batch in loader for token in batch["tokens"].reshape(-1)}))
"""


def test_more_shards_than_there_may_be_open_files_are_read(tmp_path: Path) -> None:
    assert outcome(MORE_SHARDS_THAN_DESCRIPTORS, tmp_path).splitlines() == [
        "stream 150",
        "megatron 150",
    ]


class TestViews:
    """What the local store maps."""

    def test_a_file_is_mapped_once_and_again_when_it_is_another(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"old")
        store = LocalStore()
        key = str(path)
        etag = store.info(key).etag
        first = store.view(key, etag)
        assert store.view(key, etag) is first
        assert store.view(key) is first
        replace(path, b"new")
        assert bytes(store.view(key, etag)) == b"old", "mapped, and still what was opened"
        assert bytes(store.view(key)) == b"new"
        with pytest.raises(ObjectChangedError, match="file: the object was replaced"):
            store.view(key, etag)

    @pytest.mark.guarantee("mapped-files-hold")
    def test_a_thousand_mapped_files_need_no_descriptors(self, tmp_path: Path) -> None:
        store = LocalStore()
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1000):
            (tmp_path / str(number)).write_bytes(b"x")
            assert bytes(store.view(str(tmp_path / str(number)))) == b"x"
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_move_to_another_disk_that_fails_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    (tmp_path / "source").mkdir()
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match="source: Is a directory"):
        move_or_copy(str(tmp_path / "source"), str(tmp_path / "target"), StorageConfig())


def test_nothing_is_copied_to_an_array_of_another_size() -> None:
    for out in (np.empty(3, np.uint8), np.empty(8, np.uint8)[::2]):
        with pytest.raises(ValueError, match="4 bytes are to be written"):
            copy_into("key", [(0, 4)], [memoryview(b"abcd")], [out])
    with pytest.raises(ValueError, match="zip"):
        copy_into("key", [(0, 4), (4, 8)], [memoryview(b"abcd")] * 2, [np.empty(4, np.uint8)])


@pytest.mark.guarantee("mapped-file-opened")
@pytest.mark.parametrize("suffix", ["", ".tar", ".bin.zst"])
def test_map_style_reads_are_of_the_file_that_was_opened(tmp_path: Path, suffix: str) -> None:
    shard = write_shard(tmp_path / f"shard{suffix}", 5)
    opened = IndexedDataset(shard)
    used = IndexedDataset(shard)
    config = DataConfig(
        blend=[shard],
        sequence_length=64,
        num_samples=(8, 0, 0),
        storage=StorageConfig(cache_dir=tmp_path / "cache"),
    )
    samples = map_style(build_datasets(config)[0])
    assert (tokens(used, 3) == 5).all()
    stored = Path(shard if suffix else f"{shard}.bin")
    again = Path(write_shard(tmp_path / f"other{suffix}", 7))
    replace(stored, (again if suffix else Path(f"{again}.bin")).read_bytes())
    assert (tokens(used, 3) == 5).all(), "mapped before: what it was"
    for read in (lambda: tokens(opened, 3), lambda: samples[0]["tokens"].numpy()):
        with pytest.raises(ObjectChangedError, match=stored.name):
            read()
    assert (tokens(IndexedDataset(shard), 3) == 7).all(), "opened now: what it is"


@pytest.mark.guarantee("mapped-file-opened")
def test_an_idx_that_changed_is_not_taken_for_the_one_that_was_opened(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "shard", 5)
    dataset = IndexedDataset(shard)
    sent = pickle.dumps(dataset)
    assert len(pickle.loads(sent)) == 20  # noqa: S301  (as a spawned worker does)
    with IndexedDatasetWriter(str(tmp_path / "other"), np.uint16) as writer:
        writer.add_item(np.full(40_000, 5, np.uint16))
        writer.end_document()
    replace(Path(f"{shard}.idx"), (tmp_path / "other.idx").read_bytes())
    with pytest.raises(ObjectChangedError, match=r"shard\.idx"):
        len(pickle.loads(sent))  # noqa: S301


# --- by reads instead of maps --------------------------------------------------------------------------------------------------


def first_batches(shard: str, order: str, storage: StorageConfig, cache: Path) -> list[Any]:
    config = DataConfig(
        blend=[shard],
        sequence_length=512,
        order=order,  # type: ignore[arg-type]
        num_samples=(40, 0, 0),
        storage=storage.changed(cache_dir=cache),
    )
    with StreamLoader(
        config, micro_batch_size=2, global_batch_size=4, dp_rank=0, dp_size=1
    ) as loader:
        return [batch["tokens"].numpy().copy() for batch, _ in zip(loader, range(16), strict=False)]


@pytest.mark.guarantee("local-pread-file")
@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
@pytest.mark.parametrize("suffix", ["", ".tar", ".bin.zst"])
def test_reads_give_the_tokens_that_maps_give(tmp_path: Path, order: str, suffix: str) -> None:
    with IndexedDatasetWriter(str(tmp_path / f"shard{suffix}"), np.uint16) as writer:
        for number in range(50):
            writer.add_item(np.arange(number, number + 700))
            writer.end_document()
    shard = str(tmp_path / f"shard{suffix}")
    mapped = first_batches(shard, order, StorageConfig(), tmp_path / "a")
    assert len(mapped) == 16
    for storage in (
        StorageConfig().tuned(local_io="pread"),
        StorageConfig(cache_max_bytes=1 << 30).tuned(local_io="pread"),
    ):
        np.testing.assert_array_equal(first_batches(shard, order, storage, tmp_path / "b"), mapped)


CUT_WHILE_ITERATING = """
import os, sys
from pathlib import Path
from streammega import DataConfig, StorageConfig, StreamLoader
from streammega.errors import StorageError
from tests.storage.test_local_files import write_shard

shard = write_shard(Path(sys.argv[1]) / "shard", 5, tokens=2_000_000)
storage = StorageConfig(memory_bytes=1 << 20).tuned(local_io="pread")
config = DataConfig(blend=[shard], sequence_length=512, order="stream", storage=storage)
try:
    with StreamLoader(config, micro_batch_size=2, global_batch_size=4, dp_rank=0, dp_size=1) as loader:
        for number, batch in enumerate(loader):
            assert (batch["tokens"] == 5).all()
            if number == 3:
                os.truncate(f"{shard}.bin", 0)
except StorageError as error:
    print(type(error).__name__, "shard.bin" in str(error))
"""


@pytest.mark.guarantee("local-pread-file")
def test_a_file_that_is_cut_while_it_is_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    assert outcome(CUT_WHILE_ITERATING, tmp_path) == "ObjectChangedError True"


@pytest.mark.guarantee("local-pread-file")
def test_errors_of_a_server_behind_a_file_system_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(tmp_path / "shard", 5)
    dataset = IndexedDataset(
        str(tmp_path / "shard"),
        StorageConfig(cache_dir=tmp_path / "cache").tuned(local_io="pread", max_retries=2),
    )
    read = os.preadv
    failures = iter([errno.EIO, errno.ESTALE])

    def failing(*arguments: Any) -> int:
        if number := next(failures, 0):
            raise OSError(number, os.strerror(number))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", failing)
    assert (tokens(dataset, 3) == 5).all()
    failures = iter([errno.EIO] * 99)
    with pytest.raises(StorageError, match=r"shard\.bin: Input/output error"):
        dataset[3]


def test_a_way_to_read_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of mmap, pread"):
        StorageConfig().tuned(local_io="direct")


MOUNTS = r"""
22 27 0:21 / / rw,relatime shared:1 - overlay overlay rw,lowerdir=/a:/b
23 22 8:1 / /data rw,relatime shared:2 master:1 - ext4 /dev/sda1 rw
24 23 0:30 / /data/team\040-\040files rw - nfs4 server:/a rw,vers=4.2
25 24 0:31 / /data/team\040-\040files/scratch rw - xfs /dev/nvme0n1 rw
26 22 0:32 / /mnt rw - ext4 /dev/sdb1 rw
27 26 0:33 / /mnt rw - fuse.juicefs JuiceFS:web rw
28 22 0:34 / /home rw - autofs systemd-1 rw
29 22 0:35 / /tabs\011and\134 rw - cifs //host/share rw
"""


@pytest.mark.parametrize(
    ("path", "mount", "kind", "is_remote"),
    [
        ("/", "/", "overlay", False),
        ("/database", "/", "overlay", False),
        ("/data", "/data", "ext4", False),
        ("/data/web/web.bin", "/data", "ext4", False),
        ("/data/team - files/web.bin", "/data/team - files", "nfs4", True),
        ("/data/team - files 2/web.bin", "/data", "ext4", False),
        ("/data/team - files/scratch/web.bin", "/data/team - files/scratch", "xfs", False),
        ("/mnt/web.bin", "/mnt", "fuse.juicefs", True),
        ("/home/me/web.bin", "/home", "autofs", True),
        ("/tabs\tand\\/web.bin", "/tabs\tand\\", "cifs", True),
    ],
)
def test_the_longest_mount_point_says_on_what_a_file_lies(
    path: str, mount: str, kind: str, is_remote: bool, mounted: Any
) -> None:
    mounted(MOUNTS)
    found = file_system_of(path)
    assert found == (mount, kind)
    assert found.is_remote == is_remote


@pytest.mark.guarantee("local-pread-file")
def test_files_of_another_machine_are_read_by_pread(
    tmp_path: Path, mounted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also through a link from a local folder, and each by its own mount point."""
    caplog.set_level(logging.DEBUG, "streammega")
    for folder in ("shared", "shared/local"):
        (tmp_path / folder).mkdir()
        write_shard(tmp_path / folder / "shard", 5)
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    blank = str(tmp_path).replace(" ", r"\040")
    mounted(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        f"2 1 0:30 / {blank}/shared rw - nfs server:/a rw\n"
        f"3 2 8:2 / {blank}/shared/local rw - ext4 /dev/sdb1 rw\n"
    )
    for name, is_mapped in (("shared", False), ("link", False), ("shared/local", True)):
        prefix = str(tmp_path / name / "shard")
        assert isinstance(open_store(prefix, StorageConfig())[0], PreadStore) != is_mapped
        dataset = IndexedDataset(prefix, StorageConfig(cache_dir=tmp_path / "cache"))
        assert dataset.mmap == is_mapped
        assert (tokens(dataset, 3) == 5).all()
    by_mount = [text for text in caplog.messages if text.startswith(f"{tmp_path}/shared")]
    assert by_mount == [
        f"{tmp_path}/shared (nfs): its files are read by pread",
        f"{tmp_path}/shared/local (ext4): its files are mapped",
    ]
    assert IndexedDataset(str(tmp_path / "shared" / "shard"), mmap=True).mmap
    assert not IndexedDataset(str(tmp_path / "shared" / "local" / "shard"), mmap=False).mmap


def test_files_are_mapped_where_the_system_names_no_mounts(tmp_path: Path, mounted: Any) -> None:
    mounted(None)
    assert file_system_of(str(tmp_path)) == ("/", "unknown")
    assert not isinstance(open_store(str(tmp_path / "a"), StorageConfig())[0], PreadStore)


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the system say what is mounted; None: it does not say it."""

    def say(text: str | None) -> None:
        if text is not None:
            (tmp_path / "mountinfo").write_text(text)
        monkeypatch.setattr(local, "MOUNTINFO", str(tmp_path / "mountinfo"))

    return say


class SmallDisk(io.FileIO):
    """A file of a disk that takes a little at each call, and in the end no more."""

    def __init__(self, fd: int, room: int, freed: int) -> None:
        super().__init__(fd, "w")
        self._room = room
        self._freed = freed

    def write(self, data: Any) -> int:
        taken = min(len(data), 300_001, self._room)
        if taken == 0:
            self._room = self._freed
            raise OSError(errno.ENOSPC, "No space left on device")
        self._room -= taken
        return super().write(memoryview(data)[:taken])


def on_a_small_disk(monkeypatch: pytest.MonkeyPatch, room: int, freed: int = 0) -> None:
    """freed: the bytes that there are again after each write that failed."""

    def fdopen(fd: int, mode: str, buffering: int) -> io.BufferedWriter:
        return io.BufferedWriter(SmallDisk(fd, room, freed), buffering)

    monkeypatch.setattr(os, "fdopen", fdopen)


SIZES_WRITTEN = (5 << 20, 9 << 20, 100, 3 << 20, 200 << 10, 17 << 20, 1)


def write_pieces(path: Path) -> bytes:
    """A file written in pieces of those sizes, and what was written."""
    content = np.arange(sum(SIZES_WRITTEN) // 8 + 1).tobytes()[: sum(SIZES_WRITTEN)]
    writer = LocalStore(StorageConfig(retry_timeout=0.5)).open_writer(str(path))
    start = 0
    try:
        for size in SIZES_WRITTEN:
            writer.write(memoryview(content)[start : start + size])
            start += size
        writer.commit()
    except StorageError:
        writer.abort()
        raise
    return content


@pytest.mark.guarantee("local-file-written")
def test_the_disk_begins_with_what_is_written_while_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def told(fd: int, start: int, size: int, advice: int) -> None:
        assert os.fstat(fd).st_size >= start + size, "what the disk is to begin with is in the file"
        begun.append((start, start + size))

    monkeypatch.setattr(os, "posix_fadvise", told)
    content = write_pieces(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content
    starts = [start for start, _ in begun]
    stops = [stop for _, stop in begun]
    assert starts == [0, *stops[:-1]], "each byte once, in order"
    assert min(stop - start for start, stop in begun) >= WRITE_BACK_BYTES
    assert len(content) - stops[-1] < WRITE_BACK_BYTES


@pytest.mark.guarantee("local-file-written")
@pytest.mark.parametrize("refused", [errno.EINVAL, errno.ENOSYS, None])
def test_where_disks_are_told_nothing_the_same_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(refused, "refused")

    if refused is None:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    else:
        monkeypatch.setattr(os, "posix_fadvise", refuse)
    content = write_pieces(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


@pytest.mark.guarantee("local-file-written")
def test_a_disk_that_takes_parts_of_writes_gets_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_small_disk(monkeypatch, room=1 << 40)
    content = write_pieces(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


@pytest.mark.guarantee("local-file-written")
@pytest.mark.parametrize("room", [1 << 20, 16 << 20, sum(SIZES_WRITTEN) - 1])
def test_a_disk_that_is_full_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    (tmp_path / "out").write_bytes(b"former")
    on_a_small_disk(monkeypatch, room)
    with pytest.raises(StorageError, match="out: no space left"):
        write_pieces(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"out": b"former"}


@pytest.mark.guarantee("local-file-written")
@pytest.mark.parametrize("room", [1, 1 << 20, 14 << 20, sum(SIZES_WRITTEN) - 1])
def test_writes_go_on_where_they_were_when_a_full_disk_has_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(retry, "MAX_PAUSE", 0.001)
    on_a_small_disk(monkeypatch, room, freed=1_000_003)
    content = write_pieces(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content


# Mapped files: no descriptor, no byte past their end, gone with the last array.


def map_path(path: Path, size: int) -> np.ndarray:
    fd = os.open(path, os.O_RDONLY)
    try:
        return map_file(fd, size, path)
    finally:
        os.close(fd)


@pytest.mark.guarantee("mapped-files-hold")
def test_mapped_files_hold_no_descriptors_and_are_unmapped_with_their_last_view(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bytes"
    data = os.urandom(10_000)
    path.write_bytes(data)
    before = len(os.listdir("/proc/self/fd"))
    arrays = [map_path(path, 10_000) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(array.tobytes() == data for array in arrays)
    view = memoryview(arrays[0])[100:200]  # type: ignore[arg-type]
    del arrays
    gc.collect()
    assert Path("/proc/self/maps").read_text().count(str(path)) == 1
    assert bytes(view) == data[100:200]
    del view
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_mapped_bytes_are_read_only_and_outlive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"old" * 1000)
    array = map_path(path, 3000)
    (tmp_path / "new").write_bytes(b"n")
    os.replace(tmp_path / "new", path)
    assert array.tobytes() == b"old" * 1000
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_file_shorter_than_what_is_to_be_mapped_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 10)
    with pytest.raises(OSError, match="has 10 bytes, not the 11") as caught:
        map_path(path, 11)
    assert caught.value.filename == str(path)
    assert len(map_path(path, 0)) == 0
    assert len(map_path(path, 4)) == 4


def test_a_process_that_may_map_no_more_is_told_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of 40,000 shards, which take two maps each of the 65,530 that kernels allow."""
    (tmp_path / "web.bin").write_bytes(b"bytes")

    class Full:
        def mmap(self, *_: Any) -> Any:
            ctypes.set_errno(errno.ENOMEM)
            return local._FAILED

    monkeypatch.setattr(local, "_libc", Full())
    store, key = open_store(str(tmp_path / "web.bin"), StorageConfig())
    with pytest.raises(StorageError, match=r"web\.bin: cannot be mapped.*vm\.max_map_count.*merge"):
        store.view(key)
