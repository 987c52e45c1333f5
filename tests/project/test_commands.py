"""Every command that looks at data takes a run's file or datasets, by the same words; and what somebody
meets who mistypes a name, has no credentials, or ends a command in the middle.
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega.apps import view
from streammega.cli.main import COMMANDS, main
from streammega.cli.progress import ProgressDisplay
from tests.support.builders import write_dataset, write_run_file
from tests.support.processes import launch
from tests.support.servers import S3

SHORT = "--sequence-length 16"
SMALL = f"{SHORT} --global-batch-size 8"
TAKE_DATA = {
    "doctor": ("--seconds 5", ""),
    "bench": ("--seconds 1", SHORT),
    "describe": ("", ""),
    "trace": ("--step 1", SMALL),
    "view": ("", SMALL),
    "order-report": ("--steps 8", SMALL),
    "prepare": ("", f"{SHORT} --num-samples 64"),
    "manifest": ("", ""),
}
"""Commands that take a run's file or datasets: options of both, and those of datasets alone."""
OPEN_DATASETS = (*TAKE_DATA, "verify", "cat", "train")


def command_line(name: str, data: str, *more: str) -> list[str]:
    """A command with data, and what it needs by all means."""
    out = ["out.json"] if name == "manifest" else []
    words = [f"{data}#0"] if name == "cat" else data.split()
    if words[0].endswith(".toml"):
        words[1:1] = out
        out = []
    options = TAKE_DATA.get(name, ("", ""))[0]
    return [name, *words, *out, *options.split(), *" ".join(more).split()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With datasets web and code, and a run of both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(view, "_serve", lambda *_: None)
    for name in ("web", "code"):
        write_dataset(tmp_path / name, [np.arange(50, dtype=np.uint16)] * 30)
    write_run_file(
        tmp_path,
        data={"blend": ["web", "code"], "order": "stream", "sequence_length": 16, "split": "1,0,0"},
        train={"train_iters": 8, "global_batch_size": 8},
    )
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.guarantee("commands-take-both")
@pytest.mark.parametrize("name", TAKE_DATA)
@pytest.mark.parametrize("data", ["run.toml data.seed=7", "0.7 web 0.3 code"])
def test_a_command_takes_a_run_file_with_settings_or_datasets_with_weights(
    name: str, data: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_datasets = "" if "toml" in data else TAKE_DATA[name][1]
    as_json = "" if name == "view" else "--json"
    assert main(command_line(name, data, of_datasets, as_json)) == (130 if name == "view" else 0)
    if as_json:
        assert json.loads(capsys.readouterr().out)
    if name == "manifest":
        assert {"web", "code"} == set(json.loads((folder / "out.json").read_text())["datasets"])


@pytest.mark.guarantee("commands-take-both")
@pytest.mark.parametrize("name", TAKE_DATA)
def test_its_help_says_so_in_the_same_words(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "{RUN.toml|DATASET}..." in shown
    assert "A run's TOML file, and settings over it: section.name=value. Or datasets" in shown
    examples = COMMANDS[name].examples
    assert any("run.toml" in line for line in examples)
    assert any("s3://bucket/web" in line for line in examples)


@pytest.mark.guarantee("commands-take-both")
@pytest.mark.parametrize("name", TAKE_DATA)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("run.toml --storage a=b", "--storage: run.toml has this setting; to change it, write"),
        ("web data.seed=7", "data.seed=7: settings are for a run's file (.toml)"),
        ("web run.toml", "run.toml: a run's file comes first, and without datasets"),
        ("0.7 web code", "weights and prefixes must alternate"),
    ],
)
def test_words_that_belong_to_the_other_of_both_are_refused_alike(
    name: str, data: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command_line(name, data)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_settings_of_datasets_are_refused_for_a_run_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (_, options) in TAKE_DATA.items():
        for option, value in re.findall(r"(--\S+) (\d+)", options):
            assert main(command_line(name, "run.toml", option, value)) == 1
            assert f"{option}: run.toml has this setting" in capsys.readouterr().err


def test_indices_of_datasets_depend_on_the_number_of_samples(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", "web"]) == 1
    assert "prepare needs --num-samples TRAIN,VALID,TEST" in capsys.readouterr().err
    assert main(["prepare", "web", "--num-samples", "many"]) == 1
    assert "--num-samples 'many': write it as" in capsys.readouterr().err
    words = ["prepare", "web", "--num-samples", "64,8,0", "--split", "9,1,0", *SHORT.split()]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["datasets"]
    assert {row["split"] for row in rows} == {"train", "valid"}


def test_datasets_are_traced_as_a_run_with_these_settings_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports: list[dict[str, Any]] = []
    for words in ("run.toml data.seed=7", f"web code {SMALL} --seed 7 --order stream"):
        assert main(["trace", *words.split(), "--step", "3", "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["samples"] == reports[1]["samples"]


def test_one_epoch_of_datasets_is_searched(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trace", "web", "--find", "web#3", *SMALL.split(), "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == [1, 30 * 50 // (16 * 8) + 1]
    assert report["documents"][0]["uses"]


@pytest.mark.guarantee("newcomers-mistakes")
@pytest.mark.parametrize("name", OPEN_DATASETS)
def test_a_name_that_is_neither_is_one_line_that_is_the_same_everywhere(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"wbe": "web", "rum.toml": "run.toml", "nothing-like-it": ""}
    if name in ("verify", "cat", "train"):
        wrong.pop("nothing-like-it" if name == "train" else "rum.toml")
    if name == "train":
        wrong.pop("wbe")
    for data, meant in wrong.items():
        assert main(command_line(name, data)) != 0
        out, error = capsys.readouterr()
        assert out == ""
        assert len(error.splitlines()) == 1, error
        if name != "train":
            hint = f"is {meant} meant?" if meant else "check the name"
            assert error == (
                f"error: {data}: no run's file, dataset or folder has this name; {hint}\n"
            )


@pytest.mark.guarantee("newcomers-mistakes")
@pytest.mark.parametrize("name", [*TAKE_DATA, "verify", "cat"])
def test_a_folder_without_a_dataset_is_one_line(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command_line(name, "empty/", TAKE_DATA.get(name, ("", ""))[1])) == 1
    out, error = capsys.readouterr()
    if name == "doctor":
        assert "no object to read -> name a dataset" in out
        return
    assert out == ""
    assert len([line for line in error.splitlines() if line.startswith("error: ")]) == 1
    assert "empty" in error
    assert "Traceback" not in error


@pytest.mark.guarantee("newcomers-mistakes")
@pytest.mark.parametrize("name", [*TAKE_DATA, "verify", "cat"])
def test_a_bucket_without_credentials_is_one_line(
    name: str,
    folder: Path,
    moto: S3,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (folder / "storage.toml").write_text(
        f'retry_timeout = 1.0\n[storage_options]\nendpoint_url = "{moto.endpoint}"\n'
    )
    options = f"--storage-file storage.toml {TAKE_DATA.get(name, ('', ''))[1]}"
    assert main(command_line(name, "s3://bucket/web", options)) == 1
    out, error = capsys.readouterr()
    assert "Traceback" not in out + error
    assert "credentials" in out + error
    if name != "doctor":
        assert out == ""
        assert len([line for line in error.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.guarantee("newcomers-mistakes")
@pytest.mark.parametrize("name", [*TAKE_DATA, "verify", "cat", "simulate"])
def test_ctrl_c_in_the_middle_is_one_word(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    enter = ProgressDisplay.__enter__

    def interrupt(display: ProgressDisplay) -> ProgressDisplay:
        enter(display)
        display.__exit__(None, None, None)
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressDisplay, "__enter__", interrupt)
    data = "web=1m" if name == "simulate" else "web"
    words = command_line(name, "web", TAKE_DATA.get(name, ("", ""))[1])
    assert main([name, data] if name == "simulate" else words) == 130
    out, error = capsys.readouterr()
    assert out == ""
    assert error == "interrupted\n"


def test_ctrl_c_by_a_signal_ends_a_command_at_once(folder: Path) -> None:
    command = ["-m", "streammega", "bench", "web", "--seconds", "60", *SHORT.split()]
    running = launch(folder, 1, command)
    deadline = time.monotonic() + 60
    while running.log(0).count("reading at full speed") < 2:  # two seconds later: batches came
        assert time.monotonic() < deadline, running.log(0)
        time.sleep(0.02)
    running.signal(signal.SIGINT, 0)
    assert running.ended(0, within=30) == [130]
    assert re.search("^ *full speed", running.log(0), re.M), "the report"
    assert "Traceback" not in running.log(0)
