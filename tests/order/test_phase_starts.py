"""Phases that are told by a step or a token begin where a run would be that counts both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega import DataConfig, PhaseConfig, StreamingDataset, locate
from streammega.errors import ConfigError, StateError
from streammega.order.schedule import resolve_phase_starts

LENGTH = 4
SIZES = (2, 3, 6)
MOCK = "mock://tokens=4000"


def config_of(*phases: PhaseConfig, **options: Any) -> DataConfig:
    return DataConfig(
        blend=[MOCK],
        sequence_length=LENGTH,
        order="stream",
        shuffle_lanes=48,
        phases=phases,
        **options,
    )


@pytest.mark.guarantee("phase-by-step")
@given(
    changes=st.lists(
        st.tuples(
            st.integers(1, 9),
            st.sampled_from(["first_sample", "first_step"]),
            st.sampled_from([None, *SIZES]),
            st.sampled_from([None, 4, 6, 8]),
        ),
        min_size=1,
        max_size=4,
    ),
    rampup_batch_size=st.sampled_from([None, (2, 2, 20)]),
    skip=st.integers(0, 6),
)
def test_a_phase_begins_where_a_run_that_counts_has_its_step(
    changes: list[tuple[int, str, int | None, int | None]],
    rampup_batch_size: tuple[int, int, int] | None,
    skip: int,
) -> None:
    """changes: after so many steps more, told by what, to which size and length. skip: how many
    steps are passed over from the third on, before the first change.
    """
    sample = 0
    step = 1
    size = 6
    excluded = 0
    skips = []
    told = []
    wanted = []
    changed = False
    for more, by, next_size, next_length in changes:
        for _ in range(more):
            if rampup_batch_size is not None and not changed:
                size = 2 if sample < 10 else 4 if sample < 20 else 6
            if step == 3 and excluded < skip:
                excluded += 1
                skips.append((sample, sample + size))
            else:
                step += 1
            sample += size
        place: dict[str, Any] = {"first_sample": sample, "first_step": step}
        if step == 1:
            return
        if by == "first_step" and step == 3:
            # steps are counted past what is excluded, which may lie before it or behind it
            by = "first_sample"
        told.append(
            PhaseConfig(**{by: place[by]}, global_batch_size=next_size, sequence_length=next_length)
        )
        wanted.append(sample)
        changed = changed or next_size is not None
        size = next_size or size
    config = config_of(*told, exclude_samples=tuple(skips))
    found = resolve_phase_starts(config, 6, rampup_batch_size)
    assert [phase.first_sample for phase in found.phases] == wanted
    assert all(phase.is_in_samples for phase in found.phases)
    assert resolve_phase_starts(found, 6, rampup_batch_size) is found


@pytest.mark.guarantee("phase-by-step")
def test_a_dataset_has_its_phases_in_samples_and_a_state_counts_by_them() -> None:
    by_step = config_of(PhaseConfig(first_step=5, sequence_length=8))
    by_sample = config_of(PhaseConfig(first_sample=24, sequence_length=8))
    sizes: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 6}
    one = StreamingDataset(by_step, **sizes)
    other = StreamingDataset(by_sample, **sizes)
    assert one.config == other.config
    assert one.tokens_before(30) == 24 * 4 + 6 * 8
    one.seek(30)
    other.load_state_dict(one.state_dict())
    # with another batch size step 5 is elsewhere, and the past may not change
    twice = StreamingDataset(by_step, micro_batch_size=2, global_batch_size=12)
    with pytest.raises(StateError, match=r"phases\.1: the checkpoint has .*this run null"):
        twice.load_state_dict(one.state_dict())
    # what has no phases takes no notice of them
    per_split = [[MOCK], [MOCK], None]
    valid = replace(by_step, blend=None, blend_per_split=per_split, num_samples=(0, 12, 0))
    assert StreamingDataset(valid, split="valid", **sizes).num_samples == 12


@pytest.mark.guarantee("phase-by-step")
def test_a_phase_within_a_step_is_refused() -> None:
    config = config_of(PhaseConfig(first_sample=26))
    with pytest.raises(ConfigError, match=r"2 samples into .* begin at 24 or at 30"):
        StreamingDataset(config, micro_batch_size=2, global_batch_size=6)


def test_a_phase_says_once_where_it_begins() -> None:
    with pytest.raises(
        ConfigError, match="a phase has first_step and first_sample; set one of them"
    ):
        PhaseConfig(first_sample=6, first_step=2)
    with pytest.raises(ConfigError, match="first_step of a phase is 1; it must be at least 2"):
        PhaseConfig(first_step=1)
    with pytest.raises(ConfigError, match="a phase begins at a first_sample or a first_step"):
        PhaseConfig(blend=[MOCK])
    config = config_of(PhaseConfig(first_step=4), PhaseConfig(first_sample=12))
    with pytest.raises(ConfigError, match=r"phase 2 begins at sample 12, .* at 18"):
        resolve_phase_starts(config, 6)
    with pytest.raises(ConfigError, match="only batch sizes say"):
        locate(config, [0])
