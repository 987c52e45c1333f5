"""What a worker's batch is when it arrives: the same values, in memory of its own, from few bytes."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_convert

from streammega.loading.sent_batch import SentBatch

ROWS = 3
LENGTH = 8
LIMITS = [0, 1, 255, 65_535, 65_536, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, -1, -(1 << 63)]


def arrived(batch: dict[str, Any]) -> Any:
    return pickle.loads(ForkingPickler.dumps(SentBatch(batch)))  # noqa: S301 - made here


def check_same(got: Any, sent: dict[str, Any]) -> None:
    """The same fields in the same order, bit for bit, none of which shares memory with another."""
    assert type(got) is dict
    assert list(got) == list(sent)
    memory = set()
    for name, field in sent.items():
        if not isinstance(field, torch.Tensor):
            assert got[name] == field
            continue
        assert got[name].dtype == field.dtype
        assert got[name].shape == field.shape
        assert got[name].contiguous().numpy().tobytes() == field.contiguous().numpy().tobytes()
        if field.numel():
            memory.add(got[name].untyped_storage().data_ptr())
    assert len(memory) == sum(
        isinstance(field, torch.Tensor) and field.numel() > 0 for field in sent.values()
    )


def plain(ids: torch.Tensor) -> dict[str, Any]:
    rows, width = ids.shape
    return {
        "labels": ids[:, 1:].contiguous(),
        "tokens": ids[:, :-1].contiguous(),
        "loss_mask": torch.ones(rows, width - 1),
        "position_ids": torch.arange(width - 1).repeat(rows, 1),
    }


@given(st.data())
def test_values_of_any_size_arrive_as_they_were_sent(data: st.DataObject) -> None:
    value = st.one_of(st.integers(0, 70_000), st.sampled_from(LIMITS))
    row = st.lists(value, min_size=LENGTH + 1, max_size=LENGTH + 1)
    ids = torch.tensor(data.draw(st.lists(row, min_size=ROWS, max_size=ROWS)))
    batch = plain(ids)
    for _ in range(data.draw(st.integers(0, 3))):
        # what a program in the worker may write, to one field or another
        name = data.draw(st.sampled_from(list(batch)))
        written = data.draw(st.sampled_from([0, 1, -100, 7]))
        batch[name][data.draw(st.integers(0, ROWS - 1)), data.draw(st.integers(0, 7))] = written
    check_same(arrived(batch), batch)


@pytest.mark.parametrize(
    "field",
    [
        torch.tensor([0.0, 1.0, -0.0, 1.0]),
        torch.tensor([0.0, 1.0, float("nan")]),
        torch.tensor([0.5, 1.0]),
        torch.zeros(5, 3),
        torch.ones(2, 3, 4),
        torch.ones(3, dtype=torch.float64),
        torch.empty(0, 4),
        torch.empty(0, dtype=torch.int64),
        torch.tensor(5),
        torch.tensor(1.0),
        torch.arange(6, dtype=torch.int32),
        torch.arange(6, dtype=torch.int32) - 3,
        torch.arange(6).reshape(2, 3),
        torch.arange(12).reshape(3, 4).T,
        torch.ones(2, 1, 3, 3, dtype=torch.bool),
        torch.arange(5, dtype=torch.uint8),
        torch.arange(4).to(torch.uint16),
    ],
    ids=lambda field: f"{field.dtype}{tuple(field.shape)}",
)
def test_fields_of_any_kind_arrive_as_they_were_sent(field: torch.Tensor) -> None:
    batch = {"other": field, "tokens": field.clone()}
    check_same(arrived(batch), batch)


def test_what_is_no_tensor_arrives_too_and_a_weight_goes_on_to_require_its_gradient() -> None:
    batch = {"name": "web", "count": 3, "weight": torch.ones(2, requires_grad=True)}
    got = arrived(batch)
    assert (got["name"], got["count"]) == ("web", 3)
    assert got["weight"].requires_grad


def test_a_plain_batch_takes_little_more_than_its_stored_ids() -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 60_000, (4, 1025)))
    assert len(pickle.dumps(SentBatch(plain(ids)))) < 2 * ids.numel() + 1000
    wide = ids + 70_000
    assert len(pickle.dumps(SentBatch(plain(wide)))) < 4 * ids.numel() + 1000


def test_a_view_of_larger_memory_is_sent_without_the_rest() -> None:
    memory = torch.rand(1000, 64)
    assert len(pickle.dumps(SentBatch({"part": memory[:2]}))) < 2000


def test_torchs_conversion_of_a_workers_batch_keeps_it_small() -> None:
    batch = SentBatch(plain(torch.arange(2 * 9).reshape(2, 9)))
    for made in (default_convert(batch), copy.copy(batch)):
        assert type(made) is SentBatch
        check_same(dict(made), dict(batch))


def test_batches_that_are_held_together_share_no_memory_and_dropped_ones_leave_theirs() -> None:
    sent = [plain(torch.arange(n, n + 2 * 9).reshape(2, 9)) for n in range(40)]
    got = [arrived(batch) for batch in sent]
    for one, other in zip(got, sent, strict=True):
        check_same(one, other)
    places = {field.data_ptr() for batch in got for field in batch.values()}
    assert len(places) == 40 * 4


def test_threads_receive_batches_of_their_own() -> None:
    sent = plain(torch.arange(2 * 9).reshape(2, 9))
    message = bytes(ForkingPickler.dumps(SentBatch(sent)))

    def receive(_: int) -> None:
        for _ in range(50):
            check_same(pickle.loads(message), sent)  # noqa: S301 - made here

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(receive, range(8)))
