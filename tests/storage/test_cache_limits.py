"""The page cache at its limits: many objects, few descriptors, full disks, other processes and
other users.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import resource
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import StorageConfig
from streammega.errors import StorageError
from streammega.loading.staging import Stager
from streammega.samples.token_file import TokenFile
from streammega.storage import cache as page_cache
from streammega.storage.cache import (
    PAGE_BYTES,
    CachedObject,
    PageCache,
    cache_folder,
    chunk_file,
    open_cached,
)
from streammega.storage.cache import page_cache as cached_pages
from streammega.storage.cache.page_cache import CachedStore
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.requests import FetchGroup, RangeRequest
from streammega.storage.store import Bytes
from tests.storage.test_page_cache import CHUNK, SIZE, Source, data_of
from tests.support.processes import run_python, running_python

SMALL = 3000


def open_object(cache: PageCache, url: str, size: int = SMALL) -> CachedObject:
    cached = open_cached(cache, url, "e", size)
    assert cached is not None
    return cached


def make_old(folder: Path) -> None:
    """Make it look as if nobody had used the objects of a cache for longer than the grace."""
    when = time.time() - cache_folder.GRACE - 1
    for used in folder.glob("chunks/*/used"):
        os.utime(used, (when, when))


def read(
    cached: CachedObject, start: int = 0, stop: int | None = None, source: Source | None = None
) -> int:
    """Read a part, compare it; returns the bytes that were fetched."""
    source = source or Source(data_of(cached.size))
    stop = cached.size if stop is None else stop
    before = source.fetched
    out = np.empty(stop - start, np.uint8)
    cached.read(start, stop, out, source)
    np.testing.assert_array_equal(out, source.data[start:stop])
    return source.fetched - before


def test_the_checksums_of_a_new_chunk_have_their_place_on_the_disk(tmp_path: Path) -> None:
    """On a full tmpfs, to read a hole of a mapped file would end the process."""
    for size in (1, 3000, PAGE_BYTES, 600 * PAGE_BYTES - 5):
        path = tmp_path / f"{size}.data"
        chunk_file.make_chunk(path, size)
        with open(path, "rb") as file:
            at = chunk_file.table_at(size)
            assert os.lseek(file.fileno(), at, os.SEEK_DATA) == at
            if chunk_file.file_bytes(size) - at > 4096:
                assert os.lseek(file.fileno(), at, os.SEEK_HOLE) == chunk_file.file_bytes(size)
            assert not any(path.read_bytes())


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    """Calls of the system that look at files, by name."""
    calls: collections.Counter[str] = collections.Counter()
    with monkeypatch.context() as patch:
        for name in ("stat", "lstat", "scandir", "listdir", "open", "unlink", "statvfs", "mkdir"):
            patch.setattr(os, name, _counting(calls, name, getattr(os, name)))
        yield calls


def _counting(
    calls: collections.Counter[str], name: str, original: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        calls[name] += 1
        return original(*arguments, **named)

    return call


@pytest.mark.guarantee("new-chunk-page")
def test_a_new_chunk_costs_the_same_among_many_objects_as_among_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PageCache(tmp_path, 1 << 30, CHUNK)
    kept = []
    cost = []
    for number in range(1000):
        with counted(monkeypatch) as calls:
            cached = open_object(cache, f"s3://b/{number}")
            read(cached)
        kept.append(cached)
        cost.append(calls.total())
    assert max(cost[10:]) <= max(cost[:10])
    assert max(cost) < 60


@pytest.mark.guarantee("new-chunk-page")
def test_a_full_cache_costs_little_among_many_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PageCache(tmp_path, 1 << 30, CHUNK)
    kept = [open_object(cache, f"s3://b/{number}") for number in range(300)]
    for cached in kept:
        read(cached)
    full = PageCache(tmp_path, 1000, CHUNK)
    read(open_object(full, "s3://b/first"))  # finds that nothing can make way
    with counted(monkeypatch) as calls:
        for number in range(100):
            assert read(open_object(full, f"s3://b/more{number}")) == SMALL
    assert calls["scandir"] + calls["listdir"] == 0
    assert calls.total() <= 3 * 100, "nothing is looked for again for a while"
    assert all(cached.has(0, SMALL) for cached in kept)


@pytest.mark.guarantee("new-chunk-page")
def test_making_way_looks_at_all_objects_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PageCache(tmp_path, 1 << 30, CHUNK)
    for number in range(300):
        read(open_object(cache, f"s3://b/{number}"))
    make_old(tmp_path)
    whole = sum(path.stat().st_size for path in tmp_path.glob("chunks/*/*.data"))
    full = PageCache(tmp_path, whole, CHUNK)
    with counted(monkeypatch) as calls:
        more = [open_object(full, f"s3://b/more{number}") for number in range(100)]
        assert sum(read(cached) for cached in more) == 100 * SMALL
    assert all(cached.has(0, SMALL) for cached in more)
    assert calls["stat"] + calls["scandir"] <= 300 * 2 + 100 * 10
    assert sum(path.stat().st_size for path in tmp_path.glob("chunks/*/*.data")) <= whole
    assert len(list(tmp_path.glob("chunks/*/object.json"))) == 300


FEW_DESCRIPTORS = """
import resource, sys
import numpy as np
from streammega.storage.fd_limit import open_files
from streammega.storage.cache import PageCache, open_cached
cache = PageCache(sys.argv[1], 1 << 30, 1 << 20)  # raises the limit
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
def fetch(a, b, out): out[:] = data[a:b]
objects = []
for number in range(300):
    data = np.full(200_000, number % 251, np.uint8)
    cached = open_cached(cache, f"s3://b/{number}", "e", len(data))
    cached.read(0, len(data), np.empty(len(data), np.uint8), fetch)
    objects.append(cached)
def fail(a, b, out): raise AssertionError("is there")
for number, cached in enumerate(objects):
    out = np.empty(200_000, np.uint8)
    assert cached.read(0, 200_000, out, fail) and (out == number % 251).all() and cached.has(0, 200_000)
print(open_files())
"""


@pytest.mark.guarantee("holds-descriptor-object")
def test_descriptors_do_not_grow_with_objects(tmp_path: Path) -> None:
    found = run_python(FEW_DESCRIPTORS, str(tmp_path))
    assert int(found) < 32


def test_a_process_that_reached_its_limit_of_files_reads_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = open_object(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", SIZE)
    np.testing.assert_array_equal(0, 0)  # numpy imports it now: later it can open no file
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with caplog.at_level(logging.WARNING):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            for _ in range(2):
                assert read(cached) == SIZE
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum("too many open files" in record.message for record in caplog.records) == 1
    assert read(cached) == SIZE
    assert read(cached) == 0, "the cache is used again"


def test_more_chunks_than_may_be_mapped_are_read_from_the_cache_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_file, "MAX_MAPPED", len(chunk_file.mapped) + 2)
    cache = PageCache(tmp_path, 1 << 30, CHUNK)
    objects = [open_object(cache, f"s3://b/{number}", SIZE) for number in range(5)]
    assert [read(cached) for cached in objects] == [SIZE] * 5
    assert [read(cached) for cached in objects] == [0] * 5
    assert [bool(cached.address[0]) for cached in objects] == [True, True, False, False, False]
    assert [bool(cached.verified.any()) for cached in objects] == [True, True, False, False, False]


# --- other processes -------------------------------------------------------------------------------------------------------


HOLDER = """
import sys, time
import numpy as np
from streammega.storage.cache import PageCache, open_cached
cached = open_cached(PageCache(sys.argv[1], 1 << 30, 1 << 20), "s3://b/k", "e", int(sys.argv[2]))
def fetch(a, b, out):
    print("holds", flush=True)
    time.sleep(1000)
if sys.argv[3] == "fetch":
    cached.prefetch(0, 10, fetch)
elif sys.argv[3] == "read":
    cached.read(0, 10, np.empty(10, np.uint8), fetch)
else:
    cached.read(0, 10, np.empty(10, np.uint8), lambda a, b, out: out.fill(0))
    print("uses", flush=True)
    time.sleep(1000)
"""


@contextlib.contextmanager
def other_process(folder: Path, does: str, size: int = SIZE) -> Iterator[subprocess.Popen[str]]:
    """A process that stages ("fetch") or reads page 0 of s3://b/k without end, or uses the object."""
    with running_python(HOLDER, str(folder), str(size), does) as process:
        yield process


@pytest.mark.guarantee("stopped-process-holds")
@pytest.mark.parametrize("does", ["read", "fetch"])
def test_a_stopped_process_that_fetches_a_page_is_not_waited_for(tmp_path: Path, does: str) -> None:
    with other_process(tmp_path, does) as process:
        process.send_signal(signal.SIGSTOP)
        cached = open_object(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", SIZE)
        assert read(cached) == SIZE
        assert read(cached) == 0, "what was fetched is kept"
        process.send_signal(signal.SIGCONT)
    assert not [
        bad
        for entry in page_cache.entries(tmp_path / "chunks")
        for bad in page_cache.damaged_pages(entry)
    ]


LOCKER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("holds", flush=True)
time.sleep(1000)
"""


@pytest.mark.guarantee("stopped-process-holds")
def test_a_stopped_process_that_holds_the_lock_of_the_folder_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert StorageConfig().request_timeout > cache_folder.LOCK_TIMEOUT
    monkeypatch.setattr(cache_folder, "LOCK_TIMEOUT", 0.1)
    cache = PageCache(tmp_path, 1 << 30, CHUNK)
    (tmp_path / "chunks").mkdir()
    with running_python(LOCKER, str(tmp_path / "chunks" / "lock")):
        cached = open_object(cache, "s3://b/k", SIZE)
        with caplog.at_level(logging.WARNING):
            assert [read(cached) for _ in range(3)] == [SIZE] * 3
        assert "another process has locked the cache" in caplog.text
    cache._full_until = 0.0
    assert [read(cached) for _ in range(2)] == [SIZE, 0]


def test_a_second_request_does_not_wait_for_the_page_that_the_first_one_fetches(
    tmp_path: Path,
) -> None:
    cached = open_object(PageCache(tmp_path, 1 << 30, 8 << 20), "s3://b/k", 50 * PAGE_BYTES)
    stuck = _Stuck(data_of(50 * PAGE_BYTES), 49 * PAGE_BYTES)
    fetcher = Fetcher(StorageConfig(max_concurrent_requests=4), 1 << 26)
    store = CachedStore(stuck, cached)  # type: ignore[arg-type]
    try:
        for page in range(50):
            holding = FetchGroup(
                PAGE_BYTES,
                [RangeRequest(store, "k", "e", page * PAGE_BYTES, (page + 1) * PAGE_BYTES, 0)],
            )
            fetcher.submit([holding])
            waiter = threading.Thread(target=fetcher.wait, args=([holding],), daemon=True)
            waiter.start()
            waiter.join(60)
            assert not waiter.is_alive(), f"page {page} was waited for"
            assert holding.buffer is not None
            np.testing.assert_array_equal(
                holding.buffer[:PAGE_BYTES], stuck.data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
            )
            fetcher.release([holding])
        assert stuck.asked == 2
        assert fetcher.counters.hedges_won >= 1
        assert store.fetched_bytes == 50 * PAGE_BYTES, "the one that is stuck has fetched nothing"
    finally:
        stuck.go_on.set()
        fetcher.close()


class _Stuck:
    """A store whose first read at one place does not end."""

    def __init__(self, data: Bytes, place: int) -> None:
        self.data = data
        self.place = place
        self.asked = 0
        self.go_on = threading.Event()

    def fetch_into(self, key: str, spans: Any, outs: Any, etag: str = "") -> None:
        for (start, stop), out in zip(spans, outs, strict=True):
            if start == self.place:
                self.asked += 1
                if self.asked == 1:
                    self.go_on.wait(60)
                    raise StorageError("was stuck")
            out[:] = self.data[start:stop]


@pytest.mark.guarantee("cache-dir-whole")
def test_staging_passes_over_what_another_process_fetches(tmp_path: Path) -> None:
    size = 8 * PAGE_BYTES
    with other_process(tmp_path, "fetch", size) as process:
        cached = open_object(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", size)
        store = CachedStore(_Stuck(data_of(size), -1), cached)  # type: ignore[arg-type]
        file = TokenFile(
            store=store, key="k", dtype=np.dtype("<u2"), num_tokens=size // 2, etag="e"
        )
        stager = Stager(
            [file], StorageConfig().tuned(max_request_bytes=PAGE_BYTES, cache_chunk_bytes=CHUNK)
        )
        wait_for(lambda: cached.has(PAGE_BYTES, size))
        assert not cached.has(0, 1)
        process.kill()
        wait_for(lambda: cached.has(0, size))
        stager.close()
        assert stager.staged_bytes == size


def test_staging_keeps_to_the_chunks_of_the_cache(tmp_path: Path) -> None:
    size = 20 * PAGE_BYTES
    uneven = CHUNK + 12_345
    cached = open_object(PageCache(tmp_path, 1 << 30, uneven), "s3://b/k", size)
    store = CachedStore(_Stuck(data_of(size), -1), cached)  # type: ignore[arg-type]
    file = TokenFile(store=store, key="k", dtype=np.dtype("<u2"), num_tokens=size // 2, etag="e")
    stager = Stager(
        [file], StorageConfig().tuned(max_request_bytes=300_000, cache_chunk_bytes=uneven)
    )
    wait_for(lambda: not any(thread.is_alive() for thread in stager._threads))
    assert cached.has(0, size)
    assert read(cached) == 0
    assert not [
        bad
        for entry in page_cache.entries(tmp_path / "chunks")
        for bad in page_cache.damaged_pages(entry)
    ]


def wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.guarantee("nothing-use-evicted")
def test_what_another_process_uses_stays_and_goes_ten_minutes_after_its_end(
    tmp_path: Path,
) -> None:
    assert cache_folder.GRACE == 600
    with other_process(tmp_path, "use"):
        assert [entry.in_use for entry in page_cache.entries(tmp_path / "chunks")] == [True]
        assert page_cache.clear(tmp_path / "chunks") == (0, 1)
        full = PageCache(tmp_path, SIZE, CHUNK)
        assert [read(open_object(full, "s3://b/new", 100_000)) for _ in range(2)] == [
            100_000
        ] * 2, "nothing makes way"
    assert page_cache.clear(tmp_path / "chunks") == (0, 1), "within the grace"
    make_old(tmp_path)
    assert [entry.in_use for entry in page_cache.entries(tmp_path / "chunks")] == [False]
    assert page_cache.clear(tmp_path / "chunks") == (1, 0)


TOUCHER = """
import os, sys, time
import numpy as np
from streammega.storage.cache import PageCache, open_cached, page_cache
page_cache.TOUCH_SECONDS = 0.02
cached = open_cached(PageCache(sys.argv[1], 1 << 30, 1 << 20), "s3://b/k", "e", 600_000)
cached.read(0, 10, np.empty(10, np.uint8), lambda a, b, out: out.fill(7))
used = cached.folder / "used"
os.utime(used, (1000, 1000))
while used.stat().st_mtime == 1000:
    time.sleep(0.01)
del cached
time.sleep(0.1)
os.utime(used, (1000, 1000))
time.sleep(0.3)
print(used.stat().st_mtime)
"""


@pytest.mark.guarantee("nothing-use-evicted")
def test_an_object_is_touched_while_a_process_has_it_open(tmp_path: Path) -> None:
    """Kernels read mapped chunks without a call that could note it."""
    assert cached_pages.TOUCH_SECONDS == 60
    assert float(run_python(TOUCHER, str(tmp_path))) == 1000


def test_what_an_earlier_layout_has_cached_is_fetched_again_and_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layout 3 had pages of 128 KiB, so fewer checksums."""
    with monkeypatch.context() as patch:
        patch.setattr(cache_folder, "LAYOUT", 3)
        cache = PageCache(tmp_path, 1 << 30, CHUNK)
        read(open_object(cache, "s3://b/k", SIZE))
        earlier = open_object(cache, "s3://b/k", SIZE).folder
    checksums = chunk_file.ENTRY_BYTES * -(-SIZE // (128 << 10))
    os.truncate(earlier / "0.data", chunk_file.table_at(SIZE) + checksums)
    make_old(tmp_path)
    [entry] = page_cache.entries(tmp_path / "chunks")
    assert (entry.cached_bytes, page_cache.damaged_pages(entry)) == (0, [])
    cached = open_object(PageCache(tmp_path, 2 * SIZE, CHUNK), "s3://b/k", SIZE)
    assert [read(cached) for _ in range(2)] == [SIZE, 0]
    read(open_object(PageCache(tmp_path, 2 * SIZE, CHUNK), "s3://b/other", SIZE))
    assert not earlier.exists()
    assert cached.folder.exists()


FORKED_WHILE_A_THREAD_IS_BUSY = """
import os, signal, sys, threading
import numpy as np
from streammega.storage.cache import PageCache, open_cached
cached = open_cached(PageCache(sys.argv[1], 1 << 30, 1 << 20), "s3://b/k", "e", 6_000_000)
reserve = PageCache.reserve
is_inside, goes_on = threading.Event(), threading.Event()
def fetch(a, b, out): out.fill(7)
def read(start): cached.read(start, start + 10, np.empty(10, np.uint8), fetch)
def waiting(*arguments):
    is_inside.set()
    goes_on.wait()
    return reserve(*arguments)
PageCache.reserve = waiting
thread = threading.Thread(target=read, args=(0,))
thread.start()
is_inside.wait()
PageCache.reserve = reserve
child = os.fork()
if child == 0:
    signal.alarm(20)
    read(2_000_000)
    os._exit(0)
goes_on.set()
thread.join()
print(os.waitpid(child, 0)[1])
"""


def test_a_child_reads_by_an_object_that_a_thread_of_its_parent_has_locked(tmp_path: Path) -> None:
    assert run_python(FORKED_WHILE_A_THREAD_IS_BUSY, str(tmp_path)).strip() == "0"


FORKED_WHILE_A_PART_IS_STAGED = """
import os, sys
import numpy as np
from streammega.storage.cache import PageCache, open_cached
cached = open_cached(PageCache(sys.argv[1], 1 << 30, 1 << 20), "s3://b/k", "e", 600_000)
waits, goes_on = os.pipe()
children = []
def fetch(a, b, out):
    out.fill(7)
    child = os.fork()
    if child == 0:
        os.close(goes_on)
        os.read(waits, 1)
        os._exit(0)
    children.append(child)
    assert not cached.prefetch(0, 10, fetch)
assert cached.prefetch(0, 10, fetch)
cached.verified[:] = 0
assert cached.prefetch(0, 10, None), "the child keeps no lock of its parent"
os.close(goes_on)
print(os.waitpid(children[0], 0)[1])
"""


def test_a_child_that_is_forked_while_a_part_is_staged_keeps_no_lock(tmp_path: Path) -> None:
    assert run_python(FORKED_WHILE_A_PART_IS_STAGED, str(tmp_path)).strip() == "0"


def test_an_object_that_another_process_removes_turns_nothing_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil

    cache = PageCache(tmp_path, 1 << 30, CHUNK)
    cached = open_object(cache, "s3://b/k", SIZE)
    folder = cached.folder
    read(cached, 0, PAGE_BYTES)
    del cached
    utime = os.utime

    def too_late(path: Any, *arguments: Any, **named: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        utime(path, *arguments, **named)

    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(os, "utime", too_late)
            cached = open_object(cache, "s3://b/k", SIZE)
        assert cache.usable
        assert [read(cached) for _ in range(2)] == [SIZE, 0]
        assert not caplog.records


def test_pages_of_an_object_that_was_removed_and_made_anew_are_not_mixed(tmp_path: Path) -> None:
    import shutil

    cache = PageCache(tmp_path, 1 << 30, CHUNK)
    cached = open_object(cache, "s3://b/k", SIZE)
    read(cached, 0, PAGE_BYTES)
    shutil.rmtree(cached.folder)  # as another process that does not know of this one might
    with other_process(tmp_path, "use"):
        assert [read(cached) > 0 for _ in range(2)] == [True, True], (
            "read directly: what is mapped is the old file"
        )
        assert cached.has(0, PAGE_BYTES)
        assert not cached.has(0, SIZE)
        assert cache.usable
    shutil.rmtree(tmp_path)
    assert [read(cached) > 0 for _ in range(2)] == [True, True]
    assert cache.usable


FORKED = """
import os, sys
import numpy as np
from streammega.storage.cache import PageCache, entries, open_cached
from pathlib import Path
cache = PageCache(sys.argv[1], 1 << 30, 1 << 20)
def fetch(a, b, out): out.fill(7)
def read(url, start):
    cached = open_cached(cache, url, "e", 600_000)
    out = np.empty(10, np.uint8)
    cached.read(start, start + 10, out, fetch)
    assert (out == 7).all()
    return cached
def used():
    return sorted(entry.url for entry in entries(Path(sys.argv[1]) / "chunks") if entry.in_use)
kept = read("s3://b/parent", 0)
child = os.fork()
if child == 0:
    own = read("s3://b/child", 0)
    read("s3://b/parent", 300_000)
    assert used() == ["s3://b/child", "s3://b/parent"]
    del kept
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
read("s3://b/parent", 500_000)
print(used())
"""


def test_a_forked_child_has_its_own_locks_and_leaves_those_of_its_parent(tmp_path: Path) -> None:
    assert run_python(FORKED, str(tmp_path)).strip() == "['s3://b/child', 's3://b/parent']"


AT_EXIT = """
import atexit, os, sys
late = []
atexit.register(lambda: late[0]())  # runs after whatever is registered later: finalizers of the library among it
import numpy as np
from streammega.storage.cache import PageCache, open_cached
cached = open_cached(PageCache(sys.argv[1], 1 << 30, 1 << 20), "s3://b/k", "e", 600_000)
def fetch(a, b, out): out.fill(7)
cached.read(0, 10, np.empty(10, np.uint8), fetch)
def end():
    victims = [open(f"{sys.argv[1]}/victim{n}", "w+b") for n in range(16)]
    out = np.empty(10, np.uint8)
    cached.read(300_000, 300_010, out, fetch)
    assert (out == 7).all()
    print([os.fstat(file.fileno()).st_size for file in victims] == [0] * 16, flush=True)
late.append(end)
"""


def test_a_read_while_the_process_ends_writes_into_no_other_file(tmp_path: Path) -> None:
    assert run_python(AT_EXIT, str(tmp_path)).strip() == "True"


# --- the disk --------------------------------------------------------------------------------------------------------------


class Disk:
    """What os.statvfs says: a disk of some size of which the cache's own files take their part."""

    def __init__(self, folder: Path, size: int, taken: int) -> None:
        self.folder = folder
        self.size = size
        self.taken = taken

    def __call__(self, path: Any) -> os.statvfs_result:
        own = sum(found.stat().st_blocks * 512 for found in self.folder.rglob("*.data"))
        free = max(0, self.size - self.taken - own) // 4096
        return os.statvfs_result((4096, 4096, self.size // 4096, free, free, 0, 0, 0, 0, 255))


@pytest.mark.guarantee("leaves-part-disk")
def test_the_last_of_the_disk_is_left_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path, 100 << 20, 80 << 20)  # 20 MiB are free, of which 10 are left free
    monkeypatch.setattr(os, "statvfs", disk)
    cache = PageCache(tmp_path, 1 << 40, 4 << 20)
    big = [open_object(cache, f"s3://b/{number}", 8 << 20) for number in range(4)]
    with caplog.at_level(logging.WARNING):
        for cached in big:
            read(cached)
    assert 8 << 20 <= (20 << 20) - _free(disk) <= 10 << 20
    assert cache.usable
    # somebody writes a checkpoint: pages of chunks that are there are not added to either
    disk.taken += 9 << 20
    cache._full_until = 0.0
    before = _free(disk)
    for cached in big:
        read(cached)
    assert _free(disk) == before
    disk.taken = 0
    monkeypatch.setattr(cache_folder, "FULL_SECONDS", 0.0)
    cache._full_until = 0.0
    for cached in big:
        read(cached)
    assert [read(cached) for cached in big] == [0] * 4, "and goes on when there is room again"


def _free(disk: Disk) -> int:
    found = disk("")
    return found.f_bavail * found.f_frsize


def test_what_nobody_uses_makes_way_for_others_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path, 100 << 20, 80 << 20)
    monkeypatch.setattr(os, "statvfs", disk)
    cache = PageCache(tmp_path, 1 << 40, 4 << 20)
    read(open_object(cache, "s3://b/old", 8 << 20))
    make_old(tmp_path)
    new = open_object(cache, "s3://b/new", 8 << 20)
    assert [read(new) for _ in range(2)] == [8 << 20, 0]
    assert {entry.url for entry in page_cache.entries(tmp_path / "chunks")} == {"s3://b/new"}


@pytest.mark.parametrize("left", [b"", b"garbage" * 10, None])
def test_a_lost_count_of_bytes_is_made_anew(tmp_path: Path, left: bytes | None) -> None:
    cache = PageCache(tmp_path, 1 << 30, CHUNK)
    kept = [open_object(cache, f"s3://b/{number}", SIZE) for number in range(3)]
    for cached in kept:
        read(cached)
    whole = sum(path.stat().st_size for path in tmp_path.glob("chunks/*/*.data"))
    lock = tmp_path / "chunks" / "lock"
    lock.unlink() if left is None else lock.write_bytes(left)
    full = PageCache(tmp_path, whole, CHUNK)
    assert [read(open_object(full, "s3://b/more", SIZE)) for _ in range(2)] == [SIZE] * 2
    larger = PageCache(tmp_path, whole + 2 * SIZE, CHUNK)
    assert [read(open_object(larger, "s3://b/other", SIZE))] == [SIZE]
    assert len(list(tmp_path.glob("chunks/*/0.data"))) == 4


def test_a_count_that_is_too_high_is_mended_once_the_cache_is_full(tmp_path: Path) -> None:
    import shutil

    cache = PageCache(tmp_path, 1 << 30, CHUNK)
    read(open_object(cache, "s3://b/k", SIZE))
    shutil.rmtree(next(tmp_path.glob("chunks/*/0.data")).parent)  # by hand: nobody counts
    full = PageCache(tmp_path, SIZE + 1000, CHUNK)
    new = open_object(full, "s3://b/new", SIZE)
    assert [read(new) for _ in range(2)] == [SIZE, 0]


# --- other users -----------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("users-share-umask")
def test_what_lies_in_place_of_a_chunk_is_not_believed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(100_000))
    for make in (
        lambda path: path.symlink_to(secret),
        lambda path: path.write_bytes(b"short"),
        lambda path: path.write_bytes(b""),
        lambda path: os.mkfifo(path),
        lambda path: path.mkdir(),
    ):
        cache = PageCache(tmp_path / "cache", 1 << 30, CHUNK)
        cached = open_object(cache, "s3://b/k", SIZE)
        read(cached, 0, 10)
        path = cached.folder / "0.data"
        del cached
        path.unlink()
        make(path)
        for _ in range(2):
            read(open_object(PageCache(tmp_path / "cache", 1 << 30, CHUNK), "s3://b/k", SIZE))
        path.rmdir() if path.is_dir() else path.unlink()
    assert secret.read_bytes() == bytes(100_000)


def test_descriptions_of_others_are_not_believed(tmp_path: Path) -> None:
    cached = open_object(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", SIZE)
    read(cached)
    for text in ('{"url": "u", "size": 1e30, "chunk_bytes": 131072}', "[]", "{", '{"size": -5, "url": 3, "chunk_bytes": 131072}',
                 '{"url": "u", "size": 10, "chunk_bytes": 0}'):  # fmt: skip
        (cached.folder / "object.json").write_text(text)
        for entry in page_cache.entries(tmp_path / "chunks"):
            page_cache.damaged_pages(entry)
    assert read(cached) == 0


def test_files_have_the_mode_that_the_umask_gives_them(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        kept = open_object(PageCache(tmp_path / "cache", 1 << 30, CHUNK), "s3://b/k", SIZE)
        read(kept)
    finally:
        os.umask(before)
    for path in (tmp_path / "cache").rglob("*"):
        expected = 0o775 if path.is_dir() else 0o664
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


SECOND_USER = """
import logging, os, sys
import numpy as np
folder, group, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
from streammega.storage.cache import PageCache, open_cached
os.setgroups([group])
os.setegid(group)
os.seteuid(65534)
os.umask(0o002)
logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
asked = []
def fetch(a, b, out):
    asked.append(b - a)
    out.fill(5)
for url in ("s3://b/k", "s3://b/own"):
    cached = open_cached(PageCache(folder, 1 << 30, 1 << 20), url, "e", size)
    if cached is None:
        continue
    for _ in range(2):
        out = np.empty(size, np.uint8)
        cached.read(0, size, out, fetch)
        assert (out == 5).all()
print("fetched", sum(asked))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that others may enter: pytest's own may not be."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.guarantee("users-share-umask")
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(("umask", "fetched"), [(0o002, SIZE), (0o022, None)])
def test_a_second_user_of_the_group_shares_what_the_umask_lets_them(
    open_folder: Path, umask: int, fetched: int | None
) -> None:
    root = open_folder / "cache"
    root.mkdir()
    os.chown(root, 0, 1234)
    root.chmod(0o2775)
    before = os.umask(umask)
    try:
        cached = open_object(PageCache(root, 1 << 30, CHUNK), "s3://b/k", SIZE)
        cached.read(0, SIZE, np.empty(SIZE, np.uint8), lambda start, stop, out: out.fill(5))
    finally:
        os.umask(before)
    lines = run_python(SECOND_USER, str(root), "1234", str(SIZE)).splitlines()
    warnings = [line for line in lines if "WARNING" in line]
    if fetched is not None:
        assert (lines, warnings) == ([f"fetched {fetched}"], []), "one of the two objects is there"
        return
    assert len(warnings) == 1, "one for all openings of the process"
    assert all("let this user write there" in line for line in warnings)
