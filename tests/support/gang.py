"""Processes that stay: each test hands them a function to run as ranks of a process group of its
own.

Importing torch takes seconds, forking a process that has done it takes milliseconds.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.debug as tensor_debug

TIMEOUT = 120.0
MEETINGS = 3
"""How often ranks try to connect: now and then gloo closes connections while they are made, before
code under test runs.
"""
Member = tuple[Any, Connection]


class Gang:
    """Up to any number of processes; `run` calls a function on the first `size` of them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._members: list[Member] = []
        self._folders: list[str] = []

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(rank, *arguments) on `size` ranks with gloo; their results.

        An error of any rank is raised here.
        """
        return self._collect(self._met(size, function, arguments))

    def run_until(
        self, due: Callable[[], bool], size: int, function: Callable[..., Any], *arguments: Any
    ) -> bool:
        """The same, but SIGKILL for all ranks at once when `due` says so; whether
        it came to that.
        """
        members = self._met(size, function, arguments)
        while not wait([pipe for _, pipe in members], timeout=0.01):
            if due():
                self.close()
                return True
        self._collect(members)
        return False

    def _met(
        self, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> list[Member]:
        """Ranks that have met and now run the function.

        New processes try once more where gloo could not connect them.
        """
        for attempt in range(MEETINGS):
            members = self._start(size, function, arguments)
            answers = [self._answer(pipe) for _, pipe in members]
            if all(answer is None for answer in answers):
                for _, pipe in members:
                    pipe.send("go on")
                return members
            self.close()
            print(f"ranks did not meet, attempt {attempt + 1}: {answers}", file=sys.stderr)
        raise AssertionError(f"{size} ranks did not meet: {answers}")

    def _answer(self, pipe: Connection) -> str | None:
        """What a rank says of the meeting: None is success."""
        if not pipe.poll(TIMEOUT):
            return f"no answer within {TIMEOUT:.0f} s"
        try:
            answer: str | None = pipe.recv()
        except EOFError:
            return "the process died"
        return answer

    def _start(
        self, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> list[Member]:
        while len(self._members) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self._folders.append(tempfile.mkdtemp(prefix="gang-"))
        store = os.path.join(self._folders[-1], "store")
        members = self._members[:size]
        for rank, (_, pipe) in enumerate(members):
            pipe.send((rank, size, store, function, arguments))
        return members

    def _collect(self, members: list[Member]) -> list[Any]:
        """The results of all; whatever ends the wait ends the ranks too, or they would answer to
        the next test.
        """
        try:
            return self._wait_for_all(members)
        except BaseException:
            self.close()
            raise

    def _wait_for_all(self, members: list[Member]) -> list[Any]:
        results: dict[int, Any] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(members)}
        while pipes:
            ready = wait(list(pipes), timeout=TIMEOUT)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    good, value = pipe.recv()
                except EOFError:
                    good = False
                    value = "the process died"
                if not good:
                    raise AssertionError(f"rank {rank}: {value}")
                results[rank] = value
            if not ready:
                raise AssertionError(
                    f"ranks {sorted(pipes.values())} did not answer within {TIMEOUT:.0f} s"
                )
        return [results[rank] for rank in range(len(members))]

    def close(self) -> None:
        for process, pipe in self._members:
            process.kill()
            process.join()
            pipe.close()
        self._members.clear()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders.clear()


def on_ranks(size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on so many ranks: its first argument is the rank.

    The others are fixtures and parameters, which are sent to the ranks.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(gang: Gang, **arguments: Any) -> None:
            gang.run(size, _run_body, body.__module__, body.__name__, arguments)

        _, *others = inspect.signature(body).parameters.values()
        fixture = inspect.Parameter("gang", inspect.Parameter.KEYWORD_ONLY)
        parameters = [fixture, *(item.replace(kind=fixture.kind) for item in others)]
        vars(test)["__signature__"] = inspect.Signature(parameters)
        return test

    return decorate


def _run_body(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name)
    test.__wrapped__(rank, **arguments)


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        try:
            rank, size, store, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if not _meet(pipe, rank, size, store):
                return
            value = function(rank, *arguments)
            pipe.send((True, value))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
                _forget_meshes()


def _meet(pipe: Connection, rank: int, size: int, store: str) -> bool:
    """Connect to the other ranks; True when all of them have, by the word of the one who started
    them.
    """
    try:
        if size > 1:
            timeout = timedelta(seconds=60)
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
            )
    except Exception:
        pipe.send(traceback.format_exc())
        return False
    pipe.send(None)
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


def _forget_meshes() -> None:
    """DTensor's caches hold meshes, and take one of a group that is gone for an equal one of the
    next.
    """
    for name in ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache"):
        getattr(tensor_debug, name, lambda: None)()
