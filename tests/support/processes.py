"""Processes that end by themselves, each with a log of its own: what is tested is how they end."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch


def fork_the_server() -> None:
    """Make the server of forks a fork of this process, which has imported all tests.

    A server of its own would import torch for five seconds in each worker of pytest. Python 3.14
    starts it in another way, and keeps that.
    """
    if sys.version_info < (3, 14):
        resource_tracker.ensure_running()  # an interpreter of its own, as ever
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(multiprocessing.util, "spawnv_passfds", partial(_fork_server, patch))
            forkserver.ensure_running()


def _fork_server(
    patch: pytest.MonkeyPatch, _path: object, _arguments: object, descriptors: list[int]
) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, such as that of pytest-xdist
        pid = os.fork()
    if pid:
        return pid
    patch.undo()  # or what the forks spawn would be servers too
    try:
        _serve_forks(*descriptors)
    finally:
        os._exit(0)


def _serve_forks(listener: int, alive: int) -> None:
    """The server's program, without what pytest and its worker have set up."""
    this_pipe = os.readlink(f"/proc/self/fd/{alive}")
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own
            if descriptor != alive and os.readlink(f"/proc/self/fd/{descriptor}") == this_pipe:
                os.close(descriptor)  # or the server would wait for itself
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    # Its lock is held where this process was forked: children that ask for forks would wait.
    forkserver._forkserver.__init__()  # type: ignore[misc]
    select.select([listener, alive], [], [])  # the kernels are for those who fork
    forkserver.main(listener, alive, ["tests.support.preloaded"])


class Family:
    """So many processes, forked from one that has imported torch; `program(rank, *arguments)` runs
    in each.
    """

    def __init__(
        self, folder: Path, size: int, program: Callable[..., None], *arguments: Any
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._logs = [folder / f"rank-{rank}.log" for rank in range(size)]
        self.members = [
            context.Process(target=_run, args=(str(log), program, rank, *arguments), daemon=True)
            for rank, log in enumerate(self._logs)
        ]
        for member in self.members:
            member.start()

    def log(self, rank: int) -> str:
        """What a process has written so far."""
        path = self._logs[rank]
        return path.read_text() if path.exists() else ""

    def said_last(self, rank: int) -> float:
        """When a process wrote to its log last, by time.time: what it says of its end is followed
        by it.
        """
        return self._logs[rank].stat().st_mtime

    def wait_for(self, text: str, *ranks: int, timeout: float = 60.0) -> None:
        """Return when all of these processes have written a text."""
        deadline = time.monotonic() + timeout
        while not all(text in self.log(rank) for rank in ranks):
            assert time.monotonic() < deadline, [self.log(rank) for rank in ranks]
            time.sleep(0.02)

    def signal(self, number: int, *ranks: int) -> None:
        """Send these processes a signal; one that has ended gets none."""
        for rank in ranks:
            pid = self.members[rank].pid
            assert pid is not None
            # The server of forks knows of an end before this process is told of it.
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def ended(self, *ranks: int, within: float) -> list[int | None]:
        """Exit codes; None of a process that still runs after so many seconds."""
        deadline = time.monotonic() + within
        for rank in ranks:
            self.members[rank].join(max(deadline - time.monotonic(), 0.0))
        return [self.members[rank].exitcode for rank in ranks]

    def close(self) -> None:
        """SIGKILL to those that are left."""
        for member in self.members:
            member.kill()
            member.join()


def _run(log: str, program: Callable[..., None], rank: int, *arguments: Any) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    program(rank, *arguments)


def launch(
    folder: Path, ranks: int, command: list[str], environment: dict[str, str] | None = None
) -> Family:
    """`python COMMAND` on so many ranks, as torchrun would start them, in forks.

    A fresh interpreter would import torch for five seconds. Of torchrun itself this shows nothing.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    surroundings = {**os.environ, **(environment or {})}
    return Family(folder, ranks, _run_program, ranks, port, command, surroundings)


def _run_program(
    rank: int, ranks: int, port: int, command: list[str], environment: dict[str, str]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if ranks > 1:
        os.environ.update(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
        )
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server of forks ignores
    multiprocessing.current_process().daemon = False  # it may have children, as a program has
    torch.set_num_threads(1)
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(command[1], {"__name__": "__main__"})
    elif command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


class ForkedWorker:
    """In place of the interpreter that a conversion starts for a worker: a fork that has imported the
    library, with what `subprocess.Popen` has of it.
    """

    def __init__(self, command: list[str], *, pass_fds: list[int], **_others: object) -> None:
        *_, program, handle = command
        assert [int(handle)] == pass_fds
        pipe = Connection(os.dup(int(handle)))
        context = multiprocessing.get_context("forkserver")
        arguments = (program, pipe, dict(os.environ))
        self._process = context.Process(target=_begin_worker, args=arguments, daemon=True)
        self._process.start()
        pipe.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _begin_worker(program: str, pipe: Connection, environment: dict[str, str]) -> None:
    faulthandler.disable()  # pytest's, which would tell of an abort
    multiprocessing.current_process().daemon = False
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", str(pipe.fileno())]
    exec(program, {"__name__": "__main__"})


def in_child(program: Callable[..., Any], *arguments: Any) -> Any:
    """What a program returns in a fork of this process, within two minutes."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(program(*arguments)), daemon=True)
    child.start()
    theirs.close()
    try:
        assert ours.poll(120), "the child waits for ever"
        return ours.recv()
    finally:
        child.kill()
        child.join()
        ours.close()


def python_environment(**variables: str) -> dict[str, str]:
    """The environment of another Python process that imports this checkout."""
    path = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
    )
    return os.environ | {"PYTHONPATH": path, **variables}


def run_python(code: str, *arguments: str) -> str:
    """What a Python process of its own printed; it must end without an error."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=python_environment(),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running_python(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process from its first line of output on; it is killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=python_environment(),
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
