"""Publishing: a kill at any moment leaves the former dataset or the new one, by every name; the
same command goes on.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import filelock
import fsspec
import numpy as np
import pytest

from streammega import IndexedDataset, StorageConfig
from streammega.cli.main import main
from streammega.convert import convert
from streammega.convert.conversion import Conversion
from streammega.convert.work_dir import WorkDir
from streammega.errors import ConfigError, ConvertError, StreammegaError
from streammega.storage.backends.fsspec import FsspecStore, FsspecWriter
from streammega.storage.backends.local import LocalStore, LocalWriter
from tests.support.builders import write_random_pair

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def _nothing_is_left_open() -> Iterator[None]:
    """What a kill left open is closed here, not within another test."""
    yield
    gc.collect()


OTHER_DISK = Path("/dev/shm")
STEPS = [
    *((kind, "commit") for kind in (LocalWriter, FsspecWriter)),
    *((kind, "delete") for kind in (LocalStore, FsspecStore)),
    *((os, name) for name in ("replace", "link")),
]
"""All that changes what is stored."""


class Killed(BaseException):
    """In place of SIGKILL: nothing is cleaned up."""


@contextmanager
def killed_before(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The process "dies" before its `step`-th change of what is stored; yields how
    many there were.
    """
    count = [0]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if count[0] >= step:
                raise Killed
            count[0] += 1
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "release", lambda self: None)
        for owner, name in STEPS:
            patch.setattr(owner, name, counted(getattr(owner, name)))
        yield count


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than the tests'."""
    if not OTHER_DISK.is_dir() or os.stat(OTHER_DISK).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a second file system")
    folder = OTHER_DISK / f"streammega-{os.getpid()}-{tmp_path.name}"
    folder.mkdir()
    yield folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("kind", ["bin", "zst"])
def test_the_work_folder_may_be_on_another_file_system(
    tmp_path: Path, other_disk: Path, kind: Any
) -> None:
    write_random_pair(str(tmp_path / "in"))
    options: dict[str, Any] = {"format": kind, "shard_bytes": 3000, "min_tokens": 1, "workers": 1}
    convert([str(tmp_path / "in")], str(tmp_path / "one" / "web"), **options)
    convert(
        [str(tmp_path / "in")], str(tmp_path / "two" / "web"), work_dir=str(other_disk), **options
    )
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == names
    assert all(
        (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        for name in names
    )
    assert list(other_disk.iterdir()) == []


# --- kills ----------------------------------------------------------------------------------------------------------------


def tokens_of(name: str) -> list[list[int]] | None:
    """What is read by a name; None where there is no dataset."""
    try:
        return [np.asarray(item).tolist() for item in IndexedDataset(name)[:]]
    except StreammegaError:
        return None


FORMERS: dict[str, dict[str, Any]] = {
    "one shard": {}, "several shards": {"shard_bytes": 1200},
    "another kind": {"format": "zst"}, "a pair without a manifest": {},
}  # fmt: skip


@pytest.mark.guarantee("dataset-replaced-former")
@pytest.mark.parametrize(
    ("where", "former", "stride"),
    [
        ("remote", "one shard", 5), ("local", "several shards", 5),
        *(pytest.param(where, former, 1, marks=pytest.mark.soak) for where in ("remote", "local") for former in FORMERS),
    ],
)  # fmt: skip
def test_an_overwrite_killed_at_any_moment_leaves_the_former_or_the_new_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, former: str, stride: int
) -> None:
    root = f"memory://{tmp_path.name}" if where == "remote" else str(tmp_path / "out")
    name = f"{root}/web"
    write_random_pair(str(tmp_path / "a"), 40, 40, seed=1)
    write_random_pair(str(tmp_path / "b"), 40, 40, seed=2)
    old = tokens_of(str(tmp_path / "a"))
    new = tokens_of(str(tmp_path / "b"))
    replaces: dict[str, Any] = {"shard_bytes": 1200, "workers": 1, "overwrite": True}

    def begin() -> None:
        system, path = fsspec.core.url_to_fs(root)
        if system.exists(path):
            system.rm(path, recursive=True)
        if former == "a pair without a manifest":  # as Megatron's own tools write it
            system.makedirs(path, exist_ok=True)
            for suffix in (".bin", ".idx"):
                system.put(str(tmp_path / f"a{suffix}"), f"{path}/web{suffix}")
        else:
            convert([str(tmp_path / "a")], name, workers=1, **FORMERS[former])

    step = 0
    done = False
    while not done:
        begin()
        try:
            with killed_before(step, monkeypatch):
                convert([str(tmp_path / "b")], name, **replaces)
                done = True
        except Killed:
            names = [name, f"{root}/"] + (
                [f"{name}.manifest.json"] if former != "a pair without a manifest" else []
            )
            for by in names:
                assert tokens_of(by) in (old, new), (step, by)
            convert([str(tmp_path / "b")], name, **replaces)
        assert all(tokens_of(by) == new for by in (name, f"{root}/", f"{name}.manifest.json")), step
        system, path = fsspec.core.url_to_fs(root)
        # which are removed after a day
        left = [found for found in system.find(path) if not found.endswith(".partial")]
        assert len(left) == 2 * len(IndexedDataset(f"{name}.manifest.json").shards) + 1, (
            "nothing else is left"
        )
        step += stride
    assert step > 8


@pytest.mark.guarantee("dataset-replaced-former")
@pytest.mark.parametrize("shard_bytes", [None, 1200])
def test_damaged_shards_are_replaced_by_the_same_conversion_killed_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int | None
) -> None:
    """The new manifest has the bytes of the one that it replaces."""
    write_random_pair(str(tmp_path / "a"), 40, 40, seed=1)
    options: dict[str, Any] = {"shard_bytes": shard_bytes, "workers": 1, "overwrite": True}
    for step in range(1000):
        name = str(tmp_path / f"out{step}" / "web")
        convert([str(tmp_path / "a")], name, **options)
        shards = sorted((tmp_path / f"out{step}").glob("web*.bin"))
        shards[0].write_bytes(bytes(shards[0].stat().st_size))
        try:
            with killed_before(step, monkeypatch):
                convert([str(tmp_path / "a")], name, **options)
                break
        except Killed:
            convert([str(tmp_path / "a")], name, **options)
        assert tokens_of(f"{name}.manifest.json") == tokens_of(str(tmp_path / "a")), step
    assert step > 4
    assert tokens_of(f"{name}.manifest.json") == tokens_of(str(tmp_path / "a"))


def convert_is_under_way(name: str, tmp_path: Path) -> bool:
    """Whether a work folder is left, by which the same command goes on."""
    return any(tmp_path.rglob("publishing.json"))


@pytest.mark.parametrize(("where", "shard_bytes"), [("remote", None), ("local", 1200)])
def test_a_first_conversion_killed_at_any_moment_is_no_dataset_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, shard_bytes: int | None
) -> None:
    write_random_pair(str(tmp_path / "in"), 40, 40)
    expected = tokens_of(str(tmp_path / "in"))
    for step in range(1000):
        name = (
            f"memory://{tmp_path.name}-{step}/web"
            if where == "remote"
            else str(tmp_path / f"out{step}" / "web")
        )
        try:
            with killed_before(step, monkeypatch):
                convert([str(tmp_path / "in")], name, shard_bytes=shard_bytes, workers=1)
                break
        except Killed:
            complete = tokens_of(name) == expected
            assert complete or tokens_of(name) is None
            if not complete or convert_is_under_way(name, tmp_path):
                convert([str(tmp_path / "in")], name, shard_bytes=shard_bytes, workers=1)
        assert tokens_of(name) == expected, step
    assert step > 4


@pytest.mark.guarantee("dataset-replaced-former")
def test_a_dataset_is_not_replaced_because_its_conversion_was_killed_at_its_very_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_pair(str(tmp_path / "a"), seed=1)
    write_random_pair(str(tmp_path / "b"), seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(
            Conversion, "remove_work", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            convert([str(tmp_path / "a")], str(tmp_path / "web"), workers=1)
    with pytest.raises(ConvertError, match="--overwrite"):
        convert([str(tmp_path / "b")], str(tmp_path / "web"), workers=1)
    convert([str(tmp_path / "a")], str(tmp_path / "web"), workers=1)
    assert tokens_of(str(tmp_path / "web")) == tokens_of(str(tmp_path / "a"))


@pytest.mark.parametrize("resume", [True, False])
def test_an_interrupted_conversion_says_how_to_resume(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_random_pair(str(tmp_path / "a"), seed=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Conversion, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        convert([str(tmp_path / "a")], str(tmp_path / "web"), workers=1, resume=resume)
    ending = "again to resume" if resume else "again without --no-resume to resume"
    assert caplog.messages[-1].endswith(ending)


def test_shards_of_a_set_without_a_manifest_are_not_replaced(tmp_path: Path) -> None:
    write_random_pair(str(tmp_path / "a"), seed=1)
    convert([str(tmp_path / "a")], str(tmp_path / "o" / "web"), shard_bytes=3000, workers=1)
    (tmp_path / "o" / "web.manifest.json").unlink()
    with pytest.raises(ConvertError, match="exists already"):
        convert(
            [str(tmp_path / "a")],
            str(tmp_path / "o" / "web"),
            shard_bytes=3000,
            zstd_level=4,
            workers=1,
        )


def test_a_restart_keeps_the_lock_of_the_work_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_pair(str(tmp_path / "in"))
    lock = tmp_path / ".out.convert" / "lock"
    lock.parent.mkdir()
    lock.touch()
    before = lock.stat().st_ino
    held: list[int] = []
    real = Conversion.job

    def noted(self: Conversion) -> Any:
        held.append(lock.stat().st_ino)
        return real(self)

    monkeypatch.setattr(Conversion, "job", noted)
    convert([str(tmp_path / "in")], str(tmp_path / "out"), resume=False, min_tokens=1, workers=1)
    assert held == [before], "whoever comes now finds the lock that is held"


def test_a_server_setting_of_the_caller_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setenv("RAYON_NUM_THREADS", "3")
    convert([str(tmp_path / "a.txt")], str(tmp_path / "out"), tokenizer="bytes", workers=1)
    assert os.environ.get("TOKENIZERS_PARALLELISM") is None
    assert os.environ["RAYON_NUM_THREADS"] == "3"


@pytest.mark.parametrize("shard_bytes", [None, 1200])
def test_what_megatrons_own_reader_takes_is_printed(
    tmp_path: Path, shard_bytes: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write_random_pair(str(tmp_path / "in"), 40, 40)
    name = f"memory://{tmp_path.name}/web"
    command = ["convert", str(tmp_path / "in"), name]
    if shard_bytes:
        command += ["--shard-size", str(shard_bytes)]
    assert main(command) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "megatron_prefix" in line)
    prefixes = line.removeprefix("megatron_prefix: ").split(" ... ")
    assert main([*command, "--overwrite", "--json"]) == 0
    others = json.loads(capsys.readouterr().out)["shard_prefixes"]
    assert len(prefixes) == (2 if shard_bytes else 1)
    assert others[0] != prefixes[0], "a dataset that is replaced keeps its files until then"
    stored = [tokens for prefix in others for tokens in tokens_of(prefix) or ()]
    assert stored == tokens_of(str(tmp_path / "in"))
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out" / "web")]) == 0
    assert "megatron_prefix" not in capsys.readouterr().out


# --- what is left ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["remote", "local"])
def test_what_killed_conversions_left_is_found_and_removed_when_asked(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = f"memory://{tmp_path.name}-gc" if where == "remote" else str(tmp_path / "out")
    name = f"{root}/web"
    write_random_pair(str(tmp_path / "a"), 40, 40)
    convert([str(tmp_path / "a")], name, shard_bytes=1200, workers=1)
    system, path = fsspec.core.url_to_fs(root)
    whole = set(system.find(path))
    others = ["web-genuine.bin", "web2.bin", "webs-00000-of-00002.bin", "web.tar", "notes.txt"]
    mark = "0123456789ab"
    unfinished = f".{mark}.partial"
    others += [f".web2.bin{unfinished}", f".notes.txt{unfinished}", ".web.bin.partial"]
    orphans = [f"web-gen{mark}.bin", f"web-gen{mark}.idx", "web-00007-of-00009.bin"]
    orphans += [
        f".{of}{unfinished}" for of in ("web.bin", "web.manifest.json", ".web.streammega-writable")
    ]
    orphans.append("web-00007-of-00009.idx.0123456789abcdef0123456789abcdef.partial")
    for file in (*others, *orphans):
        system.pipe_file(f"{path}/{file}", b"x")
    assert main(["gc", name, "--older-than", "0"]) == 0
    assert "7 files, 7 bytes; --remove removes them" in capsys.readouterr().out
    assert set(system.find(path)) == whole | {f"{path}/{file}" for file in (*others, *orphans)}
    assert tokens_of(f"{name}.manifest.json") == tokens_of(str(tmp_path / "a"))
    assert main(["gc", f"{name}.manifest.json", "--remove", "--older-than", "0"]) == 0
    assert set(system.find(path)) == whole | {f"{path}/{file}" for file in others}
    assert main(["gc", name]) == 0
    assert "0 files" in capsys.readouterr().out


@pytest.mark.parametrize("output", ["", ".", "out/", "out/..", "s3://bucket/", ".bin"])
def test_an_output_without_a_name_is_refused(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"cannot be the name of a dataset|give a name in it"):
        convert(["in.txt"], output, tokenizer="bytes", workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_a_conversion_begins_although_a_task_looks_at_its_lock_at_that_moment(
    tmp_path: Path,
) -> None:
    folder = WorkDir(str(tmp_path / "work"), StorageConfig())
    folder.make()
    look = filelock.FileLock(tmp_path / "work" / "lock", thread_local=False)
    look.acquire()
    timer = threading.Timer(0.2, look.release)
    timer.start()
    with folder.lock():
        pass
    timer.join()


def test_a_job_that_ends_leaves_the_work_folder_of_the_next_one_alone(tmp_path: Path) -> None:
    folder = WorkDir(str(tmp_path / "work"), StorageConfig())
    with ExitStack() as first:
        first.enter_context(folder.lock())
        folder.remove()
        with folder.lock():  # the next job makes it anew
            first.close()
            with pytest.raises(ConvertError, match="another conversion"), folder.lock():
                pass
