"""What `streammega doctor` checks of this machine, without a request; and what a finding is."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

import streammega
from streammega.storage import file_system_of

GB = 1e9
MiB = 1 << 20
GiB = 1 << 30
FEWEST_FILES = 1024
SPEED_BYTES = 32 * MiB
"""Bytes that are written, for a second at most, to measure a disk."""
FEWER_REQUESTS = (
    "run fewer jobs on the bucket, set cache_max_bytes, take larger shuffle_block_bytes before the "
    "run, or have the limit raised"
)
"""The remedy where a store refuses requests (429, 503)."""
PACKAGES = ("torch", "numpy", "numba", "obstore", "fsspec", "s3fs")


class Finding(NamedTuple):
    """The result of one check. gain: times faster that reading would be; 1 where that is not known."""

    check: str
    status: str
    result: str
    remedy: str = ""
    gain: float = 1.0


def ok(check: str, result: str) -> Finding:
    """A finding of what is as it should be."""
    return Finding(check, "ok", result)


def warning(check: str, result: str, remedy: str, gain: float = 1.0) -> Finding:
    """A finding of what makes a run slower, or less safe."""
    return Finding(check, "warning", result, remedy, gain)


def fault(check: str, result: str, remedy: str = "") -> Finding:
    """A finding of what keeps a run from working here."""
    return Finding(check, "fault", result, remedy)


def check_disk(folder: Path, *, measures: bool) -> Iterator[Finding]:
    """Space, kind and, where wanted, speed of the disk of a cache folder."""
    name = "cache_dir"
    existing = folder  # or the folder in which it will be made
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    try:
        usage = shutil.disk_usage(existing)
        if not os.access(existing, os.W_OK):
            raise PermissionError(0, "this user may not write there")
        speed = f", writes {_write_speed(existing) / 1e6:,.0f} MB/s" if measures else ""
    except OSError as error:
        yield fault(name, f"{folder}: {error.strerror}", "set cache_dir to another folder")
        return
    disk = file_system_of(str(existing))
    result = f"{folder}: {usage.free / GB:,.1f} GB free, {disk.kind}{speed}"
    # a cache keeps the larger of 1 GiB and a hundredth of its disk free
    if usage.free < max(2 * GiB, usage.total // 50):
        yield warning(name, result, "free some space, or set cache_dir to a larger disk", 1.01)
    elif disk.is_remote:
        remedy = "set cache_dir to a local disk: this one is another machine's"
        yield warning(name, result, remedy)
    else:
        yield ok(name, result)


def _write_speed(folder: Path) -> float:
    """Bytes per second that reach a disk."""
    data = os.urandom(MiB)
    with TemporaryFile(dir=folder) as file:
        began = time.monotonic()
        written = 0
        while written < SPEED_BYTES and time.monotonic() - began < 1.0:
            written += file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return written / (time.monotonic() - began)


def check_limits() -> Iterator[Finding]:
    """Open files, and the memory through which workers of a DataLoader send batches."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= FEWEST_FILES:
        yield ok("ulimit -n", "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}")
    else:
        remedy = f"`ulimit -n {FEWEST_FILES}`: each connection takes one"
        yield warning("ulimit -n", f"at most {limit:,} open files", remedy)
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        free = 0
    if free >= GiB:
        yield ok("/dev/shm", f"{free / GB:,.1f} GB free")
    else:
        remedy = (
            "workers of a DataLoader may fail: give a container more (docker: --shm-size), or use "
            "StreamLoader, which has no workers"
        )
        yield warning("/dev/shm", f"{free / GB:,.2f} GB free", remedy)


def check_versions() -> Iterator[Finding]:
    """The packages by which data is read, and whether torch is built for the GPUs that are here."""
    versions = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    missing = [name for name in PACKAGES if not _version(name)]
    result = ", ".join([f"streammega {streammega.__version__}", *versions])
    result = f"{result}, Python {platform.python_version()}"
    if missing:
        yield fault(
            "versions", f"{result}, without {', '.join(missing)}", "install streammega again"
        )
    else:
        yield ok("versions", result)
    names: list[str] = []
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True)
        names = done.stdout.split("\n")[:-1]
    torch = _version("torch")
    if not names:
        yield ok("GPU", "none; reading and converting need none")
    elif torch.endswith("+cpu"):
        remedy = "install torch's CUDA build: https://pytorch.org/get-started"
        yield fault("GPU", f"{len(names)} x {names[0]}, but torch {torch} has no CUDA", remedy)
    else:
        yield ok("GPU", f"{len(names)} x {names[0]}")


def _version(package: str) -> str:
    """The installed version; empty: it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
