"""Records too long to be held become what they would become if they were, in memory that does not
grow with them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.cli.describe import describe_input
from streammega.convert import ConvertOptions, convert
from streammega.convert.documents import LongRecord, LongString, RawDocument
from streammega.convert.dry_run import plan_conversion
from streammega.convert.read import columns, json_values, lines, long_records, readers
from streammega.convert.read.inputs import find_inputs
from streammega.convert.read.lines import LongLine, read_lines
from streammega.convert.read.long_records import read_record, text_file
from streammega.convert.read.slices import Skipped, Slice
from streammega.convert.tokenize import long_texts
from streammega.errors import ConvertError, FormatError
from tests.convert.test_long_texts import MAKERS, SENTENCES, WORDS

WORDS_OF_SENTENCES = " ".join(SENTENCES).split()
DAMAGED = st.sampled_from(
    [
        (b'"', b""),
        (b"\\", b""),
        (b"u", b"x"),
        (b",", b",,"),
        (b"}", b""),
        (b'"', b'"\n'),
        (b"\xc3", b"\xff"),
    ]
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_records, "LONG_TEXT", 8)
    monkeypatch.setattr(long_records, "READ_BYTES", 7)


def blocks(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


def whole(value: Any) -> Any:
    """A record with its long texts in it."""
    if isinstance(value, LongString):
        return "".join(value.pieces())
    if isinstance(value, dict):
        return {name: whole(item) for name, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def read_in_blocks(data: bytes, size: int, folder: Path) -> Any:
    with text_file(str(folder)) as texts:
        return whole(read_record(blocks(data, size), texts, "a.json:7"))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(WORDS, max_size=9).map("".join),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.usefixtures("small")
def test_records_in_blocks_are_what_they_are_as_a_whole(tmp_path: Path) -> None:
    @given(value=VALUES, ascii_only=st.booleans(), size=st.integers(1, 40))
    @settings(max_examples=150, deadline=None)
    def check(value: Any, ascii_only: bool, size: int) -> None:
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert repr(read_in_blocks(data, size, tmp_path)) == repr(json.loads(data))

    check()
    for escapes in (r"\ud83d\ude00" * 9, r"\u00e9\\\"\n\/" * 9, r"\\u12" * 9):
        for size in range(1, 30):
            data = f'{{"text": "{escapes}"}}'.encode()
            assert read_in_blocks(data, size, tmp_path) == json.loads(data)


@pytest.mark.usefixtures("small")
def test_what_is_refused_as_a_whole_is_refused_in_blocks(tmp_path: Path) -> None:
    @given(
        value=st.dictionaries(st.text(max_size=3), VALUES, min_size=1, max_size=3),
        damage=DAMAGED,
        size=st.integers(1, 40),
    )
    @settings(max_examples=150, deadline=None)
    def check(value: Any, damage: tuple[bytes, bytes], size: int) -> None:
        data = json.dumps(value, ensure_ascii=len(value) % 2 == 0).encode().replace(*damage)
        try:
            expected = json.loads(data)
            json.dumps(expected, ensure_ascii=False).encode()
        except ValueError:
            with pytest.raises(FormatError, match=r"^a\.json:7: "):
                read_in_blocks(data, size, tmp_path)
        else:
            assert repr(read_in_blocks(data, size, tmp_path)) == repr(expected)

    check()
    lone = r'{"text": "long enough to be one of those \ud83d"}'
    with pytest.raises(
        FormatError, match=r"half of a character \(a lone surrogate, character 31\)"
    ):
        read_in_blocks(lone.encode(), 5, tmp_path)
    for number in ('1"long enough"', '-"long enough"', '"long enough" "long enough"'):
        with pytest.raises(FormatError, match="broken JSON"):
            read_in_blocks(f'{{"a": {number}}}'.encode(), 5, tmp_path)
    spelt = b'{"0.0e0": 0.0e0, "a": 0.1e1, "text": "long enough"}'
    assert read_in_blocks(spelt, 5, tmp_path) == json.loads(spelt)


@given(
    texts=st.lists(st.binary(max_size=60), max_size=8),
    begun=st.integers(0, 30),
    most=st.integers(1, 40),
    read=st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_lines_are_lines_however_long(texts: list[bytes], begun: int, most: int, read: int) -> None:
    data = b"\n".join(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "READ_BYTES", read)
        found = []
        for line in read_lines(data[:begun], io.BytesIO(data[begun:]), most):
            found.append(b"".join(line.pieces) if isinstance(line, LongLine) else line)
    assert found == list(io.BytesIO(data))


@pytest.mark.parametrize("form", ["a.jsonl", "a.json"])
def test_a_record_is_held_up_to_its_limit_and_no_further(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONG_RECORD", 3 << 20)
    found = []
    for size in ((3 << 20) - 100, (3 << 20) + 100):
        data = json.dumps({"text": "x" * (size - 12)}).encode()
        (tmp_path / form).write_bytes(data + b"\n" if form == "a.jsonl" else b"[" + data + b"]")
        piece = Slice(input=find_inputs([str(tmp_path / form)])[0])
        found += [
            type(item)
            for item in readers.read_slice(piece, ConvertOptions(), StorageConfig(), Skipped())
        ]
    assert found == [RawDocument, LongRecord]


# --- conversions ------------------------------------------------------------------------------------------------------------


def records() -> list[dict[str, Any]]:
    rng = np.random.default_rng(4)

    def text(count: int) -> str:
        return " ".join(rng.choice(WORDS_OF_SENTENCES, count))

    found = [
        {
            "id": 1,
            "text": text(900),
            "b": text(5),
            "list": [text(3), text(700), "", text(800)],
            "meta": {"text": text(600)},
        },
        {"id": 2, "text": text(3), "b": text(4), "list": [text(5)], "meta": {"text": text(2)}},
        {
            "id": 3,
            "text": text(4),
            "b": text(900),
            "list": ["", " " * 900, text(4)],
            "meta": {"text": text(2)},
        },
        {
            "id": 4,
            "text": " " * 900,
            "b": "",
            "list": [" " * 900, ""],
            "meta": {"text": None, "else": text(900)},
        },
        {"id": 5, "text": "", "b": "", "list": [], "meta": {"text": ""}, "else": text(900)},
        {
            "id": 6,
            "text": text(50),
            "b": " " * 900,
            "list": [text(900), text(900)],
            "meta": {"text": text(3)},
        },
    ]
    return [*found, found[0], found[2]]


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nested": {"keys": ("meta.text",)},
    "two keys": {"keys": ("b", "text")},
    "modes": {"keys": ("text", "b:1")},
    "modes, kept": {"keys": ("text", "b:1"), "keep_empty": True, "bos": "<s>"},
    "one mode": {"keys": ("text", "b:1"), "modes": (1,)},
    "the other mode": {"keys": ("text", "b:1"), "modes": (0,), "max_tokens": 300},
    "modes, cut": {"keys": ("b", "text:1"), "max_tokens": 600},
    "sentences": {"keys": ("list",)},
    "sentences, kept": {"keys": ("list",), "keep_empty": True, "bos": "<s>"},
    "sentences, cut": {"keys": ("list",), "max_tokens": 600, "dedup": True},
    "no end": {"keys": ("list",), "max_tokens": 600, "append_eod": False},
    "dropped": {"max_tokens": 100, "long": "drop", "shuffle_seed": 3},
    "short": {"min_tokens": 300, "dedup": True, "shuffle_seed": 3, "bos": "<s>"},
    "not there": {"keys": ("nothing",), "on_error": "skip"},
    "a number": {"keys": ("id",), "on_error": "skip"},
    "split": {"split_sentences": "en"},
}
FORMS = {
    "in.jsonl": lambda found: "".join(json.dumps(record) + "\n" for record in found),
    "letters.jsonl": lambda found: (
        "\ufeff" + "\n".join(json.dumps(record, ensure_ascii=False) for record in found)
    ),
    "array.json": lambda found: json.dumps(found),
    "over lines.json": lambda found: "\n".join(json.dumps(record, indent=1) for record in found),
    "packed.json.gz": lambda found: json.dumps(found, indent=1),
}


def held_and_long(
    path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[Any], list[list[str]]]:
    """Reports of both, and digests of what was written."""
    reports: list[Any] = []
    digests = []
    for name in ("held", "long"):
        if name == "long":
            monkeypatch.setattr(readers, "LONG_RECORD", 1000)
            monkeypatch.setattr(columns, "LONG_RECORD", 1000)
            monkeypatch.setattr(long_records, "LONG_TEXT", 500)
            monkeypatch.setattr(long_records, "READ_BYTES", 211)
            monkeypatch.setattr(lines, "READ_BYTES", 333)
            monkeypatch.setattr(json_values, "READ_BYTES", 333)
            monkeypatch.setattr(long_texts, "LONG", 512)
            monkeypatch.setattr(long_texts, "PIECE", 100)
        out = path.parent / f"{name}-{path.name}"
        try:
            reports.append(convert([str(path)], str(out), workers=1, overwrite=True, **options))
        except ConvertError as error:
            reports.append(str(error))
        files = [Path(f"{out}{suffix}") for suffix in (".bin", ".idx")]
        digests.append(
            [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.exists()]
        )
    return reports, digests


def tokenizer_in(folder: Path) -> dict[str, Any]:
    MAKERS["words"]().save(str(folder / "tokenizer.json"))
    return {"tokenizer": str(folder / "tokenizer.json"), "eod": "<sep>"}


@pytest.mark.parametrize("name", SETTINGS)
def test_long_records_become_what_they_were_when_they_were_held(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = list(FORMS)[list(SETTINGS).index(name) % 2]
    (tmp_path / form).write_text(FORMS[form](records()))
    reports, digests = held_and_long(
        tmp_path / form, monkeypatch, **tokenizer_in(tmp_path) | SETTINGS[name]
    )
    assert digests[0] == digests[1]
    if isinstance(reports[0], str):
        assert reports[0] == reports[1]
        return
    for figure in (
        "tokens",
        "documents",
        "sequences",
        "dropped",
        "histogram",
        "text_bytes",
        "messages",
    ):
        assert getattr(reports[0], figure) == getattr(reports[1], figure), figure


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("unit", [1 << 20, 5000])
def test_long_records_are_found_in_every_form(
    form: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.write.plan.UNIT_BYTES", unit)
    data = FORMS[form](records()).encode()
    (tmp_path / form).write_bytes(gzip.compress(data) if form.endswith(".gz") else data)
    reports, digests = held_and_long(tmp_path / form, monkeypatch, **tokenizer_in(tmp_path))
    assert len(digests[0]) == 2
    assert digests[0] == digests[1]
    assert reports[0].dropped == reports[1].dropped
    planned = plan_conversion(
        [str(tmp_path / form)], str(tmp_path / "planned"), **tokenizer_in(tmp_path)
    )
    assert planned.documents
    assert "first" in describe_input(str(tmp_path / form), StorageConfig())


@pytest.mark.parametrize(
    ("form", "unit"), [("in.jsonl", 1 << 20), ("in.jsonl", 5000), ("array.json", 1 << 20)]
)
def test_broken_long_records_are_refused_as_others_are(
    form: str, unit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.write.plan.UNIT_BYTES", unit)
    found = [*records(), {"text": "a half \ud83d " * 200}, *records()]
    data = FORMS[form](found).encode()
    (tmp_path / form).write_bytes(data)
    options = tokenizer_in(tmp_path)
    reports, _ = held_and_long(tmp_path / form, monkeypatch, **options)
    assert reports[0] == reports[1]
    assert "holds half of a character (a lone surrogate, character 7)" in reports[0]
    reports, digests = held_and_long(tmp_path / form, monkeypatch, on_error="skip", **options)
    assert reports[0].messages == reports[1].messages
    assert reports[0].dropped == reports[1].dropped
    assert digests[0] == digests[1]


def test_long_records_whose_file_ends_early_are_unreadable_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for form, cut in (
        ("array.json", lambda data: data[:-9000]),
        ("in.json.gz", lambda data: gzip.compress(data)[:-2000]),
    ):
        data = FORMS["array.json"](records()).encode()
        (tmp_path / form).write_bytes(cut(data))
        reports, digests = held_and_long(
            tmp_path / form, monkeypatch, on_error="skip", **tokenizer_in(tmp_path)
        )
        assert reports[0].dropped["unreadable file"] == reports[1].dropped["unreadable file"] == 1
        assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_long_cells_become_what_they_were_when_they_were_copied(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": "a"}, *records(), {"text": None}, {"text": "b"}]
    texts = pa.array([row["text"] for row in rows])
    nested = pa.array([{"text": row["text"], "n": 1} for row in rows])
    table = pa.table({"text": texts, "raw": texts.cast(pa.large_binary()), "meta": nested})
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=4)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    for number, keys in enumerate((("text",), ("raw",), ("meta.text", "text:1"))):
        with monkeypatch.context() as patch:
            reports, digests = held_and_long(path, patch, keys=keys, **tokenizer_in(tmp_path))
        assert len(digests[0]) == 2, number
        assert digests[0] == digests[1]
        assert reports[0].dropped == reports[1].dropped
    wrong = pa.table({"text": [b"good", b"words " * 500 + b"\xff"]})
    pq.write_table(wrong, tmp_path / "wrong.parquet")
    reports, _ = held_and_long(tmp_path / "wrong.parquet", monkeypatch, **tokenizer_in(tmp_path))
    assert reports[0] == reports[1]
    assert "wrong.parquet:2: is not UTF-8 text (byte 3000)" in reports[0]


def test_a_conversion_that_is_killed_within_a_long_record_goes_on_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n')
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": "words and words\n" * (1 << 20)}) + '\n{"text": "last"}\n'
    )
    inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    convert(inputs, str(tmp_path / "whole"), tokenizer="bytes", workers=1)
    code = "import sys; from streammega.convert import convert; convert(sys.argv[2:], sys.argv[1], tokenizer='bytes', workers=1)"
    command = [sys.executable, "-c", code, str(tmp_path / "out"), *inputs]
    work = tmp_path / ".out.convert"
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(work.glob(".unit-000001-*.partial")):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert {path.name for path in work.glob("unit-*.json")} == {"unit-000000.json"}
    assert not list(work.glob("tmp*")), "long texts are kept in a file without a name"
    done = subprocess.run(command, check=True, stderr=subprocess.PIPE)
    assert b"1 of 6 units are done" in done.stderr
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (
            tmp_path / f"whole{suffix}"
        ).read_bytes()
    assert not work.exists()


MEASURED = """
import resource, sys
from streammega.convert import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert([sys.argv[1]], sys.argv[2], tokenizer="bytes", workers=1)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


WORDS_AND_TIMES = ("words and words\\n", 100 << 16)
ESCAPES_AND_TIMES = ("\\n", 12 << 20)


@pytest.mark.parametrize(
    ("form", "words", "times"),
    [
        ("a.jsonl", *WORDS_AND_TIMES),
        ("a.json", *ESCAPES_AND_TIMES),
        pytest.param("a.json", *WORDS_AND_TIMES, marks=pytest.mark.soak),
        pytest.param("a.jsonl", *ESCAPES_AND_TIMES, marks=pytest.mark.soak),
    ],
)
def test_memory_does_not_grow_with_a_record(
    form: str, words: str, times: int, tmp_path: Path
) -> None:
    with open(tmp_path / form, "w") as file:
        file.write('{"text": "' if form.endswith("l") else '[{"text": "')
        for _ in range(100):
            file.write(words * (times // 100))
        file.write('"}\n{"text": "b"}' if form.endswith("l") else '"},\n{"text": "b"}]')
    command = [sys.executable, "-c", MEASURED, str(tmp_path / form), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200, (
        "MiB; of 107 MB, which were held some four times, and of 24 MB of escapes"
    )
