"""How well batches are mixed: the figure, its word in reports, and the warning of a loader."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, PhaseConfig, StreamLoader
from streammega.cli.main import main
from streammega.order.quality import MIN_DRAWS, place_shares
from streammega.samples.open import open_source
from streammega.samples.shuffling import (
    FIGURES,
    Mixing,
    mixing_advice,
    mixing_lines,
    mixing_of,
)
from streammega.storage import warn_once
from tests.support.builders import write_dataset, write_run_file

LARGE = "mock://tokens=40000000,length=1000,seed=1"
SMALL = "mock://tokens=500000,length=1000,seed=2"


def mixing(blend: Any, *, length: int, batch: int, **settings: Any) -> tuple[Mixing, str]:
    """The mixing of a training split from its first sample on, and what would mix it better."""
    if settings.setdefault("order", "stream") != "stream":
        settings["num_samples"] = (3000, 0, 0)
    config = DataConfig(blend=blend, sequence_length=length, split="1,0,0", **settings)
    segment = open_source(config, "train", batch).segments[0]
    return mixing_of(segment, 0, batch), mixing_advice(segment, batch)


def shares_of(samples: Any, *, size: int, of_place: int, window: int) -> float:
    dataset = np.zeros(len(samples), np.int64)
    sizes, places = np.array([size]), np.array([of_place])
    return float(place_shares(np.asarray(samples), dataset, sizes, places, [window])[0, 0])


def test_a_full_shuffle_has_a_share_of_one_and_neighbours_a_small_one() -> None:
    size, of_place, window = 4096, 16, 64
    shuffled = np.random.default_rng(5).permutation(size)
    assert shares_of(shuffled, size=size, of_place=of_place, window=window) == pytest.approx(
        1, abs=0.05
    )
    neighbours = shares_of(np.arange(size), size=size, of_place=of_place, window=window)
    assert neighbours == pytest.approx(4 / 56, abs=0.01), "64 samples of 4 places, not of 56 of 256"


def test_more_than_an_epoch_is_compared_with_as_many_shuffled_epochs() -> None:
    rng = np.random.default_rng(6)
    epochs = np.concatenate([rng.permutation(100) for _ in range(5)])
    assert shares_of(epochs, size=100, of_place=1, window=75) == pytest.approx(1, abs=0.1)


def test_too_few_samples_are_not_judged() -> None:
    few = np.arange(MIN_DRAWS - 1)
    assert np.isnan(shares_of(few, size=1000, of_place=10, window=8))
    assert Mixing(share=None, one_batch=None, eight_batches=None, dataset=None).verdict == "unknown"


@pytest.mark.guarantee("mixing-verdict")
@pytest.mark.parametrize("length", [128, 2048])
@pytest.mark.parametrize("batch", [8, 64, 1024])
@pytest.mark.parametrize("blend", [[LARGE], [SMALL], ["0.9", LARGE, "0.1", SMALL]])
def test_default_lanes_mix_well(blend: list[str], batch: int, length: int) -> None:
    found, _ = mixing(blend, length=length, batch=batch)
    assert found.verdict == "good", found


@pytest.mark.guarantee("mixing-verdict")
@pytest.mark.parametrize(("length", "batch", "lanes"), [(128, 8, 8), (512, 16, 16), (2048, 64, 64)])
def test_few_lanes_mix_poorly_and_the_advice_mends_it(length: int, batch: int, lanes: int) -> None:
    found, advice = mixing([LARGE], length=length, batch=batch, shuffle_lanes=lanes)
    assert found.verdict == "poor"
    assert found.share == found.eight_batches
    assert found.one_batch is not None
    assert found.one_batch > 0.9, "lanes far apart"
    assert advice.startswith("set shuffle_lanes to 512 or more")
    mended, _ = mixing([LARGE], length=length, batch=batch, shuffle_lanes=512)
    assert mended.verdict == "good"


@pytest.mark.guarantee("mixing-verdict")
def test_the_dataset_with_the_lowest_share_is_judged() -> None:
    """A small dataset in few lanes is a full shuffle, the large one beside it is not."""
    found, _ = mixing(["0.5", SMALL, "0.5", LARGE], length=2048, batch=16, shuffle_lanes=16)
    assert (found.verdict, found.dataset) == ("poor", 1)


@pytest.mark.guarantee("mixing-verdict")
def test_short_shards_are_a_full_shuffle_too(tmp_path: Path) -> None:
    """Their rests have no sample: 600 of 3,900 tokens have as many samples of 2,048, not 1,142."""
    for number in range(600):
        write_dataset(tmp_path / f"s{number:03}", [np.full(3900, 1)])
    found, _ = mixing(f"{tmp_path}/", length=2048, batch=64)
    assert found.verdict == "good", found


@pytest.mark.guarantee("mixing-verdict")
def test_the_lowest_of_many_small_sources_is_not_low_by_chance() -> None:
    blend = [
        word
        for seed in range(300)
        for word in ("1", f"mock://tokens=2000000,length=1000,seed={seed}")
    ]
    found, _ = mixing(blend, length=512, batch=1024)
    assert found.verdict == "good", found


@pytest.mark.guarantee("mixing-verdict")
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_tiny_batches_are_judged(batch: int) -> None:
    found, _ = mixing([SMALL], length=2048, batch=batch)
    assert found.verdict == "good", found


@pytest.mark.guarantee("mixing-verdict")
def test_a_change_of_lanes_mixes_what_the_epoch_has_left() -> None:
    """What the advice says of phases."""
    config = DataConfig(
        blend=[LARGE], sequence_length=128, split="1,0,0", order="stream", shuffle_lanes=8,
        phases=[PhaseConfig(first_sample=80, shuffle_lanes=512)],
    )  # fmt: skip
    before, after = open_source(config, "train", 8).segments
    assert mixing_of(before, 0, 8).verdict == "poor"
    assert mixing_of(after, 80, 8).verdict == "good"


def test_other_orders_are_judged_too() -> None:
    found, advice = mixing([SMALL], length=128, batch=64, order="sequential")
    assert found.verdict == "poor"
    assert advice.startswith('set order to "stream"')
    found, _ = mixing([SMALL], length=128, batch=64, order="megatron")
    assert found.verdict == "good"


def run_file(folder: Path, **data: Any) -> str:
    """A run of batches of 16 x 512 tokens."""
    data = {"blend": [LARGE], "sequence_length": 512, "order": "stream", **data}
    train = {"micro_batch_size": 4, "global_batch_size": 16, "train_iters": 100}
    return write_run_file(folder, data=data, train=train)


@pytest.mark.guarantee("mixing-verdict")
@pytest.mark.parametrize("command", ["describe", "order-report"])
@pytest.mark.parametrize(("lanes", "verdict"), [(None, "good"), (16, "poor")])
def test_reports_say_it_in_a_word_and_a_number(
    command: str,
    lanes: int | None,
    verdict: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run_file(tmp_path, **({} if lanes is None else {"shuffle_lanes": lanes}))
    assert main([command, run, "--json"]) == 0
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    assert phase["mixing"]["verdict"] == verdict
    share = phase["mixing"]["of_a_full_shuffle"]
    assert (share >= 0.9) == (verdict == "good")
    advice = "set shuffle_lanes to 512 or more instead of 16"
    assert (advice in phase["mixing"].get("advice", "")) == (verdict == "poor")
    assert main([command, run]) == 0
    lines = re.findall(r"^ +mixing: (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert re.fullmatch(
        verdict + r": one batch \d\.\d\d, eight batches \d\.\d\d of the places of a full shuffle",
        lines[0],
    )
    assert [advice in line for line in lines[1:]] == ([True] if verdict == "poor" else [])


def test_describe_and_order_report_say_the_same_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_file(tmp_path, shuffle_lanes=16)
    said = []
    for command in ("describe", "order-report"):
        assert main([command, run]) == 0
        said.append(re.findall(r"^ +mixing: .*$", capsys.readouterr().out, re.MULTILINE))
    assert len(said[0]) == 2
    assert said[0] == said[1]


def test_reports_and_the_page_have_the_same_names_of_figures() -> None:
    page = " ".join(Path("docs/orders-measured.md").read_text().split())
    for name, _ in FIGURES.values():
        assert f"*{name.capitalize()}*" in page
    line, *_ = mixing_lines({"verdict": "good", "one_batch": 1.0, "eight_batches": 1.0})
    for name in ("one batch", "eight batches", "places of a full shuffle"):
        assert name in line
        assert name in page.lower()


def warnings_of(caplog: pytest.LogCaptureFixture, **settings: Any) -> list[str]:
    """What a loader says of its mixing in two iterations of a few batches."""
    split = settings.pop("split", "train")
    rank, ranks = settings.pop("rank", (0, 1))
    warn_once._warned_at.clear()
    caplog.clear()
    config = DataConfig(
        **{
            "blend": [LARGE],
            "sequence_length": 512,
            "order": "stream",
            "split": "8,1,1",
            **settings,
        }
    )
    loader = StreamLoader(
        config, split=split, micro_batch_size=4, global_batch_size=16, dp_rank=rank, dp_size=ranks
    )
    with caplog.at_level(logging.WARNING), loader:
        for _ in range(2):
            batches = iter(loader)
            for _ in range(3):
                next(batches)
    return [record.getMessage() for record in caplog.records if "mixed" in record.getMessage()]


@pytest.mark.guarantee("mixing-warning")
def test_a_loader_warns_once_of_few_places(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(caplog, shuffle_lanes=16)
    assert "tokens=40000000,length=1000,seed=1 is mixed poorly" in warning
    assert "set shuffle_lanes to 512 or more instead of 16" in warning
    assert warnings_of(caplog, shuffle_lanes=512) == [], "what the warning advises"
    assert warnings_of(caplog) == []
    assert warnings_of(caplog, blend=[SMALL]) == []


@pytest.mark.guarantee("mixing-warning")
def test_one_rank_warns_and_of_training_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, shuffle_lanes=16, rank=(1, 2)) == []
    assert warnings_of(caplog, shuffle_lanes=16, split="valid") == []
