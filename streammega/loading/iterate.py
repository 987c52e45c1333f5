"""One iteration: batches from a position on, phase by phase, to the end of the data or to a reason
why it cannot go on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from streammega.errors import StateError
from streammega.loading.engine import Engine
from streammega.loading.micro_steps import MicroSteps
from streammega.samples.fields import Batch
from streammega.storage.fork_lock import process_lock

Read = tuple[int, Batch, Engine]
"""(position, its micro-batch, the engine that read it)."""


def iterate_batches(
    steps: MicroSteps,
    start: int,
    make_engine: Callable[[MicroSteps, Iterator[int], int], Engine],
    check: Callable[[], None],
    *,
    read: Callable[[Engine], Iterator[tuple[int, Batch]]] = iter,
) -> Generator[Read, None, None]:
    """The micro-batches of some steps from sample `start` on. Where a version is appended in mid-run,
    what was read ahead is read again, because it is of the order without that version.

    Args:
        make_engine: (steps of a phase, their positions, its start) -> what reads them.
        check: raises if this iteration is over; called before each batch.
        read: (engine) -> (position, batch): the batches of an engine, on a device for instance.
    """
    steps.attach(start)
    next_sample: int | None = start
    while next_sample is not None:
        next_sample = yield from _until_data_change(steps, next_sample, make_engine, check, read)


def _until_data_change(
    steps: MicroSteps,
    first_sample: int,
    make_engine: Callable[[MicroSteps, Iterator[int], int], Engine],
    check: Callable[[], None],
    read: Callable[[Engine], Iterator[tuple[int, Batch]]],
) -> Generator[Read, None, int | None]:
    """The same as far as nothing is appended; returns the sample where it then goes on. None: at the
    end of the data.
    """
    segments = steps.samples.segments
    for steps_here, positions, start in steps.by_segment(
        steps.positions(first_sample), first_sample
    ):
        engine = make_engine(steps_here, positions, start)
        with closing(engine):
            for consumed, batch in read(engine):
                check()
                steps.advance_to(consumed)
                if steps.samples.segments is not segments:
                    return consumed
                yield consumed, batch, engine
                del batch  # its memory is free as soon as the caller lets go
    return None


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
