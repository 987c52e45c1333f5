"""Compares the orders of two configs: what differs, and from which sample on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.errors.redaction import redact_urls
from streammega.order import Extents
from streammega.order.state import differing_values
from streammega.samples.provenance import Provenance
from streammega.samples.source import SampleSource, runs_of
from streammega.storage.progress import ProgressObserver

Integers = NDArray[np.int64]

AT_ONCE = 1 << 16
"""Samples that are located and compared at once."""


@dataclass(frozen=True, kw_only=True)
class OrderDifferences:
    """How two orders compare over `samples` samples.

    settings: {path: both values} of what differs between the identities. first: the first sample
    that differs in tokens or datasets; None: all are the same. shared: how many of the `looked_at`
    samples from there on are the same.
    """

    settings: dict[str, tuple[Any, Any]]
    samples: int
    first: int | None
    looked_at: int
    shared: int

    @property
    def same(self) -> bool:
        """Whether all samples that were compared are the same."""
        return self.first is None


def compare_orders(
    one: Provenance, other: Provenance, end: int, progress: ProgressObserver | None = None
) -> OrderDifferences:
    """Compare the samples before `end` of two orders. Samples are equal if they have the same
    tokens of the same datasets and files, and skip the same of them. No token is read.

    Cost: that of locating samples, up to the first that differs. Samples that are equal by the
    identities are not located. progress: receives samples that were compared.
    """
    progress = progress or ProgressObserver()
    settings = differing_values(one.source.identity(), other.source.identity())
    names = [_numbers_of(one, other), _numbers_of(other, other)]
    possible = _first_possible(one, other, end)
    progress.begin("comparing", end - possible, " samples")
    for start in range(possible, end, AT_ONCE):
        ids = np.arange(start, min(end, start + AT_ONCE))
        extents = one.source.locate(ids)
        other_extents = other.source.locate(ids)
        differs = _differing(extents, other_extents, names)
        excluded = _excluded_columns(one.source, ids, extents)
        other_excluded = _excluded_columns(other.source, ids, other_extents)
        differs[_in_one_alone(excluded, other_excluded)] = True
        if differs.any():
            first = int(np.argmax(differs))
            return OrderDifferences(
                settings=settings,
                samples=end,
                first=start + first,
                looked_at=len(ids) - first,
                shared=int(np.count_nonzero(~differs[first:])),
            )
        progress.advance(len(ids))
    return OrderDifferences(settings=settings, samples=end, first=None, looked_at=0, shared=0)


def _first_possible(one: Provenance, other: Provenance, end: int) -> int:
    """A sample before which nothing differs: identities of the past that agree are one order.

    They do not tell two copies of a dataset apart, so the names are compared too.
    """
    # one may have more of them, in phases to come
    in_both = zip(one.datasets, other.datasets, strict=False)
    other_names = any(name != other_name for name, other_name in in_both)
    if other_names or one.source.identity(1) != other.source.identity(1):
        return 0
    low = 1
    high = end + 1
    # Identities only grow: a difference at one sample stays at all later ones.
    while low < high:
        middle = (low + high) // 2
        if one.source.identity(middle) != other.source.identity(middle):
            high = middle
        else:
            low = middle + 1
    # The identities of the first `low - 1` samples are equal.
    return min(low - 1, end)


def _numbers_of(one: Provenance, other: Provenance) -> NDArray[np.int64]:
    """For each dataset of one, a number that means a dataset of the same name and content in both."""
    known: dict[tuple[str, str], int] = {}
    for dataset in (*_datasets_of(other), *_datasets_of(one)):
        known.setdefault(dataset, len(known))
    return np.array([known[dataset] for dataset in _datasets_of(one)], np.int64)


def _datasets_of(provenance: Provenance) -> list[tuple[str, str]]:
    """The name and the content of each dataset."""
    files = provenance.source.files
    return [
        (redact_urls(name), of_dataset[0].content)
        for name, of_dataset in zip(provenance.datasets, files, strict=True)
    ]


def _excluded_columns(source: SampleSource, ids: Integers, extents: Extents) -> Integers:
    """The columns of samples that are not seen, int64 [3, ranges]: see `ExclusionMask`."""
    nothing = np.empty((3, 0), np.int64)
    if source.excluded is None:
        return nothing
    mask = source.excluded.columns(runs_of(source.files, extents), ids)
    return nothing if mask is None else mask.merged()


def _in_one_alone(one: Integers, other: Integers) -> Integers:
    """The samples that skip different columns."""
    columns = np.concatenate([one, other], axis=1)
    stretches, times = np.unique(columns, axis=1, return_counts=True)
    samples: Integers = stretches[0, times == 1]
    return samples


def _differing(one: Extents, other: Extents, names: list[NDArray[np.int64]]) -> NDArray[np.bool_]:
    """Which samples are not the same runs of tokens."""
    one_rows = np.diff(one.row_splits)
    other_rows = np.diff(other.row_splits)
    differs: NDArray[np.bool_] = one_rows != other_rows
    # Rows can be compared side by side where both have as many.
    alike = ~differs
    of_one = np.repeat(alike, one_rows)
    of_other = np.repeat(alike, other_rows)
    unequal = names[0][one.dataset[of_one]] != names[1][other.dataset[of_other]]
    for column in ("file", "start", "stop"):
        unequal |= getattr(one, column)[of_one] != getattr(other, column)[of_other]
    sample = np.repeat(np.arange(len(one)), one_rows)[of_one]
    differs[sample[unequal]] = True
    return differs
