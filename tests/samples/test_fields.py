"""Fields of ids that come from anywhere: the public functions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

import streammega as sm
from streammega.errors import ConfigError, FormatError
from streammega.samples.fields import inputs_on_device
from tests.support.builders import write_dataset
from tests.support.device_fields import device_fields
from tests.support.examples import examples

EOD = 7
DOCUMENTS: dict[str, Any] = {
    "eod_id": EOD, "eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True,
    "fields": [..., "attention_mask"],
}  # fmt: skip
DTYPES = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64]


# it leaves its files open
@pytest.mark.guarantee("batch-fields-makes")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_webdataset_pipeline_makes_the_batches_of_the_loader(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    (tmp_path / "tars").mkdir()
    for shard in range(3):
        write_dataset(
            tmp_path / "tars" / f"a-0000{shard}-of-00003.tar",
            [rng.integers(0, 50, rng.integers(1, 80)).astype(np.uint16) for _ in range(30)],
        )
    length = 32

    def pack(samples: Iterable[tuple[np.ndarray]]) -> Iterator[np.ndarray]:
        """Sequences end to end, cut into samples of S + 1 ids, of which the last is the next one's
        first.
        """
        held = np.empty(0, np.uint16)
        for (tokens,) in samples:
            held = np.concatenate([held, tokens])
            while len(held) > length:
                yield held[: length + 1]
                held = held[length:]

    fields = sm.FieldsConfig(sequence_length=length, **DOCUMENTS)
    pipeline = (
        webdataset.WebDataset(
            sorted(map(str, tmp_path.glob("tars/*.tar"))), shardshuffle=False, empty_check=False
        )
        .decode()
        .to_tuple("npy")
        .compose(pack)
        .batched(4, collation_fn=np.stack, partial=False)
        .map(lambda ids: sm.batch_fields(ids, None, fields, bounds=True))
    )
    data = sm.DataConfig(
        blend=[str(tmp_path / "tars")],
        sequence_length=length,
        order="sequential",
        storage=sm.StorageConfig(cache_dir=tmp_path / "c"),
        **DOCUMENTS,
    )
    compared = 0
    with sm.StreamLoader(data, micro_batch_size=4, global_batch_size=4) as loader:
        for ours, theirs in zip(loader, pipeline, strict=True):
            assert ours.keys() == theirs.keys()
            for name, field in ours.items():
                assert torch.equal(field, theirs[name]), name
            compared += 1
    assert compared > 20


@pytest.mark.many_examples
@pytest.mark.guarantee("batch-fields-makes")
@settings(max_examples=examples(20))
@given(
    rows=st.lists(st.lists(st.integers(0, 9), min_size=9, max_size=9), min_size=1, max_size=4),
    valid=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    as_tensor=st.booleans(),
    pad=st.sampled_from([-1, 3]),
)
def test_the_pieces_are_what_batch_fields_puts_together(
    rows: list[list[int]], valid: int, dtype: Any, as_tensor: bool, pad: int
) -> None:
    """From arrays and tensors of every integer dtype."""
    config = sm.FieldsConfig(sequence_length=8, pad_id=None if pad < 0 else pad, **DOCUMENTS)
    array = np.array(rows, dtype)
    counts = np.full(len(rows), valid, np.int16)
    ids: Any = torch.from_numpy(array) if as_tensor else array
    batch = sm.batch_fields(
        ids, torch.from_numpy(counts) if as_tensor else counts, config, bounds=True
    )
    whole = np.where(np.arange(9) < valid, array.astype(np.int64), pad)
    tokens: Any = torch.from_numpy(whole[:, :-1]) if as_tensor else whole[:, :-1]
    labels: Any = torch.from_numpy(whole[:, 1:]) if as_tensor else whole[:, 1:]
    assert torch.equal(batch["loss_mask"], sm.loss_mask(tokens, labels, pad_id=pad, eod_id=EOD))
    assert torch.equal(batch["position_ids"], sm.position_ids(tokens, eod_id=EOD))
    assert torch.equal(batch["cu_seqlens"], sm.cu_seqlens(tokens, EOD))
    assert torch.equal(batch["attention_mask"], sm.attention_mask(tokens, eod_id=EOD))
    assert all(field.is_contiguous() for field in batch.values())


@given(
    rows=st.lists(st.lists(st.integers(5, 8), min_size=9, max_size=9), min_size=1, max_size=4),
    reset=st.booleans(),
)
def test_attention_masks_forbid_later_tokens_and_other_documents(
    rows: list[list[int]], reset: bool
) -> None:
    tokens = np.array(rows)
    document = np.cumsum(np.pad(tokens == EOD, ((0, 0), (1, 0)))[:, :-1], axis=1)
    forbidden = np.triu(np.ones((9, 9), bool), 1)[None].repeat(len(rows), 0)
    if reset:
        forbidden |= document[:, :, None] != document[:, None, :]
    mask = sm.attention_mask(tokens, eod_id=EOD if reset else None)
    assert mask.dtype == torch.bool
    assert mask.shape == (len(rows), 1, 9, 9)
    np.testing.assert_array_equal(mask[:, 0], forbidden)


def test_without_an_end_of_document_everything_is_plain() -> None:
    tokens = torch.tensor([[5, EOD, -1, 5]])
    assert sm.position_ids(tokens).tolist() == [[0, 1, 2, 3]]
    assert sm.loss_mask(tokens, tokens).tolist() == [[1, 1, 0, 1]], "-1 stands for padding"
    assert sm.loss_mask(tokens, tokens, pad_id=5, eod_id=EOD).tolist() == [[0, 0, 1, 0]]
    batch = sm.batch_fields(np.array([[5, EOD, 1, 5]]), None, sm.FieldsConfig(sequence_length=3))
    assert {name: field.tolist() for name, field in batch.items()} == {
        "tokens": [[5, EOD, 1]], "labels": [[EOD, 1, 5]], "loss_mask": [[1, 1, 1]], "position_ids": [[0, 1, 2]],
    }  # fmt: skip


def test_ids_without_the_token_after_them_have_no_last_label() -> None:
    batch = sm.batch_fields(
        np.array([[5, 6, 1]], np.uint8), None, sm.FieldsConfig(sequence_length=3)
    )
    assert batch["labels"].tolist() == [[6, 1, 0]]
    assert batch["loss_mask"].tolist() == [[1, 1, 0]]


def test_what_is_returned_is_no_view_of_what_was_given() -> None:
    ids = np.arange(10, dtype=np.int64).reshape(2, 5)
    batch = sm.batch_fields(ids, None, sm.FieldsConfig(sequence_length=4))
    for field in batch.values():
        field.zero_()
    assert ids.reshape(-1).tolist() == list(range(10))


CONFIG = sm.FieldsConfig(sequence_length=4, vocab_size=100)


@pytest.mark.parametrize(
    ("ids", "valid", "message"),
    [
        (
            np.zeros((2, 5)),
            None,
            r"ids are float64 \[2, 5\]; they must be integers of the shape \[samples, 5\]",
        ),
        (
            np.zeros((2, 7), int),
            None,
            r"ids are int64 \[2, 7\]; .* or \[samples, 4\] where the last token has no label",
        ),
        (np.zeros(5, int), None, r"ids are int64 \[5\]; they must be integers"),
        (torch.zeros(2, 5, dtype=torch.bool), None, r"ids are bool \[2, 5\]"),
        (
            np.zeros((2, 5), int),
            [5, 5, 5],
            r"valid is int64 \[3\]; it must be integers of the shape \[2\]",
        ),
        (np.zeros((2, 5), int), [1.0, 5.0], r"valid is float64 \[2\]"),
        (np.zeros((2, 5), int), [6, 5], "valid counts are between 5 and 6; rows have 0 to 5 ids"),
        (np.zeros((2, 5), int), [-1, 5], "valid counts are between -1 and 5"),
        (
            torch.zeros(2, 5, dtype=torch.int64, device="meta"),
            [5, 5, 5],
            r"valid is .* \[3\]; it must be integers",
        ),
    ],
)
def test_ids_of_another_shape_or_kind_are_refused(ids: Any, valid: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sm.batch_fields(ids, np.array(valid) if valid is not None else None, CONFIG)


def test_ids_do_not_tell_their_dataset() -> None:
    config = sm.FieldsConfig(sequence_length=4, fields=[..., "dataset_id"])
    with pytest.raises(ConfigError, match="leave dataset_id out of fields"):
        sm.batch_fields(np.zeros((1, 5), int), None, config)


def test_pieces_refuse_other_shapes_and_kinds() -> None:
    with pytest.raises(
        ConfigError,
        match=r"tokens are float64 \[2, 3\]; they must be integers of the shape \[samples, S\]",
    ):
        sm.position_ids(np.zeros((2, 3)))
    with pytest.raises(ConfigError, match=r"labels are int64 \[3\]"):
        sm.loss_mask(np.zeros((1, 3), int), np.zeros(3, int))
    with pytest.raises(
        ConfigError,
        match=r"tokens are \[1, 3\], labels \[1, 4\]; a loss mask needs one label a token",
    ):
        sm.loss_mask(np.zeros((1, 3), int), np.zeros((1, 4), int))
    with pytest.raises(ConfigError, match="tokens are on meta; move them to the CPU"):
        sm.cu_seqlens(torch.zeros(2, 3, dtype=torch.int64, device="meta"), EOD)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("width", "valid"), [(5, 3), (4, 4)], ids=["padding", "no last label"])
def test_labels_without_loss_need_a_mask_on_every_device(
    device: str, width: int, valid: int
) -> None:
    config = sm.FieldsConfig(sequence_length=4, fields=["tokens", "labels"])
    ids = torch.ones(1, width, dtype=torch.int64, device=device)
    with pytest.raises(ConfigError, match="add 'loss_mask' to fields"):
        sm.batch_fields(ids, np.array([valid]), config)


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.uint8])
def test_ids_outside_of_the_vocabulary_are_refused(dtype: Any) -> None:
    with pytest.raises(FormatError, match="token id 100 is outside of the vocabulary of 100"):
        sm.batch_fields(np.array([[1, 2, 3, 4, 100]], dtype), None, CONFIG)
    with pytest.raises(FormatError, match="token id 9223372036854775808 is no int64"):
        sm.batch_fields(
            np.array([[1, 2, 3, 4, 2**63]], np.uint64), None, sm.FieldsConfig(sequence_length=4)
        )


def test_no_samples_are_fields_without_samples() -> None:
    config = sm.FieldsConfig(
        sequence_length=4, eod_id=1, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True,
        fields=[..., "attention_mask"],
    )  # fmt: skip
    none = sm.batch_fields(np.zeros((0, 5), np.int64), None, config, bounds=True)
    there = device_fields(
        torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), config
    )
    assert {name: field.shape for name, field in none.items()} == {
        name: field.shape for name, field in there.items()
    }
    assert len(none["tokens"]) == len(none["cu_seqlens"]) == 0


def test_settings_of_fields_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_length is 0"):
        sm.FieldsConfig(sequence_length=0)
    with pytest.raises(ConfigError, match="need eod_id"):
        sm.FieldsConfig(sequence_length=4, reset_position_ids=True)


def test_the_config_of_fields_needs_no_torch() -> None:
    code = "import sys, streammega; streammega.FieldsConfig(sequence_length=4); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unsigned_ids_of_a_device_are_checked_without_a_pad_id() -> None:
    config = sm.FieldsConfig(sequence_length=2, vocab_size=10)
    ids = torch.tensor([[1, 2, 9]]).to(torch.uint16)
    short = torch.tensor([2])
    assert inputs_on_device(ids, short, config, config.field_names).config is config
    with pytest.raises(FormatError, match="token id 11 is outside"):
        inputs_on_device(
            torch.tensor([[3, 4, 11]]).to(torch.uint16), None, config, config.field_names
        )
