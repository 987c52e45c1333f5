"""The micro-batches of a step, taken while the device computes: only the first is waited for before
anything is under way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from streammega.parallel import RankBatches
from streammega.samples.fields import Batch
from streammega.train.watch import Watch


class StepBatches(Iterator[Batch]):
    """So many micro-batches of one step; StopIteration after them.

    The data ends with a whole step: `empty` says that there is no further one, before anything was
    computed.

    Args:
        batches: what they are taken from.
        count: micro-batches of the step.
        watch: is told what this rank does.
        step: its number, for the watch.
        keep: hold on to them, for who looks at them afterwards; otherwise each is gone with its
            computation.
    """

    def __init__(
        self, batches: RankBatches, count: int, watch: Watch, step: int, *, keep: bool
    ) -> None:
        self._batches = batches
        self._left = count
        self._watch = watch
        self._step = step
        self.count = count
        self.kept: list[Batch] | None = [] if keep else None
        self.consumed: list[int] = []
        """The cursor after each."""
        self.waited = 0.0
        """Seconds in which this rank had nothing to do."""
        self._first = self._take()
        self.empty = self._first is None

    def __next__(self) -> Batch:
        if not self._left:
            raise StopIteration
        batch = self._first
        self._first = None
        if batch is None:
            batch = self._take()
        if batch is None:
            raise RuntimeError("the data ended within a step, of which it has only whole ones")
        self._left -= 1
        if self.kept is not None:
            self.kept.append(batch)
        self._watch.phase("computing")
        return batch

    def _take(self) -> Batch | None:
        self._watch.phase("waiting for data", self._step)
        began = time.perf_counter()
        batch = next(self._batches, None)
        self.waited += time.perf_counter() - began
        if batch is not None:
            self.consumed.append(self._batches.consumed_samples)
        return batch
