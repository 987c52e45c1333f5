"""Results of a function of positions, computed a few ahead in threads and handed out in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Position = TypeVar("Position")
Result = TypeVar("Result")


class Prefetcher(Generic[Position, Result]):
    """Iterates (position, work(position)), with up to `ahead` results in the making.

    An error of `work` is raised at the position it belongs to. `close` (also at garbage collection, and when the
    iteration ends or is left) stops the threads; results never handed out are forgotten.
    """

    def __init__(self, work: Callable[[Position], Result], positions: Iterable[Position], ahead: int) -> None:
        self._work, self._positions, self._ahead = work, iter(positions), max(1, ahead)
        self._pending: deque[tuple[Position, Future[Result]]] = deque()
        self._pool = ThreadPoolExecutor(self._ahead, thread_name_prefix="streammega-batch")
        self._lock = threading.Lock()
        self._closed = False

    def __iter__(self) -> Iterator[tuple[Position, Result]]:
        try:
            self._fill()
            while self._pending:
                position, future = self._pending[0]
                result = future.result()
                self._pending.popleft()
                self._fill()
                yield position, result
        finally:
            self.close()

    def _fill(self) -> None:
        while len(self._pending) < self._ahead:
            try:
                position = next(self._positions)
            except StopIteration:
                return
            self._pending.append((position, self._pool.submit(self._work, position)))

    def close(self) -> None:
        """Stop; waits for reads in flight, which their timeouts bound."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
