"""What each rank of a layout is given: the right fields of the right tokens, sent once, resumable
anywhere.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streammega import (
    DataConfig,
    ParallelLayout,
    PhaseConfig,
    RankBatches,
    Ranks,
    StorageConfig,
    StreamLoader,
    get_batch,
)
from streammega.errors import ConfigError, FormatError, StorageError
from streammega.loading import StreamingDataset
from streammega.order.sharding import zigzag_bounds
from streammega.parallel import device_mesh, open_loader
from streammega.parallel.broadcast import rank_device
from streammega.parallel.fields import documents_of, rank_fields, split_cu_seqlens
from streammega.parallel.groups import GROUPS
from streammega.parallel.rank_batches import read_factor
from streammega.samples.field_inputs import Samples
from streammega.samples.fields import Batch, batch_fields
from tests.support.builders import write_dataset
from tests.support.cuda_support import FakeCuda
from tests.support.device_fields import device_fields
from tests.support.expected import checked_batch
from tests.support.gang import Gang, on_ranks
from tests.support.rank_programs import read_batches

MICRO = 2
GLOBAL = 8
SIZES: dict[str, Any] = {"micro_batch_size": MICRO, "global_batch_size": GLOBAL}
EOD = 7


def documents(**more: Any) -> dict[str, Any]:
    return {"eod_id": EOD, **more}


def expected(
    config: DataConfig, dp_rank: int, dp_size: int, steps: int, **truth: Any
) -> list[Batch]:
    if config.has_plain_fields:
        # get_batch gives the four fields of Megatron's in any case
        config = replace(config, fields=[*FIELDS["first"], *FIELDS["last"]])
    dataset = StreamingDataset(config, dp_rank=dp_rank, dp_size=dp_size, **SIZES)
    return [checked_batch(dataset, n * MICRO * dp_size, **truth) for n in range(steps)]


def check_parts(
    batch: dict[str, Any], whole: Batch, at: dict[str, int], layout: ParallelLayout
) -> None:
    """The fields of a rank are those of whole samples, at the tokens that it keeps."""
    bounds = zigzag_bounds(whole["tokens"].shape[1], at["cp"], layout.cp)
    kept = np.concatenate([np.arange(a, b) for a, b in bounds])
    for name, field in batch.items():
        if name == "cu_seqlens" and layout.cp > 1:
            continue  # of the kept tokens: cut where the parts meet too
        expected = whole[name.removesuffix("_whole")].numpy()
        if name == "attention_mask":
            expected = expected[:, :, kept]
        elif not name.startswith("cu_seqlens"):
            expected = expected[:, kept]
        np.testing.assert_array_equal(field, expected)
        assert field.dtype == expected.dtype


FIELDS = {"first": {"tokens", "position_ids"}, "last": {"labels", "loss_mask"}}

LAYOUTS = [
    ParallelLayout(tp=2, dp=2),
    ParallelLayout(tp=2, cp=2, pp=2),
    ParallelLayout(cp=2, dp=2, order="dp-cp-tp-pp"),
    ParallelLayout(tp=2, pp=3),
]


@pytest.mark.guarantee("ranks-read-once", "get-batch-fields", "13-state-equal")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: f"tp{x.tp}-cp{x.cp}-dp{x.dp}-pp{x.pp}")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        documents(eod_mask_loss=True),
        documents(
            reset_position_ids=True, reset_attention_mask=True, fields=[..., "attention_mask"]
        ),
    ],
    ids=["plain", "mask", "documents"],
)
def test_every_rank_is_given_the_fields_of_its_stage_and_its_parts(
    gang: Gang, config: DataConfig, layout: ParallelLayout, changes: dict[str, Any]
) -> None:
    config = replace(config, order="stream", shuffle_lanes=GLOBAL, **changes)
    steps = 6
    results = gang.run(layout.world_size, read_batches, layout, config, SIZES, steps, 1, False)
    states = [result["state"] for result in results]
    assert all(state == states[0] for state in states)
    assert states[0]["consumed_samples"] == steps * MICRO * layout.dp
    extra = {"cu_seqlens", "attention_mask"} if "fields" in changes else set()
    for result in results:
        at = result["at"]
        wanted = set(FIELDS["first"] if at["pp"] == 0 else ()) | set(
            FIELDS["last"] if at["pp"] == layout.pp - 1 else ()
        )
        wanted |= extra if wanted else set()
        for batch, whole in zip(
            result["batches"], expected(config, at["dp"], layout.dp, steps), strict=True
        ):
            assert set(batch) - {"cu_seqlens_whole"} == wanted
            check_parts(batch, whole, at, layout)
        reads = bool(wanted) and at["tp"] == 0
        assert (result["planned"] > 0) == reads, (
            "only tensor-parallel rank 0 of the first and last stage reads"
        )
    readers = sum(result["planned"] > 0 for result in results)
    twice = read_factor(layout, config)
    assert readers == layout.dp * layout.cp * min(layout.pp, 2)
    assert twice == min(layout.pp, 2) * (layout.cp if extra else 1)


@pytest.mark.guarantee("over-change-length")
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (ParallelLayout(tp=2, dp=2), documents(reset_attention_mask=True)),
        (ParallelLayout(tp=2, cp=2, pp=2), documents()),
    ],
    ids=["documents", "parts"],
)
def test_every_rank_is_given_samples_of_the_length_of_their_phase(
    gang: Gang, config: DataConfig, layout: ParallelLayout, changes: dict[str, Any]
) -> None:
    """Messages are as long as their phase's, also those that are begun ahead, and after a skip.
    Documents that are excluded are masked on every rank.
    """
    phases = [PhaseConfig(first_sample=8, sequence_length=32, shuffle_lanes=16)]
    assert isinstance(config.blend, list)
    name = str(config.blend[0])
    config = replace(
        config,
        order="stream",
        shuffle_lanes=GLOBAL,
        phases=phases,
        exclude_samples=((16, 24),),
        exclude_documents=[f"{name}#{number}" for number in range(40)],
        **changes,
    )
    excluded = dict.fromkeys(((name, number) for number in range(40)), 0)
    steps = 12
    results = gang.run(layout.world_size, read_batches, layout, config, SIZES, steps, 2, False)
    masked = 0
    for result in results:
        at = result["at"]
        dataset = StreamingDataset(config, dp_rank=at["dp"], dp_size=layout.dp, **SIZES)
        for batch, position in zip(result["batches"], dataset.positions(), strict=False):
            whole = checked_batch(dataset, position, excluded=excluded)
            assert whole["tokens"].shape[1] == (16 if position < 8 else 32)
            check_parts(batch, whole, at, layout)
            masked += int((batch.get("loss_mask", np.ones(1)) == 0).sum())
        assert result["state"]["consumed_samples"] == 8 + steps * MICRO * layout.dp
    assert masked > 4


@pytest.mark.guarantee("excluded-documents-columns")
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (ParallelLayout(tp=2, dp=2), {"reset_position_ids": True, "reset_attention_mask": True}),
        (ParallelLayout(tp=2, cp=2, pp=2), {}),
        (ParallelLayout(tp=2, cp=2), {"reset_position_ids": True}),
    ],
    ids=["documents", "parts", "whole"],
)
def test_no_rank_is_given_documents_that_are_excluded(
    gang: Gang, config: DataConfig, layout: ParallelLayout, changes: dict[str, Any]
) -> None:
    """Messages say which labels have no loss, before the list begins and in a phase that has one."""
    names = [f"pair#{number}" for number in range(0, 200, 3)]
    phases = [
        PhaseConfig(first_sample=24, exclude_documents=[name.replace("#", ":") for name in names])
    ]
    config = replace(
        config,
        order="stream",
        shuffle_lanes=GLOBAL,
        eod_id=2000,
        exclude_documents=[(8, names[:30])],
        phases=phases,
        **changes,
    )
    steps = 10
    results = gang.run(layout.world_size, read_batches, layout, config, SIZES, steps, 2, False)
    assert isinstance(config.blend, list)
    excluded = {
        (str(config.blend[0]), number): 8 if number in range(0, 90, 3) else 24
        for number in range(0, 200, 3)
    }
    unlearned = 0
    for result in results:
        at = result["at"]
        whole_batches = expected(config, at["dp"], layout.dp, steps, excluded=excluded)
        for number, (batch, whole) in enumerate(zip(result["batches"], whole_batches, strict=True)):
            check_parts(batch, whole, at, layout)
            has_loss = batch.get("loss_mask", np.ones(1)) != 0
            if (number + 1) * MICRO * layout.dp <= 8:
                assert has_loss.all()
            unlearned += int((~has_loss).sum())
            if "tokens" in batch and "loss_mask" in batch:
                assert not has_loss[batch["tokens"] == 2000].any()
                assert not has_loss[batch["labels"] == 2000].any()
    assert unlearned > 20


def test_a_length_of_a_phase_that_ranks_cannot_cut_is_refused_at_once(config: DataConfig) -> None:
    phases = [PhaseConfig(first_sample=8, sequence_length=30)]
    config = replace(config, order="stream", shuffle_lanes=GLOBAL, phases=phases)
    cut: Any = SimpleNamespace(layout=ParallelLayout(cp=2), at={"cp": 0, "dp": 0})
    with pytest.raises(ConfigError, match="30 is not a multiple of 2 x cp"):
        open_loader(config, cut, **SIZES)


def test_a_loader_without_ranks_is_refused_with_what_to_use(config: DataConfig) -> None:
    none: Any = None
    with pytest.raises(ConfigError, match="ranks is None; give Ranks"):
        open_loader(config, none, **SIZES)


@pytest.mark.guarantee("ranks-read-once")
@pytest.mark.parametrize(("dtype", "least"), [(np.uint16, 13.0), (np.int32, 6.5)])
def test_one_message_is_many_times_smaller_than_megatrons_fields(
    gang: Gang, tmp_path: Path, dtype: Any, least: float
) -> None:
    """Megatron sends tokens, labels, position_ids of 8 bytes and loss_mask of 4: 28
    bytes a token.
    """
    write_dataset(tmp_path / "p", [np.arange(20_000, dtype=dtype)], dtype)
    config = DataConfig(
        blend=[str(tmp_path / "p")],
        sequence_length=1024,
        order="stream",
        shuffle_lanes=8,
        storage=StorageConfig(cache_dir=tmp_path),
    )
    layout = ParallelLayout(tp=2)
    for result in gang.run(2, read_batches, layout, config, SIZES, 4, 1, False):
        sent = result["sent"] / (MICRO * 1024) / 4  # bytes a token of the four that were taken
        assert 28 / sent >= least


@pytest.mark.guarantee("exact-resume-state", "rankbatches-reads-ahead")
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_reading_ahead_changes_nothing_and_is_not_counted(
    gang: Gang, config: DataConfig, ahead: int
) -> None:
    config = replace(config, order="stream", shuffle_lanes=GLOBAL, exclude_samples=((8, 16),))
    layout = ParallelLayout(tp=2, dp=1)
    for result in gang.run(2, read_batches, layout, config, SIZES, 4, ahead, False):
        assert result["state"]["consumed_samples"] == 8, (
            "what is under way lies past the excluded samples"
        )
        for batch, whole in zip(result["batches"], expected(config, 0, 1, 4), strict=True):
            np.testing.assert_array_equal(batch["tokens"], whole["tokens"].numpy())


@pytest.mark.guarantee("parallellayout-coordinates-ranks")
@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "pp-dp-tp-cp-ep"])
@on_ranks(8)
def test_device_meshes_and_layouts_say_the_same(rank: int, config: DataConfig, order: str) -> None:
    layout = ParallelLayout(tp=2, dp=2, pp=2, order=order)
    mesh = device_mesh(layout, "cpu")
    again = ParallelLayout.from_mesh(mesh)
    for name in GROUPS:
        assert again.groups(name) == layout.groups(name)
    dataset = StreamLoader(config, **SIZES, mesh=mesh).dataset
    assert (dataset.dp_rank, dataset.dp_size) == (layout.coordinates(rank)["dp"], layout.dp)


@pytest.mark.guarantee("get-batch-fields")
def test_middle_stages_may_ask_for_positions(gang: Gang, config: DataConfig) -> None:
    config = replace(config, **documents(reset_position_ids=True, reset_attention_mask=True))
    results = gang.run(3, read_batches, ParallelLayout(pp=3), config, SIZES, 2, 1, True)
    assert set(results[1]["batches"][0]) == {"position_ids", "cu_seqlens"}
    for name in ("position_ids", "cu_seqlens"):
        np.testing.assert_array_equal(
            results[1]["batches"][1][name], results[0]["batches"][1][name]
        )


def test_middle_stages_may_ask_for_positions_of_their_parts(gang: Gang, config: DataConfig) -> None:
    """All of which need whole samples."""
    config = replace(config, **documents(reset_position_ids=True))
    layout = ParallelLayout(pp=3, cp=2)
    results = gang.run(layout.world_size, read_batches, layout, config, SIZES, 2, 1, True)
    for result in results:
        at = result["at"]
        for batch, whole in zip(result["batches"], expected(config, 0, 1, 2), strict=True):
            assert "position_ids" in batch or at["pp"] == 2
            check_parts(batch, whole, at, layout)


@pytest.mark.guarantee("rankbatches-reads-ahead", "13-state-equal")
@on_ranks(4)
def test_all_ranks_end_together_and_virtual_stages_share_a_cursor(
    rank: int, config: DataConfig
) -> None:
    """Also two handles that drift apart."""
    ranks = Ranks(ParallelLayout(tp=2, pp=2))
    with open_loader(config, ranks, **SIZES) as loader:
        alone = sum(1 for _ in RankBatches(loader, ranks))
    with open_loader(config, ranks, **SIZES) as loader:
        first, second = RankBatches(loader, ranks).handles(2)
        a = [*itertools.islice(first, 3)]
        b = [*itertools.islice(second, 5)]
        a += list(first)
        b += list(second)
        for x, y in zip(a, b, strict=True):
            assert all(torch.equal(x[name], y[name]) for name in x)
    assert alone == len(a) == len(StreamLoader(config, **SIZES, dp_size=1))


@pytest.mark.guarantee("get-batch-fields")
@given(
    samples=st.integers(1, 4),
    cp=st.integers(1, 4),
    part=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    eods=st.floats(0, 1),
)
def test_cu_seqlens_of_parts_are_those_of_the_kept_tokens(
    samples: int, cp: int, part: int, seed: int, eods: float
) -> None:
    length = 2 * cp * part
    rng = np.random.default_rng(seed)
    ids = np.where(rng.random((samples, length + 1)) < eods, EOD, 1)
    config = DataConfig(blend="x", sequence_length=length, eod_id=EOD, reset_attention_mask=True)
    whole = batch_fields(ids, np.full(samples, length + 1), config, bounds=True)["cu_seqlens"]
    for rank in range(cp):
        bounds = zigzag_bounds(length, rank, cp)
        kept = np.concatenate([np.arange(a, b) for a, b in bounds])
        rows = split_cu_seqlens(whole, bounds)
        for row, document in zip(
            rows.tolist(),
            np.cumsum(np.pad(ids[:, :-1] == EOD, ((0, 0), (1, 0)))[:, :-1], 1),
            strict=True,
        ):
            own = document[kept]
            begins = [0] + [
                n for n in range(1, len(kept)) if own[n] != own[n - 1] or kept[n] != kept[n - 1] + 1
            ]
            assert [bound for bound in row if bound < len(kept)] == begins
            assert row[-1] == len(kept)


@pytest.mark.guarantee("fields-made-device")
@given(
    samples=st.integers(1, 4),
    length=st.integers(1, 20),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([np.uint16, np.int32, np.uint8, np.int64]),
    pad=st.sampled_from([None, 3, EOD]),
    flags=st.tuples(*[st.booleans()] * 5),
)
def test_fields_made_on_a_device_are_those_made_by_kernels(
    samples: int, length: int, seed: int, dtype: Any, pad: int | None, flags: tuple[bool, ...]
) -> None:
    mask, positions, attention, create, ambiguous = flags
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 10, (samples, length + 1)).astype(dtype)
    valid = rng.integers(0, length + 2, samples)
    config = DataConfig(
        blend="x", sequence_length=length, eod_id=EOD, pad_id=pad, eod_mask_loss=mask, reset_position_ids=positions,
        reset_attention_mask=attention, fields=[..., "attention_mask"] if create else None,
        allow_ambiguous_pad_tokens=ambiguous,
    )  # fmt: skip
    by_kernels = batch_fields(ids, valid, config, bounds=True)
    on_device = device_fields(torch.from_numpy(ids), torch.from_numpy(valid), config)
    assert set(by_kernels) == set(on_device)
    for name, field in by_kernels.items():
        assert field.dtype == on_device[name].dtype, name
        assert torch.equal(field, on_device[name]), name
    memory = {field.untyped_storage().data_ptr() for field in on_device.values()}
    assert len(memory) == len(on_device)
    if pad is None:  # then whole samples have no padding
        everything = torch.full((samples,), length + 1)
        slow = device_fields(torch.from_numpy(ids), everything, config)
        fast = device_fields(torch.from_numpy(ids), everything, config, may_pad=False)
        assert {name: field.tolist() for name, field in slow.items()} == {
            name: field.tolist() for name, field in fast.items()
        }


def test_wrong_loaders_are_named(config: DataConfig) -> None:
    ranks = Ranks(ParallelLayout())
    with pytest.raises(ConfigError, match="ids_only=True"):
        get_batch(StreamLoader(config, **SIZES), ranks)
    with pytest.raises(ConfigError, match="this rank keeps"):
        get_batch(StreamLoader(config, **SIZES, ids_only=True, cp_rank=1, cp_size=2), ranks)
    with pytest.raises(ConfigError, match=r"the layout has 2 ranks .* the world 1"):
        Ranks(ParallelLayout(dp=2))
    cut: Any = SimpleNamespace(layout=ParallelLayout(cp=3), at={"cp": 0, "dp": 0})
    with pytest.raises(ConfigError, match="not a multiple of 2 x cp"):
        open_loader(config, cut, **SIZES)


def test_ids_outside_of_the_vocabulary_are_named(config: DataConfig) -> None:
    loader = StreamLoader(replace(config, vocab_size=10), **SIZES, ids_only=True)
    with pytest.raises(FormatError, match="outside of the vocabulary"):
        get_batch(loader, Ranks(ParallelLayout()))


class Slow:
    """What a loader reads, given when it is asked for and let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, loader: StreamLoader) -> None:
        self.take, self.asked, self.let = loader.take, 0, threading.Event()
        monkeypatch.setattr(loader, "take", self._slowly)

    def _slowly(self) -> Any:
        self.asked += 1
        if self.asked > 1:
            assert self.let.wait(60), "the second micro-batch is waited for"
        return self.take()


@pytest.mark.guarantee("micro-batch-given")
def test_a_micro_batch_is_given_without_waiting_for_the_next(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is at hand yet when the first is asked for: the loader's thread begins with it."""
    ranks = Ranks(ParallelLayout())
    loader = open_loader(config, ranks, **SIZES)
    monkeypatch.setattr(StreamLoader, "ready", property(lambda _: False))
    slow = Slow(monkeypatch, loader)
    batches = RankBatches(loader, ranks, ahead=2)
    next(batches)
    assert slow.asked == 1
    slow.let.set()
    next(batches)
    assert slow.asked == 2
    batches.close()


def is_ready(loader: StreamLoader) -> bool:
    """Whether it has a batch, which changes by itself."""
    return loader.ready


def test_what_is_there_already_is_prepared_ahead(config: DataConfig) -> None:
    ranks = Ranks(ParallelLayout())
    with open_loader(config, ranks, **SIZES) as loader:
        assert not is_ready(loader), "nothing was asked for"
        batches = RankBatches(loader, ranks, ahead=3)
        next(batches)
        deadline = time.monotonic() + 60
        while not loader.ready and time.monotonic() < deadline:
            time.sleep(0.01)
        next(batches)
        assert loader.consumed_samples > batches.consumed_samples
        assert is_ready(loader)
        assert batches.state_dict()["consumed_samples"] == batches.consumed_samples == 2 * MICRO
        batches.close()
        loader.close()
        assert not loader.ready


def check_a_bad_micro_batch_is_not_passed_over(config: DataConfig, layout: ParallelLayout) -> None:
    """The vocabulary has the ids of the first micro-batches, and not those of the next one."""
    largest = [
        max(int(field.max()) for name, field in batch.items() if name in ("tokens", "labels"))
        for batch in expected(config, 0, 1, 20)
    ]
    good = next(number for number in range(1, 20) if largest[number] > max(largest[:number]))
    config = replace(config, vocab_size=max(largest[:good]) + 1)
    ranks = Ranks(layout)
    with open_loader(config, ranks, **SIZES) as loader:
        batches = RankBatches(loader, ranks, ahead=2)
        for _ in range(good):
            next(batches)
        batches.prepare()
        for _ in range(2):
            with pytest.raises(FormatError, match="outside of the vocabulary"):
                next(batches)
        assert batches.consumed_samples == good * MICRO
        batches.close()
        with pytest.raises(FormatError, match="outside of the vocabulary"):
            next(batches)


def test_a_bad_micro_batch_is_not_passed_over(config: DataConfig) -> None:
    check_a_bad_micro_batch_is_not_passed_over(config, ParallelLayout())


@on_ranks(2)
def test_a_bad_micro_batch_is_not_passed_over_by_ranks_that_share_messages(
    rank: int, config: DataConfig
) -> None:
    check_a_bad_micro_batch_is_not_passed_over(config, ParallelLayout(tp=2))


def test_an_error_of_reading_ahead_waits_for_the_micro_batches_before_it(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(ParallelLayout())
    with open_loader(config, ranks, **SIZES) as loader:
        take = loader.take
        calls = itertools.count(1)

        def fail_once() -> Any:
            if next(calls) == 3:
                raise StorageError("the third cannot be read now")
            return take()

        monkeypatch.setattr(loader, "take", fail_once)
        monkeypatch.setattr(StreamLoader, "ready", property(lambda _: True))
        batches = RankBatches(loader, ranks, ahead=3)
        read = [next(batches), next(batches)]
        with pytest.raises(StorageError, match="the third"):
            next(batches)
        read.append(next(batches))
        for batch, whole in zip(read, expected(config, 0, 1, 3), strict=True):
            assert torch.equal(batch["tokens"], whole["tokens"])
        batches.close()


@on_ranks(2)
def test_ranks_that_share_messages_prepare_the_next_together(rank: int, config: DataConfig) -> None:
    ranks = Ranks(ParallelLayout(tp=2))
    with (
        open_loader(config, ranks, **SIZES) as loader,
        open_loader(config, ranks, **SIZES) as other,
    ):
        batches = RankBatches(loader, ranks)
        first = next(batches)
        before = batches.broadcast_bytes
        batches.prepare()
        assert batches.broadcast_bytes == 2 * before, "the second is sent before it is asked for"
        for batch in (first, next(batches)):
            expected = get_batch(other, ranks)
            assert all(torch.equal(batch[name], expected[name]) for name in expected)
        batches.close()


@pytest.mark.guarantee("bounds-documents-made")
@given(
    samples=st.integers(1, 4),
    cp=st.integers(1, 3),
    part=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    eods=st.floats(0, 1),
    pad=st.sampled_from([None, 3, EOD]),
    dtype=st.sampled_from([np.uint16, np.int32]),
)
def test_documents_are_counted_where_ids_are_read_as_a_device_would(
    samples: int, cp: int, part: int, seed: int, eods: float, pad: int | None, dtype: Any
) -> None:
    length = 2 * cp * part
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(np.where(rng.random((samples, length + 1)) < eods, EOD, 1).astype(dtype))
    valid = torch.from_numpy(rng.integers(0, length + 2, samples))
    config = DataConfig(
        blend="x",
        sequence_length=length,
        eod_id=EOD,
        pad_id=pad,
        reset_attention_mask=True,
        allow_ambiguous_pad_tokens=True,
    )
    asked = device_fields(ids, valid, config)["cu_seqlens"]
    for rank in range(cp):
        bounds = zigzag_bounds(length, rank, cp)
        counted = documents_of(ids, valid, config, bounds)
        assert torch.equal(
            device_fields(ids, valid, config, max_documents=counted.max_documents)["cu_seqlens"],
            asked,
        )
        assert torch.equal(
            split_cu_seqlens(asked, bounds, counted.max_kept_documents),
            split_cu_seqlens(asked, bounds),
        )
        assert counted.longest == int(asked.diff(dim=1).max())


@pytest.mark.guarantee("bounds-documents-made")
def test_fields_whose_documents_are_counted_never_ask_the_device() -> None:
    """Nothing can be read back from a device like this one: asking it for a number raises."""
    config = DataConfig(
        blend="x", sequence_length=8, eod_id=EOD, reset_attention_mask=True, reset_position_ids=True
    )
    ids = torch.tensor([[1, EOD, 1, 1, EOD, 1, 1, 1, 1]])
    valid = torch.tensor([9])
    for rank in range(2):
        bounds = zigzag_bounds(8, rank, 2)
        counted = documents_of(ids, valid, config, bounds)
        there = Samples(ids.to("meta"), valid.to("meta"))
        fields = rank_fields(there, config, bounds, documents=counted)
        expected = rank_fields(Samples(ids, valid), config, bounds)
        assert {name: field.shape for name, field in fields.items()} == {
            name: field.shape for name, field in expected.items()
        }


def test_a_group_that_only_talks_on_cuda_is_given_its_batches_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks: Any = SimpleNamespace(group=lambda _: SimpleNamespace(_get_backend=no_backend))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    assert rank_device(None, ranks) == torch.device("cuda", 3)
    assert rank_device("cpu", ranks) == torch.device("cpu")
    assert rank_device(None, Ranks(ParallelLayout())) == torch.device("cpu")


def no_backend(device: torch.device) -> None:
    raise RuntimeError(f"No backend type associated with device type {device.type}")


def test_what_a_rank_reads_for_its_messages_is_not_pinned(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking for pinned memory opens a context, on the first GPU of the host if no other was chosen
    yet.
    """
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("CUDA is asked for"))
    with open_loader(config, Ranks(ParallelLayout()), **SIZES) as loader:
        next(RankBatches(loader, Ranks(ParallelLayout()), "cpu"))


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_message_has_memory_of_the_stream_that_uses_it(config: DataConfig, tp_rank: int) -> None:
    """Memory of the computing stream may still be read by what that stream has to do. The rank that
    receives copies nothing: what the broadcast overwrites was never initialised.
    """
    cuda = FakeCuda()
    ranks = one_of_two_by_tensors(tp_rank)
    with cuda.used(), open_loader(config, ranks, **SIZES) as loader:
        batches = RankBatches(loader, ranks, "cuda", ahead=0)
        for _ in range(2):
            next(batches)
    first = "memory on side 0" if tp_rank else "copy on side 0"
    assert cuda.log == [first, "broadcast on side 0", "main waits for side 0"] * 2


def test_batches_that_are_asked_for_one_by_one_use_one_stream(config: DataConfig) -> None:
    """The allocator keeps the memory of each stream for that stream."""
    cuda = FakeCuda()
    ranks = one_of_two_by_tensors(1)
    with cuda.used(), open_loader(config, ranks, **SIZES) as loader:
        for _ in range(3):
            get_batch(loader, ranks, "cuda")
    assert len(cuda.streams) == 1


def one_of_two_by_tensors(tp_rank: int) -> Any:
    """Stands for one of two tensor-parallel ranks."""
    return SimpleNamespace(
        layout=ParallelLayout(tp=2),
        at={"tp": tp_rank, "cp": 0, "dp": 0, "pp": 0},
        group=lambda _: SimpleNamespace(_get_backend=lambda _: None),
        members=lambda _: [0, 1],
        is_first_stage=True,
        is_last_stage=True,
    )
