"""Building every index of a run ahead of it, without GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from streammega.config import DataConfig
from streammega.errors.redaction import redact_urls
from streammega.kernels.parallel import num_threads
from streammega.samples.blended import BlendedDataset
from streammega.samples.build import SplitDataset, build_datasets
from streammega.samples.gpt import GPTDataset, shared_folder
from streammega.samples.restarted import built_phases


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One dataset whose indices are in the cache (and published, where the config names a shared
    folder).
    """

    prefix: str
    split: str
    samples: int
    seconds: float


def prepare(config: DataConfig) -> Iterator[Prepared]:
    """Build the indices of all splits and datasets, several at once; yields each when it is done.

    With `shared_index_url` each is also published there, for nodes to download. The stream order
    needs no indices.
    """
    if config.order == "stream":
        return
    splits = _built(config)
    datasets = [part for split in splits for part in _parts(split)]
    for split in splits:  # a blend's own indices are built with it
        if isinstance(split, BlendedDataset):
            _publish(config, split.index_files())
    # threads: the kernels that build hold no GIL
    with ThreadPoolExecutor(num_threads()) as pool:
        futures = [pool.submit(_prepare_one, dataset) for dataset in datasets]
        for future in as_completed(futures):
            yield future.result()


def _built(config: DataConfig) -> list[SplitDataset | None]:
    """The datasets of all splits; of training in phases, those of each phase."""
    if not config.phases:
        return list(build_datasets(config))
    train, valid, test = config.num_samples or (0, 0, 0)
    phases = built_phases(config, "train", train)
    others = build_datasets(replace(config, phases=()), (0, valid, test))
    return [*phases, *others]


def _parts(split: object) -> list[GPTDataset]:
    if isinstance(split, BlendedDataset):
        return split.datasets
    if isinstance(split, list):
        return split
    return [split] if isinstance(split, GPTDataset) else []


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
