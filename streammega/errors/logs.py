"""The loggers of this library, without secrets in their records, and how our commands show logs."""

from __future__ import annotations

import logging
import os

from streammega.errors import ConfigError
from streammega.errors.redaction import redact

_text_of = logging.Formatter()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module. All handlers get its records without secrets.

    Each logger has the filter: that of a parent does not see the records of its children.
    """
    log = logging.getLogger(name)
    log.addFilter(_take_out_secrets)
    return log


def _take_out_secrets(record: logging.LogRecord) -> bool:
    """Change a record before any handler has it. One without secrets keeps its arguments and error."""
    message = record.getMessage()
    shown = redact(message)
    if shown != message:
        record.msg, record.args = shown, None
    if record.exc_info:
        traceback = _text_of.formatException(record.exc_info)
        shown = redact(traceback)
        if shown != traceback:  # the message of another library's error
            record.exc_text, record.exc_info = shown, None
    return True


def set_log_level(default: str) -> None:
    """Set the level of this library's logs, by STREAMMEGA_LOG."""
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


class _Lines(logging.Formatter):
    def __init__(self, prefix: str) -> None:
        super().__init__(f"{prefix}%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        line = redact(super().format(record))  # records of other libraries come here too
        return line if record.levelno == logging.INFO else f"{record.levelname}: {line}"
