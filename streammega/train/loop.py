"""The training loop: iterations over global batches, from the loader to the optimizer."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from streammega.errors import ConfigError
from streammega.samples.fields import Batch
from streammega.stream import StreamLoader
from streammega.train import checkpoint
from streammega.train.batch_hash import global_batch_hash, sample_digests
from streammega.train.config import RunConfig, TrainConfig
from streammega.train.metrics import MetricsLog
from streammega.train.model import GPT

log = logging.getLogger(__name__)


class Trainer:
    """One run on one rank: model, optimizer, loader and position. `run` trains to the end."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.step = 0
        self.loader = open_loader(config, "train", self.rank, self.world)
        torch.manual_seed(config.train.seed)
        model = GPT(config.model).to(device)
        self.model: nn.Module = DistributedDataParallel(model) if self.world > 1 else model
        train = config.train
        betas = (train.beta1, train.beta2)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=train.lr, betas=betas, weight_decay=train.weight_decay)
        self.folder = Path(train.out_dir)
        self.metrics = MetricsLog(self.folder, train.log_interval, train.iters) if self.rank == 0 else None

    def resume(self) -> None:
        """Load the newest whole checkpoint, if there is one: weights, optimizer, and the loader's cursor."""
        found = checkpoint.checkpoints(self.folder / "checkpoints")
        if not found:
            return
        position = checkpoint.load_position(found[-1])
        self.loader.load_state_dict(position["data"])
        checkpoint.load(found[-1], self.model, self.optimizer)
        self.step = position["step"]
        if self.rank == 0:
            log.info("resumed from %s at sample %d", found[-1], self.loader.consumed_samples)

    def run(self) -> None:
        """Train until `iters`, saving and evaluating at their intervals and at the end."""
        train = self.config.train
        batches = iter(self.loader)
        while self.step < train.iters:
            record = self._train_step(batches)
            self.step += 1
            last = self.step == train.iters
            if train.eval_iters and train.eval_interval and (last or self.step % train.eval_interval == 0):
                record["valid_loss"] = self.evaluate()
            if self.metrics:
                self.metrics.write(record)
            if train.save_interval and (last or self.step % train.save_interval == 0):
                self.save()
        self.loader.close()

    def save(self) -> None:
        """One checkpoint at the current step; the data position is what was handed out."""
        position = {"step": self.step, "data": self.loader.state_dict()}
        folder = self.folder / "checkpoints"
        checkpoint.save(folder, self.step, self.model, self.optimizer, position, self.config.train.keep_checkpoints)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean validation loss over eval_iters global batches, always the same ones from the start."""
        total = torch.zeros(2, device=self.device, dtype=torch.float64)
        with open_loader(self.config, "valid", self.rank, self.world) as loader:
            micro_steps = self.config.train.eval_iters * self.config.train.global_batch_size // loader.dataset.step_samples
            for _, batch in zip(range(micro_steps), loader, strict=False):
                loss, weight = self._loss(batch)
                total += torch.stack((loss.double(), weight.double()))
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total[0] / total[1].clamp(min=1))

    def _train_step(self, batches: Iterator[Batch]) -> dict[str, object]:
        train, dataset = self.config.train, self.loader.dataset
        began, start = time.perf_counter(), dataset.consumed_samples
        micro_steps = train.global_batch_size // dataset.step_samples
        set_learning_rate(self.optimizer, train, self.step)
        self.optimizer.zero_grad(set_to_none=True)
        digests: dict[int, int] = {}
        waited, total = 0.0, torch.zeros((), device=self.device)
        for micro in range(micro_steps):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            consumed = dataset.consumed_samples - dataset.step_samples
            if train.hash_batches:
                digests.update(zip(dataset.sample_ids(consumed).tolist(), sample_digests(batch), strict=True))
            with self._sync(micro == micro_steps - 1):
                loss, weight = self._loss(batch)
                loss = loss / weight.clamp(min=1) / micro_steps
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip_grad or math.inf)
        self.optimizer.step()
        record: dict[str, object] = {
            "step": self.step + 1,
            "samples": [start, dataset.consumed_samples],
            "ranks": self.world,
            "loss": self._mean(total),
            "grad_norm": float(norm),
            "lr": self.optimizer.param_groups[0]["lr"],
            "data_wait_s": waited,
        }
        if train.hash_batches:
            record["batch_hash"] = global_batch_hash(self._all_digests(digests))
        record["tokens_per_s"] = train.global_batch_size * self.config.data.sequence_length / (time.perf_counter() - began)
        return record

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss over unmasked tokens, and how many there are."""
        fields = {name: field.to(self.device, non_blocking=True) for name, field in batch.items()}
        logits = self.model(fields["tokens"], fields["position_ids"])
        losses = F.cross_entropy(logits.flatten(0, 1).float(), fields["labels"].flatten(), reduction="none")
        mask = fields["loss_mask"].flatten()
        return (losses * mask).sum(), mask.sum()

    def _sync(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are averaged over ranks with the last micro-batch only."""
        return nullcontext() if last or self.world == 1 else self.model.no_sync()  # type: ignore[operator]

    def _mean(self, value: Tensor) -> float:
        if self.world > 1:
            dist.all_reduce(value)
        return float(value) / self.world

    def _all_digests(self, digests: dict[int, int]) -> dict[int, int]:
        if self.world == 1:
            return digests
        mine = torch.tensor(sorted(digests.items()), dtype=torch.int64, device=self.device)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine)
        return {int(sample): int(digest) for part in every for sample, digest in part.tolist()}


def open_loader(config: RunConfig, split: str, dp_rank: int, dp_size: int) -> StreamLoader:
    """The loader of a split, with the number of samples that the run asks of it."""
    data = config.data
    if data.num_samples is None:
        data = replace(data, num_samples=config.num_samples())
    if (
        data.num_samples is not None
        and split == "train"
        and data.num_samples[0] < config.train.iters * config.train.global_batch_size
    ):
        raise ConfigError(
            f"data.num_samples asks {data.num_samples[0]} training samples, but train.iters x train.global_batch_size is "
            f"{config.train.iters * config.train.global_batch_size}; raise the one or lower the other"
        )
    return StreamLoader(
        data,
        split=split,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=config.train.global_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, train: TrainConfig, step: int) -> None:
    """Linear warmup to lr, then a cosine to min_lr at `iters`: a function of the step, so a resume needs no state."""
    if step < train.warmup_iters:
        lr = train.lr * (step + 1) / train.warmup_iters
    else:
        done = (step - train.warmup_iters) / max(1, train.iters - train.warmup_iters)
        lr = train.min_lr + 0.5 * (train.lr - train.min_lr) * (1 + math.cos(math.pi * min(done, 1.0)))
    for group in optimizer.param_groups:
        group["lr"] = lr
