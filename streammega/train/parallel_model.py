"""The model of a run on one rank: its stages, split, wrapped for data parallelism, and driven over
the micro-batches.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from streammega.gradients.buffers import local_part
from streammega.gradients.collectives import clip, inverse_of_tokens, total_norm
from streammega.gradients.data_parallel import BucketedDataParallel
from streammega.parallel import Ranks
from streammega.samples.fields import Batch
from streammega.train.config import RunConfig
from streammega.train.inputs import ModelInputs
from streammega.train.losses import Losses, StepLosses
from streammega.train.model import GPT, TIED
from streammega.train.pipeline import Pipeline
from streammega.train.sharding import (
    check_gradients,
    check_largest,
    is_split_over_tensor,
    local_grads,
    reshard,
    set_last_micro_batch,
)
from streammega.train.stages import canonical, make_stages, vocab_part
from streammega.train.vocab_loss import VocabPart

BYTES_OF_FP32 = 4
MIB = 1 << 20


class ParallelModel:
    """The stages of a model that this rank holds, ready to train.

    `chunks` are the bare stages, `data_parallel` the wrapper of them all; None where each is
    sharded.
    """

    def __init__(self, config: RunConfig, ranks: Ranks, device: torch.device) -> None:
        self.config = config
        self.ranks = ranks
        self.device = device
        self.dtype: torch.dtype = getattr(torch, config.train.dtype)
        parallel = config.parallel
        self.is_sharded = parallel.optimizer == "sharded"
        self.num_stages = parallel.pp * parallel.virtual_stages
        # Interleaved: of n stages on each rank, rank r has r, r + pp, r + 2 * pp and so on.
        self.stage_ids = list(range(ranks.at["pp"], self.num_stages, parallel.pp))
        self.chunks, self.all_names = make_stages(
            config, ranks, self.num_stages, self.stage_ids, device
        )
        self.data_parallel = _wrap(self.chunks, config, ranks, self.num_stages)
        self._inputs = ModelInputs(config, ranks, device)
        self._pipeline = Pipeline(
            self.chunks, self.stage_ids, self.num_stages, config, ranks, device
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over this rank's parameters; vectors are not decayed.

        Where the stages are sharded, each rank has the state of its parts.
        """
        train = self.config.train
        which = self.config.parallel.optimizer
        settings: dict[str, Any] = {
            "lr": train.lr,
            "betas": (train.beta1, train.beta2),
            "fused": self.is_sharded,
        }
        groups = _groups(self.chunks, train.weight_decay)
        if which == "zero" and self.ranks.group("dp-cp") is not None:
            return _make_zero(groups, self.ranks, **settings)
        return torch.optim.AdamW(groups, **settings)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage_ids[-1] == self.num_stages - 1

    @property
    def counts_losses(self) -> bool:
        """Whether the losses of this rank are those that count: of tensor-parallel copies one."""
        return self.is_last and self.ranks.at["tp"] == 0

    @property
    def whole(self) -> nn.Module:
        """What computes a micro-batch where there are no pipeline stages."""
        return self.data_parallel if self.data_parallel is not None else self.chunks[0]

    def bounds_of(self, length: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) of every sample of so many tokens that this rank keeps."""
        return self._inputs.bounds_of(length)

    @property
    def _vocab_part(self) -> VocabPart | None:
        """The part of the vocabulary of which this rank computes logits; None: all."""
        return vocab_part(self.config.model.vocab_size, self.ranks)

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
            return losses.all(self.device)
        inputs_of_step = list(self._inputs.of_step(batches, length))
        with contextlib.ExitStack() as stack:
            # torch's schedules know by themselves when fully_shard has to sum
            if isinstance(self.data_parallel, BucketedDataParallel):
                stack.enter_context(self.data_parallel.expect(count))
            self._pipeline.run(inputs_of_step, length, losses, train=True)
        return losses.all(self.device)

    def _accumulate(
        self, batches: Iterable[Batch], count: int, length: int, losses: StepLosses
    ) -> None:
        """Forward and backward of one micro-batch after the other."""
        model = self.whole
        for number, inputs in enumerate(self._inputs.of_step(batches, length)):
            # Gradients are reduced once, in the backward that has the sum of all.
            with synchronised(model, is_last=number == count - 1):
                logits = model(*inputs.arguments, **inputs.keywords)
                loss = losses(logits, inputs.target)
                loss.backward()  # type: ignore[no-untyped-call]

    def finish_gradients(self, tokens: Tensor) -> None:
        """Sum gradients over all ranks, and divide them by the tokens of all.

        tokens: unmasked ones of this rank; none on all but the last stage. Raises GradientError on
        every rank where a gradient of BucketedDataParallel is not finite, or any is too large.
        """
        if isinstance(self.data_parallel, BucketedDataParallel):
            self.data_parallel.finish_grad_sync(tokens)
            return
        if self.is_sharded:
            self._sum_tied_gradients()
            largest = self.config.train.largest_gradient
            if largest is not None:
                check_largest(local_grads(names_of(self)), largest)
        groups = [self.ranks.group("dp-cp"), self.ranks.group("pp")]
        factor = inverse_of_tokens(tokens, groups, self.device)
        if not self.is_sharded:
            # torch's DDP has averaged over ranks what is to be a sum.
            factor = factor * self.ranks.size("dp-cp")
        torch._foreach_mul_(self.gradients(), factor.float())

    def _sum_tied_gradients(self) -> None:
        """Add to the gradient of the embedding that of the stage on which it is the head."""
        if self.num_stages == 1:
            return
        embedding = names_of(self).get("embedding.weight")
        if embedding is not None and embedding.grad is not None:
            self.ranks.all_reduce(local_part(embedding.grad), "embedding")

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for module in self.chunks if self.data_parallel is None else [self.data_parallel]:
            module.zero_grad()

    def gradients(self) -> list[Tensor]:
        """This rank's parts of all gradients that the optimizer will see."""
        return list(local_grads(names_of(self)).values())

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of all stages to their global norm; returns the norm before.

        Raises GradientError on every rank where a gradient of torch's own wrappers is not finite.
        """
        parameters = names_of(self)
        grads = local_grads(parameters)
        # Those that several ranks have count once in the norm, and are clipped wherever they are.
        counted = [
            grad for name, grad in grads.items() if self.is_first_copy(name, parameters[name])
        ]
        groups = [self.ranks.group("tp-pp")]
        if self.is_sharded:
            groups.append(self.ranks.group("dp-cp"))
        norm = total_norm(counted, groups, self.device)
        if not isinstance(self.data_parallel, BucketedDataParallel):
            check_gradients(grads, norm)
        clip(list(grads.values()), norm, max_norm)
        return norm

    def is_first_copy(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether no other tensor-parallel rank or pipeline stage before this one has the same
        elements of a parameter. name: in the whole model.
        """
        is_tied_copy = name == "embedding.weight" and not self.ranks.is_first_stage
        return not is_tied_copy and (is_split_over_tensor(parameter) or self.ranks.at["tp"] == 0)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Losses:
        """The losses of micro-batches of validation, which no phase changes."""
        losses = StepLosses(1.0, self._vocab_part)
        length = self.config.data.sequence_length
        if self.num_stages == 1:
            model = self.whole
            for inputs in self._inputs.of_step(batches, length):
                logits = model(*inputs.arguments, **inputs.keywords)
                losses(logits, inputs.target)
        else:
            inputs_of_step = list(self._inputs.of_step(batches, length))
            self._pipeline.run(inputs_of_step, length, losses, train=False)
        if self.is_sharded:
            for chunk in self.chunks:
                reshard(chunk)
        return losses.all(self.device)


def names_of(model: ParallelModel) -> dict[str, nn.Parameter]:
    """This rank's parameters by the names that they have in the whole model."""
    parameter_of: dict[str, nn.Parameter] = {}
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            parameter_of[canonical(name)] = parameter
    return parameter_of


@contextlib.contextmanager
def synchronised(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Within it a backward sums gradients over ranks, if it is the last of a step."""
    if isinstance(model, BucketedDataParallel | DistributedDataParallel):
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield
    else:
        set_last_micro_batch(model, is_last)
        yield


def _wrap(
    chunks: Sequence[GPT], config: RunConfig, ranks: Ranks, num_stages: int
) -> BucketedDataParallel | DistributedDataParallel | None:
    """The data-parallel wrapper of all stages of this rank; None where they are sharded."""
    parallel = config.parallel
    if parallel.optimizer == "sharded":
        return None
    group = ranks.group("dp-cp")
    if parallel.data_parallel == "torch" and group is not None:
        settings: dict[str, Any] = {}
        if parallel.bucket_size is not None:
            settings["bucket_cap_mb"] = parallel.bucket_size * BYTES_OF_FP32 / MIB
        return DistributedDataParallel(chunks[0], process_group=group, **settings)
    modules = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
    tied: list[str] = []
    if num_stages > 1:
        # the first and the last stage have copies of it, whose gradients are summed
        names = [name for name, _ in modules.named_parameters()]
        tied = [name for name in names if name.endswith(("embedding.weight", TIED))]
    return BucketedDataParallel(
        modules,
        ranks=ranks,
        bucket_size=parallel.bucket_size,
        average=False,
        tied=tied,
        largest_gradient=config.train.largest_gradient,
    )


def _groups(chunks: Sequence[nn.Module], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters of all stages, matrices and vectors apart; those that stages share are in once."""
    parameters: dict[int, nn.Parameter] = {}
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameters[id(parameter)] = parameter
    matrices = [parameter for parameter in parameters.values() if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters.values() if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _make_zero(
    groups: Sequence[Mapping[str, Any]], ranks: Ranks, **settings: Any
) -> torch.optim.Optimizer:
    """torch's ZeroRedundancyOptimizer of AdamW."""
    with warnings.catch_warnings():
        # its package compiles other optimizers when it is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    # Its constructor takes one group; the others are added.
    first, *others = groups
    zero = ZeroRedundancyOptimizer(
        first["params"],
        torch.optim.AdamW,
        process_group=ranks.group("dp-cp"),
        weight_decay=first["weight_decay"],
        **settings,
    )
    for group in others:
        zero.add_param_group(dict(group))
    return zero
