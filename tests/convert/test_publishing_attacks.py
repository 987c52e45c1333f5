"""Publishing under attack: others write, remove and read at the same time, rights are missing, work
folders are lost.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from streammega import IndexedDataset
from streammega.cli.main import main
from streammega.convert import convert
from streammega.convert.conversion import Conversion
from streammega.convert.write.gc import find_leftovers
from streammega.convert.write.publish import Publisher
from streammega.dataset.verify import verify
from streammega.errors import AccessDeniedError, ConvertError
from streammega.storage.backends.fsspec import FsspecStore
from tests.convert.test_publishing import Killed, killed_before, tokens_of
from tests.support.builders import MARK, write_random_pair

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    """What a kill left open is closed here, not within another test."""
    yield
    gc.collect()


@pytest.fixture
def pairs(tmp_path: Path) -> list[str]:
    """Two pairs of other tokens."""
    for seed in (1, 2):
        write_random_pair(str(tmp_path / f"in{seed}"), 40, 40, seed=seed)
    return [str(tmp_path / "in1"), str(tmp_path / "in2")]


def files(root: str) -> list[str]:
    system, path = fsspec.core.url_to_fs(root)
    return sorted(name.rpartition("/")[2] for name in system.find(path))


def kill(step: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> None:
    with suppress(Killed), killed_before(step, monkeypatch):
        run()
        raise AssertionError("ended before it was killed")


def test_a_dataset_is_not_removed_for_what_an_earlier_conversion_was_to_replace(
    tmp_path: Path, pairs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"memory://{tmp_path.name}-removed/web"
    convert(pairs[:1], name, workers=1)
    kill(6, monkeypatch, lambda: convert(pairs[1:], name, workers=1, overwrite=True))
    system, path = fsspec.core.url_to_fs(name)
    for found in system.find(path.rpartition("/")[0]):
        system.rm_file(found)  # by hand
    convert(pairs[1:], name, workers=1, eod_id=3)
    assert tokens_of(name) == tokens_of(pairs[1])
    assert verify(name, eod_id=None).shards == 1


@pytest.mark.guarantee("others-publish-remove")
def test_tokens_that_were_removed_between_two_runs_are_written_again(
    tmp_path: Path, pairs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"memory://{tmp_path.name}-again/web"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Conversion, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(pairs[:1], name, workers=1, shard_bytes=1200)
    assert main(["gc", name, "--remove", "--older-than", "0"]) == 0
    assert files(name.rpartition("/")[0]) == []
    convert(pairs[:1], name, workers=1, shard_bytes=1200)
    assert verify(name).problems == []
    assert tokens_of(f"{name}.manifest.json") == tokens_of(pairs[0])


@pytest.mark.guarantee("others-publish-remove")
@pytest.mark.parametrize("where", ["remote", "local"])
def test_shards_that_no_manifest_lists_are_in_no_folder_and_no_input(
    tmp_path: Path, pairs: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Those of a conversion that was killed right before its commit, and their copy."""
    root = f"memory://{tmp_path.name}-unlisted" if where == "remote" else str(tmp_path / "out")
    convert(pairs[:1], f"{root}/code", workers=1, shard_bytes=1200)
    for number in range(2):
        if where == "local" and not number:
            convert(pairs[1:], f"{root}/web", workers=1)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Publisher, "_commit", lambda *_: (_ for _ in ()).throw(Killed))
            options: Any = {"workers": 1, "overwrite": where == "local", "min_tokens": 1 + number}
            convert(pairs[:1], f"{root}/web", **options)
    expected = tokens_of(pairs[0]) or []
    if where == "local":
        expected = expected + (tokens_of(pairs[1]) or [])
    assert len([name for name in files(root) if name.startswith("web-gen")]) == 4
    assert tokens_of(f"{root}/") == tokens_of(f"{root}/*") == expected
    report = convert([f"{root}/"], str(tmp_path / "again"), workers=1)
    assert report.files_passed_over["shards that no manifest lists"] == 4
    assert tokens_of(str(tmp_path / "again")) == expected


@pytest.mark.guarantee("others-publish-remove")
def test_tokens_that_are_removed_while_a_conversion_runs_are_an_error_and_no_dataset(
    tmp_path: Path, pairs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"memory://{tmp_path.name}-beside/web"
    real = Conversion.publish

    def cleaned(self: Conversion, *arguments: Any) -> Any:
        system, path = fsspec.core.url_to_fs(name)
        (tokens,) = system.glob(f"{path}-*-00001-of-00002.bin")
        system.rm_file(tokens)  # by a gc on another machine
        return real(self, *arguments)

    with (
        monkeypatch.context() as patch,
        pytest.raises(ConvertError, match="run the same command again"),
    ):
        patch.setattr(Conversion, "publish", cleaned)
        convert(pairs[:1], name, workers=1, shard_bytes=1200)
    assert tokens_of(f"{name}.manifest.json") is None
    convert(pairs[:1], name, workers=1, shard_bytes=1200)
    assert verify(name).problems == []


@pytest.mark.guarantee("others-publish-remove")
@pytest.mark.parametrize("where", ["remote", "local"])
def test_a_dataset_that_another_published_meanwhile_is_not_replaced_unasked(
    tmp_path: Path, pairs: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    name = (
        f"memory://{tmp_path.name}-meanwhile/web"
        if where == "remote"
        else str(tmp_path / "out" / "web")
    )
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Conversion, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(pairs[:1], name, workers=1, shard_bytes=1200)
    other: Any = {"work_dir": str(tmp_path / "elsewhere"), "workers": 1}
    # which finds tokens of the one that was killed
    convert(pairs[1:], name, overwrite=True, **other)
    with pytest.raises(ConvertError, match="exists already"):
        convert(pairs[:1], name, workers=1, shard_bytes=1200)
    assert tokens_of(name) == tokens_of(pairs[1])
    assert verify(name).problems == []
    convert(pairs[:1], name, workers=1, shard_bytes=1200, overwrite=True)
    assert tokens_of(f"{name}.manifest.json") == tokens_of(pairs[0])
    assert tokens_of(f"{name.rpartition('/')[0]}/") == tokens_of(pairs[0])
    assert (
        main(["gc", name, "--remove", "--older-than", "0"]) == 0
    )  # tokens of the one that was killed
    assert len(files(name.rpartition("/")[0])) == 5
    assert verify(name).problems == []


def test_of_two_conversions_to_one_output_the_later_sees_that_it_was_published_meanwhile(
    tmp_path: Path, pairs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"memory://{tmp_path.name}-two/web"
    real = Conversion.publish

    def late(self: Conversion, *arguments: Any) -> Any:
        monkeypatch.setattr(Conversion, "publish", real)
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))  # a machine of its own
            convert(pairs[1:], name, workers=1, shard_bytes=2000)
        return real(self, *arguments)

    monkeypatch.setattr(Conversion, "publish", late)
    with pytest.raises(ConvertError, match="meanwhile"):
        convert(pairs[:1], name, workers=1, shard_bytes=1200)
    assert tokens_of(f"{name}.manifest.json") == tokens_of(pairs[1])
    assert verify(name).problems == []
    convert(pairs[:1], name, workers=1, shard_bytes=1200, overwrite=True)
    assert tokens_of(f"{name.rpartition('/')[0]}/") == tokens_of(pairs[0])


def test_one_conversion_at_a_time_whatever_the_work_folders(
    tmp_path: Path, pairs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(tmp_path / "out" / "web")
    seen: list[str] = []
    real = Conversion.run

    def run(self: Conversion, **named: Any) -> Any:
        monkeypatch.setattr(Conversion, "run", real)
        with pytest.raises(ConvertError, match="another conversion to this output is running"):
            convert(pairs[1:], name, workers=1, work_dir=str(tmp_path / "two"))
        assert main(["gc", name, "--remove", "--older-than", "0"]) == 1, (
            "there is nothing of that name yet"
        )
        seen.append("refused")
        return real(self, **named)

    monkeypatch.setattr(Conversion, "run", run)
    convert(pairs[:1], name, workers=1, work_dir=str(tmp_path / "one"))
    assert seen == ["refused"]
    assert tokens_of(name) == tokens_of(pairs[0])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "web.bin",
        "web.idx",
        "web.manifest.json",
    ]


def test_a_dataset_that_was_replaced_is_not_replaced_by_one_killed_before_unasked(
    tmp_path: Path, pairs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work folder is an object store's, and its removal is interrupted at every point."""
    work = f"memory://{tmp_path.name}-work"
    name = f"memory://{tmp_path.name}-late/web"
    for step in range(1, 60):
        convert(pairs[:1], name, workers=1, work_dir=work, overwrite=True)
        before = len(files(work))
        assert before == 0
        kill_at = step
        try:
            with killed_before(kill_at, monkeypatch):
                convert(pairs[:1], name, workers=1, work_dir=work, overwrite=True, min_tokens=1)
                break
        except Killed:
            pass
        there = tokens_of(name)
        with pytest.raises(ConvertError, match="--overwrite"):
            convert(pairs[1:], name, workers=1, work_dir=work)
        assert tokens_of(name) == there
    assert step > 8


@pytest.mark.guarantee("others-publish-remove")
@pytest.mark.parametrize("suffix", [".bin", ".tar", ".npy"])
def test_an_input_is_not_replaced_whatever_its_format(tmp_path: Path, suffix: str) -> None:
    import tarfile

    import numpy as np

    path = tmp_path / f"web{suffix}"
    if suffix == ".tar":
        (tmp_path / "a.txt").write_text("text")
        with tarfile.open(path, "w") as archive:
            archive.add(tmp_path / "a.txt", "a.txt")
    elif suffix == ".bin":
        np.arange(100, dtype=np.uint16).tofile(path)
    else:
        np.save(path, np.arange(100, dtype=np.uint16))
    before = path.read_bytes()
    kind: Any = "tar" if suffix == ".tar" else "bin"
    with suppress(ConvertError):
        convert(
            [str(path)],
            str(tmp_path / "web"),
            format=kind,
            tokenizer="bytes",
            overwrite=True,
            workers=1,
        )
    assert path.read_bytes() == before


def test_shards_of_another_set_are_not_replaced_by_an_overwrite(
    tmp_path: Path, pairs: list[str]
) -> None:
    convert(pairs[:1], str(tmp_path / "o" / "web"), shard_bytes=1200, workers=1)
    (tmp_path / "o" / "web.manifest.json").unlink()
    before = {name: (tmp_path / "o" / name).read_bytes() for name in files(str(tmp_path / "o"))}
    convert(pairs[:1], str(tmp_path / "p" / "web"), workers=1)
    for name in files(str(tmp_path / "p")):
        (tmp_path / "o" / name).write_bytes((tmp_path / "p" / name).read_bytes())
    with pytest.raises(ConvertError, match="exists already"):
        convert(
            pairs[:1],
            str(tmp_path / "o" / "web"),
            shard_bytes=1200,
            workers=1,
            overwrite=True,
            zstd_level=4,
        )
    assert {name: (tmp_path / "o" / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("damage", ["version", "cut"])
def test_a_dataset_whose_shards_are_not_known_is_not_replaced(
    tmp_path: Path, pairs: list[str], damage: str
) -> None:
    name = str(tmp_path / "o" / "web")
    convert(pairs[:1], name, shard_bytes=1200, workers=1)
    path = tmp_path / "o" / "web.manifest.json"
    found = json.loads(path.read_text())
    path.write_text(
        json.dumps(found | {"version": 99}) if damage == "version" else path.read_text()[:300]
    )
    before = files(str(tmp_path / "o"))
    with pytest.raises(ConvertError, match="which shards belong to it is not known"):
        convert(pairs[1:], name, workers=1, overwrite=True)
    assert files(str(tmp_path / "o")) == before


# --- gc -------------------------------------------------------------------------------------------------------------------


def test_datasets_whose_names_look_like_leftovers_are_none(
    tmp_path: Path, pairs: list[str]
) -> None:
    root = tmp_path / "o"
    for name in ("web", "web-2", "web-gen0123456789ab", "web-2-gen0123456789ab"):
        convert(pairs[:1], str(root / name), workers=1, shard_bytes=1200)
    for name in ("web", "web-2", "web-gen0123456789ab"):
        assert find_leftovers(str(root / name)) == []
    assert main(["gc", str(root / "web"), "--remove", "--older-than", "0"]) == 0
    for name in ("web", "web-2", "web-gen0123456789ab"):
        assert verify(str(root / name)).problems == []


def test_what_may_be_a_dataset_or_an_input_is_no_leftover(tmp_path: Path, pairs: list[str]) -> None:
    """In a bucket where shards with a mark are the dataset of the name."""
    root = f"memory://{tmp_path.name}-others"
    convert(pairs[:1], f"{root}/web", workers=1, shard_bytes=1200)
    system, path = fsspec.core.url_to_fs(root)
    whole = system.find(path)
    others = [
        "web.bin",
        "web.tar",
        *(f"web-{n:05d}-of-00003{s}" for n in range(3) for s in (".bin", ".idx")),
    ]
    for name in others:
        system.pipe_file(f"{path}/{name}", b"x")
    assert main(["gc", f"{root}/web", "--remove", "--older-than", "0"]) == 0
    assert len(system.find(path)) == len(whole) + len(others)


@pytest.mark.parametrize("where", ["remote", "local"])
def test_what_is_younger_than_a_running_conversion_may_be_stays(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = f"memory://{tmp_path.name}-young" if where == "remote" else str(tmp_path / "out")
    names = ["web-gen0123456789ab.bin", "web-gen0123456789ab.idx"]
    system, path = fsspec.core.url_to_fs(root)
    system.makedirs(path, exist_ok=True)
    now = time.time()
    for name in names:
        system.pipe_file(f"{path}/{name}", b"x")
    for hours, stay in ((23, True), (25, False)):
        monkeypatch.setattr("time.time", lambda hours=hours: now + 3600 * hours)
        assert main(["gc", f"{root}/web"]) == 0
        listed = capsys.readouterr().out
        assert ("removes 0, older than 24 hours" in listed) == stay
        assert all(name in listed for name in names)
        assert main(["gc", f"{root}/web", "--remove"]) == 0
        assert ("2 files not known to be older" in capsys.readouterr().out) == stay
        assert files(root) == (names if stay else [])


def test_what_a_replaced_dataset_left_is_found_without_the_work_folder(
    tmp_path: Path, pairs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the switch and the removal of the former shards, then gone on with on another
    machine.
    """
    for sizes in (None, 1200):
        name = f"memory://{tmp_path.name}-left-{sizes}/web"
        with monkeypatch.context() as patch:
            convert(pairs[:1], name, workers=1, shard_bytes=sizes)
            patch.setattr(
                FsspecStore, "delete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
            )
            patch.setattr("streammega.convert.run.check_writable", lambda *_, **__: None)
            with pytest.raises(KeyboardInterrupt):
                convert(pairs[1:], name, workers=1, overwrite=True)
        assert main(["gc", name, "--remove", "--older-than", "0"]) == 0
        assert len(files(name.rpartition("/")[0])) == 3
        assert tokens_of(name) == tokens_of(pairs[1])


# --- rights ---------------------------------------------------------------------------------------------------------------


def test_who_may_not_delete_converts_and_is_told_but_replaces_nothing(
    tmp_path: Path,
    pairs: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = f"memory://{tmp_path.name}-rights"

    def denied(self: Any, key: str) -> None:
        raise AccessDeniedError(f"{key}: access denied")

    with monkeypatch.context() as patch:
        patch.setattr(FsspecStore, "delete", denied)
        convert(pairs[:1], f"{root}/web", workers=1)
        assert tokens_of(f"{root}/web") == tokens_of(pairs[0])
        assert "right to delete" in caplog.text
        with pytest.raises(
            ConvertError,
            match="a work folder is removed in the end, and so needs the right to delete",
        ):
            convert(pairs[:1], f"{root}-other/web", workers=1, work_dir=f"{root}-work")
        before = files(root)
        with pytest.raises(ConvertError, match="right to delete"):
            convert(pairs[1:], f"{root}/web", workers=1, overwrite=True)
        assert files(root) == before
    convert([f"{root}/"], str(tmp_path / "again"), workers=1)
    assert tokens_of(str(tmp_path / "again")) == tokens_of(pairs[0])
    assert main(["gc", f"{root}/web", "--remove", "--older-than", "0"]) == 0
    assert [MARK.sub("", name) for name in files(root)] == [
        "web.bin",
        "web.idx",
        "web.manifest.json",
    ]


# --- readers --------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("others-publish-remove")
@pytest.mark.parametrize("where", ["remote", "local"])
def test_whoever_opens_a_dataset_while_it_is_replaced_has_the_former_or_the_new_one(
    tmp_path: Path, pairs: list[str], where: str
) -> None:
    root = f"memory://{tmp_path.name}-readers" if where == "remote" else str(tmp_path / "out")
    sizes: list[int | None] = [None, 1200]
    known = [len(IndexedDataset(pair)) for pair in pairs]
    tokens = [int(IndexedDataset(pair).sequence_lengths.sum()) for pair in pairs]
    assert tokens[0] != tokens[1], known
    convert(pairs[:1], f"{root}/web", workers=1)
    done = threading.Event()
    wrong: list[Any] = []
    opened = [0]

    def read() -> None:
        while not done.is_set():
            for name in (f"{root}/web", f"{root}/web.manifest.json", f"{root}/"):
                try:
                    found = int(IndexedDataset(name).sequence_lengths.sum())
                except Exception as error:
                    found = repr(error)  # type: ignore[assignment]
                opened[0] += 1
                if found not in tokens:
                    wrong.append((name, found))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(8):
            convert(
                [pairs[1 - number % 2]],
                f"{root}/web",
                workers=1,
                overwrite=True,
                shard_bytes=sizes[number // 2 % 2],
            )
    finally:
        done.set()
        reader.join()
    assert wrong == []
    assert opened[0] > 8
    assert os.path.exists(tmp_path)
