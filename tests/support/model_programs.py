"""What tests of the trainer's model run as ranks: functions of (rank, ...) that return plain
values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from streammega import ParallelLayout, Ranks
from streammega.order.sharding import zigzag_bounds
from streammega.train import attention
from streammega.train.attention import Visibility
from streammega.train.config import RunConfig, load_run
from streammega.train.losses import VocabPart, vocab_parallel_loss
from streammega.train.model import GPT
from streammega.train.parallel_model import ParallelModel, named_parameters
from streammega.train.stages import make_stages

CPU = torch.device("cpu")


@contextlib.contextmanager
def saved_for_backward() -> Iterator[dict[int, int]]:
    """{address: bytes} of all storages that autograd keeps for backward within it, also under hooks
    of the attention's own.
    """
    found: dict[int, int] = {}
    kept: list[Any] = []  # an address must not be used twice

    def note(packed: Any) -> Any:
        for tensor in packed if isinstance(packed, tuple) else (packed,):
            tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            tensor = getattr(tensor, "elem", tensor)  # of a result that is awaited
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
                kept.append(storage)
        return packed

    class Noted(saved_tensors_hooks):
        def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
            super().__init__(lambda tensor: note(pack(tensor)), unpack)

    with (
        mock.patch.object(attention, "saved_tensors_hooks", Noted),
        saved_tensors_hooks(note, lambda packed: packed),
    ):
        yield found


def model_of(
    run_file: str, overrides: list[str], device: torch.device = CPU
) -> tuple[ParallelModel, RunConfig]:
    """The model of a run on this world's ranks."""
    config = load_run(run_file, overrides)
    world = dist.get_world_size() if dist.is_initialized() else 1
    sizes = {name: getattr(config.parallel, name) for name in ("tp", "cp", "pp")}
    layout = ParallelLayout.of_world(world, **sizes)
    return ParallelModel(config, Ranks(layout), device), config


def batch_of(
    model: ParallelModel,
    config: RunConfig,
    cu_seqlens: list[list[int]] | None = None,
    seed: int = 0,
) -> Any:
    """A micro-batch of random ids, of the tokens that this rank keeps; the same samples on every
    rank.
    """
    samples = config.train.micro_batch_size
    length = config.data.sequence_length
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config.model.vocab_size, (samples, length + 1), generator=generator)
    mask = (torch.rand(samples, length, generator=generator) > 0.2).float()
    position = torch.arange(length).repeat(samples, 1)
    whole = {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "loss_mask": mask,
        "position_ids": position,
    }
    batch = {
        name: torch.cat([field[:, a:b] for a, b in model.bounds_of(length)], 1)
        for name, field in whole.items()
    }
    if cu_seqlens is not None:
        batch["cu_seqlens_whole"] = torch.tensor(cu_seqlens, dtype=torch.int32)
    return {name: field.to(model.device) for name, field in batch.items()}


def gradients(model: ParallelModel) -> dict[str, torch.Tensor]:
    """The gradients that optimizers would see, by name, whole."""
    found = {}
    for name, parameter in named_parameters(model).items():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        if grad is not None:
            found[name] = grad.clone()
    return found


def steps_of(
    rank: int,
    run_file: str,
    overrides: list[str],
    cu_seqlens: list[list[int]] | None,
    micro_batches: int = 2,
    device: str = "cpu",
) -> dict[str, Any]:
    """Losses by sample, gradients, and the bytes of each storage kept for backward, of one step."""
    model, config = model_of(run_file, overrides, torch.device(device))
    batches = [batch_of(model, config, cu_seqlens, seed) for seed in range(micro_batches)]
    with saved_for_backward() as saved:
        losses = model.forward_backward(batches, len(batches), config.data.sequence_length)
    model.finish_gradients(losses.tokens.sum())
    return {
        "loss": losses.loss.tolist(),
        "tokens": losses.tokens.tolist(),
        "grads": {name: grad.float().cpu().numpy() for name, grad in gradients(model).items()},
        "norm": float(model.clip_grad_norm_(float("inf"))),
        "saved": sorted(saved.values()),
    }


def gathered_again(rank: int, documents: list[list[int]] | None) -> list[int]:
    """How often backward gathers keys and values of two context-parallel ranks: kept whole,
    gathered again, and of a graph that is walked twice the second time. Gradients must be the same
    to the bit.
    """
    context = attention.ContextParallel(dist.group.WORLD, rank, 2)
    parts = zigzag_bounds(512, rank, 2)
    bounds = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    gathers: list[int] = []
    gather = attention._all_gather

    def counted(*arguments: Any) -> tuple[torch.Tensor, ...]:
        gathers.append(1)
        return gather(*arguments)

    generator = torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(1, 256, 2, 8, generator=generator, requires_grad=True) for _ in range(3))
    found = []
    grads = []
    attention._all_gather = counted  # type: ignore[assignment]
    try:
        for again in (False, True):
            visibility = Visibility(parts, 512, bounds)
            loss = attention.attend(q, k, v, visibility, context, gather_again=again).square().sum()
            for retained in (again, False) if again else (False,):
                gathers.clear()
                grads.append(torch.autograd.grad(loss, (q, k, v), retain_graph=retained))
                found.append(len(gathers))
    finally:
        attention._all_gather = gather
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))
    return found


def collectives_of_backward(rank: int) -> dict[str, int]:
    """The collectives of backward through attention of two context-parallel ranks, by name."""
    context = attention.ContextParallel(dist.group.WORLD, rank, 2)
    q, k, v = (torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3))
    mixed = attention.attend(
        q, k, v, Visibility(zigzag_bounds(16, rank, 2), 16), context, gather_again=False
    )
    with CommDebugMode() as collectives:
        mixed.sum().backward()
    return {str(name): count for name, count in collectives.get_comm_counts().items()}


def divided_loss(rank: int, ranks: int) -> tuple[float, float, bool]:
    """How far losses, and gradients of a weighted sum of them, lie from those of whole logits; and
    whether ranks agree.
    """
    generator = torch.Generator().manual_seed(3)
    rows = 200
    entries = 50
    whole = torch.randn(rows, entries, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    target = torch.randint(0, entries, (rows,), generator=generator)
    target[::7] = -100
    weights = torch.rand(rows, generator=generator) / rows
    whole.requires_grad_()
    wanted = F.cross_entropy(whole, target, ignore_index=-100, reduction="none")
    (wanted * weights).sum().backward()
    start = sum(len(part) for part in torch.arange(entries).chunk(ranks)[:rank])
    own = whole.detach().chunk(ranks, 1)[rank].clone().requires_grad_()
    part = VocabPart(dist.group.WORLD, start, own.shape[1])  # type: ignore[arg-type]
    losses = vocab_parallel_loss(own, target, part)
    (losses * weights).sum().backward()
    assert own.grad is not None
    assert whole.grad is not None
    of_first = losses.detach().clone()
    dist.broadcast(of_first, 0)
    losses = losses.detach()
    wanted = wanted.detach()
    relative = ((losses - wanted).abs() / wanted.abs().clamp(min=1.0)).max()
    worst = (own.grad - whole.grad.chunk(ranks, 1)[rank]).abs().max()
    return float(relative), float(worst), torch.equal(of_first, losses)


def first_weights(rank: int, run_file: str, overrides: list[str]) -> bool:
    """Whether this rank's parameters are its part of those that one rank alone draws."""
    model, config = model_of(run_file, overrides)
    alone = GPT(config.model)
    alone.init_weights(config.train.seed)
    whole = dict(alone.named_parameters())
    same = True
    for name, parameter in named_parameters(model).items():
        value = parameter.detach()
        same &= torch.equal(
            value.full_tensor() if isinstance(value, DTensor) else value, whole[name]
        )
    return same


def memory_of_a_stage(rank: int, run_file: str, overrides: list[str]) -> tuple[int, int, int]:
    """Bytes of resident memory that making the second of four stages takes at its height; of its
    parameters, and of all.
    """
    config = load_run(run_file, overrides)
    ranks: Any = SimpleNamespace(
        layout=ParallelLayout(pp=4), group=lambda _: None, at={"cp": 0, "tp": 0, "pp": 1}
    )

    def resident(name: str) -> int:
        with open("/proc/self/status") as status:
            return 1024 * next(int(line.split()[1]) for line in status if line.startswith(name))

    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the height begins anew
    before = resident("VmRSS")
    stages = make_stages(config, ranks, CPU)
    height = resident("VmHWM") - before
    own = sum(parameter.numel() for chunk in stages.chunks for parameter in chunk.parameters())
    whole = sum(shape.numel() for shape in stages.parameter_shapes.values())
    return height, 4 * own, 4 * whole
