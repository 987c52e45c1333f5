"""Who is where: every rank tells the others what it is doing, and ends with the cause when one of
them has stopped the job.

A rank whose main thread waits in a collective cannot be told anything: Python runs neither signal
handlers nor other code there, and with NCCL no collective raises when another rank is gone. So a
thread watches, prints why the job ends, and ends the process.

| what is seen | after |
|---|---|
| another rank said why it ends | a beat |
| the next rank gives no sign of life | `SILENCE` beats, or `patience` if shorter |
| the job's store does not answer | the same |
| the same, after a signal | `SOON` |
| this rank is where it was, and another is behind it | `patience` |
| Ctrl-C that is to end the run at once, and the main thread does not take it | `TAKEN` |
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed import Store

from streammega.train.board import ENDED, Board, as_words, compare
from streammega.train.signals import SignalPipe, StopRequests

log = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between two signs of life."""
SILENCE = 60
"""Beats: some libraries hold Python's lock for many seconds, and a job of thousands of ranks must
not end for that.
"""
SOON = 5
"""Beats after which silence counts where a signal says that the job is ending."""
TAKEN = 2
"""Beats in which a main thread that runs Python takes a Ctrl-C by itself, and says more than the
watch can.
"""
LOOKS = 10
"""Beats between two looks at all ranks: at a thousand ranks each look is a large answer."""
ANSWER_WITHIN = 30
"""Beats for which the store is asked what the others say: a host that is gone does not even refuse,
and TCP tries for minutes.
"""
LAST_WORDS = 5.0
"""Seconds that flushing metrics, and telling the others why, may take before the process ends."""


class Watch:
    """Signs of life of this rank in the store of the job, and what those of the others say.

    `phase` is cheap: it sets attributes. A thread writes them, and watches the others. Make it in
    the main thread, or signals are not seen.

    Args:
        store: that all ranks joined; None: a rank by itself, which nobody watches.
        rank: of this process.
        world: ranks of the job.
        patience: seconds that this rank may wait for others at one place; they are then named, and
            the job ended.
    """

    def __init__(self, store: Store | None, rank: int, world: int, patience: float = 600.0) -> None:
        self.rank = rank
        self.world = world
        self.patience = patience
        self.step = 0
        self._phase = "starting"
        self._since = time.monotonic()
        """When this phase began."""
        self._beats = 0
        self.before_exit: list[Callable[[], None]] = []
        """What is called before the process is ended from the thread: it must not wait for other
        ranks.
        """
        self._board = None if store is None else Board(store, rank, world)
        self._ended = threading.Event()
        self._last_word = threading.Lock()
        """Of the main thread or the watch's, whichever ends the run: the cause is printed once."""
        self._signals = SignalPipe()
        self._neighbour = Neighbour(rank, world)
        self._requests = StopRequests()
        self._gentle = False
        self._asked: int | None = None
        """The beat at which a signal asked for the end of the run."""
        self._asked_at_once: int | None = None
        """The beat at which one asked for it at once."""
        self._answered = time.monotonic()
        """When the store answered last."""
        self._looked = 0
        """The beat of the last look at all ranks."""
        if store is not None:
            self._signals.listen()
            threading.Thread(target=self._run, name="streammega-watch", daemon=True).start()

    def phase(self, name: str, step: int | None = None) -> None:
        """This rank is now doing something else, or more of the same."""
        self._phase = name
        self._since = time.monotonic()
        if step is not None:
            self.step = step

    def fail(self, cause: str, *, seen: bool = False) -> None:
        """Let the others know why this rank ends the job, by its own fault or because of what was
        seen of others.
        """
        board = self._board
        if board is None:
            return

        def tell() -> None:
            try:
                board.blame(None if seen else self.rank, cause)
            except Exception as error:
                # The store went with its host: its end is in that log.
                log.debug("the cause could not be told: %s", error)

        _run_within(LAST_WORDS, tell)

    def claim(self) -> None:
        """Take the last word: what follows is printed by the caller.

        Does not return where the thread has it already.
        """
        if self._board is not None:
            self._last_word.acquire()

    @contextlib.contextmanager
    def gentle(self) -> Iterator[None]:
        """Meanwhile the main thread takes a first Ctrl-C as a request to end after the step; else
        each ends the run at once.
        """
        self._gentle = True
        try:
            yield
        finally:
            self._gentle = False

    @property
    def interrupted(self) -> bool:
        """Whether a Ctrl-C that is to end the run at once has come, as far as the thread knows."""
        return self._asked_at_once is not None

    def explain(self) -> str:
        """What the others say after a collective failed: who failed first, who gives no sign of
        life, what each was doing.
        """
        if self._board is None:
            return ""
        answers: list[str] = []

        def ask() -> None:
            answers.append(self._explain())

        _run_within(ANSWER_WITHIN * BEAT, ask)
        if not answers:
            return f"rank {self.rank} cannot ask the others: the job's store does not answer"
        return answers[0]

    def close(self) -> None:
        """End the signs of life; the silence that follows is no failure."""
        self._ended.set()
        self._signals.close()
        if self._board is not None:
            # The store may have ended with rank 0: nobody is left who would read it.
            with contextlib.suppress(Exception):
                self._board.tell(self._status() | {"phase": ENDED})

    def _status(self) -> dict[str, Any]:
        seconds = round(time.monotonic() - self._since, 1)
        return {"beats": self._beats, "step": self.step, "phase": self._phase, "seconds": seconds}

    def _run(self) -> None:
        while not self._ended.is_set():
            code = 1
            try:
                self._beat()
                reason = self._reason_to_end()
                self._answered = time.monotonic()
            except Exception as error:
                # A connection that broke: the next beat takes another.
                log.debug("the job's store does not answer: %s", error)
                reason = self._unanswered()
            if reason is None and self._beats_since(self._asked_at_once) > TAKEN:
                reason = "interrupted"
                code = 128 + signal.SIGINT
                self.fail(reason)
            if reason is not None and not self._ended.is_set():
                self._end(reason, code)
            for number in self._signals.wait(BEAT):
                self._hear(number)

    def _hear(self, number: int) -> None:
        """Note a signal, and the beat at which it began to matter."""
        requests = self._requests
        requests.note(number, time.monotonic())
        if requests.first is not None and self._asked is None:
            self._asked = self._beats
        # A first Ctrl-C outside of the loop is no request: nothing would look at it.
        ends_now = number == signal.SIGINT and not self._gentle
        if (requests.at_once or ends_now) and self._asked_at_once is None:
            self._asked_at_once = self._beats

    def _beat(self) -> None:
        assert self._board is not None
        self._beats += 1
        self._board.tell(self._status())

    def _reason_to_end(self) -> str | None:
        """Why this rank can stop waiting, if so."""
        assert self._board is not None
        cause = self._board.cause()
        if cause is not None:
            # Its own: the main thread is about to say it.
            return as_words(cause) if cause["rank"] != self.rank else None
        neighbour_is_silent = self._neighbour.silence(self._board) >= self._max_silence()
        waits = time.monotonic() - self._since > self.patience
        # Whoever is told to end looks at all ranks: the one that is gone may have its neighbour on
        # another host.
        wants_to_look = waits or self._beats_since(self._asked) >= SOON
        may_look = self._beats - self._looked >= LOOKS
        if neighbour_is_silent or (wants_to_look and may_look):
            self._looked = self._beats
            return self._seen(waits)
        return None

    def _unanswered(self) -> str | None:
        """Words that end the job where its store has not answered for too long, or None."""
        seconds = time.monotonic() - self._answered
        if seconds < self._max_silence() * BEAT:
            return None
        return (
            f"the job's store has not answered for {seconds:.0f} s: its host is gone, see its log"
        )

    def _max_silence(self) -> float:
        """Beats for which another rank, or the store, may give no sign of life."""
        if self._beats_since(self._asked) > 0:
            return SOON
        return max(SOON, min(self.patience / BEAT, SILENCE))

    def _seen(self, waits: bool) -> str | None:
        """What all ranks show: words that end the job, or None where they go on."""
        # Behind are ranks that may still come, unless this one has waited for as long as it may.
        kinds = ("silent", "behind") if waits else ("silent",)
        words = self._compare(self._beat, kinds)
        if words:
            self.fail(words, seen=True)
        return words or None

    def _beats_since(self, beat: int | None) -> int:
        return 0 if beat is None else self._beats - beat

    def _explain(self) -> str:
        assert self._board is not None
        try:
            # Ranks ahead of this one only where none is silent or behind: they wait for this one,
            # and not this one for them.
            words = self._compare(lambda: None, ("silent", "behind"))
            if not words:
                words = self._compare(lambda: None, ("ahead",))
            cause = self._board.cause()
        except Exception as error:
            return (
                f"rank {self.rank} cannot ask the others ({error}): "
                f"the host of the job's store is gone, see its log"
            )
        if cause is not None and cause["rank"] != self.rank:
            return as_words(cause)
        return words or f"no other rank says why; this one was in step {self.step} ({self._phase})"

    def _compare(self, meanwhile: Callable[[], None], kinds: Sequence[str]) -> str:
        """The ranks of these kinds, in words: "silent" between two looks, or "behind" or "ahead" of
        this one; empty if none.
        """
        assert self._board is not None
        before = self._board.read_all()
        # Two beats and a half: each rank that lives has given a sign. Others look at this rank at
        # the same time, so its own go on meanwhile.
        for _ in range(5):
            time.sleep(BEAT / 2)
            meanwhile()
        after = self._board.read_all()
        after.pop(self.rank, None)
        return compare(before, after, (self.step, self._phase), kinds)

    def _end(self, reason: str, code: int) -> None:
        """Print why, and end the process; if the main thread is saying it already, leave that to
        it.
        """
        if not self._last_word.acquire(blocking=False):
            return
        where = f"in step {self.step} ({self._phase})"
        text = f"error (rank {self.rank}): {where}: {reason}\n"
        if code != 1:
            text = f"[{self.rank}] interrupted in step {self.step}\n"
        # Not by sys.stderr, whose lock the main thread may hold.
        os.write(2, text.encode())
        _run_within(LAST_WORDS, self._flush)
        os._exit(code)

    def _flush(self) -> None:
        for action in self.before_exit:
            # The process ends now, with a cause that is told already.
            with contextlib.suppress(Exception):
                action()


def _run_within(seconds: float, action: Callable[[], None]) -> None:
    """Run it in a thread, which is left behind where it takes longer: the process is to end."""
    thread = threading.Thread(target=action, name="streammega-last-words", daemon=True)
    thread.start()
    thread.join(seconds)


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
