"""What somebody meets who tries the commands, or mistypes one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer.main
from click import Command, Group
from typer.testing import CliRunner

from streammega.cli.main import app, main
from tests.support.builders import write_dataset
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
    for option in command.params:
        assert getattr(option, "help", None), f"{option.name} has no help"
    shown = CliRunner().invoke(app, [*name.split(), "--help"])
    assert shown.exit_code == 0
    assert first.split()[0] in shown.output


@pytest.fixture
def pair(tmp_path: Path) -> str:
    write_dataset(tmp_path / "web", [np.arange(100)])
    return str(tmp_path / "web")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("verify s3://", "no bucket or host after 's3://'"),
        ("describe oss://", "no bucket or host after 'oss://'"),
        ("order-report 0.3 {pair} 0.7", "weights and prefixes must alternate"),
        ("describe {pair} --tokens -1", "Invalid value for '--tokens'"),
        ("converts a b", "Did you mean 'convert'"),
        ("convert {pair} {tmp_path}", "is a folder; give a name in it, {tmp_path}/web"),
        ("convert {pair} s3://bucket", "is a bucket; give a name in it, s3://bucket/web"),
        ("convert {pair} s3://bucket/", "is a bucket; give a name in it, s3://bucket/web"),
        ("convert {pair} {pair}2.manifest.json", "give the prefix '{pair}2'"),
        ("gc {pair}b", "no such dataset, nor what is left of one; is web meant?"),
        ("gc {tmp_path}/none/x", "no such dataset"),
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
