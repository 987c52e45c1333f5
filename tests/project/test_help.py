"""What somebody meets who tries the commands, or mistypes one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer.main
from click import Command, Group
from typer.testing import CliRunner

from streammega import IndexedDatasetWriter
from streammega.cli.main import app, main


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
    with IndexedDatasetWriter(str(tmp_path / "web"), np.uint16) as writer:
        writer.add_document(np.arange(100), [100])
    return str(tmp_path / "web")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("verify s3://", "no bucket or host after 's3://'"),
        ("describe oss://", "no bucket or host after 'oss://'"),
        ("order-report 0.3 {pair} 0.7", "weights and prefixes must alternate"),
        ("describe {pair} --tokens -1", "Invalid value for '--tokens'"),
        ("converts a b", "Did you mean 'convert'"),
    ],
)
def test_mistakes_are_named(
    words: str, message: str, pair: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.format(pair=pair).split()) in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())


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
