"""Versions that a run takes in by itself: which there are, the phases that they make, and the sample
source that goes on with them.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from streammega.config import Blend, DataConfig, PhaseConfig, StorageConfig, parse_blend
from streammega.dataset.versions import VersionName, newest_version
from streammega.errors import ConfigError, StreammegaError
from streammega.errors.redaction import redact_urls
from streammega.order.schedule import TrainingSchedule, check_in_samples
from streammega.samples.append_log import (
    FollowRecord,
    Joined,
    JoiningPhase,
    Looked,
    same_phases,
)
from streammega.samples.excluded import with_names_read
from streammega.samples.segments import dataset_names, datasets_of_segments, split_blend
from streammega.samples.source import SampleSource, SegmentSource
from streammega.samples.stream_source import StreamSource, digests_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _NamedBlend:
    """The datasets of a phase by their names; weights None: in proportion to their samples."""

    names: tuple[str, ...]
    weights: tuple[float, ...] | None

    @property
    def blend(self) -> Blend:
        """As a config has it."""
        if self.weights is None:
            return list(self.names)
        return list(zip(self.names, self.weights, strict=True))


def record_of(config: DataConfig) -> FollowRecord:
    """Where a run that follows writes what joined. Raises ConfigError where it does not say."""
    assert config.follow is not None
    if config.follow.record is None:
        raise ConfigError(
            "follow.record is not given: name a folder that all ranks and resumes of the run see, "
            "where it is written what joined at which sample"
        )
    return FollowRecord(config.follow.record, config.storage)


def recorded(config: DataConfig, split: str = "train") -> DataConfig:
    """A config whose phases are also those in which its run has taken in something so far, and that
    follows no more; another one as it is.
    """
    if not config.follows(split):
        return config
    return replace(with_joined(config, record_of(config).newest()), follow=None)


def with_joined(config: DataConfig, looked: Looked) -> DataConfig:
    """A config whose phases are its own, and those in which something joined.

    Raises ConfigError where both begin at one sample, or what joined is of no dataset there.
    """
    check_in_samples(config.phases)
    if not looked.phases:
        return config
    blend = _first_blend(config)
    phases: list[PhaseConfig] = []
    own_and_joined: list[PhaseConfig | JoiningPhase] = [*config.phases, *looked.phases]
    for phase in sorted(own_and_joined, key=_first_sample):
        if phases and phases[-1].first_sample == phase.first_sample:
            raise ConfigError(
                f"a phase begins at sample {phase.first_sample}, where newer versions have joined: "
                f"let it begin a step later"
            )
        if isinstance(phase, JoiningPhase):
            blend = _joined_blend(blend, phase)
            phase = PhaseConfig(first_sample=phase.first_sample, blend=blend.blend)
        elif phase.blend is not None:
            blend = _named(phase.blend)
        phases.append(phase)
    return replace(config, phases=phases)


def look(
    config: DataConfig, before: Looked, sample: int, try_it: Callable[[Looked], None]
) -> Looked:
    """What joins at a sample, where `before` had joined before: the newest version of each dataset
    that the blend there names by one.

    try_it: raises where what it is given cannot be read. Such a version is left out, and looked at
    again the next time: what a producer spoils ends no run. What may pass is raised.
    """
    found = replace(before, sample=sample, left_out=[])
    if any(phase.first_sample == sample for phase in config.phases):
        return found  # which says what holds from here on
    joined_before = with_joined(config, before)
    blend = _blend_at(joined_before, sample)
    for name, number in _held(blend).items():
        newest = newest_version(name, config.storage)
        for after, until in _pieces(joined_before, name, number, newest):
            try:
                joined = _join(found, blend, name, after, until, config.storage)
                try_it(joined)
            except StreammegaError as error:
                if getattr(error, "transient", False):
                    raise
                left_out = f"{redact_urls(name)}@{after}..{until}: {error}"
                found = replace(found, left_out=[*found.left_out, left_out])
                break
            found = joined
    return found


def check_follows_something(config: DataConfig) -> None:
    """Raise ConfigError for a run none of whose datasets is named by a version."""
    blends = [_first_blend(config)]
    for phase in config.phases:
        if phase.blend is not None:
            blends.append(_named(phase.blend))
    if not any(_held(blend) for blend in blends):
        raise ConfigError(
            "follow takes in what is appended to datasets that the blend names by a version, such "
            "as web@7, and there is none: `streammega versions` lists those of a dataset"
        )


def _first_sample(phase: PhaseConfig | JoiningPhase) -> int:
    return phase.first_sample


def _named(blend: Blend) -> _NamedBlend:
    names, weights = parse_blend(blend)
    return _NamedBlend(names=names, weights=weights)


def _first_blend(config: DataConfig) -> _NamedBlend:
    blend = split_blend(config, "train")
    if blend is None:
        raise ConfigError("follow is of training, which the config gives nothing")
    return _NamedBlend(names=blend.prefixes, weights=blend.weights)


def _blend_at(config: DataConfig, sample: int) -> _NamedBlend:
    """The blend in which a sample lies, of a config that has all phases."""
    blend = _first_blend(config)
    for phase in config.phases:
        if phase.first_sample <= sample and phase.blend is not None:
            blend = _named(phase.blend)
    return blend


def _held(blend: _NamedBlend) -> dict[str, int]:
    """{dataset: the newest version that a blend has of it}."""
    held: dict[str, int] = {}
    for name in blend.names:
        growing = VersionName.parse(name)
        if growing is not None:
            held[growing.prefix] = max(growing.number, held.get(growing.prefix, 0))
    return held


def _pieces(config: DataConfig, prefix: str, held: int, newest: int) -> list[tuple[int, int]]:
    """What is taken in of a dataset from version `held` to the newest, as (after, until): cut where
    the names of all phases are. What joined before, and which a phase by hand left out, is then the
    dataset that it was, and goes on where it was.
    """
    cuts = {held, newest}
    names = list(_first_blend(config).names)
    for phase in config.phases:
        if phase.blend is not None:
            names += _named(phase.blend).names
    for name in names:
        growing = VersionName.parse(name)
        if growing is not None and growing.prefix == prefix:
            cuts |= {growing.after or 0, growing.number}
    bounds = sorted(cut for cut in cuts if held <= cut <= newest)
    return list(pairwise(bounds))


def _joined_blend(blend: _NamedBlend, phase: JoiningPhase) -> _NamedBlend:
    """A blend with what joins it, behind what it has."""
    names = list(blend.names)
    for joined in phase.joined:
        growing = None
        if 0 <= joined.dataset < len(names):
            growing = VersionName.parse(names[joined.dataset])
        if growing is None or growing.number != joined.after:
            raise ConfigError(
                f"at sample {phase.first_sample} versions up to {joined.until} joined dataset "
                f"{joined.dataset} of the blend, {joined.name}, and that is no version now: name "
                f"the datasets as the run did before"
            )
        names.append(f"{growing.prefix}@{joined.after}..{joined.until}")
    weights = None if phase.weights is None else tuple(phase.weights)
    if weights is not None and len(weights) != len(names):
        raise ConfigError(
            f"at sample {phase.first_sample} a blend of {len(weights)} datasets began, and now it "
            f"has {len(names)}: name the datasets as the run did before"
        )
    joined_blend = _NamedBlend(names=tuple(names), weights=weights)
    if not _keeps_weights(blend, joined_blend):
        raise ConfigError(
            f"at sample {phase.first_sample} versions joined a blend of other weights than the config "
            f"now has there: restore those, or remove the files of sample {phase.first_sample} and "
            f"later ones from data.follow.record: versions are then looked for anew"
        )
    return joined_blend


def _keeps_weights(blend: _NamedBlend, joined: _NamedBlend) -> bool:
    """Whether a blend with what joined it, behind what it has, has its weights: each dataset that
    grew is drawn as often in all, and what it had is shared as before.
    """
    if blend.weights is None or joined.weights is None:
        return blend.weights is None and joined.weights is None
    own = len(blend.names)
    prefixes = {_prefix_of(name) for name in joined.names[own:]}
    groups: dict[str | int, list[int]] = {}
    for place, name in enumerate(joined.names):
        prefix = _prefix_of(name)
        groups.setdefault(prefix if prefix in prefixes else place, []).append(place)
    scale = sum(joined.weights) / sum(blend.weights)
    for places in groups.values():
        before = sum(blend.weights[place] for place in places if place < own)
        after = sum(joined.weights[place] for place in places)
        if not math.isclose(before * scale, after):
            return False
        after_of_own = sum(joined.weights[place] for place in places if place < own)
        for place in places:
            # crosswise: no share of the two is divided by
            if place < own and not math.isclose(
                blend.weights[place] * after_of_own, joined.weights[place] * before
            ):
                return False
    return True


def _prefix_of(name: str) -> str:
    """The dataset of a version's name; any other name as it is."""
    growing = VersionName.parse(name)
    return name if growing is None else growing.prefix


def _join(
    found: Looked,
    blend: _NamedBlend,
    prefix: str,
    after: int,
    until: int,
    storage: StorageConfig,
) -> Looked:
    """What was found, and what a dataset has more."""
    phases = list(found.phases)
    is_first = not phases or phases[-1].first_sample < found.sample
    phase = JoiningPhase(
        first_sample=found.sample,
        joined=[],
        weights=None if blend.weights is None else list(blend.weights),
    )
    if not is_first:
        phase = phases.pop()
    places = _places(_joined_blend(blend, phase), prefix)
    place, _ = next(item for item in places if item[1].number == after)
    joined = Joined(dataset=place, name=redact_urls(prefix), after=after, until=until)
    weights = phase.weights
    if weights is not None:
        news = VersionName(prefix=prefix, number=until, after=after)
        new_tokens = news.tokens(storage)
        tokens = sum(growing.tokens(storage) for _, growing in places)
        weights = _shared(weights, [place for place, _ in places], new_tokens, tokens)
    phases.append(replace(phase, joined=[*phase.joined, joined], weights=weights))
    return replace(found, phases=phases)


def _places(blend: _NamedBlend, prefix: str) -> list[tuple[int, VersionName]]:
    """(place, name) of each dataset of a blend that is of the one that grows."""
    found = []
    for place, name in enumerate(blend.names):
        growing = VersionName.parse(name)
        if growing is not None and growing.prefix == prefix:
            found.append((place, growing))
    return found


def _shared(
    weights: Sequence[float], places: Sequence[int], new_tokens: int, tokens: int
) -> list[float]:
    """Weights with one more, of what joins the datasets at `places`: theirs is shared out by tokens,
    so that all of the dataset that grew is drawn as often as before.
    """
    if new_tokens < 1:
        raise ConfigError("what was appended holds no token")
    share = new_tokens / (new_tokens + tokens)
    changed = list(weights)
    for place in places:
        changed[place] = weights[place] * (1 - share)
    return [*changed, share * sum(weights[place] for place in places)]


class AutoAppendSource(SampleSource):
    """The stream of a config, and of the segments in which newer versions joined: as the record of
    the run says, to which `advance_to` adds. What is known of the order only grows: samples that were
    located lie where they did.
    """

    def __init__(self, config: DataConfig, split: str, global_batch_size: int) -> None:
        check_follows_something(config)
        # now: whoever writes a name more into a file of them must not change what was read already
        self._named = with_names_read(config, split)
        self._split = split
        self._looked = record_of(self._named).newest()
        whole = with_joined(self._named, self._looked)
        # the one attribute that changes, at once: other threads locate samples meanwhile
        self._source = StreamSource(
            whole, split, global_batch_size, dataset_ids=self._dataset_ids(whole)
        )

    @property
    def config(self) -> DataConfig:
        """The config of the run, with the segments in which something joined."""
        return self._source.config

    @property
    def segments(self) -> Sequence[SegmentSource]:
        """Those of the config, and those that joined, as far as they are known."""
        return self._source.segments

    @property
    def appended_at(self) -> list[int]:
        """The samples at which newer versions joined."""
        return [phase.first_sample for phase in self._looked.phases]

    def with_lanes(self, lanes: int) -> SampleSource:
        """The same in the lanes of a saved state, unless the config names its own."""
        source = copy.copy(self)
        source._source = self._source.with_lanes(lanes)
        return source

    def attach(self, sample: int) -> None:
        """Note that reading goes on at a sample: of what joined before it the record alone says, and
        nothing more will.

        Raises ConfigError for the record of another run.
        """
        record = record_of(self._named)
        first = self._source.segments[0]
        assert first.order is not None
        # what tells the record of this run from others: not where its data lies
        digests = digests_of(first.order, first.files)
        record.begin({"seed": self.config.seed, "datasets": digests})
        self._take_in(record.newest())
        if self._looked.sample < sample - 1:
            self._looked = replace(self._looked, sample=sample - 1)

    def advance_to(self, sample: int, schedule: TrainingSchedule) -> bool:
        """Take in what joins up to a sample: newer versions are looked for at the ends of steps that
        `follow` says, in their order, by whoever comes there first.

        Raises StorageError, FormatError, ConfigError.
        """
        assert self._named.follow is not None
        every_samples = self._named.follow.every_samples
        segments = self.segments
        while True:
            looked = self._looked.sample
            multiple = looked - looked % every_samples
            end = schedule.end_of_step(multiple)
            while end <= looked:
                multiple += every_samples
                end = schedule.end_of_step(multiple)
            if end > sample:
                return self.segments is not segments
            self._look(end)

    def _look(self, sample: int) -> None:
        """Take in what joins at a sample, the end of a step: what the record says, or if nobody was
        there before, what there is now, which is then written to it.

        In the order of samples: what joined before must be known. Phases that have begun stay as
        they are.
        """
        record = record_of(self._named)
        looked = record.at(sample)
        tried: list[tuple[Looked, StreamSource]] = []
        if looked is None:

            def try_it(found: Looked) -> None:
                tried.append((found, self._with(found)))

            looked = record.write(look(self._named, self._looked, sample, try_it))
            for left_out in looked.left_out:
                log.warning("sample %d: left out until it can be read: %s", sample, left_out)
        self._take_in(looked, tried)

    def _take_in(self, looked: Looked, tried: Sequence[tuple[Looked, StreamSource]] = ()) -> None:
        """Go by what was found. tried: sources with it, perhaps, which need not be opened again."""
        if not same_phases(looked, self._looked):
            opened = [source for found, source in tried if same_phases(found, looked)]
            source = opened[0] if opened else self._with(looked)
            for phase in looked.phases[len(self._looked.phases) :]:
                names = [f"{item.name}@{item.after}..{item.until}" for item in phase.joined]
                log.info("from sample %d on: %s joined", phase.first_sample, ", ".join(names))
            self._source = source
        self._looked = looked

    def _with(self, looked: Looked) -> StreamSource:
        """The stream with what joined."""
        whole = with_joined(self._named, looked)
        return self._source.with_config(whole, self._dataset_ids(whole))

    def _dataset_ids(self, whole: DataConfig) -> NDArray[np.int64]:
        """The "dataset_id" of each dataset: of those that joined, that of the first dataset of the
        config that is a version of the same.
        """
        own = dataset_names(datasets_of_segments(self._named, self._split))
        number_of = {name: number for number, name in enumerate(own)}
        first_of_growing: dict[str, int] = {}
        for number, (prefix, _) in enumerate(own):
            growing = VersionName.parse(prefix)
            if growing is not None:
                first_of_growing.setdefault(_spelled(growing.prefix), number)
        ids = []
        for name in dataset_names(datasets_of_segments(whole, self._split)):
            growing = VersionName.parse(name[0])
            if name in number_of or growing is None:
                ids.append(number_of[name])
            else:
                ids.append(first_of_growing[_spelled(growing.prefix)])
        return np.array(ids, np.int64)


def _spelled(prefix: str) -> str:
    """A prefix, the same however phases spell a local path."""
    return prefix if "://" in prefix else os.path.abspath(prefix)
