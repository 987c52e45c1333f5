"""An `out_dir` of one job at a time, which all its ranks share.

On a disk a file lock keeps other jobs out. Of two jobs in one folder of a bucket, the second to save a step
ends (`store.py`).
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import filelock

from streammega.errors import ConfigError
from streammega.errors.logs import get_logger
from streammega.parallel.rank_sync import RankSync
from streammega.train.checkpoints.files import CheckpointFiles

log = get_logger(__name__)

SHARED_SIGN = ".shared-"
"""The prefix of the small files by which ranks check that they share the folder."""
VISIBLE_SECONDS = 60.0
"""How long until all ranks must see what one has written: NFS clients may cache for a minute."""
LOOK_SECONDS = 0.2
"""Between two looks, for the sake of network file systems."""
LOCK_SECONDS = 10.0
"""How long to wait for a file lock: a job that ends may hold it a little longer."""
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""


def lock_file(path: Path) -> filelock.BaseFileLock | None:
    """Lock a file for this process, all of whose runs and threads share the lock. None where the file
    system has no locks.

    Raises ConfigError while another process has it, OSError where the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path, thread_local=False, is_singleton=True)
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except filelock.Timeout:
        owner = path.read_text(errors="replace").strip()
        raise ConfigError(
            f"{path.parent}: another job trains there ({owner or 'unknown process'}); "
            f"end it, or choose another train.out_dir"
        ) from None
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        log.warning(
            "%s: this file system has no locks (%s); let only one job at a time train there",
            path,
            error.strerror,
        )
        return None
    # Where there are no locks, filelock has its own text in the file.
    if isinstance(lock, filelock.UnixFileLock):
        with suppress(OSError):  # the disk may be full
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    return lock


def check_shared_filesystem(folder: CheckpointFiles, rank_sync: RankSync) -> None:
    """Raise ConfigError unless all ranks see what the first one writes in a folder: else each would keep a
    part of every checkpoint. Raises StorageError where it cannot write.
    """

    def write_sign() -> tuple[str, str]:
        # A new name every time: all would see one that an earlier start left.
        sign = f"{SHARED_SIGN}{secrets.token_hex(6)}"
        folder.put(sign, b"all ranks see this\n")
        return sign, socket.gethostname()

    sign, first_host = rank_sync.run_on_first(write_sign)

    def look() -> None:
        """Raise while the sign is not seen."""
        if not folder.list(sign):
            raise ConfigError(
                f"{folder.url()}: {socket.gethostname()} does not see what rank 0 wrote there "
                f"on {first_host}; train.out_dir must be one folder for all ranks: "
                f"on a shared file system, or a URL such as s3://bucket/run"
            )

    rank_sync.run_long(lambda: wait_until_visible(look, ConfigError))
    rank_sync.run_on_first(lambda: folder.store.delete(folder.key(sign)))


def wait_until_visible(look: Callable[[], None], invisible: type[Exception]) -> None:
    """`look()` until it raises nothing; its error after VISIBLE_SECONDS."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        try:
            return look()
        except invisible:
            if time.monotonic() > deadline:
                raise
        time.sleep(LOOK_SECONDS)
