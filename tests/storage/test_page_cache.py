"""The page cache: what one process of a node has fetched, all use; nothing is believed that was not
written whole.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streammega import DataConfig, StorageConfig, StreamLoader
from streammega.cli.main import main
from streammega.dataset import default_cache_dir
from streammega.storage import cache as page_cache
from streammega.storage.cache import PAGE_BYTES, PageCache, open_cached
from streammega.storage.cache.chunk_file import try_lock
from streammega.storage.cache.page_cache import CachedStore
from streammega.storage.store import Bytes
from tests.support.processes import Family, run_python
from tests.support.streams import config_of, storage_of, stream
from tools.bench.object_server import Running

SIZE = 5 * PAGE_BYTES + 1000
CHUNK = 1 << 20
BLOCK_BYTES = 256 << 10
"""Bytes of a block of the stream order."""


def data_of(size: int = SIZE) -> Bytes:
    return np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)


class Source:
    """An object that counts what is asked of it."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.asked: list[tuple[int, int]] = []

    def __call__(self, start: int, stop: int, out: Bytes) -> None:
        self.asked.append((start, stop))
        out[:] = self.data[start:stop]

    @property
    def fetched(self) -> int:
        return sum(stop - start for start, stop in self.asked)


class Through:
    """A store of one object that is read from a source."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def fetch_into(
        self, key: str, spans: Sequence[tuple[int, int]], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        for (start, stop), out in zip(spans, outs, strict=True):
            self.source(start, stop, out)


@given(
    spans=st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)), min_size=1, max_size=12
    )
)
def test_reads_are_right_and_no_page_is_fetched_twice(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int]]
) -> None:
    source = Source(data_of())
    cached = open_cached(
        PageCache(tmp_path_factory.mktemp("cache"), 1 << 30, 2 * PAGE_BYTES), "s3://b/k", "e", SIZE
    )
    assert cached is not None
    for start, length in spans:
        stop = min(start + length, SIZE)
        out = np.empty(stop - start, np.uint8)
        cached.read(start, stop, out, source)
        np.testing.assert_array_equal(out, source.data[start:stop])
    pages = {
        page
        for start, stop in source.asked
        for page in range(start // PAGE_BYTES, -(-stop // PAGE_BYTES))
    }
    assert sum(-(-(stop - start) // PAGE_BYTES) for start, stop in source.asked) == len(pages)


def test_another_opening_finds_the_pages_and_another_etag_does_not(tmp_path: Path) -> None:
    out = np.empty(SIZE, np.uint8)
    for etag, expected in (("one", SIZE), ("one", 0), ("two", SIZE)):
        source = Source(data_of())
        cached = open_cached(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", etag, SIZE)
        assert cached is not None
        cached.read(0, SIZE, out, source)
        assert source.fetched == expected
        del cached


@pytest.mark.guarantee("cache-block-alone")
def test_nodes_that_share_a_file_by_blocks_fetch_little_more_than_their_own(
    tmp_path: Path,
) -> None:
    """Blocks begin and end within pages: each of two nodes fetches the page that they share."""
    size = 64 * BLOCK_BYTES
    fetched = 0
    for node in range(2):
        cached = open_cached(PageCache(tmp_path / f"{node}", 1 << 30, CHUNK), "s3://b/k", "e", size)
        assert cached is not None
        source = Source(np.zeros(size, np.uint8))
        for start in range(node * BLOCK_BYTES + 1000, size - BLOCK_BYTES, 2 * BLOCK_BYTES):
            cached.read(start, start + BLOCK_BYTES, np.empty(BLOCK_BYTES, np.uint8), source)
        fetched += source.fetched
    assert fetched < 1.08 * 63 * BLOCK_BYTES


def test_small_reads_find_what_a_former_run_has_cached(tmp_path: Path) -> None:
    """They fetch no page, but one that lies on the disk is read there: also before this process has
    looked at it.
    """
    for fetched in (SIZE, 0):
        source = Source(data_of())
        cached = open_cached(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", "e", SIZE)
        assert cached is not None
        if fetched:
            cached.read(0, SIZE, np.empty(SIZE, np.uint8), source)
        store = CachedStore(Through(source), cached)  # type: ignore[arg-type]
        spans = [(10, 200), (PAGE_BYTES - 5, PAGE_BYTES + 5), (SIZE - 7, SIZE)]
        outs = [np.empty(stop - start, np.uint8) for start, stop in spans]
        store.fetch_into("k", spans, outs)
        for (start, stop), out in zip(spans, outs, strict=True):
            np.testing.assert_array_equal(out, source.data[start:stop])
        assert source.fetched == fetched
        del cached, store


def test_small_reads_make_no_pages(tmp_path: Path) -> None:
    source = Source(data_of())
    cached = open_cached(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", "e", SIZE)
    assert cached is not None
    CachedStore(Through(source), cached).fetch_into("k", [(10, 200)], [np.empty(190, np.uint8)])  # type: ignore[arg-type]
    assert source.asked == [(10, 200)]
    assert not list(tmp_path.glob("chunks/*/*.data"))


@pytest.mark.guarantee("12-page-file")
def test_a_damaged_page_is_fetched_again_and_verify_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(command: str, folder: str | Path = tmp_path) -> tuple[int, str]:
        code = main(["cache", command, str(folder)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    out = np.empty(SIZE, np.uint8)
    cached = open_cached(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", "e", SIZE)
    assert cached is not None
    cached.read(0, SIZE, out, Source(data_of()))
    del cached
    path = next(tmp_path.glob("chunks/*/0.data"))
    with open(path, "r+b") as file:
        file.seek(2 * PAGE_BYTES + 5)
        file.write(b"damage")
    code, text = told("verify")
    assert (code, "page 2 is damaged" in text) == (1, True)
    source = Source(data_of())
    cached = open_cached(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", "e", SIZE)
    assert cached is not None
    cached.read(0, SIZE, out, source)
    assert source.asked == [(2 * PAGE_BYTES, 3 * PAGE_BYTES)]
    np.testing.assert_array_equal(out, source.data)
    listed, cleared = of_other_processes("ls", "clear", folder=tmp_path)
    assert re.search(r"in use +s3://b/k", listed)
    assert "1 in use and kept" in cleared
    used = cached.folder / "used"
    del cached
    os.utime(used, (1000, 1000))
    assert "0 damaged" in told("verify")[1]
    assert "1 object removed" in told("clear")[1]
    assert not list(tmp_path.glob("chunks/*/*.data"))
    assert "holds no cache" in told("ls", "/nonexistent")[1]


def of_other_processes(*commands: str, folder: Path) -> list[str]:
    """What commands of the cache print that run at once, each in a process of its own."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "streammega", "cache", command, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    return [process.communicate()[0] for process in processes]


def _reader(folder: str, log_file: str, data: Bytes) -> Callable[[int, int], None]:
    """Reads bytes of an object through the cache, and compares them. What it fetches is logged."""

    def fetch(start: int, stop: int, out: Bytes) -> None:
        time.sleep(0.02)
        out[:] = data[start:stop]
        with open(log_file, "a") as file:
            file.write(f"{start} {stop}\n")

    cached = open_cached(PageCache(folder, 1 << 30, CHUNK), "s3://b/k", "e", len(data))
    assert cached is not None

    def read(start: int, stop: int) -> None:
        out = np.empty(stop - start, np.uint8)
        cached.read(start, stop, out, fetch)
        assert (out == data[start:stop]).all()

    return read


def _fetched(log_file: Path) -> list[tuple[int, int]]:
    """The bytes [start, stop) of each fetch that was logged."""
    lines = [line.split() for line in log_file.read_text().splitlines()]
    return [(int(start), int(stop)) for start, stop in lines]


def _read_all(folder: str, log_file: str, seed: int) -> None:
    data = data_of(40 * PAGE_BYTES)
    read = _reader(folder, log_file, data)
    rng = np.random.default_rng(seed)

    def work(starts: list[int]) -> None:
        for start in starts:
            read(start, min(start + 300_000, len(data)))

    starts = rng.permutation(np.arange(0, len(data), 100_000)).tolist()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, [starts[n::3] for n in range(3)]))


@pytest.mark.guarantee("cache-local-disk")
def test_processes_and_threads_that_share_a_cache_keep_each_page_for_all(tmp_path: Path) -> None:
    """Some pages are fetched by several of them at once. Whoever comes later fetches nothing."""
    log_file = tmp_path / "log"
    context = multiprocessing.get_context("forkserver")

    def run(seeds: Sequence[int]) -> None:
        processes = [
            context.Process(target=_read_all, args=(str(tmp_path / "cache"), str(log_file), seed))
            for seed in seeds
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0

    run(range(3))
    fetched = _fetched(log_file)
    pages = [range(start // PAGE_BYTES, stop // PAGE_BYTES) for start, stop in fetched]
    assert set().union(*pages) == set(range(40))
    run(range(3, 6))
    assert _fetched(log_file) == fetched
    for entry in page_cache.entries(tmp_path / "cache" / "chunks"):
        assert (entry.cached_bytes, page_cache.damaged_pages(entry)) == (40 * PAGE_BYTES, [])


def _read_own_blocks(folder: str, log_file: str, rank: int) -> None:
    """Read every eighth block, as a rank that owns its lanes does, from threads."""
    read = _reader(folder, log_file, data_of(256 * BLOCK_BYTES))

    def work(block: int) -> None:
        # Of an odd place: blocks begin and end within pages.
        start = max(0, block * BLOCK_BYTES - 1000)
        stop = (block + 1) * BLOCK_BYTES - 1000
        read(start, stop)

    blocks = np.random.default_rng(0).permutation(256)[rank::8].tolist()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, blocks))


@pytest.mark.guarantee("cache-local-disk")
def test_eight_ranks_that_own_their_blocks_fetch_little_twice(tmp_path: Path) -> None:
    """Without waiting for each other: at most a page for each block, and that only at one moment."""
    log_file = tmp_path / "log"
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(
            target=_read_own_blocks, args=(str(tmp_path / "cache"), str(log_file), rank)
        )
        for rank in range(8)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    fetched = sum(stop - start for start, stop in _fetched(log_file))
    assert fetched < 1.05 * 256 * BLOCK_BYTES


@pytest.mark.guarantee("nothing-use-evicted")
def test_what_nobody_uses_makes_room_oldest_first_and_what_is_used_stays(tmp_path: Path) -> None:
    out = np.empty(SIZE, np.uint8)
    for number, name in enumerate(("old", "newer")):
        cached = open_cached(PageCache(tmp_path, 1 << 30, CHUNK), f"s3://b/{name}", "e", SIZE)
        assert cached is not None
        cached.read(0, SIZE, out, Source(data_of()))
        used = cached.folder / "used"
        del cached
        os.utime(used, (1000 + number, 1000 + number))
    cache = PageCache(tmp_path, int(2.5 * SIZE), CHUNK)
    kept = open_cached(cache, "s3://b/third", "e", SIZE)
    assert kept is not None
    kept.read(0, SIZE, out, Source(data_of()))
    names = {entry.url for entry in page_cache.entries(tmp_path / "chunks") if entry.cached_bytes}
    assert names == {"s3://b/newer", "s3://b/third"}
    source = Source(data_of())
    second = open_cached(PageCache(tmp_path, SIZE, CHUNK), "s3://b/fourth", "e", SIZE)
    assert second is not None
    for _ in range(2):
        second.read(0, SIZE, out, source)
        np.testing.assert_array_equal(out, source.data)
    assert source.fetched == 2 * SIZE, (
        "no room: not admitted, and nothing in use was evicted for it"
    )
    assert kept.has(0, SIZE)


@pytest.mark.skipif(
    os.geteuid() == 0 and not hasattr(resource, "RLIMIT_FSIZE"),
    reason="needs a limit on file sizes",
)
def test_a_full_disk_turns_the_cache_off_with_one_warning(tmp_path: Path) -> None:
    code = f"""
import logging, resource, signal, sys
import numpy as np
from streammega.storage.cache import PageCache, open_cached
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({SIZE // 2}, {SIZE // 2}))
logging.basicConfig(stream=sys.stdout)
data = np.arange({SIZE}, dtype=np.uint8)
cached = open_cached(PageCache({str(tmp_path)!r}, 1 << 30, 1 << 20), "s3://b/k", "e", {SIZE})
def fetch(a, b, out): out[:] = data[a:b]
for at in range(0, {SIZE}, 10_000):
    out = np.empty(min(10_000, {SIZE} - at), np.uint8)
    cached.read(at, at + len(out), out, fetch)
    assert (out == data[at:at + len(out)]).all()
"""
    assert run_python(code).count("going on without a cache") == 1


def test_a_cache_dir_that_cannot_be_made_is_one_warning(
    server: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    storage = replace(
        storage_of(server, "obstore"), cache_dir=tmp_path / "file", cache_max_bytes=1 << 30
    )
    plain = config_of("stream", "s3:/", tmp_path / "idx", storage_of(server, "obstore"))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(stream(replace(plain, storage=storage)), stream(plain))
    assert len([record for record in caplog.records if "without a cache" in record.message]) == 1


@pytest.mark.guarantee("cache-one-folder")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_only_a_folder_keeps_indices_and_no_tokens_which_is_said_once(
    server: Running, tmp_path: Path, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    config = config_of(order, "s3:/", cache, storage_of(server, "obstore"), samples=400)
    with caplog.at_level(logging.INFO):
        stream(replace(config, blend=[f"{server.root}/data/web"]))
        assert "cache_max_bytes" not in caplog.text, "no token of a local file would be kept"
        stream(config)
        stream(config)
    assert caplog.text.count(f"{cache}: keeps copies of .idx files and built orders; set ") == 1
    assert not (cache / "chunks").exists()
    assert bool(list(cache.glob("order/*.npy"))) == (order == "megatron")
    assert bool(list(cache.glob("idx/*.idx"))) == (order == "megatron")


@pytest.mark.guarantee("cache-one-folder")
def test_without_a_folder_tokens_are_kept_in_the_users_cache(
    server: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = replace(storage_of(server, "obstore"), cache_max_bytes=1 << 30)
    config = config_of("stream", "s3:/", tmp_path, storage, samples=400)
    config = replace(config, storage=storage)
    with caplog.at_level(logging.INFO):
        stream(config)
    assert page_cache.entries(default_cache_dir() / "chunks")
    assert "cache_max_bytes" not in caplog.text


def bin_bytes(root: Path) -> int:
    """Bytes of the two datasets that `stream` draws from: others are there for other tests."""
    return sum((root / "data" / f"{name}.bin").stat().st_size for name in ("web", "code"))


@pytest.mark.guarantee("cache-local-disk", "cache-dir-whole")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_second_run_fetches_nothing_and_sees_the_same_tokens(
    server: Running, tmp_path: Path, order: str
) -> None:
    plain = config_of(order, "s3:/", tmp_path / "idx", storage_of(server, "obstore"))
    expected = stream(plain)
    storage = replace(
        plain.storage, cache_dir=tmp_path / "cache", cache_max_bytes=1 << 30, memory_bytes=4_000_000
    ).tuned(cache_chunk_bytes=CHUNK)
    config = replace(plain, storage=storage)
    assert torch.equal(stream(config), expected)
    wait_until_staged(config, bin_bytes(server.root))
    before = server.counts()["bytes"]
    # on a busy machine a cached page may be asked for twice
    config = replace(config, storage=storage.tuned(hedge_requests=False))
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
    with loader:
        got = torch.cat(
            [torch.cat([batch["tokens"], batch["labels"]], 1).clone() for batch in loader]
        )
    assert torch.equal(got, expected)
    assert server.counts()["bytes"] - before < 2 * (8 + 16 + 1) * 1024 + 200, (
        "of two datasets the beginnings, and the last KiB of tokens"
    )
    assert loader.stats()["cache_hit_bytes"] > 0
    assert not [
        bad
        for entry in page_cache.entries(tmp_path / "cache" / "chunks")
        for bad in page_cache.damaged_pages(entry)
    ]


def wait_until_staged(config: DataConfig, total: int) -> None:
    """Run epochs until all of the data is in the cache."""
    for _ in range(50):
        cached = sum(
            entry.cached_bytes
            for entry in page_cache.entries(Path(config.storage.cache_dir or "") / "chunks")
        )
        if cached >= total:
            return
        stream(config)
        time.sleep(0.05)
    raise AssertionError(f"{cached} of {total} bytes staged")


def read_all(rank: int, endpoint: str, order: Any, folder: str) -> None:
    """Read a stream through a cache: to be killed meanwhile."""
    storage = StorageConfig(
        storage_options={"anon": True, "endpoint_url": endpoint},
        cache_dir=Path(folder) / "cache",
        cache_max_bytes=1 << 30,
    ).tuned(max_request_bytes=65536, cache_chunk_bytes=1 << 20)
    print("started", flush=True)
    for _ in StreamLoader(
        config_of(order, "s3:/", Path(folder) / "idx", storage),
        micro_batch_size=4,
        global_batch_size=8,
    ):
        pass


def kill_at_random_moments(
    server: Running, order: str, folder: Path, times: int, seed: int
) -> None:
    """Runs that share a cache, killed at random moments, two at a time; what they leave is sound
    and gives the same stream.
    """
    rng = np.random.default_rng(seed)
    server.behave(latency=0.002)
    for number in range(times // 2):
        logs = folder / f"logs-{number}"
        logs.mkdir()
        runs = Family(logs, 2, read_all, server.endpoint, order, str(folder))
        for rank in range(2):
            runs.wait_for("started", rank)
            time.sleep(float(rng.uniform(0, 0.25)))
        runs.close()
        for entry in page_cache.entries(folder / "cache" / "chunks"):
            assert not page_cache.damaged_pages(entry)
            for path in entry.folder.glob("*.data"):
                with open(path, "r+b") as file:
                    assert try_lock(file.fileno()), "locks die with their holders"
    server.behave()
    plain = config_of(order, "s3:/", folder / "idx", storage_of(server, "obstore"))
    storage = StorageConfig(
        storage_options=server.storage_options, cache_dir=folder / "cache", cache_max_bytes=1 << 30
    ).tuned(max_request_bytes=65536, cache_chunk_bytes=1 << 20)
    cached = replace(plain, storage=storage)
    assert torch.equal(stream(cached), stream(plain))


@pytest.mark.guarantee("nothing-half-written", "12-page-file")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_cache_of_killed_runs_is_sound(server: Running, tmp_path: Path, order: str) -> None:
    kill_at_random_moments(server, order, tmp_path, times=4, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_cache_of_fifty_killed_runs_is_sound(server: Running, tmp_path: Path, order: str) -> None:
    kill_at_random_moments(server, order, tmp_path, times=50, seed=2)


def test_a_cache_dir_that_is_a_file_is_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_bytes(b"no folder")
    cached = open_cached(PageCache(tmp_path / "cache", 1 << 30, CHUNK), "s3://b/k", "e", SIZE)
    source = Source(data_of())
    if cached is not None:
        cached.read(0, SIZE, np.empty(SIZE, np.uint8), source)
    assert "is no folder" in caplog.text
    assert "free some space" not in caplog.text


def test_a_page_that_cannot_be_forgotten_costs_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged page on a disk that fails: its chunk is closed all the same."""
    out = np.empty(SIZE, np.uint8)
    cached = open_cached(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", "e", SIZE)
    assert cached is not None
    cached.read(0, SIZE, out, Source(data_of()))
    del cached
    [chunk] = tmp_path.glob("chunks/*/0.data")
    with open(chunk, "r+b") as file:
        file.write(b"damaged!")
    before = len(os.listdir("/proc/self/fd"))

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fail)
    cached = open_cached(PageCache(tmp_path, 1 << 30, CHUNK), "s3://b/k", "e", SIZE)
    assert cached is not None
    cached.read(0, SIZE, out, Source(data_of()))
    np.testing.assert_array_equal(out, data_of())
    assert len(os.listdir("/proc/self/fd")) == before
