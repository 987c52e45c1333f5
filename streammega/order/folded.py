"""Identities in states: whole where they are short, else with their long lists folded into digests,
so that a state is under 1 KB for any number of datasets and still tells which part of it differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from streammega.order.phase_chain import chain_differences, chain_of

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
