"""What our commands do about what they do not expect: defects, Ctrl-C within LLVM, and SIGBUS, where a
mapped file was shortened or its disk failed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from streammega.errors import ConfigError
from streammega.errors.redaction import redact_answer
from streammega.errors.words import in_one_line

PACKAGE = Path(__file__).parents[1]
LLVM_MODULE = "llvmlite.binding.executionengine"
"""The module that calls LLVM to compile, and that LLVM calls back."""
AGAIN_SECONDS = 0.05
"""From a Ctrl-C within LLVM to the next try."""


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


def keep_interrupts() -> None:
    """From now on, a Ctrl-C that comes while LLVM compiles a kernel is not lost.

    Python may run the handler in a callback of LLVM's, whose errors are only printed: the compilation
    fails without a reason then, or goes on. Our commands call this, in the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, within LLVM a little later."""
    while frame is not None and frame.f_globals.get("__name__") != LLVM_MODULE:
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    again = threading.Timer(AGAIN_SECONDS, signal.raise_signal, [number])
    again.daemon = True
    again.start()


class _SignalAction(ctypes.Structure):
    """`struct sigaction` of Linux's C libraries."""

    _fields_: ClassVar[Any] = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


_libc = ctypes.CDLL(None)
_SA_SIGINFO = 4
_ADDRESS_IN_SIGINFO = 16
"""Where `siginfo_t` has the address whose access failed, on 64-bit Linux."""
_action_before = _SignalAction()
_installed: list[Any] = []
"""The function that is called on SIGBUS, once it is installed."""


def name_files_on_bus_error() -> None:
    """From now on, write the name of a mapped file to stderr before SIGBUS ends this process.

    That happens when a mapped file is shortened in place, or its disk fails. What handled the signal
    before, `faulthandler` for instance, handles it next. Our commands and the example trainer call
    this; other programs may, since their signals are theirs.
    """
    if _installed or not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    _installed.append(kind(_on_bus_error))
    handler = ctypes.cast(_installed[0], ctypes.c_void_p)
    action = _SignalAction(handler=handler, flags=_SA_SIGINFO)
    _libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(_action_before))


def _on_bus_error(_number: int, info: int, _context: int) -> None:
    """Python in a signal handler is sound here: the signal comes from a read of mapped bytes, so the
    thread is not within the allocator or the interpreter's own structures.
    """
    try:
        address = ctypes.c_size_t.from_address(info + _ADDRESS_IN_SIGINFO).value
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, _mode, _offset, _device, _inode, *path = line.split(maxsplit=5)
                low, _, high = span.partition("-")
                if path and int(low, 16) <= address < int(high, 16):
                    text = (
                        f"streammega: {path[0].strip()}: was shortened while it is mapped, or its disk "
                        f"failed; write a new file and rename it, or set local_io = 'pread'\n"
                    )
                    os.write(2, text.encode())
    finally:
        # The read is repeated when this returns, and ends the process as it would have.
        _libc.sigaction(signal.SIGBUS, ctypes.byref(_action_before), None)
