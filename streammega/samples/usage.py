"""What each phase of a split takes from its datasets, in every order: samples, tokens, epochs, and
the use of remainders. Computed from the order; no sample is located.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streammega.order.stream_order import USAGE
from streammega.samples.provenance import Provenance
from streammega.samples.source import Span


@dataclass(frozen=True, kw_only=True)
class DatasetUsage:
    """What a phase takes from one of its datasets.

    share: its part of the weights. samples, tokens: how many are read, without extra tokens.
    epochs: how often its tokens were read before this phase, and with it. from_remainder: samples
    of the unread part of epochs that were open where lengths or lanes changed. carried_tokens:
    tokens of that part, if it begins in this phase. unused_tokens: its end, too short for a sample
    until the next change.
    """

    dataset: str
    share: float
    samples: int
    tokens: int
    epochs: tuple[float, float]
    from_remainder: int
    carried_tokens: int
    unused_tokens: int


@dataclass(frozen=True, kw_only=True)
class PhaseUsage:
    """Samples [first_sample, stop) of one phase, and what they take from its datasets. excluded:
    how many of them no step reads.
    """

    phase: int
    first_sample: int
    stop: int
    excluded: int
    sequence_length: int
    lanes: int | None
    datasets: tuple[DatasetUsage, ...]

    @property
    def samples(self) -> int:
        """How many samples are read."""
        return self.stop - self.first_sample - self.excluded


def sample_usage(
    provenance: Provenance, end: int, excluded_ranges: Sequence[Span] = ()
) -> list[PhaseUsage]:
    """What each phase takes from its datasets up to sample `end`. excluded_ranges: ranges that no
    step reads, and that do not overlap.

    Cost: some milliseconds a phase in the stream order; in Megatron's a scan of the index of a
    blend.
    """
    read: dict[int, int] = {}
    phases = []
    segments = provenance.source.segments
    ends = [segment.first_sample for segment in segments[1:]] + [end]
    for phase, (segment, segment_end) in enumerate(zip(segments, ends, strict=True)):
        first = segment.first_sample
        stop = min(end, segment_end)
        if first >= stop:
            continue
        length = segment.config.sequence_length
        spans = list(_unexcluded(first, stop, excluded_ranges))
        usage = segment.usage(spans)
        datasets = []
        numbers = segment.dataset_numbers.tolist()
        columns = zip(numbers, segment.shares, segment.tokens_per_epoch, usage, strict=True)
        for number, share, tokens_per_epoch, counts in columns:
            tokens = int(counts["samples"]) * length
            before = read.get(number, 0)
            read[number] = before + tokens
            size = max(1, tokens_per_epoch)
            datasets.append(
                DatasetUsage(
                    dataset=provenance.dataset_name(number),
                    share=share,
                    tokens=tokens,
                    epochs=(before / size, read[number] / size),
                    **{name: int(counts[name]) for name in USAGE.names or ()},
                )
            )
        phases.append(
            PhaseUsage(
                phase=phase,
                first_sample=first,
                stop=stop,
                excluded=stop - first - sum(last - start for start, last in spans),
                sequence_length=length,
                lanes=segment.lanes or None,
                datasets=tuple(datasets),
            )
        )
    return phases


def _unexcluded(first: int, stop: int, excluded_ranges: Sequence[Span]) -> Iterator[Span]:
    """The spans of [first, stop) that are not excluded, in order."""
    for skip_start, skip_stop in sorted(excluded_ranges):
        if skip_stop <= first or skip_start >= stop:
            continue
        if first < skip_start:
            yield first, skip_start
        first = skip_stop
    if first < stop:
        yield first, stop
