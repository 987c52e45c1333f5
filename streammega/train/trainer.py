"""The loop. `Trainer.run` is all of it, and `Trainer.train_step` one step, on any layout of ranks.

The order of a step, and why:

    forward, backward   each micro-batch is taken while the one before is computed; a pipeline takes all
                        of them first
    reduce and step     gradients are summed over ranks. Their norm is checked after the optimizer's
                        step, where the host waits for the device
    totals              one collective: losses, and whether a signal asks any rank to stop. All ranks
                        have the same totals, so all of them stop, or save, after the same step
    stop                with a checkpoint and without an evaluation, since a signal does not wait long
    save                before the evaluation, so that no steps are lost if that fails
    evaluate
    write the record    last, since it has the results of the evaluation. Until then the checkpoint
                        keeps it: a run that is killed meanwhile evaluates when it is resumed
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from streammega.config.validate import finite
from streammega.errors import (
    ConfigError,
    GradientError,
    StateError,
    StorageError,
    StreammegaError,
)
from streammega.errors.logs import get_logger
from streammega.loading.source_losses import add_losses_by_source
from streammega.parallel import RankBatches, Ranks
from streammega.parallel.groups import WORLD
from streammega.parallel.layout import DIMENSIONS, ParallelLayout
from streammega.parallel.rank_batches import read_factor
from streammega.samples.fields import Batch
from streammega.samples.pinned import read_blend
from streammega.samples.segments import source_names
from streammega.train.checkpoints.checkpointer import Checkpointer
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.config import RunConfig
from streammega.train.config_check import check_ranks_agree, hash_over_ranks, settings_of
from streammega.train.devices import DeviceTimer, metrics_port_of, process_info, set_numerics
from streammega.train.losses import Losses
from streammega.train.optimizer import LossScale, learning_rate, make_optimizer
from streammega.train.parallel_model import ParallelModel
from streammega.train.run_log import RunLog, was_evaluated
from streammega.train.signals import StopRequests, Terminated
from streammega.train.splits import has_valid, open_split, validation_sets
from streammega.train.stages import check_layout, check_vocab_parts

log = get_logger(__name__)

LEARNING_SETTINGS = (
    *("train_iters", "global_batch_size", "rampup_batch_size", "lr", "warmup_iters"),
    *("lr_decay_style", "weight_decay", "clip_grad", "dtype"),
)
"""Settings of [train] that change what a run learns from a checkpoint on. All may be changed at a
resume, which says so.
"""
RECENT_SECONDS = 30.0
"""A run that a signal stops saves no new checkpoint if the last one is at most so old: torchrun kills the
ranks 30 s after it has passed on the signal.
"""


class DataEnded(ConfigError):
    """There is no further global batch, though the run has steps left."""


class StepTotals(NamedTuple):
    """The totals of one step, the same on all ranks.

    loss: the mean over unmasked tokens of the global batch. loss_of_source: the same for each dataset
    of a blend that has such tokens. stop_signal: a signal that asks some rank to end the run; SIGINT if
    any rank has received one.
    """

    loss: float
    loss_of_source: dict[str, float]
    stop_signal: signal.Signals | None


class Trainer:
    """One run on one rank: model, optimizer, loader and position. `run` trains to the end.

    Every rank of the world makes one. Raises ConfigError for a layout that the world or the model
    does not fit.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.config = config = replace(config, data=read_blend(config.data))
        self.device = device
        train = config.train
        # First: cuBLAS reads its variable once, at the first product of matrices.
        set_numerics(train)
        self._make_ranks()
        self._open_data()
        config = self.config
        self.model = ParallelModel(config, self.ranks, device)
        self.optimizer: torch.optim.Optimizer = make_optimizer(
            self.model.chunks, train, fused=self.model.is_sharded
        )
        self.scale = LossScale() if train.dtype == "float16" else None
        self.grad_sync_timer = DeviceTimer(device)
        """Times how long this rank waits for the others until gradients are summed and divided."""
        self.checkpoints = Checkpointer(
            CheckpointStore.open(train.out_dir, config.data.storage),
            device,
            train.keep_checkpoints,
            train.collective_timeout,
        )
        self.stop_requests = StopRequests(
            lambda: self.checkpoints.is_waiting or bool(self.run_log and self.run_log.is_waiting)
        )
        self.step = 0
        """Steps that are trained."""
        self.step_under_way = 0
        """The step that is trained now; 0 before the first."""
        self.saved_step = 0
        """The step of the last checkpoint that this run saved or resumed from."""
        self.data_wait = 0.0
        """Seconds in which this rank waited for the data of the step."""
        self.kept_batches: list[Batch] = []
        """With log_batch_hash the micro-batches of the step. Otherwise each is freed after its computation."""
        self.unwritten: dict[str, Any] | None = None
        """The record of the step that was resumed, if the run ended while it evaluated that step."""
        self.run_log: RunLog | None = None
        """On the first rank only."""
        if self.ranks.rank == 0:
            # After the checkpoints: they lock an out_dir on a disk, so no other job writes metrics there.
            self.run_log = RunLog(
                train.out_dir,
                config.data.storage,
                iters=train.train_iters,
                log_interval=train.log_interval,
            )
            self._log_start(self.run_log)

    def _make_ranks(self) -> None:
        """The place of this rank in the layout, and its process groups."""
        parallel = self.config.parallel
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        layout = ParallelLayout.of_world(world_size, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp)
        check_layout(self.config, layout)
        self.ranks = Ranks(layout, timedelta(seconds=self.config.train.collective_timeout))

    def _open_data(self) -> None:
        """The loader of this rank. What is evaluated is opened too, so that errors are found before
        training and not after hours.
        """
        config, ranks, train = self.config, self.ranks, self.config.train
        # First: in some orders all ranks open together, and one of another order would not take part.
        check_ranks_agree("settings or versions", settings_of(config), ranks, self.device)
        metrics_port = None
        # Of a pipeline the last stage reads the same tokens again: they would count twice.
        if ranks.at["tp"] == 0 and ranks.at["pp"] == 0:
            metrics_port = metrics_port_of(train.metrics_port, process_info(os.environ))
        self.loader = open_split(config, "train", ranks, metrics_port)
        self.batches = RankBatches(self.loader, ranks, self.device, every_stage=config.every_stage)
        # The identity of all samples, with the data of later phases: they are not compared again.
        identity = self.loader.dataset.samples.identity()
        vocab_size = self.loader.dataset.config.vocab_size
        compared = json.dumps([identity, vocab_size], sort_keys=True)
        check_ranks_agree("data", compared, ranks, self.device)
        self.config = config = config.with_vocabulary(vocab_size)
        check_vocab_parts(config.model.vocab_size, ranks.layout.tp)
        self.sources = source_names(config.data)
        self.evaluates = train.eval_iters > 0 and train.eval_interval > 0
        if not self.evaluates:
            return
        runs = [*validation_sets(config).values(), *([config] if has_valid(config.data) else ())]
        if not runs:
            raise ConfigError(
                f"train.eval_iters is {train.eval_iters}, and there is nothing to evaluate: "
                f"data.split leaves nothing for valid, and there are no [validation] sets; give one, "
                f"or set train.eval_iters to 0"
            )
        for run in runs:
            open_split(run, "valid", ranks).close()

    def _log_start(self, run_log: RunLog) -> None:
        layout = self.ranks.layout
        data = self.loader.dataset.config
        factor = read_factor(layout, data, every_stage=self.config.every_stage)
        log.info(
            "ranks: %d (%s); each token is read %s, over all ranks",
            layout.world_size,
            ", ".join(f"{name} {getattr(layout, name)}" for name in DIMENSIONS),
            "once" if factor == 1 else f"{factor} times",
        )
        log.info("losses and other figures of each step: %s", run_log.path)
        if self.loader.metrics_address is not None:
            log.info("metrics of rank 0: streammega top %s", self.loader.metrics_address)

    def run(self) -> None:
        """Train until `train_iters`, saving and evaluating at their intervals and at the end.

        Raises Terminated after SIGTERM or Ctrl-C, StopNow where a second signal wants the end at
        once, and after the save under way any StreammegaError, as DataEnded and GradientError. This
        step is saved before Terminated, unless a save is recent, and before DataEnded if
        `save_interval` is set.
        """
        train = self.config.train
        is_first_rank = self.ranks.rank == 0
        if self.step >= train.train_iters and is_first_rank:
            log.info(
                "step %d: train.train_iters = %d is reached, and nothing left to train; "
                "raise it to go on",
                self.step,
                train.train_iters,
            )
        elif not train.save_interval and is_first_rank:
            log.warning(
                "train.save_interval is 0: only SIGTERM or Ctrl-C make a checkpoint. If the run is killed "
                "or fails, it starts at step 0 again"
            )
        with self.stop_requests.graceful(announce=is_first_rank), self._finishing_save():
            if self.unwritten is not None:
                self._evaluate_and_write(self.unwritten, evaluates=self.evaluates)
            while self.step < train.train_iters:
                try:
                    record, stop_signal = self.train_step()
                except DataEnded:
                    if train.save_interval and self.saved_step < self.step:
                        self.save()
                    self.close()
                    raise
                self.step += 1
                if stop_signal is not None and self.step < train.train_iters:
                    self._stop_here(record, stop_signal)
                is_last = self.step == train.train_iters
                evaluates = self.evaluates and (is_last or self.step % train.eval_interval == 0)
                if self._is_save_due(record):
                    self.save(background=not is_last, record=record if evaluates else None)
                self._evaluate_and_write(record, evaluates=evaluates)
        self.close()

    @contextmanager
    def _finishing_save(self) -> Iterator[None]:
        """After an error in this context the save under way is finished: its thread ends with the process, and
        a resume needs that checkpoint.
        """
        try:
            yield
        except StreammegaError as failure:
            if self.checkpoints.is_saving:  # which may take long, where storage is what failed
                log.warning("finishing the save under way, before the run ends by: %s", failure)
            try:
                self.checkpoints.wait()
            except (ConfigError, StorageError) as error:
                log.warning("%s", error)
            raise

    def train_step(self) -> tuple[dict[str, Any], signal.Signals | None]:
        """One optimizer step: its record, and the signal that asks the run to stop, if any rank has
        received one.

        Raises DataEnded where there is no data for it, GradientError for a loss or gradients that
        are not finite, StorageError where a save has failed on some rank.
        """
        start_time = time.perf_counter()
        self.step_under_way = self.step + 1
        train = self.config.train
        dataset = self.loader.dataset
        # The global batch begins after the cursor, and after what is skipped there.
        first_sample = next(dataset.steps.positions(self.batches.consumed_samples), None)
        if first_sample is None:
            raise DataEnded(
                f"the data ends at sample {self.batches.consumed_samples}, after step {self.step} of "
                f"{train.train_iters}: data.exclude_samples excludes the rest; raise data.num_samples"
            )
        schedule = dataset.steps.schedule
        num_samples = schedule.size_at(first_sample)
        num_micro_batches = schedule.micro_batches_at(
            first_sample, train.micro_batch_size, self.ranks.layout.dp
        )
        # All samples of a step have the same length: a phase begins with a step.
        length = dataset.sequence_length_at(first_sample)
        num_tokens = num_samples * length
        lr = learning_rate(train, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        # Losses are summed over tokens. In fp16 a sum of so many would overflow, so they are divided
        # by all tokens of the global batch before backward.
        factor = self.scale.value / num_tokens if self.scale else 1.0
        batches = self._take(num_micro_batches)
        losses = self.model.forward_backward(batches, num_micro_batches, length, factor)
        grad_norm = self._reduce_and_step(losses, num_tokens)
        # Samples of this rank, in the order in which they came.
        positions = first_sample + dataset.step_samples * np.arange(num_micro_batches)
        sample_ids = dataset.sample_ids(positions).reshape(-1)
        totals = self._totals(losses, sample_ids)
        # fully_shard sums within backward, so no wait of a sharded model is known.
        if not self.model.is_sharded:
            self.loader.count_grad_sync(self.grad_sync_timer.seconds)

        samples = range(first_sample, first_sample + num_samples)
        record: dict[str, Any] = {
            "step": self.step + 1,
            "samples": [samples.start, samples.stop],
            "tokens": dataset.tokens_before(samples.stop),
            "ranks": self.ranks.layout.world_size,
            "loss": totals.loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "data_wait_s": self.data_wait,
            "tokens_per_s": num_tokens / (time.perf_counter() - start_time),
        }
        if self.scale is not None:
            record["loss_scale"] = self.scale.value
        if totals.loss_of_source:
            record["source_loss"] = totals.loss_of_source
        if train.log_batch_hash:
            bounds = self.model.bounds_of(length)
            record["batch_hash"] = hash_over_ranks(
                self.kept_batches, sample_ids, samples, bounds, self.ranks, self.device
            )
        return record, totals.stop_signal

    def _take(self, count: int) -> Iterator[Batch]:
        """The micro-batches of a step. Adds up how long this rank waits for them."""
        self.data_wait = 0.0
        self.kept_batches.clear()
        for _ in range(count):
            start_time = time.perf_counter()
            batch = next(self.batches, None)
            self.data_wait += time.perf_counter() - start_time
            if batch is None:
                raise RuntimeError(
                    "the data ended within a step, though there are only whole steps"
                )
            if self.config.train.log_batch_hash:
                self.kept_batches.append(batch)
            yield batch

    def _reduce_and_step(self, losses: Losses, divided_by: int) -> float:
        """Normalise gradients by the unmasked tokens of the global batch, clip and step.

        Returns the norm before clipping; inf where fp16 overflowed, and no step was taken.
        """
        model = self.model
        with self.grad_sync_timer:
            model.finish_gradients(losses.tokens.sum())
        if self.scale is not None and not self.scale.unscale(
            model.gradients(), self.device, float(divided_by)
        ):
            model.zero_grad()
            return math.inf
        norm = model.clip_grad_norm_(self.config.train.clip_grad or math.inf)
        # A save may still be copying the values that change now.
        self.checkpoints.before_change()
        self.optimizer.step()
        model.zero_grad()
        if self.device.type == "cuda":
            # The device is busy with the step. The host prepares the next one meanwhile.
            self.batches.prepare()
        # Here the host waits for the device. Nothing is saved yet.
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            raise GradientError(
                f"the gradient norm of step {self.step + 1} is {grad_norm}, though no rank's gradients "
                f"were: their sum is too large; resume from the last checkpoint with a lower "
                f"learning rate, or skip this step's samples"
            )
        return grad_norm

    def _totals(
        self, losses: Losses, sample_ids: np.ndarray[Any, np.dtype[np.int64]]
    ) -> StepTotals:
        """The totals of the step over all ranks: one small collective, since each waits for the slowest
        rank. It tells everything that ends a run: so all ranks end after the same step.
        """
        # Of one dataset the loss is that of the batch.
        sources = self.sources if len(self.sources) > 1 else []
        sizes = [3, 2, 2 * len(sources)]
        sums = torch.zeros(sum(sizes), dtype=torch.float64)
        flags, loss_and_tokens, by_source = torch.split(sums, sizes)
        first_signal = self.stop_requests.first_signal
        flags[0] = first_signal is not None
        flags[1] = first_signal == signal.SIGINT
        flags[2] = self.checkpoints.has_failed
        if self.model.counts_losses:
            loss = losses.loss.double().cpu()
            tokens = losses.tokens.double().cpu()
            loss_and_tokens[0] = loss.sum()
            loss_and_tokens[1] = tokens.sum()
            if sources:
                samples = self.loader.dataset.samples
                dataset_id = torch.from_numpy(samples.locate(sample_ids).dataset_of_sample)
                # The mean of each sample, which weighs as much as it has tokens; of none it does not count.
                means, weights = (loss / tokens)[:, None], tokens[:, None]
                add_losses_by_source(by_source.view(-1, 2), dataset_id, means, weights)
        sums = sums.to(self.device)
        self.ranks.all_reduce(sums, WORLD)
        flags, loss_and_tokens, by_source = torch.split(sums.cpu(), sizes)
        num_stops, num_interrupts, num_failed_saves = flags.tolist()
        if num_failed_saves:
            self.checkpoints.wait()
            raise StorageError(
                "a checkpoint could not be written: the log of another rank has the cause"
            )
        loss_sum, token_sum = loss_and_tokens.tolist()
        mean = loss_sum / max(token_sum, 1.0)
        if not math.isfinite(mean):
            raise GradientError(
                f"the loss of step {self.step + 1} is {mean}: the run has diverged; resume "
                f"from the last checkpoint with a lower learning rate, or skip this step's samples"
            )
        loss_of_source = {
            name: source_loss / source_tokens
            for name, (source_loss, source_tokens) in zip(
                sources, by_source.view(-1, 2).tolist(), strict=True
            )
            if source_tokens
        }
        stop_signal = signal.SIGINT if num_interrupts else signal.SIGTERM
        return StepTotals(mean, loss_of_source, stop_signal if num_stops else None)

    def _evaluate_and_write(self, record: dict[str, Any], *, evaluates: bool) -> None:
        """Evaluate if it is time, and write the record of a step, without losses if that fails."""
        try:
            if evaluates:
                record |= self.evaluate_all()
        finally:
            if self.run_log:
                self.run_log.write(record)

    def evaluate_all(self) -> dict[str, Any]:
        """{"valid_loss": ...}, and with validation sets {"valid_loss_of": {name: ...}}. Each is read
        from its start every time.

        Collective over all ranks. The entries are added to the step's record: `RunLog.write` logs
        each step that has one whose name begins with "valid_loss", and `streammega plot` draws both
        (`FIELDS` in cli/plotting.py).
        """
        record: dict[str, Any] = {}
        if has_valid(self.config.data):
            record["valid_loss"] = self._valid_loss(self.config)
        if sets := validation_sets(self.config):
            record["valid_loss_of"] = {name: self._valid_loss(run) for name, run in sets.items()}
        return record

    def _valid_loss(self, config: RunConfig) -> float:
        """Mean loss over the first eval_iters global batches of the valid split of a run."""
        model = self.model
        loss_and_tokens = torch.zeros(2, device=self.device, dtype=torch.float64)
        with open_split(config, "valid", self.ranks) as loader:
            batches = RankBatches(loader, self.ranks, self.device, every_stage=config.every_stage)
            micro_steps = config.train.global_batch_size // loader.dataset.step_samples
            # A generator: `iter` of the batches themselves would begin at the first sample again.
            rest = (batch for batch in batches)
            for _ in range(config.train.eval_iters):
                global_batch = list(islice(rest, micro_steps))
                if len(global_batch) < micro_steps:
                    break
                losses = model.evaluate(global_batch)
                if model.counts_losses:
                    loss_and_tokens[0] += losses.loss.double().sum()
                    loss_and_tokens[1] += losses.tokens.double().sum()
            batches.close()
        self.ranks.all_reduce(loss_and_tokens, WORLD)
        loss, tokens = loss_and_tokens.tolist()
        return float(loss / max(tokens, 1.0))

    def _is_save_due(self, record: dict[str, Any]) -> bool:
        """Whether the interval of saves has passed, or the run ends.

        A step that fp16 skipped is saved only as the last one. Its weights are saved already, and a
        checkpoint of it would push out an older one. The next step is saved instead: so it counts how
        many intervals have passed since the last save.
        """
        interval = self.config.train.save_interval
        if interval == 0:
            return False
        if self.step == self.config.train.train_iters:
            return True
        was_taken = math.isfinite(record["grad_norm"])
        return was_taken and self.step // interval > self.saved_step // interval

    def save(self, *, background: bool = False, record: dict[str, Any] | None = None) -> None:
        """Save a checkpoint of the current step. A resume takes the batches after those that were taken.

        record: of this step, if it is not in the metrics yet.
        """
        self.saved_step = self.step
        position: dict[str, Any] = {
            "step": self.step,
            "data": self.batches.state_dict(),
            "model": asdict(self.config.model),
            "train": self._learning_settings(),
        }
        if ahead := self._phases_ahead():
            position["phases_ahead"] = ahead
        if record is not None:
            position["record"] = finite(record)
        if self.scale is not None:
            position["loss_scale"] = self.scale.state_dict()
        self.checkpoints.save(
            self.step, self.model, self.optimizer, position, background=background
        )

    def _stop_here(self, record: dict[str, Any], stop_signal: signal.Signals) -> NoReturn:
        """End the run after a signal. The save under way is finished, and this step saved too unless
        that one is recent enough.
        """
        if self.run_log:
            self.run_log.write(record)
        self.checkpoints.wait()
        recent_step = self.checkpoints.recent_step(RECENT_SECONDS)
        what = ", which is saved"
        if recent_step is None:
            self.save()
        else:
            what = f"; step {recent_step}, of less than {RECENT_SECONDS:.0f} s before, is saved"
        self.close()
        how = "interrupted" if stop_signal == signal.SIGINT else f"stopped by {stop_signal.name}"
        raise Terminated(
            f"{how} after step {self.step}{what} in {self.config.train.out_dir}; "
            f"the same command goes on from there",
            stop_signal,
        )

    def close(self) -> None:
        """Finish what is being written, and stop reading ahead."""
        self.checkpoints.wait()
        self.batches.close()
        self.loader.close()
        self.checkpoints.close()

    def resume(self) -> None:
        """Load the newest sound checkpoint of out_dir, or where there is none that of train.resume_from:
        weights, optimizer, and the cursor. Call it before `run`.
        """
        train = self.config.train
        position = self.checkpoints.resume(self.model, self.optimizer, self._accept)
        if position is None and train.resume_from is not None:
            storage = self.config.data.storage
            position = self.checkpoints.load(
                train.resume_from, storage, self.model, self.optimizer, self._accept
            )
            position.pop("record", None)  # its step is one of the other run's
        if position is None:
            if self.run_log and (last_step := max(self.run_log.records(), default=0)):
                log.warning(
                    "%s has no checkpoint of the %d steps in its metrics.jsonl: the run starts at step 0",
                    train.out_dir,
                    last_step,
                )
            return
        self.step = self.saved_step = position["step"]
        if self.scale is not None and "loss_scale" in position:
            self.scale.load_state_dict(position["loss_scale"])
        # Only the first rank has metrics.jsonl, and all ranks evaluate, or none.
        is_unwritten = torch.zeros((), device=self.device)
        if self.run_log:
            log.info("resumed from step %d, at sample %d", self.step, self.batches.consumed_samples)
            self._tell_of_changes(position)
            written = self.run_log.records().get(self.step)
            is_unwritten += written is None or (self.evaluates and not was_evaluated(written))
        if "record" in position:
            self.ranks.all_reduce(is_unwritten, WORLD)
            self.unwritten = position["record"] if is_unwritten else None

    def _accept(self, position: dict[str, Any]) -> None:
        """Move the cursor to a checkpoint's position. Raises StateError for one of another model or data:
        the shapes of tensors may be the same, for another number of heads for instance.
        """
        saved = position.get("model", {})
        differences = [
            f"model.{name}: the checkpoint has {saved.get(name)}, this run {size}"
            for name, size in asdict(self.config.model).items()
            if saved.get(name) != size
        ]
        if differences:
            raise StateError(f"{'; '.join(differences)}; restore [model], or start a new out_dir")
        self.batches.load_state_dict(position["data"])

    def _tell_of_changes(self, position: dict[str, Any]) -> None:
        """Say what is not as it was in the checkpoint, and may be meant: settings of training, and where
        later phases begin, which other batch sizes move.
        """
        now, saved = self._learning_settings(), position.get("train", {})
        changes = [
            f"train.{name} is {now[name]!r}, was {saved[name]!r}"
            for name in LEARNING_SETTINGS
            if name in saved and saved[name] != now[name]
        ]
        if changes:
            log.info("settings that differ from the checkpoint's: %s", "; ".join(changes))
        consumed = self.batches.consumed_samples
        ahead = self._phases_ahead()
        ahead_before = position.get("phases_ahead", ahead)
        ends_there = self.config.schedule.samples_of_step(max(self.step, 1)).stop == consumed
        if ahead != ahead_before and not ends_there:
            log.warning(
                "the batch sizes of this config are not those of the checkpoint: step %d no longer "
                "ends at sample %d, and phases that were to begin at samples %s now begin at %s. To "
                "keep them there, give phases first_sample in place of first_step",
                self.step,
                consumed,
                ahead_before,
                ahead,
            )

    def _learning_settings(self) -> dict[str, Any]:
        """What a checkpoint keeps of [train], as JSON has it."""
        values = {name: getattr(self.config.train, name) for name in LEARNING_SETTINGS}
        settings: dict[str, Any] = finite(values)
        return settings

    def _phases_ahead(self) -> list[int]:
        """The first samples of phases that have not begun."""
        firsts = [phase.first_sample for phase in self.config.data.phases]
        return [first for first in firsts if first >= self.batches.consumed_samples]
