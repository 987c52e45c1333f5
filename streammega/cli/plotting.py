"""The command that draws a run; matplotlib without a screen, and one-line plots for terminals."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from streammega.cli.options import AsJson, StorageFile, StorageOption, storage_config
from streammega.cli.render import show_report, write_output
from streammega.errors import ConfigError
from streammega.errors.extras import import_extra
from streammega.errors.words import pluralize

BLOCKS = "▁▂▃▄▅▆▇█"


def pyplot() -> Any:
    """matplotlib.pyplot on a file-only backend. Raises ConfigError when it is not installed."""
    matplotlib = import_extra("matplotlib", "plot", "plots need matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: str) -> None:
    """Write a figure as its file's name says, or as a PNG. Raises ConfigError, OSError."""
    check_plot_name(path)
    image = io.BytesIO()
    kind = Path(path).suffix.lower().removeprefix(".") or "png"
    figure.savefig(image, format=kind, dpi=120, bbox_inches="tight")
    write_output(path, image.getvalue())


def check_plot_name(path: str) -> None:
    """Raise ConfigError for a plot that cannot be written, for its name or for want of matplotlib."""
    formats = pyplot().Figure().canvas.get_supported_filetypes()
    suffix = Path(path).suffix
    if suffix and suffix[1:].lower() not in formats:
        raise ConfigError(f"{path}: {suffix} is no format of plots; write .png, .svg or .pdf")


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values as one line of block characters, averaged into at most `width` cells."""
    if not values:
        return ""
    cells = min(width, len(values))
    bounds = [len(values) * cell // cells for cell in range(cells + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(bounds)]
    low = min(means)
    high = max(means)
    span = (high - low) or 1.0
    line = ""
    for mean in means:
        height = int((mean - low) / span * len(BLOCKS))
        # the highest is at the very end of the last block
        line += BLOCKS[min(height, len(BLOCKS) - 1)]
    return line


def draw_lengths(counts: Any, edges: Any, title: str, path: str) -> None:
    """Documents of each range of lengths, as a PNG. Raises ConfigError without matplotlib."""
    figure, axes = pyplot().subplots(figsize=(8, 4))
    axes.stairs(list(counts), list(edges), fill=True)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens per document")
    axes.set_ylabel("documents")
    axes.set_title(title)
    save(figure, path)


@dataclass(frozen=True)
class PlotField:
    """One of the fields of a run's plot."""

    title: str
    """What its axis says."""
    curves: tuple[str, ...]
    """Names in the records."""
    is_noisy: bool = True
    """Whether the mean over a fiftieth of the run says more than its steps."""


FIELDS = (
    PlotField("loss (nats a token)", ("loss", "valid_loss", "valid_loss_of", "source_loss")),
    PlotField("gradient norm", ("grad_norm",)),
    PlotField("learning rate", ("lr",), is_noisy=False),
    PlotField("tokens per second", ("tokens_per_s",)),
    PlotField("seconds waited for data", ("data_wait_s",)),
)
"""From left to right, and down."""
SMOOTHED = 50
"""A noisy curve of more points than this is drawn faint, with its mean over a fiftieth of the run on top."""


def write_run(records: Sequence[Mapping[str, Any]], title: str, path: str) -> None:
    """Loss (of training, validation sets and sources), gradient norm, learning rate, speed and
    waiting by step, as a PNG.

    records: those of metrics.jsonl. Steps that a restart ran again are drawn once, and each restart
    is marked.
    """
    steps = latest_records(records)
    restart_steps = find_restarts(records)
    figure, grid = pyplot().subplots(3, 2, figsize=(12, 11), layout="constrained")
    for axes, field in zip(grid.flat, FIELDS, strict=False):
        _draw_field(axes, field, _curves(steps, field.curves), restart_steps)
        axes.set_ylabel(field.title)
    for axes in grid.flat[len(FIELDS) :]:
        axes.set_axis_off()
    figure.suptitle(title)
    save(figure, path)


def _draw_field(
    axes: Any,
    field: PlotField,
    curves: Mapping[str, list[tuple[int, float]]],
    restart_steps: Sequence[int],
) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, points in curves.items():
        # validation is rare, so its points are marked
        marker = "o" if name.startswith("valid") else None
        numbers, values = zip(*points, strict=True)
        is_smoothed = field.is_noisy and len(points) > SMOOTHED
        label = None if is_smoothed else name
        alpha = 0.3 if is_smoothed else 1.0
        (line,) = axes.plot(numbers, values, label=label, marker=marker, markersize=3, alpha=alpha)
        if is_smoothed:
            axes.plot(numbers, smooth(values), label=name, color=line.get_color())
    for place, step in enumerate(restart_steps):
        # once in the legend, however many there were
        label = None if place else "restart"
        axes.axvline(step, color="gray", linestyle=":", linewidth=1, label=label)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # steps are whole
    if len(curves) > 1 or restart_steps:
        axes.legend(loc="best", fontsize="small")


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of the values around each: a few of them, or a fiftieth of many; fewer at both ends."""
    reach = max(1, len(values) // SMOOTHED) // 2 + 1
    sums = [0.0, *accumulate(values)]
    means = []
    for place in range(len(values)):
        start = max(0, place - reach)
        stop = min(len(values), place + reach + 1)
        means.append((sums[stop] - sums[start]) / (stop - start))
    return means


def latest_records(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of the run as it is now, in order of steps.

    Where the run went back to a step, its earlier records from that step on are dropped.
    """
    kept: list[Mapping[str, Any]] = []
    for record in records:
        while kept and int(kept[-1]["step"]) >= int(record["step"]):
            kept.pop()
        kept.append(record)
    return kept


def find_restarts(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """The steps, in order, at which a run began again after it had been further.

    A restart is left out if a later restart went back to or before its step.
    """
    steps: list[int] = []
    last = 0
    for record in records:
        step = int(record["step"])
        if step <= last:
            # restarts at later steps belong to records that are dropped
            steps = [earlier for earlier in steps if earlier < step]
            steps.append(step)
        last = step
    return steps


def _curves(
    steps: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of all curves of these names; those of sets and sources have names of their
    own.
    """
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in steps:
        for name in names:
            value = record.get(name)
            values = {name: value}
            if isinstance(value, dict):
                # {"valid_loss_of": {"code": 2.1}} is a point of "valid_loss code"
                prefix = name.removesuffix("_of")
                values = {f"{prefix} {of_what}": number for of_what, number in value.items()}
            for curve, number in values.items():
                if isinstance(number, (int, float)):
                    point = (int(record["step"]), float(number))
                    curves.setdefault(curve, []).append(point)
    return curves


def plot(
    run: Annotated[
        str, typer.Argument(help="A run's out_dir, with metrics.jsonl in it; a folder or a URL.")
    ],
    out: Annotated[
        str | None,
        typer.Option(help="Where the PNG is written; by default it is run.png in the folder."),
    ] = None,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Draw what a run logged: losses, gradient norm, learning rate, speed and waiting."""
    from streammega.storage.object_ops import read_if_exists
    from streammega.train.run_log import METRICS, parse_metrics

    is_url = "://" in run
    data: bytes | None = None
    if is_url:
        place = f"{run.rstrip('/')}/{METRICS}"
        data = read_if_exists(place, storage_config(storage, storage_file, looks_only=True))
        title = run.rstrip("/").rpartition("/")[2]
        target = out or "run.png"
    else:
        path = Path(run, METRICS) if Path(run).is_dir() else Path(run)
        place = str(path)
        data = path.read_bytes() if path.is_file() else None
        title = path.parent.name
        target = out or str(path.parent / "run.png")
    check_plot_name(target)
    if data is None:
        raise ConfigError(
            f"{place}: does not exist; give the out_dir of a run that has logged a step"
        )
    records = parse_metrics(data)
    steps = [item for item in latest_records(records) if isinstance(item.get("loss"), int | float)]
    if not steps:
        raise ConfigError(f"{place}: holds no step; let the run finish one")
    losses = [float(record["loss"]) for record in steps]
    restarts = find_restarts(records)
    begun_again = ""
    if restarts:
        begun_again = f" (begun again with step {', '.join(map(str, restarts))})"
    write_run(records, f"{title}: {len(steps)} steps", target)
    summary = (
        f"{pluralize(len(steps), 'step')}{begun_again}, "
        f"loss {losses[0]:.4g} to {losses[-1]:.4g}  {sparkline(losses)}\n"
        f"plot written to {target}"
    )
    report = {
        "steps": len(steps),
        "restarts": restarts,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "plot": target,
    }
    show_report(report if as_json else {}, summary=summary, as_json=as_json)
