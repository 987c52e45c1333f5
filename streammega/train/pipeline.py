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
        stage_ids: their numbers.
        num_stages: of all pipeline ranks.
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
        """By the tokens of a sample, which phases change: a stage has fixed shapes."""
        self._schedules: dict[tuple[int, int], Any] = {}
        """By the micro-batches of a step, which a ramp-up changes, and the tokens of a sample."""
        self._losses: StepLosses | None = None

    def run(
        self, inputs_of_step: Sequence[StageInputs], length: int, losses: StepLosses, *, train: bool
    ) -> None:
        """Forward of all micro-batches, and with `train` backward. `losses` keeps the losses of all
        samples, which have `length` tokens.

        torch's schedule takes the micro-batches as one batch, and cuts it again.
        """
        schedule = self._schedule(len(inputs_of_step), length)
        self._losses = losses
        arguments: list[Tensor] = []
        if 0 in self._stage_ids:
            tokens = [inputs.tokens for inputs in inputs_of_step if inputs.tokens is not None]
            arguments = [torch.cat(tokens)]
        keywords: dict[str, Tensor] = {}
        for name in inputs_of_step[0].keywords:
            values = [inputs.keywords[name] for inputs in inputs_of_step]
            keywords[name] = _concatenate(values)
        options: dict[str, Any] = {}
        if self._num_stages - 1 in self._stage_ids:
            targets = [inputs.target for inputs in inputs_of_step if inputs.target is not None]
            options["target"] = torch.cat(targets)
        if train:
            schedule.step(*arguments, **options, **keywords, return_outputs=False)
        else:
            schedule.eval(*arguments, **options, **keywords)

    def _schedule(self, num_micro_batches: int, length: int) -> Any:
        """torch's schedule for so many micro-batches, made once.

        A schedule for another placement of stages changes three places: this one, `ParallelModel`,
        which gives rank r the stages r, r + pp, ..., and `check_layout`, which knows the numbers of
        micro-batches that fit. BucketedDataParallel counts one gradient of each parameter a
        micro-batch by its hook, which schedules that split the backward (zero bubble) do not call.
        """
        key = num_micro_batches, length
        if key not in self._schedules:
            if length not in self._stages:
                self._stages[length] = self._make_stages(length)
            stages: Any = self._stages[length]
            # Gradients are sums over all micro-batches. torch would divide them by their number.
            options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
            if self._config.parallel.virtual_pipeline_stages > 1:
                schedule: Any = ScheduleInterleaved1F1B(stages, num_micro_batches, **options)
            else:
                schedule = Schedule1F1B(stages[0], num_micro_batches, **options)
            self._schedules[key] = schedule
        for stage in self._stages[length]:
            # torch keeps the number of the schedule that was initialised last; stages are shared
            stage.chunks = num_micro_batches
        return self._schedules[key]

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """A schedule is used for many steps, and each step has losses of its own."""
        assert self._losses is not None
        return self._losses(logits, target)

    def _make_stages(self, length: int) -> list[PipelineStage]:
        """Stages with known shapes of inputs and outputs, so that torch need not find them by a run."""
        config = self._config
        layout = self._ranks.layout
        dtype: torch.dtype = getattr(torch, config.train.dtype)
        rows = config.train.micro_batch_size
        kept = length // layout.cp
        between = kept // layout.tp if config.parallel.sequence_parallel else kept
        part = vocab_part(config.model.vocab_size, self._ranks)
        entries = config.model.vocab_size if part is None else part.size
        with torch.device("meta"):
            tokens = torch.empty(rows, kept, dtype=torch.int64)
            activations = torch.empty(
                rows, between, config.model.dim, dtype=dtype, requires_grad=True
            )
            logits = torch.empty(rows, kept, entries, dtype=dtype)
        return [
            PipelineStage(
                chunk,
                stage,
                self._num_stages,
                self._device,
                input_args=(tokens if stage == 0 else activations,),
                output_args=(logits if stage == self._num_stages - 1 else activations,),
                group=self._ranks.group("pp"),
            )
            for chunk, stage in zip(self._chunks, self._stage_ids, strict=True)
        ]


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of several tensors in one; of one dimension, their elements.

    Rows of cu_seqlens differ in length: shorter ones repeat their last bound.
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
