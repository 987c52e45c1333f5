"""Two conversions to one prefix of a bucket at once, from machines that share nothing else: never a
dataset of both.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from streammega import IndexedDataset, StorageConfig
from streammega.cli.main import main
from streammega.convert import convert
from streammega.convert.conversion import Conversion
from streammega.convert.write.destination import Destination
from streammega.convert.write.publish import Publisher
from streammega.dataset.verify import verify
from streammega.errors import AccessDeniedError, ConvertError
from streammega.storage import open_store
from streammega.storage.backends.fsspec import FsspecStore
from tests.convert.test_publishing import Killed as KilledAtStep
from tests.convert.test_publishing import killed_before, tokens_of
from tests.support.kill_programs import convert_as_told
from tests.support.servers import S3
from tests.support.typed import tokens

WAIT = 60.0
"""Seconds that a process may take to its next word, on a busy machine."""


class Machine:
    """A process with a cache folder, and so a work folder, of its own."""

    def __init__(self, folder: Path, storage: StorageConfig) -> None:
        self._folder = folder
        self._storage = storage
        self._process: Any = None
        self._pipe: Any = None

    def convert(self, text: str, output: str, **named: Any) -> str:
        """Start; returns "begun" where it may begin, or an error."""
        self._folder.mkdir(exist_ok=True)
        (self._folder / "in.txt").write_text(text)
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        arguments = (
            theirs,
            str(self._folder / "cache"),
            self._storage,
            [str(self._folder / "in.txt")],
            output,
        )
        self._process = context.Process(
            target=convert_as_told, args=arguments, kwargs=named, daemon=True
        )
        self._process.start()
        theirs.close()
        return self._word()

    def go_on(self) -> str:
        """To where its tokens are "written", and from there to where all is "done"; or returns an
        error.
        """
        self._pipe.send("go on")
        return self._word()

    def end(self) -> None:
        """SIGKILL, if it is there still."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()

    def _word(self) -> str:
        assert self._pipe.poll(WAIT)
        return str(self._pipe.recv())


@pytest.fixture
def machine(tmp_path: Path, s3_storage: StorageConfig) -> Iterator[Callable[[str], Machine]]:
    made: list[Machine] = []

    def make(name: str) -> Machine:
        made.append(Machine(tmp_path / name, s3_storage))
        return made[-1]

    yield make
    for one in made:
        one.end()


def text_of(name: str, storage: StorageConfig) -> str:
    """What is stored, once it was found to be sound."""
    assert verify(name, storage).problems == []
    ids = tokens(IndexedDataset(name, storage), 0)
    return bytes(ids[:-1].astype("uint8")).decode()


@pytest.mark.guarantee("two-machines-sent")
@pytest.mark.parametrize("ends_first", ["one", "two"])
def test_of_two_first_conversions_at_once_the_first_to_end_is_there_and_the_other_is_told(
    machine: Callable[[str], Machine], bucket: str, s3_storage: StorageConfig, ends_first: str
) -> None:
    name = f"s3://{bucket}/web"
    one, two = machine("one"), machine("two")
    assert one.convert("a" * 1000, name) == two.convert("b" * 1000, name) == "begun"
    order = [one, two] if ends_first == "one" else [two, one]
    assert order[1].go_on() == order[0].go_on() == "written"
    assert order[0].go_on() == "done"
    assert "another conversion wrote it meanwhile" in order[1].go_on()
    assert text_of(name, s3_storage) == ("a" if ends_first == "one" else "b") * 1000


@pytest.mark.guarantee("two-machines-sent")
@pytest.mark.parametrize("s3", ["moto"], indirect=True)
@pytest.mark.parametrize("s3_storage", ["obstore"], indirect=True)
@pytest.mark.parametrize("first", ["plain", "beside"])
def test_what_overwrites_beside_a_conversion_that_runs_leaves_one_of_both_whole(
    machine: Callable[[str], Machine], bucket: str, s3_storage: StorageConfig, first: str
) -> None:
    name = f"s3://{bucket}/web"
    plain = machine("one")
    beside = machine("two")
    assert (
        plain.convert("a" * 1000, name)
        == beside.convert("b" * 1000, name, overwrite=True)
        == "begun"
    )
    assert plain.go_on() == beside.go_on() == "written"
    order = [plain, beside] if first == "plain" else [beside, plain]
    assert order[0].go_on() == "done"
    assert "meanwhile" in order[1].go_on()
    assert text_of(name, s3_storage) == ("a" if first == "plain" else "b") * 1000
    assert text_of(f"{name}.manifest.json", s3_storage) == text_of(name, s3_storage)


@pytest.mark.parametrize("s3", ["moto"], indirect=True)
@pytest.mark.parametrize("s3_storage", ["obstore"], indirect=True)
def test_of_two_that_overwrite_one_dataset_at_once_the_later_is_told_and_replaces_nothing(
    machine: Callable[[str], Machine], tmp_path: Path, bucket: str, s3_storage: StorageConfig
) -> None:
    name = f"s3://{bucket}/web"
    (tmp_path / "first.txt").write_text("first")
    convert([str(tmp_path / "first.txt")], name, tokenizer="bytes", storage=s3_storage)
    one, two = machine("one"), machine("two")
    for letter, each in (("a", one), ("b", two)):
        assert each.convert(letter * 1000, name, overwrite=True) == "begun"
        assert each.go_on() == "written"
    assert two.go_on() == "done"
    assert "meanwhile" in one.go_on()
    assert text_of(name, s3_storage) == "b" * 1000


# --- one after the other --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """In place of SIGKILL: nothing is cleaned up."""


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    for letter in "ab":
        (tmp_path / f"{letter}.txt").write_text(letter * 1000)
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


def kill_before(
    method: str, monkeypatch: pytest.MonkeyPatch, *arguments: Any, **named: Any
) -> None:
    """A conversion that is killed before a method of it is called."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Conversion, "release", lambda self: None)
        patch.setattr(Conversion, method, lambda *_, **__: (_ for _ in ()).throw(Killed))
        convert(*arguments, tokenizer="bytes", workers=1, **named)


def objects(name: str) -> list[str]:
    system, path = fsspec.core.url_to_fs(name.rpartition("/")[0])
    return sorted(found.rpartition("/")[2] for found in system.find(path))


@pytest.mark.parametrize("killed_in", ["run", "publish"])
def test_a_killed_conversion_goes_on_on_any_machine_and_is_in_nobodys_way(
    tmp_path: Path, inputs: list[str], killed_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "shard_bytes": 10_000}
    for cache in ("elsewhere", "here"):
        name = f"memory://{tmp_path.name}-{cache}/web"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
        kill_before(killed_in, monkeypatch, inputs[:1], name, shard_bytes=10_000)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        if cache == "here":  # other options
            convert(inputs[:1], name, min_tokens=3, **options)
            assert main(["gc", name, "--remove", "--older-than", "0"]) == 0
        else:
            convert(inputs[:1], name, **options)
        assert verify(name).problems == []
        assert len(objects(name)) == 3, "nothing else is left"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_dataset_that_appears_after_a_look_keeps_its_objects(
    tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    name = f"memory://{tmp_path.name}-{overwrite}/web"
    check = Publisher.check

    def late(self: Publisher, *arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(Publisher, "check", check)
        check(self, *arguments, **named)
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
            convert(inputs[1:], name, tokenizer="bytes", workers=1)

    monkeypatch.setattr(Publisher, "check", late)
    with pytest.raises(ConvertError, match="another conversion wrote it meanwhile"):
        convert(inputs[:1], name, tokenizer="bytes", workers=1, overwrite=overwrite)
    assert text_of(name, StorageConfig()) == "b" * 1000
    assert len(objects(name)) == 3
    convert(inputs[:1], name, tokenizer="bytes", workers=1, overwrite=True)
    assert text_of(name, StorageConfig()) == "a" * 1000
    assert len(objects(name)) == 3


def test_a_conversion_that_fails_at_once_leaves_nothing(
    tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"memory://{tmp_path.name}-fails/web"

    def denied(self: Any, key: str) -> None:
        raise AccessDeniedError(f"{key}: access denied")

    for rights in ("all", "none to delete"):
        with monkeypatch.context() as patch, pytest.raises(ConvertError, match="no text"):
            if rights != "all":
                patch.setattr(FsspecStore, "delete", denied)
            convert(inputs[:1], name, tokenizer="bytes", workers=1, min_tokens=5000)
        assert objects(name) == ([] if rights == "all" else [".web.streammega-writable"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    convert(inputs[1:], name, tokenizer="bytes", workers=1)
    assert text_of(name, StorageConfig()) == "b" * 1000


def test_who_may_not_list_may_still_convert(
    tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"memory://{tmp_path.name}-unlisted/web"

    def denied(self: Any, key: str, recursive: bool = True) -> list[Any]:
        raise AccessDeniedError(f"{key}: access denied")

    with monkeypatch.context() as patch:
        patch.setattr(FsspecStore, "list", denied)
        convert(inputs[1:], name, tokenizer="bytes", workers=1)
    assert text_of(name, StorageConfig()) == "b" * 1000


# --- stores without conditional writes ------------------------------------------------------------------------------------


@pytest.mark.guarantee("two-machines-sent")
@pytest.mark.parametrize("overwrite", [False, True])
def test_without_conditional_writes_the_last_of_two_that_end_at_one_moment_is_there_whole(
    tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    name = f"memory://{tmp_path.name}-{overwrite}/web"
    options: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "overwrite": overwrite}
    if overwrite:
        (tmp_path / "first.txt").write_text("first")
        convert([str(tmp_path / "first.txt")], name, tokenizer="bytes")
    put = FsspecStore.put

    def late(self: FsspecStore, key: str, data: bytes, **named: Any) -> bool:
        if key.endswith(".manifest.json") and not any(named.values()):
            monkeypatch.setattr(FsspecStore, "put", put)
            with monkeypatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
                convert(inputs[1:], name, **options)
        return put(self, key, data, **named)

    monkeypatch.setattr(FsspecStore, "put", late)
    convert(inputs[:1], name, **options)
    assert text_of(name, StorageConfig()) == "a" * 1000
    assert main(["gc", name, "--remove", "--older-than", "0"]) == 0  # shards of the other
    assert len(objects(name)) == 3
    assert text_of(name, StorageConfig()) == "a" * 1000


@pytest.mark.parametrize("overwrite", [False, True])
def test_that_a_store_has_no_conditional_writes_is_said_once_before_a_document_is_read(
    tmp_path: Path,
    inputs: list[str],
    monkeypatch: pytest.MonkeyPatch,
    bucket: str,
    s3: S3,
    s3_storage: StorageConfig,
    overwrite: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Conversion.run
    said = []

    def noted(self: Conversion, **named: Any) -> Any:
        said.append(caplog.text.count("no conditional writes"))
        return run(self, **named)

    monkeypatch.setattr(Conversion, "run", noted)
    name = f"s3://{bucket}/web"
    for number in range(2):
        convert(
            inputs[number:],
            name,
            tokenizer="bytes",
            workers=1,
            overwrite=overwrite or bool(number),
            storage=s3_storage,
        )
    # s3fs puts nothing on the condition that it replaces what was seen
    has_conditions = s3.name != "rclone" and (not overwrite or s3_storage.transport == "obstore")
    assert said[0] == (0 if has_conditions else 1)
    assert verify(name, s3_storage).problems == []


# --- others that are in the way -------------------------------------------------------------------------------------------


def test_a_conversion_that_fails_before_it_writes_tokens_leaves_nothing_to_that_of_other_options(
    tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"memory://{tmp_path.name}-corrected/web"
    monkeypatch.setattr("streammega.convert.job.MAX_UNIT_FILES", 1)
    (tmp_path / "c.jsonl").write_text('{"text": "c"}\n{"no": 1}\n')
    arguments: Any = ([*inputs, str(tmp_path / "c.jsonl")], name)
    with pytest.raises(ConvertError, match="text"):
        convert(*arguments, tokenizer="bytes", workers=1)
    convert(*arguments, tokenizer="bytes", workers=1, on_error="skip")
    assert len(objects(name)) == 3
    assert verify(name).problems == []


@pytest.mark.parametrize("where", ["remote", "local"])
@pytest.mark.parametrize("ended", ["failed", "killed"])
def test_a_stream_is_not_read_where_a_killed_conversion_of_one_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, ended: str
) -> None:
    """On a disk: in a bucket it is in nobody's way."""
    name = f"memory://{tmp_path.name}/web" if where == "remote" else str(tmp_path / "out" / "web")
    streams = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path in streams:
        path.write_text('{"text": "a text"}\n')
    with streams[0].open() as first, streams[1].open() as second, monkeypatch.context() as patch:
        patch.setattr("sys.stdin", first)
        with monkeypatch.context() as killed:
            killed.setattr(Publisher, "_commit", lambda *_: (_ for _ in ()).throw(Killed))
            if ended == "killed":
                killed.setattr(Conversion, "release", lambda self: None)
                killed.setattr(Conversion, "remove_work", lambda self: None)
                killed.setattr("streammega.convert.read.stdin.forget_pipes", lambda *_: None)
            with pytest.raises(Killed):
                convert(["-"], name, tokenizer="bytes", workers=1)
        patch.setattr("sys.stdin", second)
        if where == "remote":
            convert(["-"], name, tokenizer="bytes", workers=1)
            assert text_of(name, StorageConfig()) == "a text"
            return
        with pytest.raises(ConvertError, match="exists already"):
            convert(["-"], name, tokenizer="bytes", workers=1)
        assert os.lseek(second.fileno(), 0, os.SEEK_CUR) == 0, "nothing is read"


@pytest.mark.guarantee("two-machines-sent")
@pytest.mark.parametrize("shard_bytes", [None, 400])
def test_a_first_conversion_killed_at_any_moment_goes_on_on_another_machine(
    tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch, shard_bytes: int | None
) -> None:
    options: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "shard_bytes": shard_bytes}
    for step in range(1000):
        name = f"memory://{tmp_path.name}-{step}/web"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"one{step}"))
        try:
            with killed_before(step, monkeypatch):
                convert(inputs, name, **options)
                break
        except KilledAtStep:
            pass
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"two{step}"))
        if "web.manifest.json" in objects(name):
            with pytest.raises(ConvertError, match="exists already"):
                convert(inputs, name, **options)
        else:
            convert(inputs, name, **options)
            num_shards = len(IndexedDataset(f"{name}.manifest.json").shards)
            assert len(objects(name)) == 2 * num_shards + 1, step
        assert verify(f"{name}.manifest.json").problems == [], step
        assert tokens_of(f"{name}.manifest.json") == [[97] * 1000 + [256], [98] * 1000 + [256]]
    assert step > 8


def test_shards_that_others_put_between_a_kill_and_its_resumption_stay(
    tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "shard_bytes": 400}
    name = f"memory://{tmp_path.name}-others/web"
    kill_before("run", monkeypatch, inputs, name, shard_bytes=400)
    convert(inputs, str(tmp_path / "source" / "web"), **options, min_tokens=2)
    system = fsspec.filesystem("memory")
    for path in (tmp_path / "source").iterdir():
        if path.suffix in (".bin", ".idx"):
            system.pipe_file(f"{tmp_path.name}-others/{path.name}", path.read_bytes())
    for cache in ("here", "elsewhere"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        with pytest.raises(ConvertError, match="exists already"):
            convert(inputs, name, **options)


def test_the_same_conversion_twice_at_once_writes_nothing_of_a_published_dataset(
    tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"memory://{tmp_path.name}-twin/web"
    options: dict[str, Any] = {"tokenizer": "bytes", "workers": 1}
    run = Conversion.run
    etags: list[Any] = []

    def etags_there() -> list[Any]:
        store, key = open_store(name, StorageConfig())
        return [(info.key, info.etag) for info in store.list(key)]

    def late(self: Conversion, **named: Any) -> Any:
        monkeypatch.setattr(Conversion, "run", run)
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
            convert(inputs, name, **options)
        etags.extend(etags_there())
        return run(self, **named)

    monkeypatch.setattr(Conversion, "run", late)
    with pytest.raises(ConvertError, match="meanwhile"):
        convert(inputs, name, **options)
    assert etags_there() == etags
    assert len(objects(name)) == 3


@pytest.mark.parametrize("moment", ["before it is looked at", "while a run is resumed"])
def test_a_dataset_that_appears_at_the_worst_moment_is_not_replaced(
    tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    name = f"memory://{tmp_path.name}-moment/web"
    options: dict[str, Any] = {"tokenizer": "bytes", "workers": 1}
    method = "find_existing"
    if moment == "while a run is resumed":
        kill_before("remove_work", monkeypatch, inputs[:1], name)
        method = "manifest"
    real = getattr(Destination, method)

    def late(self: Destination) -> Any:
        monkeypatch.setattr(Destination, method, real)
        found = real(self) if method == "manifest" else None
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
            convert(inputs[1:], name, **options, overwrite=True)
        return found or real(self)

    monkeypatch.setattr(Destination, method, late)
    with pytest.raises(ConvertError, match=r"exists already|meanwhile"):
        convert(inputs[:1], name, **options)
    assert text_of(f"{name}.manifest.json", StorageConfig()) == "b" * 1000
