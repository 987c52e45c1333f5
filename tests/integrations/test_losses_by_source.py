"""Losses by source in loops with others' trainers: on any ranks, in phases and through resumes they are
those of a plain loop over the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streammega import (
    DataConfig,
    PhaseConfig,
    StorageConfig,
    StreamLoader,
    add_losses_by_source,
    source_names,
)
from tests.support.builders import write_random_pair
from tests.support.gang import Gang
from tests.support.trainer_programs import (
    EOD,
    GLOBAL_BATCH,
    SIZES,
    VOCABULARY,
    accelerator_of,
    accumulation,
    rank_environment,
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
        storage=StorageConfig(cache_dir=root / "cache"),
        fields=[..., "dataset_id"],
    )


# Loops with others' trainers, and a plain one. The model is a table of logits that no step changes.


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


def means_of(sums: torch.Tensor, names: list[str], prefix: str) -> dict[str, float]:
    """The mean loss over all ranks of each dataset that had tokens."""
    total = sums.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    named = zip(names, total.tolist(), strict=True)
    return {prefix + name: loss / tokens for name, (loss, tokens) in named if tokens}


def _loop(
    config: DataConfig, model: Any, loader: Any, device: Any, first: int, steps: int
) -> list[dict[str, float]]:
    """What a loop of one's own logs after every step."""
    names = source_names(config)
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    logged: list[dict[str, float]] = []
    for batch in loader:
        each = token_losses(model(batch["tokens"]), batch)
        add_losses_by_source(sums, batch["dataset_id"], each, batch["loss_mask"])
        if loader.consumed_samples % GLOBAL_BATCH == 0:
            logged.append(means_of(sums, names, "train/loss/"))
            sums.zero_()
        if loader.consumed_samples == steps * GLOBAL_BATCH:
            break
    assert len(logged) == steps - first
    return logged


def _evaluated(config: DataConfig, model: Any, loader: Any, device: Any) -> dict[str, float]:
    names = source_names(config, "valid")
    sums = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    for batch in loader:
        each = token_losses(model(batch["tokens"]), batch)
        add_losses_by_source(sums, batch["dataset_id"], each, batch["loss_mask"])
    return means_of(sums, names, "valid/loss/")


def fabric_losses(
    rank: int, config: DataConfig, folder: str, size: int, steps: int, resume: str | None
) -> Logged:
    """Of a loop with Fabric."""
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
    """Of a loop with accelerate, whose trackers get them."""
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


Program = Callable[..., Logged]


def close(found: dict[str, float], wanted: dict[str, float]) -> bool:
    """The same datasets, and their losses but for float32, in which models compute batches."""
    losses = {name: pytest.approx(loss, rel=1e-5) for name, loss in wanted.items()}
    return found == losses


@pytest.mark.guarantee("lightning-fabric-accelerate")
@pytest.mark.parametrize("program", [fabric_losses, accelerate_losses])
def test_losses_by_source_are_those_of_a_plain_loop_on_any_ranks_and_after_a_resume(
    gang: Gang, config: DataConfig, tmp_path: Path, program: Program
) -> None:
    model = table_model()
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
    assert source_names(config) == list(NAMES)
    assert source_names(config, "valid") == ["web", "code"]
    assert source_names(config, "test") == []
