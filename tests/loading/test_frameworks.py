"""In other people's loops, each the real one: torchdata, accelerate, Lightning, torch's distributed
checkpoints.
"""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from streammega import DataConfig, StreamingDataset, StreamLoader
from streammega.errors import ConfigError, StateError
from tests.support.expected import checked_batch
from tests.support.gang import Gang, on_ranks
from tests.support.trainer_programs import accelerator_of
from tests.support.typed import first_prefix

pytestmark = [
    pytest.mark.usefixtures("workers_end_soon"),
    # more workers than a small machine has cores
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's
]

SIZES: Any = {"micro_batch_size": 4, "global_batch_size": 4}
TOTAL = 13
"""Micro-batches: workers end at different times."""


@pytest.fixture
def config(config: DataConfig) -> DataConfig:
    return replace(config, order="stream", num_samples=(4 * TOTAL, 0, 0))


# torchdata.


def stateful(config: DataConfig, workers: int, every: int = 1, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = StreamingDataset(config, **SIZES)
    return StatefulDataLoader(
        dataset, batch_size=None, num_workers=workers, snapshot_every_n_steps=every, **options
    )


def copied(batches: Any) -> list[torch.Tensor]:
    return [batch["tokens"].clone() for batch in batches]


@pytest.mark.guarantee("torchdata-statefuldataloader-resumes")
@pytest.mark.parametrize(
    ("workers", "every"),
    [
        *((0, 1), (1, 4), (2, 1), (3, 4)),
        *(pytest.param(*pair, marks=pytest.mark.soak) for pair in ((0, 4), (1, 1), (2, 4), (3, 1))),
    ],
)
def test_torchdatas_loader_resumes_exactly(config: DataConfig, workers: int, every: int) -> None:
    """In the middle, when the last batch was given but its end not yet seen, and at the end; then
    whole passes.
    """
    config = replace(
        config, exclude_samples=((20, 24), (36, 40)), num_samples=(4 * TOTAL + 8, 0, 0)
    )
    reference = [
        checked_batch(StreamingDataset(config, **SIZES), at)["tokens"]
        for at in StreamingDataset(config, **SIZES).positions()
    ]
    assert len(reference) == TOTAL
    for taken in (1, 6, TOTAL, TOTAL + 1):
        loader = stateful(config, workers, every)
        batches = iter(loader)
        got = [batch["tokens"].clone() for _, batch in zip(range(taken), batches, strict=False)]
        state = loader.state_dict()
        assert len(json.dumps(state, default=str)) < 6000
        del batches, loader
        again = stateful(config, workers, every)
        again.load_state_dict(state)
        if taken <= TOTAL:
            got += copied(again)
            assert len(got) == TOTAL
            assert all(map(torch.equal, got, reference))
        whole = copied(again)
        assert len(whole) == TOTAL
        assert all(map(torch.equal, whole, reference))


def dataset_state(state: Any) -> Any:
    """As docs/torchdata.md has it: what torchdata keeps of the dataset."""
    return state["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]


@pytest.mark.guarantee("torchdata-statefuldataloader-resumes")
@pytest.mark.parametrize("before", [1, 2])
def test_the_dataset_of_a_state_goes_on_with_any_number_of_workers(
    config: DataConfig, before: int
) -> None:
    with StreamLoader(config, **SIZES) as loader:
        reference = copied(loader)
        loader.seek(12)
        expected = loader.state_dict()
    batches = iter(stateful(config, before))
    for _ in range(3):
        next(batches)
    state = dataset_state(batches.state_dict())
    assert state == expected, "workers read ahead; what was handed out counts"
    with StreamLoader(config, **SIZES) as loader:
        loader.load_state_dict(state)
        assert all(map(torch.equal, copied(loader), reference[3:]))
    for after in (0, 1, 3):
        again = stateful(config, after)
        again.dataset.load_state_dict(state)
        rest = copied(again)
        assert len(rest) == TOTAL - 3
        assert all(map(torch.equal, rest, reference[3:]))


@pytest.mark.guarantee("torchdata-statefuldataloader-resumes")
def test_a_state_of_another_order_is_refused_in_workers(config: DataConfig) -> None:
    loader = stateful(config, 2)
    next(iter(loader))
    other = stateful(replace(config, seed=9), 2)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="seed"):
        next(iter(other))


@pytest.mark.guarantee("torchdata-statefuldataloader-resumes")
@pytest.mark.parametrize("taken", [2, 7, TOTAL - 1])
def test_a_state_is_saved_and_loaded_again_and_again_while_workers_have_ended(
    config: DataConfig, taken: int
) -> None:
    """Worker 1 ends at once, and torchdata keeps its last state."""
    reference = copied(StreamingDataset(config, **SIZES))
    state = None
    got: list[torch.Tensor] = []
    while len(got) < TOTAL:
        loader = stateful(config, 2)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        got += [batch["tokens"].clone() for _, batch in zip(range(taken), batches, strict=False)]
        state = loader.state_dict()
        del batches, loader
    assert len(got) == TOTAL
    assert all(map(torch.equal, got, reference))


def test_a_later_pass_has_the_lanes_of_the_state(config: DataConfig) -> None:
    with StreamLoader(config, micro_batch_size=4, global_batch_size=24) as former:
        for _ in range(6):
            former.take()
        state = former.state_dict()
        former.seek(0)
        first = former.take()["tokens"]
    loader = stateful(config, 2)
    saved = loader.state_dict()
    saved["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"] = state
    loader = stateful(config, 2)
    loader.load_state_dict(saved)
    assert len(copied(loader)) == TOTAL - 6
    assert torch.equal(copied(loader)[0], first)


def test_persistent_workers_of_torchdata_count_every_pass(config: DataConfig) -> None:
    loader = stateful(config, 2, persistent_workers=True)
    first = copied(loader)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    again = stateful(config, 2, persistent_workers=True)
    again.load_state_dict(loader.state_dict())
    rest = copied(again)
    assert len(rest) == TOTAL - 5
    assert all(map(torch.equal, rest, first[5:]))
    assert all(map(torch.equal, copied(again), first))


# torch's distributed checkpoints.


def sums_of(batches: Any) -> list[int]:
    return [int(batch["tokens"].sum()) for batch in batches]


def loader_of_two(rank: int, config: DataConfig) -> StreamLoader:
    """The loader of a rank of two."""
    return StreamLoader(config, micro_batch_size=4, global_batch_size=8, dp_rank=rank, dp_size=2)


def save_by_dcp(rank: int, config: DataConfig, folder: Path) -> None:
    """Save the state of a rank of two after three micro-steps."""
    with loader_of_two(rank, config) as loader:
        for _ in range(3):
            loader.take()
        dcp.save({"data": loader}, checkpoint_id=folder)


def load_by_dcp(rank: int, config: DataConfig, folder: Path, refused: str | None) -> None:
    """Load it on as many ranks as there are; or it is refused with these words."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    with (
        StreamLoader(
            config, micro_batch_size=1, global_batch_size=6, dp_rank=rank, dp_size=size
        ) as loader,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # one process by itself
        if refused is None:
            dcp.load({"data": loader}, checkpoint_id=folder)
            assert loader.consumed_samples == 24
            return
        message = f"(?s)^the checkpoint counts samples of another order.*{refused}"
        with pytest.raises(StateError, match=message):
            dcp.load({"data": loader}, checkpoint_id=folder)


@pytest.mark.guarantee("torch-distributed-checkpoints")
def test_a_distributed_checkpoint_of_another_order_is_refused_in_words(
    gang: Gang, config: DataConfig, tmp_path: Path
) -> None:
    gang.run(2, save_by_dcp, config, tmp_path / "dcp")
    for other, words in (
        (replace(config, order="sequential"), "order: "),
        (replace(config, blend=[first_prefix(config)] * 2), "datasets"),
        (replace(config, seed=3), "seed: the checkpoint has 1234, this run 3"),
    ):
        gang.run(2, load_by_dcp, other, tmp_path / "dcp", words)
    for size in (1, 3):
        gang.run(size, load_by_dcp, config, tmp_path / "dcp", None)


# accelerate.


@pytest.mark.guarantee("accelerate-exact-when", "accelerate-prepare-gives")
@on_ranks(2)
def test_a_rank_of_several_that_accelerate_would_deal_out_is_refused_before_the_first_batch(
    rank: int, config: DataConfig
) -> None:
    sizes: Any = {"micro_batch_size": 4, "global_batch_size": 8, "dp_rank": rank, "dp_size": 2}
    with accelerator_of(rank, 2) as accelerator:
        dataset = StreamingDataset(config, **sizes)
        loader = accelerator.prepare(torch.utils.data.DataLoader(dataset, batch_size=None))
        message = (
            "this dataset reads only the part of data-parallel rank .*register_for_checkpointing"
        )
        with pytest.raises(ConfigError, match=message):
            next(iter(loader))


def dealt_by_accelerate(rank: int, config: DataConfig) -> list[int]:
    """The samples that accelerate gives to a rank, of a dataset that knows of no ranks."""
    with accelerator_of(rank, 2) as accelerator:
        dataset = StreamingDataset(config, **SIZES, dp_size=1)
        loader = accelerator.prepare(torch.utils.data.DataLoader(dataset, batch_size=None))
        places = {
            checked_batch(dataset, at)["tokens"][n].numpy().tobytes(): at + n
            for at in dataset.positions()
            for n in range(4)
        }
        return [places[row.numpy().tobytes()] for batch in loader for row in batch["tokens"]]


@pytest.mark.guarantee("accelerate-exact-when", "accelerate-prepare-gives")
def test_a_dataset_without_ranks_is_dealt_out_by_accelerate(gang: Gang, config: DataConfig) -> None:
    dealt = gang.run(2, dealt_by_accelerate, config)
    assert sorted(number for rank in dealt for number in rank) == list(range(4 * TOTAL))


@pytest.mark.guarantee("accelerate-exact-when", "accelerate-prepare-gives")
@on_ranks(2)
def test_a_loader_that_accelerate_checkpoints_goes_on_exactly(
    rank: int, config: DataConfig, tmp_path: Path
) -> None:
    with loader_of_two(rank, config) as alone:
        expected = sums_of(itertools.islice(alone, 6))
    sums = []
    for start, count in ((0, 2), (2, 4)):
        with accelerator_of(rank, 2) as accelerator, loader_of_two(rank, config) as loader:
            assert accelerator.prepare(loader) is loader, "as it is"
            accelerator.register_for_checkpointing(loader)
            if start:
                accelerator.load_state(str(tmp_path / "saved"))
            sums += sums_of(itertools.islice(loader, count))
            if not start:  # once: the other rank may not have loaded it yet
                accelerator.save_state(str(tmp_path / "saved"))
                dist.barrier()
    assert sums == expected


# Lightning.


@pytest.mark.guarantee("lightning-whole-passes")
@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_whole_passes_validates_the_same_and_resumes_exactly(
    config: DataConfig, tmp_path: Path
) -> None:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint

    data = replace(config, num_samples=(4 * TOTAL, 16, 0), split="80,20,0")

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))
            self.trained: list[int] = []
            self.validated: list[list[int]] = []

        def training_step(self, batch: Any, number: int) -> Any:
            self.trained.append(int(batch["tokens"].sum()))
            return self.weight * 1.0

        def on_validation_epoch_start(self) -> None:
            self.validated.append([])

        def validation_step(self, batch: Any, number: int) -> None:
            self.validated[-1].append(int(batch["tokens"].sum()))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(checkpoint: str | None = None, **options: Any) -> Module:
        module = Module()
        quiet: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=TOTAL + 5)
        trainer = Trainer(accelerator="cpu", devices=1, callbacks=[saving], **quiet, **options)
        with (
            StreamLoader(data, **SIZES) as train,
            StreamLoader(data, split="valid", **SIZES) as valid,
        ):
            trainer.fit(module, train, valid, ckpt_path=checkpoint)
        return module

    whole = fit(max_epochs=3)
    passes = [whole.trained[TOTAL * n : TOTAL * (n + 1)] for n in range(3)]
    assert len(whole.trained) == 3 * TOTAL
    assert passes[0] == passes[1] == passes[2]
    assert len(set(passes[0])) == TOTAL
    *_, first, second, third = whole.validated
    assert first == second == third
    assert len(first) == 4
    before = fit(max_steps=TOTAL + 5)
    after = fit(str(tmp_path / f"step={TOTAL + 5}.ckpt"), max_epochs=3)
    assert before.trained + after.trained == whole.trained
