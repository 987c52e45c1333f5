"""matplotlib without a screen, and one-line plots for terminals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streammega.errors import ConfigError

BLOCKS = "▁▂▃▄▅▆▇█"


def pyplot() -> Any:
    """matplotlib.pyplot on a file-only backend. Raises ConfigError when it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'streammega[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values as one line of block characters, averaged into at most `width` cells."""
    if not values:
        return ""
    cells = min(width, len(values))
    edges = [len(values) * i // cells for i in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    low = min(means)
    high = max(means)
    span = (high - low) or 1.0
    return "".join(
        BLOCKS[min(int((mean - low) / span * len(BLOCKS)), len(BLOCKS) - 1)] for mean in means
    )


def write_lengths(histogram: Sequence[int], title: str, path: str) -> None:
    """A histogram of document lengths, bin b for [2^b, 2^(b+1)) tokens, as a PNG."""
    last = max((number for number, count in enumerate(histogram) if count), default=0) + 1
    figure, axes = pyplot().subplots(figsize=(8, 4))
    axes.stairs(list(histogram[:last]), [2.0**edge for edge in range(last + 1)], fill=True)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens per document")
    axes.set_ylabel("documents")
    axes.set_title(title)
    figure.savefig(path, dpi=120, bbox_inches="tight")


UNITS = {
    "loss": "loss (nats a token)",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_s": "tokens a second",
}
"""What is drawn in each of the four fields, by its first curve, and what its axis says."""


def write_run(records: Sequence[Mapping[str, Any]], title: str, path: str) -> None:
    """Loss (of training, validation sets and sources), gradient norm, learning rate, speed and
    waiting by step, as a PNG.

    Steps that a restart gave up are not drawn, where it began again is marked; records are those of
    metrics.jsonl.
    """
    steps = latest(records)
    back = restarts(records)
    figure, axes = pyplot().subplots(2, 2, figsize=(12, 8), layout="constrained")
    fields = {
        "loss": ["loss", "valid_loss", "valid_loss_of", "source_loss"],
        "grad_norm": ["grad_norm"],
        "lr": ["lr"],
        "tokens_per_s": ["tokens_per_s"],
    }
    for own, (name, names) in zip(axes.flat, fields.items(), strict=True):
        _draw_field(own, _curves(steps, names), back)
        own.set_ylabel(UNITS[name])
    waiting = axes[1][1].twinx()
    waits = _curves(steps, ["data_wait_s"])
    if waits:
        waiting.plot(*zip(*waits["data_wait_s"], strict=True), color="tab:red", linewidth=0.7)
        waiting.set_ylabel("seconds waited for data", color="tab:red")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw_field(
    axes: Any, curves: Mapping[str, list[tuple[int, float]]], back: Sequence[int]
) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, points in curves.items():
        axes.plot(
            *zip(*points, strict=True),
            label=name,
            marker="o" if name.startswith("valid") else None,
            markersize=3,
        )
    for number, step in enumerate(back):
        axes.axvline(
            step, color="gray", linestyle=":", linewidth=1, label=None if number else "restart"
        )
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no half of a step
    if len(curves) > 1 or back:
        axes.legend(loc="best", fontsize="small")


def latest(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of the run as it is now, in order of steps.

    Where it went back to a step, all that came after that step was given up.
    """
    kept: list[Mapping[str, Any]] = []
    for record in records:
        while kept and int(kept[-1]["step"]) >= int(record["step"]):
            kept.pop()
        kept.append(record)
    return kept


def restarts(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """The steps, in order, with which a run began again after it had been further; those given up
    later are left out.
    """
    found: list[int] = []
    last = 0
    for record in records:
        step = int(record["step"])
        if step <= last:
            found = [*(before for before in found if before < step), step]
        last = step
    return found


def _curves(
    steps: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, list[tuple[int, float]]]:
    """The points of all curves of these names; those of sets and sources have names
    of their own.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for record in steps:
        for name in names:
            value = record.get(name)
            values = (
                {f"{name.removesuffix('_of')} {key}": v for key, v in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
            for key, number in values.items():
                if isinstance(number, (int, float)):
                    found.setdefault(key, []).append((int(record["step"]), float(number)))
    return found
