"""Any sequence of conversions, kills, removals and replaced inputs against a list of the documents
that must be there.

A command that ends without an error leaves a dataset that holds exactly the documents of its inputs by
its options, and is sound. One that fails or is killed leaves the former dataset whole. In the end each
output can be made, whatever went before.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, note, seed, settings
from hypothesis import strategies as st

from streammega import IndexedDataset, StorageConfig
from streammega.cli.main import main
from streammega.convert import Task, convert, convert_task, merge_tasks
from streammega.dataset.verify import verify
from streammega.errors import ConvertError, ObjectChangedError, ObjectNotFoundError, StreammegaError
from tests.convert.test_publishing import Killed, killed_before
from tests.support.builders import stored_ids, write_jsonl, write_tokenizer
from tests.support.crash_kills import Child
from tests.support.servers import S3

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
MARK = "-gen[0-9a-f]{12}"
NAMES = ("one", "two")
"""Folders of outputs, which all have the same name."""
WORDS = ("text", "of", "the", "corpus", *map(str, range(10)))
BYTES: dict[str, Any] = {"tokenizer": "bytes", "shard_bytes": 250}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": BYTES,
    "cut": {**BYTES, "max_tokens": 9},
    "shuffled": {**BYTES, "shuffle_seed": 3, "dedup": True, "provenance": True},
    "whole": {**BYTES, "shard_bytes": None, "format": "zst"},
    "words": {"tokenizer": "", "shard_bytes": 50},
}
ENDS = ("<one>", "<two>")
STEPS = 70
"""More changes of what is stored than a conversion makes."""
STALE = re.compile(r"exists already, of a dataset without|exists already; choose another output")
"""Where shards without a manifest may be anybody's: the user has to remove them."""
OTHERS = re.compile(r"another conversion, of other inputs or options|reserved it meanwhile")


@dataclass(frozen=True)
class Convert:
    """A conversion; it is killed before that change, or at that part of its time. tasks: how many
    share it out before a merge.
    """

    output: str
    options: str
    inputs: tuple[str, ...]
    overwrite: bool = True
    resume: bool = True
    kill: int | None = None
    tasks: int = 0
    is_relative: bool = False


@dataclass(frozen=True)
class Gc:
    """`streammega gc --remove`."""

    output: str


@dataclass(frozen=True)
class Remove:
    """One file is lost: of an output or of the work folders."""

    where: str
    number: int


@dataclass(frozen=True)
class Replace:
    """An input becomes another one, by another file or in its place."""

    name: str
    in_place: bool


@dataclass(frozen=True)
class EndWith:
    """The tokenizer's settings name another end of documents."""

    token: str


Command = Convert | Gc | Remove | Replace | EndWith
CONVERSIONS = st.builds(
    Convert,
    output=st.sampled_from(NAMES),
    options=st.sampled_from(list(OPTIONS)),
    inputs=st.sampled_from([("a",), ("a", "b")]),
    overwrite=st.sampled_from([True, True, False]),
    resume=st.sampled_from([True, True, True, False]),
    kill=st.none() | st.integers(0, STEPS) | st.integers(0, STEPS),
    tasks=st.sampled_from([0, 0, 0, 2]),
    is_relative=st.booleans(),
)
COMMANDS = st.lists(
    CONVERSIONS
    | CONVERSIONS
    | CONVERSIONS
    | st.builds(Gc, output=st.sampled_from(NAMES))
    | st.builds(
        Remove, where=st.sampled_from([*NAMES, "work", "work"]), number=st.integers(0, 30)
    )
    | st.builds(Replace, name=st.sampled_from("ab"), in_place=st.booleans())
    | st.builds(EndWith, token=st.sampled_from(ENDS)),
    min_size=2,
    max_size=9,
)


@dataclass
class World:
    """Inputs, outputs, and what must be there. work: of all conversions, or None. server: of a bucket
    for the outputs, if processes share them.
    """

    folder: Path
    root: str
    work: str | None
    patch: pytest.MonkeyPatch
    storage: StorageConfig = field(default_factory=StorageConfig)
    uses_processes: bool = False
    texts: dict[str, list[str]] = field(default_factory=dict)
    end: str = ENDS[0]
    datasets: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(NAMES))
    """What each output holds; None: nothing."""
    spoiled: set[str] = field(default_factory=set)
    """Outputs of which a file was removed by hand."""
    successes: int = 0
    seconds: float = 0.5
    """How long a conversion takes in a process."""

    def __post_init__(self) -> None:
        self._times = itertools.count(1_800_000_000)
        self._versions = itertools.count(1)
        self._references: dict[Any, Any] = {}
        self.patch.setenv("XDG_CACHE_HOME", str(self.folder / "cache"))
        for name in NAMES:
            (self.folder / name).mkdir()
        for name in "ab":
            self.replace(Replace(name, in_place=False))
        write_tokenizer(self.tokenizer / "tokenizer.json", WORDS, ENDS)
        self.run(EndWith(ENDS[0]))

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def is_remote(self) -> bool:
        return "://" in self.root

    def name(self, output: str) -> str:
        return f"{self.root}/{output}/web"

    def run(self, command: Command) -> None:
        """Do it, and compare what is there."""
        if isinstance(command, Convert):
            self.convert(command)
        elif isinstance(command, Gc):
            with suppress(ObjectNotFoundError):  # nothing is there
                self.main("gc", self.name(command.output), "--remove")
        elif isinstance(command, Remove):
            self.remove(command)
        elif isinstance(command, Replace):
            self.replace(command)
        else:
            self.end = command.token
            settings_file = self.tokenizer / "tokenizer_config.json"
            settings_file.write_text(json.dumps({"eos_token": command.token}))
        for output in NAMES:
            if output not in self.spoiled:
                assert self.read(output) == self.datasets[output], (command, output)

    def main(self, *words: str) -> None:
        options = []
        for key, value in self.storage.storage_options.items():
            options += ["--storage", f"{key}={value}"]
        main([*words, *options])

    def replace(self, command: Replace) -> None:
        """Texts of another number and length; some are there twice."""
        version = next(self._versions)
        texts = [f"text {n % 8} of the {command.name} {version % 10}" for n in range(10 + version)]
        path = self.folder / f"{command.name}.jsonl"
        target = path if command.in_place else path.with_suffix(".new")
        write_jsonl(target, texts)
        os.utime(target, (0, next(self._times)))
        os.replace(target, path)
        self.texts[command.name] = texts

    def files(self, where: str) -> list[tuple[Any, str]]:
        """(file system, path) of all files of an output, or of work folders."""
        folder = f"{self.root}/{where}"
        if where == "work":
            folder = self.work or str(self.folder / "cache" / "streammega" / "convert")
        system, path = fsspec.core.url_to_fs(folder, **self.driver_options)
        system.invalidate_cache()
        found = system.find(path) if system.exists(path) else []
        return [(system, name) for name in found if not name.endswith((".partial", "/lock"))]

    @property
    def driver_options(self) -> dict[str, Any]:
        return dict(self.storage.storage_options) if self.root.startswith("s3://") else {}

    def remove(self, command: Remove) -> None:
        for system, path in self.files(command.where)[command.number :][:1]:
            system.rm_file(path)
            # the work folder of a local output is beside it
            if command.where != "work" and ".web.convert" not in path:
                self.spoiled.add(command.where)

    def arguments(self, command: Convert) -> tuple[list[str], str, dict[str, Any]]:
        """Inputs, output and options."""
        inputs = [str(self.folder / f"{name}.jsonl") for name in command.inputs]
        output = self.name(command.output)
        if command.is_relative and not self.is_remote:
            output = "web"
        options = {**OPTIONS[command.options], "workers": 1, "overwrite": command.overwrite}
        options["tokenizer"] = options["tokenizer"] or str(self.tokenizer)
        options["storage"] = self.storage
        if not command.tasks:
            options["resume"] = command.resume
        work = self.work
        if work is None and command.tasks and self.is_remote:
            work = f"{self.root}/tasks"
        return inputs, output, options | {"work_dir": work}

    def convert(self, command: Convert) -> None:
        inputs, output, options = self.arguments(command)
        cwd = str(self.folder / command.output)
        work = (inputs, output, options, command.tasks)
        if self.uses_processes:
            error = self.in_process(command, cwd, work)
        else:
            error = self.here(command, cwd, work)
        expected = self.reference(command)
        if error is None:
            assert self.read(command.output) == expected, command
            assert verify(self.name(command.output), self.storage).problems == []
            self.successes += 1
            self.spoiled.discard(command.output)
            self.datasets[command.output] = expected
        elif error == "killed":
            if self.read(command.output) == expected:  # after its commit
                self.datasets[command.output] = expected
                self.spoiled.discard(command.output)
        else:
            self.check_error(command, error)

    def check_error(self, command: Convert, error: str) -> None:
        """Whether it is one that must be expected."""
        is_other = bool(OTHERS.search(error)) and self.is_remote
        may_exist = not command.overwrite or "without" in error
        assert is_other or (may_exist and STALE.search(error)), (command, error)

    def here(self, command: Convert, cwd: str, work: tuple[Any, ...]) -> str | None:
        """Run it in this process: None, "killed", or an error."""
        self.patch.chdir(cwd)
        step = 10_000 if command.kill is None else command.kill
        try:
            with killed_before(step, self.patch):
                return convert_all(*work)
        except Killed:
            return "killed"

    def in_process(self, command: Convert, cwd: str, work: tuple[Any, ...]) -> str | None:
        """Run it in a process, which SIGKILL may end."""
        cache = str(self.folder / "cache")
        began = time.monotonic()
        child = Child(convert_in_process, cache, cwd, work, method="forkserver")
        if command.kill is not None:
            child.has_ended(began + command.kill / STEPS * self.seconds)
            child.kill()
        (result,) = child.join() or ("killed",)
        if command.kill is None:
            self.seconds = time.monotonic() - began
        return result

    def read(self, output: str) -> Any:
        """What its manifest says, without marks, and what is stored by it; None without one."""
        name = f"{self.name(output)}.manifest.json"
        try:
            ids = stored_ids(name, self.storage)
        except ObjectNotFoundError:
            return None
        indexed = IndexedDataset(name, self.storage)
        data = indexed.store  # keeps what is read open
        assert data is not None
        system, path = fsspec.core.url_to_fs(name, **self.driver_options)
        return ids, re.sub(MARK, "", system.cat_file(path).decode())

    def reference(self, command: Convert) -> Any:
        """What a conversion makes that nothing disturbs. Its documents are those of the model."""
        texts = [text for name in command.inputs for text in self.texts[name]]
        key = (command.options, command.inputs, tuple(texts), self.end)
        if key not in self._references:
            inputs, _, options = self.arguments(command)
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                output = f"{folder}/web"
                convert(
                    inputs,
                    output,
                    **options | {"work_dir": None, "storage": None, "overwrite": False},
                )
                ids = stored_ids(f"{output}.manifest.json")
                manifest = Path(f"{output}.manifest.json").read_text()
            self._references[key] = ids, manifest
            expected = documents(command.options, texts, self.end)
            is_shuffled = command.options == "shuffled"
            assert (sorted(ids) == sorted(expected)) if is_shuffled else (ids == expected)
        return self._references[key]

    def finish(self) -> None:
        """Each output can be made in the end: what is in the way is removed by hand, as errors say."""
        for output in NAMES:
            command = Convert(output, "plain", ("a", "b"))
            successes = self.successes
            self.run(command)
            if self.successes == successes:
                for system, path in self.files(output):
                    if ".web.convert" not in path:
                        system.rm_file(path)
                self.datasets[output] = None
                self.run(command)
            assert self.successes == successes + 1


def documents(options: str, texts: Sequence[str], end: str) -> list[list[int]]:
    """The ids of documents: the model."""
    if options == "words":
        numbers = {word: number for number, word in enumerate(["[UNK]", *WORDS, *ENDS])}
        return [[*(numbers.get(word, 0) for word in text.split()), numbers[end]] for text in texts]
    if options == "shuffled":
        texts = list(dict.fromkeys(texts))
    kept = 8 if options == "cut" else None
    return [[*text.encode()[:kept], 256] for text in texts]


def convert_all(
    inputs: list[str], output: str, options: dict[str, Any], tasks: int
) -> str | None:
    """Convert, by tasks and their merge if there are some; None, or the message of an error."""
    try:
        for number in range(tasks):
            convert_task(inputs, output, Task(number=number, of=tasks), **options)
        (merge_tasks if tasks else convert)(inputs, output, **options)
    except (ConvertError, ObjectChangedError) as error:
        return str(error)
    return None


def convert_in_process(cache: str, cwd: str, work: tuple[Any, ...]) -> tuple[str | None]:
    """The same in a process of its own."""
    os.environ["XDG_CACHE_HOME"] = cache
    os.chdir(cwd)
    with small_units():
        return (convert_all(*work),)


@contextmanager
def small_units() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streammega.convert.job.MAX_UNIT_BYTES", 300)
        patch.setattr("streammega.convert.job.SEGMENT_BYTES", 120)
        yield


@contextmanager
def world(where: str, server: S3 | None = None) -> Iterator[World]:
    """Inputs and empty outputs at a place."""
    folder = Path(tempfile.mkdtemp())
    number = folder.name
    storage = StorageConfig()
    with pytest.MonkeyPatch.context() as patch, small_units():
        root = str(folder)
        work = None
        if where == "local, one work folder":
            work = str(folder / "work")
        elif where == "remote":
            root = f"memory://{number}"
        elif where == "remote, one work folder":
            root = f"memory://{number}"
            work = f"memory://{number}-work"
        elif where == "bucket":
            assert server is not None
            root = f"s3://{server.new_bucket()}"
            storage = StorageConfig(storage_options=server.options, request_timeout=20)
        try:
            yield World(folder, root, work, patch, storage)
        finally:
            os.chdir("/")
            shutil.rmtree(folder)
            with suppress(FileNotFoundError):
                for url in (root, work or root):
                    if url.startswith("memory://"):
                        system, path = fsspec.core.url_to_fs(url)
                        system.rm(path, recursive=True)


def run_sequence(made: World, commands: Sequence[Command]) -> None:
    for command in commands:
        note(str(command))
        made.run(command)
    made.finish()


PLACES = ("local", "local, one work folder", "remote", "remote, one work folder")


@pytest.mark.guarantee("restart-believes")
@pytest.mark.parametrize("where", PLACES)
@settings(max_examples=int(os.environ.get("EX", 6)))
@given(commands=COMMANDS)
def test_sequences_of_commands_leave_the_documents_of_the_model(
    where: str, commands: list[Command]
) -> None:
    with world(where) as made:
        run_sequence(made, commands)
