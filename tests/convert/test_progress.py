"""Nobody waits without knowing: how far a conversion is, by the bytes that are stored."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard

from streammega import IndexedDatasetWriter
from streammega.cli import progress
from streammega.cli.main import main
from streammega.cli.progress import ProgressDisplay
from streammega.convert import ProgressObserver, convert
from streammega.convert import job as plan
from streammega.errors import ConfigError
from streammega.samples import open as samples
from tests.support.builders import convert_files, write_dataset, write_run_file

LETTERS = np.frombuffer(b"abcdefghij ", np.uint8)
TEXTS = [
    LETTERS[row].tobytes().decode()
    for row in np.random.default_rng(1).integers(0, len(LETTERS), (1500, 2000))
]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def table(path: Path, write: Callable[[Any, str], None]) -> None:
    write(pa.table({"text": TEXTS, "not wanted": TEXTS}), str(path))


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number, text in enumerate(TEXTS):
            member = tarfile.TarInfo(f"{number:06d}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def pair(path: Path) -> None:
    with IndexedDatasetWriter(str(path.with_suffix("")), np.uint16) as writer:
        for _ in range(1200):
            writer.add_document(np.arange(10_000) % 500, [10_000])


FILES: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES, 1)),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES, 1)),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES, preset=0)),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(LINES)),
    "a.csv": lambda path: path.write_text("text\n" + "\n".join(TEXTS)),
    "a.parquet": lambda path: table(path, pq.write_table),
    "a.arrow": lambda path: table(
        path, lambda rows, name: pa.feather.write_feather(rows, name, chunksize=200)
    ),
    "a.tar": tar,
    "a.bin": pair,
    "a.npy": lambda path: np.save(path, np.arange(9_000_000, dtype=np.int32) % 500),
}


class Seen(ProgressObserver):
    """What was told of each stage: its total, and what was done of it, time by time."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[int | None, list[int]]] = {}
        self.tokens = 0
        self._done: list[int] = []

    def begin(self, stage: str, total: int | None = None, unit: str = "B") -> None:
        self._done = []
        self.stages[stage] = (total, self._done)

    def advance(self, size: int, tokens: int = 0) -> None:
        self._done.append(size)
        self.tokens += tokens


@pytest.mark.parametrize("name", FILES)
def test_stored_bytes_of_an_input_are_told_once_as_they_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    FILES[name](path)
    seen = Seen()
    convert_files(
        tmp_path / "out",
        path,
        tokenizer=None if name in ("a.bin", "a.npy") else "bytes",
        eod_id=0 if name == "a.npy" else None,
        dedup=True,
        progress=seen,
    )
    total, done = seen.stages["converting"]
    assert total == sum(done) == path.stat().st_size
    assert max(done) < total, "nothing was told before the end"
    assert seen.tokens > 0


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("workers", [2, 6])
def test_files_that_are_cut_among_workers_are_told_of_once(
    name: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_UNIT_BYTES", 1 << 20)
    path = tmp_path / name
    if name == "a.parquet":
        table(path, lambda rows, name: pq.write_table(rows, name, row_group_size=300))
    else:
        FILES[name](path)
    seen = Seen()
    convert([str(path)], str(tmp_path / "out"), tokenizer="bytes", workers=workers, progress=seen)
    total, done = seen.stages["converting"]
    assert total == sum(done)
    assert total is not None
    assert 0.99 < total / path.stat().st_size <= 1
    assert list(seen.stages) == ["converting", "writing shards", "publishing"]
    stored, written = seen.stages["writing shards"]
    assert stored == sum(written) == (tmp_path / "out.bin").stat().st_size


class Stderr(io.StringIO):
    """stderr that is no terminal, and tells when a line was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        size = super().write(text)
        if "\n" in text:
            self.written.set()
        return size


def listen(monkeypatch: pytest.MonkeyPatch) -> Stderr:
    """From now on; a fixture would not do, since pytest sets stderr as the test begins."""
    stderr = Stderr()
    monkeypatch.setattr(sys, "stderr", stderr)
    return stderr


def test_lines_tell_bytes_rate_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = listen(monkeypatch)
    with ProgressDisplay("converting", 4_000_000, line_every=0.01) as display:
        display.advance(1_000_000, 250_000)
        stderr.written.clear()
        assert stderr.written.wait(60)
    line = stderr.getvalue().splitlines()[-1]
    assert line.startswith("converting:  25%")
    for figure in ("1.00M/4.00M", "<", "B/s", "250,000 tokens"):
        assert figure in line


def test_lines_tell_of_waiting_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = listen(monkeypatch)
    with ProgressDisplay("preparing", line_every=0.01):
        assert stderr.written.wait(60)
    assert stderr.getvalue().startswith("preparing: 00:00 so far\n")


def test_what_is_done_soon_is_not_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = listen(monkeypatch)
    (tmp_path / "a.txt").write_text("a text")
    words = ["convert", str(tmp_path / "a.txt"), str(tmp_path / "o"), "--tokenizer", "bytes"]
    assert main(words) == 0
    assert main(["verify", str(tmp_path / "o")]) == 0
    assert stderr.getvalue() == ""


def test_a_pipe_that_is_waited_for_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = listen(monkeypatch)
    monkeypatch.setattr(progress, "LINE_EVERY", 0.01)
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with open(tmp_path / "pipe", "w") as pipe:
            stderr.written.wait(60)
            pipe.write('{"text": "a text"}')

    writer = threading.Thread(target=write)
    writer.start()
    words = ["convert", str(tmp_path / "pipe"), str(tmp_path / "o"), "--tokenizer", "bytes"]
    assert main(words) == 0
    writer.join()
    assert stderr.written.is_set()


@pytest.mark.parametrize(
    ("words", "function"),
    [
        ("convert IN OUT --tokenizer bytes", "streammega.convert.convert"),
        ("convert IN OUT --tokenizer bytes --task 0/2", "streammega.convert.convert_task"),
        ("convert IN OUT --tokenizer bytes --task merge", "streammega.convert.merge_tasks"),
        ("verify IN", "streammega.dataset.verify.verify"),
    ],
)
def test_commands_tell_that_they_wait(
    words: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = listen(monkeypatch)

    def wait(*_arguments: Any, **_settings: Any) -> None:
        stderr.written.clear()
        raise ConfigError(f"a line was written: {stderr.written.wait(60)}")

    monkeypatch.setattr(progress, "LINE_EVERY", 0.01)
    monkeypatch.setattr(function, wait)
    if words == "verify IN":  # names are looked up before it begins
        write_dataset(tmp_path / "in", [[1, 2]])
    words = words.replace("IN", str(tmp_path / "in")).replace("OUT", str(tmp_path / "out"))
    assert main(words.split()) == 1
    assert "a line was written: True" in stderr.getvalue()


def test_prepare_tells_how_many_datasets_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = listen(monkeypatch)
    blend = []
    for name in ("web", "code", "math"):
        blend.append([write_dataset(tmp_path / name, [np.arange(100)] * 20), 1.0])
    run = write_run_file(tmp_path, data={"blend": blend}, train={"train_iters": 4})
    prepare_one = samples._prepare_one
    done: list[str] = []
    in_turn = threading.Lock()

    def prepare_after_a_line(dataset: Any) -> Any:
        with in_turn:
            while done and f" {len(done)}/" not in stderr.getvalue():
                stderr.written.clear()
                assert stderr.written.wait(60)
            done.append(dataset)
            return prepare_one(dataset)

    monkeypatch.setattr(progress, "LINE_EVERY", 0.01)
    monkeypatch.setattr(samples, "_prepare_one", prepare_after_a_line)
    assert main(["prepare", run, "--json"]) == 0
    lines = [line for line in stderr.getvalue().splitlines() if line.startswith("building indices")]
    (second,) = {line.split("[")[0] for line in lines if " 2/" in line}
    assert second == f"building indices: {200 / len(done):3.0f}% 2/{len(done)} "
    assert any("<" in line and " datasets" in line for line in lines), "the time that is left"
