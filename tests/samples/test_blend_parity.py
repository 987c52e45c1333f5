"""Blends against megatron-core's own builder, bit for bit, over random configurations."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import (
    BlendedDataset,
    DataConfig,
    IndexedDataset,
    StorageConfig,
    StreamLoader,
    build_datasets,
    locate,
)
from streammega.config import parse_blend
from streammega.errors import ConfigError
from streammega.kernels.blending import blend_exhaustive, blend_weighted
from streammega.order.megatron import normalized
from tests.support import oracle
from tests.support.builders import write_dataset

PAIRS = 24
KINDS = ("random", "equal", "integers", "wide", "near", "tiny")


def random_weights(rng: np.random.Generator, count: int) -> np.ndarray:
    kind = KINDS[rng.integers(0, len(KINDS))]
    return {
        "random": rng.random(count) + 1e-9,
        "equal": np.ones(count),
        "integers": rng.integers(1, 4, count) * 1.0,
        "wide": np.exp(4 * rng.normal(size=count)),
        "near": 1 + 1e-3 * rng.random(count),
        "tiny": np.where(rng.random(count) < 0.2, 1e-6, 0.9),
    }[kind]


@pytest.mark.guarantee("indices-blends-tokens")
@pytest.mark.parametrize("block", range(4))
def test_the_greedy_choice_is_megatrons(block: int) -> None:
    """600 weighted blends of up to 200 datasets: dtypes and every entry."""
    from megatron.core.datasets import helpers

    rng = np.random.default_rng(block)
    for _ in range(150):
        count = int(rng.integers(1, 201))
        size = int(rng.integers(1, 3000))
        weights = np.array(normalized(random_weights(rng, count).tolist()))
        dataset = np.zeros(size, np.int16)
        sample = np.zeros(size, np.int64)
        helpers.build_blending_indices(dataset, sample, weights.tolist(), count, size, False)
        ours: tuple[np.ndarray, np.ndarray] = blend_weighted(weights, size)
        wanted: tuple[np.ndarray, np.ndarray] = (dataset, sample)
        for theirs, got in zip(wanted, ours, strict=True):
            assert theirs.dtype == got.dtype
            np.testing.assert_array_equal(theirs, got)


@pytest.mark.guarantee("indices-blends-tokens")
@pytest.mark.parametrize("block", range(2))
def test_the_exhaustive_choice_is_megatrons(block: int) -> None:
    from megatron.core.datasets import helpers

    rng = np.random.default_rng(100 + block)
    for _ in range(150):
        sizes = rng.integers(1, int(rng.integers(2, 60)), int(rng.integers(1, 201)))
        dataset = np.zeros(sizes.sum(), np.int16)
        sample = np.zeros(sizes.sum(), np.int64)
        helpers.build_exhaustive_blending_indices(dataset, sample, sizes, len(sizes))
        ours = blend_exhaustive(sizes)
        np.testing.assert_array_equal(dataset, ours[0])
        np.testing.assert_array_equal(sample, ours[1])


@pytest.mark.guarantee("guessed-parts-blend")
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("is_right", [True, False])
def test_guessed_parts_are_the_sequential_choice(
    kind: int, threads: int, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the guess of a part's beginning is right or wrong. These blends are so short that it
    is always right, unless it leaves out the choices before.
    """
    from streammega.kernels import blending

    if not is_right:
        monkeypatch.setattr(blending, "_TURNS_BEFORE", 0)
        monkeypatch.setattr(blending, "_SHARE_BEFORE", 1 << 60)
    rng = np.random.default_rng(kind)
    for count in (3, 40, 150):
        weights = np.array(normalized(random_weights(rng, count).tolist()))
        sizes = rng.integers(1, 60, count)
        monkeypatch.setattr(blending, "_WORTH_GUESSING", 1 << 60)
        alone = blend_weighted(weights, 9_000)
        exhausted = blend_exhaustive(sizes)
        monkeypatch.setattr(blending, "_WORTH_GUESSING", 1)
        monkeypatch.setattr(blending, "num_threads", lambda: threads)
        for a, b in zip(
            (*alone, *exhausted),
            (*blend_weighted(weights, 9_000), *blend_exhaustive(sizes)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


def test_a_longer_blend_starts_with_a_shorter_ones_choices() -> None:
    weights = np.array(normalized(np.random.default_rng(1).random(90).tolist()))
    long = blend_weighted(weights, 20_000)
    short = blend_weighted(weights, 7_001)
    np.testing.assert_array_equal(long[0][:7_001], short[0])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(3)
    for number in range(PAIRS):
        write_dataset(
            folder / f"p{number:02}",
            [rng.integers(0, 1000, rng.integers(0, 50)) for _ in range(int(rng.integers(12, 60)))],
            np.uint16 if number % 3 else np.int32,
        )
    return [str(folder / f"p{number:02}") for number in range(PAIRS)]


def random_blend(
    rng: np.random.Generator, pairs: list[str], weighted: bool
) -> tuple[list[str], list[float] | None]:
    count = int(rng.integers(1, 9))
    chosen = [pairs[n] for n in rng.choice(len(pairs), count, replace=False)]
    return chosen, [round(float(w), 6) + 1e-3 for w in rng.random(count)] if weighted else None


def ours_of(blend: tuple[list[str], list[float] | None]) -> Any:
    prefixes, weights = blend
    return prefixes if weights is None else list(zip(prefixes, weights, strict=True))


def theirs_of(sizes: list[int | None], config: Any) -> list[Any]:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
        splits: list[Any] = builder.build()
        return splits


def assert_same(theirs: Any, ours: Any, where: str) -> None:
    assert len(theirs) == len(ours), where
    if hasattr(theirs, "dataset_index"):
        for name in ("dataset_index", "dataset_sample_index"):
            a = getattr(theirs, name)
            b = getattr(ours, name)
            assert a.dtype == b.dtype, where
            np.testing.assert_array_equal(a, b, err_msg=where)
    for k in range(0, len(theirs), max(1, len(theirs) // 7)):
        for part in getattr(theirs, "datasets", [theirs]):
            part.masks_and_position_ids_are_cached = False
        expected = theirs[k]
        got = ours[k]
        assert set(expected) == set(got), where
        for name in expected:
            np.testing.assert_array_equal(
                np.asarray(expected[name]).reshape(got[name].shape),
                got[name].numpy(),
                err_msg=where,
            )


@pytest.mark.guarantee("indices-blends-tokens", "everything-megatron-core")
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.soak) for block in (1, 2, 3))]
)
def test_built_datasets_are_megatrons(block: int, pairs: list[str], tmp_path: Path) -> None:
    """60 configurations a block of blend or blend_per_split, with and without weights, sizes, masks
    and several validation sets.
    """
    compared = 0
    for number in range(60):
        rng = np.random.default_rng(1000 * block + number)
        weighted = bool(rng.integers(0, 2))
        per_split = bool(rng.integers(0, 2))
        several = per_split and rng.random() < 0.4
        sizes: list[int | None] = [int(n) for n in rng.integers(1, 400, 3)]
        if not weighted and rng.random() < 0.4:
            sizes = [None, None, None]
        shared: dict[str, Any] = {
            "eod_mask_loss": bool(rng.integers(0, 2)),
            "reset_position_ids": bool(rng.integers(0, 2)),
        }
        creates_mask = bool(rng.integers(0, 2))
        shared["reset_attention_mask"] = bool(rng.integers(0, 2))
        surplus = float(rng.choice([0.005, 0.05]))
        length = int(rng.integers(4, 20))
        if per_split:
            blends = [random_blend(rng, pairs, weighted) for _ in range(3)]
            sources: dict[str, Any] = {"blend": None, "blend_per_split": blends, "split": None}
            sources |= {"multiple_validation_sets": several}
            own: dict[str, Any] = {
                "blend_per_split": [ours_of(b) for b in blends],
                "multiple_validation_sets": several,
            }
        else:
            blend = random_blend(rng, pairs, weighted)
            split = str(rng.choice(["90,10,0", "70,20,10", "1,0,0"]))
            sources = {"blend": blend, "split": split}
            own = {"blend": ours_of(blend), "split": split}
        where = f"block {block}, case {number}"
        theirs_config = oracle.gpt_config(
            None, length, 77, eod=5, mid_level_dataset_surplus=surplus,
            create_attention_mask=creates_mask, **sources, **shared,
        )  # fmt: skip
        config = DataConfig(
            order="megatron",
            sequence_length=length,
            seed=77,
            eod_id=5,
            mid_level_dataset_surplus=surplus,
            fields=[..., "attention_mask"] if creates_mask else None,
            storage=StorageConfig(cache_dir=tmp_path / "ours"),
            **own,
            **shared,
        )
        try:
            theirs = theirs_of(sizes, theirs_config)
        except (AssertionError, IndexError, ValueError):
            with pytest.raises(ConfigError):
                build_datasets(config, sizes)
            continue
        ours = build_datasets(config, sizes)
        for split_theirs, split_ours in zip(theirs, ours, strict=True):
            assert (split_theirs is None) == (split_ours is None), where
            if isinstance(split_theirs, list):
                assert isinstance(split_ours, list)
                for a, b in zip(split_theirs, split_ours, strict=True):
                    assert_same(a, b, where)
            elif split_theirs is not None:
                assert_same(split_theirs, split_ours, where)
                compared += 1
    assert compared > 60


@pytest.mark.parametrize("weighted", [False, True])
def test_a_blend_in_sequential_order_takes_turns_and_each_dataset_is_in_stored_order(
    pairs: list[str], tmp_path: Path, weighted: bool
) -> None:
    blend: Any = list(zip(pairs[:3], (3, 2, 1), strict=True)) if weighted else pairs[:3]
    config = DataConfig(
        blend=blend,
        sequence_length=8,
        num_samples=(60, 0, 0),
        storage=StorageConfig(cache_dir=tmp_path),
    )
    turns = locate(config, np.arange(60))
    extents = locate(replace(config, order="sequential"), np.arange(60))
    first_rows = extents.row_splits[:-1]
    dataset = extents.dataset[first_rows]
    assert dataset.tolist() == turns.dataset[turns.row_splits[:-1]].tolist()
    assert len(set(dataset[:12].tolist())) > 1
    for number in set(dataset.tolist()):
        starts = extents.start[first_rows][dataset == number]
        assert (np.diff(starts) == 8).all()


def test_padding_of_a_batch_is_sample_zero_without_loss(pairs: list[str], tmp_path: Path) -> None:
    config = DataConfig(
        order="megatron",
        blend=pairs[:3],
        sequence_length=8,
        storage=StorageConfig(cache_dir=tmp_path),
    )
    blended = build_datasets(config, (20, None, None))[0]
    assert isinstance(blended, BlendedDataset)
    for dataset in (blended, blended.datasets[0]):
        padding = dataset[None]
        first = dataset[0]
        assert padding["tokens"].equal(first["tokens"])
        assert not padding["loss_mask"].any()
        assert first["loss_mask"].any()


@pytest.mark.parametrize("blended", [False, True])
def test_padding_of_a_batch_needs_a_mask(pairs: list[str], tmp_path: Path, blended: bool) -> None:
    blend = pairs[: 3 if blended else 1]
    config = DataConfig(
        order="megatron",
        blend=blend,
        sequence_length=8,
        storage=StorageConfig(cache_dir=tmp_path),
        fields=["tokens", "labels"],
    )
    dataset: Any = build_datasets(config, (20, None, None))[0]
    with pytest.raises(ConfigError, match="add 'loss_mask' to fields"):
        dataset[None]
    tokens_alone: Any = build_datasets(replace(config, fields=["tokens"]), (20, None, None))[0]
    assert tokens_alone[None]["tokens"].equal(tokens_alone[0]["tokens"])


def test_a_dataset_that_a_blend_names_twice_is_opened_once(
    pairs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_slowly(prefix: str, *rest: Any, **options: Any) -> IndexedDataset:
        opened.append(prefix)
        time.sleep(0.05)  # as long as the other thread needs to find that it is not open
        return IndexedDataset(prefix, *rest, **options)

    monkeypatch.setattr("streammega.samples.build.IndexedDataset", open_slowly)
    config = DataConfig(
        blend=[(prefix, 0.25) for prefix in (pairs[0], pairs[1]) * 2],
        sequence_length=8,
        num_samples=(40, 0, 0),
        storage=StorageConfig(cache_dir=tmp_path),
    )
    train, _, _ = build_datasets(config)
    assert train is not None
    assert sorted(opened) == sorted(pairs[:2])


def test_what_a_blend_cannot_give_is_refused_by_number(pairs: list[str], tmp_path: Path) -> None:
    config = DataConfig(
        order="megatron",
        blend=pairs[:2],
        sequence_length=8,
        storage=StorageConfig(cache_dir=tmp_path),
    )
    parts = [build_datasets(replace(config, blend=[p]), (None, None, None))[0] for p in pairs[:2]]
    lengths = [len(part) for part in parts]  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=f"takes {sum(lengths) * 2 - 1} samples of dataset 0, which has {lengths[0]}",
    ):
        BlendedDataset(parts, [1e9, 1.0], sum(lengths) * 2)  # type: ignore[arg-type]
    blend = BlendedDataset(parts, lengths, None)  # type: ignore[arg-type]
    assert len(blend) == sum(lengths)
    with pytest.raises(ConfigError, match="blends of blends"):
        BlendedDataset([blend], [1.0], 3)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="needs a number of samples"):
        build_datasets(
            replace(config, blend=[(pairs[0], 0.5), (pairs[1], 0.5)]), (None, None, None)
        )


@pytest.mark.guarantee("everything-megatron-core")
def test_full_validation_takes_everything_once(pairs: list[str], tmp_path: Path) -> None:
    config = DataConfig(
        order="megatron",
        blend=pairs[:3],
        sequence_length=8,
        split="50,50,0",
        full_validation=True,
        storage=StorageConfig(cache_dir=tmp_path),
    )
    valid = build_datasets(config, (10, 5, None))[1]
    assert isinstance(valid, BlendedDataset)
    assert len(valid) == sum(len(part) for part in valid.datasets)
    assert sorted(
        zip(valid.dataset_index.tolist(), valid.dataset_sample_index.tolist(), strict=True)
    ) == [(d, k) for d in range(3) for k in range(len(valid.datasets[d]))]


def test_the_loader_serves_a_blend_with_mixed_token_widths(
    pairs: list[str], tmp_path: Path
) -> None:
    config = DataConfig(
        blend=[(pairs[0], 0.2), (pairs[1], 0.5), (pairs[3], 0.3)],
        sequence_length=8,
        num_samples=(96, 0, 0),
        storage=StorageConfig(cache_dir=tmp_path),
    )
    blended = build_datasets(config)[0]
    assert isinstance(blended, BlendedDataset)
    with StreamLoader(
        config, micro_batch_size=3, global_batch_size=12, dp_rank=1, dp_size=2
    ) as loader:
        for step, batch in enumerate(loader):
            ids = loader.dataset.sample_ids(step * 6)
            assert ids.tolist() == [step * 6 + 3, step * 6 + 4, step * 6 + 5]
            for k, tokens, labels in zip(ids, batch["tokens"], batch["labels"], strict=True):
                assert tokens.equal(blended[int(k)]["tokens"])
                assert labels.equal(blended[int(k)]["labels"])
    assert len(str(loader.state_dict()).encode()) < 1024


@pytest.mark.parametrize(
    ("blend", "expected"),
    [
        ("s3://b/one", (("s3://b/one",), None)),
        ("0.3 a 0.7 b", (("a", "b"), (0.3, 0.7))),
        ("a b c", (("a", "b", "c"), None)),
        ([("a", 1), ("b", 2)], (("a", "b"), (1.0, 2.0))),
        ([["a", 0.5]], (("a",), (0.5,))),
        (["0.5", "a"], (("a",), (0.5,))),
    ],
)
def test_blends_in_all_their_forms(blend: Any, expected: Any) -> None:
    assert parse_blend(blend) == expected


@pytest.mark.parametrize(
    ("blend", "message"),
    [
        ([("a", 0.0)], "positive numbers"),
        ([("a", -1)], "positive numbers"),
        ([("a", float("nan"))], "positive numbers"),
        ([("a", float("inf"))], "positive numbers"),
        ([("a", "x")], "no number"),
        ([("a", 1), "b"], "to every prefix, or to none"),
        ([], "empty"),
        ("", "empty"),
        ("0.3 a 0.7", "alternate"),
        ([""], "prefix or a"),
        ([("a", 1, 2)], "prefix or a"),
        ({"a", "b"}, "a list of them"),  # whose order differs between processes
        (iter(["a", "b"]), "it must be text or a list"),  # which can be read once
    ],
)
def test_blends_that_mean_nothing_are_refused(blend: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(order="megatron", blend=blend, sequence_length=4)


@pytest.mark.guarantee("order-never-changes")
def test_the_golden_blend() -> None:
    """Changing these numbers is a breaking change: bump the order version, and say so first in the
    CHANGELOG.
    """
    dataset, sample = blend_weighted(np.array(normalized([0.5, 0.3, 0.2])), 12)
    assert dataset.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
    assert sample.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3]


@pytest.mark.guarantee("state-under-1")
def test_states_of_twenty_datasets_stay_small() -> None:
    import json

    blend = [(f"mock://tokens=50000,seed={n},length=50", 0.012345678 * (n + 1)) for n in range(20)]
    for options in ({"order": "stream"}, {"order": "megatron", "num_samples": (500, 0, 0)}):
        config = DataConfig(blend=blend, sequence_length=64, **options)
        with StreamLoader(config, micro_batch_size=8, global_batch_size=8) as loader:
            loader.seek(8)
            assert len(json.dumps(loader.state_dict())) < 1024
