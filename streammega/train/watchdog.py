"""Every rank publishes what it does, and ends with the cause if another rank has ended the job.

While the main thread waits in a collective, Python runs no signal handler and no other code there,
and NCCL raises nothing when another rank is gone. So a thread watches, prints why the job ends, and
ends the process.

Once a second, a beat, it publishes the status of its rank in the job's store, and reads one key: the
first cause that any rank has written. Every few beats rank 0 compares the statuses of all ranks. The
other ranks read that of rank 0 alone; after a signal, and once rank 0 has finished, those of all
ranks. A rank that finds something writes it as the cause.

| what the thread finds | the rank ends after |
|---|---|
| a cause | two beats: a launcher ends the ranks of one host sooner, without a word of theirs |
| a rank gives no sign of life | `MAX_SILENCE` beats, or `collective_timeout` if shorter; `MIN_SILENCE` after a signal |
| the job's store does not answer | the same |
| a rank waits, and another one is at an earlier place | `collective_timeout`, and up to `LOOK_BEATS` beats |
| Ctrl-C wants the end at once, and the main thread does not take it | `INTERRUPT_BEATS` beats |
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

from torch.distributed import Store

from streammega.train.signals import StopRequests

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""Seconds between two signs of life."""
LOOK_BEATS = 10
"""Beats between two looks at statuses: at a thousand ranks the answer is large."""
MAX_SILENCE = 60
"""Beats. Shorter silence does not end a job: some libraries hold Python's lock for many seconds."""
MIN_SILENCE = 5
"""Beats. The shortest silence that ends a job; it counts after a signal."""
INTERRUPT_BEATS = 2
"""Beats in which the main thread may handle a Ctrl-C by itself: its message says more than the
watchdog's.
"""
DIAGNOSIS_TIMEOUT = 30.0
"""Seconds for reading the statuses of others from the store: where its host is gone, TCP tries for
minutes.
"""
FLUSH_TIMEOUT = 5.0
"""Seconds that flushing metrics, and writing the cause, may take before the process ends."""
CLIENT_TIMEOUT = timedelta(seconds=5)
"""Time for one request to the store, whose keys exist already. Where its host is gone, torch takes up
to three times as long to notice.
"""
MAX_CAUSE_CHARACTERS = 2000
CAUSE = "streammega/cause"
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
"""What a rank does, in the order of a step. The others wait for a rank in an earlier phase."""
T = TypeVar("T")


class RankStatus(NamedTuple):
    """What a rank does, and for how long. beats: signs of life so far."""

    beats: int
    step: int
    phase: str
    seconds: float

    @property
    def place(self) -> tuple[int, int]:
        """How far the rank is."""
        return self.step, PHASES.index(self.phase)

    def __str__(self) -> str:
        # The others are often some steps further than the last sign of a rank that was killed.
        often = f"seen every {BEAT_SECONDS:.0f} s"
        return f"last seen in step {self.step} ({self.phase}, for {self.seconds} s; {often})"


class Failure(NamedTuple):
    """Why the job ends. rank: which has failed; None: ranks have observed it of others."""

    rank: int | None
    cause: str

    def __str__(self) -> str:
        return self.cause if self.rank is None else f"rank {self.rank} ended the job: {self.cause}"


class StatusStore:
    """Statuses of all ranks, and the first failure, in the store of the job.

    It has a client of its own, because the one of training is locked while it waits for other ranks.
    Every method raises RuntimeError where the store does not answer.
    """

    def __init__(self, store: Store) -> None:
        # Made now, while the store answers. Later clones take over its timeout.
        self._origin: Store = store.clone()  # type: ignore[attr-defined]
        self._origin.set_timeout(CLIENT_TIMEOUT)
        self._client: Store | None = self._origin

    def publish(self, rank: int, status: RankStatus) -> None:
        """Write what a rank does."""
        with self._connection() as client:
            client.set(_status_key(rank), json.dumps(status))

    def statuses(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """What ranks do. Those that have published nothing yet are left out."""
        known = list(ranks)
        with self._connection() as client:
            # One check for all: except at the start, all have published.
            if not client.check([_status_key(rank) for rank in known]):
                known = [rank for rank in known if client.check([_status_key(rank)])]
            # One request: there may be a thousand ranks.
            values = client.multi_get([_status_key(rank) for rank in known]) if known else []
        statuses = [RankStatus(*json.loads(value)) for value in values]  # noqa: TID251
        return dict(zip(known, statuses, strict=True))

    def report_failure(self, failure: Failure) -> None:
        """Write why the job ends. The first failure is kept."""
        short = failure._replace(cause=failure.cause[:MAX_CAUSE_CHARACTERS])
        with self._connection() as client:
            client.compare_set(CAUSE, "", json.dumps(short))

    def first_failure(self) -> Failure | None:
        """The first failure of any rank, if there was one."""
        with self._connection() as client:
            # `get` alone would wait until there is one.
            return Failure(*json.loads(client.get(CAUSE))) if client.check([CAUSE]) else None  # noqa: TID251

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Store]:
        """A client. After an error it is replaced, since it may be in the middle of an answer."""
        client: Store = self._client or self._origin.clone()  # type: ignore[attr-defined]
        self._client = None
        yield client
        self._client = client


class Watchdog:
    """Publishes signs of life of this rank, and watches those of the others.

    Make it in the main thread: elsewhere it receives no signals.

    Args:
        store: of the job, which all ranks have joined; None: a single rank, which is not watched.
        rank: of this process.
        world: number of ranks.
        timeout: seconds that a rank may wait for others at one place. Then the job ends, and the
            others are named.
    """

    def __init__(self, store: Store | None, rank: int, world: int, timeout: float = 600.0) -> None:
        self.rank = rank
        self.world = world
        self.step = 0
        self.stop_requests = StopRequests()
        self.before_exit: list[Callable[[], None]] = []
        """Called before the thread ends the process. They must not wait for other ranks."""
        self._timeout = timeout
        self._phase = PHASES[0]
        self._phase_start = time.monotonic()
        self._beats = 0
        self._next_look = 0
        self._is_ending = False
        """Whether a signal asks for the end of the run."""
        self._has_cause = False
        """Whether a beat has found the cause that a rank has written."""
        self._has_first_ended = False
        """Whether rank 0, which looks at all ranks, has finished."""
        self._answer_time = time.monotonic()
        """When the store answered last."""
        self._last_beats: dict[int, tuple[int, int]] = {}
        """By rank: its beats, and our beat at which they were first seen. Time is counted in our own
        beats, so that no rank counts as silent where all are slow.
        """
        self._closed = threading.Event()
        self._exit_lock = threading.Lock()
        """Held by the thread that ends the run, so that the cause is printed once."""
        self._store = None if store is None else StatusStore(store)
        if store is not None:
            self.stop_requests.listen()
            threading.Thread(target=self._run, name="streammega-watchdog", daemon=True).start()

    def enter_phase(self, name: str, step: int | None = None) -> None:
        """Note what this rank does from now on."""
        assert name in PHASES
        self._phase = name
        self._phase_start = time.monotonic()
        if step is not None:
            self.step = step

    def fail(self, cause: str, *, is_of_others: bool = False) -> None:
        """Write why this rank ends the job. is_of_others: it has observed it of other ranks."""
        if self._store is not None:
            failure = Failure(None if is_of_others else self.rank, cause)
            _run_within(FLUSH_TIMEOUT, partial(self._store.report_failure, failure))

    def claim_exit(self) -> None:
        """Let the caller print why the process ends. Does not return if the thread prints it already."""
        if self._store is not None:
            self._exit_lock.acquire()

    def diagnose(self) -> str:
        """Ask the other ranks after a collective failed: which failed first, which give no sign of
        life, what each was doing.
        """
        answer = _run_within(DIAGNOSIS_TIMEOUT, self._diagnose)
        return answer or f"rank {self.rank} cannot ask the others: the job's store does not answer"

    def _diagnose(self) -> str:
        assert self._store is not None
        try:
            before = self._store.statuses(range(self.world))
            time.sleep(2.5 * BEAT_SECONDS)  # a rank that lives gives a sign in this time
            after = self._store.statuses(range(self.world))
            failure = self._store.first_failure()
        except Exception as error:
            return (
                f"rank {self.rank} cannot ask the others ({error}): "
                f"the host of the job's store is gone, see its log"
            )
        if failure is not None and failure.rank != self.rank:
            return str(failure)
        after.pop(self.rank, None)
        here = self._status().place
        silent = [
            rank
            for rank, status in after.items()
            if rank in before and status.beats == before[rank].beats and status.phase != ENDED
        ]
        behind = [rank for rank, status in after.items() if status.place < here]
        # They wait for this rank, and not this one for them.
        ahead = [rank for rank, status in after.items() if status.place > here]
        return (
            _describe(after, silent, behind)
            or _describe(after, [], ahead)
            or f"no other rank says why; this one was in step {self.step} ({self._phase})"
        )

    def close(self) -> None:
        """End the signs of life. The silence that follows is no failure."""
        self._closed.set()
        self.stop_requests.close()
        if self._store is not None:
            self._phase = ENDED
            # The store may have ended with rank 0. Then no rank would read it.
            with contextlib.suppress(Exception):
                self._store.publish(self.rank, self._status())

    def _status(self) -> RankStatus:
        seconds = round(time.monotonic() - self._phase_start, 1)
        return RankStatus(self._beats, self.step, self._phase, seconds)

    def _run(self) -> None:
        assert self._store is not None
        requests = self.stop_requests
        while not self._closed.is_set():
            self._beats += 1
            self._note_signal()
            code = 1
            try:
                self._store.publish(self.rank, self._status())
                reason = self._reason_to_end(self._store)
                self._answer_time = time.monotonic()
            except Exception as error:
                # A connection that broke: the next beat takes another.
                log.debug("the job's store does not answer: %s", error)
                requests.wait(0)  # a signal may have come while it was asked, which takes seconds
                self._note_signal()
                seconds = time.monotonic() - self._answer_time
                reason = ""
                if seconds >= self._max_silence * BEAT_SECONDS:
                    reason = (
                        f"the job's store has not answered for {seconds:.0f} s: "
                        f"its host is gone, see its log"
                    )
            at_once_time = requests.at_once_time or math.inf
            if not reason and time.monotonic() - at_once_time > INTERRUPT_BEATS * BEAT_SECONDS:
                reason = "interrupted"
                code = 128 + signal.SIGINT
                self.fail(reason)
            if reason and not self._closed.is_set():
                self._exit(reason, code)
            requests.wait(BEAT_SECONDS)

    def _note_signal(self) -> None:
        if self.stop_requests.first_signal is not None and not self._is_ending:
            self._is_ending = True
            self._next_look = self._beats

    def _reason_to_end(self, store: StatusStore) -> str:
        """The cause that another rank has written, or that this one finds in the statuses; empty
        where the job goes on.
        """
        failure = store.first_failure()
        if failure is not None:
            # Of its own failure the main thread is about to print more.
            is_said = self._has_cause and failure.rank != self.rank
            self._has_cause = True
            return str(failure) if is_said else ""
        if self._beats < self._next_look:
            return ""
        max_silence = self._max_silence
        self._next_look = self._beats + min(LOOK_BEATS, max_silence)
        # After a signal every rank looks: rank 0 may be on another host that has received none.
        sees_all = self.rank == 0 or self._has_first_ended or self._is_ending
        statuses = store.statuses(range(self.world) if sees_all else [0])
        if 0 in statuses and statuses[0].phase == ENDED:
            self._has_first_ended = True
        silent: list[int] = []
        for rank, status in statuses.items():
            beats, since = self._last_beats.get(rank, (0, 0))
            if status.beats != beats:
                self._last_beats[rank] = (status.beats, self._beats)
            elif status.phase != ENDED and self._beats - since >= max_silence:
                silent.append(rank)
        waiting = [status.place for status in statuses.values() if status.seconds > self._timeout]
        place = max(waiting, default=(0, 0))
        behind = [rank for rank, status in statuses.items() if status.place < place]
        words = _describe(statuses, silent, behind)
        if words:
            self.fail(words, is_of_others=True)
        return words

    @property
    def _max_silence(self) -> int:
        """Beats for which another rank, or the store, may be silent."""
        if self._is_ending:
            return MIN_SILENCE
        # It is found up to `LOOK_BEATS` beats later.
        return max(MIN_SILENCE, min(int(self._timeout / BEAT_SECONDS), MAX_SILENCE) - LOOK_BEATS)

    def _exit(self, reason: str, code: int) -> None:
        """Print why, and end the process. Does nothing if the main thread prints it already."""
        if not self._exit_lock.acquire(blocking=False):
            return
        text = f"error (rank {self.rank}): in step {self.step} ({self._phase}): {reason}\n"
        if code != 1:
            text = f"[{self.rank}] interrupted in step {self.step}\n"
        # Not through sys.stderr, whose lock the main thread may hold.
        os.write(2, text.encode())
        for action in self.before_exit:
            _run_within(FLUSH_TIMEOUT, action)
        os._exit(code)


def _status_key(rank: int) -> str:
    return f"streammega/rank/{rank}"


def _describe(
    statuses: Mapping[int, RankStatus], silent: Sequence[int], elsewhere: Sequence[int]
) -> str:
    """A sentence about ranks that are silent, and ranks that are elsewhere; empty without any."""
    parts = [f"rank {rank} gives no sign of life; {statuses[rank]}" for rank in silent]
    for rank in elsewhere:
        if rank not in silent:
            parts.append(f"rank {rank} is elsewhere; {statuses[rank]}")
    return "; ".join(parts)


def _run_within(seconds: float, function: Callable[[], T]) -> T | None:
    """The function's result; None where it fails or takes longer. Its thread is then abandoned, since
    the process is about to end.
    """
    results: list[T] = []

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            log.debug("as the process ends: %s", error)

    thread = threading.Thread(target=run, name="streammega-exit", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
