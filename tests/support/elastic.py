"""torchrun's agent in this process, its ranks in forks: it starts them, watches them, ends them and
starts them again as `torchrun --standalone` does.

A launcher and two ranks in interpreters of their own import torch for twelve seconds, and two more
ranks after a restart for eight.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.support.processes import Family


@dataclass(frozen=True)
class Outcome:
    """How a job ended, and what all of its ranks have written.

    error: what torchrun says of ranks that failed.
    said_last: when one of them wrote to its log last, by time.time: what it says of its end is
    followed by it.
    """

    good: bool
    error: str
    printed: str
    log: str
    said_last: float


def run(
    folder: Path,
    ranks: int,
    program: Callable[[list[str]], int],
    arguments: list[str],
    environment: dict[str, str],
    restarts: int = 0,
    all_end_alone: bool = False,
) -> Outcome:
    """program(arguments), which returns an exit code, on so many ranks.

    all_end_alone: a rank that fails is gone only when all others are done too: the agent
    would end those that have yet to say what they know.
    """
    logs = folder / f"elastic-{uuid.uuid4().hex}"
    logs.mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )
    surroundings = {**os.environ, **environment}
    meeting = logs / "done" if all_end_alone else None
    with handlers_of_signals_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            launched = elastic_launch(config, _run_program)
            launched(program, arguments, surroundings, logs, meeting)
            error = ""
        except ChildFailedError as failure:
            error = str(failure)
    said_last = max(path.stat().st_mtime for path in logs.rglob("stderr.log"))
    logged = _all_of(logs, "stdout.log"), _all_of(logs, "stderr.log")
    return Outcome(not error, error, *logged, said_last)


def launch_agent(folder: Path, *job: Any) -> Family:
    """`run` in a fork, which may be signalled; at its end it writes what its ranks wrote to its own log.

    job: the arguments of `run` after the folder.
    """
    return Family(folder, 1, _run_agent, folder, *job)


def _run_agent(_: int, folder: Path, *job: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server of forks ignores
    multiprocessing.current_process().daemon = False  # it has children
    try:
        outcome = run(folder, *job)
    finally:
        print(_all_of(folder, "stderr.log"), file=sys.stderr, flush=True)
    if not outcome.good:
        sys.exit(outcome.error)


def pids_of_ranks(folder: Path) -> list[int]:
    """Those of the jobs of a folder."""
    return [int(path.read_text()) for path in folder.glob("elastic-*/*.pid")]


def run_script(arguments: list[str]) -> int:
    """`python SCRIPT ...`, as a program for `run`."""
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _all_of(logs: Path, name: str) -> str:
    return "".join(path.read_text() for path in sorted(logs.rglob(name)))


@contextlib.contextmanager
def handlers_of_signals_kept() -> Iterator[None]:
    """The agent takes these signals, and does not give them back."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_program(
    program: Callable[[list[str]], int],
    arguments: list[str],
    environment: dict[str, str],
    logs: Path,
    meeting: Path | None,
) -> None:
    (logs / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    os.environ.update(environment)
    torch.set_num_threads(1)
    code = program(arguments)
    if meeting is not None:
        _wait_for_all(meeting)
    if code:
        os._exit(code)


def _wait_for_all(meeting: Path) -> None:
    """Until every rank is done, or half a minute is over."""
    meeting.mkdir(exist_ok=True)
    (meeting / os.environ["RANK"]).touch()
    ranks = int(os.environ["WORLD_SIZE"])
    deadline = time.monotonic() + 30
    while len(list(meeting.iterdir())) < ranks and time.monotonic() < deadline:
        time.sleep(0.02)
