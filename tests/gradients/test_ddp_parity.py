"""Gradients of random models, in random loops, are those of torch's DDP."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from streammega import BucketedDataParallel
from tests.support.examples import examples
from tests.support.gang import Gang

WIDTH = 3
LR = 0.1


@dataclasses.dataclass(frozen=True)
class Layer:
    """shares: the layer is the one before it once more, or has its weight under a second name.
    frozen: before the model is wrapped, or after it.
    """

    dtype: torch.dtype
    shares: str | None
    frozen: str | None


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """used: the layers of its forward on each rank, after the first. backwards: of its loss."""

    used: tuple[list[int], list[int]]
    backwards: int


@dataclasses.dataclass(frozen=True)
class Step:
    micro_batches: list[MicroBatch]
    zeroes: str


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how it is wrapped, and the steps of its loop.

    kind: gradients are averaged, summed and divided by tokens, or added to `main_grad`.
    """

    layers: list[Layer]
    steps: list[Step]
    kind: str
    bucket_size: int
    grad_dtype: torch.dtype | None
    overlap: bool
    expects: bool
    checks: bool


DTYPES = [torch.float32, torch.float64, torch.bfloat16]
LAYERS = st.builds(
    Layer,
    dtype=st.sampled_from(DTYPES),
    shares=st.sampled_from([None, None, "module", "weight"]),
    frozen=st.sampled_from([None, None, None, "before", "after"]),
)
USED = st.lists(st.integers(0, 4), max_size=3)
MICRO_BATCHES = st.builds(
    MicroBatch, used=st.tuples(USED, USED), backwards=st.sampled_from([1, 1, 2])
)
STEPS = st.builds(
    Step,
    micro_batches=st.lists(MICRO_BATCHES, min_size=1, max_size=3),
    zeroes=st.sampled_from(["to none", "to zero", "by the optimizer", "not"]),
)
CASES = st.builds(
    Case,
    layers=st.lists(LAYERS, min_size=1, max_size=5),
    steps=st.lists(STEPS, min_size=1, max_size=3),
    kind=st.sampled_from(["mean", "mean", "tokens", "main_grad"]),
    bucket_size=st.integers(1, 60),
    grad_dtype=st.sampled_from([None, None, *DTYPES]),
    overlap=st.booleans(),
    expects=st.booleans(),
    checks=st.booleans(),
)


class Model(nn.Module):
    def __init__(self, layers: list[Layer], *, freezes_all: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList()
        self.later: list[nn.Module] = []
        for number, layer in enumerate(layers):
            before: Any = self.layers[-1] if number else None
            if before is not None and layer.shares == "module":
                self.layers.append(before)
                continue
            is_tied = before is not None and layer.shares == "weight"
            linear = nn.Linear(WIDTH, WIDTH, dtype=before.weight.dtype if is_tied else layer.dtype)
            if is_tied:
                linear.weight = before.weight
            self.layers.append(linear)
            # The first layer is trained, so that there is something to train.
            if number and (layer.frozen == "before" or (freezes_all and layer.frozen)):
                linear.requires_grad_(False)
            elif number and layer.frozen:
                self.later.append(linear)

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for n in [0, *used]:
            layer: Any = self.layers[n % len(self.layers)]
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double().square().sum()


def compare(rank: int, case: Case) -> None:
    theirs = DistributedDataParallel(
        Model(case.layers, freezes_all=True), find_unused_parameters=True
    )
    module = Model(case.layers, freezes_all=False)
    ours = BucketedDataParallel(
        module,
        bucket_size=case.bucket_size,
        grad_dtype=case.grad_dtype,
        average=case.kind != "tokens",
        overlap=case.overlap,
        check_gradients=case.checks,
        main_grad=case.kind == "main_grad",
    )
    for layer in module.later:
        layer.requires_grad_(False)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.1) for model in (theirs, ours)
    ]
    largest = 0.0
    for number, step in enumerate(case.steps):
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            zero(model, optimizer, step.zeroes if case.kind == "mean" else "to none")
            add_gradients(rank, model, step.micro_batches, case.expects)
        ours.finish_grad_sync(torch.tensor(1) if case.kind == "tokens" else None)
        pairs = list(zip(theirs.module.named_parameters(), module.parameters(), strict=True))
        grads = [one.grad for (_, one), _ in pairs if one.grad is not None]
        largest = max([largest, *(float(grad.abs().max()) for grad in grads)])
        for (name, one), other in pairs:
            where = f"step {number}, {name}"
            assert (one.grad is None) == (other.grad is None), where
            if one.grad is not None and other.grad is not None:
                off = tolerance(one.dtype, case.grad_dtype) * largest
                assert float((other.grad - one.grad).abs().max()) <= off, where
        for optimizer in optimizers:
            optimizer.step()
        for (name, one), other in pairs:
            # the parameters themselves, below 1, are rounded too
            off = tolerance(one.dtype, case.grad_dtype) * (LR * largest + 0.1)
            assert float((other.data - one.data).abs().max()) <= off, f"step {number}, {name}"
            # Else what differs by rounding would make the gradients of the next step differ.
            other.data.copy_(one.data)


def zero(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    if how == "by the optimizer":
        optimizer.zero_grad()
    elif how != "not":
        model.zero_grad(set_to_none=how == "to none")


def add_gradients(rank: int, model: Any, micro_batches: list[MicroBatch], expects: bool) -> None:
    """Run a step, whose backward passes but the last are within `no_sync`, or are counted."""
    total = sum(micro_batch.backwards for micro_batch in micro_batches[:-1]) + 1
    counts = expects and isinstance(model, BucketedDataParallel)
    with model.expect(total) if counts else contextlib.nullcontext():
        for number, micro_batch in enumerate(micro_batches):
            is_last = number == len(micro_batches) - 1
            x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) * (1 + rank) + 0.1 * number
            with contextlib.nullcontext() if is_last or counts else model.no_sync():
                loss = model(x, micro_batch.used[rank])
                # DDP reduces in the first backward after a forward
                for _ in range(1 if is_last else micro_batch.backwards):
                    loss.backward(retain_graph=True)


def tolerance(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> float:
    """How far a gradient may be from DDP's, which are of the parameter's dtype, in parts of the largest.

    Zero where ours are too: two ranks' sum is the same in any order, and a division by two is exact.
    Else the one or the other rounds more, at each of up to a dozen additions.
    """
    of_bucket = grad_dtype or torch.promote_types(dtype, torch.float32)
    if of_bucket == dtype:
        return 0.0
    return 12 * max(torch.finfo(of_bucket).eps, torch.finfo(dtype).eps)


@pytest.mark.guarantee("gradients-torch-ddp")
@pytest.mark.many_examples
@settings(max_examples=examples(80))
@given(case=CASES)
def test_random_models_have_the_gradients_of_torchs_ddp(gang: Gang, case: Case) -> None:
    gang.run(2, compare, case)
