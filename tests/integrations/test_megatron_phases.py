"""The provider against Megatron's own `--phase-transition-iterations`: its counts, its
samplers and its datasets, over whole runs that end at a transition and begin again there.

`megatron.training` of core 0.19 and newer has them, for Python 3.12 and newer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from streammega.integrations.megatron import datasets_provider
from tests.integrations.test_megatron_provider import (
    FIELDS,
    arguments,
    theirs_of,
    tokenizer,
    write_datasets,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    training = pytest.importorskip(
        "megatron.training.training", reason="needs megatron-core 0.19 or newer"
    )
    from megatron.core import mpu
    from megatron.training import global_vars

    if "phase_transition_iterations" not in Path(training.__file__).read_text():
        pytest.skip("needs megatron-core 0.19 or newer", allow_module_level=True)

RUNS = 40
"""In make soak; make test goes through the first few."""
FEW = 4
BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of Megatron in phases: its arguments in each, and the iterations at which they change."""

    phases: list[dict[str, Any]]
    transitions: list[int]
    iterations: int

    def bounds(self, iteration: int) -> tuple[int, int]:
        """(phase, iteration before which it ends)."""
        phase = sum(start <= iteration for start in self.transitions)
        return phase, [*self.transitions, self.iterations][phase]

    def arguments(self, iteration: int, micro: int, **given: Any) -> Any:
        """Those that Megatron has when it starts at an iteration."""
        phase, _ = self.bounds(iteration)
        return arguments(
            **self.phases[phase],
            micro_batch_size=micro,
            global_batch_size=BATCH,
            iteration=iteration,
            phase_transition_iterations=self.transitions,
            train_iters=self.iterations,
            train_samples=self.iterations * BATCH,
            consumed_train_samples=iteration * BATCH,
            eval_interval=1000,
            eval_iters=1,
            eval_micro_batch_size=micro,
            eval_global_batch_size=BATCH,
            start_eval_at_iter=None,
            perform_rl_step=False,
            hybrid_context_parallel=False,
            num_workers=0,
            exit_signal_handler=False,
            **given,
        )


def random_run(number: int, folder: Path) -> Run:
    """Up to four phases, some of one iteration, of any of three datasets, in samples of any length."""
    rng = np.random.default_rng(number)
    prefixes = write_datasets(folder, rng, 3)
    iterations = int(rng.integers(4, 30))
    count = int(rng.integers(1, 4))
    transitions = sorted(rng.choice(np.arange(1, iterations), count, replace=False).tolist())
    seed = int(rng.integers(0, 2**31))
    phases = []
    for _ in range(count + 1):
        chosen = rng.permutation(prefixes)[: int(rng.integers(1, 4))].tolist()
        weights = rng.integers(1, 20, len(chosen)).tolist()
        weighted = rng.random() < 0.7
        words = [str(word) for pair in zip(weights, chosen, strict=True) for word in pair]
        phases.append(
            {
                "data_path": words if weighted else chosen,
                "seq_length": int(rng.integers(8, 40)),
                "seed": seed,
                "split": "8,1,1",
            }
        )
    return Run(phases=phases, transitions=transitions, iterations=iterations)


def their_provider(args: Any) -> Any:
    """What trains Megatron's GPT, its sizes being those that Megatron counts."""

    def provider(sizes: Any, vp_stage: int | None = None) -> Any:
        return theirs_of(args, sizes, tokenizer())

    provider.is_distributed = True  # type: ignore[attr-defined]
    return provider


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron's flags stay on the CPU, and are not sent to anybody."""
    make_tensor = torch.tensor

    def without_device(*values: Any, **options: Any) -> torch.Tensor:
        return make_tensor(*values, **(options | {"device": "cpu"}))

    monkeypatch.setattr(torch, "tensor", without_device)
    monkeypatch.setattr(dist, "broadcast", lambda *given, **named: None)
    for name in ("is_pipeline_first_stage", "is_pipeline_last_stage"):
        monkeypatch.setattr(mpu, name, lambda **named: True)
    monkeypatch.setattr(mpu, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(global_vars, "_GLOBAL_TOKENIZER", tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pinned memory, where there is no device
        yield


def train_iterator(monkeypatch: pytest.MonkeyPatch, args: Any, provider: Any, rank: Any) -> Any:
    """Megatron's training iterator on a data-parallel rank (rank, size)."""
    dp_rank, dp_size = rank
    monkeypatch.setattr(mpu, "get_data_parallel_rank", lambda: dp_rank)
    monkeypatch.setattr(mpu, "get_data_parallel_world_size", lambda: dp_size)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    train, _, _ = training.build_train_valid_test_data_iterators(provider)
    return train


def their_phase(
    monkeypatch: pytest.MonkeyPatch, run: Run, iteration: int, micro: int, rank: Any
) -> list[Any]:
    """The micro-batches that Megatron's own datasets and sampler give from an iteration to the end
    of its phase.
    """
    args = run.arguments(iteration, micro, dataloader_type="single")
    found = train_iterator(monkeypatch, args, their_provider(args), rank)
    return [next(found) for _ in range(micro_batches(run, iteration, micro, rank))]


def micro_batches(run: Run, iteration: int, micro: int, rank: Any) -> int:
    """How many a rank takes up to the end of the phase."""
    _, dp_size = rank
    _, end = run.bounds(iteration)
    count: int = (end - iteration) * BATCH // (micro * dp_size)
    return count


def equal(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in FIELDS)


def places(run: Run) -> list[int]:
    """Iterations at which a run is resumed: at, before and after each transition, and at its ends."""
    around = [start + shift for start in run.transitions for shift in (-1, 0, 1)]
    wanted = {0, run.iterations - 1, *around}
    return sorted(place for place in wanted if 0 <= place < run.iterations)


NUMBERS = [
    *range(FEW),
    *(pytest.param(number, marks=pytest.mark.soak) for number in range(FEW, RUNS)),
]


@pytest.mark.guarantee("phase-transition-iterations")
@pytest.mark.parametrize("number", NUMBERS)
def test_the_provider_gives_megatrons_micro_batches_in_every_phase(
    number: int, tmp_path: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run(number, tmp_path)
    for turn, iteration in enumerate(places(run)):
        dp_size = (1, 2, 4)[turn % 3]
        micro = (1, 2)[(turn + number) % 2]
        rank = ((turn + number) % dp_size, dp_size)
        theirs = their_phase(monkeypatch, run, iteration, micro, rank)
        args = run.arguments(iteration, micro, data_cache_path=str(tmp_path / "ours"))
        ours = train_iterator(monkeypatch, args, datasets_provider(), rank)
        assert len(theirs) == micro_batches(run, iteration, micro, rank)
        for batch in theirs:
            assert equal(next(ours), batch)
        ours.iterable.close()


@pytest.mark.guarantee("phase-transition-iterations")
def test_megatron_ends_a_run_at_every_transition_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phase = {"data_path": ["unused"], "seq_length": 8}
    run = Run(phases=[phase] * 3, transitions=[3, 5], iterations=9)
    ends = {
        "save": None,
        "save_interval": None,
        "exit_interval": None,
        "exit_duration_in_mins": None,
    }
    args = run.arguments(0, 1, non_persistent_save_interval=None, **ends)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    monkeypatch.setattr(global_vars, "_GLOBAL_TIMERS", lambda *names, **options: None)
    monkeypatch.setattr(training, "print_datetime", lambda text: None)
    ended = [
        iteration
        for iteration in range(1, 9)
        if training.checkpoint_and_decide_exit(None, None, None, iteration, 0, {}, None)
    ]
    assert ended == run.transitions
