"""What adapters for other trainers cost for each micro-batch, compared with the bare loader: the same
batches, in turns.

    python tools/bench/adapters.py [--batches 1600] [--rounds 7]

Host seconds of this process and its threads, which other programs on the machine disturb less than
they do seconds of the clock. Sides whose framework is not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import streammega as sm
from tools.bench import corpus, harness, sides

LENGTH = 2048
ROWS = 4
SAMPLES = 8000
"""Samples of the Megatron order, which depends on their number: for all batches, and a few more."""
Batches = Iterator[Any]


def bare(loader: sm.StreamLoader) -> Batches:
    return iter(loader)


def with_state(loader: sm.StreamLoader) -> Batches:
    """The bare loader, asked for its state after each batch, as some of the adapters are."""
    for batch in loader:
        loader.state_dict()
        yield batch


def torchdata_node(loader: sm.StreamLoader) -> Batches:
    from torchdata import nodes

    from streammega.integrations.torchdata import stream_node

    return iter(nodes.Loader(stream_node(loader)))


def torchdata_stateful(loader: sm.StreamLoader) -> Batches:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return iter(StatefulDataLoader(loader.dataset, batch_size=None))


def megatron_batches(loader: sm.StreamLoader) -> Any:
    from streammega.integrations.megatron import MegatronBatches

    return MegatronBatches(loader.dataset.config, split="train", micro_batch_size=ROWS)


def megatron_replayed(loader: sm.StreamLoader) -> Batches:
    """As Megatron reads it: behind what keeps micro-batches for a replay."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    batches = RerunDataIterator(megatron_batches(loader))
    return (next(batches) for _ in itertools.count())  # it is no iterable


def bridge_batches(loader: sm.StreamLoader) -> Batches:
    from streammega.integrations.megatron_bridge import BridgeBatches

    batches = BridgeBatches(loader.dataset.config, split="train", micro_batch_size=ROWS)
    batches.seek(0)
    return batches


def by_next(loader: sm.StreamLoader) -> Batches:
    return (next(loader) for _ in itertools.count())


def on_a_device(loader: sm.StreamLoader) -> Batches:
    """One ahead, on a device that copies nothing: what is around the copies."""
    return iter(loader.prefetch_to("meta"))


SIZES: Any = {"micro_batch_size": ROWS, "global_batch_size": ROWS}


def lightning_batches(loader: sm.StreamLoader) -> Batches:
    """Each counted as trained on, as Lightning's callback does."""
    from streammega.integrations.lightning import StreamDataModule

    batches = StreamDataModule(loader.dataset.config, **SIZES).train_dataloader()
    for batch in batches:
        yield batch
        batches.mark_consumed()


def accelerate_batches(loader: sm.StreamLoader, **options: Any) -> Batches:
    from accelerate import Accelerator

    from streammega.integrations.accelerate import StreamDataLoader

    config = loader.dataset.config
    batches: Batches = iter(StreamDataLoader(Accelerator(cpu=True), config, **SIZES, **options))
    return batches


def causal_lm_batches(loader: sm.StreamLoader) -> Batches:
    """The fields of Hugging Face's models."""
    from streammega.integrations.transformers import causal_lm_batch

    return accelerate_batches(loader, prepare_batch=causal_lm_batch)


def megatron_dataset(loader: sm.StreamLoader) -> Batches:
    """Megatron's own builder and torch's DataLoader over our dataset class, without workers."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from torch.utils.data import DataLoader

    from streammega.integrations.megatron_dataset import StreamGPTDataset

    config = sides.gpt_config(LENGTH, blend=(list(loader.dataset.config.blend or ()), None))
    builder = BlendedMegatronDatasetBuilder(StreamGPTDataset, (SAMPLES, 0, 0), is_here, config)
    return iter(DataLoader(builder.build()[0], batch_size=ROWS))


def torchtitan_pairs(loader: sm.StreamLoader) -> Batches:
    """As torchtitan's main branch takes them; its own config class is not needed for it."""
    from streammega.integrations.torchtitan import TitanPairs

    return TitanPairs(loader, flat=True, positions=True, repeat=True)


def webdataset_pipeline(loader: sm.StreamLoader) -> Batches:
    import webdataset

    from streammega.integrations.webdataset import loader_stage

    return iter(webdataset.DataPipeline(loader_stage(loader)))


def is_here() -> bool:
    """Whether this rank builds the dataset."""
    return True


SIDES: dict[str, tuple[str, Callable[[sm.StreamLoader], Batches]]] = {
    "bare loader": ("torch", bare),
    "bare loader, its state at every batch": ("torch", with_state),
    "next(loader)": ("torch", by_next),
    "prefetch_to, without the copies": ("torch", on_a_device),
    "Lightning's data module": ("pytorch_lightning", lightning_batches),
    "accelerate's StreamDataLoader": ("accelerate", accelerate_batches),
    "the same with causal_lm_batch": ("accelerate", causal_lm_batches),
    "torchdata node": ("torchdata", torchdata_node),
    "StatefulDataLoader, no workers": ("torchdata", torchdata_stateful),
    "torchtitan's pairs": ("torch", torchtitan_pairs),
    "webdataset pipeline": ("webdataset", webdataset_pipeline),
    "MegatronBatches behind RerunDataIterator": ("megatron", megatron_replayed),
    "BridgeBatches": ("torch", bridge_batches),
    "StreamGPTDataset, no workers": ("megatron", megatron_dataset),
}
"""A name, what has to be installed, and the batches."""


def host_seconds(
    config: sm.DataConfig, side: Callable[[sm.StreamLoader], Batches], batches: int
) -> float:
    """Host seconds of a micro-batch, after a warm-up."""
    with sm.StreamLoader(config, micro_batch_size=ROWS, global_batch_size=ROWS) as loader:
        taken = side(loader)
        warm = sum(1 for _ in itertools.islice(taken, 20))
        assert warm == 20
        start = time.process_time()
        count = sum(1 for _ in itertools.islice(taken, batches))
        seconds = time.process_time() - start
        assert count == batches
        del taken
    return seconds / batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data"
        corpus.write_random(prefix, np.full(2000, 4000), 50_000)
        config = sm.DataConfig(blend=[prefix], sequence_length=LENGTH)
        installed = {
            name: partial(host_seconds, config, side, chosen.batches)
            for name, (module, side) in SIDES.items()
            if importlib.util.find_spec(module) is not None
        }
        seconds = harness.in_turns(chosen.rounds, installed)
    harness.table("us of the host for a micro-batch", "median", "least")
    for name, values in seconds.items():
        harness.row(name, f"{statistics.median(values) * 1e6:.0f}", f"{min(values) * 1e6:.0f}")


if __name__ == "__main__":
    main()
