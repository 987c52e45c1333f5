"""What a file is read as: by its suffix, or not at all."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega.cli.main import main
from streammega.cli.render import as_text
from streammega.convert import ConvertReport
from streammega.convert.options import ConvertOptions
from streammega.convert.read.formats import format_of
from streammega.convert.read.inputs import find_inputs
from streammega.errors import ConvertError
from tests.support.builders import convert_bytes, stored_texts, write_tar
from tests.support.examples import examples

RECORDS = b'{"text": "one"}\n{"text": "two"}\n'


def convert_to(tmp_path: Path, *inputs: Path, **options: Any) -> ConvertReport:
    return convert_bytes(
        tmp_path / "made" / "out", *[str(path) for path in inputs], overwrite=True, **options
    )


def made(tmp_path: Path) -> list[str]:
    return stored_texts(tmp_path / "made" / "out")


def written(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonlines", ".jl", ".ndjson", ".JSONL", ".jl.gz"])
def test_lines_of_json_have_several_suffixes(suffix: str, tmp_path: Path) -> None:
    pack: Callable[[bytes], bytes] = gzip.compress if suffix.endswith("gz") else bytes
    convert_to(tmp_path, written(tmp_path / f"a{suffix}", pack(RECORDS)))
    assert made(tmp_path) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "member"])
@pytest.mark.parametrize("before", [b"", b"\n", b"\n \r\n"])
def test_a_mark_of_utf_8_may_be_alone_in_its_line(name: str, before: bytes, tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + before
    for written_data in (data, data + RECORDS):
        if name == "member":
            path = Path(write_tar(tmp_path / "a.tar", ("a.jsonl", written_data)))
        else:
            pack: Callable[[bytes], bytes] = gzip.compress if name.endswith("gz") else bytes
            path = written(tmp_path / name, pack(written_data))
        convert_to(tmp_path, path, written(tmp_path / "z.txt", b"last"))
        assert made(tmp_path) == (["one", "two"] if written_data != data else []) + ["last"]


UNKNOWN = ["a.jsonl.bak", "a.jsonl.1", "corpus", "a.dat", "a.jsonl.1.gz", "a.md", "a.C", "README"]


@pytest.mark.parametrize("name", ["a.txt", "a.text", "a.TXT.gz"])
def test_a_text_is_known_by_its_suffix(name: str, tmp_path: Path) -> None:
    pack: Callable[[bytes], bytes] = gzip.compress if name.endswith("gz") else bytes
    convert_to(tmp_path, written(tmp_path / name, pack(RECORDS)))
    assert made(tmp_path) == [RECORDS.decode()]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_suffix_is_refused_and_is_a_text_if_that_is_asked_for(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = gzip.compress(RECORDS) if name.endswith("gz") else RECORDS
    path = written(tmp_path / "in" / name, data)
    assert format_of(name) == ""
    with pytest.raises(ConvertError, match=rf"{name}'.*\.txt .*\.jsonl .*--include '") as refused:
        convert_to(tmp_path, path)
    for named in (path.parent, path.parent / "*"):
        with pytest.raises(ConvertError, match=rf"left out: of unknown suffix: 1 \('.*{name}'\)"):
            convert_to(tmp_path, named)
    told = str(refused.value).rpartition("--include ")[2].strip("'")
    for pattern in (told, name, f"*/{name}"):
        for named in (path, path.parent, path.parent / "*"):
            convert_to(tmp_path, named, include=(pattern,))
            assert made(tmp_path) == [RECORDS.decode()]
    assert not caplog.messages
    # a pattern that chooses files says nothing of their format
    for pattern in ("*", "*/in/*"):
        with pytest.raises(ConvertError, match="of unknown suffix: 1"):
            convert_to(tmp_path, path.parent, include=(pattern,))


def test_unknown_files_beside_known_ones_are_left_out_and_counted(tmp_path: Path) -> None:
    for name in UNKNOWN:
        written(tmp_path / "in" / "below" / name, RECORDS)
    written(tmp_path / "in" / "b.jsonl", RECORDS)
    for named in (tmp_path / "in", tmp_path / "in" / "**"):
        report = convert_to(tmp_path, named)
        assert made(tmp_path) == ["one", "two"]
        assert report.files_passed_over == {"of unknown suffix": len(UNKNOWN)}
        assert "of unknown suffix: 8" in as_text(report.summary())
    report = convert_to(tmp_path, tmp_path / "in", include=("*.jsonl", "*.md", "*.C"))
    assert made(tmp_path) == ["one", "two", RECORDS.decode(), RECORDS.decode()]


@pytest.mark.guarantee("files-folders-read")
@pytest.mark.parametrize("unwanted", ["b.md", ".b.jsonl", "other/c.md", "fifo"])
def test_what_is_left_out_is_an_error_if_that_is_asked_for(unwanted: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    written(folder / "a.jsonl", RECORDS)
    (folder / "link.jsonl").symlink_to("a.jsonl")
    convert_to(tmp_path, folder, strict=True)
    if unwanted == "fifo":
        os.mkfifo(folder / unwanted)
    else:
        written(folder / unwanted, RECORDS)
    with pytest.raises(ConvertError, match=rf"--strict.* left out: .*: 1 \('.*{unwanted}'\)"):
        convert_to(tmp_path, folder, strict=True)
    convert_to(tmp_path, folder)
    convert_to(tmp_path, folder, strict=True, exclude=(Path(unwanted).parts[0],))
    convert_to(tmp_path, folder, strict=True, include=("a.jsonl",), exclude=(".*",))
    assert made(tmp_path) == ["one", "two"]


@pytest.mark.parametrize(("known", "unknown"), [(1, 1), (3, 1), (9, 1), (10, 1), (1, 0)])
def test_a_large_share_of_unknown_files_is_warned_of(
    known: int, unknown: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(known):
        written(tmp_path / "in" / f"{number}.jsonl", RECORDS)
    for number in range(unknown):
        written(tmp_path / "in" / f"{number}.jsonl.log", RECORDS)
    find_inputs([str(tmp_path / "in")])
    warned = [message for message in caplog.messages if "are left out" in message]
    assert len(warned) == (unknown > 0 and unknown * 10 >= known + unknown)
    if warned:
        assert f"{unknown} of {known + unknown} files are left out" in warned[0]
        assert "'.log'" in warned[0]
    caplog.clear()
    if unknown:  # left out on purpose
        options = ConvertOptions(exclude=("*.log",))
        find_inputs([str(tmp_path / "in")], options=options)
        assert not caplog.messages


def test_stdin_that_begins_like_nothing_known_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(written(tmp_path / "given", b"a line\n"), "rb") as file:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        with pytest.raises(ConvertError, match=r"stdin: begins with .*save it to a file"):
            convert_to(tmp_path, Path("-"))


DISGUISED = {
    "UTF-16": (lambda data: data.decode().encode("utf-16"), "is UTF-16 by its byte order mark; .*iconv -f UTF-16"),
    "UTF-32": (lambda data: data.decode().encode("utf-32"), "is UTF-32 by its byte order mark; .*iconv -f UTF-32"),
    "gzip": (gzip.compress, "is compressed, and its name does not say so; add .gz to it"),
    "xz": (lzma.compress, "is compressed, and its name does not say so; add .xz to it"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DISGUISED)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "lines", "record", "text"])
def test_texts_in_another_encoding_are_named_by_it(name: str, kind: str, tmp_path: Path) -> None:
    change, message = DISGUISED[kind]
    data = {"a.csv": b"text\none\n", "a.json": b'[\n{"text": "one"}\n]'}.get(name, RECORDS)
    member = {"lines": "a.jsonl", "record": "a.json", "text": "a.txt"}.get(name)
    if member is None:
        path = written(tmp_path / "in" / name, change(data))
        place = rf"{name}(:1)?: "
    else:
        (tmp_path / "in").mkdir()
        path = Path(write_tar(tmp_path / "in" / "a.tar", (member, change(data)), ("b.txt", b"two")))
        place = rf"a\.tar!{member}(:1)?: "
    with pytest.raises(ConvertError, match=place + message):
        convert_to(tmp_path, path)
    report = convert_to(
        tmp_path, path.parent, written(tmp_path / "z.txt", b"last"), on_error="skip"
    )
    assert made(tmp_path)[-1] == "last"
    assert report.dropped


def test_a_text_that_is_none_is_skipped_alone(tmp_path: Path) -> None:
    written(tmp_path / "in" / "bad.txt", b"\x89PNG\xff")
    written(tmp_path / "in" / "good.txt", b"good")
    with pytest.raises(ConvertError, match=r"bad\.txt: is not UTF-8 .*--on-error skip") as caught:
        convert_to(tmp_path, tmp_path / "in")
    assert "*.txt" not in str(caught.value)
    convert_to(tmp_path, tmp_path / "in", on_error="skip")
    assert made(tmp_path) == ["good"]
    convert_to(tmp_path, tmp_path / "in", exclude=("bad.txt",))
    assert made(tmp_path) == ["good"]


# --- CSV ------------------------------------------------------------------------------------------


def table(path: Path, rows: list[list[str]], delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


cells = st.text(st.sampled_from('ab",\t\n\r é'), max_size=12)


@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(rows=st.lists(st.tuples(cells, cells), max_size=12), is_tsv=st.booleans())
def test_tables_give_the_cells_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], is_tsv: bool
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    name, delimiter = ("a.tsv", "\t") if is_tsv else ("a.csv", ",")
    # one row more, so that there is a document
    given_rows = [["id", "text"], *map(list, rows), ["x", "last"]]
    convert_to(folder, table(folder / name, given_rows, delimiter))
    assert made(folder) == [text for _, text in given_rows[1:] if text]


def test_columns_are_chosen_as_keys_are(tmp_path: Path) -> None:
    path = table(tmp_path / "a.csv", [["q", "meta.a", "id"], ["Q1", "A1", "7"], ["Q2", "A2", "8"]])
    convert_to(tmp_path, path, text_keys=("q", "meta.a:1"), provenance=True)
    assert made(tmp_path) == ["Q1", "A1", "Q2", "A2"]
    with pytest.raises(ConvertError, match=r"no column 'text' \(it has: 'q', 'meta.a', 'id'\)"):
        convert_to(tmp_path, path)
    with pytest.raises(ConvertError, match=r"no column 'no', which --id-field"):
        convert_to(tmp_path, path, text_key="q", provenance=True, id_field="no")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no first row"),
        (b"text,id,text\n", "two columns 'text'"),
        (b'text\n"a\nb\n', r"a\.csv:2: broken CSV"),
        (b'text,id\n"a"b,1\n', r"a\.csv:2: broken CSV"),
        (b"text,id\nx,1\n\n\ny\n", r"a\.csv:5: has 1 cell, where the header names 2 columns"),
        (b'text,id\n"x\n\n",1\n\xff,2\n', r"a\.csv:5: is not UTF-8"),
    ],
)
def test_broken_tables_are_named_by_their_lines(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=message):
        convert_to(tmp_path, written(tmp_path / "a.csv", data))


@pytest.mark.parametrize("data", [b"id;text\n1;one\n", b'"id";"text"\r\n"1";"one"\r\n'])
@pytest.mark.parametrize(
    ("sign", "name", "remedy"),
    [
        (b";", "a.csv", "write it with commas"),
        (b"|", "a.csv", "write it with commas"),
        (b"\t", "a.csv", r"call it \.tsv"),
        (b",", "a.tsv", r"call it \.csv"),
        (b";", "a.tsv", "write it with tabs"),
    ],
)
def test_another_delimiter_is_named(
    data: bytes, sign: bytes, name: str, remedy: str, tmp_path: Path
) -> None:
    path = written(tmp_path / name, data.replace(b";", sign))
    with pytest.raises(
        ConvertError, match=rf"{name}: .*'(\\t|{re.escape(sign.decode())})'.*{remedy}"
    ):
        convert_to(tmp_path, path)


def test_a_column_may_have_any_sign_in_its_name(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", b"text;id\none;1\n")
    convert_to(tmp_path, path, text_key="text;id")
    assert made(tmp_path) == ["one;1"]


def test_rows_before_and_behind_broken_ones_are_kept(tmp_path: Path) -> None:
    rows = b'text,id\none,1\ntwo\n\xff,3\n"f\no,ur",4\nfive,5,5\nsix,6\n'
    path = written(tmp_path / "a.csv", rows)
    report = convert_to(tmp_path, path, on_error="skip")
    assert made(tmp_path) == ["one", "f\no,ur", "six"]
    assert report.dropped == {"broken record": 3}


@pytest.mark.parametrize("broken", [b'"seven,7\n', b'"se"ven,7\n'])
@pytest.mark.parametrize("rest", [b"", b"eight,8\n" * 50, b"eight,8\n" * 49 + b"end,9"])
def test_rows_behind_an_open_quote_are_lost_and_counted(
    broken: bytes, rest: bytes, tmp_path: Path
) -> None:
    rows = b"text,id\none,1\n" + broken + rest
    path = written(tmp_path / "a.csv", rows)
    report = convert_to(tmp_path, path, on_error="skip")
    assert made(tmp_path) == ["one"], "what follows an open quote is unknown"
    assert report.dropped == {"unreadable row": 51 if rest else 1}
    with pytest.raises(ConvertError, match="more than max_errors"):
        convert_to(tmp_path, path, on_error="skip", max_errors="40%")


def test_a_cell_may_be_longer_than_a_block(tmp_path: Path) -> None:
    long = "x, y\n" * 700_000
    convert_to(tmp_path, table(tmp_path / "a.csv", [["text"], [long], ["short"]]))
    assert made(tmp_path) == [long, "short"]


# --- names from inputs ----------------------------------------------------------------------------

HOSTILE = "a\x1b]0;owned\x07\nb\x9b2J"


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(
    "kind", ["file", "key", "column", "member", "members", "hostile member", "unknown", "damaged"]
)
def test_no_name_of_an_input_is_obeyed_by_a_terminal(
    kind: str, on_error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.dumps({HOSTILE: 1}).encode() + b"\n"
    folder = tmp_path / "in"
    folder.mkdir()
    if kind == "file":
        written(folder / f"{HOSTILE}.jsonl", b"{broken\n")
    elif kind == "key":
        written(folder / "a.jsonl", record)
    elif kind == "column":
        table(folder / "a.csv", [["id", HOSTILE], ["1", "2"]])
    elif kind == "member":
        write_tar(folder / "a.tar", (f"{HOSTILE}.txt", b"\xff"))
    elif kind == "members":
        write_tar(folder / "a.tar", (f"{HOSTILE}.txt", b"{}"), (f"{HOSTILE}.json", b"{}"))
    elif kind == "hostile member":
        write_tar(folder / "a.tar", (f"../{HOSTILE}.txt", b"x"))
    elif kind == "unknown":
        written(folder / HOSTILE, b"x")
    else:
        written(folder / f"{HOSTILE}.jsonl.gz", gzip.compress(RECORDS)[:-3])
    written(tmp_path / "z.jsonl", RECORDS)
    main(
        ["convert", str(folder), str(tmp_path / "z.jsonl"), str(tmp_path / "out"),
         "--tokenizer", "bytes", "--on-error", on_error, "--workers", "1"]
    )  # fmt: skip
    printed = "".join(capsys.readouterr())
    assert "owned" in printed, "the name is shown"
    assert not set(printed) & {"\x1b", "\x07", "\x9b"}
    assert "\nb" not in printed
    assert "\\nb" in printed
