"""Losses by source where others' trainers report losses: on any ranks, in phases and through resumes
they are those of a plain loop over the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streammega import DataConfig, PhaseConfig, SourceLosses
from streammega.errors import ConfigError
from streammega.samples.segments import source_names
from tests.support.builders import write_random_pair
from tests.support.gang import Gang
from tests.support.source_programs import (
    Logged,
    accelerate_losses,
    fabric_losses,
    lightning_losses,
    plain_means,
    sft_losses,
    table_model,
    transformers_losses,
)
from tests.support.trainer_programs import EOD, GLOBAL_BATCH, VOCABULARY, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 6
SAVED = 2
NAMES = ("web", "code", "math")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    """Web and code; in the fourth step math takes the place of code."""
    root = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(NAMES):
        write_random_pair(str(root / name), vocab=VOCABULARY, seed=seed)
    web, code, math = (f"{root}/{name}" for name in NAMES)
    return DataConfig(
        blend=[(web, 2.0), (code, 1.0)],
        phases=[PhaseConfig(first_sample=3 * GLOBAL_BATCH, blend=[(web, 1.0), (math, 1.0)])],
        sequence_length=16,
        order="stream",
        split="80,20,0",
        num_samples=(10 * GLOBAL_BATCH, 2 * GLOBAL_BATCH, 0),
        eod_id=EOD,
        eod_mask_loss=True,
        index_cache_dir=root / "cache",
        dataset_ids=True,
    )


Program = Callable[..., Logged]
IN_DEV = (lightning_losses, fabric_losses, accelerate_losses)
OF_HUGGINGFACE = (transformers_losses, sft_losses)


def model_of(program: Program) -> Any:
    if program not in OF_HUGGINGFACE:
        return table_model()
    model = tiny_model().eval()
    return lambda tokens: model(tokens, use_cache=False).logits


def close(found: dict[str, float], wanted: dict[str, float]) -> bool:
    """The same datasets, and their losses but for float32, in which models compute batches."""
    losses = {name: pytest.approx(loss, rel=1e-5) for name, loss in wanted.items()}
    return found == losses


@pytest.mark.guarantee("lightning-fabric-accelerate")
@pytest.mark.parametrize("program", [*IN_DEV, *OF_HUGGINGFACE])
def test_losses_by_source_are_those_of_a_plain_loop_on_any_ranks_and_after_a_resume(
    gang: Gang, config: DataConfig, tmp_path: Path, program: Program
) -> None:
    if program in OF_HUGGINGFACE:
        pytest.importorskip("transformers", reason="make integrations installs transformers")
    if program is sft_losses:
        pytest.importorskip("trl", reason="make integrations installs trl")
    model = model_of(program)
    wanted = plain_means(config, "train", model, STEPS, NAMES)
    evaluated = plain_means(config, "valid", model, STEPS, NAMES)
    assert [set(step) for step in (wanted[0], wanted[-1])] == [{"web", "code"}, {"web", "math"}]
    assert set(evaluated) == {"web", "code"}, "validation stays the same"
    (first,) = gang.run(1, program, config, str(tmp_path), 1, SAVED, None)
    resume = str(tmp_path / f"of-{SAVED}.ckpt")
    later = gang.run(2, program, config, str(tmp_path), 2, STEPS, resume)
    for answer in (first, *later):
        for found in answer["valid"]:
            assert close(found, evaluated)
    assert first["valid"], "it was validated"
    logged = [answer["train"] for answer in later]
    assert any(logged)
    for steps in logged:
        for found, expected in zip([*first["train"], *steps], wanted, strict=False):
            assert close(found, expected)
        assert len(steps) in (0, STEPS - SAVED), "of a rank that logs, every step once"


@pytest.mark.guarantee("lightning-fabric-accelerate")
def test_names_are_those_of_all_phases_and_of_the_split(config: DataConfig) -> None:
    assert SourceLosses.of(config).names == list(NAMES)
    assert SourceLosses.of(config, split="valid").names == ["web", "code"]
    assert source_names(config, "test") == []
    with pytest.raises(ConfigError, match="names of the datasets"):
        SourceLosses.of(config, split="test")


def test_what_is_cleared_is_not_counted() -> None:
    losses = SourceLosses(["web", "code"])
    losses.add(torch.tensor([0]), torch.ones(1, 4), torch.ones(1, 4))
    losses.clear()
    losses.add(torch.tensor([1]), torch.full((1, 4), 3.0), torch.ones(1, 4))
    assert losses.means(prefix="train/loss/") == {"train/loss/code": 3.0}


def test_losses_of_lightning_are_of_the_data_module_that_is_trained_on(config: DataConfig) -> None:
    pytest.importorskip("pytorch_lightning")
    from types import SimpleNamespace

    from streammega.integrations.lightning import LogsSourceLosses, StreamDataModule

    callbacks: list[Any] = []
    first = replace(config, phases=(), dataset_ids=True)
    second = replace(first, seed=first.seed + 1)
    for settings in (first, second, replace(first, dataset_ids=False)):
        data = StreamDataModule(settings, micro_batch_size=1, global_batch_size=GLOBAL_BATCH)
        data.trainer = SimpleNamespace(callbacks=callbacks)
        for stage in ("fit", "validate"):
            data.setup(stage)
        told = [one._config for one in callbacks if isinstance(one, LogsSourceLosses)]
        assert told == ([settings] if settings.dataset_ids else [])


@pytest.mark.guarantee("lightning-fabric-accelerate")
def test_steps_of_lightning_that_tell_no_losses_are_told_what_to_return(
    config: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    from types import SimpleNamespace

    from streammega.integrations.lightning import LogsSourceLosses

    logs = LogsSourceLosses(replace(config, phases=()))
    module = SimpleNamespace(device="cpu")
    trainer = SimpleNamespace(
        global_step=0, log_every_n_steps=1, should_stop=False, loggers=[], callback_metrics={}
    )
    logs.on_train_start(trainer, module)
    batch = {"dataset_id": torch.tensor([0])}
    for _ in range(2):
        logs.on_train_batch_end(trainer, module, {"loss": 1.0}, batch)
    assert caplog.text.count('return {"loss": loss, "token_losses": each.detach()}') == 1
