"""Stores in forked processes: fsspec in place of obstore, and no lock that nobody releases."""

from __future__ import annotations

import ast
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

from streammega import StorageConfig
from streammega.errors import ConfigError, ObjectNotFoundError
from streammega.storage import open_store
from streammega.storage.backends import obstore as obstore_backend
from streammega.storage.fork_lock import process_lock
from streammega.storage.store import Store, create_object
from streammega.train.checkpoints.out_dir import lock_file
from tests.support.processes import python_environment, run_python, running_python
from tests.support.read_programs import read_part
from tests.support.servers import S3
from tools.bench.object_server import Running, running

PATIENCE = 60
"""Seconds that a child is waited for: what it does takes less than one."""


def in_fork(program: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> Any:
    """What a program returns, or the repr of its error, in a forked child of this process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_tell, args=(theirs, program, arguments))
    child.start()
    try:
        assert ours.poll(patience), "the child hangs"
        return ours.recv()
    finally:
        child.join(patience)
        child.kill()
        child.join()
        assert child.exitcode == 0


def _tell(pipe: Any, program: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send(program(*arguments))
    except BaseException as error:
        pipe.send(repr(error))


def _use_all(store: Store, key: str) -> list[Any]:
    """What every method of a store tells in this process."""
    size = store.info(key).size
    part = bytes(store.read(key, [(2, 5), (0, 1)])[0])
    store.put("folder/made", b"abc")
    listed = [item.key for item in store.list("folder/")]
    created = create_object(store, "folder/made", b"other")
    store.delete("folder/made")
    try:
        store.info("folder/made")
    except ObjectNotFoundError:
        return [store.transport, size, part, listed, created, "deleted"]
    return []


ALL_USED = [10, b"234", ["folder/key", "folder/made"], False, "deleted"]
BY_FSSPEC = ["fsspec", *ALL_USED]


@pytest.mark.guarantee("forked-processes-read")
def test_a_child_does_all_by_fsspec_and_so_does_its_child_and_the_parent_goes_on(
    moto: S3,
) -> None:
    url = f"s3://{moto.new_bucket()}/folder/key"
    store, key = open_store(url, StorageConfig(storage_options=moto.options))
    store.put(key, b"0123456789")
    assert in_fork(_use_all, store, key) == BY_FSSPEC

    def use_and_fork() -> list[Any]:
        return [_use_all(store, key), in_fork(_use_all, store, key), _use_all(store, key)]

    assert in_fork(use_and_fork) == [BY_FSSPEC] * 3
    assert _use_all(store, key) == ["obstore", *ALL_USED]


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[Running]:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "key").write_bytes(bytes(range(256)) * 4096)
    with running(tmp_path) as server:
        yield server


@pytest.mark.guarantee("forked-processes-read")
@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_child_opens_and_reads_what_its_parent_has_read(objects: Running, scheme: str) -> None:
    options = objects.storage_options if scheme == "s3" else {}
    url = f"{objects.endpoint}/data/key" if scheme == "http" else "s3://data/key"
    expected = bytes([5, 6, 7])
    assert read_part(url, options) == ("obstore", expected)
    assert in_fork(read_part, url, options) == ("fsspec", expected)
    assert read_part(url, options) == ("obstore", expected)


@pytest.mark.guarantee("forked-processes-read")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_that_are_no_forks_read_by_obstore(objects: Running, method: Any) -> None:
    url = "s3://data/key"
    assert read_part(url, objects.storage_options) == ("obstore", bytes([5, 6, 7]))
    with multiprocessing.get_context(method).Pool(1) as children:
        got = children.apply(read_part, (url, objects.storage_options))
    assert got == ("obstore", bytes([5, 6, 7]))


@pytest.fixture
def in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes itself for a child of one that has used obstore."""
    monkeypatch.setattr(obstore_backend._Runtime, "is_lost", True)


@pytest.mark.guarantee("gs-holds-contract")
@pytest.mark.usefixtures("in_a_fork")
@pytest.mark.parametrize("url", ["gs://bucket/key", "az://container/key"])
@pytest.mark.parametrize("transport", ["auto", "obstore"])
def test_what_fsspec_reads_by_other_options_says_in_a_child_how_to_start_workers(
    url: str, transport: Any
) -> None:
    store, key = open_store(url, StorageConfig(transport=transport))
    for call in (
        lambda: store.info(key),
        lambda: store.read(key, [(0, 3)]),
        lambda: store.open_writer(key),
    ):
        with pytest.raises(ConfigError, match=r"'spawn' or 'forkserver'.*StreamLoader"):
            call()
    store, _ = open_store(url, StorageConfig(transport="fsspec"))
    assert store.transport == "fsspec", "what the error names is no error"


@pytest.mark.guarantee("forked-processes-read")
def test_locks_that_a_thread_of_the_parent_holds_are_free_in_the_child() -> None:
    lock = process_lock()
    held = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(PATIENCE)
    assert in_fork(lambda: lock.acquire(timeout=1)) is True
    assert not lock.acquire(blocking=False), "it is held in the parent"
    done.set()
    thread.join()


LOCKS_A_FILE = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(1000)
"""


def release(lock: filelock.BaseFileLock | None) -> None:
    assert lock is not None
    lock.release()


@pytest.mark.guarantee("forked-processes-read")
def test_a_child_locks_an_out_dir_while_a_thread_of_its_parent_waits_for_another(
    tmp_path: Path,
) -> None:
    with running_python(LOCKS_A_FILE, str(tmp_path / "occupied")) as holder:
        waiting = threading.Thread(target=lock_file, args=(tmp_path / "occupied",))
        waiting.start()
        try:
            time.sleep(0.5)
            assert in_fork(lambda: release(lock_file(tmp_path / "free")), patience=5) is None
        finally:
            holder.kill()
            waiting.join()
            release(lock_file(tmp_path / "occupied"))


@pytest.mark.guarantee("forked-processes-read")
def test_no_module_has_a_lock_that_a_fork_leaves_locked() -> None:
    """A child can never release a plain lock that another thread of its parent held."""
    plain = []
    for path in Path("streammega").rglob("*.py"):
        for line in ast.parse(path.read_text()).body:
            if isinstance(line, (ast.Assign, ast.AnnAssign)) and line.value is not None:
                called = ast.unparse(line.value)
                if called.startswith(("threading.", "multiprocessing.")) and "local" not in called:
                    plain.append(f"{path}: {ast.unparse(line)}")
    assert plain == []


IN_FLIGHT = """
import gc, os, sys, threading
from streammega import StorageConfig
from streammega.storage import open_store
options = {"anon": True, "endpoint_url": sys.argv[1]}
store, key = open_store("s3://data/key", StorageConfig(storage_options=options))
end = threading.Event()
failures = []

def read(count):
    for _ in range(count):
        (part,) = store.read(key, [(256, 70_000)])
        if bytes(part[:3]) != b"\\x00\\x01\\x02":
            failures.append("other bytes")

def go_on():
    while not end.is_set():
        read(1)

def fork():
    for number in range(2):
        child = os.fork()
        if child == 0:
            read(3)
            if number == 1:
                del globals()["store"]
            gc.collect()
            failed = 7 if failures else 0
            # sys.exit in another thread than the main one ends that thread alone
            if number == 1 or threading.current_thread() is forker:
                os._exit(failed)
            sys.exit(failed)
        children.append(os.waitpid(child, 0)[1])

children = []
readers = [threading.Thread(target=go_on) for _ in range(4)]
for reader in readers:
    reader.start()
read(1)
forker = threading.Thread(target=fork)
fork()
forker.start()
forker.join()
end.set()
for reader in readers:
    reader.join()
print(children, failures)
"""


@pytest.mark.guarantee("forked-processes-read")
def test_forks_while_requests_are_in_flight_from_any_thread_harm_nobody(objects: Running) -> None:
    """Children of os.fork, made by the main thread and by another one, that end with and without
    freeing what they inherited.
    """
    objects.behave(latency=0.005)
    quiet = "import warnings\nwarnings.filterwarnings('ignore')\n"
    assert run_python(quiet + IN_FLIGHT, objects.endpoint) == f"{[0] * 4} []\n"


NEVER_USED = """
import logging, os, sys, warnings
warnings.filterwarnings("ignore")
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
from streammega import StorageConfig
from streammega.storage import open_store
options = {"anon": True, "endpoint_url": sys.argv[1]}
store, key = open_store("s3://data/key", StorageConfig(storage_options=options))
for _ in range(2):
    if os.fork() == 0:
        print(len(store.read(key, [(0, 9)])[0]), store.transport, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.guarantee("forked-processes-read")
def test_children_of_a_parent_that_never_read_read_by_obstore(objects: Running) -> None:
    assert run_python(NEVER_USED, objects.endpoint) == "9 obstore\n" * 2


COMPILES = """
import os, sys, threading, time, warnings
import numba, numpy as np
from streammega.kernels.jit import kernel
warnings.filterwarnings("ignore")
array = np.arange(10)
end = threading.Event()

@kernel
def largest(values):
    most = values[0]
    for value in values:
        most = max(most, value)
    return most

def compile_others():
    while not end.is_set():
        numba.njit(lambda values: values.sum())(array)

thread = threading.Thread(target=compile_others)
thread.start()
for number in range(3):
    time.sleep(0.003 + 0.05 * number)  # at first its thread has compiled nothing
    if os.fork() == 0:
        os._exit(0 if largest(array) == 9 else 1)
    print(os.wait()[1])
end.set()
thread.join()
"""


@pytest.mark.guarantee("forked-processes-read")
def test_no_child_waits_for_a_compiler_that_a_thread_of_its_parent_was_in(tmp_path: Path) -> None:
    """With an empty cache of kernels, the child has to compile too."""
    environment = python_environment(NUMBA_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-c", COMPILES]
    done = subprocess.run(command, env=environment, timeout=PATIENCE, stdout=subprocess.PIPE)
    assert done.stdout.split() == [b"0"] * 3
