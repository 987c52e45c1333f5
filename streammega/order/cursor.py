"""The resumable state of a stream: one integer, and the identity of the order it counts in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from streammega.errors import StateError

STATE_VERSION = 1


def make_state(identity: Mapping[str, Any], consumed_samples: int, batch_offset: int = 0) -> dict[str, Any]:
    """A small, JSON-able state: version, consumed_samples, the identity in the clear, and its fingerprint.

    `batch_offset`: how many of the consumed samples belong to a global batch that is not finished.
    """
    return {
        "version": STATE_VERSION,
        "consumed_samples": consumed_samples,
        "batch_offset": batch_offset,
        "identity": dict(identity),
        "fingerprint": fingerprint(identity),
    }


def read_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> tuple[int, int]:
    """(consumed_samples, batch_offset) of a state that counts in the order `identity` describes.

    Raises StateError for an empty, foreign or damaged state, and for another order: it lists what differs.
    """
    if not state:
        raise StateError("the data state is empty; was the checkpoint written by another program, or before the loader existed?")
    missing = {"version", "consumed_samples", "batch_offset", "identity", "fingerprint"} - set(state)
    if missing:
        raise StateError(f"the data state lacks {', '.join(sorted(missing))}; it is not a state of this loader")
    if state["version"] != STATE_VERSION:
        raise StateError(f"the data state has version {state['version']}, this release reads version {STATE_VERSION}")
    consumed, offset, saved = state["consumed_samples"], state["batch_offset"], state["identity"]
    for name, count in (("consumed_samples", consumed), ("batch_offset", offset)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise StateError(f"{name} of the data state is {count!r}, not a count")
    if fingerprint(saved) != state["fingerprint"]:
        raise StateError("the data state does not match its own fingerprint; the checkpoint is damaged or was edited")
    differences = describe_differences(saved, identity)
    if differences:
        raise StateError(
            "the checkpoint counts samples of another order, so its position means nothing here:\n  "
            + "\n  ".join(differences)
            + "\nrestore these settings, or start a new run without the data state"
        )
    return consumed, offset


def fingerprint(identity: Mapping[str, Any]) -> str:
    """A digest of an identity, 32 hex digits."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def describe_differences(saved: Any, current: Any, path: str = "") -> list[str]:
    """Lines `name: checkpoint has X, this run Y` for all leaves that differ."""
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        names = list(dict.fromkeys([*saved, *current]))
        return [
            line
            for name in names
            for line in describe_differences(saved.get(name), current.get(name), f"{path}.{name}" if path else str(name))
        ]
    if isinstance(saved, (list, tuple)) and isinstance(current, (list, tuple)) and len(saved) == len(current):
        pairs = zip(saved, current, strict=True)
        return [line for i, (a, b) in enumerate(pairs) for line in describe_differences(a, b, f"{path}[{i}]")]
    if json.dumps(saved, sort_keys=True) == json.dumps(current, sort_keys=True):
        return []
    return [f"{path}: the checkpoint has {json.dumps(saved)}, this run {json.dumps(current)}"]
