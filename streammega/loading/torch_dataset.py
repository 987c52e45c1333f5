"""A torch IterableDataset of the micro-batches of one rank, with a position that can be saved."""

from __future__ import annotations

import copy
import operator
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from streammega.config import ORDERS, DataConfig
from streammega.config.validate import whole_number
from streammega.errors import ConfigError, StateError
from streammega.errors.logs import get_logger
from streammega.loading.iterate import Iteration, iterate_batches
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.ranks import check_alone, data_parallel
from streammega.loading.ready import Form
from streammega.loading.worker_state import IterationStart, IterationState
from streammega.loading.worker_transfer import FieldsOfPhase, WorkerBatch
from streammega.order.schedule import resolve_phase_starts, training_schedule
from streammega.order.split import split_fractions
from streammega.order.state import parse_state
from streammega.samples.field_inputs import Batch, check_mask_is_there
from streammega.samples.open import open_source
from streammega.samples.segments import split_data
from streammega.samples.source import SampleSource, check_fields

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = get_logger(__name__)

AHEAD = 2
"""Micro-batches made ahead when a dataset is iterated without a loader."""
Last = Literal["drop", "pad"]
"""What happens to samples at the end that fill no global batch."""


def check_last(last: Last, config: DataConfig, split: str) -> None:
    """Raise ConfigError if a last batch cannot be padded: there is none where samples repeat or go on.
    Or if batches have no mask that says what is padding.
    """
    if last == "drop":
        return
    data = split_data(config, split)
    is_all = split == "train" and split_fractions(data.shares)[0] == 1
    reads_once = not ORDERS[config.order].is_shuffled and data.num_samples is None
    if not (is_all and reads_once and len(data.prefixes) == 1):
        raise ConfigError(
            "last='pad' hands out every sample of one dataset once: give order='sequential', a blend of "
            "one dataset, split='1,0,0' (which is split 'train' of the loader), and no num_samples"
        )
    check_mask_is_there(config.field_names)


class StreamingDataset(torch.utils.data.IterableDataset[Batch]):
    """Yields micro-batches: {"tokens", "labels", "position_ids"} int64 and "loss_mask" float32, all
    [micro_batch_size, S].

    In the stream order a batch has only tokens and labels, if every label has a loss and positions
    only count up (see `fields` of DataConfig). With reset_attention_mask it also has "cu_seqlens", the
    bounds of documents, int32 [micro_batch_size, most documents + 1]. With "dataset_id" in `fields` it has
    this too, int64 [micro_batch_size], and with `columns` each of these. With inter_document_masking it
    has "cu_seqlens" and "max_seqlen", which that setting describes.

    Every rank reads its part of the same global batches, whatever dp_size is. An iteration reads the
    data once, in whole global batches. Every iteration has the same samples in the same order.

    **Where an iteration begins**: the first iteration after `load_state_dict` or `seek` begins at
    their sample. All others begin at the first sample, even after one that was left in the middle. An
    iteration that begins at the end of the data yields nothing and logs a warning. An iterator raises
    StateError after the dataset was moved, and after it ended by an error.

    **Workers**: under a torch DataLoader (`batch_size=None`) all of this holds for any number of
    workers, forked, spawned or persistent. Worker 0 reads everything and the others yield nothing. So
    one worker is enough, and a transform that wraps the dataset runs in that one process. torchdata's
    StatefulDataLoader keeps the state, which fits any number of ranks and workers. With a plain
    DataLoader only the caller knows how many batches were taken: call `state_dict(num_batches)`.

    Args:
        config: the data and its order.
        split: "train", "valid" or "test".
        micro_batch_size: samples of one batch of this rank.
        global_batch_size: samples of one optimizer step over all ranks; a multiple of
            micro_batch_size * dp_size.
        dp_rank, dp_size: this data-parallel rank. dp_size=1 alone: this process reads everything, even
            if there are others. Without both, it must be the only process of its job.
        mesh: in place of both, a DeviceMesh. Its dimension "dp", or its only one, gives rank and size.
        rampup_batch_size: (start, increment, samples): the global batch grows from start to
            global_batch_size, in steps of increment, over this many samples.
        last: what happens to samples at the end that fill no global batch. "drop": they are not read.
            "pad": rows without tokens or loss complete it, so that every sample is read once on any
            number of ranks. That is for one dataset in the sequential order, all of it.

    Raises ConfigError before any token is read, StorageError and FormatError for the files.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        split: str = "train",
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        rampup_batch_size: tuple[int, int, int] | None = None,
        last: Last = "drop",
    ) -> None:
        if not isinstance(config, DataConfig):
            raise ConfigError(f"config is a {type(config).__name__}; it must be a DataConfig")
        if last not in get_args(Last):
            raise ConfigError(f"last is {last!r}; it takes 'drop' or 'pad'")
        self._is_rank_said = (dp_rank, dp_size, mesh) != (None, None, None)
        dp_rank, dp_size = data_parallel(dp_rank, dp_size, mesh)
        if split == "train":  # the others have no phases
            config = resolve_phase_starts(config, global_batch_size, rampup_batch_size)
        schedule = training_schedule(config, split, global_batch_size, rampup_batch_size)
        self.split = split
        self.micro_batch_size = whole_number("micro_batch_size", micro_batch_size, 1)
        self.global_batch_size = schedule.global_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        schedule.check(self.micro_batch_size, dp_rank, dp_size)
        self.steps = MicroSteps(
            split=split,
            samples=open_source(config, split, self.global_batch_size),
            schedule=schedule,
            micro_batch_size=self.micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            pads_last=last == "pad",
        )
        self.config = self.samples.config
        self.steps.check()
        check_fields(self.samples.segments[0])
        check_last(last, self.config, split)
        self._consumed = 0  # the cursor
        self._last_seek = 0  # where `seek` or `load_state_dict` last moved the cursor
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
        """Samples handed out so far, over all ranks: the next global sample."""
        return self._consumed

    @property
    def is_where_it_was_put(self) -> bool:
        """Whether no batch was handed out since the last `seek` or `load_state_dict`, or at all."""
        return self._consumed == self._last_seek

    def tokens_before(self, sample: int) -> int:
        """Tokens of all global samples before this one. Phases may change their length."""
        return self.steps.tokens_before(operator.index(sample))

    def sequence_length_at(self, sample: int) -> int:
        """Tokens of a global sample. Phases may change it."""
        return self.steps.sequence_length_at(sample)

    def sample_ids(self, consumed: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Global sample ids of this rank's micro-batch in the micro-step at `consumed`, int64 [...,
        micro_batch_size].
        """
        return self.steps.sample_ids(consumed)

    def dataset_ids(self, consumed: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """The dataset of each sample of this rank's micro-batch in the micro-step at `consumed`.

        int64 [..., micro_batch_size], numbered as "dataset_id" of batches. It reads no token.
        """
        return self.steps.dataset_ids(consumed)

    def batch(self, consumed: int) -> Batch:
        """Read this rank's micro-batch in the micro-step at `consumed`, which alone determines it."""
        return self.steps.batch(consumed)

    def positions(self) -> Iterator[int]:
        """The micro-steps from the cursor on, as values of `consumed`, without excluded samples."""
        return self.steps.positions(self._consumed)

    def advance(self, consumed: int) -> None:
        """Note that the micro-step at `consumed` was handed out."""
        self._consumed = operator.index(consumed) + self.step_samples

    def check_ranks(self) -> None:
        """Raise ConfigError if nothing was said of ranks, and a process group came since then."""
        if not self._is_rank_said:
            check_alone()

    def __iter__(self) -> Iterator[Batch]:
        self.check_ranks()
        worker = torch.utils.data.get_worker_info()
        if worker is not None and worker.id > 0:
            nothing: tuple[Batch, ...] = ()  # worker 0 reads; torch skips workers without batches
            return Iteration(batch for batch in nothing)
        begun = self._state.begin()
        # A worker may have copied this dataset before `seek` set the position: memory is shared.
        self.steps = self.steps.with_lanes(begun.lanes).from_origin(begun.origin)
        self._consumed = begun.start
        return Iteration(self._batches(self.steps, begun))

    def _batches(self, steps: MicroSteps, begun: IterationStart) -> Generator[Any, None, None]:
        if begun.start and begun.start == steps.num_samples:
            log.warning(
                "%s: the position that was set, sample %d, is the end of the data, "
                "so this iteration gives nothing; the next begins at the first sample",
                self.split,
                begun.start,
            )
        in_worker = torch.utils.data.get_worker_info() is not None
        form: Form = "both" if in_worker else "fields"
        batches = iterate_batches(
            steps, begun.start, lambda: self._state.check(begun), ahead=AHEAD, form=form
        )
        phase: MicroSteps | None = None
        with closing(batches):
            for consumed, batch, engine in batches:
                output = batch
                if in_worker:
                    if phase is not engine.steps:
                        phase = engine.steps
                        fields = FieldsOfPhase.of(phase)
                    made, samples = batch
                    output = WorkerBatch(made, samples, fields)
                if self._state.is_latest(begun):
                    self.advance(consumed)
                yield output
                del batch, output  # the caller alone decides when their memory is free
        self._state.check(begun)
        if not in_worker and self._state.is_latest(begun):
            self.steps = self.steps.from_origin(0)  # the next iteration begins at the first sample
            self._consumed = 0
            self._state.finish()

    def __copy__(self) -> StreamingDataset:
        """As deepcopy: with a position of its own."""
        return copy.deepcopy(self)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing, because all iterations are alike. DataLoaders that accelerate prepared call it.

        Raises ConfigError if the dataset is for one of several ranks: such a DataLoader would divide
        the part of one rank among all ranks.
        """
        if self.dp_size > 1:
            raise ConfigError(
                f"this dataset reads only the part of data-parallel rank {self.dp_rank} of "
                f"{self.dp_size}, but accelerate prepared its DataLoader and would divide that part "
                "among all ranks: no rank would read the other samples. Use "
                "streammega.integrations.accelerate.StreamDataLoader, which prepare does not change. "
                "Or iterate a StreamLoader(dp_rank=, dp_size=) that is not prepared, with "
                "accelerator.register_for_checkpointing(loader). "
                "Or give the dataset dp_size=1"
            )

    def seek(self, consumed_samples: int) -> None:
        """Continue at a global sample.

        From the start of its global batch there must be whole micro-steps of these ranks.
        """
        consumed_samples = operator.index(consumed_samples)
        steps = self.steps if consumed_samples else self.steps.from_origin(0)
        steps.check_position(consumed_samples)
        steps.check_ahead(consumed_samples)
        self._move_to(consumed_samples, steps)

    @property
    def generation(self) -> int:
        """How often `seek` and `load_state_dict` have moved the dataset."""
        return self._state.generation

    def state_dict(self, num_batches: int | None = None, *others: Any) -> dict[str, Any]:
        """The position at which to go on, the same on every rank: {"version", "consumed_samples",
        "batch_offset", "global_batch_size", "order", "fingerprint"}.

        It counts the batches that were handed out. After an iteration has ended, the position is the
        first sample. Under a DataLoader with workers only the caller knows how many were handed out:
        pass `num_batches`, the micro-batches taken from the latest iteration. In a worker, where
        torchdata's StatefulDataLoader calls it, it counts the batches of the worker.

        Raises StateError for other arguments, which Composer passes.
        """
        if others:
            arguments = ", ".join(map(repr, (num_batches, *others)))
            raise StateError(
                f"state_dict({arguments}) is how Composer calls it, which counts samples, but this "
                f"dataset counts micro-batches. Wrap it for Composer in an IterableDataset without "
                f"state_dict, and save state_dict(num_batches=...) in a callback"
            )
        if torch.utils.data.get_worker_info() is not None:
            return self.state_at(self._consumed)
        if num_batches is not None:
            start, origin = self._state.running
            steps = self.steps.from_origin(origin)
            return steps.state(steps.after(start, operator.index(num_batches)))
        if self._state.in_worker:
            raise StateError(
                "a worker process reads ahead of the batches that the DataLoader handed out, "
                "so this process does not know the position. "
                "Pass state_dict(num_batches=<micro-batches taken from this iteration>), "
                "save the state of torchdata's StatefulDataLoader, "
                "or use StreamLoader, which needs no workers"
            )
        return self.state_at(self._consumed)

    def state_at(self, consumed: int) -> dict[str, Any]:
        """The state of a run that has handed out all samples before `consumed`."""
        return self.steps.state(operator.index(consumed))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last sample that was handed out before the state was saved.

        Raises StateError for a state of another order, and then changes nothing.
        """
        saved = parse_state(state)
        steps = self.steps.with_lanes(saved.lanes).from_origin(saved.consumed - saved.offset)
        identity = steps.samples.identity(saved.consumed)
        data = split_data(steps.config, steps.split)
        saved.check(identity, data.names_in_identity())
        size = steps.schedule.size_at(saved.consumed)
        if saved.offset >= size:
            raise StateError(
                f"the state stops {saved.offset} samples into a global batch, "
                f"which now has {size}; resume with the former global_batch_size, "
                "or from a state saved between global batches"
            )
        steps.check_position(saved.consumed)
        steps.check_ahead(saved.consumed)
        self._move_to(saved.consumed, steps)

    def _move_to(self, consumed: int, steps: MicroSteps) -> None:
        """Move the cursor to `consumed`. steps: the micro-steps to read from there on."""
        self.steps = steps
        self._consumed = consumed
        self._last_seek = consumed
        worker = torch.utils.data.get_worker_info()
        if worker is None or worker.id == 0:  # the others read nothing
            self._state.put(consumed, steps.lanes, steps.schedule.origin)
