"""The log of what was appended in mid-run: files that all ranks and resumes of the run see.

    follow/00000000000000000000.json   which run the log belongs to
    follow/00000000000001920000.json   all that was appended up to sample 1,920,000
    follow/00000000000003840000.json   all that was appended up to sample 3,840,000

There is a file for each sample at which the run checked for newer versions, even if it found none.
A rank that comes to such a sample and finds no file checks, and creates the file, if it still does
not exist. Ranks that come later, or at the same moment, or again after a kill go by that file. So
ranks and workers agree without a message, and nothing is drawn before it is in the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import dacite

from streammega.config import StorageConfig
from streammega.config.validate import parse_json
from streammega.errors import ConfigError, FormatError, StateError, UnsupportedOperation
from streammega.storage import join_url, open_store
from streammega.storage.object_ops import read_if_exists
from streammega.storage.store import create_on_condition

FORMAT = "streammega-follow"
VERSION = 2
_DIGITS = 20
"""Digits of a sample in a file's name: names sort as samples do."""


@dataclass(frozen=True, kw_only=True)
class AppendedSegment:
    """A segment that begins because versions were appended, with its whole blend.

    datasets: names, without secrets; the first `num_before` were in the blend already. weights:
    None: in proportion to samples. weights_before: those of the first `num_before` until then.
    """

    first_sample: int
    datasets: list[str]
    weights: list[float] | None
    num_before: int
    weights_before: list[float] | None

    @property
    def appended(self) -> list[str]:
        """The versions that begin here."""
        return self.datasets[self.num_before :]


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """All that was appended up to `sample`, at which the run checked for versions.

    So the newest entry alone is enough.

    unreadable: versions that could not be read then, and why, for people.
    """

    sample: int
    segments: list[AppendedSegment]
    unreadable: list[str]


NOTHING = LogEntry(sample=0, segments=[], unreadable=[])
"""The entry of a run that has not checked yet."""


class AppendLog:
    """The files of one run. Raises StorageError, FormatError for files that are not its own.

    Args:
        url: their folder.
        storage: how it is reached.
    """

    def __init__(self, url: str, storage: StorageConfig) -> None:
        self.url = url
        self._storage = storage

    def newest(self) -> LogEntry:
        """The last entry. Cost: one listing, and one file."""
        store, key = open_store(self.url, self._storage)
        samples = [0]
        for info in store.list(f"{key}/", recursive=False):
            name, _, suffix = info.key[len(f"{key}/") :].partition(".")
            if suffix == "json" and len(name) == _DIGITS and name.isdecimal():
                samples.append(int(name))
        newest = max(samples)
        entry = self.at(newest)
        if entry is None and newest:
            raise self._damaged(newest, "it was listed, and is not there")
        return entry or NOTHING

    def at(self, sample: int) -> LogEntry | None:
        """The entry of a sample; None: no rank has checked there."""
        raw = read_if_exists(self._url_of(sample), self._storage)
        if raw is None:
            return None
        stored = self._parse(raw, sample)
        stored.pop("run", None)
        try:
            entry = dacite.from_dict(LogEntry, stored, dacite.Config(strict=True))
        except (dacite.DaciteError, TypeError, ValueError) as error:  # of a mapping for a list
            raise self._damaged(sample, str(error)) from None
        firsts = [segment.first_sample for segment in entry.segments]
        in_order = firsts == sorted(set(firsts)) and all(0 < first <= sample for first in firsts)
        if entry.sample != sample or not in_order:
            raise self._damaged(sample, "its samples are not in order")
        return entry

    def begin(self, run: Mapping[str, Any]) -> None:
        """Mark the log as that of a run, which `run` identifies.

        Raises ConfigError if it belongs to another run, or the storage does not support conditional
        writes.
        """
        first = self._to_json(NOTHING, run=dict(run))
        self._create(0, first)
        raw = read_if_exists(self._url_of(0), self._storage)
        if raw is None:
            raise self._lost(0)
        written = self._parse(raw, 0).get("run")
        if written != json.loads(json.dumps(dict(run))):  # noqa: TID251
            raise ConfigError(
                f"{self.url}: is the log of another run ({written}, and this one is "
                f"{dict(run)}); name another folder by data.follow.log_url"
            )
        # the second write must be refused: else two ranks could each write an entry
        if self._create(0, raw):
            raise _no_conditions(self.url, "what is there is written over")

    def write(self, entry: LogEntry) -> LogEntry:
        """Write an entry, unless its sample has one; returns the one that is there."""
        self._create(entry.sample, self._to_json(entry))
        written = self.at(entry.sample)
        if written is None:
            raise self._lost(entry.sample)
        return written

    def _create(self, sample: int, data: bytes) -> bool:
        store, key = open_store(self._url_of(sample), self._storage)
        try:
            return create_on_condition(store, key, data)
        except UnsupportedOperation as unknown:
            raise _no_conditions(self.url, str(unknown)) from None

    def _url_of(self, sample: int) -> str:
        return join_url(self.url, f"{sample:0{_DIGITS}d}.json")

    def _to_json(self, entry: LogEntry, **more: Any) -> bytes:
        stored = {"format": FORMAT, "version": VERSION, **more, **asdict(entry)}
        text = json.dumps(stored, indent=1) + "\n"
        return text.encode()

    def _parse(self, raw: bytes, sample: int) -> dict[str, Any]:
        try:
            stored: Any = parse_json(raw)
        except ValueError as error:
            raise self._damaged(sample, str(error)) from None
        if not isinstance(stored, dict) or stored.pop("format", None) != FORMAT:
            raise self._damaged(sample, "it is not of this format")
        version = stored.pop("version", None)
        if type(version) is int and version > VERSION:
            raise FormatError(
                f"{self._url_of(sample)}: is a log of version {version}, and this streammega reads "
                f"version {VERSION}; resume the run with a newer streammega"
            )
        if version != VERSION:
            raise self._damaged(sample, f"version {version}; this program reads {VERSION}")
        return stored

    def _lost(self, sample: int) -> StateError:
        return StateError(
            f"{self._url_of(sample)}: was written and is gone, so ranks could take in different "
            "versions; let nothing remove files of this folder, and resume the run"
        )

    def _damaged(self, sample: int, why: str) -> FormatError:
        return FormatError(
            f"{self._url_of(sample)}: is a damaged log of what a run took in ({why}); "
            f"restore this file, for the order of the run depends on it"
        )


def _no_conditions(url: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{url}: nothing can be written here on the condition that nothing is there "
        f"({reason}), so ranks could take in different versions; name another folder by "
        f"data.follow.log_url, in s3:// for instance, or on a disk that all ranks see"
    )
