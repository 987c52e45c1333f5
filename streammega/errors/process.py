"""What our commands do about what they do not expect."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streammega.errors.logs import get_logger
from streammega.errors.redaction import redact
from streammega.errors.words import in_one_line

PACKAGE = Path(__file__).parents[1]


def replace_unknown_letters() -> None:
    """Show `?` for letters that the encoding of stdout lacks, where printing them would be an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # stderr shows their numbers by itself
        sys.stdout.reconfigure(errors="replace")


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
    get_logger("streammega").debug("the defect", exc_info=error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    last = (ours or frames)[-1]
    reason = in_one_line(redact(f"{type(error).__name__}: {error}"))
    return (
        f"{reason} ({Path(last.filename).name}, line {last.lineno}); this is a defect of streammega: "
        "please report it, with what the same command prints with STREAMMEGA_LOG=DEBUG"
    )
