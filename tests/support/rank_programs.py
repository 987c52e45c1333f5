"""What tests run as ranks: functions of (rank, ...) that return plain values.

They import nothing slow.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from streammega import (
    DataConfig,
    IndexedDataset,
    ParallelLayout,
    RankBatches,
    Ranks,
    StreamingDataset,
    StreamLoader,
    get_batch,
)
from streammega.errors import ConfigError
from streammega.parallel import open_loader


def read_batches(
    rank: int,
    layout: ParallelLayout,
    config: DataConfig,
    sizes: dict[str, Any],
    steps: int,
    ahead: int,
    every_stage: bool,
) -> dict[str, Any]:
    """The first micro-batches of a rank, its state after them, and what was sent
    and read for them.
    """
    ranks = Ranks(layout)
    with open_loader(config, ranks, **sizes) as loader:
        if ahead:
            batches = RankBatches(loader, ranks, every_stage=every_stage, ahead=ahead)
            got = list(itertools.islice(batches, steps))
            state = batches.state_dict()
            sent = batches.broadcast_bytes
            batches.close()
        else:
            got = [get_batch(loader, ranks, every_stage=every_stage) for _ in range(steps)]
            state = loader.state_dict()
            sent = 0
        return {
            "at": ranks.at,
            "batches": [
                {name: field.clone().numpy() for name, field in batch.items()} for batch in got
            ],
            "state": state,
            "sent": sent,
            "planned": loader.stats()["batches"],
        }


def prepared(
    rank: int, layout: ParallelLayout, config: DataConfig, sizes: dict[str, Any]
) -> tuple[float, float, bool]:
    """Messages sent when the first micro-batch was given, and after `prepare`; whether the next is
    then the right one.
    """
    ranks = Ranks(layout)
    with (
        open_loader(config, ranks, **sizes) as loader,
        open_loader(config, ranks, **sizes) as other,
    ):
        batches = RankBatches(loader, ranks)
        first = next(batches)
        before = batches.broadcast_bytes
        batches.prepare()
        after = batches.broadcast_bytes
        second = next(batches)
        expected = [get_batch(other, ranks) for _ in range(2)]
        same = all(
            torch.equal(a[name], b[name])
            for a, b in zip((first, second), expected, strict=True)
            for name in b
        )
        batches.close()
        return before / before, after / before, same


def to_the_end(
    rank: int, layout: ParallelLayout, config: DataConfig, sizes: dict[str, Any]
) -> tuple[int, int, int]:
    """How many micro-batches a rank gets until the end: by itself, and by two handles that drift
    apart.
    """
    ranks = Ranks(layout)
    with open_loader(config, ranks, **sizes) as loader:
        alone = sum(1 for _ in RankBatches(loader, ranks))
    with open_loader(config, ranks, **sizes) as loader:
        first, second = RankBatches(loader, ranks).handles(2)
        a = [*itertools.islice(first, 3)]
        b = [*itertools.islice(second, 5)]
        a += list(first)
        b += list(second)
        for x, y in zip(a, b, strict=True):
            assert all(torch.equal(x[name], y[name]) for name in x)
    return alone, len(a), len(b)


def mesh_both_ways(
    rank: int, layout: ParallelLayout, config: DataConfig, sizes: dict[str, Any]
) -> tuple[bool, bool]:
    """Whether a DeviceMesh of a layout gives the layout back, and whether a loader takes its rank
    from it.
    """
    from streammega import StreamLoader
    from streammega.parallel import device_mesh

    mesh = device_mesh(layout, "cpu")
    again = ParallelLayout.from_mesh(mesh)
    same = all(
        again.groups(name) == layout.groups(name)
        for name in ("tp", "cp", "dp-cp", "pp", "tp-pp", "embedding")
    )
    loader = StreamLoader(config, **sizes, mesh=mesh)
    at = layout.coordinates(rank)
    return same, (loader.dataset.dp_rank, loader.dataset.dp_size) == (at["dp"], layout.dp)


# Gradients.


class Net(torch.nn.Module):
    """A small model with a parameter that is not used every time, and one that is used twice."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.seldom = torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor, seldom: bool = False) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if seldom:
            x = x + self.seldom(x)
        return torch.nn.functional.linear(self.norm(x), self.embedding.weight)


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def ids_of(rank: int, step: int, micro: int) -> torch.Tensor:
    return torch.randint(
        0, 50, (4, 6), generator=torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    )


def loss_of(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    logits = model(ids[:, :-1], **options)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def grads_beside_ddp(rank: int, micro_batches: int, bucket_size: int, overlap: bool) -> bool:
    """Whether gradients and clipped norms of two steps are those of torch's DDP, to the bit."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from streammega import BucketedDataParallel

    theirs = DistributedDataParallel(make_net(), find_unused_parameters=True)
    ours = BucketedDataParallel(make_net(), bucket_size=bucket_size, overlap=overlap)
    same = True
    for step in range(2):
        for model in (theirs, ours):
            model.zero_grad()
            for micro in range(micro_batches):
                last = micro == micro_batches - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    (
                        loss_of(model, ids_of(rank, step, micro), seldom=step == 1) / micro_batches
                    ).backward()
        ours.finish_grad_sync()
        for a, b in zip(theirs.module.parameters(), ours.module.parameters(), strict=True):
            same &= (
                a.grad is b.grad
                if a.grad is None or b.grad is None
                else torch.equal(a.grad, b.grad)
            )
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        same &= bool(torch.isclose(norm, ours.clip_grad_norm_(0.1), rtol=1e-6))
        for a, b in zip(theirs.module.parameters(), ours.module.parameters(), strict=True):
            if a.grad is not None:
                assert b.grad is not None
                same &= torch.allclose(a.grad, b.grad, rtol=1e-6)
    dist.barrier()
    return same


def bf16_accumulation(rank: int, micro_batches: int) -> tuple[float, float]:
    """Relative errors of gradients of a bf16 model over many micro-batches: accumulated by torch in
    bf16, and by us in fp32.
    """
    from streammega import BucketedDataParallel

    exact = make_net().double()
    exact.load_state_dict(
        {name: value.double() for name, value in make_net(torch.bfloat16).state_dict().items()}
    )
    narrow = make_net(torch.bfloat16)
    wide = BucketedDataParallel(make_net(torch.bfloat16))
    for micro in range(micro_batches):
        ids = ids_of(rank, 0, micro)
        logits = exact(ids[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        loss_of(narrow, ids).backward()
        with wide.no_sync():
            loss_of(wide, ids).backward()
    wide.finish_grad_sync()
    mains = {slot.name: slot.main_grad for slot in wide.reducer.slots()}

    def error(grads: dict[str, torch.Tensor]) -> float:
        truth = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
        off = sum(
            float((grads[name].double() - value).square().sum()) for name, value in truth.items()
        )
        return float((off / sum(float(value.square().sum()) for value in truth.values())) ** 0.5)

    return error(
        {name: p.grad for name, p in narrow.named_parameters() if p.grad is not None}
    ), error(mains)


def bad_gradient(rank: int, value: float, limit: float | None, at_once: bool) -> str:
    """What a rank is told where the gradient of one layer is `value` somewhere on rank 1; that the
    next step is sound again.

    at_once: as on the CPU; else as on a device that is asked once a step.
    """
    from streammega import BucketedDataParallel
    from streammega.errors import GradientError
    from streammega.gradients.checks import GradientChecks

    net: Any = make_net()
    model = BucketedDataParallel(net, bucket_size=700, largest_gradient=limit)
    model.reducer.starts.checks = GradientChecks(limit, at_once=at_once)
    handle = net.layers[1].weight.register_hook(
        lambda grad: grad.index_fill(0, torch.tensor([2]), value) if rank == 1 else grad
    )
    message = ""
    loss_of(model, ids_of(rank, 0, 0)).backward()
    try:
        model.finish_grad_sync()
    except GradientError as error:
        message = str(error)
    assert all(parameter.grad is None for parameter in model.parameters()), (
        "nothing is left to step with"
    )
    handle.remove()
    loss_of(model, ids_of(rank, 1, 0)).backward()
    model.finish_grad_sync()
    assert all(
        parameter.grad is None or parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )
    return message


def bad_shared_gradient(rank: int, at_once: bool) -> str:
    """What two pipeline stages are told that share an embedding, of which the second makes
    something of it that is not finite.
    """
    from streammega import BucketedDataParallel
    from streammega.errors import GradientError
    from streammega.gradients.checks import GradientChecks

    stage = torch.nn.ModuleDict(
        {"own": torch.nn.Linear(4, 4), "shared": torch.nn.Linear(4, 4, bias=False)}
    )
    model = BucketedDataParallel(stage, ranks=Ranks(ParallelLayout(pp=2)), tied={"shared.weight"})
    model.reducer.starts.checks = GradientChecks(None, at_once=at_once)
    shared = stage["shared"](torch.ones(1, 4)) * (float("nan") if rank == 1 else 1.0)
    (shared + stage["own"](torch.ones(1, 4))).sum().backward()
    try:
        model.finish_grad_sync()
    except GradientError as error:
        return str(error)
    return ""


def run_until_bad(rank: int, run_file: str, overrides: list[str]) -> str:
    """The error that ends a run, in one of its first steps."""
    from streammega.errors import GradientError
    from streammega.train.config import load_run
    from streammega.train.loop import Trainer

    trainer = Trainer(load_run(run_file, overrides), torch.device("cpu"))
    try:
        for _ in range(4):
            trainer.train_step()
    except GradientError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def second_backward(rank: int, retained: bool) -> str:
    """The message of a second backward of one step whose first was to be reduced already."""
    from streammega import BucketedDataParallel
    from streammega.errors import GradientError

    model = BucketedDataParallel(make_net(), bucket_size=700)
    try:
        loss = loss_of(model, ids_of(rank, 0, 0))
        loss.backward(retain_graph=retained)
        (loss if retained else loss_of(model, ids_of(rank, 0, 1))).backward()
    except GradientError as error:
        model.finish_grad_sync()  # the ranks' collectives still agree
        return str(error)
    return ""


class Expert(torch.nn.Module):
    """Parameters of two dtypes, so two buffers of gradients, and one that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(16, 16, bias=False)
        self.b = torch.nn.Linear(16, 16, bias=False, dtype=torch.float64)
        self.expert = torch.nn.Linear(16, 16, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.b(self.a(x).double())
        chosen: torch.Tensor = self.expert(y) if use else y
        return chosen


def two_buffers(rank: int, chunks: int) -> list[float]:
    """How far gradients lie from the true averages where rank 1 leaves a parameter out, for one or
    two models of a group.
    """
    import torch.distributed as dist

    from streammega import BucketedDataParallel
    from streammega.gradients.data_parallel import finish_grad_sync

    def made(number: int) -> Expert:
        torch.manual_seed(number)
        return Expert()

    plain = [made(n) for n in range(chunks)]
    ours = [
        BucketedDataParallel(made(n), bucket_size=1, grad_dtype=torch.float64)
        for n in range(chunks)
    ]
    for step in range(2):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(7 * rank + step))
        for models in (plain, ours):
            total = torch.zeros((), dtype=torch.float64)
            for number, model in enumerate(models):
                model.zero_grad()
                total = total + model(x, use=rank == 0).square().mean() * (number + 1)
            # one graph: the models' gradients come ready in an order of their own on each rank
            total.backward()
        finish_grad_sync(ours)
    worst = []
    for one, other in zip(plain, ours, strict=True):
        for a, b in zip(one.parameters(), other.module.parameters(), strict=True):
            mean = torch.zeros_like(a) if a.grad is None else a.grad / 2
            dist.all_reduce(mean)
            assert b.grad is not None
            worst.append(float((mean - b.grad).abs().max()))
    return worst


def clipped_tensor_parallel(rank: int) -> tuple[float, list[float]]:
    """The norm before clipping, and a replicated gradient after it, of a model whose weight is
    split over two ranks.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from streammega import BucketedDataParallel

    torch.manual_seed(5)
    module = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 6, bias=False))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(module, mesh, {"1": ColwiseParallel(output_layouts=None)})
    alone = [dist.new_group([number]) for number in range(2)][rank]
    model = BucketedDataParallel(module, group=alone, check_gradients=False)
    output = model(torch.arange(16.0).view(2, 8))
    weights = torch.arange(6.0).add(1).chunk(2)[rank]
    (output * weights).square().sum().backward()
    model.finish_grad_sync()
    norm = model.clip_grad_norm_(1.0)
    mains = {slot.name: slot.main_grad for slot in model.reducer.slots()}
    return float(norm), mains["0.weight"].tolist()


def first_weights(rank: int) -> list[float]:
    """Some of the parameters, and a buffer, of a model that was made from another seed on each
    rank.
    """
    from streammega import BucketedDataParallel

    torch.manual_seed(rank)
    linear = torch.nn.Linear(3, 3)
    norm = torch.nn.BatchNorm1d(3)
    assert norm.running_mean is not None
    norm.running_mean += rank
    BucketedDataParallel(torch.nn.Sequential(linear, norm))
    return [linear.weight[0, 0].item(), float(norm.running_mean[0])]


def per_token(rank: int, tokens: list[int]) -> list[float]:
    """A gradient normalised by the tokens of all ranks."""
    from streammega import BucketedDataParallel

    linear = torch.nn.Linear(2, 1, bias=False)
    model = BucketedDataParallel(linear, average=False)
    (model(torch.ones(1, 2)).sum() * tokens[rank]).backward()
    model.finish_grad_sync(torch.tensor(tokens[rank]))
    grad = linear.weight.grad
    assert grad is not None
    return [float(value) for value in grad.flatten()]


def fp16_steps(rank: int) -> list[tuple[bool, float, bool]]:
    """(good, scale, moved) of steps of which the second overflows on rank 0 only."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from streammega.gradients.loss_scale import LossScale

    net: Any = make_net()
    fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scale = LossScale(1024.0, interval=2)
    seen = []
    for step in range(4):
        before = net.norm.weight.to_local().clone()
        loss = loss_of(net, ids_of(rank, step, 0)) * scale.value
        (loss * float("inf") if step == 1 and rank == 0 else loss).backward()
        found = [parameter.grad for parameter in net.parameters()]
        grads = [grad.to_local() for grad in found if grad is not None]
        good = scale.unscale(grads, torch.device("cpu"))
        if good:
            optimizer.step()
        optimizer.zero_grad()
        moved = not torch.equal(before, net.norm.weight.to_local())
        seen.append((good, scale.value, moved))
    return seen


# Training.


def train(
    rank: int, run_file: str, overrides: list[str], steps: int | None
) -> list[dict[str, Any]]:
    """Train (or resume) a run on this world's ranks to its end, or for some steps; the records of
    rank 0.
    """
    return train_on_device(rank, run_file, overrides, steps, "cpu")


def train_on_device(
    rank: int, run_file: str, overrides: list[str], steps: int | None, device: str
) -> list[dict[str, Any]]:
    """The same with the model on this device, which ranks may share."""
    from streammega.train.config import load_run
    from streammega.train.loop import Trainer

    trainer = Trainer(load_run(run_file, overrides), torch.device(device))
    trainer.resume()
    if steps is None:
        trainer.run()
        return []
    records = []
    for _ in range(steps):
        record, _stop = trainer.train_step()
        trainer.step += 1
        records.append(record)
    trainer.save()
    trainer.close()
    return records if rank == 0 else []


# Other people's frameworks.


def _steps_of(batches: Any) -> list[int]:
    return [int(batch["tokens"].sum()) for batch in batches]


def numbers_of(rank: int, config: DataConfig, count: int) -> list[int]:
    """Sums of the first micro-batches of a rank of two, by its loader alone."""
    with StreamLoader(
        config, micro_batch_size=4, global_batch_size=8, dp_rank=rank, dp_size=2
    ) as loader:
        return _steps_of(itertools.islice(loader, count))


def save_by_dcp(rank: int, config: DataConfig, folder: str, steps: int) -> None:
    """Save the state of a rank of two in a distributed checkpoint, after so many micro-steps."""
    import torch.distributed.checkpoint as dcp

    with StreamLoader(
        config, micro_batch_size=4, global_batch_size=8, dp_rank=rank, dp_size=2
    ) as loader:
        for _ in range(steps):
            loader.take()
        dcp.save({"data": loader}, checkpoint_id=folder)


def load_by_dcp(rank: int, config: DataConfig, folder: str) -> str:
    """Load it, on as many ranks as there are: the cursor, or the error."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    size = dist.get_world_size() if dist.is_initialized() else 1
    with StreamLoader(
        config, micro_batch_size=1, global_batch_size=6, dp_rank=rank, dp_size=size
    ) as loader:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # one process by itself
                dcp.load({"data": loader}, checkpoint_id=folder)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return str(loader.consumed_samples)


def load_data_state(rank: int, config: DataConfig, folder: str) -> str:
    """Load a distributed checkpoint by its one key: the cursor, or the error."""
    from streammega.integrations.dcp import DataState, load

    with StreamLoader(
        config, micro_batch_size=4, global_batch_size=8, dp_rank=rank, dp_size=2
    ) as loader:
        try:
            load({"data": DataState(loader)}, checkpoint_id=folder)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return str(loader.consumed_samples)


@contextlib.contextmanager
def accelerator_of(rank: int) -> Iterator[Any]:
    """An Accelerator of two processes, in a process that has been a rank before and
    will be again.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    before = dict(os.environ)
    os.environ.update(
        names | {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            accelerator = Accelerator(cpu=True)
            assert accelerator.num_processes == 2
            yield accelerator
        finally:
            for state in (AcceleratorState, PartialState, GradientState):
                state._reset_state()
            os.environ.clear()
            os.environ.update(before)


def accelerate_prepared_dataset(rank: int, config: DataConfig, ranked: bool) -> Any:
    """Iterate a DataLoader of a dataset that accelerate prepared: the error, or the global
    micro-steps this rank was given.
    """
    sizes: dict[str, Any] = (
        {"dp_rank": rank, "dp_size": 2, "global_batch_size": 8}
        if ranked
        else {"global_batch_size": 4}
    )
    with accelerator_of(rank) as accelerator:
        dataset = StreamingDataset(config, micro_batch_size=4, **sizes)
        loader = accelerator.prepare(torch.utils.data.DataLoader(dataset, batch_size=None))
        try:
            given = [row for batch in loader for row in batch["tokens"]]
        except ConfigError as error:
            return f"{type(error).__name__}: {error}"
        places = {
            dataset.batch(at)["tokens"][n].numpy().tobytes(): at + n
            for at in dataset.positions()
            for n in range(4)
        }
        return [places[row.numpy().tobytes()] for row in given]


def accelerate_checkpoint(
    rank: int, config: DataConfig, folder: str, start: int, count: int
) -> list[int]:
    """The next micro-batches of a loader that accelerate checkpoints, from its checkpoint on if
    `start` says there is one.
    """
    with accelerator_of(rank) as accelerator:
        loader = StreamLoader(
            config, micro_batch_size=4, global_batch_size=8, dp_rank=rank, dp_size=2
        )
        assert accelerator.prepare(loader) is loader, "as it is"
        accelerator.register_for_checkpointing(loader)
        if start:
            accelerator.load_state(folder)
        given = _steps_of(itertools.islice(loader, count))
        if not start:  # once: the other rank may not have loaded it yet
            accelerator.save_state(folder)
        loader.close()
        return given


def started_with(rank: int, run_file: str, overrides: list[list[str]]) -> str:
    """What a rank is told when it starts a run with overrides of its own."""
    from streammega.train.config import load_run
    from streammega.train.loop import Trainer

    try:
        Trainer(load_run(run_file, overrides[rank]), torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return "started"


# Readers.


def open_and_sum(url: str, cache: str, results: Any) -> None:
    """Put the tokens of a pair into a queue."""
    results.put(int(IndexedDataset(url, index_cache_dir=cache).sequence_lengths.sum()))
