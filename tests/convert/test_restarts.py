"""What a conversion believes of one that was killed before it: nothing of other options, of another
output, or of files that are gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streammega.convert import convert
from streammega.convert.conversion import Conversion
from streammega.dataset.verify import verify
from streammega.errors import ConvertError
from tests.convert.test_publishing import Killed, killed_before
from tests.support.builders import stored_texts, write_jsonl

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
TEXTS = [f"document {number} of the corpus" for number in range(24)]
OPTIONS: dict[str, Any] = {"tokenizer": "bytes", "shard_bytes": 500, "workers": 1}


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 400)
    monkeypatch.setattr("streammega.convert.job.SEGMENT_BYTES", 200)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "in.jsonl", TEXTS)


def roots(tmp_path: Path, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Places for outputs, each with the settings of its work folder, if it has one."""
    for number in itertools.count():
        if where == "local":
            yield str(tmp_path / f"out{number}"), {}
        else:
            root = f"memory://{tmp_path.name}-{number}"
            yield root, {"work_dir": f"{root}-work"} if where == "remote work" else {}


@pytest.mark.parametrize("where", ["local", "remote", "remote work"])
@pytest.mark.parametrize(
    "stride", [9, pytest.param(4, marks=pytest.mark.soak)], ids=["some", "many"]
)
def test_a_killed_conversion_of_other_options_leaves_nothing_in_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str, where: str, stride: int
) -> None:
    """A is killed, B is killed, and A goes on."""
    places = roots(tmp_path, where)
    shortened = {**OPTIONS, "max_tokens": 12, "overwrite": True}

    def is_killed(step: int, output: str, options: dict[str, Any]) -> bool:
        with suppress(Killed), killed_before(step, monkeypatch):
            convert([corpus], output, **options)
            return False
        return True

    for first in itertools.count(2, stride):
        root, work = next(places)
        if not is_killed(first, f"{root}/web", {**OPTIONS, **work}):
            break
        for second in range(first % stride, first + stride, stride):
            root, work = next(places)
            assert is_killed(first, f"{root}/web", {**OPTIONS, **work})
            with suppress(ConvertError):  # what A has put may be in its way
                is_killed(second, f"{root}/web", {**shortened, **work})
            try:
                convert([corpus], f"{root}/web", **OPTIONS, **work, overwrite=True)
            except ConvertError as error:  # nor does A take what B has put after it for its own
                if "exists already, of a dataset without" not in str(error):
                    raise
                continue
            assert stored_texts(f"{root}/web.manifest.json") == TEXTS, (first, second)
            assert verify(f"{root}/web").problems == []
    assert first > 15


def test_outputs_of_one_name_in_two_folders_share_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str
) -> None:
    others = write_jsonl(tmp_path / "others.jsonl", [f"another text {n}" for n in range(20)])
    work = str(tmp_path / "work")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    for step in itertools.count(2, 3):
        monkeypatch.chdir(tmp_path / "one")
        done = False
        with suppress(Killed), killed_before(step, monkeypatch):
            convert([corpus], "web", work_dir=work, **OPTIONS, overwrite=True)
            done = True
        monkeypatch.chdir(tmp_path / "two")
        convert([others], "web", work_dir=work, **OPTIONS, overwrite=True)
        assert stored_texts("web.manifest.json") == [f"another text {n}" for n in range(20)], step
        monkeypatch.chdir(tmp_path / "one")
        convert([corpus], "web", work_dir=work, **OPTIONS, overwrite=True)
        assert stored_texts("web.manifest.json") == TEXTS, step
        if done:
            break


def test_what_other_options_made_is_removed_as_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str
) -> None:
    files = []
    for max_tokens in (12, 12, 10):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(
                Conversion, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            convert([corpus], str(tmp_path / "web"), max_tokens=max_tokens, **OPTIONS)
        files.append({path.name for path in (tmp_path / ".web.convert").glob("unit-*.bin")})
    assert files[0] == files[1]
    assert len(files[2]) == len(files[1])
    assert not files[2] & files[1]
