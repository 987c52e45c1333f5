"""Work in processes of their own. A native library may end one of them; the others go on.

A process tells what it reads before it reads it (`source.native_reads`), so that its end is charged
to the right part of the right file. What ended a process is done again at the end, alone: other
work takes no memory then.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from streammega.convert.read.source import Place, native_reads
from streammega.errors import ConfigError, ConvertError, StreammegaError
from streammega.errors.logs import get_logger
from streammega.storage.progress import Progress

log = get_logger(__name__)

Work = Callable[[int, Progress], Any]
"""Does the unit or shard of a number: (number, progress(bytes, tokens)) -> its result. It is sent to
other processes.
"""
START = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
try:
    pipe.send(None)
    sys.path[:] = pipe.recv()
    from streammega.convert.processes import serve
    serve(pipe)
except (EOFError, BrokenPipeError, ConnectionResetError):
    pass  # the parent has ended
"""
"""A process begins here and not with the user's script, so this needs no `if __name__ == "__main__"`
and may be a notebook. Ctrl-C is for the parent, which ends its processes.
"""
PR_SET_PDEATHSIG = 1
"""The option of Linux's prctl for the signal that a process gets when its parent ends."""


class Step(NamedTuple):
    """Bytes and tokens of some work. A difference is not below zero."""

    size: int = 0
    tokens: int = 0

    def __add__(self, other: Step) -> Step:  # type: ignore[override]
        return Step(self.size + other.size, self.tokens + other.tokens)

    def __sub__(self, other: Step) -> Step:
        return Step(max(0, self.size - other.size), max(0, self.tokens - other.tokens))


class Done(NamedTuple):
    """The result of a number, and how much it was."""

    result: Any
    step: Step = Step()


class Death(NamedTuple):
    """A process ended in the middle of its work. status: as `Popen.returncode` has it. place: what it
    read last; None: nothing.
    """

    status: int
    place: Place | None

    @property
    def is_kill(self) -> bool:
        """Whether it was ended from outside, as the system does for memory."""
        return self.status == -signal.SIGKILL

    def message(self) -> str:
        """What is said of the second one."""
        if self.is_kill and self.place is None:
            return (
                "the system killed a worker twice, probably for its memory; use fewer --workers, or "
                "less --shuffle-memory"
            )
        what = "a worker" if self.place is None else str(self.place)
        if self.is_kill:
            return (
                f"{what}: the system killed the process that read it, twice, probably for its "
                f"memory; use fewer --workers or less --shuffle-memory, or write the input with "
                f"smaller row groups"
            )
        return (
            f"{what}: reading it ends the process ({self._how()}), twice by now: it is damaged, or a "
            f"library cannot read it; write it again, or leave it out by --on-error skip"
        )

    def _how(self) -> str:
        return signal.Signals(-self.status).name if self.status < 0 else f"exit {self.status}"


def run_in_processes(
    work: Work,
    numbers: Sequence[int],
    processes: int,
    progress: Progress,
    *,
    library_threads: int = 1,
    may_leave_out: bool = False,
) -> Iterator[tuple[int, Any]]:
    """(number, result) of each as it is done.

    library_threads: of the tokenizers library, over all processes. may_leave_out: whether what ends
    its process twice is left out, where it is known. Raises what the work raises, and ConvertError
    for other work that ends its process twice, and where memory may be the reason.
    """
    died: dict[int, Death] = {}
    reported: dict[int, Step] = {}
    for number, outcome in _attempt(
        work, numbers, processes, progress, reported, library_threads, {}
    ):
        if isinstance(outcome, Death):
            log.warning("a worker was killed; what it was doing is done again at the end, alone")
            died[number] = outcome
        else:
            yield number, outcome
    for number, death in died.items():
        tried = {death.place}
        fatal: dict[Place, str] = {}
        while True:
            [(_, outcome)] = _attempt(work, [number], 1, progress, reported, library_threads, fatal)
            if not isinstance(outcome, Death):
                yield number, outcome
                break
            place = outcome.place
            is_known = place in tried
            if outcome.is_kill or (is_known and not (place and may_leave_out)):
                raise ConvertError(outcome.message())
            if is_known and place:
                fatal[place] = outcome.message()
            tried.add(place)


def _attempt(
    work: Work,
    numbers: Sequence[int],
    processes: int,
    progress: Progress,
    reported: dict[int, Step],
    library_threads: int,
    fatal: Mapping[Place, str],
) -> Iterator[tuple[int, Any]]:
    """(number, result or Death) of each. A process does one number at a time.

    reported: how much progress of each was reported, for what is done again is not reported again. fatal:
    what is left out, and why.
    """
    processes = min(processes, len(numbers))
    setup = (work, max(1, library_threads // processes), fatal)
    waiting = deque(numbers)
    children: dict[Any, _Child] = {}

    def start() -> None:
        """Start a process for the next number."""
        child = _Child(waiting.popleft())
        children[child.pipe] = child

    try:
        for _ in range(processes):
            start()
        while children:
            for pipe in wait(list(children)):
                child = children[pipe]
                answer = child.receive()
                if answer is None:  # it is there, and reads what it is sent
                    child.send(sys.path, setup, child.number)
                elif isinstance(answer, Place):
                    child.place = answer
                elif isinstance(answer, Step):
                    child.done += answer
                    before = reported.get(child.number, Step())
                    ahead = child.done - before
                    reported[child.number] = before + ahead
                    progress(*ahead)
                    child.send(None)  # it goes on when that is reported, as a thread does
                elif isinstance(answer, Exception):
                    raise answer
                elif isinstance(answer, Death):
                    del children[pipe]
                    if waiting:
                        start()
                    yield child.number, answer
                else:
                    number = child.number
                    if waiting:
                        child.begin(waiting.popleft())
                    else:
                        child.end()
                        del children[pipe]
                    yield number, answer.result
    finally:
        for child in children.values():
            child.end()


class _Child:
    """A process that does numbers, one at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.place: Place | None = None
        self.done = Step()
        self.pipe, its_end = Pipe()
        with its_end:
            handle = its_end.fileno()
            # -P: modules of the folder that it is started in are not taken for Python's own
            command = [sys.executable, "-P", "-c", START, str(handle)]
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[handle], stdin=subprocess.DEVNULL
                )
            except OSError as error:
                raise ConvertError(
                    f"a worker process cannot be started ({error}); use fewer --workers"
                ) from None

    def receive(self) -> Any:
        """What it says next. Raises ConvertError if it could not start."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            death = Death(self._process.wait(), self.place)
            self.pipe.close()
            if death.status == 1:  # an error of Python, outside of the work
                raise ConvertError(
                    "a worker process ended with an error of Python; see its message above"
                ) from None
            return death

    def send(self, *values: Any) -> None:
        """Send values. If it is dead, `receive` says so."""
        with suppress(OSError):
            for value in values:
                self.pipe.send(value)

    def begin(self, number: int) -> None:
        """Give it the next number."""
        self.number = number
        self.place = None
        self.done = Step()
        self.send(number)

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        self.pipe.close()


# --- in the process -------------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Do the work of the numbers that are sent, until this process is ended."""
    if sys.platform == "linux":
        # It does not outlive its parent, however that ends.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        work, threads, native_reads.fatal = pipe.recv()
    except AttributeError as error:  # of pickle
        pipe.send(
            ConfigError(
                f"worker processes do not have all that they need ({error}); define it in a module "
                f"that can be imported, in place of the script"
            )
        )
        return
    native_reads.tell = pipe.send
    set_library_threads(threads)

    def report(size: int, tokens: int) -> None:
        """Report progress, and wait until that is done."""
        pipe.send(Step(size, tokens))
        pipe.recv()

    while True:
        number = pipe.recv()
        try:
            answer: Any = Done(work(number, report))
        except Exception as error:
            # Those of libraries may not survive the way.
            answer = error
            if not isinstance(error, StreammegaError):
                if type(error).__module__ != "builtins":
                    answer = RuntimeError(f"{type(error).__name__}: {error}")
                answer.add_note(traceback.format_exc())
        pipe.send(answer)


def do_counted(work: Work, number: int) -> Done:
    """Do the work of a number, where progress cannot be reported meanwhile."""
    step = Step()

    def count(size: int, tokens: int) -> None:
        nonlocal step
        step += Step(size, tokens)

    return Done(work(number, count), step)


def set_library_threads(threads: int) -> None:
    """Let the tokenizers library use so many threads in this process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
