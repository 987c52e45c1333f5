"""What our commands do about what they do not expect, and how they show logs."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streammega.errors import ConfigError
from streammega.errors.redaction import redact_answer
from streammega.errors.words import in_one_line

PACKAGE = Path(__file__).parents[1]


def set_log_level(default: str) -> None:
    """Set the level of this library's logs, by STREAMMEGA_LOG. At DEBUG, botocore's have session tokens."""
    name = os.environ.get("STREAMMEGA_LOG", default)
    try:
        logging.getLogger("streammega").setLevel(name.upper())
        # its warnings are tracebacks, of what our errors say in a sentence
        logging.getLogger("botocore").setLevel(logging.ERROR)
    except ValueError:
        raise ConfigError(
            f"STREAMMEGA_LOG is {name!r}; it is DEBUG, INFO, WARNING or ERROR"
        ) from None


def log_to_stderr(prefix: str = "") -> None:
    """Show logs of this process as lines. Warnings begin with `WARNING: `, lines of a run (INFO) have
    no level. prefix: stands behind the level.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(prefix))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def replace_unknown_letters() -> None:
    """Show `?` for letters that the encoding of stdout lacks, where printing them would be an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # stderr shows their numbers by itself
        sys.stdout.reconfigure(errors="replace")


class _Lines(logging.Formatter):
    def __init__(self, prefix: str) -> None:
        super().__init__(f"{prefix}%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if record.levelno == logging.INFO else f"{record.levelname}: {line}"


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Make a RuntimeError of a panic in a library of Rust: it would pass by every `except Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"panic: {error}") from None


def describe_defect(error: Exception) -> str:
    """A message in place of a traceback, which goes to the log at DEBUG."""
    logging.getLogger("streammega").debug("the defect", exc_info=error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    last = (ours or frames)[-1]
    reason = in_one_line(redact_answer(f"{type(error).__name__}: {error}", {}))
    return (
        f"{reason} ({Path(last.filename).name}, line {last.lineno}); this is a defect of streammega: "
        "please report it, with what the same command prints with STREAMMEGA_LOG=DEBUG"
    )
