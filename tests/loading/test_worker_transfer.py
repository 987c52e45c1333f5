"""Batches that leave a DataLoader worker: the same values in memory of their own, from few bytes, also
where a program in the worker wrote to them.
"""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, default_convert

from streammega import DataConfig, FieldsConfig, StorageConfig, StreamingDataset
from streammega.errors import FormatError
from streammega.loading.worker_transfer import FieldsOfPhase, WorkerBatch
from streammega.samples.field_inputs import Samples
from tests.support.examples import examples
from tests.support.expected import checked_batch
from tests.support.streams import config_of, write_data

SAMPLES = 160
BATCH = 4
ROWS = 3
LENGTH = 8
LIMITS = [0, 1, 255, 65_535, 65_536, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, -1, -(1 << 63)]


# A batch by itself.


def in_worker(batch: dict[str, Any]) -> WorkerBatch:
    """A batch that a program in a worker has made into this one."""
    tokens, labels = (batch.get(name, torch.empty(0)) for name in ("tokens", "labels"))
    ids = torch.zeros(1, LENGTH + 1, dtype=torch.int64)
    if tokens.ndim == 2 and tokens.numel() and tokens.shape == labels.shape:
        ids = torch.cat([tokens, labels[:, -1:]], 1).to(torch.int64)
        if ids.min() >= 0 and ids.max() < 65_536:
            ids = ids.to(torch.uint16)
    config = FieldsConfig(sequence_length=ids.shape[1] - 1)
    samples = Samples(ids, torch.full((len(ids),), ids.shape[1]))
    return WorkerBatch(batch, samples, FieldsOfPhase(config, config.field_names, extra_token=True))


def arrived(batch: dict[str, Any]) -> Any:
    return pickle.loads(ForkingPickler.dumps(in_worker(batch)))  # noqa: S301 - made here


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
        assert bytes_of(got[name]) == bytes_of(field)
        if field.numel():
            memory.add(got[name].untyped_storage().data_ptr())
    assert len(memory) == sum(
        isinstance(field, torch.Tensor) and field.numel() > 0 for field in sent.values()
    )


def bytes_of(field: torch.Tensor) -> bytes:
    return field.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def plain(ids: torch.Tensor) -> dict[str, Any]:
    rows, width = ids.shape
    return {
        "labels": ids[:, 1:].contiguous(),
        "tokens": ids[:, :-1].contiguous(),
        "loss_mask": torch.ones(rows, width - 1),
        "position_ids": torch.arange(width - 1).repeat(rows, 1),
    }


@pytest.mark.many_examples
@pytest.mark.guarantee("batches-forked-workers")
@settings(max_examples=examples(20))
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


@pytest.mark.guarantee("batches-forked-workers")
@pytest.mark.parametrize(
    "field",
    [
        torch.tensor([0.0, 1.0, -0.0, 1.0]),
        torch.tensor([0.0, 1.0, float("nan")]),
        torch.zeros(5, 3),
        torch.ones(2, 3, 4),
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64),
        torch.empty(0, 4),
        torch.empty(0, dtype=torch.int64),
        torch.tensor(5),
        torch.tensor(1.0),
        torch.arange(6, dtype=torch.int32) - 3,
        torch.arange(6).reshape(2, 3),
        torch.arange(12).reshape(3, 4).T,
        torch.ones(2, 1, 3, 3, dtype=torch.bool),
        torch.arange(5, dtype=torch.uint8),
        torch.arange(4).to(torch.uint16),
    ],
    ids=lambda field: f"{field.dtype}{tuple(field.shape)}",
)
@pytest.mark.parametrize("name", ["tokens", "labels", "loss_mask", "position_ids", "other"])
def test_fields_of_any_kind_arrive_as_they_were_sent(name: str, field: torch.Tensor) -> None:
    batch = plain(torch.arange(2 * 4).reshape(2, 4)) | {name: field}
    check_same(arrived(batch), batch)


def test_what_is_no_tensor_arrives_too_and_a_weight_goes_on_to_require_its_gradient() -> None:
    batch = {"name": "web", "count": 3, "none": None, "weight": torch.ones(2, requires_grad=True)}
    got = arrived(batch)
    assert (got["name"], got["count"], got["none"]) == ("web", 3, None)
    assert got["weight"].requires_grad


def test_a_plain_batch_takes_little_more_than_its_stored_ids() -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 60_000, (4, 1025)))
    assert len(pickle.dumps(in_worker(plain(ids)))) < 2 * ids.numel() + 1000


def test_a_view_of_larger_memory_is_sent_without_the_rest() -> None:
    memory = torch.rand(1000, 64)
    assert len(pickle.dumps(in_worker({"part": memory[:2]}))) < 2000


def test_torchs_conversion_of_a_workers_batch_keeps_it_small() -> None:
    batch = in_worker(plain(torch.arange(2 * 9).reshape(2, 9)))
    for made in (default_convert(batch), copy.copy(batch)):
        assert type(made) is WorkerBatch
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
    message = bytes(ForkingPickler.dumps(in_worker(sent)))

    def receive(_: int) -> None:
        for _ in range(50):
            check_same(pickle.loads(message), sent)  # noqa: S301 - made here

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(receive, range(8)))


# Through a DataLoader.


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    write_data(tmp_path)
    return config_of("stream", str(tmp_path), tmp_path / "idx", StorageConfig(), samples=SAMPLES)


def dataset_of(config: DataConfig) -> StreamingDataset:
    return StreamingDataset(config, micro_batch_size=BATCH, global_batch_size=2 * BATCH)


def expected_of(config: DataConfig) -> list[dict[str, Any]]:
    dataset = dataset_of(config)
    return [checked_batch(dataset, consumed) for consumed in dataset.positions()]


def from_workers(dataset: Any, **options: Any) -> list[Any]:
    return list(
        DataLoader(
            dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", **options
        )
    )


def check_batches(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        check_same(one, other)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reset_position_ids": True},
        {"eod_mask_loss": True},
        {
            "reset_position_ids": True,
            "reset_attention_mask": True,
            "fields": [..., "attention_mask", "dataset_id"],
        },
    ],
    ids=", ".join,
)
def test_fields_are_in_one_order_with_padding_and_without_and_in_workers(
    config: DataConfig, fields: dict[str, Any]
) -> None:
    """Programs take a batch apart by `batch.values()`."""
    rare = int(dataset_of(config).batch(0)["tokens"][0, 0])
    config = replace(config, eod_id=7, pad_id=rare, **{"fields": [..., "dataset_id"], **fields})
    expected = expected_of(config)
    whole = [bool(batch["loss_mask"].all()) for batch in expected]
    assert fields.get("eod_mask_loss") or set(whole) == {True, False}
    for batch, same in zip(dataset_of(config), expected, strict=True):
        assert list(batch) == list(same)
        assert all(torch.equal(batch[name], same[name]) for name in batch)
    check_batches(from_workers(dataset_of(config)), expected)


def _negated(batch: Any) -> Any:
    assert isinstance(batch, dict)
    batch["tokens"].numpy()[:] *= -1
    batch["weight"] = torch.ones(2)
    del batch["position_ids"]
    return batch


@pytest.mark.guarantee("batches-forked-workers")
def test_what_collate_fn_writes_in_a_worker_is_what_arrives(config: DataConfig) -> None:
    config = replace(config, fields=["tokens", "labels", "loss_mask", "position_ids"])
    expected = expected_of(config)
    for batch in expected:
        _negated(batch)
    check_batches(from_workers(dataset_of(config), collate_fn=_negated), expected)


class Within(IterableDataset[Any]):
    """A dataset that looks at the batches of another one."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        for batch in self.dataset:
            assert isinstance(batch, dict)
            yield {"first": 1} | batch | {"rows": len(batch["tokens"])}


def test_a_dataset_around_ours_sees_dicts_in_workers_too(config: DataConfig) -> None:
    got = from_workers(Within(dataset_of(config)))
    assert [batch.pop("rows") for batch in got] == [BATCH] * (SAMPLES // BATCH)
    assert [batch.pop("first") for batch in got] == [1] * (SAMPLES // BATCH)
    check_batches(got, expected_of(config))


def test_an_id_outside_of_the_vocabulary_is_refused_in_the_worker(config: DataConfig) -> None:
    highest = max(int(batch["labels"].max()) for batch in expected_of(config))
    limited = replace(config, vocab_size=highest + 1)
    check_batches(from_workers(dataset_of(limited)), expected_of(limited))
    with pytest.raises(FormatError, match="outside of the vocabulary of 40"):
        from_workers(dataset_of(replace(config, vocab_size=40)))
