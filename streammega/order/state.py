"""The resumable state of a run: how many samples it has handed out, and which order counts them.

An identity describes an order: its settings, and a digest of each dataset. A state holds a short
identity whole. In a longer one, each long list is a number of items and digests: a state is under
1 KB for any number of datasets and phases.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from streammega.config import MAX_SAMPLES
from streammega.config.validate import parse_json
from streammega.errors import StateError

PHASES = "phases"
"""The entry of an identity that has the later phases of a run: {number: what defines it}."""
STATE_VERSION = 1
COUNTS = ("consumed_samples", "batch_offset", "global_batch_size")
KEYS = ("version", *COUNTS, "order", "fingerprint")
"""The entries of every state, in every order. Checkpoints with one entry a key (torch's DCP) can
then load the state of another order, and the error here says what differs.
"""
MAX_WHOLE_IDENTITY = 720
"""Characters of an identity that a state holds whole, as JSON text within JSON."""
MAX_WHOLE_ENTRY = 100
"""Characters of an entry that stays whole in a longer identity. A digested one has about as many.
"""
GROUPS = 8
"""Stretches of a list with a digest each, so that a mismatch says between which items it is."""
GROUP_DIGITS = 5
_DIGESTED = re.compile(r"([1-9]\d{0,17}) items: ([0-9a-f]{32}(?: [0-9a-f]+)+)")
_DATASET = re.compile(r"(?:\d+:)?([0-9a-f]{8,16})(?:\*(.+))?")
"""The digest and the share of a dataset, as orders describe it."""
NO_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """A state that was read and is undamaged, of any order. global_batch_size: of the run that saved
    it, at its first sample: phases may change it since.
    """

    consumed: int
    offset: int
    global_batch_size: int
    order: Mapping[str, Any]
    """The identity of its order, with long lists digested."""

    @property
    def lanes(self) -> int | None:
        """The lanes of a stream order; None for other orders."""
        lanes = self.order.get("shuffle_lanes")
        return lanes if type(lanes) is int and lanes > 0 else None

    def check(self, identity: Mapping[str, Any], names: Mapping[str, str] = NO_NAMES) -> None:
        """Raise StateError, listing what differs, unless `identity` describes the order this state
        counts in. names: of this run's datasets, by their paths in the identity: "datasets[0]".
        """
        differences = describe_differences(self.order, identity, names)
        if differences:
            change = "; a change of data in mid-run is a phase (data.phases)"
            raise StateError(
                "the checkpoint counts samples of another order, so its position means nothing "
                "here:\n  "
                + "\n  ".join(differences)
                + "\nrestore these settings, or start a new run without the data state"
                + (change if any("dataset" in line for line in differences) else "")
            )


def make_state(
    identity: Mapping[str, Any],
    consumed_samples: int,
    batch_offset: int = 0,
    *,
    global_batch_size: int,
) -> dict[str, Any]:
    """A JSON-able state under 1 KB. batch_offset: how many of the consumed samples belong to a
    global batch that is not finished. global_batch_size: see SavedState.
    """
    order: Mapping[str, Any] = identity
    # Encoded twice: a state has it as text within JSON, where a quote takes two characters.
    if len(json.dumps(canonical_json(identity))) > MAX_WHOLE_IDENTITY:
        order = {name: _short_entry(value) for name, value in identity.items()}
    return {
        "version": STATE_VERSION,
        "consumed_samples": consumed_samples,
        "batch_offset": batch_offset,
        "global_batch_size": global_batch_size,
        "order": canonical_json(order),
        "fingerprint": _digest(order),
    }


def parse_state(state: Mapping[str, Any]) -> SavedState:
    """A state as `make_state` made it. Raises StateError for an empty, foreign or damaged one."""
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
    for name in COUNTS:
        if type(state[name]) is not int or not 0 <= state[name] <= MAX_SAMPLES:
            raise StateError(f"{name} of the data state is {state[name]!r}, not a count")
    consumed, offset, global_batch_size = (state[name] for name in COUNTS)
    if offset > consumed:
        raise StateError(
            f"batch_offset {offset} of the data state is more than its {consumed} consumed samples"
        )
    try:
        order = parse_json(state["order"])
    except (TypeError, ValueError):
        order = None
    if not isinstance(order, dict) or _digest(order) != state["fingerprint"]:
        raise StateError(
            "the data state does not match its own fingerprint; the checkpoint is damaged or was "
            "edited"
        )
    return SavedState(
        consumed=consumed, offset=offset, global_batch_size=global_batch_size, order=order
    )


def canonical_json(value: Any) -> str:
    """A value as JSON text, the same for equal ones."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def differing_values(one: Any, other: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """{path: both values} for each entry in which two identities differ; None where one has no such
    entry. Lists of different lengths are one entry.
    """
    if canonical_json(one) == canonical_json(other):
        return {}
    if path == PHASES:  # a run without any has no such entry
        one, other = one or {}, other or {}
    items = []
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in {**one, **other}:
            item_path = f"{path}.{name}" if path else str(name)
            items.append((item_path, one.get(name), other.get(name)))
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=True) if len(one) == len(other) else ()
        items = [(f"{path}[{number}]", *pair) for number, pair in enumerate(pairs)]
    if not items:
        return {path: (one, other)}
    differences: dict[str, tuple[Any, Any]] = {}
    for item_path, item, other_item in items:
        differences |= differing_values(item, other_item, item_path)
    return differences


def shown_value(value: Any) -> str:
    """A value of an identity as a message shows it: of a long list, how many items it has."""
    digested = _DIGESTED.fullmatch(value) if isinstance(value, str) else None
    if digested:
        return f"{digested[1]} items"
    text = json.dumps(value)
    is_long = isinstance(value, list | tuple | Mapping) and len(text) > MAX_WHOLE_IDENTITY
    return f"{len(value)} items" if is_long else text


def describe_differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], names: Mapping[str, str] = NO_NAMES
) -> list[str]:
    """Lines `path: the checkpoint has X, this run Y`, for all that differs; of another order, this
    alone: all else follows from it. names: of datasets, by their paths.
    """
    orders = saved.get("order"), current.get("order")
    if None not in orders and orders[0] != orders[1]:
        saved, current = {"order": orders[0]}, {"order": orders[1]}
    lines = []
    differing = differing_values(saved, current)
    is_of_data = all("dataset" in path for path in differing)
    for path, (before, now) in differing.items():
        digested = _DIGESTED.fullmatch(before) if isinstance(before, str) else None
        if digested and isinstance(now, list | tuple | Mapping) and len(now) == int(digested[1]):
            lines += _differences_of_digests(digested, now, names, path)
            continue
        where = f"{path} ({names[path]!r})" if path in names else path
        lines.append(
            f"{where}: the checkpoint has {shown_value(before)}, this run {shown_value(now)}"
            + (_why(before, now) if is_of_data else "")
        )
    return lines


def _why(before: Any, now: Any) -> str:
    """What two described datasets differ in."""
    described = [
        _DATASET.fullmatch(value) if isinstance(value, str) else None for value in (before, now)
    ]
    if None in described:
        return ""
    (digest, share), (other, other_share) = (match.groups() for match in described if match)
    if digest != other and share == other_share:
        return ": other data of this name; was it replaced, or is the split another?"
    return ": the same data, with another weight" if digest == other else ""


def _differences_of_digests(
    saved: re.Match[str],
    current: Sequence[Any] | Mapping[str, Any],
    names: Mapping[str, str],
    path: str,
) -> list[str]:
    """Between which items a list of this run differs from a digested one of as many items."""
    digest_of_all, *groups = saved[2].split()
    if _digest(current) == digest_of_all:
        return []
    labels = []
    for item in current if isinstance(current, Mapping) else range(len(current)):
        name = names.get(f"{path}[{item}]")
        labels.append(str(item) if name is None else f"{item} ({name!r})")
    if len(groups) != min(GROUPS, len(current)):
        return [
            f"{path}: of {len(current)} items, the checkpoint has other digests than a state has"
        ]
    differing = []
    for digest, values, group in zip(groups, _groups(current), _groups(labels), strict=True):
        if digest != _digest(values)[:GROUP_DIGITS]:
            differing += group
    first, last = (differing or labels)[0], (differing or labels)[-1]
    where = f"number {first} differs" if first == last else f"some of {first} to {last} differ"
    return [f"{path}: of {len(current)} items, {where}"]


def _short_entry(value: Any) -> Any:
    """An entry of an identity, as one that is too long holds it."""
    if not isinstance(value, list | tuple | Mapping):
        return value
    if len(canonical_json(value)) <= MAX_WHOLE_ENTRY:
        return value
    groups = [_digest(group)[:GROUP_DIGITS] for group in _groups(value)]
    return f"{len(value)} items: {' '.join([_digest(value), *groups])}"


def _groups(values: Sequence[Any] | Mapping[str, Any]) -> list[list[Any]]:
    """The items of a list or mapping in GROUPS stretches, or one for each item."""
    items = list(values.values() if isinstance(values, Mapping) else values)
    count = min(GROUPS, len(items))
    bounds = [number * len(items) // count for number in range(count + 1)]
    return [items[first:stop] for first, stop in pairwise(bounds)]


def _digest(value: Any) -> str:
    return hashlib.blake2b(canonical_json(value).encode(), digest_size=16).hexdigest()
