"""The model of a run on one rank, and how a step makes its gradients on any layout.

forward, backward   `forward_backward` runs one micro-batch after the other, or all of them through the
                    `pipeline`. The last backward sums gradients over dp-cp ranks as it makes them.
                    With optimizer = "replicated" BucketedDataParallel does that, bucket by bucket;
                    with "sharded" fully_shard, layer by layer, which gathers parameters too
within a layer      tensor-parallel ranks sum activations, or with sequence parallelism gather and
                    scatter them (`stages.split_layers`). Context-parallel ranks gather keys and
                    values, and scatter their gradients (`attention`)
loss                a sum over tokens; of divided vocabularies ranks exchange what they need (`losses`)
`finish_gradients`  waits for the sums, adds up both copies of the embedding, and divides by the
                    tokens of all ranks
`clip_grad_norm_`   takes one norm over all ranks
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from streammega.errors import GradientError
from streammega.gradients.buffers import local_part
from streammega.gradients.collectives import clip, inverse_of_tokens, total_norm
from streammega.gradients.data_parallel import BucketedDataParallel
from streammega.gradients.grad_checks import MEND
from streammega.order.sharding import zigzag_bounds
from streammega.parallel import Ranks
from streammega.parallel.groups import WORLD
from streammega.samples.fields import Batch
from streammega.train.config import RunConfig
from streammega.train.inputs import StageInputs, stage_inputs
from streammega.train.losses import Losses, StepLosses
from streammega.train.pipeline import Pipeline
from streammega.train.stages import TENSOR, canonical, make_stages, vocab_part


class ParallelModel:
    """The stages of a model that this rank holds, ready to train.

    chunks: the stages, as virtual pipeline stages are called in torch and Megatron. data_parallel: the
    wrapper of them all, which reduces gradients; None where fully_shard does. module: the wrapper, or
    what it would wrap. parameter_shapes: of the whole model, by name.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
        self.config = config
        self.ranks = ranks
        self.device = device
        self.is_sharded = config.parallel.optimizer == "sharded"
        # Embedding and head are tied within a stage, and with is_sharded fully_shard is applied.
        stages = make_stages(config, ranks, device)
        self.chunks = stages.chunks
        self.parameter_shapes = stages.parameter_shapes
        self.module: nn.Module = (
            self.chunks[0] if len(self.chunks) == 1 else nn.ModuleList(self.chunks)
        )
        self.data_parallel: BucketedDataParallel | None = None
        if not self.is_sharded:
            self.module = self.data_parallel = BucketedDataParallel(
                self.module,
                ranks=ranks,
                bucket_size=config.parallel.bucket_size,
                average=False,  # losses are sums: `finish_gradients` divides by all tokens
            )
        self._pipeline: Pipeline | None = None
        if stages.num_stages > 1:
            self._pipeline = Pipeline(stages, config, ranks, device)
        self._vocab_part = vocab_part(config.model.vocab_size, ranks)
        self.counts_losses = stages.has_last and ranks.at["tp"] == 0
        """Whether the losses of this rank count: those of one tensor-parallel rank on last stages."""

    def bounds_of(self, length: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) of every sample of so many tokens that this rank keeps."""
        return zigzag_bounds(length, self.ranks.at["cp"], self.ranks.layout.cp)

    def forward_backward(
        self, batches: Iterable[Batch], count: int, length: int, scale: float = 1.0
    ) -> Losses:
        """Compute the gradients of a step, and return its losses. Gradients are those of the summed
        loss times `scale`.

        count: micro-batches of the step. Each is taken while the one before is computed; pipelines
        take all first. length: tokens of a sample.
        """
        losses = StepLosses(scale, self._vocab_part)
        inputs_of_step = self._inputs(batches, length)
        if self._pipeline is not None:
            # torch's schedules let fully_shard sum at the right time.
            wrapper = self.data_parallel
            with wrapper.expect(count) if wrapper is not None else contextlib.nullcontext():
                self._pipeline.run(list(inputs_of_step), length, losses, train=True)
            return losses.all(self.device)
        for number, inputs in enumerate(inputs_of_step):
            # Gradients are reduced once, in the backward that has the sum of all.
            with gradient_sync(self.module, is_last=number == count - 1):
                logits = self.module(inputs.tokens, **inputs.keywords)
                loss = losses(logits, inputs.target)
                loss.backward()  # type: ignore[no-untyped-call]
        return losses.all(self.device)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Losses:
        """The losses of micro-batches of validation. Phases do not change their length."""
        losses = StepLosses(1.0, self._vocab_part)
        length = self.config.data.sequence_length
        inputs_of_step = self._inputs(batches, length)
        if self._pipeline is not None:
            self._pipeline.run(list(inputs_of_step), length, losses, train=False)
        else:
            for inputs in inputs_of_step:
                losses(self.module(inputs.tokens, **inputs.keywords), inputs.target)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                # No backward frees the gathered parameters.
                module.reshard()
        return losses.all(self.device)

    def _inputs(self, batches: Iterable[Batch], length: int) -> Iterator[StageInputs]:
        """The inputs of the micro-batches of a step, one by one."""
        kept = self.bounds_of(length)
        micro_batch_size = self.config.train.micro_batch_size
        for batch in batches:
            yield stage_inputs(batch, kept, micro_batch_size, self.device)

    def finish_gradients(self, tokens: Tensor) -> None:
        """Make the gradients those of the mean loss over the tokens of all ranks. Call it after the last
        backward of a step, on all ranks together.

        tokens: unmasked tokens of this rank, 0 on all but the last stage. With BucketedDataParallel
        it raises GradientError on every rank if an element is not finite.
        """
        if self.data_parallel is not None:
            # fully_shard has summed over dp-cp ranks in backward. What follows is the same for both, so
            # BucketedDataParallel is given neither `tied` nor the tokens.
            self.data_parallel.finish_grad_sync()
        embedding = named_parameters(self).get("embedding.weight")
        if embedding is not None and embedding.grad is not None:
            # Of several stages the first has the embedding, and the last a copy of it as the head.
            self.ranks.all_reduce(local_part(embedding.grad), "embedding")
        # Only the last stage counts tokens, and all stages need the number.
        groups = [self.ranks.group("dp-cp"), self.ranks.group("pp")]
        factor = inverse_of_tokens(tokens, groups, self.device)
        torch._foreach_mul_(self.gradients(), factor.float())

    def gradients(self) -> list[Tensor]:
        """This rank's parts of all gradients of the optimizer."""
        return list(self._local_grads().values())

    def _local_grads(self) -> dict[str, Tensor]:
        return {
            name: local_part(parameter.grad)
            for name, parameter in named_parameters(self).items()
            if parameter.grad is not None
        }

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of all stages to their global norm; returns the norm before.

        Raises GradientError on every rank where a gradient of a sharded model is not finite.
        """
        grads = self._local_grads()
        # Gradients that several ranks have count once in the norm. All of them are clipped.
        parameters = named_parameters(self)
        counted = [
            grad for name, grad in grads.items() if self._is_first_copy(name, parameters[name])
        ]
        groups = [self.ranks.group("tp-pp")]
        if self.is_sharded:
            groups.append(self.ranks.group("dp-cp"))
        norm = total_norm(counted, groups, self.device)
        if self.is_sharded:
            self._check_finite(grads, norm)
        clip(list(grads.values()), norm, max_norm)
        return norm

    def _is_first_copy(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether no tensor-parallel rank or pipeline stage before this one has the same elements of a
        parameter. name: in the whole model.
        """
        if name == "embedding.weight" and not self.ranks.is_first_stage:
            return False
        return self.ranks.at["tp"] == 0 or _is_split_over_tensor(parameter)

    def _check_finite(self, grads: dict[str, Tensor], norm: Tensor) -> None:
        """Raise GradientError on every rank if a gradient is not finite. Call it on all ranks together.

        grads: this rank's parts, by name. norm: of all gradients of all ranks, and equal on all: it
        decides who takes part in the search.
        """
        if norm.isfinite():
            return
        names = list(self.parameter_shapes)
        bad = [names.index(name) for name, grad in grads.items() if not grad.isfinite().all()]
        first = torch.tensor(min(bad, default=len(names)), device=self.device)
        self.ranks.all_reduce(first, WORLD, op=dist.ReduceOp.MIN)
        # The norm of finite gradients may overflow: who calls `clip_grad_norm_` raises for that.
        if first < len(names):
            raise GradientError(
                f"the gradient of {names[int(first)]} is not finite, summed over the ranks; {MEND}"
            )

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.module.zero_grad()


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


def _is_split_over_tensor(parameter: nn.Parameter) -> bool:
    """Whether tensor-parallel ranks have different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == TENSOR and not placement.is_replicate()
        for name, placement in zip(names, parameter.placements, strict=True)
    )
