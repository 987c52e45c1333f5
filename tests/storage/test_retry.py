"""How long failures are waited for: outages of minutes by default, what waiting cannot mend not at
all, and Ctrl-C at once.
"""

from __future__ import annotations

import logging
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp.http_exceptions import ContentLengthError

from streammega import StorageConfig
from streammega.errors import (
    AccessDeniedError,
    ConfigError,
    EndpointError,
    ObjectChangedError,
    ObjectNotFoundError,
    ShortReadError,
    StorageError,
)
from streammega.storage import http_errors, open_store, retry
from streammega.storage.backends.fsspec import driver_error
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.requests import FetchGroup, RangeRequest
from streammega.storage.retry import MAX_PAUSE, MAX_SHORT_READS, RetryPolicy
from streammega.storage.store import Bytes, Span
from streammega.storage.thread_pool import Pool
from tests.support.processes import python_environment
from tests.support.servers import KEY, SECRET, HttpObjects, http_server
from tools.fuzz.answers import AnswerServer, plain_answer


class Clock:
    """Time that passes only while somebody sleeps, or a try takes some."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, stop: Any = None) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(retry, "interruptible_pause", clock.sleep)
    monkeypatch.setattr("streammega.storage.warn_once._warned_at", {})
    return clock


def failing(
    error: StorageError, clock: Clock, until: float = float("inf"), takes: float = 0.0
) -> Callable[[], str]:
    def attempt() -> str:
        if clock.now >= until:
            return "answer"
        clock.now += takes
        raise type(error)(*error.args)

    return attempt


@pytest.mark.guarantee("passing-faults-waited")
@pytest.mark.parametrize("outage", [8, 20, 120, 500])
@pytest.mark.parametrize("takes", [0.0, 10.0])
def test_by_default_an_outage_of_minutes_is_waited_for(
    clock: Clock, outage: float, takes: float
) -> None:
    policy = RetryPolicy.of(StorageConfig())
    assert policy.call(failing(EndpointError("down"), clock, outage, takes)) == "answer"
    assert clock.now <= outage + MAX_PAUSE + takes, "its end is noticed soon"


@pytest.mark.guarantee("passing-faults-waited")
def test_an_outage_that_does_not_end_is_given_up_at_the_deadline_and_says_so(clock: Clock) -> None:
    with pytest.raises(EndpointError, match=r"down \[failed after \d+ tries in [56]\d\d"):
        RetryPolicy.of(StorageConfig()).call(failing(EndpointError("down"), clock))
    assert clock.now == pytest.approx(600)


def test_a_first_try_that_takes_longer_than_the_deadline_says_that_it_was_given_up(
    clock: Clock,
) -> None:
    policy = RetryPolicy(deadline=1.5)
    with pytest.raises(
        EndpointError, match=r"down \[failed after 1 try in 2\.0 s, retry_timeout is 1\.5 s\]"
    ):
        policy.call(failing(EndpointError("down"), clock, takes=2.0))


def test_an_error_says_once_that_it_was_given_up(clock: Clock) -> None:
    inner = RetryPolicy(deadline=3)
    with pytest.raises(EndpointError) as caught:
        RetryPolicy(deadline=100).call(lambda: inner.call(failing(EndpointError("down"), clock)))
    assert str(caught.value).count("failed after") == 1


@pytest.mark.parametrize("outer", [2.0, 4.0, 100.0])
def test_a_call_within_another_is_not_tried_beyond_the_end_of_that_one(
    clock: Clock, outer: float
) -> None:
    inner = RetryPolicy(deadline=3)
    with pytest.raises(EndpointError, match="failed after"):
        RetryPolicy(deadline=outer).call(lambda: inner.call(failing(EndpointError("down"), clock)))
    assert clock.now == pytest.approx(outer, abs=0.01)
    began = clock.now
    with pytest.raises(EndpointError):
        inner.call(failing(EndpointError("down"), clock))
    assert clock.now - began == pytest.approx(3), "alone it has its own time"


def test_a_call_in_a_thread_of_a_pool_ends_with_the_call_that_waits_for_it(clock: Clock) -> None:
    inner = RetryPolicy(deadline=300)

    def read_in_threads() -> list[str]:
        return Pool(1).map(lambda _: inner.call(failing(EndpointError("down"), clock)), [None])

    with pytest.raises(EndpointError, match="failed after"):
        RetryPolicy(deadline=2).call(read_in_threads)
    assert clock.now == pytest.approx(2, abs=0.01)


@pytest.mark.guarantee("passing-faults-waited")
@pytest.mark.parametrize("deadline", [0.13, 0.3, 0.72, 1.0])
def test_a_pause_that_would_leave_next_to_nothing_lasts_until_the_deadline_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, deadline: float
) -> None:
    # tries after 0.1, 0.3 and 0.7 seconds
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    with pytest.raises(EndpointError):
        RetryPolicy(deadline=deadline).call(failing(EndpointError("down"), clock))
    assert clock.now == pytest.approx(deadline)


@pytest.mark.parametrize(
    "kind", [AccessDeniedError, ObjectNotFoundError, ObjectChangedError, StorageError]
)
def test_what_waiting_cannot_mend_is_raised_at_once(clock: Clock, kind: type[StorageError]) -> None:
    with pytest.raises(kind, match=r"^no$"):
        RetryPolicy.of(StorageConfig()).call(failing(kind("no"), clock))
    assert clock.now == 0


@pytest.mark.guarantee("passing-faults-waited")
def test_bodies_that_stay_short_are_given_up_after_a_few_tries(clock: Clock) -> None:
    with pytest.raises(ShortReadError, match=f"after {MAX_SHORT_READS + 1} tries"):
        RetryPolicy.of(StorageConfig()).call(failing(ShortReadError("short"), clock))
    assert clock.now < 10


@pytest.mark.guarantee("passing-faults-waited")
def test_retries_bound_the_tries_where_they_are_given(clock: Clock) -> None:
    for retries in (0, 1, 4):
        policy = RetryPolicy.of(StorageConfig().tuned(max_retries=retries))
        for failures in range(1, retries + 1):
            policy.next_pause(EndpointError("x"), failures, 0.0)
        with pytest.raises(EndpointError, match="failed after"):
            policy.next_pause(EndpointError("x"), retries + 1, 0.0)
    with pytest.raises(ConfigError, match="retries is -1"):
        StorageConfig().tuned(max_retries=-1)
    with pytest.raises(ConfigError, match="retry_timeout is 0"):
        StorageConfig(retry_timeout=0)


@pytest.mark.guarantee("passing-faults-waited")
def test_pauses_grow_to_their_cap_with_jitter_and_never_overflow() -> None:
    policy = RetryPolicy(deadline=1e9)
    seen = {
        attempt: [policy.next_pause(EndpointError("x"), attempt, 0.0) for _ in range(50)]
        for attempt in (1, 3, 8, 10_000)
    }
    assert 0.05 <= min(seen[1]) < max(seen[1]) <= 0.1
    assert 0.2 <= min(seen[3]) < max(seen[3]) <= 0.4
    for attempt in (8, 10_000):
        assert MAX_PAUSE / 2 <= min(seen[attempt]) < max(seen[attempt]) <= MAX_PAUSE


@pytest.mark.guarantee("passing-faults-waited")
def test_waiting_is_said_now_and_then_with_the_object_and_the_end(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RetryPolicy.of(StorageConfig())
    with caplog.at_level(logging.WARNING):
        policy.call(failing(EndpointError("s3://bucket/web.bin: refused"), clock, until=100))
    said = [record.getMessage() for record in caplog.records]
    assert 3 <= len(said) <= 5, "one every thirty seconds"
    assert all(
        "s3://bucket/web.bin: refused" in text and "600 s (retry_timeout)" in text for text in said
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        policy.call(failing(EndpointError("x"), clock, until=clock.now + 1))
    assert not caplog.records, "what a second mends is not said"
    with pytest.raises(EndpointError), caplog.at_level(logging.WARNING):
        RetryPolicy.of(StorageConfig(retry_timeout=5)).call(failing(EndpointError("x"), clock))
    assert not caplog.records, "the error follows soon"


def new_endpoint() -> bytes:
    return uuid.uuid4().bytes


def silent(clock: Clock, until: float = float("inf")) -> Callable[[], str]:
    def attempt() -> str:
        if clock.now >= until:
            return "answer"
        raise http_errors.no_answer("s3://bucket/key", "refused")

    return attempt


def test_an_endpoint_that_never_answered_is_given_up_soon_and_one_that_did_is_waited_for(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RetryPolicy.of(StorageConfig(), new_endpoint())
    with pytest.raises(EndpointError, match="this endpoint never answered"):
        policy.call(silent(clock))
    assert clock.now == pytest.approx(30)
    assert "retrying for up to 30 s (this endpoint never answered)" in caplog.text

    policy = RetryPolicy.of(StorageConfig(), new_endpoint())
    with pytest.raises(ObjectNotFoundError):
        policy.call(failing(ObjectNotFoundError("none"), clock))  # an answer, too
    assert policy.call(silent(clock, until=clock.now + 500)) == "answer"

    policy = RetryPolicy.of(StorageConfig(), new_endpoint())
    assert policy.call(failing(EndpointError("503"), clock, until=clock.now + 500)) == "answer"
    assert RetryPolicy.of(StorageConfig()).call(silent(clock, until=clock.now + 500)) == "answer", (
        "of what was opened before"
    )


def test_the_shorter_of_both_deadlines_holds(clock: Clock) -> None:
    for config, seconds in (
        (StorageConfig(retry_timeout=5), 5),
        (StorageConfig().tuned(connect_deadline=60), 60),
    ):
        began = clock.now
        with pytest.raises(EndpointError) as caught:
            RetryPolicy.of(config, new_endpoint()).call(silent(clock))
        assert clock.now - began == pytest.approx(seconds), "the last try is at the deadline"
        assert ("never answered" in str(caught.value)) == (seconds == 60)
    with pytest.raises(ConfigError, match="connect_deadline is 0"):
        StorageConfig().tuned(connect_deadline=0)


def refused_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def upload(store: Any, key: str) -> None:
    writer = store.open_writer(key)
    try:
        writer.write(b"abc")
        writer.commit()
    except BaseException:
        writer.abort()
        raise


ASK: dict[str, Callable[[Any, str], Any]] = {
    "info": lambda store, key: store.info(key),
    "read": lambda store, key: store.read(key, [(0, 4)]),
    "list": lambda store, key: store.list(key),
    "write": upload,
    "delete": lambda store, key: store.delete(key),
}


@pytest.mark.guarantee("endpoint-never-answered")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
@pytest.mark.parametrize("endpoint", ["refused", "http://no-such-endpoint.invalid:9000"])
def test_whatever_is_asked_of_an_endpoint_that_is_not_there_ends_soon(
    transport: Any, endpoint: str
) -> None:
    config = StorageConfig(
        transport=transport,
        storage_options={
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": refused_port() if endpoint == "refused" else endpoint,
        },
    ).tuned(connect_deadline=0.2)
    store, key = open_store("s3://bucket/key", config)
    for what, ask in ASK.items():
        began = time.monotonic()
        words = r"bucket/key.*check endpoint_url.*this endpoint never answered"
        with pytest.raises(EndpointError, match=words):
            ask(store, key)
        assert time.monotonic() - began < 60, what  # else it is tried for ten minutes


@pytest.mark.guarantee("endpoint-never-answered")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_an_outage_after_an_answer_is_waited_for_in_other_buckets_and_processes_too(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = {"/bucket/key": b"abcdef", "/other/key": b"abcdef"}
    with http_server(objects) as server:
        config = StorageConfig(
            transport=transport, retry_timeout=1.5, storage_options=server.options
        ).tuned(connect_deadline=0.2)
        store, key = open_store("s3://bucket/key", config)
        store.info(key)
    # has no connection that is still open
    other, other_key = open_store("s3://other/key", replace(config, max_concurrent_requests=7))
    there = pickle.dumps(store)
    monkeypatch.setattr(retry, "_answered", set())  # as a process has it that was spawned
    spawned = pickle.loads(there)  # noqa: S301 - of our own making
    with ThreadPoolExecutor() as threads_of_readers:
        reads = [
            threads_of_readers.submit(kept.read, kept_key, [(0, 4)])
            for kept, kept_key in ((spawned, key), (other, other_key))
        ]
        for read in reads:
            with pytest.raises(EndpointError, match="failed after") as caught:
                read.result()
            assert "never answered" not in str(caught.value)


@pytest.mark.guarantee("endpoint-never-answered")
def test_an_upload_by_obstore_waits_for_an_outage_as_long_as_all_else() -> None:
    with http_server({"/bucket/key": b"abcdef"}) as server:
        store, key = server.open(retry_timeout=2)
        store.info(key)
        server.status = 503
        began = time.monotonic()
        with pytest.raises(EndpointError):
            upload(store, key)
        assert time.monotonic() - began > 1.2


@contextmanager
def answering_after(
    seconds: float, objects: dict[str, bytes], status: int = 503
) -> Iterator[HttpObjects]:
    """A server that answers `status` for a while."""
    with http_server(objects) as server:
        server.status = status
        timer = threading.Timer(seconds, lambda: setattr(server, "status", None))
        timer.start()
        yield server
        timer.join()


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_reads_uploads_and_removals_outlive_an_outage(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The outage is longer than six pauses.
    monkeypatch.setattr(retry, "MAX_PAUSE", 0.2)
    monkeypatch.setattr("streammega.storage.backends.obstore.MAX_PAUSE", 0.2)
    with answering_after(1.6, {"/bucket/old": b"abcdef"}) as server:
        store, key = server.open("s3://bucket/old", transport=transport)
        assert bytes(store.read(key, [(2, 5)], store.info(key).etag)[0]) == b"cde"
        for change in (lambda: upload(store, key.replace("old", "key")), lambda: store.delete(key)):
            server.status = 503
            threading.Timer(1.6, lambda: setattr(server, "status", None)).start()
            change()
        assert server.objects == {"/bucket/key": b"abc"}


class Scripted:
    """A store whose reads do what a test says, by their first byte."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self.act = act

    def fetch_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        for (start, _), out in zip(spans, outs, strict=True):
            self.act(start)
            out[:] = 1


def test_a_paused_retry_does_not_wait_for_other_requests() -> None:
    """The only thread that could time the pause is busy with another read by then."""
    failed = threading.Event()
    slow_ends = threading.Event()
    done = threading.Event()

    def act(start: int) -> None:
        if start == 0 and not failed.is_set():
            failed.set()
            raise EndpointError("once")
        if start == 0:
            done.set()
        if start == 1000:
            slow_ends.wait(120)

    store: Any = Scripted(act)
    fetcher = Fetcher(
        StorageConfig(memory_bytes=1 << 20, max_concurrent_requests=4).tuned(hedge_requests=False)
    )
    first, slow = (
        FetchGroup(10, [RangeRequest(store, "key", "", start, start + 10, 0)])
        for start in (0, 1000)
    )
    fetcher.submit([first])
    assert failed.wait(60)
    fetcher.submit([slow])
    try:
        assert done.wait(60), "the retry waited for the slow read"
        fetcher.wait([first])
    finally:
        slow_ends.set()
        fetcher.close()


def test_a_closed_stager_does_not_wait_for_its_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streammega.loading.staging import Stager
    from streammega.samples.token_file import TokenFile
    from streammega.storage.cache import PageCache, open_cached
    from streammega.storage.cache.page_cache import CachedStore

    monkeypatch.setattr(retry, "FIRST_PAUSE", 100.0)
    monkeypatch.setattr(retry, "MAX_PAUSE", 100.0)
    tried = threading.Event()

    def refuse(start: int) -> None:
        tried.set()
        raise EndpointError("refused")

    store: Any = Scripted(refuse)
    config = StorageConfig(cache_dir=tmp_path)
    cached = open_cached(
        PageCache(tmp_path, 1 << 30, config.tuning.cache_chunk_bytes), "s3://b/k", "etag", 1 << 20
    )
    assert cached is not None
    file = TokenFile(
        store=CachedStore(store, cached),
        key="k",
        dtype=np.dtype("<u2"),
        num_tokens=1 << 19,
        etag="etag",
    )
    stager = Stager([file], config)
    assert tried.wait(30)
    began = time.monotonic()
    stager.close()
    assert time.monotonic() - began < 40, "the shortest of its pauses is 50 seconds"
    assert not any(thread.is_alive() for thread in stager._threads)


OPEN = {
    "loader": "StreamLoader(DataConfig(blend=['s3://data/web', 's3://data/code'], sequence_length=8, order='stream', storage=s), "
    "micro_batch_size=1, global_batch_size=1)",
    "folder": "IndexedDataset('s3://data/', s)",
}


@pytest.mark.guarantee("10-transports-try")
@pytest.mark.parametrize(
    ("what", "transport"),
    [
        ("loader", "obstore"),
        ("folder", "fsspec"),
        pytest.param("loader", "fsspec", marks=pytest.mark.soak),
        pytest.param("folder", "obstore", marks=pytest.mark.soak),
    ],
)
def test_ctrl_c_while_a_hung_endpoint_is_opened_ends_the_program_soon(
    transport: str, what: str
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        code = f"""
from streammega import DataConfig, IndexedDataset, StorageConfig, StreamLoader
options = {{"key": "k" * 8, "secret": "s" * 8, "endpoint_url": {url!r}}}
s = StorageConfig(transport={transport!r}, storage_options=options).tuned(connect_deadline=600)
print("ready", flush=True)
{OPEN[what]}
"""
        pipe = subprocess.PIPE
        environment = python_environment()
        run = subprocess.Popen(
            [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment
        )
        assert run.stdout is not None
        run.stdout.readline()
        deaf.settimeout(60)
        connection, _ = deaf.accept()
        with connection:
            time.sleep(0.2)
            run.send_signal(signal.SIGINT)
            # The endpoint would be given up after ten minutes.
            _, errors = run.communicate(timeout=60)
        assert errors.strip().endswith("KeyboardInterrupt"), errors
        assert "Exception ignored" not in errors


def test_settings_of_retries_may_be_replaced() -> None:
    assert RetryPolicy.of(
        replace(StorageConfig(), retry_timeout=5).tuned(max_retries=2)
    ) == RetryPolicy(deadline=5, retries=2)


@pytest.mark.guarantee("10-transports-try")
@pytest.mark.parametrize(
    ("status", "code", "kind", "passing"),
    [
        (503, "SlowDown", EndpointError, True),
        (429, "", EndpointError, True),
        (500, "InternalError", EndpointError, True),
        (200, "SlowDown", EndpointError, True),
        (502, "", EndpointError, True),
        (408, "", EndpointError, True),
        (400, "RequestTimeout", EndpointError, True),
        (403, "RequestTimeTooSkewed", EndpointError, True),
        (501, "NotImplemented", StorageError, False),
        (400, "AuthorizationHeaderMalformed", StorageError, False),
        (301, "PermanentRedirect", StorageError, False),
        (403, "AccessDenied", AccessDeniedError, False),
        (400, "ExpiredToken", AccessDeniedError, False),
        (403, "SecurityTokenExpired", AccessDeniedError, False),
        (404, "NoSuchBucket", ObjectNotFoundError, False),
        (404, "NoSuchKey", ObjectNotFoundError, False),
        (416, "InvalidRange", ShortReadError, False),
    ],
)
def test_a_status_means_one_error_whatever_met_it(
    status: int, code: str, kind: type[StorageError], passing: bool
) -> None:
    error = http_errors.failure_of_status("s3://bucket/key", status, code, "what it said")
    assert type(error) is kind
    assert error.transient is passing
    assert "s3://bucket/key" in str(error)


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (503, "SlowDown", EndpointError, "overloaded or limits requests"),
        (400, "RequestTimeout", EndpointError, "could not answer it now"),
        (403, "RequestTimeTooSkewed", EndpointError, "the clock of this machine differs"),
        (400, "ExpiredToken", AccessDeniedError, "the credentials have expired"),
        (403, "SignatureDoesNotMatch", AccessDeniedError, "access denied"),
        (400, "AuthorizationHeaderMalformed", StorageError, "another region"),
        (400, "InvalidRequest", StorageError, "InvalidRequest"),
        (404, "NoSuchBucket", ObjectNotFoundError, "the bucket s3://bucket does not exist"),
        (404, "NoSuchKey", ObjectNotFoundError, "no such object"),
        (416, "InvalidRange", ShortReadError, "ends before the bytes"),
    ],
)
def test_the_code_of_an_answer_counts_and_no_word_of_its_message(
    status: int, code: str, kind: type[StorageError], words: str, transport: Any
) -> None:
    server = AnswerServer()
    body = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code>\n<Message>Sorry.</Message></Error>"
    server.answers = [plain_answer(f"{status} No", body.encode())]
    options = {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{server.port}"}
    storage = StorageConfig(transport=transport, storage_options=options).tuned(max_retries=0)
    store, key = open_store("s3://bucket/key", storage)
    with pytest.raises(StorageError, match=words) as caught:
        store.read(key, [(0, 3)])
    assert type(caught.value) is kind


class HttpError(Exception):
    """As gcsfs's."""

    code = 429


class AzureError(Exception):
    """As those of Azure's client."""

    status_code = 403


@pytest.mark.parametrize(
    ("error", "kind"), [(HttpError(), EndpointError), (AzureError(), AccessDeniedError)]
)
def test_errors_of_other_drivers_have_a_status_too(
    error: Exception, kind: type[StorageError]
) -> None:
    outer = OSError("a driver")
    outer.__cause__ = error
    for raised in (error, outer):
        assert type(driver_error("gs://bucket/key", raised)) is kind


def test_a_body_that_is_cut_short_has_no_status() -> None:
    error = aiohttp.ClientPayloadError("Response payload is not completed")
    error.__cause__ = ContentLengthError("Not enough data")
    assert error.__cause__.code == 400
    ours = driver_error("s3://bucket/key", error)
    assert type(ours) is EndpointError
    assert ours.silent


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
@pytest.mark.parametrize("status", [400, 501])
def test_answers_that_no_second_try_changes_are_raised_at_once(transport: Any, status: int) -> None:
    with http_server({"/bucket/key": b"abc"}) as server:
        server.status = status
        store, key = server.open(transport=transport)
        for call in (
            lambda: store.info(key),
            lambda: store.read(key, [(0, 3)]),
            lambda: store.delete(key),
        ):
            before = len(server.requests)
            with pytest.raises(StorageError, match="s3://bucket/key"):
                call()
            asked = server.requests[before:]
            assert len(set(asked)) == len(asked), "nothing is asked twice"
