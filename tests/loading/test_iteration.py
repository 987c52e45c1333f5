"""Iterating, again, after leaving, over a load, after an error: one rule for each, by StreamLoader
and DataLoaders.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import pickle
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from streammega import (
    DataConfig,
    ParallelLayout,
    RankBatches,
    Ranks,
    StorageConfig,
    StreamingDataset,
    StreamLoader,
)
from streammega.errors import AccessDeniedError, FormatError, StateError
from streammega.loading.iterate import Iteration
from streammega.parallel import open_loader
from streammega.samples.fields import Batch
from tests.support.builders import data_config, write_random_pair
from tests.support.examples import examples
from tests.support.expected import checked_batch
from tests.support.servers import http_server
from tests.support.typed import first_prefix

pytestmark = [
    pytest.mark.usefixtures("workers_end_soon"),
    # more workers than a small machine has cores
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

SIZES: Any = {"micro_batch_size": 4, "global_batch_size": 8}
TOTAL = 104
EVERY = list(range(0, TOTAL, 4))


@pytest.fixture
def config(pair: str, tmp_path: Path) -> DataConfig:
    samples = (TOTAL, 40, 0)
    return data_config([pair], tmp_path, order="stream", num_samples=samples, split="70,30,0")


class Numbered:
    """Says which micro-step a batch is of: the value of `consumed` that it was made at."""

    def __init__(self, config: DataConfig, split: str = "train") -> None:
        dataset = StreamingDataset(config, split=split, **SIZES)
        self._step = {self._key(checked_batch(dataset, at)): at for at in dataset.positions()}

    @staticmethod
    def _key(batch: dict[str, torch.Tensor]) -> bytes:
        return batch["tokens"].numpy().tobytes()

    def __call__(
        self, batches: Iterable[dict[str, torch.Tensor]], most: int | None = None
    ) -> list[int]:
        return [self._step[self._key(batch)] for batch in itertools.islice(batches, most)]


# StreamLoader.


@pytest.mark.guarantee("train-loader-goes")
def test_a_pass_goes_on_where_it_was_left_and_after_the_end_comes_the_next(
    config: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    number = Numbered(config)
    with (
        caplog.at_level("INFO", "streammega.loading.loader"),
        StreamLoader(config, **SIZES) as loader,
    ):
        assert number(loader, 5) == EVERY[:5]
        assert number(loader) == EVERY[5:]
        assert loader.consumed_samples == TOTAL
        assert not caplog.records
        for _ in range(2):
            assert number(loader) == EVERY
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "the next pass begins" in caplog.text


@pytest.mark.guarantee("take-stays-end")
def test_take_stays_at_the_end_until_the_loader_goes_elsewhere(config: DataConfig) -> None:
    number = Numbered(config)
    with StreamLoader(config, **SIZES) as loader:
        end = loader.state_dict()
        loader.seek(TOTAL - 8)
        end = loader.state_dict()
        for go in (
            lambda: iter(loader),
            lambda: loader.seek(16),
            lambda: loader.load_state_dict(end),
        ):
            loader.seek(TOTAL - 4)
            loader.take()
            for _ in range(3):
                with pytest.raises(StopIteration):
                    loader.take()
            go()
            assert number([loader.take()]) == [loader.consumed_samples - 4]
        assert loader.consumed_samples == TOTAL - 4


@pytest.mark.guarantee("train-loader-goes")
def test_a_state_of_the_end_begins_another_pass_with_a_warning(
    config: DataConfig, caplog: pytest.LogCaptureFixture
) -> None:
    number = Numbered(config)
    with StreamLoader(config, **SIZES) as loader:
        assert number(loader) == EVERY
        end = loader.state_dict()
    with StreamLoader(config, **SIZES) as loader:
        loader.load_state_dict(end)
        with pytest.raises(StopIteration):
            loader.take()
        assert number(loader) == EVERY
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"sample {TOTAL}, is the end of the data; iterating begins another pass" in caplog.text


@pytest.mark.guarantee("evaluation-begins-first")
@pytest.mark.parametrize(("split", "evaluation"), [("valid", None), ("train", True)])
def test_evaluation_begins_at_the_first_sample_every_time(
    config: DataConfig, split: str, evaluation: bool | None
) -> None:
    number = Numbered(config, split)
    with StreamLoader(config, split=split, evaluation=evaluation, **SIZES) as loader:
        every = list(range(0, 4 * len(loader), 4))
        for most in (6, 3, None, None):
            assert number(loader, most) == every[:most]
        loader.seek(16)
        state = loader.state_dict()
        iter(loader)  # frameworks look whether a loader can be iterated; nothing was taken
        assert number(loader, 2) == [16, 20]
        assert number([loader.take()]) == [24], "take goes on from the cursor"
        assert number(loader, 2) == [0, 4]
        loader.load_state_dict(state)
        assert number(loader, 1) == [16]


def test_a_valid_split_may_be_trained_on(config: DataConfig) -> None:
    number = Numbered(config, "valid")
    with StreamLoader(config, split="valid", evaluation=False, **SIZES) as loader:
        assert number(loader, 3) == [0, 4, 8]
        assert number(loader, 1) == [12]


@pytest.mark.guarantee("stopiteration-end-data")
@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            lambda loader: loader.load_state_dict(loader.state_dict()),
            "load_state_dict moved its loader",
        ),
        (lambda loader: loader.seek(0), "seek moved its loader"),
        (lambda loader: loader.close(), "its loader was closed"),
        (lambda loader: iter(loader), "another iteration of its loader began"),
        (lambda loader: loader.dataset.seek(0), "put elsewhere under its loader"),
    ],
    ids=["load_state_dict", "seek", "close", "iter", "dataset"],
)
def test_an_iteration_that_is_held_over_a_move_raises(
    config: DataConfig, act: Callable[[StreamLoader], Any], words: str
) -> None:
    loader = StreamLoader(config, **SIZES)
    held = iter(loader)
    next(held)
    act(loader)
    for _ in range(2):
        with pytest.raises(StateError, match=words):
            next(held)
        words = "cannot go on"
    loader.close()


def test_an_iteration_that_gave_everything_stays_over(config: DataConfig) -> None:
    loader = StreamLoader(config, **SIZES)
    held = iter(loader)
    assert len(list(held)) == len(EVERY)
    loader.seek(0)
    assert list(held) == []


@pytest.mark.guarantee("after-error-batch")
def test_after_an_error_the_loader_goes_on_with_the_batch_that_failed(config: DataConfig) -> None:
    objects = {
        f"/p{suffix}": Path(f"{first_prefix(config)}{suffix}").read_bytes()
        for suffix in (".bin", ".idx")
    }
    number = Numbered(config)
    with http_server(objects) as server:
        storage = StorageConfig(request_timeout=60, memory_bytes=1 << 20).tuned(max_retries=0)
        remote = replace(config, blend=[f"{server.url}/p"], storage=storage)
        with StreamLoader(remote, **SIZES) as loader:
            server.status = 403
            for _ in range(2):
                with pytest.raises(AccessDeniedError):
                    loader.take()
            held = iter(loader)
            with pytest.raises(AccessDeniedError):
                next(held)
            server.status = None
            for _ in range(2):
                with pytest.raises(StateError, match="ended by AccessDeniedError"):
                    next(held)
            assert number([loader.take() for _ in range(3)]) == EVERY[:3]
            assert number(loader) == EVERY[3:]


# RankBatches.


def alone(config: DataConfig, **options: Any) -> tuple[StreamLoader, RankBatches]:
    ranks = Ranks(ParallelLayout())
    loader = open_loader(config, ranks, **SIZES, **options)
    return loader, RankBatches(loader, ranks)


@pytest.mark.guarantee("after-error-batch")
def test_an_error_ahead_costs_rank_batches_nothing(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = Numbered(config)
    loader, batches = alone(config)
    take = loader.take
    asked = itertools.count(1)

    def failing() -> Any:
        if next(asked) in (3, 4):
            raise AccessDeniedError("the third is refused twice")
        return take()

    monkeypatch.setattr(loader, "take", failing)
    got = []
    errors = 0
    while True:
        try:
            got.append(next(batches))
        except AccessDeniedError:
            errors += 1
            assert batches.consumed_samples == 8
        except StopIteration:
            break
    assert number(got) == EVERY
    assert errors == 2
    batches.close()


@pytest.mark.guarantee("train-loader-goes")
def test_rank_batches_begin_passes_as_their_loader_does(config: DataConfig) -> None:
    number = Numbered(config)
    _, batches = alone(config)
    assert number(batches, 5) == EVERY[:5]
    assert number(batches) == EVERY[5:]
    assert next(batches, None) is None
    for _ in range(2):
        assert number(batches) == EVERY
    batches.close()
    valid = Numbered(config, "valid")
    _, batches = alone(config, split="valid")
    for most in (3, None, None):
        assert valid(batches, most) == list(range(0, 40, 4))[:most]
    batches.close()


@pytest.mark.guarantee("stopiteration-end-data")
def test_what_virtual_stages_kept_is_not_given_after_a_load(config: DataConfig) -> None:
    number = Numbered(config)
    loader, batches = alone(config)
    state = batches.state_dict()
    first, second = batches.handles(2)
    assert number(first, 3) == EVERY[:3]
    batches.load_state_dict(state)
    for handle in (first, second):
        with pytest.raises(StateError, match="load_state_dict moved them"):
            next(handle)
    first, second = batches.handles(2)
    assert number(first, 2) == number(second, 2) == EVERY[:2]
    loader.seek(0)
    with pytest.raises(StateError, match="loader of these RankBatches was moved"):
        next(first)


# StreamingDataset under DataLoaders.

MODES: dict[str, Any] = {
    "alone": None,
    "none": {"num_workers": 0},
    "forked": {"num_workers": 2},
    "three": {"num_workers": 3},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "spawned": {
        "num_workers": 2,
        "persistent_workers": True,
        "multiprocessing_context": "forkserver",
    },
}


def feed(dataset: StreamingDataset, mode: str) -> Iterable[Any]:
    options = MODES[mode]
    return dataset if options is None else DataLoader(dataset, batch_size=None, **options)


@pytest.mark.guarantee("streamingdataset-begins-put")
@pytest.mark.parametrize("mode", MODES)
def test_the_first_iteration_begins_where_the_dataset_was_put_and_others_at_the_first_sample(
    config: DataConfig, mode: str
) -> None:
    number = Numbered(config)
    dataset = StreamingDataset(config, **SIZES)
    batches = feed(dataset, mode)
    if mode != "spawned":  # starting those takes seconds
        assert number(batches, 3) == EVERY[:3]
        assert number(batches) == EVERY
    dataset.seek(16)
    assert number(batches, 5) == EVERY[4:9]
    assert number(batches, 2) == EVERY[:2]
    if mode != "spawned":
        assert number(batches) == EVERY
        dataset.load_state_dict(dataset.state_dict(num_batches=7))
        assert number(batches) == EVERY[7:]
        assert number(batches) == EVERY


@pytest.mark.guarantee("streamingdataset-begins-put")
@pytest.mark.parametrize("mode", ["none", "forked", "persistent"])
def test_iterations_with_the_same_seed_are_told_apart(config: DataConfig, mode: str) -> None:
    number = Numbered(config)
    dataset = StreamingDataset(config, **SIZES)
    batches = feed(dataset, mode)
    dataset.seek(16)
    for begins in (4, 0, 0):
        torch.manual_seed(1234)
        assert number(batches, 4) == EVERY[begins : begins + 4]
    dataset.seek(24)
    torch.manual_seed(1234)
    assert number(batches, 4) == EVERY[6:10]


@pytest.mark.guarantee("streamingdataset-begins-put")
@pytest.mark.parametrize("mode", ["none", "forked"])
def test_two_iterations_at_once_do_not_share_a_place(config: DataConfig, mode: str) -> None:
    number = Numbered(config)
    dataset = StreamingDataset(config, **SIZES)
    dataset.seek(16)
    first = iter(feed(dataset, mode))
    assert number(first, 2) == EVERY[4:6]
    second = iter(feed(dataset, mode))
    assert number(second, 4) == EVERY[:4]
    assert number(first) == EVERY[6:]
    assert number(second) == EVERY[4:]


@pytest.mark.guarantee("stopiteration-end-data")
@pytest.mark.parametrize("mode", ["alone", "none", "forked", "persistent"])
def test_an_iteration_of_a_dataset_held_over_a_load_raises(config: DataConfig, mode: str) -> None:
    number = Numbered(config)
    dataset = StreamingDataset(config, **SIZES)
    batches = feed(dataset, mode)
    held = iter(batches)
    next(held)
    dataset.seek(16)
    with pytest.raises(StateError, match="given another position"):
        list(held)
    assert number(batches) == EVERY[4:]


@pytest.mark.guarantee("stopiteration-end-data")
@pytest.mark.parametrize("mode", ["alone", "none", "forked"])
def test_an_iteration_that_ended_by_an_error_is_not_over(config: DataConfig, mode: str) -> None:
    dataset = StreamingDataset(replace(config, vocab_size=10), **SIZES)
    held = iter(feed(dataset, mode))
    with pytest.raises(FormatError, match="outside of the vocabulary"):
        next(held)
    for _ in range(4):
        with pytest.raises(
            (StateError, FormatError), match=r"outside of the vocabulary|ended by FormatError"
        ):
            next(held)


@pytest.mark.parametrize("mode", ["alone", "none", "forked"])
def test_the_end_that_was_loaded_is_an_empty_pass_with_a_warning(
    config: DataConfig, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As torchdata's loader resumes a pass of which everything was handed out."""
    number = Numbered(config)
    dataset = StreamingDataset(config, **SIZES)
    batches = feed(dataset, mode)
    dataset.seek(TOTAL)
    assert number(batches) == []
    assert number(batches) == EVERY
    if mode != "forked":
        assert "is the end of the data, so this iteration gives nothing" in caplog.text
        assert dataset.state_dict()["consumed_samples"] == 0, (
            "the next iteration begins at the first sample"
        )


@pytest.mark.parametrize("mode", ["alone", "forked"])
@pytest.mark.parametrize("start", [0, 40])
def test_a_state_after_so_many_batches_is_that_of_having_taken_them(
    config: DataConfig, mode: str, start: int
) -> None:
    config = replace(config, exclude_samples=((16, 32), (48, 56), (96, 104)))
    reference = StreamLoader(config, **SIZES)
    reference.seek(start)
    states = [reference.state_dict(), *(reference.state_dict() for _ in reference)]
    dataset = StreamingDataset(config, **SIZES)
    dataset.seek(start)
    next(iter(feed(dataset, mode)))
    for count, state in enumerate(states):
        assert dataset.state_dict(num_batches=count) == state
    with pytest.raises(StateError, match="there are no"):
        dataset.state_dict(num_batches=len(states))


@pytest.mark.guarantee("3-cursor-counts")
@pytest.mark.parametrize("mode", ["forked", "persistent"])
def test_where_only_the_caller_can_count_he_is_asked(config: DataConfig, mode: str) -> None:
    dataset = StreamingDataset(config, **SIZES)
    batches = feed(dataset, mode)
    dataset.seek(16)
    for begins in (16, 0):
        taken = len(list(itertools.islice(batches, 3)))
        with pytest.raises(StateError, match="StatefulDataLoader"):
            dataset.state_dict()
        assert dataset.state_dict(num_batches=taken)["consumed_samples"] == begins + 12
    dataset.seek(24)
    assert dataset.state_dict()["consumed_samples"] == 24, "what was set is known"


def test_a_state_that_is_asked_for_as_composer_does_is_refused_in_words(config: DataConfig) -> None:
    """It counts samples, and says whether they are those since the first."""
    dataset = StreamingDataset(config, **SIZES)
    asked: Any = dataset.state_dict
    with pytest.raises(StateError, match=r"state_dict\(4096, True\) is how Composer calls it"):
        asked(4096, True)


@pytest.mark.guarantee("loop-fetches-ahead")
@pytest.mark.parametrize("excluded_ranges", [(), ((16, 32), (48, 56))])
def test_a_loop_that_fetches_ahead_saves_what_it_has_trained_on(
    config: DataConfig, excluded_ranges: tuple[tuple[int, int], ...]
) -> None:
    """As docs/loops.md has it: the next batch is taken before the step is done."""
    config = replace(config, exclude_samples=excluded_ranges)
    with StreamLoader(config, **SIZES) as loader, StreamLoader(config, **SIZES) as plain:
        batches = iter(loader)
        batch = next(batches)
        for _ in range(12):
            trained = loader.consumed_samples
            trained_on = batch["tokens"]
            batch = next(batches)
            assert torch.equal(trained_on, next(plain)["tokens"])
            assert loader.dataset.state_at(trained) == plain.state_dict()
            assert loader.state_dict() != plain.state_dict()
        plain.load_state_dict(loader.dataset.state_at(trained))
        assert torch.equal(next(plain)["tokens"], batch["tokens"])


def test_persistent_workers_follow_the_lanes_and_steps_of_a_state(config: DataConfig) -> None:
    config = replace(config, order="stream", num_samples=(400, 0, 0))
    with StreamLoader(config, micro_batch_size=4, global_batch_size=24) as former:
        for _ in range(6):
            former.take()
        state = former.state_dict()
        rest = [batch["tokens"].clone() for batch in former]
    dataset = StreamingDataset(config, micro_batch_size=4, global_batch_size=40)
    batches = feed(dataset, "persistent")
    next(iter(batches))
    dataset.load_state_dict(state)
    got = [batch["tokens"].clone() for batch in batches]
    assert len(got) == (400 - 24) // 40 * 10
    assert all(a.equal(b) for a, b in zip(got, rest, strict=False))
    assert dataset.state_dict(num_batches=10)["batch_offset"] == 0
    assert len(list(batches)) == 100, "a pass has the steps that it would have had from its start"


def pickled(dataset: StreamingDataset) -> Any:
    return pickle.loads(pickle.dumps(dataset))  # noqa: S301


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, pickled], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_of_a_dataset_have_places_of_their_own(
    config: DataConfig, make: Callable[[Any], Any]
) -> None:
    number = Numbered(config)
    dataset = StreamingDataset(config, **SIZES)
    dataset.seek(16)
    other = make(dataset)
    dataset.seek(40)
    for _ in range(2):
        assert number(feed(other, "forked"), 2) == EVERY[4:6]
        other.seek(16)
    assert number(feed(dataset, "forked"), 2) == EVERY[10:12]


def test_ranks_that_were_forked_with_their_loader_have_cursors_of_their_own(
    config: DataConfig,
) -> None:
    import multiprocessing

    number = Numbered(config)
    loader = StreamLoader(config, **SIZES)
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def rank(start: int) -> None:
        loader.seek(start)
        held = iter(loader)
        results.put((start, number(held, 4)))

    processes = [context.Process(target=rank, args=(8 * start,)) for start in range(3)]
    held = iter(loader)
    next(held)
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert found == {start: list(range(start, start + 16, 4)) for start in (0, 8, 16)}
    assert number(held, 2) == EVERY[1:3]
    loader.close()


# States.


@pytest.mark.guarantee("4-identity-defines")
def test_weights_of_the_same_shares_are_the_same_order(
    pair: str, config: DataConfig, tmp_path: Path
) -> None:
    write_random_pair(str(tmp_path / "b"), seed=1)
    other = str(tmp_path / "b")
    stream = replace(config, order="stream", blend=[(pair, 0.3), (other, 0.7)], split="1,0,0")
    state = StreamLoader(stream, **SIZES).state_dict()
    StreamLoader(replace(stream, blend=[(pair, 3), (other, 7)]), **SIZES).load_state_dict(state)
    with pytest.raises(StateError, match="datasets"):
        StreamLoader(replace(stream, blend=[(pair, 3), (other, 7.00001)]), **SIZES).load_state_dict(
            state
        )


@pytest.mark.guarantee("state-refused-changes")
@pytest.mark.parametrize("version", [0, 2, 4, True, "1", None])
def test_a_state_of_another_version_is_refused_by_its_version(
    config: DataConfig, version: Any
) -> None:
    with StreamLoader(config, **SIZES) as loader:
        state = loader.state_dict()
        with pytest.raises(StateError, match=r"has version .*, this release reads version 1"):
            loader.load_state_dict({**state, "version": version})


@pytest.mark.many_examples
@pytest.mark.guarantee("state-refused-changes")
@settings(max_examples=examples(10))
@given(data=st.data())
def test_a_load_that_is_refused_changes_nothing(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(tmp_path_factory.getbasetemp()) / "refused"
    if not folder.exists():
        write_random_pair(str(folder / "pair"))
    config = DataConfig(
        blend=[str(folder / "pair")],
        sequence_length=16,
        order="stream",
        num_samples=(960, 0, 0),
        storage=StorageConfig(cache_dir=folder),
    )
    foreign = replace(config, seed=7, shuffle_lanes=64)
    with StreamLoader(foreign, micro_batch_size=4, global_batch_size=16) as other:
        other.seek(32)
        states = [other.state_dict()]
    with StreamLoader(config, micro_batch_size=3, global_batch_size=24) as other:
        other.seek(24 * 3)
        other.take()
        states.append(other.state_dict())
    state = dict(data.draw(st.sampled_from(states)))
    damage: Any = st.one_of(
        st.none(),
        st.integers(-3, 2000),
        st.just([]),
        st.just({}),
        st.just("{}"),
        st.just("x"),
        st.just(10**30),
        st.floats(),
    )
    for name in data.draw(st.lists(st.sampled_from(sorted(state)), max_size=2, unique=True)):
        state[name] = data.draw(damage)
    with StreamLoader(config, micro_batch_size=4, global_batch_size=32) as loader:
        loader.take()
        held = iter(loader)
        next(held)

        before = loader.state_dict()
        lanes = loader.dataset.steps.lanes
        schedule = loader.dataset.steps.schedule
        generation = loader.dataset.generation
        with contextlib.suppress(StateError):
            loader.load_state_dict(state)
            return  # it was whole, or whole enough
        assert loader.state_dict() == before
        assert loader.dataset.steps.lanes == lanes
        assert (loader.dataset.steps.schedule, loader.dataset.generation) == (schedule, generation)
        next(held)
        assert loader.consumed_samples == before["consumed_samples"] + 4


def test_states_have_the_same_keys_in_every_order(config: DataConfig) -> None:
    keys = set()
    for order in ("stream", "megatron", "sequential"):
        state = StreamLoader(replace(config, order=order), **SIZES).state_dict()
        keys.add(tuple(state))
        assert all(type(value) in (int, str) for value in state.values())
        assert json.loads(state["order"])["order"] == order
    assert len(keys) == 1


def test_a_loader_is_not_closed_under_a_thread_that_waits_for_a_batch() -> None:
    """A generator cannot be closed while it runs: that was a ValueError about generators."""
    entered = threading.Event()
    arrived = threading.Event()

    def batches() -> Generator[Batch, None, None]:
        entered.set()
        assert arrived.wait(60)
        yield {}
        yield {}

    iteration = Iteration(batches())
    waiter = threading.Thread(target=next, args=(iteration,))
    waiter.start()
    assert entered.wait(60)
    with pytest.raises(StateError, match="another thread waits"):
        iteration.stop("its loader was closed")
    arrived.set()
    waiter.join(60)
    iteration.stop("its loader was closed")
    with pytest.raises(StateError, match="its loader was closed"):
        next(iteration)


def test_a_loader_is_not_closed_under_a_thread_that_is_about_to_wait() -> None:
    batches: list[Batch] = [{}]
    iteration = Iteration(batch for batch in batches)
    with iteration._lock, pytest.raises(StateError, match="another thread waits"):
        iteration.stop("its loader was closed")
    assert next(iteration) == {}


@pytest.mark.guarantee("state-refused-changes")
@pytest.mark.parametrize("move", ["seek", "load_state_dict"])
def test_a_move_under_a_thread_that_waits_for_a_batch_changes_nothing(
    config: DataConfig, move: str
) -> None:
    number = Numbered(config)
    with StreamLoader(config, **SIZES) as loader:
        loader.seek(80)
        target: Any = 80 if move == "seek" else loader.state_dict()
        loader.seek(0)
        iteration = loader._begin()
        assert number(iteration, 2) == EVERY[:2]
        with iteration._lock, pytest.raises(StateError, match="another thread waits"):
            getattr(loader, move)(target)
        assert loader.consumed_samples == 8
        assert number(iteration, 1) == EVERY[2:3]
        getattr(loader, move)(target)
        with pytest.raises(StateError, match=f"{move} moved its loader"):
            next(iteration)
        assert number([next(loader)]) == [80]


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, pickled], ids=["copy", "deepcopy", "pickle"]
)
def test_a_loader_is_copied_between_its_iterations(
    config: DataConfig, make: Callable[[Any], StreamLoader]
) -> None:
    number = Numbered(config)
    with StreamLoader(config, **SIZES) as loader:
        assert number(loader, 2) == EVERY[:2]
        with pytest.raises(StateError, match=r"while it has an iteration.*close\(\)"):
            make(loader)
        loader.close()
        loader.pass_over()
        with pytest.raises(StateError, match=r"while it has an iteration.*close\(\)"):
            make(loader)
        loader.close()
        with make(loader) as another:
            assert number(another, 2) == EVERY[3:5]
        assert number(loader, 1) == EVERY[3:4]


def test_a_batch_that_was_passed_over_is_not_taken(config: DataConfig) -> None:
    with StreamLoader(config, **SIZES) as loader:
        expected = [loader.take()["tokens"].tolist() for _ in range(5)]
    with StreamLoader(config, **SIZES) as loader:
        for number, batch in enumerate(expected):
            if number in (1, 2):
                loader.pass_over()
            else:
                assert loader.take()["tokens"].tolist() == batch


def test_threads_that_share_a_loader_get_each_batch_once_while_it_is_closed(
    config: DataConfig,
) -> None:
    loader = StreamLoader(config, micro_batch_size=2, global_batch_size=2)
    expected = [batch["tokens"].tolist() for batch in loader]
    loader.seek(0)
    taken: list[list[list[int]]] = []

    def take() -> None:
        while True:
            try:
                taken.append(next(loader)["tokens"].tolist())
            except StopIteration:
                return
            except StateError:  # closed in between: the next one goes on
                continue

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with contextlib.suppress(StateError):  # a thread waits for a batch
            loader.close()
    assert sorted(taken) == sorted(expected)


@pytest.mark.parametrize("shared", ["loader", "iterator"])
def test_threads_that_share_a_loader_get_each_batch_once(config: DataConfig, shared: str) -> None:
    loader = StreamLoader(config, micro_batch_size=2, global_batch_size=2)
    expected = [batch["tokens"].tolist() for batch in loader]
    loader.seek(0)
    batches = loader if shared == "loader" else iter(loader)
    taken: list[list[list[int]]] = []
    failed: list[BaseException] = []
    ready = threading.Barrier(4)

    def take() -> None:
        ready.wait()
        try:
            while True:
                taken.append(next(batches)["tokens"].tolist())
        except StopIteration:
            pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert sorted(taken) == sorted(expected)
    assert loader.consumed_samples == 2 * len(expected)


@pytest.mark.parametrize("num_samples", [None, (64, 0, 0)])
@pytest.mark.parametrize("options", [{}, {"batch_size": None}])
def test_a_dataloader_of_a_loader_is_refused_in_words(
    config: DataConfig, num_samples: tuple[int, int, int] | None, options: dict[str, Any]
) -> None:
    data = replace(config, order="stream", num_samples=num_samples)
    with (
        StreamLoader(data, micro_batch_size=2, global_batch_size=2) as loader,
        pytest.raises(TypeError, match="gives batches already: iterate it"),
    ):
        next(iter(DataLoader(loader, **options)))  # type: ignore[arg-type]
