"""balance_attention_cost: the same global batches, dealt out by the lengths of documents."""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streammega import DataConfig, IndexedDatasetWriter, StorageConfig, StreamLoader
from streammega.cli.trace import TracedRunFile
from streammega.config import Order
from streammega.errors import ConfigError, FormatError, StateError
from streammega.loading.micro_steps import BalancedBatches, attention_costs
from streammega.loading.read_plan import plan_reading
from streammega.order.schedule import TrainingSchedule
from streammega.samples.provenance import Provenance
from tests.support.builders import write_dataset
from tests.support.servers import S3
from tests.support.streams import rank_loaders
from tools.bench.balance import pace

EOD = 0
GLOBAL = 24
LENGTH = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two shards of documents of very different lengths, each ended by EOD; some of two
    sequences.
    """
    folder = tmp_path_factory.mktemp("documents")
    rng = np.random.default_rng(0)
    for shard in range(2):
        with IndexedDatasetWriter(str(folder / f"part-{shard}"), np.uint16) as writer:
            for number in range(400):
                size = int(rng.choice([2, 3, 5, 40, 90]))
                tokens = rng.integers(1, 1000, size)
                tokens[-1] = EOD
                cut = size // 2 if number % 5 == 0 else size
                writer.add_document(tokens, [cut, size - cut] if cut < size else [size])
    return str(folder)


def config_of(data: str, order: Order, tmp_path: Path, **settings: Any) -> DataConfig:
    return DataConfig(
        blend=[data] if order == "stream" else [f"{data}/part-0", f"{data}/part-1"],
        sequence_length=LENGTH,
        order=order,
        num_samples=(10 * GLOBAL, 0, 0),
        eod_id=EOD,
        reset_attention_mask=True,
        balance_attention_cost=True,
        shuffle_lanes=2 * GLOBAL if order == "stream" else None,
        shuffle_block_bytes=512,
        index_cache_dir=tmp_path / "cache",
        **settings,
    )


def opened(config: DataConfig, dp_size: int, micro: int) -> list[StreamLoader]:
    return rank_loaders(config, dp_size, micro, GLOBAL)


def read(loaders: list[StreamLoader], micro_steps: int) -> dict[int, bytes]:
    """{sample: its tokens} of the next micro-steps of all ranks."""
    seen: dict[int, bytes] = {}
    for _ in range(micro_steps):
        for loader in loaders:
            ids = loader.dataset.sample_ids(loader.consumed_samples).tolist()
            for sample, tokens in zip(ids, loader.take()["tokens"], strict=True):
                assert sample not in seen, "a sample came twice"
                seen[sample] = tokens.numpy().tobytes()
    return seen


def close(loaders: list[StreamLoader]) -> None:
    for loader in loaders:
        loader.close()


@pytest.mark.guarantee("balance-batches-global")
@pytest.mark.parametrize("order", ["stream", "megatron", "sequential"])
def test_global_batches_are_the_same_sets_for_any_ranks(
    data: str, order: Order, tmp_path: Path
) -> None:
    config = config_of(data, order, tmp_path)
    plain = opened(replace(config, balance_attention_cost=False), 1, 1)
    expected = [read(plain, GLOBAL) for _ in range(3)]
    close(plain)
    for dp_size, micro in ((1, 1), (2, 3), (4, 2), (8, 3)):
        ranks = opened(config, dp_size, micro)
        for batch in expected:
            assert read(ranks, GLOBAL // (dp_size * micro)) == batch
        close(ranks)


@pytest.mark.guarantee("balanced-batch-finished")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_batch_is_finished_by_other_ranks(data: str, order: Order, tmp_path: Path) -> None:
    config = config_of(data, order, tmp_path)
    whole = opened(config, 1, 1)
    expected = read(whole, 2 * GLOBAL)
    close(whole)
    layouts = [(2, 3), (1, 2), (4, 1), (4, 3), (2, 6)]
    seen: dict[int, bytes] = {}
    state = None
    for dp_size, micro in layouts:
        ranks = opened(config, dp_size, micro)
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        left = 2 * GLOBAL - len(seen)
        steps = 1 if (dp_size, micro) != layouts[-1] else left // (dp_size * micro)
        seen |= read(ranks, steps)
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
        close(ranks)
    assert seen == expected


@pytest.mark.guarantee("ranks-differ-sample")
def test_costs_are_those_of_the_bounds_that_batches_have(data: str, tmp_path: Path) -> None:
    config = config_of(data, "stream", tmp_path)
    costs = {False: 0, True: 0}
    for balanced in costs:
        ranks = opened(replace(config, balance_attention_cost=balanced), 4, 2)
        for _ in range(5):
            of_step = []
            for _ in range(GLOBAL // 8):
                bounds = [loader.take()["cu_seqlens"] for loader in ranks]
                of_step.append([bound.diff(dim=1).pow(2).sum(1).tolist() for bound in bounds])
            costs[balanced] += pace(np.array(of_step))
        close(ranks)
    assert costs[True] < 0.9 * costs[False]


@pytest.mark.guarantee("costs-bounds-batch")
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_costs_are_known_before_a_token_is_read(data: str, order: Order, tmp_path: Path) -> None:
    config = config_of(data, order, tmp_path)
    masking = order == "megatron"
    config = replace(config, reset_attention_mask=not masking, inter_document_masking=masking)
    (loader,) = opened(config, 1, 4)
    for _ in range(GLOBAL):
        ids = loader.dataset.sample_ids(loader.consumed_samples)
        of_bounds = loader.take()["cu_seqlens"].diff(dim=1).pow(2).sum(1)
        assert (
            attention_costs(loader.dataset.samples.segments[0], ids).tolist() == of_bounds.tolist()
        )
    loader.close()


@pytest.mark.guarantee("balanced-batch-finished")
def test_within_a_batch_only_the_same_batch_goes_on(data: str, tmp_path: Path) -> None:
    config = config_of(data, "stream", tmp_path)
    (loader,) = opened(config, 1, 2)
    read([loader], 3)
    within = loader.state_dict()
    read([loader], GLOBAL // 2 - 3)
    between = loader.state_dict()
    loader.close()
    plain = replace(config, balance_attention_cost=False)
    for other, size in ((plain, GLOBAL), (config, 2 * GLOBAL)):
        with StreamLoader(other, micro_batch_size=2, global_batch_size=size) as changed:
            with pytest.raises(StateError, match="balanced_batch"):
                changed.load_state_dict(within)
            changed.load_state_dict(between)
            assert len(changed.take()["tokens"]) == 2


@pytest.mark.guarantee("balance-batches-global")
def test_datasets_are_sent_to_other_processes_and_read_from_buckets(
    data: str, moto: S3, tmp_path: Path
) -> None:
    bucket = moto.new_bucket()
    for path in sorted(Path(data).iterdir()):
        moto.objects(bucket)[f"data/{path.name}"] = path.read_bytes()
    config = config_of(data, "stream", tmp_path)
    storage = StorageConfig(storage_options=moto.options)
    remote = replace(config, blend=[f"s3://{bucket}/data/"], storage=storage)
    local_ranks = opened(config, 2, 3)
    expected = read(local_ranks, 4)
    sent = pickle.dumps(local_ranks[0].dataset.steps)
    assert pickle.loads(sent).sample_ids(0).shape == (3,)  # noqa: S301
    close(local_ranks)
    # alone, a reader fetches whole blocks; one of several does not
    for dp_size in (1, 2):
        remote_ranks = opened(remote, dp_size, 3)
        assert read(remote_ranks, 8 // dp_size) == expected
        close(remote_ranks)


@pytest.mark.guarantee("balance-batches-global")
def test_blocks_are_left_alone_where_a_batch_has_more_samples_than_lanes(
    data: str, moto: S3, tmp_path: Path
) -> None:
    """A state brings its lanes along: a lane gives several samples of a larger batch, and of those
    the later one may be read first, when the piece would be freed before the other has come.
    """
    bucket = moto.new_bucket()
    for path in sorted(Path(data).glob("part-0.*")):
        moto.objects(bucket)[path.name] = path.read_bytes()
    settings = config_of(data, "stream", tmp_path)
    settings = replace(settings, storage=StorageConfig(storage_options=moto.options))
    config = replace(
        settings, blend=[f"s3://{bucket}/part-0"], num_samples=None, shuffle_lanes=GLOBAL
    )
    with StreamLoader(config, micro_batch_size=8, global_batch_size=GLOBAL) as loader:
        state = loader.state_dict()
        assert plan_reading(loader.dataset.steps, 0, 1 << 28).planner.blocks is not None
    larger = replace(config, shuffle_lanes=None)
    with StreamLoader(larger, micro_batch_size=8, global_batch_size=4 * GLOBAL) as loader:
        loader.load_state_dict(state)
        assert loader.dataset.steps.lanes == GLOBAL
        assert plan_reading(loader.dataset.steps, 0, 1 << 28).planner.blocks is None


def test_workers_give_the_same_batches(data: str, tmp_path: Path) -> None:
    config = config_of(data, "stream", tmp_path)
    (loader,) = opened(config, 1, 2)
    expected = [loader.take()["tokens"] for _ in range(20)]
    loader.close()
    dataset = loader.dataset
    dataset.seek(0)
    from_workers = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    for batch, other in zip(from_workers, expected, strict=False):
        assert torch.equal(batch["tokens"], other)


def test_without_documents_apart_it_is_refused(data: str) -> None:
    with pytest.raises(ConfigError, match="reset_attention_mask or inter_document_masking"):
        DataConfig(blend=[data], sequence_length=8, order="stream", balance_attention_cost=True)


def test_an_index_in_no_order_is_refused_by_name(tmp_path: Path) -> None:
    prefix = str(tmp_path / "swapped")
    write_dataset(prefix, [np.arange(1, 65) for _ in range(40)])
    index = Path(f"{prefix}.idx")
    stored = bytearray(index.read_bytes())
    offsets = np.frombuffer(stored, "<i8", 40, 34 + 4 * 40).copy()
    offsets[[3, 4]] = offsets[[4, 3]]
    stored[34 + 4 * 40 : 34 + 12 * 40] = offsets.tobytes()
    index.write_bytes(stored)
    config = config_of(prefix, "stream", tmp_path)
    (loader,) = opened(config, 1, 2)
    with pytest.raises(
        FormatError, match=r"swapped\.idx: its sequences are not in ascending order"
    ):
        loader.take()
    loader.close()


def test_what_is_remembered_of_batches_holds_no_dataset_open(data: str, tmp_path: Path) -> None:
    """Without the collector: a run of many loaders would keep the files of all of them."""
    (loader,) = opened(config_of(data, "stream", tmp_path), 1, 2)
    balanced = loader.dataset.steps._balanced
    assert balanced is not None
    loader.dataset.sample_ids(0)
    again = BalancedBatches(
        samples=balanced.samples,
        micro_batch_size=balanced.micro_batch_size,
        dp_size=balanced.dp_size,
    )
    assert (again.sample_ids(0, GLOBAL) == balanced.sample_ids(0, GLOBAL)).all()
    gone = weakref.ref(again)
    collects = gc.isenabled()
    gc.disable()
    try:
        del again
        assert gone() is None
    finally:
        if collects:
            gc.enable()
    close([loader])


def test_a_trace_names_the_rank_that_reads_a_sample(data: str, tmp_path: Path) -> None:
    config = config_of(data, "stream", tmp_path)
    traced = TracedRunFile(
        provenance=Provenance(config, "train", GLOBAL),
        schedule=TrainingSchedule(global_batch_size=GLOBAL),
        split="train",
        micro_batch_size=2,
        last_step=10,
        ranks=4,
    )
    ranks = opened(config, 4, 2)
    for number, loader in enumerate(ranks):
        for sample in loader.dataset.sample_ids(np.arange(0, 2 * GLOBAL, 8)).reshape(-1).tolist():
            assert traced.place(sample)["rank"] == number
    close(ranks)
