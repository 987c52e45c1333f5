"""Every crash and every fault of a run: after each of its operations, what may be left is made, looked
at, and run again.

`make crash` does so for each scene of `crash_scenes.py`, and goes on where it was ended.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streammega.errors import EndpointError, ObjectNotFoundError, StreammegaError
from streammega.storage import atomic_file
from streammega.storage.backends import local
from streammega.storage.etags import check_version
from streammega.storage.http_errors import truncated
from streammega.storage.open import register_scheme
from streammega.storage.store import Buffer, ObjectInfo, ObjectWriter, Span, Store
from tests.support.crash_disk import (
    BUCKET_FAULTS,
    DISK_FAULTS,
    LYING_POLICIES,
    POLICIES,
    Change,
    Recorder,
    Tree,
    digest_of,
    read_tree,
    state_after,
    write_tree,
)

SCHEME = "crashing"


class Bucket(Store):
    """Objects in memory. Requests are counted and changes recorded by `recorder`, if there is one."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.recorder: Recorder | None = None

    def url(self, key: str) -> str:
        return f"{SCHEME}://{key}"

    def info(self, key: str) -> ObjectInfo:
        self._ask(("refused",), key)
        return self._info(key)

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        self._ask(("refused",), key)
        check_version(self.url(key), etag, self._info(key).etag)
        data = self.objects[key]
        for start, stop in spans:
            if not 0 <= start <= stop <= len(data):
                raise truncated(self.url(key), f"bytes [{start}, {stop}) of {len(data)}")
        return [memoryview(data)[start:stop] for start, stop in spans]

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        self._ask(("refused",), prefix)
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        return [self._info(key) for key in keys if recursive or "/" not in key[len(prefix) :]]

    def open_writer(self, key: str) -> ObjectWriter:
        return _Upload(self, key)

    def put(
        self, key: str, data: bytes | memoryview, *, if_absent: bool = False, if_match: str = ""
    ) -> bool:
        is_conditional = if_absent or bool(if_match)
        kind = self._ask(BUCKET_FAULTS if is_conditional else BUCKET_FAULTS[:2], key)
        if if_absent and key in self.objects:
            return False
        if if_match and (key not in self.objects or self._info(key).etag != if_match):
            return False
        self.objects[key] = bytes(data)
        if self.recorder is not None:
            self.recorder.note(Change("put", (key,), data=bytes(data)))
        if kind == "unheard":
            raise EndpointError(f"{self.url(key)}: the answer was lost")
        return kind != "denied"

    def delete(self, key: str) -> None:
        kind = self._ask(BUCKET_FAULTS[:2], key)
        if self.objects.pop(key, None) is not None and self.recorder is not None:
            self.recorder.note(Change("delete", (key,)))
        if kind == "unheard":
            raise EndpointError(f"{self.url(key)}: the answer was lost")

    def _ask(self, kinds: tuple[str, ...], key: str) -> str:
        """Count a request that can fail in these ways; how it fails."""
        kind = "" if self.recorder is None else self.recorder.begin(kinds)
        if kind == "refused":
            raise EndpointError(f"{self.url(key)}: the request was refused")
        return kind

    def _info(self, key: str) -> ObjectInfo:
        if key not in self.objects:
            raise ObjectNotFoundError(f"{self.url(key)}: no such object")
        data = self.objects[key]
        return ObjectInfo(key=key, size=len(data), etag=f'"{hashlib.md5(data).hexdigest()}"')


class _Upload(ObjectWriter):
    """An upload in parts, which appears when it is committed."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        self._bucket = bucket
        self._key = key
        self._data = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._data += data

    def commit(self) -> None:
        self._bucket.put(self._key, bytes(self._data))

    def abort(self) -> None:
        self._data.clear()


class Scene:
    """Something that writes to a disk, to a bucket or to both. Subclasses say what.

    folder: `folder/disk` is the disk that may fail. Inputs are next to it. patch: undone by the
    caller.
    """

    is_checksummed = True
    """Whether what a disk that lies leaves is always noticed."""
    processes = 1
    """Those that `crash_kills.py` starts at once."""
    has_survivors = True
    """Whether some of the processes go on if others are killed."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch
        self.disk = folder / "disk"
        self.disk.mkdir(parents=True)
        self.bucket: Any = Bucket()
        self.bucket_url = f"{SCHEME}://"
        self.promises: list[tuple[int, Any]] = []
        """(changes until then, value)."""
        register_scheme(SCHEME, lambda: self.bucket)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(local, "FULL_ERRNOS", frozenset())  # nobody waits for space
        self.set_up()

    def set_up(self) -> None:
        """Patch modules. Nothing is read or written yet."""

    def prepare(self) -> None:
        """Make inputs, and what is there before."""

    def run(self) -> None:
        """What is recorded and run again."""
        raise NotImplementedError

    def before_fork(self) -> None:
        """Choose what all processes that are started now must know."""

    def run_process(self, number: int) -> None:
        """What one of several processes does."""
        self.run()

    def promise(self, value: Any) -> None:
        """Note in `run` that from here on no crash loses something."""
        if self.bucket.recorder is not None:
            self.promises.append((len(self.bucket.recorder.changes), value))

    def check(self, promised: Any, *, has_lied: bool = False) -> None:
        """Fail if something is believed that is not whole, or if what was promised last is lost.

        has_lied: the disk did not sync what it should. Then nothing is promised, and all may be lost.
        """
        raise NotImplementedError

    def result(self) -> Any:
        """What a whole run leaves, to be compared."""
        raise NotImplementedError


class Case(NamedTuple):
    """A crash or a fault: at which operation, and what happens."""

    at: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.at}"


class Crashes:
    """All crashes and faults of a scene. `cases`: in the order of operations."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        with quiet():
            scene.prepare()
            self._before = stored(scene.disk)
            self._objects_before = dict(scene.bucket.objects)
            self.recorder = self._run_recorded(None)
            self.promises = list(scene.promises)
            scene.check(self._promised(len(self.recorder.changes)))
            self.expected = scene.result()
        changes = len(self.recorder.changes)
        self.cases = [
            Case(at, kind)
            for at in range(changes + 1)
            for kind in (*POLICIES, *(f"lied {policy}" for policy in LYING_POLICIES))
        ]
        self.cases += [
            Case(at, kind) for at, kinds in enumerate(self.recorder.can_fail) for kind in kinds
        ]
        self._known: set[str] = set()
        self.counts: Counter[str] = Counter()
        operations = len(self.recorder.can_fail)
        self.title = (
            f"{type(scene).__name__}: {changes} changes, {operations} operations that can fail"
        )

    def try_case(self, case: Case) -> None:
        """Make it happen, look, and run again. Raises AssertionError with what went before."""
        _forget()
        try:
            with quiet():
                if case.kind in (*BUCKET_FAULTS, *DISK_FAULTS):
                    self._fail(case)
                else:
                    self._crash(case)
        except BaseException as error:
            error.add_note(f"{type(self.scene).__name__}: {case}, after {self._before_case(case)}")
            raise

    def _before_case(self, case: Case) -> str:
        if case.kind in (*BUCKET_FAULTS, *DISK_FAULTS):
            return "other operations"
        last = self.recorder.changes[max(0, case.at - 4) : case.at]
        return "; ".join(map(str, last))

    def _crash(self, case: Case) -> None:
        lies = case.kind.startswith("lied ")
        policy = case.kind.removeprefix("lied ")
        tree = state_after(self.recorder, case.at, policy, lies=lies)
        objects = dict(self._objects_before)
        for change in self.recorder.changes[: case.at]:
            if change.name == "put":
                objects[change.paths[0]] = change.data
            elif change.name == "delete":
                del objects[change.paths[0]]
        state = f"{lies} {digest_of(tree)} {sorted((key, hash(data)) for key, data in objects.items())}"  # fmt: skip
        if state in self._known:
            self.counts["states like another"] += 1
            return
        self._known.add(state)
        self.counts[case.kind] += 1
        self._restore(tree, objects)
        try:
            self.scene.check(None if lies else self._promised(case.at), has_lied=lies)
            self.scene.run()
        except StreammegaError:
            if not lies:
                raise
            self.counts["refused after a lie"] += 1
            return
        if not lies or self.scene.is_checksummed:
            self.scene.check(None)
            assert self.scene.result() == self.expected

    def _fail(self, case: Case) -> None:
        self.counts[case.kind] += 1
        self._restore(self._before, self._objects_before)
        try:
            self._run_recorded((case.at, case.kind))
        except (StreammegaError, OSError):
            self.counts["runs that ended with an error"] += 1
        self.scene.check(None)
        self.scene.run()
        self.scene.check(None)
        assert self.scene.result() == self.expected

    def _run_recorded(self, fault: tuple[int, str] | None) -> Recorder:
        recorder = Recorder(self.scene.disk, fault)
        self.scene.bucket.recorder = recorder
        try:
            with recorder.recording():
                self.scene.run()
        finally:
            self.scene.bucket.recorder = None
        return recorder

    def _promised(self, changes: int) -> Any:
        """What was promised last before so many changes."""
        values = [value for at, value in self.promises if at <= changes]
        return values[-1] if values else None

    def _restore(self, tree: Tree, objects: dict[str, bytes]) -> None:
        write_tree(self.scene.disk, tree)
        self.scene.bucket.objects = dict(objects)


def stored(folder: Path) -> Tree:
    """The files of a folder."""
    return {path: (file.data, file.time, id(file)) for path, file in read_tree(folder).items()}


def _forget() -> None:
    """What a process remembers goes with it."""
    atomic_file._swept.clear()


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings of what was left and what failed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def thinned(cases: Sequence[Case], each: int) -> Iterable[Case]:
    """Some of the cases: of each kind so many, spread over the run."""
    for number, kind in enumerate(sorted({case.kind for case in cases})):
        of_kind = [case for case in cases if case.kind == kind]
        stride = max(1, len(of_kind) // each)
        # The kinds begin at different operations.
        yield from of_kind[(7 * number) % stride :: stride][:each]
