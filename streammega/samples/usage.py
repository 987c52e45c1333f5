"""What each phase of a split takes from its datasets, in every order: samples, tokens, epochs, and
what of them was cut anew. Computed of the order; no sample is located.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from streammega.errors import ConfigError
from streammega.order.epoch_layout import Integers
from streammega.order.stream_order import StreamOrder
from streammega.samples.blended import BlendedDataset
from streammega.samples.gpt import GPTDataset
from streammega.samples.lanes import StreamSource
from streammega.samples.phases import PhasedSource
from streammega.samples.provenance import Provenance
from streammega.samples.restarted import RestartedPhases, datasets_of


@dataclass(frozen=True, kw_only=True)
class SegmentUsage:
    """What samples of one phase take from each of its datasets; int64 [datasets] each.

    samples: how many. from_remainder: of these, those of what former epochs had left, cut anew.
    first_epoch, last_epoch: all others are of epochs [first, last), by their numbers, which are not
    used again when a dataset begins anew; equal where there are none. carried_tokens: tokens that
    former epochs had left, where this phase cuts them anew; unused_tokens: of these, those that make
    no sample and wait for the next change. dropped_tokens: tokens that former epochs had left and a
    restart passes over.
    """

    samples: Integers
    from_remainder: Integers
    first_epoch: Integers
    last_epoch: Integers
    carried_tokens: Integers
    unused_tokens: Integers
    dropped_tokens: Integers


def usage_of(order: StreamOrder, spans: Sequence[tuple[int, int]]) -> SegmentUsage:
    """What [start, stop) spans of samples of a phase, in their order, take from its datasets.

    Cost: two walks of the blending tree in each lane for every span, whatever their length.
    """
    columns = len(order.datasets)
    usage = SegmentUsage(
        samples=np.zeros(columns, np.int64),
        from_remainder=np.zeros(columns, np.int64),
        first_epoch=order.first_epochs.copy(),
        last_epoch=order.first_epochs.copy(),
        carried_tokens=np.zeros(columns, np.int64),
        unused_tokens=np.zeros(columns, np.int64),
        dropped_tokens=np.zeros(columns, np.int64),
    )
    remainder_draws = np.zeros((order.lanes, columns), np.int64)
    for column, remainder in enumerate(order.remainders):
        if remainder is not None:
            remainder_draws[:, column] = remainder.lane_counts
    for start, stop in spans:
        before = order.counts(start - order.first_sample)
        after = order.counts(stop - order.first_sample)
        usage.samples[:] += (after - before).sum(axis=0)
        cut_anew = np.minimum(after, remainder_draws) - np.minimum(before, remainder_draws)
        usage.from_remainder[:] += cut_anew.sum(axis=0)
    if spans:
        before = order.counts(spans[0][0] - order.first_sample)
        after = order.counts(spans[-1][1] - order.first_sample)
        _add_epochs(order, before - remainder_draws, after - remainder_draws, usage)
    for column in range(columns):
        left, is_read = order.left_before(column)
        if left is not None and is_read:
            usage.carried_tokens[column] = left.tokens
            usage.unused_tokens[column] = left.tokens - left.samples * left.length
        elif left is not None:
            usage.dropped_tokens[column] = left.tokens
    return usage


def _add_epochs(order: StreamOrder, before: Integers, after: Integers, usage: SegmentUsage) -> None:
    """Add the epochs that lanes draw from between two counts of their draws, [lanes, datasets];
    negative counts are of remainders.
    """
    before = np.maximum(before, 0)
    after = np.maximum(after, 0)
    draws = after > before
    for column in np.flatnonzero(draws.any(axis=0)).tolist():
        here = draws[:, column]
        epochs = order.layout.epochs_of_draws(before[:, column], column)
        usage.first_epoch[column] += epochs[here].min()
        usage.last_epoch[column] += order.epochs_of(np.where(here, after[:, column], 0), column)


Span = tuple[int, int]
"""Samples [start, stop)."""


@dataclass(frozen=True, kw_only=True)
class DatasetUsage:
    """What a phase takes from one of its datasets.

    share: its part of the weights, over the samples that were dealt. samples, tokens: how many are
    read of it, a sample's last label not counted. epochs: how often its tokens were read in all
    phases before this one, and with it. from_remainder: of the samples those of what epochs in
    progress had left where lengths or lanes changed. carried_tokens, unused_tokens: tokens that were
    left at the beginning of the phase, if it cuts them anew, and those that wait for the next
    change. dropped_tokens: tokens that its `restart` passes over.
    """

    dataset: str
    share: float
    samples: int
    tokens: int
    epochs: tuple[float, float]
    from_remainder: int = 0
    carried_tokens: int = 0
    unused_tokens: int = 0
    dropped_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SampleUsage:
    """One phase of a split, up to a sample: its samples [first_sample, stop), of which `skipped`
    are read by no step, and what they take from its datasets.
    """

    phase: int
    first_sample: int
    stop: int
    skipped: int
    sequence_length: int
    lanes: int | None
    datasets: tuple[DatasetUsage, ...]

    @property
    def samples(self) -> int:
        """Those that are read."""
        return self.stop - self.first_sample - self.skipped


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """What spans of samples take from the datasets of a phase, int64 [datasets] each.

    numbers: of the datasets over all phases. tokens_of: tokens of the split of each.
    """

    numbers: Sequence[int]
    shares: Sequence[float]
    samples: Integers
    tokens_of: Sequence[int]
    others: Sequence[dict[str, int]]


def sample_usage(provenance: Provenance, end: int, skips: Sequence[Span] = ()) -> list[SampleUsage]:
    """What each phase that begins before sample `end` takes from its datasets up to there. skips:
    ranges that no step reads, none of which overlaps another.

    Raises ConfigError for an order in which it cannot be told. Cost: some milliseconds a phase in
    the stream order; in Megatron's a pass over the index of a blend.
    """
    read: dict[int, int] = {}
    found = []
    for number, (first, stop, length, lanes) in enumerate(_phases_before(provenance, end)):
        spans = list(_unskipped(first, stop, skips))
        taken = _taken(provenance, number, spans)
        datasets = []
        for column, dataset in enumerate(taken.numbers):
            tokens = int(taken.samples[column]) * length
            before = read.get(dataset, 0)
            read[dataset] = before + tokens
            size = max(1, taken.tokens_of[column])
            datasets.append(
                DatasetUsage(
                    dataset=provenance.dataset_name(dataset),
                    share=taken.shares[column],
                    samples=int(taken.samples[column]),
                    tokens=tokens,
                    epochs=(before / size, read[dataset] / size),
                    **taken.others[column],
                )
            )
        found.append(
            SampleUsage(
                phase=number,
                first_sample=first,
                stop=stop,
                skipped=stop - first - sum(b - a for a, b in spans),
                sequence_length=length,
                lanes=lanes,
                datasets=tuple(datasets),
            )
        )
    return found


def _phases_before(provenance: Provenance, end: int) -> Iterator[tuple[int, int, int, int | None]]:
    """(first sample, end, sequence length, lanes) of each phase that begins before a sample."""
    source = provenance.source
    length = source.config.sequence_length
    shapes: list[tuple[int, int, int | None]] = [(0, length, None)]
    if isinstance(source, StreamSource | PhasedSource):
        orders = _orders(source)
        shapes = [(order.first_sample, order.sequence_length, order.lanes) for order in orders]
    elif isinstance(source, RestartedPhases):
        shapes = [
            (phase.first_sample, phase.config.sequence_length, None) for phase in source.phases
        ]
    firsts = [first for first, _, _ in shapes]
    for (first, length, lanes), following in zip(shapes, [*firsts[1:], end], strict=True):
        if first < end:
            yield first, min(end, following), length, lanes


def _unskipped(first: int, stop: int, skips: Sequence[Span]) -> Iterator[Span]:
    """The spans of [first, stop) that are not skipped, in order."""
    for skip_start, skip_stop in sorted(skips):
        if skip_stop <= first or skip_start >= stop:
            continue
        if first < skip_start:
            yield first, skip_start
        first = skip_stop
    if first < stop:
        yield first, stop


def _taken(provenance: Provenance, phase: int, spans: Sequence[Span]) -> _Taken:
    source = provenance.source
    if isinstance(source, StreamSource | PhasedSource):
        return _taken_of_stream(_orders(source)[phase], spans)
    first = 0
    numbers: Sequence[int] | None = None
    if isinstance(source, RestartedPhases):
        of_phase = source.phases[phase]
        first = of_phase.first_sample
        numbers = of_phase.numbers.tolist()
        source = of_phase.samples
    if not isinstance(source, GPTDataset | BlendedDataset):
        raise ConfigError(f"samples of a {type(source).__name__} cannot be told by dataset")
    own_spans = [(start - first, stop - first) for start, stop in spans]
    return _taken_of_index(source, numbers, own_spans)


def _orders(source: StreamSource | PhasedSource) -> Sequence[StreamOrder]:
    """The order of each phase."""
    return source.order.phases if isinstance(source, PhasedSource) else [source.order]


def _taken_of_stream(order: StreamOrder, spans: Sequence[Span]) -> _Taken:
    usage = usage_of(order, spans)
    columns = ("from_remainder", "carried_tokens", "unused_tokens", "dropped_tokens")
    others = [
        {name: int(getattr(usage, name)[column]) for name in columns}
        for column in range(len(order.datasets))
    ]
    return _Taken(
        numbers=order.dataset_numbers.tolist(),
        shares=_shares(order, spans),
        samples=usage.samples,
        tokens_of=[sum(part.tokens for part in dataset.parts) for dataset in order.datasets],
        others=others,
    )


def _shares(order: StreamOrder, spans: Sequence[Span]) -> list[float]:
    """The share of each dataset in the weights, over spans of samples: a schedule changes them."""
    starts = [order.first_of_segment(segment) for segment in range(len(order.schedule))]
    ends = [*starts[1:], None]
    total = np.zeros(len(order.datasets))
    for (_, weights), start, end in zip(order.schedule, starts, ends, strict=True):
        relative = np.array(weights, np.float64) / max(weights)
        samples = sum(
            max(0, (last if end is None else min(last, end)) - max(first, start))
            for first, last in spans
        )
        total += samples * relative / relative.sum()
    dealt = sum(last - first for first, last in spans)
    shares: list[float] = (total / max(1, dealt)).tolist()
    return shares


def _taken_of_index(
    source: GPTDataset | BlendedDataset, numbers: Sequence[int] | None, spans: Sequence[Span]
) -> _Taken:
    """Of Megatron's built indices, which are looked through."""
    datasets = datasets_of(source)
    counts = np.zeros(len(datasets), np.int64)
    shares = [1.0]
    for start, stop in spans:
        if isinstance(source, BlendedDataset):
            counts += np.bincount(source.dataset_index[start:stop], minlength=len(datasets))
        else:
            counts += stop - start
    if isinstance(source, BlendedDataset):
        total = sum(source.weights)
        shares = [float(weight / total) for weight in source.weights]
    return _Taken(
        numbers=range(len(datasets)) if numbers is None else numbers,
        shares=shares,
        samples=counts,
        tokens_of=[dataset.shape.tokens_per_epoch for dataset in datasets],
        others=[{} for _ in datasets],
    )
