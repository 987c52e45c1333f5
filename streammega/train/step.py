"""One step of the optimizer on one rank: micro-batches, gradients, totals, and the record of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streammega.errors import GradientError, StorageError
from streammega.gradients.loss_scale import LossScale
from streammega.loading import StreamLoader
from streammega.parallel import RankBatches, Ranks
from streammega.samples.fields import Batch
from streammega.samples.source import dataset_of_samples
from streammega.train.batch_hash import hash_over_ranks
from streammega.train.checkpoints.checkpointer import Checkpointer
from streammega.train.config import RunConfig, TrainConfig
from streammega.train.losses import Losses, StepTotals, add_over_ranks
from streammega.train.parallel_model import ParallelModel
from streammega.train.signals import StopRequests
from streammega.train.watch import Watch


class StepBatches(Iterator[Batch]):
    """So many micro-batches of one step; StopIteration after them.

    The data ends with a whole step: `empty` says that there is no further one, before anything was
    computed.

    Args:
        batches: what they are taken from.
        count: micro-batches of the step.
        watch: is told what this rank does.
        step: its number, for the watch.
        keep: hold on to them, for who looks at them afterwards; otherwise each is gone with its
            computation.
    """

    def __init__(
        self, batches: RankBatches, count: int, watch: Watch, step: int, *, keep: bool
    ) -> None:
        self._batches = batches
        self._left = count
        self._watch = watch
        self._step = step
        self.count = count
        self.kept: list[Batch] | None = [] if keep else None
        self.consumed: list[int] = []
        """The cursor after each."""
        self.waited = 0.0
        """Seconds in which this rank had nothing to do."""
        self._first = self._take()
        self.empty = self._first is None

    def __next__(self) -> Batch:
        if not self._left:
            raise StopIteration
        batch = self._first
        self._first = None
        if batch is None:
            batch = self._take()
        if batch is None:
            raise RuntimeError("the data ended within a step, of which it has only whole ones")
        self._left -= 1
        if self.kept is not None:
            self.kept.append(batch)
        self._watch.phase("computing")
        return batch

    def _take(self) -> Batch | None:
        self._watch.phase("waiting for data", self._step)
        began = time.perf_counter()
        batch = next(self._batches, None)
        self.waited += time.perf_counter() - began
        if batch is not None:
            self.consumed.append(self._batches.consumed_samples)
        return batch


class DataEnded(Exception):
    """There is no further global batch."""


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """What a step needs, of a run on one rank. `take` makes one.

    requests: what signals have asked of this rank; the totals of a step say whether of any.
    sources: names of the datasets of the blend.
    """

    config: RunConfig
    ranks: Ranks
    device: torch.device
    watch: Watch
    loader: StreamLoader
    batches: RankBatches
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    scale: LossScale | None
    checkpoints: Checkpointer
    requests: StopRequests
    sources: Sequence[str]

    def take(self, step: int) -> tuple[dict[str, Any], StepTotals]:
        """The step after `step` others: its record, and what all ranks know of it.

        Raises DataEnded where there is no data for it, GradientError for a loss or gradients that
        are not finite.
        """
        train = self.config.train
        dataset = self.loader.dataset
        began = time.perf_counter()
        schedule = dataset.schedule
        data_ranks = self.ranks.layout.dp
        first_sample = self._next_sample()
        set_learning_rate(self.optimizer, train, step, self._decay.done_before(first_sample))
        num_samples = schedule.size_at(first_sample)
        micro_steps = schedule.micro_batches_at(first_sample, train.micro_batch_size, data_ranks)
        batches = self._batches_of(step, micro_steps)
        # of all its samples: a phase begins where a step does
        length = dataset.sequence_length_at(first_sample)
        num_tokens = num_samples * length
        # Losses are summed over tokens: in fp16 a sum of so many would overflow, so they are
        # divided by all tokens of the global batch before backward.
        divided_by = float(num_tokens)
        scale = self.scale.value / divided_by if self.scale else 1.0
        losses = self.model.forward_backward(batches, micro_steps, length, scale)
        self.watch.phase("reducing")
        starts = np.array(batches.consumed, np.int64) - dataset.step_samples
        sample_ids = dataset.sample_ids(starts).reshape(-1)
        grad_norm = self._reduce_and_step(step, losses, divided_by)
        totals = self._totals(step, losses, sample_ids)
        tokens_per_s = num_tokens / (time.perf_counter() - began)
        stop_sample = self.batches.consumed_samples
        samples = range(stop_sample - num_samples, stop_sample)
        record = self._record(step, samples, totals, grad_norm, batches.waited, tokens_per_s)
        if train.hash_batches:
            record["batch_hash"] = hash_over_ranks(
                batches.kept or [],
                sample_ids.tolist(),
                samples,
                self.model.bounds_of(length),
                self.ranks,
                self.device,
            )
        return record, totals

    @cached_property
    def _decay(self) -> Decay:
        return Decay(self.config, self.loader.dataset.tokens_before)

    def _next_sample(self) -> int:
        """The first sample of the next global batch: behind the cursor, and what is skipped there.

        0 where there is none: `_batches_of` says so.
        """
        parts = self.loader.dataset.parts(self.batches.consumed_samples)
        next_part = next(parts, None)
        return 0 if next_part is None else next_part.start

    def _batches_of(self, step: int, micro_steps: int) -> StepBatches:
        """The micro-batches of a step on this rank. Raises DataEnded where there is none."""
        batches = StepBatches(
            self.batches,
            micro_steps,
            self.watch,
            step + 1,
            keep=self.config.train.hash_batches,
        )
        if batches.empty:
            raise DataEnded(
                f"the data ends at sample {self.batches.consumed_samples}, after step {step} "
                f"of {self.config.train.iters}: data.skip_samples passed over the rest; "
                f"raise data.num_samples"
            )
        return batches

    def _record(
        self,
        step: int,
        samples: range,
        totals: StepTotals,
        grad_norm: float,
        data_wait_s: float,
        tokens_per_s: float,
    ) -> dict[str, Any]:
        """What metrics keep of the step that was taken."""
        record: dict[str, Any] = {
            "step": step + 1,
            "samples": [samples.start, samples.stop],
            "tokens": self.loader.dataset.tokens_before(samples.stop),
            "ranks": self.ranks.layout.world_size,
            "loss": totals.loss,
            "grad_norm": grad_norm,
            "lr": self.optimizer.param_groups[0]["lr"],
            "data_wait_s": data_wait_s,
            "tokens_per_s": tokens_per_s,
        }
        if self.scale is not None:
            record["loss_scale"] = self.scale.value
        if totals.loss_of_source:
            record["source_loss"] = totals.loss_of_source
        return record

    def _reduce_and_step(self, step: int, losses: Losses, divided_by: float) -> float:
        """Normalise gradients by the unmasked tokens of the global batch, clip and step.

        Returns the norm before clipping; inf where fp16 overflowed, and no step was taken.
        """
        model = self.model
        model.finish_gradients(losses.tokens.sum())
        is_good = self.scale is None or self.scale.unscale(
            model.gradients(), self.device, divided_by
        )
        norm = model.clip_grad_norm_(self._largest_norm) if is_good else math.inf
        # A save may still be copying the values that change now.
        self.checkpoints.before_change()
        if is_good:
            self.optimizer.step()
        model.zero_grad()
        if not is_good:
            return math.inf
        if self.device.type == "cuda":
            # All of the step is under way, and the host would wait for it here.
            self.batches.prepare()
        return self._finite(step, float(norm))

    @property
    def _largest_norm(self) -> float:
        """To which gradients are clipped."""
        clip_grad = self.config.train.clip_grad
        return clip_grad if clip_grad > 0 else math.inf

    def _finite(self, step: int, norm: float) -> float:
        """The norm of a step that was taken; looked at here, where the host waits for it anyway,
        and before anything is saved.
        """
        if not math.isfinite(norm):
            raise GradientError(
                f"the gradient norm of step {step + 1} is {norm}, though no rank's gradients "
                f"were: their sum is too large; resume from the last checkpoint with a lower "
                f"learning rate, or skip this step's samples"
            )
        return norm

    def _totals(self, step: int, losses: Losses, sample_ids: NDArray[np.int64]) -> StepTotals:
        """What all ranks know of the step.

        Raises StorageError where a save has failed on one, GradientError for a loss that is not
        finite.
        """
        counts_losses = self.model.counts_losses
        by_source = counts_losses and len(self.sources) > 1
        totals = add_over_ranks(
            self.requests.first,
            self.checkpoints.failed,
            losses if counts_losses else None,
            self._sources_of(sample_ids) if by_source else None,
            self.sources,
            self.ranks,
            self.device,
        )
        # Known to all ranks now: none goes on into a collective that another one has left.
        if totals.failed_save:
            self.checkpoints.wait()
            raise StorageError("a checkpoint could not be written: another rank says why")
        if not math.isfinite(totals.loss):
            raise GradientError(
                f"the loss of step {step + 1} is {totals.loss}: the run has diverged; resume from "
                f"the last checkpoint with a lower learning rate, or skip this step's samples"
            )
        return totals

    def _sources_of(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The dataset of the blend that each sample is of."""
        samples = self.loader.dataset.samples
        return dataset_of_samples(samples, samples.locate(sample_ids))


def set_learning_rate(
    optimizer: Any, train: TrainConfig, step: int, done: float | None = None
) -> None:
    """Linear warmup to lr, then down to the lowest rate at `iters`: a function of the position, so a
    resume needs no state. done: as in `learning_rate`.
    """
    lr = learning_rate(train, step, done)
    for group in optimizer.param_groups:
        group["lr"] = lr


def learning_rate(train: TrainConfig, step: int, done: float | None = None) -> float:
    """The rate of the step after `step` others. done: the part of the decay that is behind it; None:
    that of the steps.
    """
    warmup = train.warmup_iters
    if step < warmup:
        # From the first step on more than 0: a step by nothing would be a wasted one.
        return train.lr * (step + 1) / warmup
    decay_steps = max(1, train.iters - warmup)
    if done is None:
        done = min((step - warmup) / decay_steps, 1.0)
    lowest = train.lowest_lr
    return lowest + (train.lr - lowest) * _left(train.decay, done)


def _left(decay: str, done: float) -> float:
    """The part of the way from the lowest rate to lr that is left, of a decay that is so far."""
    if decay == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    if decay == "linear":
        return 1 - done
    return 1.0


class Decay:
    """How far the decay of the learning rate is, by samples or tokens.

    Args: config: of the run. tokens_before: the tokens of all samples before one.
    """

    def __init__(self, config: RunConfig, tokens_before: Callable[[int], int]) -> None:
        self._train = config.train
        self._schedule = config.schedule
        by_tokens = config.train.decay_by == "tokens"
        self._before: Callable[[int], int] = tokens_before if by_tokens else int

    def done_before(self, sample: int) -> float | None:
        """The part of it before a sample; None: it goes by steps."""
        if self._train.decay_by == "steps":
            return None
        first, last = self._ends
        done = (self._amount_before(sample) - first) / max(1, last - first)
        return min(max(done, 0.0), 1.0)

    @cached_property
    def _ends(self) -> tuple[int, int]:
        """Where the decay begins and ends, in what it goes by."""
        first_step = self._schedule.samples_of_step(self._train.warmup_iters + 1)
        last_step = self._schedule.samples_of_step(self._train.iters)
        return self._amount_before(first_step.start), self._amount_before(last_step.stop)

    def _amount_before(self, sample: int) -> int:
        """Samples or tokens that steps take before a sample: none of what is skipped."""
        amount = self._before(sample)
        for start, stop in self._schedule.skipped:
            amount -= self._before(min(stop, sample)) - self._before(min(start, sample))
        return amount
