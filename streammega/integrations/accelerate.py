"""Accelerate trains from s3:// and oss:// with this DataLoader. It does not shard the loader or dispatch
its batches, and saves and loads the position with everything else.

    from streammega.integrations.accelerate import StreamDataLoader

    loader = StreamDataLoader(accelerator, config, micro_batch_size=4, global_batch_size=64)
    model, optimizer = accelerator.prepare(model, optimizer)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NoReturn

from torch.utils.data import DataLoader, IterableDataset

from streammega.config import DataConfig
from streammega.errors import ConfigError, StateError
from streammega.integrations.frameworks import check_batch_size, check_phases
from streammega.loading import StreamLoader
from streammega.loading.iterate import Iteration
from streammega.samples.fields import Batch


class PlaceholderDataset(IterableDataset[Batch]):
    """In place of the dataset of a DataLoader. Iterating it would read past the cursor.

    num_samples: what trainers ask its length for, over all ranks; None: it has no end.
    """

    column_names = ("input_ids", "labels")
    """What TRL asks of a dataset, to know that its labels are there."""

    def __init__(self, num_samples: int | None) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        if self._num_samples is None:
            raise TypeError("the stream has no end; num_samples in the config gives it one")
        return self._num_samples

    def __bool__(self) -> bool:
        return True  # a test whether there is a dataset would ask for its length

    def __iter__(self) -> NoReturn:
        raise ConfigError(
            "something made another DataLoader of a StreamDataLoader (skip_first_batches does, and "
            "Trainers without ignore_data_skip): go to a place by its seek or load_state_dict, "
            "and iterate it as it is"
        )


class StreamDataLoader(DataLoader[Batch]):
    """The micro-batches of this process, on its device.

    `prepare` returns it unchanged, and the call may be left out. `save_state` and `load_state` include
    its position, and any number of processes goes on from there. Iterations begin as those of a
    StreamLoader.

    A state that is saved within `accumulate` is that of the last whole optimizer step: gradients of
    the micro-batches since are in no checkpoint of accelerate.

    Args:
        accelerator: has the rank, the device, and how many micro-batches make a step.
        config: the data.
        micro_batch_size: samples of one batch of a process.
        global_batch_size: samples of one optimizer step over all processes.
        dp_rank, dp_size: the data-parallel rank; None: that of the process, which is right where no
            processes share a model (tensor or context parallelism).
        prepare_batch: converts each batch, on the device.
        allow_batch_size_change: go on from a state of another global_batch_size too, which is an
            error without it: the number of processes may have changed it.
        options: further options of StreamLoader. A loader for evaluation (`split="valid"`) begins every
            iteration at the first sample, and is in no checkpoint.
    """

    _is_accelerate_prepared = True  # so `prepare` does not wrap it
    use_stateful_dataloader = True  # so `save_state` saves its state
    batch_size_settings = "global_batch_size={size} and gradient_accumulation_steps={count}"
    """What makes a global batch: the words of an error, see `check_batch_size`."""

    def __init__(
        self,
        accelerator: Any,
        config: DataConfig,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        prepare_batch: Callable[[Batch], Batch] | None = None,
        allow_batch_size_change: bool = False,
        **options: Any,
    ) -> None:
        if dp_rank is None and dp_size is None:
            dp_rank, dp_size = _rank_and_size(accelerator)
        self.loader = StreamLoader(
            config,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            **options,
        )
        self.loader.prefetch_to(accelerator.device)
        self.prepare_batch = prepare_batch
        self.allow_batch_size_change = allow_batch_size_change
        self.gradient_state = accelerator.gradient_state
        self.end_of_dataloader = False
        """Whether the last batch of the pass was handed out: `accumulate` steps there in any case."""
        self.remainder = 0
        """Samples that were added to fill the last batch: none, as all batches are whole."""
        self._stepped_at: int | None = None
        """The position at which an optimizer stepped last."""
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that tell it."""
        self._accelerator = weakref.ref(accelerator)
        self._awaits_state_of: str | None = None
        """The folder of the last `load_state`, until the loader has its position from there."""
        super().__init__(
            PlaceholderDataset(self.loader.dataset.num_samples), batch_size=micro_batch_size
        )
        if not self.loader.evaluation:
            _check_accumulation(accelerator, self.loader)
            accelerator.prepare_data_loader(self)
            accelerator.register_load_state_pre_hook(_weakly(self._await_state))

    def __len__(self) -> int:
        """Micro-batches of a pass. TypeError for a stream without an end."""
        return len(self.loader)

    def __iter__(self) -> Any:
        if self._awaits_state_of is not None:
            raise StateError(
                f"{self._awaits_state_of} has no position of this loader, so training would go on "
                "with the wrong samples: call seek(consumed_samples) after load_state"
            )
        return Iteration(self._batches(iter(self.loader)))

    def _batches(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        """As accelerate's own loaders do: the one that iterates last is asked for the end."""
        self.end_of_dataloader = False
        self.gradient_state._remove_dataloader(self)  # of an iteration that was left
        self.gradient_state._add_dataloader(self)
        if not self.loader.evaluation:
            self._watch_optimizers()
            self._align_accumulation()
        self._check_step()
        for batch in batches:
            self.end_of_dataloader = next(self.loader.dataset.positions(), None) is None
            yield batch if self.prepare_batch is None else self.prepare_batch(batch)
            del batch  # the caller alone decides when its memory is free
            self._check_step()
        self.gradient_state._remove_dataloader(self)

    @property
    def consumed_samples(self) -> int:
        """Samples handed out so far, over all ranks."""
        return self.loader.consumed_samples

    def state_dict(self) -> dict[str, Any]:
        """The resumable state after the last whole optimizer step, the same on every rank: see
        StreamingDataset.state_dict.
        """
        dataset = self.loader.dataset
        consumed = dataset.consumed_samples
        return dataset.state_at(consumed - dataset.steps.schedule.offset_at(consumed))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a state. Raises StateError for one of another order or global batch, and changes
        nothing.
        """
        if not self.allow_batch_size_change:
            check_batch_size(state, self.loader.dataset, self.batch_size_settings)
        self.loader.load_state_dict(state)
        self._awaits_state_of = self._stepped_at = None

    def seek(self, consumed_samples: int) -> None:
        """Go on at a global sample."""
        self.loader.seek(consumed_samples)
        self._awaits_state_of = self._stepped_at = None

    def set_epoch(self, epoch: int) -> None:
        """Nothing: accelerate calls it before every pass, and all passes have the same order."""

    def close(self) -> None:
        """End reading ahead. The position stays."""
        self.loader.close()

    def _watch_optimizers(self) -> None:
        """Have the optimizers that accelerate prepared until now tell where they step."""
        accelerator = self._accelerator()
        for prepared in getattr(accelerator, "_optimizers", ()):
            register = getattr(prepared.optimizer, "register_step_post_hook", None)
            if register is not None and prepared.optimizer not in self._watched:
                register(_weakly(self._note_step))
                self._watched.add(prepared.optimizer)

    def _note_step(self, *_: Any) -> None:
        """An optimizer stepped."""
        self._stepped_at = self.consumed_samples

    def _await_state(self, models: Any, folder: Any) -> None:
        """`load_state` begins, which skips a loader if the folder has no state for it."""
        self._awaits_state_of = str(folder)

    def _align_accumulation(self) -> None:
        """Where a global batch begins, have accelerate begin to count its micro-batches.

        `load_state` restores its count, which may be of within an accumulation.
        """
        accelerator = self._accelerator()
        dataset = self.loader.dataset
        if accelerator is None or dataset.steps.schedule.offset_at(dataset.consumed_samples):
            return
        accelerator.step -= accelerator.step % accelerator.gradient_accumulation_steps

    def _check_step(self) -> None:
        """Raise ConfigError if an optimizer stepped within a global batch, since the last batch."""
        dataset = self.loader.dataset
        consumed = dataset.consumed_samples
        if self._stepped_at != consumed:
            return
        schedule = dataset.steps.schedule
        offset, size = schedule.offset_at(consumed), schedule.size_at(consumed)
        if offset:
            raise ConfigError(
                f"the optimizer stepped {offset} samples into a global batch of {size}: step within "
                "accelerator.accumulate, with "
                f"gradient_accumulation_steps={size // dataset.step_samples}; or set "
                f"global_batch_size={offset}, if that is meant"
            )


def _rank_and_size(accelerator: Any) -> tuple[int, int]:
    """The data-parallel rank of a process, and how many there are."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and parallelism.non_data_parallel_size > 1:
        raise ConfigError(
            "some processes share a model, and must read the same samples: give dp_rank and dp_size "
            "of this process"
        )
    return accelerator.process_index, accelerator.num_processes


def _check_accumulation(accelerator: Any, loader: StreamLoader) -> None:
    """Raise ConfigError where `accumulate` would step after another number of samples."""
    steps = accelerator.gradient_accumulation_steps
    dataset = loader.dataset
    if steps != 1:
        check_phases(dataset.config, "accelerate", dataset.global_batch_size)
    expected_steps = dataset.global_batch_size // dataset.step_samples
    if steps not in (1, expected_steps):  # 1: loops that accumulate by themselves leave it so
        raise ConfigError(
            f"global_batch_size is {dataset.global_batch_size}, but accelerate steps after "
            f"{steps * dataset.step_samples} samples: give it gradient_accumulation_steps={expected_steps}"
        )


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls a method, and does not keep its loader alive."""
    reference = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        living = reference()
        if living is not None:
            living(*arguments)

    return hook
