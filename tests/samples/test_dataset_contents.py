"""A state belongs to the datasets that it was saved with: told by what they hold, not where they lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streammega import (
    DataConfig,
    IndexedDataset,
    PhaseConfig,
    StorageConfig,
    StreamLoader,
)
from streammega.dataset.names import SUFFIXES
from streammega.dataset.opening import content_of, open_manifests
from streammega.errors import StateError
from streammega.order.state import differing_values
from streammega.samples.provenance import Provenance
from tests.support.builders import KINDS, write_dataset, write_manifest
from tools.bench.object_server import running

DOCUMENTS = 40
LENGTH = 100
ORDERS = ["stream", "megatron"]


def put(name: str, tokens: np.ndarray[Any, Any], length: int = LENGTH) -> str:
    """A shard of documents of `length` tokens."""
    write_dataset(name, [tokens[first : first + length] for first in range(0, len(tokens), length)])
    return name


def tokens_of(seed: int, count: int = DOCUMENTS * LENGTH) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.uint16)


def content_of_dataset(name: str, storage: StorageConfig | None = None) -> str:
    (manifest,) = open_manifests([name], storage or StorageConfig())
    return content_of(manifest)


def loader_of(blend: Any, order: Any, cache: Path, **options: Any) -> StreamLoader:
    config = DataConfig(
        blend=blend,
        sequence_length=32,
        order=order,
        num_samples=(200, 0, 0),
        storage=StorageConfig(cache_dir=cache),
        **options,
    )
    return StreamLoader(config, micro_batch_size=2, global_batch_size=4)


def saved(blend: Any, order: Any, cache: Path, steps: int = 4, **options: Any) -> Any:
    with loader_of(blend, order, cache, **options) as loader:
        batches = iter(loader)
        for _ in range(steps):
            next(batches)
        return json.loads(json.dumps(loader.state_dict()))


def refusal(state: Any, blend: Any, order: Any, cache: Path, **options: Any) -> str:
    with loader_of(blend, order, cache, **options) as loader:
        with pytest.raises(StateError) as caught:
            loader.load_state_dict(state)
        return str(caught.value)


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Two datasets of equal counts."""
    return [put(str(tmp_path / name), tokens_of(seed)) for seed, name in enumerate(("web", "code"))]


@pytest.mark.guarantee("state-belongs-datasets")
@pytest.mark.parametrize("order", ORDERS)
def test_a_blend_of_datasets_of_equal_size_that_changed_places_is_refused_by_name(
    pair: list[str], tmp_path: Path, order: str
) -> None:
    web, code = pair
    state = saved([(web, 0.5), (code, 0.5)], order, tmp_path / "cache")
    words = refusal(state, [(code, 0.5), (web, 0.5)], order, tmp_path / "cache")
    assert f"datasets[0] ({code!r}): the checkpoint has" in words
    assert f"datasets[1] ({web!r}): the checkpoint has" in words


@pytest.mark.guarantee("state-belongs-datasets")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("place", [0, -1])
def test_a_dataset_that_was_replaced_by_one_of_equal_counts_is_refused_by_name(
    pair: list[str], tmp_path: Path, order: str, place: int
) -> None:
    web, code = pair
    blend = [(web, 0.5), (code, 0.5)]
    state = saved(blend, order, tmp_path / "cache")
    tokens = tokens_of(1)
    tokens[place] += 1
    put(code, tokens)
    words = refusal(state, blend, order, tmp_path / "cache")
    assert f"datasets[1] ({code!r})" in words
    assert web not in words


@pytest.mark.parametrize("order", [*ORDERS, "sequential"])
def test_a_single_dataset_that_was_replaced_is_refused_by_name(
    pair: list[str], tmp_path: Path, order: str
) -> None:
    web, code = pair
    state = saved([web], order, tmp_path / "cache")
    assert repr(code) in refusal(state, [code], order, tmp_path / "cache")
    (tmp_path / "moved").mkdir()
    for suffix in (".bin", ".idx"):
        shutil.copy(web + suffix, tmp_path / "moved" / f"other{suffix}")
    with loader_of([str(tmp_path / "moved" / "other")], order, tmp_path / "cache") as loader:
        loader.load_state_dict(state)


def test_splits_of_other_shards_of_one_size_are_other_orders(tmp_path: Path) -> None:
    shards = [f"s{number}" for number in range(4)]
    for number, shard in enumerate(shards):
        put(str(tmp_path / shard), tokens_of(number))
    web = write_manifest(tmp_path / "web", shards)
    one, other = (
        Provenance(
            DataConfig(
                blend=[web],
                split=split,
                sequence_length=32,
                order="stream",
                num_samples=(200, 200, 0),
                storage=StorageConfig(cache_dir=tmp_path / "cache"),
            ),
            "valid",
        )
        for split in ("25,25,50", "50,25,25")
    )
    assert one.source.identity() != other.source.identity()
    assert one.trace([0]) != other.trace([0])


@pytest.mark.parametrize("order", ORDERS)
def test_of_many_datasets_the_message_names_those_where_one_was_replaced(
    tmp_path: Path, order: str
) -> None:
    names = [put(str(tmp_path / f"d{n:02}"), tokens_of(n, 200)) for n in range(48)]
    blend = [(name, 1.0) for name in names]
    state = saved(blend, order, tmp_path / "cache", 1)
    assert len(json.dumps(state)) < 1024
    put(names[20], tokens_of(100, 200))
    words = refusal(state, blend, order, tmp_path / "cache")
    assert f"some of 18 ({names[18]!r}) to 23 ({names[23]!r}) differ" in words


@pytest.mark.guarantee("state-belongs-datasets")
def test_a_replaced_dataset_of_a_later_phase_is_refused_by_name(
    pair: list[str], tmp_path: Path
) -> None:
    web, code = pair
    phase = PhaseConfig(first_sample=8, blend=[(web, 0.5), (code, 0.5)])
    options: dict[str, Any] = {"phases": [phase]}
    state = saved([(web, 1.0)], "stream", tmp_path / "cache", 8, **options)
    put(code, tokens_of(7))
    words = refusal(state, [(web, 1.0)], "stream", tmp_path / "cache", **options)
    assert repr(code) in words
    assert repr(web) not in words


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_a_dataset_before_and_after_it_was_replaced_differ_from_its_first_sample_on(
    pair: list[str], tmp_path: Path, order: Any
) -> None:
    web, code = pair

    def provenance() -> Provenance:
        config = DataConfig(
            blend=[(web, 0.5), (code, 0.5)],
            sequence_length=32,
            order=order,
            num_samples=(200, 0, 0),
            storage=StorageConfig(cache_dir=tmp_path / "cache"),
        )
        return Provenance(config, global_batch_size=4)

    before = provenance()
    same = provenance()
    assert same.source.identity() == before.source.identity()
    ids = np.arange(200)
    tokens, _ = same.tokens(ids)
    put(code, tokens_of(7))
    after = provenance()
    differences = differing_values(before.source.identity(), after.source.identity())
    assert list(differences) == ["datasets[1]"]
    traced = after.trace(ids)
    of_code = [sample.runs[0].name.dataset == 1 for sample in traced]
    assert 0 < sum(of_code) < len(ids)
    assert ((tokens != after.tokens(ids)[0]).any(axis=1) == of_code).all()


@pytest.mark.guarantee("state-belongs-datasets")
@pytest.mark.parametrize("shards", [1, 3])
def test_the_content_is_the_same_in_every_form_and_place(tmp_path: Path, shards: int) -> None:
    """With and without a manifest, by its shards' kind, on a disk and on a server."""
    root = tmp_path / "served" / "b"
    names = [f"s{number}" for number in range(shards)]
    for kind, suffix in SUFFIXES.items():
        (root / kind).mkdir(parents=True)
        (root / f"{kind}-manifest").mkdir()
        for number, name in enumerate(names):
            put(f"{root / kind / name}{suffix}", tokens_of(number, 30_000))
        for path in list((root / kind).iterdir()):
            shutil.copy(path, root / f"{kind}-manifest" / path.name)
        write_manifest(root / f"{kind}-manifest" / "web", names, kind)
    cache = tmp_path / "cache"
    found = set()
    with running(tmp_path / "served") as server:
        remote = StorageConfig(storage_options=server.storage_options)
        for form in KINDS:
            for place, storage in ((f"{root}/", StorageConfig()), ("s3://b/", remote)):
                for name in (f"{place}{form}/", f"{place}{form}-manifest/web"):
                    found.add(content_of_dataset(name, storage))
                    dataset = IndexedDataset(name, storage=storage.changed(cache_dir=cache))
                    found.add(dataset.content)
    assert len(found) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remote", [False, True])
def test_datasets_of_few_or_no_tokens_have_a_content_too(
    tmp_path: Path, kind: Any, remote: bool
) -> None:
    root = tmp_path / "served" / "b"
    contents = set()
    with running(tmp_path / "served") as server:
        storage = StorageConfig(storage_options=server.storage_options if remote else {})
        for case, sizes in enumerate([[0], [1], [511], [513], [0, 3], [3, 0], [0, 3, 0], [0, 0]]):
            folder = root / str(case)
            folder.mkdir(parents=True)
            for number, size in enumerate(sizes):
                put(f"{folder}/s{number}{SUFFIXES[kind]}", tokens_of(1, size))
            name = f"s3://b/{case}/" if remote else f"{folder}/"
            contents.add(content_of_dataset(name, storage))
    assert len(contents) == 8, "each is another dataset"


def test_an_empty_shard_at_an_end_hides_no_replaced_tokens(tmp_path: Path) -> None:
    contents = set()
    for seed in (1, 2):
        for number, tokens in enumerate([tokens_of(0, 0), tokens_of(seed), tokens_of(0, 0)]):
            put(f"{tmp_path}/s{number}", tokens)
        contents.add(content_of_dataset(f"{tmp_path}/"))
    assert len(contents) == 2


@pytest.mark.guarantee("state-belongs-datasets")
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(count=st.integers(1, 5000), data=st.data())
def test_any_token_within_the_first_or_last_kib_tells_datasets_apart(
    tmp_path: Path, count: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, min(count, 512) - 1))
    at_end = data.draw(st.booleans())
    place = count - 1 - place if at_end else place
    tokens = tokens_of(3, count)
    contents = []
    for change in (0, 1, 0):
        changed = tokens.copy()
        changed[place] += change
        put(str(tmp_path / "web"), changed, length=count)
        contents.append(content_of_dataset(str(tmp_path / "web")))
    assert contents[0] == contents[2] != contents[1]


def test_the_split_changes_nothing_of_a_content(pair: list[str], tmp_path: Path) -> None:
    contents = set()
    for split in ("1,0,0", "60,40,0"):
        with loader_of(pair[:1], "stream", tmp_path, split=split) as loader:
            contents.add(loader.dataset.samples.files[0][0].content)
    assert len(contents) == 1


def test_mock_datasets_are_told_apart(tmp_path: Path) -> None:
    one, other = ("mock://tokens=40000,length=70", "mock://tokens=40000,length=70,seed=1")
    state = saved([one, other], "stream", tmp_path)
    assert repr(other) in refusal(state, [other, one], "stream", tmp_path)


@pytest.mark.parametrize("order", ["megatron", "sequential"])
def test_a_blend_with_the_same_data_twice_warns_once(
    tmp_path: Path, order: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Under one name, as a copy, or as a link. Megatron gives the samples of both without a word."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first = put(f"{tmp_path}/a/web", tokens_of(1))
    copied = put(f"{tmp_path}/b/web", tokens_of(1))
    other = put(f"{tmp_path}/a/code", tokens_of(2))
    for blend, warned in (
        ([(first, 0.5), (first, 0.5)], f"{first} and {first}"),
        ([(first, 0.5), (copied, 0.5)], f"{first} and {copied}"),
        ([(first, 0.5), (other, 0.5)], ""),
    ):
        caplog.clear()
        for _ in range(2):
            loader_of(blend, order, tmp_path / "cache").close()
        lines = [
            record.getMessage() for record in caplog.records if "hold the same" in record.message
        ]
        assert len(lines) == bool(warned)
        assert all(warned in line for line in lines)
