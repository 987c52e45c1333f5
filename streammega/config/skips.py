"""What training passes over: ranges of samples, and documents by their names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls

SkippedNames = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""Names of documents: a file of them, one a line; a list; or either for each of some datasets."""


class SkippedList(NamedTuple):
    """Names of documents that are not seen in samples `first_sample` and later.

    names: the names, or the path of a file of them. dataset: the prefix whose documents they are;
    None: those of any.
    """

    first_sample: int
    names: str | tuple[str, ...]
    dataset: str | None = None


def skipped_lists(given: Any) -> list[SkippedList]:
    """skip_documents of a run, in any of its forms. Raises ConfigError for others."""
    if isinstance(given, Sequence) and given and not isinstance(given[0], str):
        lists: list[SkippedList] = []
        for entry in given:
            is_pair = isinstance(entry, Sequence) and len(entry) == 2
            if not is_pair or type(entry[0]) is not int or entry[0] < 0:
                raise ConfigError(
                    f"skip_documents holds {redact_urls(repr(entry))}; it takes names of documents, or several lists "
                    "of them, each as (first sample, names)"
                )
            first_sample, names = entry
            lists += skipped_names(names, first_sample)
        return lists
    return skipped_names(given, 0)


def skipped_names(given: Any, first_sample: int) -> list[SkippedList]:
    """One list of names, or those of each dataset. Raises ConfigError for anything else."""
    by_dataset = given if isinstance(given, Mapping) else {None: given}
    lists = []
    for dataset, names in by_dataset.items():
        if isinstance(names, os.PathLike):
            names = os.fspath(names)
        if isinstance(dataset, os.PathLike):
            dataset = os.fspath(dataset)
        are_names = isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
        if not are_names or not isinstance(dataset, str | None):
            raise ConfigError(
                f"skip_documents is {redact_urls(repr(given))}; it takes the path of a file of names, a list of "
                "names, or either for each dataset, as {prefix: names}"
            )
        if len(names):
            names = names if isinstance(names, str) else tuple(names)
            lists.append(SkippedList(first_sample=first_sample, names=names, dataset=dataset))
    return lists


def check_ranges(skipped: Any) -> None:
    """Raise ConfigError for skip_samples that are no ranges."""
    try:
        ranges = [(start, stop, 0 <= start < stop) for start, stop in skipped]
    except (TypeError, ValueError):
        raise ConfigError(
            f"skip_samples is {skipped!r}; it takes ranges of sample ids, each as (start, stop)"
        ) from None
    for start, stop, runs_upwards in ranges:
        if not runs_upwards:
            raise ConfigError(
                f"skip_samples holds [{start}, {stop}); ranges run upwards from 0 or more"
            )
