"""Samples of a run that takes in what is appended while it trains."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig
from streammega.dataset.versions import VersionName
from streammega.samples.follow_record import Looked, same_phases
from streammega.samples.following import (
    check_follows_something,
    look,
    record_of,
    with_joined,
)
from streammega.samples.lanes import digests_of
from streammega.samples.phases import PhasedSource, numbers_of
from streammega.samples.skipped_names import with_names_read

log = logging.getLogger(__name__)


class FollowingSource(PhasedSource):
    """The phases of a config, and those in which newer versions joined: as the record of the run
    says, to which `look` adds. What is known of the order only grows: samples that were located
    lie where they did.
    """

    def __init__(self, config: DataConfig, split: str, global_batch_size: int) -> None:
        check_follows_something(config)
        # now: whoever writes a name more into a file of them must not change what was read already
        self._asked = with_names_read(config, split)
        config = self._asked
        self._looked = record_of(config).newest()
        super().__init__(with_joined(config, self._looked), split, global_batch_size)

    @property
    def looked(self) -> int:
        """The last sample at which newer versions were looked for, if this follows any."""
        return self._looked.sample

    @property
    def joined_at(self) -> list[int]:
        """The samples at which newer versions joined."""
        return [phase.first_sample for phase in self._looked.phases]

    def begin(self, sample: int) -> None:
        """Reading begins at a sample, or goes on there: of what joined before it the record alone
        says, and nothing more will.

        Raises ConfigError for the record of another run.
        """
        record = record_of(self._asked)
        record.begin(self._run)
        self._take_in(record.newest())
        if self._looked.sample < sample - 1:
            self._looked = replace(self._looked, sample=sample - 1)

    def look(self, sample: int) -> None:
        """Take in what joins at a sample, the end of a step: what the record says, or if nobody was
        there before, what there is now, which is then written to it.

        In the order of samples: what joined before must be known. Phases that have begun stay as
        they are. Raises StorageError, FormatError, ConfigError.
        """
        record = record_of(self._asked)
        looked = record.at(sample)
        tried: list[FollowingSource] = []
        if looked is None:

            def try_it(found: Looked) -> None:
                tried.append(self._grown(found))

            looked = record.write(look(self._asked, self._looked, sample, try_it))
            for left_out in looked.left_out:
                log.warning("sample %d: left out until it can be read: %s", sample, left_out)
        self._take_in(looked, tried)

    def _take_in(self, looked: Looked, tried: Sequence[FollowingSource] = ()) -> None:
        """Go by what was found. tried: this with it, perhaps, which need not be opened again."""
        if same_phases(looked, self._looked):
            self._looked = looked
            return
        opened = [source for source in tried if same_phases(source._looked, looked)]
        grown = opened[0] if opened else self._grown(looked)
        for phase in looked.phases[len(self._looked.phases) :]:
            names = [f"{item.name}@{item.after}..{item.until}" for item in phase.joined]
            log.info("from sample %d on: %s joined", phase.first_sample, ", ".join(names))
        # at once: other threads locate samples meanwhile, all of which lie where they did
        self.__dict__.update(grown.__dict__)
        self._looked = looked

    def _grown(self, looked: Looked) -> FollowingSource:
        """This with what joined."""
        grown = copy.copy(self)
        grown._looked = looked
        grown._open(with_joined(self._asked, looked), self.lanes)
        return grown

    @property
    def _run(self) -> dict[str, Any]:
        """What tells the record of this run from others: not where its data lies."""
        digests = digests_of(self.phases[0].order, self.files)
        return {"seed": self.config.seed, "datasets": digests}

    def _take_lanes(self, lanes: int) -> None:
        super()._take_lanes(lanes)
        self.joined_ids = self._joined_ids()
        for source in self.phases:
            source.joined_ids = self.joined_ids

    def _joined_ids(self) -> NDArray[np.int64]:
        """The "dataset_id" of each dataset: of those that joined, that of the first dataset of the
        config that is a version of the same.
        """
        own = numbers_of(self._asked, self.split)
        first_of_growing: dict[str, int] = {}
        for (prefix, _), number in own.items():
            growing = VersionName.parse(prefix)
            if growing is not None:
                first_of_growing.setdefault(_spelled(growing.prefix), number)
        ids = []
        for name in self._number_of:
            growing = VersionName.parse(name[0])
            if name in own or growing is None:
                ids.append(own[name])
            else:
                ids.append(first_of_growing[_spelled(growing.prefix)])
        return np.array(ids, np.int64)


def _spelled(prefix: str) -> str:
    """A prefix, the same however phases spell a local path."""
    return prefix if "://" in prefix else os.path.abspath(prefix)
