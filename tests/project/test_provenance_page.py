"""docs/provenance.md does what it says: its commands print what stands there."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from streammega.cli.main import main
from streammega.cli.render import show_report
from streammega.samples.provenance import DocumentUse, Provenance
from tests.project.test_pages import blocks


def run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints; it succeeds."""
    capsys.readouterr()
    code = main(shlex.split(command)[1:])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, the run and the dataset of the page."""
    folder = tmp_path_factory.mktemp("page")
    (records,) = blocks("provenance", "jsonl")
    (run_file,) = blocks("provenance", "toml")
    (folder / "corpus.jsonl").write_text(records)
    (folder / "run.toml").write_text(run_file)
    (command,) = blocks("provenance", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert main(shlex.split(command)[1:]) == 0
    return folder


@pytest.fixture
def corpus(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of them, in the current folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.guarantee("trace-marks-seen", "commands-code-page")
@pytest.mark.usefixtures("corpus")
def test_the_commands_of_the_page_print_what_stands_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = 0
    for block in blocks("provenance", "console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, expected = part.partition("\n")
            assert run(command, capsys) == expected
            commands += 1
    assert commands >= 3


@pytest.mark.guarantee("commands-code-page")
@pytest.mark.usefixtures("corpus")
def test_the_code_of_the_page_agrees_with_the_commands() -> None:
    (code,) = blocks("provenance", "python")
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "provenance.md", "exec"), {})
    traced, found = printed.getvalue().splitlines()
    assert traced == "[('data/web', 2, 16, 33)]"
    assert found == "[(0, 29, 45), (3, 0, 14), (4, 13, 30)]"


@pytest.mark.guarantee("json-says-text")
@pytest.mark.usefixtures("corpus")
def test_json_says_what_the_text_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = "streammega trace run.toml --sample 0 --tokenizer bytes"
    report: dict[str, Any] = json.loads(run(f"{text} --json", capsys))
    (sample,) = report["samples"]
    assert [entry["document"] for entry in sample["runs"]] == [1, 2]
    assert [entry["tokens"] for entry in sample["runs"]] == [[29, 45], [0, 1]]
    assert report["datasets"] == {"data/web": {"tokens": 17, "documents": 2}}
    part = f"streammega trace run.toml --sample 0 --tokens 1:{10**20} --json"
    assert json.loads(run(part, capsys))["datasets"]["data/web"]["tokens"] == 16
    shown = run(text, capsys)
    assert "say nine lives.<|endoftext|>" in shown
    assert "[29, 45)" in shown
    assert "ends_document" in shown
    assert [entry.get("ends_document", False) for entry in sample["runs"]] == [True, False]


@pytest.mark.guarantee("commands-code-page")
@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "give one of --step, --sample, --find and --excluded"),
        ("--step 0", "steps are counted from 1"),
        ("--step 1 --sample 1", "give one of --step"),
        ("--step 1 --rank 0", "say by --ranks how many"),
        ("--step 101", "the run's last is 100; to look further, add train.train_iters=101"),
        ("--find a-3 --steps 0:2", "--steps 0: steps are counted from 1"),
        ("--find a-3 --steps 2:2", "--steps 2:2: is empty"),
        ("--find a-3 --steps 90:103", "--steps 102: steps are counted from 1"),
        ("--find a-3 --steps 3", "write it as START:STOP"),
        ("--find a-3 --tokens 0:8", "--tokens goes with --step or --sample only"),
        ("--sample 1 --rank 0", "--rank 0: goes with --step"),
        ("--step 1 --steps 1:2", "--steps 1:2: goes with --find"),
        ("--step 1 --ranks 3", "not a multiple"),
        ("--sample 1 --tokens 5", "write it as START:STOP"),
        ("--find owl", "give the --tokenizer"),
        ("--find 'no such text' --tokenizer bytes", "no document of this split has the text"),
        ("--find data/web#3", "data/web has 3 documents, numbered from 0"),
        ("--sample -1", "sample ids run from -1 to -1; train has those from 0 on"),
        (f"--sample {10**20}", "no run has so many samples"),
        (f"--find a-3 train.train_iters={10**30}", "cannot be searched: give start and end"),
        ("--find data/web#²", "no document is called"),
        ("--find ''", "no document is called ''"),
        ("--sample 1 --tokens 17:20", "tokens 17:20 are beyond a sample, which has 17"),
        ("--find data/code#3", "is one mistyped, or of another dataset? There are data/web"),
        ("--sample 1 --validation books", "no validation set 'books'"),
    ],
)
def test_wrong_use_is_told_in_words(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "run.toml", *shlex.split(arguments)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("corpus")
def test_ctrl_c_ends_a_search_and_prints_what_was_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = Provenance.uses

    def interrupted(*arguments: Any, **options: Any) -> Iterator[DocumentUse]:
        yield from islice(uses(*arguments, **options), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(Provenance, "uses", interrupted)
    assert main(["trace", "run.toml", "--find", "a-3", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"]
    assert [use["sample"] for use in report["documents"][0]["uses"]] == [0, 5, 6]


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize("step", ["0", "-1"])
def test_a_step_before_the_first_is_not_to_be_had_by_more_iterations(
    step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "run.toml", "--step", step]) == 1
    assert "train.train_iters" not in capsys.readouterr().err


def test_names_of_files_that_are_no_text_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")
    show_report({"file": name})
    assert capsys.readouterr().out == "file: caf\\udce9.jsonl\n"
    show_report({"file": name}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"file": name}


@pytest.mark.guarantee("trace-marks-seen")
@pytest.mark.usefixtures("corpus")
def test_a_report_of_what_is_excluded_counts_each_token_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    skips = 'data.exclude_documents=\'[[8, ["a-2"]], [40, ["a-3", "a-2"]]]\' data.eod_id=256'
    command = f"streammega trace run.toml {skips} --json"
    report = json.loads(run(f"{command} --excluded --steps 1:10", capsys))
    readings = {
        words: json.loads(run(f"{command} --find {words} --steps 1:10", capsys))["documents"][0]
        for words in ("a-2", "a-3")
    }
    assert [report["excluded_documents"], report["seen_before"]] == [2, 2]
    for entry in report["documents"]:
        found = readings[entry["id"]]["uses"]
        assert entry["uses"] == [place for place in found if not place.get("excluded")]
        assert entry["excluded_from"]["sample"] == {"a-2": 8, "a-3": 40}[entry["id"]]
        seen = {token for place in entry["uses"] for token in range(*place["tokens"])}
        assert entry["tokens_seen"] == len(seen)
    assert report["tokens_seen"] == sum(entry["tokens_seen"] for entry in report["documents"])
    shown = run(f"{command} --excluded", capsys)
    assert "a-2" in shown
    assert "a-3" in shown
