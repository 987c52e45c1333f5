"""The resumable state of a stream: one integer, and the identity of the order it counts in."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streammega.errors import StateError
from streammega.order.folded import (
    PHASES,
    canonical,
    digest_of,
    folded,
    folded_differences,
    has_folded,
    is_folded,
)

STATE_VERSION = 3
"""3: long lists of the identity are folded into digests. What is short is still written as 2.

2: the identity is one JSON string, and blend weights in it are divided by their sum.

1: a dict, with weights as given.
"""
WHOLE_VERSION = 2
"""Of states that hold their identity whole."""
READABLE = "readable_identity"
"""What a state is given by who kept the whole identity beside it: for messages alone."""

KEYS = ("version", "consumed_samples", "batch_offset", "identity", "fingerprint")

ROUNDING = 2e-7
"""What weights of version 1, kept with eight digits, may be off by when they are divided by their
sum.
"""


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A state that was read, and is whole.

    Nothing is known yet of whether it counts in the order of this run.
    """

    version: int
    consumed: int
    offset: int
    identity: Mapping[str, Any]
    readable: Mapping[str, Any] | None = None
    """The identity before it was folded, where it was kept."""

    @property
    def lanes(self) -> int | None:
        """The lanes of a stream order; None for other orders."""
        lanes = self.identity.get("lanes")
        return lanes if type(lanes) is int and lanes > 0 else None

    def check(self, identity: Mapping[str, Any]) -> None:
        """Raise StateError, listing what differs, unless `identity` describes the order this state
        counts in.
        """
        differences = self._differences(identity)
        if differences:
            raise StateError(
                "the checkpoint counts samples of another order, so its position means nothing "
                "here:\n  "
                + "\n  ".join(differences)
                + "\nrestore these settings, or start a new run without the data state"
            )

    def _differences(self, identity: Mapping[str, Any]) -> list[str]:
        if self.version == 1:
            return describe_differences(_in_shares(self.identity, identity), identity)
        if not has_folded(self.identity):
            return describe_differences(self.identity, identity)
        lines = _differences_of_folded(self.identity, identity)
        if lines and self.readable is not None:
            return describe_differences(self.readable, identity) or lines
        return lines


def make_state(
    identity: Mapping[str, Any], consumed_samples: int, batch_offset: int = 0
) -> dict[str, Any]:
    """A JSON-able state under 1 KB: version, consumed_samples, the identity as JSON, and its
    fingerprint. Long lists of the identity are folded: `keep_readable` keeps them beside it.

    Its keys are the same for every order, so that checkpoints which keep one entry a key (torch's
    DCP) hand a state of another order over to be refused here, in words. `batch_offset`: how many
    of the consumed samples belong to a global batch that is not finished.
    """
    short = folded(identity)
    # an earlier release goes on from what it can read, and refuses the rest by its version
    version = STATE_VERSION if has_folded(short) else WHOLE_VERSION
    return {
        "version": version,
        "consumed_samples": consumed_samples,
        "batch_offset": batch_offset,
        "identity": canonical(short),
        "fingerprint": fingerprint(short),
    }


def keep_readable(state: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to keep beside a state of this identity, so that a mismatch says what differs and not
    only where; None where the state holds all of it.
    """
    return dict(identity) if state["version"] > WHOLE_VERSION else None


def with_readable(state: Mapping[str, Any], readable: Any) -> Mapping[str, Any]:
    """A state to load with what `keep_readable` gave; None: without it."""
    return state if readable is None else {**state, READABLE: readable}


def parse_state(state: Mapping[str, Any]) -> SavedState:
    """A state of this release or of an earlier one.

    Raises StateError for an empty, foreign or damaged state.
    """
    if not isinstance(state, Mapping):
        raise StateError(
            f"the data state is a {type(state).__name__}, not a dict; pass what state_dict() "
            "returned"
        )
    if not state:
        raise StateError(
            "the data state is empty; was the checkpoint written by another program, or before the "
            "loader existed?"
        )
    missing = [name for name in KEYS if name not in state]
    if missing:
        raise StateError(
            f"the data state lacks {', '.join(sorted(missing))}; it is not a state of this loader"
        )
    version = state["version"]
    # A bool is an int, and True would be version 1.
    if type(version) is not int or not 1 <= version <= STATE_VERSION:
        raise StateError(
            f"the data state has version {version!r}, this release reads versions 1 to "
            f"{STATE_VERSION}"
        )
    for name in ("consumed_samples", "batch_offset"):
        count = state[name]
        if type(count) is not int or count < 0:
            raise StateError(f"{name} of the data state is {count!r}, not a count")
    consumed = state["consumed_samples"]
    offset = state["batch_offset"]
    if offset > consumed:
        raise StateError(
            f"batch_offset {offset} of the data state is more than its {consumed} consumed samples"
        )
    identity = _parse_identity(state["identity"])
    if identity is None or fingerprint(identity) != state["fingerprint"]:
        raise StateError(
            "the data state does not match its own fingerprint; the checkpoint is damaged or was "
            "edited"
        )
    return SavedState(
        version=version,
        consumed=consumed,
        offset=offset,
        identity=identity,
        readable=_readable(state.get(READABLE), identity),
    )


def fingerprint(identity: Mapping[str, Any]) -> str:
    """A digest of an identity, 32 hex digits."""
    return digest_of(identity)


def describe_differences(saved: Any, current: Any, path: str = "") -> list[str]:
    """Lines `name: checkpoint has X, this run Y` for all leaves that differ."""
    if path == PHASES:  # one may have none: each phase of the other is a line
        saved = saved or {}
        current = current or {}
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        lines = []
        for name in dict.fromkeys([*saved, *current]):
            inner_path = f"{path}.{name}" if path else str(name)
            lines += describe_differences(saved.get(name), current.get(name), inner_path)
        return lines
    are_lists = isinstance(saved, (list, tuple)) and isinstance(current, (list, tuple))
    if are_lists and len(saved) == len(current):
        lines = []
        for number, (item, current_item) in enumerate(zip(saved, current, strict=True)):
            lines += describe_differences(item, current_item, f"{path}[{number}]")
        return lines
    # As JSON: what was saved came through it, and has lists for tuples.
    saved_text = json.dumps(saved, sort_keys=True)
    current_text = json.dumps(current, sort_keys=True)
    if saved_text == current_text:
        return []
    return [f"{path}: the checkpoint has {json.dumps(saved)}, this run {json.dumps(current)}"]


def _differences_of_folded(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """As `describe_differences`, for an identity that has folded lists."""
    lines = []
    for name in dict.fromkeys([*saved, *current]):
        value = saved.get(name)
        if isinstance(value, Mapping) and is_folded(value):
            lines += folded_differences(name, value, current.get(name))
        else:
            lines += describe_differences(value, current.get(name), name)
    return lines


def _readable(kept: Any, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What was kept beside a state, if it is the identity that the state has folded."""
    whole = _parse_identity(kept)
    if whole is None or canonical(folded(whole)) != canonical(identity):
        return None
    return whole


def _parse_identity(identity: Any) -> Mapping[str, Any] | None:
    """The identity of a state: JSON text, or of version 1 a mapping. None for anything else."""
    if isinstance(identity, str):
        try:
            identity = json.loads(identity)
        except ValueError:
            return None
    if not isinstance(identity, Mapping):
        return None
    try:
        plain: dict[str, Any] = json.loads(canonical(identity))
    except (TypeError, ValueError):  # keys or values that no state of ours has
        return None
    return plain


def _in_shares(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Mapping[str, Any]:
    """A version 1 identity of a stream order with its weights divided by their sum; those that
    equal the current ones, as those.

    A dataset is "digest*weight" there, and a later segment of the blend schedule [first sample,
    weights].
    """
    if saved.get("order") != "stream" or not isinstance(saved.get("datasets"), list):
        return saved
    digests = []
    weights = []
    for text in saved["datasets"]:
        digest, _, weight = str(text).partition("*")
        digests.append(digest)
        weights.append(weight)
    current_shares = [str(text).partition("*")[2] for text in current.get("datasets", [])]
    current_schedule = current.get("schedule", [])
    try:
        shares = _shares(weights, current_shares)
        schedule = []
        for number, (first_sample, later_weights) in enumerate(saved.get("schedule", [])):
            current_later = []
            if number < len(current_schedule):
                _, current_later = current_schedule[number]
            later_shares = _shares(later_weights, current_later)
            schedule.append([first_sample, [float(share) for share in later_shares]])
    except (TypeError, ValueError, ZeroDivisionError):
        return saved  # no weights of ours: the differences will be listed
    datasets = [f"{digest}*{share}" for digest, share in zip(digests, shares, strict=True)]
    return {**saved, "datasets": datasets, "schedule": schedule}


def _shares(weights: list[Any], current_shares: list[Any]) -> list[str]:
    """Weights divided by their sum, eight digits; a share that rounding alone tells from the
    current one is the current one.
    """
    total = sum(float(weight) for weight in weights)
    shares = [f"{float(weight) / total:.8g}" for weight in weights]
    if len(current_shares) != len(shares):
        return shares
    for number, current_share in enumerate(current_shares):
        if math.isclose(float(shares[number]), float(current_share), rel_tol=ROUNDING):
            shares[number] = str(current_share)
    return shares
