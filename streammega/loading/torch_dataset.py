"""Micro-batches of one rank as a torch IterableDataset, and its position."""

from __future__ import annotations

import logging
import operator
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.errors import ConfigError, StateError
from streammega.loading.engine import Engine
from streammega.loading.iterate import Iteration, iterate_batches
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.worker_state import IterationStart, IterationState
from streammega.loading.worker_transfer import (
    WorkerBatch,
    batch_of_ids,
    ids_tell_fields,
    is_sent_unseen,
)
from streammega.order.schedule import resolve_phase_starts, training_schedule
from streammega.order.state import parse_state
from streammega.samples.fields import Batch
from streammega.samples.loss_masks import SampleJoins
from streammega.samples.open import open_source
from streammega.samples.segments import names_in_identity
from streammega.samples.source import SampleSource, check_fields, dataset_of_samples

log = logging.getLogger(__name__)

AHEAD = 2
"""Micro-batches made ahead when a dataset is iterated without a loader."""


class StreamingDataset(torch.utils.data.IterableDataset[Batch]):
    """Yields micro-batches: {"tokens", "labels", "position_ids"} int64 and "loss_mask" float32,
    [micro_batch_size, S]; in the stream order only tokens and labels, if every label has a loss and
    positions only count up (see `fields` of DataConfig). With reset_attention_mask also "cu_seqlens", the bounds of documents,
    int32 [micro_batch_size, most documents + 1]; with return_dataset_ids "dataset_id", int64
    [micro_batch_size]; with inter_document_masking "cu_seqlens" and
    "max_seqlen" as it says.

    Every rank sees its part of the same global batches, whatever dp_size is. An iteration is one
    pass over the data (whole global batches only), and every pass has the same samples in the same
    order.

    **Where an iteration begins**: where `load_state_dict` or `seek` put the dataset, if it is the
    first one since, and at the first sample otherwise, also after one that was left in the middle.
    An iteration from the end of the data gives nothing, with a warning. One that
    is held while the dataset is put elsewhere, or that ended by an error, raises StateError.

    **Workers**: under a torch DataLoader (`batch_size=None`) all of this holds for any number of
    workers, forked, spawned or persistent. Worker 0 reads everything and the others give nothing,
    so one worker is enough, and a transform that wraps the dataset runs in that one process.
    torchdata's StatefulDataLoader keeps the state, which fits any number of ranks and workers.
    With a plain DataLoader only the caller knows what was taken: `state_dict(num_batches)`.

    Args:
        config: what is read.
        split: "train", "valid" or "test".
        micro_batch_size: samples of one batch of this rank.
        global_batch_size: samples of one optimizer step over all ranks; a multiple of
            micro_batch_size * dp_size.
        dp_rank, dp_size: this data-parallel rank.
        rampup_batch_size: (start, increment, samples): the global batch grows from start to global_batch_size
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
        rampup_batch_size: tuple[int, int, int] | None = None,
    ) -> None:
        if split == "train":  # the others have no phases
            config = resolve_phase_starts(config, global_batch_size, rampup_batch_size)
        schedule = training_schedule(config, split, global_batch_size, rampup_batch_size)
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
        check_fields(self.samples)
        self._consumed = 0  # the cursor
        self._placed = 0  # where `seek` or `load_state_dict` put it last
        self._state = IterationState()

    def __len__(self) -> int:
        """Micro-batches of this rank from the first sample to the last.

        TypeError for a stream without an end.
        """
        if self.num_samples is None:
            raise TypeError("the stream has no end; num_samples in the config gives it one")
        return sum(len(part) for part in self.steps.parts(0))

    @property
    def samples(self) -> SampleSource:
        """The samples of the split, in their order."""
        return self.steps.samples

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
            self.steps.advance_to(int(np.max(consumed)))
        extents = self.samples.locate(sample_ids.reshape(-1))
        return dataset_of_samples(self.samples, extents).reshape(sample_ids.shape)

    def sample_joins(self, consumed: int) -> SampleJoins:
        """Where samples of this rank's micro-batch in the micro-step at `consumed` go over from one
        run of tokens to another: arrays `sample`, its row, and `column` of the first token of the
        other run. None but after a phase that changes the length or lanes. Of the order alone:
        nothing is read.
        """
        return self.steps.sample_joins(consumed)

    def batch(self, consumed: int) -> Batch:
        """This rank's micro-batch in the micro-step at `consumed`: a pure function of it."""
        return self.steps.batch(consumed)

    def positions(self) -> Iterator[int]:
        """The micro-steps that are left, as values of `consumed`, without those
        that are excluded.
        """
        return self.steps.positions(self._consumed)

    def advance(self, consumed: int) -> None:
        """Note that the micro-step at `consumed` was handed out."""
        self._consumed = consumed + self.step_samples

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.id > 0:
            nothing: tuple[Batch, ...] = ()  # worker 0 reads; torch passes over the others
            return Iteration(batch for batch in nothing)
        begun = self._state.begin()
        self.steps = self.steps.with_lanes(begun.lanes).from_origin(begun.origin)
        self._consumed = begun.start
        return Iteration(self._batches(self.steps, begun, is_sent_unseen(self)))

    def _batches(
        self, steps: MicroSteps, begun: IterationStart, unseen: bool
    ) -> Generator[Batch, None, None]:
        """unseen: no program looks at batches before they leave this worker."""
        if begun.start and begun.start == steps.num_samples:
            log.warning(
                "%s: the position that was set, sample %d, is the end of the data, "
                "so this iteration gives nothing; the next begins at the first sample",
                self.split,
                begun.start,
            )
        in_worker = torch.utils.data.get_worker_info() is not None

        def make_engine(steps: MicroSteps, positions: Iterator[int], start: int) -> Engine:
            """What reads one phase."""
            as_ids = unseen and ids_tell_fields(steps)
            return Engine(steps, positions, AHEAD, start=start, ids_only=as_ids)

        batches = iterate_batches(steps, begun.start, make_engine, lambda: self._state.check(begun))
        with closing(batches):
            for consumed, batch, engine in batches:
                given: Any = batch
                if engine.ids_only:
                    given = batch_of_ids(batch, engine.steps)
                elif in_worker:
                    given = WorkerBatch(batch)
                if self._state.is_latest(begun):
                    self.advance(consumed)
                yield given
                del batch, given  # their memory is free as soon as the caller lets go
        self._state.check(begun)
        if not in_worker and self._state.is_latest(begun):
            self.steps = self.steps.from_origin(0)  # the position is now that of the next iteration
            self._consumed = 0
            self._state.finish()

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
        steps.attach(consumed_samples)
        steps.check_position(consumed_samples)
        steps.check_ahead(consumed_samples)
        self._put(consumed_samples, steps)

    @property
    def generation(self) -> int:
        """How often `seek` and `load_state_dict` have put the dataset somewhere."""
        return self._state.generation

    def state_dict(self, num_batches: int | None = None, *others: Any) -> dict[str, Any]:
        """Where to go on, the same on every rank: {"version", "consumed_samples", "batch_offset",
        "order", "fingerprint"}.

        Counts what was handed out; after the last batch of an iteration that has ended, the
        position is the first sample. Under a DataLoader with workers only the caller knows what was
        handed out: pass `num_batches`, the micro-batches taken from the iteration that began last.
        In a worker, where torchdata's StatefulDataLoader asks, it counts what the worker gave.

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
            return self.state_at(self._consumed)
        if num_batches is not None:
            start, origin = self._state.running
            steps = self.steps.from_origin(origin)
            return steps.state(steps.after(start, num_batches))
        if self._state.in_worker:
            raise StateError(
                "a worker process reads ahead of what the DataLoader handed out, "
                "so the position is not known here; "
                "pass state_dict(num_batches=<micro-batches taken from this iteration>), "
                "save the state of torchdata's StatefulDataLoader, "
                "or use StreamLoader, which needs no workers"
            )
        return self.state_at(self._consumed)

    def state_at(self, consumed: int) -> dict[str, Any]:
        """The state of a run that has handed out all samples before `consumed`."""
        return self.steps.state(consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the sample after the last that was handed out.

        Raises StateError for another order, and changes nothing.
        """
        saved = parse_state(state)
        steps = self.steps.with_lanes(saved.lanes).resumed(saved.consumed, saved.offset)
        steps.attach(saved.consumed)
        identity = steps.identity(saved.consumed)
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
        self._put(saved.consumed, steps)

    def _put(self, consumed: int, steps: MicroSteps) -> None:
        """Go somewhere."""
        self.steps = steps
        self._consumed = consumed
        self._placed = consumed
        worker = torch.utils.data.get_worker_info()
        if worker is None or worker.id == 0:  # the others read nothing
            self._state.put(consumed, steps.lanes, steps.schedule.origin)
