"""Losses by source in the logs of Lightning: the data module brings this callback along."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from streammega.config import DataConfig
from streammega.loading.source_losses import SourceLosses
from streammega.samples.segments import source_names

log = logging.getLogger(__name__)

TOKEN_LOSSES = "token_losses"
"""What steps return beside "loss": the loss of each token, [micro_batch_size, S], not reduced."""


class LogsSourceLosses:
    """A callback that logs "train/loss/NAME" with Lightning's own metrics, "val/loss/NAME" after a
    validation and "test/loss/NAME" after a test, of every dataset that had tokens: exact means over
    tokens and ranks.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._losses: SourceLosses | None = None
        """Of training, since the last log."""
        self._evaluated: SourceLosses | None = None
        """Of the evaluation that runs."""
        self._steps_before = 0
        self._warned = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin to count: what was counted in another run is in no checkpoint."""
        self._losses = self._of("train", module)
        self._steps_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Add a batch, and log where Lightning does."""
        self._add(self._losses, outputs, batch)
        steps = trainer.global_step
        if self._losses is None or steps == self._steps_before:  # within an accumulation
            return
        self._steps_before = steps
        if steps % trainer.log_every_n_steps == 0 or trainer.should_stop:
            _log(trainer, self._losses.means(prefix="train/loss/"))

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        """Count anew: every validation is of the whole split."""
        self._evaluated = self._of("valid", module)

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Add a batch."""
        self._add(self._evaluated, outputs, batch)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        """Log, unless this was the look at a few batches before training."""
        if not trainer.sanity_checking:
            self._log_evaluation(trainer, "val/loss/")

    def on_test_epoch_start(self, trainer: Any, module: Any) -> None:
        """Count anew."""
        self._evaluated = self._of("test", module)

    def on_test_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Add a batch."""
        self._add(self._evaluated, outputs, batch)

    def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
        """Log."""
        self._log_evaluation(trainer, "test/loss/")

    def _log_evaluation(self, trainer: Any, prefix: str) -> None:
        if self._evaluated is not None:
            _log(trainer, self._evaluated.means(prefix=prefix))

    def _of(self, split: str, module: Any) -> SourceLosses | None:
        """Of the datasets of a split, the same on every rank; None: it has none."""
        if not source_names(self._config, split):
            return None
        return SourceLosses.of(self._config, split=split, device=module.device)

    def _add(self, losses: SourceLosses | None, outputs: Any, batch: Any) -> None:
        if losses is None or not isinstance(batch, Mapping) or "dataset_id" not in batch:
            return  # of a loader of another's
        each = outputs.get(TOKEN_LOSSES) if isinstance(outputs, Mapping) else None
        if each is not None:
            losses.add(batch["dataset_id"], each, batch["loss_mask"])
        elif not self._warned:
            self._warned = True
            log.warning(
                'dataset_ids is set, and steps return no "%s": no loss is logged by source; return '
                '{"loss": loss, "%s": each.detach()}, each being the loss of each token, '
                "[micro_batch_size, S]",
                TOKEN_LOSSES,
                TOKEN_LOSSES,
            )


def _log(trainer: Any, metrics: dict[str, float]) -> None:
    """To the loggers, at the step of Lightning's own metrics, and for callbacks that monitor."""
    step = max(0, trainer.global_step - 1)  # Lightning numbers the first step 0 in its logs
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=step)
    trainer.callback_metrics.update(
        {name: torch.tensor(loss, dtype=torch.float64) for name, loss in metrics.items()}
    )
