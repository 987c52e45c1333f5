"""What an adapter for another trainer costs beside the bare loader, by micro-batch: the same batches,
taken in turns.

    python tools/bench/adapters.py [--batches 400] [--rounds 5]

Host seconds of this process and its threads, which other programs on the machine disturb less than
they do seconds of the clock. Sides whose framework is not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import streammega as sm

LENGTH = 2048
ROWS = 4
Batches = Iterator[Any]


def bare(loader: sm.StreamLoader) -> Batches:
    return iter(loader)


def with_state(loader: sm.StreamLoader) -> Batches:
    """The bare loader, asked for its state after each batch, as some of the adapters are."""
    for batch in loader:
        loader.state_dict()
        yield batch


def with_dcp_state(loader: sm.StreamLoader) -> Batches:
    from streammega.integrations.dcp import DataState

    state = DataState(loader)
    for batch in loader:
        state.state_dict()
        yield batch


def torchdata_node(loader: sm.StreamLoader) -> Batches:
    from torchdata import nodes

    from streammega.integrations.torchdata import stream_node

    return iter(nodes.Loader(stream_node(loader)))


def torchdata_stateful(loader: sm.StreamLoader) -> Batches:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return iter(StatefulDataLoader(loader.dataset, batch_size=None))


SIDES: dict[str, tuple[str, Callable[[sm.StreamLoader], Batches]]] = {
    "bare loader": ("torch", bare),
    "bare loader, its state at every batch": ("torch", with_state),
    "DataState at every batch": ("torch", with_dcp_state),
    "torchdata node": ("torchdata", torchdata_node),
    "StatefulDataLoader, no workers": ("torchdata", torchdata_stateful),
}
"""A name, what has to be installed, and the batches."""


def data(folder: Path) -> sm.DataConfig:
    """Sequences of random ids on disk."""
    rng = np.random.default_rng(0)
    with sm.IndexedDatasetWriter(str(folder / "data"), np.uint16) as writer:
        for _ in range(2000):
            writer.add_item(rng.integers(0, 50_000, 4000).astype(np.uint16))
            writer.end_document()
    return sm.DataConfig(blend=[str(folder / "data")], sequence_length=LENGTH, order="stream")


def host_seconds(
    config: sm.DataConfig, side: Callable[[sm.StreamLoader], Batches], batches: int
) -> float:
    """Of a micro-batch, without those that warm up."""
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
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    here = {
        name: side
        for name, (module, side) in SIDES.items()
        if importlib.util.find_spec(module) is not None
    }
    seconds: dict[str, list[float]] = {name: [] for name in here}
    with tempfile.TemporaryDirectory() as folder:
        config = data(Path(folder))
        for _ in range(options.rounds):
            for name, side in here.items():
                seconds[name].append(host_seconds(config, side, options.batches))
    base = statistics.median(seconds["bare loader"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        line = {
            "side": name,
            "host_us": round(middle * 1e6),
            "least_us": round(min(values) * 1e6),
            "over_bare_us": round((middle - base) * 1e6),
        }
        print(json.dumps(line))


if __name__ == "__main__":
    main()
