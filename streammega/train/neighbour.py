"""Whether another rank lives, by its signs of life."""

from __future__ import annotations

from streammega.train.board import Board
from streammega.train.statuses import ENDED


class Neighbour:
    """Watches one other rank, the next that has not ended: every rank is watched by one, so the
    store's load is linear.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._watched = (rank + 1) % world
        self._last_beats: int | None = None
        """Of the watched rank, when it was last looked at."""
        self._silence = 0

    def silence(self, board: Board) -> int:
        """Beats of this process without one of the other.

        Of this process: where all are slow, nobody is silent.
        """
        status = None
        if self._watched != self._rank:
            status = board.read([self._watched]).get(self._watched)
        if status is None:  # it has not begun, or all others have ended
            return 0
        if status["phase"] == ENDED:
            self._watched = (self._watched + 1) % self._world
            self._last_beats = None
        is_silent = status["beats"] == self._last_beats
        self._silence = self._silence + 1 if is_silent else 0
        self._last_beats = status["beats"]
        return self._silence
