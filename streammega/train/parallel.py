"""The model of a run on one rank: its stages, split, wrapped for data parallelism, and driven over
the micro-batches.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from streammega.gradients.boxes import offset_of
from streammega.gradients.buffers import local_part
from streammega.gradients.collectives import clip, total_norm
from streammega.gradients.data_parallel import BucketedDataParallel
from streammega.gradients.sharded_optimizer import ShardedOptimizer
from streammega.order.rank_samples import zigzag_bounds
from streammega.parallel import Ranks
from streammega.parallel.exchange import RankBatch
from streammega.samples.fields import Batch
from streammega.train.config import RunConfig
from streammega.train.model import GPT, TIED
from streammega.train.stages import canonical, make_stages
from streammega.train.visibility import longest_document
from streammega.train.vocab_loss import VocabPart, vocab_parallel_loss

IGNORED = -100
"""The label of positions without loss."""

Optimizer = torch.optim.Optimizer | ShardedOptimizer
Inputs = tuple[tuple[Tensor, ...], dict[str, Tensor]]
Wrapped = BucketedDataParallel | DistributedDataParallel


@dataclass(frozen=True)
class Losses:
    """Of some micro-batches on this rank: loss summed over the unmasked tokens of every sample, and
    how many those are.

    Both float32 [samples]; without samples where the loss is not computed.
    """

    loss: Tensor
    tokens: Tensor


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
        self.stage_ids = [ranks.at["pp"] + parallel.pp * n for n in range(parallel.virtual_stages)]
        self.chunks, self.all_names = make_stages(
            config, ranks, self.num_stages, self.stage_ids, device
        )
        self.wrapped = [_wrap(chunk, config, ranks, self.num_stages) for chunk in self.chunks]
        self._schedules: dict[int, Any] = {}

    def make_optimizer(self) -> Optimizer:
        """AdamW over this rank's parameters; vectors are not decayed."""
        train = self.config.train
        kind = self.config.parallel.optimizer
        settings: dict[str, Any] = {
            "lr": train.lr,
            "betas": (train.beta1, train.beta2),
            "fused": kind == "sharded",
        }
        if kind == "sharded":
            wrapped = [model for model in self.wrapped if isinstance(model, BucketedDataParallel)]

            def decay(_: str, parameter: nn.Parameter) -> dict[str, float]:
                return {"weight_decay": train.weight_decay if parameter.dim() > 1 else 0.0}

            return ShardedOptimizer(wrapped, torch.optim.AdamW, settings_of=decay, **settings)
        parameters = list({id(p): p for chunk in self.chunks for p in chunk.parameters()}.values())
        groups = [
            {"params": own, "weight_decay": value}
            for own, value in (
                ([p for p in parameters if p.dim() > 1], train.weight_decay),
                ([p for p in parameters if p.dim() <= 1], 0.0),
            )
            if own
        ]
        if kind == "zero" and self.ranks.group("dp-cp") is not None:
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
    def _vocab_part(self) -> VocabPart | None:
        """The part of the vocabulary of which this rank computes logits; None: all, or none."""
        head = self.chunks[-1].head
        group = self.ranks.group("tp")
        if head is None or not isinstance(head.weight, DTensor) or group is None:
            return None
        return VocabPart(group, offset_of(head.weight)[0])

    def forward_backward(self, batches: Iterable[Batch], count: int, scale: float = 1.0) -> Losses:
        """Gradients of all micro-batches of a step, of the summed loss times `scale`; and their
        losses.

        Each of the `count` micro-batches is taken when the computation of the one before is under
        way; pipelines take all first.
        """
        losses = _LossList(scale, self._vocab_part)
        if self.num_stages == 1:
            model = self.wrapped[0]
            for number, (inputs, target) in enumerate(self._all_inputs(batches)):
                with model.no_sync() if number < count - 1 else contextlib.nullcontext():
                    losses(model(*inputs[0], **inputs[1]), target).backward()  # type: ignore[no-untyped-call]
        else:
            with contextlib.ExitStack() as stack:
                for wrapped in self.wrapped:
                    assert isinstance(wrapped, BucketedDataParallel)
                    stack.enter_context(wrapped.expect(count))
                self._run_schedule(list(batches), losses, train=True)
        return losses.taken(self.device)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of all stages of a replicated optimizer to their global norm; returns
        the norm before.
        """
        models = [model for model in self.wrapped if isinstance(model, BucketedDataParallel)]
        once = [grad for model in models for grad in model.grads(once=True)]
        norm = total_norm(once, [self.ranks.group("tp-pp")], self.device)
        clip([grad for model in models for grad in model.grads()], norm, max_norm)
        return norm

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Losses:
        """The losses of micro-batches."""
        losses = _LossList(1.0, self._vocab_part)
        if self.num_stages == 1:
            for inputs, target in self._all_inputs(batches):
                losses(self.wrapped[0](*inputs[0], **inputs[1]), target)
        else:
            self._run_schedule(batches, losses, train=False)
        return losses.taken(self.device)

    def _all_inputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Inputs, Tensor | None]]:
        """`_inputs` of the micro-batches of a step, one by one, and the longest document of each.

        Kernels for documents want that number on the host. Where nobody counted it, it is asked of
        the device once for all of a step, before anything is under way: in each micro-batch, the
        host would wait for the computation of the one before.
        """
        batches = iter(batches)
        for batch in batches:
            longest = batch.longest if isinstance(batch, RankBatch) else None
            if longest is None and self.device.type != "cpu" and "cu_seqlens" in batch:
                yield from self._inputs_asked_for([batch, *batches])
                return
            inputs, target = self._inputs(batch)
            if "cu_seqlens" in inputs[1]:
                bounds = inputs[1]["cu_seqlens"]
                known = longest_document(bounds).cpu() if longest is None else torch.tensor(longest)
                inputs[1]["longest"] = known.expand(len(bounds))
            yield inputs, target

    def _inputs_asked_for(self, batches: Sequence[Batch]) -> list[tuple[Inputs, Tensor | None]]:
        made = [self._inputs(batch) for batch in batches]
        bounds = [keywords["cu_seqlens"] for (_, keywords), _ in made if "cu_seqlens" in keywords]
        if bounds:
            longest = torch.stack([longest_document(own) for own in bounds]).max().cpu()
            for (_, keywords), _ in made:
                keywords["longest"] = longest.expand(len(keywords["cu_seqlens"]))
        return made

    def _inputs(self, batch: Batch) -> tuple[Inputs, Tensor | None]:
        """((tokens, if any), keywords of every stage, labels with IGNORED where
        there is no loss).
        """
        samples = self.config.train.micro_batch_size
        positions = batch.get("position_ids")
        bounds = self.bounds
        if positions is None:
            kept = torch.cat(
                [torch.arange(start, stop, device=self.device) for start, stop in bounds]
            )
            positions = kept.expand(samples, -1)
        keywords = {"position_ids": positions}
        whole = batch.get("cu_seqlens_whole", batch.get("cu_seqlens"))
        if whole is not None:
            keywords["cu_seqlens"] = whole
        target = (
            batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED)
            if "labels" in batch
            else None
        )
        return ((batch["tokens"],) if "tokens" in batch else (), keywords), target

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Tokens [start, stop) of every sample that this rank keeps."""
        return zigzag_bounds(
            self.config.data.sequence_length, self.ranks.at["cp"], self.ranks.layout.cp
        )

    def _run_schedule(self, batches: Sequence[Batch], losses: _LossList, *, train: bool) -> None:
        """torch's pipeline schedule over the micro-batches, which it takes end to end and cuts
        again.
        """
        schedule = self._schedule(len(batches))
        made = list(self._all_inputs(batches))
        arguments = [
            torch.cat(parts) for parts in zip(*(inputs[0] for inputs, _ in made), strict=True)
        ]
        keywords = {
            name: _end_to_end([inputs[1][name] for inputs, _ in made]) for name in made[0][0][1]
        }
        targets = [target for _, target in made if target is not None]
        first = 0 in self.stage_ids
        last = self.is_last
        options: dict[str, Any] = {"target": torch.cat(targets)} if last else {}
        self._losses.current = losses
        if train:
            schedule.step(
                *(arguments if first else ()), **options, **keywords, return_outputs=False
            )
        else:
            schedule.eval(*(arguments if first else ()), **options, **keywords)

    def _schedule(self, micro_batches: int) -> Any:
        if micro_batches not in self._schedules:
            parallel = self.config.parallel
            if not self._schedules:
                self._losses = _CurrentLosses()
                self._stages = [
                    self._stage(chunk, stage)
                    for chunk, stage in zip(self.wrapped, self.stage_ids, strict=True)
                ]
            options: dict[str, Any] = {"loss_fn": self._losses, "scale_grads": False}
            if parallel.virtual_stages > 1:
                self._schedules[micro_batches] = ScheduleInterleaved1F1B(
                    self._stages,  # type: ignore[arg-type]
                    micro_batches,
                    **options,
                )
            else:
                self._schedules[micro_batches] = Schedule1F1B(
                    self._stages[0], micro_batches, **options
                )
        return self._schedules[micro_batches]

    def _stage(self, model: nn.Module, stage: int) -> PipelineStage:
        """A stage whose inputs and outputs have known shapes: nothing has to be tried out."""
        rows = self.config.train.micro_batch_size
        kept = self.config.data.sequence_length // self.ranks.layout.cp
        first = stage == 0
        last = stage == self.num_stages - 1
        between = kept // self.ranks.layout.tp if self.config.parallel.sequence_parallel else kept
        wide = torch.empty(
            rows,
            between,
            self.config.model.dim,
            dtype=self.dtype,
            device="meta",
            requires_grad=True,
        )
        tokens = torch.empty(rows, kept, dtype=torch.int64, device="meta")
        head = self.chunks[-1].head
        entries = 0 if head is None else len(local_part(head.weight))
        logits = torch.empty(rows, kept, entries, dtype=self.dtype, device="meta")
        return PipelineStage(
            model,
            stage,
            self.num_stages,
            self.device,
            input_args=(tokens if first else wide,),
            output_args=(logits if last else wide,),
            group=self.ranks.group("pp"),
        )


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors in one; those of bounds, of other lengths, filled up
    with their last.
    """
    if tensors[0].dim() > 1:
        width = max(tensor.shape[1] for tensor in tensors)
        tensors = [
            torch.cat((own, own[:, -1:].expand(-1, width - own.shape[1])), 1) for own in tensors
        ]
    return torch.cat(list(tensors))


def _make_zero(
    groups: Sequence[Mapping[str, Any]], ranks: Ranks, **settings: Any
) -> torch.optim.Optimizer:
    """torch's ZeroRedundancyOptimizer of AdamW."""
    with warnings.catch_warnings():
        # its package compiles other optimizers when it is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    first = groups[0]
    zero = ZeroRedundancyOptimizer(
        first["params"],
        torch.optim.AdamW,
        process_group=ranks.group("dp-cp"),
        weight_decay=first["weight_decay"],
        **settings,
    )
    for group in groups[1:]:
        zero.add_param_group(dict(group))
    return zero


class _LossList:
    """The loss function of one step: sums over unmasked tokens, kept by sample."""

    def __init__(self, scale: float, part: VocabPart | None) -> None:
        self.scale = scale
        self.part = part
        self.loss: list[Tensor] = []
        self.tokens: list[Tensor] = []

    def __call__(self, logits: Tensor, target: Tensor | None) -> Tensor:
        """The scaled sum; logits [samples, S, vocab_size] or this rank's part of them, target
        [samples, S] with IGNORED.
        """
        assert target is not None
        rows = logits.flatten(0, 1)
        labels = target.flatten()
        if self.part is not None:
            losses = vocab_parallel_loss(rows, labels, self.part, IGNORED)
        else:
            losses = F.cross_entropy(rows.float(), labels, ignore_index=IGNORED, reduction="none")
        by_sample = losses.view_as(target).sum(1)
        self.loss.append(by_sample.detach())
        self.tokens.append((target != IGNORED).sum(1).float())
        return by_sample.sum() * self.scale

    def taken(self, device: torch.device) -> Losses:
        """All of them."""
        if not self.loss:
            none = torch.zeros(0, device=device)
            return Losses(none, none)
        return Losses(torch.cat(self.loss), torch.cat(self.tokens))


class _CurrentLosses:
    """What a schedule calls; schedules outlive steps."""

    current: _LossList

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.current(logits, target)


def names_of(model: ParallelModel) -> dict[str, nn.Parameter]:
    """This rank's parameters by the names that they have in the whole model."""
    found: dict[str, nn.Parameter] = {}
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            found[canonical(name)] = parameter
    return found


def _wrap(chunk: GPT, config: RunConfig, ranks: Ranks, num_stages: int) -> Wrapped:
    """A stage in its data-parallel wrapper."""
    parallel = config.parallel
    if parallel.data_parallel == "torch" and ranks.group("dp-cp") is not None:
        size: dict[str, Any] = (
            {}
            if parallel.bucket_size is None
            else {"bucket_cap_mb": parallel.bucket_size * 4 / (1 << 20)}
        )
        return DistributedDataParallel(chunk, process_group=ranks.group("dp-cp"), **size)
    tied = {"embedding.weight", TIED} if num_stages > 1 else ()
    return BucketedDataParallel(
        chunk,
        ranks=ranks,
        bucket_size=parallel.bucket_size,
        average=False,
        sharded=parallel.optimizer == "sharded",
        tied=tied,
        check_gradients=config.train.dtype != "float16",
        largest_gradient=config.train.largest_gradient,
    )
