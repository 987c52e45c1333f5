"""The resumable state of a stream: one integer, and the identity of the order it counts in.

Long lists of an identity are folded into digests, and phases into a chain of them, so that a state
stays under 1 KB.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from streammega.errors import StateError

PHASES = "phases"
"""The entry of an identity that has the later phases of a run: {number: what defines it}."""
MOST_CHARACTERS = 720
"""Of an identity that stays whole, as JSON text within JSON: with the other entries of a state, and
those of a DataLoader worker, it is under 1 KB.
"""
LONG_LIST = 160
"""Characters of a list that is worth folding: what it is folded into has about as many."""
GROUPS = 8
"""Digests of stretches of a list, by which a mismatch says where it lies."""
GROUP_DIGITS = 6
"""Hex digits of each: enough to find a place. Whether lists are equal, 32 digits of all say."""


def canonical(value: Any) -> str:
    """A value as JSON text, the same for equal ones."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest_of(value: Any, digits: int = 32) -> str:
    """A digest of a value's JSON, so many hex digits."""
    return hashlib.blake2b(canonical(value).encode(), digest_size=digits // 2).hexdigest()


def folded(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity as a state holds it: itself where that is short, else with its long lists folded.

    A folded list is {"count", "digest"} and digests of GROUPS stretches of it, end to end: as
    "items", or of datasets with their shares as "contents" and "weights". Phases are a chain.
    """
    # Twice: in a state it is text within JSON, where each quote takes another character.
    if len(json.dumps(canonical(identity))) <= MOST_CHARACTERS:
        return dict(identity)
    short = {}
    for name, value in identity.items():
        short[name] = _fold(value) if _is_long(value) else value
    if short.get(PHASES):
        short[PHASES] = chain_of(short[PHASES])
    return short


def is_folded(value: Any) -> bool:
    """Whether a value of an identity stands for a list."""
    return isinstance(value, Mapping) and "count" in value and "digest" in value


def has_folded(identity: Mapping[str, Any]) -> bool:
    """Whether an identity of a state is less than that of an order."""
    return any(is_folded(value) for value in identity.values())


def folded_differences(
    name: str,
    saved: Mapping[str, Any],
    current: Any,
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Lines that say how a list differs from the one that was folded; none where they are equal.
    names: see `describe_differences`.
    """
    if name == PHASES:
        return chain_differences(saved, current)
    count = saved["count"]
    if not isinstance(current, list | tuple):
        return [f"{name}: the checkpoint has {count} of them, this run {json.dumps(current)}"]
    if len(current) != count:
        return [f"{name}: the checkpoint has {count} of them, this run {len(current)}"]
    here = _fold(current)
    if here == dict(saved):
        return []
    lines = []
    for column in sorted(set(saved) | set(here)):
        if column in ("count", "digest"):
            continue
        stretches = _stretches(str(saved.get(column)), str(here.get(column)), count)
        for first, last in stretches:
            first_name, last_name = (_with_name(number, name, names) for number in (first, last))
            where = f"numbers {first_name} to {last_name}"
            if first == last:
                where = f"number {first_name}"
            lines.append(f"{name}: their {column} differ, of {where} (of 0 to {count - 1})")
    return lines or [f"{name}: the checkpoint has other ones, by their digest"]


def _is_long(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(canonical(value)) > LONG_LIST


def _fold(values: Sequence[Any]) -> dict[str, Any]:
    """A list in about LONG_LIST characters."""
    short: dict[str, Any] = {"count": len(values), "digest": digest_of(list(values))}
    texts = [value for value in values if isinstance(value, str) and "*" in value]
    if len(texts) < len(values):
        return short | {"items": _digests_of_groups(values)}
    # apart: one weight that changes changes the share of every dataset
    columns = [text.partition("*") for text in texts]
    contents = [content for content, _, _ in columns]
    weights = [weight for _, _, weight in columns]
    return short | {
        "contents": _digests_of_groups(contents),
        "weights": _digests_of_groups(weights),
    }


def _with_name(number: int, list_name: str, names: Mapping[str, str]) -> str:
    """A number of a list, and the name of the dataset that it is of, if it is of one."""
    name = names.get(f"{list_name}[{number}]")
    return str(number) if name is None else f"{number} ({name!r})"


def _digests_of_groups(values: Sequence[Any]) -> str:
    """The digests of all groups, end to end."""
    digests = []
    for first, stop in _groups(len(values)):
        digests.append(digest_of(list(values[first:stop]), GROUP_DIGITS))
    return "".join(digests)


def _groups(count: int) -> Iterator[tuple[int, int]]:
    """[first, stop) of each group of a list."""
    groups = min(GROUPS, count)
    for number in range(groups):
        yield number * count // groups, (number + 1) * count // groups


def _stretches(saved: str, current: str, count: int) -> list[tuple[int, int]]:
    """(first, last) of neighbouring groups whose digests differ."""
    stretches: list[tuple[int, int]] = []
    for number, (first, stop) in enumerate(_groups(count)):
        digits = slice(number * GROUP_DIGITS, (number + 1) * GROUP_DIGITS)
        if saved[digits] == current[digits]:
            continue
        if stretches and stretches[-1][1] == first - 1:
            first, _ = stretches.pop()
        stretches.append((first, stop - 1))
    return stretches


LINKS = 8
"""The last so many links are kept by themselves, to say which phase differs."""
LINK_DIGITS = 6


def chain_of(phases: Mapping[str, Any]) -> dict[str, Any]:
    """What a state holds of phases {number: what defines it}, in about 130 characters: {"count",
    "digest": the last link, "links": the beginnings of the last few}.
    """
    links = _links(phases)
    digits = [link[:LINK_DIGITS] for link in links[-LINKS:]]
    return {"count": len(links), "digest": links[-1], "links": "".join(digits)}


def chain_differences(saved: Mapping[str, Any], current: Any) -> list[str]:
    """A line that says from which phase on a run differs from a chain; none where it does not."""
    phases = current if isinstance(current, Mapping) else {}
    count = saved["count"]
    if len(phases) == count and _links(phases)[-1] == saved["digest"]:
        return []
    links = _links(phases)
    text = str(saved["links"])
    kept = [text[at : at + LINK_DIGITS] for at in range(0, len(text), LINK_DIGITS)]
    first_kept = count - len(kept)
    for place, link in enumerate(kept, first_kept):
        if place >= len(links) or links[place][:LINK_DIGITS] != link:
            return [_line(place, first_kept, count, phases)]
    return [_line(count, first_kept, count, phases)]


def _line(place: int, first_kept: int, count: int, phases: Mapping[str, Any]) -> str:
    """Which phase differs, as far as the links tell."""
    number = str(place + 1)
    if place == count:
        return (
            f"phases.{number}: the checkpoint is before it, this run {json.dumps(phases[number])}"
        )
    if number not in phases:
        return (
            f"phases.{number}: the checkpoint has {count} phases behind it, this run {len(phases)}"
        )
    here = json.dumps(phases[number])
    if place == first_kept > 0:
        return f"phases.1 to {number}: one of them is another in the checkpoint"
    return f"phases.{number}: the checkpoint has another one than this run, {here}"


def _links(phases: Mapping[str, Any]) -> list[str]:
    """A digest of each phase and all before it, 32 hex digits each, in the order of the phases."""
    links: list[str] = []
    before = ""
    for number in range(1, len(phases) + 1):
        text = json.dumps([before, phases.get(str(number))], sort_keys=True, separators=(",", ":"))
        before = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        links.append(before)
    return links


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
