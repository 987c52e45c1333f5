"""What each integration does with a state: an empty or a foreign one, one that is loaded twice, after
iterating began, or in the middle of an accumulation. An old iterator never looks like the end.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streammega.integrations
from streammega import DataConfig
from streammega.errors import StateError
from tests.support.adapters import ADAPTERS, Adapter, StatefulAdapter, is_json, take

pytestmark = [
    pytest.mark.usefixtures("workers_end_soon"),
    pytest.mark.filterwarnings("ignore"),  # those of the frameworks
]

Open = Callable[..., Adapter]
WITHOUT_STATES = {
    *("__init__", "frameworks", "megatron_arguments", "text_samples"),
    *("megatron_bridge", "megatron_dataset"),  # Megatron counts samples, and seeks
}
"""Files of integrations/ that keep no position."""


def test_every_integration_has_an_adapter() -> None:
    files = Path(streammega.integrations.__file__).parent.glob("*.py")
    adapters = Path(inspect.getfile(Adapter)).read_text()
    named = set(re.findall(r"streammega\.integrations\.(\w+) import", adapters))
    assert {file.stem for file in files} - WITHOUT_STATES == named, "ADAPTERS of adapters.py"


@pytest.fixture(params=ADAPTERS)
def opened(request: pytest.FixtureRequest, endless: DataConfig) -> Iterator[Open]:
    """Opens an adapter, of the stream or one of another seed, as often as it is asked to."""
    made: list[Adapter] = []

    def open_adapter(**other: Any) -> Adapter:
        made.append(ADAPTERS[request.param](replace(endless, shuffle_lanes=16, **other)))
        return made[-1]

    yield open_adapter
    for adapter in reversed(made):
        adapter.close()


def after(opened: Open, micro_batches: int) -> tuple[Adapter, Iterator[Any], Any, list[list[int]]]:
    """An adapter that has trained on so many, its iteration, its state, and the 8 that follow."""
    whole = opened()
    rest = take(whole, whole.batches(), micro_batches + 8)[2 * micro_batches :]
    adapter = opened()
    batches = adapter.batches()
    take(adapter, batches, micro_batches)
    return adapter, batches, adapter.state(), rest


@pytest.mark.guarantee("integration-loading-twice")
def test_loading_twice_is_loading_once(opened: Open) -> None:
    _, _, state, rest = after(opened, 8)
    assert isinstance(opened(), StatefulAdapter) or is_json(state)
    again = opened()
    for _ in range(2):
        again.load(state)
    assert take(again, again.batches(), 8) == rest


@pytest.mark.guarantee("integration-loading-twice")
def test_an_accumulation_is_gone_on_with_in_its_middle(opened: Open) -> None:
    """Where a trainer fetches whole steps, at the first micro-batch of the step that was not made."""
    adapter, _, state, rest = after(opened, 7)
    again = opened()
    again.load(state)
    if adapter.counts_steps:
        _, _, _, rest = after(opened, 4)
    assert take(again, again.batches(), 8) == rest


@pytest.mark.guarantee("integration-loading-twice")
def test_an_older_iterator_goes_on_there_or_says_that_it_cannot(opened: Open) -> None:
    adapter, batches, state, rest = after(opened, 8)
    take(adapter, batches, 3)
    adapter.load(state)
    for _ in range(2):
        try:
            following = take(adapter, batches, 1)
        except StateError:
            if adapter.tells_once:
                break
            continue
        except StopIteration:
            pytest.fail("it looks like the end of the data")
        is_old = isinstance(adapter, StatefulAdapter)  # which moves with its next iteration
        assert is_old or following == rest[: len(following)]
        rest = rest[len(following) :]


@pytest.mark.guarantee("integration-loading-twice")
def test_a_state_is_loaded_after_an_iteration_began(opened: Open) -> None:
    _, _, state, rest = after(opened, 8)
    again = opened()
    take(again, again.batches(), 1)
    again.load(state)
    assert take(again, again.batches(), 8) == rest


@pytest.mark.guarantee("integration-loading-twice")
def test_an_empty_state_is_refused_or_none(opened: Open) -> None:
    adapter, batches, _, rest = after(opened, 8)
    if adapter.empty_is_none:
        first = take(opened(), opened().batches(), 1)
        adapter.load({})
        assert take(adapter, adapter.batches(), 1) == first, "as if nothing had been loaded"
        return
    with pytest.raises(StateError):
        adapter.load({})
    assert take(adapter, batches, 8) == rest, "and nothing changed"


@pytest.mark.guarantee("integration-loading-twice")
def test_foreign_states_are_refused_and_change_nothing(opened: Open) -> None:
    adapter, batches, state, rest = after(opened, 8)
    other = opened(seed=5)
    take(other, other.batches(), 4)
    other_trainers = {"epoch": 3, "dp_rank_0": "..."}
    for foreign in (other_trainers, other.state(), damaged(state)):
        if not adapter.is_lazy:
            with pytest.raises(StateError):
                adapter.load(foreign)
            continue
        adapter.load(foreign)
        # what is not of torchdata's form at all meets torchdata's own words
        of_torchdata = (AssertionError, KeyError) if foreign is other_trainers else ()
        with pytest.raises((StateError, *of_torchdata)):
            take(adapter, adapter.batches(), 1)
    if not adapter.is_lazy:
        assert take(adapter, batches, 8) == rest


def damaged(state: Any) -> Any:
    """A state whose count, wherever it lies, is none."""
    if isinstance(state, str):
        return state.replace("consumed_samples", "samples")
    if not isinstance(state, dict):
        return state
    named = {name: damaged(value) for name, value in state.items()}
    if "consumed_samples" in named:
        named["consumed_samples"] = -7
    return named
