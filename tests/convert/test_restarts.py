"""What a conversion believes of one that was killed before it: nothing of other options, of another
output, or of files that are gone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from streammega.cli.main import main
from streammega.convert import Task, convert, convert_task, merge_tasks
from streammega.convert.conversion import Conversion
from streammega.dataset.names import MANIFEST
from streammega.dataset.verify import verify
from streammega.errors import ConvertError
from tests.convert.test_publishing import Killed, killed_before
from tests.support.builders import stored_ids, stored_texts, write_jsonl, write_tokenizer

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
TEXTS = [f"document {number} of the corpus" for number in range(24)]
OPTIONS: dict[str, Any] = {"tokenizer": "bytes", "shard_bytes": 500, "workers": 1}
PLACES = ("local", "remote", "remote work")


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


@pytest.mark.guarantee("restart-believes")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "stride", [16, pytest.param(4, marks=pytest.mark.soak)], ids=["some", "many"]
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


@pytest.mark.guarantee("restart-believes")
@pytest.mark.parametrize(
    "stride", [9, pytest.param(3, marks=pytest.mark.soak)], ids=["some", "many"]
)
def test_outputs_of_one_name_in_two_folders_share_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str, stride: int
) -> None:
    others = write_jsonl(tmp_path / "others.jsonl", [f"another text {n}" for n in range(20)])
    work = str(tmp_path / "work")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    for step in itertools.count(2, stride):
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


@pytest.mark.guarantee("restart-believes")
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


# --- files that are gone ---

ALL_FILES: dict[str, Any] = {
    **OPTIONS, "overwrite": True, "provenance": True, "shuffle_seed": 3, "dedup": True
}  # fmt: skip


def files_of(*folders: str) -> list[tuple[Any, str]]:
    """(file system, path) of all files below folders, but for those of killed writers."""
    found = []
    for folder in folders:
        system, path = fsspec.core.url_to_fs(folder)
        found += [(system, name) for name in system.find(path) if not name.endswith(".partial")]
    return found


def remove_by_gc(output: str, _work: str, _turn: int) -> list[str]:
    main(["gc", output, "--remove", "--older-than", "0"])  # which fails where nothing is there yet
    return []


def remove_half(output: str, _work: str, turn: int) -> list[str]:
    """By hand, every second file of the output."""
    files = files_of(output.rpartition("/")[0])[turn % 2 :: 2]
    for system, path in files:
        system.rm_file(path)
    return [path for _, path in files]


def remove_one(output: str, work: str, turn: int) -> list[str]:
    """Any file of the output or of the work folder."""
    files = files_of(output.rpartition("/")[0], work)[turn * 7 % 11 :][:1]
    for system, path in files:
        system.rm_file(path)
    return [path for _, path in files]


REMOVALS = (remove_by_gc, remove_half, remove_one)


@pytest.mark.guarantee("restart-believes")
@pytest.mark.parametrize(
    ("where", "has_former", "remove", "stride"),
    [
        ("local", False, remove_by_gc, 14),
        ("local", True, remove_half, 13),
        ("remote", True, remove_one, 13),
        ("remote work", False, remove_one, 19),
        *(
            pytest.param(where, has_former, remove, 1, marks=pytest.mark.soak)
            for where in PLACES
            for has_former in (False, True)
            for remove in REMOVALS
        ),
    ],
)
def test_what_is_gone_between_two_starts_is_made_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    corpus: str,
    where: str,
    has_former: bool,
    remove: Callable[[str, str, int], list[str]],
    stride: int,
) -> None:
    """From units to what is published and what it replaces, on a disk and in a bucket."""
    former = write_jsonl(tmp_path / "former.jsonl", TEXTS[::3])
    places = roots(tmp_path, where)
    # the kinds of removal begin at different steps
    for step in itertools.count(len(remove.__name__) % stride, stride):
        root, named = next(places)
        output = f"{root}/web"
        work = named.get("work_dir", str(tmp_path / "xdg-cache" / "streammega" / "convert"))
        if has_former:
            convert([former], output, **OPTIONS)
        with suppress(Killed), killed_before(step, monkeypatch):
            convert([corpus], output, **ALL_FILES, **named)
            break
        removed = remove(output, work, step)
        try:
            convert([corpus], output, **ALL_FILES, **named)
        except ConvertError as error:
            # shards without a manifest, and without the record of what is put, may be anybody's
            is_unknown = any(name.endswith(("publishing.json", MANIFEST)) for name in removed)
            if not is_unknown or "exists already" not in str(error):
                raise
            continue
        assert sorted(stored_texts(f"{output}.manifest.json")) == sorted(TEXTS), step
        assert verify(output).problems == [], step
    assert step > 25


# --- the end of documents, which the tokenizer's settings name ---


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of which two tokens may end documents."""
    words = " ".join(TEXTS).split()
    write_tokenizer(
        tmp_path / "tokenizer" / "tokenizer.json", list(dict.fromkeys(words)), ["<one>", "<two>"]
    )
    end_documents_with("<one>", tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def end_documents_with(token: str, tokenizer: Path) -> None:
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))


def last_ids(prefix: Path) -> set[int]:
    return {ids[-1] for ids in stored_ids(f"{prefix}.manifest.json")}


@pytest.mark.guarantee("restart-believes")
@pytest.mark.parametrize(
    "stride", [7, pytest.param(2, marks=pytest.mark.soak)], ids=["some", "many"]
)
def test_documents_end_alike_though_the_settings_of_the_tokenizer_change_between_two_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str, tokenizer: Path, stride: int
) -> None:
    options = {**OPTIONS, "tokenizer": str(tokenizer), "shard_bytes": 50}
    ends = {}
    for token in ("<one>", "<two>"):
        end_documents_with(token, tokenizer)
        convert([corpus], str(tmp_path / token / "web"), **options)
        (ends[token],) = last_ids(tmp_path / token / "web")
    assert len(set(ends.values())) == 2
    for step in itertools.count(1, stride):
        output = tmp_path / f"out{step}" / "web"
        end_documents_with("<one>", tokenizer)
        done = False
        with suppress(Killed), killed_before(step, monkeypatch):
            convert([corpus], str(output), **options)
            done = True
        end_documents_with("<two>", tokenizer)
        with suppress(ConvertError):  # what was published is in the way
            convert([corpus], str(output), **options)
            assert last_ids(output) == {ends["<two>"]}, step
            assert verify(str(output)).problems == []
        if done:
            break
    assert step > 10


@pytest.mark.guarantee("restart-believes")
def test_tasks_whose_tokenizers_name_other_ends_are_not_merged(
    tmp_path: Path, corpus: str, tokenizer: Path
) -> None:
    options = {**OPTIONS, "tokenizer": str(tokenizer)}
    output = str(tmp_path / "out" / "web")
    convert_task([corpus], output, Task(number=0, of=2), **options)
    end_documents_with("<two>", tokenizer)
    convert_task([corpus], output, Task(number=1, of=2), **options)
    for token in ("<two>", "<one>"):
        end_documents_with(token, tokenizer)
        with pytest.raises(ConvertError, match="units are not done, or were of other inputs"):
            merge_tasks([corpus], output, **options)


@pytest.mark.guarantee("restart-believes")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_workers_end_documents_as_the_conversion_does_whatever_their_tokenizer_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, corpus: str, tokenizer: Path
) -> None:
    options = {**OPTIONS, "tokenizer": str(tokenizer)}
    convert([corpus], str(tmp_path / "one" / "web"), **options)
    real = Conversion.do_units

    def changed(self: Conversion, *arguments: Any) -> Any:
        end_documents_with("<two>", tokenizer)  # as on another machine
        return real(self, *arguments)

    monkeypatch.setattr(Conversion, "do_units", changed)
    monkeypatch.setattr("streammega.convert.conversion.MAX_THREADS", 1)
    convert([corpus], str(tmp_path / "two" / "web"), **options | {"workers": 2})
    assert last_ids(tmp_path / "two" / "web") == last_ids(tmp_path / "one" / "web")
