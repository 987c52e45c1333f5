"""PyTorch Lightning trains from s3:// and oss:// through this data module, and resumes exactly.

    from streammega.integrations.lightning import StreamDataModule

    data = StreamDataModule(config, micro_batch_size=4, global_batch_size=64)
    trainer.fit(model, datamodule=data, ckpt_path="last")

Lightning's checkpoints contain the position as the state of the data module. Lightning loads it before
it calls for a loader, whatever `configure_optimizers` read. The position counts the batches that were
trained on, not those that Lightning fetched ahead.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from streammega.config import DataConfig
from streammega.errors import ConfigError, StateError
from streammega.integrations.frameworks import (
    check_phases,
    class_on_demand,
    import_framework,
    with_bases,
)
from streammega.loading import StreamLoader
from streammega.loading.iterate import Iteration
from streammega.loading.ranks import data_parallel
from streammega.samples.fields import Batch
from streammega.samples.segments import has_data

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two names that Lightning is published under; their classes know nothing of each other."""


class StreamDataHooks:
    """The hooks of a LightningDataModule. `StreamDataModule` is this with Lightning's own class;
    for a base of your own: `class Data(StreamDataHooks, MyBase)`.

    An epoch of Lightning ends at the end of the data, or where `limit_train_batches` or `max_steps`
    end it. The next epoch goes on after the last batch that was trained on. If the data has ended, it
    begins at the first sample. In the stream order without `num_samples` training has no end: set
    `max_steps` of the Trainer.

    A state is that of the last whole optimizer step, and so are Lightning's own counts in its
    checkpoints: gradients of the batches since are in none. So a checkpoint by time or of an exception
    loses no batch, wherever it falls.

    Args:
        config: what is read.
        micro_batch_size: samples of one batch of a rank.
        global_batch_size: samples of one optimizer step over all ranks. The Trainer's
            `accumulate_grad_batches` has to be global_batch_size / (micro_batch_size * ranks).
        dp_rank, dp_size: this data-parallel rank; None: as the Trainer's strategy says. A strategy of
            one process, in a job of several, needs dp_size=1.
        options: further ones of StreamLoader, for the train split.
    """

    trainer: Any

    def __init__(
        self,
        config: DataConfig,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if "rampup_batch_size" in options:
            raise ConfigError("the steps of Lightning have one size: leave out rampup_batch_size")
        check_phases(config, "Lightning", global_batch_size)
        self._config = config
        self._sizes: dict[str, Any] = {
            "micro_batch_size": micro_batch_size,
            "global_batch_size": global_batch_size,
        }
        self._data_parallel: tuple[int, int] | None = None
        if dp_rank is not None or dp_size is not None:
            self._data_parallel = data_parallel(dp_rank, dp_size)
        self._options = options
        self._batches: ConsumedBatches | None = None

    # What Lightning calls.

    def setup(self, stage: str) -> None:
        """Take note of every batch that was trained on, before a checkpoint is saved."""
        callbacks = self.trainer.callbacks
        # the first: those that save checkpoints come last
        if stage == "fit" and not any(isinstance(one, CountsTrained) for one in callbacks):
            callbacks.insert(0, with_bases(CountsTrained, _callback_class(type(self)))())

    def train_dataloader(self) -> ConsumedBatches:
        """The batches of this rank, from the cursor on; the same object every time."""
        batches = self._open_batches()
        self._check_trainer()
        return batches

    def val_dataloader(self) -> Any:
        """The whole global batches of the valid split, from its first sample every time; nothing where it
        is empty.
        """
        return self._open_evaluation("valid")

    def test_dataloader(self) -> Any:
        """The same of the test split."""
        return self._open_evaluation("test")

    def state_dict(self) -> dict[str, Any]:
        """The position after the last optimizer step, the same on every rank: see
        StreamingDataset.state_dict. Empty before anything was opened.
        """
        return {} if self._batches is None else self._batches.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after a state, on any number of ranks.

        Raises StateError for one of another order, or none; everything is then as it was.
        """
        self._open_batches().load_state_dict(state_dict)

    def teardown(self, stage: str) -> None:
        """End reading ahead. The position stays."""
        if self._batches is not None:
            self._batches.loader.close()

    # What else is here.

    @property
    def loader(self) -> StreamLoader:
        """The loader of the train split, which may be ahead by what Lightning fetched."""
        return self._open_batches().loader

    def seek(self, consumed_samples: int) -> None:
        """Train from a global sample on, for checkpoints that were saved without this module."""
        self._open_batches().seek(consumed_samples)

    def _open_batches(self) -> ConsumedBatches:
        """The batches of this rank, opened once. Before there is a Trainer, this process counts as the
        only rank. If the Trainer says otherwise, they are opened again at the same position.
        """
        dp_rank, dp_size = self._rank_and_size()
        before = self._batches
        if before is not None:
            dataset = before.loader.dataset
            if (dp_rank, dp_size) == (dataset.dp_rank, dataset.dp_size):
                return before
        loader = StreamLoader(
            self._config, dp_rank=dp_rank, dp_size=dp_size, **self._sizes, **self._options
        )
        self._batches = ConsumedBatches(loader)
        if before is not None:
            before.loader.close()
            if before.has_position:
                self._batches.load_state_dict(before.state_dict())
        return self._batches

    def _rank_and_size(self) -> tuple[int, int]:
        if self._data_parallel is not None:
            return self._data_parallel
        trainer = getattr(self, "trainer", None)
        if trainer is None:
            return 0, 1
        places = trainer.distributed_sampler_kwargs
        if not places:  # a strategy of one process
            return data_parallel(None, None)
        return places["rank"], places["num_replicas"]

    def _check_trainer(self) -> None:
        trainer = getattr(self, "trainer", None)
        if trainer is None:
            return
        module = trainer.lightning_module
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise ConfigError(
                "training_step takes dataloader_iter, so the number of batches that it trained on is "
                "unknown; let it take batch and batch_idx"
            )
        if trainer.ckpt_path is not None and not self._open_batches().has_position:
            raise StateError(
                f"the checkpoint {trainer.ckpt_path} has no position of {type(self).__qualname__}: "
                "training would begin at the first sample again; call seek(consumed_samples) of "
                "the data module before fit, with 0 if that is meant"
            )
        if module.automatic_optimization:
            self._check_accumulation(trainer)
        self._check_validation(trainer)

    def _check_validation(self, trainer: Any) -> None:
        """Raise ConfigError where validation waits for the end of an epoch that never comes."""
        if not (trainer.enable_validation and has_data(self._config, "valid")):
            return
        has_end = self._open_batches().loader.dataset.num_samples is not None
        at_end_of_epoch = trainer.val_check_interval == 1.0
        # a number of batches makes epochs of an endless stream too
        cuts_epochs = isinstance(trainer.limit_train_batches, int)
        if at_end_of_epoch and not (has_end or cuts_epochs):
            raise ConfigError(
                "the stream has no end, where the Trainer would validate, so it would never validate: give "
                "it val_check_interval=COUNT, a number of micro-batches, or limit_val_batches=0"
            )

    def _check_accumulation(self, trainer: Any) -> None:
        """Raise ConfigError where optimizer steps would be of other sizes than global batches."""
        if any(hasattr(one, "going_to_accumulate_grad_batches") for one in trainer.callbacks):
            return  # Lightning's scheduler of accumulations: the sizes are its user's affair
        _, dp_size = self._rank_and_size()
        step_samples = self._sizes["micro_batch_size"] * dp_size
        micro_batches = self._sizes["global_batch_size"] // step_samples
        if trainer.accumulate_grad_batches != micro_batches:
            raise ConfigError(
                f"global_batch_size is {self._sizes['global_batch_size']}, but the Trainer steps "
                f"after {trainer.accumulate_grad_batches * step_samples} samples: give it "
                f"accumulate_grad_batches={micro_batches}"
            )

    def _open_evaluation(self, split: str) -> Any:
        if not has_data(self._config, split):
            return []
        dp_rank, dp_size = self._rank_and_size()
        return StreamLoader(
            self._config, split=split, dp_rank=dp_rank, dp_size=dp_size, **self._sizes
        )


class CountsTrained:
    """A callback that tells the data module which batches were trained on, and when the optimizer
    stepped.
    """

    def __init__(self) -> None:
        self._steps = -1
        self._fit_loop: dict[str, Any] = {}
        """The state of Lightning's loop after the last optimizer step."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Keep where training begins, until the first step."""
        self._note_step(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """A batch was trained on; those that save checkpoints are called after this."""
        batches = trainer.datamodule._batches
        if batches is None:
            return
        batches.mark_consumed()
        # also right for manual optimization, and where Lightning steps at the end of an epoch
        if trainer.global_step != self._steps:
            batches.mark_step()
            self._note_step(trainer)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        """Within an accumulation, have Lightning's loop go on from the last step, as the data does. It
        would count the batches since, and make its next step of what is left of them.
        """
        batches = trainer.datamodule._batches
        if batches is not None and batches.is_within_step:
            checkpoint["loops"]["fit_loop"] = self._fit_loop

    def _note_step(self, trainer: Any) -> None:
        self._steps = trainer.global_step
        self._fit_loop = copy.deepcopy(trainer.fit_loop.state_dict())


class ConsumedBatches:
    """What Lightning iterates: batches of a loader, and which of them were trained on.

    `iter` begins after the last batch that was trained on, so one that Lightning fetched ahead and
    dropped (at the end of an epoch that is cut short, say) is given again.
    """

    def __init__(self, loader: StreamLoader) -> None:
        self.loader = loader
        self._trained = loader.consumed_samples
        """The position after the last batch that was trained on."""
        self._stepped = self._trained
        """The position after the last batch of an optimizer step."""
        self._fetched: deque[int] = deque()
        """The positions after those that were only fetched."""
        self._running: Iteration | None = None
        self.has_position = False
        """Whether a state or `seek` said where to begin, or something was trained on."""

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        self._stop("another iteration of its loader began, and one loader has one cursor")
        if self._fetched:
            self.loader.load_state_dict(self.loader.dataset.state_at(self._trained))
            self._fetched.clear()
        iter(self.loader)  # which begins the next pass where the data has ended
        self._running = Iteration(self._fetch())
        return self._running

    def _fetch(self) -> Generator[Batch, None, None]:
        # by `take`, which goes on where the loader was moved while nothing was fetched
        for batch in iter(self.loader.take, None):
            self._fetched.append(self.loader.consumed_samples)
            yield batch
            del batch  # Lightning alone decides when its memory is free

    def mark_consumed(self) -> None:
        """The oldest batch that was fetched is trained on."""
        if self._fetched:  # none is, where the loader was moved within that batch
            self._trained = self._fetched.popleft()
            self.has_position = True

    def mark_step(self) -> None:
        """An optimizer stepped on all batches that were trained on."""
        self._stepped = self._trained

    @property
    def is_within_step(self) -> bool:
        """Whether a batch was trained on since the last optimizer step."""
        return self._trained != self._stepped

    def state_dict(self) -> dict[str, Any]:
        """The state of a loader that has given what optimizer steps were made of."""
        return self.loader.dataset.state_at(self._stepped)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a state. Raises StateError for one of another order, and changes nothing."""
        self.loader.load_state_dict(state)
        self._note_move("load_state_dict")

    def seek(self, consumed_samples: int) -> None:
        """Go on at a global sample."""
        self.loader.seek(consumed_samples)
        self._note_move("seek")

    def _note_move(self, by: str) -> None:
        self._trained = self._stepped = self.loader.consumed_samples
        self.has_position = True
        if self._fetched:
            # Lightning still holds it, and would train on it next
            self._fetched.clear()
            self._stop(f"{by} moved its loader while a batch of the old position was fetched")

    def _stop(self, reason: str) -> None:
        if self._running is not None:
            self._running.stop(reason)


def _callback_class(module: type) -> Any:
    """The Callback of the package whose data module `module` is."""
    (base,) = [item for item in module.__mro__ if item.__name__ == "LightningDataModule"]
    return sys.modules[base.__module__.removesuffix(".core.datamodule")].Callback


def _lightning() -> Any:
    """The package of Lightning that this process uses."""
    imported = [name for name in PACKAGES if sys.modules.get(name) is not None]
    installed = [name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None]
    return import_framework([*imported, *installed, *PACKAGES][0], "lightning")


__getattr__ = class_on_demand(
    "StreamDataModule", StreamDataHooks, lambda: _lightning().LightningDataModule
)
