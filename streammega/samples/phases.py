"""The phases of a run over stored datasets: what they name is opened once, and each has its order."""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.config import DataConfig, parse_blend
from streammega.dataset.names import strip_suffix
from streammega.dataset.resolve import is_local_folder
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.order import Extents
from streammega.order.split import SPLITS
from streammega.order.state import PHASES
from streammega.order.stream_order import (
    LaterPhase,
    PhasedOrder,
    StreamOrder,
    default_lanes,
    phased_order,
)
from streammega.samples.excluded import skipped_tokens, skips_identity
from streammega.samples.lanes import (
    LaneSource,
    blend_of,
    check_lanes,
    digests_of,
    first_order,
    shares_of,
    weights_of,
)
from streammega.samples.packed import are_packed, check_bins, check_one_kind, without_padding
from streammega.samples.source import SampleSource, all_files, file_of_rows
from streammega.samples.split_blend import split_blend
from streammega.samples.stream_datasets import OpenDataset, open_datasets
from streammega.samples.token_file import TokenFile
from streammega.storage.open import resolved

log = logging.getLogger(__name__)

Name = tuple[str, int]
"""A dataset: its prefix, and how many of that prefix stand before it in its blend."""


class Phased:
    """Samples that are drawn from another source in each phase.

    phases: what each of them draws from, samples being numbered over all of them. starts: the
    sample at which each begins.
    """

    phases: Sequence[Any]
    starts: Sequence[int]

    def phase_at(self, sample: int) -> int:
        """The number of the phase that holds a sample."""
        return bisect_right(self.starts, sample) - 1


class PhasedSource(Phased):
    """Samples of training in the stream order, over all phases of a config.

    `phases[p]` is what phase p draws from; `files` are those of all datasets, by their numbers in
    the order in which they first appear. Raises ConfigError for a phase or dataset that holds no
    sample, naming the phase, StorageError and FormatError for the files.
    """

    def __init__(self, config: DataConfig, split: str, global_batch_size: int) -> None:
        check_lanes(config, global_batch_size)
        self.split = split
        self._global_batch_size = global_batch_size
        self._opened: Sequence[OpenDataset] = ()
        lanes = config.lanes or default_lanes(global_batch_size)
        shared = _shared_lanes(config, lanes, global_batch_size)
        if shared is not None:
            raise ConfigError(shared)
        self._open(config, lanes)

    def _open(self, config: DataConfig, lanes: int) -> None:
        """Open what the phases of a config name, but for what is open already, and order it in so
        many lanes.
        """
        split = self.split
        self.config = config
        self._blends = _blends_of(config, split)
        self._number_of = _numbers(self._blends)
        prefixes = prefixes_of(config, split)
        shares = blend_of(config, split).shares
        self._opened = open_datasets(prefixes, shares, split, config, self._opened)
        self.files: Sequence[Sequence[TokenFile]] = [dataset.files for dataset in self._opened]
        _check_apart(self._blends, prefixes, self.files)
        self.skipped = skipped_tokens(config, split, prefixes, self.files)
        self._all_files = all_files(self)
        self._is_packed = are_packed(self._all_files)
        self._take_lanes(lanes)

    @property
    def num_samples(self) -> int | None:
        """Samples the config asks of this split; None: no end."""
        asked = self.config.num_samples
        return asked[SPLITS.index(self.split)] if asked else None

    @property
    def lanes(self) -> int:
        """Lanes of the order."""
        return self.phases[0].lanes

    def adopt_lanes(self, lanes: int) -> None:
        """Take the lanes of a saved state, unless the config names its own."""
        if self.config.lanes is None and lanes != self.lanes:
            # no error, for the phase may have begun, with samples that are where they are
            shared = _shared_lanes(self.config, lanes, self._global_batch_size)
            if shared is not None:
                log.warning(
                    "in the lanes of the checkpoint ranks read some bytes twice: %s", shared
                )
            self._take_lanes(lanes)

    def locate(self, sample_ids: NDArray[np.int64]) -> Extents:
        """Where samples lie."""
        extents = self.order.locate(sample_ids)
        if not self._is_packed:
            return extents
        return without_padding(extents, self._all_files, file_of_rows(self, extents))

    def identity(self, consumed: int | None = None) -> dict[str, Any]:
        """That of the first phase, as of a run without others, and beside it those that began
        before `consumed`, by their numbers: the future may still be changed. None: all of them.
        """
        identity = self.phases[0].identity(consumed)
        identity |= skips_identity(self.skipped, consumed, self._drawn_before(consumed))
        begun = {
            str(number): _identity_of(source.order, self.files)
            for number, source in enumerate(self.phases)
            if number and (consumed is None or source.order.first_sample < consumed)
        }
        # Without any the identity is the one of a run that has no phases.
        return identity | {PHASES: begun} if begun else identity

    def _drawn_before(self, consumed: int | None) -> set[int]:
        """The datasets of phases that began before a sample (None: of all): what is skipped of
        others has changed nothing yet.
        """
        orders = self.order.phases
        begun = [orders[0]]
        begun += [o for o in orders[1:] if consumed is None or o.first_sample < consumed]
        return {number for order in begun for number in order.dataset_numbers.tolist()}

    def _take_lanes(self, lanes: int) -> None:
        self.order: PhasedOrder = self._order_in(lanes)
        self.starts = [order.first_sample for order in self.order.phases]
        self.phases: Sequence[LaneSource] = [
            LaneSource(
                _with_length(self.config, order.sequence_length),
                self.split,
                self.files,
                order,
                self.skipped,
            )
            for order in self.order.phases
        ]

    def _order_in(self, lanes: int) -> PhasedOrder:
        """The order in so many lanes. Raises ConfigError for a dataset that holds no sample."""
        config = self.config
        first_blend = self._blends[0]
        opened = self._datasets_of(first_blend)
        datasets = [dataset.parts for dataset in opened]
        first = first_order(config, self.split, datasets, first_blend.weights, lanes)
        later = []
        length = config.sequence_length
        check_bins(self._bins_of(first_blend), config)
        check_one_kind([(dataset.name, dataset.bin_tokens) for dataset in self._opened])
        for phase, blend in zip(config.phases, self._blends[1:], strict=True):
            length = phase.sequence_length or length
            check_bins(self._bins_of(blend), _with_length(config, length))
            datasets = [dataset.parts for dataset in self._datasets_of(blend)]
            restart = [self._number_of[name] for name in blend.names if name[0] in blend.restart]
            later.append(
                LaterPhase(
                    first_sample=blend.first_sample,
                    numbers=[self._number_of[name] for name in blend.names],
                    datasets=datasets,
                    weights=weights_of(_with_length(config, length), datasets, blend.weights),
                    restart=frozenset(restart),
                    sequence_length=length,
                    lanes=phase.lanes,
                )
            )
        return phased_order(first, later)

    def _bins_of(self, blend: _PhaseBlend) -> list[tuple[str, int | None]]:
        """(name, tokens of its bins) of each dataset of a phase."""
        return [(dataset.name, dataset.bin_tokens) for dataset in self._datasets_of(blend)]

    def _datasets_of(self, blend: _PhaseBlend) -> list[OpenDataset]:
        return [self._opened[self._number_of[name]] for name in blend.names]


def _check_apart(
    blends: Sequence[_PhaseBlend], prefixes: Sequence[str], files: Sequence[Sequence[TokenFile]]
) -> None:
    """Raise ConfigError where datasets of different phases have a file in common, as `web@1` and
    `web@2` do, or `web` and `./web`: to the order they are two, and it would read that file in each.

    Those that are drawn from in the same phases may overlap: that is a blend as in any run.
    """
    phases_of_prefix: dict[str, set[int]] = {prefix: set() for prefix in prefixes}
    for number, blend in enumerate(blends):
        for prefix, _ in blend.names:
            phases_of_prefix[prefix].add(number)
    prefix_of_file: dict[str, str] = {}
    for prefix, own_files in zip(prefixes, files, strict=True):
        for file in own_files:
            url = _place_of(file)
            other = prefix_of_file.setdefault(url, prefix)
            if phases_of_prefix[other] != phases_of_prefix[prefix]:
                raise ConfigError(
                    f"{redact_urls(url)}: is in {redact_urls(other)} and in {redact_urls(prefix)}, "
                    f"so phases would read it twice; call a dataset the same in all of them. Of one "
                    f"that grew keep the former version, and name what was appended since beside "
                    f"it, such as web@1..2"
                )


def _place_of(file: TokenFile) -> str:
    """Where a file lies, the same however its dataset is called."""
    return resolved(file.store.url(file.key))


def numbers_of(config: DataConfig, split: str) -> dict[Name, int]:
    """The number of each dataset of a split over all phases."""
    return _numbers(_blends_of(config, split))


def prefixes_of(config: DataConfig, split: str) -> list[str]:
    """The prefix of each dataset of a split, by its number over all phases."""
    return [prefix for prefix, _ in numbers_of(config, split)]


def names_in_identity(config: DataConfig, split: str) -> dict[str, str]:
    """The name of each dataset, by its path in the identity of an order: "datasets[0]", or
    "dataset" of a single one, and in phases "phases.1.datasets[0]".
    """
    names = {}
    for number, blend in enumerate(_blends_of(config, split)):
        phase = f"{PHASES}.{number}." if number else ""
        for place, (prefix, _) in enumerate(blend.names):
            names[f"{phase}datasets[{place}]"] = redact_urls(prefix)
            names[f"{phase}dataset"] = redact_urls(prefix)
    return names


def numbers_of_phases(config: DataConfig, split: str) -> list[list[int]]:
    """Of each phase the numbers of its datasets over all phases, in the order of its blend."""
    blends = _blends_of(config, split)
    number_of = _numbers(blends)
    return [[number_of[name] for name in blend.names] for blend in blends]


@dataclass(frozen=True, kw_only=True)
class _PhaseBlend:
    """The datasets of a phase and their weights; None: in proportion to their samples. restart: the
    prefixes of those that begin a new epoch.
    """

    first_sample: int
    names: Sequence[Name]
    weights: Sequence[float] | None
    restart: frozenset[str] = frozenset()


def _blends_of(config: DataConfig, split: str) -> list[_PhaseBlend]:
    """The blend of each phase."""
    first = blend_of(config, split)
    spelling_of: dict[str, str] = {}
    names: Sequence[Name] = _names(
        [_first_spelling(prefix, spelling_of) for prefix in first.prefixes]
    )
    blends = [_PhaseBlend(first_sample=0, names=names, weights=first.weights)]
    for number, phase in enumerate(config.phases_of(split), 1):
        names = blends[-1].names
        weights = blends[-1].weights
        if phase.blend is not None:
            prefixes, weights = parse_blend(phase.blend)
            names = _names([_first_spelling(prefix, spelling_of) for prefix in prefixes])
        restart = [_first_spelling(prefix, spelling_of) for prefix in phase.restart]
        _check_restart(number, restart, names, blends)
        blends.append(
            _PhaseBlend(
                first_sample=phase.first_sample,
                names=names,
                weights=weights,
                restart=frozenset(restart),
            )
        )
    return blends


def _first_spelling(prefix: str, spelling_of: dict[str, str]) -> str:
    """A prefix as it was spelled first, so that `web`, `./web` and `/data/web` are one dataset in
    all phases, and a folder with and without its last slash. spelling_of: by what they name.

    Names of other storage are as they are: there a folder and a prefix may have the same name.
    """
    if "://" in prefix:
        return spelling_of.setdefault(prefix, prefix)
    named = os.path.abspath(strip_suffix(prefix))
    if is_local_folder(prefix):
        named += os.sep
    return spelling_of.setdefault(named, prefix)


def _names(prefixes: Sequence[str]) -> list[Name]:
    """Prefixes, of which one that is repeated is another dataset each time."""
    repeated: Counter[str] = Counter()
    names: list[Name] = []
    for prefix in prefixes:
        names.append((prefix, repeated[prefix]))
        repeated[prefix] += 1
    return names


def _numbers(blends: Sequence[_PhaseBlend]) -> dict[Name, int]:
    """The number of each dataset: its place in the order in which they first appear."""
    names = dict.fromkeys(name for blend in blends for name in blend.names)
    return {name: number for number, name in enumerate(names)}


def _check_restart(
    number: int, restart: Sequence[str], names: Sequence[Name], before: Sequence[_PhaseBlend]
) -> None:
    """Raise ConfigError for a prefix to begin anew that the phase does not draw from, or that no
    phase before it did.
    """
    here = {prefix for prefix, _ in names}
    drawn = {prefix for blend in before for prefix, _ in blend.names}
    for prefix in restart:
        if prefix not in here or prefix not in drawn:
            where = "in its blend" if prefix not in here else "in a phase before it"
            raise ConfigError(
                f"phase {number}: restart names {redact_urls(prefix)}, which is not {where}; "
                "leave it out"
            )


def _with_length(config: DataConfig, sequence_length: int) -> DataConfig:
    """The config of a phase whose samples are so long."""
    if sequence_length == config.sequence_length:
        return config
    return replace(config, sequence_length=sequence_length)


def _shared_lanes(config: DataConfig, lanes: int, global_batch_size: int) -> str | None:
    """What is to be said of the first phase whose global batch does not divide its lanes: ranks
    would share them. None: there is none.
    """
    size = global_batch_size
    for number, phase in enumerate(config.phases, 1):
        size = phase.global_batch_size or size
        lanes = phase.lanes or lanes
        if lanes % size:
            divided = -(-lanes // size) * size
            return (
                f"phase {number}: global_batch_size {size} does not divide its {lanes} lanes; take "
                f"one that does, give the phase lanes = {divided}, or begin the run with `lanes` "
                "that every batch size divides"
            )
    return None


def source_at(source: SampleSource, sample: int) -> SampleSource:
    """What a sample is drawn from: of several phases, that of its own."""
    if isinstance(source, Phased):
        of_sample: SampleSource = source.phases[source.phase_at(sample)]
        return of_sample
    return source


def _identity_of(order: StreamOrder, files: Sequence[Sequence[TokenFile]]) -> dict[str, Any]:
    """What defines a later phase: each of its datasets is "number:digest*share"."""
    _, weights = order.schedule[0]
    numbers = order.dataset_numbers.tolist()
    datasets = zip(numbers, digests_of(order, files), shares_of(weights), strict=True)
    restart = {"restart": sorted(order.restart)} if order.restart else {}
    return restart | {
        "first_sample": order.first_sample,
        "sequence_length": order.sequence_length,
        "lanes": order.lanes,
        "datasets": [f"{number}:{digest}*{share}" for number, digest, share in datasets],
    }


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
