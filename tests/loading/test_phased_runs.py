"""Runs of several phases: any ranks read what the phases say, through resumes, and the past stays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

import streammega
from streammega import DataConfig, PhaseConfig, StreamingDataset, StreamLoader
from streammega.config import StorageConfig
from streammega.errors import ConfigError, StateError
from streammega.order.state import differing_values
from streammega.samples.document_names import DocumentName
from streammega.samples.open import open_source
from streammega.samples.provenance import Provenance
from tests.support.builders import write_random_pair
from tests.support.examples import examples
from tests.support.servers import http_server

LENGTH = 16
BATCH = 24
END = 732
"""Samples that are compared: some steps into the last phase."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three datasets: web, code and math."""
    root = tmp_path_factory.mktemp("phased")
    for seed, name in enumerate(("web", "code", "math")):
        write_random_pair(str(root / name), 60, 120, seed=seed)
    return root


def config_of(root: str | Path, **options: Any) -> DataConfig:
    """Web and code; then math joins and the batch is halved; then web comes back without math."""
    phases = [
        PhaseConfig(
            first_sample=240,
            blend=[(f"{root}/code", 0.5), (f"{root}/math", 0.5)],
            global_batch_size=12,
        ),
        PhaseConfig(
            first_sample=492,  # in the middle of a row of lanes
            blend=[(f"{root}/web", 0.8), (f"{root}/code", 0.2)],
            global_batch_size=48,
        ),
    ]
    settings: dict[str, Any] = {
        "shuffle_lanes": 48,
        "shuffle_block_bytes": 256,
        "phases": phases,
    } | options
    blend = settings.pop("blend", [(f"{root}/web", 0.6), (f"{root}/code", 0.4)])
    return DataConfig(blend=blend, sequence_length=LENGTH, order="stream", **settings)


def read(
    config: DataConfig,
    ranks: int,
    micro: int,
    stop: int,
    state: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[dict[int, bytes], dict[str, Any]]:
    """({sample: its tokens} up to `stop`, over all ranks, the state there)."""
    found: dict[int, bytes] = {}
    for rank in range(ranks):
        with StreamLoader(
            config,
            micro_batch_size=micro,
            global_batch_size=BATCH,
            dp_rank=rank,
            dp_size=ranks,
            **options,
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            while loader.consumed_samples < stop:
                ids = loader.dataset.sample_ids(loader.consumed_samples)
                batch = loader.take()
                for sample, tokens in zip(ids.tolist(), batch["tokens"], strict=True):
                    assert sample not in found
                    found[sample] = tokens.numpy().tobytes()
            after = loader.state_dict()
    return found, after


@pytest.fixture(scope="module")
def wanted(data: Path) -> dict[int, bytes]:
    """{sample: its tokens}, from the files themselves."""
    found = streammega.locate(config_of(data), np.arange(END), global_batch_size=BATCH)
    files = [np.fromfile(f"{data}/{name}.bin", np.uint16) for name in ("web", "code", "math")]
    runs = zip(found.dataset.tolist(), found.start.tolist(), strict=True)
    return {
        sample: files[dataset][start : start + LENGTH].astype(np.int64).tobytes()
        for sample, (dataset, start) in enumerate(runs)
    }


def test_the_datasets_of_a_phase_are_read_in_their_shares(data: Path) -> None:
    dataset = streammega.locate(
        config_of(data), np.arange(END), global_batch_size=BATCH
    ).dataset.astype(np.int64)
    bounds = [0, 240, 492, END]
    shares = [
        np.bincount(dataset[low:high], minlength=3) / (high - low)
        for low, high in zip(bounds, bounds[1:], strict=False)
    ]
    np.testing.assert_allclose(shares, [[0.6, 0.4, 0], [0, 0.5, 0.5], [0.8, 0.2, 0]], atol=0.05)


@pytest.mark.many_examples
@pytest.mark.guarantee("ranks-micro-batches")
@given(
    resumes=st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from([(1, 12), (2, 3), (4, 1), (12, 1)])),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=examples(4), deadline=None)
def test_any_ranks_read_what_the_phases_say_through_any_resumes(
    data: Path, wanted: dict[int, bytes], resumes: list[tuple[int, tuple[int, int]]]
) -> None:
    config = config_of(data)
    schedule = StreamingDataset(config, micro_batch_size=1, global_batch_size=BATCH).steps.schedule
    found: dict[int, bytes] = {}
    state = None
    steps = 0
    for more, (ranks, micro) in resumes:
        steps += more
        stop = min(schedule.samples_after(steps), END)
        part, state = read(config, ranks, micro, stop, state)
        found |= part
    assert state is not None
    part, _ = read(config, 3, 4, END, state)
    assert found | part == wanted


@pytest.mark.guarantee("ranks-micro-batches")
def test_workers_of_a_dataloader_read_the_phases_in_order(
    data: Path, wanted: dict[int, bytes]
) -> None:
    config = config_of(data, num_samples=(END, 0, 0))
    dataset = StreamingDataset(config, micro_batch_size=12, global_batch_size=BATCH)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    tokens = [row.numpy().tobytes() for batch in loader for row in batch["tokens"]]
    assert tokens == list(wanted.values())


@pytest.fixture(scope="module")
def remote(data: Path) -> Iterator[Any]:
    objects = {f"/{path.name}": path.read_bytes() for path in data.glob("*.*")}
    with http_server(objects) as server:
        yield server


@pytest.mark.guarantee("ranks-micro-batches")
def test_pieces_are_fetched_whole_in_every_phase(
    remote: Any, tmp_path: Path, wanted: dict[int, bytes]
) -> None:
    """Also where the last phase begins in the middle of a row, and a dataset of another phase has
    its lanes' pieces open.
    """
    config = config_of(remote.url, storage=StorageConfig(cache_dir=tmp_path))
    found, _ = read(config, 4, 3, END)
    assert found == wanted


# --- samples of another length ---


def longer(root: str | Path, **options: Any) -> DataConfig:
    """Web in samples of 16; then of 24 beside math, in fewer lanes; then both of 32, going on with what is
    left of their epochs.
    """
    both = [(f"{root}/web", 0.6), (f"{root}/math", 0.4)]
    phases = [
        PhaseConfig(first_sample=96, blend=both, sequence_length=24, shuffle_lanes=24),
        PhaseConfig(
            first_sample=240,
            sequence_length=32,
            global_batch_size=12,
            shuffle_lanes=48,
        ),
    ]
    return config_of(root, blend=[f"{root}/web"], phases=phases, **options)


def length_at(sample: int) -> int:
    if sample < 96:
        return 16
    return 24 if sample < 240 else 32


@pytest.mark.guarantee("phase-samples-may")
def test_samples_are_longer_from_a_phase_on(data: Path, remote: Any, tmp_path: Path) -> None:
    """On any ranks, from object storage too, and resumed on both sides of the change."""
    config = longer(data)
    found = streammega.locate(config, np.arange(480), global_batch_size=BATCH)
    # numbered by first appearance: web, math
    files = [np.fromfile(f"{data}/{name}.bin", np.uint16) for name in ("web", "math")]
    wanted = {}
    joined = 0
    for sample in range(480):
        rows = range(*found.row_splits[sample : sample + 2].tolist())
        runs = [files[found.dataset[row]][found.start[row] : found.stop[row]] for row in rows]
        tokens = np.concatenate(runs)[:-1]
        joined += len(runs) > 1
        assert len(tokens) == length_at(sample)
        wanted[sample] = tokens.astype(np.int64).tobytes()
    assert joined > 20
    assert read(config, 2, 6, 480)[0] == wanted
    assert (
        read(longer(remote.url, storage=StorageConfig(cache_dir=tmp_path)), 2, 6, 480)[0] == wanted
    )
    for stop in (120, 264):
        first, state = read(config, 1, 12, stop)
        second, _ = read(config, 2, 3, 480, state)
        assert first | second == wanted


@pytest.mark.guarantee("phase-samples-may")
def test_context_ranks_keep_their_parts_of_longer_samples(data: Path) -> None:
    config = longer(data)
    sizes: dict[str, Any] = {
        "micro_batch_size": 4,
        "global_batch_size": BATCH,
        "ids_only": True,
    }
    with StreamLoader(config, **sizes) as whole, StreamLoader(config, **sizes, cp_size=2) as part:
        for position in (72, 96, 120, 240, 252, 264):
            length = length_at(position)
            for loader in (whole, part):
                loader.seek(position)
            assert part.bounds == [(0, length // 4 + 1), (length * 3 // 4, length + 1)]
            samples = whole.take()["ids"]
            kept = part.take()["ids"].view(4, 2, -1)
            for number, (start, stop) in enumerate(part.bounds):
                assert (kept[:, number] == samples[:, start:stop]).all()


def test_a_longer_sample_is_batched_and_traced_as_it_is_read(data: Path) -> None:
    config = longer(data)
    dataset = StreamingDataset(config, micro_batch_size=2, global_batch_size=BATCH)
    assert dataset.batch(0)["tokens"].shape == (2, 16)
    assert dataset.batch(240)["tokens"].shape == (2, 32)
    provenance = Provenance(config, "train", BATCH)
    tokens, valid = provenance.tokens([0, 300])
    assert tokens.shape == (2, 33)
    assert valid.tolist() == [17, 33]
    scanned: dict[DocumentName, list[tuple[int, int, int]]] = {}
    for sample in provenance.trace(np.arange(480)):
        for run in sample.runs:
            scanned.setdefault(run.name, []).append((sample.sample, run.start, run.stop))
    found: dict[DocumentName, list[tuple[int, int, int]]] = {}
    for use in provenance.uses(list(scanned), end=480):
        found.setdefault(use.document, []).append((use.sample, use.start, use.stop))
    for name, expected in scanned.items():
        assert covered(found[name]) == covered(expected)


def covered(readings: list[tuple[int, int, int]]) -> set[tuple[int, int]]:
    """Every (sample, token of the document): runs may be cut in one and not in the other."""
    return {(sample, token) for sample, start, stop in readings for token in range(start, stop)}


def test_phases_of_other_lanes_or_lengths_that_mean_nothing_are_refused(data: Path) -> None:
    sizes: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": BATCH}
    for phase, message in (
        (
            PhaseConfig(first_sample=240, shuffle_lanes=36),
            "phase 1: global_batch_size 24 does not divide its 36 lanes",
        ),
        (PhaseConfig(first_sample=240, sequence_length=10**6), "phase 1: .*/web holds no sample"),
    ):
        with pytest.raises(ConfigError, match=message):
            StreamLoader(config_of(data, phases=[phase]), **sizes)


# --- what a state says of the phases ---


def states_of(config: DataConfig, *positions: int) -> list[dict[str, Any]]:
    with StreamLoader(config, micro_batch_size=4, global_batch_size=BATCH) as loader:
        states = []
        for position in positions:
            loader.seek(position)
            states.append(loader.state_dict())
        return states


@pytest.mark.guarantee("later-phase-never")
@pytest.mark.parametrize("name", [item.name for item in fields(PhaseConfig)])
def test_a_state_notices_every_setting_of_a_phase_that_has_begun(data: Path, name: str) -> None:
    """But the batch size, which moves no sample."""
    web, code = f"{data}/web", f"{data}/code"
    other: dict[str, Any] = {
        "first_sample": 264,
        "first_step": 12,
        "blend": [(web, 0.5), (code, 0.5)],
        "global_batch_size": 48,
        "sequence_length": 32,
        "shuffle_lanes": 96,
        "exclude_documents": ["web#3"],
    }
    start = {} if name.startswith("first_") else {"first_sample": 240}
    before = config_of(data, phases=[PhaseConfig(first_sample=240)], eod_id=0)
    after = replace(before, phases=[PhaseConfig(**{**start, name: other[name]})])
    (state,) = states_of(before, 480)
    with StreamLoader(after, micro_batch_size=4, global_batch_size=BATCH) as loader:
        if name == "global_batch_size":
            loader.load_state_dict(state)
            return
        with pytest.raises(StateError):
            loader.load_state_dict(state)


@pytest.mark.guarantee("data-come-go", "later-phase-never")
def test_a_phase_is_appended_to_a_running_job(data: Path, wanted: dict[int, bytes]) -> None:
    """By editing the config and resuming; the state of a run without phases is one of phase 0."""
    whole = config_of(data)
    found: dict[int, bytes] = {}
    state = None
    for count, stop in enumerate((120, 240, 492)):
        config = replace(whole, phases=whole.phases[:count])
        part, state = read(config, 2, 2, stop, state)
        found |= part
    part, _ = read(whole, 4, 3, END, state)
    assert found | part == wanted


@pytest.mark.guarantee("later-phase-never")
def test_the_phases_ahead_may_be_changed_and_those_behind_not(data: Path) -> None:
    config = config_of(data)
    first, second = config.phases
    at_the_boundary, behind_it = states_of(config, 240, 252)
    other_weights = replace(first, blend=[(f"{data}/code", 0.9), (f"{data}/math", 0.1)])
    later = replace(first, first_sample=264)
    for edited in (other_weights, later):
        changed = replace(config, phases=[edited, second])
        assert read(changed, 1, 4, 264, at_the_boundary)[0]
        with pytest.raises(StateError, match=r"phases\.1"):
            read(changed, 1, 4, 264, behind_it)
    assert read(replace(config, phases=[first]), 1, 4, 300, behind_it)[0]
    with pytest.raises(StateError, match=r"phases\.1: the checkpoint has .*this run null"):
        read(replace(config, phases=[]), 1, 4, 300, behind_it)
    inserted = PhaseConfig(first_sample=120, blend=[f"{data}/math"])
    with pytest.raises(StateError, match=r"phases\.1\.first_sample: the checkpoint has 240, .*120"):
        read(replace(config, phases=[inserted, first]), 1, 4, 300, behind_it)


def test_a_resume_with_another_batch_size_must_reach_the_phase_ahead(data: Path) -> None:
    config = config_of(data)
    (state,) = states_of(config, 120)
    sizes = {"micro_batch_size": 1, "dp_rank": 0, "dp_size": 1}
    with StreamLoader(config, global_batch_size=12, **sizes) as loader:  # type: ignore[arg-type]
        loader.load_state_dict(state)
    with StreamLoader(config, global_batch_size=16, **sizes) as loader:  # type: ignore[arg-type]
        with pytest.raises(StateError, match="phase 1 begins at sample 240, 8 samples into"):
            loader.load_state_dict(state)
        assert loader.consumed_samples == 0


@pytest.mark.guarantee("batches-another-size")
def test_lanes_of_a_checkpoint_that_a_phase_does_not_divide_are_told(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins in 4104 lanes, which go with the state; a batch of 48 shares some of them."""
    phases = [PhaseConfig(first_sample=240, global_batch_size=48)]
    config = config_of(data, shuffle_lanes=None, phases=[])
    _, state = read(config, 1, 12, 96)
    with pytest.raises(
        ConfigError, match=r"48 does not divide its 4104 lanes; .* shuffle_lanes = 4128"
    ):
        StreamLoader(replace(config, phases=phases), micro_batch_size=12, global_batch_size=24)
    doubled = replace(config, phases=phases)
    sizes: dict[str, Any] = {"micro_batch_size": 12, "global_batch_size": 48}
    with StreamLoader(doubled, **sizes) as loader:
        loader.load_state_dict(state)
        found = [loader.take()["tokens"] for _ in range(24)]
        samples = loader.dataset.samples.locate(np.arange(96, 384))
    web = np.fromfile(f"{data}/web.bin", np.uint16)
    assert "in the lanes of the checkpoint ranks read some bytes twice: phase 1" in caplog.text
    for tokens, dataset, start in zip(
        torch.cat(found), samples.dataset, samples.start.tolist(), strict=True
    ):
        if dataset == 0:
            assert tokens.tolist() == web[start : start + LENGTH].tolist()


@pytest.mark.guarantee("ranks-micro-batches")
def test_validation_is_the_same_whatever_the_phases(data: Path) -> None:
    config = config_of(data, split="90,10,0", num_samples=(END, 48, 0))
    sizes = {"micro_batch_size": 4, "global_batch_size": BATCH, "split": "valid"}
    with_phases = [batch["tokens"] for batch in StreamLoader(config, **sizes)]  # type: ignore[arg-type]
    without = StreamLoader(replace(config, phases=()), **sizes)  # type: ignore[arg-type]
    assert len(with_phases) == 12
    for batch, same in zip(without, with_phases, strict=True):
        assert (batch["tokens"] == same).all()


def test_documents_are_traced_over_all_phases(data: Path) -> None:
    """A document is found by which samples read it, and a sample by its documents."""
    config = config_of(data)
    provenance = Provenance(config, "train", BATCH)
    found = streammega.locate(config, np.arange(END), global_batch_size=BATCH)
    for dataset, name in enumerate(("web", "code", "math")):
        assert provenance.datasets[dataset] == f"{data}/{name}"
        first, *_, last = np.flatnonzero(found.dataset == dataset).tolist()
        for sample in (first, last):
            (traced,) = provenance.trace([sample])
            assert all(run.dataset == f"{data}/{name}" for run in traced.runs)
            readings = provenance.uses([traced.runs[0].name], end=END)
            assert sample in [reading.sample for reading in readings]


def test_two_configs_are_one_order_up_to_the_phase_that_differs(data: Path) -> None:
    config = config_of(data)
    without = replace(config, phases=config.phases[:1])
    one, other = (Provenance(each, "train", BATCH) for each in (config, without))
    ids = np.arange(END)
    pairs = zip(one.trace(ids), other.trace(ids), strict=True)
    first = next(sample.sample for sample, same in pairs if sample.runs != same.runs)
    assert 492 <= first < 500
    differences = differing_values(one.source.identity(), other.source.identity())
    assert {path.partition(".")[0] for path in differences} == {"phases"}


# --- phases that mean nothing ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "sequential"}, 'phases belong to the stream order: set order="stream"'),
        ({"order": "megatron"}, 'phases belong to the stream order: set order="stream"'),
        ({"phases": [{"first_sample": 9}]}, "it must be a PhaseConfig, such as"),
        (
            {"phases": [PhaseConfig(first_sample=9), PhaseConfig(first_sample=9)]},
            "phase 2 begins at sample 9, and the one before it at 9",
        ),
    ],
)
def test_phases_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(config_of("data"), **options)


def test_datasets_of_phases_are_not_built_as_one(data: Path) -> None:
    with pytest.raises(ConfigError, match="train has phases, which are of the stream order"):
        streammega.build_datasets(config_of(data))


def test_a_phase_says_what_is_wrong_with_it(data: Path) -> None:
    for settings_of_phase, message in (
        ({"first_sample": 0}, "first_sample of a phase is 0; it must be at least 1"),
        ({"first_sample": 9.5}, "first_sample is 9.5; it must be a whole number"),
        (
            {"first_sample": 9, "global_batch_size": 0},
            "phase.global_batch_size is 0; it must be at least 1",
        ),
        ({"first_sample": 9, "blend": []}, "the blend is empty"),
        ({"first_sample": 9, "blend": [("web", 1), ("code", 0)]}, "leave the dataset out instead"),
    ):
        with pytest.raises(ConfigError, match=message):
            PhaseConfig(**settings_of_phase)
    sizes = {"micro_batch_size": 1, "global_batch_size": BATCH}
    for phase, message in (
        (PhaseConfig(first_sample=250), "phase 1 begins at sample 250, 10 samples into"),
        (PhaseConfig(first_sample=240, global_batch_size=20), "20 does not divide its 48 lanes"),
    ):
        with pytest.raises(ConfigError, match=message):
            StreamLoader(config_of(data, phases=[phase]), **sizes)  # type: ignore[arg-type]


def test_a_secret_of_a_phase_is_in_no_repr() -> None:
    phase = PhaseConfig(first_sample=9, blend=["https://user:hunter2@host/web"])
    assert "hunter2" not in repr(phase)
    assert "hunter2" not in repr(config_of("data", phases=[phase]))


def test_the_code_of_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "phases.md").read_text()
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "phases" in block
    ]
    names: dict[str, Any] = {}
    exec(code, names)
    datasets = streammega.locate(names["config"], np.arange(2880), global_batch_size=48).dataset
    wanted = ([1, 0, 0], [0.5, 0.5, 0], [0.3, 0, 0.7])
    for first, shares in zip((0, 960, 1920), wanted, strict=True):
        drawn = np.bincount(datasets[first : first + 960], minlength=3) / 960
        np.testing.assert_allclose(drawn, np.array(shares), atol=0.02)
    with names["loader"] as loader:
        assert loader.take()["tokens"].shape == (8, 64)


def test_a_source_numbers_its_datasets_by_first_appearance(data: Path) -> None:
    config = config_of(data, storage=StorageConfig())
    source = open_source(config, "train", BATCH)
    numbers = [segment.dataset_numbers.tolist() for segment in source.segments]
    assert numbers == [[0, 1], [1, 2], [0, 1]]
    assert [files[0].key.rpartition("/")[2] for files in source.files] == [
        "web.bin",
        "code.bin",
        "math.bin",
    ]


@pytest.mark.guarantee("phases-lane-goes")
def test_a_dataset_that_phases_spell_in_two_ways_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_random_pair("web", 60, 120)
    Path("folder").mkdir()
    write_random_pair("folder/code", 60, 120, seed=1)
    again = [["./folder/", f"{tmp_path}/web"], ["folder", ".//web.bin"], ["web"]]
    orders = []
    for first, second, third in (again, [["folder/", "web"], ["folder/", "web"], ["web"]]):
        phases = [
            PhaseConfig(first_sample=96, blend=second, sequence_length=24),
            PhaseConfig(first_sample=192, blend=third),
        ]
        config = DataConfig(
            blend=first, phases=phases, sequence_length=16, order="stream", shuffle_lanes=48
        )
        orders.append(open_source(config, "train", BATCH))
    one, other = (source.locate(np.arange(300)) for source in orders)
    assert len(orders[0].files) == 2
    for name in ("dataset", "file", "start", "stop"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert orders[0].identity() == orders[1].identity()


@pytest.mark.guarantee("phases-lane-goes")
def test_one_dataset_called_by_two_names_is_not_read_twice(tmp_path: Path) -> None:
    write_random_pair(str(tmp_path / "web"))
    write_random_pair(str(tmp_path / "code"))
    (tmp_path / "link").symlink_to(tmp_path)
    web, same, code = (f"{tmp_path}/{name}" for name in ("web", "link/web", "code"))
    phases = [PhaseConfig(first_sample=96, blend=[code, same])]
    config = DataConfig(
        blend=[web], phases=phases, sequence_length=16, order="stream", shuffle_lanes=96
    )
    with pytest.raises(
        ConfigError, match=r"web and .*/link/web share the file .*web\.bin.*use the same name"
    ):
        StreamLoader(config, micro_batch_size=8, global_batch_size=48)
    # in the same phases they are a blend, as in any run
    phases = [PhaseConfig(first_sample=96, blend=[web, same, code])]
    overlapping = replace(config, blend=[web, same], phases=phases)
    StreamLoader(overlapping, micro_batch_size=8, global_batch_size=48).close()


@pytest.mark.many_examples
@pytest.mark.guarantee("steps-end")
@settings(max_examples=examples(12))
@given(
    batches=st.integers(0, 40),
    sizes=st.sampled_from([(2, 24, 1), (6, 48, 2), (12, 12, 1), (4, 24, 3)]),
    ramp=st.booleans(),
)
def test_a_loop_knows_where_steps_end_through_phases_ramps_and_resumes(
    data: Path, batches: int, sizes: tuple[int, int, int], ramp: bool
) -> None:
    """Its global batches are those of the schedule, also after a resume with another batch size."""
    config = config_of(data, **({"phases": ()} if ramp else {}))
    with StreamLoader(
        config, micro_batch_size=12, global_batch_size=24, dp_rank=0, dp_size=1
    ) as before:
        while batches > 0 or not before.is_step_end:
            next(before)
            batches -= 1
        state = before.state_dict()
    micro, batch, world = sizes
    with StreamLoader(
        config,
        micro_batch_size=micro,
        global_batch_size=48 if ramp else batch,
        rampup_batch_size=(12, 12, 96) if ramp else None,
        dp_rank=world - 1,
        dp_size=world,
    ) as loader:
        loader.load_state_dict(state)
        for _ in range(4):
            first = loader.consumed_samples
            expected = loader.dataset.steps.schedule.size_at(first)
            count = 0
            while not (count and loader.is_step_end):
                next(loader)
                count += 1
                assert loader.num_micro_batches == expected // (micro * world)
            assert count == loader.num_micro_batches
            assert loader.consumed_samples == first + expected


@pytest.mark.guarantee("steps-end")
def test_another_batch_size_after_a_resume_still_ends_steps(data: Path) -> None:
    """`consumed_samples % global_batch_size` would never be 0 again."""
    config = DataConfig(blend=f"{data}/web", sequence_length=LENGTH, shuffle_lanes=96)

    def loader_of(global_batch_size: int) -> StreamLoader:
        return StreamLoader(
            config, global_batch_size=global_batch_size, micro_batch_size=8, dp_rank=0, dp_size=1
        )

    before = loader_of(24)
    before.seek(24)
    ends = []
    with loader_of(32) as after:
        after.load_state_dict(before.state_dict())
        for _ in range(8):
            next(after)
            if after.is_step_end:
                ends.append(after.consumed_samples)
    assert ends == [56, 88]
