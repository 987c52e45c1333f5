"""The Trainer of transformers, and those that derive from it, train from s3:// and oss:// with this.

    from streammega.integrations.transformers import StreamTrainer

    trainer = StreamTrainer(model=model, args=args, stream=config)
    trainer.train(resume_from_checkpoint=True)

`trainer_state.json` contains the position together with the number of its step. A resumed run reads no
sample again. Any number of processes can continue with the next sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from streammega.config import DataConfig
from streammega.config.fields import FIELDS
from streammega.errors import ConfigError, StateError
from streammega.integrations.accelerate import PlaceholderDataset, StreamDataLoader
from streammega.integrations.frameworks import (
    check_phases,
    class_on_demand,
    import_framework,
    with_bases,
    with_used_fields,
)
from streammega.samples.fields import Batch
from streammega.samples.segments import has_data

NO_LOSS = -100
"""The label of a token that is not learned, in all losses of transformers and torch."""
TRAINING_ARGUMENTS = 1
EVAL_DATASET = 4
"""Where these stand among the arguments of a Trainer that are not named."""
DATASET_ID = "dataset_id"
POSITION = "StreamPosition"
"""The name of the callback whose state is the position."""


def causal_lm_batch(batch: Batch) -> Batch:
    """What causal language models of Hugging Face take: "input_ids", "shift_labels", "labels" and, if
    the batch has them, "position_ids", int64 [micro_batch_size, S].

    They shift "labels" themselves, and lose the last one; "shift_labels" are taken as they are, and
    are what the loss is of. "labels" are the same ones not shifted, for metrics that shift them.
    Documents are kept apart by their positions only where a model makes no cache: call it with
    use_cache=False, as Trainers do. A "dataset_id" and stored columns stay, which no model takes.
    """
    shift_labels = batch["labels"]
    if "loss_mask" in batch:
        shift_labels = shift_labels.masked_fill(batch["loss_mask"] == 0, NO_LOSS)
    labels = torch.full_like(shift_labels, NO_LOSS)
    labels[:, 1:] = shift_labels[:, :-1]
    fields = {"input_ids": batch["tokens"], "labels": labels, "shift_labels": shift_labels}
    for name, field in batch.items():
        # others than the fields of a model are stored columns
        if name in ("position_ids", DATASET_ID) or name not in FIELDS:
            fields[name] = field
    return fields


class TrainerDataLoader(StreamDataLoader):
    """The micro-batches of a Trainer, whose arguments and processes make the global batch."""

    batch_size_settings = "gradient_accumulation_steps={count}"


class StreamTrainerMixin:
    """Before a Trainer: `class MyTrainer(StreamTrainerMixin, Trainer)`; for TRL's SFTTrainer, which
    wants a `train_dataset` in any case, one of a single record that is never trained on.

    The global batch is per_device_train_batch_size * gradient_accumulation_steps * processes. To
    resume with another one is an error, unless `stream_options` has allow_batch_size_change=True. An
    epoch ends at the end of the data; a stream without an end needs `max_steps`. Evaluation reads the
    valid split of the stream, unless the Trainer has an `eval_dataset`.

    With `fields=[..., "dataset_id"]` or `columns` in the stream's config, inputs have these too, which no
    model takes: take them out in a `compute_loss` of your own.

    Args:
        stream: what is read.
        stream_options: further options of accelerate.StreamDataLoader and StreamLoader.
        arguments, keywords: as the Trainer takes them.

    Raises ConfigError for settings that these models cannot follow.
    """

    args: Any
    accelerator: Any
    eval_dataset: Any
    _train_batch_size: int

    def __init__(
        self,
        *arguments: Any,
        stream: DataConfig,
        stream_options: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        _check(stream)
        if "rampup_batch_size" in (stream_options or {}):
            raise ConfigError("the steps of the Trainer have one size: leave out rampup_batch_size")
        # TRL's trainer needs position_ids, though its models count from 0 by themselves
        used = {"tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", DATASET_ID}
        self._stream = with_used_fields(stream, used)
        self._stream_options = dict(stream_options or {})
        self._stream_valid: StreamDataLoader | None = None
        if _evaluates_stream(stream, arguments, keywords):
            # Trainers that are to evaluate ask for a dataset before they ask for its batches
            keywords["eval_dataset"] = PlaceholderDataset(None)
        super().__init__(*arguments, **keywords)
        _check_cache(stream, getattr(self, "model", None))
        # otherwise a resume would read and drop everything before its position
        self.args.ignore_data_skip = True
        self.add_callback(_position_callback())  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> StreamDataLoader:
        """The batches of this process, on its device."""
        micro_batch_size = self._train_batch_size
        micro_batches = self.args.gradient_accumulation_steps * self.accelerator.num_processes
        global_batch_size = micro_batch_size * micro_batches
        check_phases(self._stream, "the Trainer", global_batch_size)
        if isinstance(self.eval_dataset, PlaceholderDataset):
            self.get_eval_dataloader()  # now: what cannot be evaluated would end the run at a step
        return TrainerDataLoader(
            self.accelerator,
            self._stream,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            prepare_batch=causal_lm_batch,
            **self._stream_options,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The valid split of the stream, whole global batches from its first sample every time; or
        the batches of a dataset that was given. Raises ConfigError where there is neither.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is not None and not isinstance(dataset, PlaceholderDataset):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        if self._stream_valid is not None:
            return self._stream_valid
        if not has_data(self._stream, "valid"):
            raise ConfigError(
                "the stream has no valid split to evaluate: give its DataConfig one by split or "
                "blend_per_split, or the Trainer an eval_dataset"
            )
        micro_batch_size = self.args.eval_batch_size
        self._stream_valid = StreamDataLoader(
            self.accelerator,
            self._stream,
            split="valid",
            micro_batch_size=micro_batch_size,
            global_batch_size=micro_batch_size * self.accelerator.num_processes,
            prepare_batch=causal_lm_batch,
        )
        return self._stream_valid


class CountsSteps:
    """A callback that keeps the position after the last optimizer step, and goes there at a resume.

    The Trainer fetches all micro-batches of a step before it begins: what its loader has given is
    not what was trained on.
    """

    _loader: StreamDataLoader | None = None
    _trained = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any
    ) -> None:
        """Go to the position of the checkpoint that is resumed."""
        self._loader = train_dataloader
        if state.global_step:
            train_dataloader.load_state_dict(_saved_position(state))
        self._trained = train_dataloader.consumed_samples

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any
    ) -> None:
        """A step was made of everything that was fetched."""
        self._trained = train_dataloader.consumed_samples

    def state(self) -> dict[str, Any]:
        """What the Trainer keeps in its own state."""
        position = None
        if self._loader is not None:
            position = self._loader.loader.dataset.state_at(self._trained)
        return {"args": {}, "attributes": {"position": position}}


def _saved_position(state: Any) -> Mapping[str, Any]:
    """The position in the state of a Trainer. Raises StateError if the state has no position."""
    saved = state.stateful_callbacks.get(POSITION) or {}
    attributes = saved.get("attributes", {}) if isinstance(saved, dict) else {}
    position: Mapping[str, Any] | None = attributes.get("position")
    if position is None:
        raise StateError(
            f"the checkpoint of step {state.global_step} was saved without StreamTrainerMixin, so it has "
            "no position of the stream: resume from one that has, or train without "
            "resume_from_checkpoint"
        )
    return position


def _evaluates_stream(
    config: DataConfig, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> bool:
    """Whether a Trainer is to evaluate as it trains, and has nothing but the stream to do it with."""
    eval_dataset = keywords.get("eval_dataset")
    training = keywords.get("args")
    if len(arguments) > EVAL_DATASET:
        eval_dataset = arguments[EVAL_DATASET]
    if len(arguments) > TRAINING_ARGUMENTS:
        training = arguments[TRAINING_ARGUMENTS]
    if eval_dataset is not None or getattr(training, "eval_strategy", "no") == "no":
        return False
    return has_data(config, "valid")


def _check(config: DataConfig) -> None:
    if "attention_mask" in config.field_names:
        raise ConfigError(
            "models of transformers make their masks themselves: leave attention_mask out of fields"
        )
    if config.reset_position_ids != config.reset_attention_mask:
        raise ConfigError(
            "models of transformers keep documents apart where positions begin again, and only "
            "there: set both reset_position_ids and reset_attention_mask, or neither"
        )


def _check_cache(config: DataConfig, model: Any) -> None:
    """Raise ConfigError where documents that are to be apart would not be."""
    makes_cache = getattr(getattr(model, "config", None), "use_cache", False)
    if config.reset_attention_mask and makes_cache:
        raise ConfigError(
            "models of transformers that make a cache do not keep documents apart: set "
            "use_cache=False in TrainingArguments and in the model's config"
        )


def _position_callback() -> Any:
    """A CountsSteps that is a callback of transformers, and has a state there."""
    module = import_framework("transformers.trainer_callback", "transformers")
    return with_bases(CountsSteps, module.TrainerCallback, module.ExportableState, name=POSITION)()


__getattr__ = class_on_demand(
    "StreamTrainer",
    StreamTrainerMixin,
    lambda: import_framework("transformers", "transformers").Trainer,
)
