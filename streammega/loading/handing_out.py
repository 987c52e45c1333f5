"""Batches in the order of the cursor, which moves when one is handed out: phase by phase, as far as
nothing joins, on a device if one is given.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

import torch

from streammega.errors import StateError
from streammega.loading.dataset import StreamingDataset
from streammega.loading.device_batches import DeviceBatches, copier_to
from streammega.loading.engine import Engine
from streammega.loading.kept_parts import WHOLE, KeptParts
from streammega.loading.steps import MicroSteps
from streammega.order.rank_samples import zigzag_bounds
from streammega.samples.fields import Batch

log = logging.getLogger(__name__)


def batches_of(
    dataset: StreamingDataset,
    generation: int,
    make_engine: Callable[..., Engine],
    log_every: int,
    device: torch.device | None,
) -> Generator[Batch, None, None]:
    """The batches from the cursor of a dataset on, which was put somewhere for the `generation`-th
    time, on a device if one is given. The engine is made when the first of them is asked for, in
    the thread that asks.

    Does not refer to the loader, so that a loader nobody holds is collected, and its threads with
    it.
    """
    dataset.steps.begin(dataset.consumed_samples)
    counts = itertools.count(1)
    goes_on = True
    while goes_on:
        goes_on = yield from _until_something_joins(
            dataset, generation, make_engine, log_every, counts, device
        )


def _until_something_joins(
    dataset: StreamingDataset,
    generation: int,
    make_engine: Callable[..., Engine],
    log_every: int,
    counts: Iterator[int],
    device: torch.device | None,
) -> Generator[Batch, None, bool]:
    """As `batches_of`, as far as nothing joins; whether something did, and what was read ahead is to
    be read anew. counts: numbers of global batches.
    """
    start = dataset.consumed_samples
    joined_at = dataset.steps.joined_at
    for steps, positions, begin in dataset.steps.by_phase(dataset.positions(), start):
        engine = make_engine(steps, positions, start=begin)
        with closing(engine):
            for consumed, batch in _on_device(engine, device):
                # looked at before the cursor moves: it is no longer the one that this iteration
                # began at
                if dataset.generation != generation:
                    raise StateError(
                        "the dataset was put elsewhere under its loader; "
                        "use seek and load_state_dict of the loader"
                    )
                dataset.steps.reach(consumed)
                if dataset.steps.joined_at != joined_at:
                    return True
                dataset.advance(consumed)
                yield batch
                del batch  # its memory is free as soon as the caller lets go
                is_whole = log_every and not dataset.schedule.offset_at(dataset.consumed_samples)
                if is_whole and next(counts) % log_every == 0:
                    line = engine.stats.line()
                    log.info("%s: sample %d; %s", dataset.split, dataset.consumed_samples, line)
    return False


def engine_of(
    context_rank: tuple[int, int], steps: MicroSteps, positions: Iterator[int], **options: Any
) -> Engine:
    """What reads one phase, of each sample what a context-parallel rank (rank, size) keeps."""
    kept = kept_parts_of(steps.config.sequence_length, *context_rank)
    return Engine(steps, positions, kept=kept, **options)


def _on_device(engine: Engine, device: torch.device | None) -> Iterator[tuple[int, Batch]]:
    """What an engine gives, on a device if one is given."""
    batches = iter(engine)
    if device is None or device.type == "cpu":
        return batches
    return DeviceBatches(batches, lambda: engine.is_ready, copier_to(device))


def kept_parts_of(sequence_length: int, cp_rank: int, cp_size: int) -> KeptParts:
    """What a context-parallel rank keeps of each sample, with the token after each part: its last
    label. Raises ConfigError for a rank that does not exist: it would read others' tokens.
    """
    parts = zigzag_bounds(sequence_length, cp_rank, cp_size)
    if cp_size == 1:
        return WHOLE
    return KeptParts(bounds=[(start, stop + 1) for start, stop in parts])
