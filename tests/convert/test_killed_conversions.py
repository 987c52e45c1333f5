"""SIGKILL in every phase of a conversion, onto a disk and into S3: the former dataset or the new
one, then the same bytes.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import IndexedDataset, StorageConfig
from streammega.convert import convert
from streammega.dataset.verify import verify
from streammega.errors import StreammegaError
from tests.support.builders import without_marks
from tests.support.kill_programs import PHASES, convert_and_tell
from tests.support.servers import S3

OPTIONS: dict[str, Any] = {
    "tokenizer": "bytes",
    "shard_bytes": 60_000,
    "shuffle_seed": 5,
    "dedup": True,
    "provenance": True,
}
PACKING: dict[str, Any] = {**OPTIONS, "pack_length": 256, "pack_max_documents": 6}
OVERHEAD = 60.0
"""Seconds that any one process may take, on a busy machine."""


@dataclass
class Scene:
    """Where a dataset is replaced: by its name and a cache of its own, with what is
    there before.
    """

    root: str
    tmp_path: Path
    server: S3 | None = None
    options: dict[str, Any] = field(default_factory=lambda: OPTIONS)
    former: dict[str, bytes] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.root}/web"

    @property
    def inputs(self) -> list[str]:
        return [str(self.tmp_path / "in.jsonl")]

    @property
    def storage(self) -> StorageConfig:
        return StorageConfig(
            storage_options=self.server.options if self.server else {}, request_timeout=20
        )

    def files(self) -> dict[str, bytes]:
        """All that is stored, temporary files of killed writers aside, which are removed a day
        later.
        """
        if self.server is None:
            found = (
                path
                for path in Path(self.root).iterdir()
                if path.is_file() and path.suffix != ".partial"
            )
            return {path.name: path.read_bytes() for path in found}
        client = self.server.client()
        bucket = self.root.partition("://")[2]
        keys = [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", [])]
        return {key: client.get_object(Bucket=bucket, Key=key)["Body"].read() for key in keys}

    def reset(self) -> None:
        """What was there before, and nothing else."""
        for name in self.files():
            if self.server is None:
                (Path(self.root) / name).unlink()
            else:
                self.server.client().delete_object(Bucket=self.root.partition("://")[2], Key=name)
        for name, data in self.former.items():
            if self.server is None:
                (Path(self.root) / name).write_bytes(data)
            else:
                self.server.client().put_object(
                    Bucket=self.root.partition("://")[2], Key=name, Body=data
                )

    def start(self) -> tuple[Any, Any]:
        """(process, its pipe) of the conversion that replaces the dataset."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=convert_and_tell,
            args=(theirs, str(self.tmp_path / "cache"), dict(self.storage.storage_options), self.inputs, self.name),
            kwargs={**self.options, "overwrite": True},
            daemon=True,
        )  # fmt: skip
        process.start()
        theirs.close()
        return process, ours

    def run(self) -> None:
        """The conversion to its end; how long its phases took is noted."""
        process, pipe = self.start()
        began = time.monotonic()
        phase = ""
        while True:
            assert pipe.poll(OVERHEAD), phase
            word = pipe.recv()
            now = time.monotonic()
            self.durations[phase] = now - began
            began = now
            phase = word
            if word not in PHASES:
                break
        process.join(OVERHEAD)
        assert phase == "done"

    def kill(self, phase: str, after: float) -> bool:
        """SIGKILL so many seconds into a phase; False if the conversion was done before."""
        process, pipe = self.start()
        try:
            while True:
                assert pipe.poll(OVERHEAD), phase
                word = pipe.recv()
                assert word in (*PHASES, "done"), word
                if word == "done":
                    return False
                if word == phase:
                    time.sleep(after)
                    return bool(process.is_alive())
        finally:
            process.kill()
            process.join()
            pipe.close()

    def readable(self) -> list[Any]:
        """What is read by each of the dataset's names."""
        return [
            tokens_of(by, self.storage)
            for by in (self.name, f"{self.name}.manifest.json", f"{self.root}/")
        ]


def tokens_of(name: str, storage: StorageConfig) -> str | None:
    try:
        items = IndexedDataset(name, storage)[:]
    except StreammegaError:
        return None
    return hashlib.sha256(b"".join(np.asarray(item).tobytes() for item in items)).hexdigest()


def write_corpus(path: Path, seed: int, lines: int) -> None:
    rng = random.Random(seed)
    with open(path, "w") as file:
        for number in range(lines):
            file.write(
                '{"text": "'
                + f"document {number} of {seed} "
                + "lorem ipsum " * rng.randrange(20)
                + '"}\n'
            )


@pytest.fixture(params=["s3", pytest.param("local", marks=pytest.mark.soak)])
def scene(request: pytest.FixtureRequest, tmp_path: Path, moto: S3) -> Scene:
    server = moto if request.param == "s3" else None
    root = f"s3://{server.new_bucket()}" if server else str(tmp_path / "out")
    write_corpus(tmp_path / "in.jsonl", 1, 600)
    write_corpus(tmp_path / "former.jsonl", 2, 100)
    made = Scene(root, tmp_path, server)
    convert(
        [str(tmp_path / "former.jsonl")],
        made.name,
        tokenizer="bytes",
        shard_bytes=20_000,
        workers=1,
        storage=made.storage,
    )
    made.former = made.files()
    return made


def kill_again_and_again(scene: Scene, phases: Sequence[str], kills: int, seed: int) -> int:
    """So many kills in each of these phases, at random moments of it; each time, the conversion
    then goes on to its end.
    """
    former = scene.readable()
    scene.run()
    whole = scene.files()
    new = scene.readable()
    assert len(set(former)) == len(set(new)) == 1
    rng = random.Random(seed)
    all_killed = 0
    for phase in phases:
        killed = 0
        tried = 0
        while killed < kills:
            tried += 1
            assert tried < 4 * kills + 10, "ends before it can be killed"
            scene.reset()
            killed += scene.kill(phase, rng.uniform(0, scene.durations[phase]))
            assert set(scene.readable()) in (set(former), set(new)), (
                "the former dataset or the new one, by every name"
            )
            while kills > 1 and rng.random() < 0.3:  # on its way to the end it may be killed again
                killed += scene.kill(rng.choice(PHASES), rng.uniform(0, scene.durations[phase]))
                assert set(scene.readable()) in (set(former), set(new))
            scene.run()
            # marks in the names of shards say what they replaced
            assert without_marks(scene.files()) == without_marks(whole)
            assert set(scene.readable()) == set(new)
            assert not list((scene.tmp_path / "cache").rglob("unit-*"))
        all_killed += killed
    assert verify(scene.name, scene.storage).problems == []
    return all_killed


@pytest.mark.guarantee("killed-moment-dataset", "killed-phase-onto")
def test_a_conversion_killed_in_any_phase_goes_on_to_the_same_bytes(scene: Scene) -> None:
    # in `make soak` all phases, again and again
    assert kill_again_and_again(scene, ("lay", "publish"), 1, 0) == 2


@pytest.mark.guarantee("killed-phase-onto")
@pytest.mark.soak
@pytest.mark.parametrize("options", [OPTIONS, PACKING], ids=["end to end", "packed"])
@pytest.mark.parametrize("phase", PHASES)
def test_fifty_kills_in_each_phase_change_no_byte(
    scene: Scene, phase: str, options: dict[str, Any]
) -> None:
    scene.options = options
    killed = kill_again_and_again(scene, [phase], 50, PHASES.index(phase))
    print(f"{killed} kills, from {phase} on, {scene.root}")
