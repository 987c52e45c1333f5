"""Phases of the Megatron order: each is the run that its own settings would make, on any ranks and
through any resume; what is past stays, and documents are found in them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import DataConfig, PhaseConfig, StreamingDataset, StreamLoader
from streammega.errors import ConfigError, StateError
from streammega.samples.build import build_datasets
from streammega.samples.open import prepare
from streammega.samples.provenance import Provenance
from tests.support.builders import write_random_pair

BATCH = 12
STARTS = (0, 60, 96)
SAMPLES = 240


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three datasets: web, code and math, and the folder of their indices."""
    root = tmp_path_factory.mktemp("restarted")
    for seed, name in enumerate(("web", "code", "math")):
        write_random_pair(str(root / name), 30, 60, seed=seed)
    return root


def config_of(data: Path, **options: Any) -> DataConfig:
    """Web and code; then math alone, of longer samples; then all of them."""
    web, code, math = (f"{data}/{name}" for name in ("web", "code", "math"))
    phases = [
        PhaseConfig(first_sample=STARTS[1], blend=[math], sequence_length=24),
        PhaseConfig(first_sample=STARTS[2], blend=[(math, 0.2), (web, 0.5), (code, 0.3)]),
    ]
    given: dict[str, Any] = {
        "blend": [(web, 0.6), (code, 0.4)],
        "sequence_length": 16,
        "num_samples": (SAMPLES, 0, 0),
        "phases": phases,
        "index_cache_dir": data / "indices",
        "return_dataset_ids": True,
    }
    return DataConfig(**(given | options))


def alone(data: Path, number: int) -> DataConfig:
    """The run that a phase would be by itself."""
    config = config_of(data)
    ends = (*STARTS[1:], SAMPLES)
    given: dict[str, Any] = {"num_samples": (ends[number] - STARTS[number], 0, 0)}
    if number:
        given |= {"blend": config.phases[number - 1].blend, "sequence_length": 24}
    return replace(config, phases=(), **given)


@pytest.fixture(scope="module")
def wanted(data: Path) -> list[bytes]:
    """The tokens of each sample, of the runs that the phases are by themselves."""
    rows: list[bytes] = []
    ends = (*STARTS[1:], SAMPLES)
    for number, end in enumerate(ends):
        samples, _, _ = build_datasets(alone(data, number))
        assert samples is not None
        assert not isinstance(samples, list)
        for sample in range(end - STARTS[number]):
            rows.append(samples[sample]["tokens"].numpy().tobytes())
    return rows


def read(
    config: DataConfig, ranks: int, micro: int, stop: int, state: Any = None
) -> tuple[dict[int, bytes], dict[str, Any]]:
    """({sample: its tokens} up to `stop`, over all ranks, the state there)."""
    found: dict[int, bytes] = {}
    for rank in range(ranks):
        with StreamLoader(
            config, micro_batch_size=micro, global_batch_size=BATCH, dp_rank=rank, dp_size=ranks
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            while loader.consumed_samples < stop:
                consumed = loader.consumed_samples
                ids = loader.dataset.sample_ids(consumed).tolist()
                batch = loader.take()
                told = loader.dataset.dataset_ids(consumed)
                assert batch["dataset_id"].tolist() == told.tolist()
                for sample, tokens in zip(ids, batch["tokens"], strict=True):
                    found[sample] = tokens.numpy().tobytes()
            after = loader.state_dict()
    return found, after


@pytest.mark.guarantee("megatron-order-phase")
@settings(max_examples=8)
@given(
    stops=st.lists(st.integers(1, SAMPLES // BATCH - 1), max_size=3, unique=True),
    ranks=st.lists(st.sampled_from([1, 2, 4]), min_size=4, max_size=4),
    micro=st.sampled_from([1, 3]),
)
def test_each_phase_is_the_run_of_its_own_settings_on_any_ranks_through_any_resumes(
    data: Path, wanted: list[bytes], stops: list[int], ranks: list[int], micro: int
) -> None:
    found: dict[int, bytes] = {}
    state = None
    for dp_size, steps in zip(ranks, [*sorted(stops), SAMPLES // BATCH], strict=False):
        part, state = read(config_of(data), dp_size, micro, steps * BATCH, state)
        assert not found.keys() & part.keys()
        found |= part
    assert [found[sample] for sample in range(SAMPLES)] == wanted


@pytest.mark.guarantee("megatron-order-phase")
def test_workers_go_through_all_phases(data: Path, wanted: list[bytes]) -> None:
    dataset = StreamingDataset(config_of(data), micro_batch_size=3, global_batch_size=BATCH)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    rows = [row.numpy().tobytes() for batch in loader for row in batch["tokens"]]
    assert rows[:SAMPLES] == wanted


def test_datasets_are_numbered_over_all_phases(data: Path) -> None:
    dataset = StreamingDataset(config_of(data), micro_batch_size=1, global_batch_size=BATCH)
    ids = dataset.dataset_ids(np.arange(SAMPLES)).reshape(-1)
    assert [set(ids[start:stop]) for start, stop in ((0, 60), (60, 96), (96, SAMPLES))] == [
        {0, 1},
        {2},
        {0, 1, 2},
    ]


# --- the past ---


@pytest.mark.guarantee("megatron-order-phase")
def test_phases_to_come_may_be_changed_and_those_begun_may_not(data: Path) -> None:
    config = config_of(data)
    _, at_transition = read(config, 1, 3, STARTS[2])
    _, within = read(config, 1, 3, STARTS[2] + BATCH)
    first, second = config.phases
    web = [f"{data}/web"]
    another_end = replace(config, phases=[first, replace(second, blend=web)])
    with StreamLoader(another_end, micro_batch_size=1, global_batch_size=BATCH) as loader:
        loader.load_state_dict(at_transition)
        with pytest.raises(StateError, match=r"phases\.2"):
            loader.load_state_dict(within)
    another_past = replace(config, phases=[replace(first, blend=web), second])
    with (
        StreamLoader(another_past, micro_batch_size=1, global_batch_size=BATCH) as loader,
        pytest.raises(StateError, match=r"phases\.1\.dataset"),
    ):
        loader.load_state_dict(at_transition)


@pytest.mark.guarantee("megatron-order-phase")
def test_how_long_a_phase_is_belongs_to_its_order(data: Path) -> None:
    config = config_of(data)
    _, state = read(config, 1, 3, BATCH)
    first, second = config.phases
    moved = replace(config, phases=[replace(first, first_sample=72), second])
    with (
        StreamLoader(moved, micro_batch_size=1, global_batch_size=BATCH) as loader,
        pytest.raises(StateError, match="num_samples: the checkpoint has"),
    ):
        loader.load_state_dict(state)


def test_a_state_of_phases_is_small(data: Path) -> None:
    _, state = read(config_of(data), 1, 3, SAMPLES)
    assert len(str(state)) < 1024


# --- documents ---


@pytest.mark.guarantee("megatron-order-phase")
def test_documents_are_found_in_every_phase(data: Path) -> None:
    provenance = Provenance(config_of(data), "train", BATCH)
    for sample in (0, 59, 60, 95, 96, SAMPLES - 1):
        (traced,) = provenance.trace([sample])
        for run in traced.runs:
            found = provenance.uses([run.name], end=SAMPLES)
            assert (sample, run.start) in [(one.sample, one.start) for one in found]
    tokens, sizes = provenance.tokens([0, 60])
    assert tokens.shape == (2, 25)
    assert sizes.tolist() == [17, 25]


@pytest.mark.guarantee("megatron-order-phase")
def test_indices_of_all_phases_are_built_ahead(data: Path, tmp_path: Path) -> None:
    config = config_of(data, index_cache_dir=tmp_path)
    prepared = list(prepare(config))
    assert sorted(Path(done.prefix).name for done in prepared) == [
        *("code", "code"),
        *("math", "math"),
        *("web", "web"),
    ]
    built = {path: path.stat().st_mtime_ns for path in (tmp_path / "order").glob("*.npy")}
    read(config, 1, 3, SAMPLES)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "order").glob("*.npy")} == built


# --- phases that mean nothing ---


@pytest.mark.guarantee("megatron-order-phase")
@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"global_batch_size": 24}, "phase 1 sets global_batch_size, which is of the stream order"),
        ({"shuffle_lanes": 24}, "phase 1 sets shuffle_lanes, which is of the stream order"),
        (
            {"restart_datasets": ["web"]},
            "phase 1 sets restart_datasets, which is of the stream order",
        ),
    ],
)
def test_what_megatrons_phases_do_not_change_is_refused(
    data: Path, phase: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(data, phases=[PhaseConfig(first_sample=BATCH, **phase)])


def opened(config: DataConfig) -> StreamingDataset:
    return StreamingDataset(config, micro_batch_size=1, global_batch_size=BATCH)


def test_phases_behind_the_samples_that_are_asked_are_refused(data: Path) -> None:
    with pytest.raises(
        ConfigError, match="phase 2 begins at sample 96; ask for the samples of all"
    ):
        opened(config_of(data, num_samples=(96, 0, 0)))


def test_a_phase_of_fewer_samples_than_it_lasts_is_named(data: Path) -> None:
    names = [f"{data}/web", f"{data}/code"]
    phase = PhaseConfig(first_sample=BATCH, blend=names)
    with pytest.raises(
        ConfigError, match="phase 1 has 99996 samples, but one epoch of its datasets"
    ):
        opened(config_of(data, phases=[phase], num_samples=(100_008, 0, 0)))


def test_a_phase_begins_at_the_end_of_a_step(data: Path) -> None:
    with pytest.raises(ConfigError, match="phase 1 begins at sample 50"):
        opened(config_of(data, phases=[PhaseConfig(first_sample=50)]))


def test_datasets_of_phases_are_not_built_as_one(data: Path) -> None:
    with pytest.raises(ConfigError, match="train has phases, which are datasets of their own"):
        build_datasets(config_of(data))


def test_a_phase_is_told_by_a_step_or_by_tokens_too(data: Path) -> None:
    config = config_of(data)
    first, second = config.phases
    told = [
        replace(first, first_sample=0, first_step=STARTS[1] // BATCH + 1),
        replace(second, first_sample=0, first_token=STARTS[1] * 16 + (STARTS[2] - STARTS[1]) * 24),
    ]
    ids = np.arange(SAMPLES)
    located = [opened(one).samples.locate(ids) for one in (config, replace(config, phases=told))]
    for name in ("row_splits", "dataset", "start", "stop"):
        assert np.array_equal(getattr(located[0], name), getattr(located[1], name))
