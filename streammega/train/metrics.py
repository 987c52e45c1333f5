"""What a run reports: metrics.jsonl, one object a step, TensorBoard where wanted, and a line in the
log now and then.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from streammega.errors import ConfigError

log = logging.getLogger(__name__)


class MetricsLog:
    """Appends to `metrics.jsonl`; steps repeated after a resume are appended again."""

    def __init__(
        self, folder: Path, log_interval: int, total: int, *, tensorboard: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        self._interval = log_interval
        self._total = total
        self._board = _open_board(folder / "tensorboard") if tensorboard else None
        self._end_torn_line()

    def write(self, record: dict[str, Any]) -> None:
        """One line, flushed: a killed run keeps every step that it finished."""
        line = json.dumps(finite(record))
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
        step = record["step"]
        numbers = scalars(record)
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
        is_due = step % self._interval == 0 or step == self._total
        was_evaluated = any(name.startswith("valid_loss") for name in record)
        if is_due or was_evaluated:
            told = [f"{name} {_short(value)}" for name, value in numbers.items()]
            log.info("step %d/%d %s", step, self._total, " ".join(told))

    def has(self, step: int) -> bool:
        """Whether a line of a step was written."""
        if not self._path.exists():
            return False
        return any(record.get("step") == step for record in read_metrics(self._path))

    @property
    def last_step(self) -> int:
        """The last step of which a line was written; 0: none."""
        if not self._path.exists():
            return 0
        return max((record.get("step", 0) for record in read_metrics(self._path)), default=0)

    def close(self) -> None:
        """Write out what TensorBoard has not written yet."""
        if self._board is not None:
            self._board.close()

    def _end_torn_line(self) -> None:
        """A kill in the middle of a write must not spoil the next line."""
        if not self._path.exists():
            return
        written = self._path.read_bytes()
        if written and not written.endswith(b"\n"):
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


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The figures of a record, those of several sets or sources as name/set."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, float):
            numbers[name] = value
        elif isinstance(value, dict):
            for set_name, number in value.items():
                if isinstance(number, float):
                    numbers[f"{name}/{set_name}"] = number
    return numbers


def finite(value: Any) -> Any:
    """The same with None for what JSON has no number for: an fp16 norm that overflowed, the loss of
    a run that diverged.
    """
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "train.tensorboard needs: pip install 'streammega[tensorboard]'"
        ) from None
    return SummaryWriter(str(folder))


def _short(value: float) -> str:
    """Four digits; of tokens a second and the like all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
