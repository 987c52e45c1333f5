"""Megatron's provider: micro-batches of parsed arguments against megatron-core's own datasets and the
order in which its sampler deals them to ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.config import parse_blend
from streammega.errors import ConfigError, StateError
from streammega.integrations.megatron import (
    FullValidation,
    MegatronBatches,
    Place,
    _place,
    datasets_of,
    datasets_provider,
)
from streammega.integrations.megatron_arguments import pad_id, read_blends
from tests.support import oracle
from tests.support.builders import write_dataset

ARGUMENT_SETS = 300
"""In make soak; make test runs the first few of each part."""
PARTS = 6
FEW = 5
EOD = 5
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
IN_MEGATRONS_FORM = ("attention_mask", "cu_seqlens", "max_seqlen")
HAS_MASKING = "inter_document_masking" in oracle.config_fields()
"""From core 0.19 on."""


def arguments(**given: Any) -> SimpleNamespace:
    """Parsed arguments, as Megatron's own parser leaves them."""
    defaults: dict[str, Any] = {
        "data_path": None,
        "data_args_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "per_split_data_args_path": None,
        "split": "8,1,1",
        "seed": 1234,
        "seq_length": 16,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "eval_micro_batch_size": None,
        "eval_global_batch_size": None,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skip_train": False,
        "full_validation": False,
        "multiple_validation_sets": False,
        "phase_transition_iterations": None,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask_in_dataloader": False,
        "dataloader_inter_document_masking": False,
        "dataloader_type": "external",
        "data_cache_path": None,
        "mid_level_dataset_surplus": 0.005,
    }
    return SimpleNamespace(**(defaults | given))


def tokenizer(pad: int = -1, **others: Any) -> SimpleNamespace:
    return SimpleNamespace(eod=EOD, pad=pad, **others)


def write_datasets(folder: Path, rng: np.random.Generator, count: int) -> list[str]:
    prefixes = []
    for number in range(count):
        prefix = str(folder / f"data{number}")
        write_dataset(
            prefix,
            [
                rng.integers(0, 50, length)
                for length in rng.integers(0, 60, int(rng.integers(250, 400)))
            ],
        )
        prefixes.append(prefix)
    return prefixes


def random_arguments(rng: np.random.Generator, folder: Path) -> tuple[SimpleNamespace, int]:
    """Arguments of a run, and its data-parallel size."""
    dp_size = int(rng.choice([1, 2, 3, 4]))
    micro = int(rng.integers(1, 4))
    eval_micro = int(rng.integers(1, 4))
    prefixes = write_datasets(folder, rng, int(rng.integers(1, 4)))

    def blend(weighted: bool) -> list[str]:
        if not weighted:
            return list(prefixes)
        weights = rng.integers(1, 20, len(prefixes))
        return [str(word) for pair in zip(weights, prefixes, strict=True) for word in pair]

    given: dict[str, Any] = {
        "seq_length": int(rng.integers(1, 40)),
        "seed": int(rng.integers(0, 2**31)),
        "micro_batch_size": micro,
        "global_batch_size": micro * dp_size * int(rng.integers(1, 4)),
        "eval_micro_batch_size": eval_micro,
        "eval_global_batch_size": eval_micro * dp_size * int(rng.integers(1, 3)),
        "reset_position_ids": bool(rng.integers(0, 2)),
        "reset_attention_mask": bool(rng.integers(0, 2)),
        "eod_mask_loss": bool(rng.integers(0, 2)),
        "create_attention_mask_in_dataloader": bool(rng.random() < 0.3),
        "mid_level_dataset_surplus": float(rng.choice([0.005, 0.0, 0.1])),
        "data_cache_path": str(folder / "ours"),
    }
    full = bool(rng.random() < 0.3)
    weighted = bool(rng.integers(0, 2))
    if rng.random() < 0.5:
        given["data_path"] = blend(weighted and not full)
        given["split"] = str(rng.choice(["8,1,1", "60, 25, 15", "80, 15, 5"]))
    else:
        given["train_data_path"] = blend(weighted)
        given["valid_data_path"] = blend(bool(rng.integers(0, 2)) and not full)
        given["test_data_path"] = blend(False) if rng.random() < 0.5 else None
        given["multiple_validation_sets"] = full and bool(rng.integers(0, 2))
    given["full_validation"] = full
    if HAS_MASKING and rng.random() < 0.4:
        given["dataloader_inter_document_masking"] = True
        # Megatron fails at a sample of more sequences, empty ones among them, than it has tokens
        given["seq_length"] += 8
    return arguments(**given), dp_size


def theirs_of(args: SimpleNamespace, sizes: Any, tokens: Any, kind: Any = None) -> Any:
    """What Megatron's builder makes of its own dataset class, or another."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import get_blend_from_list

    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    named: dict[str, Any] = {"blend": None, "split": None}
    if HAS_MASKING:
        named["inter_document_masking"] = args.dataloader_inter_document_masking
    if args.data_path is not None:
        named |= {"blend": get_blend_from_list(args.data_path), "split": args.split}
    else:
        named["blend_per_split"] = [get_blend_from_list(one) for one in per_split]
    config = oracle.gpt_config(
        None,
        args.seq_length,
        args.seed,
        eod=tokens.eod,
        pad=tokens.pad,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        **named,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = BlendedMegatronDatasetBuilder(
            kind or GPTDataset, sizes, lambda: True, config
        ).build()
    for whole in built:
        for one in as_list(whole):
            for dataset in getattr(one, "datasets", [one]):
                # Its cached loss mask is that of the first sample it was asked for, with the holes
                # that padding made there; without the cache each sample has its own.
                if dataset is not None:
                    dataset.masks_and_position_ids_are_cacheable = False
    return built


def check_batch(batch: Any, theirs: Any, ids: list[int]) -> None:
    """A micro-batch is the samples of these numbers of Megatron's dataset."""
    samples = [theirs[number] for number in ids]
    for name in (*FIELDS, *IN_MEGATRONS_FORM):
        if name in samples[0]:
            expected = torch.stack([sample[name] for sample in samples])
            assert torch.equal(batch[name], expected), name
            assert batch[name].dtype == expected.dtype
        else:
            assert name not in batch


def sampler_ids(total: int, consumed: int, micro: int, dp_rank: int, dp_size: int) -> list[Any]:
    """The micro-batches of a rank by Megatron's `single` sampler, from a consumed sample on."""
    step = micro * dp_size
    starts = range(consumed, total - step + 1, step)
    return [list(range(start + dp_rank * micro, start + (dp_rank + 1) * micro)) for start in starts]


@pytest.mark.guarantee("rank-gets-micro", "inter-document-masking")
@pytest.mark.parametrize(
    "numbers",
    [range(part * FEW, (part + 1) * FEW) for part in range(PARTS)]
    + [
        pytest.param(range(part, ARGUMENT_SETS, PARTS), marks=pytest.mark.soak)
        for part in range(PARTS)
    ],
    ids=str,
)
def test_every_rank_gets_megatrons_samples_before_and_after_a_resume(
    numbers: range, tmp_path: Path
) -> None:
    for number in numbers:
        rng = np.random.default_rng(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        args, dp_size = random_arguments(rng, folder)
        steps = int(rng.integers(2, 30))
        valid = (
            None if args.full_validation else int(rng.integers(1, 4)) * args.eval_global_batch_size
        )
        sizes = (steps * args.global_batch_size, valid, args.eval_global_batch_size)
        tokens = tokenizer(pad=int(rng.choice([-1, 0, 7, EOD])))
        theirs = theirs_of(args, sizes, tokens)
        check_ranks(args, tokens, sizes, theirs, dp_size)
        # the same run goes on with other ranks, at the step it has reached
        train_steps = min(steps, len(theirs[0]) // args.global_batch_size)
        args.consumed_train_samples = int(rng.integers(0, train_steps)) * args.global_batch_size
        if theirs[1] is not None and valid is not None:
            done = int(rng.integers(0, 2)) * args.eval_global_batch_size
            args.consumed_valid_samples = done if done < len(theirs[1]) else 0
        micro = args.global_batch_size if rng.random() < 0.5 else 1
        args.micro_batch_size = micro
        args.eval_micro_batch_size = 1
        other_size = args.global_batch_size // micro if micro > 1 else 1
        check_ranks(args, tokens, sizes, theirs, other_size)


def check_ranks(args: Any, tokens: Any, sizes: Any, theirs: Any, dp_size: int) -> None:
    for dp_rank in range(dp_size):
        ours = datasets_of(args, tokens, sizes, place=Place(dp_rank=dp_rank, dp_size=dp_size))
        splits = zip(
            ours,
            theirs,
            (args.micro_batch_size, args.eval_micro_batch_size, args.eval_micro_batch_size),
            (args.consumed_train_samples, args.consumed_valid_samples, 0),
            strict=True,
        )
        for mine, other, micro, consumed in splits:
            if other is None:
                assert mine is None
            elif isinstance(mine, MegatronBatches):
                expected = sampler_ids(len(other), consumed, micro, dp_rank, dp_size)
                check_stream(mine, other, expected, consumed)
                mine.close()
            else:
                assert isinstance(mine, list) == args.multiple_validation_sets
                for one, whole in zip(as_list(mine), as_list(other), strict=True):
                    check_full(one, whole, dp_rank, dp_size)
                    one.close()


def as_list(valid: Any) -> list[Any]:
    """Several validation sets, or the only one, which Megatron makes a list of one later."""
    return valid if isinstance(valid, list) else [valid]


def check_stream(mine: MegatronBatches, theirs: Any, expected: list[Any], consumed: int) -> None:
    """A few micro-batches from where the run is, and the end of the data."""
    for ids in expected[:4]:
        check_batch(next(mine), theirs, ids)
    if len(expected) > 4:
        loader = mine.open()
        loader.seek(consumed + (len(expected) - 1) * loader.dataset.step_samples)
        check_batch(next(mine), theirs, expected[-1])
    with pytest.raises(StopIteration):
        next(mine)


def check_full(mine: FullValidation, theirs: Any, dp_rank: int, dp_size: int) -> None:
    expected = range(dp_rank, len(theirs), dp_size)
    assert len(mine) == len(expected)
    for _ in range(2):  # Megatron goes round and round
        batches = iter(mine)
        for number in expected[:3]:
            check_batch(next(batches), theirs, [number])
        rest = list(batches)
        assert len(rest) == max(0, len(expected) - 3)
        if rest:
            check_batch(rest[-1], theirs, [expected[-1]])


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return write_datasets(tmp_path, np.random.default_rng(0), 3)


ALONE = Place(dp_rank=0, dp_size=1)
SIZES = (80, 16, 8)


def opened(args: Any, place: Place = ALONE, **options: Any) -> Any:
    return datasets_of(args, tokenizer(), SIZES, place=place, **options)


def tokens_of(batches: Any, count: int) -> list[list[int]]:
    """The rows of so many micro-batches."""
    return [row for _ in range(count) for row in next(batches)["tokens"].tolist()]


@pytest.mark.guarantee("resume-needs-megatron")
@pytest.mark.parametrize("order", ["megatron", "stream"])
def test_a_run_goes_on_on_other_ranks_by_megatrons_count_alone(
    prefixes: list[str], tmp_path: Path, order: Any
) -> None:
    args = arguments(data_path=prefixes, split="8,1,1", data_cache_path=str(tmp_path / "idx"))
    train, _, _ = opened(args, order=order)
    whole = tokens_of(train, 80 // 2)
    assert len({tuple(row) for row in whole}) > 70
    args.consumed_train_samples = 24
    halves = []
    for dp_rank in range(2):
        train, _, _ = opened(args, Place(dp_rank=dp_rank, dp_size=2), order=order)
        assert train.consumed_samples == 24
        halves.append(tokens_of(train, 4))
    assert sorted(halves[0] + halves[1]) == sorted(whole[24:40])


@pytest.mark.guarantee("cache-one-folder")
def test_indices_are_kept_in_megatrons_folder_unless_the_storage_names_one(
    prefixes: list[str], tmp_path: Path
) -> None:
    args = arguments(data_path=prefixes, data_cache_path=str(tmp_path / "megatrons"))
    named = StorageConfig(cache_dir=tmp_path / "own")
    for storage, folder in ((None, "megatrons"), (named, "own")):
        opened(args, order="megatron", storage=storage)
        assert list((tmp_path / folder / "order").glob("*.npy"))
        shutil.rmtree(tmp_path / folder)
    assert not (tmp_path / "megatrons").exists()


@pytest.mark.guarantee("resume-needs-megatron")
def test_the_lanes_do_not_depend_on_the_ranks(prefixes: list[str]) -> None:
    args = arguments(data_path=prefixes, global_batch_size=6, micro_batch_size=1)
    for dp_size in (1, 2, 3, 6):
        train, _, _ = opened(args, Place(dp_rank=0, dp_size=dp_size), order="stream")
        assert train.open().dataset.steps.lanes == 516
    train, _, _ = opened(args, order="stream", shuffle_lanes=12)
    assert train.open().dataset.steps.lanes == 12


@pytest.mark.guarantee("resume-needs-megatron")
def test_steps_of_any_size_go_on_where_the_last_one_ended(prefixes: list[str]) -> None:
    """A ramp, or --step-batch-size-schedule: Megatron takes as many micro-batches as it likes."""
    args = arguments(data_path=prefixes)
    train, _, _ = opened(args)
    tokens_of(train, 3 + 5)
    args.consumed_train_samples = train.consumed_samples
    assert args.consumed_train_samples == 16
    again, _, _ = opened(args)
    assert tokens_of(again, 1) == tokens_of(train, 1)


def test_valid_goes_on_and_test_begins_anew(prefixes: list[str]) -> None:
    args = arguments(data_path=prefixes, split="60,20,20", consumed_valid_samples=8)
    _, valid, test = opened(args)
    assert valid.consumed_samples == 8
    assert test.consumed_samples == 0
    args.skip_train = True
    train, valid, _ = opened(args)
    assert train is None
    assert valid.consumed_samples == 0


@pytest.mark.guarantee("full-validation-sees")
def test_evaluation_has_batch_sizes_of_its_own_where_megatron_has_them(
    prefixes: list[str],
) -> None:
    args = arguments(data_path=prefixes, split="60,20,20", eval_micro_batch_size=4)
    train, valid, test = opened(args)
    assert [len(next(one)["tokens"]) for one in (train, valid, test)] == [2, 4, 4]


@pytest.mark.guarantee("resume-needs-megatron")
def test_a_phase_begins_at_its_own_first_sample(prefixes: list[str]) -> None:
    args = arguments(
        data_path=prefixes,
        iteration=7,
        phase_transition_iterations=[3, 5, 9],
        consumed_train_samples=56,
    )
    train, _, _ = opened(args)
    assert train.consumed_samples == (7 - 5) * args.global_batch_size
    with pytest.raises(ConfigError, match="--phase-transition-iterations"):
        opened(args, order="stream")


def test_splits_without_a_share_or_a_size_are_none(prefixes: list[str]) -> None:
    args = arguments(train_data_path=prefixes)
    train, valid, test = opened(args)
    assert train is not None
    assert valid is test is None
    args = arguments(data_path=prefixes, split="8,1,1")
    train, valid, test = datasets_of(args, tokenizer(), (80, 0, 0), place=ALONE)
    assert valid is test is None


@pytest.mark.guarantee("ranks-read-open")
def test_ranks_that_do_not_read_open_nothing(tmp_path: Path) -> None:
    """Nor do they fail where the data is not there."""
    args = arguments(data_path=[str(tmp_path / "nowhere")], split="8,1,1")
    idle = Place(dp_rank=0, dp_size=1, reads=False)
    train, valid, test = datasets_of(args, tokenizer(), SIZES, place=idle)
    assert all(one is not None for one in (train, valid, test))
    with pytest.raises(Exception, match="nowhere"):
        opened(args)


def test_a_batch_is_a_dict_of_its_own(prefixes: list[str]) -> None:
    """Megatron writes into what it is given."""
    train, _, _ = opened(arguments(data_path=prefixes))
    first = next(train)
    kept = first["tokens"].clone()
    first["labels"] = None
    second = next(train)
    assert second["labels"] is not None
    assert torch.equal(first["tokens"], kept)


@pytest.mark.parametrize("order", ["megatron", "stream"])
@pytest.mark.parametrize("masked", [False, True])
def test_fields_of_a_provider_are_more_than_those_of_megatrons_arguments(
    order: str, masked: bool, prefixes: list[str]
) -> None:
    args = arguments(data_path=prefixes, create_attention_mask_in_dataloader=masked)
    train, _, _ = opened(args, order=order, fields=[..., "dataset_id"])
    batch = next(train)
    assert {"tokens", "labels", "loss_mask", "position_ids", "dataset_id"} <= set(batch)
    assert ("attention_mask" in batch) == masked


@pytest.mark.guarantee("arguments-served-refused")
@pytest.mark.parametrize(("name", "flag"), [("seed", "--seed"), ("num_samples", "--train-samples")])
def test_a_setting_that_megatron_has_an_argument_for_is_refused_by_its_name(
    name: str, flag: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} .*{flag}"):
        datasets_provider(**{name: 3})  # type: ignore[arg-type]


def test_a_saved_position_is_restored_and_one_of_another_order_refused(
    prefixes: list[str],
) -> None:
    args = arguments(data_path=prefixes)
    train, _, _ = opened(args)
    tokens_of(train, 5)
    state = train.save_state()
    again, _, _ = opened(args)
    again.restore_state(state)
    assert tokens_of(again, 2) == tokens_of(train, 2)
    args.seed = 9
    other, _, _ = opened(args)
    with pytest.raises(StateError, match="seed"):
        other.restore_state(state)


def test_a_closed_one_goes_on(prefixes: list[str]) -> None:
    args = arguments(data_path=prefixes)
    train, _, _ = opened(args)
    other, _, _ = opened(args)
    tokens_of(train, 3)
    tokens_of(other, 3)
    train.close()
    assert train.consumed_samples == 6
    assert tokens_of(train, 2) == tokens_of(other, 2)


def whole_valid(args: Any, place: Place) -> Any:
    """What --full-validation goes through on a rank, in the stream order."""
    return datasets_of(args, tokenizer(), (80, None, 8), place=place, order="stream")[1]


@pytest.mark.guarantee("full-validation-sees")
def test_everything_is_seen_once_by_full_validation_in_the_stream_order_too(
    prefixes: list[str],
) -> None:
    args = arguments(
        train_data_path=prefixes[:1],
        valid_data_path=prefixes[1:],
        full_validation=True,
        global_batch_size=12,
        eval_micro_batch_size=2,
    )
    seen = []
    for dp_rank in range(3):
        valid = whole_valid(args, Place(dp_rank=dp_rank, dp_size=3))
        rows = [tuple(batch["tokens"][0].tolist()) for batch in valid]
        assert len(rows) == len(valid)
        seen += rows
    valid = whole_valid(args, ALONE)
    assert sorted(seen) == [
        tuple(row) for row in sorted(batch["tokens"][0].tolist() for batch in valid)
    ]
    assert len(set(seen)) == len(seen) > 100


@pytest.mark.guarantee("full-validation-sees")
@pytest.mark.parametrize("settings", [{}, {"reset_attention_mask": True, "eod_mask_loss": True}])
def test_the_last_round_of_full_validation_has_the_fields_of_the_others(
    prefixes: list[str], settings: dict[str, Any]
) -> None:
    args = arguments(data_path=prefixes, split="0,100,0", full_validation=True, **settings)
    sizes = set()
    for dp_size in (2, 3, 5):
        for dp_rank in range(dp_size):
            valid = whole_valid(args, Place(dp_rank=dp_rank, dp_size=dp_size))
            first, *_, last = valid
            assert {name: (field.dtype, field.shape) for name, field in first.items()} == {
                name: (field.dtype, field.shape) for name, field in last.items()
            }
            sizes.add(len(valid) * dp_size)
    assert len(sizes) > 2, "some ranks have a sample more"


@pytest.mark.guarantee("full-validation-sees")
def test_full_validation_of_fewer_samples_than_ranks(tmp_path: Path) -> None:
    """Megatron's sampler leaves out the ranks for which there is none."""
    prefix = str(tmp_path / "few")
    write_dataset(prefix, [np.arange(3 * 16 + 1)])
    args = arguments(
        data_path=None, valid_data_path=[prefix], full_validation=True, global_batch_size=20
    )
    rows = []
    for dp_rank in range(5):
        valid = whole_valid(args, Place(dp_rank=dp_rank, dp_size=5))
        assert len(valid) == (1 if dp_rank < 3 else 0)
        rows += [batch["tokens"][0, 0].item() for batch in valid]
    assert sorted(rows) == [0, 16, 32]


def test_a_list_of_data_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"--data-args-path: .* is no text of UTF-8"):
        opened(arguments(data_args_path=str(tmp_path / "list.txt")))


@pytest.mark.guarantee("blends-padding-mean")
def test_data_is_named_as_on_megatrons_command_line(prefixes: list[str], tmp_path: Path) -> None:
    listed = tmp_path / "blend.txt"
    listed.write_text(f"\ufeff30 {prefixes[0]}\n70 {prefixes[1]}\n", encoding="utf-8")
    by_split = tmp_path / "blend.json"
    by_split.write_text(
        json.dumps({"train": f"1 {prefixes[0]}", "valid": [prefixes[1]], "test": None})
    )
    one = tokens_of(opened(arguments(data_args_path=str(listed)))[0], 2)
    same = arguments(data_path=["30", prefixes[0], "70", prefixes[1]])
    assert one == tokens_of(opened(same)[0], 2)
    train, valid, test = opened(arguments(per_split_data_args_path=str(by_split)))
    apart = arguments(train_data_path=["1", prefixes[0]], valid_data_path=[prefixes[1]])
    expected = opened(apart)
    assert tokens_of(train, 2) == tokens_of(expected[0], 2)
    assert tokens_of(valid, 2) == tokens_of(expected[1], 2)
    assert test is None


@pytest.mark.guarantee("blends-padding-mean")
@pytest.mark.parametrize(
    "words",
    [
        ["30", "a", "b"],
        ["a", "b"],
        ["30", "a", "70", "b"],
        ["a"],
        [" a ", "b", "c"],
        ["0.5", "a"],
        ["1e3", "a", "2", "3"],
    ],
)
def test_blends_mean_what_they_mean_to_megatron(words: list[str]) -> None:
    from megatron.core.datasets.utils import get_blend_from_list

    prefixes, weights = get_blend_from_list(words)
    blends = read_blends(arguments(data_path=words), StorageConfig())
    assert parse_blend(blends["blend"]) == (
        tuple(prefixes),
        None if weights is None else tuple(weights),
    )


def _is_number(word: str) -> bool:
    with contextlib.suppress(ValueError):
        float(word)
        return True
    return False


@pytest.mark.guarantee("blends-padding-mean")
@given(
    words=st.lists(
        st.sampled_from(["a", "b", "30", "0.5", "1e3", "0", "-1", "nan", "inf", "7x"]), max_size=6
    )
)
def test_any_list_of_words_is_to_us_what_it_is_to_megatron(words: list[str]) -> None:
    """From the command line, and as a blend of a DataConfig.

    But for a list that gives weights to some of its prefixes: Megatron refuses some of these, and
    takes the weights of others for prefixes.
    """
    from megatron.core.datasets.utils import get_blend_from_list

    expected: Any = None
    some_weights = {_is_number(word) for word in words[::2]} == {True, False} and not len(words) % 2
    with contextlib.suppress(AssertionError, ValueError):
        prefixes, weights = get_blend_from_list(words)
        # it takes other weights here, and fails when it blends
        are_weights = weights is None or all(0 < weight < math.inf for weight in weights)
        if are_weights and not some_weights:
            expected = (tuple(prefixes), None if weights is None else tuple(weights))
    for read in (
        lambda: read_blends(arguments(data_path=words), StorageConfig())["blend"],
        lambda: words,
    ):
        if expected is None:
            with pytest.raises(ConfigError):
                parse_blend(read())
        else:
            assert parse_blend(read()) == expected


class Unnamed:
    """A tokenizer whose ids are asked by name, some of which it does not have."""

    eod = EOD

    def __init__(self, pad: Any, special: Any = None) -> None:
        self._pad = pad
        if special is not None:
            self.special_tokens_dict = special

    @property
    def pad(self) -> int:
        if self._pad is None:
            raise NotImplementedError
        return int(self._pad)

    @property
    def eos(self) -> int:
        raise NotImplementedError


@pytest.mark.guarantee("blends-padding-mean")
@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize(
    "tokens",
    [
        Unnamed(None),
        Unnamed(-1),
        Unnamed(7),
        Unnamed(EOD),
        Unnamed(EOD, {"pad_token": EOD, "bos_token": 3}),
        Unnamed(3, {"pad_token": 3, "bos_token": 3}),
        Unnamed(3, {"pad_token": 3}),
    ],
    ids=lambda tokens: f"{tokens._pad}-{getattr(tokens, 'special_tokens_dict', None)}",
)
@pytest.mark.filterwarnings("ignore:The pad token id", "ignore:Could not determine rank")
def test_padding_is_what_megatron_takes_for_it(
    tokens: Any, allowed: bool, prefixes: list[str]
) -> None:
    config = oracle.gpt_config(None, 8, 1, allow_ambiguous_pad_tokens=allowed)
    config.tokenizer = tokens
    tokens.unique_identifiers = {}
    tokens.vocab_size = 1000
    ids = np.arange(5)
    theirs = oracle.gpt_dataset(prefixes[0], ids, 4, "train", config)._pad_token_id
    ours = pad_id(tokens, allowed=allowed)
    assert (-1 if ours is None else ours) == theirs


@pytest.mark.guarantee("arguments-served-refused")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dataloader_type": "single"}, "--dataloader-type external"),
        ({"mock_data": True}, "mock"),
        ({"sft": True}, "--sft"),
        ({"fim_data": True}, "--fim-data"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        ({"data_path": None}, "no data is named"),
        ({"train_data_path": ["a"]}, "give one of them"),
        ({"data_args_path": "list.txt"}, "both given"),
        ({"data_path": None, "data_args_path": "/nowhere/list.txt"}, "there is no /nowhere"),
        ({"data_path": ["0.3", "a", "b", "c"]}, "the weight of c is .b., which is no number"),
        ({"multiple_validation_sets": True}, "--full-validation"),
        ({"multiple_validation_sets": True, "full_validation": True}, "--valid-data-path"),
    ],
)
def test_arguments_that_are_not_served_are_refused_with_what_to_do(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(arguments(**{"data_path": ["a"], "split": "8,1,1"} | given))


@pytest.mark.guarantee("arguments-served-refused")
def test_full_validation_of_an_older_megatron_is_refused() -> None:
    args = arguments(data_path=["a"], full_validation=True)
    del args.eval_micro_batch_size
    with pytest.raises(ConfigError, match=r"0\.18"):
        opened(args)


def test_a_list_of_splits_that_is_no_json_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "blend.json"
    wrong.write_text('{"train": []}')
    with pytest.raises(ConfigError, match=f"--per-split-data-args-path {wrong} must be JSON"):
        opened(arguments(per_split_data_args_path=str(wrong)))


@pytest.mark.guarantee("ranks-read-open")
@pytest.mark.parametrize(
    ("tp_rank", "pp_rank", "vp_stage", "reads"),
    [
        (0, 0, 0, True),
        (0, 0, 1, False),
        (0, 1, 0, False),
        (0, 1, 1, True),
        (1, 0, 0, False),
        (1, 1, 1, False),
    ],
)
def test_the_first_and_last_chunk_of_a_virtual_pipeline_read(
    monkeypatch: pytest.MonkeyPatch, tp_rank: int, pp_rank: int, vp_stage: int, reads: bool
) -> None:
    """By Megatron's own stages, two ranks of two chunks each."""
    mpu = oracle.parallel_state
    monkeypatch.setattr(mpu, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 2)
    monkeypatch.setattr(mpu, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 2)
    monkeypatch.setattr(mpu, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", pp_rank)
    monkeypatch.setattr(mpu, "_MPU_TENSOR_MODEL_PARALLEL_RANK", tp_rank)
    monkeypatch.setattr(mpu, "get_data_parallel_rank", lambda: 1)
    monkeypatch.setattr(mpu, "get_data_parallel_world_size", lambda: 4)
    assert _place(vp_stage, every_stage=False) == Place(dp_rank=1, dp_size=4, reads=reads)
    # bounds of documents are read on every stage
    assert _place(vp_stage, every_stage=True).reads == (tp_rank == 0)
