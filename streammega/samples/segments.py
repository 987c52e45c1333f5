"""What a config means for a split, decoded once: its datasets, their numbers, and the segments of the
run that draw from them.

Every order, and the trainer, decode blends and splits here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from streammega.config import DataConfig, Segment
from streammega.dataset.names import strip_suffix
from streammega.dataset.opening import is_local_folder
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.order.split import SPLITS, split_fractions
from streammega.order.state import PHASES


@dataclass(frozen=True, kw_only=True)
class SplitData:
    """The datasets of a split, how they are cut, and what draws from them.

    prefixes: of each dataset, by its number over all segments: in the order in which datasets first
    appear. shares: the split string that cuts every dataset; with `blend_per_split` it gives all of
    a dataset to the split. segments: at least one, whose datasets have these prefixes and numbers.
    num_samples: those that the config asks of the split; None: it names no number.
    """

    split: str
    prefixes: tuple[str, ...]
    shares: str
    segments: tuple[Segment, ...]
    num_samples: int | None

    def names_in_identity(self) -> dict[str, str]:
        """The name of each dataset, by its path in the identity of an order: "datasets[0]"; "dataset"
        if there is one; "phases.1.datasets[0]" in a phase.
        """
        names = {}
        for number, segment in enumerate(self.segments):
            phase = f"{PHASES}.{number}." if number else ""
            for place, prefix in enumerate(segment.datasets):
                names[f"{phase}datasets[{place}]"] = names[f"{phase}dataset"] = prefix
        return names


def has_data(config: DataConfig, split: str) -> bool:
    """Whether a config gives anything to a split: "train", "valid" or "test".

    Raises ConfigError for a split string that means nothing.
    """
    number = SPLITS.index(split)
    if config.blend_per_split is not None:
        return config.blend_per_split[number] is not None
    return split_fractions(config.split)[number] > 0


def split_data(config: DataConfig, split: str) -> SplitData:
    """What a config means for a split. Raises ConfigError where it gives the split nothing."""
    if not has_data(config, split):
        missing = "blend_per_split has no blend"
        if config.blend is not None:
            missing = f"split {config.split!r} leaves nothing"
        raise ConfigError(f"{missing} for {split}")
    shares = config.split
    if config.blend is None:  # all of such a dataset belongs to the split
        shares = ",".join("1" if name == split else "0" for name in SPLITS)
    spelling_of: dict[str, str] = {}
    # a dataset is a prefix, and how many of that prefix its blend has before it
    number_of: dict[tuple[str, int], int] = {}
    segments = []
    for segment in config.segments(split):
        prefixes = tuple(_first_spelling(prefix, spelling_of) for prefix in segment.datasets)
        repeated: Counter[str] = Counter()
        numbers = []
        for prefix in prefixes:
            numbers.append(number_of.setdefault((prefix, repeated[prefix]), len(number_of)))
            repeated[prefix] += 1
        segments.append(segment._replace(datasets=prefixes, numbers=tuple(numbers)))
    return SplitData(
        split=split,
        prefixes=tuple(prefix for prefix, _ in number_of),
        shares=shares,
        segments=tuple(segments),
        num_samples=config.num_samples[SPLITS.index(split)] if config.num_samples else None,
    )


def source_names(data: DataConfig, split: str = "train") -> list[str]:
    """A short name for each dataset of a split, over all phases, by its "dataset_id"."""
    return short_names(split_data(data, split).prefixes) if has_data(data, split) else []


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
