"""What ranks write for each other into the store of the job: what each does, and why one of them ended
it. And how those statuses are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store

Status = Mapping[str, Any]
"""Of a rank: beats, step, phase, and seconds in it."""
ENDED = "ended"
PHASES = (
    "starting",
    "waiting for data",
    "computing",
    "reducing",
    "saving",
    "evaluating",
    "ending",
    ENDED,
)
"""What a rank does, in the order of a step: one that is behind is what those before it wait for."""


def compare(
    before: Mapping[int, Status],
    after: Mapping[int, Status],
    here: tuple[int, str],
    kinds: Sequence[str],
) -> str:
    """The ranks of these kinds, in words: "silent" between two looks, or "behind" or "ahead" of
    what is done `here` (step, phase); empty if none.
    """
    lines_of: dict[str, list[str]] = {"silent": [], "behind": [], "ahead": [], "here": []}
    for rank, status in after.items():
        kind = _kind(before.get(rank, {}), status, here)
        says = "gives no sign of life" if kind == "silent" else "is elsewhere"
        lines_of[kind].append(f"rank {rank} {says}; {_describe(status)}")
    lines: list[str] = []
    for kind in kinds:
        lines += lines_of[kind]
    return "; ".join(lines)


def _kind(before: Status, after: Status, here: tuple[int, str]) -> str:
    """What two statuses of another rank say: "silent", or where it is as seen from here."""
    if after["phase"] != ENDED and after["beats"] == before.get("beats"):
        return "silent"
    own_place = _place(*here)
    there = _place(after["step"], after["phase"])
    if there == own_place:
        return "here"
    return "behind" if there < own_place else "ahead"


def _place(step: int, phase: str) -> tuple[int, int]:
    """How far a rank is: comparable with those of others. A phase that is not known is the last."""
    number = PHASES.index(phase) if phase in PHASES else len(PHASES)
    return step, number


def as_words(cause: Status) -> str:
    """Why a rank ended the job, by its notice."""
    words = str(cause["cause"])
    if cause["rank"] is None:
        return words
    return f"rank {cause['rank']} ended the job: {words}"


def _describe(status: Status) -> str:
    return f"last heard of in step {status['step']} ({status['phase']}, for {status['seconds']} s)"


CLIENT_TIMEOUT = timedelta(seconds=10)
"""Of one request: what is asked for is there already, so a store that takes longer does not answer.
"""
MOST_CHARACTERS = 2000
"""Of a cause, which every rank prints."""
FAILURES = "streammega/failures"
CAUSE = "streammega/cause"
T = TypeVar("T")


class Board:
    """The notices of all ranks, read and written by a client of its own.

    A store's client is locked while it waits, and that of training waits for other ranks (groups
    that are made, ids that NCCL exchanges): signs of life must not stop meanwhile. After an error
    the next request takes a new connection, for which it tries as long as a request may take.

    Every method raises RuntimeError where the store does not answer.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        # Made while the store answers: clones of it wait no longer than it does.
        self._origin: Store = store.clone()  # type: ignore[attr-defined]
        self._origin.set_timeout(CLIENT_TIMEOUT)
        self._store: Store | None = self._origin

    def tell(self, status: dict[str, Any]) -> None:
        """Say what this rank does."""
        self._ask(lambda store: store.set(_name(self.rank), json.dumps(status)))

    def read(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """What these ranks said last; without those that have said nothing yet."""
        return self._ask(lambda store: _read(store, ranks))

    def read_all(self) -> dict[int, dict[str, Any]]:
        """What every rank said last."""
        return self.read(range(self.world))

    def blame(self, rank: int | None, cause: str) -> None:
        """Say why the job ends: `rank` by its own fault, or None: what was seen of others.

        The first cause is kept.
        """
        notice = json.dumps({"rank": rank, "cause": cause[:MOST_CHARACTERS]})

        def write(store: Store) -> None:
            """Count a failure; the first one is the cause."""
            # The store counts: of ranks that fail at once one is the first.
            failures = store.add(FAILURES, 1)
            if failures == 1:
                store.set(CAUSE, notice)

        self._ask(write)

    def cause(self) -> dict[str, Any] | None:
        """{"rank", "cause"} of the first failure, if there was one."""

        def look(store: Store) -> dict[str, Any] | None:
            """The cause that stands there, or None."""
            # Asked first: `get` would wait until there is one.
            if not store.check([CAUSE]):
                return None
            return dict(json.loads(store.get(CAUSE)))

        return self._ask(look)

    def _ask(self, request: Callable[[Store], T]) -> T:
        if self._store is None:
            self._store = self._origin.clone()  # type: ignore[attr-defined]
        try:
            return request(self._store)
        except Exception:
            # Whatever it was: a client in the middle of an answer would read the rest of it as the
            # next one.
            self._store = None
            raise


def _name(rank: int) -> str:
    return f"streammega/rank/{rank}"


def _read(store: Store, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    told = list(ranks)
    # For all at once the store says only whether all are there; they are, but at the start.
    if not store.check([_name(rank) for rank in told]):
        told = [rank for rank in told if store.check([_name(rank)])]
    if not told:
        return {}
    # One request: there may be a thousand ranks.
    values = store.multi_get([_name(rank) for rank in told])
    return {rank: json.loads(value) for rank, value in zip(told, values, strict=True)}
