"""The model of a run on one rank: its stages, split over ranks, in a data-parallel wrapper; and how they
run over the micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from streammega.gradients.buffers import local_part
from streammega.gradients.collectives import clip, inverse_of_tokens, total_norm
from streammega.gradients.data_parallel import BucketedDataParallel
from streammega.parallel import Ranks
from streammega.samples.fields import Batch
from streammega.train.config import RunConfig
from streammega.train.inputs import ModelInputs, StageInputs
from streammega.train.losses import Losses, StepLosses
from streammega.train.model import TIED
from streammega.train.optimizer import make_optimizer
from streammega.train.sharding import (
    check_gradients,
    is_split_over_tensor,
    local_grads,
    reshard,
)
from streammega.train.stages import canonical, make_stages, vocab_part


class ParallelModel:
    """The stages of a model that this rank holds, ready to train.

    chunks: the stages, as virtual pipeline stages are called in torch and Megatron. data_parallel: the
    wrapper of them all, which reduces gradients; None where fully_shard does. parameter_shapes: of the
    whole model, by name.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
        self.config = config
        self.ranks = ranks
        self.device = device
        parallel = config.parallel
        self.is_sharded = parallel.optimizer == "sharded"
        self.num_stages = parallel.pp * parallel.virtual_pipeline_stages
        # Interleaved: pipeline rank r has the stages r, r + pp, r + 2 * pp and so on.
        self.stage_ids = list(range(ranks.at["pp"], self.num_stages, parallel.pp))
        # With is_sharded, this applies fully_shard. It ties embedding and head within a stage.
        self.chunks, self.parameter_shapes = make_stages(
            config, ranks, self.num_stages, self.stage_ids, device
        )
        self.data_parallel: BucketedDataParallel | None = None
        if not self.is_sharded:
            module = self.chunks[0] if len(self.chunks) == 1 else nn.ModuleList(self.chunks)
            tied: list[str] = []
            if self.num_stages > 1:
                # The first stage has the embedding, and the last a copy of it as the head. Their gradients
                # are summed. In a list of modules each name begins with the number of the module.
                names = [name for name, _ in module.named_parameters()]
                tied = [name for name in names if name.endswith(("embedding.weight", TIED))]
            self.data_parallel = BucketedDataParallel(
                module,
                ranks=ranks,
                bucket_size=parallel.bucket_size,
                average=False,  # losses are sums: `finish_gradients` divides by all tokens
                tied=tied,
            )
        self._inputs = ModelInputs(config, ranks, device)
        self._pipeline = Pipeline(
            self.chunks, self.stage_ids, self.num_stages, config, ranks, device
        )
        self._vocab_part = vocab_part(config.model.vocab_size, ranks)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over this rank's parameters, or its parts of them where they are sharded."""
        return make_optimizer(self.chunks, self.config.train, fused=self.is_sharded)

    @property
    def module(self) -> nn.Module:
        """The module whose forward computes a micro-batch. With several stages the pipeline does."""
        return self.data_parallel if self.data_parallel is not None else self.chunks[0]

    @property
    def counts_losses(self) -> bool:
        """Whether the losses of this rank count: those of one tensor-parallel rank on last stages."""
        is_last = self.stage_ids[-1] == self.num_stages - 1
        return is_last and self.ranks.at["tp"] == 0

    def bounds_of(self, length: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) of every sample of so many tokens that this rank keeps."""
        return self._inputs.bounds_of(length)

    def forward_backward(
        self, batches: Iterable[Batch], count: int, length: int, scale: float = 1.0
    ) -> Losses:
        """Compute the gradients of a step, and return its losses. Gradients are those of the summed
        loss times `scale`.

        count: micro-batches of the step. Each is taken while the one before is computed; pipelines
        take all first. length: tokens of a sample.
        """
        losses = StepLosses(scale, self._vocab_part)
        inputs_of_step = self._inputs.of_step(batches, length)
        if self.num_stages > 1:
            # torch's schedules let fully_shard sum at the right time.
            wrapper = self.data_parallel
            with wrapper.expect(count) if wrapper is not None else contextlib.nullcontext():
                self._pipeline.run(list(inputs_of_step), length, losses, train=True)
            return losses.all(self.device)
        for number, inputs in enumerate(inputs_of_step):
            # Gradients are reduced once, in the backward that has the sum of all.
            with gradient_sync(self.module, is_last=number == count - 1):
                logits = self.module(*inputs.arguments, **inputs.keywords)
                loss = losses(logits, inputs.target)
                loss.backward()  # type: ignore[no-untyped-call]
        return losses.all(self.device)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Losses:
        """The losses of micro-batches of validation. Phases do not change their length."""
        losses = StepLosses(1.0, self._vocab_part)
        length = self.config.data.sequence_length
        inputs_of_step = self._inputs.of_step(batches, length)
        if self.num_stages > 1:
            self._pipeline.run(list(inputs_of_step), length, losses, train=False)
        else:
            for inputs in inputs_of_step:
                losses(self.module(*inputs.arguments, **inputs.keywords), inputs.target)
        if self.is_sharded:
            for chunk in self.chunks:
                reshard(chunk)
        return losses.all(self.device)

    def finish_gradients(self, tokens: Tensor) -> None:
        """Make the gradients those of the mean loss over the tokens of all ranks. Call it after the last
        backward of a step, on all ranks together.

        tokens: unmasked tokens of this rank, 0 on all but the last stage. With BucketedDataParallel
        it raises GradientError on every rank if an element is not finite.
        """
        if self.data_parallel is not None:
            # It sums over dp-cp ranks and tied copies, checks, and divides.
            self.data_parallel.finish_grad_sync(tokens)
            return
        # fully_shard has summed over dp-cp ranks in backward. The same remains to be done here.
        parameters = named_parameters(self)
        embedding = parameters.get("embedding.weight")
        if self.num_stages > 1 and embedding is not None and embedding.grad is not None:
            # The first stage has the embedding, and the last a copy of it as the head.
            self.ranks.all_reduce(local_part(embedding.grad), "embedding")
        grads = local_grads(parameters)
        # Only the last stage counts tokens, and all stages need the number.
        groups = [self.ranks.group("dp-cp"), self.ranks.group("pp")]
        factor = inverse_of_tokens(tokens, groups, self.device)
        torch._foreach_mul_(list(grads.values()), factor.float())

    def gradients(self) -> list[Tensor]:
        """This rank's parts of all gradients of the optimizer."""
        return list(local_grads(named_parameters(self)).values())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of all stages to their global norm; returns the norm before.

        Raises GradientError on every rank where a gradient of a sharded model is not finite.
        """
        parameters = named_parameters(self)
        grads = local_grads(parameters)
        # Gradients that several ranks have count once in the norm. All of them are clipped.
        counted = [
            grad for name, grad in grads.items() if self.is_first_copy(name, parameters[name])
        ]
        groups = [self.ranks.group("tp-pp")]
        if self.is_sharded:
            groups.append(self.ranks.group("dp-cp"))
        norm = total_norm(counted, groups, self.device)
        if self.is_sharded:
            check_gradients(grads, norm, list(self.parameter_shapes))
        clip(list(grads.values()), norm, max_norm)
        return norm

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for module in self.chunks if self.data_parallel is None else [self.data_parallel]:
            module.zero_grad()

    def is_first_copy(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether no tensor-parallel rank or pipeline stage before this one has the same elements of a
        parameter. name: in the whole model.
        """
        is_tied_copy = name == "embedding.weight" and not self.ranks.is_first_stage
        return not is_tied_copy and (is_split_over_tensor(parameter) or self.ranks.at["tp"] == 0)


def named_parameters(model: ParallelModel) -> dict[str, nn.Parameter]:
    """This rank's parameters, by their names in the whole model."""
    return {
        canonical(name): parameter
        for chunk in model.chunks
        for name, parameter in chunk.named_parameters()
    }


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """In this context backward sums gradients over ranks if it is the last of its step, and else only
    adds them up. model: divided by fully_shard, or a wrapper with `no_sync`.
    """
    if isinstance(model, FSDPModule):
        # The last backward also frees the gathered parameters.
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        yield
    else:
        with contextlib.nullcontext() if is_last else model.no_sync():  # type: ignore[operator]
            yield


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
