"""Processes that end by SIGKILL at random moments, disks and a real S3 server: what has its final name
is whole, and the next run goes on to the same bytes and tokens.

The scenes are those of `crash_scenes.py`, and a few of several processes. A kill takes a fork, not an
interpreter. The process that forks reads and writes nothing itself, so that its children have no
threads and connections of others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streammega import StorageConfig, StreamLoader
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.program import run as train
from streammega.train.run_log import METRICS, read_metrics
from tests.support.crash_disk import Tree, write_tree
from tests.support.crash_runs import Scene, quiet, stored
from tests.support.crash_scenes import (
    BucketCheckpoints,
    BucketConversion,
    BucketOverwrite,
    BucketWork,
    Checkpoints,
    Conversion,
    Merge,
    NodeCaches,
    Overwrite,
)
from tests.support.run_hashes import loader_hashes
from tests.support.servers import S3, Objects

PATIENCE = 120
"""Seconds within which a process ends that nobody kills: it takes two."""
SHARE_OF_ENDS = 1 / 3
"""The share of kills after which a run goes on to its end. After the others it is killed again."""


class Readers(NodeCaches):
    """Loaders in three processes that share the caches of a node. Each notes its tokens, saves its
    state after each batch, and goes on from there.
    """

    processes = 3
    samples = 600

    def run_process(self, number: int) -> None:
        state_file = self.disk / f"state-{number}.json"
        saved: dict[str, Any] = {"bytes": 0}
        if state_file.exists():
            saved = json.loads(state_file.read_text())
        config = self.config(order="stream" if number == 1 else "megatron")
        with (
            StreamLoader(config, micro_batch_size=5, global_batch_size=5) as loader,
            open(self.disk / f"tokens-{number}", "ab") as tokens,
        ):
            tokens.seek(tokens.truncate(saved["bytes"]))
            if "state" in saved:
                loader.load_state_dict(saved["state"])
            # Another iteration of a loader that has ended begins again; the stream order has no end.
            batches = iter(loader) if loader.consumed_samples < self.samples else iter(())
            while loader.consumed_samples < self.samples:
                tokens.write(next(batches)["tokens"].numpy().tobytes())
                tokens.flush()
                saved = {"bytes": tokens.tell(), "state": loader.state_dict()}
                new = state_file.with_suffix(".new")
                new.write_text(json.dumps(saved))
                new.rename(state_file)

    def check(self, promised: Any, *, has_lied: bool = False) -> None:
        for number, expected in enumerate(self.expected or ()):
            path = self.disk / f"tokens-{number}"
            tokens = path.read_bytes() if path.exists() else b""
            assert expected.startswith(tokens), f"the tokens of reader {number}"

    def result(self) -> Any:
        paths = [self.disk / f"tokens-{number}" for number in range(self.processes)]
        self.expected = [path.read_bytes() for path in paths]
        return [super().result(), self.expected]


class TrainedSteps(Checkpoints):
    """A run of twelve steps on a disk, whose batches are those of a loader without ranks."""

    steps = 12

    def result(self) -> Any:
        self.compare_batches()
        assert {record["step"] for record in self.records()} == set(range(1, self.steps + 1))
        return super().result()

    def compare_batches(self) -> None:
        expected = loader_hashes(self.config)
        for record in self.records():
            assert record["batch_hash"] == expected[record["step"] - 1], record

    def records(self) -> list[dict[str, Any]]:
        metrics = Path(self.out_dir) / METRICS
        return read_metrics(metrics) if metrics.exists() else []


class TrainedRanks(TrainedSteps):
    """The same by the example trainer on two ranks, which die at once."""

    processes = 2
    has_survivors = False
    port = 0

    def before_fork(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def run_process(self, number: int) -> None:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        train(str(self.folder / "run.toml"), [])

    def check(self, promised: Any, *, has_lied: bool = False) -> None:
        self.compare_batches()
        steps = CheckpointStore.open(self.out_dir, StorageConfig()).steps()
        assert max(steps, default=0) >= (promised or 0)


class TrainedIntoBucket(BucketCheckpoints):
    """A run of twelve steps whose checkpoints go to a bucket."""

    steps = 12


KILLED: tuple[type[Scene], ...] = (
    Conversion, Overwrite, BucketConversion, BucketOverwrite, BucketWork, Merge, Readers,
    TrainedSteps, TrainedRanks, TrainedIntoBucket,
)  # fmt: skip


class ServedBucket(NamedTuple):
    """In place of the bucket in memory: one of a server."""

    objects: Objects
    recorder: None = None


class Kills:
    """So many kills of a scene's processes. `cases`: moments, one after another.

    bucket: an empty one of the server.
    """

    def __init__(self, scene: Scene, server: S3, bucket: str, moments: int) -> None:
        self.scene = scene
        self.cases = range(moments)
        self.counts: Counter[str] = Counter()
        self.title = f"{type(scene).__name__}, killed"
        self._promises = scene.folder / "promises"
        scene.bucket = ServedBucket(server.objects(bucket))
        scene.bucket_url = f"s3://{bucket}/"
        for name, value in server.environment.items():
            scene.patch.setenv(name, value)
        scene.patch.setattr(scene, "promise", self._promise)
        self._learn(scene.prepare)
        self._before: tuple[Tree, dict[str, bytes]] = in_child(self._stored)
        began = time.monotonic()
        self._learn(scene.run_process, [(number,) for number in range(scene.processes)])
        self.seconds = time.monotonic() - began
        self._learn(scene.check, [(None,)])
        (self.expected,) = self._learn(scene.result)
        self._reset()

    def try_case(self, case: int) -> None:
        """Start the processes, and kill some at a random moment; look, and perhaps go on to the end.

        Raises AssertionError.
        """
        random_numbers = random.Random(f"{type(self.scene).__name__} {case}")
        while not (killed := self._kill(random_numbers)):
            self._compare()  # they had ended before
        self.counts["kills"] += killed
        self._check()
        if random_numbers.random() < SHARE_OF_ENDS:
            self._run_to_the_end()
            self._compare()

    def _run_to_the_end(self) -> None:
        for child in self._start():
            child.join()

    def _start(self) -> list[Child]:
        self.scene.before_fork()
        return [Child(self.scene.run_process, number) for number in range(self.scene.processes)]

    def _kill(self, random_numbers: random.Random) -> int:
        """How many processes were killed. The others have ended."""
        began = time.monotonic()
        children = self._start()
        moment = began + random_numbers.uniform(0, self.seconds)
        if all(child.has_ended(moment) for child in children):
            # The first run found no caches, or the machine had more to do.
            self.seconds = min(self.seconds, time.monotonic() - began)
        count = random_numbers.randint(1, len(children))
        chosen = random_numbers.sample(children, count) if self.scene.has_survivors else children
        for child in chosen:
            child.kill()
        for child in children:
            child.join()
        return sum(child.is_killed for child in children)

    def _check(self) -> None:
        in_child(self.scene.check, self._promised())

    def _compare(self) -> None:
        """Compare what a whole run has left with the first one, and go back to the start."""
        self._check()
        assert in_child(self.scene.result) == self.expected
        self.counts["ends with the same"] += 1
        self._reset()

    def _promise(self, value: Any) -> None:
        with open(self._promises, "a") as file:
            file.write(f"{json.dumps(value)}\n")

    def _promised(self) -> Any:
        """What a process has promised last."""
        lines = self._promises.read_text().split("\n") if self._promises.exists() else []
        return json.loads(lines[-2]) if lines[1:] else None

    def _learn(
        self, method: Callable[..., Any], calls: Sequence[tuple[Any, ...]] = ((),)
    ) -> list[Any]:
        """Call a method of the scene, each time in a child, and keep what is noted in the scene."""
        self.scene.before_fork()
        children = [Child(self._call_and_tell, method, *arguments) for arguments in calls]
        told = [child.join() for child in children]
        for _, noted in told:
            vars(self.scene).update(noted)
        return [result for result, _ in told]

    def _call_and_tell(
        self, method: Callable[..., Any], *arguments: Any
    ) -> tuple[Any, dict[str, Any]]:
        result = method(*arguments)
        of_this_process = ("bucket", "patch", "promise")
        return result, {
            name: value for name, value in vars(self.scene).items() if name not in of_this_process
        }

    def _stored(self) -> tuple[Tree, dict[str, bytes]]:
        return stored(self.scene.disk), dict(self.scene.bucket.objects)

    def _reset(self) -> None:
        tree, objects = self._before
        write_tree(self.scene.disk, tree)
        self._promises.unlink(missing_ok=True)
        in_child(self._put, objects)

    def _put(self, objects: dict[str, bytes]) -> None:
        there: Any = self.scene.bucket.objects
        for key in list(there):
            if key not in objects:
                del there[key]
        for key, data in objects.items():
            there[key] = data


def kill_at_moments(
    scene: type[Scene], folder: Path, server: S3, bucket: str, moments: int
) -> Counter[str]:
    """Kill a scene so often; the counts. For a process without threads and connections."""
    with pytest.MonkeyPatch.context() as patch:
        kills = Kills(scene(folder, patch), server, bucket, moments)
        for case in kills.cases:
            kills.try_case(case)
        return kills.counts


class Child:
    """A process that calls a function: a fork of this one, or of multiprocessing's fork server."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, method: str = "fork") -> None:
        context: Any = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_call, args=(theirs, function, arguments))
        self._process.start()
        theirs.close()

    def kill(self) -> None:
        """SIGKILL, if it is there still."""
        self._process.kill()

    def has_ended(self, moment: float) -> bool:
        """Whether it has ended by a moment of `time.monotonic`, until which this waits."""
        self._process.join(max(0.0, moment - time.monotonic()))
        return self._process.exitcode is not None

    @property
    def is_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return bool(self._process.exitcode == -signal.SIGKILL)

    def join(self) -> Any:
        """What the function returned; None if it was killed. Raises AssertionError with the text of
        its error.
        """
        try:
            is_error, value = self._pipe.recv() if self._pipe.poll(PATIENCE) else (True, "hangs")
        except EOFError:
            is_error, value = False, None
        if is_error:
            self.kill()
        self._process.join()
        self._pipe.close()
        assert not is_error, value
        assert self._process.exitcode in (0, -signal.SIGKILL), self._process.exitcode
        return value


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a fork of this process. Raises AssertionError."""
    return Child(function, *arguments).join()


def _call(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        with quiet():
            result = function(*arguments)
    except BaseException:
        pipe.send((True, traceback.format_exc()))
        raise SystemExit(0) from None
    pipe.send((False, result))
