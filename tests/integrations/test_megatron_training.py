"""Megatron's own training code with our provider: its data iterators, its replay of micro-batches.

`megatron.training` comes with megatron-core 0.17 and newer, for Python 3.12 and newer.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from streammega.integrations.megatron import datasets_provider, train_valid_test_datasets_provider
from tests.integrations.test_megatron_provider import arguments, tokenizer, write_datasets
from tests.support.gang import Gang
from tests.support.megatron_programs import without_cuda

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    training = pytest.importorskip(
        "megatron.training.training", reason="needs megatron-core 0.17 or newer"
    )


def iterators(args: Any, provider: Any) -> Any:
    """Megatron's train, valid and test iterators, its flags kept on the CPU."""
    from megatron.training import global_vars

    global_vars._GLOBAL_ARGS = args
    global_vars._GLOBAL_TOKENIZER = tokenizer()
    make_tensor = torch.tensor

    def on_cpu(*values: Any, **options: Any) -> torch.Tensor:
        return make_tensor(*values, **(options | {"device": "cpu"}))

    torch.tensor = on_cpu
    try:
        return training.build_train_valid_test_data_iterators(provider)
    finally:
        torch.tensor = make_tensor


def run_arguments(prefixes: list[str], **given: Any) -> Any:
    defaults: dict[str, Any] = {
        "data_path": prefixes,
        "train_iters": 10,
        "train_samples": None,
        "eval_interval": 5,
        "eval_iters": 1,
        "start_eval_at_iter": None,
        "eval_micro_batch_size": 2,
        "eval_global_batch_size": 8,
        "perform_rl_step": False,
    }
    return arguments(**(defaults | given))


def megatron_rank(rank: int, folder: str, prefixes: list[str], given: Any, order: Any) -> Any:
    """What Megatron's iterators give on this rank: rows of train, valid and test."""
    from megatron.core import parallel_state

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        args = run_arguments(prefixes, data_cache_path=folder, **given)
        train, valid, test = iterators(args, datasets_provider(order=order))
        rows: list[Any] = []
        for iterator, count in ((train, 4), (valid, 2), (test, 1)):
            batches = [next(iterator) for _ in range(count)]
            rows.append([row for batch in batches for row in batch["tokens"].tolist()])
        return rows, args.eval_iters, (args.do_train, args.do_valid, args.do_test)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return write_datasets(tmp_path, np.random.default_rng(0), 2)


@pytest.mark.guarantee("megatron-own-iterators")
@pytest.mark.parametrize("order", ["megatron", "stream"])
def test_megatrons_iterators_go_on_on_other_ranks(
    gang: Gang, prefixes: list[str], tmp_path: Path, order: str
) -> None:
    folder = str(tmp_path / "idx")
    ((whole, _, flags),) = gang.run(1, megatron_rank, folder, prefixes, {}, order)
    assert flags == (1, 1, 1)
    resumed = {"consumed_train_samples": 4}
    answers = gang.run(2, megatron_rank, folder, prefixes, resumed, order)
    next_step = [row for rows, _, _ in answers for row in rows[0][:2]]
    assert sorted(next_step) == sorted(whole[0][4:8])


@pytest.mark.guarantee("megatron-own-iterators")
def test_full_validation_runs_as_long_as_its_longest_rank(
    gang: Gang, prefixes: list[str], tmp_path: Path
) -> None:
    given = {"full_validation": True}
    answers = gang.run(2, megatron_rank, str(tmp_path / "idx"), prefixes, given, "megatron")
    assert len({eval_iters for _, eval_iters, _ in answers}) == 1


def fields_of_a_tensor_rank(
    rank: int, folder: str, prefixes: list[str], given: dict[str, Any], order: Any
) -> dict[str, Any]:
    """What the first part of Megatron's `get_batch` leaves on this of two tensor-parallel ranks: one
    takes the batch from the iterator, and sends it.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.utils import get_batch_on_this_tp_rank

    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    try:
        args = run_arguments(prefixes, data_cache_path=folder, **given)
        train, _, _ = iterators(args, datasets_provider(order=order))
        with without_cuda():
            batch = get_batch_on_this_tp_rank(
                {"attention_mask": None} | next(train) if rank == 0 else {},
                has_cu_seqlens=args.dataloader_inter_document_masking,
                is_hybrid_cp=False,
                create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
                broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
                broadcast_group=mpu.get_tensor_model_parallel_group(),
                cp_size=1,
                tp_rank=mpu.get_tensor_model_parallel_rank(),
                micro_batch_size=args.micro_batch_size,
                seq_length=args.seq_length,
                mtp_on_this_rank=False,
            )
        return {
            name: value.tolist() for name, value in batch.items() if isinstance(value, torch.Tensor)
        }
    finally:
        mpu.destroy_model_parallel()


@pytest.mark.guarantee("megatron-own-iterators")
@pytest.mark.parametrize(
    ("order", "given"),
    [
        ("megatron", {}),
        ("megatron", {"dataloader_inter_document_masking": True}),
        ("stream", {}),
        ("stream", {"create_attention_mask_in_dataloader": True, "reset_attention_mask": True}),
    ],
    ids=["megatron", "megatron, documents apart", "stream", "stream, attention mask"],
)
def test_megatrons_get_batch_gives_every_tensor_rank_the_fields(
    gang: Gang, prefixes: list[str], tmp_path: Path, order: str, given: dict[str, Any]
) -> None:
    folder = str(tmp_path / "idx")
    ((whole, _, _),) = gang.run(1, megatron_rank, folder, prefixes, given, order)
    first, second = gang.run(2, fields_of_a_tensor_rank, folder, prefixes, given, order)
    assert first == second
    assert {"tokens", "labels", "loss_mask", "position_ids"} <= set(first)
    assert ("attention_mask" in first) == bool(given.get("create_attention_mask_in_dataloader"))
    assert ("cu_seqlens" in first) == bool(given.get("dataloader_inter_document_masking"))
    assert first["tokens"] == whole[0][:2]
    for tokens, labels in zip(first["tokens"], first["labels"], strict=True):
        assert labels[:-1] == tokens[1:]


def test_the_provider_takes_the_chunk_of_a_virtual_pipeline() -> None:
    import inspect

    assert "vp_stage" in inspect.signature(train_valid_test_datasets_provider).parameters
    assert train_valid_test_datasets_provider.is_distributed  # type: ignore[attr-defined]
