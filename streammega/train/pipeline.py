"""torch's pipeline schedules over the stages of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from streammega.parallel import Ranks
from streammega.train.config import RunConfig
from streammega.train.inputs import StageInputs
from streammega.train.losses import StepLosses
from streammega.train.stages import vocab_part


class Pipeline:
    """Runs micro-batches through the stages of all pipeline ranks. Collective over them.

    Args:
        chunks: the stages of this rank.
        stage_ids: their numbers, of `num_stages`.
        num_stages: on all pipeline ranks.
        config: of the run.
        ranks: of the run.
        device: of the stages.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        stage_ids: Sequence[int],
        num_stages: int,
        config: RunConfig,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self._chunks = chunks
        self._stage_ids = stage_ids
        self._num_stages = num_stages
        self._config = config
        self._ranks = ranks
        self._device = device
        self._stages: dict[int, list[PipelineStage]] = {}
        """By the tokens of a sample, which phases change: a stage knows its shapes."""
        self._schedules: dict[tuple[int, int], Any] = {}
        """By the micro-batches of a step, which a ramp-up of the global batch changes, and the
        tokens of a sample.
        """
        self._losses = _LossesOfNow()

    def run(
        self, inputs_of_step: Sequence[StageInputs], length: int, losses: StepLosses, *, train: bool
    ) -> None:
        """Forward of all micro-batches, of samples of `length` tokens, and with `train` backward; the
        losses note their samples.

        torch's schedule takes micro-batches end to end and cuts them again.
        """
        schedule = self._schedule(len(inputs_of_step), length)
        self._losses.now = losses
        arguments: list[Tensor] = []
        if 0 in self._stage_ids:
            tokens = [inputs.tokens for inputs in inputs_of_step if inputs.tokens is not None]
            arguments = [torch.cat(tokens)]
        keywords: dict[str, Tensor] = {}
        for name in inputs_of_step[0].keywords:
            values = [inputs.keywords[name] for inputs in inputs_of_step]
            keywords[name] = _end_to_end(values)
        options: dict[str, Any] = {}
        if self._num_stages - 1 in self._stage_ids:
            targets = [inputs.target for inputs in inputs_of_step if inputs.target is not None]
            options["target"] = torch.cat(targets)
        if train:
            schedule.step(*arguments, **options, **keywords, return_outputs=False)
        else:
            schedule.eval(*arguments, **options, **keywords)

    def _schedule(self, micro_batches: int, length: int) -> Any:
        """torch's schedule for so many micro-batches, made once."""
        schedule = self._schedules.get((micro_batches, length))
        if schedule is None:
            schedule = self._make_schedule(micro_batches, length)
            self._schedules[micro_batches, length] = schedule
        return schedule

    def _make_schedule(self, micro_batches: int, length: int) -> Any:
        if length not in self._stages:
            kept = length // self._ranks.layout.cp
            self._stages[length] = [
                self._stage(model, stage, kept)
                for model, stage in zip(self._chunks, self._stage_ids, strict=True)
            ]
        # Gradients are those of the sum over all micro-batches: torch would divide by their number.
        options: dict[str, Any] = {"loss_fn": self._losses, "scale_grads": False}
        if self._config.parallel.virtual_stages > 1:
            stages: Any = self._stages[length]
            return ScheduleInterleaved1F1B(stages, micro_batches, **options)
        (stage,) = self._stages[length]
        return Schedule1F1B(stage, micro_batches, **options)

    def _stage(self, model: nn.Module, stage: int, kept: int) -> PipelineStage:
        """A stage whose inputs and outputs have known shapes: nothing has to be tried out. kept:
        tokens of each sample on this rank.
        """
        is_first = stage == 0
        is_last = stage == self._num_stages - 1
        return PipelineStage(
            model,
            stage,
            self._num_stages,
            self._device,
            input_args=(self._tokens(kept) if is_first else self._activations(kept),),
            output_args=(self._logits(kept) if is_last else self._activations(kept),),
            group=self._ranks.group("pp"),
        )

    def _tokens(self, kept: int) -> Tensor:
        """Of the shape of a first stage's input."""
        return torch.empty(self._rows, kept, dtype=torch.int64, device="meta")

    def _activations(self, kept: int) -> Tensor:
        """Of the shape of what goes from one stage to the next."""
        if self._config.parallel.sequence_parallel:
            kept //= self._ranks.layout.tp
        return torch.empty(
            self._rows,
            kept,
            self._config.model.dim,
            dtype=self._dtype,
            device="meta",
            requires_grad=True,
        )

    def _logits(self, kept: int) -> Tensor:
        """Of the shape of a last stage's output: of this rank's part of the vocabulary."""
        vocab_size = self._config.model.vocab_size
        part = vocab_part(vocab_size, self._ranks)
        entries = vocab_size if part is None else part.size
        return torch.empty(self._rows, kept, entries, dtype=self._dtype, device="meta")

    @property
    def _rows(self) -> int:
        return self._config.train.micro_batch_size

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._config.train.dtype)
        return dtype


class _LossesOfNow:
    """The loss function that schedules call: they outlive steps."""

    now: StepLosses

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.now(logits, target)


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors in one; those of bounds, of other lengths, filled up with their last
    column.
    """
    if tensors[0].dim() == 1:
        return torch.cat(list(tensors))
    width = max(tensor.shape[1] for tensor in tensors)
    filled: list[Tensor] = []
    for tensor in tensors:
        missing = width - tensor.shape[1]
        last_column = tensor[:, -1:].expand(-1, missing)
        filled.append(torch.cat((tensor, last_column), 1))
    return torch.cat(filled)
