"""Who is where: every rank tells the others what it is doing, and ends with the cause when one of
them has stopped the job.

A rank whose main thread waits in a collective cannot be told anything: Python runs neither signal
handlers nor other code there, and with NCCL no collective raises when another rank is gone. So a
thread watches, prints why the job ends, and ends the process.

| what is seen | after |
|---|---|
| another rank said why it ends | a beat |
| the next rank gives no sign of life | `SILENCE` beats, or `patience` if that is shorter; after a signal `SOON` |
| this rank is where it was, and another is behind it | `patience` |
| Ctrl-C that is to end the run at once, and the main thread does not take it | `TAKEN` |
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed import Store

from streammega.train.board import Board
from streammega.train.stopping import StopRequests

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
"""Seconds that flushing metrics may take before the process ends."""
ENDED = "ended"
PHASES = (
    "starting",
    "waiting for data",
    "computing",
    "reducing",
    "saving",
    "evaluating",
    "ending",
    ENDED,
)
"""What a rank does, in the order of a step: one that is behind is what those before it wait for."""


class Watch:
    """Signs of life of this rank in the store of the job, and what those of the others say.

    `phase` is cheap: it sets attributes. A thread writes them, and watches the others. Make it in
    the main thread, or signals are not seen.

    Args: store: that all ranks joined; None: a rank by itself, which nobody watches. rank, world:
        of this process, and of the job. patience: seconds that this rank may wait for others at one
        place; they are then named, and the job ended.
    """

    def __init__(self, store: Store | None, rank: int, world: int, patience: float = 600.0) -> None:
        self.rank = rank
        self.world = world
        self.patience = patience
        self.step, self._phase, self._since, self._beats = 0, "starting", time.monotonic(), 0
        self.before_exit: list[Callable[[], None]] = []
        """What is called before the process is ended from the thread: it must not wait for other
        ranks.
        """
        self._board = None if store is None else Board(store, rank, world)
        self._ended = threading.Event()
        # of the main thread and this one's: the cause is printed once, whole
        self._last_word = threading.Lock()
        self._signals = _Signals()
        self._others = _Others(rank, world)
        self._requests = StopRequests()
        self._gentle = False
        self._asked: int | None = None
        self._asked_at_once: int | None = None
        self._looked = 0
        if store is not None:
            self._signals.listen()
            threading.Thread(target=self._run, name="streammega-watch", daemon=True).start()

    def phase(self, name: str, step: int | None = None) -> None:
        """This rank is now doing something else, or more of the same."""
        self._phase, self._since = name, time.monotonic()
        self.step = self.step if step is None else step

    def fail(self, cause: str, *, seen: bool = False) -> None:
        """Let the others know why this rank ends the job, by its own fault or because of what was
        seen of others.
        """
        if self._board is None:
            return
        try:
            self._board.blame(None if seen else self.rank, cause)
        except Exception as error:  # the store went with its host: its end is in that log
            log.debug("the cause could not be told: %s", error)

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
        answer: list[str] = []
        asking = threading.Thread(
            target=lambda: answer.append(self._explain()), name="streammega-asks", daemon=True
        )
        asking.start()
        asking.join(ANSWER_WITHIN * BEAT)
        return (
            answer[0]
            if answer
            else f"rank {self.rank} cannot ask the others: the job's store does not answer"
        )

    def close(self) -> None:
        """End the signs of life; the silence that follows is no failure."""
        self._ended.set()
        self._signals.close()
        if self._board is not None:
            # the store may have ended with rank 0: nobody is left who would read it
            with contextlib.suppress(Exception):
                self._board.tell(self._status() | {"phase": ENDED})

    def _status(self) -> dict[str, Any]:
        seconds = round(time.monotonic() - self._since, 1)
        return {"beats": self._beats, "step": self.step, "phase": self._phase, "seconds": seconds}

    def _run(self) -> None:
        assert self._board is not None
        failures = 0
        while not self._ended.is_set():
            reason = None
            code = 1
            try:
                self._beat()
                reason = self._reason_to_end()
                failures = 0
            except Exception as error:  # a connection that broke; the next beat takes another
                failures += 1
                log.log(
                    logging.WARNING if failures == SILENCE else logging.DEBUG,
                    "the job's store does not answer: %s",
                    error,
                )
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
        self._requests.note(number, time.monotonic())
        if self._requests.first is not None and self._asked is None:
            self._asked = self._beats
        ends = self._requests.at_once or (number == signal.SIGINT and not self._gentle)
        if ends and self._asked_at_once is None:
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
            # its own: the main thread is about to say it
            return _as_words(cause) if cause["rank"] != self.rank else None
        told = self._beats_since(self._asked)
        limit = max(SOON, min(self.patience / BEAT, SILENCE))
        suspicious = self._others.silence(self._board) >= (SOON if told else limit)
        waits = time.monotonic() - self._since > self.patience
        # Whoever is told to end looks at all ranks: the one that is gone may have its neighbour on
        # another host.
        if suspicious or ((waits or told >= SOON) and self._beats - self._looked >= LOOKS):
            self._looked = self._beats
            return self._seen(waits)
        return None

    def _seen(self, waits: bool) -> str | None:
        """What all ranks show: words that end the job, or None where they go on."""
        assert self._board is not None
        words = self._compare(self._beat, ("silent", "behind") if waits else ("silent",))
        if words:
            self.fail(words, seen=True)
        return words or None

    def _beats_since(self, beat: int | None) -> int:
        return 0 if beat is None else self._beats - beat

    def _explain(self) -> str:
        assert self._board is not None
        try:
            words = self._compare(lambda: None, ("silent", "behind")) or self._compare(
                lambda: None, ("ahead",)
            )
            cause = self._board.cause()
        except Exception as error:
            return f"rank {self.rank} cannot ask the others ({error}): the host of the job's store is gone, see its log"
        if cause is not None and cause["rank"] != self.rank:
            return _as_words(cause)
        return words or f"no other rank says why; this one was in step {self.step} ({self._phase})"

    def _compare(self, meanwhile: Callable[[], None], kinds: Sequence[str]) -> str:
        """The ranks of these kinds, in words: "silent" between two looks, or "behind" or "ahead" of
        this one; empty if none.
        """
        assert self._board is not None
        before = self._board.read_all()
        for _ in range(5):  # two beats and a half; others look at this rank at the same time
            time.sleep(BEAT / 2)
            meanwhile()
        found: dict[str, list[str]] = {"silent": [], "behind": [], "ahead": [], "here": []}
        for rank, status in self._board.read_all().items():
            kind = self._kind(before.get(rank, {}), status)
            says = "gives no sign of life" if kind == "silent" else "is elsewhere"
            if rank != self.rank:
                found[kind].append(f"rank {rank} {says}; {_describe(status)}")
        return "; ".join(line for kind in kinds for line in found[kind])

    def _kind(self, before: dict[str, Any], after: dict[str, Any]) -> str:
        if after["phase"] != ENDED and after["beats"] == before.get("beats"):
            return "silent"
        here = _place(self.step, self._phase)
        there = _place(after["step"], after["phase"])
        if there == here:
            return "here"
        return "behind" if there < here else "ahead"

    def _end(self, reason: str, code: int) -> None:
        """Print why, and end the process; if the main thread is saying it already, leave that to
        it.
        """
        if not self._last_word.acquire(blocking=False):
            return
        interrupted = code != 1
        place = f"in step {self.step} ({self._phase})"
        text = (
            f"[{self.rank}] interrupted in step {self.step}\n"
            if interrupted
            else f"error (rank {self.rank}): {place}: {reason}\n"
        )
        os.write(2, text.encode())  # not by sys.stderr, whose lock the main thread may hold
        flushing = threading.Thread(target=self._flush, daemon=True)
        flushing.start()
        flushing.join(LAST_WORDS)
        os._exit(code)

    def _flush(self) -> None:
        for action in self.before_exit:
            # the process ends now, with a cause that is told already
            with contextlib.suppress(Exception):
                action()


class _Others:
    """Watches one other rank, the next that has not ended: every rank is watched by one, so the
    store's load is linear.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._own = rank
        self._world = world
        self._next = (rank + 1) % world
        self._seen: int | None = None
        self._silence = 0

    def silence(self, board: Board) -> int:
        """Beats of this process without one of the other.

        Of this process: where all are slow, nobody is silent.
        """
        status = board.read([self._next]).get(self._next) if self._next != self._own else None
        if status is None:  # it has not begun, or all others have ended
            return 0
        if status["phase"] == ENDED:
            self._next = (self._next + 1) % self._world
            self._seen = None
        self._silence = self._silence + 1 if status["beats"] == self._seen else 0
        self._seen = status["beats"]
        return self._silence


class _Signals:
    """Numbers of the signals that reach this process, whatever its main thread waits in.

    Python's own handlers run between two instructions of the main thread; what is read here is
    written by the handler in C.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._before = -1

    def listen(self) -> None:
        """Begin, in the main thread; in another one no signal is ever seen."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)

    def wait(self, seconds: float) -> bytes:
        """The signals that came, at once, or none after so many seconds."""
        if self._pipe is None:
            time.sleep(seconds)
            return b""
        if not select.select([self._pipe[0]], [], [], seconds)[0]:
            return b""
        try:
            return os.read(self._pipe[0], 64)
        except OSError:  # none after all: select may say so, and must not block what comes next
            return b""

    def close(self) -> None:
        """Stop listening. The pipe stays open: the thread may be reading."""
        if self._pipe is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._before)


def _place(step: int, phase: str) -> tuple[int, int]:
    return step, PHASES.index(phase) if phase in PHASES else len(PHASES)


def _as_words(cause: dict[str, Any]) -> str:
    return (
        str(cause["cause"])
        if cause["rank"] is None
        else f"rank {cause['rank']} ended the job: {cause['cause']}"
    )


def _describe(status: dict[str, Any]) -> str:
    return f"last heard of in step {status['step']} ({status['phase']}, for {status['seconds']} s)"
