"""Phases together with all else that deals samples out: ramp-ups, packed datasets,
parts of sequences, workers and resumes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings
from hypothesis import strategies as st

from streammega import DataConfig, PhaseConfig, StorageConfig, StreamingDataset, StreamLoader
from streammega.convert import convert
from streammega.samples.gather import read_samples
from tests.support.builders import write_dataset
from tests.support.examples import examples
from tests.support.expected import checked_batch

EOD = 0
LENGTH = 32
BATCH = 12
RANKS = [(1, 6), (2, 3), (3, 1), (6, 1), (3, 2)]
"""(data-parallel ranks, samples of a micro-batch): all of them fit batches of 6, 12 and 24."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets of documents of very different lengths, each ended by EOD, and both packed."""
    folder = tmp_path_factory.mktemp("mixes")
    rng = np.random.default_rng(0)
    for name, count in (("web", 700), ("code", 400)):
        write_dataset(
            folder / name,
            [
                np.append(rng.integers(1, 1000, size - 1), EOD)
                for size in rng.choice([2, 3, 5, 40, 90], count).tolist()
            ],
        )
        packed = str(folder / f"packed-{name}")
        convert([str(folder / name)], packed, pack_length=LENGTH, eod_id=EOD, workers=1)
    return folder


def config_of(data: Path, phases: list[dict[str, Any]], packed: bool, **options: Any) -> DataConfig:
    """phases: as PhaseConfig, with names for prefixes in "blend"."""
    kind = "packed-" if packed else ""
    prefixes = {name: str(data / f"{kind}{name}") for name in ("web", "code")}
    told = []
    for phase in phases:
        blend = phase.get("blend")
        named = None if blend is None else [prefixes[name] for name in blend]
        told.append(PhaseConfig(**(phase | {"blend": named})))
    return DataConfig(
        blend=[(prefixes["web"], 0.7), (prefixes["code"], 0.3)],
        sequence_length=LENGTH,
        order="stream",
        shuffle_lanes=48,
        shuffle_block_bytes=512,
        eod_id=EOD,
        phases=told,
        storage=StorageConfig(cache_dir=data / "cache"),
        **options,
    )


@st.composite
def chains(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Phases, each some steps after the one before."""
    phases = []
    step = 1
    for _ in range(draw(st.integers(1, 3))):
        step += draw(st.integers(1, 4))
        phases.append(
            {
                "first_step": step,
                "blend": draw(st.sampled_from([None, ["web"], ["code"], ["code", "web"]])),
                "global_batch_size": draw(st.sampled_from([None, 6, 12, 24])),
                "sequence_length": draw(st.sampled_from([None, 16, 24, 64])),
                "shuffle_lanes": draw(st.sampled_from([None, 24, 48, 96])),
            }
        )
    return phases


def ids_of(dataset: StreamingDataset, end: int) -> dict[int, list[int]]:
    """{sample: its ids} up to `end`, by reading one after the other."""
    found = {}
    for sample in range(end):
        read = read_samples(dataset.samples.segment_at(sample), np.array([sample]))
        found[sample] = read.ids[0, : read.valid[0]].tolist()
    return found


@pytest.mark.many_examples
@pytest.mark.guarantee("phases-mixed")
@given(
    phases=chains(),
    kind=st.sampled_from(["plain", "packed", "parts", "packed parts"]),
    rampup_batch_size=st.sampled_from([None, (6, 6, 24)]),
    resumes=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(RANKS)), max_size=2),
    last=st.sampled_from(RANKS),
)
@settings(max_examples=examples(5), deadline=None)
def test_every_sample_is_read_once_on_any_ranks(
    data: Path,
    phases: list[dict[str, Any]],
    kind: str,
    rampup_batch_size: tuple[int, int, int] | None,
    resumes: list[tuple[int, tuple[int, int]]],
    last: tuple[int, int],
) -> None:
    """Each with its own ids: whole, or in the parts of two context-parallel ranks."""
    packed = "packed" in kind
    if packed:  # bins are of one length
        phases = [phase | {"sequence_length": None} for phase in phases]
    config = config_of(data, phases, packed)
    dataset = StreamingDataset(
        config, micro_batch_size=1, global_batch_size=BATCH, rampup_batch_size=rampup_batch_size
    )
    end = dataset.steps.schedule.samples_after(phases[-1]["first_step"] + 3)
    wanted = ids_of(dataset, end)
    contexts = [(0, 2), (1, 2)] if "parts" in kind else [(0, 1)]
    state = None
    position = 0
    steps = 0
    for more, (ranks, micro) in [*resumes, (99, last)]:
        steps += more
        stop = min(dataset.steps.schedule.samples_after(steps), end)
        found: dict[int, list[list[int]]] = {}
        for rank in range(ranks):
            for cp_rank, cp_size in contexts:
                with StreamLoader(
                    config,
                    micro_batch_size=micro,
                    global_batch_size=BATCH,
                    dp_rank=rank,
                    dp_size=ranks,
                    rampup_batch_size=rampup_batch_size,
                    ids_only=True,
                    cp_rank=cp_rank,
                    cp_size=cp_size,
                ) as loader:
                    if state is not None:
                        loader.load_state_dict(state)
                    assert loader.consumed_samples == position
                    while loader.consumed_samples < stop:
                        ids = loader.dataset.sample_ids(loader.consumed_samples).tolist()
                        bounds = loader.bounds or [(0, 65)]  # all of the longest
                        batch = loader.take()
                        rows = batch["ids"].view(micro, len(bounds), -1).tolist()
                        valid = batch["valid"].view(micro, -1).tolist()
                        for sample, parts, counts in zip(ids, rows, valid, strict=True):
                            got = [part[:count] for part, count in zip(parts, counts, strict=True)]
                            cut = [wanted[sample][slice(*bound)] for bound in bounds]
                            assert got == cut
                            found.setdefault(sample, []).append(got)
                    after = loader.state_dict()
        assert sorted(found) == list(range(position, stop))
        assert {len(parts) for parts in found.values()} <= {len(contexts)}
        state = json.loads(json.dumps(after))
        position = stop


MIXED: list[dict[str, Any]] = [
    {"first_step": 5, "sequence_length": 64, "global_batch_size": 24},
    {"first_step": 8, "blend": ["code"], "global_batch_size": 6, "sequence_length": 24},
]
RAMPUP = (6, 6, 24)


def mixed(data: Path) -> tuple[StreamingDataset, list[int]]:
    """A dataset over three phases and a ramp-up, with its positions."""
    config = config_of(
        data,
        MIXED,
        packed=False,
        reset_attention_mask=True,
        reset_position_ids=True,
        num_samples=(144, 0, 0),
    )
    dataset = StreamingDataset(
        config,
        micro_batch_size=3,
        global_batch_size=BATCH,
        rampup_batch_size=RAMPUP,
        dp_rank=1,
        dp_size=2,
    )
    return dataset, list(dataset.positions())


def check(batches: list[dict[str, torch.Tensor]], data: Path) -> None:
    dataset, positions = mixed(data)
    assert len(batches) == len(positions)
    lengths = {batch["tokens"].shape[1] for batch in batches}
    assert lengths == {32, 64, 24}
    for batch, position in zip(batches, positions, strict=True):
        alone = checked_batch(dataset, position)
        assert set(batch) == set(alone)
        assert all(torch.equal(batch[name], alone[name]) for name in alone)


@pytest.mark.guarantee("phases-mixed")
def test_workers_give_batches_of_every_phase_in_order(data: Path) -> None:
    dataset, _ = mixed(data)
    check(list(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)), data)


@pytest.mark.guarantee("phases-mixed")
@pytest.mark.usefixtures("workers_end_soon")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("taken", [5, pytest.param(11, marks=pytest.mark.soak)])
def test_torchdatas_loader_goes_on_over_phases_and_a_ramp_up(data: Path, taken: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        dataset, _ = mixed(data)
        return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=2)

    first = loader()
    batches = iter(first)
    got = [next(batches) for _ in range(taken)]
    state = first.state_dict()
    del batches, first
    again = loader()
    again.load_state_dict(state)
    check([*got, *again], data)
