"""Where a run's records go: a folder; or, for a URL, a folder of this machine whose files are
copied there as they grow.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from pathlib import Path

from streammega.config import StorageConfig
from streammega.errors import ObjectNotFoundError, StorageError
from streammega.storage import Store, open_store
from streammega.storage.open import is_remote
from streammega.storage.store import atomic_writer
from streammega.train.small_objects import read_small

log = logging.getLogger(__name__)

EVERY_SECONDS = 30.0
"""Between two copies: objects cannot be appended to, so each is written anew."""
PIECE_BYTES = 8 << 20
"""Of one read and write: what a copy needs of memory."""
NAMES = ("metrics.jsonl",)
"""What a resumed run goes on writing."""


def fetch_record(store: Store, key: str, path: Path) -> bool:
    """Copy an object to a file of this machine; whether it is there. Raises StorageError."""
    try:
        data = read_small(store, key)
    except ObjectNotFoundError:
        return False
    path.write_bytes(data)
    return True


class OutDir:
    """`folder` is where the first rank writes; `upload` copies what changed to the URL, as does a
    thread now and then.
    """

    def __init__(self, out_dir: str, storage: StorageConfig) -> None:
        # Without a slash at the end, as keys are; "/" alone is a folder, and stays.
        place = out_dir.rstrip("/") or out_dir
        store, self._key = open_store(place, storage)
        self._store: Store | None = store if is_remote(out_dir) else None
        self._sent: dict[str, tuple[int, int]] = {}
        """By name the bytes and the time of change, in ns, of what was copied last."""
        self._lock = threading.Lock()
        """Of `_sent`, and of sending: the thread and a checkpoint may copy at once, and of two
        writes of one object the older could come last.
        """
        self._ended = threading.Event()
        if self._store is None:
            self.folder = Path(self._key)
            return
        self.folder = Path(tempfile.mkdtemp(prefix="streammega-run-"))
        for name in NAMES:
            fetch_record(self._store, self._key_of(name), self.folder / name)
        threading.Thread(target=self._run, name="streammega-records", daemon=True).start()

    def upload(self) -> None:
        """Copy what has changed. Raises StorageError."""
        if self._store is None:
            return
        with self._lock:
            for path in sorted(self.folder.rglob("*")):
                if path.is_file():
                    self._send_if_changed(self._store, path)

    def _send_if_changed(self, store: Store, path: Path) -> None:
        name = path.relative_to(self.folder).as_posix()
        # Before it is read: what is written meanwhile is then sent the next time.
        stat = path.stat()
        state = (stat.st_size, stat.st_mtime_ns)
        if self._sent.get(name) != state:
            self._send(store, name, path)
            self._sent[name] = state

    def close(self) -> None:
        """Copy the rest, and remove the folder of this machine."""
        self._ended.set()
        if self._store is not None and self.folder.is_dir():
            self.upload()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _key_of(self, name: str) -> str:
        return f"{self._key}/{name}".lstrip("/")  # of a whole bucket the key is empty

    def _run(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            try:
                self.upload()
            except (StorageError, OSError) as error:
                log.warning("metrics cannot be copied: %s", error)

    def _send(self, store: Store, name: str, path: Path) -> None:
        with atomic_writer(store, self._key_of(name)) as writer, open(path, "rb") as file:
            while data := file.read(PIECE_BYTES):
                writer.write(data)
