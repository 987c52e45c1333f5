"""Phases of runs in other people's trainers: what their steps cannot follow is refused at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from streammega import DataConfig, PhaseConfig
from streammega.errors import ConfigError
from streammega.integrations import megatron_bridge
from streammega.integrations.accelerate import StreamDataLoader
from streammega.integrations.lightning import StreamDataHooks
from streammega.integrations.torchtitan import TitanBatch, titan_data
from streammega.integrations.transformers import StreamTrainerMixin
from tests.support.trainer_programs import accelerator_of

SIZES: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 8}
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


def by_lightning(config: DataConfig) -> Any:
    return StreamDataHooks(config, **SIZES)


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


def by_torchtitan(config: DataConfig) -> Any:
    asked = SimpleNamespace(
        blend=config.blend,
        part="train",
        split="1,0,0",
        order="stream",
        seed=1,
        global_batch_size=8,
        num_samples=-1,
        positions="none",
        eod_id=-1,
        infinite=True,
        repeat=True,
        settings={"shuffle_lanes": 16, "phases": config.phases},
    )
    return titan_data(asked, TitanBatch(length=LENGTH, rows=2, flat=False), None)


def by_bridge(config: DataConfig) -> Any:
    return megatron_bridge.stream_dataset(config, micro_batch_size=2)


@pytest.mark.guarantee("phases-steps-another")
@pytest.mark.parametrize(
    ("opened", "trainer"),
    [
        (by_lightning, "Lightning"),
        (by_accelerate, "accelerate"),
        (by_transformers, "the Trainer"),
        (by_torchtitan, "torchtitan"),
        (by_bridge, "Megatron"),
    ],
)
def test_a_phase_of_another_batch_size_is_refused_where_steps_have_one(
    opened: Callable[[DataConfig], Any], trainer: str
) -> None:
    words = f"phase 1 sets global_batch_size 16, and the steps of {trainer} have one size"
    with pytest.raises(ConfigError, match=words):
        opened(phased(global_batch_size=16))


@pytest.mark.guarantee("phases-steps-another")
@pytest.mark.parametrize("opened", [by_torchtitan, by_bridge])
def test_a_phase_of_another_length_is_refused_where_samples_have_one(
    opened: Callable[[DataConfig], Any],
) -> None:
    with pytest.raises(
        ConfigError, match=r"sequence_length 32, .* takes samples of one length, 16"
    ):
        opened(phased(sequence_length=32))


@pytest.mark.guarantee("phases-steps-another")
def test_a_step_is_no_beginning_where_its_samples_are_not_known() -> None:
    with pytest.raises(ConfigError, match="how many samples a step of Megatron has is not known"):
        by_bridge(phased(first_step=3))
    assert by_torchtitan(phased(first_step=3)).phases[0].first_step == 3
    by_accelerate(phased(sequence_length=32))


def test_a_ramp_up_is_refused_by_a_trainer_of_transformers() -> None:
    with pytest.raises(ConfigError, match="the steps of the Trainer have one size: leave out"):
        StreamTrainerMixin(
            stream=replace(phased(), phases=()), stream_options={"rampup_batch_size": (4, 4, 16)}
        )
