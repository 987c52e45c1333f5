"""Ranks prove that they train the same run on the same data, before the first step."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from streammega.errors import ConfigError
from streammega.train.config import load_run
from streammega.train.config_check import name_ranks
from streammega.train.trainer import Trainer
from tests.support.builders import write_layout_run, write_random_pair
from tests.support.gang import Gang


def started_with(rank: int, run_file: str, overrides: list[list[str]]) -> str:
    """What a rank is told when it starts a run with overrides of its own."""
    try:
        Trainer(load_run(run_file, overrides[rank]), torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return "started"


@pytest.mark.guarantee("ranks-train-same")
def test_a_rank_with_other_data_or_settings_is_named_on_every_rank(
    gang: Gang, tmp_path: Path
) -> None:
    run_file = write_layout_run(tmp_path)
    for name in ("web", "code"):
        for suffix in (".bin", ".idx"):
            target = tmp_path / "copy" / f"{name}{suffix}"
            target.parent.mkdir(exist_ok=True)
            shutil.copy(tmp_path / f"{name}{suffix}", target)
        write_random_pair(str(tmp_path / "stale" / name), count=400, vocab=100, seed=7)

    def told(*second: str) -> list[str]:
        return gang.run(
            3,
            started_with,
            run_file,
            [
                ["train.global_batch_size=24"],
                ["train.global_batch_size=24", *second],
                ["train.global_batch_size=24"],
            ],
        )

    copy = f'data.blend=[["{tmp_path}/copy/web", 0.7], ["{tmp_path}/copy/code", 0.3]]'
    assert told(copy) == ["started"] * 3, "the same data elsewhere"
    stale = copy.replace("copy", "stale")
    for message in told(stale):
        assert message.startswith(
            "ranks do not train the same run: rank 0 has other data than rank 1; give all"
        )
    for message in told("train.lr=0.5"):
        assert "rank 0 has other settings or versions than rank 1; give all" in message


@pytest.mark.guarantee("ranks-train-same")
def test_ranks_of_other_orders_are_named_before_some_open_together(
    gang: Gang, tmp_path: Path
) -> None:
    run_file = write_layout_run(tmp_path)
    sizes = "train.global_batch_size=24"
    orders = [[sizes, f'data.order="{order}"'] for order in ("stream", "megatron", "stream")]
    for message in gang.run(3, started_with, run_file, orders):
        assert "rank 0 has other settings or versions than rank 1; give all" in message


@pytest.mark.guarantee("ranks-train-same")
def test_what_lies_ahead_may_be_called_otherwise_and_must_be_the_same(
    gang: Gang, tmp_path: Path
) -> None:
    for folder, seed in (("here", 0), ("there", 0), ("stale", 7)):
        for number, name in enumerate(("web", "code")):
            # of what is drawn from at first, all have the same
            own_seed = number * (1 + seed)
            write_random_pair(str(tmp_path / folder / name), count=400, vocab=100, seed=own_seed)
        (tmp_path / folder / "names.txt").write_text(f"code#{3 + seed}")
    run_file = write_layout_run(tmp_path)

    def ahead(folder: str, names: str) -> list[str]:
        return [
            f'data.blend=["{tmp_path}/{folder}/web"]',
            f'data.phases=[{{first_sample=48, blend=["{tmp_path}/{folder}/code"]}}]',
            f'data.exclude_documents=[[64, {{"{tmp_path}/{folder}/code" = "{names}"}}]]',
        ]

    def told(folder: str, names: str = "there") -> list[str]:
        first = ahead("here", f"{tmp_path}/here/names.txt")
        second = ahead(folder, f"{tmp_path}/{names}/names.txt")
        return gang.run(2, started_with, run_file, [first, second])

    assert told("there") == ["started"] * 2
    for message in [*told("there", "stale"), *told("stale")]:
        assert "rank 0 has other data than rank 1; give all" in message


def test_many_ranks_are_named_by_the_first_of_them() -> None:
    assert name_ranks([1]) == "rank 1"
    assert name_ranks(range(20, 32)) == "ranks 20, 21, 22, 23, 24, 25, 26, 27 and 4 more"
