"""Objects as files: the bytes of one version, whatever the endpoint does, sought in and read ahead
in bounded memory.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from streammega import StorageConfig
from streammega.convert.read.compression import open_stream
from streammega.convert.read.inputs import find_inputs
from streammega.errors import (
    AccessDeniedError,
    EndpointError,
    ObjectChangedError,
    ObjectNotFoundError,
)
from streammega.storage.file_system import expect_end, open_file, open_place
from streammega.storage.object_file import (
    MAX_READ_AHEAD_BYTES,
    MAX_READ_BYTES,
    MIN_READ_BYTES,
    ObjectReader,
)
from streammega.storage.store import ObjectInfo
from tools.bench.object_server import Running, running

FAULTS: dict[str, dict[str, Any]] = {
    "503 bursts": {"error_share": 0.35, "error_burst": 3},
    "resets": {"reset_share": 0.35},
    "truncation": {"truncate_share": 0.35},
    "over-long bodies": {"overlong_share": 0.35},
    "stalls": {"stall_share": 0.35},
}
DATA = np.random.default_rng(3).integers(0, 256, 14 << 20, np.uint8).tobytes()
"""Longer than what is read ahead at most."""


@dataclass
class Place:
    """A served bucket `data` with the object `a.bin`."""

    root: Path
    endpoint: Running
    storage: StorageConfig

    def write(self, name: str, data: bytes) -> None:
        """Replace an object at once."""
        (self.root / "new").write_bytes(data)
        os.replace(self.root / "new", self.root / "data" / name)


@pytest.fixture(params=["obstore", "fsspec"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    # how long pauses grow is shown elsewhere
    monkeypatch.setattr("streammega.storage.retry.MAX_PAUSE", 0.3)
    (tmp_path / "data").mkdir()
    with running(tmp_path) as endpoint:
        storage = StorageConfig(
            transport=request.param, storage_options=endpoint.storage_options, request_timeout=20
        ).tuned(read_timeout=0.5)
        place = Place(tmp_path, endpoint, storage)
        place.write("a.bin", DATA)
        yield place


@pytest.mark.guarantee("corpora-buckets-read")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_middle_change_no_byte(place: Place, fault: str) -> None:
    with open_file("s3://data/a.bin", place.storage) as file:
        head = file.read(1000)
        place.endpoint.behave(**FAULTS[fault])
        pieces = [head, *iter(lambda: file.read(100_000), b"")]
    assert b"".join(pieces) == DATA
    assert place.endpoint.counts()["faults"] > 0, "the fault did not happen: this shows nothing"


def test_every_way_to_read_gives_the_bytes_of_the_object(place: Place) -> None:
    place.write("a.bin", DATA[:700_001])
    data = io.BytesIO(DATA[:700_001])
    draw = random.Random(4)
    with open_file("s3://data/a.bin", place.storage) as file:
        assert file.readable()
        assert file.seekable()
        for _ in range(300):
            if draw.random() < 0.3:
                whence = draw.choice([io.SEEK_SET, io.SEEK_END])
                offset = draw.randrange(800_000) - (700_001 if whence == io.SEEK_END else 0)
                offset = max(offset, -700_001 if whence == io.SEEK_END else 0)
                assert file.seek(offset, whence) == data.seek(offset, whence)
            size = draw.choice([0, 1, 5, 4096, 65_536, 300_000])
            assert file.read(size) == data.read(size)
            assert file.tell() == data.tell()
        assert file.seek(17) == data.seek(17)
        assert file.readline() == data.readline()
        assert file.read() == data.read()
        assert file.read(1) == b""
        with pytest.raises(ValueError, match=r"negative seek|cannot seek"):
            file.seek(-1)
        with pytest.raises(ValueError, match="whence"):
            file.seek(0, 7)
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_an_empty_object_is_an_empty_file(place: Place) -> None:
    place.write("a.bin", b"")
    with open_file("s3://data/a.bin", place.storage) as file:
        assert file.read() == b""
        assert file.read(1) == b""


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(place: Place) -> None:
    with open_file("s3://data/a.bin", place.storage) as file:
        assert file.read(1000) == DATA[:1000]
        place.write("a.bin", DATA[::-1])
        with pytest.raises(ObjectChangedError, match=r"s3://data/a\.bin"):
            file.read()


@pytest.mark.guarantee("corpora-buckets-read")
def test_an_object_that_was_replaced_since_it_was_found_is_not_opened(place: Place) -> None:
    for inputs in (["s3://data"], ["s3://data/a.bin"], ["s3://data/*.bin"]):
        found = find_inputs(inputs, place.storage)[0]
        with open_stream(found.url, place.storage, found.etag) as file:
            assert file.read(10) == DATA[:10]
        place.write("a.bin", DATA)
        with (
            pytest.raises(ObjectChangedError, match=r"s3://data/a\.bin"),
            open_stream(found.url, place.storage, found.etag),
        ):
            pass


def test_what_waiting_cannot_mend_is_an_error_at_once(place: Place) -> None:
    with pytest.raises(ObjectNotFoundError), open_file("s3://data/none", place.storage):
        pass
    place.endpoint.behave(status=403)
    began = time.monotonic()
    with pytest.raises(AccessDeniedError), open_file("s3://data/a.bin", place.storage):
        pass
    assert time.monotonic() - began < 60, "it would be tried again for ten minutes"
    place.endpoint.behave()
    with open_file("s3://data/a.bin", place.storage) as file:
        file.read(1000)
        place.endpoint.behave(status=403)
        with pytest.raises(AccessDeniedError):
            file.read()
        place.endpoint.behave()
        assert file.seek(5) == 5
        assert file.read(7) == DATA[5:12], "after an error a file can be read again"


def test_the_deadline_of_the_config_holds_for_files(place: Place) -> None:
    storage = replace(place.storage, retry_timeout=0.5)
    with open_file("s3://data/a.bin", storage) as file:
        file.read(1000)
        place.endpoint.behave(status=503)
        began = time.monotonic()
        with pytest.raises(EndpointError, match="failed after"):
            file.read()
    assert time.monotonic() - began < 60, "without it reads are tried for ten minutes"


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "a.gz": gzip.compress,
    "a.bz2": bz2.compress,
    "a.xz": lzma.compress,
    "a.lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    "a.zst": lambda data: (
        zstandard.compress(data[:1_000_000]) + zstandard.compress(data[1_000_000:])
    ),
    "a.zip": lambda data: _zipped(data),
}


def _zipped(data: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.txt", data)
    return packed.getvalue()


@functools.cache
def packed_and_plain(name: str) -> tuple[bytes, bytes]:
    """Data in a format, and as it is."""
    plain = DATA[: 3 << 19]
    return PACKED[name](plain), plain


@pytest.mark.parametrize("name", PACKED)
def test_compressed_objects_are_read_through_faults(place: Place, name: str) -> None:
    packed, plain = packed_and_plain(name)
    place.write(name, packed)
    place.endpoint.behave(error_share=0.2, truncate_share=0.2)
    with open_stream(f"s3://data/{name}", place.storage) as file:
        assert file.read() == plain


def test_files_of_a_bucket_are_listed_by_the_store(place: Place) -> None:
    for name in ("deep/b.bin", "deep/er/c.bin", "other.txt"):
        (place.root / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        place.write(name, b"abc")
    files = open_place("s3://data/", place.storage)
    names = ["a.bin", "deep/b.bin", "deep/er/c.bin", "other.txt"]
    for is_deep, listed in ((False, ["a.bin", "other.txt"]), (True, names)):
        # what a listing tells is not asked again
        assert files.is_folder("s3://data/deep")
        assert not files.is_folder("s3://data/other.txt")
        assert not files.is_folder("s3://data/dee")
        entries = list(files.entries("s3://data", is_deep=is_deep))
        assert [entry.path for entry in entries] == [f"s3://data/{name}" for name in listed]
        assert all(files.file(entry.path) == entry for entry in entries)
    assert list(files.entries("s3://data/deep", is_deep=False))
    assert files.file("s3://data/a.bin") == entries[0]
    assert files.file("s3://data/deep") is None
    assert files.read("s3://data/deep/b.bin") == b"abc"


def test_inputs_that_were_listed_are_not_asked_for_one_by_one(place: Place) -> None:
    for number in range(50):
        place.write(f"{number}.txt", b"abc")
    before = place.endpoint.counts()["requests"]
    assert len(find_inputs(["s3://data"], place.storage)) == 51
    assert place.endpoint.counts()["requests"] - before < 10


class Recorded:
    """A store of one object, which notes what is asked of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.spans: list[tuple[int, int]] = []
        self.held = threading.Event()
        self.held.set()

    def url(self, key: str) -> str:
        return f"test://{key}"

    def read(self, key: str, spans: Sequence[tuple[int, int]], etag: str = "") -> list[memoryview]:
        self.spans += spans
        self.held.wait()
        return [memoryview(bytes(stop - start)) for start, stop in spans]


def reader_of(store: Any) -> ObjectReader:
    return ObjectReader(store, ObjectInfo(key="a", size=store.size, etag='"1"'))


@pytest.mark.guarantee("corpora-buckets-read")
def test_what_is_read_ahead_is_bounded_and_comes_in_large_parts() -> None:
    store = Recorded(200 << 20)
    farthest = 0
    with reader_of(store) as file:
        buffer = bytearray(1 << 20)
        while file.readinto(buffer):
            asked = max((stop for _, stop in list(store.spans)), default=0)
            farthest = max(farthest, asked - file.tell())
    assert farthest <= MAX_READ_AHEAD_BYTES + len(buffer)
    spans = sorted(store.spans)
    assert spans[0][0] == 0
    assert spans[-1][1] == store.size
    assert all(one[1] == other[0] for one, other in zip(spans, spans[1:], strict=False))
    assert len(spans) < store.size / MAX_READ_BYTES + 40
    assert max(stop - start for start, stop in spans) <= MAX_READ_BYTES


def test_a_reader_of_everything_holds_no_more_than_that() -> None:
    store = Recorded(100 << 20)
    store.held.clear()
    file = reader_of(store)
    thread = threading.Thread(target=file.readinto, args=(bytearray(store.size),))
    thread.start()
    time.sleep(0.2)
    assert sum(stop - start for start, stop in store.spans) <= MAX_READ_AHEAD_BYTES
    store.held.set()
    thread.join()
    file.close()


def test_a_look_at_a_header_costs_no_more_than_one_small_request() -> None:
    store = Recorded(200 << 20)
    with io.BufferedReader(reader_of(store)) as file:
        file.read(8)
        file.seek(-8, io.SEEK_END)
        file.read(8)
        file.seek(100 << 20)
        file.read(1000)
    assert len(store.spans) == 3
    assert all(stop - start <= MIN_READ_BYTES for start, stop in store.spans)


def test_short_jumps_ahead_read_on() -> None:
    """As over the columns of a Parquet file that are not wanted."""
    store = Recorded(60 << 20)
    with reader_of(store) as file:
        buffer = bytearray(400_000)
        while file.readinto(buffer):
            file.seek(100_000, io.SEEK_CUR)
    assert max(stop - start for start, stop in store.spans) == MAX_READ_BYTES
    assert len(store.spans) < store.size / MAX_READ_BYTES + 40


def test_little_is_read_ahead_behind_the_end_that_is_expected() -> None:
    """As of a unit of a large file, which other units follow."""
    store = Recorded(60 << 20)
    stop = (20 << 20) + 12_345
    with io.BufferedReader(reader_of(store)) as file:
        expect_end(file, stop)
        file.seek(10 << 20)
        while file.tell() < stop:
            file.read(1 << 20)
    asked = max(end for _, end in store.spans)
    assert stop <= asked <= stop + (1 << 20) + MIN_READ_BYTES


def test_ctrl_c_is_heard_while_a_file_waits_for_its_endpoint(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").write_bytes(DATA)
    program = (
        "import json, sys\n"
        "from streammega import StorageConfig\n"
        "from streammega.storage.file_system import open_file\n"
        "storage = StorageConfig(storage_options=json.loads(sys.argv[1]))\n"
        "with open_file('s3://data/a.bin', storage) as file:\n"
        "    file.read(1000)\n"
        "    print('reads', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    file.read()\n"
    )
    with running(tmp_path) as endpoint:
        process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(endpoint.storage_options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "reads\n"
        endpoint.behave(stall_share=1.0)
        before = endpoint.counts()["requests"]
        process.stdin.write("\n")
        process.stdin.flush()
        while endpoint.counts()["requests"] == before:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.2)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    assert time.monotonic() - began < 30
    assert "KeyboardInterrupt" in error
