"""The resumable state of a stream: one integer, and the identity of the order it counts in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
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

STATE_VERSION = 4
"""4: the digest of a dataset is also of its first and last tokens. No earlier version is read."""
READABLE = "readable_identity"
"""What a state is given by who kept the whole identity beside it: for messages alone."""

KEYS = ("version", "consumed_samples", "batch_offset", "identity", "fingerprint")


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A state that was read, and is whole.

    Nothing is known yet of whether it counts in the order of this run.
    """

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

    def check(
        self, identity: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Raise StateError, listing what differs, unless `identity` describes the order this state
        counts in. names: of this run's datasets, by their paths in the identity: "datasets[0]".
        """
        differences = self._differences(identity, names)
        if differences:
            raise StateError(
                "the checkpoint counts samples of another order, so its position means nothing "
                "here:\n  "
                + "\n  ".join(differences)
                + "\nrestore these settings, or start a new run without the data state"
            )

    def _differences(self, identity: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
        if not has_folded(self.identity):
            return describe_differences(self.identity, identity, names=names)
        lines = _differences_of_folded(self.identity, identity, names)
        if lines and self.readable is not None:
            return describe_differences(self.readable, identity, names=names) or lines
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
    return {
        "version": STATE_VERSION,
        "consumed_samples": consumed_samples,
        "batch_offset": batch_offset,
        "identity": canonical(short),
        "fingerprint": fingerprint(short),
    }


def keep_readable(state: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """What to keep beside a state of this identity, so that a mismatch says what differs and not
    only where; None where the state holds all of it.
    """
    return dict(identity) if has_folded(json.loads(state["identity"])) else None


def with_readable(state: Mapping[str, Any], readable: Any) -> Mapping[str, Any]:
    """A state to load with what `keep_readable` gave; None: without it."""
    return state if readable is None else {**state, READABLE: readable}


def parse_state(state: Mapping[str, Any]) -> SavedState:
    """A state as `make_state` made it.

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
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"the data state has version {version!r}, this release reads version {STATE_VERSION}; "
            "resume with the release that saved it, or start a new run without the data state"
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
        consumed=consumed,
        offset=offset,
        identity=identity,
        readable=_readable(state.get(READABLE), identity),
    )


def fingerprint(identity: Mapping[str, Any]) -> str:
    """A digest of an identity, 32 hex digits."""
    return digest_of(identity)


def describe_differences(
    saved: Any, current: Any, path: str = "", names: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Lines `path: checkpoint has X, this run Y` for all leaves that differ. names: of datasets, by
    their paths.
    """
    if path == PHASES:  # one may have none: each phase of the other is a line
        saved = saved or {}
        current = current or {}
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        lines = []
        for name in dict.fromkeys([*saved, *current]):
            inner_path = f"{path}.{name}" if path else str(name)
            lines += describe_differences(saved.get(name), current.get(name), inner_path, names)
        return lines
    are_lists = isinstance(saved, (list, tuple)) and isinstance(current, (list, tuple))
    if are_lists and len(saved) == len(current):
        lines = []
        for number, (item, current_item) in enumerate(zip(saved, current, strict=True)):
            lines += describe_differences(item, current_item, f"{path}[{number}]", names)
        return lines
    # As JSON: what was saved came through it, and has lists for tuples.
    saved_text = json.dumps(saved, sort_keys=True)
    current_text = json.dumps(current, sort_keys=True)
    if saved_text == current_text:
        return []
    where = f"{path} ({names[path]!r})" if path in names else path
    return [f"{where}: the checkpoint has {json.dumps(saved)}, this run {json.dumps(current)}"]


def _differences_of_folded(
    saved: Mapping[str, Any], current: Mapping[str, Any], names: Mapping[str, str]
) -> list[str]:
    """As `describe_differences`, for an identity that has folded lists."""
    lines = []
    for name in dict.fromkeys([*saved, *current]):
        value = saved.get(name)
        if isinstance(value, Mapping) and is_folded(value):
            lines += folded_differences(name, value, current.get(name), names)
        else:
            lines += describe_differences(value, current.get(name), name, names)
    return lines


def _readable(kept: Any, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What was kept beside a state, if it is the identity that the state has folded."""
    is_of_state = isinstance(kept, Mapping) and canonical(folded(kept)) == canonical(identity)
    return kept if is_of_state else None


def _parse_identity(identity: Any) -> Mapping[str, Any] | None:
    """The identity of a state, which is JSON text of a mapping. None for anything else."""
    try:
        plain = json.loads(identity)
    except (TypeError, ValueError):
        return None
    return plain if isinstance(plain, Mapping) else None
