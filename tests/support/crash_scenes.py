"""What `crash_runs.py` interrupts: everything of the library that writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

import streammega.convert.job as job
from streammega import DataConfig, IndexedDataset, IndexedDatasetWriter, StorageConfig, StreamLoader
from streammega.convert import convert
from streammega.convert.work_dir import REMOVED
from streammega.convert.write.destination import PROBE
from streammega.dataset.verify import verify
from streammega.errors import StreammegaError
from streammega.storage.cache import cache_folder
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.config import RunConfig, load_run
from streammega.train.trainer import Trainer
from tests.support.builders import (
    without_marks,
    write_dataset,
    write_random_pair,
    write_run_file,
)
from tests.support.crash_runs import Scene


def tokens_of(name: str) -> list[list[int]] | None:
    """What is read by a name; None where there is no dataset."""
    try:
        return [np.asarray(item).tolist() for item in IndexedDataset(name)[:]]
    except StreammegaError:
        return None


def files_below(folder: Path) -> dict[str, bytes]:
    """All files, without those that killed writers left, which are removed a day later."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".partial")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


class Conversion(Scene):
    """A first conversion onto a disk, of several shards, shuffled, with origins."""

    is_checksummed = False
    replaces = False
    is_remote = False
    has_remote_work = False
    options: ClassVar[dict[str, Any]] = {
        "shard_bytes": 1200, "shuffle_seed": 5, "dedup": True, "provenance": True
    }  # fmt: skip

    @property
    def name(self) -> str:
        return f"{self.bucket_url}out/web" if self.is_remote else str(self.disk / "out" / "web")

    def set_up(self) -> None:
        self.patch.setenv("XDG_CACHE_HOME", str(self.disk / "cache"))
        for name, size in {
            "MAX_UNIT_BYTES": 1500,
            "MIN_UNIT_BYTES": 1500,
            "SEGMENT_BYTES": 1000,
        }.items():
            self.patch.setattr(job, name, size)

    def prepare(self) -> None:
        write_random_pair(str(self.folder / "new"), 30, 40, seed=2)
        self.former: Any = None
        self.new: Any = None
        if self.replaces:
            write_random_pair(str(self.folder / "old"), 40, 40, seed=1)
            convert([str(self.folder / "old")], self.name, shard_bytes=1200, workers=1)
            self.former = tokens_of(self.name)

    def run(self) -> None:
        is_done = not self.replaces and tokens_of(f"{self.name}.manifest.json") == self.new
        if self.new is None or not is_done or self._is_under_way():
            options = self.options | {"overwrite": self.replaces, "workers": 1}
            if self.has_remote_work:
                options["work_dir"] = f"{self.bucket_url}work"
            convert([str(self.folder / "new")], self.name, **options)
        self.promise("done")

    def _is_under_way(self) -> bool:
        """Whether a record is left by which the same command goes on."""
        records = (path for path in self.disk.rglob("publishing.json"))
        return any(not path.parent.name.endswith(".removed") for path in records)

    def check(self, promised: Any, *, has_lied: bool = False) -> None:
        for name in (self.name, f"{self.name}.manifest.json", f"{self.name.rpartition('/')[0]}/"):
            found = tokens_of(name)
            if self.new is None:
                self.new = found
            allowed = [self.new] if promised == "done" else [self.former, self.new]
            assert found in allowed or (has_lied and found is None), name

    def result(self) -> Any:
        assert verify(self.name).problems == []
        assert tokens_of(self.name) == self.new
        files = dict(self.bucket.objects) if self.is_remote else files_below(self.disk / "out")
        # What a process that died at its very end left is removed by the next one, or by `gc`.
        left = (REMOVED, PROBE)
        files = {name: files[name] for name in files if not any(map(name.__contains__, left))}
        # Marks say what was replaced: another dataset if the run had ended before.
        return without_marks(files)


class Overwrite(Conversion):
    """A conversion that replaces a dataset on a disk."""

    replaces = True


class BucketConversion(Conversion):
    """A first conversion into a bucket; its work folder is on the disk that fails."""

    is_remote = True


class BucketOverwrite(Conversion):
    """A conversion that replaces a dataset in a bucket."""

    is_remote = True
    replaces = True


class BucketWork(Conversion):
    """A first conversion into a bucket by a work folder in a bucket."""

    is_remote = True
    has_remote_work = True

    def _is_under_way(self) -> bool:
        return any(key.endswith("publishing.json") for key in self.bucket.objects)

    def result(self) -> Any:
        files: dict[str, Any] = super().result()
        return {name: data for name, data in files.items() if name.startswith("out/")}


class Merge(Scene):
    """A writer that joins two pairs over a pair that is there."""

    is_checksummed = False

    @property
    def name(self) -> str:
        return str(self.disk / "joined")

    def prepare(self) -> None:
        for number, name in enumerate("ab"):
            write_random_pair(str(self.folder / name), 30, 40, seed=number)
        write_random_pair(self.name, 20, 40, seed=7)
        self.former = tokens_of(self.name)
        self.new = [*tokens_of(str(self.folder / "a")), *tokens_of(str(self.folder / "b"))]  # type: ignore[misc]

    def run(self) -> None:
        with IndexedDatasetWriter(
            self.name, IndexedDataset(str(self.folder / "a")).dtype
        ) as writer:
            for name in "ab":
                writer.add_index(str(self.folder / name))
        self.promise("done")

    def check(self, promised: Any, *, has_lied: bool = False) -> None:
        allowed = [self.new] if promised == "done" else [None, self.former, self.new]
        assert tokens_of(self.name) in allowed

    def result(self) -> Any:
        return files_below(self.disk)


class NodeCaches(Scene):
    """A run reads objects of a bucket through the caches of its node: copies of `.idx`, pages, and
    the arrays of Megatron's order, which it publishes for other nodes.
    """

    def prepare(self) -> None:
        rng = np.random.default_rng(3)
        for name in ("web", "code"):
            documents = [rng.integers(0, 60_000, 3000).astype(np.uint16) for _ in range(240)]
            write_dataset(f"{self.bucket_url}data/{name}", documents)
        self.expected: Any = None

    def config(self, **settings: Any) -> DataConfig:
        """600 samples of two datasets, by the caches."""
        defaults: dict[str, Any] = {
            "blend": [(f"{self.bucket_url}data/web", 0.7), (f"{self.bucket_url}data/code", 0.3)],
            "sequence_length": 512,
            "num_samples": (600, 0, 0),
            "index_publish_url": f"{self.bucket_url}shared",
            "storage": StorageConfig(
                cache_dir=self.disk / "cache", cache_max_bytes=1 << 30, max_concurrent_requests=1
            ).tuned(cache_chunk_bytes=1 << 20),
        }
        return DataConfig(**(defaults | settings))

    def run(self) -> None:
        config = self.config()
        with StreamLoader(config, micro_batch_size=5, global_batch_size=5) as loader:
            tokens = torch.cat([batch["tokens"].clone() for batch in loader])
        if self.expected is None:
            self.expected = tokens
        assert torch.equal(tokens, self.expected)

    def check(self, promised: Any, *, has_lied: bool = False) -> None:
        pass  # whoever looks reads: that is a run

    def result(self) -> Any:
        chunks = self.disk / "cache" / "chunks"
        damaged = [cache_folder.damaged_pages(entry) for entry in cache_folder.entries(chunks)]
        assert not any(damaged)
        return sorted(key for key in self.bucket.objects if key.startswith("shared/"))


class Checkpoints(Scene):
    """A run of three steps with a checkpoint after each, of which two are kept."""

    is_remote = False
    steps = 3

    @property
    def out_dir(self) -> str:
        return f"{self.bucket_url}runs/one" if self.is_remote else f"{self.disk}/run"

    @property
    def config(self) -> RunConfig:
        return load_run(str(self.folder / "run.toml"))

    def set_up(self) -> None:
        self.patch.chdir(self.folder)
        self.weights: dict[int, list[NDArray[Any]]] = {}
        publish = CheckpointStore.publish

        def publish_and_promise(store: Any, step: int, *rest: Any) -> None:
            publish(store, step, *rest)
            self.promise(step)

        self.patch.setattr(CheckpointStore, "publish", publish_and_promise)

    def prepare(self) -> None:
        write_random_pair(str(self.folder / "pair"))
        write_run_file(
            self.folder,
            data={"blend": [f"{self.folder}/pair"], "order": "stream"},
            train={
                "train_iters": self.steps,
                "save_interval": 1,
                "keep_checkpoints": 2,
                "micro_batch_size": 1,
                "global_batch_size": 2,
                "out_dir": self.out_dir,
            },
        )

    def run(self) -> None:
        trainer = Trainer(self.config, torch.device("cpu"))
        try:
            trainer.resume()
            self._compare(trainer)
            step = trainer.train_step

            def step_and_compare() -> Any:
                self._compare(trainer)
                return step()

            trainer.train_step = step_and_compare  # type: ignore[method-assign]
            trainer.run()
            self._compare(trainer)
        finally:
            trainer.close()

    def _compare(self, trainer: Trainer) -> None:
        """Compare the weights with those of the same step in an earlier run."""
        now = [weight.detach().numpy().copy() for weight in trainer.model.chunks[0].parameters()]
        before = self.weights.setdefault(trainer.step, now)
        assert all(map(np.array_equal, now, before)), trainer.step

    def check(self, promised: Any, *, has_lied: bool = False) -> None:
        trainer = Trainer(self.config, torch.device("cpu"))
        try:
            trainer.resume()
            self._compare(trainer)
            assert trainer.step >= (promised or 0)
        finally:
            trainer.close()

    def result(self) -> Any:
        store = CheckpointStore.open(self.out_dir, StorageConfig())
        # A run that died before it removed an older one has nothing more to do.
        positions = [store.find(step).position for step in store.steps()[-2:]]
        return json.dumps([(each["step"], each["data"]) for each in positions])


class BucketCheckpoints(Checkpoints):
    """The same in a bucket."""

    is_remote = True


SCENES: tuple[type[Scene], ...] = (
    Conversion, Overwrite, BucketConversion, BucketOverwrite, BucketWork, Merge, NodeCaches,
    Checkpoints, BucketCheckpoints,
)  # fmt: skip
