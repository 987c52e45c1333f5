"""Any sequence of conversions, kills, removals and replaced inputs against a list of the documents
that must be there.

A command that ends without an error leaves a dataset that holds exactly the documents of its inputs by
its options, and is sound. One that fails or is killed leaves the former dataset whole. In the end each
output can be made, whatever went before.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given, note, seed, settings
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.cli.main import main
from streammega.convert import Task, convert, convert_task, merge_tasks
from streammega.dataset.verify import verify
from streammega.errors import ConvertError, ObjectChangedError, ObjectNotFoundError
from streammega.storage import open_store
from streammega.storage.object_ops import read_if_exists
from tests.convert.test_changed_inputs import Replaces
from tests.convert.test_publishing import Killed, killed_before
from tests.support.builders import (
    MARK,
    stored_ids,
    without_versions,
    write_jsonl,
    write_tokenizer,
)
from tests.support.crash_kills import Child
from tests.support.servers import S3

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
PARTS = 3
SEQUENCES = 600
KILLED_SEQUENCES = 200
"""Of each part: an hour for all."""
MEMORY = "/dev/shm"
"""A file system in memory, where syncs cost nothing."""
NAMES = ("one", "two")
"""Folders of outputs, which all have the same name."""
WORDS = ("text", "of", "the", "corpus", *map(str, range(10)))
BYTES: dict[str, Any] = {"tokenizer": "bytes", "shard_bytes": 200}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": BYTES,
    "cut": {**BYTES, "max_tokens": 9},
    "shuffled": {**BYTES, "shuffle_seed": 3, "dedup": True, "provenance": True},
    "whole": {**BYTES, "shard_bytes": None, "format": "zst"},
    "words": {"tokenizer": "", "shard_bytes": 60},
}
ENDS = ("<one>", "<two>")
STALE = re.compile(r"exists already, of a dataset without|exists already; choose another output")
"""Where shards without a manifest may be anybody's: the user has to remove them. In a bucket no
conversion leaves such.
"""


@dataclass(frozen=True)
class Convert:
    """A conversion. kill: the part of it, in percent, after which it is killed; what replaces a
    dataset does more than 100. tasks: how many share it out before a merge. changes: an input that
    is replaced meanwhile.
    """

    output: str
    options: str
    inputs: tuple[str, ...]
    overwrite: bool = True
    resume: bool = True
    kill: int | None = None
    tasks: int = 0
    is_relative: bool = False
    changes: str | None = None


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


@st.composite
def sequences(draw: st.DrawFn) -> list[Command]:
    """Some commands, of a few options, inputs and outputs: so that they meet what others left."""

    def few(values: Sequence[Any]) -> st.SearchStrategy[Any]:
        chosen = draw(st.lists(st.sampled_from(values), min_size=1, max_size=2, unique=True))
        return st.sampled_from(chosen)

    outputs = few(NAMES)
    inputs = {name: few([("a",), ("b",), ("a", "b")]) for name in NAMES}
    options = few(list(OPTIONS))
    overwrite = few([True, False])
    is_relative = few([True, False])

    def conversions_to(output: str) -> st.SearchStrategy[Command]:
        return st.builds(
            Convert,
            output=st.just(output),
            options=options,
            inputs=inputs[output],
            overwrite=overwrite,
            resume=st.sampled_from([True] * 7 + [False]),
            kill=st.integers(0, 130) | st.integers(20, 110) | st.none(),
            tasks=st.sampled_from([0] * 7 + [2]),
            is_relative=is_relative,
            changes=st.sampled_from([None] * 9 + ["a"]),
        )

    conversions = outputs.flatmap(conversions_to)
    others = (
        st.builds(Gc, output=outputs)
        | st.builds(Remove, where=outputs, number=st.integers(0, 20))
        | st.builds(Remove, where=st.just("work"), number=st.integers(0, 20))
        | st.builds(Replace, name=st.sampled_from("ab"), in_place=st.booleans())
        | st.builds(EndWith, token=st.sampled_from(ENDS))
    )
    commands = conversions | conversions | conversions | others
    return draw(st.lists(commands, min_size=3, max_size=9))


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
            self.main("gc", self.name(command.output), "--remove", "--older-than", "0")
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
        number = 9 + version % 4
        texts = [f"text {n % 8} of the {command.name} {version % 10}" for n in range(number)]
        path = self.folder / f"{command.name}.jsonl"
        target = path if command.in_place else path.with_suffix(".new")
        write_jsonl(target, texts)
        os.utime(target, (0, next(self._times)))
        if not command.in_place:
            os.replace(target, path)
        self.texts[command.name] = texts

    def files(self, where: str) -> list[tuple[Any, str]]:
        """(store, key) of all files of an output, or of work folders."""
        folder = f"{self.root}/{where}"
        if where == "work":
            folder = self.work or str(self.folder / "cache" / "streammega" / "convert")
        store, key = open_store(f"{folder}/", self.storage)
        keys = [info.key for info in store.list(f"{key.rstrip('/')}/")]
        return [(store, key) for key in keys if not key.endswith((".partial", "/lock"))]

    def remove(self, command: Remove) -> None:
        for store, key in self.files(command.where)[command.number :][:1]:
            store.delete(key)
            # the work folder of a local output is beside it
            if command.where != "work" and ".web.convert" not in key:
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
        expected = self.reference(command)
        run = self.in_process if self.uses_processes else self.here
        error = run(command, cwd, work)
        if error is None:
            if self.read(command.output) != expected and command.changes:
                expected = self.reference(command)  # it was replaced before it was read
            assert self.read(command.output) == expected, command
            assert verify(self.name(command.output), self.storage).problems == []
            self.successes += 1
            self.spoiled.discard(command.output)
            self.datasets[command.output] = expected
        elif error == "killed":
            for made in (expected, self.reference(command)):
                if self.read(command.output) == made:  # after its commit
                    self.datasets[command.output] = made
                    self.spoiled.discard(command.output)
        else:
            self.check_error(command, error)

    def check_error(self, command: Convert, error: str) -> None:
        """Whether it is one that must be expected."""
        is_of_set = "of a dataset without" in error
        may_exist = not self.is_remote if is_of_set else not command.overwrite
        has_changed = command.changes is not None and "was replaced while" in error
        is_stale = may_exist and bool(STALE.search(error))
        # Tasks have read the input that their merge finds replaced.
        is_of_tasks = command.changes is not None and "units are not done" in error
        assert is_stale or has_changed or is_of_tasks, (command, error)

    def here(self, command: Convert, cwd: str, work: tuple[Any, ...]) -> str | None:
        """Run it in this process: None, "killed", or an error."""
        self.patch.chdir(cwd)
        step = 10_000
        if command.kill is not None:
            step = command.kill * self.changes(command) // 100
        if command.changes is not None:
            change = Replace(command.changes, in_place=True)
            work[2]["progress"] = Replaces(lambda: self.replace(change))
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
            child.has_ended(began + command.kill / 100 * self.seconds)
            child.kill()
        (result,) = child.join() or ("killed",)
        if command.kill is None:
            self.seconds = time.monotonic() - began
        return result

    def read(self, output: str) -> Any:
        """What its manifest says, without marks and versions, and what is stored by it; None without
        one.
        """
        name = f"{self.name(output)}.manifest.json"
        try:
            ids = stored_ids(name, self.storage)
        except ObjectNotFoundError:
            return None
        manifest = without_versions(read_if_exists(name, self.storage) or b"")
        return ids, MARK.sub("", manifest.decode())

    def reference(self, command: Convert) -> Any:
        """What `read` gives of a conversion that nothing disturbs: its documents are the model's."""
        return self.undisturbed(command)[0]

    def changes(self, command: Convert) -> int:
        """How many changes of what is stored it makes."""
        return int(self.undisturbed(command)[1])

    def undisturbed(self, command: Convert) -> tuple[Any, int]:
        texts = [text for name in command.inputs for text in self.texts[name]]
        key = (command.options, command.inputs, tuple(texts), self.end)
        if key not in self._references:
            inputs, _, options = self.arguments(command)
            options |= {"work_dir": None, "storage": None, "overwrite": False}
            with (
                tempfile.TemporaryDirectory(dir=self.folder) as folder,
                killed_before(10_000, self.patch) as changes,
            ):
                output = f"{folder}/web"
                convert(inputs, output, **options)
                ids = stored_ids(f"{output}.manifest.json")
                manifest = Path(f"{output}.manifest.json").read_text()
            self._references[key] = (ids, manifest), changes[0]
            expected = documents(command.options, texts, self.end)
            is_shuffled = command.options == "shuffled"
            assert (sorted(ids) == sorted(expected)) if is_shuffled else (ids == expected)
        made: tuple[Any, int] = self._references[key]
        return made

    def finish(self, commands: Sequence[Command]) -> None:
        """The first conversion to each output can be made in the end: what is in its way is removed by
        hand, as errors say.
        """
        first = {
            command.output: replace(command, overwrite=True, resume=True, kill=None, changes=None)
            for command in reversed(commands)
            if isinstance(command, Convert)
        }
        for output, command in first.items():
            successes = self.successes
            self.run(command)
            if self.successes == successes:
                for store, key in self.files(output):
                    if ".web.convert" not in key:
                        store.delete(key)
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


def convert_all(inputs: list[str], output: str, options: dict[str, Any], tasks: int) -> str | None:
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
    folder = Path(tempfile.mkdtemp(dir=MEMORY if os.path.isdir(MEMORY) else None))
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
    made.finish(commands)


PLACES = ("local", "local, one work folder", "remote", "remote, one work folder")


@pytest.mark.guarantee("restart-believes")
@pytest.mark.parametrize("where", PLACES)
@settings(max_examples=8)
@given(commands=sequences())
def test_sequences_of_commands_leave_the_documents_of_the_model(
    where: str, commands: list[Command]
) -> None:
    with world(where) as made:
        run_sequence(made, commands)


@pytest.mark.guarantee("restart-believes")
@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("where", PLACES)
def test_thousands_of_sequences_leave_the_documents_of_the_model(where: str, part: int) -> None:
    @seed(part)
    @settings(max_examples=SEQUENCES, derandomize=False, database=None)
    @given(commands=sequences())
    def run(commands: list[Command]) -> None:
        with world(where) as made:
            run_sequence(made, commands)

    run()


@pytest.mark.guarantee("restart-believes")
@pytest.mark.soak
@pytest.mark.parametrize("where", ["local", "local, one work folder", "bucket"])
def test_sequences_of_processes_that_are_killed_leave_the_documents_of_the_model(
    where: str, moto: S3
) -> None:
    """By SIGKILL, at any moment."""

    @seed(1)
    @settings(max_examples=KILLED_SEQUENCES, derandomize=False, database=None)
    @given(commands=sequences())
    def run(commands: list[Command]) -> None:
        with world(where, moto) as made:
            made.uses_processes = True
            run_sequence(made, commands)

    run()
