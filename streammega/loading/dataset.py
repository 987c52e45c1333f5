"""Micro-batches of one rank as a torch IterableDataset, and its position."""

from __future__ import annotations

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
from streammega.kernels.collector import end_without_a_look
from streammega.loading.engine import Engine
from streammega.loading.iteration import Iteration
from streammega.loading.places import Begun, Places
from streammega.loading.sent_ids import as_given, goes_as_ids
from streammega.loading.shares import Share, read_share, write_share
from streammega.loading.steps import MicroSteps
from streammega.order.batch_size import BatchSchedule, batch_schedule
from streammega.order.cursor import make_state, parse_state
from streammega.order.phase_starts import in_samples
from streammega.samples.fields import Batch
from streammega.samples.open import open_source
from streammega.samples.phases import names_in_identity
from streammega.samples.seams import Seams
from streammega.samples.source import SampleSource, dataset_of_samples

log = logging.getLogger(__name__)

AHEAD = 2
"""Micro-batches made ahead when a dataset is iterated without a loader."""


class StreamingDataset(torch.utils.data.IterableDataset[Batch]):
    """Yields micro-batches: {"tokens", "labels", "position_ids"} int64 and "loss_mask" float32,
    [micro_batch_size, S]; with reset_attention_mask also "cu_seqlens", the bounds of documents,
    int32 [micro_batch_size, most documents + 1]; with dataset_ids "dataset_id", int64
    [micro_batch_size]; with inter_document_masking "cu_seqlens" and
    "max_seqlen" as it says.

    Every rank sees its part of the same global batches, whatever dp_size is. An iteration is one
    pass over the data (whole global batches only), and every pass has the same samples in the same
    order.

    **Where an iteration begins**: where `load_state_dict` or `seek` put the dataset, if it is the
    first one since, and at the first sample otherwise, also after one that was left in the middle.
    That is so by itself and under a torch DataLoader (`batch_size=None`) with any number of
    workers, forked, spawned or persistent; worker w builds micro-batches w, w + W, ..., so the
    order is the same. An iteration from the end of the data gives nothing, with a warning. One that
    is held while the dataset is put elsewhere, or that ended by an error, raises StateError.

    **State under workers**: torchdata's StatefulDataLoader keeps each worker's own, to be loaded
    with as many workers. With a plain DataLoader only the caller knows what was taken:
    `state_dict(num_batches)`.

    Args:
        config: what is read.
        split: "train", "valid" or "test".
        micro_batch_size: samples of one batch of this rank.
        global_batch_size: samples of one optimizer step over all ranks; a multiple of
            micro_batch_size * dp_size.
        dp_rank, dp_size: this data-parallel rank.
        rampup: (start, increment, samples): the global batch grows from start to global_batch_size
            over so many samples.

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
        if config.phases_of(split):
            config = in_samples(config, global_batch_size, rampup)
        schedule = batch_schedule(global_batch_size, rampup, config.batch_changes(split))
        schedule.check(micro_batch_size, dp_rank, dp_size)
        self.config = config
        self.split = split
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.steps = MicroSteps(
            config=config,
            split=split,
            samples=open_source(config, split, global_batch_size),
            schedule=schedule,
            micro_batch_size=micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
        )
        self.steps.check()
        self._consumed = 0  # the cursor
        self._placed = 0  # where `seek` or `load_state_dict` put it last
        self._places = Places()
        self._share: Share | None = None  # in a worker: of the iteration that runs
        self._loaded: Share | None = None  # in a worker: of the iteration that will

    def __len__(self) -> int:
        """Micro-batches of this rank from the first sample to the last.

        TypeError for a stream without an end.
        """
        if self.num_samples is None:
            raise TypeError("the stream has no end; num_samples in the config gives it one")
        return sum(len(part) for part in self.parts(0))

    @property
    def samples(self) -> SampleSource:
        """The samples of the split, in their order."""
        return self.steps.samples

    @property
    def schedule(self) -> BatchSchedule:
        """The sizes of global batches, and where their steps begin."""
        return self.steps.schedule

    @property
    def num_samples(self) -> int | None:
        """Samples over all ranks, whole global batches only; None: the stream has no end."""
        return self.steps.num_samples

    @property
    def step_samples(self) -> int:
        """Samples that one micro-batch on every rank takes from the global stream."""
        return self.steps.step_samples

    @property
    def consumed_samples(self) -> int:
        """The next global sample: how many were handed out, over all ranks."""
        return self._consumed

    @property
    def is_where_it_was_put(self) -> bool:
        """Whether no batch was handed out since `seek` or `load_state_dict`, or since there is the
        dataset.
        """
        return self._consumed == self._placed

    def tokens_before(self, sample: int) -> int:
        """Tokens of all global samples before one, whatever phases make of their length."""
        return self.steps.tokens_before(sample)

    def sequence_length_at(self, sample: int) -> int:
        """Tokens of a global sample, which phases may change."""
        return self.steps.sequence_length_at(sample)

    def sample_ids(self, consumed: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Global sample ids of this rank's micro-batch in the micro-step at `consumed`, int64 [...,
        micro_batch_size].
        """
        return self.steps.sample_ids(consumed)

    def dataset_ids(self, consumed: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Which dataset each sample of this rank's micro-batch in the micro-step at `consumed` is of,
        int64 [..., micro_batch_size]: its place in the blend. Of the order alone: nothing is read.
        """
        sample_ids = self.sample_ids(consumed)
        if sample_ids.size:
            self.steps.reach(int(np.max(consumed)))
        extents = self.samples.locate(sample_ids.reshape(-1))
        return dataset_of_samples(self.samples, extents).reshape(sample_ids.shape)

    def seams(self, consumed: int) -> Seams:
        """Where samples of this rank's micro-batch in the micro-step at `consumed` go over from one
        run of tokens to another: arrays `sample`, its row, and `column` of the first token of the
        other run. None but after a phase that changes the length or lanes. Of the order alone:
        nothing is read.
        """
        return self.steps.seams(consumed)

    def batch(self, consumed: int) -> Batch:
        """This rank's micro-batch in the micro-step at `consumed`: a pure function of it."""
        return self.steps.batch(consumed)

    def positions(self) -> Iterator[int]:
        """The micro-steps that are left, as values of `consumed`, without those
        that are skipped.
        """
        return self.steps.positions(self._consumed)

    def parts(self, start: int) -> Iterator[range]:
        """The ranges of positions from `start` on, between the skipped ones."""
        return self.steps.parts(start)

    def advance(self, consumed: int) -> None:
        """Note that the micro-step at `consumed` was handed out."""
        self._consumed = consumed + self.step_samples

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        begun = self._places.begin(worker)
        share = Share(start=begun.start, origin=begun.origin)
        if worker is not None:
            end_without_a_look()  # its process is there for this iteration alone
            share = replace(share, worker=worker.id, workers=worker.num_workers)
            # what this worker was told by `load_state_dict` goes before what all were told
            share = self._loaded or share
            self._loaded = None
        self.steps = self.steps.in_lanes(begun.lanes).from_origin(share.origin)
        self._share = share
        self._consumed = share.start
        return Iteration(self._batches(self.steps, begun, share))

    def _batches(
        self, steps: MicroSteps, begun: Begun, share: Share
    ) -> Generator[Batch, None, None]:
        if share.start and share.start == steps.num_samples and share.is_first_batch:
            log.warning(
                "%s: the position that was set, sample %d, is the end of the data, "
                "so this iteration gives nothing; the next begins at the first sample",
                self.split,
                share.start,
            )
        steps.begin(share.start)
        left: Share | None = share
        while left is not None:
            left = yield from self._until_something_joins(steps, begun, left)
        self._places.check(begun)
        in_worker = torch.utils.data.get_worker_info() is not None
        if not in_worker and self._places.is_latest(begun):
            self.steps = self.steps.from_origin(0)  # the position is now that of the next iteration
            self._consumed = 0
            self._places.finished()

    def _until_something_joins(
        self, steps: MicroSteps, begun: Begun, share: Share
    ) -> Generator[Batch, None, Share | None]:
        """The batches of a share, as far as nothing joins, and where it then goes on: what was read
        ahead is of the order without it. None: at the end of the data.
        """
        given = 0
        joined_at = steps.joined_at
        positions = steps.positions(share.start, share.next_batch, share.workers)
        for steps_of_phase, positions_of_phase, start in steps.by_phase(positions, share.start):
            as_ids = goes_as_ids(self, steps_of_phase)
            engine = Engine(
                steps_of_phase,
                positions_of_phase,
                AHEAD,
                start=start,
                worker=share.worker,
                workers=share.workers,
                ids_only=as_ids,
            )
            with closing(engine):
                for consumed, batch in engine:
                    self._places.check(begun)
                    steps.reach(consumed)
                    if steps.joined_at != joined_at:
                        return replace(share, batches=share.batches + given)
                    batch = as_given(batch, steps_of_phase, as_ids=as_ids)
                    given += 1
                    self._count(begun, consumed)
                    yield batch
                    del batch  # its memory is free as soon as the caller lets go
        return None

    def _count(self, begun: Begun, consumed: int) -> None:
        """Note that the batch at `consumed` is handed out: in a worker as one of its share, else by
        the cursor, unless it is that of a later iteration.
        """
        if torch.utils.data.get_worker_info() is not None:
            assert self._share is not None
            self._share = replace(self._share, batches=self._share.batches + 1)
        elif self._places.is_latest(begun):
            self.advance(consumed)

    def set_epoch(self, epoch: int) -> None:
        """Called by DataLoaders that accelerate prepared; passes are all alike, so there is nothing
        to set.

        Raises ConfigError for a dataset of one of several ranks: such a DataLoader deals out what
        one process reads.
        """
        if self.dp_size > 1:
            raise ConfigError(
                f"this dataset reads the part of data-parallel rank {self.dp_rank} of "
                f"{self.dp_size} alone, but accelerate prepared its DataLoader and would deal "
                "that part out to all ranks: the others' samples would never be seen. "
                "Take streammega.integrations.accelerate.StreamDataLoader, which prepare leaves as "
                "it is; iterate a StreamLoader(dp_rank=, dp_size=) that is not prepared, with "
                "accelerator.register_for_checkpointing(loader); "
                "or give the dataset neither dp_rank nor dp_size"
            )

    def seek(self, consumed_samples: int) -> None:
        """Continue at a global sample, whole micro-steps of these ranks from the start of a global
        batch.
        """
        consumed_samples = operator.index(consumed_samples)  # of numpy too: states are JSON
        steps = self.steps if consumed_samples else self.steps.from_origin(0)
        steps.begin(consumed_samples)
        steps.check_position(consumed_samples)
        steps.check_ahead(consumed_samples)
        self._put(consumed_samples, steps)

    @property
    def generation(self) -> int:
        """How often `seek` and `load_state_dict` have put the dataset somewhere."""
        return self._places.generation

    def state_dict(self, num_batches: int | None = None, *others: Any) -> dict[str, Any]:
        """Where to go on, the same on every rank: {"version", "consumed_samples", "batch_offset",
        "identity", "fingerprint"}.

        Counts what was handed out; after the last batch of an iteration that has ended, the
        position is the first sample. Under a DataLoader with workers only the caller knows what was
        handed out: pass `num_batches`, the micro-batches taken from the iteration that began last.
        In a worker (asked by torchdata's StatefulDataLoader) it is the state of that worker.

        Raises StateError for other arguments, which Composer passes.
        """
        if others:
            arguments = ", ".join(map(repr, (num_batches, *others)))
            raise StateError(
                f"state_dict({arguments}) is a call of Composer's, which counts samples; this "
                f"dataset counts micro-batches. Give Composer an IterableDataset around this one "
                f"that has no state_dict, and save state_dict(num_batches=...) in a callback"
            )
        if torch.utils.data.get_worker_info() is not None:
            return self._worker_state()
        if num_batches is not None:
            start, origin = self._places.running
            steps = self.steps.from_origin(origin)
            return steps.state(steps.after(start, num_batches))
        if self._places.by_workers:
            raise StateError(
                "worker processes read ahead of what the DataLoader handed out, "
                "so the position is not known here; "
                "pass state_dict(num_batches=<micro-batches taken from this iteration>), "
                "save the state of torchdata's StatefulDataLoader, "
                "or use StreamLoader, which needs no workers"
            )
        return self.state_at(self._consumed)

    def state_at(self, consumed: int) -> dict[str, Any]:
        """The state of a run that has handed out all samples before `consumed`."""
        return self.steps.state(consumed)

    def identity_at(self, consumed: int) -> dict[str, Any]:
        """What defines the order of all samples before `consumed`, whole: a state has long lists of
        it folded into digests.
        """
        return self.steps.identity(consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the sample after the last that was handed out.

        Raises StateError for another order, and changes nothing.
        """
        saved = parse_state(state)
        steps = self.steps.in_lanes(saved.lanes).resumed(saved.consumed, saved.offset)
        share = read_share(state, self.step_samples)
        reached = saved.consumed if share is None else share.reached
        steps.begin(saved.consumed)
        identity = steps.identity(saved.consumed, reached)
        saved.check(identity, names_in_identity(steps.samples.config, steps.split))
        size = steps.schedule.size_at(saved.consumed)
        if saved.offset >= size:
            raise StateError(
                f"the state stops {saved.offset} samples into a global batch, "
                f"which now has {size}; resume with the former global_batch_size, "
                "or from a state saved between global batches"
            )
        steps.check_position(saved.consumed)
        steps.check_ahead(saved.consumed)
        if share is not None:
            share = replace(share, start=saved.consumed, origin=steps.schedule.origin)
            if _reached(share, steps) != reached:
                raise StateError(
                    "skip_samples or num_samples changed within what this worker's state counts; "
                    "restore them"
                )
        self._put(saved.consumed, steps, share)

    def _put(self, consumed: int, steps: MicroSteps, share: Share | None = None) -> None:
        """Go somewhere. A worker process goes there by itself: what it is given is only its own."""
        worker = torch.utils.data.get_worker_info()
        origin = steps.schedule.origin
        self.steps = steps
        self._consumed = consumed
        self._placed = consumed
        if worker is None:
            self._places.put(consumed, steps.lanes, origin)
            return
        self._places.adopt_lanes(steps.lanes)
        alone = Share(start=consumed, origin=origin, worker=worker.id, workers=worker.num_workers)
        self._loaded = share or alone

    def _worker_state(self) -> dict[str, Any]:
        """The state of one worker: where the iteration began, and how many micro-batches this
        worker gave.
        """
        share = self._share
        if share is None:
            raise StateError("a worker has a state once its iteration began")
        steps = self.steps.from_origin(share.origin)
        reached = _reached(share, steps)
        state = make_state(
            steps.identity(share.start, reached), share.start, steps.schedule.offset_at(share.start)
        )
        return state | write_share(replace(share, reached=reached), self.step_samples)


def _reached(share: Share, steps: MicroSteps) -> int:
    """The position after the last micro-batch that a worker gave."""
    if not share.batches:
        return share.start
    last_batch = share.next_batch - share.workers
    return steps.after(share.start, last_batch + 1)
