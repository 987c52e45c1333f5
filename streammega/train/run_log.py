"""The reports of a run, on its first rank: metrics.jsonl with one object a step, TensorBoard if wanted,
and a line in the log every few steps. Imports no torch: `streammega plot` uses it too.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from streammega.config import StorageConfig
from streammega.config.validate import finite, parse_json
from streammega.errors import ObjectNotFoundError, StorageError
from streammega.errors.extras import import_extra
from streammega.storage import Store, open_store
from streammega.storage.backends.local import with_space
from streammega.storage.object_ops import read_object
from streammega.storage.open import is_remote
from streammega.storage.retry import RetryPolicy
from streammega.storage.store import atomic_writer

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
UPLOAD_SECONDS = 30.0
"""Between two uploads. Nothing can be appended to objects, so each upload is of whole files."""
LAST_UPLOAD_SECONDS = 3.0
"""For the upload of a run that fails."""
CHUNK_BYTES = 8 << 20
"""Memory that an upload needs."""


class RunLog:
    """The records of a run in its `out_dir`. Steps that are repeated after a resume are appended
    again.

    Where `out_dir` is a URL, files are written on this machine, and a thread uploads those that have
    changed.

    check_lock: raises StorageError where another job may write in `out_dir`.
    """

    def __init__(
        self,
        out_dir: str,
        storage: StorageConfig,
        check_lock: Callable[[], None],
        *,
        iters: int,
        log_interval: int = 1,
        tensorboard: bool = False,
    ) -> None:
        # Keys have no slash at the end. "/" alone is a folder.
        store, self._key = open_store(out_dir.rstrip("/") or out_dir, storage)
        self._store: Store | None = store if is_remote(out_dir) else None
        self._uploaded: dict[str, tuple[int, int]] = {}
        """By file name: size and time of change of the last upload."""
        self._upload_lock = threading.Lock()
        """For one upload at a time: of two at once, the older could arrive last."""
        self._closed = threading.Event()
        self._policy = RetryPolicy.of(storage)
        self._check_lock = check_lock
        self._iters = iters
        self._interval = log_interval
        if tensorboard:
            import_extra("tensorboard", "tensorboard", "train.tensorboard needs tensorboard")
        self._folder = Path(self._key)
        if self._store is not None:
            earlier = b""
            with suppress(ObjectNotFoundError):
                earlier, _ = read_object(self._store, self._key_of(METRICS))
            # The last that may fail: who has no RunLog cannot remove the folder.
            self._folder = Path(tempfile.mkdtemp(prefix="streammega-run-"))
            (self._folder / METRICS).write_bytes(earlier)
            threading.Thread(target=self._run, name="streammega-run-log", daemon=True).start()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / METRICS
        written = self._path.read_bytes() if self._path.exists() else b""
        if written and not written.endswith(b"\n"):
            self._append("\n")  # a kill cut the last line short: the next record has its own
        self._tensorboard: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self._folder / "tensorboard"))

    def write(self, record: dict[str, Any]) -> None:
        """One line, flushed: a killed run keeps every step that it finished.

        Waits for space while the disk is full. Raises StorageError if it stays full, or another job
        may write there, OSError.
        """
        self._append(json.dumps(finite(record)) + "\n")
        step = record["step"]
        numbers = scalars(record)
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        is_due = step % self._interval == 0 or step == self._iters
        was_evaluated = any(name.startswith("valid_loss") for name in record)
        if is_due or was_evaluated:
            figures = " ".join(f"{name} {_short(value)}" for name, value in numbers.items())
            log.info("step %d/%d %s", step, self._iters, figures)

    @property
    def steps(self) -> set[int]:
        """The steps that have a line."""
        if not self._path.exists():
            return set()
        return {record["step"] for record in read_metrics(self._path)}

    def upload(self) -> None:
        """Upload what has changed, if `out_dir` is a URL. Raises StorageError."""
        if self._store is None:
            return
        self._check_lock()
        with self._upload_lock:
            for path in sorted(self._folder.rglob("*")):
                if not path.is_file():
                    continue
                name = path.relative_to(self._folder).as_posix()
                # Before the file is read: what is written meanwhile is uploaded next time.
                stat = path.stat()
                state = (stat.st_size, stat.st_mtime_ns)
                if self._uploaded.get(name) == state:
                    continue
                with (
                    atomic_writer(self._store, self._key_of(name)) as writer,
                    open(path, "rb") as file,
                ):
                    while data := file.read(CHUNK_BYTES):
                        writer.write(data)
                self._uploaded[name] = state

    def close(self) -> None:
        """Write what TensorBoard has buffered, upload the rest, and remove the files of this machine.

        Raises StorageError.
        """
        self._flush()
        if self._store is not None and self._folder.is_dir():
            self.upload()
            shutil.rmtree(self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """As `close`, for a run that fails: raises nothing, and waits for the upload a short time."""
        self._flush()
        if self._store is not None and self._folder.is_dir():
            upload = threading.Thread(target=self._try_to_upload, daemon=True)
            upload.start()
            upload.join(LAST_UPLOAD_SECONDS)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _flush(self) -> None:
        self._closed.set()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _key_of(self, name: str) -> str:
        return f"{self._key}/{name}".lstrip("/")  # of a whole bucket the key is empty

    def _run(self) -> None:
        while not self._closed.wait(UPLOAD_SECONDS):
            self._try_to_upload()

    def _try_to_upload(self) -> None:
        try:
            self.upload()
        except (StorageError, OSError) as error:
            log.warning("metrics cannot be uploaded: %s", error)

    def _append(self, text: str) -> None:
        """Append to metrics.jsonl, again while the disk is full. Raises StorageError."""
        self._check_lock()
        size = self._path.stat().st_size if self._path.exists() else 0

        def append() -> None:
            with open(self._path, "ab", buffering=0) as file:
                file.truncate(size)  # an attempt that failed may have written a part
                rest = text.encode()
                while rest:
                    rest = rest[os.write(file.fileno(), rest) :]

        with_space(append, str(self._path), self._policy)


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
