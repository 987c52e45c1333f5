"""Records may be large, up to a limit: a larger one is an error with its place, or is skipped."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import IndexedDataset
from streammega.convert import convert
from streammega.convert.read import source as read_source
from streammega.convert.read import tables
from streammega.convert.read.source import LongLine, read_lines
from streammega.errors import ConvertError
from tests.support.builders import convert_bytes, stored_texts, tar_bytes, write_tar
from tests.support.processes import launch

MAX_BYTES = 3000
LARGE = "large " * 1000


@given(
    texts=st.lists(st.binary(max_size=60), max_size=8),
    begun=st.integers(0, 30),
    max_bytes=st.integers(1, 40),
    read=st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_lines_are_lines_however_reads_end(
    texts: list[bytes], begun: int, max_bytes: int, read: int
) -> None:
    data = b"\n".join(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_source, "READ_BYTES", read)
        found = list(read_lines(data[:begun], io.BytesIO(data[begun:]), max_bytes))
    expected = list(io.BytesIO(data))
    assert len(found) == len(expected)
    for line, whole in zip(found, expected, strict=True):
        if isinstance(line, LongLine):
            assert line.size == len(whole) > max_bytes
        else:
            assert line == whole


def json_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), file)
    return file.getvalue()


def arrow(texts: list[str]) -> bytes:
    file = io.BytesIO()
    table = pa.table({"text": texts})
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def tar(texts: list[str]) -> bytes:
    return tar_bytes(*((f"{number}.txt", text.encode()) for number, text in enumerate(texts)))


def packed_tar(texts: list[str]) -> bytes:
    packed = [gzip.compress(text.encode()) for text in texts]
    return tar_bytes(*((f"{number}.txt.gz", data) for number, data in enumerate(packed)))


FORMS: dict[str, tuple[Callable[[list[str]], bytes], str]] = {
    "in.jsonl": (json_lines, r"in\.jsonl:3: "),
    "in.jsonl.gz": (lambda texts: gzip.compress(json_lines(texts)), r"in\.jsonl\.gz:3: "),
    "in.csv": (lambda texts: "\n".join(["text", *texts]).encode(), r"in\.csv:4: "),
    "in.parquet": (parquet, r"in\.parquet:3: "),
    "in.arrow": (arrow, r"in\.arrow:3: "),
    "in.tar": (tar, r"in\.tar!2\.txt: "),
    "packed.tar": (packed_tar, r"packed\.tar!2\.txt\.gz: "),
}


@pytest.mark.guarantee("record-larger-max")
@pytest.mark.parametrize("unit", [1 << 20, 500])
@pytest.mark.parametrize("form", FORMS)
def test_a_record_that_is_too_large_is_refused_or_skipped(
    form: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", unit)
    monkeypatch.setattr(read_source, "READ_BYTES", 700)
    monkeypatch.setattr("streammega.convert.read.text.READ_BYTES", 700)
    monkeypatch.setattr("streammega.convert.read.text.HEAD_BYTES", 64)
    write, place = FORMS[form]
    (tmp_path / form).write_bytes(write(["first", "second", LARGE, "last"]))
    settings: dict[str, Any] = {"tokenizer": "bytes", "workers": 1}
    inputs = [str(tmp_path / form)]
    message = place + r"the record is larger than max_record_bytes \(--max-record-bytes\), 3,000;"
    with pytest.raises(ConvertError, match=message):
        convert(inputs, str(tmp_path / "no"), max_record_bytes=MAX_BYTES, **settings)
    report = convert(
        inputs, str(tmp_path / "out"), max_record_bytes=MAX_BYTES, on_error="skip", **settings
    )
    assert report.documents == 3
    assert report.dropped == {"too large": 1}
    whole = convert(inputs, str(tmp_path / "whole"), **settings)
    assert whole.documents == 4


@pytest.mark.guarantee("record-larger-max")
@pytest.mark.parametrize("name", ["large.txt", "large.txt.gz"])
@pytest.mark.parametrize("data", [LARGE.encode(), b"\xef\xbb\xbf" + LARGE.encode()])
def test_a_text_that_is_too_large_is_refused_or_skipped(
    name: str, data: bytes, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (tmp_path / "z.txt").write_text("small")
    settings: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "max_record_bytes": MAX_BYTES}
    with pytest.raises(ConvertError, match=rf"{name}: the record is larger than max_record_bytes"):
        convert([str(tmp_path / name)], str(tmp_path / "no"), **settings)
    inputs = [str(tmp_path / name), str(tmp_path / "z.txt")]
    report = convert(inputs, str(tmp_path / "out"), on_error="skip", **settings)
    assert report.dropped == {"too large": 1}
    (document,) = IndexedDataset(str(tmp_path / "out"))[:]
    assert bytes(np.asarray(document)[:-1].astype(np.uint8)) == b"small"


@pytest.mark.guarantee("record-larger-max")
def test_a_conversion_that_is_killed_within_a_large_record_goes_on_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n')
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": "words and words\n" * (1 << 20)}) + '\n{"text": "last"}\n'
    )
    inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    convert_bytes(tmp_path / "whole", *inputs)
    code = "import sys; from streammega.convert import convert; convert(sys.argv[2:], sys.argv[1], tokenizer='bytes', workers=1)"
    command = ["-c", code, str(tmp_path / "out"), *inputs]
    work = tmp_path / ".out.convert"
    process = launch(tmp_path, 1, command)
    while process.ended(0, within=0.002) == [None] and not list(
        work.glob(".unit-000001-*.partial")
    ):
        pass
    process.close()
    assert {path.name for path in work.glob("unit-*.json")} == {"unit-000000.json"}
    again = launch(tmp_path, 1, command)
    assert again.ended(0, within=120) == [0], again.log(0)
    assert "1 of 6 units are done" in again.log(0)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (
            tmp_path / f"whole{suffix}"
        ).read_bytes()
    assert not work.exists()


@pytest.mark.parametrize("compression", ["", ".gz"])
def test_members_of_json_lines_may_be_larger_than_a_record(
    compression: str, tmp_path: Path
) -> None:
    lines = [f"line {number:03}" for number in range(100)]
    data = json_lines([*lines[:50], LARGE, *lines[50:]])
    # the end of a line, and a place within one
    for max_bytes in (10 * len(json_lines(lines[:1])) - 1, 200):
        stored = gzip.compress(data) if compression else data
        write_tar(tmp_path / "in.tar", (f"a.jsonl{compression}", stored))
        done = convert(
            [str(tmp_path / "in.tar")],
            str(tmp_path / "out"),
            tokenizer="bytes",
            max_record_bytes=max_bytes,
            on_error="skip",
            overwrite=True,
        )
        assert done.dropped == {"too large": 1}
        assert f"a.jsonl{compression}:51: the record is larger" in done.messages[0]
        written = IndexedDataset(str(tmp_path / "out"))
        stored_texts = [bytes(written.get(n)[:-1].tolist()).decode() for n in range(len(written))]
        assert stored_texts == lines


@pytest.mark.parametrize("suffix", ["txt.gz", "npy.gz", "npy"])
def test_members_that_are_too_large_are_refused(suffix: str, tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.zeros(5000, np.uint16))
    data = array.getvalue() if "npy" in suffix else LARGE.encode()
    stored = gzip.compress(data) if suffix.endswith("gz") else data
    write_tar(tmp_path / "in.tar", (f"a.{suffix}", stored))
    with pytest.raises(ConvertError, match=rf"in\.tar!a\.{suffix}: the record is larger than"):
        convert(
            [str(tmp_path / "in.tar")],
            str(tmp_path / "out"),
            tokenizer=None if "npy" in suffix else "bytes",
            max_record_bytes=MAX_BYTES,
        )


def test_a_cell_that_is_too_large_is_no_missing_quote(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\nfirst\n" + "a" * 200 + "\nlast\n")
    with pytest.raises(ConvertError, match=r"in\.csv:3: the record is larger than max_record_byte"):
        convert(
            [str(tmp_path / "in.csv")],
            str(tmp_path / "no"),
            tokenizer="bytes",
            max_record_bytes=100,
        )


def test_rows_of_csv_are_measured_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text('text\n"' + "漢字\n" * 20 + '"\nnext\n', encoding="utf-8")
    done = convert(
        [str(tmp_path / "in.csv")],
        str(tmp_path / "out"),
        tokenizer="bytes",
        max_record_bytes=100,
        on_error="skip",
    )
    assert done.documents == 1
    assert done.dropped == {"too large": 1}


cells = st.text(st.sampled_from('aa",;\n\r é'), max_size=40)


@pytest.mark.guarantee("record-larger-max")
@given(rows=st.lists(st.tuples(cells, cells), max_size=9), read_bytes=st.integers(1, 99))
def test_a_large_row_of_csv_costs_itself_alone(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], read_bytes: int
) -> None:
    max_bytes = 40
    folder = tmp_path_factory.mktemp("csv")
    stored = []
    for row in [("id", "text"), *rows, ("x", "last")]:
        line = io.StringIO()
        csv.writer(line).writerow(row)
        stored.append(line.getvalue().encode())
    (folder / "in.csv").write_bytes(b"".join(stored))
    are_large = [len(line) - 2 > max_bytes for line in stored[1:-1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "READ_BYTES", read_bytes)
        done = convert(
            [str(folder / "in.csv")],
            str(folder / "out"),
            tokenizer="bytes",
            workers=1,
            max_record_bytes=max_bytes,
            on_error="skip",
        )
    kept = [text for (_, text), is_large in zip(rows, are_large, strict=True) if not is_large]
    assert stored_texts(folder / "out") == [*filter(None, kept), "last"]
    assert done.dropped.get("too large", 0) == sum(are_large)


@pytest.mark.guarantee("record-larger-max")
@pytest.mark.parametrize("cell", ["a" * 100, "a" * 99 + "\n", '","' * 200, ",a" * 200])
def test_memory_of_a_large_row_of_csv_is_bounded(cell: str, tmp_path: Path) -> None:
    repeats = (16 << 20) // len(cell)
    with open(tmp_path / "in.csv", "w") as file:
        file.write('text\nfirst\n"')
        file.writelines(itertools.repeat(cell, repeats))
        file.write('"\nlast\n')
    tracemalloc.start()
    done = convert(
        [str(tmp_path / "in.csv")],
        str(tmp_path / "out"),
        tokenizer="bytes",
        workers=1,
        max_record_bytes=1 << 16,
        on_error="skip",
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20
    assert stored_texts(tmp_path / "out")[0] == "first"
    assert sum(done.dropped.values()) >= 1


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_a_line_is_measured_without_its_ending(ending: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    line = json.dumps({"text": "a" * 80})
    source.write_bytes(f"{line}{ending}".encode())
    settings: dict[str, Any] = {"tokenizer": "bytes", "workers": 1}
    convert([str(source)], str(tmp_path / "out"), max_record_bytes=len(line), **settings)
    assert len(IndexedDataset(str(tmp_path / "out"))) == 1
    with pytest.raises(ConvertError, match=r"in\.jsonl:1: the record is larger than"):
        convert([str(source)], str(tmp_path / "no"), max_record_bytes=len(line) - 1, **settings)
