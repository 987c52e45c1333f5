"""The global batches of a run, read by one loader without ranks: those of every run must be the same."""

from __future__ import annotations

from dataclasses import replace

from streammega import StreamLoader
from streammega.train.config import RunConfig
from streammega.train.config_check import global_batch_hash, sample_digests
from streammega.train.splits import batch_sizes, data_of


def open_without_ranks(config: RunConfig) -> StreamLoader:
    """A loader of all global batches of training for one rank, to compare those of a run with."""
    data = data_of(config, "train")
    if data.num_samples is None:  # a stream without an end
        train, valid, test = config.num_samples()
        train += sum(stop - start for start, stop in data.exclude_samples)
        data = replace(data, num_samples=(train, valid, test))
    return StreamLoader(data, split="train", dp_rank=0, dp_size=1, **batch_sizes(config, "train"))


def loader_hashes(config: RunConfig) -> list[str]:
    """The hashes of all global batches of a run. Those in metrics.jsonl must be the same."""
    hashes: list[str] = []
    digests: dict[int, int] = {}
    with open_without_ranks(config) as loader:
        dataset = loader.dataset
        for batch in loader:
            consumed = loader.consumed_samples
            sample_ids = dataset.sample_ids(consumed - dataset.step_samples).tolist()
            digests.update(zip(sample_ids, sample_digests(batch).tolist(), strict=True))
            if dataset.steps.schedule.offset_at(consumed) == 0:
                hashes.append(global_batch_hash(digests))
                digests = {}
            if len(hashes) == config.train.train_iters:
                break
    return hashes
