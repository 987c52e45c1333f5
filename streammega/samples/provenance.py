"""Where samples come from, and which samples read a document: computed from the order, without a log.

step, sample  ──►  dataset, shard, document, its tokens     trace
document      ──►  samples, and which tokens they read      uses
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from streammega.config import MAX_SAMPLES, DataConfig
from streammega.config.validate import plain
from streammega.dataset.document_lookup import DocumentRun, ShardDocuments
from streammega.dataset.manifest import Manifest
from streammega.dataset.provenance import DocumentOrigin
from streammega.errors import ConfigError
from streammega.errors.cached_property import cached_property
from streammega.errors.redaction import redact_urls
from streammega.kernels import num_threads
from streammega.kernels.documents import find_overlaps
from streammega.order import Extents
from streammega.order.extents import cut_extents
from streammega.samples.document_names import DocumentName, DocumentNames
from streammega.samples.gather import read_samples
from streammega.samples.open import check_sample_ids, open_source
from streammega.samples.source import SampleSource
from streammega.storage.progress import ProgressObserver
from streammega.storage.thread_pool import ordered_map

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """Consecutive tokens of one document within a sample.

    dataset, shard: names, without secrets. name: the document. start, stop: its tokens, of
    `document_tokens`. column: the token of the sample at which they begin. shard_start: the token
    of the shard at which they begin. origin: where the document came from, if the shard keeps that.
    excluded: training does not see them (exclude_documents).
    """

    dataset: str
    shard: str
    name: DocumentName
    start: int
    stop: int
    document_tokens: int
    column: int
    shard_start: int
    origin: DocumentOrigin | None = None
    excluded: bool = False


@dataclass(frozen=True, kw_only=True)
class TracedSample:
    """A sample of the global stream and its tokens, in order. The extra token, only a label, is
    last.

    phase: the number of its phase.
    """

    sample: int
    runs: tuple[TracedRun, ...]
    phase: int = 0


class DocumentUse(NamedTuple):
    """One sample that reads tokens [start, stop) of a document."""

    document: DocumentName
    sample: int
    start: int
    stop: int


class Intervals(NamedTuple):
    """Tokens [low, high) of files that documents have, by file and token.

    first [files + 1]: the first interval of each file. shift: the token of the file at which the
    document would begin.
    """

    first: Integers
    low: Integers
    high: Integers
    shift: Integers
    documents: Sequence[DocumentName]


SCANNED_AT_ONCE = 1 << 16
"""Samples that a thread locates at once, some 10 ms of work: bounds the memory."""


class Provenance:
    """What the samples of one split of a config are made of, and which samples read a document.

    Reads only the `.idx` entries that are asked for. Raises ConfigError for a split that holds
    nothing, StorageError and FormatError for the files.

    Args:
        config: as the run has it. In the Megatron order it needs num_samples.
        split: "train", "valid" or "test".
        global_batch_size: chooses the lanes of the stream order, unless the config names them.
    """

    def __init__(
        self, config: DataConfig, split: str = "train", global_batch_size: int = 1
    ) -> None:
        self.split = split
        ids_alone = replace(config, columns=())
        self.source: SampleSource = open_source(ids_alone, split, global_batch_size)
        self.config = config = self.source.config
        self.datasets = self.source.prefixes
        """The names of its datasets, over all phases."""
        self.names = DocumentNames(self.datasets, config.storage, config.manifests)
        self._bounds: dict[int, Integers] = {}

    def trace(
        self, sample_ids: ArrayLike, tokens: tuple[int, int] | None = None
    ) -> list[TracedSample]:
        """What samples are made of, in the order of `sample_ids`. tokens: only [start, stop) of
        every sample.

        Raises IndexError for a number that no sample has, ConfigError for tokens that are no range
        or begin behind a sample.
        """
        ids = np.asarray(sample_ids, np.int64).reshape(-1)
        check_sample_ids(self.source, ids, self.split)
        extents = self.source.locate(ids)
        first_column = 0
        if tokens is not None:
            first_column, last_column = plain(tokens)
            if not 0 <= first_column < last_column:
                raise ConfigError(
                    f"tokens {first_column}:{last_column} are no range; give START:STOP, where STOP is "
                    "the token after the last"
                )
            lengths = [segment.config.sequence_length for segment in self.source.segments]
            width = max(lengths) + int(self.config.add_extra_token)
            if first_column >= width:
                raise ConfigError(
                    f"tokens {first_column}:{last_column} are beyond a sample, which has {width}; give a "
                    "smaller range"
                )
            extents = cut_extents(extents, [(first_column, min(last_column, width))])
        return [
            TracedSample(
                sample=sample,
                runs=tuple(self._runs_of(extents, number, first_column, sample)),
                phase=self.source.segment_number(sample),
            )
            for number, sample in enumerate(ids.tolist())
        ]

    def tokens(self, sample_ids: ArrayLike) -> tuple[NDArray[Any], Integers]:
        """Token ids of samples, [samples, S + extra], and how many each has. They are read from
        storage. The longest sample length of the phases is S. Raises IndexError for a number that no
        sample has.
        """
        ids = np.asarray(sample_ids, np.int64).reshape(-1)
        check_sample_ids(self.source, ids, self.split)
        extra = int(self.config.add_extra_token)
        numbers = [self.source.segment_number(sample) for sample in ids.tolist()]
        segments = self.source.segments
        widths = [segments[number].config.sequence_length + extra for number in numbers]
        tokens = np.zeros((len(ids), max(widths, default=0)), segments[0].file_table.dtype)
        valid = np.zeros(len(ids), np.int64)
        for number in set(numbers):
            rows = np.flatnonzero(np.array(numbers) == number)
            samples = read_samples(segments[number], ids[rows])
            width = min(samples.ids.shape[1], tokens.shape[1])
            tokens[rows, :width] = samples.ids.numpy()[:, :width]
            valid[rows] = samples.valid.numpy()
        return tokens, valid

    def find(self, name: str) -> list[DocumentName]:
        """The documents of a name: `web#7`, an id or URL, or `corpus.jsonl:12`. Several if the
        blend has a dataset several times, or documents share an id.

        Raises ConfigError for a name that no document has, or that may mean different documents.
        """
        documents = self.names.find(name)
        if not documents:
            raise ConfigError(self.names.describe_missing([name]))
        return documents

    def origin(self, name: DocumentName) -> DocumentOrigin | None:
        """Where a document came from; None if its shard does not keep that (convert --provenance)."""
        stored = self.shards(name.dataset)[name.shard].origins
        return None if stored is None else stored[name.document]

    def uses(
        self,
        documents: Sequence[DocumentName],
        *,
        start: int = 0,
        end: int | None = None,
        progress: ProgressObserver | None = None,
    ) -> Generator[DocumentUse]:
        """Every sample of [start, end) that reads tokens of some documents, in the order of samples.

        One scan of the samples finds the uses of all documents, in threads; it yields what it has found
        so far. end: None: the last sample; the stream order without num_samples needs an end. progress:
        receives samples that were scanned.
        """
        samples = self.source.num_samples
        if end is None and samples is None:
            raise ConfigError("the stream has no end: give `end`, the sample up to which to search")
        last = min(limit for limit in (end, samples) if limit is not None)
        if not 0 <= start <= last <= MAX_SAMPLES:
            raise ConfigError(
                f"samples {start} to {last} cannot be searched: give start and end within the "
                f"{samples or MAX_SAMPLES} samples that there may be"
            )
        intervals = self._intervals(documents)
        progress = progress or ProgressObserver()
        progress.begin("tracing", last - start, " samples")
        stretches = (
            range(first, min(first + SCANNED_AT_ONCE, last))
            for first in range(start, last, SCANNED_AT_ONCE)
        )
        scan = partial(self._scan, intervals)
        for stretch, uses in ordered_map(scan, stretches, num_threads()):
            yield from uses
            progress.advance(len(stretch))

    def _intervals(self, documents: Sequence[DocumentName]) -> Intervals:
        """Where documents are in the files of extents."""
        rows = []
        for name in dict.fromkeys(documents):
            file = self._first_files[name.dataset]
            shard_start = 0
            if self.source.has_file_per_shard:
                file += name.shard
            else:
                shard_start = int(self._token_bounds(name.dataset)[name.shard])
            for run in self.shards(name.dataset)[name.shard].tokens_of(name.document):
                low = shard_start + run.file_start
                rows.append((file, low, low + run.stop - run.start, low - run.start, name))
        rows.sort()
        files, lows, highs, shifts = np.array([row[:4] for row in rows], np.int64).reshape(-1, 4).T
        num_files = sum(len(files) for files in self.source.files)
        return Intervals(
            first=np.searchsorted(files, np.arange(num_files + 1)),
            low=np.ascontiguousarray(lows),
            high=np.ascontiguousarray(highs),
            shift=shifts,
            documents=[row[4] for row in rows],
        )

    def _scan(self, intervals: Intervals, stretch: range) -> tuple[range, list[DocumentUse]]:
        """The samples of a stretch that read tokens of some intervals."""
        sample_ids = np.arange(stretch.start, stretch.stop)
        extents = self.source.locate(sample_ids)
        file = self.source.segments[0].file_table.file_of_rows(extents)
        start, stop = extents.start, extents.stop
        row = place = np.empty(0, np.int64)
        while True:
            count = find_overlaps(
                file, start, stop, intervals.first, intervals.low, intervals.high, row, place
            )
            if count <= len(row):
                break
            row, place = np.empty((2, count), np.int64)
        sample = sample_ids[np.searchsorted(extents.row_splits, row, side="right") - 1]
        low = np.maximum(start[row], intervals.low[place]) - intervals.shift[place]
        high = np.minimum(stop[row], intervals.high[place]) - intervals.shift[place]
        columns = zip(place.tolist(), sample.tolist(), low.tolist(), high.tolist(), strict=True)
        uses = [DocumentUse(intervals.documents[k], n, a, b) for k, n, a, b in columns]
        return stretch, sorted(uses, key=lambda use: (use.sample, use))

    def dataset_name(self, dataset: int) -> str:
        """A dataset as the config names it, without secrets."""
        return redact_urls(self.datasets[dataset])

    @property
    def dataset_names(self) -> list[str]:
        """The names of all datasets, as the config has them, without secrets."""
        return [self.dataset_name(dataset) for dataset in range(len(self.datasets))]

    def manifest(self, dataset: int) -> Manifest:
        """The manifest of a dataset, as it was opened."""
        return self.names.manifest(dataset)

    def shard_name(self, dataset: int, shard: int) -> str:
        """A shard's name, without secrets: what `find` takes."""
        return redact_urls(self.shards(dataset)[shard].name)

    def shards(self, dataset: int) -> list[ShardDocuments]:
        """The shards of a dataset, opened once."""
        return self.names.shards(dataset)

    def excluded_from(self, name: DocumentName) -> int | None:
        """The sample from which on a document is excluded; None: it never is."""
        excluded = self.source.excluded
        runs = self.shards(name.dataset)[name.shard].tokens_of(name.document)
        if excluded is None or not runs:
            return None
        file = self._first_files[name.dataset]
        token = runs[0].file_start
        if self.source.has_file_per_shard:
            return excluded.excluded_from(file + name.shard, token)
        return excluded.excluded_from(
            file, token + int(self._token_bounds(name.dataset)[name.shard])
        )

    def excluded_documents(self) -> dict[DocumentName, int]:
        """The excluded documents, and the sample from which on each is excluded."""
        first_samples: dict[DocumentName, int] = {}
        excluded = self.source.excluded
        if excluded is None:
            return first_samples
        for file, start, stop, since in excluded.ranges():
            dataset = bisect_right(self._first_files, file) - 1
            in_dataset = file - self._first_files[dataset]
            for name in self._documents_at(dataset, in_dataset, start, stop):
                first_samples[name] = min(since, first_samples.get(name, since))
        return first_samples

    def _documents_at(
        self, dataset: int, file: int, start: int, stop: int
    ) -> Iterator[DocumentName]:
        """The documents that have tokens [start, stop) of a file of extents."""
        while start < stop:
            shard, shard_start = self._shard_at(dataset, file, start)
            documents = self.shards(dataset)[shard]
            # a file may have several shards end to end
            size = min(stop - start, documents.num_tokens - shard_start)
            for run in documents.runs(shard_start, shard_start + size):
                yield DocumentName(dataset=dataset, shard=shard, document=run.document)
            start += size

    @cached_property
    def _first_files(self) -> list[int]:
        """The number, among all files, of the first file of each dataset."""
        sizes = [len(files) for files in self.source.files]
        firsts: list[int] = np.cumsum([0, *sizes])[:-1].tolist()
        return firsts

    def _runs_of(self, extents: Extents, number: int, column: int, sample: int) -> list[TracedRun]:
        """The runs of one of the samples in `extents`, from token `column` of it on."""
        runs = []
        for row in range(int(extents.row_splits[number]), int(extents.row_splits[number + 1])):
            dataset = int(extents.dataset[row])
            start = int(extents.start[row])
            stop = int(extents.stop[row])
            # An extent is within one shard: in the stream order a file is a shard; in the others each
            # extent is of one sequence.
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
        # most configs exclude nothing
        since = None if self.source.excluded is None else self.excluded_from(name)
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
            excluded=since is not None and since <= sample,
        )

    def _token_bounds(self, dataset: int) -> Integers:
        """The token of a dataset at which each of its shards begins; int64 [shards + 1]."""
        if dataset not in self._bounds:
            sizes = [shard.num_tokens for shard in self.shards(dataset)]
            self._bounds[dataset] = np.cumsum([0, *sizes])
        return self._bounds[dataset]

    def _shard_at(self, dataset: int, file: int, start: int) -> tuple[int, int]:
        """(shard, its token) of a token of a file of extents."""
        if self.source.has_file_per_shard:
            return file, start
        bounds = self._token_bounds(dataset)
        shard = int(np.searchsorted(bounds, start, side="right")) - 1
        return shard, start - int(bounds[shard])


MAX_OPENED = 16
"""Shards that are looked up at once before they are searched."""
SEARCH_BYTES = 16 << 20
"""Bytes of a shard that are searched at once: bounds the memory."""


def documents_with(
    provenance: Provenance,
    patterns: Sequence[Sequence[int]],
    progress: ProgressObserver | None = None,
) -> Iterator[tuple[DocumentName, int, NDArray[Any]]]:
    """(document, token of the shard, ids there) for every match of one of some patterns of ids, in
    the order of datasets and shards.

    The ids have up to a longest pattern more on both sides, as context. Cost: reads every byte of the datasets once.
    progress: receives bytes that were searched. Raises StorageError.
    """
    progress = progress or ProgressObserver()
    of_prefix = {prefix: dataset for dataset, prefix in reversed([*enumerate(provenance.datasets)])}
    shards = []
    for dataset in sorted(of_prefix.values()):
        for shard, documents in enumerate(provenance.shards(dataset)):
            shards.append((dataset, shard, documents))
    progress.begin("searching", sum(documents.shard.token_bytes for _, _, documents in shards))
    for dataset, shard, documents in shards:
        for start, size, ids in _matches(documents, patterns, progress):
            # A match may span documents: the first one counts. Tokens of no document have none.
            for run in documents.runs(start, start + size)[:1]:
                name = DocumentName(dataset=dataset, shard=shard, document=run.document)
                yield name, start, ids


def _matches(
    documents: ShardDocuments, patterns: Sequence[Sequence[int]], progress: ProgressObserver
) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """(token of a shard, tokens of the pattern, ids around it) of every match."""
    store, info = documents.open_tokens()
    itemsize = documents.dtype.itemsize
    tokens = documents.num_tokens
    request_bytes = documents.storage.tuning.max_request_bytes
    stretch = SEARCH_BYTES // itemsize
    longest = max(len(pattern) for pattern in patterns)
    for first in range(0, tokens, stretch):
        # with the ids around the first and the last match
        begin = max(0, first - longest)
        stop = min(tokens, first + stretch + 2 * longest)
        starts = list(range(begin * itemsize, stop * itemsize, request_bytes))
        stops = [*starts[1:], stop * itemsize]
        bodies = store.read(info.key, list(zip(starts, stops, strict=True)), info.etag)
        ids = np.frombuffer(b"".join(bytes(body) for body in bodies), documents.dtype)
        for pattern in patterns:
            for place in _starts(ids, pattern).tolist():
                if first <= begin + place < first + stretch:
                    around = ids[max(0, place - longest) : place + len(pattern) + longest]
                    yield begin + place, len(pattern), around
        progress.advance((min(tokens, first + stretch) - first) * itemsize)


def _starts(ids: NDArray[Any], pattern: Sequence[int]) -> NDArray[np.int64]:
    """Where a pattern begins in an array of ids, ascending."""
    if len(pattern) > len(ids):
        return np.empty(0, np.int64)
    starts = np.flatnonzero(ids[: len(ids) - len(pattern) + 1] == pattern[0])
    for offset, token in enumerate(pattern[1:], 1):
        starts = starts[ids[starts + offset] == token]
    return starts
