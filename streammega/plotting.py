"""matplotlib without a screen, and one-line plots for terminals."""

from __future__ import annotations

from collections.abc import Sequence
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
