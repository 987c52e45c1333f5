"""What a trace tells of samples and documents, and which samples read the tokens of a document: the
order backwards, over stored documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from streammega.dataset.provenance import DocumentOrigin
from streammega.errors import ConfigError
from streammega.order.megatron_inverse import gpt_readings, samples_of_blend
from streammega.order.stream_inverse import samples_using_tokens
from streammega.order.stream_order import PhasedOrder
from streammega.samples.blended import BlendedDataset
from streammega.samples.document_names import BlendShards, DocumentName
from streammega.samples.gpt import GPTDataset
from streammega.samples.lanes import StreamSource
from streammega.samples.phases import PhasedSource
from streammega.samples.restarted import RestartedPhases
from streammega.samples.source import SampleSource


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
    origin: DocumentOrigin | None = None
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


Integers = NDArray[np.int64]


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


class DocumentReadings:
    """Which samples of a source read the tokens of documents.

    Args: source: of one split. shards: of its blend. extra_token: whether samples have a token
        after their last.
    """

    def __init__(self, source: SampleSource, shards: BlendShards, *, extra_token: bool) -> None:
        self._source = source
        self._shards = shards
        self._extra_token = extra_token

    def of(self, name: DocumentName, end: int) -> list[DocumentReading]:
        """Every sample before `end` that reads tokens of a document, in order.

        In the stream order in closed form. In the others the built indices are looked through.
        """
        source = self._source
        if isinstance(source, StreamSource | PhasedSource):
            found = self._stream_readings(source, name, end)
        elif isinstance(source, RestartedPhases):
            found = self._restarted_readings(source, name, end)
        else:
            found = self._megatron_readings(source, name, name.dataset, end)
        return sorted(found, key=lambda reading: (reading.sample, reading.start))

    def _stream_readings(
        self, source: StreamSource | PhasedSource, name: DocumentName, end: int
    ) -> list[DocumentReading]:
        order = source.order
        if not isinstance(order, PhasedOrder):
            order = PhasedOrder(phases=[order])
        found = []
        for run in self._shards.of(name.dataset)[name.shard].tokens_of(name.document):
            size = run.stop - run.start
            shift = run.start - run.file_start
            stop = run.file_start + size
            readings = samples_using_tokens(
                order, name.dataset, name.shard, run.file_start, stop, end
            )
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
            extra = int(self._extra_token and not dataset.is_packed)
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
        shards = self._shards.of(name.dataset)
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


def _as_readings(columns: Sequence[Integers]) -> list[DocumentReading]:
    readings = []
    for sample, start, stop in zip(*(column.tolist() for column in columns), strict=True):
        readings.append(DocumentReading(sample=sample, start=start, stop=stop))
    return readings
