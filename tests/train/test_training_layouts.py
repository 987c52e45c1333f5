"""One loss, one order, one checkpoint: training on any layout of ranks is training on one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from streammega.train.config import load_run
from streammega.train.trainer import Trainer
from tests.support.builders import write_layout_run
from tests.support.checkpoint_programs import checkpoint_records, files_of
from tests.support.gang import Gang
from tests.support.rank_programs import train

SOON_STEPS = 2
LONGER_STEPS = 4
STEPS = 20
"""Of a comparison in `make test`, of one whose samples get longer after two steps, and in `make
soak`: a rank whose share of a gradient is wrong shows in the second step.
"""
TOLERANCE = 2e-5
"""Of losses; ten times that of parameters after 20 steps. They add the same fp32 numbers in another
order: a matrix product split in two, a softmax over gathered keys, gradients summed over ranks.
That is some 1e-7 a step in a gradient; AdamW divides by the gradient's own size, so a parameter
whose gradient is itself that small can differ by a part of lr = 0.003 after a step.
"""
LAYOUTS = [
    (dp, tp, cp, pp)
    for dp, tp, cp, pp in itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 2))
    if 1 < dp * tp * cp * pp <= 8
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write_layout_run(folder)
    return folder


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], tuple[list[dict[str, Any]], dict[str, torch.Tensor]]]:
    """Of each variant of the data and number of steps: the records and the final parameters of one
    rank.
    """
    return {}


DOCUMENTS = [
    "data.reset_position_ids=true",
    "data.reset_attention_mask=true",
    "data.eod_mask_loss=true",
]
LONGER = [
    # after two steps: twice as long, in other lanes and half the batches
    "data.phases=[{first_sample=32, sequence_length=32, shuffle_lanes=512, global_batch_size=8}]",
]
HALF_AND_BACK = [
    "data.phases=[{first_sample=32, global_batch_size=8}, {first_sample=40, global_batch_size=16}]",
]
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "documents": DOCUMENTS,
    "longer": LONGER,
    "longer documents": LONGER + DOCUMENTS,
    "half and back": HALF_AND_BACK,
}
SMALLEST_BATCH = {
    "plain": 16,
    "documents": 16,
    "longer": 8,
    "longer documents": 8,
    "half and back": 8,
}
"""Samples of the smallest global batch of each variant."""


def parameters(run_file: Path, out: str, overrides: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The parameters of the last checkpoint of a run, loaded on one rank."""
    config = load_run(str(run_file), [f"train.out_dir={out}", *overrides])
    trainer = Trainer(config, torch.device("cpu"))
    trainer.resume()
    trainer.close()
    return {
        name: value.detach().clone() for name, value in trainer.model.chunks[0].named_parameters()
    }


def run_on(
    gang: Gang, folder: Path, name: str, size: int, overrides: list[str], steps: int
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    out = str(folder / name)
    records = gang.run(
        size, train, str(folder / "run.toml"), [f"train.out_dir={out}", *overrides], steps
    )[0]
    of_data = [override for override in overrides if override.startswith("data.")]
    return records, parameters(folder / "run.toml", out, of_data)


def run_alone(
    gang: Gang, folder: Path, alone: dict[Any, Any], variant: str, steps: int
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    if (variant, steps) not in alone:
        alone[variant, steps] = run_on(
            gang, folder, f"alone-{variant}-{steps}", 1, VARIANTS[variant], steps
        )
    records, weights = alone[variant, steps]
    return records, weights


def compare(
    gang: Gang,
    folder: Path,
    alone: dict[Any, Any],
    variant: str,
    layout: tuple[int, int, int, int],
    overrides: list[str],
    steps: int,
) -> None:
    truth, weights = run_alone(gang, folder, alone, variant, steps)
    dp, tp, cp, pp = layout
    sizes = [
        f"parallel.tp={tp}",
        f"parallel.cp={cp}",
        f"parallel.pp={pp}",
        micro_batches(variant, dp, tp, pp, overrides),
    ]
    name = f"{variant}-{dp}-{tp}-{cp}-{pp}-{steps}-{abs(hash(tuple(overrides)))}"
    records, final = run_on(
        gang, folder, name, dp * tp * cp * pp, [*VARIANTS[variant], *sizes, *overrides], steps
    )
    assert len(records) == steps
    for record, wanted in zip(records, truth, strict=True):
        assert record["batch_hash"] == wanted["batch_hash"]
        assert record["loss"] == pytest.approx(wanted["loss"], abs=TOLERANCE)
        assert record["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
        assert record["source_loss"] == pytest.approx(wanted["source_loss"], abs=10 * TOLERANCE)
    assert len({record["batch_hash"] for record in records}) == steps
    for key, value in weights.items():
        assert torch.allclose(final[key], value, atol=10 * TOLERANCE, rtol=0), (
            key,
            float((final[key] - value).abs().max()),
        )


def micro_batches(variant: str, dp: int, tp: int, pp: int, overrides: list[str]) -> str:
    """Another cut of the same global batches than that of one rank, where the layout leaves room
    for one.

    Two micro-batches a step on tensor-parallel ranks: on a CPU each costs a tenth of a second of
    dispatching, whatever its size.
    """
    size = 2
    if tp > 1:
        size = 8 // dp
    elif dp < 4 and not any("virtual" in own for own in overrides):
        size = 4
    # Of every step as many as there are stages, or those would idle, which a run refuses.
    most = SMALLEST_BATCH[variant] // (dp * pp)
    return f"train.micro_batch_size={min(size, most)}"


SOON = [(4, 1, 1, 1), (1, 1, 2, 1), (2, 1, 1, 2), (1, 2, 2, 1)]
"""Every pair of two kinds is in one of them, of those with other optimizers or of the run that
changes its layout; all, over more steps, run in `make soak`.
"""


@pytest.mark.guarantee("loss-layout-global", "metrics-jsonl-line")
@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        *((own, SOON_STEPS) for own in SOON),
        *(pytest.param(own, STEPS, marks=pytest.mark.soak) for own in LAYOUTS),
    ],
    ids=str,
)
def test_one_loss_for_all_layouts(
    gang: Gang, folder: Path, alone: dict[Any, Any], layout: tuple[int, int, int, int], steps: int
) -> None:
    compare(gang, folder, alone, "plain", layout, [], steps)


@pytest.mark.guarantee("loss-layout-global", "16-losses-sums")
@pytest.mark.parametrize("steps", [SOON_STEPS, pytest.param(STEPS, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "layout",
    [(2, 1, 2, 1), (1, 1, 1, 4), pytest.param((1, 2, 2, 2), marks=pytest.mark.soak)],
    ids=["cp", "four-stages", "tp-cp-pp"],
)
def test_one_loss_with_documents_apart(
    gang: Gang, folder: Path, alone: dict[Any, Any], layout: tuple[int, int, int, int], steps: int
) -> None:
    compare(gang, folder, alone, "documents", layout, [], steps)


@pytest.mark.guarantee("loss-layout-global")
@pytest.mark.parametrize("steps", [SOON_STEPS, pytest.param(STEPS, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ((4, 1, 1, 1), ["parallel.optimizer=sharded"]),
        ((1, 1, 1, 4), ["train.micro_batch_size=1"]),
        pytest.param((2, 2, 1, 2), ["parallel.optimizer=sharded"], marks=pytest.mark.soak),
        pytest.param((2, 1, 1, 2), ["parallel.virtual_pipeline_stages=2"], marks=pytest.mark.soak),
        ((1, 1, 2, 2), ["parallel.virtual_pipeline_stages=2", "parallel.optimizer=sharded"]),
        ((2, 2, 1, 1), ["parallel.optimizer=sharded"]),
    ],
    ids=[
        "sharded",
        "four-stages",
        "sharded-tp-pp",
        "virtual",
        "virtual-sharded-cp",
        "sharded-tp",
    ],
)
def test_one_loss_for_all_optimizers_and_schedules(
    gang: Gang,
    folder: Path,
    alone: dict[Any, Any],
    layout: tuple[int, int, int, int],
    overrides: list[str],
    steps: int,
) -> None:
    compare(gang, folder, alone, "plain", layout, overrides, steps)


CHAIN_STEPS = 7
"""One for each of the layouts below."""


@pytest.mark.guarantee("run-may-change", "15-checkpoint-holds")
def test_a_run_that_changes_its_layout_and_optimizer_is_one_run(
    gang: Gang, folder: Path, alone: dict[Any, Any]
) -> None:
    """Weights, moments and cursor cross from each layout and optimizer to each other: the losses
    are those of one rank. Each layout makes one step: the next one's loss shows whether it was right.
    """
    whole, _ = run_alone(gang, folder, alone, "plain", CHAIN_STEPS)
    chain = [
        (4, ["parallel.optimizer=sharded"]),
        (
            4,
            [
                "parallel.tp=2",
                "parallel.pp=2",
                "parallel.optimizer=sharded",
                "train.micro_batch_size=8",
            ],
        ),
        (2, ["parallel.cp=2"]),
        (4, ["parallel.pp=2", "parallel.virtual_pipeline_stages=2"]),
        (2, ["parallel.tp=2", "train.micro_batch_size=8"]),
        (1, ["parallel.optimizer=sharded", "parallel.bucket_size=333"]),
        (1, []),
    ]
    out = str(folder / "chain")
    records = []
    for size, overrides in chain:
        records += gang.run(
            size, train, str(folder / "run.toml"), [f"train.out_dir={out}", *overrides], 1
        )[0]
    for record, wanted in zip(records, whole, strict=True):
        assert record["batch_hash"] == wanted["batch_hash"]
        assert record["loss"] == pytest.approx(wanted["loss"], abs=TOLERANCE)
        assert record["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    assert len(records) == CHAIN_STEPS
    written = checkpoint_records(Path(out) / "checkpoints")
    assert len(written) == 3
    first, *others = (what_is_stored(files_of(record)) for record in written)
    assert all(other == first for other in others), (
        "what a checkpoint holds depends on no layout, optimizer or bucket"
    )


@pytest.mark.guarantee("over-change-length")
@pytest.mark.parametrize(
    ("variant", "layout", "steps"),
    [
        ("longer", (1, 1, 2, 2), LONGER_STEPS),
        ("longer documents", (1, 2, 1, 1), LONGER_STEPS),
        *(pytest.param("longer documents", own, STEPS, marks=pytest.mark.soak) for own in LAYOUTS),
    ],
    ids=str,
)
def test_one_loss_where_a_phase_has_longer_samples(
    gang: Gang,
    folder: Path,
    alone: dict[Any, Any],
    variant: str,
    layout: tuple[int, int, int, int],
    steps: int,
) -> None:
    compare(gang, folder, alone, variant, layout, [], steps)


@pytest.mark.parametrize(
    "overrides", [[], pytest.param(["parallel.virtual_pipeline_stages=2"], marks=pytest.mark.soak)]
)
def test_one_loss_where_the_batch_size_falls_and_comes_back(
    gang: Gang, folder: Path, alone: dict[Any, Any], overrides: list[str]
) -> None:
    """Schedules of different numbers of micro-batches share their pipeline stages."""
    compare(gang, folder, alone, "half and back", (1, 1, 1, 2), overrides, SOON_STEPS)


@pytest.mark.guarantee("over-change-length")
def test_a_run_goes_on_over_a_change_of_length_on_other_ranks(
    gang: Gang, folder: Path, alone: dict[Any, Any]
) -> None:
    """Resumed before the change, at it and after it."""
    whole, weights = run_alone(gang, folder, alone, "longer", LONGER_STEPS)
    assert [record["tokens"] for record in whole] == [256, 512, 768, 1024]
    out = str(folder / "chain-longer")
    layouts = [(2, ["parallel.cp=2"]), (2, ["parallel.tp=2"]), (2, []), (1, [])]
    records = []
    for size, overrides in layouts:
        overrides = [f"train.out_dir={out}", *LONGER, *overrides]
        records += gang.run(size, train, str(folder / "run.toml"), overrides, 1)[0]
    for record, wanted in zip(records, whole, strict=True):
        for name in ("batch_hash", "samples", "tokens", "lr"):
            assert record[name] == wanted[name]
        assert record["loss"] == pytest.approx(wanted["loss"], abs=TOLERANCE)
    final = parameters(folder / "run.toml", out, LONGER)
    for key, value in weights.items():
        assert torch.allclose(final[key], value, atol=10 * TOLERANCE, rtol=0), key


def what_is_stored(path: Path) -> dict[str, tuple[Any, ...]]:
    """The shape and dtype of each tensor of a checkpoint, by its name."""
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: (tuple(item.size), item.properties.dtype) for name, item in stored.items()}  # type: ignore[union-attr]
