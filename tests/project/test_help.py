"""What somebody meets who tries the commands, or mistypes one."""

from __future__ import annotations

import errno
import importlib.abc
import io
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from click import Command, Group
from typer.testing import CliRunner

from streammega.__main__ import main as entry_point
from streammega.cli import options
from streammega.cli.main import COMMANDS as ROWS
from streammega.cli.main import app, main
from streammega.storage.atomic_file import AtomicFile
from tests.support.builders import convert_bytes, write_dataset, write_small_run
from tests.support.processes import launch
from tests.support.servers import S3


def commands(group: Group, name: str = "") -> Iterator[tuple[str, Command]]:
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")  # type: ignore[arg-type]
        else:
            yield f"{name} {word}".strip(), command


COMMANDS = dict(commands(typer.main.get_command(app)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_in_a_line_what_it_does(name: str) -> None:
    """The list of commands cuts a first paragraph where its line ends."""
    command = COMMANDS[name]
    first = (command.help or "").split("\n\n")[0].strip()
    assert first
    assert "\n" not in first
    assert command.epilog or name == "cache"
    for option in command.params:
        assert getattr(option, "help", None), f"{option.name} has no help"
    shown = CliRunner().invoke(app, [*name.split(), "--help"])
    assert shown.exit_code == 0
    assert first.split()[0] in shown.output


def test_the_help_of_convert_fits_two_screens_and_has_every_flag_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 50 lines of 100 columns. What is rarely needed comes last."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["convert", "--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 100
    assert max(map(len, shown.splitlines())) <= 100
    flags = re.findall(r"^  (--\S+|-h)(?: / |, )?(--\S+)?", shown, re.MULTILINE)
    names = [name for words in flags for name in words if name.startswith("--")]
    known = [name for param in COMMANDS["convert"].params for name in param.opts]
    known += [name for param in COMMANDS["convert"].params for name in param.secondary_opts]
    assert sorted(names) == sorted([*filter(lambda name: name.startswith("--"), known), "--help"])
    asked_for = ["--text-key", "--tokenizer", "--shuffle ", "--shard-size", "--resume", "--bos"]
    places = [shown.index(name) for name in asked_for]
    assert places == sorted(places)


@pytest.mark.parametrize("example", [line for row in ROWS.values() for line in row.examples])
def test_every_example_is_a_command_line_that_the_command_takes(example: str) -> None:
    program, *words = shlex.split(example)
    if program == "torchrun":
        return
    assert program == "streammega"
    name = " ".join(words[:2]) if words[0] == "cache" else words[0]
    COMMANDS[name].make_context(name, words[len(name.split()) :])


def test_every_command_that_ends_prints_json() -> None:
    without = [
        name
        for name, command in COMMANDS.items()
        if not any("--json" in param.opts for param in command.params)
    ]
    assert without == ["train", "view"], "its records are metrics.jsonl; a site has pages"


@pytest.fixture
def made(pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run and its records, converted datasets `one` and `two`, and a cache."""
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "long", [np.arange(100)] * 20)
    write_small_run(tmp_path, str(tmp_path / "long"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for name in ("one", "two"):
        convert_bytes(tmp_path / name, tmp_path / "a.jsonl")
    (tmp_path / "cache" / "chunks").mkdir(parents=True)
    return tmp_path


@pytest.mark.guarantee("json-of-commands")
@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("convert a.jsonl three --tokenizer bytes", "documents"),
        ("convert a.jsonl three --tokenizer bytes --task 0/1", "task"),
        ("ls a.jsonl", "inputs"),
        ("gc one", "files"),
        ("describe one", "documents"),
        ("describe a.jsonl", "input"),
        ("describe run.toml", "run"),
        ("cat one#0 --ids", "ids"),
        ("verify one", "problems"),
        ("cache ls cache", "objects"),
        ("cache verify cache", "damaged"),
        ("cache clear cache", "removed"),
        ("doctor one --seconds 4", "checks"),
        ("bench long --seconds 1 --sequence-length 8", "full_speed"),
        ("prepare run.toml", "datasets"),
        ("trace run.toml --step 1", "samples"),
        ("order-report run.toml", "phases"),
        ("plot metrics.jsonl --out run.png", "steps"),
    ],
)
def test_with_json_a_command_prints_one_value_and_nothing_else(
    words: str, key: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--json"]) == 0
    assert key in json.loads(capsys.readouterr().out)


ENCODINGS = ["ascii", "latin-1", "cp1252"]


def run_on_terminal(encoding: str, *words: str) -> tuple[int, str]:
    """The exit code of a command, and what a terminal of an encoding shows of it."""
    out, err = io.BytesIO(), io.BytesIO()
    with (
        redirect_stdout(io.TextIOWrapper(out, encoding)),
        redirect_stderr(io.TextIOWrapper(err, encoding, "backslashreplace")),
    ):
        code = main(words)
        sys.stdout.flush()
        sys.stderr.flush()
        return code, (out.getvalue() + err.getvalue()).decode(encoding)


def with_encodings(values: Iterable[str]) -> list[Any]:
    """Each with ASCII, which has the fewest letters, and the first with the others too; all in `make
    soak`.
    """
    return [
        pytest.param(value, encoding, marks=[] if number * place == 0 else pytest.mark.soak)
        for number, value in enumerate(values)
        for place, encoding in enumerate(ENCODINGS)
    ]


@pytest.mark.guarantee("letters-replaced")
@pytest.mark.parametrize(("name", "encoding"), with_encodings(["", *COMMANDS]))
def test_a_terminal_of_another_encoding_shows_the_help_of_every_command(
    name: str, encoding: str
) -> None:
    code, shown = run_on_terminal(encoding, *name.split(), "--help")
    assert (code, "Usage:" in shown) == (0, True)


@pytest.mark.guarantee("letters-replaced")
@pytest.mark.parametrize(
    ("words", "encoding"),
    with_encodings(
        [
            "convert {w}.jsonl {w}3 --tokenizer bytes --text-key {w}",
            "ls {w}.jsonl",
            "describe {w}",
            "describe {w}.jsonl",
            "describe {w}.toml",
            "cat {w}#0",
            "cat {w}#0 --json",
            "verify {w}",
            "doctor {w} --seconds 1",
            "trace {w}.toml --step 1",
            "order-report {w}.toml",
            "prepare {w}.toml",
            "gc {w}",
        ]
    ),
)
def test_a_terminal_of_another_encoding_has_other_letters_replaced(
    words: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    word = "w\u00f6\u4e16"
    (tmp_path / f"{word}.jsonl").write_text(
        (json.dumps({word: word * 9}) + "\n") * 30, encoding="utf-8"
    )
    convert_bytes(tmp_path / word, tmp_path / f"{word}.jsonl", text_key=word)
    Path(write_small_run(tmp_path, f"{tmp_path}/{word}")).rename(tmp_path / f"{word}.toml")
    code, shown = run_on_terminal(encoding, *words.format(w=word).split())
    assert code == 0, shown
    if "--json" in words:
        assert json.loads(shown)["text"].startswith(word * 9)


@pytest.mark.guarantee("letters-replaced")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_for_a_terminal_of_another_encoding_has_every_letter(
    encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / "\u4e16.jsonl"
    path.write_text('{"text": "a"}')
    code, shown = run_on_terminal(encoding, "describe", str(path), "--json")
    assert code == 0
    assert json.loads(shown)["input"] == str(path)


def test_completion_knows_commands_and_options(tmp_path: Path) -> None:
    for number, (words, word) in enumerate(
        (
            ("streammega conv", "convert"),
            ("streammega verify --voc", "--vocab-size"),
            ("streammega convert --format z", "zst"),
            ("streammega trace --split v", "valid"),
        )
    ):
        asked = {
            "_STREAMMEGA_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        (tmp_path / str(number)).mkdir()
        process = launch(tmp_path / str(number), 1, ["-m", "streammega"], asked)
        process.ended(0, within=60)
        assert process.log(0).split() == [word]


def test_ctrl_c_while_modules_are_imported_is_a_word_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(importlib.abc.MetaPathFinder):
        def find_spec(self, *_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "streammega.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted()])
    assert entry_point() == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.guarantee("no-traceback")
def test_a_defect_is_one_message_and_its_traceback_a_log_record(
    pair: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of s3://user:secret@host")

    monkeypatch.setattr("streammega.dataset.IndexedDataset", fail)
    monkeypatch.setenv("STREAMMEGA_LOG", "DEBUG")
    assert main(["describe", pair]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ZeroDivisionError: of s3://***@host (describe.py, line ")
    assert "report it" in error
    assert "Traceback" in caplog.text
    assert "ZeroDivisionError: of s3://***@host" in caplog.text
    assert "user:secret" not in caplog.text


@pytest.mark.guarantee("no-traceback")
@pytest.mark.parametrize(
    ("closed", "code", "message"),
    [
        ("> /dev/full", 1, "No space left"),
        ("| true", 141, ""),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
    ],
)
def test_an_output_that_takes_nothing_is_no_traceback(
    closed: str, code: int, message: str, pair: str
) -> None:
    # after a wait: the reader of the pipe has gone before something is written
    script = "import sys, time, streammega.__main__ as m; time.sleep(0.2); sys.exit(m.main())"
    command = f"{sys.executable} -c '{script}' describe {pair} {closed}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 1


@pytest.mark.guarantee("no-traceback")
def test_a_role_that_cannot_be_taken_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("token")
    role = {
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/reader",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ENDPOINT_URL_STS": "http://127.0.0.1:1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    (tmp_path / "storage.toml").write_text("retry_timeout = 0.1\n")
    words = ["describe", "s3://bucket/web", "--storage-file", str(tmp_path / "storage.toml")]
    command = [sys.executable, "-m", "streammega", *words]
    done = subprocess.run(command, env=kept | role, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "credentials" in done.stderr


@pytest.mark.parametrize(
    "words",
    ["verify {url}", "describe {url}", "trace run.toml --step 1", "describe run.toml"],
)
def test_commands_that_only_look_wait_for_no_server(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "LOOK_TIMEOUT", 0.1)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    write_small_run(tmp_path, "s3://bucket/web")
    assert main(words.format(url="s3://bucket/web").split()) == 1
    error = capsys.readouterr().err
    assert re.search(r"in \d\.\d s\b", error), "in a fraction of a second, or some on a busy host"
    assert "Connection refused" in error


@pytest.fixture
def pair(tmp_path: Path) -> str:
    write_dataset(tmp_path / "web", [np.arange(100)])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(b'[1]\n{"step": 1, "loss": "\xff"}\n')
    (tmp_path / "s.toml").write_text("[storage_options]\nclient_kwargs = {bad = 1}\n")
    return str(tmp_path / "web")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("verify s3://", "no bucket or host after 's3://'"),
        ("describe oss://", "no bucket or host after 'oss://'"),
        ("order-report 0.3 {pair} 0.7", "weights and prefixes must alternate"),
        ("describe {pair} --tokens -1", "Invalid value for '--tokens'"),
        ("bench run.toml --sequence-length 8", "write section.name=value after the file"),
        ("top runs/one", "is no address of metrics; write it as HOST:PORT"),
        ("converts a b", "Did you mean 'convert'"),
        ("convert {pair} {tmp_path}", "is a folder; give a name in it, {tmp_path}/web"),
        ("convert {pair} s3://bucket", "is a bucket; give a name in it, s3://bucket/web"),
        ("convert {pair} s3://bucket/", "is a bucket; give a name in it, s3://bucket/web"),
        ("convert {pair} {pair}2.manifest.json", "give the prefix '{pair}2'"),
        ("gc {pair}b", "no such dataset, nor what is left of one; is web meant?"),
        ("gc {tmp_path}/none/x", "no such dataset"),
        ("gc {tmp_path}/run/metrics.jsonl", "nor what is left of one; check the name"),
        ("ls s3://b/x --storage retry_timeout=0", "write it above [storage_options], in a file"),
        (
            "ls s3://b/x --storage-file {tmp_path}/s.toml",
            "client_kwargs of storage_options hold bad",
        ),
        (
            "order-report {pair} --sequence-length 8 --global-batch-size 9223372036854775807",
            "--global-batch-size 9,223,372,036,854,775,807 samples are more than",
        ),
        (
            "order-report {pair} --sequence-length 8 --global-batch-size 4294967296 --steps 1",
            "global_batch_size 4,294,967,296, or shuffle_lanes, needs 4,294,967,296 lanes",
        ),
        (
            "order-report {pair} --sequence-length 8 --lanes 4294967296 --global-batch-size 8",
            "needs 4,294,967,296 lanes; the stream order has at most 16,777,216: lower it",
        ),
        ("verfy {pair}", "Did you mean 'verify'"),
        ("cache lss x", "Did you mean 'ls'"),
        ("verify {pair} --vocab-siz 3", "--vocab-size"),
        ("convert {pair} x --tokeniser bytes", "--tokeniser (Possible options: --tokenizer)"),
        ("describe {pair} --plot x.unknown", ".unknown is no format of plots"),
        ("plot {tmp_path}/run", "holds no step"),
        ("convert a.{{001..010}}.jsonl x --tokenizer bytes", "braces"),
    ],
)
def test_mistakes_are_named(
    words: str, message: str, pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.format(pair=pair, tmp_path=tmp_path).split()) in (1, 2)
    message = message.format(pair=pair, tmp_path=tmp_path)
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_unknown_log_level_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMMEGA_LOG", "verbose")
    assert main(["--version"]) == 1
    assert (
        "STREAMMEGA_LOG is 'verbose'; it is DEBUG, INFO, WARNING or ERROR"
        in capsys.readouterr().err
    )


def test_prefixes_with_blanks_are_measured_too(
    pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ending in (".bin", ".idx"):
        (tmp_path / f"my web{ending}").write_bytes(Path(pair + ending).read_bytes())
    settings = [
        "--sequence-length",
        "8",
        "--global-batch-size",
        "8",
        "--lanes",
        "8",
        "--steps",
        "1",
    ]
    assert main(["order-report", "0.5", f"{tmp_path}/my web", "0.5", pair, *settings]) == 0
    assert "samples" in capsys.readouterr().out


def test_a_mistyped_tokenizer_file_is_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("tokenizers.Tokenizer.from_pretrained", ask)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "sub").mkdir()
    for folder in ("", "sub/"):
        (tmp_path / folder / "tok.json").write_text("{}")
    for name, hint in {
        "tok.jsn": "is tok.json meant?",
        "./sub/tok.jsn": "is ./sub/tok.json meant?",
        "other.tokenizer": "give the path",
    }.items():
        assert main(["convert", "a.txt", "o", "--tokenizer", name]) == 1
        error = capsys.readouterr().err
        assert f"{name}: no such tokenizer file; {hint}" in error
        assert len(error.splitlines()) == 1


def test_a_hub_that_does_not_answer_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ask(*_: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise Exception("cannot find the requested files")

    monkeypatch.setattr("tokenizers.Tokenizer.from_pretrained", ask)
    (tmp_path / "a.txt").write_text("a text")
    assert main(["convert", str(tmp_path / "a.txt"), "o", "--tokenizer", "some/model"]) == 1
    assert not caplog.records


def test_a_hub_that_is_asked_for_the_first_time_is_one_message_too(tmp_path: Path) -> None:
    """The hub's package sets the level of its log when it is imported."""
    (tmp_path / "a.txt").write_text("a text")
    code = """
import sys, tokenizers
from streammega.cli.main import main
class Model:
    @staticmethod
    def from_pretrained(name):
        from huggingface_hub.utils import _http
        _http.logger.warning("Retrying in 1s [Retry 1/5].")
        raise Exception("cannot find the requested files")
tokenizers.Tokenizer = Model
sys.exit(main(["convert", "a.txt", "o", "--tokenizer", "some/model"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: some/model: neither a file nor a tokenizer")


def test_plotting_without_matplotlib_is_refused_before_anything_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "streammega[plot]" in printed.err


def test_ctrl_c_is_answered_with_a_word(
    pair: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streammega.convert.convert", interrupt)
    assert main(["convert", pair, f"{pair}2"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def test_a_conversion_that_cannot_be_thought_to_fit_the_disk_is_warned_of(
    pair: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Generously: of inputs four times as large as what is free nothing is said."""
    usage = shutil.disk_usage(Path(pair).parent)
    size = Path(f"{pair}.bin").stat().st_size
    for free, warns in ((size // 4, False), (size // 4 - 1, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert main(["convert", pair, f"{pair}2", "--overwrite"]) == 0
        assert ("will hardly do" in caplog.text) == warns


def test_a_plot_of_a_run_in_a_bucket_takes_options_of_its_storage(
    moto: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = moto.new_bucket()
    record = b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'
    moto.objects(bucket)["run/metrics.jsonl"] = record
    options = [word for item in moto.options.items() for word in ("--storage", "=".join(item))]
    out = tmp_path / "run.png"
    assert main(["plot", f"s3://{bucket}/run", "--out", str(out), *options]) == 0
    assert "2 steps" in capsys.readouterr().out
    assert out.is_file()


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("describe {tmp_path}/made --plot {output}", "p.png"),
        ("plot {tmp_path}/metrics.jsonl --out {output}", "run.png"),
    ],
)
def test_an_output_on_a_full_disk_is_named_and_leaves_the_one_of_before(
    words: str,
    output: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n')
    convert_bytes(tmp_path / "made", tmp_path / "in.jsonl")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    folder = tmp_path / "outputs"
    folder.mkdir()
    target = folder / output
    target.write_text("of before")

    commit = AtomicFile.commit

    def full(self: AtomicFile, *, sync: bool = True) -> None:
        if os.path.dirname(self._path) == str(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(self, sync=sync)

    monkeypatch.setattr(AtomicFile, "commit", full)
    assert main(words.format(tmp_path=tmp_path, output=target).split()) == 1
    assert f"error: {target}: No space left on device" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == [output]
    assert target.read_text() == "of before"
