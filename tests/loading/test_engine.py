"""The planner and the engine: what is requested, what is held, and that nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import (
    DataConfig,
    IndexedDatasetWriter,
    PhaseConfig,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
)
from streammega.config.storage import Tuning
from streammega.errors import ConfigError, FormatError
from streammega.loading.engine import Engine
from streammega.loading.lookahead import SECONDS_FETCHED, Lookahead
from streammega.loading.memory_plan import (
    BatchSize,
    BlockSize,
    MemoryPlan,
    ResidentSize,
    plan_memory,
)
from streammega.loading.planner import MAX_WASTE as COALESCING_WASTE
from streammega.loading.planner import Planner, largest_gap
from streammega.loading.read_plan import ReadPlan, plan_reading
from streammega.loading.ready import Assembler
from streammega.loading.stats import Stats
from streammega.order import Extents
from streammega.order.sharding import zigzag_bounds
from streammega.samples.rows import FileTable
from streammega.storage.fetch import buffer_pool
from streammega.storage.fetch.buffer_pool import MAX_WASTE, BufferPool, rounded
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.requests import FetchGroup
from tests.support.builders import write_dataset, write_lengths
from tests.support.examples import examples
from tests.support.expected import checked_batch
from tests.support.processes import python_environment
from tests.support.streams import blend_of, config_of, storage_of, stream, write_data
from tools.bench.object_server import Running

FILES = 3
TOKENS = 5000


def table(local: list[bool]) -> FileTable:
    zeros = np.zeros(FILES, np.int64)
    return FileTable(
        firsts=np.arange(FILES + 1),
        itemsize=np.array([2, 4, 2]),
        num_tokens=np.full(FILES, TOKENS),
        local=np.array(local),
        files=[],
        verified_at=zeros,
        mapped_at=zeros,
        page_bytes=4096,
        chunk_bytes=1 << 20,
    )


row = st.tuples(st.integers(0, FILES - 1), st.integers(0, TOKENS - 1), st.integers(0, 300))


@pytest.mark.guarantee("reads-flight-before")
@given(
    samples=st.lists(st.lists(row, min_size=1, max_size=4), min_size=1, max_size=20),
    gap=st.sampled_from([0, 64, 4096]),
    part=st.sampled_from([4096, 1 << 20]),
    slab=st.integers(1, 6),
    local=st.lists(st.booleans(), min_size=FILES, max_size=FILES),
)
def test_every_row_is_served_by_bytes_that_are_requested_in_order_of_need(
    samples: list[list[tuple[int, int, int]]], gap: int, part: int, slab: int, local: list[bool]
) -> None:
    rows = [item for sample in samples for item in sample]
    start = np.array([a for _, a, _ in rows])
    stop = np.minimum(start + np.array([n for _, _, n in rows]), TOKENS)
    extents = Extents(
        row_splits=np.cumsum([0, *map(len, samples)]),
        dataset=np.array([f for f, _, _ in rows], np.int32),
        file=np.zeros(len(rows), np.int32),
        start=start,
        stop=stop,
    )
    files = [
        np.random.default_rng(n)
        .integers(0, 60_000, TOKENS)
        .astype(np.uint16 if n != 1 else np.int32)
        for n in range(FILES)
    ]
    planner = Planner(table(local), gap, part, None)
    window = planner.plan(np.arange(len(samples)), extents, slab)
    held: dict[int, np.ndarray] = {}
    for planned in window.buffers:
        buffer = held[planned.slot] = np.zeros(planned.size, np.uint8)
        for request in planned.requests:
            size = request.stop - request.start
            assert 0 < size <= part
            assert not local[request.file]
            buffer[request.at : request.at + size] = files[request.file].view(np.uint8)[
                request.start : request.stop
            ]
    for r, (file, _, _) in enumerate(rows):
        size = int(window.size[r]) * files[file].itemsize
        if not size:
            continue
        if local[file]:
            assert window.slot[r] == file
            source = files[file].view(np.uint8)
        else:
            source = held[int(window.slot[r])]
        at = int(window.offset[r])
        np.testing.assert_array_equal(
            source[at : at + size].view(files[file].dtype), files[file][start[r] : stop[r]]
        )
    needs = [planned.row for planned in window.buffers]
    assert needs == sorted(needs)
    for slot in held:
        assert planner.table.uses[slot] == int(((window.slot == slot) & (window.size > 0)).sum())
    used = sum(len(np.unique(np.concatenate([np.arange(a, b) for f, a, b in zip(extents.dataset, start, stop, strict=True)
                if f == n] or [np.zeros(0, int)]))) * files[n].itemsize for n in range(FILES) if not local[n])  # fmt: skip
    fetched = sum(
        request.stop - request.start for planned in window.buffers for request in planned.requests
    )
    assert used <= fetched
    if part > 8 * TOKENS:  # nothing is cut: waste is gaps alone
        wanted = sum(
            int(stop[r] - start[r]) * files[f].itemsize
            for r, (f, _, _) in enumerate(rows)
            if not local[f]
        )
        assert fetched <= used + 0.2 * wanted


@pytest.mark.guarantee("reads-flight-before")
@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 50)), min_size=1, max_size=60),
    st.integers(0, 500),
)
def test_gaps_are_bridged_while_they_are_a_seventh_of_what_is_used(
    rows: list[tuple[int, int]], limit: int
) -> None:
    start = np.sort(np.array([a for a, _ in rows]))
    stop = start + np.array([n for _, n in rows])
    gap = largest_gap(np.zeros(len(rows), np.int64), start, stop, limit)
    ends = np.maximum.accumulate(stop)
    gaps = start[1:] - ends[:-1]
    bridged = gaps[(gaps > 0) & (gaps < gap)]
    assert gap <= limit
    assert bridged.sum() <= (stop - start).sum() / 7


@pytest.mark.parametrize("last", [1, 32_768, 1 << 31])
def test_gaps_are_bridged_in_any_number_of_files(last: int) -> None:
    file = np.array([0, last, last])
    start = np.array([5_000_000, 0, 110])
    assert largest_gap(file, start, start + 100, 1000) == 10


@pytest.mark.guarantee("memory-budget-never")
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=80),
    st.integers(50_000, 200_000),
)
def test_a_pool_never_has_more_than_its_budget(steps: list[tuple[bool, int]], budget: int) -> None:
    """A third of the reads end before their answer arrives."""
    pool = BufferPool(budget)
    reads: list[tuple[int, np.ndarray | None]] = []
    for number, (begins, size) in enumerate(steps):
        if begins and pool.has_room(size):
            pool.reserve(size)
            buffer = None
            if number % 3:
                with pool.lock:
                    buffer = pool.take(size)
                assert size <= len(buffer) <= MAX_WASTE * rounded(size)
            reads.append((size, buffer))
        elif reads:
            pool.free(*reads.pop(0))
        taken = sum(len(buffer) for _, buffer in reads if buffer is not None)
        kept = sum(len(buffer) for buffers in pool._free.values() for buffer in buffers)
        assert pool.in_use == sum(rounded(size) for size, _ in reads) <= budget
        assert taken + kept == pool._allocated <= MAX_WASTE * budget
        assert all(pool._free.values())
    assert all(size <= rounded(size) <= max(4096, size * 17 / 16 + 4096) for _, size in steps)


BEYOND_LEAST = (0, 1000, 8000, 50_000, 240_000, 2_000_000)
"""Bytes of memory beside the least with which one micro-batch can be read."""


def orders_and_budgets() -> list[Any]:
    """Each budget with an order, and each order with the least and with one that holds much, where
    nothing stays in memory; and two where something does. All in `make soak`.
    """
    soon = {
        "stream": (0, 8000, 2_000_000),
        "megatron": (0, 1000, 240_000),
        "sequential": (0, 50_000, 2_000_000),
    }
    of_resident = {"stream": (0, 2_000_000), "megatron": (0, 240_000), "sequential": (0, 2_000_000)}
    return [
        pytest.param(order, beyond, resident_bytes, marks=[] if is_soon else pytest.mark.soak)
        for order, beyond in itertools.product(soon, BEYOND_LEAST)
        for resident_bytes in (0, 1 << 20)
        for is_soon in [beyond in (of_resident if resident_bytes else soon)[order]]
    ]


def least_memory(config: DataConfig) -> int:
    """What the error says of a memory that is too small for one micro-batch."""
    config = replace(config, storage=replace(config.storage, memory_bytes=4096))
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
    with pytest.raises(ConfigError, match=r"memory_bytes 4,096 .* needs at least ") as caught:
        next(iter(loader))
    return int(str(caught.value).split("at least ")[1].split(" ")[0].replace(",", ""))


@pytest.mark.guarantee("memory-budget-never", "9-budget-deadlocks")
@pytest.mark.parametrize(("order", "beyond", "resident_bytes"), orders_and_budgets())
def test_any_budget_gives_the_same_stream_within_it(
    server: Running, tmp_path: Path, order: str, beyond: int, resident_bytes: int
) -> None:
    """From the least that the error names on: fetched blocks, small datasets that stay, ids and fields
    that are ready.
    """
    tuning = Tuning(resident_bytes=resident_bytes)
    storage = replace(storage_of(server, "obstore"), _tuning=tuning)
    # 130 bytes each
    config = config_of(order, "s3:/", tmp_path, storage, samples=400 if beyond < 50_000 else 2000)
    if order == "sequential":
        config = replace(config, num_samples=None, blend=["s3://data/web"])
    budget = least_memory(config) + beyond
    config = replace(config, storage=replace(storage, memory_bytes=budget))
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
    with loader:
        got = torch.cat(
            [torch.cat([batch["tokens"], batch["labels"]], 1).clone() for batch in loader]
        )
    blend: Any = [f"{server.root}/data/web"] if order == "sequential" else blend_of(server.root)
    assert torch.equal(got, stream(replace(config, blend=blend)))
    assert 0 < loader.stats()["most_held_bytes"] <= budget


@pytest.mark.guarantee("9-budget-deadlocks")
def test_windows_get_memory_where_a_phase_reads_samples_outside_of_blocks(
    server: Running, tmp_path: Path
) -> None:
    """Samples that earlier phases left unread are in no block. Other datasets of the run are."""
    in_flight_bytes = 4096
    storage = replace(storage_of(server, "obstore"), memory_bytes=8_000_000).tuned(
        max_in_flight_bytes=in_flight_bytes
    )
    config = replace(
        config_of("stream", "s3:/", tmp_path, storage, samples=3000),
        blend=["s3://data/web"],
        phases=[
            PhaseConfig(first_sample=800, blend=["s3://data/web", "s3://data/code"]),
            PhaseConfig(first_sample=1600, sequence_length=16),
        ],
    )
    steps = StreamLoader(config, micro_batch_size=4, global_batch_size=8).dataset.steps
    segments = steps.by_segment(steps.positions(0), 0)
    for (here, positions, start), only_blocks in zip(segments, (True, True, False), strict=True):
        memory = plan_reading(here, start, storage.memory_bytes).memory
        assert memory.block_datasets
        assert (memory.fetch_bytes - memory.open_bytes == in_flight_bytes) == only_blocks
        assert list(positions)


@pytest.mark.guarantee("9-budget-deadlocks")
def test_windows_get_memory_for_a_dataset_that_is_too_small_for_blocks(
    server: Running, tmp_path: Path
) -> None:
    write_lengths(f"{server.root}/data/few-samples", [700])
    storage = replace(storage_of(server, "obstore"), memory_bytes=8_000_000).tuned(
        max_in_flight_bytes=4096
    )
    config = replace(
        config_of("stream", "s3:/", tmp_path, storage),
        blend=["s3://data/web", "s3://data/few-samples"],
    )
    steps = StreamLoader(config, micro_batch_size=4, global_batch_size=8).dataset.steps
    memory = plan_reading(steps, 0, storage.memory_bytes).memory
    assert memory.block_datasets == (0,)
    assert memory.fetch_bytes - memory.open_bytes > 4096
    config = replace(config, storage=storage.tuned(resident_bytes=1))
    steps = StreamLoader(config, micro_batch_size=4, global_batch_size=8).dataset.steps
    memory = plan_reading(steps, 0, storage.memory_bytes).memory
    assert (memory.block_datasets, memory.resident_datasets) == ((0,), (1,)), "it has no blocks"
    assert memory.fetch_bytes - memory.open_bytes == memory.resident_bytes + 4096


@pytest.mark.guarantee("9-budget-deadlocks")
def test_a_budget_too_small_for_the_open_blocks_is_told_with_what_would_do(
    server: Running, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = replace(storage_of(server, "obstore"), memory_bytes=300_000)

    def reading_with(memory_bytes: int) -> ReadPlan:
        caplog.clear()
        config = config_of("stream", "s3:/", tmp_path, replace(storage, memory_bytes=memory_bytes))
        loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
        return plan_reading(loader.dataset.steps, 0, memory_bytes)

    short = reading_with(storage.memory_bytes).planner.blocks
    assert short is None or not short.is_followed.all()
    assert "memory_bytes 300,000 has no room for the open blocks" in caplog.text
    enough = int(caplog.text.split("at least ")[1].split(";")[0].replace(",", ""))
    blocks = reading_with(enough).planner.blocks
    assert blocks is not None
    assert blocks.is_followed.all(), "what was told is enough"
    assert not caplog.records
    reading_with(enough - 4096)
    assert caplog.records, "and no more than is needed"


@pytest.mark.guarantee("fetches-token-once", "pieces-held-whole")
def test_the_stream_order_fetches_every_byte_once(server: Running, tmp_path: Path) -> None:
    storage = replace(storage_of(server, "obstore"), memory_bytes=4_000_000)
    config = replace(
        config_of("stream", "s3:/", tmp_path, storage),
        blend=["s3://data/web"],
        num_samples=None,
        shuffle_block_bytes=2048,
    )
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
    reader = plan_reading(loader.dataset.steps, 0, storage.memory_bytes)
    assert reader.planner.blocks is not None
    order = loader.dataset.samples.segments[0].order
    assert order is not None
    epoch = int(order.layout.datasets["size"][0]) // 8
    loader = StreamLoader(
        replace(config, num_samples=(epoch * 8, 0, 0)), micro_batch_size=4, global_batch_size=8
    )
    server.behave()
    assert len(list(loader)) == epoch * 2
    assert loader.stats()["amplification"] < 1.05, "an extra token for each piece of 16 samples"
    assert loader.stats()["requests"] < epoch * 8 / 4


@pytest.mark.guarantee("pieces-held-whole")
def test_blocks_and_parts_of_blocks_take_the_memory_of_earlier_ones(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs begin and end within blocks, so an epoch has parts of all sizes."""
    allocated: list[int] = []

    def new_buffer(size: int) -> Any:
        allocated.append(size)
        return np.empty(size, np.uint8)

    monkeypatch.setattr(buffer_pool, "new_buffer", new_buffer)
    write_lengths(f"{server.root}/data/blocks", [1 << 22])
    config = DataConfig(
        blend=["s3://data/blocks"],
        sequence_length=1024,
        order="stream",
        num_samples=(4000, 0, 0),
        shuffle_lanes=8,
        shuffle_block_bytes=1 << 14,
        storage=replace(storage_of(server, "obstore"), memory_bytes=4_000_000, cache_dir=tmp_path),
    )
    loader = StreamLoader(config, micro_batch_size=1, global_batch_size=1)
    with loader:
        for _ in loader:
            pass
    assert sum(allocated) < loader.stats()["fetched_bytes"] / 4


@pytest.mark.guarantee("pieces-held-whole")
def test_the_first_blocks_of_an_epoch_fit_beside_the_last_of_the_one_before(
    server: Running, tmp_path: Path
) -> None:
    """All lanes begin an epoch at the same row. Bytes that are fetched only then are waited for."""
    lanes = 64
    write_lengths(f"{server.root}/data/epochs", [1 << 22])
    config = DataConfig(
        blend=["s3://data/epochs"],
        sequence_length=256,
        order="stream",
        shuffle_lanes=lanes,
        shuffle_block_bytes=1 << 14,
        storage=replace(storage_of(server, "obstore"), memory_bytes=50_000_000)
        .tuned(max_request_bytes=6000)
        .changed(cache_dir=tmp_path),
    )
    steps = StreamLoader(config, micro_batch_size=lanes, global_batch_size=lanes).dataset.steps
    reading = plan_reading(steps, 0, config.storage.memory_bytes)
    order = steps.samples.segment_at(0).order
    assert order is not None
    epoch_rows = -(-int(order.layout.datasets["size"][0]) // lanes)
    ids = np.arange((epoch_rows + 1) * lanes)
    window = reading.planner.plan(ids, steps.samples.locate(ids), lanes)
    around_the_end = np.unique(window.slot[(epoch_rows - 1) * lanes :])
    sizes = {buffer.slot: rounded(buffer.size) for buffer in window.buffers}
    held = sum(sizes[slot] for slot in around_the_end.tolist())
    assert len(around_the_end) > 1.5 * lanes, "a last and a first block of each lane"
    assert held < 1.25 * lanes * max(sizes.values())
    requests = [request for buffer in window.buffers for request in buffer.requests]
    assert max(request.stop - request.start for request in requests) == 6000


sizes = st.integers(1, 1 << 20)


@pytest.mark.guarantee("pieces-held-whole", "memory-budget-never")
@given(
    samples=st.integers(1, 64),
    stored=sizes,
    ids=sizes,
    fields=st.lists(sizes, max_size=8),
    blocks=st.lists(sizes, max_size=5),
    small=st.lists(sizes, max_size=5),
    lanes=st.integers(1, 1024),
    memory_bytes=st.integers(1 << 12, 1 << 34),
    more=st.integers(0, 1 << 30),
    ahead=st.integers(1, 200),
)
def test_memory_is_divided_and_more_of_it_holds_no_less(
    samples: int, stored: int, ids: int, fields: list[int], blocks: list[int], small: list[int],
    lanes: int, memory_bytes: int, more: int, ahead: int,
) -> None:  # fmt: skip
    batch = BatchSize(samples, 1, stored, (ids, 8 * samples), tuple(fields))
    assert batch.fetched(samples) >= samples * stored * (1 + COALESCING_WASTE)
    wanted = [BlockSize(number, size) for number, size in enumerate(blocks)]
    resident = [ResidentSize(number, size) for number, size in enumerate(small)]
    plan_of = partial(
        plan_memory,
        batch=batch,
        blocks=wanted,
        lanes=lanes,
        resident=resident,
        ahead=ahead,
        coalesce_gap_bytes=512,
        only_blocks=True,
    )
    plans: list[MemoryPlan | None] = []
    for memory in (memory_bytes, memory_bytes + more):
        try:
            plan = plan_of(memory)
        except ConfigError as error:
            least = int(str(error).split("at least ")[1].split(" ")[0].replace(",", ""))
            assert least > memory
            plan_of(least)
            plans.append(None)  # and what the error names is enough
            continue
        plans.append(plan)
        assert plan.ready_bytes + plan.max_fetch_bytes <= memory
        assert plan.fetch_bytes <= plan.max_fetch_bytes
        assert plan.open_bytes <= min(plan.fetch_bytes, 0.75 * (memory - plan.ready_bytes))
        assert plan.open_bytes >= lanes * sum(blocks[dataset] for dataset in plan.block_datasets)
        assert plan.window_batches >= plan.group_batches >= plan.field_batches >= 1
        assert plan.ready_groups * plan.group_batches >= ahead
        stay = set(plan.resident_datasets)
        assert stay.isdisjoint(plan.block_datasets), "a dataset is in memory once"
        assert plan.resident_bytes == sum(small[dataset] for dataset in stay)
        left = set(range(len(blocks))).difference(stay, plan.block_datasets)
        assert plan.num_without_room == len(left)
        reads_samples = bool(left) or len(stay) < len(small)
        assert (plan.fetch_bytes > plan.open_bytes + plan.resident_bytes) == reads_samples
        if reads_samples:
            enough = plan_of(plan.enough_bytes)
            assert enough.num_without_room == 0 < plan.enough_bytes - memory
            assert len(enough.resident_datasets) == len(small)
    less, large = plans
    if less is not None:
        assert large is not None
        held = [{*plan.block_datasets, *plan.resident_datasets} for plan in (less, large)]
        holds_more = len(held[1]) > len(held[0])  # beside smaller groups, it may be
        stays_more = large.resident_bytes > less.resident_bytes
        assert large.open_bytes >= less.open_bytes or holds_more or stays_more
        assert large.group_batches >= less.group_batches or held[1]


@pytest.mark.guarantee("pieces-held-whole")
def test_blocks_are_held_whole_of_datasets_drawn_most_first(
    server: Running, tmp_path: Path
) -> None:
    config = config_of("stream", "s3:/", tmp_path, storage_of(server, "obstore"))
    config = replace(config, blend=[("s3://data/web", 0.3), ("s3://data/code", 0.7)])
    steps = StreamLoader(config, micro_batch_size=4, global_batch_size=8).dataset.steps
    held = []
    for budget in range(1_000_000, 8_000_000, 100_000):
        blocks = plan_reading(steps, 0, budget).planner.blocks
        held.append((False, False) if blocks is None else tuple(blocks.is_followed.tolist()))
    assert list(dict.fromkeys(held)) == [(False, False), (False, True), (True, True)], (
        "the second is drawn more often"
    )


def test_memory_is_planned_for_masks_of_sequences(tmp_path: Path) -> None:
    """Of ids alone too: which tokens have a loss is gathered with them."""
    with IndexedDatasetWriter(str(tmp_path / "d"), np.uint16, multimodal=True) as writer:
        for _ in range(100):
            writer.add_document(np.arange(80), [40, 40], [0, 1])
    ready_bytes = []
    for is_masked in (False, True):
        config = DataConfig(
            blend=[str(tmp_path / "d")],
            sequence_length=64,
            num_samples=(96, 0, 0),
            mask_loss_by_mode=is_masked,
            storage=StorageConfig(cache_dir=tmp_path / "cache"),
        )
        loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8, ids_only=True)
        ready_bytes.append(plan_reading(loader.dataset.steps, 0, 1 << 26).memory.ready_bytes)
    assert ready_bytes[0] < ready_bytes[1]


def test_memory_is_planned_for_all_fields_of_a_batch(tmp_path: Path) -> None:
    write_data(tmp_path)
    config = config_of("stream", str(tmp_path), tmp_path / "cache", StorageConfig())
    config = replace(config, shuffle_lanes=64)
    loader = StreamLoader(config, micro_batch_size=64, global_batch_size=64)
    memory = plan_reading(loader.dataset.steps, 0, 1 << 26).memory
    with loader:
        batch = next(iter(loader))
    nbytes = sum(field.nbytes for field in batch.values())
    assert memory.field_bytes >= memory.field_batches * nbytes


def lookahead_with_room(
    server: Running, cache: Path, samples: int, fetcher: Fetcher | None = None, **limits: Any
) -> tuple[Lookahead, int]:
    """One that may plan far ahead, as memory and samples are no limit, and its slabs' batches.

    limits: fields of its memory plan.
    """
    storage = replace(storage_of(server, "obstore"), memory_bytes=100_000_000)
    config = replace(config_of("stream", "s3:/", cache, storage), num_samples=(samples, 0, 0))
    steps = StreamLoader(config, micro_batch_size=4, global_batch_size=8).dataset.steps
    reading = plan_reading(steps, 0, storage.memory_bytes)
    reading = replace(reading, memory=replace(reading.memory, **limits))
    positions = iter(range(0, samples, 4))
    lookahead = Lookahead(steps, reading, positions, fetcher=fetcher, stats=Stats())
    return lookahead, reading.memory.group_batches


def test_a_shard_without_tokens_is_read_with_a_cache(server: Running, tmp_path: Path) -> None:
    for name, tokens in (("full", 2000), ("none", 0)):
        write_lengths(f"{server.root}/data/shards/{name}", [tokens])
    storage = replace(
        storage_of(server, "obstore"), cache_dir=tmp_path / "pages", cache_max_bytes=1 << 30
    ).tuned(cache_chunk_bytes=1 << 20)
    config = replace(
        config_of("stream", "s3:/", tmp_path / "cache", storage, samples=24),
        blend=["s3://data/shards/"],
    )
    expected = stream(replace(config, blend=[f"{server.root}/data/shards/"]))
    for _ in range(2):
        assert torch.equal(stream(config), expected)


@pytest.mark.guarantee("first-spans-small")
def test_training_starts_with_the_first_parts(server: Running, tmp_path: Path) -> None:
    """Spans grow from one micro-batch, so that the first does not wait for a long plan."""
    lookahead, group_batches = lookahead_with_room(server, tmp_path, 3000)
    lookahead.record_pace(0.0)
    planned = []
    for _ in range(6):
        before = lookahead.batches
        lookahead.plan_window()
        planned.append(lookahead.batches - before)
    assert planned[0] <= group_batches
    assert planned == sorted(planned)
    assert planned[-1] > planned[0]


@pytest.mark.parametrize("is_answered", [True, False])
def test_what_is_there_is_handed_out_before_more_is_planned(
    server: Running, tmp_path: Path, is_answered: bool
) -> None:
    class Answered(Fetcher):
        def submit(self, groups: Sequence[FetchGroup]) -> None:
            if is_answered:
                for group in groups:
                    group.missing = 0

    with closing(Answered(StorageConfig())) as fetcher:
        lookahead, _ = lookahead_with_room(server, tmp_path, 3000, fetcher=fetcher)
        lookahead.plan()
        assert (lookahead.batches == 1) == is_answered


@pytest.mark.guarantee("memory-budget-never")
def test_groups_end_before_they_open_too_many_bytes(server: Running, tmp_path: Path) -> None:
    """Only a lone batch may open more."""
    most = 20_000
    lookahead, _ = lookahead_with_room(server, tmp_path, 300, opening_bytes=most)
    while not lookahead.exhausted:
        lookahead.plan_window()
    batches = []
    while (group := lookahead.take_group()) is not None:
        (buffers,) = group.buffers
        opened = sum(rounded(buffer.size) for buffer in buffers)
        batches.append(len(group.consumed))
        assert opened <= most or batches[-1] == 1
    assert sum(batches) == 300 // 4
    assert max(batches) > 1 == min(batches)


@pytest.mark.guarantee("memory-batches-used")
@pytest.mark.parametrize("ids_only", [False, True])
def test_batches_that_are_kept_stay_what_they_were(
    tmp_path: Path, config: DataConfig, ids_only: bool
) -> None:
    kept = []
    copies = []
    with StreamLoader(config, micro_batch_size=2, global_batch_size=4, ids_only=ids_only) as loader:
        for batch in loader:
            kept.append(batch)
            copies.append({name: tensor.clone() for name, tensor in batch.items()})
    for batch, copy in zip(kept, copies, strict=True):
        for name in copy:
            assert torch.equal(batch[name], copy[name])


def test_what_a_caller_writes_into_a_batch_reaches_no_other_batch(config: DataConfig) -> None:
    config = replace(config, fields=["tokens", "labels", "loss_mask", "position_ids"])
    with StreamLoader(config, micro_batch_size=2, global_batch_size=4) as loader:
        for batch in loader:
            assert bool((batch["loss_mask"] == 1).all())
            assert batch["position_ids"].tolist() == [list(range(16))] * 2
            batch["loss_mask"].zero_()
            batch["position_ids"].add_(7)
            batch["tokens"].fill_(-1)


def test_ids_in_their_stored_width_are_the_tokens_and_labels(config: DataConfig) -> None:
    with (
        StreamLoader(config, micro_batch_size=2, global_batch_size=4) as plain,
        StreamLoader(config, micro_batch_size=2, global_batch_size=4, ids_only=True) as stored,
    ):
        for batch, raw in zip(plain, stored, strict=True):
            assert raw["ids"].dtype == torch.uint16
            ids = raw["ids"].to(torch.int64)
            assert torch.equal(ids[:, :-1], batch["tokens"])
            assert torch.equal(ids[:, 1:], batch["labels"])
            assert raw["valid"].tolist() == [17, 17]


@pytest.mark.guarantee("context-parallel-ranks", "parts-r-2")
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("order", ["megatron", "stream", "sequential"])
def test_context_parallel_ranks_read_their_parts_and_no_more(
    server: Running, tmp_path: Path, order: Any, remote: bool
) -> None:
    """Two of four parts each, with the token after them; pieces are fetched and freed as often as
    they are used.
    """
    root = "s3:/" if remote else str(server.root)
    config = config_of(order, root, tmp_path, storage_of(server, "obstore"), samples=1000)
    config = replace(config, exclude_samples=((64, 72),))
    sizes: Any = {"micro_batch_size": 4, "global_batch_size": 8, "ids_only": True}
    with StreamLoader(config, **sizes) as loader:
        whole = [(batch["ids"].clone(), batch["valid"].clone()) for batch in loader]
        everything = loader.stats()["useful_bytes"]
    length = config.sequence_length
    for rank in (0, 1):
        bounds = [(a, b + 1) for a, b in zigzag_bounds(length, rank, 2)]
        with StreamLoader(config, **sizes, cp_rank=rank, cp_size=2) as loader:
            for (ids, valid), batch in zip(whole, loader, strict=True):
                parts = torch.stack([ids[:, a:b] for a, b in bounds], 1).flatten(0, 1)
                assert torch.equal(batch["ids"], parts)
                has = torch.stack([(valid - a).clamp(0, b - a) for a, b in bounds], 1).flatten()
                assert torch.equal(batch["valid"], has)
        if remote and order != "stream":
            assert loader.stats()["useful_bytes"] < 0.55 * everything


def test_parts_are_read_as_ids_only(config: DataConfig) -> None:
    with pytest.raises(ConfigError, match="give ids_only=True"):
        StreamLoader(config, micro_batch_size=2, global_batch_size=4, cp_rank=0, cp_size=2)
    with pytest.raises(ConfigError, match="not a multiple of 2 x cp"):
        StreamLoader(
            config, micro_batch_size=2, global_batch_size=4, ids_only=True, cp_rank=0, cp_size=3
        )


def test_an_error_waits_for_the_step_it_belongs_to(tmp_path: Path) -> None:
    tokens = np.zeros(16 * 64 + 1, np.uint16)
    tokens[16 * 40 + 3] = 999
    write_dataset(tmp_path / "p", [tokens])
    config = DataConfig(
        blend=[str(tmp_path / "p")],
        sequence_length=16,
        order="sequential",
        vocab_size=900,
        storage=StorageConfig(cache_dir=tmp_path),
    )
    loader = StreamLoader(config, micro_batch_size=1, global_batch_size=1)
    with pytest.raises(FormatError, match="999"):
        for _ in loader:
            pass
    assert loader.consumed_samples == 40


def flat(values: list[int], allowed: int) -> bool:
    """Whether the second half lies at some time no more than `allowed` above the first: what leaks,
    never does.
    """
    half = len(values) // 2
    return min(values[half:]) <= max(values[:half]) + allowed


def open_and_close(config: DataConfig, times: int) -> None:
    process = psutil.Process()
    threads = []
    files = []
    memory = []
    for _ in range(times):
        loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
        batches = iter(loader)
        next(batches)
        loader.close()
        del loader, batches
        gc.collect()
        threads.append(threading.active_count())
        files.append(process.num_fds())
        memory.append(process.memory_info().rss)
    assert flat(threads, 0), threads
    assert flat(files, 0), files
    assert flat(memory, 8 << 20), memory


@pytest.mark.guarantee("inter-document-masking")
@pytest.mark.parametrize("where", ["s3:/", "local"])
def test_bounds_of_sequences_are_those_of_samples_by_themselves(
    server: Running, tmp_path: Path, where: str
) -> None:
    place = str(server.root) if where == "local" else where
    # enough for windows of several groups
    storage = replace(storage_of(server, "obstore"), memory_bytes=1 << 27)
    config = config_of("megatron", place, tmp_path, storage)
    config = replace(config, inter_document_masking=True)

    def local(url: str) -> str:
        return url.replace("s3:/", str(server.root))

    with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
        length = config.sequence_length
        some_bounds = 0
        for consumed in range(0, 3000, 4):
            batch = loader.take()
            if consumed >= 48 and consumed % 100:
                continue  # some of each group
            assert batch["cu_seqlens"].shape == (4, length + 1)
            assert batch["max_seqlen"].shape == (4,)
            some_bounds += int((batch["cu_seqlens"] < length).sum()) - 4
            expected = checked_batch(loader.dataset, consumed, local=local)
            assert set(batch) == set(expected)
            for name, field in expected.items():
                assert torch.equal(batch[name], field), name
        assert some_bounds > 0


@pytest.mark.parametrize("where", ["s3:/", "local", "cache"])
def test_nothing_is_left_of_loaders_that_were_closed(
    server: Running, tmp_path: Path, where: str
) -> None:
    storage = storage_of(server, "obstore")
    if where == "cache":
        storage = replace(storage, cache_dir=tmp_path / "cache", cache_max_bytes=1 << 30).tuned(
            cache_chunk_bytes=1 << 20
        )
    config = config_of(
        "megatron", str(server.root) if where == "local" else "s3:/", tmp_path, storage
    )
    open_and_close(config, 10)


@pytest.mark.soak
@pytest.mark.parametrize("where", ["s3:/", "local"])
def test_nothing_is_left_of_two_hundred_loaders(
    server: Running, tmp_path: Path, where: str
) -> None:
    open_and_close(
        config_of(
            "stream",
            str(server.root) if where == "local" else "s3:/",
            tmp_path,
            storage_of(server, "obstore"),
        ),
        200,
    )


@pytest.mark.soak
def test_a_hundred_thousand_batches_leave_everything_flat(server: Running, tmp_path: Path) -> None:
    storage = replace(storage_of(server, "obstore"), memory_bytes=4_000_000)
    config = replace(config_of("stream", "s3:/", tmp_path, storage), num_samples=None)
    process = psutil.Process()
    threads = []
    files = []
    memory = []
    with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
        for number, _ in enumerate(loader):
            if number % 2000 == 1999:
                threads.append(threading.active_count())
                files.append(process.num_fds())
                memory.append(process.memory_info().rss)
            if number == 100_000:
                break
    assert flat(threads, 0), threads
    assert flat(files, 0), files
    assert flat(memory, 8 << 20), memory


@pytest.mark.guarantee("stats-log-prometheus")
def test_stats_say_what_was_read_and_how_long_was_waited(server: Running, tmp_path: Path) -> None:
    loader = StreamLoader(
        config_of("megatron", "s3:/", tmp_path, storage_of(server, "obstore")),
        micro_batch_size=4,
        global_batch_size=8,
    )
    before = server.counts()
    with loader:
        for _ in loader:
            time.sleep(0.0005)
    stats = loader.stats()
    after = server.counts()
    assert stats["batches"] == len(loader)
    assert stats["requests"] == after["requests"] - before["requests"]
    assert stats["fetched_bytes"] == after["bytes"] - before["bytes"]
    assert stats["useful_bytes"] == 3000 * 65 * 2
    assert (
        0
        < stats["amplification"]
        == pytest.approx(stats["fetched_bytes"] / stats["useful_bytes"], abs=0.01)
    )
    assert stats["amplification"] < 1.3
    assert stats["retries"] == stats["errors"] == 0
    assert 0 <= stats["wait_p50"] <= stats["wait_p95"] <= stats["wait_p99"]
    assert 0 < stats["stall_share"] < 1


def test_a_caller_that_makes_fields_does_not_wait(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that runs only while fields are made."""
    now = [0.0]
    assemble = Assembler.assemble

    def assemble_in_a_second(*arguments: Any) -> Any:
        now[0] += 1.0
        return assemble(*arguments)

    monkeypatch.setattr(Assembler, "assemble", assemble_in_a_second)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with StreamLoader(config, micro_batch_size=2, global_batch_size=4) as loader:
        for _ in loader:
            pass
    stats = loader.stats()
    assert now[0] > 0
    assert stats["wait_total"] == stats["stall_share"] == 0


def test_a_call_that_finds_a_batch_ready_counts_no_wait(config: DataConfig) -> None:
    with StreamLoader(config, micro_batch_size=2, global_batch_size=4) as loader:
        batches = iter(loader)
        next(batches)
        waited = loader.stats()["wait_total"]
        for _ in range(200):
            while not loader.ready:
                time.sleep(0.001)
            next(batches)
        assert loader.stats()["wait_total"] == waited


@pytest.mark.guarantee("7-stores-datasets")
def test_a_forked_child_reads_by_itself(server: Running, tmp_path: Path) -> None:
    """A dataset used before a fork (as torch's workers are made) works in the child."""
    server.behave()
    config = config_of("stream", "s3:/", tmp_path, storage_of(server, "auto"), samples=800)
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
    expected = stream(config)
    workers = torch.utils.data.DataLoader(
        loader.dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    got = torch.cat([torch.cat([batch["tokens"], batch["labels"]], 1) for batch in workers])
    assert torch.equal(got, expected)


LEFT_OPEN = """
import atexit, sys, threading
atexit.register(lambda: print(sorted({t.name for t in threading.enumerate() if t.name.startswith("streammega")})))
from streammega import DataConfig, StorageConfig, StreamLoader
config = DataConfig(
    blend=[sys.argv[1]], sequence_length=64, order="stream", num_samples=(100_000, 0, 0),
    shuffle_lanes=16, storage=StorageConfig(cache_dir=sys.argv[2]),
)
batches = iter(StreamLoader(config, micro_batch_size=4, global_batch_size=8))
next(batches)
"""


def test_a_program_may_end_with_an_iteration_open(server: Running, tmp_path: Path) -> None:
    """Exit functions run before Python takes threads away: one that is in torch then would abort
    the process.
    """
    command = [sys.executable, "-c", LEFT_OPEN, str(server.root / "data" / "web"), str(tmp_path)]
    environment = python_environment()
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


KEPT_PAST_MODULES = (
    LEFT_OPEN
    + """
import os
os.kept = [batches, [module for name, module in sys.modules.items() if name.startswith("streammega")]]
"""
)


def test_an_iteration_that_outlives_the_modules_ends_without_a_word(tmp_path: Path) -> None:
    """As where dill keeps the globals of the program: Python has emptied our modules by then."""
    command = [
        sys.executable, "-c", KEPT_PAST_MODULES, "mock://tokens=1000000,vocab=1000", str(tmp_path),
    ]  # fmt: skip
    environment = python_environment()
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")


FORK = """
import gc, os, sys, time
from streammega import StorageConfig
from streammega.storage import open_store
options = {"anon": True, "endpoint_url": sys.argv[1]}
store, key = open_store("s3://data/web.bin", StorageConfig(transport="fsspec", storage_options=options))
expected = [bytes(part) for part in store.read(key, [(at, at + 1) for at in range(8)])]
if os.fork() == 0:
    assert [bytes(part) for part in store.read(key, [(at, at + 1) for at in range(8)])] == expected
    gc.collect()
    time.sleep(0.2)
    print("well", flush=True)
    os._exit(0)
assert os.wait()[1] == 0
"""


def test_a_forked_child_leaves_the_connections_of_its_parent_alone(
    server: Running,
) -> None:
    """s3fs would try to close them in the child, and print a traceback for each
    that it could not.
    """
    command = [sys.executable, "-W", "ignore", "-c", FORK, server.endpoint]
    environment = python_environment()
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert (run.stdout, run.stderr) == ("well\n", "")


@pytest.mark.many_examples
@settings(max_examples=examples(5))
@given(
    seek=st.integers(0, 370),
    dp_size=st.sampled_from([1, 2, 4]),
    skip=st.sampled_from([(), ((800, 960), (1600, 1608))]),
)
def test_pieces_survive_seeks_skips_and_any_ranks(
    server: Running,
    tmp_path_factory: pytest.TempPathFactory,
    seek: int,
    dp_size: int,
    skip: Any,
) -> None:
    tmp_path = tmp_path_factory.mktemp("t")
    storage = replace(storage_of(server, "obstore"), memory_bytes=1_000_000)
    config = replace(config_of("stream", "s3:/", tmp_path, storage), exclude_samples=skip)
    local = replace(config, blend=blend_of(server.root))
    for rank in range(dp_size):
        both = []
        for own in (config, local):
            with StreamLoader(
                own, micro_batch_size=2, global_batch_size=8, dp_rank=rank, dp_size=dp_size
            ) as loader:
                loader.seek(8 * seek)
                both.append([batch["tokens"].clone() for batch in loader])
                stats = loader.stats()
                if own is config and both[0]:
                    assert stats["held_bytes"] == 0 or stats["requests_in_flight"] == 0
        assert len(both[0]) == len(both[1])
        assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.many_examples
@settings(max_examples=examples(8))
@given(every=st.sampled_from([8, 16, 32, 64, 128, 1024]), size=st.sampled_from([8, 64, 256, 264]))
def test_skips_leave_nothing_open_wherever_they_fall(
    server: Running, tmp_path_factory: pytest.TempPathFactory, every: int, size: int
) -> None:
    """Each jump forgets the pieces that are open; one that stayed would keep its memory, and in the
    end there would be none.
    """
    storage = replace(storage_of(server, "obstore"), memory_bytes=4_000_000)
    config = replace(
        config_of("stream", "s3:/", tmp_path_factory.mktemp("t"), storage, samples=1500),
        exclude_samples=tuple((first, first + size) for first in range(every, 1500, every + size)),
    )
    with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
        got = [next(loader)["tokens"].clone() for _ in range(len(loader))]
        # a piece of both datasets in each of 16 lanes
        assert config.shuffle_block_bytes is not None
        assert loader.stats()["held_bytes"] <= 16 * 2 * (config.shuffle_block_bytes + 4096)
    with StreamLoader(
        replace(config, blend=blend_of(server.root)), micro_batch_size=4, global_batch_size=8
    ) as local:
        assert all(
            torch.equal(tokens, batch["tokens"]) for tokens, batch in zip(got, local, strict=True)
        )


@pytest.mark.many_examples
@pytest.mark.guarantee("ranks-stream-order", "1-batch-function")
@settings(max_examples=examples(5))
@given(
    micro=st.sampled_from([1, 4]),
    dp_size=st.sampled_from([1, 2]),
    steps=st.sampled_from([1, 2, 3]),
    skip=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5)), min_size=1, max_size=3),
    memory=st.sampled_from([400_000, 4_000_000]),
)
def test_ranks_follow_their_lanes_over_skips(
    server: Running, tmp_path_factory: pytest.TempPathFactory, micro: int, dp_size: int, steps: int,
    skip: list[tuple[int, int]], memory: int,
) -> None:  # fmt: skip
    size = micro * dp_size * steps
    config = config_of(
        "stream",
        "s3:/",
        tmp_path_factory.mktemp("t"),
        replace(storage_of(server, "obstore"), memory_bytes=memory),
    )
    ranges = tuple((first * size, (first + count) * size) for first, count in skip)
    config = replace(
        config, shuffle_lanes=size, num_samples=(70 * size, 0, 0), exclude_samples=ranges
    )
    sizes: Any = {
        "micro_batch_size": micro,
        "global_batch_size": size,
        "dp_rank": dp_size - 1,
        "dp_size": dp_size,
    }
    expected = StreamingDataset(replace(config, blend=blend_of(server.root)), **sizes)
    dataset = StreamingDataset(config, **sizes)
    # a piece of both datasets in each of its lanes
    assert config.shuffle_block_bytes is not None
    open_bytes = size // dp_size * 2 * (config.shuffle_block_bytes + 2)
    engine = Engine(dataset.steps, dataset.positions(), 2, start=0)
    with closing(iter(engine)) as batches:  # type: ignore[type-var]
        for consumed, batch in batches:
            assert torch.equal(batch["tokens"], checked_batch(expected, consumed)["tokens"])
    planned = engine.stats.planned_bytes
    assert planned <= 1.3 * engine.stats.useful_bytes + (len(skip) + 2) * open_bytes, (
        "pieces are opened once, and once more at a jump"
    )


@pytest.mark.guarantee("ahead-filled-up")
def test_what_is_ahead_is_filled_up_by_plans_of_a_quarter_of_it(
    server: Running, tmp_path: Path
) -> None:
    """A plan of one slab costs nearly as much as one of thirty-two."""
    lookahead, group_batches = lookahead_with_room(server, tmp_path, 300_000)
    lookahead.record_pace(0.0)
    while not lookahead.has_enough_planned:
        lookahead.plan_window()
    full = lookahead.batches
    assert lookahead.take_group() is not None
    while bool(lookahead.has_enough_planned):
        lookahead.take_group()
    least = lookahead.batches
    lookahead.plan_window()
    planned = lookahead.batches - least
    assert least > full / 2, "what is ahead stays far more than what is being gathered"
    assert planned >= 16 * group_batches


@pytest.mark.guarantee("first-spans-small")
def test_a_slow_caller_is_not_read_far_ahead_of(server: Running, tmp_path: Path) -> None:
    planned = []
    for seconds in (0.0, 1e6, None):
        lookahead, _ = lookahead_with_room(server, tmp_path, 100_000)
        if seconds is not None:
            lookahead.record_pace(seconds)
        lookahead.plan()
        while not lookahead.has_enough_planned:
            lookahead.plan_window()
        planned.append(lookahead.batches)
    fast, slow, unknown = planned
    assert fast >= 8 * slow > 0
    assert fast >= 4 * unknown, "the first batches do not wait for a long plan"


@pytest.mark.guarantee("first-spans-small")
def test_a_caller_that_rarely_waits_is_given_memory_for_what_it_takes_soon(
    server: Running, tmp_path: Path
) -> None:
    """One that often waits is given memory for what far storage has in flight."""
    lookahead, _ = lookahead_with_room(server, tmp_path, 100_000)
    memory = lookahead._plan.memory
    with closing(Fetcher(storage_of(server, "obstore"), memory.fetch_bytes)) as fetcher:
        lookahead._fetcher = fetcher
        batch_bytes = 4 * 65 * 2
        lookahead.record_pace(SECONDS_FETCHED / 1000, waited=0.0)
        assert fetcher.pool.budget == memory.fetch_bytes + 1000 * batch_bytes
        lookahead.record_pace(1e-9, waited=0.0)
        assert fetcher.pool.budget <= memory.max_fetch_bytes
        for _ in range(20):
            lookahead.record_pace(SECONDS_FETCHED / 1000, waited=1.0)
        assert fetcher.pool.budget == memory.fetch_bytes
        fetcher.flow.max_bytes += 4096
        lookahead.record_pace(SECONDS_FETCHED / 1000, waited=1.0)
        assert fetcher.pool.budget == min(memory.fetch_bytes + 4096, memory.max_fetch_bytes)


def test_the_whole_epoch_frees_what_it_held(server: Running, tmp_path: Path) -> None:
    storage = replace(storage_of(server, "obstore"), memory_bytes=4_000_000)
    config = replace(config_of("stream", "s3:/", tmp_path, storage), num_samples=None)
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
    batches = iter(loader)
    held = []
    for number in range(6000):
        next(batches)
        if number % 100 == 0:
            held.append(loader.stats()["held_bytes"])
    assert flat(held[10:], 400_000), "pieces of the epochs before are freed"
    loader.close()


@pytest.mark.guarantee("stats-log-prometheus")
def test_the_log_and_prometheus_tell_the_same_figures(
    config: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    loader = StreamLoader(
        config, micro_batch_size=2, global_batch_size=8, log_every=10, metrics_port=0
    )
    with caplog.at_level("INFO", logger="streammega"):
        list(loader)
    lines = [record.message for record in caplog.records if "stalled" in record.message]
    assert len(lines) == len(loader) // 4 // 10 > 0
    assert "train: sample 80; " in lines[0]
    assert loader.metrics_address is not None
    with urllib.request.urlopen(loader.metrics_address) as answer:
        text = answer.read().decode()
    assert f'streammega_batches_total{{dp_rank="0"}} {len(loader)}.0' in text
    address = loader.metrics_address
    del loader, answer
    gc.collect()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address)
