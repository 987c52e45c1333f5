"""Two orders compared: what differs, and from which sample on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, PhaseConfig
from streammega.cli.main import main
from streammega.samples.order_differences import OrderDifferences, compare_orders
from streammega.samples.provenance import Provenance

WEB = "mock://tokens=40000,length=70"
CODE = "mock://tokens=30000,length=50,seed=1"


def config_of(order: str, **settings: Any) -> DataConfig:
    return replace(
        DataConfig(
            blend=[(WEB, 0.6), (CODE, 0.4)],
            sequence_length=32,
            order=order,  # type: ignore[arg-type]
            split="1,0,0",
            num_samples=(2000, 0, 0),
            shuffle_lanes=16 if order == "stream" else None,
        ),
        **settings,
    )


def compared(one: DataConfig, other: DataConfig, end: int = 2000) -> OrderDifferences:
    return compare_orders(Provenance(one), Provenance(other), end)


@pytest.mark.guarantee("diff-orders-names")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_the_same_order_is_the_same_whatever_does_not_make_it(order: str) -> None:
    one = config_of(order)
    found = compared(one, replace(one, blend=[(WEB, 6), (CODE, 4)], eod_id=0, eod_mask_loss=True))
    assert found.same
    assert found.settings == {}


@pytest.mark.guarantee("diff-orders-names")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_another_seed_differs_at_the_first_sample_that_is_not_the_same(order: str) -> None:
    one = config_of(order)
    other = replace(one, seed=99)
    found = compared(one, other)
    assert found.settings["seed"] == (1234, 99)
    extents = [Provenance(config).source.locate(np.arange(2000)) for config in (one, other)]
    same = 0
    while rows_of(extents[0], same) == rows_of(extents[1], same):
        same += 1
    assert found.first == same


def rows_of(extents: Any, sample: int) -> list[tuple[int, ...]]:
    rows = slice(*extents.row_splits[sample : sample + 2])
    columns = (extents.dataset, extents.file, extents.start, extents.stop)
    return list(zip(*(column[rows].tolist() for column in columns), strict=True))


@pytest.mark.guarantee("diff-orders-names")
def test_a_later_segment_of_a_blend_leaves_what_is_before_it() -> None:
    one = config_of("stream")
    phase = PhaseConfig(first_sample=800, blend=[(WEB, 0.1), (CODE, 0.9)])
    found = compared(one, replace(one, phases=[phase]))
    assert list(found.settings) == ["phases.1"]
    assert found.first is not None
    assert 800 <= found.first < 900
    assert found.shared < found.looked_at
    late = replace(phase, first_sample=1990)
    assert compared(one, replace(one, phases=[late]), 1900).same


@pytest.mark.guarantee("diff-orders-names")
def test_datasets_of_the_same_sizes_and_other_names_are_others() -> None:
    one = config_of("stream")
    found = compared(one, replace(one, blend=[(f"{WEB},seed=7", 0.6), (CODE, 0.4)]))
    assert list(found.settings) == ["datasets[0]"], "an identity holds what the datasets hold"
    assert found.first is not None
    # The samples of the other dataset are the same ones.
    assert 0 < found.shared < found.looked_at


def write_run(path: Path, seed: int, global_batch_size: int) -> None:
    path.write_text(
        f'[data]\nblend = ["0.6", "{WEB}", "0.4", "{CODE}"]\nsequence_length = 32\nseed = {seed}\n'
        f'order = "stream"\nshuffle_lanes = 16\n[model]\nvocab_size = 50304\n[train]\ntrain_iters = 10\n'
        f'micro_batch_size = 1\nglobal_batch_size = {global_batch_size}\nout_dir = "runs/one"\n'
    )


@pytest.mark.guarantee("diff-orders-names")
def test_the_command_says_it_in_words_json_and_by_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("a.toml"), 1, 8)
    write_run(Path("b.toml"), 2, 8)
    write_run(Path("c.toml"), 1, 4)
    assert main(["diff-orders", "a.toml", "b.toml", "--html", "page.html"]) == 1
    words = capsys.readouterr().out
    assert "they differ from sample 0 on (step 1 of a.toml, step 1 of b.toml)" in words
    assert re.search(r"settings\n +name +first +second\n +seed +1 +2\n", words)
    assert "seed" in Path("page.html").read_text()
    assert main(["diff-orders", "a.toml", "b.toml", "--samples", "0"]) == 1
    assert "--samples 0: nothing is compared" in capsys.readouterr().err
    assert main(["diff-orders", "a.toml", "c.toml", "--json", "--html", "same.html"]) == 0
    page = Path("same.html").read_text()
    assert "<p>the first 40 samples of train are the same</p>" in page
    assert "same_of_these" not in page
    report = json.loads(capsys.readouterr().out)
    assert report["first_sample"] is None
    assert report["samples"] == 40
    assert report["steps"] == {"samples_of_a_step[0][1]": {"first": 8, "second": 4}}
