"""The command `order-report`, which measures an order before a run: shuffle quality, blend drift,
and what each rank would fetch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from streammega.cli.options import (
    GLOBAL_BATCH_SIZE,
    OF_DATASETS,
    AsJson,
    DataWords,
    GlobalBatchSize,
    OrderName,
    Seed,
    SequenceLength,
    Shares,
    StorageFile,
    StorageOption,
    load_data,
    show_progress,
)
from streammega.cli.render import Report, print_text
from streammega.cli.trace import open_run, show_phases
from streammega.config import MAX_SAMPLES, ORDERS, DataConfig
from streammega.errors import ConfigError

if TYPE_CHECKING:
    from streammega.order.quality import FetchPlan
    from streammega.order.schedule import TrainingSchedule
    from streammega.order.stream_order import StreamOrder
    from streammega.samples.source import SampleSource, SegmentSource
    from streammega.storage.progress import ProgressObserver

DRIFT_POINTS = 200
"""Prefixes at which a blend is compared with its target, evenly spread."""
STEPS_OF_MEASURING = 4
FAR_MORE = 1.5
"""Bytes fetched for each byte used, above which a note says why."""
RANKS = 8


def order_report(
    words: DataWords,
    ranks: Annotated[
        int | None, typer.Option(help="Data-parallel ranks.", show_default=str(RANKS))
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Global batches to look at, from the first of each phase on.")
    ] = 256,
    plot: Annotated[str | None, typer.Option(help="Write the figures to this PNG.")] = None,
    sequence_length: SequenceLength = None,
    global_batch_size: GlobalBatchSize = None,
    order: OrderName = None,
    split: Shares = None,
    seed: Seed = None,
    lanes: Annotated[
        int | None,
        typer.Option(help="Lanes of the stream order.", rich_help_panel=OF_DATASETS),
    ] = None,
    block_kib: Annotated[
        int | None,
        typer.Option(
            help="KiB of a block of the stream order; default as in a run.",
            rich_help_panel=OF_DATASETS,
        ),
    ] = None,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Is the shuffle good enough? Measures it before a run, with blend drift, requests and bytes.

    For a run's file it measures each phase. It reads no tokens.
    """
    options = {
        "sequence_length": sequence_length,
        "global_batch_size": global_batch_size,
        "order": order,
        "split": split,
        "seed": seed,
        "lanes": lanes,
        "block_kib": block_kib,
    }
    size = GLOBAL_BATCH_SIZE if global_batch_size is None else global_batch_size
    if steps * size > MAX_SAMPLES:
        raise ConfigError(
            f"--steps {steps:,} of --global-batch-size {size:,} samples are more than the "
            f"{MAX_SAMPLES:,} of an order; lower one of them"
        )
    settings = {
        "shuffle_lanes": lanes,
        "shuffle_block_bytes": block_kib and block_kib * 1024,
        "num_samples": (steps * size, 0, 0),
    }
    config, of_file = load_data(
        words, storage, storage_file, options=options, settings=settings, looks_only=True
    )
    notes = []
    if ranks is None:
        ranks = RANKS
        if of_file:
            notes.append(
                f"a run's file does not name the number of data-parallel ranks; {ranks} are assumed: "
                "give --ranks"
            )
    with show_progress("opening") as progress:
        if of_file is None:
            phases = [measure_order(config, "train", size, ranks, steps, progress)]
        else:
            run = open_run(of_file, "train", None)
            source = run.provenance.source
            phases = measure_phases(source, run.schedule, ranks, steps, run.end, progress)
    if plot and len(phases) > 1:
        raise ConfigError(
            f"--plot: draws one order, and {words[0]} has {len(phases)} phases; leave it out"
        )
    values = [measured.report for measured in phases]
    show_phases({"ranks": ranks, "notes": notes, "phases": values}, as_json=as_json)
    if plot:
        write_plot(phases[0], plot)
        print_text(f"plot written to {plot}", to_stderr=as_json)


class MeasuredOrder(NamedTuple):
    """Figures of the samples at the beginning of a phase."""

    report: Report
    """The report, for JSON and for people. A figure is null if there are too few samples."""
    drift: list[tuple[int, float]]
    """(samples so far, largest distance of a dataset from its share, in samples) of a blend."""


def measure_order(
    config: DataConfig,
    split: str,
    global_batch_size: int,
    dp_size: int,
    steps: int,
    progress: ProgressObserver,
) -> MeasuredOrder:
    """Measure `steps` global batches of an order from its plan; no token is read.

    With phases, it measures the first one, to its end at most. Raises ConfigError for sizes below 1.
    """
    from streammega.order.schedule import training_schedule
    from streammega.samples.open import open_source

    _check_sizes(global_batch_size=global_batch_size, ranks=dp_size, steps=steps)
    source = open_source(config, split, global_batch_size)
    schedule = training_schedule(config, split, global_batch_size)
    end = steps * global_batch_size
    return measure_phases(source, schedule, dp_size, steps, end, progress)[0]


def measure_phases(
    source: SampleSource,
    schedule: TrainingSchedule,
    dp_size: int,
    steps: int,
    end: int,
    progress: ProgressObserver,
) -> list[MeasuredOrder]:
    """The same of every phase that begins before sample `end`, from its first sample on.

    A rank gets every `dp_size`-th sample. Raises ConfigError for sizes below 1.
    """
    from streammega.samples.segments import short_names

    _check_sizes(ranks=dp_size, steps=steps)
    starts = [segment.first_sample for segment in source.segments]
    if source.num_samples is not None:
        end = min(end, source.num_samples)
    measured = []
    begun = sum(start < end for start in starts)
    progress.begin("measuring", begun * STEPS_OF_MEASURING, " steps")
    for number, start in enumerate(starts[:begun]):
        stop = min([end, *starts[number + 1 : number + 2]])
        batch = schedule.size_at(start)
        ids = np.arange(start, min(stop, start + steps * batch))
        phase = number if len(starts) > 1 else None
        segment = source.segments[number]
        names = short_names(source.prefixes)
        measured.append(_measure(segment, names, ids, batch, dp_size, phase, progress))
    return measured


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} is {size}; it must be at least 1")


def _measure(
    segment: SegmentSource,
    names: Sequence[str],
    ids: NDArray[np.int64],
    global_batch_size: int,
    dp_size: int,
    phase: int | None,
    progress: ProgressObserver,
) -> MeasuredOrder:
    """Figures of samples of one phase, in STEPS_OF_MEASURING steps."""
    from streammega.samples.shuffling import mixing_report, shuffle_figures

    config = segment.config
    samples = len(ids)
    extents = segment.locate(ids)
    progress.advance(1)
    figures = shuffle_figures(segment, ids, global_batch_size)
    progress.advance(1)
    mixing = mixing_report(segment, int(ids[0]), global_batch_size, names)
    order = segment.order
    plan = _plan_of_a_rank(config, segment, order, ids[ids % dp_size == 0])
    progress.advance(1)
    report: Report = {
        "phase": phase,
        "first_sample": int(ids[0]),
        "samples": samples,
        "lanes": None if order is None else order.lanes,
        "mixing": mixing,
        "shuffling": figures,
        "each_rank": None,
        "notes": _notes(samples, figures, plan),
    }
    if plan is not None:
        report["each_rank"] = {
            "requests": plan.requests,
            "fetched_bytes": plan.fetched_bytes,
            "fetched_for_each_byte_used": plan.amplification,
            "most_bytes_of_open_blocks": 0 if order is None else _open_bytes(order, dp_size),
        }
    if order is not None:
        report["notes"] += _notes_on_columns(segment, order, dp_size)
    drift = _blend_drift(extents.dataset[extents.row_splits[:-1]], order)
    if drift:
        report["blend"] = {
            "most_samples_from_its_target": max(distance for _, distance in drift),
            "at_any_of_prefixes": len(drift),
        }
    progress.advance(1)
    return MeasuredOrder(report, drift)


def _plan_of_a_rank(
    config: DataConfig, segment: SegmentSource, order: StreamOrder | None, ids: NDArray[np.int64]
) -> FetchPlan | None:
    """What one rank would fetch for its samples.

    In the stream order it fetches whole blocks, one open in each lane; else each sample by itself.
    None where a small dataset is fetched as a whole, or lanes share the samples of one.
    """
    from streammega.order.quality import fetch_plan
    from streammega.storage.open import is_remote

    most_bytes = config.storage.tuning.resident_bytes
    numbers = segment.dataset_numbers.tolist()
    for number, tokens in zip(numbers, segment.tokens_per_epoch, strict=True):
        file = segment.files[number][0]
        stays = file.dtype.itemsize * tokens <= most_bytes and is_remote(file.url)
        if stays and ORDERS[config.order].is_shuffled:
            return None
    if order is not None and (order.lanes_per_run > 1).any():
        return None
    itemsize = max(file.dtype.itemsize for files in segment.files for file in files)
    holders = ids
    block_tokens = config.sequence_length
    if order is not None:
        holders = order.lane_of(ids)
        block_tokens = order.shuffle_block_bytes // itemsize
    extra_tokens = int(config.add_extra_token)
    return fetch_plan(segment.locate(ids), holders, itemsize, block_tokens, extra_tokens)


def _open_bytes(order: StreamOrder, dp_size: int, token_bytes: int | None = None) -> int:
    """The blocks that a rank has open, one of each dataset in each of its lanes. token_bytes: of a column;
    None: of ids.
    """
    itemsizes = np.array([token_bytes or dataset.itemsize for dataset in order.datasets])
    block_bytes = order.block_samples * order.sequence_length * itemsizes
    return order.lanes // dp_size * int(block_bytes.sum())


def _notes_on_columns(segment: SegmentSource, order: StreamOrder, dp_size: int) -> list[str]:
    """The columns whose open blocks have about no room next to those of ids and of columns before them."""
    from streammega.loading.memory_plan import BLOCK_SHARE

    room = segment.config.storage.memory_bytes * BLOCK_SHARE - _open_bytes(order, dp_size)
    notes = []
    for name, column in segment.stored_columns.items():
        open_bytes = _open_bytes(order, dp_size, column.token_bytes)
        if open_bytes <= room:
            room -= open_bytes
            continue
        sample_bytes = order.sequence_length * column.token_bytes
        notes.append(
            f"column {name}: its open blocks, {open_bytes:,} bytes, have no room in memory_bytes, so a "
            f"sample of it is one request of {sample_bytes:,} bytes"
        )
    return notes


def _notes(samples: int, figures: Sequence[Mapping[str, Any]], plan: FetchPlan | None) -> list[str]:
    """Explanations of figures that are missing or look wrong where data is small."""
    notes = []
    if any(value is None for row in figures for value in row.values()):
        notes.append(
            f"{samples:,} samples are too few for a figure, which is left out; give more --steps"
        )
    if plan is None:
        notes.append(
            "requests and bytes are not forecast: a dataset of up to 16 MiB, or with fewer than 32 "
            "samples for each lane, is fetched once and stays in memory, or is read by the sample "
            "where there is no room or ranks are many"
        )
    elif plan.amplification > FAR_MORE:
        notes.append(
            "more is fetched than used, since every lane has a block open, and so few samples "
            "take little: over a whole epoch each byte is fetched about once; look at more --steps"
        )
    return notes


def write_plot(measured: MeasuredOrder, path: str) -> None:
    """Figures against a full shuffle's, and of a blend its drift, as a PNG."""
    from streammega.cli.plotting import pyplot, save

    report, drift = measured
    columns = 2 if drift else 1
    figure = pyplot().figure(figsize=(12 if drift else 8, 4), layout="constrained")
    _draw_shuffling(figure.add_subplot(1, columns, 1), report["shuffling"])
    if drift:
        right = figure.add_subplot(1, columns, 2)
        right.plot(*zip(*drift, strict=True))
        right.set_title("Distance of the blend from its target")
        right.set_xlabel("samples so far")
        right.set_ylabel("samples too many or too few (largest of all datasets)")
    figure.suptitle(f"{report['samples']:,} samples")
    save(figure, path)


def _draw_shuffling(axes: Any, figures: Sequence[Mapping[str, Any]]) -> None:
    """A bar for each figure as a share of a full shuffle's, with the figures themselves, which
    are all where that is 0.
    """
    lengths = []
    for row, figure in enumerate(figures):
        ours, full = (figure[name] for name in ("this_order", "full_shuffle"))
        length = ours / full if ours is not None and full else 0.0
        words = ["too few samples" if value is None else f"{value:.4g}" for value in (ours, full)]
        axes.barh(textwrap.fill(figure["figure"], 34), length, color="C0")
        axes.text(length, row, f" {' of '.join(words)}", va="center", fontsize="small")
        lengths.append(length)
    axes.axvline(1.0, color="gray", linestyle="--")
    axes.set_xlim(0, 1.5 * max(1.0, *lengths))  # with room for the words after the longest bar
    axes.invert_yaxis()  # the first figure on top, as in the table
    axes.set_title("Shuffling")
    axes.set_xlabel("this order / full shuffle (1 is as good)")


def _blend_drift(dataset: NDArray[Any], order: StreamOrder | None) -> list[tuple[int, float]]:
    """(samples so far, largest distance of a dataset from its share, in samples) of a blend.

    dataset: the dataset of each sample, int [samples]. Empty without a blend.
    """
    if order is None or len(order.datasets) < 2:
        return []
    # datasets are numbered over all phases
    columns = np.zeros(int(order.dataset_numbers.max()) + 1, np.int64)
    columns[order.dataset_numbers] = np.arange(len(order.datasets))
    dataset = columns[dataset]
    shares = np.array(order.weights) / np.sum(order.weights)
    evenly_spread = np.linspace(1, len(dataset), DRIFT_POINTS).astype(np.int64)
    drift: list[tuple[int, float]] = []
    drawn = np.zeros(len(shares))
    before = 0
    for stop in np.unique(evenly_spread).tolist():
        drawn += np.bincount(dataset[before:stop], minlength=len(shares))
        drift.append((stop, float(np.abs(drawn - stop * shares).max())))
        before = stop
    return drift
