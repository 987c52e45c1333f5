"""Every option of `streammega convert` reaches what it is called after."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import streammega.convert
from streammega import StorageConfig
from streammega.cli.main import app
from streammega.cli.options import format_size, parse_size
from streammega.convert import ConvertOptions, ExecutionConfig, convert
from streammega.errors import ConfigError

ALL: dict[str, dict[str, Any]] = {
    "--tokenizer vocab.json --merges merges.txt": {"tokenizer": "vocab.json,merges.txt"},
    "--text-key a --text-key b:1": {"text_keys": ("a", "b:1")},
    "--include *.txt --include b": {"include": ("*.txt", "b")},
    "--exclude c": {"exclude": ("c",)},
    "--hf-split train": {"hf_split": "train"},
    "--strict": {"strict": True},
    "--tar-member txt": {"tar_member": "txt"},
    "--chat --chat-template chatml": {"chat": True, "chat_template": "chatml"},
    "--eod <e>": {"eod": "<e>"},
    "--no-append-eod": {"append_eod": False},
    "--eod-id 7": {"eod_id": 7},
    "--special-tokens-in-text text": {"special_tokens_in_text": "text"},
    "--bos <b>": {"bos": "<b>"},
    "--add-special-tokens": {"add_special_tokens": True},
    "--tiktoken-pattern gpt2": {"tiktoken_pattern": "gpt2"},
    "--dtype int32": {"dtype": "int32"},
    "--min-tokens 2": {"min_tokens": 2},
    "--max-tokens 9 --max-tokens-policy drop": {"max_tokens": 9, "max_tokens_policy": "drop"},
    "--pack-length 64 --pack-overflow drop --pack-max-documents 3": {
        "pack_length": 64,
        "pack_overflow": "drop",
        "pack_max_documents": 3,
    },
    "--keep-mode 0 --keep-mode 1": {"keep_modes": (0, 1)},
    "--loss-mode 1": {"loss_modes": (1,)},
    "--allow-mixed-tokenizers": {"allow_mixed_tokenizers": True},
    "--dedup": {"dedup": True},
    "--drop-columns": {"drop_columns": True},
    "--shuffle --seed 5": {"shuffle_seed": 5},
    "--shuffle": {"shuffle_seed": 0},
    "--provenance --id-field meta.id": {"provenance": True, "id_field": "meta.id"},
    "--format zst --zstd-level 9": {"format": "zst", "zstd_level": 9},
    "--shard-size 1G": {"shard_bytes": 1 << 30},
    "--on-error skip": {"on_error": "skip"},
    "--max-record-bytes 1M": {"max_record_bytes": 1 << 20},
    "--on-error skip --max-errors 1%": {"on_error": "skip", "max_errors": "1%"},
}
EXECUTION: dict[str, dict[str, Any]] = {
    "--workers 3 --shuffle-memory 16M": {"workers": 3, "shuffle_memory_bytes": 16 << 20},
    "--backend ray": {"backend": "ray"},
    "--work-dir w --no-resume": {"work_dir": "w", "resume": False},
}


def given_by(words: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `convert` is called with."""
    caught: dict[str, Any] = {}

    def catch(inputs: list[str], output: str, **named: Any) -> Any:
        caught.update(named, inputs=inputs, output=output)
        raise ConfigError("caught")

    monkeypatch.setattr(streammega.convert, "convert", catch)
    done = CliRunner().invoke(app, ["convert", "in.txt", "b.txt", "out", *words.split()])
    assert str(done.exception) == "caught", done.output
    assert caught["inputs"] == ["in.txt", "b.txt"]
    assert caught["output"] == "out"
    return caught


@pytest.mark.parametrize("words", ["", *ALL])
def test_options_are_the_settings_they_name(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_by(words, monkeypatch)
    assert given["options"] == ConvertOptions(**ALL.get(words, {}))
    assert not given["overwrite"]


@pytest.mark.parametrize("words", ["", *EXECUTION])
def test_how_the_work_is_done_is_as_asked(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default = {"shuffle_memory_bytes": 4 << 30}
    assert given_by(words, monkeypatch)["execution"] == ExecutionConfig(
        **(default | EXECUTION.get(words, {}))
    )


def test_every_setting_has_an_option() -> None:
    set_by_options = {name for settings in ALL.values() for name in settings}
    assert {item.name for item in fields(ConvertOptions)} == set_by_options


def test_overwriting_and_storage_are_as_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = given_by("--overwrite --storage anon=true", monkeypatch)
    assert given["overwrite"]
    assert given["storage"].storage_options == {"anon": True}


@pytest.mark.parametrize(
    ("size", "words"), [(4 << 30, "4G"), (1536 << 20, "1536M"), (1000, "1000")]
)
def test_sizes_are_read_as_they_are_written(size: int, words: str) -> None:
    assert format_size(size) == words
    assert parse_size(words, "--shuffle-memory") == size


def test_modes_may_be_a_list_and_are_checked_one_by_one() -> None:
    assert list(ConvertOptions(loss_modes=[1]).loss_modes or ()) == [1]  # type: ignore[arg-type]
    for modes in (("a",), [128]):
        with pytest.raises(ConfigError, match=r"loss_modes \(--loss-mode\) is .*at most 127"):
            ConvertOptions(loss_modes=modes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text_keys": "text"}, r"text_keys \(--text-key\) is 'text'; it must be a list"),
        ({"keep_modes": "12"}, r"keep_modes \(--keep-mode\) is '12'; it must be a list"),
        ({"dedup": "no"}, r"dedup \(--dedup\) is 'no'; it must be true or false"),
        ({"tokenizer": 7}, r"tokenizer \(--tokenizer\) is 7; it must be text"),
        ({"min_tokens": -5}, r"min_tokens \(--min-tokens\) is -5; it must be at least 0"),
        ({"keep_modes": (999,)}, r"keep_modes \(--keep-mode\) is \(999,\); .*at most 127"),
        ({"max_tokens_policy": "drop"}, r"drop needs a limit: set max_tokens \(--max-tokens\)"),
    ],
)
def test_a_value_of_another_kind_than_its_setting_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ConvertOptions(**settings)


@pytest.mark.parametrize(
    ("settings", "name", "nearest"),
    [(ConvertOptions, "tokeniser", "tokenizer"), (ExecutionConfig, "worker", "workers")],
)
def test_an_unknown_setting_is_refused_by_the_name_of_the_nearest(
    settings: type, name: str, nearest: str
) -> None:
    unknown: dict[str, Any] = {name: 1}
    message = re.escape(f"unknown setting {name}; did you mean {nearest}?")
    with pytest.raises(ConfigError, match=message):
        convert(["in.jsonl"], "out", **unknown)
    with pytest.raises(ConfigError, match=message):
        settings(**unknown)


def test_a_seed_below_zero_is_refused_by_the_name_of_its_option() -> None:
    error = CliRunner().invoke(app, ["convert", "in.jsonl", "out", "--seed=-1"]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == "seed (--seed) is -1; it must be at least 0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("convert in.jsonl out --seed 5", "seed (--seed) is for --shuffle; give that too"),
        (
            "convert in.jsonl out.bin --format zst",
            "'out.bin': its suffix says format bin, and format (--format) is zst; leave out one",
        ),
        (
            "describe in.jsonl --plot p.png",
            "in.jsonl: is no dataset, and --tokenizer and --plot are for datasets; leave them out",
        ),
        (
            "describe in.jsonl --tokenizer bytes",
            "in.jsonl: is no dataset, and --tokenizer and --plot are for datasets; leave them out",
        ),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"text": "a"}\n')
    error = CliRunner().invoke(app, words.split()).exception
    assert isinstance(error, ConfigError)
    assert str(error) == message


def test_inputs_of_a_list_of_another_scheme_have_the_storage_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught: dict[str, Any] = {}

    def catch(inputs: list[str], output: str, **named: Any) -> Any:
        caught.update(named, inputs=inputs)
        raise ConfigError("caught")

    monkeypatch.setattr(streammega.convert, "convert", catch)
    (tmp_path / "list").write_text("gs://corpus/a.jsonl\ngs://corpus/b.jsonl\n")
    words = ["convert", f"@{tmp_path}/list", "s3://mine/web", "--storage", "key=K"]
    assert str(CliRunner().invoke(app, words).exception) == "caught"
    assert caught["inputs"] == ["gs://corpus/a.jsonl", "gs://corpus/b.jsonl"]
    assert caught["input_storage"] == StorageConfig()
    assert caught["storage"].storage_options == {"key": "K"}
