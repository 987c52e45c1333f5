"""The phases of an identity as a chain of digests: each link stands for all phases up to its own.

Two runs whose links are equal have the same past, however many phases of however many datasets
that is; the first link that differs names the phase that was edited.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

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
