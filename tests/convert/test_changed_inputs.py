"""An input that changes while it is read, or between a kill and the next start: an error that names
it, or all of the new one; whatever kind of name it has.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streammega import StorageConfig
from streammega.convert import ProgressObserver, convert
from streammega.convert.options import ConvertOptions
from streammega.convert.read.formats import FORMATS, read_slice
from streammega.convert.read.inputs import find_inputs
from streammega.convert.read.source import Skipped
from streammega.dataset.verify import verify
from streammega.errors import ConvertError, ObjectChangedError
from tests.convert.test_publishing import Killed, killed_before
from tests.support.builders import jsonl, stored_texts, tar_bytes, write_dataset
from tests.support.process_programs import run_unit_in_small_batches
from tests.support.servers import http_server
from tools.bench.object_server import running

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
TEXTS = [f"document {number} of the first corpus" for number in range(40)]
NEW_TEXTS = [f"number {number} of the second corpus, which is longer" for number in range(40)]
LATER = 1_800_000_000
"""A time of modification that no file of a test has by itself."""


def parquet_bytes(texts: Sequence[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": list(texts)}), file, row_group_size=5)
    return file.getvalue()


def arrow_bytes(texts: Sequence[str]) -> bytes:
    file = io.BytesIO()
    table = pa.table({"text": list(texts)})
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return file.getvalue()


def npy_bytes(texts: Sequence[str]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.frombuffer("".join(texts).encode(), np.uint8).astype(np.uint16))
    return file.getvalue()


def packed_items(texts: Sequence[str]) -> bytes:
    """A shard of MDS or of litdata: items of one text."""
    encoded = [text.encode() for text in texts]
    items = [len(text).to_bytes(4, "little") + text for text in encoded]
    bounds = 4 * (2 + len(items)) + np.cumsum([0, *map(len, items)])
    return np.array([len(items), *bounds], "<u4").tobytes() + b"".join(items)


def mds_files(texts: Sequence[str]) -> dict[str, bytes]:
    half = len(texts) // 2
    parts = {"a.mds": texts[:half], "b.mds": texts[half:]}
    shards = [
        {
            "format": "mds", "compression": None, "column_names": ["text"],
            "column_encodings": ["str"], "column_sizes": [None], "raw_data": {"basename": name},
        }
        for name in parts
    ]  # fmt: skip
    files = {name: packed_items(part) for name, part in parts.items()}
    return {"index.json": json.dumps({"shards": shards}).encode(), **files}


def litdata_files(texts: Sequence[str]) -> dict[str, bytes]:
    half = len(texts) // 2
    parts = {"chunk-0.bin": texts[:half], "chunk-1.bin": texts[half:]}
    chunks = [{"filename": name} for name in parts]
    config = {"data_format": ["str"], "compression": None}
    files = {name: packed_items(part) for name, part in parts.items()}
    return {"index.json": json.dumps({"config": config, "chunks": chunks}).encode(), **files}


FILES: dict[str, Callable[[Sequence[str]], dict[str, bytes]]] = {
    "in.jsonl": lambda texts: {"in.jsonl": jsonl(texts)},
    "in.json": lambda texts: {"in.json": json.dumps([{"text": text} for text in texts]).encode()},
    "in.jsonl.gz": lambda texts: {"in.jsonl.gz": gzip.compress(jsonl(texts))},
    "in.txt": lambda texts: {"in.txt": "\n".join(texts).encode()},
    "in.csv": lambda texts: {"in.csv": ("text\n" + "\n".join(map(json.dumps, texts))).encode()},
    "in.parquet": lambda texts: {"in.parquet": parquet_bytes(texts)},
    "in.arrow": lambda texts: {"in.arrow": arrow_bytes(texts)},
    "in.npy": lambda texts: {"in.npy": npy_bytes(texts)},
    "in.tar": lambda texts: {
        "in.tar": tar_bytes(*((f"{n}.txt", text.encode()) for n, text in enumerate(texts)))
    },
    "mds": mds_files,
    "litdata": litdata_files,
}
"""By a name: the files of some texts."""


@dataclass
class Place:
    """Where inputs are. url: of a folder. write: puts a file there, in place of another one."""

    url: str
    write: Callable[[str, bytes], None]
    storage: StorageConfig

    def put(self, name: str, texts: Sequence[str]) -> str:
        """All files of an input, at once; its name."""
        files = FILES[name](texts)
        for file, data in files.items():
            self.write(file, data)
        return f"{self.url}/{name}" if name in files else self.url


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A disk where files are written in place or renamed, a bucket, a driver of fsspec, and servers
    of the web that send ETags or times alone.
    """
    folder = tmp_path / "in"
    folder.mkdir()
    with ExitStack() as stack:
        if request.param == "driver":
            url = f"memory:///{tmp_path.name}"
            system, root = fsspec.core.url_to_fs(url)
            yield Place(
                url,
                lambda name, data: system.pipe_file(f"{root}/{name}", data),
                StorageConfig(),
            )
        elif request.param.startswith("http"):
            server = stack.enter_context(http_server({}))
            if request.param == "http times":
                server.left_out |= {("GET", "ETag"), ("HEAD", "ETag")}
            writes = itertools.count(1)

            def put_on_server(name: str, data: bytes) -> None:
                number = next(writes)
                server.objects[f"/in/{name}"] = data
                server.etags[f"/in/{name}"] = f"version-{number}"
                server.modified[f"/in/{name}"] = f"Sat, 21 Nov 2026 00:00:{number:02d} GMT"

            yield Place(f"{server.url}/in", put_on_server, StorageConfig())
        elif request.param == "bucket":
            bucket = stack.enter_context(running(tmp_path))
            storage = StorageConfig(storage_options=bucket.storage_options)
            yield Place("s3://in", replacing(folder), storage)
        elif request.param == "renamed":
            yield Place(str(folder), replacing(folder), StorageConfig())
        else:
            yield Place(str(folder), in_place(folder), StorageConfig())


def replacing(folder: Path) -> Callable[[str, bytes], None]:
    def write(name: str, data: bytes) -> None:
        (folder / "new").write_bytes(data)
        os.replace(folder / "new", folder / name)

    return write


def in_place(folder: Path) -> Callable[[str, bytes], None]:
    times = itertools.count(LATER)

    def write(name: str, data: bytes) -> None:
        (folder / name).write_bytes(data)
        os.utime(folder / name, (LATER, next(times)))

    return write


NAMES_OF = {
    "in place": list(FILES),
    "renamed": ["in.jsonl", "in.parquet", "mds"],
    "bucket": ["in.jsonl", "in.tar", "mds", "litdata"],
    "driver": ["in.jsonl", "in.parquet", "mds", "litdata"],
    "http": ["in.jsonl", "in.jsonl.gz", "in.parquet", "in.npy"],
    "http times": ["in.jsonl", "in.tar"],
}
CASES = [(place, name) for place, names in NAMES_OF.items() for name in names]
# Others were read as a whole before their first document is there.
READ_IN_PARTS = [
    case for case in CASES if case[1] not in ("in.txt", "in.npy") and case != ("bucket", "in.tar")
]
OPTIONS: dict[str, Any] = {"tokenizer": "bytes", "workers": 1}


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 400)
    monkeypatch.setattr("streammega.convert.conversion.run_unit", run_unit_in_small_batches)


@pytest.mark.guarantee("input-changes")
@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(("place", "name"), READ_IN_PARTS, indirect=["place"])
def test_an_input_that_changes_while_it_is_read_is_an_error_that_names_it(
    place: Place, name: str, on_error: Literal["stop", "skip"]
) -> None:
    """Not even where what cannot be read is passed over: half of it would be of another corpus."""
    url = place.put(name, TEXTS)
    options = ConvertOptions(tokenizer="bytes", on_error=on_error)
    (found,) = find_inputs([url], place.storage, options)
    pieces = list(FORMATS[found.format].cut(found, 400, 400, place.storage))
    documents = itertools.chain.from_iterable(
        read_slice(piece, options, place.storage, Skipped()) for piece in pieces
    )
    assert next(documents)
    place.put(name, NEW_TEXTS)
    with pytest.raises(ObjectChangedError, match=url):
        list(documents)


@pytest.mark.guarantee("input-changes")
@pytest.mark.parametrize(("place", "name"), CASES, indirect=["place"])
def test_an_input_that_changed_since_it_was_found_is_an_error_that_names_it(
    place: Place, name: str
) -> None:
    url = place.put(name, TEXTS)
    options = ConvertOptions(tokenizer="bytes")
    (found,) = find_inputs([url], place.storage, options)
    place.put(name, NEW_TEXTS)
    with pytest.raises(ObjectChangedError, match=url):
        list(
            itertools.chain.from_iterable(
                read_slice(piece, options, place.storage, Skipped())
                for piece in FORMATS[found.format].cut(found, 400, 400, place.storage)
            )
        )


class Replaces(ProgressObserver):
    """Replaces an input once, when some of a stage is done."""

    def __init__(self, replace: Callable[[], object], stage: str = "converting") -> None:
        self._replace: Callable[[], object] | None = replace
        self._stage = stage
        self._is_stage = False

    def begin(self, stage: str, total: int | None = None, unit: str = "B") -> None:
        self._is_stage = stage == self._stage

    def advance(self, size: int, tokens: int = 0) -> None:
        if self._is_stage and self._replace is not None:
            self._replace()
            self._replace = None


@pytest.mark.guarantee("input-changes")
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("place", "name"), READ_IN_PARTS, indirect=["place"])
def test_a_conversion_of_an_input_that_changes_leaves_no_dataset(
    place: Place, name: str, tmp_path: Path
) -> None:
    url = place.put(name, TEXTS)
    observer = Replaces(lambda: place.put(name, NEW_TEXTS))
    options: dict[str, Any] = {**OPTIONS, "input_storage": place.storage}
    with pytest.raises(ObjectChangedError, match=url):
        convert([url], str(tmp_path / "out" / "web"), progress=observer, **options)
    assert not list((tmp_path / "out").glob("web*"))
    convert([url], str(tmp_path / "out" / "web"), **options)
    assert stored_texts(tmp_path / "out" / "web") == NEW_TEXTS
    assert verify(str(tmp_path / "out" / "web")).problems == []


@pytest.mark.guarantee("input-changes")
@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("place", "name"), READ_IN_PARTS, indirect=["place"])
def test_an_input_that_changes_between_a_kill_and_the_next_start_is_read_as_a_whole(
    place: Place, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {**OPTIONS, "input_storage": place.storage}
    # requests take their time
    stride = 14 if place.url.startswith(("http", "s3")) else 5
    for step in itertools.count(1, stride):
        output = f"{tmp_path}/out{step}/web"
        place.put(name, TEXTS)
        done = False
        with suppress(Killed), killed_before(step, monkeypatch):
            convert([place.put(name, TEXTS)], output, **options)
            done = True
        if done:
            break
        try:
            convert([place.put(name, NEW_TEXTS)], output, **options)
        except ConvertError as error:
            if "exists already" not in str(error):
                raise
            # so far had the first one got
            if Path(f"{output}.manifest.json").exists():
                assert stored_texts(output) == TEXTS
            continue
        assert stored_texts(output) == NEW_TEXTS, step
    assert step > 5


@pytest.mark.guarantee("input-changes")
@pytest.mark.parametrize("changed", [".bin", ".idx"])
@pytest.mark.parametrize(
    "options", [{}, {"min_tokens": 1}, {"shuffle_seed": 3}], ids=["copied", "read", "shuffled"]
)
def test_a_dataset_with_a_file_that_changes_ends_its_conversion(
    tmp_path: Path, changed: str, options: dict[str, Any]
) -> None:
    """Each of its files is compared, also by what holds it open."""
    documents = [np.full(50, number, np.uint16) for number in range(40)]
    for name in ("a", "b"):
        write_dataset(tmp_path / name, documents)

    def touch() -> None:
        path = tmp_path / f"b{changed}"
        with open(path, "r+b") as file:
            file.write(file.read(1))
        os.utime(path, (LATER, LATER))

    inputs = [str(tmp_path / name) for name in ("a", "b")]
    observer = Replaces(touch, "converting" if options else "writing shards")
    with pytest.raises(ObjectChangedError, match=f"{tmp_path}/b"):
        convert(inputs, str(tmp_path / "out"), workers=1, progress=observer, **options)
    assert not list(tmp_path.glob("out*"))
