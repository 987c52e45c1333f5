"""Versions of datasets that a run appends by itself: which there are, the phases that they make,
and the sample source that continues with them.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig, PhaseConfig, Segment, StorageConfig
from streammega.dataset.versions import VersionName, newest_version
from streammega.errors import ConfigError, StreammegaError
from streammega.errors.redaction import redact_urls
from streammega.order.schedule import TrainingSchedule, check_in_samples
from streammega.samples.append_log import AppendedSegment, AppendLog, LogEntry
from streammega.samples.excluded import with_names_read
from streammega.samples.segments import dataset_names, datasets_of_segments, split_blend
from streammega.samples.source import SampleSource, SegmentSource
from streammega.samples.stream_source import StreamSource, digests_of

log = logging.getLogger(__name__)


def log_of(config: DataConfig) -> AppendLog:
    """The log of a run. Raises ConfigError if the config names no place for it."""
    assert config.follow is not None
    if config.follow.log_url is None:
        raise ConfigError(
            "follow.log_url is not given: name a folder that all ranks and resumes of the run see; it "
            "keeps what was appended, and at which sample"
        )
    return AppendLog(config.follow.log_url, config.storage)


def recorded(config: DataConfig, split: str = "train") -> DataConfig:
    """The config with the phases that its run has appended so far, and without `follow`. A config
    that does not follow stays as it is.
    """
    if not config.follows(split):
        return config
    return replace(with_appended(config, log_of(config).newest()), follow=None)


def with_appended(config: DataConfig, entry: LogEntry) -> DataConfig:
    """The config with the phases of what was appended up to the sample of an entry.

    A phase that sets no blend keeps the appended versions; one that sets a blend replaces them.

    Raises ConfigError if a phase of the config begins at the same sample, or the config no longer
    has the blend that the versions were appended to.
    """
    check_in_samples(config.phases)
    if not entry.segments:
        return config
    segment_at = _segments(config)
    appended_at = {segment.first_sample: segment for segment in entry.segments}
    for phase in config.phases:
        if phase.first_sample in appended_at:
            raise ConfigError(
                f"a phase begins at sample {phase.first_sample}, where newer versions were appended: let "
                "it begin a step later"
            )
    phases = {phase.first_sample: phase for phase in config.phases}
    segment = segment_at[0]
    for first_sample in sorted([*phases, *appended_at]):
        if first_sample in appended_at:
            segment = _appended_to(segment, appended_at[first_sample])
            phases[first_sample] = PhaseConfig(first_sample=first_sample, blend=segment.blend)
        elif phases[first_sample].blend is not None:
            segment = segment_at[first_sample]
    return replace(config, phases=[phases[first_sample] for first_sample in sorted(phases)])


def _appended_to(before: Segment, logged: AppendedSegment) -> Segment:
    """A segment of the log in the names of the config, whose data may be elsewhere by now. before:
    the segment that it follows.
    """
    where = f"at sample {logged.first_sample}"
    has_weights = before.weights is not None
    if has_weights != (logged.weights_before is not None) or not _are_alike(
        before.weights or (), logged.weights_before or ()
    ):
        raise ConfigError(
            f"{where} versions were appended to a blend with other weights than the config now has there: "
            f"restore those weights, or remove the files of sample {logged.first_sample} and later ones "
            "from data.follow.log_url, to check for versions again"
        )
    prefix_of: dict[str, str] = {}
    are_same = len(before.datasets) == logged.num_before
    for name, stored in zip(before.datasets, logged.datasets, strict=False):
        version = VersionName.parse(name)
        old_version = VersionName.parse(stored)
        if version is None or old_version is None:
            are_same = are_same and version is old_version
            continue
        are_same = are_same and (version.after, version.number) == (
            old_version.after,
            old_version.number,
        )
        prefix_of[old_version.prefix] = version.prefix
    if not are_same:
        raise ConfigError(
            f"{where} versions were appended to {', '.join(logged.datasets[: logged.num_before])}, but "
            "the config now has other datasets there: name the datasets as the run did before"
        )
    names = list(before.datasets)
    for stored in logged.appended:
        new = VersionName.parse(stored)
        assert new is not None
        names.append(f"{prefix_of[new.prefix]}@{new.after}..{new.number}")
    return before._replace(datasets=names, weights=logged.weights)


def _are_alike(weights: Sequence[float], others: Sequence[float]) -> bool:
    """Whether weights are the same but for a common factor."""
    if len(weights) != len(others):
        return True  # the caller compares the names, and has a better message
    scale = sum(others) / sum(weights) if weights else 1.0
    return all(math.isclose(a * scale, b) for a, b in zip(weights, others, strict=True))


def check_follows_something(config: DataConfig) -> None:
    """Raise ConfigError if no dataset of the run is named by a version."""
    if not any(_newest_versions(segment) for segment in _segments(config).values()):
        raise ConfigError(
            "follow appends new versions of datasets that the blend names by a version, such as web@7, "
            "but the blend names none: `streammega versions` lists the versions of a dataset"
        )


def _segments(config: DataConfig) -> dict[int, Segment]:
    """The segments of training, by their first samples."""
    if split_blend(config, "train") is None:
        raise ConfigError("follow applies to training, which this config gives no data")
    return {segment.first_sample: segment for segment in config.segments("train")}


def _versions_of(segment: Segment, prefix: str) -> list[tuple[int, VersionName]]:
    """(place, name) of each dataset of a segment that is a version of the one of that prefix."""
    versions = [VersionName.parse(name) for name in segment.datasets]
    return [
        (place, version)
        for place, version in enumerate(versions)
        if version is not None and version.prefix == prefix
    ]


def _newest_versions(segment: Segment) -> dict[str, int]:
    """{dataset: the newest version of it that a segment has}."""
    newest: dict[str, int] = {}
    for name in segment.datasets:
        version = VersionName.parse(name)
        if version is not None:
            newest[version.prefix] = max(version.number, newest.get(version.prefix, 0))
    return newest


def _pieces(
    segments: Iterable[Segment], prefix: str, number: int, newest: int
) -> list[tuple[int, int]]:
    """The versions of a dataset from `number` to the newest, as (after, until) pairs, cut where the
    names of any segment are cut. A part that was appended before, and that a later phase left out,
    is then the same dataset, and continues where it was.
    """
    cuts = {number, newest}
    for segment in segments:
        for _, version in _versions_of(segment, prefix):
            cuts |= {version.after or 0, version.number}
    return list(pairwise(sorted(cut for cut in cuts if number <= cut <= newest)))


def _with_version(
    segment: Segment, prefix: str, after: int, until: int, storage: StorageConfig
) -> Segment:
    """A segment with what was appended to a dataset, whose weight is divided by tokens: all of the
    dataset is drawn as often as before.
    """
    new = VersionName(prefix=prefix, number=until, after=after)
    names = (*segment.datasets, f"{prefix}@{after}..{until}")
    if segment.weights is None:
        return segment._replace(datasets=names)
    new_tokens = new.tokens(storage)
    if new_tokens < 1:
        raise ConfigError("what was appended holds no token")
    versions = _versions_of(segment, prefix)
    share = new_tokens / (new_tokens + sum(version.tokens(storage) for _, version in versions))
    weights = list(segment.weights)
    for place, _ in versions:
        weights[place] *= 1 - share
    # Python's sum of floats rounds otherwise from 3.12 on
    taken = share * float(np.sum([segment.weights[place] for place, _ in versions]))
    return segment._replace(datasets=names, weights=(*weights, taken))


class AutoAppendSource(SampleSource):
    """The stream of a config, with the segments that were appended: those in the log of the run, to
    which `advance_to` adds. Appending never moves samples that were located before.
    """

    def __init__(self, config: DataConfig, split: str, global_batch_size: int) -> None:
        check_follows_something(config)
        # without what was appended. Names are read once: one that is added to a file later must not
        # change samples that were read
        self._base_config = with_names_read(config, split)
        self._split = split
        self._last_entry = log_of(self._base_config).newest()
        config_of_run = with_appended(self._base_config, self._last_entry)
        # the one attribute that changes, at once: other threads locate samples meanwhile
        self._source = StreamSource(
            config_of_run, split, global_batch_size, dataset_ids=self._dataset_ids(config_of_run)
        )

    @property
    def config(self) -> DataConfig:
        """The config of the run, with the segments that were appended."""
        return self._source.config

    @property
    def segments(self) -> Sequence[SegmentSource]:
        """Those of the config, and those that were appended so far."""
        return self._source.segments

    @property
    def appended_at(self) -> list[int]:
        """The first samples of the appended segments."""
        return [segment.first_sample for segment in self._last_entry.segments]

    def with_lanes(self, lanes: int) -> SampleSource:
        """The same in the lanes of a saved state, unless the config names its own."""
        source = copy.copy(self)
        source._source = self._source.with_lanes(lanes)
        return source

    def attach(self, sample: int) -> None:
        """Note that reading continues at a sample: before it, only what the log has is appended.

        Raises ConfigError for the log of another run.
        """
        append_log = log_of(self._base_config)
        first = self._source.segments[0]
        assert first.order is not None
        # identifies the run by what its data holds, not by where the data is
        digests = digests_of(first.order.datasets, first.files[: len(first.order.datasets)])
        append_log.begin({"seed": self.config.seed, "datasets": digests})
        self._apply(append_log.newest())
        if self._last_entry.sample < sample - 1:
            self._last_entry = replace(self._last_entry, sample=sample - 1)

    def advance_to(self, sample: int, schedule: TrainingSchedule) -> bool:
        """Append what belongs before a sample. `follow` says at which ends of steps the run checks
        for newer versions; the first rank to come there checks.

        Raises StorageError, FormatError, ConfigError.
        """
        assert self._base_config.follow is not None
        every_samples = self._base_config.follow.check_every_samples
        segments = self.segments
        while True:
            checked = self._last_entry.sample
            multiple = checked - checked % every_samples
            end = schedule.end_of_step(multiple)
            while end <= checked:
                multiple += every_samples
                end = schedule.end_of_step(multiple)
            if end > sample:
                return self.segments is not segments
            self._check(end)

    def _check(self, sample: int) -> None:
        """Append what belongs at a sample, the end of a step: what the log has there. If it has no
        entry, check for versions now, and write one.

        Samples must come in order: an entry builds on the one before. Phases that have begun stay.
        """
        append_log = log_of(self._base_config)
        entry = append_log.at(sample)
        if entry is not None:
            self._apply(entry)
            return
        new_entry, source = self._find_versions(sample)
        entry = append_log.write(new_entry)
        for unreadable in entry.unreadable:
            log.warning("sample %d: left out until it can be read: %s", sample, unreadable)
        # another rank may have written its entry first
        self._apply(entry, source if entry.segments == new_entry.segments else None)

    def _find_versions(self, sample: int) -> tuple[LogEntry, StreamSource]:
        """Check for the newest version of each dataset that the blend at a sample names by a
        version; with the source that reads them.

        A version that cannot be read is left out until the next check: it does not end a run.
        Transient errors are raised.
        """
        config = self._base_config
        new_entry = replace(self._last_entry, sample=sample, unreadable=[])
        source = self._source
        if any(phase.first_sample == sample for phase in config.phases):
            return new_entry, source  # that phase decides what is read from here on
        segment_at = _segments(with_appended(config, self._last_entry))
        last = segment_at[max(first for first in segment_at if first <= sample)]
        current = last
        for prefix, number in _newest_versions(last).items():
            newest = newest_version(prefix, config.storage)
            for after, until in _pieces(segment_at.values(), prefix, number, newest):
                try:
                    grown = _with_version(current, prefix, after, until, config.storage)
                    segment = AppendedSegment(
                        first_sample=sample,
                        datasets=[redact_urls(name) for name in grown.datasets],
                        weights=None if grown.weights is None else list(grown.weights),
                        num_before=len(last.datasets),
                        weights_before=None if last.weights is None else list(last.weights),
                    )
                    trial = replace(new_entry, segments=[*self._last_entry.segments, segment])
                    source = self._with(trial)
                except StreammegaError as error:
                    if getattr(error, "transient", False):
                        raise
                    unreadable = f"{redact_urls(prefix)}@{after}..{until}: {error}"
                    new_entry = replace(new_entry, unreadable=[*new_entry.unreadable, unreadable])
                    break
                new_entry = trial
                current = grown
        return new_entry, source

    def _apply(self, entry: LogEntry, source: StreamSource | None = None) -> None:
        """Continue with an entry. source: the one with its segments, if that is open."""
        if entry.segments != self._last_entry.segments:
            opened = source or self._with(entry)
            for segment in entry.segments[len(self._last_entry.segments) :]:
                names = ", ".join(segment.appended)
                log.info("from sample %d on: %s joined", segment.first_sample, names)
            self._source = opened
        self._last_entry = entry

    def _with(self, entry: LogEntry) -> StreamSource:
        """The stream with what was appended."""
        config = with_appended(self._base_config, entry)
        return self._source.with_config(config, self._dataset_ids(config))

    def _dataset_ids(self, config: DataConfig) -> NDArray[np.int64]:
        """The "dataset_id" of each dataset. An appended one has that of the first dataset of the
        config that is a version of the same.
        """
        named = dataset_names(datasets_of_segments(self._base_config, self._split))
        number_of = {name: number for number, name in enumerate(named)}
        first_of_growing: dict[str, int] = {}
        for number, (prefix, _) in enumerate(named):
            growing = VersionName.parse(prefix)
            if growing is not None:
                first_of_growing.setdefault(_spelled(growing.prefix), number)
        ids = []
        for name in dataset_names(datasets_of_segments(config, self._split)):
            growing = VersionName.parse(name[0])
            if name in number_of or growing is None:
                ids.append(number_of[name])
            else:
                ids.append(first_of_growing[_spelled(growing.prefix)])
        return np.array(ids, np.int64)


def _spelled(prefix: str) -> str:
    """A prefix, with one spelling for each local path."""
    return prefix if "://" in prefix else os.path.abspath(prefix)
