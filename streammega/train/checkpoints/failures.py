"""What torch.distributed.checkpoint tells of failures, and what a user is told of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from streammega.errors import StorageError, StreammegaError


def first_cause(error: BaseException) -> BaseException:
    """The first rank's error, of those that torch has collected."""
    if not isinstance(error, CheckpointException) or not error.failures:
        return error
    first_rank = min(error.failures)
    cause, _ = error.failures[first_rank]
    return cause


def root_failure(error: BaseException) -> BaseException:
    """The failure of a disk or store that an error came from; else the error.

    torch's writer of archives fails once more as it is closed, and tells of that alone.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError | StorageError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, StreammegaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        if not error.filename:
            return error.strerror
        return f"{os.fspath(error.filename)}: {error.strerror}"
    # Of others the last line: torch's own are tracebacks, which end with what went wrong.
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


@contextmanager
def without_torch_warning() -> Iterator[None]:
    """torch warns when one process saves by itself, which one rank without torchrun
    rightly does.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled, unavailable or uninitialized"
        )
        yield
