"""Datasets and their weights, in all forms that are accepted."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from streammega.errors import ConfigError

Blend = str | Sequence[str] | Sequence[tuple[str, float]]
MAX_DATASETS = 32766
"""Most datasets of a blend: the dataset of a sample is an int16, as in Megatron's index."""


def parse_blend(blend: Blend) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """(prefixes, weights or None) of a blend in any of its forms.

    A string without blanks is one prefix; "0.3 a 0.7 b" gives weights, "a b" none. So do lists of
    strings, but for those of odd length, which are prefixes. Raises ConfigError for an empty blend,
    weights that are not positive numbers, or weights for some of the prefixes only.
    """
    pairs = _pairs(blend)
    if len(pairs) > MAX_DATASETS:
        raise ConfigError(
            f"the blend has {len(pairs)} datasets; there may be {MAX_DATASETS}: merge some, "
            f"or name folders of them"
        )
    prefixes = tuple(prefix for prefix, _ in pairs)
    weighted = [(prefix, weight) for prefix, weight in pairs if weight is not None]
    if not weighted:
        return prefixes, None
    if len(weighted) != len(pairs):
        raise ConfigError(f"blend {blend!r}: give a weight to every prefix, or to none")
    weights = tuple(_weight(prefix, weight) for prefix, weight in weighted)
    if not math.isfinite(sum(weights)):
        raise ConfigError(
            f"the weights of the blend add up to more than {sys.float_info.max:.3g}; "
            f"divide them by a common number"
        )
    return prefixes, weights


def _pairs(blend: Blend) -> list[tuple[str, Any]]:
    """(prefix, weight or None) of each entry of a blend. Raises ConfigError for other entries."""
    entries = _entries(blend)
    if not entries:
        raise ConfigError(
            "the blend is empty; it takes one prefix, such as ['s3://bucket/web'], "
            "or more with weights"
        )
    pairs: list[tuple[str, Any]] = []
    for entry in entries:
        pair: tuple[Any, ...] = (entry, None)
        if not isinstance(entry, str):
            pair = tuple(entry) if isinstance(entry, Iterable) else ()
        if len(pair) != 2 or not isinstance(pair[0], str) or not pair[0]:
            raise ConfigError(
                f"blend {blend!r}: each entry is a prefix or a (prefix, weight) pair, as in "
                f"[('s3://bucket/web', 0.7)]"
            )
        pairs.append(pair)
    return pairs


def _entries(blend: Blend) -> list[Any]:
    """The entries of a blend in a list. Weights that alternate with prefixes are paired with them.

    They alternate if there is an even number of words and the first, third and so on are numbers, as
    in Megatron's --data-path. If only some of these are numbers, a weight was forgotten.
    """
    if isinstance(blend, os.PathLike):
        blend = [os.fspath(blend)]
    # A set has another order in each process, an iterator can be read once, and a mapping would lose
    # its weights.
    if not isinstance(blend, Iterable) or isinstance(blend, Iterator | Mapping | Set):
        raise ConfigError(
            f"blend {blend!r}: give a prefix, a list of them, or of (prefix, weight) pairs"
        )
    entries: list[Any] = (
        blend.split() if isinstance(blend, str) else [_as_text(entry) for entry in blend]
    )
    all_words = all(isinstance(entry, str) for entry in entries)
    if not entries or not all_words:
        return entries
    in_places_of_weights = entries[0::2] if len(entries) % 2 == 0 else entries[:1]
    if not any(map(_is_number, in_places_of_weights)):
        return entries
    if len(entries) % 2:
        # As in Megatron, a list of odd length has no weights, even if its first prefix is a number.
        # In a string something was forgotten.
        if not isinstance(blend, str):
            return entries
        raise ConfigError(
            f"blend {blend!r}: weights and prefixes must alternate, as in '0.3 a 0.7 b'"
        )
    weights = entries[0::2]
    prefixes = entries[1::2]
    return list(zip(prefixes, weights, strict=True))


def _as_text(item: Any) -> Any:
    """An entry of a blend, with paths of pathlib as text."""
    if isinstance(item, os.PathLike):
        return os.fspath(item)
    if isinstance(item, (tuple, list)) and item and isinstance(item[0], os.PathLike):
        return (os.fspath(item[0]), *item[1:])
    return item


def _weight(prefix: str, weight: Any) -> float:
    try:
        value = float(weight)
    except (TypeError, ValueError):
        raise ConfigError(f"the weight of {prefix} is {weight!r}, which is no number") from None
    if not 0 < value < math.inf:
        raise ConfigError(
            f"the weight of {prefix} is {value}; weights are positive numbers "
            f"(leave the dataset out instead)"
        )
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
