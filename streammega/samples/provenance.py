"""Where samples come from, and where documents go: computed of the order, without a log of a run.

step, sample  ──►  dataset, shard, document, its tokens     trace
document      ──►  samples, and which tokens they read      readings
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from streammega.config import DataConfig
from streammega.dataset.origins import Origin
from streammega.dataset.shard_documents import DocumentRun, ShardDocuments, open_documents
from streammega.dataset.shards import strip_suffix
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls
from streammega.order import Extents
from streammega.order.extents import cut_extents
from streammega.order.megatron_readings import gpt_readings, samples_of_blend
from streammega.order.phases import PhasedOrder
from streammega.order.readings import phased_readings
from streammega.samples.blended import BlendedDataset
from streammega.samples.following import recorded
from streammega.samples.gpt import GPTDataset
from streammega.samples.lanes import StreamSource
from streammega.samples.open import locate_checked, open_source
from streammega.samples.phases import Phased, PhasedSource, prefixes_of, source_at
from streammega.samples.read import Ids
from streammega.samples.restarted import RestartedPhases
from streammega.samples.seams import NO_SEAMS, Seams
from streammega.samples.skipped_names import NamedShards
from streammega.samples.source import SampleSource, read_samples, seams_of
from streammega.samples.split_blend import split_blend

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DocumentName:
    """A document of a blend, by numbers: of the dataset within the blend, of the shard within the
    dataset, and its own in the shard's `.idx`.
    """

    dataset: int
    shard: int
    document: int


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """Consecutive tokens of one document within a sample.

    dataset, shard: names, without secrets. name: the same in numbers. start, stop: tokens of the
    document, which has `document_tokens`. column: the token of the sample at which they begin.
    shard_start: the token of the shard at which they lie. origin: where the document came from, if
    the shard has it. skipped: training does not see them (skip_documents).
    """

    dataset: str
    shard: str
    name: DocumentName
    start: int
    stop: int
    document_tokens: int
    column: int
    shard_start: int
    origin: Origin | None = None
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class TracedSample:
    """A sample of the global stream, and what its tokens are, in their order; with the extra one,
    which is a label alone.

    phase: the number of its phase. seams: the tokens of it, by their column, that do not follow
    those before them in their file: where lengths or lanes changed, samples join what was left.
    """

    sample: int
    runs: tuple[TracedRun, ...]
    phase: int = 0
    seams: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DocumentReading:
    """One sample that reads tokens [start, stop) of a document."""

    sample: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Tokens [start, stop) of what the Megatron order shuffles, which has `length` tokens; in their
    document they lie `shift` tokens further on.
    """

    number: int
    length: int
    start: int
    stop: int
    shift: int


class Provenance:
    """What one split of a config is made of, forwards and backwards.

    Nothing but `.idx` files is read, and of these what was asked for. Raises ConfigError for a
    split that holds nothing, StorageError and FormatError for the files.

    Args:
        config: as the run has it. In the Megatron order it needs num_samples.
        split: "train", "valid" or "test".
        global_batch_size: chooses the lanes of the stream order, unless the config names them.
    """

    def __init__(
        self, config: DataConfig, split: str = "train", global_batch_size: int = 1
    ) -> None:
        # what joined a run until now is part of what it is made of
        config = recorded(config, split)
        self.config = config
        self.split = split
        self.source: SampleSource = open_source(config, split, global_batch_size)
        if split_blend(config, split) is None:
            raise ConfigError(f"the config has no samples for {split}")
        self.datasets: Sequence[str] = prefixes_of(config, split)
        """The names of its datasets, over all phases."""
        self._opened: dict[int, list[ShardDocuments]] = {}

    def trace(
        self, sample_ids: ArrayLike, tokens: tuple[int, int] | None = None
    ) -> list[TracedSample]:
        """What samples are made of, in the order asked. tokens: only these of every sample, [start,
        stop). Raises IndexError for a number that no sample has.
        """
        ids = np.asarray(sample_ids, np.int64).reshape(-1)
        extents = locate_checked(self.source, ids, self.split)
        first_column = 0
        if tokens is not None:
            first_column, last_column = tokens
            if not 0 <= first_column < last_column:
                raise ConfigError(
                    f"tokens {first_column}:{last_column} are none; give FIRST:BEHIND-THE-LAST"
                )
            width = max(self.config.lengths_of(self.split)) + int(self.config.add_extra_token)
            if first_column >= width:
                raise ConfigError(
                    f"tokens {first_column}:{last_column} are none: a sample has {width}"
                )
            extents = cut_extents(extents, [(first_column, min(last_column, width))])
        seams = self._seams(extents)
        samples = []
        for number, sample in enumerate(ids.tolist()):
            own_seams = seams.column[seams.sample == number] + first_column
            samples.append(
                TracedSample(
                    sample=sample,
                    runs=tuple(self._runs_of(extents, number, first_column, sample)),
                    phase=self.phase_of(sample),
                    seams=tuple(own_seams.tolist()),
                )
            )
        return samples

    def tokens(self, sample_ids: ArrayLike) -> tuple[Ids, Integers]:
        """Token ids of samples, [samples, S + extra], and how many of them each has; these are
        read.
        """
        ids = np.asarray(sample_ids, np.int64).reshape(-1)
        if not isinstance(self.source, Phased):
            return read_samples(self.source, ids)
        return _read_phases(self.source, ids)

    def phase_of(self, sample: int) -> int:
        """The number of the phase that holds a sample."""
        return self.source.phase_at(sample) if isinstance(self.source, Phased) else 0

    def _seams(self, extents: Extents) -> Seams:
        """Where samples join runs of tokens: in the others' orders they follow no file anyway."""
        if not isinstance(self.source, PhasedSource):
            return NO_SEAMS
        return seams_of(self.source, extents)

    def find(self, name: str, number: int) -> list[DocumentName]:
        """The documents of that number in a dataset or shard: by the name of a dataset, numbered
        over all its shards, or by that of a shard; or by the end of either (`web` of
        `s3://bucket/web`). Several where the blend has the dataset several times.

        Raises ConfigError for a name that is in no dataset, or ends several; IndexError for a
        number.
        """
        found = []
        for dataset, prefix in enumerate(self.datasets):
            if strip_suffix(prefix) == strip_suffix(name):
                found.append(self._numbered(dataset, number))
                continue
            # Only datasets that may have it are opened.
            if not _may_be_shard(name, prefix):
                continue
            for shard, documents in enumerate(self.shards(dataset)):
                if strip_suffix(documents.name) == strip_suffix(name):
                    _ = documents.tokens_of(number)  # that there is one
                    found.append(DocumentName(dataset=dataset, shard=shard, document=number))
        return found or self._ending_with(name, number)

    def _ending_with(self, name: str, number: int) -> list[DocumentName]:
        """`find`, by the end of a name. All datasets are opened."""
        shards = [self.shards(dataset) for dataset in range(len(self.datasets))]
        known = NamedShards(prefixes=self.datasets, shards=shards).called(name)
        if not known:
            raise ConfigError(
                f"{redact_urls(name)} is no dataset of this split, and no shard of one; it has "
                f"{redact_urls(', '.join(self.datasets[:8]))}"
            )
        if len(known) > 1:
            raise ConfigError(
                f"{redact_urls(name)} may be {redact_urls(' or '.join(known))}; name it in full"
            )
        (meant,) = known.values()
        found = []
        for dataset, shard in meant:
            if shard is None:
                found.append(self._numbered(dataset, number))
            else:
                _ = shards[dataset][shard].tokens_of(number)  # that there is one
                found.append(DocumentName(dataset=dataset, shard=shard, document=number))
        # a dataset of one shard is called as that is
        return list(dict.fromkeys(found))

    def origin(self, name: DocumentName) -> Origin | None:
        """Where a document came from; None where its shard does not say (convert --origins)."""
        stored = self.shards(name.dataset)[name.shard].origins
        return None if stored is None else stored[name.document]

    def documents_from(self, words: str) -> list[DocumentName]:
        """The documents of that id or URL, or of that place (`corpus.jsonl:12`), in all datasets
        whose shards say where documents came from. All of their origins are looked through.
        """
        found = []
        for dataset in range(len(self.datasets)):
            for shard, documents in enumerate(self.shards(dataset)):
                if documents.origins is None:
                    continue
                for document in documents.origins.search(words):
                    found.append(DocumentName(dataset=dataset, shard=shard, document=document))
        return found

    def readings(self, name: DocumentName, end: int | None = None) -> list[DocumentReading]:
        """Every sample before `end` that reads tokens of a document, in order.

        In the stream order in closed form. In the others the built indices are looked through.
        `end` None: all samples there are; the stream order without num_samples needs one.
        """
        samples = self.source.num_samples
        if end is None and samples is None:
            raise ConfigError("the stream has no end: say up to which sample it is looked for")
        limits = [limit for limit in (end, samples) if limit is not None]
        last = min(limits)
        if isinstance(self.source, StreamSource | PhasedSource):
            found = self._stream_readings(self.source, name, last)
        elif isinstance(self.source, RestartedPhases):
            found = self._restarted_readings(self.source, name, last)
        else:
            found = self._megatron_readings(self.source, name, name.dataset, last)
        return sorted(found, key=lambda reading: (reading.sample, reading.start))

    def dataset_name(self, dataset: int) -> str:
        """A dataset as the config names it, without secrets."""
        return redact_urls(self.datasets[dataset])

    @property
    def dataset_names(self) -> list[str]:
        """The names of all of them."""
        return [self.dataset_name(dataset) for dataset in range(len(self.datasets))]

    def shard_name(self, dataset: int, shard: int) -> str:
        """A shard's name, without secrets: what `find` takes."""
        return redact_urls(self.shards(dataset)[shard].name)

    def shards(self, dataset: int) -> list[ShardDocuments]:
        """The shards of a dataset, opened once."""
        if dataset not in self._opened:
            config = self.config
            prefix = self.datasets[dataset]
            self._opened[dataset] = open_documents(prefix, config.storage, config.index_cache_dir)
        return self._opened[dataset]

    def skipped_from(self, name: DocumentName) -> int | None:
        """The sample from which on a document is not seen; None: it is not skipped."""
        skipped = self.source.skipped
        runs = self.shards(name.dataset)[name.shard].tokens_of(name.document)
        if skipped is None or not runs:
            return None
        file = self._first_files[name.dataset]
        token = runs[0].file_start
        if self._has_shards_as_files:
            return skipped.since_of(file + name.shard, token)
        return skipped.since_of(file, token + int(self._token_bounds(name.dataset)[name.shard]))

    def skipped_documents(self) -> dict[DocumentName, int]:
        """The documents that are skipped, and from which sample on each is."""
        found: dict[DocumentName, int] = {}
        skipped = self.source.skipped
        if skipped is None:
            return found
        for file, start, stop, since in skipped.stretches():
            dataset = bisect_right(self._first_files, file) - 1
            in_dataset = file - self._first_files[dataset]
            for name in self._documents_at(dataset, in_dataset, start, stop):
                found[name] = min(since, found.get(name, since))
        return found

    def _documents_at(
        self, dataset: int, file: int, start: int, stop: int
    ) -> Iterator[DocumentName]:
        """The documents that have tokens [start, stop) of a file, as extents name it."""
        while start < stop:
            shard, shard_start = self._shard_at(dataset, file, start)
            documents = self.shards(dataset)[shard]
            # of several shards that are read as one file, those of each
            size = min(stop - start, documents.num_tokens - shard_start)
            for run in documents.runs(shard_start, shard_start + size):
                yield DocumentName(dataset=dataset, shard=shard, document=run.document)
            start += size

    @cached_property
    def _first_files(self) -> list[int]:
        """The place among all files of the first one of each dataset."""
        sizes = [len(files) for files in self.source.files]
        firsts: list[int] = np.cumsum([0, *sizes])[:-1].tolist()
        return firsts

    def _runs_of(self, extents: Extents, number: int, column: int, sample: int) -> list[TracedRun]:
        """The runs of one of some samples, whose first token is `column`."""
        runs = []
        for row in range(int(extents.row_splits[number]), int(extents.row_splits[number + 1])):
            dataset = int(extents.dataset[row])
            start = int(extents.start[row])
            stop = int(extents.stop[row])
            shard, shard_start = self._shard_at(dataset, int(extents.file[row]), start)
            documents = self.shards(dataset)[shard]
            for run in documents.runs(shard_start, shard_start + stop - start):
                at = column + run.file_start - shard_start
                runs.append(self._traced(dataset, shard, run, at, sample))
            column += stop - start
        return runs

    def _traced(
        self, dataset: int, shard: int, run: DocumentRun, column: int, sample: int
    ) -> TracedRun:
        name = DocumentName(dataset=dataset, shard=shard, document=run.document)
        # of most runs nothing is skipped, nor looked for
        since = None if self.source.skipped is None else self.skipped_from(name)
        return TracedRun(
            dataset=self.dataset_name(dataset),
            shard=self.shard_name(dataset, shard),
            name=name,
            start=run.start,
            stop=run.stop,
            document_tokens=run.document_tokens,
            column=column,
            shard_start=run.file_start,
            origin=self.origin(name),
            skipped=since is not None and since <= sample,
        )

    @property
    def _has_shards_as_files(self) -> bool:
        """Whether the shards of a dataset are files to the order: Megatron reads all as one."""
        return isinstance(self.source, StreamSource | PhasedSource)

    def _shard_at(self, dataset: int, file: int, start: int) -> tuple[int, int]:
        """(shard, token of it) of a token of a file as extents name it."""
        if self._has_shards_as_files:
            return file, start
        bounds = self._token_bounds(dataset)
        shard = int(np.searchsorted(bounds, start, side="right")) - 1
        return shard, start - int(bounds[shard])

    def _token_bounds(self, dataset: int) -> Integers:
        """The token of a dataset at which each of its shards begins; int64 [shards + 1]."""
        if dataset not in self._bounds:
            sizes = [shard.num_tokens for shard in self.shards(dataset)]
            self._bounds[dataset] = np.cumsum([0, *sizes])
        return self._bounds[dataset]

    @cached_property
    def _bounds(self) -> dict[int, Integers]:
        return {}

    def _numbered(self, dataset: int, number: int) -> DocumentName:
        """A document by its number in the whole dataset."""
        left = number
        for shard, documents in enumerate(self.shards(dataset)):
            if 0 <= left < documents.num_documents:
                return DocumentName(dataset=dataset, shard=shard, document=left)
            left -= documents.num_documents
        name = redact_urls(self.datasets[dataset])
        raise IndexError(f"document {number} of {name}, which has {number - left}")

    def _stream_readings(
        self, source: StreamSource | PhasedSource, name: DocumentName, end: int
    ) -> list[DocumentReading]:
        order = source.order
        if not isinstance(order, PhasedOrder):
            order = PhasedOrder(phases=[order])
        found = []
        for run in self.shards(name.dataset)[name.shard].tokens_of(name.document):
            size = run.stop - run.start
            shift = run.start - run.file_start
            stop = run.file_start + size
            readings = phased_readings(order, name.dataset, name.shard, run.file_start, stop, end)
            columns = (readings.sample, readings.start + shift, readings.stop + shift)
            found += _as_readings(columns)
        return found

    def _restarted_readings(
        self, source: RestartedPhases, name: DocumentName, end: int
    ) -> list[DocumentReading]:
        """In the Megatron order over phases, each of which has an order of its own."""
        ends = [*source.starts[1:], source.num_samples]
        found = []
        for phase, phase_end in zip(source.phases, ends, strict=True):
            first = phase.first_sample
            samples = min(end, phase_end) - first
            for place in np.flatnonzero(phase.numbers == name.dataset).tolist():
                for one in self._megatron_readings(phase.samples, name, place, samples):
                    found.append(replace(one, sample=first + one.sample))
        return found

    def _megatron_readings(
        self, source: SampleSource, name: DocumentName, place: int, end: int
    ) -> list[DocumentReading]:
        """place: of the document's dataset in the blend of the source."""
        dataset = source.datasets[place] if isinstance(source, BlendedDataset) else source
        if not isinstance(dataset, GPTDataset):
            raise ConfigError(f"documents cannot be found in a {type(dataset).__name__}")
        found = []
        for unit in self._units(dataset, name):
            extra = int(self.config.add_extra_token and not dataset.is_packed)
            readings = gpt_readings(
                dataset.indices, unit.length, extra, unit.number, unit.start, unit.stop
            )
            sample, kept = _of_blend(source, place, readings.sample, end)
            columns = (
                sample,
                readings.start[kept] + unit.shift,
                readings.stop[kept] + unit.shift,
            )
            found += _as_readings(columns)
        return found

    def _units(self, dataset: GPTDataset, name: DocumentName) -> Iterator[_Unit]:
        """What of a document lies in which units of the Megatron order: its sequences, or the bin
        of a packed dataset.
        """
        shards = self.shards(name.dataset)
        documents = shards[name.shard]
        former = shards[: name.shard]
        bin_tokens = dataset.indexed.bin_tokens
        if bin_tokens is not None:
            bins_before = sum(shard.num_tokens // bin_tokens for shard in former)
            for run in documents.tokens_of(name.document):
                number, start = divmod(run.file_start, bin_tokens)
                yield _Unit(
                    number=bins_before + number,
                    length=bin_tokens,
                    start=start,
                    stop=start + run.stop - run.start,
                    shift=run.start - start,
                )
            return
        first = sum(shard.num_sequences for shard in former)
        tokens_before = 0
        for sequence in documents.sequences_of(name.document):
            length = int(dataset.indexed.sequence_lengths[first + sequence])
            yield _Unit(
                number=first + sequence, length=length, start=0, stop=length, shift=tokens_before
            )
            tokens_before += length


def _of_blend(
    source: SampleSource, dataset: int, samples: Integers, end: int
) -> tuple[Integers, NDArray[np.bool_]]:
    """(samples of the source, which of a dataset's own they are): those before `end`."""
    if not isinstance(source, BlendedDataset):
        kept = samples < end
        return samples[kept], kept
    of_blend = samples_of_blend(source.dataset_index, source.dataset_sample_index, dataset, samples)
    # What the blend does not take comes after its end.
    global_samples = np.array([of_blend.get(own, end) for own in samples.tolist()], np.int64)
    kept = global_samples < end
    return global_samples[kept], kept


def _read_phases(source: SampleSource, ids: Integers) -> tuple[Ids, Integers]:
    """Token ids of samples of several phases, as wide as the longest, and how many each has."""
    parts = [
        read_samples(source_at(source, sample), ids[at : at + 1])
        for at, sample in enumerate(ids.tolist())
    ]
    widest = max((tokens.shape[1] for tokens, _ in parts), default=0)
    dtypes = [tokens.dtype for tokens, _ in parts]
    found = np.zeros((len(ids), widest), np.result_type(*dtypes) if dtypes else np.int64)
    valid = np.zeros(len(ids), np.int64)
    for at, (tokens, count) in enumerate(parts):
        found[at, : tokens.shape[1]] = tokens[0]
        valid[at] = count[0]
    return found, valid


def _as_readings(columns: Sequence[Integers]) -> list[DocumentReading]:
    readings = []
    for sample, start, stop in zip(*(column.tolist() for column in columns), strict=True):
        readings.append(DocumentReading(sample=sample, start=start, stop=stop))
    return readings


def _may_be_shard(name: str, prefix: str) -> bool:
    """Whether a shard of that name may belong to a dataset: its folder is the dataset's."""
    folder, _, _ = prefix.rpartition("/")
    return name.startswith(folder)
