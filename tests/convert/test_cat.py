"""`streammega cat` shows the documents that were converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega import IndexedDatasetWriter, StorageConfig
from streammega.cli.datasets import parse_documents
from streammega.cli.main import main
from streammega.convert import convert
from streammega.errors import ConfigError
from streammega.errors.words import pluralize, without_controls
from tests.support.builders import convert_bytes, convert_files, write_tokenizer
from tests.support.servers import S3

TEXTS = [f"document {n} of ftp://me:word@host/?sig={n}\n\tü" for n in range(200)]
"""They look as if they held secrets, which is no reason to change them."""
END = "<|endoftext|>"


def web(tmp_path: Path, **options: Any) -> str:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text, "q": "Q"}) + "\n" for text in TEXTS))
    convert([str(source)], str(tmp_path / "web"), workers=1, **({"tokenizer": "bytes"} | options))
    return str(tmp_path / "web")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["cat", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["bin", "zst", "tar"])
def test_a_document_is_shown_as_the_text_that_it_was(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = web(tmp_path, format=kind, shard_bytes=500)
    assert shown(capsys, f"{name}#0") == f"{TEXTS[0]}{END}\n"
    assert shown(capsys, f"{name}#199") == f"{TEXTS[199]}{END}\n"
    several = shown(capsys, f"{name}#60..70", f"{name}#3")
    wanted = [*range(60, 71), 3]
    assert several == "".join(
        f"--- {name}#{n}: {len(TEXTS[n].encode()) + 1} tokens\n{TEXTS[n]}{END}\n" for n in wanted
    )


def test_ids_and_json_are_shown_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = web(tmp_path, text_keys=("q:0", "text:1"))
    ids = [*b"Q", *TEXTS[5].encode(), 256]
    assert shown(capsys, f"{name}#5", "--ids").split() == list(map(str, ids))
    lines = shown(capsys, f"{name}#0..199", "--json").splitlines()
    assert [json.loads(line)["text"] for line in lines] == [f"Q{text}{END}" for text in TEXTS]
    assert json.loads(shown(capsys, f"{name}#5", "--json", "--ids")) == {
        "dataset": name,
        "document": 5,
        "tokens": len(ids),
        "sequences": [{"tokens": 1, "mode": 0}, {"tokens": len(ids) - 1, "mode": 1}],
        "ids": ids,
    }


def test_documents_of_a_bucket_are_shown(
    s3: S3, s3_storage: StorageConfig, bucket: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    convert_files(f"s3://{bucket}/cat/web", web(tmp_path), storage=s3_storage, overwrite=True)
    storage = tmp_path / "storage.toml"
    lines = [f'{name} = "{value}"' for name, value in s3.options.items()]
    lines = [f'transport = "{s3_storage.transport}"', "[storage_options]", *lines]
    storage.write_text("\n".join(lines))
    options = ["--storage-file", str(storage)]
    assert shown(capsys, f"s3://{bucket}/cat/web#7", *options) == f"{TEXTS[7]}{END}\n"


def test_the_tokenizer_is_that_of_the_manifest_unless_another_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    words: str,
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "hello world"}\n')
    convert_files(tmp_path / "web", source, tokenizer=words)
    name = f"{tmp_path}/web#0"
    assert shown(capsys, name).startswith("hello world"), "by the copy of its tokenizer"
    (copy,) = tmp_path.glob("web.*.tokenizer")
    copy.unlink()
    assert main(["cat", name]) == 1, "a manifest has no folder of it"
    error = capsys.readouterr().err
    assert "its tokenizer 'words.json' cannot be loaded" in error
    assert "--tokenizer" in error
    assert "--ids" in error
    assert shown(capsys, name, "--tokenizer", words).startswith("hello world")
    assert main(["cat", name, "--tokenizer", "bytes"]) == 0
    assert "was made with 'words.json', and 'bytes' is another tokenizer" in caplog.text


@pytest.fixture
def words(tmp_path: Path) -> str:
    path = tmp_path / "tokenizers" / "words.json"
    return write_tokenizer(path, ["<s>", "</s>", "hello", "world"], ["</s>"])


@pytest.mark.parametrize(
    ("words_of_command", "message"),
    [
        ("{web}", "write DATASET#N or DATASET#N..M"),
        ("{web}#", "write DATASET#N"),
        ("{web}#-1", "write DATASET#N"),
        ("{web}#1..", "write DATASET#N"),
        ("#3", "write DATASET#N"),
        ("{web}#3..2", "ends before it begins"),
        ("{web}#0..200", "has 200 documents, numbered from 0 to 199; there is no number 200"),
        ("{web}#999999999999999999", "there is no number 999,999,999,999,999,999"),
        ("{web}nothing#0", "nothing"),
        ("{web}#0 --tokenizer no.json", "no such tokenizer file"),
        ("{foreign}#0", "no manifest names its tokenizer; name one by --tokenizer"),
        ("{foreign}#0 --tokenizer bytes", "holds ids from 1 to 999, and 'bytes' has 257 ids"),
        ("{below}#0 --tokenizer bytes", "holds ids from -5 to 3, and 'bytes' has 257 ids"),
    ],
)
def test_mistakes_are_named(
    words_of_command: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedDatasetWriter(str(tmp_path / "foreign"), np.uint16) as writer:
        writer.add_document(np.array([1, 999]), [2])
    with IndexedDatasetWriter(str(tmp_path / "below"), np.int32) as writer:
        writer.add_document(np.array([-5, 3]), [2])
    names = {"foreign": tmp_path / "foreign", "below": tmp_path / "below"}
    filled = words_of_command.format(web=web(tmp_path), **names)
    assert main(["cat", *filled.split()]) == 1
    assert message in capsys.readouterr().err


def test_a_name_may_have_a_number_sign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert_files(tmp_path / "web#1", web(tmp_path))
    assert shown(capsys, f"{tmp_path}/web#1#2") == f"{TEXTS[2]}{END}\n"


@given(name=st.text(min_size=1), first=st.integers(0, 10**17), more=st.integers(0, 10**17))
def test_names_of_documents_are_read_as_they_are_written(name: str, first: int, more: int) -> None:
    assert parse_documents(f"{name}#{first}..{first + more}") == (name, first, first + more)
    assert parse_documents(f"{name}#{first}") == (name, first, first)
    with pytest.raises(ConfigError):
        parse_documents(f"{name}#{first + more + 1}..{first}")


def test_terminals_are_shown_no_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("a\x1b]0;owned\x07\tb\nc\x9b1m\u202e", encoding="utf-8")
    convert_bytes(tmp_path / "web", tmp_path / "a.txt")
    assert "\x1b]0;owned\x07" in shown(capsys, f"{tmp_path}/web#0")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    text = shown(capsys, f"{tmp_path}/web#0")
    assert text == f"a\\x1b]0;owned\\x07\tb\nc\\x9b1m\\u202e{END}\n"


@given(text=st.text())
def test_text_without_controls_is_printable(text: str) -> None:
    found = without_controls(text)
    assert not set(found) & {chr(n) for n in (*range(9), *range(11, 32), *range(127, 160))}
    if text.isprintable():
        assert found == text


def test_counts_have_their_nouns() -> None:
    assert [pluralize(n, "shard") for n in (0, 1, 2, 2000)] == [
        "0 shards", "1 shard", "2 shards", "2,000 shards",
    ]  # fmt: skip
    assert pluralize(2, "index", "indices") == "2 indices"
