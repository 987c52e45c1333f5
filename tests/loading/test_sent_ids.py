"""Batches that leave a DataLoader worker as ids: the same fields, also where a program in the worker
asks for them, writes to them, or finds padding or ids that are to be refused.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_convert

from streammega import DataConfig, StorageConfig, StreamingDataset
from streammega.errors import FormatError
from streammega.loading.sent_batch import SentBatch
from streammega.loading.sent_ids import SentIds, sent_batch
from tests.support.streams import config_of, write_data

SAMPLES = 160
BATCH = 4


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    write_data(tmp_path)
    return config_of("stream", str(tmp_path), tmp_path / "idx", StorageConfig(), samples=SAMPLES)


def dataset_of(config: DataConfig) -> StreamingDataset:
    return StreamingDataset(config, micro_batch_size=BATCH, global_batch_size=2 * BATCH)


def expected_of(config: DataConfig) -> list[dict[str, Any]]:
    dataset = dataset_of(config)
    return [dataset.batch(consumed) for consumed in dataset.positions()]


def from_workers(dataset: Any, **options: Any) -> list[Any]:
    return list(
        DataLoader(
            dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", **options
        )
    )


def check_same(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same plain dicts: names in their order, types and every bit."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert type(one) is dict
        assert list(one) == list(other)
        for name, field in one.items():
            assert field.dtype == other[name].dtype
            assert torch.equal(field, other[name])


@pytest.mark.parametrize(
    "fields",
    [
        {"reset_position_ids": True},
        {"eod_mask_loss": True},
        {"reset_position_ids": True, "reset_attention_mask": True, "create_attention_mask": True},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_fields_are_in_one_order_with_padding_and_without_and_in_workers(
    config: DataConfig, fields: dict[str, Any]
) -> None:
    """Programs take a batch apart by `batch.values()`."""
    rare = int(dataset_of(config).batch(0)["tokens"][0, 0])
    config = replace(config, eod_id=7, pad_id=rare, dataset_ids=True, **fields)
    expected = expected_of(config)
    whole = [bool(batch["loss_mask"].all()) for batch in expected]
    assert fields.get("eod_mask_loss") or set(whole) == {True, False}
    check_same(list(dataset_of(config)), expected)
    check_same(from_workers(dataset_of(config)), expected)


def ids_of(dataset: StreamingDataset, consumed: int = 0) -> dict[str, torch.Tensor]:
    """A micro-batch as the engine of a worker gives it."""
    fields = dataset.batch(consumed)
    ids = torch.cat([fields["tokens"], fields["labels"][:, -1:]], dim=1)
    return {"ids": ids.to(torch.uint16), "valid": torch.full((len(ids),), ids.shape[1])}


def arrived(batch: Any) -> Any:
    return pickle.loads(ForkingPickler.dumps(batch))  # noqa: S301 - made here


def test_ids_arrive_as_the_fields_that_they_tell(config: DataConfig) -> None:
    dataset = dataset_of(config)
    sent = sent_batch(ids_of(dataset), dataset.steps)
    assert type(sent) is SentIds
    assert default_convert(sent) is sent
    length = config.sequence_length
    assert len(ForkingPickler.dumps(sent)) < 2 * BATCH * (length + 1) + 500
    check_same([arrived(sent), arrived(copy.copy(sent))], [dataset.batch(0)] * 2)


def test_padding_among_ids_makes_fields_in_the_worker(config: DataConfig) -> None:
    dataset = dataset_of(config)
    fields = ids_of(dataset)
    fields["valid"][1] = 9
    sent = sent_batch(fields, dataset.steps)
    assert type(sent) is SentBatch
    assert arrived(sent)["loss_mask"].sum() == dataset.batch(0)["loss_mask"].sum() - (
        config.sequence_length - 8
    )
    first_id = int(fields["ids"][0, 0])
    padded = dataset_of(replace(config, pad_id=first_id))
    sent = sent_batch(ids_of(dataset), padded.steps)
    check_same([arrived(sent)], [padded.batch(0)])


def test_a_program_in_the_worker_finds_a_dict_and_sends_what_it_wrote(config: DataConfig) -> None:
    dataset = dataset_of(config)
    expected = dataset.batch(0)
    sent = sent_batch(ids_of(dataset), dataset.steps)
    assert list(sent) == list(sent.keys()) == list(expected)
    assert len(sent) == 4
    assert "tokens" in sent
    assert {**sent}.keys() == dict(sent).keys() == (sent | {}).keys() == expected.keys()
    sent["tokens"][0, 3] = -5
    sent["weight"] = torch.ones(2)
    del sent["position_ids"]
    assert sent.pop("loss_mask").shape == expected["loss_mask"].shape
    tokens = expected["tokens"].clone()
    tokens[0, 3] = -5
    written = {"tokens": tokens, "labels": expected["labels"], "weight": torch.ones(2)}
    check_same([arrived(sent)], [written])
    with pytest.raises(AttributeError, match="no_such"):
        getattr(sent, "no_such")  # noqa: B009 - known to have none


def test_batches_in_a_worker_are_joined_with_dicts(config: DataConfig) -> None:
    dataset = dataset_of(config)
    expected = dataset.batch(0)
    first = {"rows": torch.arange(4)}
    sent: Any = sent_batch(ids_of(dataset), dataset.steps)
    check_same([arrived(first | sent)], [first | expected])
    check_same([arrived(sent | first)], [expected | first])
    same = sent
    sent |= first
    assert sent is same
    check_same([arrived(same)], [expected | first])
    first |= sent
    check_same([arrived(first)], [first | expected])


def _negated(batch: Any) -> Any:
    batch["tokens"].numpy()[:] *= -1
    return batch


def test_what_collate_fn_writes_in_a_worker_is_what_arrives(config: DataConfig) -> None:
    expected = expected_of(config)
    for batch in expected:
        batch["tokens"].neg_()
    check_same(from_workers(dataset_of(config), collate_fn=_negated), expected)


class Within(IterableDataset[Any]):
    """A dataset that looks at the batches of another one."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        for batch in self.dataset:
            assert isinstance(batch, dict)
            yield batch | {"rows": len(batch["tokens"])}


def test_a_dataset_around_ours_sees_dicts_in_workers_too(config: DataConfig) -> None:
    got = from_workers(Within(dataset_of(config)))
    assert [batch.pop("rows") for batch in got] == [BATCH] * (SAMPLES // BATCH)
    check_same(got, expected_of(config))


@pytest.mark.parametrize("vocab_size", [1 << 16, 40])
def test_an_id_outside_of_the_vocabulary_is_refused_in_the_worker(
    config: DataConfig, vocab_size: int
) -> None:
    limited = replace(config, vocab_size=vocab_size)
    dataset = dataset_of(limited)
    highest = max(int(batch["labels"].max()) for batch in expected_of(config))
    if vocab_size > highest:
        check_same(from_workers(dataset), expected_of(limited))
        return
    with pytest.raises(FormatError, match=f"outside of the vocabulary of {vocab_size}"):
        from_workers(dataset)


def test_ids_of_a_signed_width_arrive_too(config: DataConfig) -> None:
    dataset = dataset_of(config)
    fields = ids_of(dataset)
    fields["ids"] = fields["ids"].to(torch.int32) + 70_000
    got = arrived(sent_batch(fields, dataset.steps))
    assert np.array_equal(got["tokens"].numpy(), fields["ids"][:, :-1].numpy())
    assert np.array_equal(got["labels"].numpy(), fields["ids"][:, 1:].numpy())
    assert got["tokens"].dtype == torch.int64
