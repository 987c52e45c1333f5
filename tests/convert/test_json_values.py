"""JSON files that are arrays, or records over several lines: told by what they hold, streamed, and
as exact as lines.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.convert import ConvertOptions, ConvertReport, convert
from streammega.convert.job import plan_units
from streammega.convert.read.inputs import find_inputs
from streammega.convert.read.text import HEAD_BYTES, holds_lines, read_values
from streammega.errors import ConvertError
from tests.support.builders import convert_bytes, stored_texts
from tests.support.processes import launch
from tests.support.servers import S3

RECORDS = [
    {
        "text": f'text {n} with [brackets], {{braces}}, "quotes" \\ and é\n',
        "meta": {"n": n, "tags": ["a", []]},
    }
    for n in range(40)
]
FORMS = {
    "lines": lambda records: "".join(json.dumps(record) + "\n" for record in records),
    "array": lambda records: json.dumps(records),
    "array over lines": lambda records: json.dumps(records, indent=2, ensure_ascii=False) + "\n",
    "a record a line in an array": lambda records: (
        "[\n" + ",\n".join(map(json.dumps, records)) + "\n]"
    ),
    "records over lines": lambda records: "\n".join(
        json.dumps(record, indent="\t") for record in records
    ),
    "arrays end to end": lambda records: (
        json.dumps(records[:7]) + "\n" + json.dumps([]) + json.dumps(records[7:])
    ),
    "with CRLF": lambda records: json.dumps(records, indent=1).replace("\n", "\r\n"),
}


def digests(prefix: Path) -> list[str]:
    return [
        hashlib.sha256(Path(f"{prefix}{suffix}").read_bytes()).hexdigest()
        for suffix in (".bin", ".idx")
    ]


def converted(folder: Path, *names: str, **options: Any) -> ConvertReport:
    """What is said of files of a folder, in.json by default, that become the dataset `out` there
    without what is broken in them.
    """
    inputs = [str(folder / name) for name in names or ("in.json",)]
    output = str(folder / "out")
    return convert_bytes(output, *inputs, on_error="skip", **options)


@pytest.mark.parametrize("form", FORMS)
def test_large_files_are_cut_into_units_only_where_they_are_lines(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 500)
    (tmp_path / "in.json").write_text(FORMS[form](RECORDS))
    units = plan_units(find_inputs([str(tmp_path / "in.json")]), ConvertOptions(), StorageConfig())
    assert (len(units) > 5) == (form == "lines")
    convert([str(tmp_path / "in.json")], str(tmp_path / "out"), tokenizer="bytes", workers=2)
    assert stored_texts(tmp_path / "out") == [record["text"] for record in RECORDS]


def test_arrays_are_read_from_object_storage(
    s3: S3, s3_storage: StorageConfig, bucket: str, tmp_path: Path
) -> None:
    import s3fs

    system = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)
    system.pipe_file(f"{bucket}/in/a.json", FORMS["array over lines"](RECORDS).encode())
    system.pipe_file(f"{bucket}/in/b.json.gz", gzip.compress(FORMS["array"](RECORDS).encode()))
    convert_bytes(tmp_path / "out", f"s3://{bucket}/in", storage=s3_storage)
    assert stored_texts(tmp_path / "out") == [record["text"] for record in RECORDS] * 2


BROKEN = {
    "cut within a record": (FORMS["array over lines"](RECORDS)[:2500], "it ends within a record"),
    "cut between records": (json.dumps(RECORDS[:2], indent=0)[:-1], r":\d\d: broken JSON \(it ends within an array"),
    "cut after a comma": ("[" + json.dumps(RECORDS[0]) + ",\n", "it ends within an array"),
    "no comma": ("[\n" + json.dumps(RECORDS[0]) + "\n" + json.dumps(RECORDS[1]) + "]", r":3: broken JSON \(a comma"),
    "no JSON": ("[\n" + json.dumps(RECORDS[0]) + ",\n{'text': 1}\n]", r":3: broken JSON \(Expecting property name"),
    "something behind": (json.dumps(RECORDS[:2]) + "\n]", r":2: broken JSON"),
}  # fmt: skip


@pytest.mark.guarantee("arrays-size-memory", "broken-member-json")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_arrays_name_their_line_and_lose_nothing_in_silence(
    name: str, tmp_path: Path
) -> None:
    text, message = BROKEN[name]
    (tmp_path / "in.json").write_text(text)
    (tmp_path / "good.json").write_text(FORMS["array"](RECORDS[:3]))
    with pytest.raises(
        ConvertError,
        match=rf"in\.json.*{message}" if not message.startswith(":") else rf"in\.json{message}",
    ):
        convert_bytes(tmp_path / "no", tmp_path / "in.json")
    report = converted(tmp_path, "in.json", "good.json")
    assert report.dropped == {"unreadable file": 1}
    assert "what comes after it cannot be read" in report.messages[0]
    assert stored_texts(tmp_path / "out")[-3:] == [record["text"] for record in RECORDS[:3]]


@pytest.mark.guarantee("broken-member-json")
@pytest.mark.parametrize("bad", ['{"text: "x"}', '{"text": "a",}', '{"text": "x"} {"text": "y"}'])
def test_what_follows_a_broken_member_is_left_out_and_reported(bad: str, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text(f'[{{"text": "good"}},\n{bad},\n{{"text": "b"}}]')
    report = converted(tmp_path)
    assert stored_texts(tmp_path / "out")[0] == "good"
    assert "b" not in stored_texts(tmp_path / "out")
    assert report.dropped == {"unreadable file": 1}
    assert "in.json:2: broken JSON" in report.messages[0]
    assert "what comes after it cannot be read" in report.messages[0]


@pytest.mark.parametrize("form", ["array", "lines", "records over lines"])
def test_a_number_of_too_many_digits_costs_its_record_alone(form: str, tmp_path: Path) -> None:
    text = FORMS[form]([{"text": "a"}, {"text": "b", "n": -7}, {"text": "c"}])
    (tmp_path / "in.json").write_text(text.replace("-7", "-" + "7" * 5000))
    report = converted(tmp_path)
    assert stored_texts(tmp_path / "out") == ["a", "c"]
    assert report.dropped == {"broken record": 1}


def test_records_of_an_array_are_refused_one_by_one(tmp_path: Path) -> None:
    broken = [
        b'{"text": "good"}',
        b'{"body": "no text"}',
        b'{"text": "\xff"}',
        b'{"text": "a\ttab"}',
        b"7",
        b"null",
        b'{"text": "x"}',
    ]
    (tmp_path / "in.json").write_bytes(b"[\n" + b",\n".join(broken) + b"\n]\n")
    report = converted(tmp_path)
    assert stored_texts(tmp_path / "out") == ["good", "x"]
    assert report.dropped == {"broken record": 5}
    places = [message.partition(": ")[0].rpartition(":")[2] for message in report.messages]
    assert places == ["3", "4", "5", "6", "7"]
    with pytest.raises(ConvertError, match=r"in\.json:3: has no key 'text' \(it has: 'body'\)"):
        convert_bytes(tmp_path / "no", tmp_path / "in.json")


def test_a_file_of_lines_whose_first_is_broken_stays_one_of_lines(tmp_path: Path) -> None:
    for first in ('{"text": ', '{"text": "a', "{", '{"text": "a"} {'):
        (tmp_path / "in.json").write_text(f'{first}\n{{"text": "b"}}\n{{"text": "c"}}\n')
        report = converted(tmp_path, overwrite=True)
        assert stored_texts(tmp_path / "out") == ["b", "c"], first
        assert report.dropped == {"broken record": 1}


def test_lines_that_are_called_lines_but_are_an_array_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(FORMS["array over lines"](RECORDS))
    with pytest.raises(ConvertError, match=r"in\.jsonl:1: .*call the file \.json"):
        convert_bytes(tmp_path / "out", tmp_path / "in.jsonl")


class Pieces(io.RawIOBase):
    """A file that gives few bytes at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data = data
        self.size = size
        self.at = 0

    def read(self, size: int = -1) -> bytes:
        piece = self.data[self.at : self.at + self.size]
        self.at += len(piece)
        return piece


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25)
@given(
    records=st.lists(values, max_size=6),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    head=st.integers(0, 50),
    size=st.integers(1, 20),
)
def test_values_are_found_wherever_reads_end(
    records: list[Any], indent: int | None, ascii_only: bool, head: int, size: int
) -> None:
    data = json.dumps(records, indent=indent, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    )
    found = list(read_values(data[:head], Pieces(data[head:], size), "x", ConvertOptions()))
    assert repr([json.loads(document.data) for document in found]) == repr(records)
    for document in found:
        assert document.data.split(b"\n")[0] in data.split(b"\n")[document.line - 1]


@given(
    records=st.lists(st.dictionaries(st.text(), values, max_size=3), min_size=1, max_size=4),
    indent=st.sampled_from([None, 2]),
)
def test_what_a_file_holds_is_told_by_its_first_record(
    records: list[Any], indent: int | None
) -> None:
    data = "\n".join(json.dumps(record, indent=indent) for record in records).encode()
    over_lines = b"\n" in json.dumps(records[0], indent=indent).encode()
    assert holds_lines(data) == (not over_lines)
    assert holds_lines(b"\xef\xbb\xbf \n" + data) == (not over_lines)
    assert not holds_lines(json.dumps(records, indent=indent).encode())


def test_long_first_records_are_told_too() -> None:
    long = {"id": 1, "text": "x" * HEAD_BYTES}
    assert holds_lines((json.dumps(long) + "\n").encode()[:HEAD_BYTES])
    assert not holds_lines(json.dumps(long, indent=1).encode()[:HEAD_BYTES])


@pytest.mark.guarantee("arrays-size-memory")
def test_an_array_is_read_in_bounded_memory() -> None:
    record = json.dumps({"text": "word " * 2000}).encode()

    def parts() -> Iterator[bytes]:
        yield b"["
        for _ in range(6000):
            yield record + b",\n"
        yield record + b"]"

    class Stream(io.RawIOBase):
        source = parts()

        def read(self, size: int = -1) -> bytes:
            found = []
            while size > 0 and (part := next(self.source, b"")):
                found.append(part)
                size -= len(part)
            return b"".join(found)

    tracemalloc.start()
    count = 0
    for document in read_values(b"", Stream(), "x", ConvertOptions()):
        count += len(document.data) == len(record)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 6001
    assert peak < 12 << 20, "of 60 MB"


def test_a_killed_conversion_of_arrays_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    for number in range(6):
        records = [{"text": f"{number} {n} " + "word " * 300} for n in range(2000)]
        (tmp_path / f"{number}.json").write_text(json.dumps(records, indent=1))
    inputs = [str(tmp_path / f"{number}.json") for number in range(6)]
    convert_bytes(tmp_path / "whole", *inputs)
    code = (
        "import sys; from streammega.convert import convert; import streammega.convert.job as plan;"
        "plan.MAX_UNIT_BYTES = 1000;"
        "convert(sys.argv[2:], sys.argv[1], tokenizer='bytes', workers=1)"
    )
    command = ["-c", code, str(tmp_path / "out"), *inputs]
    for seed in range(1, 3):
        process = launch(tmp_path, 1, command)
        wanted = seed + 1
        while (
            process.ended(0, within=0.01) == [None]
            and len(list((tmp_path / ".out.convert").glob("unit-*.json"))) < wanted
        ):
            pass
        time.sleep(random.Random(seed).random() / 20)
        process.close()
    process = launch(tmp_path, 1, command)
    assert process.ended(0, within=120) == [0], process.log(0)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
