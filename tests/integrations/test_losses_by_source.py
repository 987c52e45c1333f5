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

from streammega import DataConfig, PhaseConfig, SourceLosses, StreamLoader
from streammega.errors import ConfigError
from streammega.samples.segments import source_names
from tests.support.builders import write_random_pair
from tests.support.gang import Gang
from tests.support.trainer_programs import (
    EOD,
    GLOBAL_BATCH,
    SIZES,
    VOCABULARY,
    accelerate_rank,
    accelerator_of,
    accumulation,
    huggingface_arguments,
    rank_environment,
    sft_trainer,
    tiny_model,
)

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 6
SAVED = 2
NAMES = ("web", "code", "math")
Logged = dict[str, list[dict[str, float]]]
"""{"train": what each step logged, "valid": what each evaluation did}: {name: loss}."""
EVALUATED_AT_ONCE: Any = {"micro_batch_size": 2, "global_batch_size": 8}


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
        return_dataset_ids=True,
    )


# Runs of others' trainers, and a plain loop. The model of most is a table of logits that no step changes.


def table_model() -> torch.nn.Embedding:
    """The logits of the next token, by the token alone."""
    torch.manual_seed(11)
    return torch.nn.Embedding(VOCABULARY, VOCABULARY)


def token_losses(logits: torch.Tensor, batch: Any) -> torch.Tensor:
    """Of each token, [batch, S]."""
    losses: torch.Tensor = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), batch["labels"], reduction="none"
    )
    return losses


def plain_means(config: DataConfig, split: str, model: Any, steps: int, names: Any) -> Any:
    """[{name: mean loss}] of each global batch, added up in float64; of the valid split as one."""
    of_steps = []
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    sizes: Any = {"micro_batch_size": GLOBAL_BATCH, "global_batch_size": GLOBAL_BATCH}
    with StreamLoader(config, split=split, **sizes) as loader, torch.no_grad():
        for batch in loader:
            each = token_losses(model(batch["tokens"]), batch).double()
            for row, number in enumerate(batch["dataset_id"].tolist()):
                learned = batch["loss_mask"][row] == 1
                name = names[number]
                sums[name] = sums.get(name, 0.0) + float(each[row][learned].sum())
                counts[name] = counts.get(name, 0) + int(learned.sum())
            if split == "train":
                of_steps.append({name: sums[name] / counts[name] for name in sums})
                sums, counts = {}, {}
                if len(of_steps) == steps:
                    return of_steps
    return {name: sums[name] / counts[name] for name in sums}


def sorted_into(logged: list[dict[str, float]], train: str, valid: str) -> Logged:
    """Entries of a log with the names that begin so."""
    found: Logged = {"train": [], "valid": []}
    for entry in logged:
        for kind, prefix in (("train", train), ("valid", valid)):
            named = {
                name.removeprefix(prefix): loss
                for name, loss in entry.items()
                if name.startswith(prefix)
            }
            if named:
                found[kind].append(named)
    return found


def lightning_losses(
    rank: int, config: DataConfig, folder: str, size: int, steps: int, resume: str | None
) -> Logged:
    """Of Lightning, with a validation at the end and a checkpoint there."""
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.loggers import Logger

    from streammega.integrations.lightning import StreamDataModule

    logged: list[dict[str, float]] = []

    class Notes(Logger):
        name = "notes"
        version = 0

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            logged.append(dict(metrics))

        def log_hyperparams(self, *given: Any, **named: Any) -> None:
            pass

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = table_model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            each = token_losses(self.table(batch["tokens"]), batch)
            return {"loss": each.mean(), "token_losses": each.detach()}

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    with rank_environment(rank, size):
        trainer = Trainer(
            accelerator="cpu",
            devices=size,
            strategy="ddp" if size > 1 else "auto",
            accumulate_grad_batches=accumulation(size),
            max_steps=steps,
            val_check_interval=steps * accumulation(size) if resume is None else None,
            num_sanity_val_steps=1,
            logger=Notes(),
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        data = StreamDataModule(config, **SIZES)
        trainer.fit(Model(), datamodule=data, ckpt_path=resume)
        trainer.save_checkpoint(f"{folder}/of-{steps}.ckpt")
        assert set(trainer.callback_metrics) >= {name for entry in logged for name in entry} - {
            "epoch"
        }
    return sorted_into(logged, "train/loss/", "val/loss/")


def _loop(
    config: DataConfig, model: Any, loader: Any, device: Any, first: int, steps: int
) -> list[dict[str, float]]:
    """What a loop of one's own logs after every step."""
    losses = SourceLosses.of(config, device=device)
    logged: list[dict[str, float]] = []
    for batch in loader:
        each = token_losses(model(batch["tokens"]), batch)
        losses.add(batch["dataset_id"], each, batch["loss_mask"])
        if loader.consumed_samples % GLOBAL_BATCH == 0:
            logged.append(losses.means(prefix="train/loss/"))
        if loader.consumed_samples == steps * GLOBAL_BATCH:
            break
    assert len(logged) == steps - first
    return logged


def _evaluated(config: DataConfig, model: Any, loader: Any, device: Any) -> dict[str, float]:
    losses = SourceLosses.of(config, split="valid", device=device)
    for batch in loader:
        each = token_losses(model(batch["tokens"]), batch)
        losses.add(batch["dataset_id"], each, batch["loss_mask"])
    return losses.means(prefix="valid/loss/")


def fabric_losses(
    rank: int, config: DataConfig, folder: str, size: int, steps: int, resume: str | None
) -> Logged:
    """Of a loop with Fabric, which takes what it logs from SourceLosses."""
    from lightning_fabric import Fabric

    with rank_environment(rank, size):
        fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
        fabric.launch()
        ranks: Any = {"dp_rank": fabric.global_rank, "dp_size": fabric.world_size}
        loader = StreamLoader(config, **SIZES, **ranks)
        model = table_model()
        if resume is not None:
            fabric.load(resume, {"data": loader})
        first = loader.consumed_samples // GLOBAL_BATCH
        logged = _loop(config, model, loader, fabric.device, first, steps)
        fabric.save(f"{folder}/of-{steps}.ckpt", {"data": loader})
        loader.close()
        with StreamLoader(config, split="valid", **EVALUATED_AT_ONCE, **ranks) as valid:
            logged.append(_evaluated(config, model, valid, fabric.device))
    return sorted_into(logged, "train/loss/", "valid/loss/")


def accelerate_losses(
    rank: int, config: DataConfig, folder: str, size: int, steps: int, resume: str | None
) -> Logged:
    """Of a loop with accelerate, whose trackers get what SourceLosses give."""
    from accelerate.tracking import GeneralTracker, on_main_process

    from streammega.integrations.accelerate import StreamDataLoader

    logged: list[dict[str, float]] = []

    class Notes(GeneralTracker):  # type: ignore[misc]
        name = "notes"
        requires_logging_directory = False
        main_process_only = False

        def __init__(self) -> None:
            super().__init__()

        @property
        def tracker(self) -> Any:
            return self

        @on_main_process
        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: Any, step: Any = None, **named: Any) -> None:
            logged.append(dict(values))

    with accelerator_of(
        rank, size, gradient_accumulation_steps=accumulation(size), log_with=Notes()
    ) as accelerator:
        accelerator.init_trackers("run")
        model = table_model()
        loader = StreamDataLoader(accelerator, config, **SIZES)
        if resume is not None:
            accelerator.load_state(resume)
        first = loader.consumed_samples // GLOBAL_BATCH
        for means in _loop(config, model, loader, accelerator.device, first, steps):
            accelerator.log(means)
        accelerator.save_state(f"{folder}/of-{steps}.ckpt")
        loader.close()
        valid = StreamDataLoader(accelerator, config, split="valid", **EVALUATED_AT_ONCE)
        accelerator.log(_evaluated(config, model, valid, accelerator.device))
        valid.close()
    return sorted_into(logged, "train/loss/", "valid/loss/")


def transformers_losses(
    rank: int, config: DataConfig, folder: str, size: int, steps: int, resume: str | None
) -> Logged:
    """Of the Trainer of transformers."""
    from transformers import TrainingArguments

    from streammega.integrations.transformers import StreamTrainer

    with accelerate_rank(rank, size):
        arguments = _arguments(TrainingArguments, folder, size, steps)
        trainer = StreamTrainer(model=tiny_model(), args=arguments, stream=config)
        return _trained(trainer, resume)


def sft_losses(
    rank: int, config: DataConfig, folder: str, size: int, steps: int, resume: str | None
) -> Logged:
    """Of that of TRL, whose loss is fused with the logits."""
    from trl import SFTConfig

    unprepared: Any = {"bf16": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    with accelerate_rank(rank, size):
        arguments = _arguments(SFTConfig, folder, size, steps, **unprepared)
        return _trained(sft_trainer(arguments, config), resume)


def _arguments(kind: Any, folder: str, size: int, steps: int, **options: Any) -> Any:
    often: Any = {"eval_strategy": "steps", "eval_steps": steps, "per_device_eval_batch_size": 2}
    arguments = huggingface_arguments(kind, folder, size, steps, **often, **options)
    arguments.learning_rate = 0.0
    arguments.logging_strategy = "steps"
    arguments.logging_steps = 1
    return arguments


def _trained(trainer: Any, resume: str | None) -> Logged:
    if resume is not None:
        step = Path(resume).stem.removeprefix("of-")
        resume = str(Path(resume).parent / f"checkpoint-{step}")
    before = 0 if resume is None else int(resume.rpartition("-")[2])
    trainer.train(resume_from_checkpoint=resume)
    trainer.callback_handler.train_dataloader.close()
    logged = [entry for entry in trainer.state.log_history if entry["step"] > before]
    return sorted_into(logged, "loss/", "eval_loss/")


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
    with pytest.raises(ConfigError, match="at least one dataset name"):
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
    first = replace(config, phases=(), return_dataset_ids=True)
    second = replace(first, seed=first.seed + 1)
    for settings in (first, second, replace(first, return_dataset_ids=False)):
        data = StreamDataModule(settings, micro_batch_size=1, global_batch_size=GLOBAL_BATCH)
        data.trainer = SimpleNamespace(callbacks=callbacks)
        for stage in ("fit", "validate"):
            data.setup(stage)
        told = [one._config for one in callbacks if isinstance(one, LogsSourceLosses)]
        assert told == ([settings] if settings.return_dataset_ids else [])


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
