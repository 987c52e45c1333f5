"""JSON files that are arrays, or records over several lines: told by what they hold, read as a whole,
and as exact as lines.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.convert import ConvertOptions, ConvertReport, convert
from streammega.convert.documents import RawDocument
from streammega.convert.job import plan_units
from streammega.convert.read.formats import read_slice
from streammega.convert.read.inputs import find_inputs
from streammega.convert.read.source import Input, Skipped, Slice
from streammega.convert.read.text import HEAD_BYTES, holds_lines
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


TWO = [json.dumps(record) for record in RECORDS[:2]]
BROKEN = {
    "cut within a record": (FORMS["array over lines"](RECORDS)[:2500].encode(), r":\d+: broken JSON"),
    "cut between records": (FORMS["array over lines"](RECORDS[:2])[:-3].encode(), r":\d\d: broken JSON"),
    "cut after a comma": (f"[{TWO[0]},\n".encode(), r":2: broken JSON \(Expecting value"),
    "no comma": (f"[\n{TWO[0]}\n{TWO[1]}]".encode(), r":3: broken JSON \(Expecting ',' delimiter"),
    "no JSON": (f"[\n{TWO[0]},\n{{'text': 1}}\n]".encode(), r":3: broken JSON \(Expecting property name"),
    "something behind": (f"[{TWO[0]}]\n]".encode(), r":2: broken JSON \(Expecting value"),
    "a broken member": (f'[{TWO[0]},\n{{"text: "x"}},\n{TWO[1]}]'.encode(), r":2: broken JSON"),
    "a control character": (f'[{TWO[0]},\n{{"text": "a\ttab"}}]'.encode(), r":2: broken JSON \(Invalid control"),
    "too many digits": (f'[{TWO[0]},{{"n": {"7" * 5000}}}]'.encode(), r": broken JSON \(Exceeds the limit"),
    "nested too deeply": (b"[" * 100_000, r": broken JSON \(.*recursion"),
    "not UTF-8": (f"[{TWO[0]},\n".encode() + b'{"text": "\xff"}]', r": is not UTF-8 text \(byte \d+\)"),
}  # fmt: skip


@pytest.mark.guarantee("broken-member-json")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_arrays_name_their_line_and_are_left_out_whole(name: str, tmp_path: Path) -> None:
    data, message = BROKEN[name]
    (tmp_path / "in.json").write_bytes(data)
    (tmp_path / "good.json").write_text(FORMS["array"](RECORDS[:3]))
    with pytest.raises(ConvertError, match=rf"in\.json{message}"):
        convert_bytes(tmp_path / "no", tmp_path / "in.json")
    report = converted(tmp_path, "in.json", "good.json")
    assert report.dropped == {"unreadable file": 1}
    assert "; 0 documents of it, read before that, kept" in report.messages[0]
    assert stored_texts(tmp_path / "out") == [record["text"] for record in RECORDS[:3]]


@pytest.mark.guarantee("arrays-size-memory")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["array", "array over lines", "records over lines"])
def test_arrays_are_read_up_to_the_size_of_a_record(
    form: str, packed: bool, tmp_path: Path
) -> None:
    data = FORMS[form](RECORDS).encode()
    path = tmp_path / ("in.json.gz" if packed else "in.json")
    path.write_bytes(gzip.compress(data) if packed else data)
    convert_bytes(tmp_path / "whole", path, max_record_bytes=len(data))
    assert stored_texts(tmp_path / "whole") == [record["text"] for record in RECORDS]
    with pytest.raises(ConvertError, match=r"in\.json.*: is read as a whole.*jq -c '\.\[\]'"):
        convert_bytes(tmp_path / "no", path, max_record_bytes=len(data) - 1)
    (tmp_path / "good.json").write_text(FORMS["array"](RECORDS[:1]))
    report = converted(tmp_path, path.name, "good.json", max_record_bytes=len(data) - 1)
    assert report.dropped == {"too large": 1}
    assert stored_texts(tmp_path / "out") == [RECORDS[0]["text"]]


def test_records_of_an_array_are_refused_one_by_one_by_their_numbers(tmp_path: Path) -> None:
    records = [
        {"text": "good"},
        {"body": "no text"},
        {"text": "half \ud800"},
        7,
        None,
        {"text": "x"},
    ]
    (tmp_path / "in.json").write_text(json.dumps(records, indent=1))
    report = converted(tmp_path)
    assert stored_texts(tmp_path / "out") == ["good", "x"]
    assert report.dropped == {"broken record": 4}
    places = [message.partition(": ")[0].rpartition(":")[2] for message in report.messages]
    assert places == ["2", "3", "4", "5"]
    with pytest.raises(ConvertError, match=r"in\.json:2: has no key 'text' \(it has: 'body'\)"):
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


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(records=st.lists(values, max_size=6), indent=st.sampled_from([None, 0, 2]))
def test_values_are_those_of_the_json_module(
    tmp_path_factory: pytest.TempPathFactory, records: list[Any], indent: int | None
) -> None:
    """Of an array, and of the same values end to end, of which arrays are taken apart."""
    path = tmp_path_factory.mktemp("json") / "in.json"
    for data in (
        json.dumps(records, indent=indent),
        "[]" + "\n".join(json.dumps([record], indent=indent) for record in records),
    ):
        path.write_text(data)
        source = Slice(input=Input(path=str(path), format="jsonl", size=len(data), etag=""))
        found = list(read_slice(source, ConvertOptions(), StorageConfig(), Skipped()))
        fields = [document.fields for document in found if isinstance(document, RawDocument)]
        assert repr(fields) == repr([{} if record is None else record for record in records])
        assert [document.line for document in found] == [*range(1, len(records) + 1)]  # type: ignore[union-attr]


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
