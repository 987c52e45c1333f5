"""What a config names, segment by segment: the datasets of a split with their weights and numbers.

Every order, and the trainer, decode blends and splits here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streammega.config import DataConfig, Segment, parse_blend
from streammega.dataset.names import strip_suffix
from streammega.dataset.opening import is_local_folder
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.order.split import SPLITS, split_fractions
from streammega.order.state import PHASES

DatasetName = tuple[str, int]
"""A dataset: its prefix, and how many datasets of that prefix its blend has before it."""


@dataclass(frozen=True, kw_only=True)
class SplitBlend:
    """The datasets of a split, and how they are cut.

    weights: None: the config has none. shares: the split string that cuts every dataset; with
    `blend_per_split` it gives all of a dataset to the split.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    shares: str


def split_blend(config: DataConfig, split: str) -> SplitBlend | None:
    """What a split reads: "train", "valid" or "test". None where the config gives it nothing.

    Raises ConfigError for a split string that means nothing.
    """
    number = SPLITS.index(split)
    blend = config.blend
    shares = config.split
    if blend is None:
        blend = (config.blend_per_split or ())[number]
        # all of such a dataset belongs to the split
        shares = ",".join("1" if name == split else "0" for name in SPLITS)
    if blend is None or not split_fractions(shares)[number] > 0:
        return None
    prefixes, weights = parse_blend(blend)
    return SplitBlend(prefixes=prefixes, weights=weights, shares=shares)


def blend_of(config: DataConfig, split: str) -> SplitBlend:
    """What a split reads. Raises ConfigError where the config gives it nothing."""
    blend = split_blend(config, split)
    if blend is None:
        missing = "blend_per_split has no blend"
        if config.blend is not None:
            missing = f"split {config.split!r} leaves nothing"
        raise ConfigError(f"{missing} for {split}")
    return blend


class SegmentDatasets(NamedTuple):
    """The datasets of a segment.

    numbers: over all segments, in the order in which datasets first appear.
    """

    segment: Segment
    numbers: Sequence[int]
    names: Sequence[DatasetName]


def datasets_of_segments(config: DataConfig, split: str) -> list[SegmentDatasets]:
    """The datasets of each segment of a split. Raises ConfigError where the config gives it
    nothing.
    """
    blend_of(config, split)
    spelling_of: dict[str, str] = {}
    number_of: dict[DatasetName, int] = {}
    segments: list[SegmentDatasets] = []
    for segment in config.segments(split):
        names = _names([_first_spelling(prefix, spelling_of) for prefix in segment.datasets])
        numbers = [number_of.setdefault(name, len(number_of)) for name in names]
        segments.append(SegmentDatasets(segment, numbers, names))
    return segments


def dataset_names(segments: Sequence[SegmentDatasets]) -> list[DatasetName]:
    """The name of each dataset, by its number."""
    return list(dict.fromkeys(name for segment in segments for name in segment.names))


def prefixes_of(config: DataConfig, split: str) -> list[str]:
    """The prefix of each dataset of a split, by its number over all segments."""
    return [prefix for prefix, _ in dataset_names(datasets_of_segments(config, split))]


def names_in_identity(config: DataConfig, split: str) -> dict[str, str]:
    """The name of each dataset, by its path in the identity of an order: "datasets[0]"; "dataset"
    if there is one; "phases.1.datasets[0]" in a phase.
    """
    names = {}
    for number, segment in enumerate(datasets_of_segments(config, split)):
        phase = f"{PHASES}.{number}." if number else ""
        for place, (prefix, _) in enumerate(segment.names):
            names[f"{phase}datasets[{place}]"] = names[f"{phase}dataset"] = prefix
    return names


def source_names(data: DataConfig, split: str = "train") -> list[str]:
    """A short name for each dataset of a split, over all phases, by its "dataset_id"."""
    if split_blend(data, split) is None:
        return []
    return short_names(prefixes_of(data, split))


def short_names(prefixes: Sequence[str]) -> list[str]:
    """The last parts of prefixes, numbered where they repeat; no two are the same."""
    names: list[str] = []
    for prefix in prefixes:
        _, _, last_part = redact_urls(prefix).rstrip("/").rpartition("/")
        names.append(last_part)
    while len(set(names)) < len(names):  # again where a numbered name is another prefix
        names = [
            name if names.count(name) == 1 else f"{name}-{number}"
            for number, name in enumerate(names)
        ]
    return names


def _first_spelling(prefix: str, spelling_of: dict[str, str]) -> str:
    """The first spelling of a prefix, so that `web`, `./web` and `/data/web` are one dataset in all
    phases, with or without a last slash. spelling_of: by absolute path.

    URLs stay as they are: in a bucket, a folder and a prefix may have the same name.
    """
    if "://" in prefix:
        return spelling_of.setdefault(prefix, prefix)
    named = os.path.abspath(strip_suffix(prefix))
    if is_local_folder(prefix):
        named += os.sep
    return spelling_of.setdefault(named, prefix)


def _names(prefixes: Sequence[str]) -> Sequence[DatasetName]:
    """The names of prefixes; a repeated prefix is another dataset each time."""
    repeated: Counter[str] = Counter()
    names: list[DatasetName] = []
    for prefix in prefixes:
        names.append((prefix, repeated[prefix]))
        repeated[prefix] += 1
    return names
