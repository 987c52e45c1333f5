"""Conversion: text and JSON lines to pairs, whatever the workers; errors with file and line; the
command lines.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from streammega import IndexedDataset, StorageConfig
from streammega.cli.main import main
from streammega.cli.plotting import find_restarts, latest_records, smooth, sparkline
from streammega.convert import ConvertReport, convert, convert_task, merge_tasks
from streammega.convert.read.compression import open_stream
from streammega.convert.run import Task
from streammega.convert.tokenize import tokenizers
from streammega.errors import AccessDeniedError, ConvertError, ObjectNotFoundError
from streammega.storage.backends.local import LocalWriter, local_error
from tests.support.builders import convert_bytes, write_random_pair
from tests.support.processes import launch
from tests.support.servers import S3

EOD = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One id per byte-level character, and an end-of-document token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(
        models.BPE({EOD: 0, **{symbol: i + 1 for i, symbol in enumerate(alphabet)}}, [])
    )
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model.save(str(path))
    return str(path)


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[list[str], list[str]]:
    """Input files of every kind, and the texts they hold in order."""
    texts = [f"document {n} " + "wörd " * (n * 7 % 50) for n in range(600)]
    lines = [json.dumps({"text": text, "id": n}).encode() + b"\n" for n, text in enumerate(texts)]
    folder = tmp_path / "in"
    (folder / "texts" / "deep").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(b"".join(lines[:100]) + b"\n\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[100:300])))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[300:500])))
    (folder / "d.jsonl.bz2").write_bytes(bz2.compress(b"".join(lines[500:598])))
    (folder / "texts" / "1.txt").write_text(texts[599], encoding="utf-8")
    (folder / "texts" / "deep" / "0.txt").write_text(texts[598], encoding="utf-8")
    (folder / "texts" / "empty.txt").write_text("")
    inputs = [
        str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "*.bz2", "texts")
    ]
    return inputs, [*texts[:598], texts[599], texts[598]]


def expected_ids(texts: list[str], tokenizer: str) -> list[list[int]]:
    model = Tokenizer.from_file(tokenizer)
    return [[*model.encode(text).ids, 0] for text in texts]


def tokenize(source: Path, target: Path, tokenizer: str, **options: Any) -> ConvertReport:
    """Convert one file, by one worker."""
    return convert([str(source)], str(target), tokenizer=tokenizer, workers=1, **options)


@pytest.mark.guarantee("conversion-killed-goes", "units-shards-functions")
@pytest.mark.parametrize("workers", [1, 3])
def test_every_document_arrives_in_order_whatever_the_workers(
    corpus: tuple[list[str], list[str]], tokenizer: str, tmp_path: Path, workers: int
) -> None:
    inputs, texts = corpus
    report = convert(inputs, str(tmp_path / "out"), tokenizer=tokenizer, workers=workers)
    read = IndexedDataset(str(tmp_path / "out"))
    assert [np.asarray(read[i]).tolist() for i in range(len(read))] == expected_ids(
        texts, tokenizer
    )
    assert read.document_indices.tolist() == list(range(601))
    assert (report.documents, report.dtype, report.eod_id, report.vocab_size) == (
        600,
        "uint16",
        0,
        257,
    )
    assert report.tokens == read.sequence_lengths.sum()


def test_a_conversion_loads_its_tokenizer_once_and_the_next_one_anew(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = tokenizers._load_huggingface
    loaded = []

    def counted(name: str) -> Any:
        loaded.append(name)
        return load(name)

    monkeypatch.setattr(tokenizers, "_load_huggingface", counted)
    (tmp_path / "in.txt").write_text("one text")
    mine = tmp_path / "mine.json"
    mine.write_text(Path(tokenizer).read_text())
    source = tmp_path / "in.txt"
    tokenize(source, tmp_path / "first", str(mine))
    assert len(loaded) == 1
    model = Tokenizer.from_file(tokenizer)
    model.add_tokens(["one text"])
    model.save(str(mine))
    tokenize(source, tmp_path / "second", str(mine))
    assert len(loaded) == 2
    first, second = (IndexedDataset(str(tmp_path / name))[0] for name in ("first", "second"))
    assert len(first) == len("one text") + 1
    assert list(second) == [model.token_to_id("one text"), 0]


def test_conversion_straight_into_s3(
    corpus: tuple[list[str], list[str]],
    tokenizer: str,
    s3_storage: StorageConfig,
    bucket: str,
    tmp_path: Path,
) -> None:
    inputs, texts = corpus
    convert(inputs, f"s3://{bucket}/web", tokenizer=tokenizer, storage=s3_storage)
    read = IndexedDataset(f"s3://{bucket}/web", s3_storage.changed(cache_dir=tmp_path / "cache"))
    assert [np.asarray(item).tolist() for item in read[:]] == expected_ids(texts, tokenizer)


def test_lines_that_are_passed_over_cost_no_second_reading(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 4000)
    good = b'{"text": "a good line"}\n'
    (tmp_path / "in.jsonl").write_bytes((good * 9 + b"{\n") * 100)
    opened: list[str] = []
    real = open_stream

    def noted(path: str, storage: Any, etag: str = "", note: Any = None) -> Any:
        opened.append(path)
        return real(path, storage, etag, note)

    monkeypatch.setattr("streammega.convert.read.source.open_stream", noted)
    report = tokenize(tmp_path / "in.jsonl", tmp_path / "p", tokenizer, on_error="skip")
    assert (report.documents, report.dropped["broken record"]) == (900, 100)
    assert len(opened) == -(-(tmp_path / "in.jsonl").stat().st_size // 4000), "once for each unit"
    assert report.messages[0].startswith(f"{tmp_path}/in.jsonl:10: broken JSON")
    assert report.messages[-1].startswith(f"{tmp_path}/in.jsonl@"), (
        "the byte, where the lines before were not counted"
    )


def test_why_nothing_is_left_is_told(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"body": "a"}\n{\n')
    with pytest.raises(
        ConvertError,
        match=r"nothing was written; broken record: 2\n.*in.jsonl:1: has no key 'text' \(it has: 'body'\)",
    ):
        tokenize(tmp_path / "in.jsonl", tmp_path / "p", tokenizer, on_error="skip")


def test_an_input_of_blank_lines_leaves_nothing(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n\n")
    with pytest.raises(ConvertError, match="hold no text"):
        tokenize(tmp_path / "in.jsonl", tmp_path / "out" / "p", tokenizer)
    assert not list((tmp_path / "out").glob("*"))


def test_all_frames_of_a_zst_file_are_read(tokenizer: str, tmp_path: Path) -> None:
    frames = [zstandard.compress(f'{{"text": "frame {n}"}}\n'.encode()) for n in range(5)]
    (tmp_path / "in.jsonl.zst").write_bytes(b"".join(frames))
    assert tokenize(tmp_path / "in.jsonl.zst", tmp_path / "p", tokenizer).documents == 5


def test_end_of_document_can_be_named_and_left_out(tokenizer: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("ab")
    tokenize(tmp_path / "in.txt", tmp_path / "p", tokenizer, append_eod=False)
    assert len(np.asarray(IndexedDataset(str(tmp_path / "p"))[0])) == 2
    with pytest.raises(ConvertError, match="name it with --eod"):
        tokenize(tmp_path / "in.txt", tmp_path / "q", tokenizer, eod="<nope>")
    with pytest.raises(ObjectNotFoundError, match="nope"):
        tokenize(tmp_path / "nope.txt", tmp_path / "q", tokenizer)


# --- the command lines ----------------------------------------------------------------------------------------------------


def run(folder: Path, *words: str, **environment: str) -> tuple[int | None, str]:
    """How the program ends as a process of its own, and what it prints; the folder is for its log."""
    folder.mkdir()
    process = launch(folder, 1, ["-m", "streammega", *words], environment)
    [code] = process.ended(0, within=120)
    return code, process.log(0)


def test_convert_and_describe_as_a_user_runs_them(tokenizer: str, tmp_path: Path, moto: S3) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "hello world"}\n{"text": ""}\n{"text": "more"}\n')
    url = f"s3://{moto.new_bucket()}/web"
    words = [str(tmp_path / "in.jsonl"), url, "--tokenizer", tokenizer]
    code, printed = run(tmp_path / "convert", "convert", *words, **moto.environment)
    assert code == 0, printed
    assert "documents: 2\ntokens: 17\ndtype: uint16\n" in printed
    assert "empty: 1\n" in printed
    words = [url, "--tokenizer", tokenizer, "--plot", str(tmp_path / "h.png")]
    code, printed = run(tmp_path / "describe", "describe", *words, **moto.environment)
    assert code == 0, printed
    assert "documents: 2\nsequences: 2\nempty_documents: 0\n" in printed
    assert "hello world<|endoftext|>more<|endoftext|>" in printed
    assert (tmp_path / "h.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.guarantee("errors-say-how")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "describe s3://nobucket/x --storage endpoint_url=http://127.0.0.1:1 --storage anon=true",
            "endpoint",
        ),
        ("describe /no/such/prefix", "/no/such/prefix: no run's file, dataset or folder"),
        ("describe x --storage endpoint", "KEY=VALUE"),
        (
            "convert /no/such.txt /tmp/never --tokenizer /no/tokenizer.json",
            "no such tokenizer file",
        ),
        ("convert in.jsonl out --merges merges.txt", "give that as --tokenizer"),
        ("train /no/run.toml", "/no/run.toml: No such file"),
    ],
)
def test_mistakes_are_one_message_without_a_traceback(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("what", ["bucket", "work", "folder", "tokenizer", "eod", "mistyped"])
def test_what_would_fail_in_the_end_fails_before_a_document_is_read(
    what: str,
    s3: S3,
    bucket: str,
    tokenizer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(Path(tokenizer).parent)
    monkeypatch.setattr(
        "streammega.convert.conversion.run_unit", lambda *_: pytest.fail("a document was read")
    )
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "file").write_text("no folder")
    options = {
        "bucket": ("s3://no-such-bucket/x", "", "no such bucket"),
        "work": (f"s3://{bucket}/x", f"--work-dir {tmp_path}/file", "name another by --work-dir"),
        "folder": (f"{tmp_path}/file/x", "", "file"),
        "tokenizer": (f"{tmp_path}/x", "--dtype uint8", "cannot hold the 257 ids"),
        "eod": (
            f"{tmp_path}/x",
            "--eod-id 300",
            "name the tokenizer's end of a document with --eod",
        ),
        "mistyped": (f"{tmp_path}/x", "--tokenizer tokeniser.jsn", "is tokenizer.json meant?"),
    }
    output, words, message = options[what]
    command = ["convert", str(tmp_path / "in.jsonl"), output, "--tokenizer", tokenizer]
    assert main([*command, *words.split()]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.glob("*x*")) in ([], [tmp_path / "xdg-cache"])


@pytest.mark.parametrize("name", [str, Path])
def test_a_single_input_needs_no_list_and_names_may_be_paths(
    name: type[str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a name read as a list of characters would find "." here
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("another")
    source, output = name(tmp_path / "a.txt"), name(tmp_path / "out")
    for given in (source, [source]):
        assert convert(given, output, tokenizer="bytes", overwrite=True).documents == 1
    task = Task(number=0, of=1)
    assert convert_task(source, name(tmp_path / "task"), task, tokenizer="bytes").documents == 1
    assert merge_tasks(source, name(tmp_path / "task"), tokenizer="bytes").documents == 1


def test_misspelled_commands_and_options_are_usage_errors(tmp_path: Path) -> None:
    for words in (["convrt"], ["describe", "x", "--tokeniser", "y"]):
        code, printed = run(tmp_path / words[0], *words)
        assert code == 2
        assert "Traceback" not in printed


def test_describe_says_when_the_tokenizer_is_another(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_pair(str(tmp_path / "p"), vocab=1000)
    assert main(["describe", str(tmp_path / "p"), "--tokenizer", tokenizer]) == 1
    assert "made with another tokenizer" in capsys.readouterr().err


def test_ctrl_c_ends_a_conversion_quietly_and_leaves_no_dataset(
    tokenizer: str, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(('{"text": "' + "word " * 2000 + '"}\n') * 5000)
    words = [str(tmp_path / "in.jsonl"), str(tmp_path / "out" / "p"), "--tokenizer", tokenizer]
    process = subprocess.Popen(
        [sys.executable, "-m", "streammega", "convert", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not list(
            (tmp_path / "out" / ".p.convert").glob("unit-*")
        ):
            time.sleep(0.02)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the workers too
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()  # or the tests that follow would share the machine with it
        process.communicate()
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert not list((tmp_path / "out").glob("p*"))


def test_steps_that_a_restart_gave_up_are_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = [{"step": step, "loss": 1.0} for step in range(1, 17)]
    restarted = [{"step": step, "loss": 2.0} for step in range(1, 4)]
    assert latest_records([*killed, *restarted]) == restarted
    assert latest_records([*killed, {"step": 11, "loss": 3.0}]) == [
        *killed[:10],
        {"step": 11, "loss": 3.0},
    ]
    assert find_restarts(
        [*killed, {"step": 11, "loss": 3.0}, {"step": 12, "loss": 3.0}, *restarted]
    ) == [1]
    assert find_restarts([*killed, {"step": 11}, {"step": 12}, {"step": 12}]) == [11, 12]
    assert find_restarts(killed) == []
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [*killed, *restarted])
    )
    assert main(["plot", str(tmp_path)]) == 0
    assert "3 steps (begun again with step 1), loss 2 to 2" in capsys.readouterr().out
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_smoothed_curves_have_the_mean_of_what_is_around_each_step() -> None:
    values = [float(n % 2) for n in range(200)]
    means = smooth(values)
    assert len(means) == 200
    assert all(abs(mean - 0.5) < 0.2 for mean in means)
    assert smooth([3.0] * 60) == [3.0] * 60


def test_sparklines_follow_the_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), 40)) == 40
    assert sparkline([]) == ""
    assert sparkline([2.0, 2.0]) == "▁▁"


EIO = OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("error", [EIO, local_error("web", EIO), AccessDeniedError("web: denied")])
def test_a_place_that_cannot_be_written_is_named_before_a_document_is_read(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_arguments: Any) -> None:
        raise error

    (tmp_path / "in.txt").write_text("text")
    monkeypatch.setattr(LocalWriter, "commit", failing)
    with pytest.raises(ConvertError, match=r"out: cannot be written: .*(Input/output|denied)"):
        convert_bytes(tmp_path / "out", tmp_path / "in.txt")
