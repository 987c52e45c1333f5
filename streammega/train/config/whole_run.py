"""All settings of a run, and what they must be together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streammega.config import DataConfig, parse_blend
from streammega.errors import ConfigError
from streammega.errors.redaction import redacted_repr
from streammega.order.schedule import TrainingSchedule, resolve_phase_starts, training_schedule
from streammega.train.config.optimization import TrainConfig
from streammega.train.config.sizes import ModelConfig, ParallelConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of a run: [data] with [data.storage], [model], [train], and where wanted [parallel] and
    [validation].
    """

    data: DataConfig
    model: ModelConfig
    train: TrainConfig = field()
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    validation: Mapping[str, Any] = field(default_factory=dict)
    """Name -> blend, each evaluated by itself, besides the valid split of [data]; they are read
    from their start every time.
    """

    def __repr__(self) -> str:
        return redacted_repr(self)

    def __post_init__(self) -> None:
        self._set_follow_record()
        self._set_phase_starts()
        self._check_vocabulary()
        recompute = self.train.recompute
        if isinstance(recompute, int) and recompute > self.model.layers:
            raise ConfigError(
                f"train.recompute is {recompute}, more than model.layers {self.model.layers}; "
                f"set it to full for all of them"
            )
        if self.train.dtype != "float32" and self.parallel.optimizer != "sharded":
            raise ConfigError(
                f"train.dtype = {self.train.dtype} computes with copies of fp32 parameters, which "
                f"only the sharded model makes: set parallel.optimizer = sharded"
            )
        if self.train.largest_gradient is not None and self.parallel.data_parallel == "torch":
            raise ConfigError(
                "train.largest_gradient is of gradients before they are averaged, which torch's "
                "DDP shows to nobody: set parallel.data_parallel = buckets"
            )
        for name, blend in self.validation.items():
            _check_blend(name, blend)
            letters = name.replace("_", "").replace("-", "")
            if not letters.isalnum():
                raise ConfigError(f"validation set {name!r}: names are letters, digits, - and _")

    def _set_follow_record(self) -> None:
        """What a run takes in is written beside its checkpoints, unless it says where."""
        follow = self.data.follow
        if follow is None or follow.record is not None:
            return
        out_dir = self.train.out_dir.rstrip("/")
        data = replace(self.data, follow=replace(follow, record=f"{out_dir}/follow"))
        # the way to set a field of what is frozen
        object.__setattr__(self, "data", data)

    def _set_phase_starts(self) -> None:
        """Every phase is told by its first sample, as all that reads it wants it."""
        data = resolve_phase_starts(self.data, self.train.global_batch_size, self.train.rampup)
        object.__setattr__(self, "data", data)

    def _check_vocabulary(self) -> None:
        of_data = self.data.vocab_size
        of_model = self.model.vocab_size
        if of_data is not None and of_data > of_model:
            raise ConfigError(
                f"data.vocab_size is {of_data}, more than model.vocab_size {of_model}: the model "
                f"has no embedding for the ids between; leave data.vocab_size out, "
                f"or raise model.vocab_size"
            )

    @property
    def schedule(self) -> TrainingSchedule:
        """The samples, steps and tokens of training, over all phases."""
        train = self.train
        return training_schedule(self.data, "train", train.global_batch_size, train.rampup)

    @property
    def every_stage(self) -> bool:
        """Whether every pipeline stage is given batches: positions or bounds of documents are then
        other ones in each sample, and the attention of every layer needs them.
        """
        return self.data.reset_position_ids or self.data.reset_attention_mask

    def num_samples(self) -> tuple[int, int, int]:
        """Samples the run asks of train, valid and test, as Megatron counts them."""
        train = self.train
        evaluations = 0
        if train.eval_interval:
            evaluations = train.iters // train.eval_interval + 1
        train_samples = self.schedule.samples_after(train.iters)
        valid_samples = evaluations * train.eval_iters * train.global_batch_size
        return train_samples, valid_samples, 0


def _check_blend(name: str, blend: Any) -> None:
    """Raise ConfigError for what is no blend."""
    if not isinstance(blend, (str, Sequence)):
        raise ConfigError(
            f"validation.{name} is {blend!r}; it must be a blend, such as ['s3://bucket/books']"
        )
    try:
        parse_blend(blend)
    except ConfigError as error:
        raise ConfigError(f"validation.{name}: {error}") from None
