"""Every rank publishes what it does, and ends with the cause when another one has stopped the job.

A rank whose main thread waits in a collective is out of reach: Python runs neither signal
handlers nor other code there, and with NCCL no collective raises when another rank is gone. So a
thread watches, prints why the job ends, and ends the process.

Once a second, a beat, it publishes the status of its rank in the job's store, and reads one key: the
first cause that any rank has left there. Rank 0 compares the statuses of all ranks now and then. The
other ranks look at rank 0 alone; at all ranks after a signal, and once rank 0 has finished. Who finds
something writes it as the cause.

| what is seen | the rank ends after |
|---|---|
| a cause | a beat |
| a rank gives no sign of life | `SILENCE` beats, or `timeout` if shorter; `SOON` after a signal |
| the job's store does not answer | the same |
| a rank waits, and another one is at an earlier place | `timeout`, and up to `LOOK` beats |
| Ctrl-C wants the end at once, and the main thread does not take it | `TAKEN` beats |
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

BEAT = 1.0
"""Seconds between two signs of life."""
LOOK = 10
"""Beats between two looks at statuses: at a thousand ranks the answer is large."""
SILENCE = 60
"""Beats: some libraries hold Python's lock for many seconds, and a job of thousands of ranks must
not end for that.
"""
SOON = 5
"""Beats after which silence counts where a signal ends the job."""
TAKEN = 2
"""Beats in which a main thread that runs Python takes a Ctrl-C by itself. Its message has more than
the watchdog's.
"""
DIAGNOSIS_TIMEOUT = 30.0
"""Seconds for which the store is asked for the statuses of others: a host that is gone does not even
refuse, and TCP tries for minutes.
"""
FLUSH_TIMEOUT = 5.0
"""Seconds that flushing metrics, and telling the others why, may take before the process ends."""
CLIENT_TIMEOUT = timedelta(seconds=10)
"""Of one request to the store, whose keys are there already."""
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
"""What a rank does, in the order of a step. Ranks wait for one that is in an earlier phase."""
T = TypeVar("T")


class RankStatus(NamedTuple):
    """What a rank does, and for how long. beats: signs of life that it has given."""

    beats: int
    step: int
    phase: str
    seconds: float

    @property
    def place(self) -> tuple[int, int]:
        """How far the rank is."""
        return self.step, PHASES.index(self.phase)

    def __str__(self) -> str:
        return f"last heard of in step {self.step} ({self.phase}, for {self.seconds} s)"


class Failure(NamedTuple):
    """Why the job ends. rank: whose fault it is; None: what ranks have seen of others."""

    rank: int | None
    cause: str

    def __str__(self) -> str:
        return self.cause if self.rank is None else f"rank {self.rank} ended the job: {self.cause}"


class StatusStore:
    """Statuses of all ranks, and the first failure, in the store of the job.

    It has a client of its own. A store's client is locked while it waits, and that of training waits
    for other ranks. Every method raises RuntimeError where the store does not answer.
    """

    def __init__(self, store: Store) -> None:
        # Made while the store answers: clones of it wait no longer than it does.
        self._origin: Store = store.clone()  # type: ignore[attr-defined]
        self._origin.set_timeout(CLIENT_TIMEOUT)
        self._client: Store | None = self._origin

    def publish(self, rank: int, status: RankStatus) -> None:
        """Say what a rank does."""
        with self._connection() as client:
            client.set(_status_key(rank), json.dumps(status))

    def statuses(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """What these ranks do, without those that have published nothing yet."""
        known = list(ranks)
        with self._connection() as client:
            # For all at once the store only says whether all are there. They are, but at the start.
            if not client.check([_status_key(rank) for rank in known]):
                known = [rank for rank in known if client.check([_status_key(rank)])]
            # One request: there may be a thousand ranks.
            values = client.multi_get([_status_key(rank) for rank in known]) if known else []
        statuses = [RankStatus(*json.loads(value)) for value in values]
        return dict(zip(known, statuses, strict=True))

    def report_failure(self, failure: Failure) -> None:
        """Say why the job ends. The first failure is kept."""
        short = failure._replace(cause=failure.cause[:MAX_CAUSE_CHARACTERS])
        with self._connection() as client:
            client.compare_set(CAUSE, "", json.dumps(short))

    def first_failure(self) -> Failure | None:
        """The first failure of any rank, if there was one."""
        with self._connection() as client:
            # `get` alone would wait until there is one.
            return Failure(*json.loads(client.get(CAUSE))) if client.check([CAUSE]) else None

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Store]:
        """A client. After an error the next one is new: this one may be in the middle of an answer."""
        client: Store = self._client or self._origin.clone()  # type: ignore[attr-defined]
        self._client = None
        yield client
        self._client = client


class Watchdog:
    """Signs of life of this rank in the store of the job, and what those of the others say.

    `phase` is cheap: it sets attributes. Make it in the main thread, or signals are not heard.

    Args:
        store: that all ranks joined; None: a rank by itself, which nobody watches.
        rank: of this process.
        world: ranks of the job.
        timeout: seconds that a rank may wait for others at one place; they are then named, and the
            job ended.
    """

    def __init__(self, store: Store | None, rank: int, world: int, timeout: float = 600.0) -> None:
        self.rank = rank
        self.world = world
        self.step = 0
        self.stop_requests = StopRequests()
        self.before_exit: list[Callable[[], None]] = []
        """What is called before the thread ends the process: it must not wait for other ranks."""
        self._timeout = timeout
        self._phase = PHASES[0]
        self._phase_start = time.monotonic()
        self._beats = 0
        self._next_look = 0
        self._is_ending = False
        """Whether a signal asks for the end of the run."""
        self._has_first_ended = False
        """Whether rank 0, which looks at all ranks, has finished."""
        self._answer_time = time.monotonic()
        """When the store answered last."""
        self._last_beats: dict[int, tuple[int, int]] = {}
        """By rank its beats, and the beat of this rank at which they were first seen: where all are
        slow, nobody is silent.
        """
        self._closed = threading.Event()
        self._exit_lock = threading.Lock()
        """Of the main thread or the watchdog's, whichever ends the run: the cause is printed once."""
        self._store = None if store is None else StatusStore(store)
        if store is not None:
            self.stop_requests.listen()
            threading.Thread(target=self._run, name="streammega-watchdog", daemon=True).start()

    def phase(self, name: str, step: int | None = None) -> None:
        """This rank now does something else, or more of the same."""
        assert name in PHASES
        self._phase = name
        self._phase_start = time.monotonic()
        if step is not None:
            self.step = step

    def fail(self, cause: str, *, is_of_others: bool = False) -> None:
        """Let the others know why this rank ends the job: by its own fault, or because of what it
        has seen of others.
        """
        if self._store is not None:
            failure = Failure(None if is_of_others else self.rank, cause)
            _run_within(FLUSH_TIMEOUT, partial(self._store.report_failure, failure))

    def claim_exit(self) -> None:
        """The caller prints why the process ends. Does not return where the thread does already."""
        if self._store is not None:
            self._exit_lock.acquire()

    def diagnose(self) -> str:
        """What the others say after a collective failed: who failed first, who gives no sign of
        life, what each was doing.
        """
        answer = _run_within(DIAGNOSIS_TIMEOUT, self._diagnose)
        return answer or f"rank {self.rank} cannot ask the others: the job's store does not answer"

    def _diagnose(self) -> str:
        assert self._store is not None
        try:
            before = self._store.statuses(range(self.world))
            time.sleep(2.5 * BEAT)  # in which each rank that lives gives a sign
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
        """End the signs of life; the silence that follows is no failure."""
        self._closed.set()
        self.stop_requests.close()
        if self._store is not None:
            self._phase = ENDED
            # The store may have ended with rank 0: nobody is left who would read it.
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
            if requests.first is not None and not self._is_ending:
                self._is_ending = True
                self._next_look = self._beats
            code = 1
            try:
                self._store.publish(self.rank, self._status())
                reason = self._reason_to_end(self._store)
                self._answer_time = time.monotonic()
            except Exception as error:
                # A connection that broke: the next beat takes another.
                log.debug("the job's store does not answer: %s", error)
                seconds = time.monotonic() - self._answer_time
                reason = ""
                if seconds >= self._max_silence * BEAT:
                    reason = (
                        f"the job's store has not answered for {seconds:.0f} s: "
                        f"its host is gone, see its log"
                    )
            at_once_time = requests.at_once_time or math.inf
            if not reason and time.monotonic() - at_once_time > TAKEN * BEAT:
                reason = "interrupted"
                code = 128 + signal.SIGINT
                self.fail(reason)
            if reason and not self._closed.is_set():
                self._exit(reason, code)
            requests.wait(BEAT)

    def _reason_to_end(self, store: StatusStore) -> str:
        """The cause that another rank has left, or that this one finds by a look at statuses; empty
        where the job goes on.
        """
        failure = store.first_failure()
        if failure is not None:
            # If it is its own, the main thread is about to say it.
            return "" if failure.rank == self.rank else str(failure)
        if self._beats < self._next_look:
            return ""
        max_silence = self._max_silence
        self._next_look = self._beats + min(LOOK, max_silence)
        # A rank that a signal ends looks at all: rank 0 may be on another host, and not know of it.
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
        """Beats for which another rank, or the store, may give no sign of life."""
        if self._is_ending:
            return SOON
        # A silence is seen up to `LOOK` beats after it is so long.
        return max(SOON, min(int(self._timeout / BEAT), SILENCE) - LOOK)

    def _exit(self, reason: str, code: int) -> None:
        """Print why, and end the process; if the main thread is saying it already, leave that to
        it.
        """
        if not self._exit_lock.acquire(blocking=False):
            return
        text = f"error (rank {self.rank}): in step {self.step} ({self._phase}): {reason}\n"
        if code != 1:
            text = f"[{self.rank}] interrupted in step {self.step}\n"
        # Not by sys.stderr, whose lock the main thread may hold.
        os.write(2, text.encode())
        for action in self.before_exit:
            _run_within(FLUSH_TIMEOUT, action)
        os._exit(code)


def _status_key(rank: int) -> str:
    return f"streammega/rank/{rank}"


def _describe(
    statuses: Mapping[int, RankStatus], silent: Sequence[int], elsewhere: Sequence[int]
) -> str:
    """The ranks that are silent, and then those that are elsewhere, in words; empty without any."""
    parts = [f"rank {rank} gives no sign of life; {statuses[rank]}" for rank in silent]
    for rank in elsewhere:
        if rank not in silent:
            parts.append(f"rank {rank} is elsewhere; {statuses[rank]}")
    return "; ".join(parts)


def _run_within(seconds: float, function: Callable[[], T]) -> T | None:
    """Its result. None where it fails, or takes longer: its thread is left behind, for the process
    is to end.
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
