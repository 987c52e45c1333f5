"""Opens the sample source of a config's split in any order; and builds the indices of a run ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from streammega.config import ORDERS, DataConfig, Order
from streammega.config.validate import whole_number
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.kernels import num_threads
from streammega.kernels.jit import loading_ahead
from streammega.order import Extents
from streammega.order.schedule import check_in_samples
from streammega.order.split import SPLITS
from streammega.samples.build import build_datasets, build_split
from streammega.samples.gpt import GPTDataset, shared_folder
from streammega.samples.pinned import read_blend
from streammega.samples.segments import SplitData, split_data
from streammega.samples.source import SampleSource
from streammega.samples.stream_source import StreamSource


def open_source(config: DataConfig, split: str, global_batch_size: int) -> SampleSource:
    """Samples of a split in the config's order. Raises ConfigError before any token is read."""
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    with loading_ahead():
        config = read_blend(config)
        if split == "train":  # the others have no phases
            check_in_samples(config.phases)
        size = whole_number("global_batch_size", global_batch_size, 1)
        return OPENED_BY[config.order](config, split_data(config, split), size)


def _open_built(config: DataConfig, data: SplitData, _global_batch_size: int) -> SampleSource:
    """A source of Megatron's datasets, whose indices are built."""
    split = data.split
    if ORDERS[config.order].needs_num_samples and data.num_samples is None and split == "train":
        raise ConfigError(
            f"the {config.order} order depends on the number of samples: "
            "set num_samples=(train, valid, test), "
            "for instance (train_iters * global_batch_size, 0, 0)"
        )
    samples = build_split(config, data, data.num_samples)
    if isinstance(samples, list):
        raise ConfigError(
            "multiple_validation_sets makes several datasets: open each by a config of its own, "
            "or build_datasets"
        )
    if samples is None:
        raise ConfigError(
            f"{split} has no samples: split {config.split!r} or num_samples {config.num_samples} "
            f"leaves nothing for {split}; give it a share and a number of samples"
        )
    _ = samples.excluded  # now: raises for names that no document has
    return SampleSource(samples.config, [samples])


OPENED_BY: Mapping[Order, Callable[[DataConfig, SplitData, int], SampleSource]] = {
    "megatron": _open_built,
    "stream": StreamSource,
    "sequential": _open_built,
}


def locate(
    config: DataConfig, sample_ids: ArrayLike, *, split: str = "train", global_batch_size: int = 1
) -> Extents:
    """Where samples of the global stream are stored: arrays dataset, file, start, stop (in tokens),
    and `row_splits` of samples.

    A pure function of sizes, seed and config; no token is read. In the stream order a sample is one
    row, unless it joins what earlier phases left unread, and `global_batch_size` chooses the lanes
    unless the config names them. In other orders a sample may have several rows. Raises IndexError
    for a number that no sample has.
    """
    ids = np.asarray(sample_ids, np.int64).reshape(-1)
    source = open_source(replace(config, columns=()), split, global_batch_size)
    check_sample_ids(source, ids, split)
    return source.locate(ids)


def check_sample_ids(source: SampleSource, ids: NDArray[np.int64], split: str) -> None:
    """Raise IndexError for a number that no sample has: closed forms would answer for any number."""
    if not len(ids):
        return
    first = ids.min()
    last = ids.max()
    end = source.num_samples
    if first < 0 or (end is not None and last >= end):
        there_are = "those from 0 on" if end is None else f"those from 0 to {end - 1}"
        raise IndexError(f"sample ids run from {first} to {last}; {split} has {there_are}")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One dataset whose indices are cached, and published if the config names a shared folder."""

    prefix: str
    split: str
    samples: int
    seconds: float


def prepare(config: DataConfig) -> Iterator[Prepared]:
    """Build the indices of all splits and datasets, several at once; yields each when it is done.

    With `index_publish_url` each is also published there, for nodes to download. Yields nothing for
    an order without indices.
    """
    yield from build_indices(datasets_with_indices(config))


def datasets_with_indices(config: DataConfig) -> list[GPTDataset]:
    """The datasets of all splits whose indices are to be built; none in an order without indices.

    Indices of blends are built, and published, with this.
    """
    datasets: list[GPTDataset] = []
    if not ORDERS[config.order].has_indices:
        return datasets
    for split in build_datasets(config):
        several = split if isinstance(split, list) else [split]
        for samples in several:
            if samples is None:
                continue
            if samples.datasets != [samples]:  # a blend's own indices are built with it
                _publish(config, samples.index_files())
            datasets += samples.datasets
    return datasets


def build_indices(datasets: Sequence[GPTDataset]) -> Iterator[Prepared]:
    """Build the indices of datasets, several at once; yields each when it is done."""
    # threads: the kernels that build hold no GIL
    pool = ThreadPoolExecutor(num_threads())
    try:
        futures = [pool.submit(_prepare_one, dataset) for dataset in datasets]
        for future in as_completed(futures):
            yield future.result()
    finally:
        # After an error or Ctrl-C nothing more begins, and what is under way is not waited for.
        pool.shutdown(wait=False, cancel_futures=True)


def _prepare_one(dataset: GPTDataset) -> Prepared:
    began = time.monotonic()
    _publish(dataset.config, dataset.index_files())
    seconds = time.monotonic() - began
    return Prepared(
        prefix=redact_urls(dataset.indexed.prefix),
        split=dataset.split,
        samples=len(dataset),
        seconds=seconds,
    )


def _publish(config: DataConfig, files: Sequence[Path]) -> None:
    published = shared_folder(config)
    if published is not None:
        for path in files:
            published.publish(path)
