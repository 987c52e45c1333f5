"""What version 0.2 wrote is read by the code of today: docs/compatibility.md."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from streammega.dataset.verify import verify
from streammega.train.config import load_run
from tests.support.data.make_release import (
    CONFIGS,
    DATASETS,
    DIGEST,
    FOLDER,
    SECTIONS,
    describe_dataset,
    folder_digest,
    next_batches,
    open_loader,
    open_text_stream,
    origins,
    train,
)
from tools import public_api

EXPECTED = json.loads((FOLDER / "expected.json").read_text())
STATES = json.loads((FOLDER / "states.json").read_text())


@pytest.fixture
def _release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is a copy of the kept files."""
    shutil.copytree(FOLDER, tmp_path / "kept")
    monkeypatch.chdir(tmp_path / "kept")


@pytest.mark.guarantee("later-reads-0-2")
@pytest.mark.usefixtures("_release")
@pytest.mark.parametrize("name", DATASETS)
def test_datasets_have_the_same_ids(name: str) -> None:
    assert describe_dataset(name) == EXPECTED["datasets"][name]
    assert not verify(name).problems


@pytest.mark.guarantee("later-reads-0-2")
@pytest.mark.usefixtures("_release")
@pytest.mark.parametrize("name", CONFIGS)
def test_states_go_on_with_the_same_batches(name: str) -> None:
    with open_loader(name) as loader:
        loader.load_state_dict(STATES[name])
        assert next_batches(iter(loader)) == EXPECTED["states"][name]


@pytest.mark.guarantee("later-reads-0-2")
def test_the_state_of_a_stream_of_texts_goes_on_with_the_same_batches() -> None:
    with open_text_stream() as stream:
        stream.load_state_dict(STATES["texts"])
        assert next_batches(iter(stream)) == EXPECTED["states"]["texts"]


@pytest.mark.guarantee("later-reads-0-2")
@pytest.mark.usefixtures("_release")
def test_origins_of_documents_are_the_same() -> None:
    assert origins() == EXPECTED["origins"]


@pytest.mark.guarantee("later-reads-0-2")
@pytest.mark.usefixtures("_release")
def test_a_checkpoint_goes_on_with_the_same_batches_and_losses() -> None:
    """Batches are the same to the bit; losses as far as releases of torch compute alike."""
    steps = train()
    assert len(steps) == len(EXPECTED["steps"]) == 2
    for step, expected in zip(steps, EXPECTED["steps"], strict=True):
        assert step["batch_hash"] == expected["batch_hash"]
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-4)


@pytest.mark.guarantee("later-reads-0-2")
@pytest.mark.usefixtures("_release")
def test_settings_of_a_run_file_are_known_and_have_their_values() -> None:
    run: Any = load_run("run.toml")
    sections = {"data.storage": run.data.storage} | {
        name: getattr(run, name) for name in ("data", "model", "parallel", "train")
    }
    assert set(sections) == set(SECTIONS)
    table = tomllib.loads(Path("run.toml").read_text())
    table["data.storage"] = table["data"].pop("storage")
    for section, settings in sections.items():
        for name, value in table[section].items():
            assert getattr(sections[section], name) == value, f"{section}.{name}"
        assert settings is not None


def test_kept_files_are_those_that_were_kept() -> None:
    """A mend belongs into the code that reads: who changes these files breaks the promise."""
    assert folder_digest() == DIGEST.read_text().strip()


@pytest.mark.guarantee("public-api-written")
def test_the_public_api_is_the_one_that_was_reviewed() -> None:
    assert public_api.FILE.read_text() == public_api.describe_modules(), (
        "the public API differs from docs/public_api.txt: run python tools/public_api.py, and let "
        "CHANGELOG say what changes"
    )
