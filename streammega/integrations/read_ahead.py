"""A thread that makes what an iterator gives, a few items ahead of who takes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

LOOK_AGAIN = 0.2
"""Seconds after which the thread that reads ahead looks whether anybody still wants its items."""


class ReadAhead(Iterator[Any]):
    """What an iterator gives, made so many items ahead by a thread.

    A daemon thread: what it reads holds up no end of the program.
    """

    def __init__(self, items: Iterator[Any], count: int = 1) -> None:
        self._items = items
        self._made: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=count)
        self._stopped = threading.Event()
        threading.Thread(target=self._make, name="streammega-texts", daemon=True).start()

    def __next__(self) -> Any:
        item, error = self._made.get()
        if error is not None:
            raise error
        return item

    def stop(self) -> None:
        """Nobody wants what follows."""
        self._stopped.set()

    def _make(self) -> None:
        try:
            for item in self._items:
                if not self._put(item, None):
                    return
            self._put(None, StopIteration())
        except BaseException as error:  # whatever it is, the one who waits is told
            self._put(None, error)

    def _put(self, item: Any, error: BaseException | None) -> bool:
        """Hand over an item; whether it is wanted."""
        while not self._stopped.is_set():
            try:
                self._made.put((item, error), timeout=LOOK_AGAIN)
                return True
            except queue.Full:
                continue
        return False
