from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.session
import pytest
import torch
from hypothesis import HealthCheck, settings

from streammega import DataConfig, StorageConfig
from streammega.errors import redaction
from tests.support.builders import data_config, write_random_pair
from tests.support.oss_server import KEY as oss_key
from tests.support.oss_server import SECRET as oss_secret
from tests.support.oss_server import Oss, oss_server
from tests.support.processes import ForkedWorker, fork_the_server
from tests.support.servers import S3, moto_server, rclone_server
from tests.support.streams import write_data
from tools.bench.object_server import Running, running

settings.register_profile(
    "streammega",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("streammega")

OSS_NAMES = (
    "ENDPOINT",
    "REGION",
    "ACCESS_KEY_ID",
    "ACCESS_KEY_SECRET",
    "SESSION_TOKEN",
    "SECURITY_TOKEN",
)
ALIBABA_NAMES = ("ACCESS_KEY_ID", "ACCESS_KEY_SECRET", "SECURITY_TOKEN", "CREDENTIALS_URI")
AWS_NAMES = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_PROFILE",
)

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
"""Here and in what tests start: threads that share products of 16 by 16 numbers spend their time
waiting for each other.
"""

botocore.session.create_loader = functools.cache(botocore.session.create_loader)
"""Every client of botocore lists 400 services and reads the same 100,000 objects from JSON: once in
a process is enough.
"""

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""As in many containers: each of some eighty interpreters would compile the package anew, for half
a second, and each run all tests.
"""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
"""A job in the background of a shell is to ignore Ctrl-C, and so would all that tests start."""

multiprocessing.set_forkserver_preload(["tests.support.preloaded"])
"""What the server of forks imports where `fork_the_server` does not make it."""

gc.disable()  # until all tests are imported: see pytest_collection_finish


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections.

    It is some 300,000 objects, which stay. Going over them for whatever the tests leave took half
    of the suite's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()
    fork_the_server()


STORAGE_TESTS = Path(__file__).parent / "storage"
WAIT_LONG = (
    "test_elastic.py",
    "test_clusters.py",
    "to_torchrun",
    "test_retry.py",
    "test_faults.py::test_an_outage",
    "test_faults.py::test_a_server_that_restarts",
    "test_local_files.py",
    "test_train.py::test_killed_runs",
    "test_checkpoints.py",
    "test_training_layouts.py",
)
"""In the names of tests that wait for timeouts and other processes, or take seconds.

First, so that nothing waits for them in the end; and one after the other, which is on one worker,
so that the others keep the processors busy meanwhile.
"""


@pytest.hookimpl(tryfirst=True)  # before those of `-m "not soak"` are taken out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave one of the pairs of a server and a transport to `make soak`, and out the one that cannot
    work; begin with what waits long.
    """
    for item in items:
        if is_left_to_soak(item):
            item.add_marker(pytest.mark.soak)
    items[:] = [item for item in items if pair_of(item) != ("rclone", "obstore")]
    items.sort(key=lambda item: place_of(item.nodeid))


def place_of(name: str) -> int:
    """The place in WAIT_LONG of a test of this name; that of all others is behind them."""
    for place, part in enumerate(WAIT_LONG):
        if part in name:
            return place
    return len(WAIT_LONG)


def is_left_to_soak(item: pytest.Item) -> bool:
    """Whether this is a test of more than the storage with a pair of server and transport that is
    not needed for it to meet both servers and both transports; or, with one transport, the server
    that takes more time.

    What depends on the pair is the storage's: its own tests meet all.
    """
    if not isinstance(item, pytest.Function) or STORAGE_TESTS in item.path.parents:
        return False
    if any("s3" in marker.args[0] for marker in item.iter_markers("parametrize")):
        return False  # it has chosen by itself
    return pair_of(item) in (("moto", "fsspec"), ("moto", None))


def pair_of(item: pytest.Item) -> tuple[Any, Any]:
    """The server and the transport of a test, None where it has not both."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get("s3"), parameters.get("s3_storage")


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test reads or writes the user's caches or credentials, nor waits for the disk: none of
    them cuts the power. The level of logs that a command sets ends with its test.
    """
    log = logging.getLogger("streammega")
    level = log.level
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    # the secrets of other tests are words that messages have
    monkeypatch.setattr(redaction, "_known", [])
    monkeypatch.setattr(redaction, "_environment", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg-cache"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in (
        *AWS_NAMES,
        *(f"OSS_{name}" for name in OSS_NAMES),
        *(f"ALIBABA_CLOUD_{name}" for name in ALIBABA_NAMES),
    ):
        monkeypatch.delenv(name, raising=False)
    yield
    log.setLevel(level)


@pytest.fixture(autouse=True)
def _forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions fork their workers, where `new_interpreters` is not asked for."""
    if "new_interpreters" not in request.fixturenames:
        stand_in = SimpleNamespace(Popen=ForkedWorker, DEVNULL=subprocess.DEVNULL)
        monkeypatch.setattr("streammega.convert.processes.subprocess", stand_in)


@pytest.fixture
def new_interpreters() -> None:
    """Workers of conversions begin as users have them, each for a second."""


@pytest.fixture
def workers_end_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test left of DataLoaders is collected here, and not in the middle of a later one."""
    # s that torch waits for a worker of a loader that was left, and then ends it
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    before = set(multiprocessing.active_children())
    yield
    if set(multiprocessing.active_children()) - before:
        gc.collect()


@pytest.fixture(scope="session")
def gang() -> Iterator[Any]:
    """Processes to run as ranks."""
    from tests.support.gang import Gang

    gang = Gang()
    yield gang
    gang.close()


@pytest.fixture(scope="session")
def moto() -> Iterator[S3]:
    """One for all tests, each with buckets of its own: starting one takes seconds."""
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session", params=["moto", "rclone"])
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """Two implementations of S3: what uses this runs against both."""
    if request.param == "moto":
        yield request.getfixturevalue("moto")
        return
    with rclone_server(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def _object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("objects")
    write_data(root)
    with running(root) as server:
        yield server


@pytest.fixture
def server(_object_server: Running) -> Running:
    """A server for benches with the datasets of streams.py; it behaves well at first."""
    _object_server.behave()
    return _object_server


@pytest.fixture(scope="session")
def _oss_server() -> Iterator[Oss]:
    with oss_server() as server:
        yield server


@pytest.fixture
def oss(_oss_server: Oss, monkeypatch: pytest.MonkeyPatch) -> Oss:
    """A server of OSS's REST interface; while it is used, OSS's host names lead to it."""
    for name, value in _oss_server.environment.items():
        monkeypatch.setenv(name, value)
    _oss_server.behave()
    _oss_server.know(**{oss_key: {"secret": oss_secret}})
    _oss_server.take_log()
    return _oss_server


@pytest.fixture
def bucket(s3: S3) -> str:
    return s3.new_bucket()


@pytest.fixture(params=["obstore", "fsspec"])
def s3_storage(request: pytest.FixtureRequest, s3: S3) -> StorageConfig:
    return StorageConfig(
        transport=request.param, storage_options=s3.options, request_timeout=20
    ).tuned(max_retries=2)


@pytest.fixture
def pair(tmp_path: Path) -> str:
    """The prefix of a local pair of 200 random sequences."""
    prefix = str(tmp_path / "data" / "pair")
    write_random_pair(prefix)
    return prefix


@pytest.fixture
def config(pair: str, tmp_path: Path) -> DataConfig:
    return data_config([pair], tmp_path, num_samples=(960, 0, 0))
