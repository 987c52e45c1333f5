"""What reads without a word about ranks is refused where a job has several processes: each of them
would read the same batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from streammega import (
    DataConfig,
    FieldsConfig,
    ParallelLayout,
    Ranks,
    StreamingDataset,
    StreamLoader,
    get_batch,
)
from streammega.errors import ConfigError
from streammega.integrations.megatron import MegatronBatches
from streammega.integrations.webdataset import TextStream
from streammega.parallel import open_loader
from tests.support.gang import on_ranks

SIZES: Any = {"micro_batch_size": 2, "global_batch_size": 4}
SAID_BY_LAUNCHERS = (
    *("WORLD_SIZE", "RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SAID_BY_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def text_stream(_config: DataConfig, **ranks: Any) -> TextStream:
    fields = FieldsConfig(sequence_length=16)
    return TextStream(
        ["a"], lambda text: list(text.encode()), fields, texts=lambda _: ["text"], **SIZES, **ranks
    )


def megatron_batches(config: DataConfig, **ranks: Any) -> MegatronBatches:
    return MegatronBatches(config, split="train", micro_batch_size=2, **ranks)


OPENERS: dict[str, Callable[..., Any]] = {
    "loader": lambda config, **ranks: StreamLoader(config, **SIZES, **ranks),
    "dataset": lambda config, **ranks: StreamingDataset(config, **SIZES, **ranks),
    "texts": text_stream,
    "megatron": megatron_batches,
}


@pytest.mark.guarantee("ranks-said")
@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is 2 in the environment"),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "srun started 4 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 processes"),
        ({"PMI_SIZE": "2"}, "mpirun started 2 processes"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment; it must be a whole"),
    ],
)
def test_a_job_of_several_processes_has_to_say_who_reads_what(
    config: DataConfig,
    opener: str,
    variables: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message) as error:
        OPENERS[opener](config)
    if "a whole number" not in str(error.value):
        for way in ("dp_rank= and dp_size=", "mesh=", "dp_size=1"):
            assert way in str(error.value)
    OPENERS[opener](config, dp_size=1)
    OPENERS[opener](config, dp_rank=1, dp_size=2)


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"WORLD_SIZE": ""},
        # the script of a batch job, and a shell of salloc: one process for all tasks of the job
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        # torchrun alone on each of several nodes
        {"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_a_process_that_is_alone_need_not_say_so(
    config: DataConfig, opener: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    OPENERS[opener](config)


@on_ranks(2)
def test_a_process_group_has_to_say_it_too(rank: int, config: DataConfig) -> None:
    for opener in OPENERS.values():
        with pytest.raises(ConfigError, match=r"torch\.distributed has 2 ranks, and nothing says"):
            opener(config)
    with StreamLoader(config, **SIZES, dp_size=1) as loader:
        assert (loader.dataset.dp_rank, loader.dataset.dp_size) == (0, 1)


@pytest.mark.guarantee("ranks-said")
@pytest.mark.parametrize("opener", ["loader", "dataset", "texts"])
def test_a_process_group_that_comes_later_is_seen_at_the_first_batch(
    config: DataConfig, opener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said_nothing = OPENERS[opener](config)
    alone = OPENERS[opener](config, dp_size=1)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"torch\.distributed has 2 ranks, and nothing says"):
        next(iter(said_nothing))
    next(iter(alone))


@on_ranks(2)
def test_a_batch_is_refused_that_is_another_ranks(rank: int, config: DataConfig) -> None:
    ranks = Ranks(ParallelLayout(dp=2))
    with (
        StreamLoader(config, **SIZES, dp_size=1, ids_only=True) as loader,
        pytest.raises(
            ConfigError,
            match=rf"the loader reads for dp_rank 0 of 1, and this rank is {rank} of 2: use open_l",
        ),
    ):
        get_batch(loader, ranks)
    with open_loader(config, ranks, **SIZES) as loader:
        get_batch(loader, ranks)


def test_ranks_ask_for_the_process_group_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    Ranks(ParallelLayout())
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"WORLD_SIZE is 2 .*call init_process_group before Ranks"
    ):
        Ranks(ParallelLayout())
