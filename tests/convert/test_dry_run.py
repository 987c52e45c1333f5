"""`convert --dry-run`: nothing is written, the documents shown are those that are stored, the
estimate is near.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import IndexedDataset
from streammega.cli.main import main
from streammega.convert import convert
from streammega.convert.dry_run import plan_conversion
from streammega.dataset.writer import IndexedDatasetWriter
from streammega.errors import ConvertError
from tests.support.builders import convert_bytes, convert_files, write_random_pair


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = [
        json.dumps({"text": f"document {n} " + "word " * int(rng.integers(1, 60))})
        for n in range(4000)
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines) + "\n")
    with gzip.open(tmp_path / "in" / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")
    return tmp_path / "in"


@pytest.mark.guarantee("dry-run-writes")
@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", ""])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_tokens": 40, "max_tokens_policy": "cut"}, {"min_tokens": 60, "dtype": "int32"}],
)
def test_the_plan_is_what_comes_out(
    corpus: Path, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    inputs = [str(corpus / name)]
    before = tree(tmp_path)
    plan = plan_conversion(
        inputs, str(tmp_path / "out" / "web"), tokenizer="bytes", shard_bytes=100_000, **settings
    )
    assert tree(tmp_path) == before
    made = convert_bytes(tmp_path / "out" / "web", *inputs, shard_bytes=100_000, **settings)
    assert plan["documents"] == pytest.approx(made.documents, rel=0.25)
    assert plan["tokens"] == pytest.approx(made.tokens, rel=0.25)
    assert plan["shards"] == pytest.approx(made.shards, abs=3)
    assert (plan["dtype"], plan["eod_id"]) == (made.dtype, made.eod_id)
    stored = IndexedDataset(str(tmp_path / "out" / "web.manifest.json"))
    shown = plan["sample"]["first_documents"]
    assert [row["document"] for row in shown] == [0, 1, 2]
    for number, row in enumerate(shown):
        assert row["ids"] == np.asarray(stored[number]).tolist()[: len(row["ids"])]
        assert row["tokens"] == len(np.asarray(stored[number]))
        assert "".join(row["pieces"]).startswith(f"document {number}"[:20]) or number > 0


@pytest.mark.guarantee("dry-run-writes")
def test_a_small_corpus_is_counted_not_estimated(tmp_path: Path) -> None:
    for name in ("q", "r"):
        (tmp_path / f"{name}.jsonl").write_text('{"q": "Hi", "a": "Hello"}\n{"q": "", "a": ""}\n')
    plan = plan_conversion(
        [str(tmp_path / "q.jsonl")], str(tmp_path / "o"), tokenizer="bytes", text_keys=("q", "a:1")
    )
    shown = plan["sample"]["first_documents"]
    assert [(row["document"], row["mode"]) for row in shown] == [(0, 0), (0, 1)]
    made = convert_bytes(tmp_path / "o", tmp_path / "q.jsonl", text_keys=("q", "a:1"))
    assert (plan["documents"], plan["tokens"]) == (made.documents, made.tokens)
    assert plan["sample"]["dropped"] == made.dropped


def test_tokens_pass_as_they_are(tmp_path: Path) -> None:
    write_random_pair(str(tmp_path / "in"), 50)
    plan = plan_conversion([str(tmp_path / "in")], str(tmp_path / "o"), workers=1)
    made = convert_files(tmp_path / "o", tmp_path / "in")
    assert (plan["documents"], plan["tokens"], plan["dtype"]) == (
        made.documents,
        made.tokens,
        made.dtype,
    )
    assert plan["sample"]["first_documents"][0]["pieces"] == []


@pytest.mark.guarantee("dry-run-writes")
def test_the_command_prints_it_and_ends_as_the_conversion_would(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(corpus / "a.jsonl"), str(tmp_path / "out" / "web"), "--dry-run"]
    before = tree(tmp_path)
    assert main([*words, "--tokenizer", "bytes"]) == 0
    out = capsys.readouterr().out
    assert "nothing is written" in out
    assert "100, 111" in out
    assert "d, o" in out
    assert main(words) == 1
    assert "a tokenizer is needed" in capsys.readouterr().err
    assert (
        main([*words[:2], str(corpus / "a.jsonl" / "web"), "--dry-run", "--tokenizer", "bytes"])
        == 1
    )
    assert "is a file, not a folder" in capsys.readouterr().err
    assert tree(tmp_path) == before
    convert_bytes(tmp_path / "out" / "web", corpus / "a.jsonl")
    assert main([*words, "--tokenizer", "bytes"]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--tokenizer", "bytes", "--overwrite"]) == 0
    (corpus / "a.jsonl").write_text('{"text": "a"}\n{broken\n')
    with pytest.raises(ConvertError, match=r"a\.jsonl:2"):
        plan_conversion([str(corpus / "a.jsonl")], str(tmp_path / "other"), tokenizer="bytes")
    assert os.path.exists(tmp_path)


@pytest.mark.guarantee("dry-run-writes")
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32"])
@pytest.mark.parametrize("settings", [{}, {"shuffle_seed": 1}])
def test_the_plan_names_the_dtype_of_token_inputs(
    tmp_path: Path, dtype: str, settings: dict[str, Any]
) -> None:
    with IndexedDatasetWriter(str(tmp_path / "in"), dtype) as writer:
        writer.add_document(np.arange(100), [60, 40])
    inputs = [str(tmp_path / "in")]
    plan = plan_conversion(inputs, str(tmp_path / "out"), **settings)
    made = convert(inputs, str(tmp_path / "out"), workers=1, **settings)
    assert plan["dtype"] == made.dtype == dtype
    assert plan["output_bytes"] == made.stored_bytes
