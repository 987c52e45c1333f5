"""The training loop: iterations over global batches, from the loader to the optimizer, on any
layout of ranks.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from streammega.errors import ConfigError, GradientError, StorageError
from streammega.gradients.checks import clip_finite_grads
from streammega.gradients.data_parallel import BucketedDataParallel, finish_grad_sync
from streammega.gradients.loss_scale import LossScale
from streammega.gradients.sharded_optimizer import ShardedOptimizer
from streammega.parallel import RankBatches, Ranks
from streammega.parallel.batches import read_factor
from streammega.parallel.groups import WORLD
from streammega.parallel.layout import ParallelLayout
from streammega.samples.fields import Batch
from streammega.train.agreement import check_that_ranks_agree, facts_of
from streammega.train.batch_hash import global_batch_hash, sample_digests
from streammega.train.checkpoints.checkpoints import Checkpoints
from streammega.train.checkpoints.open import open_place
from streammega.train.checkpoints.resume import rewinds_of
from streammega.train.config import RunConfig
from streammega.train.feed import StepBatches
from streammega.train.metrics import MetricsLog, finite
from streammega.train.numerics import set_numerics
from streammega.train.out_dir import OutDir
from streammega.train.parallel import Losses, ParallelModel
from streammega.train.schedule import set_learning_rate
from streammega.train.splits import has_valid, open_split, source_names, validation_sets
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
        set_numerics(config.train)
        parallel = config.parallel
        world = dist.get_world_size() if dist.is_initialized() else 1
        layout = ParallelLayout.of_world(
            world, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, order=parallel.order
        )
        _check_pipeline(config, layout)
        self.ranks = Ranks(
            layout,
            timedelta(
                seconds=config.train.timeout + (NCCL_MARGIN if device.type == "cuda" else 0.0)
            ),
        )
        self.watch = watch or Watch(None, self.ranks.rank, world)
        self.step = 0
        self.every_stage = config.data.reset_position_ids or config.data.reset_attention_mask
        self.loader = open_split(config, "train", self.ranks)
        self.batches = RankBatches(self.loader, self.ranks, device, every_stage=self.every_stage)
        check_that_ranks_agree(facts_of(config, self.loader), self.ranks, device)
        self.sources = source_names(config.data)
        self.model = ParallelModel(config, self.ranks, device)
        self.optimizer = self.model.make_optimizer()
        self.scale = LossScale() if config.train.dtype == "float16" else None
        self._try_validation()
        self.out: OutDir | None = None
        self.checkpoints = Checkpoints(
            open_place(config.train.out_dir, config.data.storage),
            config.train.keep_checkpoints,
            config.train.timeout,
            before_publish=self._upload_records,
        )
        self.rewinds: list[int] = []
        self.metrics: MetricsLog | None = None
        self.ended: str | None = None
        """Why the run stopped before its last step, where the data ended."""
        self.requests = StopRequests()
        """What signals have asked of this rank."""
        self._stop_signal = signal.SIGTERM
        if self.ranks.rank == 0:
            train = config.train
            self.out = OutDir(train.out_dir, config.data.storage)
            self.metrics = MetricsLog(
                self.out.folder, train.log_interval, train.iters, tensorboard=train.tensorboard
            )
            factor = read_factor(layout, self.loader.dataset.config, every_stage=self.every_stage)
            often = "once" if factor == 1 else f"{factor} times"
            log.info("%s; each token is read %s, over all ranks", layout, often)

    def resume(self) -> None:
        """Load the newest sound checkpoint (with train.rewind, the newest up to there): weights,
        optimizer, and the cursor.
        """
        rewind = self.config.train.rewind
        position = self.checkpoints.resume(
            self.model,
            self.optimizer,
            lambda found: self.batches.load_state_dict(found["data"]),
            rewind,
        )
        if position is None:
            return
        if self.scale is not None and "loss_scale" in position:
            self.scale.load_state_dict(position["loss_scale"])
        self.step = position["step"]
        self.rewinds = sorted({*rewinds_of(position), *([] if rewind is None else [rewind])})
        if self.ranks.rank == 0:
            log.info("resumed from step %d, at sample %d", self.step, self.batches.consumed_samples)
        if self.metrics and "record" in position and not self.metrics.has(self.step):
            self.metrics.write(position["record"])  # the run was killed while it evaluated

    def run(self) -> None:
        """Train until `iters`, saving and evaluating at their intervals and at the end.

        Raises Terminated after SIGTERM or Ctrl-C, and KeyboardInterrupt where a second Ctrl-C wants
        the end at once.
        """
        train = self.config.train
        if self.step >= train.iters and self.ranks.rank == 0:
            log.info(
                "step %d: train.iters = %d is reached, and nothing left to train; raise it to go on",
                self.step,
                train.iters,
            )
        with heard(self.requests, says=self.ranks.rank == 0), self.watch.gentle():
            while self.step < train.iters:
                try:
                    record, stop = self.train_step()
                except DataEnded as ended:
                    self.ended = str(ended)
                    log.warning("%s", ended)
                    if train.save_interval:
                        self.save()
                    break
                self.step += 1
                last = self.step == train.iters
                evaluates = bool(train.eval_iters and train.eval_interval) and (
                    last or self.step % train.eval_interval == 0
                )
                if stop and not last:
                    self._stop_here(record)
                due = train.save_interval and self.step % train.save_interval == 0
                # first, so that what fails in an evaluation costs no steps
                if due or (train.save_interval and last):
                    self.save(
                        background=train.async_save and not last,
                        record=record if evaluates else None,
                    )
                try:
                    if evaluates:
                        record |= self.evaluate_all()
                finally:
                    if self.metrics:
                        self.metrics.write(record)
        self.close()

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
        position: dict[str, Any] = {"step": self.step, "data": self.batches.state_dict()}
        if self.rewinds:
            # a restart with one of these settings goes on from here
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
        start = next(dataset.parts(self.batches.consumed_samples), range(0)).start
        set_learning_rate(self.optimizer, train, self.step)
        size = dataset.schedule.size_at(start)
        micro_steps = dataset.schedule.micro_batches_at(
            start, train.micro_batch_size, self.ranks.layout.dp
        )
        batches = self._take(micro_steps)
        tokens = float(size * self.config.data.sequence_length)
        losses = self.model.forward_backward(
            batches, micro_steps, self.scale.value / tokens if self.scale else 1.0
        )
        self.watch.phase("reducing")
        ids = dataset.sample_ids(
            np.array(batches.consumed, np.int64) - dataset.step_samples
        ).reshape(-1)
        norm = self._reduce_and_step(losses, tokens)
        totals = self._totals(losses, ids)
        record: dict[str, Any] = {
            "step": self.step + 1,
            "samples": [self.batches.consumed_samples - size, self.batches.consumed_samples],
            "ranks": self.ranks.layout.world_size,
            "loss": totals["loss"],
            "grad_norm": norm,
            "lr": self.optimizer.param_groups[0]["lr"],
            "data_wait_s": batches.waited,
            "tokens_per_s": size * self.config.data.sequence_length / (time.perf_counter() - began),
        }
        if self.scale is not None:
            record["loss_scale"] = self.scale.value
        if totals["sources"]:
            record["source_loss"] = totals["sources"]
        if train.hash_batches:
            record["batch_hash"] = self._hash(batches.kept or [], ids, record["samples"][0], size)
        return record, totals["stop"]

    def _stop_here(self, record: dict[str, Any]) -> None:
        """End the run as a signal asked: when the save under way is whole, and with another one
        unless that is recent enough.
        """
        if self.metrics:
            self.metrics.write(record)
        self.watch.phase("saving", self.step)
        self.checkpoints.wait()
        saved = self.checkpoints.recent(RECENT_SECONDS)
        if saved is None:
            self.save()
        self.close()
        how = (
            "interrupted"
            if self._stop_signal == signal.SIGINT
            else f"stopped by {self._stop_signal.name}"
        )
        what = ", which is saved"
        if saved not in (None, self.step):
            what = f"; step {saved}, of less than {RECENT_SECONDS:.0f} s before, is saved"
        raise Terminated(
            f"{how} after step {self.step}{what} in {self.config.train.out_dir}; the same command goes on from there",
            self._stop_signal,
        )

    def _try_validation(self) -> None:
        """Open what will be evaluated: what is wrong with it should not be found after hours of
        training.
        """
        train = self.config.train
        if not (train.eval_iters and train.eval_interval):
            return
        sets = list(validation_sets(self.config).values())
        if has_valid(self.config.data):
            sets.append(self.config)
        for own in sets:
            open_split(own, "valid", self.ranks).close()

    def _upload_records(self) -> None:
        if self.out:
            self.out.upload()

    def evaluate(self) -> float:
        """Mean loss over eval_iters global batches of the valid split, always the same ones from
        its start.
        """
        return self._evaluate(self.config)

    def evaluate_all(self) -> dict[str, Any]:
        """{"valid_loss": ...}, and with validation sets of their own {"valid_loss_of": {name:
        ...}}.
        """
        record: dict[str, Any] = {}
        if has_valid(self.config.data):
            record["valid_loss"] = self.evaluate()
        sets = validation_sets(self.config)
        if sets:
            record["valid_loss_of"] = {name: self._evaluate(own) for name, own in sets.items()}
        return record

    def _evaluate(self, config: RunConfig) -> float:
        total = torch.zeros(2, device=self.device, dtype=torch.float64)
        train = config.train
        with open_split(config, "valid", self.ranks) as loader:
            batches = RankBatches(loader, self.ranks, self.device, every_stage=self.every_stage)
            micro_steps = train.global_batch_size // loader.dataset.step_samples
            for _ in range(train.eval_iters):
                self.watch.phase("evaluating")
                taken = [
                    batch for _ in range(micro_steps) if (batch := next(batches, None)) is not None
                ]
                if len(taken) < micro_steps:
                    break
                losses = self.model.evaluate(taken)
                if self._contributes:
                    total += torch.stack((losses.loss.double().sum(), losses.tokens.double().sum()))
            batches.close()
        self.ranks.all_reduce(total, WORLD)
        return float(total[0] / total[1].clamp(min=1))

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
                f"the data ends at sample {self.batches.consumed_samples}, after step {self.step} of "
                f"{self.config.train.iters}: data.skip_samples passed over the rest; raise data.num_samples"
            )
        return batches

    def _reduce_and_step(self, losses: Losses, divided_by: float) -> float:
        """Normalise gradients by the unmasked tokens of the global batch, clip and step; returns
        the norm before clipping.
        """
        tokens = losses.tokens.sum()
        limit = self.config.train.clip_grad or math.inf
        optimizer = self.optimizer
        if isinstance(self.model.wrapped[0], BucketedDataParallel):
            models = [
                model for model in self.model.wrapped if isinstance(model, BucketedDataParallel)
            ]
            finish_grad_sync(models, tokens)  # none on all but the last stage
            if isinstance(optimizer, ShardedOptimizer):
                if self.scale is not None and not self.scale.unscale(optimizer, divided_by):
                    return math.inf  # fp16 overflowed: no step, and a smaller scale
                norm = optimizer.clip_grad_norm_(limit)
            else:
                norm = self.model.clip_grad_norm_(limit)
        else:
            total = self.ranks.all_reduce(tokens.clone(), "dp-cp").clamp(min=1.0)
            grads = [p.grad for p in self.model.wrapped[0].parameters() if p.grad is not None]
            torch._foreach_mul_(grads, self.ranks.size("dp-cp") / total)  # DDP has averaged sums
            norm = clip_finite_grads(self.model.wrapped[0], limit)
        self.checkpoints.before_change()
        optimizer.step()
        for model in self.model.wrapped:
            model.zero_grad()
        if self.device.type == "cuda":
            # all of the step is under way, and the host would wait for it here
            self.batches.prepare()
        return self._finite(float(norm))

    def _finite(self, norm: float) -> float:
        """The norm of a step that was taken; looked at here, where the host waits for it anyway,
        and before anything is saved.
        """
        if not math.isfinite(norm):
            raise GradientError(
                f"the gradient norm of step {self.step + 1} is {norm}, though no rank's gradients were: their sum is too large; "
                f"resume from the last checkpoint with a lower learning rate, or skip this step's samples"
            )
        return norm

    @property
    def _contributes(self) -> bool:
        """Whether the losses of this rank are those that count: of tensor-parallel copies one."""
        return self.model.is_last and self.ranks.at["tp"] == 0

    def _totals(self, losses: Losses, ids: NDArray[np.int64]) -> dict[str, Any]:
        """Means over the global batch, by source too, and whether to stop: one small collective a
        step.
        """
        count = len(self.sources)
        total = torch.zeros(5 + 2 * count, dtype=torch.float64)
        total[0] = self.requests.first is not None
        total[1] = self.requests.first == signal.SIGINT
        total[2] = self.checkpoints.failed
        if self._contributes:
            loss = losses.loss.double().cpu()
            tokens = losses.tokens.double().cpu()
            total[3:5] = torch.stack((loss.sum(), tokens.sum()))
            if count > 1:
                located = self.loader.dataset.samples.locate(ids)
                source = torch.from_numpy(located.dataset[located.row_splits[:-1]].astype("int64"))
                total[5 : 5 + count].index_add_(0, source, loss)
                total[5 + count :].index_add_(0, source, tokens)
        total = total.to(self.device)
        self.ranks.all_reduce(total, WORLD)
        stops, interrupts, failed_saves, loss_sum, token_sum, *by_source = total.tolist()
        # known to all ranks now: none goes on into a collective that another one has left
        if failed_saves:
            self.checkpoints.wait()
            raise StorageError("a checkpoint could not be written: another rank says why")
        # one for all ranks, whichever were signalled
        self._stop_signal = signal.SIGINT if interrupts else signal.SIGTERM
        sums = by_source[:count]
        counts = by_source[count:]
        sources = (
            {name: s / n for name, s, n in zip(self.sources, sums, counts, strict=True) if n}
            if count > 1
            else {}
        )
        return {"stop": stops > 0, "loss": loss_sum / max(token_sum, 1.0), "sources": sources}

    def _hash(self, batches: list[Batch], ids: NDArray[np.int64], start: int, size: int) -> str:
        """The hash of the global batch that all ranks together were given.

        Tensor-parallel copies must agree.
        """
        digests = torch.zeros(size, dtype=torch.int64)
        places = torch.cat([torch.arange(a, b) for a, b in self.model.bounds])
        rows = [
            digest
            for batch in batches
            for digest in (sample_digests(batch, places) if batch else [])
        ]
        for sample, digest in zip(ids.tolist(), rows, strict=bool(rows)):
            digests[sample - start] += digest - 2**64 if digest >= 2**63 else digest
        digests = digests.to(self.device)
        low = digests.clone()
        high = digests.clone()
        self.ranks.all_reduce(low, "tp", dist.ReduceOp.MIN)
        self.ranks.all_reduce(high, "tp", dist.ReduceOp.MAX)
        if not torch.equal(low, high):
            raise RuntimeError(
                f"tensor-parallel ranks were given different tokens in step {self.step + 1}"
            )
        if self.ranks.at["tp"] > 0:
            digests.zero_()
        self.ranks.all_reduce(digests, WORLD)
        return global_batch_hash({start + n: digest for n, digest in enumerate(digests.tolist())})


def _check_pipeline(config: RunConfig, layout: ParallelLayout) -> None:
    """Raise ConfigError for steps of too few micro-batches to keep the pipeline's stages busy."""
    micro = config.train.micro_batch_size * layout.dp
    rounds = config.parallel.virtual_stages > 1
    for _, size in config.train.schedule.stages:
        if size // micro < layout.pp or (rounds and size // micro % layout.pp):
            raise ConfigError(
                f"a step of {size} samples has {size // micro} micro-batches on each rank; parallel.pp {layout.pp} needs "
                f"{'a multiple of' if rounds else 'at least'} {layout.pp}: change train.global_batch_size or micro_batch_size"
            )
