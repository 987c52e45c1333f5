"""Trainers' loops as ranks: what they take is noted, and where they are is saved by the trainer's own
means, so that they may be killed and begun again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from streammega import DataConfig, StreamingDataset, StreamLoader
from tests.support.gang import Gang

GLOBAL_BATCH = 8
MICRO_BATCH = 2
SIZES: Any = {"micro_batch_size": MICRO_BATCH, "global_batch_size": GLOBAL_BATCH}
EVERY = 2
"""Steps from checkpoint to checkpoint."""


class Feed:
    """A loader alone, its state in a JSON file.

    Trainers' own are derived from it.
    """

    def __init__(self, config: Any, rank: int, size: int) -> None:
        self.rank = rank
        self.open(config, {"dp_rank": rank, "dp_size": size})

    def open(self, config: DataConfig, ranks: dict[str, Any]) -> None:
        """Open what is taken from."""
        self.loader: Any = StreamLoader(config, **SIZES, **ranks)

    def take(self) -> torch.Tensor:
        """Tokens beside labels of the next micro-batch, a sample a row."""
        return rows_of(self.loader.take())

    def save(self, folder: Path) -> None:
        """Save where the feed is."""
        if self.rank == 0:
            folder.mkdir(exist_ok=True)
            (folder / "state.json").write_text(json.dumps(self.loader.state_dict()))

    def load(self, folder: Path) -> None:
        """Go there."""
        self.loader.load_state_dict(json.loads((folder / "state.json").read_text()))

    def close(self) -> None:
        """End its threads."""
        self.loader.close()


class DcpFeed(Feed):
    """By torch's distributed checkpoints."""

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        from streammega.integrations.dcp import DataState

        dcp.save({"data": DataState(self.loader)}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        from streammega.integrations.dcp import DataState, load

        load({"data": DataState(self.loader)}, checkpoint_id=folder)


class AsyncDcpFeed(DcpFeed):
    """Saved in the background, while the next batch is taken."""

    ahead: torch.Tensor | None = None

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        from streammega.integrations.dcp import DataState

        if not hasattr(self, "group"):
            # one process by itself has none
            self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        pending: Any = dcp.async_save(
            {"data": DataState(self.loader)}, checkpoint_id=folder, process_group=self.group
        )
        self.ahead = super().take()
        pending.result()

    def take(self) -> torch.Tensor:
        if self.ahead is None:
            return super().take()
        rows = self.ahead
        self.ahead = None
        return rows


class NodeFeed(Feed):
    """A node of torchdata behind two others, one of which reads ahead."""

    def open(self, config: DataConfig, ranks: dict[str, Any]) -> None:
        from torchdata import nodes

        from streammega.integrations.torchdata import stream_node

        super().open(config, ranks)
        rows = nodes.Mapper(stream_node(self.loader), rows_of)
        self.nodes: Any = nodes.Loader(nodes.Prefetcher(rows, prefetch_factor=3))

    def take(self) -> torch.Tensor:
        if not hasattr(self, "batches"):
            self.batches = iter(self.nodes)
        rows: torch.Tensor = next(self.batches)
        return rows

    def save(self, folder: Path) -> None:
        if self.rank == 0:
            folder.mkdir(exist_ok=True)
            (folder / "state.json").write_text(json.dumps(self.nodes.state_dict()))

    def load(self, folder: Path) -> None:
        self.nodes.load_state_dict(json.loads((folder / "state.json").read_text()))

    def close(self) -> None:
        self.nodes.root._it._shutdown()  # the thread that reads ahead
        super().close()


class WorkersFeed(Feed):
    """torchdata's StatefulDataLoader with two workers."""

    workers = 2

    def open(self, config: DataConfig, ranks: dict[str, Any]) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        # s that torch waits for a worker before it ends it
        torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
        # ranks of these tests are daemons, which may have no children: these end with them
        vars(multiprocessing.current_process())["_config"]["daemon"] = False
        dataset = StreamingDataset(config, **SIZES, **ranks)
        context = "fork" if self.workers else None  # whose workers end with a rank that is killed
        self.loader = StatefulDataLoader(
            dataset,
            batch_size=None,
            num_workers=self.workers,
            multiprocessing_context=context,
        )

    def take(self) -> torch.Tensor:
        if not hasattr(self, "batches"):
            self.batches: Any = iter(self.loader)
        return rows_of(next(self.batches))

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        if self.rank == 0:  # all ranks have one state, whatever their number
            torch.save(self.loader.state_dict(), folder / "state.pt")

    def load(self, folder: Path) -> None:
        self.loader.load_state_dict(torch.load(folder / "state.pt", weights_only=False))

    def close(self) -> None:
        if self.workers:  # they hold what the rank's end is told by
            self.batches._shutdown_workers()


class NoWorkersFeed(WorkersFeed):
    """torchdata's StatefulDataLoader without workers."""

    workers = 0


class StageFeed(Feed):
    """A pipeline of webdataset behind a loader, whose state is the loader's."""

    def take(self) -> torch.Tensor:
        import webdataset

        from streammega.integrations.webdataset import loader_stage

        if not hasattr(self, "batches"):
            pipeline = webdataset.DataPipeline(loader_stage(self.loader), webdataset.map(rows_of))
            self.batches = iter(pipeline)
        rows: torch.Tensor = next(self.batches)
        return rows


class TextFeed(Feed):
    """Texts that are tokenised as they come; the config is the names of their shards."""

    lanes = 1

    def open(self, config: Any, ranks: dict[str, Any]) -> None:
        from streammega import FieldsConfig
        from streammega.integrations.webdataset import TextStream

        self.loader = TextStream(
            list(config),
            lambda text: list(text.encode()),
            FieldsConfig(sequence_length=16, eod_id=256),
            lanes=self.lanes,
            texts=config.__getitem__ if isinstance(config, dict) else None,
            seed=3,
            **SIZES,
            **ranks,
        )

    def take(self) -> torch.Tensor:
        return rows_of(next(self.loader))


class LanedTextFeed(TextFeed):
    """Texts by lanes of shards, each rank's state in a file of its own; the config is the texts of
    each shard.
    """

    lanes = 4

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        path = folder / f"rank-{self.rank}.json"
        path.write_text(json.dumps(self.loader.state_dict()))

    def load(self, folder: Path) -> None:
        from streammega.integrations.webdataset import join_states

        states = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
        self.loader.load_state_dict(join_states(states))


def rows_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Tokens beside labels, a sample a row, in memory of their own."""
    return torch.cat([batch["tokens"], batch["labels"]], 1)


def train(rank: int, feed: Callable[..., Feed], config: Any, folder: Path, until: int) -> None:
    """Take global batches up to number `until`, from the last checkpoint of the folder on."""
    warnings.simplefilter("ignore")
    size = dist.get_world_size() if dist.is_initialized() else 1
    latest = folder / "latest"
    trained = feed(config, rank, size)
    step = 0
    if latest.exists():
        step = int(latest.read_text())
        trained.load(folder / f"step-{step}")
    with (folder / f"rank-{rank}-of-{size}-from-{step}").open("w") as log:
        for number in range(step, until):
            rows = [trained.take().tolist() for _ in range(GLOBAL_BATCH // MICRO_BATCH // size)]
            log.write(json.dumps(rows) + "\n")
            log.flush()
            if (number + 1) % EVERY == 0:
                trained.save(folder / f"step-{number + 1}")
                _publish(rank, latest, number + 1)
    trained.close()


def _publish(rank: int, latest: Path, step: int) -> None:
    """The checkpoint of a step is whole on all ranks."""
    if dist.is_initialized():
        dist.barrier()
    if rank == 0:
        latest.with_suffix(".new").write_text(str(step))
        os.replace(latest.with_suffix(".new"), latest)


def taken(folder: Path, size: int, start: int) -> list[list[list[Any]]]:
    """By global batch and rank, the micro-batches of a run that began at step `start`."""
    ranks = []
    for rank in range(size):
        lines = (folder / f"rank-{rank}-of-{size}-from-{start}").read_text().splitlines(True)
        # the last line of a run that was killed may be cut
        ranks.append([json.loads(line) for line in lines if line.endswith("\n")])
    return [list(step) for step in zip(*ranks, strict=False)]


def samples_of(step: list[list[Any]]) -> list[Any]:
    """The samples of a global batch, whatever the ranks."""
    return sorted(row for rank in step for micro_batch in rank for row in micro_batch)


def check_kills(
    gang: Gang,
    feed: Callable[..., Feed],
    config: Any,
    folder: Path,
    before: int,
    after: int,
    reference: Callable[..., Feed] = Feed,
) -> None:
    """Train on `before` ranks, kill them in the middle, go on with `after`: every global batch is
    that of a run that nobody stopped, and the micro-batches of as many ranks are.
    """
    folder.mkdir(parents=True)
    killed = folder / f"rank-0-of-{before}-from-0"
    endless = 1_000_000

    def due() -> bool:
        return (folder / "latest").exists() and killed.read_bytes().count(b"\n") > 2 * EVERY

    assert gang.run_until(due, before, train, feed, config, folder, endless)
    step = int((folder / "latest").read_text())
    until = step + EVERY + 1
    gang.run(after, train, feed, config, folder, until)
    whole = folder / "whole"
    whole.mkdir()
    gang.run(after, train, reference, config, whole, until)
    expected = taken(whole, after, 0)
    first = taken(folder, before, 0)[:until]
    rest = taken(folder, after, step)
    assert len(expected) == until
    assert len(first) >= step
    assert rest == expected[step:], "micro-batch by micro-batch, as the loader alone"
    assert list(map(samples_of, first)) == list(map(samples_of, expected[: len(first)]))
