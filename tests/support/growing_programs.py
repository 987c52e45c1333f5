"""What producers of a dataset that grows do in processes of their own; they import little."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from streammega.config import StorageConfig
from streammega.dataset.append import append
from streammega.storage.backends.obstore import ObstoreStore

WITHIN = 120
"""Seconds that a process has: far more than it takes."""


def produce(
    barrier: Any, prefix: str, names: list[str], storage: StorageConfig, errors: Any
) -> None:
    barrier.wait(WITHIN)
    try:
        for name in names:
            append(prefix, [name], storage)
    except BaseException as error:
        errors.put(repr(error))
        raise


def append_and_die(folder: str, event: int) -> None:
    """Append, with SIGKILL at this event of the interpreter that has to do with the folder: opening,
    linking, removing, listing.
    """
    seen = 0

    def watch(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if name not in ("open", "os.link", "os.remove", "os.rename", "os.scandir", "os.listdir"):
            return
        if not any(isinstance(item, str) and item.startswith(folder) for item in arguments):
            return
        if seen == event:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    sys.addaudithook(watch)
    append(f"{folder}/web", [f"{folder}/web-a", f"{folder}/web-b"])


REQUESTS = ("info", "read", "list", "put")
"""Methods of a store by which a producer talks to a bucket."""


def append_and_die_at_a_request(
    prefix: str, names: list[str], storage: StorageConfig, request: int, answered: bool
) -> None:
    """Append in a bucket, with SIGKILL at this request: before it is sent, or when it is answered.

    A negative one counts from the write of the version: -1 is that.
    """
    seen = 0

    def dies_in(name: str) -> bool:
        nonlocal seen
        seen += 1
        return name == "put" and seen > 2 if request < 0 else seen == request

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(ObstoreStore, name)

        def call(*arguments: Any, **named: Any) -> Any:
            dies = dies_in(name)
            if dies and not answered:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(*arguments, **named)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call

    for name in REQUESTS:
        setattr(ObstoreStore, name, watched(name))
    append(prefix, names, storage)
