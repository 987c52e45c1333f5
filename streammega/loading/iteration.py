"""One iteration: it gives batches, ends with the data, or says why it cannot go on."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator

from streammega.errors import StateError
from streammega.samples.fields import Batch
from streammega.storage.fork_lock import process_lock


class Iteration(Iterator[Batch]):
    """The batches of a generator. StopIteration means the end of the data, and nothing else.

    A bare generator that was closed, or that an error went through, answers with StopIteration too,
    which a training loop takes for the end of the data. This one raises StateError with the reason
    instead.

    Several threads may take batches: each gets batches of its own, one thread after the other.
    """

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._batches = batches
        self._lock = process_lock()
        self._ended = False
        self._reason: str | None = None

    def __next__(self) -> Batch:
        with self._lock:  # a generator refuses a second thread
            return self._next()

    def _next(self) -> Batch:
        if self._reason is not None:
            raise StateError(
                f"this iteration cannot go on: {self._reason}; begin another with iter()"
            )
        try:
            return next(self._batches)
        except StopIteration:
            self._ended = True
            raise
        except BaseException as error:  # Ctrl-C too: it went through the generator, which is over
            self._reason = (
                f"it ended by {type(error).__name__}, which was raised where it was waited for"
            )
            raise

    @property
    def goes_on(self) -> bool:
        """Whether the next batch, or the end of the data, can still be asked for."""
        return self._reason is None

    def stop(self, reason: str) -> None:
        """End it and what it runs. One that gave all its batches stays one that is over.

        Raises StateError, and goes on, where another thread waits for its next batch.
        """
        if inspect.getgeneratorstate(self._batches) == inspect.GEN_RUNNING:
            raise StateError(
                "another thread waits for a batch of this iteration: let that thread have it, or "
                "end, before the loader is closed or moved"
            )
        if self._reason is None and not self._ended:
            self._reason = reason
        self._batches.close()
