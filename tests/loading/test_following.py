"""Runs that take in by themselves what is appended: once for all ranks, and for every resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import (
    DataConfig,
    FollowConfig,
    PhaseConfig,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
)
from streammega.dataset.append import append
from streammega.dataset.manifest import version_url
from streammega.errors import ConfigError, FormatError, StateError
from streammega.samples.append_log import FORMAT, VERSION, AppendLog
from streammega.samples.auto_append import recorded
from streammega.storage import save_bytes
from tests.support.builders import put_dataset
from tests.support.servers import S3

LENGTH = 8
EVERY = 20
BATCH = 4
EOD = 60_001
"""No id of the data."""


@pytest.fixture
def web(tmp_path: Path) -> str:
    """A dataset with one version."""
    prefix = put_dataset(f"{tmp_path}/web", seed=0)
    append(prefix, [put_dataset(f"{tmp_path}/web-a", seed=1)])
    return prefix


def grow(web: str, name: str) -> None:
    append(web, [put_dataset(f"{web}-{name}", seed=ord(name))])


def config_of(web: str, **options: Any) -> DataConfig:
    folder = Path(web).parent
    settings: dict[str, Any] = {
        "blend": [f"{web}@1"],
        "follow": FollowConfig(check_every_samples=EVERY, log_url=str(folder / "record")),
        "index_cache_dir": folder / "cache",
        "shuffle_lanes": 4,
        "shuffle_block_bytes": 64,
    } | options
    return DataConfig(sequence_length=LENGTH, order="stream", split="1,0,0", **settings)


def opened(config: DataConfig, rank: int = 0, ranks: int = 1, **options: Any) -> StreamLoader:
    settings: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": BATCH} | options
    return StreamLoader(config, dp_rank=rank, dp_size=ranks, **settings)


def take(loader: StreamLoader, until: int) -> dict[int, bytes]:
    """{sample: its tokens} of this rank, up to a sample."""
    found = {}
    while loader.consumed_samples < until:
        ids = loader.dataset.sample_ids(loader.consumed_samples).tolist()
        rows = loader.take()["tokens"].numpy()
        for sample, row in zip(ids, rows, strict=True):
            found[sample] = row.tobytes()
    return found


def versions_in(config: DataConfig) -> list[tuple[int, Any]]:
    return [(phase.first_sample, phase.blend) for phase in recorded(config).phases]


@pytest.mark.guarantee("run-takes-appended")
def test_what_is_appended_joins_where_it_is_looked_for(web: str) -> None:
    config = config_of(web)
    with opened(config) as loader:
        read = take(loader, 12)
        grow(web, "b")
        read |= take(loader, 36)
        grow(web, "c")
        grow(web, "d")
        read |= take(loader, 100)
        state = loader.state_dict()
    assert len(state["order"]) < 1000
    assert versions_in(config) == [
        (20, [f"{web}@1", f"{web}@1..2"]),
        (40, [f"{web}@1", f"{web}@1..2", f"{web}@2..4"]),
    ]
    by_hand = replace(recorded(config), follow=None)
    with opened(by_hand) as loader:
        assert take(loader, 100) == read, "as phases of a config"
        assert loader.state_dict() == state
    assert len(set(read.values())) == len(read), "nothing twice in an epoch"


@pytest.mark.guarantee("run-takes-appended")
def test_every_rank_and_resume_takes_in_the_same(web: str) -> None:
    config = config_of(web)
    grow(web, "b")
    read: dict[int, bytes] = {}
    with opened(config, 0, 2) as first:
        read |= take(first, 28)
        grow(web, "c")  # between two ranks that come to the same sample
        with opened(config, 1, 2) as second:
            read |= take(second, 28)
            assert second.state_dict() == first.state_dict()
            state = json.loads(json.dumps(first.state_dict()))
        take(first, 50)  # and is killed: what it has chosen stays chosen
    grow(web, "d")
    with opened(config, micro_batch_size=4) as resumed:
        resumed.load_state_dict(state)
        read |= take(resumed, 100)
    assert versions_in(config)[:2] == [
        (20, [f"{web}@1", f"{web}@1..2"]),
        (40, [f"{web}@1", f"{web}@1..2", f"{web}@2..3"]),
    ]
    with opened(config, micro_batch_size=2) as again:
        assert take(again, 100) == read


@pytest.mark.guarantee("run-takes-appended")
@given(data=st.data())
@settings(max_examples=12)
def test_any_kills_ranks_and_producers_read_what_the_record_says(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ranks go on by drawn turns, a producer appends in between, and all are killed and go on as
    other ranks from a state of any of them, which is at the end of a step.
    """
    folder = tmp_path_factory.mktemp("drawn")
    web = put_dataset(f"{folder}/web", seed=0)
    append(web, [put_dataset(f"{web}-0", seed=1)])
    every = data.draw(st.sampled_from([6, 20, 32]))
    follow = FollowConfig(check_every_samples=every, log_url=f"{folder}/record")
    config = config_of(web, follow=follow)
    read: dict[int, bytes] = {}
    state: dict[str, Any] | None = None
    appended = 0
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.sampled_from([1, 2, 4]))
        ranks = [opened(config, rank, size) for rank in range(size)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        for _ in range(data.draw(st.integers(1, 6))):
            if appended < 4 and data.draw(st.booleans()):
                appended += 1
                append(web, [put_dataset(f"{web}-{appended}", seed=1 + appended)])
            loader = data.draw(st.sampled_from(ranks))
            steps = data.draw(st.integers(1, 6))
            for sample, tokens in take(loader, loader.consumed_samples + steps * BATCH).items():
                assert read.setdefault(sample, tokens) == tokens, "as it was read before"
        state = json.loads(json.dumps(data.draw(st.sampled_from(ranks)).state_dict()))
        for loader in ranks:
            loader.close()
    end = max(read) + 1
    with opened(replace(recorded(config), follow=None)) as loader:
        by_hand = take(loader, -(-end // BATCH) * BATCH)
    assert read == {sample: by_hand[sample] for sample in read}
    assert len(set(by_hand.values())) == len(by_hand), "nothing twice in an epoch"


@pytest.mark.guarantee("run-takes-appended")
def test_a_record_and_its_datasets_may_lie_in_a_bucket(web: str, tmp_path: Path, moto: S3) -> None:
    storage = StorageConfig(storage_options=moto.options, request_timeout=60)
    root = f"s3://{moto.new_bucket()}"
    grow(web, "b")
    for path in tmp_path.iterdir():
        save_bytes(f"{root}/{path.name}", path.read_bytes(), storage)
    follow = FollowConfig(check_every_samples=EVERY, log_url=f"{root}/record/")
    ended = {"num_samples": (32, 0, 0)}  # so that little is read ahead
    config = config_of(web, blend=[f"{root}/web@1"], follow=follow, storage=storage, **ended)
    with opened(config, 0, 2) as first, opened(config, 1, 2) as second:
        read = take(first, 32) | take(second, 32)
        assert first.state_dict() == second.state_dict()
    assert versions_in(config) == [(20, [f"{root}/web@1", f"{root}/web@1..2"])]
    with opened(config_of(web)) as local:
        assert take(local, 32) == read


@pytest.mark.guarantee("run-takes-appended")
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_agree_and_their_state_tells_what_joined(web: str, workers: int) -> None:
    config = config_of(web, num_samples=(100, 0, 0))
    dataset = StreamingDataset(config, micro_batch_size=4, global_batch_size=BATCH)
    grow(web, "b")
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
    rows = [batch["tokens"].numpy().tobytes() for batch in loader]
    state = dataset.state_dict(num_batches=10)
    with opened(config, micro_batch_size=4) as alone:
        assert rows == list(by_batch(take(alone, 100)))
        alone.seek(40)
        assert alone.state_dict() == state
    assert versions_in(config) == [(20, [f"{web}@1", f"{web}@1..2"])]


def by_batch(found: dict[int, bytes]) -> Iterator[bytes]:
    rows = list(found.values())
    for first in range(0, len(rows), BATCH):
        yield b"".join(rows[first : first + BATCH])


@pytest.mark.guarantee("run-takes-appended")
def test_who_asks_ahead_changes_nothing(web: str) -> None:
    """A batch or a state of later samples has something join, which was read ahead without it."""
    config = config_of(web, eod_id=3, reset_attention_mask=True, balance_attention_cost=True)
    grow(web, "b")
    with opened(config) as loader:
        read = take(loader, 12)
        ahead = loader.dataset.batch(24)["tokens"].numpy()[0].tobytes()
        (sample,) = loader.dataset.sample_ids(24).tolist()
        read |= take(loader, 60)
        assert read[sample] == ahead
    by_hand = replace(recorded(config), follow=None)
    with opened(by_hand) as loader:
        assert take(loader, 60) == read


@pytest.mark.guarantee("run-takes-appended")
def test_ranks_that_read_nothing_take_in_the_same(web: str) -> None:
    config = config_of(web)
    grow(web, "b")
    with opened(config) as reads, opened(config) as passes:
        passes.load_state_dict(reads.state_dict())
        while reads.consumed_samples < 60:
            passes.pass_over()
            reads.take()
            assert passes.state_dict() == reads.state_dict()
    assert passes.dataset.samples.files[1][0].key == f"{web}-b.bin"


@pytest.mark.guarantee("run-takes-appended")
def test_weights_are_shared_out_so_that_the_dataset_keeps_its_own(web: str) -> None:
    code = put_dataset(f"{web}-code", seed=7)
    config = config_of(web, blend=[(f"{web}@1", 0.6), (code, 0.4)])
    grow(web, "b")
    with opened(config) as loader:
        take(loader, 24)
    ((_, blend),) = versions_in(config)
    names = [name for name, _ in blend]
    assert names == [f"{web}@1", code, f"{web}@1..2"]
    np.testing.assert_allclose([weight for _, weight in blend], [0.4, 0.4, 0.2])


@pytest.mark.guarantee("run-takes-appended")
def test_what_joins_is_of_the_source_that_it_was_appended_to(web: str) -> None:
    code = put_dataset(f"{web}-code", seed=7)
    config = config_of(web, blend=[(code, 0.4), (f"{web}@1", 0.6)], return_dataset_ids=True)
    grow(web, "b")
    share = {0: 0, 1: 0}
    with opened(config, micro_batch_size=4) as loader:
        while loader.consumed_samples < 200:
            consumed = loader.consumed_samples
            batch = loader.take()
            told = loader.dataset.dataset_ids(consumed)
            assert batch["dataset_id"].tolist() == told.tolist()
            for source in told.tolist():
                share[source] += 1
    assert versions_in(config)
    assert abs(share[0] - 80) < 8


@pytest.mark.guarantee("run-takes-appended")
def test_ranks_that_read_nothing_know_the_sources_of_what_joined(web: str) -> None:
    code = put_dataset(f"{web}-code", seed=7)
    config = config_of(web, blend=[(f"{web}@1", 0.5), (code, 0.5)], return_dataset_ids=True)
    grow(web, "b")
    with opened(config) as loader:
        read = [loader.take()["dataset_id"].tolist() for _ in range(60)]
    follow = FollowConfig(check_every_samples=EVERY, log_url=str(Path(web).with_name("again")))
    with opened(replace(config, follow=follow)) as other:  # before anything is known to it
        assert [other.dataset.dataset_ids(sample).tolist() for sample in range(60)] == read
    with opened(replace(config, follow=follow)) as other:
        every = other.dataset.dataset_ids(np.arange(60))
        assert every.tolist() == read


@pytest.mark.guarantee("run-takes-appended")
def test_what_phases_spell_in_two_ways_is_followed(
    web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(web).parent)
    phases = [PhaseConfig(first_sample=12, blend=["./web@1"])]
    config = config_of(web, blend=["web@1"], phases=phases, return_dataset_ids=True)
    grow(web, "b")
    with opened(config) as loader:
        read = take(loader, 60)
        assert loader.take()["dataset_id"].tolist() == [0]
    assert versions_in(config)[-1] == (20, ["./web@1", "./web@1..2"])
    assert len(set(read.values())) == len(read), "nothing twice in an epoch"


@pytest.mark.guarantee("run-takes-appended")
def test_a_version_that_cannot_be_read_is_left_out_and_looked_at_again(
    web: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(web)
    grow(web, "b")
    damaged = Path(version_url(web, 2))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-20])
    with opened(config) as loader:
        take(loader, 24)
        assert "left out until it can be read" in caplog.text
        assert versions_in(config) == []
        damaged.write_bytes(whole)
        take(loader, 44)
    assert versions_in(config) == [(40, [f"{web}@1", f"{web}@1..2"])]


@pytest.mark.guarantee("run-takes-appended")
def test_a_phase_by_hand_goes_with_it(web: str) -> None:
    code = put_dataset(f"{web}-code", seed=7)
    phases = [PhaseConfig(first_sample=40, blend=[f"{web}@1", f"{web}@1..2", code])]
    config = config_of(web, phases=phases)
    grow(web, "b")
    with opened(config) as loader:
        take(loader, 44)
        grow(web, "c")
        take(loader, 100)
    assert versions_in(config) == [
        (20, [f"{web}@1", f"{web}@1..2"]),
        (40, [f"{web}@1", f"{web}@1..2", code]),
        (60, [f"{web}@1", f"{web}@1..2", code, f"{web}@2..3"]),
    ]


@pytest.mark.guarantee("excluded-documents-columns")
def test_documents_are_excluded_while_versions_join(web: str, tmp_path: Path) -> None:
    """By the names that stood in a file of them when the run was begun."""
    names = tmp_path / "names.txt"
    named = [f"web-a#{number}" for number in range(40)]
    names.write_text("\n".join(named))
    config = config_of(web, eod_id=EOD, exclude_documents=[(8, str(names))])
    with opened(config, 0, 2) as first, opened(config, 1, 2) as second:
        read = take(first, 12) | take(second, 12)
        names.write_text("\n".join([*named, *(f"web#{number}" for number in range(40))]))
        grow(web, "b")
        read |= take(first, 100) | take(second, 100)
        state = first.state_dict()
        assert second.state_dict() == state
    assert versions_in(config) == [(20, [f"{web}@1", f"{web}@1..2"])]
    with opened(config) as edited, pytest.raises(StateError, match="exclude_documents"):
        edited.load_state_dict(state)
    names.write_text("\n".join(named))
    by_hand = replace(recorded(config), follow=None)
    with opened(by_hand) as loader:
        assert take(loader, 100) == read
        assert loader.state_dict() == state
    unseen = {sample for sample, row in read.items() if EOD in np.frombuffer(row, np.int64)}
    assert len(unseen) > 10
    assert min(unseen) >= 8
    with opened(config) as resumed:
        resumed.load_state_dict(state)


@pytest.mark.guarantee("run-takes-appended")
def test_what_a_phase_by_hand_left_out_joins_again_as_it_was(web: str) -> None:
    config = config_of(web, phases=[PhaseConfig(first_sample=60, blend=[f"{web}@1"])])
    grow(web, "b")
    with opened(config) as loader:
        read = take(loader, 44)
        grow(web, "c")
        read |= take(loader, 100)
    assert versions_in(config)[1:] == [
        (60, [f"{web}@1"]),
        (80, [f"{web}@1", f"{web}@1..2", f"{web}@2..3"]),
    ]
    assert len(set(read.values())) == len(read), "nothing twice in an epoch"
    with opened(config) as loader:
        assert take(loader, 100) == read


@pytest.mark.guarantee("ranks-killed-between")
@pytest.mark.parametrize("phase", [None, 12])
@pytest.mark.parametrize("weights", [(0.1, 0.9), (None, None)])
def test_what_joined_a_blend_of_other_weights_is_refused(
    web: str, phase: int | None, weights: tuple[Any, Any]
) -> None:
    code = put_dataset(f"{web}-code", seed=7)
    config = config_of(web, blend=[(f"{web}@1", 0.7), (code, 0.3)])
    grow(web, "b")
    with opened(config) as loader:
        take(loader, 24)
    in_percent = replace(config, blend=[(f"{web}@1", 70), (code, 30)])
    assert versions_in(in_percent) == versions_in(config)
    given = zip((f"{web}@1", code), weights, strict=True)
    blend: Any = [name if weight is None else (name, weight) for name, weight in given]
    other = replace(config, blend=blend)
    if phase is not None:
        other = replace(config, phases=[PhaseConfig(first_sample=phase, blend=blend)])
    with pytest.raises(
        ConfigError, match="at sample 20 versions were appended to a blend with other weights"
    ):
        opened(other)
    Path(web).with_name("record").joinpath(f"{20:020d}.json").unlink()
    with opened(other) as loader:
        take(loader, 24)
    _, joined = versions_in(other)[-1]
    assert joined[-1] == f"{web}@1..2" or joined[-1][0] == f"{web}@1..2"


@pytest.mark.guarantee("run-takes-appended")
def test_a_run_may_begin_to_follow_in_the_middle(web: str) -> None:
    with opened(replace(config_of(web), follow=None)) as loader:
        read = take(loader, 32)
        state = loader.state_dict()
    grow(web, "b")
    config = config_of(web)
    with opened(config) as loader:
        loader.load_state_dict(state)
        read |= take(loader, 60)
    assert versions_in(config) == [(40, [f"{web}@1", f"{web}@1..2"])]
    with opened(config) as loader:
        assert take(loader, 60) == read


def test_a_log_that_is_removed_while_a_run_begins_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streammega.samples.append_log.read_if_exists", lambda *_: None)
    with pytest.raises(StateError, match="was written and is gone"):
        AppendLog(str(tmp_path / "record"), StorageConfig()).begin({"seed": 1})


@pytest.mark.guarantee("ranks-killed-between")
def test_the_record_is_of_one_run_and_the_state_is_refused_without_it(
    web: str, tmp_path: Path
) -> None:
    config = config_of(web)
    grow(web, "b")
    with opened(config) as loader:
        take(loader, 24)
        state = loader.state_dict()
    with (
        opened(replace(config, seed=5)) as loader,
        pytest.raises(ConfigError, match=r"record: is the log of another run"),
    ):
        loader.take()
    follow = FollowConfig(check_every_samples=EVERY, log_url=str(tmp_path / "elsewhere"))
    with (
        opened(replace(config, follow=follow)) as loader,
        pytest.raises(StateError, match=r"phases\.1: the checkpoint has"),
    ):
        loader.load_state_dict(state)
    newer = {"format": FORMAT, "version": VERSION + 1, "more": []}
    Path(f"{tmp_path}/record/{20:020d}.json").write_text(json.dumps(newer))
    with pytest.raises(FormatError, match="resume the run with a newer streammega"):
        opened(config)
    of_mapping = {"format": FORMAT, "version": VERSION, "sample": 20, "segments": {"": None}}
    for damaged in ('{"format"', json.dumps(of_mapping)):
        Path(f"{tmp_path}/record/{20:020d}.json").write_text(damaged)
        with pytest.raises(FormatError, match="is a damaged log of what a run took in"):
            opened(config)


@pytest.mark.guarantee("ranks-killed-between")
def test_what_joined_ahead_must_fit_the_steps_of_a_resume(web: str) -> None:
    config = config_of(web, shuffle_lanes=12)
    with opened(config) as loader:
        take(loader, 4)
        state = loader.state_dict()
        grow(web, "b")
        take(loader, 24)
    with (
        opened(config, global_batch_size=6, micro_batch_size=6) as loader,
        pytest.raises(StateError, match="sample 20, ahead of sample 4"),
    ):
        loader.load_state_dict(state)


def test_what_cannot_be_followed_says_why(web: str) -> None:
    follow = FollowConfig(check_every_samples=EVERY)
    with pytest.raises(ConfigError, match="follow belongs to the stream order"):
        DataConfig(blend=[f"{web}@1"], sequence_length=8, follow=follow)
    with pytest.raises(ConfigError, match="give its weights to phases"):
        config_of(web, blend_schedule=[(10, [1.0])])
    with pytest.raises(ConfigError, match=r"follow\.log_url is not given"):
        opened(config_of(web, follow=follow))
    with pytest.raises(ConfigError, match=r"by a version, such as web@7, but the blend names none"):
        opened(config_of(web, blend=[web]))
    with pytest.raises(ConfigError, match=r"follow\.check_every_samples is 0"):
        FollowConfig(check_every_samples=0)
    for empty in ("", "/"):
        with pytest.raises(ConfigError, match=r"follow\.log_url is empty"):
            FollowConfig(check_every_samples=1, log_url=empty)
    with pytest.raises(ConfigError, match="it must be a FollowConfig"):
        config_of(web, follow={"check_every_samples": 20})


@pytest.mark.guarantee("ranks-killed-between")
def test_a_place_without_conditional_writes_is_refused(
    web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streammega.storage.backends.local import LocalStore
    from streammega.storage.store import atomic_writer

    def writes_over(self: LocalStore, key: str, data: bytes, **_: Any) -> bool:
        with atomic_writer(self, key) as writer:
            writer.write(data)
        return True

    monkeypatch.setattr(LocalStore, "put", writes_over)
    with (
        opened(config_of(web)) as loader,
        pytest.raises(ConfigError, match=r"what is there is written over.*data\.follow\.log_url"),
    ):
        loader.take()
