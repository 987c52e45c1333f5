"""Batches for a trainer that fetches ahead of what it trains on, and a position that does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from streammega.errors import StateError
from streammega.loading import StreamLoader
from streammega.samples.fields import Batch


class TrainedBatches:
    """What Lightning iterates: batches of a loader, and which of them were trained on.

    `iter` begins after the last batch that was trained on, so one that Lightning fetched ahead and
    dropped (at the end of an epoch that is cut short, say) is given again.
    """

    def __init__(self, loader: StreamLoader) -> None:
        self.loader = loader
        self._trained = loader.consumed_samples
        """The position after the last batch that was trained on."""
        self._fetched: deque[int] = deque()
        """The positions after those that were only fetched."""
        self._running: TrainedIteration | None = None
        self.placed = False
        """Whether a state or `seek` said where to begin, or something was trained on."""

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        self._stop("another iteration of its loader began, and one loader has one cursor")
        if self._fetched:
            state = self.state_dict()
            self._fetched.clear()
            self.loader.load_state_dict(state)
        iter(self.loader)  # which begins the next pass where the data has ended
        self._running = TrainedIteration(self)
        return self._running

    def fetch(self) -> Batch:
        """The next batch, which counts as fetched."""
        batch = next(self.loader)
        self._fetched.append(self.loader.consumed_samples)
        return batch

    def trained(self) -> None:
        """The oldest batch that was fetched is trained on."""
        if self._fetched:  # none is, where the loader was moved within that batch
            self._trained = self._fetched.popleft()
            self.placed = True

    def state_dict(self) -> dict[str, Any]:
        """The state of a loader that has given what was trained on."""
        return self.loader.dataset.state_at(self._trained)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a state. Raises StateError for one of another order, and changes nothing."""
        self.loader.load_state_dict(state)
        self._moved("load_state_dict")

    def seek(self, consumed_samples: int) -> None:
        """Go on at a global sample."""
        self.loader.seek(consumed_samples)
        self._moved("seek")

    def _moved(self, by: str) -> None:
        self._trained = self.loader.consumed_samples
        self.placed = True
        if self._fetched:
            # Lightning still holds it, and would train on it next
            self._fetched.clear()
            self._stop(f"{by} moved its loader while a batch of the former place was fetched")

    def _stop(self, reason: str) -> None:
        if self._running is not None:
            self._running.reason = reason
            self._running = None


class TrainedIteration(Iterator[Batch]):
    """One iteration of TrainedBatches; StopIteration is the end of the data, and nothing else."""

    def __init__(self, batches: TrainedBatches) -> None:
        self._batches = batches
        self.reason: str | None = None

    def __next__(self) -> Batch:
        if self.reason is not None:
            raise StateError(
                f"this iteration cannot go on: {self.reason}; begin another with iter()"
            )
        return self._batches.fetch()
