"""The reports of a run, on its first rank: metrics.jsonl with one object a step, and a line in the log
every few steps. Imports no torch: `streammega plot` uses it too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from streammega.config import StorageConfig
from streammega.config.validate import finite, parse_json
from streammega.errors.logs import get_logger
from streammega.errors.redaction import redact_urls
from streammega.storage.backends.local import with_space
from streammega.storage.open import is_remote, local_path
from streammega.storage.retry import RetryPolicy

log = get_logger(__name__)

METRICS = "metrics.jsonl"


class RunLog:
    """The records of a run in its `metrics_folder`. Steps that are repeated after a resume are appended
    again.
    """

    def __init__(
        self,
        out_dir: str,
        storage: StorageConfig,
        *,
        iters: int,
        log_interval: int = 1,
    ) -> None:
        self._policy = RetryPolicy.of(storage)
        self._iters = iters
        self._interval = log_interval
        self.is_waiting = False
        """Whether a record is being written: for a full disk it may take long."""
        folder = metrics_folder(out_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        written = self.path.read_bytes() if self.path.exists() else b""
        if written and not written.endswith(b"\n"):
            self._append("\n")  # a kill cut the last line short: the next record has its own

    def write(self, record: dict[str, Any]) -> None:
        """One line, flushed: a killed run keeps every step that it finished.

        Waits for space while the disk is full. Raises StorageError if it stays full, OSError.
        """
        self._append(json.dumps(finite(record)) + "\n")
        step = record["step"]
        numbers = scalars(record)
        is_due = step % self._interval == 0 or step == self._iters
        if is_due or was_evaluated(record):
            figures = " ".join(f"{name} {_short(value)}" for name, value in numbers.items())
            log.info("step %d/%d %s", step, self._iters, figures)

    def records(self) -> dict[int, dict[str, Any]]:
        """The last record of each step that has one."""
        records = read_metrics(self.path) if self.path.exists() else ()
        return {record["step"]: record for record in records}

    def _append(self, text: str) -> None:
        """Append to metrics.jsonl, again while the disk is full. Raises StorageError."""
        size = self.path.stat().st_size if self.path.exists() else 0

        def append() -> None:
            with open(self.path, "ab", buffering=0) as file:
                file.truncate(size)  # an attempt that failed may have written a part
                rest = text.encode()
                while rest:
                    rest = rest[os.write(file.fileno(), rest) :]

        self.is_waiting = True
        try:
            with_space(append, str(self.path), self._policy)
        finally:
            self.is_waiting = False


def metrics_folder(out_dir: str) -> Path:
    """Where the metrics of a run are: in its out_dir; for a URL, in a folder of its name under the current
    one, since nothing can be appended to objects.
    """
    if is_remote(out_dir):
        return Path(redact_urls(out_dir).partition("://")[2]).absolute()
    return Path(local_path(out_dir))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole records of a metrics.jsonl, in order."""
    return parse_metrics(path.read_bytes())


def parse_metrics(data: bytes) -> list[dict[str, Any]]:
    """All whole records of the bytes of a metrics.jsonl, in order: each has a `step`.

    A kill or a power failure may have torn some. A resumed run has written their steps again.
    """
    records = []
    for line in data.splitlines():
        with suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def was_evaluated(record: Mapping[str, Any]) -> bool:
    """Whether a record has losses of validation."""
    return any(name.startswith("valid_loss") for name in record)


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record; those of several sets or sources are called name/set."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, float):
            numbers[name] = value
        elif isinstance(value, dict):
            for set_name, number in value.items():
                if isinstance(number, float):
                    numbers[f"{name}/{set_name}"] = number
    return numbers


def _short(value: float) -> str:
    """Four digits; large numbers with all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
