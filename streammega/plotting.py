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
        raise ConfigError("plots need matplotlib: pip install 'streammega[demo]'") from None
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
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(int((mean - low) / span * len(BLOCKS)), len(BLOCKS) - 1)] for mean in means)


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


def write_run(records: Sequence[Mapping[str, Any]], title: str, path: str) -> None:
    """Loss (of training, validation sets and sources), gradient norm, learning rate, speed and waiting by step, as a PNG.

    Of steps that were trained twice the last is drawn; records are those of metrics.jsonl.
    """
    steps = latest(records)
    figure, axes = pyplot().subplots(2, 2, figsize=(12, 8))
    curves = {
        axes[0][0]: ["loss", "valid_loss", "valid_loss_of", "source_loss"],
        axes[0][1]: ["grad_norm"],
        axes[1][0]: ["lr"],
        axes[1][1]: ["tokens_per_s"],
    }
    for own, names in curves.items():
        for name, points in _curves(steps, names).items():
            own.plot(*zip(*points, strict=True), label=name, marker="o" if name.startswith("valid") else None, markersize=3)
        own.set_xlabel("step")
        own.legend()
    waiting = axes[1][1].twinx()
    waits = _curves(steps, ["data_wait_s"])
    if waits:
        waiting.plot(*zip(*waits["data_wait_s"], strict=True), color="tab:red", linewidth=0.7)
        waiting.set_ylabel("seconds waited for data", color="tab:red")
    figure.suptitle(title)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def latest(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last record of each step, in order of steps."""
    return [record for _, record in sorted({int(record["step"]): record for record in records}.items())]


def _curves(steps: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    """The points of all curves of these names; those of sets and sources have names of their own."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in steps:
        for name in names:
            value = record.get(name)
            values = (
                {f"{name.removesuffix('_of')} {key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
            )
            for key, number in values.items():
                if isinstance(number, (int, float)):
                    found.setdefault(key, []).append((int(record["step"]), float(number)))
    return found
