"""What ranks say of themselves, compared and put into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
