"""Runs of other people's trainers that write down every sample they train on, for ranks of a gang."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from streammega import DataConfig, StreamLoader
from streammega.samples.fields import Batch

MICRO_BATCH = 2
GLOBAL_BATCH = 8
SIZES: Any = {"micro_batch_size": MICRO_BATCH, "global_batch_size": GLOBAL_BATCH}
VOCABULARY = 1000
EOD = 7
STEPS = 13
"""Optimizer steps of a pass, where the data has an end."""


def rows_of(batch: Batch, name: str = "tokens") -> list[list[int]]:
    """The tokens of each sample."""
    rows: list[list[int]] = batch[name].tolist()
    return rows


def stream(config: DataConfig, steps: int) -> list[list[int]]:
    """The samples of so many steps, by the bare loader; after the end the next pass."""
    rows: list[list[int]] = []
    whole: Any = {"micro_batch_size": GLOBAL_BATCH, "global_batch_size": GLOBAL_BATCH}
    with StreamLoader(config, **whole, dp_size=1) as loader:
        while len(rows) < steps * GLOBAL_BATCH:
            for batch in loader:
                rows += rows_of(batch)
                if len(rows) == steps * GLOBAL_BATCH:
                    break
    return rows


class RowLog:
    """Samples that were trained on, a line for each micro-batch, whole after a kill."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder) / f"rows-{rank}.jsonl"
        self._path.touch()

    def note(self, rows: list[list[int]]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(rows) + "\n")


def logged(folder: Path, ranks: int) -> list[list[int]]:
    """The samples that ranks noted, in the order of the global stream."""
    logs = []
    for rank in range(ranks):
        lines = (folder / f"rows-{rank}.jsonl").read_text().splitlines(keepends=True)
        logs.append([json.loads(line) for line in lines if line.endswith("\n")])
    # of a micro-step the ranks take samples in turn
    return [
        row for step in zip(*logs, strict=False) for turn in zip(*step, strict=True) for row in turn
    ]


@contextlib.contextmanager
def rank_environment(rank: int, size: int) -> Iterator[None]:
    """What torchrun tells a process, for one that is in a process group already; nothing for one by
    itself, which would begin a group of its own.
    """
    before = dict(os.environ)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if size > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            GROUP_RANK="0",
            TORCHELASTIC_RUN_ID="gang",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="1",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def accumulation(size: int) -> int:
    """Micro-batches of a step on so many ranks."""
    return GLOBAL_BATCH // (MICRO_BATCH * size)


# Lightning.


def lightning_module(log: RowLog, estimate: bool = False) -> Any:
    """A model that notes what it is trained on."""
    from pytorch_lightning import LightningModule

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            log.note(rows_of(batch))
            return self.weight * batch["tokens"].numel()

        def configure_optimizers(self) -> Any:
            if estimate:
                assert self.trainer.estimated_stepping_batches > 0
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


def lightning_fit(
    rank: int,
    config: DataConfig,
    folder: str,
    size: int,
    checkpoint: str | None = None,
    estimate: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train with checkpoints every second step; the state of the data module at the end."""
    from pytorch_lightning import Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint

    from streammega.integrations.lightning import StreamDataModule

    with rank_environment(rank, size):
        data = StreamDataModule(config, **SIZES)
        saving = ModelCheckpoint(
            folder, "{step:04d}", every_n_train_steps=2, save_top_k=-1, save_weights_only=False
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=size,
            strategy="ddp" if size > 1 else "auto",
            callbacks=[saving],
            accumulate_grad_batches=options.pop("accumulate", accumulation(size)),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=True,
            **options,
        )
        module = lightning_module(RowLog(folder, rank), estimate)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        state: dict[str, Any] = data.state_dict()
        return state


def lightning_validate(
    rank: int, config: DataConfig, folder: str, size: int, **options: Any
) -> list[list[Any]]:
    """Train some steps with a module that validates; the rows of each of its validations."""

    class Validating(type(lightning_module(RowLog(folder, rank)))):  # type: ignore[misc]
        def on_validation_epoch_start(self) -> None:
            validations.append([])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validations[-1] += rows_of(batch)

    from pytorch_lightning import Trainer

    from streammega.integrations.lightning import StreamDataModule

    validations: list[list[Any]] = []
    with rank_environment(rank, size):
        trainer = Trainer(
            accelerator="cpu",
            devices=size,
            strategy="ddp" if size > 1 else "auto",
            accumulate_grad_batches=accumulation(size),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **options,
        )
        trainer.fit(Validating(), datamodule=StreamDataModule(config, **SIZES))
    return validations


def lightning_train(
    rank: int, config: DataConfig, folder: str, size: int, resume: str | None, steps: int
) -> dict[str, Any]:
    """Train up to a step; the state of the data module at the end."""
    return lightning_fit(rank, config, folder, size, resume, max_steps=steps)


def newest_torch_file(folder: Path) -> tuple[str, int]:
    """The newest checkpoint that was written to its end before a kill, and its step."""
    for path in sorted(folder.glob("*.ckpt"), reverse=True):
        with contextlib.suppress(Exception):
            return str(path), int(torch.load(path, weights_only=True)["global_step"])
    raise AssertionError("no checkpoint was written")


# Fabric.


def fabric_train(
    rank: int, config: DataConfig, folder: str, size: int, resume: str | None, steps: int
) -> dict[str, Any]:
    """Train up to a step, with a checkpoint after every second; the loader's state at the end."""
    from lightning_fabric import Fabric

    log = RowLog(folder, rank)
    with rank_environment(rank, size):
        fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
        fabric.launch()
        place: Any = {"dp_rank": fabric.global_rank, "dp_size": fabric.world_size}
        loader = StreamLoader(config, **SIZES, **place)
        bare = torch.nn.Linear(1, 1)
        model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        kept: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": loader}
        if resume:
            fabric.load(resume, kept)
        for batch in loader.prefetch_to(fabric.device):
            log.note(rows_of(batch))
            step, within = divmod(loader.consumed_samples, GLOBAL_BATCH)
            with fabric.no_backward_sync(model, enabled=within > 0):
                fabric.backward(model(batch["labels"][:, :1].float()).sum())
            if within:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if step % 2 == 0:
                path = Path(folder) / f"step={step:04d}.ckpt"
                fabric.save(path, kept | {"global_step": step})
            if step == steps:
                break
        state: dict[str, Any] = loader.state_dict()
        loader.close()
        return state


# Accelerate.


@contextlib.contextmanager
def accelerate_rank(rank: int, size: int) -> Iterator[None]:
    """A rank for an Accelerator, in a process that has been a rank before and will be again."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    with rank_environment(rank, size):
        try:
            yield
        finally:
            for state in (AcceleratorState, PartialState, GradientState):
                state._reset_state()


@contextlib.contextmanager
def accelerator_of(rank: int, size: int, **options: Any) -> Iterator[Any]:
    """An Accelerator of so many processes."""
    from accelerate import Accelerator

    with accelerate_rank(rank, size):
        accelerator = Accelerator(cpu=True, **options)
        assert accelerator.num_processes == size
        yield accelerator


def accelerate_train(
    rank: int, config: DataConfig, folder: str, size: int, resume: str | None, steps: int
) -> dict[str, Any]:
    """Train so many steps, with a checkpoint after every second; the loader's state at the end."""
    from streammega.integrations.accelerate import StreamDataLoader

    log = RowLog(folder, rank)
    with accelerator_of(rank, size, gradient_accumulation_steps=accumulation(size)) as accelerator:
        loader = StreamDataLoader(accelerator, config, **SIZES)
        bare = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        model, optimizer, prepared = accelerator.prepare(bare, optimizer, loader)
        assert prepared is loader, "as it is"
        if resume:
            accelerator.load_state(resume)
        step = loader.consumed_samples // GLOBAL_BATCH
        while step < steps:
            for batch in loader:
                with accelerator.accumulate(model):
                    log.note(rows_of(batch))
                    accelerator.backward(model(batch["labels"][:, :1].float()).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    step += 1
                    _save_every_second(accelerator, folder, step)
                if step == steps:
                    break
        state: dict[str, Any] = loader.state_dict()
        loader.close()
        return state


def _save_every_second(accelerator: Any, folder: str, step: int) -> None:
    if step % 2 == 0:
        place = Path(folder) / f"step-{step:04d}"
        accelerator.save_state(str(place))
        accelerator.wait_for_everyone()
        (place / "whole").touch()


def accelerate_whole_checkpoint(folder: Path) -> tuple[str, int]:
    """The newest checkpoint that all ranks had written before a kill, and its step."""
    path = max(path.parent for path in folder.glob("step-*/whole"))
    return str(path), int(path.name.partition("-")[2])


# transformers.


def tiny_model() -> Any:
    """A causal language model of Hugging Face, with a few thousand parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )


def transformers_train(
    rank: int, config: DataConfig, folder: str, size: int, resume: str | None, steps: int
) -> dict[str, Any]:
    """Train so many steps, with a checkpoint after every second; the loader's state at the end."""
    from transformers import TrainingArguments

    from streammega.integrations.transformers import StreamTrainer

    with accelerate_rank(rank, size):
        arguments = huggingface_arguments(TrainingArguments, folder, size, steps)
        trainer_class = noted(StreamTrainer, RowLog(folder, rank))
        trainer = trainer_class(model=tiny_model(), args=arguments, stream=config)
        return trained_to_the_end(trainer, resume)


def sft_train(
    rank: int, config: DataConfig, folder: str, size: int, resume: str | None, steps: int
) -> dict[str, Any]:
    """The same, by the trainer of TRL."""
    from trl import SFTConfig

    with accelerate_rank(rank, size):
        arguments = huggingface_arguments(SFTConfig, folder, size, steps, bf16=False)
        trainer = sft_trainer(arguments, config, RowLog(folder, rank))
        return trained_to_the_end(trainer, resume)


def sft_trainer(
    arguments: Any, config: DataConfig, log: RowLog | None = None, **options: Any
) -> Any:
    """The trainer of TRL, which notes what it is trained on."""
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import SFTTrainer

    from streammega.integrations.transformers import StreamTrainerMixin

    class Tuning(StreamTrainerMixin, SFTTrainer):  # type: ignore[misc]
        pass

    return (Tuning if log is None else noted(Tuning, log))(
        model=tiny_model(),
        args=arguments,
        train_dataset=Dataset.from_list([{"input_ids": [1, 2, 3]}]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=plain_tokenizer(), eos_token="</s>"
        ),
        stream=config,
        **options,
    )


def transformers_evaluate(
    rank: int, config: DataConfig, folder: str, size: int, steps: int
) -> tuple[float, list[list[int]]]:
    """Train so many steps and evaluate after every second, and once more; the last loss, and all
    samples of this rank that were evaluated.
    """
    from transformers import TrainingArguments

    from streammega.integrations.transformers import StreamTrainer

    seen: list[list[int]] = []

    class Evaluating(noted(StreamTrainer, RowLog(folder, rank))):  # type: ignore[misc]
        def prediction_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            seen.extend(rows_of(inputs, "input_ids"))
            return super().prediction_step(model, inputs, *rest, **named)

    often: Any = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    with accelerate_rank(rank, size):
        arguments = huggingface_arguments(TrainingArguments, folder, size, steps, **often)
        arguments.learning_rate = 0.0  # the model stays the one that the losses are known of
        trainer = Evaluating(model=tiny_model(), args=arguments, stream=config)
        trained_to_the_end(trainer, None)
        return trainer.evaluate()["eval_loss"], seen


def noted(trainer_class: Any, log: RowLog) -> Any:
    """The class of a trainer that notes what it is trained on."""

    class Noted(trainer_class):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            log.note(rows_of(inputs, "input_ids"))
            return super().training_step(model, inputs, *rest, **named)

    return Noted


def huggingface_arguments(
    arguments_class: Any, folder: str, size: int, steps: int, **options: Any
) -> Any:
    """Quiet ones, with a checkpoint after every second step."""
    return arguments_class(
        output_dir=folder,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=options.pop("micro_batches", accumulation(size)),
        max_steps=steps,
        save_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )


def trained_to_the_end(trainer: Any, resume: str | None) -> dict[str, Any]:
    """Train, from a checkpoint on if there is one; the state of the loader at the end."""
    trainer.train(resume_from_checkpoint=resume)
    loader = trainer.callback_handler.train_dataloader
    state: dict[str, Any] = loader.state_dict()
    loader.close()
    return state


def transformers_whole_checkpoint(folder: Path) -> tuple[str, int]:
    """The newest checkpoint that was written to its end before a kill, and its step."""
    found = []
    for path in folder.glob("checkpoint-*/trainer_state.json"):
        with contextlib.suppress(ValueError):
            found.append((int(json.loads(path.read_text())["global_step"]), str(path.parent)))
    step, newest = max(found)
    return newest, step


def plain_tokenizer() -> Any:
    """A tokenizer of whole words that has what trainers ask for."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"</s>": 0, "[UNK]": 1}, unk_token="[UNK]"))
