"""StreamLoader and StreamingDataset: one stream for every rank count, exact resume, errors on their
step, no leftovers.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streammega import (
    DataConfig,
    IndexedDatasetWriter,
    PhaseConfig,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
    batch_fields,
)
from streammega.config import parse_blend
from streammega.errors import ConfigError, FormatError, ShortReadError, StateError, StorageError
from tests.support.builders import data_config, write_dataset, write_random_pair
from tests.support.expected import checked_batch
from tests.support.servers import http_server
from tests.support.streams import rank_loaders
from tests.support.typed import first_prefix

GLOBAL = 24
RANKS = (1, 2, 4)


def loaders(
    config: DataConfig, dp_size: int, micro: int, state: dict[str, Any] | None = None
) -> list[StreamLoader]:
    made = rank_loaders(config, dp_size, micro, GLOBAL)
    for loader in made:
        if state is not None:
            loader.load_state_dict(state)
    return made


def micro_steps(ranks: list[StreamLoader]) -> Iterator[dict[int, bytes]]:
    """{global sample id: its tokens and labels} of each micro-step over all ranks."""
    iterators = [iter(loader) for loader in ranks]
    while True:
        found: dict[int, bytes] = {}
        for loader, iterator in zip(ranks, iterators, strict=True):
            ids = loader.dataset.sample_ids(loader.consumed_samples)
            batch = next(iterator, None)
            if batch is None:
                return
            for sample, tokens, labels in zip(
                ids.tolist(), batch["tokens"], batch["labels"], strict=True
            ):
                assert sample not in found
                found[sample] = tokens.numpy().tobytes() + labels.numpy().tobytes()
        yield found


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """The whole global stream of `config`, from one rank with micro-batches of one sample."""
    folder = tmp_path_factory.mktemp("stream")
    write_random_pair(str(folder / "pair"))
    config = data_config([str(folder / "pair")], folder, num_samples=(960, 0, 0))
    whole: dict[int, bytes] = {}
    for step in micro_steps(loaders(config, 1, 1)):
        whole.update(step)
    return whole


def test_a_loader_that_has_not_begun_has_counted_nothing(config: DataConfig) -> None:
    with StreamLoader(config, micro_batch_size=4, global_batch_size=GLOBAL) as loader:
        counted = loader.stats()
    assert counted.pop("seconds") >= 0
    assert counted.pop("source_tokens") == {}
    assert counted == dict.fromkeys(counted, 0)


@pytest.mark.guarantee("stream-layout-global", "2-micro-steps")
@pytest.mark.parametrize("order", ["megatron", "sequential"])
def test_every_rank_count_sees_the_same_stream(config: DataConfig, order: Any) -> None:
    config = replace(config, order=order)
    streams = []
    for dp_size, micro in ((1, 1), (1, 8), (2, 3), (4, 2), (8, 3), (24, 1)):
        whole: dict[int, bytes] = {}
        for number, step in enumerate(micro_steps(loaders(config, dp_size, micro))):
            assert sorted(step) == list(
                range(number * dp_size * micro, (number + 1) * dp_size * micro)
            )
            whole.update(step)
        streams.append(whole)
    assert all(other == streams[0] for other in streams)
    assert len(streams[0]) % GLOBAL == 0


@pytest.mark.guarantee("exact-resume-state")
@pytest.mark.parametrize("before", RANKS)
@pytest.mark.parametrize("after", RANKS)
def test_resume_is_exact_at_every_step_and_from_any_rank_count_to_any(
    config: DataConfig, stream: dict[int, bytes], before: int, after: int
) -> None:
    """Saves after every micro-step of a run of four steps; each state is resumed for two steps or
    to the end of the data.
    """
    total = len(stream)
    running = loaders(config, before, 2)
    for loader in running:
        loader.seek(total - 4 * GLOBAL)
    for number, step in enumerate(micro_steps(running), 1):
        states = [loader.state_dict() for loader in running]
        assert all(state == states[0] for state in states), "the state differs between ranks"
        assert {sample: stream[sample] for sample in step} == step
        consumed = states[0]["consumed_samples"]
        assert consumed == total - 4 * GLOBAL + number * 2 * before, (
            "the state counts more than was handed out"
        )
        if consumed % GLOBAL % (2 * after):
            continue
        resumed = loaders(config, after, 2, json.loads(json.dumps(states[0])))
        first = checked = consumed % total  # after the end of the data comes another pass
        for later in micro_steps(resumed):
            assert {sample: stream[sample] for sample in later} == later
            assert min(later) == checked
            checked += len(later)
            if checked >= first + 2 * GLOBAL:
                break
        assert checked >= min(total, first + 2 * GLOBAL)
        for loader in resumed:
            loader.close()
    assert number * 2 * before == 4 * GLOBAL


STOPS = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), st.integers(1, 5)),
    min_size=1,
    max_size=5,
)


@pytest.mark.guarantee("exact-resume-state")
@settings(max_examples=6)
@given(stops=STOPS)
def test_any_chain_of_resumes_is_the_uninterrupted_stream(
    stops: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    resume_again_and_again(stops, tmp_path_factory)


@pytest.mark.soak
@settings(max_examples=300)
@given(stops=STOPS)
def test_three_hundred_chains_of_resumes_are_the_uninterrupted_stream(
    stops: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    resume_again_and_again(stops, tmp_path_factory)


def resume_again_and_again(
    stops: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(tmp_path_factory.getbasetemp()) / "chain"
    if not folder.exists():
        write_random_pair(str(folder / "pair"))
    config = data_config([str(folder / "pair")], folder, num_samples=(960, 0, 0))
    reference = StreamingDataset(config, micro_batch_size=1, global_batch_size=GLOBAL)
    state: dict[str, Any] | None = None
    position = 0
    for dp_size, batches in stops:
        ranks = loaders(config, dp_size, 1, state)
        for step in itertools.islice(micro_steps(ranks), batches * GLOBAL // dp_size):
            for sample, data in step.items():
                expected = checked_batch(reference, sample)
                assert (
                    data
                    == expected["tokens"].numpy().tobytes() + expected["labels"].numpy().tobytes()
                )
            assert min(step) == position
            position += len(step)
        state = ranks[0].state_dict()
        for loader in ranks:
            loader.close()


@pytest.mark.guarantee("state-under-1")
def test_the_state_is_small_and_readable(config: DataConfig) -> None:
    state = loaders(config, 1, 1)[0].state_dict()
    assert len(json.dumps(state)) < 1024
    assert json.loads(state["order"])["seed"] == 1234


@pytest.mark.guarantee("refused-differs-another", "4-identity-defines", "number-samples-belongs")
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 9}, "seed: the checkpoint has 1234, this run 9"),
        ({"sequence_length": 32}, "sequence_length: the checkpoint has 16, this run 32"),
        ({"num_samples": (1200, 0, 0)}, "num_samples: the checkpoint has 960, this run 1200"),
        ({"split": "50,50,0"}, "sequences"),
        ({"order": "sequential"}, "order: "),
    ],
)
def test_a_state_of_another_order_is_refused(
    config: DataConfig, change: dict[str, Any], named: str
) -> None:
    state = loaders(config, 1, 1)[0].state_dict()
    other = loaders(replace(config, **change), 1, 1)[0]
    with pytest.raises(StateError) as caught:
        other.load_state_dict(state)
    assert named in str(caught.value)


@pytest.mark.guarantee("moving-data-another", "4-identity-defines")
def test_a_state_of_another_dataset_is_refused_but_a_copy_elsewhere_is_the_same(
    config: DataConfig, tmp_path: Path
) -> None:
    state = loaders(config, 1, 1)[0].state_dict()
    write_random_pair(str(tmp_path / "copy"))
    loaders(replace(config, blend=[str(tmp_path / "copy")]), 1, 1, state)
    write_random_pair(str(tmp_path / "other"), seed=5)
    with pytest.raises(StateError, match=r"dataset \(.*\): the checkpoint has"):
        loaders(replace(config, blend=[str(tmp_path / "other")]), 1, 1, state)


@pytest.mark.guarantee("1-batch-function")
def test_seek_goes_anywhere_and_nowhere_else(config: DataConfig, stream: dict[int, bytes]) -> None:
    loader = loaders(config, 1, 2)[0]
    for sample in (GLOBAL * 7, 0, len(stream) - 2):
        loader.seek(sample)
        step = next(micro_steps([loader]))
        assert step == {number: stream[number] for number in (sample, sample + 1)}
    for bad in (-1, len(stream) + 1):
        with pytest.raises(StateError, match="not within"):
            loader.seek(bad)
    with pytest.raises(StateError, match="resume with the former sizes"):
        loader.seek(3)


@pytest.mark.guarantee("exact-resume-state", "3-cursor-counts")
def test_leaving_the_loop_counts_only_what_was_handed_out(config: DataConfig) -> None:
    loader = StreamLoader(config, micro_batch_size=2, global_batch_size=GLOBAL, prefetch=8)
    for _number, _batch in zip(range(5), loader, strict=False):
        pass
    assert loader.consumed_samples == 10
    first = next(iter(loader))
    assert loader.consumed_samples == 12
    dataset = StreamingDataset(config, micro_batch_size=2, global_batch_size=GLOBAL)
    expected = checked_batch(dataset, 10)
    assert first["tokens"].equal(expected["tokens"])
    loader.close()


@pytest.mark.guarantee("3-cursor-counts", "7-stores-datasets")
@pytest.mark.parametrize("workers", [1, 2])
def test_dataloader_workers_keep_the_order(config: DataConfig, workers: int) -> None:
    dataset = StreamingDataset(
        replace(config, num_samples=(200, 0, 0)), micro_batch_size=3, global_batch_size=GLOBAL
    )
    expected = [checked_batch(dataset, consumed) for consumed in dataset.positions()]
    options: Any = {"multiprocessing_context": "forkserver"} if workers == 1 else {}
    got = list(
        torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers, **options)
    )
    assert len(got) == len(expected) == len(dataset)
    assert all(a["tokens"].equal(b["tokens"]) for a, b in zip(got, expected, strict=True))
    with pytest.raises(StateError, match="num_batches"):
        dataset.state_dict()
    assert dataset.state_dict(num_batches=5)["consumed_samples"] == 15


class WithBfloat16(torch.utils.data.IterableDataset[Any]):
    """A dataset around ours that adds a field in a dtype that numpy does not have."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataset:
            batch["weight"] = batch["loss_mask"].to(torch.bfloat16)
            yield batch


@pytest.mark.guarantee("batches-forked-workers")
def test_workers_send_fields_of_every_dtype(config: DataConfig) -> None:
    dataset = WithBfloat16(StreamingDataset(config, micro_batch_size=6, global_batch_size=12))
    workers = DataLoader(dataset, batch_size=None, num_workers=1, timeout=60)
    assert next(iter(workers))["weight"].dtype == torch.bfloat16


@pytest.mark.guarantee("batches-forked-workers")
def test_batches_in_workers_are_dicts_and_can_be_collated(config: DataConfig) -> None:
    def types(batches: list[Any]) -> list[bool]:
        return [isinstance(batch, dict) for batch in batches]

    dataset = StreamingDataset(config, micro_batch_size=6, global_batch_size=12)
    workers = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=types)
    assert all(itertools.chain.from_iterable(workers))
    expected = [batch["tokens"] for batch in DataLoader(dataset, batch_size=2)]
    got = [batch["tokens"] for batch in DataLoader(dataset, batch_size=2, num_workers=1)]
    assert torch.equal(torch.cat(got), torch.cat(expected))


def test_the_iterable_dataset_counts_what_it_yields(config: DataConfig) -> None:
    dataset = StreamingDataset(config, micro_batch_size=3, global_batch_size=GLOBAL)
    batches = list(zip(range(4), dataset, strict=False))
    assert dataset.state_dict()["consumed_samples"] == 12
    again = StreamingDataset(config, micro_batch_size=3, global_batch_size=GLOBAL)
    again.load_state_dict(dataset.state_dict())
    assert not next(iter(again))["tokens"].equal(batches[-1][1]["tokens"])


def test_batches_are_the_same_from_s3_by_both_transports(
    config: DataConfig, stream: dict[int, bytes], s3_storage: StorageConfig, bucket: str
) -> None:
    with IndexedDatasetWriter(f"s3://{bucket}/pair", np.uint16, storage=s3_storage) as writer:
        writer.add_index(first_prefix(config))
    remote = replace(config, blend=[f"s3://{bucket}/pair"], storage=s3_storage)
    whole: dict[int, bytes] = {}
    for step in micro_steps(loaders(remote, 2, 6)):
        whole.update(step)
    assert whole == stream


def test_a_mesh_gives_rank_and_size(config: DataConfig) -> None:
    class Mesh:
        ndim = 2
        mesh_dim_names = ("dp", "tp")

        def get_local_rank(self, dim: int) -> int:
            return (1, 0)[dim]

        def size(self, dim: int) -> int:
            return (4, 2)[dim]

    mesh: Any = Mesh()
    loader = StreamLoader(config, micro_batch_size=2, global_batch_size=GLOBAL, mesh=mesh)
    assert (loader.dataset.dp_rank, loader.dataset.dp_size) == (1, 4)
    with pytest.raises(ConfigError, match="either a mesh"):
        StreamLoader(
            config, micro_batch_size=2, global_batch_size=GLOBAL, mesh=mesh, dp_rank=0, dp_size=1
        )
    for names, said in ((("pp", "tp"), r"\('pp', 'tp'\)"), (None, "2")):
        mesh.mesh_dim_names = names
        with pytest.raises(ConfigError, match=f"the mesh has dimensions {said}; name the"):
            StreamLoader(config, micro_batch_size=2, global_batch_size=GLOBAL, mesh=mesh)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch_size": 25, "micro_batch_size": 2}, "not a multiple"),
        ({"dp_rank": 1}, "go together"),
        ({"dp_rank": 0, "dp_size": 0}, "dp_size is 0"),
        ({"cp_rank": 2, "cp_size": 2, "ids_only": True}, r"cp_rank 2 is not in \[0, 2\)"),
        ({"cp_rank": -1, "cp_size": 2, "ids_only": True}, "cp_rank -1 is not in"),
        ({"cp_rank": 1}, "cp_rank 1 is not in"),
        ({"cp_size": 0}, "cp_rank 0 is not in"),
        ({"rampup_batch_size": (2, 2)}, "rampup_batch_size is .*three"),
        ({"split": "validation"}, "not one of train, valid, test"),
        ({"split": "valid"}, "leaves nothing for valid"),
        ({"global_batch_size": 10**6}, "less than one global batch"),
        ({"micro_batch_size": "4"}, "micro_batch_size is '4'; it must be a whole number"),
        ({"global_batch_size": 2.0}, "global_batch_size is 2.0; it must be a whole number"),
        ({"prefetch": -1}, "prefetch is -1; it must be a whole number, at least 0"),
        ({"prefetch": "4"}, "prefetch is '4'; it must be a whole number"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    config: DataConfig, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamLoader(config, **({"micro_batch_size": 1, "global_batch_size": 2} | arguments))


@pytest.mark.parametrize("config", ["s3://bucket/web", {"blend": "s3://bucket/web"}, None])
def test_what_is_no_config_is_refused_by_its_type(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"config is a \w+; it must be a DataConfig"):
        StreamLoader(config, micro_batch_size=1, global_batch_size=2)


@pytest.mark.guarantee("settings-run-cannot")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"sequence_lenght": 8}, "sequence_lenght; did you mean sequence_length"),
        ({"seed": -1}, "seed is -1"),
        ({"blend": []}, "one prefix"),
        ({"blend": ("web", 0.7)}, r"each entry is a prefix or a \(prefix, weight\) pair, as in"),
        ({"blend": [(0.7, "web")]}, r"each entry is a prefix or a \(prefix, weight\) pair, as in"),
        ({"order": "random"}, "order is 'random'"),
        ({"num_samples": (1, 2)}, "it must be 3 whole numbers"),
        ({"num_samples": 5}, "it must be 3 whole numbers"),
        ({"num_samples": "500"}, "it must be 3 whole numbers"),
        ({"num_samples": (5.5, 0, 0)}, "it must be 3 whole numbers"),
        ({"num_samples": (-1, 0, 0)}, "it must be at least 0"),
        ({"reset_position_ids": "no"}, "reset_position_ids is 'no'; it must be true or false"),
        ({"mask_loss_by_mode": "yes"}, "mask_loss_by_mode is 'yes'; it must be true or false"),
        ({"phases": "web"}, "phases is 'web'; it must be a list"),
        ({"exclude_samples": "0"}, "exclude_samples is '0'; it must be a list"),
        ({"storage": {"request_timeout": 9}}, "it must be a StorageConfig"),
        ({"storage_by_prefix": "s3://a/"}, "it must be a mapping"),
        ({"split": 1}, "split is 1; it must be text"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"shuffle_lanes": 4.0}, "shuffle_lanes is 4.0"),
        ({"eod_id": 1.5}, "eod_id is 1.5"),
        ({"eod_id": -1}, "eod_id is -1"),
        ({"pad_id": -5}, "pad_id is -5"),
        (
            {"eod_id": 100, "vocab_size": 100},
            "eod_id is 100, outside of the vocabulary of 100: no document would ever end",
        ),
        ({"blend": 3}, "blend is 3; it must be text or a list"),
        ({"mid_level_dataset_surplus": "much"}, "surplus is 'much'; it must be a number"),
        ({"exclude_samples": 8}, "exclude_samples is 8"),
        ({"exclude_samples": [(8,)]}, r"exclude_samples is \[\(8,\)\]"),
        ({"exclude_samples": [("a", "b")]}, r"exclude_samples is \[\('a', 'b'\)\]"),
        ({"order": "stream", "inter_document_masking": True}, "reset_attention_mask"),
        (
            {"inter_document_masking": True, "fields": [..., "attention_mask"]},
            "leave one of them out",
        ),
    ],
)
def test_data_settings_that_cannot_work_are_refused(
    config: DataConfig, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config, **change)


@pytest.mark.guarantee("inter-document-masking")
def test_bounds_of_sequences_are_asked_of_what_knows_them(config: DataConfig) -> None:
    masked = replace(config, order="megatron", num_samples=(48, 0, 0), inter_document_masking=True)
    with pytest.raises(
        ConfigError, match="ids_only batches do not contain the bounds of sequences"
    ):
        StreamLoader(masked, micro_batch_size=1, global_batch_size=2, ids_only=True)
    ids = torch.zeros(1, masked.sequence_length, dtype=torch.int64)
    with pytest.raises(ConfigError, match="which ids do not tell"):
        batch_fields(ids, None, masked)


@pytest.mark.guarantee("settings-run-cannot")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_concurrent_requests": 0}, "max_concurrent_requests is 0; it must be at least 1"),
        (
            {"max_concurrent_requests": "8"},
            "max_concurrent_requests is a str; it must be a whole number",
        ),
        ({"request_timeout": -1}, "request_timeout is -1; it must be more than 0"),
        ({"request_timeout": "60"}, "request_timeout is a str; it must be a number"),
        ({"retry_timeout": None}, "retry_timeout is None; it must be a number"),
        ({"cache_dir": 3}, "cache_dir is 3; it must be text or a path"),
        ({"storage_options": "key=secret-word"}, "storage_options is a str; it must be a mapping"),
    ],
)
def test_storage_settings_that_cannot_work_are_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StorageConfig(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hedge_requests": "off"}, "hedge_requests is 'off'; it must be true or false"),
        ({"local_io": "map"}, "local_io is 'map'; it must be one of mmap, pread"),
    ],
)
def test_values_of_tuning_that_cannot_work_are_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StorageConfig().tuned(**change)


def test_numbers_of_numpy_and_paths_of_pathlib_are_taken_for_what_they_are(
    config: DataConfig,
) -> None:
    plain = replace(config, seed=3, num_samples=(60, 0, 0))
    assert isinstance(config.blend, list | str)
    prefix = config.blend if isinstance(config.blend, str) else str(config.blend[0])
    weighted: Any = [(Path(prefix), 0.5)]
    assert parse_blend(weighted) == ((prefix,), (0.5,))
    given: list[Any] = [Path(prefix), [Path(prefix)]]
    for blend in given:
        numbers: Any = {"seed": np.int64(3), "num_samples": tuple(np.array([60, 0, 0]))}
        other = replace(plain, blend=blend, **numbers)
        with StreamLoader(other, micro_batch_size=1, global_batch_size=2) as loader:
            loader.seek(np.int64(4))  # type: ignore[arg-type]
            state = json.loads(json.dumps(loader.state_dict()))
        with StreamLoader(plain, micro_batch_size=1, global_batch_size=2) as loader:
            loader.load_state_dict(state)
            assert loader.consumed_samples == 4


@pytest.mark.guarantee("number-samples-belongs")
def test_the_megatron_order_asks_for_the_number_of_samples(config: DataConfig) -> None:
    with pytest.raises(ConfigError, match=r"set num_samples=\(train, valid, test\)"):
        StreamLoader(replace(config, num_samples=None), micro_batch_size=1, global_batch_size=1)


def test_a_sequence_longer_than_the_data_is_refused(config: DataConfig) -> None:
    with pytest.raises(ConfigError, match="lower sequence_length"):
        StreamLoader(
            replace(config, sequence_length=10**6, order="sequential", num_samples=None),
            micro_batch_size=1,
            global_batch_size=1,
        )


def test_a_token_id_past_the_vocabulary_is_an_error_on_its_step(config: DataConfig) -> None:
    loader = StreamLoader(
        replace(config, vocab_size=900), micro_batch_size=1, global_batch_size=GLOBAL
    )
    with pytest.raises(FormatError, match="outside of the vocabulary of 900"):
        list(loader)
    assert loader.consumed_samples < 960


@pytest.mark.guarantee("403-404-changed")
def test_an_error_of_the_storage_reaches_the_step_that_needs_the_bytes(config: DataConfig) -> None:
    objects = {
        f"/p{suffix}": Path(f"{first_prefix(config)}{suffix}").read_bytes()
        for suffix in (".bin", ".idx")
    }
    storage = StorageConfig(request_timeout=60).tuned(max_retries=0)
    with http_server(dict(objects)) as server:
        remote = replace(
            config, blend=[f"{server.url}/p"], storage=storage, order="sequential", num_samples=None
        )
        loader = StreamLoader(remote, micro_batch_size=1, global_batch_size=1)
        server.objects["/p.bin"] = objects["/p.bin"][: len(objects["/p.bin"]) // 2]
        batches = iter(loader)
        next(batches)
        with pytest.raises(ShortReadError, match=r"p\.bin"):
            list(batches)
        half = loader.consumed_samples
        assert 0 < half < len(loader)
        server.objects["/p.bin"] = objects["/p.bin"]
        assert len(list(loader)) == len(loader) - half, "after the mend it goes on where it stopped"
        server.status = 403
        with pytest.raises(StorageError, match="access denied"):
            loader.seek(0)
            next(iter(loader))


def test_no_threads_are_left(config: DataConfig) -> None:
    before = set(threading.enumerate())
    for _ in range(20):
        loader = StreamLoader(config, micro_batch_size=1, global_batch_size=1)
        batches = iter(loader)
        next(batches)
        del loader, batches
    gc.collect()
    with StreamLoader(config, micro_batch_size=1, global_batch_size=1) as loader:
        next(iter(loader))
    assert set(threading.enumerate()) <= before


@pytest.fixture
def mapped_below(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """How many files below the test's folder are mapped, without any collection of garbage."""

    def count() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    gc.collect()
    gc.disable()
    yield count
    gc.enable()


KINDS_OF_LOADERS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "sequential": {"order": "sequential"},
    "stream": {"order": "stream"},
    "phases": {
        "order": "stream",
        "phases": [PhaseConfig(first_sample=48, sequence_length=8)],
    },
    "documents apart": {"eod_id": 7, "reset_attention_mask": True, "reset_position_ids": True},
    "excluded documents": {"order": "stream", "eod_id": 7, "exclude_documents": ["#5"]},
    "sequences": {"inter_document_masking": True, "eod_id": 7},
}


@pytest.mark.parametrize("kind", KINDS_OF_LOADERS)
@pytest.mark.parametrize("ids_only", [False, True])
def test_a_dropped_loader_unmaps_its_files_without_a_collection_of_garbage(
    config: DataConfig, mapped_below: Callable[[], int], kind: str, ids_only: bool
) -> None:
    settings = dict(KINDS_OF_LOADERS[kind])
    if ids_only and "inter_document_masking" in settings:
        pytest.skip("ids do not contain the bounds of sequences")
    if "exclude_documents" in settings:
        settings["exclude_documents"] = [f"{first_prefix(config)}#5"]
    before = mapped_below()
    for close in (False, True):
        loader = StreamLoader(
            replace(config, **settings),
            micro_batch_size=2,
            global_batch_size=GLOBAL,
            ids_only=ids_only,
        )
        batches = [next(loader) for _ in range(40)]
        assert mapped_below() > before
        if close:
            loader.close()
        del loader, batches
        assert mapped_below() == before


def test_a_closed_loader_lets_its_tokens_go_and_goes_on_where_it_was(
    config: DataConfig, mapped_below: Callable[[], int]
) -> None:
    loader = StreamLoader(
        replace(config, order="stream"), micro_batch_size=2, global_batch_size=GLOBAL
    )
    next(loader)
    loader.close()
    assert mapped_below() == 0
    position = loader.consumed_samples
    assert next(loader)["tokens"].equal(checked_batch(loader.dataset, position)["tokens"])
    loader.close()


@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_dropped_loader_of_a_bucket_unmaps_what_its_caches_hold(
    config: DataConfig,
    s3_storage: StorageConfig,
    bucket: str,
    tmp_path: Path,
    mapped_below: Callable[[], int],
    order: Any,
) -> None:
    with IndexedDatasetWriter(f"s3://{bucket}/pair", np.uint16, storage=s3_storage) as writer:
        writer.add_index(first_prefix(config))
    cached = replace(s3_storage, cache_dir=str(tmp_path / "pages"), cache_max_bytes=1 << 30)
    remote = replace(config, blend=[f"s3://{bucket}/pair"], storage=cached, order=order)
    for _ in range(2):
        loader = StreamLoader(remote, micro_batch_size=2, global_batch_size=GLOBAL)
        next(loader)
        assert mapped_below()
        loader.close()
        del loader
        assert mapped_below() == 0


def test_document_bounds_come_with_the_batches_that_need_them(config: DataConfig) -> None:
    with StreamLoader(
        replace(config, eod_id=7, reset_attention_mask=True),
        micro_batch_size=6,
        global_batch_size=6,
    ) as loader:
        found = 0
        for batch in loader:
            for row, bounds in zip(batch["tokens"], batch["cu_seqlens"], strict=True):
                starts = [0, *(int(n) + 1 for n in torch.nonzero(row == 7) if n + 1 < 16)]
                assert [int(b) for b in bounds if b < 16] == starts
                assert bounds[-1] == 16
                found += len(starts) - 1
        assert found


@pytest.mark.guarantee("order-never-changes")
def test_the_golden_sequential_order(tmp_path: Path) -> None:
    """Changing these numbers is a breaking change: bump the order version, and say so first in the
    CHANGELOG.
    """
    write_dataset(tmp_path / "g", [np.arange(10 * n, 10 * n + 3 + n) for n in range(5)])
    config = DataConfig(
        blend=str(tmp_path / "g"),
        sequence_length=6,
        order="sequential",
        storage=StorageConfig(cache_dir=tmp_path),
    )
    batches = list(StreamLoader(config, micro_batch_size=2, global_batch_size=2))
    assert batches[0]["tokens"].tolist() == [[0, 1, 2, 10, 11, 12], [13, 20, 21, 22, 23, 24]]
    assert batches[1]["tokens"].tolist() == [[30, 31, 32, 33, 34, 35], [40, 41, 42, 43, 44, 45]]
    assert len(batches) == 2


@pytest.mark.parametrize("with_cache", [False, True])
def test_a_loader_of_remote_data_is_copied_after_an_iteration(
    config: DataConfig,
    s3_storage: StorageConfig,
    bucket: str,
    with_cache: bool,
    tmp_path: Path,
) -> None:
    write_dataset(f"s3://{bucket}/pair", [np.arange(2000)], storage=s3_storage)
    storage = replace(
        s3_storage, cache_dir=tmp_path / "cache", cache_max_bytes=1 << 30 if with_cache else 0
    )
    remote = replace(config, blend=[f"s3://{bucket}/pair"], storage=storage)
    sizes: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 2}
    with StreamLoader(remote, **sizes, metrics_port=0) as loader:
        loader.take()
        loader.close()
        copies = [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]  # noqa: S301
        following = loader.take()
    for one in copies:
        assert one.stats()["batches"] == 0, "a copy counts its own batches"
        with one:
            assert torch.equal(one.take()["tokens"], following["tokens"])
        assert one.stats()["batches"] == 1
