"""One face for all integrations: what opens, takes batches, and has a state, so that each is asked
the same of its state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from streammega import DataConfig, FieldsConfig, StreamingDataset, StreamLoader
from tests.support.trainer_programs import SIZES, accelerator_of, rows_of

Rows = list[list[int]]


class Adapter:
    """A StreamLoader alone, and whatever keeps its state as it is: Fabric, a loop of one's own.

    The others are derived from it.
    """

    is_lazy = False
    """Whether a state is looked at when the next batch is asked for, and not when it is loaded."""
    empty_is_none = False
    """Whether an empty state is none to its framework, which then begins as if none was loaded."""
    tells_once = False
    """Whether an iteration that raised is over: a generator of the framework's own."""
    counts_steps = False
    """Whether micro-batches of a step that was not made count for nothing."""

    def __init__(self, config: DataConfig) -> None:
        self.loader: Any = StreamLoader(config, **SIZES)
        self.open()

    def open(self) -> None:
        """Put the framework's part around the loader."""

    def batches(self) -> Iterator[Any]:
        """A new iteration."""
        return iter(self.loader)

    def rows(self, batch: Any) -> Rows:
        """The tokens of each sample."""
        return rows_of(batch)

    def trained(self, micro_batches: int) -> None:
        """A batch was trained on, which makes so many since the last step."""

    def state(self) -> Any:
        """What a checkpoint keeps, as it comes out of one."""
        return json.loads(json.dumps(self.loader.state_dict()))

    def load(self, state: Any) -> None:
        """Go to a state."""
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """End its threads."""
        self.loader.close()


class DeviceAdapter(Adapter):
    """Batches of `prefetch_to`."""

    def open(self) -> None:
        self.loader.prefetch_to("cpu")


class DcpAdapter(Adapter):
    """What torch's distributed checkpoints are given."""

    def open(self) -> None:
        from streammega.integrations.dcp import DataState

        self.kept = DataState(self.loader)

    def state(self) -> Any:
        return self.kept.state_dict()

    def load(self, state: Any) -> None:
        self.kept.load_state_dict(state)


class LightningAdapter(Adapter):
    """Lightning's data module, whose batches are told when they were trained on."""

    counts_steps = True

    def __init__(self, config: DataConfig) -> None:
        from streammega.integrations.lightning import StreamDataModule

        self.loader = StreamDataModule(config, **SIZES)

    def batches(self) -> Iterator[Any]:
        return iter(self.loader.train_dataloader())

    def trained(self, micro_batches: int) -> None:
        batches = self.loader.train_dataloader()
        batches.mark_consumed()
        if micro_batches == 4:
            batches.mark_step()

    def close(self) -> None:
        self.loader.teardown("fit")


class AccelerateAdapter(Adapter):
    """Accelerate's DataLoader."""

    counts_steps = True

    def __init__(self, config: DataConfig) -> None:
        from streammega.integrations.accelerate import StreamDataLoader

        self.accelerator = accelerator_of(0, 1, gradient_accumulation_steps=4)
        self.loader = StreamDataLoader(self.accelerator.__enter__(), config, **SIZES)
        self.open()

    def close(self) -> None:
        super().close()
        self.accelerator.__exit__(None, None, None)


class TransformersAdapter(AccelerateAdapter):
    """The same under the Trainer of transformers, whose callback keeps the position."""

    def open(self) -> None:
        from streammega.integrations.transformers import CountsSteps

        self.callback = CountsSteps()
        self._train(SimpleNamespace(global_step=0))

    def _train(self, state: Any) -> None:
        self.callback.on_train_begin(None, state, None, train_dataloader=self.loader)

    def trained(self, micro_batches: int) -> None:
        if micro_batches == 4:
            self.callback.on_step_end(None, None, None, train_dataloader=self.loader)

    def state(self) -> Any:
        return json.loads(json.dumps(self.callback.state()["attributes"]["position"]))

    def load(self, state: Any) -> None:
        saved = {"StreamPosition": {"args": {}, "attributes": {"position": state}}}
        self._train(SimpleNamespace(global_step=1, stateful_callbacks=saved))


class TitanAdapter(Adapter):
    """torchtitan's data loader, without its base class."""

    def __init__(self, config: DataConfig) -> None:
        from streammega.integrations.torchtitan import TitanLoader

        settings = {
            "shuffle_lanes": config.shuffle_lanes,
            "storage": {"cache_dir": config.storage.cache_dir},
            "phases": config.phases,
        }
        given = SimpleNamespace(
            blend=" ".join(map(str, config.blend or ())),
            part="train",
            split=config.split,
            order=config.order,
            seed=config.seed,
            global_batch_size=SIZES["global_batch_size"],
            num_samples=config.num_samples[0] if config.num_samples else -1,
            positions="samples",
            eod_id=-1,
            infinite=True,
            repeat=True,
            prefetch=4,
            settings=settings,
        )
        rows = SIZES["micro_batch_size"]
        sizes: Any = {"seq_len": config.sequence_length, "local_batch_size": rows}
        self.loader = TitanLoader(given, dp_world_size=1, dp_rank=0, **sizes)

    def rows(self, batch: Any) -> Rows:
        inputs, _ = batch
        return rows_of(inputs, "input")


class NodeAdapter(Adapter):
    """A node of torchdata: an iteration is a `reset`, with the state that it is given."""

    def open(self) -> None:
        from streammega.integrations.torchdata import stream_node

        self.node = stream_node(self.loader)

    def batches(self) -> Iterator[Any]:
        return self.node  # type: ignore[no-any-return]

    def state(self) -> Any:
        return json.loads(json.dumps(self.node.state_dict()))

    def load(self, state: Any) -> None:
        self.node.reset(state)


class StatefulAdapter(Adapter):
    """torchdata's StatefulDataLoader without workers."""

    is_lazy = True
    empty_is_none = True
    workers = 0

    def __init__(self, config: DataConfig) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        self.loader = StatefulDataLoader(
            StreamingDataset(config, **SIZES), batch_size=None, num_workers=self.workers
        )

    def state(self) -> Any:
        return self.loader.state_dict()

    def close(self) -> None:
        """Its iterations end with it."""


class WorkersAdapter(StatefulAdapter):
    """The same with two workers."""

    workers = 2


class StageAdapter(Adapter):
    """A pipeline of webdataset."""

    tells_once = True

    def open(self) -> None:
        import webdataset

        from streammega.integrations.webdataset import loader_stage

        self.pipeline = webdataset.DataPipeline(loader_stage(self.loader))

    def batches(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self.pipeline)
        return batches


class TextAdapter(Adapter):
    """Texts that are tokenised as they come; another seed is another order of shards."""

    lanes = 1

    def __init__(self, config: DataConfig) -> None:
        from streammega.integrations.webdataset import TextStream

        self.loader: Any = TextStream(
            [f"shard-{number}" for number in range(8)],
            lambda text: list(text.encode()),
            FieldsConfig(sequence_length=16),
            texts=lambda name: [f"{name} text {number} of it all" for number in range(40)],
            lanes=self.lanes,
            seed=config.seed,
            **SIZES,
        )


class LanedTextAdapter(TextAdapter):
    """The same by lanes of shards."""

    lanes = 4


class MegatronAdapter(Adapter):
    """The iterator that Megatron is given, by the state that it may save; to Megatron itself its
    counted samples are all there is.
    """

    def __init__(self, config: DataConfig) -> None:
        from streammega.integrations.megatron import MegatronBatches

        self.loader = MegatronBatches(
            replace(config, shuffle_lanes=16), split="train", micro_batch_size=2
        )

    def state(self) -> Any:
        return json.loads(json.dumps(self.loader.save_state()))

    def load(self, state: Any) -> None:
        self.loader.restore_state(state)


ADAPTERS: dict[str, Callable[[DataConfig], Adapter]] = {
    "loader": Adapter,
    "prefetch_to": DeviceAdapter,
    "dcp": DcpAdapter,
    "lightning": LightningAdapter,
    "accelerate": AccelerateAdapter,
    "transformers": TransformersAdapter,
    "torchtitan": TitanAdapter,
    "torchdata-node": NodeAdapter,
    "torchdata-0-workers": StatefulAdapter,
    "torchdata-2-workers": WorkersAdapter,
    "webdataset-stage": StageAdapter,
    "webdataset-texts": TextAdapter,
    "webdataset-lanes": LanedTextAdapter,
    "megatron": MegatronAdapter,
}


def take(adapter: Adapter, batches: Iterator[Any], count: int, done: int = 0) -> Rows:
    """The samples of so many micro-batches that are trained on, after `done` of the same step."""
    rows: Rows = []
    for number in range(count):
        rows += adapter.rows(next(batches))
        adapter.trained((done + number) % 4 + 1)
    return rows


def is_json(state: Any) -> bool:
    """Whether a state is flat, small and JSON-able; those of StatefulDataLoader are torchdata's."""
    text = json.dumps(state, default=str)
    values = state.values() if isinstance(state, Mapping) else [state]
    return len(text) < 1024 and not any(isinstance(value, torch.Tensor | dict) for value in values)
