"""One iteration over the data: batches from a position on, phase by phase."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

from streammega.errors import StateError
from streammega.errors.logs import get_logger
from streammega.loading.engine import Engine
from streammega.loading.micro_steps import MicroSteps
from streammega.samples.field_inputs import Batch
from streammega.samples.rows import WHOLE, kept_parts_of
from streammega.samples.segments import short_names
from streammega.samples.shuffling import FAIR_SHARE, mixing_advice, mixing_of
from streammega.storage.fork_lock import process_lock
from streammega.storage.warn_once import warn_once

log = get_logger(__name__)

Read = tuple[int, Any, Engine]
"""(position, micro-batch at the position, engine that read the micro-batch)."""


def iterate_batches(
    steps: MicroSteps,
    start: int,
    check: Callable[[], None],
    *,
    context_rank: tuple[int, int] = (0, 1),
    read: Callable[[Engine], Iterator[tuple[int, Any]]] = iter,
    **options: Any,
) -> Generator[Read, None, None]:
    """Iterate the micro-batches from sample `start` to the end of the data. An engine reads each phase;
    the thread that takes its first batch makes it.

    Args:
        check: raises an error if the iteration must not go on; called before each batch.
        context_rank: (rank, size) of this context-parallel rank.
        read: iterates (position, batch) of an engine. It may copy the batches to a device.
        options: of Engine.
    """
    for steps_here, positions, first_sample in steps.by_segment(steps.positions(start), start):
        config = steps_here.config
        kept = kept_parts_of(config.sequence_length, *context_rank)
        engine = Engine(
            steps_here,
            positions,
            start=first_sample,
            kept=WHOLE if config.needs_whole_samples else kept,
            kept_of_columns=kept,
            **options,
        )
        is_mixing_due = steps.split == "train" and steps.dp_rank == 0
        with closing(engine):
            for consumed, batch in read(engine):
                check()
                yield consumed, batch, engine
                del batch  # the caller alone decides when its memory is free
                if is_mixing_due:  # here, for the first batch need not wait for it
                    is_mixing_due = False
                    _warn_of_mixing(steps, first_sample)


def _warn_of_mixing(steps: MicroSteps, start: int) -> None:
    """Warn once if batches of the stream order come from much fewer places than a full shuffle's."""
    segment = steps.samples.segment_at(start)
    batch = steps.schedule.size_at(start)
    if segment.order is None:
        return
    mixing = mixing_of(segment, start, batch)
    if mixing.share is None or mixing.share >= FAIR_SHARE:
        return
    assert mixing.dataset is not None
    name = short_names(steps.samples.prefixes)[mixing.dataset]
    warn_once(
        log,
        f"{name}, {segment.order.lanes} lanes, batches of {batch}",
        "%s is mixed poorly: its samples in consecutive batches come from %.2f of the places that "
        "they would come from in a full shuffle; %s",
        name,
        mixing.share,
        mixing_advice(segment, batch),
    )


class Iteration(Iterator[Batch]):
    """Iterates the batches of a generator. StopIteration means the end of the data, and nothing else.

    A bare generator also raises StopIteration after it was closed or raised an error. A training
    loop would take that for the end of the data. This iterator raises StateError with the reason.

    Several threads may take batches. Each batch goes to one of them. In a forked child it raises
    StateError: the threads that read for it are the parent's.
    """

    def __init__(self, batches: Generator[Batch, None, None]) -> None:
        self._batches = batches
        self._lock = process_lock()
        self._ended = False
        self._reason: str | None = None
        self._process = os.getpid()

    def __next__(self) -> Batch:
        with self._lock:  # a generator refuses a second thread
            return self._next()

    def _next(self) -> Batch:
        if self._is_of_parent and self._reason is None:
            self._reason = "this process was forked while it ran, and its threads are the parent's"
        if self._reason is not None:
            raise StateError(
                f"this iteration cannot go on: {self._reason}; begin another with iter()"
            )
        try:
            return next(self._batches)
        except StopIteration:
            self._ended = True
            raise
        except BaseException as error:  # Ctrl-C too: it has ended the generator
            self._reason = (
                f"it ended by {type(error).__name__}, which was raised where it was waited for"
            )
            raise

    @property
    def goes_on(self) -> bool:
        """Whether `next` may be called: no error ended the iteration, and `stop` was not called."""
        return self._reason is None and not self._is_of_parent

    @property
    def _is_of_parent(self) -> bool:
        """Whether this process is a fork of the one that runs the iteration."""
        return os.getpid() != self._process

    def stop(self, reason: str) -> None:
        """End the iteration and its generator. `next` then raises StateError with the reason.

        After the last batch `next` still raises StopIteration. Raises StateError and stops nothing
        if another thread waits for a batch.
        """
        with self.stopping(reason):
            pass

    @contextmanager
    def stopping(self, reason: str) -> Iterator[None]:
        """Run the body, then `stop`. Meanwhile other threads wait in `next`.

        Raises StateError before the body if another thread waits for a batch. An error of the body
        stops nothing.
        """
        if not self._lock.acquire(blocking=False):
            raise StateError(
                "another thread waits for a batch of this iteration: let that thread have it, or "
                "end, before the loader is closed or moved"
            )
        try:
            yield
            if self._reason is None and not self._ended:
                self._reason = reason
            if not self._is_of_parent:  # whose thread may be within the generator for ever
                self._batches.close()
        finally:
            self._lock.release()
