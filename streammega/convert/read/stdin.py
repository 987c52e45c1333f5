"""Inputs that can be read only once (stdin, pipes, process substitution): the work folder keeps them
while they are converted. After an interruption they have to be given again.
"""

from __future__ import annotations

import glob
import io
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from streammega.convert.read.compression import PieceReader, compression_of_bytes, decompress
from streammega.convert.read.formats import FORMATS
from streammega.convert.read.text import BYTE_ORDER_MARK, why_no_text
from streammega.convert.work_dir import KEPT_INPUT, WorkDir
from streammega.errors import ConfigError, ConvertError, StreammegaError
from streammega.errors.logs import get_logger

log = get_logger(__name__)

READ_BYTES = 1 << 20
SIGN_BYTES = 16
"""Bytes of a stream's beginning that a message shows."""
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


@contextmanager
def pipes_as_files(inputs: Sequence[str], work_dir: WorkDir) -> Iterator[dict[str, str]]:
    """The files of the work folder that hold the bytes of each pipe among the inputs.

    Errors within the block name pipes, not these files, and remove them. The way that a pipe begins
    says its format. Raises ConfigError for a terminal, a pipe that is named twice and a work folder
    that is not on this machine, ConvertError for an unknown format.
    """
    pipes = [item for item in inputs if is_pipe(item)]
    if work_dir.is_remote:
        raise ConfigError(
            f"{pipes[0]}: what comes by a pipe is kept in the work folder, so --work-dir has to name "
            f"a local one"
        )
    if len(set(pipes)) < len(pipes):
        raise ConfigError(f"{pipes[0]}: is named twice; a pipe can be read once")
    forget_pipes(work_dir)  # of a conversion that was killed
    kept: dict[str, str] = {}
    try:
        for number, item in enumerate(pipes):
            kept[item] = _save(item, number, work_dir)
        yield kept
    except BaseException as error:  # Ctrl-C, too: a pipe may be endless
        forget_pipes(work_dir)
        if isinstance(error, StreammegaError):
            error.args = tuple(
                with_pipe_names(arg, kept) if isinstance(arg, str) else arg for arg in error.args
            )
        raise


def with_pipe_names(message: str, kept: Mapping[str, str]) -> str:
    """A message that names pipes as the user does, and not the files in which they are kept."""
    for item, path in kept.items():
        message = message.replace(path, _name(item))
    return message


def _name(item: str) -> str:
    """A pipe in messages."""
    return "stdin" if item == "-" else item


def forget_pipes(work_dir: WorkDir) -> None:
    """Remove what was kept."""
    for path in glob.glob(f"{glob.escape(work_dir.file(KEPT_INPUT))}*"):
        os.unlink(path)


def _save(item: str, number: int, work_dir: WorkDir) -> str:
    """Read a pipe to its end into a file, whose suffixes say its format and its compression."""
    log.info("%s is read to its end, into %s", _name(item), work_dir.url)
    try:
        with _open(item) as pipe:
            head = pipe.read(READ_BYTES)
            packed = compression_of_bytes(head)
            suffix = _suffix(head, packed, item)
            kept = work_dir.file(f"{KEPT_INPUT}{number}{suffix}{packed}")
            with open(kept, "wb") as file:
                file.write(head)
                shutil.copyfileobj(pipe, file, READ_BYTES)
    except OSError as error:
        raise ConvertError(
            f"{_name(item)}: cannot be kept in {work_dir.url} ({error.strerror or error}); name another "
            f"folder by --work-dir"
        ) from None
    return kept


def _open(item: str) -> Any:
    if item != "-":
        return open(item, "rb")
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("stdin is a terminal; pipe a corpus into it, or name files")
    return open(sys.stdin.fileno(), "rb", closefd=False)


def _suffix(head: bytes, packed: str, item: str) -> str:
    """The suffix of a stream's format, by its first bytes. packed: that of its compression."""
    if packed:
        try:
            head = PieceReader(decompress(io.BytesIO(head), packed, _name(item))).read(
                tarfile.BLOCKSIZE
            )
        except (OSError, EOFError) as error:
            raise ConvertError(f"{_name(item)}: cannot be decompressed ({error})") from None
    if head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b"["):
        return ".json"
    for known in FORMATS.values():
        if known.signature is not None:
            place, signature = known.signature
            if head.startswith(signature, place):
                return known.suffixes[0]
    if reason := why_no_text(head):
        raise ConvertError(f"{_name(item)}: {reason}")
    raise ConvertError(
        f"{_name(item)}: begins with {head[:SIGN_BYTES]!r}, which is neither JSON nor Parquet, "
        f"Arrow or tar; save it to a file whose suffix says what it is"
    )
