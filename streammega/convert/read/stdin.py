"""Inputs that can be read only once (stdin, pipes, process substitution) are kept in the work folder
while they are converted. What was interrupted has to be given again, and is read again.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.read.json import BYTE_ORDER_MARK
from streammega.convert.read.open import open_stream
from streammega.dataset.manifest import MANIFEST
from streammega.dataset.shard import strip_suffix
from streammega.errors import ConfigError, ConvertError, StreammegaError
from streammega.errors.redaction import redact_urls
from streammega.storage.open import is_remote

log = logging.getLogger(__name__)

KEPT = "input-"
"""Begins the names of kept inputs in the work folder."""
READ_BYTES = 1 << 20
PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
"""How a stream that begins so is compressed."""
SIGN_BYTES = 16
"""Of its beginning, of which the format is told or which a message shows: longer than any sign."""
TAR_SIGN_AT = 257
"""Where the first header of a tar has its sign: that of POSIX and GNU begin alike."""
_DESCRIPTORS = ("/dev/fd/", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/proc/self/fd/")


def is_pipe(item: str) -> bool:
    """Whether an input can be read only once, and by this process alone."""
    if item == "-" or item.startswith(_DESCRIPTORS):
        return True
    try:
        mode = os.stat(item).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)


def check_output(output: str) -> None:
    """Raise ConfigError for an output that is a pipe, or that has no name: `$UNSET`, a folder."""
    if is_pipe(output):
        raise ConfigError(
            f"{output}: a dataset is several files (tokens, their .idx and a manifest), which a "
            f"pipe cannot take; give a prefix, out/web for instance"
        )
    shown = redact_urls(output)
    _, scheme, path = output.partition("://")
    if scheme and "/" not in path.rstrip("/") and is_remote(output):
        raise ConfigError(
            f"{shown!r}: is a bucket; give a name in it, {shown.rstrip('/')}/web for instance"
        )
    if output.endswith(MANIFEST):
        raise ConfigError(
            f"{shown!r}: is the name of a manifest; give the prefix {shown.removesuffix(MANIFEST)!r}"
        )
    if os.path.isdir(output):
        raise ConfigError(
            f"{shown!r}: is a folder; give a name in it, {os.path.join(shown, 'web')} for instance"
        )
    if strip_suffix(output).rpartition("/")[2] in ("", ".", ".."):
        raise ConfigError(
            f"{redact_urls(output)!r}: is no name of a dataset, whose files would be hidden ones; "
            f"give a prefix, out/web for instance"
        )


def keep_pipes(inputs: Sequence[str], work: str, read_as: str | None = None) -> dict[str, str]:
    """For each input that is a pipe, which is read to its end, the file of the work folder that
    holds its bytes.

    read_as: what they hold, if that is not told by how they begin. Raises ConfigError for a
    terminal, a pipe that is named twice and a work folder that is not on this machine, ConvertError
    for a stream whose format cannot be told.
    """
    pipes = [item for item in inputs if is_pipe(item)]
    if is_remote(work):
        raise ConfigError(
            f"{pipes[0]}: what comes by a pipe is kept in the work folder, so --work has to name a "
            f"local one"
        )
    if len(set(pipes)) < len(pipes):
        raise ConfigError(f"{pipes[0]}: is named twice; a pipe can be read once")
    _remove(work)  # of a conversion that was killed
    kept = {}
    try:
        for number, item in enumerate(pipes):
            kept[item] = _keep(item, number, work, read_as)
    except BaseException:  # Ctrl-C, too: a pipe may be endless
        forget_pipes(work)
        raise
    return kept


def named_as_given(message: str, kept: Mapping[str, str]) -> str:
    """A message that speaks of pipes by what they were called, and not of the files in which they
    are kept.
    """
    for item, path in kept.items():
        message = message.replace(path, _shown(item))
    return message


def _shown(item: str) -> str:
    """A pipe in messages."""
    return "stdin" if item == "-" else item


@contextmanager
def tell_of_pipes(kept: Mapping[str, str]) -> Iterator[None]:
    """What is raised within names pipes as they were given."""
    try:
        yield
    except StreammegaError as error:
        error.args = tuple(
            named_as_given(arg, kept) if isinstance(arg, str) else arg for arg in error.args
        )
        raise


def forget_pipes(work: str) -> None:
    """Remove what was kept, after an error."""
    if not os.path.isdir(work):
        return
    _remove(work)
    if set(os.listdir(work)) <= {"lock"}:  # made for the pipes alone
        shutil.rmtree(work, ignore_errors=True)


def _remove(work: str) -> None:
    for name in os.listdir(work):
        if name.startswith(KEPT):
            os.unlink(os.path.join(work, name))


def _keep(item: str, number: int, work: str, read_as: str | None) -> str:
    """Read a pipe to its end into a file, whose name tells its format."""
    kept = os.path.join(work, f"{KEPT}{number}")
    log.info("%s is read to its end, into %s", _shown(item), work)
    head = b""
    try:
        with _opened(item) as pipe, open(kept, "wb") as file:
            for data in iter(lambda: pipe.read(READ_BYTES), b""):
                head = head or data[:SIGN_BYTES]
                file.write(data)
    except OSError as error:
        raise ConvertError(
            f"{_shown(item)}: cannot be kept in {work} ({error.strerror or error}); name another "
            f"folder by --work"
        ) from None
    # readers tell by its suffix how a file is compressed, and what it holds
    packed = next((suffix for sign, suffix in PACKED.items() if head.startswith(sign)), "")
    if packed:
        kept = _renamed(kept, f"{kept}{packed}")
    # a file without a suffix is read as `--as` says
    suffix = _suffix(kept, item) if read_as is None else ""
    return _renamed(kept, f"{kept.removesuffix(packed)}{suffix}{packed}")


def _renamed(path: str, name: str) -> str:
    os.replace(path, name)
    return name


def _opened(item: str) -> Any:
    if item != "-":
        return open(item, "rb")
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("stdin is a terminal; pipe a corpus into it, or name files")
    return open(sys.stdin.fileno(), "rb", closefd=False)


def _suffix(path: str, item: str) -> str:
    """Of the format that a stream is in, by how it begins."""
    with open_stream(path, StorageConfig()) as file:
        head = file.read(tarfile.BLOCKSIZE)
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if text.startswith((b"{", b"[")):
        return ".json"
    if head.startswith(b"PAR1"):
        return ".parquet"
    if head.startswith(b"ARROW1"):
        return ".arrow"
    if head.startswith(b"ustar", TAR_SIGN_AT):
        return ".tar"
    raise ConvertError(
        f"{_shown(item)}: begins with {head[:SIGN_BYTES]!r}, which is neither JSON nor Parquet, "
        f"Arrow or tar; say how it is read: --as text (one text), lines (a text a line) or json, or "
        f"save it to a file whose suffix says it"
    )
