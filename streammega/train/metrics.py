"""What a run reports: metrics.jsonl, one object a step, and a line in the log now and then."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends to `metrics.jsonl`; steps repeated after a resume are appended again."""

    def __init__(self, folder: Path, log_interval: int, total: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._interval, self._total = folder / "metrics.jsonl", log_interval, total
        self._end_torn_line()

    def write(self, record: dict[str, Any]) -> None:
        """One line, flushed: a killed run keeps every step that it finished."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        step = record["step"]
        if step % self._interval == 0 or step == self._total or "valid_loss" in record:
            numbers = " ".join(f"{name} {_short(value)}" for name, value in record.items() if isinstance(value, float))
            log.info("step %d/%d %s", step, self._total, numbers)

    def _end_torn_line(self) -> None:
        """A kill in the middle of a write must not spoil the next line."""
        if self._path.exists() and self._path.stat().st_size and not self._path.read_bytes().endswith(b"\n"):
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics.jsonl, in order."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # torn by a kill; its step was written again
    return records


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
