"""What every order gives to the layers above: samples by their global numbers, where they are
stored, their fields, and an identity. A source has one or more segments; each holds from its first
sample on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import ORDERS, DataConfig
from streammega.config.fields import FIELDS, Field
from streammega.dataset.columns import StoredColumn
from streammega.errors.cached_property import cached_property
from streammega.order import Extents
from streammega.order.epoch_layout import Records
from streammega.order.extents import merge_extents
from streammega.order.state import PHASES
from streammega.order.stream_order import StreamOrder
from streammega.samples.columns import (
    COLUMNS,
    TokenColumn,
    as_token_column,
    field_of,
    files_of,
    stored_columns,
)
from streammega.samples.excluded import ExcludedTokens, excluded_tokens
from streammega.samples.field_inputs import check_mask_is_there
from streammega.samples.packed import are_packed
from streammega.samples.rows import FileTable
from streammega.samples.token_file import TokenFile, has_modes

Integers = NDArray[np.int64]
Span = tuple[int, int]
"""Samples [start, stop)."""


class SegmentSource(ABC):
    """Samples of one split in one order over open files, by their numbers in the whole stream.

    `files[d]` are the files of dataset d, to which extents refer. Datasets are numbered over all
    segments of a run, in the order in which they first appear.
    """

    config: DataConfig
    """With the sequence length of this segment."""
    split: str
    files: Sequence[Sequence[TokenFile]]
    prefixes: Sequence[str]
    """The name of each dataset."""
    shares: Sequence[float]
    """The part of the weights that each of its own datasets has."""
    tokens_per_epoch: Sequence[int]
    """What the split has of each of its own datasets."""
    first_sample: int = 0
    order: StreamOrder | None = None
    """None in orders of built indices."""
    has_file_per_shard: bool = False
    """Whether extents refer to the shards of a dataset as files of their own, not as one."""

    @property
    @abstractmethod
    def num_samples(self) -> int | None:
        """The end of the samples that it could have; None: they have no end."""

    @abstractmethod
    def locate(self, sample_ids: Integers) -> Extents:
        """Where samples are stored."""

    @abstractmethod
    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """What defines the order of the samples before `consumed` (None: of all), wherever the data
        is: small, for JSON.
        """

    @abstractmethod
    def usage(self, spans: Sequence[Span]) -> Records:
        """What spans of samples take from each of its datasets: USAGE [datasets]."""

    def later_identity(self) -> dict[str, Any]:
        """What defines a later segment, of an order with phases: its identity without what all segments
        share.
        """
        raise NotImplementedError

    @property
    def lanes(self) -> int:
        """Lanes of the stream order; 0 in others."""
        return 0 if self.order is None else self.order.lanes

    @cached_property
    def dataset_numbers(self) -> Integers:
        """The numbers of its own datasets, from which samples are drawn, int64."""
        return np.arange(len(self.files))

    @cached_property
    def excluded(self) -> ExcludedTokens | None:
        """The tokens that are not seen; None: all are seen. Raises ConfigError for names that no
        document of these datasets has.
        """
        return excluded_tokens(self.config, self.split, self.prefixes, self.files)

    @cached_property
    def file_table(self) -> FileTable:
        """All files, without a cache of pages."""
        return FileTable.of(self.files)

    @cached_property
    def is_packed(self) -> bool:
        """Whether the files hold bins."""
        return are_packed(all_files(self.files))

    @cached_property
    def has_extra_token(self) -> bool:
        """Whether a sample has a token after its last; one that is a bin has none."""
        return self.config.add_extra_token and not self.is_packed

    @cached_property
    def masks_loss(self) -> bool:
        """Whether modes or excluded documents leave some tokens without loss."""
        return self.excluded is not None or has_modes(all_files(self.files))

    @cached_property
    def field_names(self) -> Sequence[str]:
        """The fields that batches have, in their order. By default those of the stream order have no
        mask of ones, nor positions that only count up.
        """
        config = self.config
        names = config.field_names
        if not config.has_default_fields or not ORDERS[config.order].omits_plain_fields:
            return names
        if not config.has_plain_fields or self.masks_loss or self.is_packed:
            return names
        plain_fields = {"loss_mask", "position_ids"} - {*config.named_fields}
        return [name for name in names if name not in plain_fields]

    @cached_property
    def stored_columns(self) -> Mapping[str, StoredColumn]:
        """The columns that are read next to the ids, by name. Raises ConfigError where datasets differ."""
        return stored_columns(self.config, self.prefixes, self.files)

    @cached_property
    def columns(self) -> Mapping[str, TokenColumn]:
        """The columns of these samples, by name: those that the fields are made of, and those stored."""
        needed = {name for field in self.field_names for name in FIELDS[field].columns}
        made = {
            name: column
            for name, column in COLUMNS.items()
            if name in needed and column.is_there(self)
        }
        read = self.config.column_settings
        stored = self.stored_columns.items()
        return made | {name: as_token_column(column, read[name]) for name, column in stored}

    @cached_property
    def column_fields(self) -> Mapping[str, Field]:
        """The fields that batches have of stored columns, by name."""
        read = self.config.column_settings
        return {name: field_of(column, read[name]) for name, column in self.stored_columns.items()}

    @cached_property
    def column_tables(self) -> Mapping[str, FileTable]:
        """The files of each stored column, numbered as those of ids, without a cache of pages."""
        return {name: FileTable.of(files_of(name, self.files)) for name in self.stored_columns}


class SampleSource:
    """Samples of one split, over all segments of a run. The first begins at sample 0.

    Args:
        config: of the run, with all its segments.
        segments: at least one, in the order of their first samples, all over the same files.
    """

    def __init__(self, config: DataConfig, segments: Sequence[SegmentSource]) -> None:
        self.config = config
        self.segments: Sequence[SegmentSource] = tuple(segments)

    def segment_number(self, sample: int) -> int:
        """The number of the segment that holds a sample."""
        return bisect_right(self.segments, sample, key=lambda segment: segment.first_sample) - 1

    def segment_at(self, sample: int) -> SegmentSource:
        """The segment that holds a sample."""
        return self.segments[self.segment_number(sample)]

    def of_segment(self, number: int) -> SampleSource:
        """The samples of one segment alone."""
        segment = self.segments[number]
        return SampleSource(segment.config, [segment])

    @property
    def files(self) -> Sequence[Sequence[TokenFile]]:
        """The files of each dataset."""
        return self.segments[0].files

    @property
    def prefixes(self) -> Sequence[str]:
        """The name of each dataset."""
        return self.segments[0].prefixes

    @property
    def excluded(self) -> ExcludedTokens | None:
        """The tokens that are not seen; None: all are seen."""
        return self.segments[0].excluded

    @property
    def num_samples(self) -> int | None:
        """How many samples there are; None: the stream has no end."""
        return self.segments[-1].num_samples

    @property
    def lanes(self) -> int:
        """Lanes of the first segment in the stream order; 0 in others."""
        return self.segments[0].lanes

    def with_lanes(self, lanes: int) -> SampleSource:
        """The same datasets in the lanes of a saved state, unless the config names lanes. Orders
        without lanes stay as they are.
        """
        return self

    @property
    def has_file_per_shard(self) -> bool:
        """Whether extents refer to the shards of a dataset as files of their own."""
        return self.segments[0].has_file_per_shard

    def locate(self, sample_ids: Integers) -> Extents:
        """Where samples are stored."""
        segments = self.segments
        if len(segments) == 1:
            return segments[0].locate(sample_ids)
        first_samples = np.array([segment.first_sample for segment in segments], np.int64)
        number_of_sample = np.searchsorted(first_samples, sample_ids, side="right") - 1
        parts: list[tuple[Integers, Extents]] = []
        for number in np.unique(number_of_sample).tolist():
            chosen = np.flatnonzero(number_of_sample == number)
            parts.append((chosen, segments[number].locate(sample_ids[chosen])))
        if len(parts) == 1:  # nearly always: a segment has many thousands of steps
            return parts[0][1]
        return merge_extents(parts)

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """What defines the order of the first `consumed` samples (None: of all): the identity of
        the first segment, and of later segments that have begun, by number. Others may still
        change.
        """
        first, *later = self.segments
        begun = {
            number: segment
            for number, segment in enumerate(later, 1)
            if consumed is None or segment.first_sample < consumed
        }
        # a list of documents has no effect before a sample is drawn from their dataset
        drawn = {*first.dataset_numbers.tolist()}
        drawn.update(*(segment.dataset_numbers.tolist() for segment in begun.values()))
        identity = first.identity(consumed)
        if self.excluded is not None:
            identity |= self.excluded.identity(consumed, drawn)
        # equal to the identity of a run without phases, as long as none has begun
        phases = {str(number): segment.later_identity() for number, segment in begun.items()}
        return identity | {PHASES: phases} if phases else identity


def check_fields(source: SegmentSource) -> None:
    """Raise ConfigError if the data has labels without loss, and the config leaves out loss_mask; or for
    columns in which datasets differ.
    """
    _ = source.stored_columns
    if source.masks_loss or source.is_packed:
        check_mask_is_there(source.config.field_names)


def all_files(files: Sequence[Sequence[TokenFile]]) -> list[TokenFile]:
    """The files of all datasets, end to end."""
    return [file for of_dataset in files for file in of_dataset]
