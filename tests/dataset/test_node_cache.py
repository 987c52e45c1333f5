"""The node-wide cache of `.idx` copies and built arrays: shared between users, cleaned of what was
killed.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.cli.main import main
from streammega.config import local_folder
from streammega.dataset.local_cache import (
    ArrayKind,
    SharedFolder,
    cache_error,
    cache_folder,
    cached_arrays,
    cached_copy,
    default_cache_dir,
    map_local_copy,
    node_lock,
    remove_stale,
    write_atomically,
)
from streammega.errors import CacheError, ConfigError
from streammega.storage.atomic_file import ORPHAN_SECONDS, create_beside
from streammega.storage.backends.local import LocalStore
from streammega.storage.cache import PageCache
from streammega.storage.open import local_path
from tests.support.gang import Gang

NOBODY = 65534
STRANGER = 65533
SHARED_ITEMS = 1 << 20
KIND: dict[str, ArrayKind] = {"a": ((np.int64,), (3,))}


@pytest.fixture(params=[0o022, 0o002, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def build(value: int) -> dict[str, np.ndarray]:
    return {"a": np.full(3, value)}


def test_cached_files_and_their_locks_have_the_mode_that_the_umask_says(
    tmp_path: Path, umask: int
) -> None:
    cached_arrays(tmp_path / "order", "key", KIND, lambda: build(1))
    writer = LocalStore().open_writer(str(tmp_path / "written"))
    writer.write(b"x")
    writer.commit()
    folder = tmp_path / "order"
    for path in (folder / "key-a.npy", folder / "key.lock", tmp_path / "written"):
        assert mode(path) == 0o666 & ~umask


@pytest.mark.guarantee("12-page-file")
def test_what_was_published_damaged_is_named_and_never_believed(tmp_path: Path) -> None:
    cached_arrays(tmp_path / "built", "key", KIND, lambda: build(1))
    path = tmp_path / "built" / "key-a.npy"
    folder = SharedFolder(url=str(tmp_path / "shared"), storage=StorageConfig())
    folder.publish(path)

    def fetched(cache: str) -> Any:
        return cached_arrays(tmp_path / cache, "key", KIND, dict, folder)["a"].tolist()

    assert fetched("sound") == [1, 1, 1]
    published = tmp_path / "shared" / path.name
    stored = bytearray(published.read_bytes())
    stored[-20] ^= 1
    published.write_bytes(stored)
    for _ in range(2):
        with pytest.raises(CacheError, match=r"checksum.*index_publish_url, publish it again"):
            fetched("damaged")


@pytest.mark.parametrize(
    "text",
    [
        b"{'descr': '<i8', 'fo",
        b"{'descr': ', <i8', 'fortran_order': False, 'shape': (0, 2), }",
    ],
)
def test_a_kept_array_whose_header_is_no_python_is_named(tmp_path: Path, text: bytes) -> None:
    header = b"\x93NUMPY\x01\x00\x76\x00" + text.ljust(118)
    (tmp_path / "key-a.npy").write_bytes(header + xxhash.xxh3_64_digest(header))
    with pytest.raises(CacheError, match=r"key-a\.npy: is no readable array"):
        cached_arrays(tmp_path, "key", KIND, dict)


@pytest.mark.guarantee("12-page-file")
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_or_a_cut_in_what_is_kept_is_never_believed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "a.idx"
        source.write_bytes(data.draw(st.binary(max_size=200)))
        objects = LocalStore()
        info = objects.info(str(source))

        def views() -> tuple[bytes, list[int]]:
            copy = map_local_copy(objects, info, folder / "cache", 64)
            rows: Any = cached_arrays(folder / "cache" / "idx", "key", KIND, lambda: build(1))["a"]
            return bytes(copy), rows.tolist()

        expected = views()
        kept_files = (folder / "cache" / "idx").glob("*[xy]")
        for path in sorted(kept_files, key=lambda path: path.suffix):
            kept = bytearray(path.read_bytes())
            place = data.draw(st.integers(0, 8 * len(kept) - 1))
            kept[place // 8] ^= 1 << place % 8
            cut = data.draw(st.sampled_from([0, 0, 1, 8, len(kept)]))
            path.unlink()  # what is mapped stays as it was
            path.write_bytes(kept[: len(kept) - cut])
        assert views() == expected
        source.unlink()
        copy = map_local_copy(objects, info, folder / "cache", 64)
        assert bytes(copy) == expected[0], "the copy is mended"


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_a_copy_that_takes_long_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streammega.dataset.local_cache.DOWNLOAD_BYTES", 1 << 20)
    stored = tmp_path / "a.idx"
    stored.write_bytes(bytes(3 << 20))
    store = LocalStore()
    info = store.info(str(stored))
    for name, line_every in (("quick", 30.0), ("slow", 0.0)):
        monkeypatch.setattr("streammega.dataset.local_cache.LINE_EVERY", line_every)
        map_local_copy(store, info, tmp_path / name, 1 << 20)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == (2 if name == "slow" else 0)
    assert lines[0].startswith(f"{stored}: 1 of 3 MB are copied to this node; about ")


def test_a_copy_from_slow_storage_says_how_far_it_is_at_least_twice_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a clock that runs while bytes come: a megabyte a second."""
    now = [0.0]
    said: list[float] = []
    read = LocalStore.read

    def read_slowly(self: LocalStore, key: str, spans: Any, etag: str = "") -> Any:
        now[0] += sum(stop - start for start, stop in spans) / 1e6
        return read(self, key, spans, etag)

    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("streammega.dataset.local_cache.time", clock)
    monkeypatch.setattr(LocalStore, "read", read_slowly)
    monkeypatch.setattr(
        "streammega.dataset.local_cache.log.warning", lambda *_: said.append(now[0])
    )
    stored = tmp_path / "a.idx"
    with open(stored, "wb") as file:
        file.truncate(150 << 20)
    store = LocalStore()
    data = map_local_copy(store, store.info(str(stored)), tmp_path / "cache", 1 << 20)
    assert len(data) == 150 << 20
    assert len(said) >= 4
    assert max(np.diff([0.0, *said])) < 40


def test_a_file_system_without_locks_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(CacheError, match="has no file locks; set cache_dir"),
        node_lock(tmp_path / "idx" / "a.lock"),
    ):
        pass


@pytest.mark.guarantee("users-may-share")
def test_a_second_user_takes_the_lock_of_the_first_and_reads_what_is_cached() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        assert cached_arrays(folder / "order", "key", KIND, lambda: build(1))["a"][0] == 1
        for path in (folder, folder / "order"):  # as an administrator makes a folder for all
            path.chmod(0o777)
        child = os.fork()
        if child == 0:
            code = 100
            try:
                os.setuid(NOBODY)
                read = int(cached_arrays(folder / "order", "key", KIND, lambda: build(2))["a"][0])
                (folder / "order" / "key-a.npy").unlink()  # now the first user's lock is needed
                code = 10 * read + int(
                    cached_arrays(folder / "order", "key", KIND, lambda: build(2))["a"][0]
                )
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 12
    finally:
        shutil.rmtree(folder)


@pytest.mark.guarantee("cache-stranger-refused")
@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
@pytest.mark.parametrize(
    ("parent_mode", "owner", "group", "mode", "is_refused"),
    [
        (0o1777, STRANGER, STRANGER, 0o777, True),
        (0o1777, STRANGER, STRANGER, 0o755, True),
        (0o1777, STRANGER, NOBODY, 0o755, True),
        (0o1777, STRANGER, NOBODY, 0o775, False),  # shared by a group
        (0o1777, 0, 0, 0o777, False),
        (0o1777, NOBODY, NOBODY, 0o700, False),
        (0o755, STRANGER, STRANGER, 0o755, False),  # who may write the parent chose its owner
    ],
)
def test_a_cache_that_a_stranger_may_have_made_is_refused(
    parent_mode: int, owner: int, group: int, mode: int, is_refused: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        folder = parent / "cache"
        (folder / "deeper").mkdir(parents=True)
        os.chown(folder, owner, group)
        folder.chmod(mode)
        parent.chmod(parent_mode)
        assert cache_folder(StorageConfig(cache_dir=folder)) == folder, "root trusts every folder"
        child = os.fork()
        if child == 0:
            refusals = 0
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            for path in (folder, folder / "deeper"):
                for open_cache in (
                    lambda path: cache_folder(StorageConfig(cache_dir=path)),
                    lambda path: PageCache(path, 1 << 20, 1 << 20),
                ):
                    try:
                        open_cache(path)
                    except CacheError as error:
                        refusals += f"{folder}: belongs to another user (id {owner})" in str(error)
            os._exit(refusals)
        refusals = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert refusals == (4 if is_refused else 0)


@pytest.mark.guarantee("cache-stranger-refused")
@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
@pytest.mark.parametrize("part", ["chunks", "idx", "order", "convert"])
def test_a_part_of_a_cache_that_a_stranger_may_have_made_is_refused(part: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)  # named as `cache_dir`, as /tmp may be
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)

            def is_refused() -> bool:
                try:
                    if part == "chunks":
                        PageCache(folder, 1 << 20, 1 << 20)
                    else:
                        cache_folder(StorageConfig(cache_dir=folder))
                except CacheError as error:
                    return f"{folder / part}: belongs to another user" in str(error)
                return False

            before = is_refused()
            os.kill(os.getpid(), signal.SIGSTOP)  # the stranger makes it now
            os._exit(10 * before + is_refused())
        os.waitpid(child, os.WUNTRACED)
        (folder / part).mkdir()
        os.chown(folder / part, STRANGER, STRANGER)
        os.kill(child, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The surroundings of a container's user whose id has no name: its temporary folder."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")

    def has_no_name(user: int) -> None:
        raise KeyError(f"uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", has_no_name)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.guarantee("no-home")
def test_without_a_home_the_cache_is_a_temporary_folder_of_this_user(no_home: Path) -> None:
    folder = default_cache_dir()
    assert cache_folder(StorageConfig()) == folder
    assert folder.parent.parent == no_home
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    for path in ("~", "~/cache"):
        for read in (local_folder, local_path):
            with pytest.raises(ConfigError, match="no home folder; set HOME"):
                read(path)
    source = no_home / "a.txt"
    source.write_text("hello\n")
    output = str(no_home / "web")
    assert main(["convert", str(source), output, "--tokenizer", "bytes"]) == 0
    for command in ("describe", "verify", "doctor"):
        assert main([command, output]) == 0
    assert not (no_home / "~").exists()


@pytest.mark.guarantee("no-home", "cache-stranger-refused")
@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_temporary_cache_that_a_stranger_made_is_refused(
    kind: str, no_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By root too: anybody may make it, in the temporary folder of any machine."""
    folder = default_cache_dir().parent
    folder.rmdir()
    (no_home / "theirs").mkdir()
    if kind == "link":
        folder.symlink_to("theirs")
    elif kind == "file":
        folder.touch()
    else:
        folder.mkdir()
        os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(CacheError, match="set XDG_CACHE_HOME"):
        cache_folder(StorageConfig())
    source = no_home / "a.txt"
    source.write_text("hello\n")
    output = str(no_home / "web")
    assert main(["convert", str(source), output, "--tokenizer", "bytes"]) == 0, "it needs no cache"
    capsys.readouterr()
    assert main(["convert", str(source), "s3://data/web", "--tokenizer", "bytes"]) == 1
    assert "set XDG_CACHE_HOME" in capsys.readouterr().err
    assert main(["doctor", output]) == 1
    assert "set XDG_CACHE_HOME" in capsys.readouterr().out


@pytest.mark.guarantee("no-home")
def test_without_any_temporary_folder_the_setting_is_named(
    no_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(no_home / "missing"))
    with pytest.raises(CacheError, match="set XDG_CACHE_HOME"):
        default_cache_dir()


@pytest.mark.guarantee("no-home")
@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_a_home_that_is_the_root_folder_is_one_only_where_it_may_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/")
    assert default_cache_dir() == Path("/.cache/streammega")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        child = os.fork()
        if child == 0:
            code = 100
            try:
                os.setuid(NOBODY)
                code = 0 if default_cache_dir().is_relative_to(name) else 1
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.guarantee("users-may-share")
@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_in_a_sticky_folder_what_another_user_kept_stays() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        cache = folder / "cache"
        objects = LocalStore()
        source = folder / "a.idx"
        cached_arrays(cache / "idx", "web-1", KIND, lambda: build(1))
        copies = []
        for content in (b"first", b"second"):
            source.write_bytes(content)
            info = objects.info(str(source))
            assert bytes(map_local_copy(objects, info, cache, 1 << 20)) == content
            copies.append(cached_copy(objects, info, cache))
        assert [copy.exists() for copy in copies] == [False, True]
        source.write_bytes(b"and the third")
        for path in (folder, cache, cache / "idx"):  # as /tmp is: for all, each for itself
            path.chmod(0o1777)
        child = os.fork()
        if child == 0:
            code = 100
            try:
                os.setuid(NOBODY)
                cached_arrays(cache / "idx", "web-2", KIND, lambda: build(2))
                remove_stale(cache / "idx", "web-", "web-2")
                copy = map_local_copy(objects, objects.info(str(source)), cache, 1 << 20)
                code = bytes(copy) != b"and the third"
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert copies[1].exists()
        assert (cache / "idx" / "web-1-a.npy").exists()
        remove_stale(cache / "idx", "web-", "web-2")
        kept = sorted(path.name for path in (cache / "idx").glob("web-*"))
        assert kept == ["web-2-a.npy", "web-2.lock"]
    finally:
        shutil.rmtree(folder)


def test_a_cache_of_another_user_says_so() -> None:
    error = cache_error(Path("/cache/idx"), PermissionError(13, "Permission denied"), 0)
    assert isinstance(error, CacheError)
    assert "another user" in str(error)
    assert "set cache_dir" in str(error)


WRITE_FOR_EVER = """
import sys, time
from pathlib import Path
from streammega.dataset.local_cache import write_atomically
def chunks():
    yield b"half"
    print("begun", flush=True)
    time.sleep(60)
write_atomically(Path(sys.argv[1]) / "array.npy", chunks(), 8)
"""


@pytest.mark.guarantee("users-may-share")
def test_what_a_killed_process_left_is_removed_once_it_is_old_and_what_is_written_is_not(
    tmp_path: Path,
) -> None:
    held, temporary = create_beside(tmp_path / "held")
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.kill()
    (orphan,) = tmp_path.glob(".array.npy.*.partial")
    (tmp_path / ".unrelated.partial").write_bytes(b"")
    sweep = [
        sys.executable,
        "-c",
        f"from streammega.dataset.local_cache import *; write_atomically(Path({str(tmp_path)!r}) / 'x', [], 0)",
    ]
    subprocess.run(sweep, check=True)
    assert orphan.exists(), "perhaps somebody on another node writes it"
    old = time.time() - ORPHAN_SECONDS - 60
    for path in tmp_path.iterdir():
        os.utime(path, (old, old))
    subprocess.run(sweep, check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [".unrelated.partial", Path(temporary).name, "x"]
    )
    os.close(held)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(CacheError, match="8 bytes wanted"):
        write_atomically(tmp_path / "array.npy", chunks(), 8)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_where_another_process_was_forked_meanwhile(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with node_lock(tmp_path / "lock"):
        child = context.Process(target=time.sleep, args=(600,))
        child.start()
    with node_lock(tmp_path / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
        pass
    child.kill()
    child.join()


@pytest.mark.guarantee("index-maps-shared")
def test_processes_of_a_node_map_the_same_memory(gang: Gang, tmp_path: Path) -> None:
    """One inode, of which each counts its share, and nothing is copied."""
    maps = gang.run(2, map_and_measure, tmp_path)
    assert maps[0]["inode"] == maps[1]["inode"]
    for found in maps:
        assert found["Rss"] >= SHARED_ITEMS * 8 // 1024
        assert found["Pss"] < 0.6 * found["Rss"]
        assert found["Private_Dirty"] == 0


def map_and_measure(rank: int, folder: Path) -> dict[str, int]:
    """The inode of a built array, and the kilobytes of its map while all ranks have it."""
    kinds: dict[str, ArrayKind] = {"a": ((np.int64,), (SHARED_ITEMS,))}
    arrays = cached_arrays(folder, "k", kinds, lambda: {"a": np.arange(SHARED_ITEMS)})
    assert int(arrays["a"].sum()) == SHARED_ITEMS * (SHARED_ITEMS - 1) // 2
    dist.barrier()
    _, _, smaps = Path("/proc/self/smaps").read_text().partition(str(folder / "k-a.npy"))
    dist.barrier()
    sizes = re.findall(r"^(Rss|Pss|Private_Dirty): +(\d+) kB$", smaps[:2000], re.MULTILINE)
    found = {name: int(size) for name, size in reversed(sizes)}  # those of the first map
    return {**found, "inode": (folder / "k-a.npy").stat().st_ino}
