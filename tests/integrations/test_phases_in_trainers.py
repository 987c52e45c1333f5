"""Phases of runs in other people's trainers: what their steps cannot follow is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streammega import DataConfig, PhaseConfig
from streammega.errors import ConfigError
from streammega.integrations import megatron_bridge
from streammega.integrations.accelerate import StreamDataLoader
from streammega.integrations.megatron import MegatronBatches, Place, datasets_of
from streammega.integrations.transformers import StreamTrainerMixin
from tests.integrations.test_megatron_provider import EOD, arguments, tokenizer
from tests.support.adapters import ADAPTERS
from tests.support.trainer_programs import SIZES, accelerator_of

LENGTH = 16


def phased(**phase: int) -> DataConfig:
    start = {} if "first_step" in phase else {"first_sample": 8}
    told: dict[str, Any] = start | phase
    return DataConfig(
        blend=["mock://tokens=4000"],
        sequence_length=LENGTH,
        order="stream",
        shuffle_lanes=16,
        phases=[PhaseConfig(**told)],
    )


def by_accelerate(config: DataConfig) -> Any:
    with accelerator_of(0, 1, gradient_accumulation_steps=4) as accelerator:
        return StreamDataLoader(accelerator, config, **SIZES)


def by_transformers(config: DataConfig) -> Any:
    trainer: Any = StreamTrainerMixin.__new__(StreamTrainerMixin)
    trainer._stream = config
    trainer._stream_options = {}
    trainer._train_batch_size = 2
    trainer.args = SimpleNamespace(gradient_accumulation_steps=4)
    trainer.accelerator = SimpleNamespace(num_processes=1)
    return StreamTrainerMixin.get_train_dataloader(trainer)


def by_megatron(config: DataConfig, num_samples: Any = (80, 0, 0), **given: Any) -> Any:
    args = arguments(data_path=config.blend, split=config.split, seq_length=LENGTH, **given)
    return datasets_of(
        args,
        tokenizer(),
        num_samples,
        place=Place(dp_rank=0, dp_size=1),
        order=config.order,
        shuffle_lanes=config.shuffle_lanes,
        phases=config.phases,
    )


def by_bridge(config: DataConfig) -> Any:
    return megatron_bridge.stream_dataset(config, micro_batch_size=2)


REFUSE: dict[str, tuple[Callable[[DataConfig], Any], str]] = {
    "lightning": (ADAPTERS["lightning"], "Lightning"),
    "accelerate": (by_accelerate, "accelerate"),
    "transformers": (by_transformers, "the Trainer"),
    "torchtitan": (ADAPTERS["torchtitan"], "torchtitan"),
    "megatron-provider": (by_megatron, "Megatron"),
    "megatron-bridge": (by_bridge, "Megatron"),
}
"""Trainers whose steps have one size: what opens them, and their names in messages."""
FOLLOW = {
    *("loader", "prefetch_to", "dcp", "torchdata-node", "torchdata-0-workers"),
    *(
        "torchdata-2-workers",
        "webdataset-stage",
        "webdataset-texts",
        "webdataset-lanes",
        "megatron",
    ),
}
"""Those of ADAPTERS that make no steps, or steps of any size."""


def test_every_adapter_follows_phases_or_refuses_them() -> None:
    others = {"megatron-provider", "megatron-bridge"}
    assert set(ADAPTERS) | others == set(REFUSE) | FOLLOW, "REFUSE by check_phases?"


@pytest.mark.guarantee("phases-steps-another")
@pytest.mark.parametrize("name", REFUSE)
def test_a_phase_of_another_batch_size_is_refused_where_steps_have_one(name: str) -> None:
    opened, trainer = REFUSE[name]
    words = f"phase 1 sets global_batch_size 16, and the steps of {trainer} have one size"
    with pytest.raises(ConfigError, match=words):
        opened(phased(global_batch_size=16))


@pytest.mark.guarantee("phases-steps-another")
@pytest.mark.parametrize("name", ["torchtitan", "megatron-provider", "megatron-bridge"])
def test_a_phase_of_another_length_is_refused_where_samples_have_one(name: str) -> None:
    opened, _ = REFUSE[name]
    with pytest.raises(
        ConfigError, match=r"sequence_length 32, .* takes samples of one length, 16"
    ):
        opened(phased(sequence_length=32))


@pytest.mark.guarantee("phases-steps-another")
def test_a_step_is_no_beginning_where_its_samples_are_not_known() -> None:
    for opened in (by_megatron, by_bridge):
        with pytest.raises(ConfigError, match="a step of Megatron has is not known"):
            opened(phased(first_step=3))
    ADAPTERS["torchtitan"](phased(first_step=3)).close()
    by_accelerate(phased(sequence_length=32))


@pytest.mark.guarantee("phases-steps-another")
def test_megatrons_provider_follows_phases_of_the_stream_order() -> None:
    config = replace(phased(shuffle_lanes=32), eod_id=EOD, split="1,0,0", num_samples=(80, 0, 0))
    train, _, _ = by_megatron(config)
    with MegatronBatches(config, split="train", micro_batch_size=2).open() as loader:
        for _ in range(12):
            assert torch.equal(next(train)["tokens"], loader.take()["tokens"])
    train.close()
    cut = replace(config, split="80,20,0")
    train, valid, _ = by_megatron(cut, (80, None, 0), full_validation=True)
    assert len(valid) == len(list(valid)) > 0, "which has no phases"
    for batches in (train, valid):
        batches.close()


def test_trainers_follow_or_refuse_every_setting_of_a_phase() -> None:
    checked = {"global_batch_size", "sequence_length", "first_step"}
    followed = {"first_sample", "blend", "shuffle_lanes", "exclude_documents"}
    settings = {item.name for item in fields(PhaseConfig)}
    assert settings == checked | followed, "check_phases of frameworks.py refuses it, or not?"


def test_a_ramp_up_is_refused_by_a_trainer_of_transformers() -> None:
    with pytest.raises(ConfigError, match="the steps of the Trainer have one size: leave out"):
        StreamTrainerMixin(
            stream=replace(phased(), phases=()), stream_options={"rampup_batch_size": (4, 4, 16)}
        )
