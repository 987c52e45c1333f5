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
from typing import Any

import torch

from streammega.gradients.loss_scale import LossScale
from streammega.parallel import RankBatches
from streammega.parallel.batches import read_factor
from streammega.parallel.layout import DIMENSIONS
from streammega.samples.segments import source_names
from streammega.train.agreement import check_that_ranks_agree, facts_of
from streammega.train.checkpoints.checkpointer import Checkpointer, rewinds_of
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.config import RunConfig
from streammega.train.devices import make_ranks, set_numerics
from streammega.train.evaluation import check_valid_splits, evaluate_all
from streammega.train.metrics import MetricsLog
from streammega.train.out_dir import OutDir
from streammega.train.parallel_model import ParallelModel
from streammega.train.position import (
    check_model,
    position_of,
    warn_of_moved_phases,
    with_rewind,
)
from streammega.train.signals import StopRequests, Terminated, heard
from streammega.train.splits import open_split
from streammega.train.step import DataEnded, TrainStep
from streammega.train.watch import Watch

log = logging.getLogger(__name__)

RECENT_SECONDS = 30.0
"""A checkpoint of so few seconds ago is enough when a run is stopped: torchrun leaves it as long
before it kills it.
"""


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
        self.ranks = make_ranks(config, device)
        world = self.ranks.layout.world_size
        self.watch = watch or Watch(None, self.ranks.rank, world)
        self.step = 0
        self.saved_step = 0
        """Of the last checkpoint that this run saved or resumed from."""
        self.loader = open_split(config, "train", self.ranks)
        self.batches = RankBatches(self.loader, self.ranks, device, every_stage=config.every_stage)
        check_that_ranks_agree(facts_of(config, self.loader), self.ranks, device)
        self.sources = source_names(config.data)
        self.model = ParallelModel(config, self.ranks, device)
        self.optimizer = self.model.make_optimizer()
        self.scale = LossScale() if train.dtype == "float16" else None
        check_valid_splits(config, self.ranks)
        self.out: OutDir | None = None
        self.checkpoints = Checkpointer(
            CheckpointStore.open(train.out_dir, config.data.storage),
            device,
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
        self._step = self._make_step()
        self._stop_signal = signal.SIGTERM
        """What the run was asked to stop by: one for all ranks, whichever were signalled."""
        if self.ranks.rank == 0:
            # After the checkpoints: they hold the place, and no other job writes its metrics there.
            self._open_records()

    def _make_step(self) -> TrainStep:
        return TrainStep(
            config=self.config,
            ranks=self.ranks,
            device=self.device,
            watch=self.watch,
            loader=self.loader,
            batches=self.batches,
            model=self.model,
            optimizer=self.optimizer,
            scale=self.scale,
            checkpoints=self.checkpoints,
            requests=self.requests,
            sources=self.sources,
        )

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
        sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in DIMENSIONS)
        log.info(
            "ranks: %d (%s); each token is read %s, over all ranks",
            layout.world_size,
            sizes,
            often,
        )

    def resume(self) -> None:
        """Load the newest sound checkpoint (with train.rewind, the newest up to there): weights,
        optimizer, and the cursor.
        """
        rewind = self.config.train.rewind

        def accept(position: dict[str, Any]) -> None:
            check_model(self.config, position)
            self.batches.load_state_dict(position["data"])

        position = self.checkpoints.resume(self.model, self.optimizer, accept, rewind)
        if position is None:
            if self.metrics is not None and self.metrics.last_step:
                log.warning(
                    "%s has no checkpoint of the %d steps in its metrics.jsonl: the run begins anew",
                    self.config.train.out_dir,
                    self.metrics.last_step,
                )
            return
        self.step = self.saved_step = position["step"]
        self.rewinds = with_rewind(rewinds_of(position), rewind)
        if self.scale is not None and "loss_scale" in position:
            self.scale.load_state_dict(position["loss_scale"])
        metrics = self.metrics
        if metrics is None:  # on all ranks but the first
            return
        log.info("resumed from step %d, at sample %d", self.step, self.batches.consumed_samples)
        warn_of_moved_phases(self.config, position, self.batches.consumed_samples)
        if "record" in position and not metrics.has(self.step):
            # The run was killed while it evaluated.
            metrics.write(position["record"])

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
        if self._is_save_due(record):
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

    def _is_save_due(self, record: dict[str, Any]) -> bool:
        """Whether the interval of saves has passed, or the run ends.

        A step that fp16 did not take is not saved but as the last: it would take the place of an
        older checkpoint, with weights that are saved already. The next step is saved instead.
        """
        interval = self.config.train.save_interval
        if interval == 0 or self.step == self.config.train.iters:
            return interval > 0
        was_taken = math.isfinite(record["grad_norm"])
        return was_taken and self.step // interval > self.saved_step // interval

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
        self.saved_step = self.step
        position = position_of(
            self.config,
            self.step,
            self.batches.state_dict(),
            rewinds=self.rewinds,
            record=record,
            scale=self.scale,
        )
        self.checkpoints.save(
            self.step, self.model, self.optimizer, position, background=background
        )

    def train_step(self) -> tuple[dict[str, Any], bool]:
        """One optimizer step: its record, and whether some rank was asked to stop."""
        record, totals = self._step.take(self.step)
        self._stop_signal = signal.SIGINT if totals.interrupted else signal.SIGTERM
        return record, totals.stop

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
