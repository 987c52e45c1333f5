"""Indices built ahead, published beside the data, and downloaded instead of built; reports of
orders.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import DataConfig, StorageConfig, build_datasets
from streammega.cli.main import main
from streammega.cli.order_report import measure_order
from streammega.errors import ConfigError
from streammega.order.epoch_layout import FilePart, StreamDataset
from streammega.order.quality import fetch_plan, shuffle_quality
from streammega.order.stream_order import StreamOrder
from streammega.samples import blended, gpt
from streammega.samples import open as opening
from streammega.samples.open import prepare
from streammega.storage.progress import ProgressObserver
from tests.support.builders import write_random_pair
from tests.support.servers import http_server
from tools.bench.shuffle_models import block_shuffle, full_shuffle, py1e, shuffle_buffer

BUILD = "build_gpt_indices"


@pytest.fixture
def blend(tmp_path: Path) -> list[tuple[str, float]]:
    for number in range(3):
        write_random_pair(str(tmp_path / "data" / f"p{number}"), 60, 50, seed=number)
    return [(str(tmp_path / "data" / f"p{number}"), 1.0 + number) for number in range(3)]


def config_of(blend: Any, tmp_path: Path, **options: Any) -> DataConfig:
    options = {"storage": StorageConfig(cache_dir=tmp_path / "c")} | options
    return DataConfig(
        blend=blend,
        sequence_length=8,
        split="80,20,0",
        num_samples=(300, 30, 0),
        **options,
    )


@pytest.mark.parametrize("num_samples", [(300,), (300, 30), (300, 30, 0, 7)])
def test_num_samples_that_are_not_of_three_splits_are_refused(
    blend: Any, tmp_path: Path, num_samples: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match="takes three counts: \\(train, valid, test\\)"):
        build_datasets(config_of(blend, tmp_path), num_samples)


@pytest.mark.guarantee("prepare-builds-indices")
@pytest.mark.parametrize("where", ["local", "s3"])
def test_prepared_indices_are_downloaded_by_other_nodes_not_built(
    blend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, s3: Any, bucket: str
) -> None:
    url = f"s3://{bucket}/order" if where == "s3" else str(tmp_path / "shared")
    storage = s3.storage.changed(cache_dir=tmp_path / "c")
    config = config_of(blend, tmp_path, index_publish_url=url, storage=storage)
    done = list(prepare(config))
    assert sorted((item.split, item.prefix[-2:]) for item in done) == [
        (s, f"p{n}") for s in ("train", "valid") for n in range(3)
    ]
    built = build_datasets(config)[0]

    def refuse(*_: Any) -> None:
        raise AssertionError("this node builds what was published")

    monkeypatch.setattr(gpt, BUILD, refuse)
    monkeypatch.setattr(blended, "blend_indices", refuse)
    fetched = build_datasets(
        replace(config, storage=config.storage.changed(cache_dir=tmp_path / "other-node"))
    )[0]
    for a, b in zip(built.datasets, fetched.datasets, strict=True):  # type: ignore[union-attr]
        np.testing.assert_array_equal(a.document_index, b.document_index)
        np.testing.assert_array_equal(a.shuffle_index, b.shuffle_index)


def test_after_ctrl_c_no_further_index_is_built_or_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    is_over = threading.Event()

    def build(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise KeyboardInterrupt
        is_over.wait(60)

    monkeypatch.setattr(opening, "_prepare_one", build)
    monkeypatch.setattr(opening, "num_threads", lambda: 1)
    datasets: Any = range(3)
    with pytest.raises(KeyboardInterrupt):
        list(opening.build_indices(datasets))
    assert 2 not in begun
    is_over.set()


def test_indices_of_several_datasets_are_built_at_once(
    blend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_build = threading.Barrier(2)
    build: Any = getattr(gpt, BUILD)

    def wait_for_another(*arguments: Any) -> Any:
        both_build.wait(60)
        return build(*arguments)

    monkeypatch.setattr(gpt, BUILD, wait_for_another)
    monkeypatch.setattr(opening, "num_threads", lambda: 2)
    assert len(list(prepare(config_of(blend[:2], tmp_path)))) == 4


def test_a_child_forked_while_indices_are_built_builds_those_of_its_own_dataset(
    blend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = (build_datasets(config_of(blend[n][0], tmp_path))[0] for n in range(2))
    assert ours is not None
    assert other is not None
    _ = ours[0]  # compiles the kernels
    is_building, is_over = threading.Event(), threading.Event()
    build: Any = getattr(gpt, BUILD)

    def hold(*arguments: Any) -> Any:
        if threading.current_thread() is builder:
            is_building.set()
            is_over.wait(60)
        return build(*arguments)

    monkeypatch.setattr(gpt, BUILD, hold)
    held = build_datasets(config_of(blend[2][0], tmp_path))[0]
    builder = threading.Thread(target=lambda: held[0])  # type: ignore[index]
    builder.start()
    assert is_building.wait(60)
    child = multiprocessing.get_context("fork").Process(target=lambda: other[0])
    child.start()
    child.join(30)
    is_hanging = child.is_alive()
    child.kill()
    is_over.set()
    builder.join()
    assert not is_hanging
    assert child.exitcode == 0


def test_an_empty_shared_folder_means_building(blend: Any, tmp_path: Path) -> None:
    config = config_of(blend, tmp_path, index_publish_url=str(tmp_path / "nothing"))
    dataset = build_datasets(config)[0]
    assert dataset is not None
    assert dataset[0]["tokens"].shape == (8,)  # type: ignore[index, union-attr]


def test_only_indices_that_are_kept_in_files_are_published(blend: Any, tmp_path: Path) -> None:
    plain = [prefix for prefix, _ in blend]
    config = config_of(
        plain, tmp_path, order="sequential", index_publish_url=str(tmp_path / "shared")
    )
    assert len(list(prepare(config))) == 6
    published = [path.name.rpartition("-")[2] for path in (tmp_path / "shared").iterdir()]
    assert sorted(published) == ["dataset_index.npy"] * 2 + ["dataset_sample_index.npy"] * 2


@pytest.mark.guarantee("prepare-builds-indices")
def test_prepare_as_a_user_runs_it(
    blend: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = f"""
[data]
blend = {[list(item) for item in blend]}
sequence_length = 8
split = "80,20,0"
order = "megatron"
[data.storage]
cache_dir = "{tmp_path}/cache"
[model]
vocab_size = 1000
[train]
train_iters = 10
micro_batch_size = 2
global_batch_size = 8
eval_interval = 5
eval_iters = 1
out_dir = "{tmp_path}/run"
"""
    (tmp_path / "run.toml").write_text(toml)
    assert main(["prepare", str(tmp_path / "run.toml")]) == 0
    out = capsys.readouterr().out
    assert "6 datasets prepared" in out
    assert out.count("samples") == 6
    assert main(["prepare", str(tmp_path / "run.toml"), "data.order=stream"]) == 0
    assert "needs no indices" in capsys.readouterr().out


@pytest.mark.guarantee("order-report-measures")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_order_reports_as_a_user_asks_for_them(
    blend: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str
) -> None:
    words = [word for prefix, weight in blend for word in (str(weight), prefix)]
    options = [
        "--sequence-length",
        "8",
        "--global-batch-size",
        "16",
        "--ranks",
        "4",
        "--steps",
        "64",
        "--order",
        order,
    ]
    assert main(["order-report", *words, *options, "--plot", str(tmp_path / "r.png")]) == 0
    out = capsys.readouterr().out
    assert "samples 1,024" in out
    assert ("each_rank" in out) == (order == "megatron")
    assert ("blend\n      most_samples_from_its_target" in out) == (order == "stream")
    assert (tmp_path / "r.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("option", "name"),
    [("--ranks", "ranks"), ("--steps", "steps"), ("--global-batch-size", "global_batch_size")],
)
def test_a_report_of_nothing_is_refused_by_name(
    option: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["order-report", "mock://tokens=1000,length=100", option, "0"]) == 1
    assert capsys.readouterr().err == f"error: {name} is 0; it must be at least 1\n"


def test_a_report_of_one_small_dataset_says_what_it_cannot_know(
    blend: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, path, **_: drawn.append(figure)
    )
    words = ["--sequence-length", "8", "--global-batch-size", "2", "--ranks", "1", "--steps", "2"]
    assert main(["order-report", blend[0][0], *words, "--plot", str(tmp_path / "r.png")]) == 0
    out = capsys.readouterr().out
    assert "nan" not in out
    assert "too few for a figure" in out
    made = measure_order(
        DataConfig(blend="mock://tokens=100000,length=1000", sequence_length=64, order="stream"),
        "train",
        4,
        2,
        4,
        ProgressObserver(),
    )
    assert "requests and bytes are not forecast" in str(made.report["notes"])
    assert made.report["each_rank"] is None
    large = measure_order(
        DataConfig(
            blend="mock://tokens=20000000,length=1000",
            sequence_length=64,
            order="stream",
            shuffle_lanes=4,
        ),
        "train",
        4,
        2,
        4,
        ProgressObserver(),
    )
    each_rank = large.report["each_rank"]
    assert each_rank["requests"] > 0, "each lane has blocks of its own"
    assert each_rank["fetched_for_each_byte_used"] > 1.5
    assert "every lane has a block open" in str(large.report["notes"])
    (axes,) = drawn[0].axes  # of one dataset there is no blend to draw
    titles = " ".join(label.get_text().replace("\n", " ") for label in axes.get_yticklabels())
    assert titles == "places neighbours domain drift"
    assert axes.get_title()
    assert len(axes.texts) == len(axes.patches) == 3, (
        "what is a share of nothing is told by its figures"
    )


@pytest.mark.guarantee("order-report-measures")
@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
def test_a_report_reads_no_tokens_but_those_of_the_opening(
    blend: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str
) -> None:
    objects = {f"/{path.name}": path.read_bytes() for path in (tmp_path / "data").iterdir()}
    with http_server(objects) as server:
        options = [
            "--sequence-length",
            "8",
            "--global-batch-size",
            "16",
            "--steps",
            "16",
            "--order",
            order,
        ]
        assert main(["order-report", f"{server.url}/p0", *options, "--json"]) == 0
        asked = [(method, path) for method, path, _ in server.requests]
    (phase,) = json.loads(capsys.readouterr().out)["phases"]
    assert phase["samples"] == 256
    stays_in_memory = order != "sequential"
    assert (phase["each_rank"] is None) == stays_in_memory, "so little is fetched whole"
    assert ("requests and bytes are not forecast" in str(phase["notes"])) == stays_in_memory
    assert ("GET", "/p0.idx") in asked
    assert asked.count(("GET", "/p0.bin")) == 1, "the tokens by which the dataset is known"


def test_the_plan_of_a_blend_has_the_requests_of_its_datasets() -> None:
    """A lane that turns to another dataset goes on where it was in the first one."""
    datasets = [
        StreamDataset(parts=[FilePart(file=0, start=0, tokens=100_000)], itemsize=2)
        for _ in range(2)
    ]
    order = StreamOrder(
        datasets=datasets, weights=[0.5, 0.5], sequence_length=10, extra_token=True, seed=1,
        lanes=8, shuffle_block_bytes=1000,
    )  # fmt: skip
    ids = np.arange(8 * 60)
    plan = fetch_plan(order.locate(ids), order.lane_of(ids), 2, 500, 1)
    assert plan.requests <= 8 * 2 * 2, "in each lane and dataset a block or two"


@pytest.mark.parametrize("make", [full_shuffle, block_shuffle, shuffle_buffer, py1e])
def test_modelled_shuffles_are_permutations(make: Any) -> None:
    rng = np.random.default_rng(0)
    arguments = {
        full_shuffle: (),
        block_shuffle: (64,),
        shuffle_buffer: (32, 100),
        py1e: (32, 100),
    }[make]
    assert sorted(make(1000, *arguments, rng).tolist()) == list(range(1000))


@pytest.mark.guarantee("order-report-measures")
def test_quality_tells_a_shuffle_from_none() -> None:
    total = 1 << 15
    rng = np.random.default_rng(0)
    good = shuffle_quality(full_shuffle(total, rng), total, 1024)
    none = shuffle_quality(np.arange(total), total, 1024)
    blocks = shuffle_quality(block_shuffle(total, 1024, rng), total, 1024)
    assert (none.adjacent_share, none.neighbour_distance, none.distance_entropy) == (1.0, 1.0, 0.0)
    assert good.domain_drift == pytest.approx(1.0, abs=0.15)
    assert good.places_per_256 > 240 > 150 > blocks.places_per_256 > none.places_per_256
    assert none.domain_drift > blocks.domain_drift * 0.9 > 10 * good.domain_drift


def test_a_report_needs_memory_for_what_it_looks_at_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import tracemalloc

    tracemalloc.start()
    assert (
        main(
            [
                "order-report",
                "mock://tokens=1000000000,length=1000000",
                "--sequence-length",
                "8",
                "--steps",
                "16",
            ]
        )
        == 0
    )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "full_shuffle" in capsys.readouterr().out
    assert peak < 200 << 20, "the modelled full shuffle is as large as the data"
