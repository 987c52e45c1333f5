"""Stored columns in the batches of other trainers."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streammega import Column, DataConfig, StreamingDataset, StreamLoader
from streammega.train.config import load_run
from streammega.train.trainer import Trainer
from tests.support import oracle
from tests.support.builders import write_run_file
from tests.support.columns import add_column
from tests.support.expected import check_batch
from tests.support.trainer_programs import SIZES, accelerator_of, rank_environment

COLUMNS = {"teacher": Column("uint16", 3), "weight": Column("bfloat16")}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def config(sized: DataConfig) -> DataConfig:
    assert sized.blend is not None
    for name, column in COLUMNS.items():
        add_column(str(sized.blend[0]), name, column)
    return replace(sized, columns=[*COLUMNS])


def check_first(batches: Any, config: DataConfig) -> None:
    dataset = StreamingDataset(config, dp_rank=0, dp_size=1, **SIZES)
    for consumed, batch in zip(dataset.positions(), islice(batches, 4), strict=False):
        check_batch(batch, dataset, consumed, columns=COLUMNS)


@pytest.mark.guarantee("columns-other-trainers")
def test_accelerate(config: DataConfig) -> None:
    from streammega.integrations.accelerate import StreamDataLoader

    with accelerator_of(0, 1, gradient_accumulation_steps=4) as accelerator:
        loader = StreamDataLoader(accelerator, config, **SIZES)
        check_first(loader, config)
        loader.close()


@pytest.mark.guarantee("columns-other-trainers")
@pytest.mark.parametrize("workers", [0, 1])
def test_torchdata_stateful(config: DataConfig, workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    dataset = StreamingDataset(config, dp_rank=0, dp_size=1, **SIZES)
    loader = torchdata.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)
    check_first(loader, config)


@pytest.mark.guarantee("columns-other-trainers")
def test_lightning(config: DataConfig) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    from streammega.integrations.lightning import StreamDataModule

    seen: list[Any] = []

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch)
            return self.weight * batch["weight"].float().sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with rank_environment(0, 1):
        trainer = lightning.Trainer(
            max_steps=1,
            accelerator="cpu",
            accumulate_grad_batches=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(Model(), datamodule=StreamDataModule(config, **SIZES))
    assert len(seen) == 4
    check_first(seen, config)


@pytest.mark.guarantee("columns-other-trainers")
@pytest.mark.guarantee("columns-other-trainers")
def test_fabric(config: DataConfig) -> None:
    fabric_module = pytest.importorskip("lightning_fabric")
    with rank_environment(0, 1):
        fabric = fabric_module.Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        place: Any = {"dp_rank": fabric.global_rank, "dp_size": fabric.world_size}
        with StreamLoader(config, **SIZES, **place) as loader:
            check_first(loader.prefetch_to(fabric.device), config)


def test_megatrons_builder_by_a_class_attribute(config: DataConfig, tmp_path: Path) -> None:
    from megatron.core.datasets.utils import Split

    from streammega.integrations.megatron_dataset import StreamGPTDataset

    class WithColumns(StreamGPTDataset):  # type: ignore[misc]
        columns = ("teacher",)

    assert config.blend is not None
    prefix = str(config.blend[0])
    megatron = oracle.gpt_config(tmp_path / "cache", 16, 1)
    indexed = WithColumns.build_low_level_dataset(prefix, megatron)
    dataset = WithColumns(indexed, prefix, np.arange(len(indexed)), 20, Split.train, megatron)
    sample = dataset[3]
    stored = np.fromfile(f"{prefix}.col-teacher", np.uint16).reshape(-1, 3)
    extents = dataset.samples.locate(np.array([3]))
    places = [np.arange(*run) for run in zip(extents.start, extents.stop, strict=True)]
    np.testing.assert_array_equal(sample["teacher"].numpy(), stored[np.concatenate(places)][1:])
    together = torch.utils.data.default_collate(dataset.__getitems__([3, 4]))
    assert together["teacher"].shape == (2, 16, 3)


@pytest.mark.guarantee("columns-other-trainers")
def test_our_trainer(config: DataConfig, tmp_path: Path) -> None:
    """Its loss is of tokens alone; who changes its loop has the columns of the last stage."""
    assert config.blend is not None
    path = write_run_file(
        tmp_path,
        data={"blend": list(config.blend), "order": "stream", "columns": ["weight"], "eod_id": 0},
        train={"train_iters": 2, "eval_interval": 2, "eval_iters": 1},
    )
    run = load_run(path)
    assert [*run.data.column_settings] == ["weight"]
    trainer = Trainer(run, torch.device("cpu"))
    trainer.run()
    trainer.close()
