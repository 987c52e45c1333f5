"""The stream order: every epoch is exact, ranks own their lanes, blends keep their shares, all from
arithmetic.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import streammega
from streammega import (
    DataConfig,
    IndexedDataset,
    IndexedDatasetWriter,
    PhaseConfig,
    StorageConfig,
    StreamLoader,
)
from streammega.errors import ConfigError, ObjectNotFoundError, StateError
from streammega.kernels.keyed import keyed, permute, permute_back
from streammega.order.epoch_layout import FilePart, StreamDataset, samples_of
from streammega.order.extents import Extents
from streammega.order.schedule import TrainingSchedule
from streammega.order.stream_order import StreamOrder, default_block_bytes, default_lanes
from streammega.samples.open import open_source
from tests.order.test_phases import chain_of, golden_order
from tests.support.builders import write_random_pair
from tests.support.examples import examples
from tests.support.servers import http_server

LANES = st.sampled_from([1, 2, 6, 8, 12, 48, 96])


@st.composite
def datasets(draw: st.DrawFn) -> StreamDataset:
    """Files of no, one and many samples, whole and cut out of larger ones."""
    tokens = draw(
        st.lists(
            st.sampled_from([0, 1, 2, 5, 17, 60, 300]) | st.integers(0, 400), min_size=1, max_size=6
        )
    )
    starts = [draw(st.integers(0, 50)) for _ in tokens]
    parts = [
        FilePart(file=n, start=s, tokens=t)
        for n, (s, t) in enumerate(zip(starts, tokens, strict=True))
    ]
    return StreamDataset(parts=parts, itemsize=draw(st.sampled_from([1, 2, 4])))


@st.composite
def orders(draw: st.DrawFn, count: int = 1) -> StreamOrder:
    order = StreamOrder(
        datasets=[draw(datasets()) for _ in range(count)],
        weights=[draw(st.sampled_from([1e-6, 0.1, 0.3, 0.9, 5.0])) for _ in range(count)],
        sequence_length=draw(st.integers(1, 9)),
        extra_token=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        lanes=draw(LANES),
        shuffle_block_bytes=draw(st.integers(1, 300)),
    )
    try:
        order.check()
    except ConfigError:
        assume(False)
    return order


def rows(extents: Extents) -> list[tuple[int, int, int, int]]:
    columns = (extents.dataset, extents.file, extents.start, extents.stop)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.guarantee("fetches-token-once")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(order=orders())
def test_the_first_samples_of_a_lone_dataset_are_one_exact_epoch(order: StreamOrder) -> None:
    size = int(order.layout.datasets["size"][0])
    found = order.locate(np.arange(size))
    for part in order.datasets[0].parts:
        starts = np.sort(found.start[found.file == part.file])
        assert len(starts) == samples_of(part.tokens, order.sequence_length, int(order.extra_token))
        if len(starts):
            assert (np.diff(starts) == order.sequence_length).all(), (
                "samples of a file lie end to end, each once"
            )
            assert starts[0] >= part.start
            assert starts[-1] + order.sequence_length + order.extra <= part.start + part.tokens
            assert starts[0] - part.start < order.sequence_length


@pytest.mark.guarantee("runs-tile-dataset")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(order=orders(), epoch=st.integers(0, 3))
def test_each_lanes_epoch_covers_its_run_once_and_runs_tile_the_dataset(
    order: StreamOrder, epoch: int
) -> None:
    """Groups of lanes that share a run are taken together.

    In sample numbers: (file, start without the phase) of each.
    """
    size = int(order.layout.datasets["size"][0])
    lanes = order.lanes
    runs = order.lanes // int(order.lanes_per_run[0])
    group = lanes // runs
    assert runs * group == lanes
    seen: list[tuple[int, int]] = []
    for run in range(runs):
        members = range(run * group, (run + 1) * group)
        length = sum(size // lanes + (lane < size % lanes) for lane in members)
        if size < lanes:
            assert runs == 1
            length = size
        draws = np.arange(epoch * length, (epoch + 1) * length)
        ids = (draws // group) * lanes + run * group + draws % group
        found = order.locate(ids)
        mine = [(f, s // order.sequence_length) for _, f, s, _ in rows(found)]
        assert len(set(rows(found))) == length, "a run gives a sample twice in one epoch"
        seen += mine
    assert len(seen) == size


@pytest.mark.guarantee("small-data-shuffled")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(order=orders(), epochs=st.integers(1, 5))
def test_samples_are_used_equally_often(order: StreamOrder, epochs: int) -> None:
    """A lane has a run of at least 32 samples, or all lanes have one."""
    size = int(order.layout.datasets["size"][0])
    shared = order.lanes_per_run[0] == order.lanes
    assert shared or size // order.lanes >= 32
    uses = order.locate(np.arange(epochs * size))
    samples = Counter(zip(uses.file.tolist(), starts_in_epoch(order, uses), strict=True))
    assert len(samples) == size
    assert max(samples.values()) <= epochs + (not shared)
    assert min(samples.values()) >= epochs - (not shared)


def starts_in_epoch(order: StreamOrder, found: Extents) -> list[int]:
    """The number of each sample in its part, whatever the offset of its epoch."""
    start_of_file = np.array([part.start for part in order.datasets[0].parts])
    starts = found.start - start_of_file[found.file]
    numbers: list[int] = (starts // order.sequence_length).tolist()
    return numbers


@pytest.mark.guarantee("small-data-shuffled")
@pytest.mark.parametrize(
    "tokens",
    [200_000, 2_000_000, 7_000_000, 33_000_000, 66_000_000, 68_000_000, 80_000_000, 134_000_000],
)
@pytest.mark.parametrize("length", [128, 2048, 131_072])
def test_a_batch_of_a_small_dataset_comes_from_everywhere(tokens: int, length: int) -> None:
    """Distinct places in a batch, and in eight, beside a full shuffle: with the default lanes."""
    size = 64
    part = FilePart(file=0, start=0, tokens=tokens)
    order = StreamOrder(
        datasets=[StreamDataset(parts=[part], itemsize=2)], weights=[1.0], sequence_length=length,
        extra_token=True, seed=7, lanes=default_lanes(size, None),
    )  # fmt: skip
    samples = (tokens - 1) // length
    if samples < 2 * size:
        pytest.skip("not two batches an epoch")
    rng = np.random.default_rng(0)
    batches = min(samples // size, 400)
    places = order.locate(np.arange(batches * size)).start * 2 >> 18
    full = rng.permutation(samples)[: batches * size] * length * 2 >> 18
    for together, least in ((1, 0.9), (8, 0.85)):
        windows = max(1, batches // together)
        distinct = [
            sum(len(np.unique(window)) for window in np.array_split(column, windows))
            for column in (places, full)
        ]
        assert distinct[0] >= least * distinct[1]


@pytest.mark.guarantee("1-batch-function")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(
    order=orders(count=3),
    start=st.integers(0, 5000),
    count=st.integers(1, 200),
    cut=st.integers(0, 200),
)
def test_locating_is_a_function_of_the_id_alone(
    order: StreamOrder, start: int, count: int, cut: int
) -> None:
    ids = np.arange(start, start + count)
    whole = rows(order.locate(ids))
    parts = rows(order.locate(ids[: cut % count])) + rows(order.locate(ids[cut % count :]))
    assert whole == parts
    shuffled = np.random.default_rng(0).permutation(ids)
    assert sorted(whole) == sorted(rows(order.locate(shuffled)))


@pytest.mark.guarantee("blends-exact-fractions", "lane-dataset-share")
@pytest.mark.many_examples
@settings(max_examples=examples(20))
@given(order=orders(count=4), steps=st.integers(1, 60))
def test_blend_counts_are_close_to_exact_in_every_lane_and_over_all(
    order: StreamOrder, steps: int
) -> None:
    """At every prefix: within 4 samples in each lane, within L / 4 (but no closer than 4) over all
    lanes.
    """
    shares = np.array(order.weights) / sum(order.weights)
    counts = order.counts(steps * order.lanes)
    assert (counts.sum(axis=1) == steps).all()
    assert np.abs(counts - steps * shares).max() <= 4
    taken = np.bincount(order.locate(np.arange(steps * order.lanes)).dataset, minlength=4)
    np.testing.assert_array_equal(taken, counts.sum(axis=0))
    if order.lanes >= 48:
        assert np.abs(taken - steps * order.lanes * shares).max() <= max(4, order.lanes / 4)


@pytest.mark.guarantee("blends-exact-fractions", "lane-dataset-share")
def test_counts_of_large_blends_stay_within_their_bounds() -> None:
    rng = np.random.default_rng(0)
    part = [StreamDataset(parts=[FilePart(file=0, start=0, tokens=10_000)], itemsize=2)]
    for weights in (rng.random(1000) + 1e-3, [1e-6] * 5 + [0.9] * 3, 1 / np.arange(1, 65)):
        order = StreamOrder(
            datasets=part * len(weights),
            weights=list(weights),
            sequence_length=64,
            extra_token=True,
            seed=1,
            lanes=256,
        )
        shares = np.array(weights) / np.sum(weights)
        for samples in (256, 256 * 77, 256 * 10**6, 256 * 10**9):
            counts = order.counts(samples)
            assert np.abs(counts - samples // 256 * shares).max() <= 4
            assert np.abs(counts.sum(axis=0) - samples * shares).max() <= 64


@pytest.mark.guarantee("later-segment-schedule")
def test_a_later_phase_of_other_weights_never_changes_the_past_and_adds_a_dataset_late() -> None:
    parts = [
        StreamDataset(parts=[FilePart(file=0, start=0, tokens=5_000)], itemsize=2) for _ in range(3)
    ]
    shape: dict[str, Any] = {"sequence_length": 8, "extra_token": True, "seed": 5, "lanes": 12}
    alone = StreamOrder(datasets=parts[:2], weights=[0.6, 0.4], **shape)
    changed = {
        "first_sample": 600,
        "numbers": range(3),
        "datasets": parts,
        "weights": [0.2, 0.2, 0.6],
    }
    later = chain_of(alone, [changed])
    ids = np.arange(3000)
    a = alone.locate(ids)
    b = later.locate(ids)
    assert rows(a)[:600] == rows(b)[:600]
    assert not (b.dataset[:600] == 2).any()
    assert abs((b.dataset[600:] == 2).mean() - 0.6) < 0.02
    for d in range(3):  # a dataset goes on where it was: no sample twice before its epoch ends
        size = int(later.phases[1].layout.datasets["size"][d])
        mine = [row for row in rows(b) if row[0] == d][: size // 2]
        assert len(set(mine)) == len(mine)
    np.testing.assert_array_equal(
        later.phases[1].counts(2400).sum(axis=0), np.bincount(b.dataset, minlength=3)
    )


@pytest.mark.guarantee("tiny-permutations-put")
@given(size=st.integers(1, 5000), key=st.integers(0, 2**63))
def test_keyed_permutations_are_permutations_with_an_inverse(size: int, key: int) -> None:
    key64 = np.uint64(key)
    images = [permute(np.int64(x), np.int64(size), key64) for x in range(min(size, 300))]
    assert len(set(images)) == len(images)
    assert all(0 <= y < size for y in images)
    assert [permute_back(np.int64(y), np.int64(size), key64) for y in images] == list(
        range(len(images))
    )


@pytest.mark.parametrize(
    ("size", "images"),
    [
        (31, [29, 19, 13, 16, 22, 26, 7, 2]),
        (32, [29, 19, 13, 16, 22, 26, 7, 2]),
        (33, [16, 24, 20, 26, 28, 19, 1, 27]),
    ],
)
def test_golden_permutations(size: int, images: list[int]) -> None:
    """Shuffles up to 32 numbers, walks beyond."""
    key = np.uint64(1)
    assert [permute(np.int64(x), np.int64(size), key) for x in range(8)] == images


@pytest.mark.guarantee("tiny-permutations-put")
@pytest.mark.parametrize("size", [2, 3, 5, 8, 31, 33, 64, 100])
def test_keyed_permutations_put_every_element_everywhere(size: int) -> None:
    """Each place is as likely as any other: chi-square over 4,000 keys, far from its tail."""
    counts = np.zeros((size, size))
    for n in range(4000):
        key = np.uint64(keyed(np.uint64(1), 1, n, 0))
        for x in range(size):
            counts[x, permute(np.int64(x), np.int64(size), key)] += 1
    expected = 4000 / size
    chi = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert chi < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.guarantee("fetches-token-once", "runs-tile-dataset")
def test_in_the_plan_every_byte_is_fetched_once() -> None:
    """With blocks enough for the lanes, the pieces of an epoch overlap by the label token alone:
    under one per cent.
    """
    tokens = 64 * 1024 * 300
    order = StreamOrder(
        datasets=[StreamDataset(parts=[FilePart(file=0, start=0, tokens=tokens)], itemsize=2)],
        weights=[1.0],
        sequence_length=64,
        extra_token=True,
        seed=3,
        lanes=16,
        shuffle_block_bytes=1 << 14,
    )
    size = int(order.layout.datasets["size"][0])
    assert order.lanes // int(order.lanes_per_run[0]) == 16
    fetched = 0
    for lane in range(16):
        found = order.locate(np.arange(lane, size, 16))
        # a lane moves to its next piece
        breaks = np.flatnonzero(np.abs(np.diff(found.start)) >= order.shuffle_block_bytes)
        for piece in np.split(np.arange(len(found.start)), breaks + 1):
            fetched += int(found.stop[piece].max() - found.start[piece].min())
    assert fetched <= 1.01 * size * 64


@pytest.mark.guarantee("l-multiple-global")
@pytest.mark.parametrize(
    ("global_batch_size", "block_kib", "lanes", "default_kib"),
    [
        (1, None, 512, 256),
        (96, None, 576, 227),
        (1024, None, 1024, 128),
        (4096, None, 4096, 128),
        (256, 1024, 256, 256),
        (48, 1024, 144, 256),
        (256, 64, 2048, 128),
        (1, 4, 4096, 128),
    ],
)
def test_lanes_and_blocks_are_chosen_together(
    global_batch_size: int, block_kib: int | None, lanes: int, default_kib: int
) -> None:
    """The open blocks of all lanes take 128 MiB, unless the global batch or the blocks forbid it."""
    block_bytes = block_kib and block_kib << 10
    assert default_lanes(global_batch_size, block_bytes) == lanes
    assert default_block_bytes(lanes) >> 10 == default_kib


@pytest.mark.guarantee("l-multiple-global")
def test_ranks_own_disjoint_lanes_and_samples() -> None:
    order = StreamOrder(
        datasets=[StreamDataset(parts=[FilePart(file=0, start=0, tokens=100_000)], itemsize=2)],
        weights=[1.0],
        sequence_length=8,
        extra_token=False,
        seed=3,
        lanes=default_lanes(96, None),
        shuffle_block_bytes=64,
    )
    assert order.lanes == 576
    for ranks in (48, 96):
        places = [
            set(
                order.locate(
                    np.arange(rank, int(order.layout.datasets["size"][0]), ranks)
                ).start.tolist()
            )
            for rank in range(ranks)
        ]
        assert (
            sum(map(len, places))
            == len(set().union(*places))
            == int(order.layout.datasets["size"][0])
        )


# --- over stored data -----------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """A folder of seven pairs, of which one is short and one empty of samples."""
    folder = tmp_path / "web"
    for number, count in enumerate((40, 3, 60, 0, 25, 1, 33)):
        write_random_pair(str(folder / f"shard-{number}"), count, 60, seed=number)
    return str(folder)


def stream_config(blend: Any, tmp_path: Path, **options: Any) -> DataConfig:
    storage = StorageConfig(cache_dir=tmp_path / "cache")
    settings: dict[str, Any] = {"shuffle_lanes": 240, "storage": storage}
    return DataConfig(
        blend=blend,
        sequence_length=16,
        order="stream",
        shuffle_block_bytes=128,
        **settings | options,
    )


def tokens_of(
    config: DataConfig, ranks: int, micro: int, count: int, state: Any = None, size: int = 24
) -> dict[int, bytes]:
    """{sample: tokens and labels} of the next `count` samples, over all ranks."""
    found: dict[int, bytes] = {}
    for rank in range(ranks):
        with StreamLoader(
            config, micro_batch_size=micro, global_batch_size=size, dp_rank=rank, dp_size=ranks
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            first = loader.consumed_samples
            for batch in loader:
                before = loader.consumed_samples - ranks * micro
                for sample, tokens, labels in zip(
                    loader.dataset.sample_ids(before), batch["tokens"], batch["labels"], strict=True
                ):
                    found[int(sample)] = tokens.numpy().tobytes() + labels.numpy().tobytes()
                if loader.consumed_samples - first >= count:
                    break
    return found


@pytest.mark.guarantee("stream-layout-global")
def test_every_rank_count_and_micro_batch_sees_the_same_stream(shards: str, tmp_path: Path) -> None:
    config = stream_config([(shards, 0.7), (f"{shards}/shard-2", 0.3)], tmp_path)
    reference = tokens_of(config, 1, 1, 480)
    assert len(reference) == 480
    for ranks, micro in ((1, 24), (2, 4), (4, 3), (8, 1), (24, 1)):
        assert tokens_of(config, ranks, micro, 480) == reference


def test_the_samples_are_the_tokens_that_lie_there(shards: str, tmp_path: Path) -> None:
    config = stream_config(shards, tmp_path, split="80,20,0")
    source = open_source(config, "valid", 8)
    raw = [np.fromfile(f"{shards}/shard-{n}.bin", np.uint16) for n in range(7)]
    lengths = [IndexedDataset(f"{shards}/shard-{n}").sequence_lengths.tolist() for n in range(7)]
    every = [length for shard in lengths for length in shard]
    first_token = sum(every[: round(0.8 * len(every))])
    order = source.segments[0].order
    assert order is not None
    ids = np.arange(int(order.layout.datasets["size"][0]))
    extents = source.locate(ids)
    before = np.cumsum([0, *map(len, raw)])
    assert (before[extents.file] + extents.start >= first_token).all(), (
        "a token of train is in valid"
    )
    loader = StreamLoader(config, split="valid", micro_batch_size=4, global_batch_size=8)
    for step, batch in zip(range(6), loader, strict=False):
        for k, tokens in zip(loader.dataset.sample_ids(step * 4), batch["tokens"], strict=True):
            at = extents.start[k]
            np.testing.assert_array_equal(tokens, raw[extents.file[k]][at : at + 16])
    loader.close()


@pytest.mark.guarantee("stream-begins-sample")
def test_resume_anywhere_on_any_ranks(shards: str, tmp_path: Path) -> None:
    config = stream_config([(shards, 2.0), (f"{shards}/shard-0", 1.0)], tmp_path)
    reference = tokens_of(config, 1, 1, 24 * 30)
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=24, dp_rank=0, dp_size=2)
    for step, _ in enumerate(loader, 1):
        state = json.loads(json.dumps(loader.state_dict()))
        if step % 3 == 0 or step < 8:
            consumed = state["consumed_samples"]
            ranks = (1, 3, 6, 2)[step % 4] if consumed % 24 == 0 else 1
            got = tokens_of(config, ranks, 1, 24, state)
            assert got == {sample: reference[sample] for sample in range(consumed, consumed + 24)}
        if step == 30:
            break
    loader.close()


@pytest.mark.guarantee("moving-data-another", "l-multiple-global")
def test_lanes_are_kept_in_the_state_so_the_global_batch_may_change(
    shards: str, tmp_path: Path
) -> None:
    config = stream_config(shards, tmp_path, shuffle_lanes=None)
    reference = tokens_of(config, 1, 1, 600, size=24)
    with StreamLoader(config, micro_batch_size=24, global_batch_size=24) as loader:
        next(iter(loader))
        state = loader.state_dict()
    assert json.loads(state["order"])["shuffle_lanes"] == 4104
    after = tokens_of(config, 2, 20, 120, state, size=40)
    assert after == {sample: reference[sample] for sample in range(24, 144)}
    with pytest.raises(StateError, match="shuffle_lanes: the checkpoint has 4104, this run 512"):
        tokens_of(replace(config, shuffle_lanes=512), 1, 1, 1, state, size=8)


@pytest.mark.guarantee("refused-differs-another")
@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"sequence_length": 8}, {"shuffle_block_bytes": 256}, {"split": "50,50,0"}],
)
def test_another_order_is_refused(shards: str, tmp_path: Path, change: dict[str, Any]) -> None:
    config = stream_config(shards, tmp_path)
    with StreamLoader(config, micro_batch_size=24, global_batch_size=24) as loader:
        state = loader.state_dict()
    with pytest.raises(StateError, match="another order"):
        tokens_of(replace(config, **change), 1, 1, 1, state)


@pytest.mark.guarantee("stream-order-made", "8-stream-order")
def test_a_copy_in_a_bucket_is_the_same_order_and_is_opened_without_its_index(
    shards: str, tmp_path: Path
) -> None:
    objects = {f"/web/{path.name}": path.read_bytes() for path in Path(shards).iterdir()}
    local = stream_config(
        [(f"{shards}/shard-0", 1.0), (f"{shards}/shard-2", 3.0)], tmp_path, split="70,30,0"
    )
    with http_server(objects) as server:
        remote = replace(
            local, blend=[(f"{server.url}/web/shard-0", 1.0), (f"{server.url}/web/shard-2", 3.0)]
        )
        with StreamLoader(local, micro_batch_size=8, global_batch_size=8) as loader:
            state = loader.state_dict()
        assert tokens_of(remote, 1, 8, 80, state, size=8) == tokens_of(local, 1, 8, 80, size=8)
        spans = {span for _, path, span in server.requests if path.endswith(".idx") and span}
    spans.remove("bytes=0-8191")  # the beginning of each
    assert all(int(s[6:].split("-")[1]) - int(s[6:].split("-")[0]) < 34 for s in spans), (
        "an index was read"
    )


@pytest.mark.guarantee("epoch-cuts-files")
def test_no_token_is_always_lost_and_epochs_are_cut_in_other_places() -> None:
    """A file of 5 samples and 7 tokens more: in each epoch some 8 tokens are left out, and never
    the same ones.
    """
    order = StreamOrder(
        datasets=[StreamDataset(parts=[FilePart(file=0, start=30, tokens=58)], itemsize=2)],
        weights=[1.0],
        sequence_length=10,
        extra_token=True,
        seed=3,
        lanes=1,
        shuffle_block_bytes=20,
    )
    size = int(order.layout.datasets["size"][0])
    assert size == 5
    found = order.locate(np.arange(40 * size))
    phases = {int(found.start[epoch * size : (epoch + 1) * size].min()) for epoch in range(40)}
    assert phases == set(range(30, 38)), "every place where five samples fit"
    labelled = {token for start in found.start.tolist() for token in range(start + 1, start + 11)}
    assert labelled == set(range(31, 88)), (
        "every token but the first, which follows none, is to be predicted in some epoch"
    )


@pytest.mark.guarantee("stream-begins-sample")
def test_a_stream_begins_at_any_sample(shards: str, tmp_path: Path) -> None:
    config = stream_config([(shards, 0.7), (f"{shards}/shard-2", 0.3)], tmp_path)
    raw = [np.fromfile(f"{shards}/shard-{n}.bin", np.uint16) for n in range(7)]
    with StreamLoader(config, micro_batch_size=24, global_batch_size=24) as loader:
        far = 24 * (10**10 // 24)
        loader.seek(far)
        batch = loader.take()
        found = streammega.locate(config, range(far, far + 24), global_batch_size=24)
        for k, tokens in enumerate(batch["tokens"]):
            file = 2 if found.dataset[k] else found.file[k]
            np.testing.assert_array_equal(tokens, raw[file][found.start[k] : found.start[k] + 16])
        assert loader.state_dict()["consumed_samples"] == far + 24


def test_folders_and_globs_in_s3_are_one_dataset(
    shards: str, tmp_path: Path, s3_storage: Any, bucket: str
) -> None:
    for path in sorted(Path(shards).glob("*.idx")):
        with IndexedDatasetWriter(
            f"s3://{bucket}/web/{path.stem}", np.uint16, storage=s3_storage
        ) as writer:
            writer.add_index(str(path))
    reference = tokens_of(stream_config(shards, tmp_path), 1, 8, 48)
    for name in (f"s3://{bucket}/web/", f"s3://{bucket}/web/shard-*"):
        assert tokens_of(stream_config(name, tmp_path, storage=s3_storage), 1, 8, 48) == reference
    assert tokens_of(stream_config(f"{shards}/shard-*", tmp_path), 1, 8, 48) == reference
    with pytest.raises(ObjectNotFoundError, match="holds no pair"):
        tokens_of(stream_config(f"s3://{bucket}/nothing/", tmp_path, storage=s3_storage), 1, 8, 48)


@pytest.mark.guarantee("skips-whole-global")
def test_excluded_ranges_are_passed_over_and_the_rest_stays_where_it_was(
    shards: str, tmp_path: Path
) -> None:
    config = stream_config(shards, tmp_path)
    reference = tokens_of(config, 1, 1, 24 * 12)
    skipping = replace(config, exclude_samples=[(48, 96), (144, 168)])
    got = tokens_of(skipping, 2, 2, 24 * 9)
    assert sorted(got) == [n for n in range(24 * 9) if not (48 <= n < 96 or 144 <= n < 168)]
    assert all(reference[sample] == data for sample, data in got.items())
    with pytest.raises(ConfigError, match="cuts a global batch"):
        tokens_of(replace(config, exclude_samples=[(48, 90)]), 1, 1, 1)


@pytest.mark.guarantee("skips-whole-global")
def test_a_resume_with_another_batch_size_reads_nothing_that_is_excluded(
    shards: str, tmp_path: Path
) -> None:
    """Batches that are counted from where a run resumed would begin within the range."""
    config = replace(
        stream_config(shards, tmp_path), shuffle_lanes=240, exclude_samples=[(96, 128)]
    )
    with StreamLoader(
        replace(config, exclude_samples=()), micro_batch_size=8, global_batch_size=8
    ) as loader:
        for _ in range(5):
            loader.take()
        state = loader.state_dict()
    with StreamLoader(config, micro_batch_size=8, global_batch_size=8) as loader:
        loader.load_state_dict(state)
        positions = list(itertools.islice(loader.dataset.positions(), 9))
        assert positions == [40, 48, 56, 64, 72, 80, 88, 128, 136]
    with StreamLoader(config, micro_batch_size=16, global_batch_size=16) as loader:
        with pytest.raises(
            StateError, match=r"exclude_samples \[96, 128\) cuts a global batch of 16"
        ):
            loader.load_state_dict(state)
        assert loader.consumed_samples == 0


@pytest.mark.guarantee("batches-another-size")
def test_a_range_is_excluded_in_batches_of_another_size_from_a_checkpoint_on(
    shards: str, tmp_path: Path
) -> None:
    """At a sample that is no multiple of them no range would fit both a run from sample 0 on and the
    one that resumes: a phase says where they are counted from.
    """
    config = replace(stream_config(shards, tmp_path), shuffle_lanes=240)
    with StreamLoader(config, micro_batch_size=8, global_batch_size=8) as loader:
        for _ in range(5):
            loader.take()
        state = loader.state_dict()
    skipping = replace(config, exclude_samples=[(88, 120)])
    with pytest.raises(
        ConfigError, match="add a phase with the new one that begins at the checkpoint's sample"
    ):
        StreamLoader(skipping, micro_batch_size=16, global_batch_size=16)
    larger = PhaseConfig(first_sample=40, global_batch_size=16)
    with StreamLoader(
        replace(skipping, phases=[larger]), micro_batch_size=8, global_batch_size=8
    ) as loader:
        loader.load_state_dict(state)
        positions = list(itertools.islice(loader.dataset.positions(), 9))
        assert positions == [40, 48, 56, 64, 72, 80, 120, 128, 136]
        assert loader.dataset.steps.schedule.offset_at(120) == 0
        again = loader.state_dict()
        loader.load_state_dict(again)


def test_a_range_that_begins_before_a_batch_in_progress_ends_is_refused(
    shards: str, tmp_path: Path
) -> None:
    """The rest of the batch would be taken from the next one, and all after it be cut apart."""
    config = replace(stream_config(shards, tmp_path), shuffle_lanes=240)
    with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
        loader.take()
        state = loader.state_dict()
    skipping = replace(config, exclude_samples=[(0, 16)])
    wanted = r"exclude_samples \[0, 16\) cuts a global batch of 8"
    with (
        StreamLoader(skipping, micro_batch_size=4, global_batch_size=8) as loader,
        pytest.raises(StateError, match=wanted),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "100,0,0"}, "leaves nothing"),
        ({"shuffle_lanes": 100}, "shuffle_lanes 100 is not a multiple"),
        ({"sequence_length": 10**7}, "holds no sample"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    shards: str, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = replace(stream_config(shards, tmp_path, split="90,10,0"), **change)
    with pytest.raises(ConfigError, match=message):
        StreamLoader(config, split="valid", micro_batch_size=1, global_batch_size=24)


@pytest.mark.guarantee("order-never-changes")
def test_golden_stream_order() -> None:
    """Changing these numbers is a breaking change: bump STREAM_VERSION, and say so first in the
    CHANGELOG.
    """
    order = golden_order()
    found = order.locate(np.arange(0, 1600, 50))
    assert found.dataset.tolist() == GOLDEN_DATASETS
    assert found.file.tolist() == GOLDEN_FILES
    assert found.start.tolist() == GOLDEN_STARTS
    digest = blake2b(digest_size=8)
    whole = order.locate(np.arange(20_000))
    for column in (whole.dataset, whole.file, whole.start, whole.stop):
        digest.update(np.ascontiguousarray(column, "<i8").tobytes())
    assert digest.hexdigest() == GOLDEN_DIGEST


GOLDEN_DATASETS = [
    0,
    0,
    1,
    0,
    0,
    0,
    2,
    0,
    0,
    0,
    1,
    0,
    0,
    0,
    2,
    0,
    0,
    0,
    1,
    0,
    0,
    0,
    2,
    0,
    0,
    0,
    1,
    0,
    0,
    0,
    2,
    0,
]
GOLDEN_FILES = [
    0,
    1,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    1,
    0,
    0,
    0,
    1,
    0,
    0,
    0,
    1,
    0,
    0,
    1,
    0,
    0,
    0,
    1,
    0,
    0,
    0,
]
GOLDEN_STARTS = [
    8040, 517, 457, 5460, 7930, 4490, 139, 5330, 5670, 4260, 2967, 5250,
    5630, 2647, 249, 6030, 2470, 2587, 3047, 6190, 2730, 2657, 17, 890,
    3217, 3470, 2915, 4930, 2937, 3370, 267, 5230,
]  # fmt: skip
GOLDEN_DIGEST = "483220daaf9239e4"


# --- ramp-up --------------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("global-batch-ramps")
def test_ramp_up_is_megatrons_step_by_step() -> None:
    """By hand: 4 to 12 by 4 over 40 samples: two increments of 20 samples each."""
    schedule = TrainingSchedule(global_batch_size=12, rampup_batch_size=(4, 4, 40))
    sizes = []
    at = 0
    while at < 90:
        sizes.append(schedule.size_at(at))
        at += sizes[-1]
    assert sizes == [4, 4, 4, 4, 4, 8, 8, 8, 12, 12, 12, 12]
    assert schedule.stages == [(0, 4), (20, 8), (44, 12)]
    assert schedule.micro_batches_at(20, 2, 2) == 2
    assert (schedule.offset_at(31), schedule.last_whole(60)) == (3, 56)


@pytest.mark.guarantee("global-batch-ramps")
@pytest.mark.filterwarnings("ignore")  # of megatron-core, when it is imported
@given(
    start=st.integers(1, 9),
    increment=st.integers(1, 9),
    count=st.integers(1, 60),
    samples=st.integers(1, 5000),
)
# Its floats round k * (samples / count) / (samples / count) below k: a step that begins where an
# increment ends has the size before.
@example(start=4, increment=2, count=21, samples=864)
@example(start=7, increment=1, count=14, samples=1152)
def test_ramp_up_is_that_of_megatrons_calculator(
    start: int, increment: int, count: int, samples: int
) -> None:
    from megatron.core.num_microbatches_calculator import (
        RampupBatchsizeNumMicroBatchesCalculator as Calculator,
    )

    final = start + increment * count
    calculator = Calculator(final, 1, 1, False, 1, start, increment, samples)
    schedule = TrainingSchedule(
        global_batch_size=final, rampup_batch_size=(start, increment, samples)
    )
    consumed = 0
    while consumed < samples + 3 * final:
        calculator.update(consumed, consistency_check=True)
        expected = calculator.current_global_batch_size
        assert schedule.size_at(consumed) == expected, consumed
        assert replace(schedule, origin=consumed).size_at(consumed) == expected
        assert schedule.offset_at(consumed) == 0
        assert schedule.offset_at(consumed + expected - 1) == expected - 1
        consumed += expected


def test_every_stage_of_a_ramp_up_must_divide_among_the_ranks(shards: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="global_batch_size 6 is not a multiple"):
        StreamLoader(
            stream_config(shards, tmp_path),
            micro_batch_size=4,
            global_batch_size=8,
            rampup_batch_size=(4, 2, 100),
        )
    with pytest.raises(ConfigError, match="whole number of increments"):
        StreamLoader(
            stream_config(shards, tmp_path),
            micro_batch_size=1,
            global_batch_size=8,
            rampup_batch_size=(4, 3, 100),
        )


@pytest.mark.guarantee("locate-gives-token")
def test_locate_is_public_and_checks_its_ids(shards: str, tmp_path: Path) -> None:
    config = stream_config(shards, tmp_path)
    found = streammega.locate(config, [5, 7, 5], global_batch_size=24)
    assert rows(found)[0] == rows(found)[2] != rows(found)[1]
    assert (found.stop - found.start == 17).all()
    with pytest.raises(IndexError, match="sample ids run from -1"):
        streammega.locate(config, -1)
    whole = replace(config, order="megatron", num_samples=(50, 0, 0), blend=f"{shards}/shard-2")
    assert len(streammega.locate(whole, range(50))) == 50
    with pytest.raises(IndexError, match="train has"):
        streammega.locate(whole, 10**6)


@pytest.mark.guarantee("later-segment-schedule")
def test_weights_to_come_may_be_changed_at_a_resume_and_those_of_the_past_not(
    shards: str, tmp_path: Path
) -> None:
    def blend(first: float, second: float) -> Any:
        return [(f"{shards}/shard-0", first), (f"{shards}/shard-2", second)]

    phase = PhaseConfig(first_sample=480, blend=blend(0.5, 0.5))
    config = stream_config([f"{shards}/shard-0"], tmp_path, phases=[phase])
    source = open_source(config, "train", 24)
    dataset = source.locate(np.arange(960)).dataset
    assert set(dataset[:480].tolist()) == {0}
    assert set(dataset[480:].tolist()) == {0, 1}
    with StreamLoader(config, micro_batch_size=24, global_batch_size=24) as loader:
        loader.seek(240)
        before = loader.state_dict()
        loader.seek(720)
        after = loader.state_dict()
    changed = replace(config, phases=[replace(phase, blend=blend(0.1, 0.9))])
    assert len(tokens_of(changed, 1, 24, 24, before)) == 24
    with pytest.raises(StateError, match=r"phases\.1"):
        tokens_of(changed, 1, 24, 24, after)
    with pytest.raises(StateError, match="datasets"):
        tokens_of(replace(config, blend=blend(0.5, 0.5)), 1, 24, 24, before)
