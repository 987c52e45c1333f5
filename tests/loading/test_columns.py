"""Stored columns in batches: from buckets, in workers, from the cache, on every rank, and what refuses
them. That every value is its token's, in any order and with any feature, test_expected_batches.py shows
for local files.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from streammega import (
    Column,
    DataConfig,
    FieldsConfig,
    ParallelLayout,
    SFTDataset,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
    batch_fields,
)
from streammega.cli.order_report import measure_order
from streammega.errors import ConfigError, FormatError, ObjectChangedError, StreammegaError
from streammega.integrations.megatron import MegatronBatches
from streammega.integrations.transformers import causal_lm_batch
from streammega.integrations.webdataset import TextStream
from streammega.loading.lookahead import Lookahead
from streammega.loading.read_plan import plan_reading
from streammega.loading.stats import Stats
from streammega.order.sharding import zigzag_bounds
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.requests import FetchGroup
from streammega.storage.progress import ProgressObserver
from tests.support.builders import write_dataset
from tests.support.columns import add_column, change_entry
from tests.support.expected import check_batch
from tests.support.gang import Gang
from tests.support.rank_programs import read_batches
from tests.support.streams import storage_of
from tools.bench.object_server import Running

LENGTH = 32
SIZES: Any = {"micro_batch_size": 2, "global_batch_size": 4}
COLUMNS = {
    "teacher": Column("uint16", 4),
    "logprobs": Column("float16", 4, fill=-0.5),
    "weight": Column("float8_e4m3fn", align="tokens", missing=1.0),
}
READ = {name: Column(missing=column.missing) for name, column in COLUMNS.items()}


def write_columns(root: Path) -> None:
    """Two datasets; `code` has no weights."""
    rng = np.random.default_rng(3)
    for name, columns in (("web", [*COLUMNS]), ("code", ["teacher", "logprobs"])):
        documents = [rng.integers(0, 60_000, rng.integers(1, 300)) for _ in range(150)]
        write_dataset(root / name, [document.astype(np.uint16) for document in documents])
        for number, column in enumerate(columns):
            add_column(root / name, column, COLUMNS[column], shards=[number + 9 * len(name)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_columns(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def bucket(server: Running) -> str:
    folder = server.root / "columns"
    if not folder.exists():
        folder.mkdir()
        write_columns(folder)
    return "s3://columns"


def config_of(
    root: Path | str, storage: StorageConfig | None = None, **settings: Any
) -> DataConfig:
    defaults: dict[str, Any] = {
        "blend": [(f"{root}/web", 0.6), (f"{root}/code", 0.4)],
        "sequence_length": LENGTH,
        "order": "stream",
        "num_samples": (160, 0, 0),
        "shuffle_lanes": 8,
        "shuffle_block_bytes": 512,
        "columns": READ,
        "storage": storage or StorageConfig(),
    }
    return DataConfig(**defaults | settings)


def check_all(loader: StreamLoader, local: Callable[[str], str] = str, steps: int = 30) -> None:
    with loader:
        for consumed in islice(loader.dataset.positions(), steps):
            check_batch(next(loader), loader.dataset, consumed, columns=COLUMNS, local=local)


@pytest.mark.guarantee("columns-values-of-tokens")
@pytest.mark.parametrize("memory_bytes", [600_000, 40_000_000], ids=["no-room", "blocks"])
@pytest.mark.parametrize("order", ["stream", "megatron"])
@pytest.mark.parametrize("resident_bytes", [0, 1 << 20])
def test_batches_of_buckets_have_the_values_of_their_tokens(
    server: Running, bucket: str, tmp_path: Path, memory_bytes: int, order: Any, resident_bytes: int
) -> None:
    storage = storage_of(server, "obstore").changed(
        memory_bytes=memory_bytes, cache_dir=tmp_path / "cache"
    )
    storage = storage.tuned(resident_bytes=resident_bytes)
    config = config_of(bucket, storage, order=order)
    loader = StreamLoader(config, **SIZES)
    check_all(loader, lambda url: url.replace(bucket, f"{server.root}/columns"))
    batch = loader.dataset.batch(8)
    local = StreamLoader(replace(config, blend=config_of(server.root / "columns").blend), **SIZES)
    for name, field in local.dataset.batch(8).items():
        assert torch.equal(batch[name].view(torch.uint8), field.view(torch.uint8)), name


@pytest.mark.guarantee("columns-no-room")
def test_blocks_are_chosen_by_column(server: Running, bucket: str) -> None:
    """The widest is read a sample a request where its blocks have no room; ids still are in blocks."""

    def blocks(memory_bytes: int) -> list[bool]:
        storage = storage_of(server, "obstore").tuned(resident_bytes=0)
        config = config_of(bucket, storage, blend=f"{bucket}/web", shuffle_block_bytes=8192)
        steps = StreamingDataset(config, **SIZES).steps
        plan = plan_reading(steps, 0, memory_bytes)
        return [files.planner.blocks is not None for files in plan.files]

    assert blocks(40_000_000) == [True] * 4
    few = blocks(5_500_000)
    assert few[0]
    assert not all(few)


def test_reads_of_a_group_come_file_by_file(server: Running, bucket: str) -> None:
    """Requests go out together if they are for one object, and follow each other."""
    submitted: list[FetchGroup] = []

    class Recording(Fetcher):
        def submit(self, groups: Sequence[FetchGroup]) -> None:
            submitted.extend(groups)

    storage = storage_of(server, "obstore").tuned(resident_bytes=0)
    steps = StreamingDataset(config_of(bucket, storage, blend=f"{bucket}/web"), **SIZES).steps
    plan = plan_reading(steps, 0, 40_000_000)
    positions = iter(range(0, 160, 2))
    with closing(Recording(storage)) as fetcher:
        lookahead = Lookahead(steps, plan, positions, fetcher=fetcher, stats=Stats())
        while not lookahead.exhausted:
            lookahead.plan_window()
    in_order: list[FetchGroup] = []
    while (group := lookahead.take_group()) is not None:
        assert len({len(of_file) for of_file in group.buffers}) == 1, "blocks of the same places"
        for of_file in group.buffers:
            in_order += of_file
    assert submitted == in_order
    assert len(submitted) > 4 * 2


@pytest.mark.guarantee("columns-not-fetched-unasked")
@pytest.mark.parametrize("columns", [[], ["weight"]])
def test_only_what_is_asked_for_is_fetched_and_no_more_of_it_than_of_ids(
    server: Running, bucket: str, columns: list[str]
) -> None:
    storage = storage_of(server, "obstore").changed(memory_bytes=40_000_000)

    def fetched(names: list[str]) -> float:
        config = config_of(bucket, storage, blend=f"{bucket}/web", columns=names)
        with StreamLoader(config, **SIZES) as loader:
            before = server.counts()["bytes"]
            for _ in loader:
                pass
            stats = loader.stats()
        assert stats["amplification"] < 1.3
        return server.counts()["bytes"] - before

    alone = fetched([])
    token_bytes = {"weight": 1}
    expected = 1 + sum(token_bytes[name] for name in columns) / 2
    assert fetched(columns) / alone == pytest.approx(expected, rel=0.15)


@pytest.mark.guarantee("columns-values-of-tokens")
def test_the_page_cache_keeps_columns_too(server: Running, bucket: str, tmp_path: Path) -> None:
    storage = storage_of(server, "obstore").changed(
        memory_bytes=40_000_000, cache_dir=tmp_path / "cache", cache_max_bytes=1 << 26
    )
    config = config_of(bucket, storage)
    local = lambda url: url.replace(bucket, f"{server.root}/columns")  # noqa: E731
    fetched: list[int] = []
    while not fetched or fetched[-1]:  # until the threads that fill the cache have come to its end
        assert len(fetched) < 50, fetched
        before = server.counts()["bytes"]
        loader = StreamLoader(config, **SIZES)
        opened = server.counts()["bytes"] - before
        check_all(loader, local)
        fetched.append(server.counts()["bytes"] - before - opened)
    assert fetched[0]


@pytest.mark.guarantee("columns-values-of-tokens")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_send_columns(folder: Path, method: str) -> None:
    dataset = StreamingDataset(config_of(folder), **SIZES)
    loader: Any = DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context=method
    )
    for number, batch in enumerate(islice(loader, 6)):
        check_batch(batch, dataset, number * 2, columns=COLUMNS)


@pytest.mark.guarantee("columns-values-of-tokens")
def test_a_copy_and_a_pickle_of_a_loader_that_has_read_read_the_same(folder: Path) -> None:
    loader = StreamLoader(config_of(folder), **SIZES)
    next(loader)
    loader.close()
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):  # noqa: S301
        with other:
            check_batch(next(other), other.dataset, 2, columns=COLUMNS)


@pytest.mark.guarantee("columns-in-no-state")
def test_columns_are_in_no_state(folder: Path) -> None:
    with StreamLoader(config_of(folder), **SIZES) as loader:
        for _ in range(5):
            next(loader)
        state = loader.state_dict()
    alone = StreamLoader(config_of(folder, columns=[]), **SIZES)
    alone.load_state_dict(state)
    assert alone.state_dict() == state
    with StreamLoader(config_of(folder, columns=["teacher"]), **SIZES) as other:
        other.load_state_dict(alone.state_dict())
        check_batch(next(other), other.dataset, 10, columns={"teacher": COLUMNS["teacher"]})


@pytest.mark.guarantee("columns-values-of-tokens")
@pytest.mark.parametrize("on_device", [False, True])
def test_batches_of_ids_have_them_too(folder: Path, on_device: bool) -> None:
    with StreamLoader(config_of(folder), ids_only=True, **SIZES) as loader:
        raw = next(loader.prefetch_to("cpu" if on_device else None))
    assert [*raw] == ["ids", "valid", "teacher", "logprobs", "weight", "dataset_id"]
    assert raw["teacher"].shape == (2, LENGTH + 1, 4)
    assert raw["weight"].shape == (2, LENGTH + 1)
    assert raw["weight"].dtype == torch.float8_e4m3fn


@pytest.mark.guarantee("columns-values-of-tokens")
@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(tp=2, cp=2, pp=2), ParallelLayout(cp=2, dp=2), ParallelLayout(tp=2, pp=2)],
    ids=lambda x: f"tp{x.tp}-cp{x.cp}-dp{x.dp}-pp{x.pp}",
)
@pytest.mark.parametrize("documents", [False, True], ids=["parts", "whole"])
def test_ranks_have_the_parts_that_they_keep(
    gang: Gang, folder: Path, layout: ParallelLayout, documents: bool
) -> None:
    read = {"teacher": Column(), "logprobs": Column(stage="both")}
    config = config_of(folder, columns=read)
    if documents:
        config = replace(config, eod_id=1, reset_position_ids=True, reset_attention_mask=True)
    sizes: Any = {"micro_batch_size": 2, "global_batch_size": 8}
    results = gang.run(layout.world_size, read_batches, layout, config, sizes, 3, 1, False)
    for result in results:
        at = result["at"]
        dataset = StreamingDataset(config, dp_rank=at["dp"], dp_size=layout.dp, **sizes)
        bounds = zigzag_bounds(LENGTH, at["cp"], layout.cp)
        kept = np.concatenate([np.arange(*part) for part in bounds])
        for number, batch in enumerate(result["batches"]):
            expected = dataset.batch(number * 2 * layout.dp)
            is_last = at["pp"] == layout.pp - 1
            assert ("teacher" in batch) == is_last
            for name in {"teacher", "logprobs"} & {*batch}:
                np.testing.assert_array_equal(batch[name], expected[name].numpy()[:, kept])
            assert "logprobs" in batch


@pytest.mark.guarantee("columns-values-of-tokens")
def test_what_is_missing_does_not_make_reads_scattered(server: Running, tmp_path: Path) -> None:
    """Where they are, whole files are fetched into the cache."""
    root = server.root / "scattered"
    rng = np.random.default_rng(0)
    for name in ("web", "code"):
        documents = [rng.integers(0, 60_000, 3000).astype(np.uint16) for _ in range(400)]
        write_dataset(root / name, documents)
    add_column(root / "web", "weight", Column("float32"))
    storage = storage_of(server, "obstore").changed(
        cache_dir=tmp_path / "cache", cache_max_bytes=1 << 28
    )
    sizes: dict[str, Any] = {"sequence_length": 128, "shuffle_block_bytes": 32768}
    nowhere = Column("uint8", missing=0)
    for columns in ({}, {"weight": Column(missing=1.0)}, {"nowhere": nowhere}):
        config = config_of("s3://scattered", storage, columns=columns, num_samples=None, **sizes)
        steps = StreamingDataset(config, **SIZES).steps
        plan = plan_reading(steps, 0, 400_000_000)
        is_read = [bool(file.table.itemsize.any()) for file in plan.files]
        assert [file.planner.blocks is not None for file in plan.files] == is_read
        assert not plan.is_scattered


def test_nan_is_a_fill_like_others(folder: Path) -> None:
    for name in ("web", "code"):
        add_column(folder / name, "score", Column("float32", fill=math.nan))
        add_column(folder / name, "zero", Column("float32", fill=0 if name == "web" else 0.0))
    with StreamLoader(config_of(folder, columns=["score", "zero"]), **SIZES) as loader:
        assert next(loader)["score"].shape == (2, LENGTH)
    with StreamLoader(config_of(folder, blend=f"{folder}/", columns=["score"]), **SIZES) as loader:
        assert next(loader)["score"].shape == (2, LENGTH)


def test_no_dataset_needs_the_column_where_the_run_says_what_it_is(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where validation is of other datasets. It may be a wrong name: a warning says so."""
    column = Column("float16", 2, missing=0.5)
    with StreamLoader(config_of(folder, columns={"score": column}), **SIZES) as loader:
        batch = next(loader)
    assert batch["score"].dtype == torch.float16
    assert batch["score"].shape == (2, LENGTH, 2)
    assert (batch["score"] == 0.5).all()
    assert "no dataset has a column score: all its values are 0.5" in caplog.text


def test_rows_that_complete_the_last_batch_have_the_fill(folder: Path) -> None:
    changes: dict[str, Any] = {"order": "sequential", "num_samples": None, "shuffle_lanes": None}
    config = config_of(folder, blend=f"{folder}/web", shuffle_block_bytes=None, **changes)
    check_all(StreamLoader(config, last="pad", **SIZES), steps=1 << 20)


def test_a_phase_reads_them_at_its_length(folder: Path) -> None:
    from streammega import PhaseConfig

    phase = PhaseConfig(first_sample=8, sequence_length=48, blend=f"{folder}/web")
    check_all(StreamLoader(config_of(folder, phases=[phase]), **SIZES), steps=10)


@pytest.mark.guarantee("columns-replaced")
def test_a_column_that_is_replaced_is_refused_by_its_version(
    server: Running, bucket: str, tmp_path: Path
) -> None:
    root = server.root / "replaced"
    root.mkdir()
    write_columns(root)
    storage = storage_of(server, "obstore").tuned(max_retries=0)
    config = config_of("s3://replaced", storage, order="megatron", blend="s3://replaced/web")
    loader = StreamLoader(config, **SIZES)
    path = root / "web.col-teacher"
    path.write_bytes(bytes(reversed(path.read_bytes())))
    with loader, pytest.raises(ObjectChangedError, match="col-teacher"):
        for _ in loader:
            pass


@pytest.mark.guarantee("columns-refused-by-name")
def test_wrong_data_is_refused_by_name(folder: Path) -> None:
    def opened(**settings: Any) -> StreamLoader:
        return StreamLoader(config_of(folder, **settings), **SIZES)

    with pytest.raises(ConfigError, match=r"code: has no column 'weight'"):
        opened(columns=["weight"])
    with pytest.raises(ConfigError, match="no dataset has a column 'weights'"):
        opened(columns={"weights": Column(missing=0)})
    with pytest.raises(
        ConfigError, match="has dtype uint16, and columns of the config says uint32"
    ):
        opened(columns={"teacher": Column("uint32")})
    with pytest.raises(ConfigError, match=r"missing is -2.*cannot hold"):
        opened(columns={"teacher": Column(missing=-2)})
    add_column(folder / "code", "teacher", Column("uint16", 5))
    with pytest.raises(ConfigError, match=r"column 'teacher' is 4 x uint16 .*web, and 5 x uint16"):
        opened(columns=["teacher"])
    for order in ("megatron", "sequential"):
        with pytest.raises(
            ConfigError, match=r"column 'teacher' is 4 x uint16 .*web, and 5 x uint16"
        ):
            opened(columns=["teacher"], order=order)
    change_entry(folder / "web", "logprobs", {"width": 2})
    with pytest.raises(FormatError, match=r"web\.col-logprobs: has [\d,]+ bytes, and"):
        opened(columns=["logprobs"])


@pytest.mark.guarantee("columns-other-trainers")
def test_what_has_no_place_for_columns_says_so(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder)
    fields = FieldsConfig(sequence_length=LENGTH)
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"tokens": [1, 2], "answers": [0, 1]}\n')
    for use in (
        lambda: MegatronBatches(config, split="train", micro_batch_size=2, dp_rank=0, dp_size=1),
        lambda: SFTDataset([str(chat)], lambda _: [1], config),
        lambda: TextStream(
            ["a"], lambda text: [1], config, micro_batch_size=1, global_batch_size=1
        ),
        lambda: batch_fields(np.zeros((1, LENGTH + 1), np.int64), None, config),
    ):
        with pytest.raises(ConfigError, match="leave teacher, logprobs, weight out of columns"):
            use()
    assert batch_fields(np.zeros((1, LENGTH + 1), np.int64), None, fields)


@pytest.mark.guarantee("columns-other-trainers")
def test_the_inputs_of_transformers_have_them(folder: Path) -> None:
    batch = StreamingDataset(config_of(folder), **SIZES).batch(0)
    inputs = causal_lm_batch(batch)
    assert {*COLUMNS} <= {*inputs}
    assert "loss_mask" not in inputs


@pytest.mark.guarantee("columns-refused-by-name")
def test_a_manifest_that_is_damaged_is_an_error_of_streammega(folder: Path) -> None:
    change_entry(folder / "web", "teacher", {"width": "four"})
    with pytest.raises(StreammegaError, match=r"web\.manifest\.json"):
        StreamLoader(config_of(folder), **SIZES)


@pytest.mark.guarantee("columns-no-room")
@pytest.mark.parametrize(("memory_bytes", "told"), [(1 << 30, False), (20_000, True)])
def test_order_report_names_columns_whose_blocks_have_no_room(
    folder: Path, memory_bytes: int, told: bool
) -> None:
    config = config_of(
        folder, StorageConfig(memory_bytes=memory_bytes), blend=f"{folder}/web", columns=["teacher"]
    )
    report = measure_order(config, "train", 4, 1, 8, ProgressObserver()).report
    assert any("column teacher: its open blocks" in note for note in report["notes"]) == told
