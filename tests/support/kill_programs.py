"""A conversion in a process of its own that tells which phase it is in: to be killed in it, or to
wait there for another.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import streammega.convert.job as job
from streammega import StorageConfig
from streammega.convert import convert
from streammega.convert.conversion import Conversion
from streammega.convert.write.publish import Publisher
from streammega.errors import ConvertError

PHASES = ("read", "lay", "publish", "clean")
"""Units are made of inputs, shards are laid of them, these are published, and what was left of the
work is removed.
"""


def telling(owner: Any, name: str, phase: str, tell: Callable[[str], None]) -> None:
    """Make a method tell its phase before it begins."""
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        tell(phase)
        return real(*arguments, **named)

    setattr(owner, name, call)


def convert_and_tell(
    pipe: Connection,
    cache: str,
    options: dict[str, Any],
    inputs: list[str],
    output: str,
    **named: Any,
) -> None:
    """One conversion; phases go to `pipe`, then "done" or the error."""
    os.environ["XDG_CACHE_HOME"] = cache
    job.MAX_UNIT_BYTES = job.MIN_UNIT_BYTES = 20_000
    job.SEGMENT_BYTES = 8_000
    telling(Conversion, "do_units", "read", pipe.send)
    telling(Publisher, "choose_names", "lay", pipe.send)
    telling(Publisher, "publish", "publish", pipe.send)
    telling(Conversion, "remove_work", "clean", pipe.send)
    try:
        convert(
            inputs,
            output,
            storage=StorageConfig(storage_options=options, request_timeout=20),
            workers=1,
            **named,
        )
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
    pipe.send("done")


def waiting(owner: Any, name: str, word: str, pipe: Connection) -> None:
    """Make a method tell a word before it begins, and wait for one."""
    real = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        pipe.send(word)
        pipe.recv()
        return real(*arguments, **named)

    setattr(owner, name, call)


def convert_as_told(
    pipe: Connection,
    cache: str,
    storage: StorageConfig,
    inputs: list[str],
    output: str,
    **named: Any,
) -> None:
    """One conversion of a machine of its own: it waits before it reads its inputs, and before it
    publishes.
    """
    os.environ["XDG_CACHE_HOME"] = cache
    waiting(Conversion, "run", "begun", pipe)
    waiting(Publisher, "publish", "written", pipe)
    try:
        convert(inputs, output, storage=storage, tokenizer="bytes", workers=1, **named)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    else:
        pipe.send("done")


def slow_task(shared: Path, number: int, progress: Any) -> int:
    """Leaves its process's number; once, waits to be killed."""
    (shared / f"pid-{number}").write_text(str(os.getpid()))
    if number == 3 and not (shared / "killed").exists():
        (shared / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    progress(10, 1)
    return number * number


def failing_task(number: int, progress: Any) -> int:
    raise ConvertError("this one cannot be done")
