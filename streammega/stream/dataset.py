"""Micro-batches of one rank as a torch IterableDataset, and its position."""

from __future__ import annotations

import copy
import itertools
import logging
import operator
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.errors import ConfigError, StateError
from streammega.order.cursor import make_state, parse_state
from streammega.order.rampup import BatchSchedule, batch_schedule
from streammega.order.sharding import check_resume, every_nth, rank_samples
from streammega.samples.fields import Batch
from streammega.samples.open import open_source
from streammega.samples.source import sample_fields
from streammega.samples.stream import StreamSource
from streammega.stream.engine import Engine
from streammega.stream.iteration import Iteration
from streammega.stream.places import Begun, Places
from streammega.stream.shares import Share, read_share, write_share

log = logging.getLogger(__name__)

NO_END = 1 << 62
AHEAD = 2
"""Micro-batches made ahead when a dataset is iterated without a loader."""


class StreamingDataset(torch.utils.data.IterableDataset[Batch]):
    """Yields micro-batches: {"tokens", "labels", "position_ids"} int64 and "loss_mask" float32, [micro_batch_size, S];
    with reset_attention_mask also "cu_seqlens", the bounds of documents, int32 [micro_batch_size, most documents + 1].

    Every rank sees its part of the same global batches, whatever dp_size is. An iteration is one pass over the data (whole global
    batches only), and every pass has the same samples in the same order.

    **Where an iteration begins**: where `load_state_dict` or `seek` put the dataset, if it is the first one since, and at the
    first sample otherwise, also after one that was left in the middle. That is so by itself and under a torch DataLoader
    (`batch_size=None`) with any number of workers, forked, spawned or persistent; worker w builds micro-batches w, w + W, ...,
    so the order is the same. An iteration from the end of the data gives nothing, with a warning. One that is held while
    the dataset is put elsewhere, or that ended by an error, raises StateError.

    **State under workers**: torchdata's StatefulDataLoader keeps each worker's own, to be loaded with as many workers. With a
    plain DataLoader only the caller knows what was taken: `state_dict(num_batches)`.

    Args:
        config: what is read.
        split: "train", "valid" or "test".
        micro_batch_size: samples of one batch of this rank.
        global_batch_size: samples of one optimizer step over all ranks; a multiple of micro_batch_size * dp_size.
        dp_rank, dp_size: this data-parallel rank.
        rampup: (start, increment, samples): the global batch grows from start to global_batch_size over so many samples.

    Raises ConfigError before any token is read, StorageError and FormatError for the files.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        split: str = "train",
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        rampup: tuple[int, int, int] | None = None,
    ) -> None:
        self.schedule = batch_schedule(global_batch_size, rampup)
        self.schedule.check(micro_batch_size, dp_rank, dp_size)
        self.config, self.split = config, split
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.samples = open_source(config, split, global_batch_size)
        for start, stop in config.skip_samples:
            if self.schedule.offset_at(start) or self.schedule.offset_at(stop):
                raise ConfigError(
                    f"skip_samples [{start}, {stop}) cuts a global batch of {self.schedule.size_at(start)} samples apart"
                )
        if self.num_samples == 0:
            raise ConfigError(
                f"{split} holds {self.samples.num_samples} samples, less than one global batch of {global_batch_size}; lower "
                f"global_batch_size or ask for more samples"
            )
        self._consumed = 0
        self._places = Places()
        self._share: Share | None = None  # in a worker: of the iteration that runs
        self._loaded: Share | None = None  # in a worker: of the iteration that will

    def __len__(self) -> int:
        """Micro-batches of this rank from the first sample to the last. TypeError for a stream without an end."""
        if self.num_samples is None:
            raise TypeError("the stream has no end; num_samples in the config gives it one")
        return sum(len(part) for part in self.parts(0))

    @property
    def num_samples(self) -> int | None:
        """Samples over all ranks, whole global batches only; None: the stream has no end."""
        return self._num_samples(self.schedule)

    @property
    def step_samples(self) -> int:
        """Samples that one micro-batch on every rank takes from the global stream."""
        return self.micro_batch_size * self.dp_size

    @property
    def consumed_samples(self) -> int:
        """The next global sample: how many were handed out, over all ranks."""
        return self._consumed

    def sample_ids(self, consumed: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Global sample ids of this rank's micro-batch in the micro-step at `consumed`, int64 [..., micro_batch_size]."""
        contiguous = self.config.order == "megatron"
        return rank_samples(consumed, self.micro_batch_size, self.dp_rank, self.dp_size, contiguous=contiguous)

    def batch(self, consumed: int) -> Batch:
        """This rank's micro-batch in the micro-step at `consumed`: a pure function of it."""
        return sample_fields(self.samples, self.sample_ids(consumed), bounds=True)

    def positions(self) -> Iterator[int]:
        """The micro-steps that are left, as values of `consumed`, without those that are skipped."""
        return itertools.chain.from_iterable(self.parts(self._consumed))

    def parts(self, start: int, schedule: BatchSchedule | None = None) -> Iterator[range]:
        """The ranges of positions from `start` on, between the skipped ones."""
        num_samples = self._num_samples(schedule or self.schedule)
        end = NO_END if num_samples is None else num_samples
        for low, high in sorted(self.config.skip_samples):
            if start < low:
                yield range(start, min(low, end), self.step_samples)
            start = max(start, high)
        if start < end:
            yield range(start, end, self.step_samples)

    def advance(self, consumed: int) -> None:
        """Note that the micro-step at `consumed` was handed out."""
        self._consumed = consumed + self.step_samples

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        begun = self._places.begin(worker)
        if begun.lanes and isinstance(self.samples, StreamSource):
            self.samples.adopt_lanes(begun.lanes)
        share = Share(start=begun.start, origin=begun.origin)
        if worker is not None:
            share = replace(share, worker=worker.id, workers=worker.num_workers)
            share, self._loaded = self._loaded or share, None
        self.schedule = replace(self.schedule, origin=share.origin)
        self._share, self._consumed = share, share.start
        return Iteration(self._batches(begun, share))

    def _batches(self, begun: Begun, share: Share) -> Generator[Batch, None, None]:
        first = share.worker + share.batches * share.workers
        positions = itertools.chain.from_iterable(every_nth(self.parts(share.start), first, share.workers))
        if share.worker == share.batches == 0 and share.start and share.start == self.num_samples:
            log.warning(
                "%s: the position that was set, sample %d, is the end of the data, so this iteration gives nothing; the next "
                "begins at the first sample",
                self.split,
                share.start,
            )
        with closing(Engine(self, positions, AHEAD, worker=share.worker, workers=share.workers)) as engine:
            for consumed, batch in engine:
                self._places.check(begun)
                self._count(begun, share, consumed)
                yield batch
                del batch
        self._places.check(begun)
        if torch.utils.data.get_worker_info() is None and self._places.is_latest(begun):
            self.schedule = replace(self.schedule, origin=0)  # the position is now that of the next iteration
            self._consumed = 0
            self._places.finished()

    def _count(self, begun: Begun, share: Share, consumed: int) -> None:
        if torch.utils.data.get_worker_info() is not None:
            assert self._share is not None
            self._share = replace(self._share, batches=self._share.batches + 1)
        elif self._places.is_latest(begun):
            self.advance(consumed)

    def set_epoch(self, epoch: int) -> None:
        """Called by DataLoaders that accelerate prepared; passes are all alike, so there is nothing to set.

        Raises ConfigError for a dataset of one of several ranks: such a DataLoader deals out what one process reads.
        """
        if self.dp_size > 1:
            raise ConfigError(
                f"this dataset reads the part of data-parallel rank {self.dp_rank} of {self.dp_size} alone, but accelerate "
                f"prepared its DataLoader and would deal that part out to all ranks: the others' samples would never be seen. "
                f"Iterate a StreamLoader(dp_rank=, dp_size=) that is not prepared, with "
                f"accelerator.register_for_checkpointing(loader), or give the dataset neither dp_rank nor dp_size"
            )

    def seek(self, consumed_samples: int) -> None:
        """Continue at a global sample, whole micro-steps of these ranks from the start of a global batch."""
        consumed_samples = operator.index(consumed_samples)  # of numpy too: states are JSON
        schedule = self.schedule if consumed_samples else self.schedule.resumed(0, 0)
        self._check_position(consumed_samples, schedule)
        self._put(consumed_samples, schedule)

    @property
    def generation(self) -> int:
        """How often `seek` and `load_state_dict` have put the dataset somewhere."""
        return self._places.generation

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Where to go on, the same on every rank: {"version", "consumed_samples", "batch_offset", "identity", "fingerprint"}.

        Counts what was handed out; after the last batch of an iteration that has ended, the position is the first sample. Under
        a DataLoader with workers only the caller knows what was handed out: pass `num_batches`, the micro-batches taken from
        the iteration that began last. In a worker (asked by torchdata's StatefulDataLoader) it is the state of that worker.
        """
        if torch.utils.data.get_worker_info() is not None:
            return self._worker_state()
        if num_batches is not None:
            start, origin = self._places.running
            schedule = replace(self.schedule, origin=origin)
            return self.state_at(self._after(start, num_batches, schedule), schedule)
        if self._places.by_workers:
            raise StateError(
                "worker processes read ahead of what the DataLoader handed out, so the position is not known here; pass "
                "state_dict(num_batches=<micro-batches taken from this iteration>), save the state of torchdata's "
                "StatefulDataLoader, or use StreamLoader, which needs no workers"
            )
        return self.state_at(self._consumed)

    def state_at(self, consumed: int, schedule: BatchSchedule | None = None) -> dict[str, Any]:
        """The state of a run that has handed out all samples before `consumed`."""
        offset = (schedule or self.schedule).offset_at(consumed)
        return make_state(self.samples.identity(consumed), consumed, offset)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the sample after the last that was handed out. Raises StateError for another order, and changes nothing."""
        saved = parse_state(state)
        samples = self.samples
        if isinstance(samples, StreamSource) and saved.lanes is not None:
            samples = copy.copy(samples)
            samples.adopt_lanes(saved.lanes)
        schedule = self.schedule.resumed(saved.consumed, saved.offset)
        share = read_share(state, self.step_samples)
        reached = saved.consumed if share is None else share.reached
        saved.check(samples.identity(reached))
        if saved.offset >= schedule.size_at(saved.consumed):
            raise StateError(
                f"the state stops {saved.offset} samples into a global batch, which now has {schedule.size_at(saved.consumed)}; "
                f"resume with the former global_batch_size, or from a state saved between global batches"
            )
        self._check_position(saved.consumed, schedule)
        if share is not None:
            share = replace(share, start=saved.consumed, origin=schedule.origin)
            if self._reached(share, schedule) != reached:
                raise StateError("skip_samples or num_samples changed within what this worker's state counts; restore them")
        self.samples = samples
        self._put(saved.consumed, schedule, share)

    def _check_position(self, consumed: int, schedule: BatchSchedule) -> None:
        """Raise StateError unless these ranks can go on at `consumed`."""
        end = self._num_samples(schedule)
        if not 0 <= consumed <= (NO_END if end is None else end):
            raise StateError(f"sample {consumed} is not within the {'endless' if end is None else end} samples of {self.split}")
        check_resume(schedule.offset_at(consumed), self.micro_batch_size, self.dp_size)

    def _put(self, consumed: int, schedule: BatchSchedule, share: Share | None = None) -> None:
        """Go somewhere. A worker process goes there by itself: what it is given is only its own."""
        lanes = self.samples.order.lanes if isinstance(self.samples, StreamSource) else 0
        worker = torch.utils.data.get_worker_info()
        self.schedule = schedule
        self._consumed = consumed
        if worker is None:
            return self._places.put(consumed, lanes, schedule.origin)
        self._places.adopt_lanes(lanes)
        alone = Share(start=consumed, origin=schedule.origin, worker=worker.id, workers=worker.num_workers)
        self._loaded = share or alone

    def _num_samples(self, schedule: BatchSchedule) -> int | None:
        total = self.samples.num_samples
        return None if total is None else schedule.last_whole(total)

    def _after(self, start: int, num_batches: int, schedule: BatchSchedule) -> int:
        """The position after so many micro-batches from `start`, past those that are skipped."""
        if num_batches == 0:
            return start
        last = next(itertools.chain.from_iterable(every_nth(self.parts(start, schedule), num_batches - 1, 1)), None)
        if num_batches < 0 or last is None:
            raise StateError(
                f"there are no {num_batches} micro-batches from sample {start} on; count those of one iteration alone"
            )
        return last + self.step_samples

    def _reached(self, share: Share, schedule: BatchSchedule) -> int:
        """The position after the last micro-batch that a worker gave."""
        given = share.worker + (share.batches - 1) * share.workers + 1 if share.batches else 0
        return self._after(share.start, given, schedule)

    def _worker_state(self) -> dict[str, Any]:
        """The state of one worker: where the iteration began, and how many micro-batches this worker gave."""
        share = self._share
        if share is None:
            raise StateError("a worker has a state once its iteration began")
        schedule = replace(self.schedule, origin=share.origin)
        reached = self._reached(share, schedule)
        state = make_state(self.samples.identity(reached), share.start, schedule.offset_at(share.start))
        return state | write_share(replace(share, reached=reached), self.step_samples)
