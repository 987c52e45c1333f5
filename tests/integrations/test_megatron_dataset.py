"""The dataset class for Megatron's builder, side by side with Megatron's own."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from streammega import StorageConfig
from streammega.errors import ConfigError
from streammega.integrations import megatron_dataset
from streammega.storage import save_bytes
from tests.integrations.test_megatron_provider import (
    FIELDS,
    arguments,
    as_list,
    random_arguments,
    theirs_of,
    tokenizer,
    write_datasets,
)
from tests.support import oracle
from tests.support.servers import S3

CONFIGURATIONS = 200
"""In make soak; make test runs the first few."""
FEW = 8
SIZES = (80, 16, 8)


def dataset_class() -> Any:
    return megatron_dataset.StreamGPTDataset


def same_sample(ours: Any, theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, field in theirs.items():
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(field)), name
        assert ours[name].dtype == field.dtype


def same_datasets(ours: Any, theirs: Any, rng: np.random.Generator) -> None:
    assert len(ours) == len(theirs)
    numbers = rng.integers(0, len(theirs), 12).tolist()
    for number in [0, *numbers, len(theirs) - 1]:
        same_sample(ours[number], theirs[number])


@pytest.mark.guarantee("streamgptdataset-gives-megatron")
@pytest.mark.parametrize(
    "numbers",
    [range(FEW), pytest.param(range(FEW, CONFIGURATIONS), marks=pytest.mark.soak)],
    ids=["few", "many"],
)
def test_the_builder_makes_the_same_of_both_classes(numbers: range, tmp_path: Path) -> None:
    for number in numbers:
        rng = np.random.default_rng([9, number])
        folder = tmp_path / str(number)
        folder.mkdir()
        args, _ = random_arguments(rng, folder)
        valid = None if args.full_validation else int(rng.integers(1, 40))
        sizes = (int(rng.integers(1, 300)), valid, int(rng.integers(1, 20)))
        tokens = tokenizer(pad=int(rng.choice([-1, 0, 7])))
        theirs = theirs_of(args, sizes, tokens)
        ours = theirs_of(args, sizes, tokens, dataset_class())
        for mine, other in zip(ours, theirs, strict=True):
            if other is None:
                assert mine is None
                continue
            for one, whole in zip(as_list(mine), as_list(other), strict=True):
                same_datasets(one, whole, rng)


@pytest.fixture
def built(tmp_path: Path) -> Any:
    """Megatron's class and ours over one dataset: (theirs, ours)."""
    args = arguments(data_path=write_datasets(tmp_path, np.random.default_rng(0), 1))
    return [theirs_of(args, SIZES, tokenizer(), kind) for kind in (None, dataset_class())]


@pytest.mark.guarantee("cache-one-folder")
def test_indices_are_kept_in_megatrons_folder_or_in_that_of_a_storage(tmp_path: Path) -> None:
    from megatron.core.datasets.utils import Split

    (prefix,) = write_datasets(tmp_path, np.random.default_rng(0), 1)
    config = oracle.gpt_config(tmp_path / "megatrons", 16, 1)

    class WithStorage(dataset_class()):  # type: ignore[misc]
        storage = StorageConfig(cache_dir=tmp_path / "own")

    for kind, folder in ((dataset_class(), "megatrons"), (WithStorage, "own")):
        indexed = kind.build_low_level_dataset(prefix, config)
        assert indexed.storage.cache_dir == tmp_path / folder
        kind(indexed, prefix, np.arange(len(indexed)), 80, Split.train, config)
        assert list((tmp_path / folder / "order").glob("*.npy"))
        shutil.rmtree(tmp_path / folder)
    assert not (tmp_path / "megatrons").exists()


@pytest.mark.guarantee("streamgptdataset-gives-megatron")
def test_padding_of_a_batch_has_no_loss(built: Any) -> None:
    theirs, ours = built
    padding = ours[0][None]
    assert not padding["loss_mask"].any()
    assert torch.equal(padding["tokens"], theirs[0][None]["tokens"])


@pytest.mark.guarantee("streamgptdataset-gives-megatron")
def test_samplers_see_which_split_it_is(built: Any) -> None:
    """They look at `split` first, and would take a text for no validation."""
    for theirs, ours in zip(*built, strict=True):
        assert not hasattr(ours, "split")
        assert ours.index_split is theirs.index_split


@pytest.mark.guarantee("streamgptdataset-gives-megatron")
def test_the_indices_have_megatrons_names_and_values(built: Any) -> None:
    for theirs, ours in zip(*built, strict=True):
        for name in ("document_index", "sample_index", "shuffle_index"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        lengths = ours.dataset.index.sequence_lengths
        np.testing.assert_array_equal(lengths, theirs.dataset.index.sequence_lengths)
        same_sample(ours[-1], theirs[-1])


@pytest.mark.guarantee("streamgptdataset-gives-megatron")
def test_a_batch_is_fetched_at_once_and_equal(built: Any) -> None:
    _, (train, _, _) = built
    numbers = [3, 79, 0, 3]
    for number, sample in zip(numbers, train.__getitems__(numbers), strict=True):
        same_sample(sample, train[number])
    for outside in (-1, len(train)):
        with pytest.raises(IndexError):
            train.__getitems__([0, outside])


@pytest.mark.guarantee("streamgptdataset-gives-megatron")
def test_it_travels_to_workers_that_are_spawned(built: Any) -> None:
    _, (train, _, _) = built
    train.config.tokenizer = None  # that of this test cannot be pickled by its own fault
    again = pickle.loads(pickle.dumps(train))  # noqa: S301
    assert type(again) is type(train)
    same_sample(again[5], train[5])


@pytest.mark.guarantee("streamgptdataset-gives-megatron")
def test_forked_workers_read_from_buckets(moto: S3, tmp_path: Path) -> None:
    """Their parent's transport does not survive the fork."""
    prefixes = write_datasets(tmp_path, np.random.default_rng(0), 2)
    bucket = moto.new_bucket()
    settings = moto.storage
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            content = Path(prefix + suffix).read_bytes()
            save_bytes(f"s3://{bucket}/{Path(prefix).name}{suffix}", content, settings)

    class FromBucket(dataset_class()):  # type: ignore[misc]
        storage = settings

    local = theirs_of(arguments(data_path=prefixes), SIZES, tokenizer())[0]
    urls = [f"s3://{bucket}/{Path(prefix).name}" for prefix in prefixes]
    remote = theirs_of(arguments(data_path=urls), SIZES, tokenizer(), FromBucket)[0]
    same_sample(remote[0], local[0])  # and the parent has used its transport
    fork = multiprocessing.get_context("fork")
    loader = DataLoader(remote, batch_size=4, num_workers=2, multiprocessing_context=fork)
    for number, batch in zip(range(0, 16, 4), loader, strict=False):
        for name in FIELDS:
            expected = torch.stack([local[number + row][name] for row in range(4)])
            assert torch.equal(batch[name], expected), name


def test_mock_data_is_refused(tmp_path: Path) -> None:
    config = oracle.gpt_config(None, 8, 1)
    config.mock = True
    with pytest.raises(ConfigError, match="MockGPTDataset"):
        megatron_dataset.samples_config(config, "web", StorageConfig())


def test_only_its_name_is_made_up() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = megatron_dataset.Other
