"""The model of a run on one rank: its stages, split, wrapped for data parallelism, and driven over
the micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from streammega.gradients.boxes import offset_of
from streammega.gradients.collectives import clip, total_norm
from streammega.gradients.data_parallel import BucketedDataParallel
from streammega.parallel import Ranks
from streammega.samples.fields import Batch
from streammega.train.config import RunConfig
from streammega.train.inputs import ModelInputs
from streammega.train.losses import Losses, StepLosses
from streammega.train.model import GPT, TIED
from streammega.train.optimizer import Optimizer, make_optimizer
from streammega.train.pipeline import Pipeline
from streammega.train.stages import canonical, make_stages
from streammega.train.vocab_loss import VocabPart

Wrapped = BucketedDataParallel | DistributedDataParallel

BYTES_OF_FP32 = 4
MIB = 1 << 20


class ParallelModel:
    """The stages of a model that this rank holds, ready to train.

    `chunks` are the bare stages, `wrapped` the same in their data-parallel wrappers.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
        self.config = config
        self.ranks = ranks
        self.device = device
        self.dtype: torch.dtype = getattr(torch, config.train.dtype)
        parallel = config.parallel
        self.num_stages = parallel.pp * parallel.virtual_stages
        # Interleaved: of n stages on each rank, rank r has r, r + pp, r + 2 * pp and so on.
        self.stage_ids = list(range(ranks.at["pp"], self.num_stages, parallel.pp))
        self.chunks, self.all_names = make_stages(
            config, ranks, self.num_stages, self.stage_ids, device
        )
        self.wrapped = [_wrap(chunk, config, ranks, self.num_stages) for chunk in self.chunks]
        self._inputs = ModelInputs(config, ranks, device)
        self._pipeline = Pipeline(
            self.chunks, self.wrapped, self.stage_ids, self.num_stages, config, ranks, device
        )

    def make_optimizer(self) -> Optimizer:
        """AdamW over this rank's parameters; vectors are not decayed."""
        return make_optimizer(self.config, self.ranks, self.chunks, self.wrapped)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage_ids[-1] == self.num_stages - 1

    @property
    def counts_losses(self) -> bool:
        """Whether the losses of this rank are those that count: of tensor-parallel copies one."""
        return self.is_last and self.ranks.at["tp"] == 0

    def bounds_of(self, length: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) of every sample of so many tokens that this rank keeps."""
        return self._inputs.bounds_of(length)

    @property
    def _vocab_part(self) -> VocabPart | None:
        """The part of the vocabulary of which this rank computes logits; None: all, or none."""
        head = self.chunks[-1].head
        group = self.ranks.group("tp")
        if head is None or not isinstance(head.weight, DTensor) or group is None:
            return None
        first_entry, _ = offset_of(head.weight)
        return VocabPart(group, first_entry)

    def forward_backward(
        self, batches: Iterable[Batch], count: int, length: int, scale: float = 1.0
    ) -> Losses:
        """Gradients of all micro-batches of a step, whose samples have `length` tokens, of the
        summed loss times `scale`; and their losses.

        Each of the `count` micro-batches is taken when the computation of the one before is under
        way; pipelines take all first.
        """
        losses = StepLosses(scale, self._vocab_part)
        if self.num_stages == 1:
            self._accumulate(batches, count, length, losses)
        else:
            with contextlib.ExitStack() as stack:
                for wrapped in self.wrapped:
                    assert isinstance(wrapped, BucketedDataParallel)
                    stack.enter_context(wrapped.expect(count))
                inputs_of_step = list(self._inputs.of_step(batches, length))
                self._pipeline.run(inputs_of_step, length, losses, train=True)
        return losses.all(self.device)

    def _accumulate(
        self, batches: Iterable[Batch], count: int, length: int, losses: StepLosses
    ) -> None:
        """Forward and backward of one micro-batch after the other."""
        model = self.wrapped[0]
        for number, inputs in enumerate(self._inputs.of_step(batches, length)):
            is_last = number == count - 1
            # Gradients are reduced once, in the backward that has the sum of all.
            with contextlib.nullcontext() if is_last else model.no_sync():
                logits = model(*inputs.arguments, **inputs.keywords)
                loss = losses(logits, inputs.target)
                loss.backward()  # type: ignore[no-untyped-call]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of all stages of a replicated optimizer to their global norm; returns
        the norm before.
        """
        models = [model for model in self.wrapped if isinstance(model, BucketedDataParallel)]
        # Those that several ranks have count once in the norm, and are clipped wherever they are.
        counted = [grad for model in models for grad in model.grads(once=True)]
        norm = total_norm(counted, [self.ranks.group("tp-pp")], self.device)
        clip([grad for model in models for grad in model.grads()], norm, max_norm)
        return norm

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Losses:
        """The losses of micro-batches of validation, which no phase changes."""
        losses = StepLosses(1.0, self._vocab_part)
        length = self.config.data.sequence_length
        if self.num_stages == 1:
            model = self.wrapped[0]
            for inputs in self._inputs.of_step(batches, length):
                logits = model(*inputs.arguments, **inputs.keywords)
                losses(logits, inputs.target)
        else:
            inputs_of_step = list(self._inputs.of_step(batches, length))
            self._pipeline.run(inputs_of_step, length, losses, train=False)
        return losses.all(self.device)


def names_of(model: ParallelModel) -> dict[str, nn.Parameter]:
    """This rank's parameters by the names that they have in the whole model."""
    parameter_of: dict[str, nn.Parameter] = {}
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            parameter_of[canonical(name)] = parameter
    return parameter_of


def _wrap(chunk: GPT, config: RunConfig, ranks: Ranks, num_stages: int) -> Wrapped:
    """A stage in its data-parallel wrapper."""
    parallel = config.parallel
    group = ranks.group("dp-cp")
    if parallel.data_parallel == "torch" and group is not None:
        settings: dict[str, Any] = {}
        if parallel.bucket_size is not None:
            settings["bucket_cap_mb"] = parallel.bucket_size * BYTES_OF_FP32 / MIB
        return DistributedDataParallel(chunk, process_group=group, **settings)
    # Stages that lie on other ranks have copies of it, whose gradients are summed.
    tied = {"embedding.weight", TIED} if num_stages > 1 else ()
    return BucketedDataParallel(
        chunk,
        ranks=ranks,
        bucket_size=parallel.bucket_size,
        average=False,
        sharded=parallel.optimizer == "sharded",
        tied=tied,
        # Of fp16 the loss scale looks at them: an overflow is a smaller scale there, and no error.
        check_gradients=config.train.dtype != "float16",
        largest_gradient=config.train.largest_gradient,
    )
