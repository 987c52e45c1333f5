"""The training loop: iterations over global batches, from the loader to the optimizer, on any
layout of ranks.

The order of a step, and why:

    take and compute    each micro-batch is taken while the one before is computed (`feed`)
    reduce and step     gradients are summed over ranks. Whether their norm is finite is looked at
                        after the optimizer's step, where the host waits for the device anyway
    totals              one collective: losses, and whether any rank was asked to stop. It is the
                        same on all ranks, so that all of them stop, or save, after the same step
    stop                with a checkpoint, and no evaluation: what stops a run does not wait
    save                before the evaluation, so that what fails in one costs no steps
    evaluate
    write the record    last, since it has what the evaluation found. A checkpoint keeps the record
                        until then, for a run that is killed meanwhile
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from streammega.errors import ConfigError, GradientError, StorageError
from streammega.gradients.checks import clip_finite_grads
from streammega.gradients.data_parallel import BucketedDataParallel, finish_grad_sync
from streammega.gradients.loss_scale import LossScale
from streammega.gradients.sharded_optimizer import ShardedOptimizer
from streammega.order.cursor import keep_readable, with_readable
from streammega.order.step_numbers import StepNumbers
from streammega.parallel import RankBatches, Ranks
from streammega.parallel.batches import read_factor
from streammega.parallel.layout import ParallelLayout
from streammega.samples.source import dataset_of_samples
from streammega.samples.source_names import source_names
from streammega.train.agreement import check_that_ranks_agree, facts_of
from streammega.train.batch_hash import hash_over_ranks
from streammega.train.checkpoints.checkpoints import Checkpoints
from streammega.train.checkpoints.open import open_place
from streammega.train.checkpoints.resume import rewinds_of
from streammega.train.config import RunConfig
from streammega.train.evaluation import check_valid_splits, evaluate_all
from streammega.train.feed import StepBatches
from streammega.train.losses import Losses
from streammega.train.metrics import MetricsLog, finite
from streammega.train.numerics import set_numerics
from streammega.train.out_dir import OutDir
from streammega.train.parallel_model import ParallelModel
from streammega.train.schedule import set_learning_rate
from streammega.train.splits import open_split
from streammega.train.step_totals import StepTotals, add_over_ranks
from streammega.train.stopping import StopRequests, Terminated, heard
from streammega.train.watch import Watch

log = logging.getLogger(__name__)

NCCL_MARGIN = 60.0
"""Seconds: NCCL's own watchdog aborts the process without saying which rank was missing, so it must
come after the watch.
"""
RECENT_SECONDS = 30.0
"""A checkpoint of so few seconds ago is enough when a run is stopped: torchrun leaves it as long
before it kills it.
"""


class DataEnded(Exception):
    """There is no further global batch."""


class Trainer:
    """One run on one rank: model, optimizer, loader and position. `run` trains to the end.

    Every rank of the world makes one. Raises ConfigError for a layout that the world or the model
    does not fit.
    """

    def __init__(self, config: RunConfig, device: torch.device, watch: Watch | None = None) -> None:
        self.config = config
        self.device = device
        train = config.train
        # First: cuBLAS looks at its variable once, at the first product of matrices.
        set_numerics(train)
        self.ranks = _make_ranks(config, device)
        world = self.ranks.layout.world_size
        self.watch = watch or Watch(None, self.ranks.rank, world)
        self.step = 0
        self.loader = open_split(config, "train", self.ranks)
        self.batches = RankBatches(self.loader, self.ranks, device, every_stage=config.every_stage)
        check_that_ranks_agree(facts_of(config, self.loader), self.ranks, device)
        self.sources = source_names(config.data)
        self.model = ParallelModel(config, self.ranks, device)
        self.optimizer = self.model.make_optimizer()
        self.scale = LossScale() if train.dtype == "float16" else None
        check_valid_splits(config, self.ranks)
        self.out: OutDir | None = None
        self.checkpoints = Checkpoints(
            open_place(train.out_dir, config.data.storage),
            train.keep_checkpoints,
            train.timeout,
            before_publish=self._upload_records,
        )
        self.rewinds: list[int] = []
        """The values of train.rewind by which this run, and those it goes on from, have rewound."""
        self.metrics: MetricsLog | None = None
        self.ended: str | None = None
        """Why the run stopped before its last step, where the data ended."""
        self.requests = StopRequests()
        """What signals have asked of this rank."""
        self._stop_signal = signal.SIGTERM
        """What the run was asked to stop by: one for all ranks, whichever were signalled."""
        if self.ranks.rank == 0:
            # After the checkpoints: they hold the place, and no other job writes its metrics there.
            self._open_records()

    def _open_records(self) -> None:
        """On the first rank: where metrics go."""
        train = self.config.train
        self.out = OutDir(train.out_dir, self.config.data.storage)
        self.metrics = MetricsLog(
            self.out.folder, train.log_interval, train.iters, tensorboard=train.tensorboard
        )
        layout = self.ranks.layout
        factor = read_factor(
            layout, self.loader.dataset.config, every_stage=self.config.every_stage
        )
        often = "once" if factor == 1 else f"{factor} times"
        log.info("%s; each token is read %s, over all ranks", layout, often)

    def resume(self) -> None:
        """Load the newest sound checkpoint (with train.rewind, the newest up to there): weights,
        optimizer, and the cursor.
        """
        rewind = self.config.train.rewind

        def accept(position: dict[str, Any]) -> None:
            readable = position.get("data_identity")
            self.batches.load_state_dict(with_readable(position["data"], readable))

        position = self.checkpoints.resume(self.model, self.optimizer, accept, rewind)
        if position is None:
            if self.metrics is not None and self.metrics.last_step:
                log.warning(
                    "%s has no checkpoint of the %d steps in its metrics.jsonl: the run begins anew",
                    self.config.train.out_dir,
                    self.metrics.last_step,
                )
            return
        self.step = position["step"]
        self.rewinds = _with(rewinds_of(position), rewind)
        if self.scale is not None and "loss_scale" in position:
            self.scale.load_state_dict(position["loss_scale"])
        metrics = self.metrics
        if metrics is None:  # on all ranks but the first
            return
        log.info("resumed from step %d, at sample %d", self.step, self.batches.consumed_samples)
        self._warn_of_moved_phases(position)
        if "record" in position and not metrics.has(self.step):
            # The run was killed while it evaluated.
            metrics.write(position["record"])

    def _warn_of_moved_phases(self, position: dict[str, Any]) -> None:
        """Say so where phases ahead begin elsewhere than when the checkpoint was saved, since steps
        are counted by other batch sizes.
        """
        consumed = self.batches.consumed_samples
        ahead = self._phases_ahead(consumed)
        before = position.get("phases_ahead", ahead)
        if ahead == before or self._step_numbers.samples(max(self.step, 1)).stop == consumed:
            return
        log.warning(
            "by the batch sizes of this config step %d does not end at sample %d, as it did: phases "
            "that were to begin at samples %s begin at %s now; where first_step says it, give them "
            "first_sample instead",
            self.step,
            consumed,
            before,
            ahead,
        )

    def _phases_ahead(self, consumed: int) -> list[int]:
        """The first samples of phases that have not begun."""
        firsts = [phase.first_sample for phase in self.config.data.phases]
        return [first for first in firsts if first >= consumed]

    def run(self) -> None:
        """Train until `iters`, saving and evaluating at their intervals and at the end.

        Raises Terminated after SIGTERM or Ctrl-C, and KeyboardInterrupt where a second Ctrl-C wants
        the end at once.
        """
        iters = self.config.train.iters
        is_first_rank = self.ranks.rank == 0
        if self.step >= iters and is_first_rank:
            log.info(
                "step %d: train.iters = %d is reached, and nothing left to train; "
                "raise it to go on",
                self.step,
                iters,
            )
        elif not self.config.train.save_interval and is_first_rank:
            log.warning(
                "train.save_interval is 0: no checkpoint is kept, of the last step neither, but after "
                "SIGTERM or Ctrl-C; if it is killed or fails, the run begins anew"
            )
        with heard(self.requests, says=is_first_rank), self.watch.gentle():
            while self.step < iters:
                try:
                    record, stop = self.train_step()
                except DataEnded as ended:
                    self._end_with_the_data(str(ended))
                    break
                self.step += 1
                self._after_step(record, stop)
        self.close()

    def _after_step(self, record: dict[str, Any], stop: bool) -> None:
        """Stop, save, evaluate and write the record, as far as it is time to: in this order, for
        which see above.
        """
        train = self.config.train
        is_last = self.step == train.iters
        if stop and not is_last:
            self._stop_here(record)
        evaluates = train.eval_iters > 0 and self._is_due(train.eval_interval)
        if self._is_due(train.save_interval):
            self.save(
                background=train.async_save and not is_last,
                record=record if evaluates else None,
            )
        try:
            if evaluates:
                record |= self.evaluate_all()
        finally:
            if self.metrics:
                self.metrics.write(record)

    def _is_due(self, interval: int) -> bool:
        """Whether a step is one of an interval, or the last. 0: never."""
        if interval == 0:
            return False
        return self.step % interval == 0 or self.step == self.config.train.iters

    def _end_with_the_data(self, why: str) -> None:
        self.ended = why
        log.warning("%s", why)
        if self.config.train.save_interval:
            self.save()

    def flush(self) -> None:
        """Write out what metrics are kept back, alone: also for a run that ends by an error."""
        if self.metrics:
            self.metrics.close()

    def close(self) -> None:
        """Finish what is being written, and end reading ahead."""
        self.watch.phase("ending")
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.finish_param_sync()
        self.checkpoints.wait()
        self.batches.close()
        self.loader.close()
        if self.metrics:
            self.metrics.close()
        if self.out:
            self.out.close()
        self.checkpoints.close()

    def save(self, *, background: bool = False, record: dict[str, Any] | None = None) -> None:
        """One checkpoint at the current step; the data position is what was handed out.

        record: of this step, where it is not in the metrics yet.
        """
        self.watch.phase("saving", self.step)
        data = self.batches.state_dict()
        position: dict[str, Any] = {"step": self.step, "data": data}
        identity = self.loader.dataset.identity_at(data["consumed_samples"])
        readable = keep_readable(data, identity)
        if readable is not None:
            position["data_identity"] = readable
        phases_ahead = self._phases_ahead(data["consumed_samples"])
        if phases_ahead:
            position["phases_ahead"] = phases_ahead
        if self.rewinds:
            # A restart with one of these settings goes on from here.
            position["rewinds"] = self.rewinds
        if record is not None:
            position["record"] = finite(record)
        if self.scale is not None:
            position["loss_scale"] = self.scale.state_dict()
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.finish_param_sync()
        self.checkpoints.save(
            self.step, self.model, self.optimizer, position, background=background
        )

    def train_step(self) -> tuple[dict[str, Any], bool]:
        """One optimizer step: its record, and whether some rank was asked to stop."""
        train = self.config.train
        dataset = self.loader.dataset
        began = time.perf_counter()
        schedule = dataset.schedule
        data_ranks = self.ranks.layout.dp
        first_sample = self._next_sample()
        set_learning_rate(self.optimizer, train, self.step, self._decayed(first_sample))
        num_samples = schedule.size_at(first_sample)
        micro_steps = schedule.micro_batches_at(first_sample, train.micro_batch_size, data_ranks)
        batches = self._take(micro_steps)
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
        grad_norm = self._reduce_and_step(losses, divided_by)
        totals = self._totals(losses, sample_ids)
        tokens_per_s = num_tokens / (time.perf_counter() - began)
        stop_sample = self.batches.consumed_samples
        samples = range(stop_sample - num_samples, stop_sample)
        record = self._record(samples, totals, grad_norm, batches.waited, tokens_per_s)
        if train.hash_batches:
            record["batch_hash"] = hash_over_ranks(
                batches.kept or [],
                sample_ids.tolist(),
                samples,
                self.model.bounds_of(length),
                self.ranks,
                self.device,
            )
        return record, totals.stop

    def _record(
        self,
        samples: range,
        totals: StepTotals,
        grad_norm: float,
        data_wait_s: float,
        tokens_per_s: float,
    ) -> dict[str, Any]:
        """What metrics keep of the step that was taken."""
        record: dict[str, Any] = {
            "step": self.step + 1,
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

    def _decayed(self, sample: int) -> float | None:
        """The part of the decay of the learning rate before a sample; None: it goes by steps."""
        if self.config.train.decay_by == "steps":
            return None
        first, last = self._decay
        done = (self._amount_before(sample) - first) / max(1, last - first)
        return min(max(done, 0.0), 1.0)

    @cached_property
    def _decay(self) -> tuple[int, int]:
        """Where the decay begins and ends, in what it goes by."""
        train = self.config.train
        first_step = self._step_numbers.samples(train.warmup_iters + 1)
        last_step = self._step_numbers.samples(train.iters)
        return self._amount_before(first_step.start), self._amount_before(last_step.stop)

    def _amount_before(self, sample: int) -> int:
        """Samples or tokens that steps take before a sample: none of what is skipped."""
        by_tokens = self.config.train.decay_by == "tokens"
        before: Callable[[int], int] = self.loader.dataset.tokens_before if by_tokens else int
        amount = before(sample)
        for start, stop in self._step_numbers.skipped:
            amount -= before(min(stop, sample)) - before(min(start, sample))
        return amount

    @property
    def _step_numbers(self) -> StepNumbers:
        """The steps of a run from sample 0 on with the batch sizes of the config."""
        return StepNumbers(schedule=self.config.schedule, skips=self.config.data.skip_samples)

    def _next_sample(self) -> int:
        """The first sample of the next global batch: behind the cursor, and what is skipped there.

        0 where there is none: `_take` says so.
        """
        parts = self.loader.dataset.parts(self.batches.consumed_samples)
        next_part = next(parts, None)
        return 0 if next_part is None else next_part.start

    def _stop_here(self, record: dict[str, Any]) -> None:
        """End the run as a signal asked: when the save under way is whole, and with another one
        unless that is recent enough.
        """
        if self.metrics:
            self.metrics.write(record)
        self.watch.phase("saving", self.step)
        self.checkpoints.wait()
        saved_step = self.checkpoints.recent(RECENT_SECONDS)
        if saved_step is None:
            self.save()
        self.close()
        how = f"stopped by {self._stop_signal.name}"
        if self._stop_signal == signal.SIGINT:
            how = "interrupted"
        if saved_step is None or saved_step == self.step:
            what = ", which is saved"
        else:
            what = f"; step {saved_step}, of less than {RECENT_SECONDS:.0f} s before, is saved"
        raise Terminated(
            f"{how} after step {self.step}{what} in {self.config.train.out_dir}; "
            f"the same command goes on from there",
            self._stop_signal,
        )

    def _upload_records(self) -> None:
        if self.out:
            self.out.upload()

    def evaluate_all(self) -> dict[str, Any]:
        """The losses of the valid split and of validation sets: see `evaluation`."""
        return evaluate_all(self.config, self.model, lambda: self.watch.phase("evaluating"))

    def _take(self, micro_steps: int) -> StepBatches:
        """The micro-batches of a step on this rank. Raises DataEnded where there is none."""
        batches = StepBatches(
            self.batches,
            micro_steps,
            self.watch,
            self.step + 1,
            keep=self.config.train.hash_batches,
        )
        if batches.empty:
            raise DataEnded(
                f"the data ends at sample {self.batches.consumed_samples}, after step {self.step} "
                f"of {self.config.train.iters}: data.skip_samples passed over the rest; "
                f"raise data.num_samples"
            )
        return batches

    def _reduce_and_step(self, losses: Losses, divided_by: float) -> float:
        """Normalise gradients by the unmasked tokens of the global batch, clip and step.

        Returns the norm before clipping; inf where fp16 overflowed, and no step was taken.
        """
        tokens = losses.tokens.sum()
        if isinstance(self.model.wrapped[0], BucketedDataParallel):
            norm = self._reduce_buckets(tokens, divided_by)
        else:
            norm = self._normalise_torch_ddp(tokens)
        if norm is None:
            return math.inf
        # A save may still be copying the values that change now.
        self.checkpoints.before_change()
        self.optimizer.step()
        for model in self.model.wrapped:
            model.zero_grad()
        if self.device.type == "cuda":
            # All of the step is under way, and the host would wait for it here.
            self.batches.prepare()
        return self._finite(float(norm))

    def _reduce_buckets(self, tokens: Tensor, divided_by: float) -> Tensor | float | None:
        """The norm of gradients that are reduced, divided by tokens and clipped.

        tokens: unmasked ones of this rank; none on all but the last stage. None: fp16 overflowed;
        the scale is smaller now.
        """
        models = [model for model in self.model.wrapped if isinstance(model, BucketedDataParallel)]
        finish_grad_sync(models, tokens)
        limit = self._largest_norm
        optimizer = self.optimizer
        if not isinstance(optimizer, ShardedOptimizer):
            return self.model.clip_grad_norm_(limit)
        if self.scale is not None and not self.scale.unscale(optimizer, divided_by):
            return None
        return optimizer.clip_grad_norm_(limit)

    def _normalise_torch_ddp(self, tokens: Tensor) -> Tensor | float:
        """The same of torch's DDP, which has reduced already."""
        model = self.model.wrapped[0]
        total_tokens = self.ranks.all_reduce(tokens.clone(), "dp-cp").clamp(min=1.0)
        grads: list[Tensor] = []
        for parameter in model.parameters():
            if parameter.grad is not None:
                grads.append(parameter.grad)
        # DDP has averaged over ranks what is to be a sum.
        factor = self.ranks.size("dp-cp") / total_tokens
        torch._foreach_mul_(grads, factor)
        return clip_finite_grads(model, self._largest_norm)

    @property
    def _largest_norm(self) -> float:
        """To which gradients are clipped."""
        clip_grad = self.config.train.clip_grad
        return clip_grad if clip_grad > 0 else math.inf

    def _finite(self, norm: float) -> float:
        """The norm of a step that was taken; looked at here, where the host waits for it anyway,
        and before anything is saved.
        """
        if not math.isfinite(norm):
            raise GradientError(
                f"the gradient norm of step {self.step + 1} is {norm}, though no rank's gradients "
                f"were: their sum is too large; resume from the last checkpoint with a lower "
                f"learning rate, or skip this step's samples"
            )
        return norm

    def _totals(self, losses: Losses, sample_ids: NDArray[np.int64]) -> StepTotals:
        """What all ranks know of the step. Raises StorageError where a save has failed on one."""
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
        self._stop_signal = signal.SIGINT if totals.interrupted else signal.SIGTERM
        return totals

    def _sources_of(self, sample_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The dataset of the blend that each sample is of."""
        samples = self.loader.dataset.samples
        return dataset_of_samples(samples, samples.locate(sample_ids))


def _with(rewinds: list[int], rewind: int | None) -> list[int]:
    """All values of train.rewind so far, each once."""
    values = set(rewinds)
    if rewind is not None:
        values.add(rewind)
    return sorted(values)


def _make_ranks(config: RunConfig, device: torch.device) -> Ranks:
    """The ranks of a run's layout, in the world that there is. Raises ConfigError."""
    parallel = config.parallel
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout = ParallelLayout.of_world(
        world, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, order=parallel.order
    )
    _check_pipeline(config, layout)
    margin = NCCL_MARGIN if device.type == "cuda" else 0.0
    return Ranks(layout, timedelta(seconds=config.train.timeout + margin))


def _check_pipeline(config: RunConfig, layout: ParallelLayout) -> None:
    """Raise ConfigError for steps of too few micro-batches to keep the pipeline's stages busy."""
    step_samples = config.train.micro_batch_size * layout.dp
    is_interleaved = config.parallel.virtual_stages > 1
    for _, batch_samples in config.schedule.stages:
        micro_batches = batch_samples // step_samples
        too_few = micro_batches < layout.pp
        # The interleaved schedule goes through its stages in rounds of pp micro-batches.
        uneven = is_interleaved and micro_batches % layout.pp != 0
        if too_few or uneven:
            needs = "a multiple of" if is_interleaved else "at least"
            raise ConfigError(
                f"a step of {batch_samples} samples has {micro_batches} micro-batches on each "
                f"rank; parallel.pp {layout.pp} needs {needs} {layout.pp}: "
                f"change train.global_batch_size or micro_batch_size"
            )
