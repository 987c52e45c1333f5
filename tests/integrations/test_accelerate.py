"""Accelerate's own preparing, accumulating, saving and loading with the opt-out DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streammega import DataConfig
from streammega.errors import ConfigError, StateError
from streammega.integrations.accelerate import StreamDataLoader
from tests.support.gang import Gang
from tests.support.trainer_kills import ACCELERATE, KILLS, check_killed_trainer
from tests.support.trainer_programs import SIZES, STEPS, accelerator_of, rows_of, stream

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def accelerator() -> Iterator[Any]:
    with accelerator_of(0, 1, gradient_accumulation_steps=4) as made:
        yield made


@pytest.mark.guarantee("accelerate-killed-run")
@KILLS
def test_a_killed_run_resumes_exactly(
    gang: Gang, endless: DataConfig, tmp_path: Path, before: int, after: int
) -> None:
    check_killed_trainer(gang, ACCELERATE, endless, tmp_path, before, after)


@pytest.mark.guarantee("accumulate-end-pass")
def test_the_end_of_a_pass_is_known_with_its_last_batch(
    accelerator: Any, sized: DataConfig
) -> None:
    """As by accelerate's own loaders: `accumulate` steps there, and nothing is left after it."""
    loader = StreamDataLoader(accelerator, sized, **SIZES)
    gradients = accelerator.gradient_state
    assert len(loader) == 4 * STEPS
    for _ in range(2):
        ends = [gradients.end_of_dataloader for _ in loader]
        assert ends == [False] * (4 * STEPS - 1) + [True]
        assert gradients.active_dataloader is None
    for _ in loader:
        assert gradients.active_dataloader is loader
        assert gradients.remainder == 0
        break  # left in the middle
    rest = [gradients.end_of_dataloader for _ in loader]
    assert len(rest) == 4 * STEPS - 1
    assert gradients.active_dataloader is None
    loader.close()


@pytest.mark.guarantee("accelerate-killed-run")
def test_a_loader_that_nobody_prepared_is_saved_too(
    accelerator: Any, sized: DataConfig, tmp_path: Path
) -> None:
    """In the middle of an accumulation; and loaded twice, and after iter."""
    rows = stream(sized, 3)
    loader = StreamDataLoader(accelerator, sized, **SIZES)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    accelerator.save_state(str(tmp_path / "five"))
    next(batches)
    for _ in range(2):
        accelerator.load_state(str(tmp_path / "five"))
        with pytest.raises(StateError, match="load_state_dict moved its loader"):
            next(batches)
        batches = iter(loader)
        assert rows_of(next(batches)) == rows[8:10], "of the step that was not made"
    assert loader.state_dict()["consumed_samples"] == 8
    loader.close()


@pytest.mark.guarantee("accelerate-foreign-empty")
def test_foreign_empty_and_missing_states_are_refused(
    accelerator: Any, sized: DataConfig, tmp_path: Path
) -> None:
    accelerator.save_state(str(tmp_path / "without"))
    loader = StreamDataLoader(accelerator, sized, **SIZES)
    state = loader.state_dict()
    others: list[Any] = [{}, {"_snapshot": {}}, state | {"fingerprint": "0"}]
    for foreign in others:
        with pytest.raises(StateError):
            loader.load_state_dict(foreign)
    other = StreamDataLoader(accelerator, replace(sized, seed=8), **SIZES)
    with pytest.raises(StateError, match="seed"):
        other.load_state_dict(state)
    accelerator.load_state(str(tmp_path / "without"))
    with pytest.raises(StateError, match="without has no position of this loader"):
        next(iter(loader))
    loader.seek(0)
    assert rows_of(next(iter(loader))) == stream(sized, 1)[:2]
    loader.close()


@pytest.mark.guarantee("accelerate-foreign-empty")
def test_what_would_be_read_twice_or_dealt_out_is_refused_before_the_first_batch(
    accelerator: Any, sized: DataConfig
) -> None:
    from accelerate import skip_first_batches

    loader = StreamDataLoader(accelerator, sized, **SIZES)
    with pytest.raises(ConfigError, match="go to a place by its seek"):
        next(iter(skip_first_batches(loader, 3)))
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2"):
        StreamDataLoader(accelerator, sized, micro_batch_size=4, global_batch_size=8)
    shared = type("Config", (), {"non_data_parallel_size": 2})()
    accelerator.state.parallelism_config = shared
    with pytest.raises(ConfigError, match="give dp_rank and dp_size"):
        StreamDataLoader(accelerator, sized, **SIZES)


@pytest.mark.guarantee("states-of-whole-steps")
@pytest.mark.parametrize("after", [1, 3, 4, 5, 7])
def test_a_checkpoint_within_an_accumulation_is_that_of_the_last_step(
    sized: DataConfig, tmp_path: Path, after: int
) -> None:
    """Every later step is of the samples of an uninterrupted run."""

    def steps_of(save_after: int, resume: bool) -> tuple[list[list[list[int]]], float]:
        with accelerator_of(0, 1, gradient_accumulation_steps=4) as accelerator:
            loader = StreamDataLoader(accelerator, sized, **SIZES)
            bare = torch.nn.Linear(1, 1)
            torch.nn.init.zeros_(bare.weight)
            model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
            if resume:
                accelerator.load_state(str(tmp_path / "middle"))
            steps: list[list[list[int]]] = []
            pending: list[list[int]] = []
            for number, batch in enumerate(loader, 1):
                with accelerator.accumulate(model):
                    pending += rows_of(batch)
                    accelerator.backward(model(batch["labels"][:, :1].float()).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    steps.append(pending)
                    pending = []
                if number == save_after:
                    accelerator.save_state(str(tmp_path / "middle"))
            loader.close()
            return steps, float(bare.weight)

    whole, weight = steps_of(after, resume=False)
    assert [row for step in whole for row in step] == stream(sized, STEPS)
    assert steps_of(0, resume=True) == (whole[after // 4 :], weight)


@pytest.mark.guarantee("trainers-batch-size")
def test_fewer_processes_do_not_change_the_global_batch_without_a_word(
    sized: DataConfig, tmp_path: Path
) -> None:
    """By a program that multiplies its sizes by the number of processes."""
    state = {}
    with accelerator_of(0, 1, gradient_accumulation_steps=2) as accelerator:
        for world in (2, 1):
            ranks: Any = {"dp_rank": 0, "dp_size": world}
            sizes: Any = {"micro_batch_size": 2, "global_batch_size": 4 * world}
            loader = StreamDataLoader(accelerator, sized, **sizes, **ranks)
            if world == 2:
                next(iter(loader))
                next(iter(loader))
                state = loader.state_dict()
                continue
            before = loader.state_dict()
            message = (
                "a global batch of 8 samples, and this run has 4: to keep it, set "
                "global_batch_size=8 and gradient_accumulation_steps=4. If the change is meant, set "
                "allow_batch_size_change=True"
            )
            with pytest.raises(StateError, match=message):
                loader.load_state_dict(state)
            assert loader.state_dict() == before
            meant = StreamDataLoader(accelerator, sized, **sizes, allow_batch_size_change=True)
            meant.load_state_dict(state)
            assert rows_of(next(iter(meant))) == stream(sized, 2)[8:10]
            meant.close()
            loader.close()
        other = StreamDataLoader(accelerator, sized, micro_batch_size=3, global_batch_size=6)
        with pytest.raises(StateError, match="no number of micro-batches makes 8 samples on 1 pro"):
            other.load_state_dict(state)


@pytest.mark.guarantee("trainers-batch-size")
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_steps_within_a_global_batch_are_refused_at_the_next_batch(
    sized: DataConfig, micro_batches: int
) -> None:
    """A loop that steps by itself, or forgot to accumulate; with as many micro-batches a step as make
    a global batch it is right.
    """
    with accelerator_of(0, 1) as accelerator:
        loader = StreamDataLoader(accelerator, sized, **SIZES)
        bare = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        for number, batch in enumerate(batches := iter(loader), 1):
            accelerator.backward(model(batch["labels"][:, :1].float()).sum())
            if number % micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
                if micro_batches < 4:
                    message = (
                        rf"stepped {2 * micro_batches} samples into a global batch of 8: .*"
                        rf"gradient_accumulation_steps=4; or set global_batch_size={2 * micro_batches}"
                    )
                    with pytest.raises(ConfigError, match=message):
                        next(batches)
                    break
        assert (number == 4 * STEPS) is (micro_batches == 4)
        loader.close()


@pytest.mark.guarantee("trainer-transformers-evaluates")
def test_a_loader_for_evaluation_is_in_no_checkpoint(
    accelerator: Any, sized: DataConfig, tmp_path: Path
) -> None:
    valid = StreamDataLoader(
        accelerator, sized, split="valid", micro_batch_size=2, global_batch_size=2
    )
    assert len(valid) == 8
    assert len(valid.dataset) == 16  # type: ignore[arg-type]
    first = rows_of(next(iter(valid)))
    accelerator.save_state(str(tmp_path / "state"))
    assert not list((tmp_path / "state").glob("dl_*"))
    accelerator.load_state(str(tmp_path / "state"))
    assert rows_of(next(iter(valid))) == first, "it waits for no position"
    valid.close()


def test_batches_may_be_made_into_others(accelerator: Any, sized: DataConfig) -> None:
    loader = StreamDataLoader(
        accelerator,
        sized,
        prepare_batch=lambda batch: {"sum": batch["tokens"].sum()},
        **SIZES,
    )
    assert set(next(iter(loader))) == {"sum"}
    assert isinstance(loader, torch.utils.data.DataLoader)
    loader.close()
