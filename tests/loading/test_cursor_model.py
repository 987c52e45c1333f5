"""Random sequences of what a program may do with a loader, against a model of its cursor in sixty lines."""

from __future__ import annotations

import copy
import json
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streammega import DataConfig, StreamLoader
from streammega.errors import StateError
from tests.support.builders import data_config, write_random_pair
from tests.support.expected import checked_batch
from tests.support.processes import in_child

GLOBAL_BATCH = 8
SAMPLES = 64
ENDLESS = 1 << 40
LAYOUTS = [(1, 2), (2, 2), (1, 4), (4, 2), (2, 1), (1, 8), (8, 1)]
"""Data-parallel ranks, and samples of a micro-batch."""
STEPS = 40
"""Calls of a sequence."""
WALKS = 480
"""Sequences of a block: about a minute. `make test` takes a few of the first one."""
BLOCKS = 20
"""Blocks of every config."""
PATIENCE = 120
"""Seconds for threads that read a few batches: the first may compile kernels."""


class Cursor:
    """Where a loader is, by what its documentation says."""

    def __init__(self, config: DataConfig, end: int, evaluation: bool) -> None:
        self.end = end
        self.excluded = config.exclude_samples
        self.contiguous = config.order == "megatron"
        self.evaluation = evaluation
        self.consumed = 0
        self.put = 0
        """Where it was last put: by seek, by a state, or at the first sample."""

    def place(self, dp_rank: int, dp_size: int, rows: int) -> None:
        self.dp_rank, self.dp_size, self.rows = dp_rank, dp_size, rows

    @property
    def step(self) -> int:
        return self.dp_size * self.rows

    def next_position(self) -> int | None:
        """The samples before the next micro-step; None at the end."""
        position = self.consumed
        for start, stop in self.excluded:
            if start <= position < stop:
                position = stop
        return position if position < self.end else None

    def take(self) -> list[int] | None:
        """The samples of this rank's next micro-batch."""
        position = self.next_position()
        if position is None:
            return None
        self.consumed = position + self.step
        if self.contiguous:
            first = position + self.dp_rank * self.rows
            return list(range(first, first + self.rows))
        micro_step = range(position, position + self.step)
        return [sample for sample in micro_step if sample % self.dp_size == self.dp_rank]

    def begin(self) -> None:
        """`iter`: on from the cursor; in evaluation, and at the end, at the first sample."""
        is_unread = self.consumed == self.put
        if self.next_position() is None or (self.evaluation and not is_unread):
            self.move(0)

    def move(self, consumed: int) -> None:
        self.consumed = self.put = consumed

    def can_be(self, consumed: int) -> bool:
        offset = consumed % GLOBAL_BATCH
        is_excluded = any(start <= consumed < stop for start, stop in self.excluded)
        is_whole = offset == 0 if is_excluded else offset % self.step == 0
        return 0 <= consumed <= self.end and is_whole


class Walk:
    """One loader, its model, and what was done so far."""

    def __init__(
        self, config: DataConfig, end: int, rows: Callable[[int], bytes], seed: int
    ) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.rows = rows
        is_endless = config.order == "stream" and config.num_samples is None
        self.evaluation = self.random.random() < 0.3 and not is_endless
        self.model = Cursor(config, end, self.evaluation)
        self.done: list[str] = []
        self.iterator: Iterator[Any] | None = None
        """The iteration that runs; None: `next(loader)` may run one that nobody holds."""
        self.stale: Iterator[Any] | None = None
        """An iteration of before."""
        self.may_run = False
        """Whether the loader has an iteration."""
        self.device = False
        self.open(*self.layout())
        self.states = [self.loader.state_dict()]

    def layout(self) -> tuple[int, int, int]:
        dp_size, rows = self.random.choice(LAYOUTS)
        return self.random.randrange(dp_size), dp_size, rows

    def open(self, dp_rank: int, dp_size: int, rows: int) -> None:
        self.model.place(dp_rank, dp_size, rows)
        self.loader = StreamLoader(
            self.config,
            micro_batch_size=rows,
            global_batch_size=GLOBAL_BATCH,
            dp_rank=dp_rank,
            dp_size=dp_size,
            evaluation=self.evaluation,
            prefetch=self.random.choice([0, 1, 4]),
        )
        self.device = False
        self.ended()

    def ended(self) -> None:
        """No iteration runs any more."""
        self.stale = self.iterator or self.stale
        self.iterator = None
        self.may_run = False

    def run(self, steps: int) -> None:
        actions = [name for name in dir(self) if name.startswith("do_")]
        for _ in range(steps):
            name = self.random.choice(actions)
            self.done.append(name.removeprefix("do_"))
            getattr(self, name)()
            assert self.loader.consumed_samples == self.model.consumed
        self.loader.close()

    def check(self, batch: Any, samples: list[int] | None) -> None:
        """A batch is of these samples; None is the end of the data, for both."""
        got = None if batch is None else [row.numpy().tobytes() for row in batch["tokens"]]
        assert got == (None if samples is None else list(map(self.rows, samples)))

    # what a program may do

    def do_next(self) -> None:
        self.check(next(self.loader, None), self.model.take())
        self.may_run = True

    def do_iter(self) -> None:
        self.ended()
        self.model.begin()
        self.iterator = iter(self.loader)
        self.may_run = True

    def do_next_of_iterator(self) -> None:
        if self.iterator is not None:
            self.check(next(self.iterator, None), self.model.take())

    def do_next_of_stale_iterator(self) -> None:
        """The end of the data stays it; everything else is an error."""
        if self.stale is not None:
            with pytest.raises((StateError, StopIteration)):
                next(self.stale)

    def do_seek(self) -> None:
        consumed = self.random.randrange(-4, SAMPLES + 9)
        if self.model.can_be(consumed):
            self.loader.seek(consumed)
            self.model.move(consumed)
            self.ended()
            return
        with pytest.raises(StateError):
            self.loader.seek(consumed)

    def do_state_dict(self) -> None:
        state = json.loads(json.dumps(self.loader.state_dict()))
        assert state["consumed_samples"] == self.model.consumed
        assert state["batch_offset"] == self.model.consumed % GLOBAL_BATCH
        assert state["global_batch_size"] == GLOBAL_BATCH
        self.states.append(state)

    def do_load_state_dict(self) -> None:
        state = self.random.choice(self.states)
        consumed = state["consumed_samples"]
        if self.model.can_be(consumed):
            self.loader.load_state_dict(state)
            self.model.move(consumed)
            self.ended()
            return
        with pytest.raises(StateError):
            self.loader.load_state_dict(state)

    def do_load_into_other_ranks(self) -> None:
        """Where these can go on; another loader is as new then, but for its position."""
        state = self.loader.state_dict()
        self.loader.close()
        before = self.model.dp_rank, self.model.dp_size, self.model.rows
        self.open(*self.layout())
        if not self.model.can_be(self.model.consumed):
            with pytest.raises(StateError):
                self.loader.load_state_dict(state)
            self.open(*before)
        self.loader.load_state_dict(state)
        self.model.move(self.model.consumed)
        self.ended()

    def do_pass_over(self) -> None:
        expected = self.model.take()
        self.ended()
        self.may_run = True  # a copy would not have the positions that it goes through
        if expected is None:
            with pytest.raises(StopIteration):
                self.loader.pass_over()
        else:
            self.loader.pass_over()

    def do_prefetch_to(self) -> None:
        device = self.random.choice([None, "cpu"])
        if (device is not None) != self.device:
            self.ended()
        self.device = device is not None
        assert self.loader.prefetch_to(device) is self.loader

    def do_close(self) -> None:
        self.loader.close()
        self.ended()

    def do_copy(self) -> None:
        """It goes on by itself, and the loader does where it was; either may be used on."""
        ways: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy, pickled]
        make = self.random.choice(ways)
        if self.may_run:
            with pytest.raises(StateError, match=r"call close\(\) first"):
                make(self.loader)
            return
        copied = make(self.loader)
        after = copy.copy(self.model)
        self.check(next(copied, None), after.take())
        assert self.loader.consumed_samples == self.model.consumed
        if self.random.random() < 0.5:
            self.loader.close()
            self.loader, self.model = copied, after
            self.may_run = True
        else:
            copied.close()

    def do_threads(self) -> None:
        """Each batch goes to one of several threads."""
        counts = [self.random.randrange(1, 4) for _ in range(self.random.randrange(2, 4))]
        taken: list[Any] = []

        def take(count: int) -> None:
            for _ in range(count):
                batch = next(self.loader, None)
                taken.append(
                    batch if batch is None else [row.numpy().tobytes() for row in batch["tokens"]]
                )

        threads = [threading.Thread(target=take, args=(count,)) for count in counts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        expected = [self.model.take() for _ in range(sum(counts))]
        rows = [None if samples is None else list(map(self.rows, samples)) for samples in expected]
        assert sorted(taken, key=repr) == sorted(rows, key=repr)
        self.may_run = True

    def do_fork(self) -> None:
        """The child goes on where the loader is; what its parent iterates is an error in it."""
        if self.random.random() < 0.7:
            return  # a fork of this process takes longer than all else
        count = self.random.randrange(1, 4)
        child = in_child(read_in_child, self.loader, self.iterator, count)
        after = copy.copy(self.model)
        expected = [after.take() for _ in range(count)]
        rows = [None if samples is None else list(map(self.rows, samples)) for samples in expected]
        iterator_error = None if self.iterator is None else "StateError"
        assert child == (iterator_error, rows, after.consumed)


def pickled(loader: StreamLoader) -> Any:
    return pickle.loads(pickle.dumps(loader))  # noqa: S301 - made here


def read_in_child(
    loader: StreamLoader, iterator: Iterator[Any] | None, count: int
) -> tuple[str | None, list[Any], int]:
    error = None
    if iterator is not None:
        try:
            next(iterator)
        except (StateError, StopIteration) as raised:
            error = type(raised).__name__
    batches = [next(loader, None) for _ in range(count)]
    rows = [
        None if batch is None else [row.numpy().tobytes() for row in batch["tokens"]]
        for batch in batches
    ]
    loader.close()
    return error, rows, loader.consumed_samples


CONFIGS: dict[str, dict[str, Any]] = {
    "endless": {"order": "stream", "num_samples": None},
    "stream": {"order": "stream"},
    "excluded": {"order": "stream", "exclude_samples": [(8, 24), (48, 64)]},
    "megatron": {"order": "megatron"},
    "sequential": {"order": "sequential"},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = str(tmp_path_factory.mktemp("model") / "pair")
    write_random_pair(prefix)
    return prefix


@pytest.mark.guarantee("cursor-model")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")  # of Python 3.12 and newer
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.soak) for block in range(1, BLOCKS))]
)
def test_any_sequence_of_calls_gives_the_batches_of_its_model(
    pair: str, tmp_path: Path, name: str, block: int
) -> None:
    settings = {"num_samples": (SAMPLES, 0, 0), "shuffle_lanes": 16} | CONFIGS[name]
    if settings["order"] != "stream":
        del settings["shuffle_lanes"]
    config = data_config([pair], tmp_path, **settings)
    whole = replace(config, exclude_samples=())
    rows: dict[int, bytes] = {}
    with StreamLoader(whole, micro_batch_size=1, global_batch_size=GLOBAL_BATCH) as loader:

        def row_of(sample: int) -> bytes:
            if sample not in rows:
                rows[sample] = checked_batch(loader.dataset, sample)["tokens"][0].numpy().tobytes()
            return rows[sample]

        end = loader.dataset.num_samples or ENDLESS
        walks = WALKS if block else WALKS // 80
        for seed in range(block * WALKS, block * WALKS + walks):
            walk = Walk(config, end, row_of, seed)
            try:
                walk.run(STEPS)
            except BaseException as error:
                error.add_note(f"{name}, seed {seed}: {', '.join(walk.done)}")
                raise
