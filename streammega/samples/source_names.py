"""Short names of the datasets of a config, for losses by source."""

from __future__ import annotations

from collections.abc import Sequence

from streammega.config import DataConfig
from streammega.errors.redaction import redact_urls
from streammega.samples.phases import prefixes_of
from streammega.samples.split_blend import split_blend


def source_names(data: DataConfig, split: str = "train") -> list[str]:
    """A short name for each dataset of a split, over all phases, by its "dataset_id"."""
    if split_blend(data, split) is None:
        return []
    return short_names(prefixes_of(data, split))


def short_names(prefixes: Sequence[str]) -> list[str]:
    """The last parts of prefixes, numbered where they repeat."""
    names: list[str] = []
    for prefix in prefixes:
        _, _, last_part = redact_urls(prefix).rstrip("/").rpartition("/")
        names.append(last_part)
    return [
        name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names)
    ]
