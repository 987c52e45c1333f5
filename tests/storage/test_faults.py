"""The same tokens, bit for bit, whatever the endpoint does; or an error that names the object, on
the step that needs it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streammega import StorageConfig, StreamLoader
from streammega.errors import (
    AccessDeniedError,
    EndpointError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from streammega.storage import open_store
from tests.support.processes import python_environment
from tests.support.streams import (
    FAULTS,
    blend_of,
    check_that_faults_change_no_token,
    config_of,
    rows_of,
    storage_of,
    stream,
    write_data,
)
from tools.bench.object_server import Running, running, start
from tools.fuzz.answers import AnswerServer, listing_answer, plain_answer


@pytest.mark.guarantee("faults-change-token")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("fault", "order"),
    [
        *((fault, "stream") for fault in FAULTS),
        ("mixture", "megatron"),  # of all of them
        *(
            pytest.param(fault, "megatron", marks=pytest.mark.soak)
            for fault in FAULTS
            if fault != "mixture"
        ),
    ],
)
def test_faults_change_no_token(
    server: Running, tmp_path: Path, fault: str, order: str, transport: str
) -> None:
    storage = storage_of(server, transport)
    remote = config_of(order, "s3:/", tmp_path, storage, samples=600)
    check_that_faults_change_no_token(server, remote, server.root, fault)


@pytest.mark.guarantee("server-counts-requests")
@pytest.mark.parametrize(
    "behaviour",
    [
        {"answers_at_once": 2, "latency": 0.002},
        {"rate": 400.0, "burst": 20},
        {"small_bytes": 1024, "small_latency": 0.01},
    ],
    ids=["a few at once", "so many a second", "small ones late"],
)
def test_servers_that_serve_little_change_no_token(
    server: Running, tmp_path: Path, behaviour: dict[str, Any]
) -> None:
    remote = config_of("stream", "s3:/", tmp_path, storage_of(server, "obstore"), samples=400)
    expected = stream(replace(remote, blend=blend_of(server.root)))
    loader = StreamLoader(remote, micro_batch_size=4, global_batch_size=8)
    server.behave(**behaviour)
    with loader:
        assert torch.equal(rows_of(loader), expected)
    refused = server.counts()["faults"]
    assert loader.stats()["throttled"] > 0 or "rate" not in behaviour, f"{refused} refused"


@pytest.mark.guarantee("faults-change-token")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_a_server_that_restarts_is_waited_for(tmp_path: Path, order: str, transport: str) -> None:
    write_data(tmp_path)
    server = start(tmp_path)
    # a fraction of the data, so that much is left to be read afterwards
    storage = replace(storage_of(server, transport), memory_bytes=120_000)
    samples = {"stream": 600, "megatron": 1500}[order]  # of whole blocks, or read one by one
    config = config_of(order, "s3:/", tmp_path / "cache", storage, samples)
    expected = stream(replace(config, blend=blend_of(tmp_path)))
    again: list[Running] = []

    def restart() -> None:
        time.sleep(0.5)
        again.append(start(tmp_path, server.port))

    with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
        got = []
        for number, batch in enumerate(loader):
            if number == 20:
                server.process.kill()
                server.process.wait()
                thread = threading.Thread(target=restart)
                thread.start()
            got.append(torch.cat([batch["tokens"], batch["labels"]], 1).clone())
    thread.join()
    requests = again[0].counts()["requests"]
    for process in (server.process, again[0].process):
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert torch.equal(torch.cat(got), expected)
    assert requests > 0


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_an_outage_is_waited_for_as_long_as_the_deadline_allows(
    server: Running,
    tmp_path: Path,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("streammega.storage.warn_once._warned_at", {})
    # so that a second holds a dozen pauses, and more than one that could warn
    monkeypatch.setattr("streammega.storage.retry.MAX_PAUSE", 0.1)
    monkeypatch.setattr("streammega.storage.retry.WARN_AFTER_S", 0.5)
    # or requests would go one by one for six seconds afterwards
    monkeypatch.setattr("streammega.storage.fetch.flow_control.MAX_INTERVAL", 0.05)
    storage = storage_of(server, transport).tuned(max_retries=None)
    config = config_of("stream", "s3:/", tmp_path, storage, samples=400)
    expected = stream(replace(config, blend=blend_of(server.root)))
    with StreamLoader(config, micro_batch_size=4, global_batch_size=8) as loader:
        server.behave(status=503)
        threading.Timer(1.2, server.behave).start()
        got = rows_of(loader)
    assert torch.equal(got, expected)
    said = [
        record.getMessage()
        for record in caplog.records
        if "storage requests have failed for" in record.getMessage()
    ]
    assert len(said) == 1
    assert "retrying for up to 600 s" in said[0]


@pytest.mark.guarantee("403-404-changed")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (403, AccessDeniedError, "check the credentials"),
        (404, ObjectNotFoundError, "check the bucket and the key"),
    ],
)
def test_what_waiting_cannot_mend_fails_at_once(
    server: Running,
    tmp_path: Path,
    transport: str,
    status: int,
    kind: type[StorageError],
    words: str,
) -> None:
    config = config_of("stream", "s3:/", tmp_path, storage_of(server, transport))
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
    server.behave(status=status)
    before = server.counts()["requests"]
    began = time.monotonic()
    with pytest.raises(kind, match=rf"(web|code)\.bin: .*{words}"):
        next(iter(loader))
    assert time.monotonic() - began < 20, "the pauses between its tries would last 30 seconds"
    assert server.counts()["requests"] - before <= 64, "not tried again and again"


@pytest.mark.parametrize(
    ("status", "code", "transport"),
    [
        (301, "PermanentRedirect", "obstore"),  # botocore follows it for ever
        (400, "AuthorizationHeaderMalformed", "obstore"),
        (400, "AuthorizationHeaderMalformed", "fsspec"),
    ],
)
def test_another_region_is_named(
    server: Running, tmp_path: Path, status: int, code: str, transport: str
) -> None:
    config = config_of("stream", "s3:/", tmp_path, storage_of(server, transport))
    loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
    server.behave(status=status, code=code)
    with pytest.raises(StorageError, match=r"\.bin: .*another region; set AWS_DEFAULT_REGION"):
        next(iter(loader))


@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_storage_is_given_up_after_so_many_retries(
    server: Running, tmp_path: Path, transport: str
) -> None:
    storage = storage_of(server, transport).tuned(max_retries=2)
    loader = StreamLoader(
        config_of("stream", "s3:/", tmp_path, storage), micro_batch_size=4, global_batch_size=8
    )
    server.behave(status=503)
    with pytest.raises(EndpointError, match="lower max_concurrent_requests if this goes on"):
        next(iter(loader))
    assert loader.stats()["throttled"] > 0


@pytest.mark.guarantee("object-replaced-under", "403-404-changed")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_an_object_that_is_replaced_stops_the_run(
    tmp_path: Path, order: str, transport: str
) -> None:
    write_data(tmp_path)
    with running(tmp_path) as server:
        config = config_of(order, "s3:/", tmp_path / "cache", storage_of(server, transport))
        loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
        batches = iter(loader)
        next(batches)
        path = tmp_path / "data" / "web.bin"
        # as long as before, and other bytes
        (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
        os.replace(tmp_path / "other", path)
        with pytest.raises(ObjectChangedError, match=r"web\.bin: the object was replaced"):
            list(batches)
        assert loader.consumed_samples > 0


@pytest.mark.guarantee("slow-answers-asked")
def test_stragglers_are_asked_for_twice(server: Running, tmp_path: Path) -> None:
    """One answer in fifty takes a second; nobody waits for it."""
    storage = replace(storage_of(server, "obstore"), request_timeout=30).tuned(read_timeout=20)
    loader = StreamLoader(
        config_of("megatron", "s3:/", tmp_path, storage, samples=1200),
        micro_batch_size=4,
        global_batch_size=8,
    )
    server.behave(latency=0.003, slow_share=0.02, slow_factor=300, seed=3)
    began = time.monotonic()
    assert len(list(loader)) == len(loader)
    stats = loader.stats()
    assert stats["hedges"] > 0
    assert stats["hedges_won"] > 0
    assert time.monotonic() - began < 20, "without hedges every wave would wait a second"


def test_closing_does_not_wait_for_a_stalled_endpoint(server: Running, tmp_path: Path) -> None:
    storage = replace(storage_of(server, "obstore"), request_timeout=30).tuned(read_timeout=3)
    loader = StreamLoader(
        config_of("stream", "s3:/", tmp_path, storage), micro_batch_size=4, global_batch_size=8
    )
    next(iter(loader))
    server.behave(stall_share=1.0)
    loader.seek(0)
    iter(loader)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 20, "twelve tries, each of which stalls, take 36 seconds"


@pytest.mark.guarantee("server-answers-ranges")
def test_ranges_answered_by_200_are_read_by_s3fs_and_obstore_says_so(
    server: Running, tmp_path: Path
) -> None:
    server.behave(plain_200=True)
    config = config_of("stream", "s3:/", tmp_path, storage_of(server, "auto"), samples=600)
    with pytest.raises(StorageError, match=r"s3://data/.*200 in place of 206.*transport='fsspec'"):
        stream(config)
    got = stream(replace(config, storage=config.storage.changed(transport="fsspec")))
    assert torch.equal(got, stream(replace(config, blend=blend_of(server.root))))


@pytest.mark.guarantee("10-transports-try")
@pytest.mark.parametrize("moment", ["waiting for bytes", "in the step"])
def test_ctrl_c_ends_a_run_soon(server: Running, tmp_path: Path, moment: str) -> None:
    code = f"""
import sys, time
from streammega import DataConfig, StorageConfig, StreamLoader
storage = StorageConfig(storage_options={{"anon": True, "endpoint_url": {server.endpoint!r}}}).tuned(read_timeout=2)
config = DataConfig(
    blend=["s3://data/web"], sequence_length=64, order="stream", storage=storage.changed(cache_dir={str(tmp_path)!r})
)
loader = StreamLoader(config, micro_batch_size=4, global_batch_size=8)
print("ready", flush=True)
sys.stdin.readline()
for batch in loader:
    time.sleep(0.01)
"""
    environment = python_environment()
    pipe = subprocess.PIPE
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
    )
    assert run.stdout is not None
    assert run.stdin is not None
    run.stdout.readline()
    if moment == "waiting for bytes":
        server.behave(stall_share=1.0)
    before = server.counts()["requests"]
    run.stdin.write("\n")
    run.stdin.flush()
    while server.counts()["requests"] == before:
        assert run.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)
    began = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert errors.strip().endswith("KeyboardInterrupt"), errors
    assert "Exception ignored" not in errors


@pytest.mark.parametrize("scheme", ["s3", "oss"])
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_a_server_that_lists_the_same_page_for_ever_is_refused(scheme: str, transport: Any) -> None:
    server = AnswerServer()
    server.answers = [listing_answer("a1", "a2", "a3", token="again")]
    server.max_answers = 100_000
    options = {**SECRETS, "endpoint_url": f"http://127.0.0.1:{server.port}"}
    storage = StorageConfig(transport=transport, storage_options=options)
    store, key = open_store(f"{scheme}://bucket/a", storage)
    # Older s3fs leaves it to botocore.
    refusal = r"//bucket/(a\d)?: the server lists this again and again|same next token was received"
    with pytest.raises(StorageError, match=refusal):
        store.list(key)
    if transport == "fsspec":  # obstore asks for more pages ahead the busier the machine is
        assert server.requests < 60


@pytest.mark.parametrize("scheme", ["s3", "oss"])
@pytest.mark.parametrize("second", ["no token", "a page of a proxy", "an error with status 200"])
def test_a_listing_that_ends_with_a_full_page_goes_on_after_its_last_key(
    scheme: str, second: str
) -> None:
    keys = [f"a{number:04}" for number in range(1000)]
    first = listing_answer(*keys, token="t")
    bodies = {
        "a page of a proxy": b"<html><body>Log in</body></html>",
        "an error with status 200": b"<Error><Code>SlowDown</Code><Message>m</Message></Error>",
    }
    server = AnswerServer()
    if second == "no token":
        element = b"<NextContinuationToken>t</NextContinuationToken>"
        server.answers = [first.replace(element, b" " * len(element))]
    else:
        server.answers = [first, plain_answer("200 OK", bodies[second])]
    server.answers.append(listing_answer("b1", "b2"))
    server.max_answers = len(server.answers)
    options = {**SECRETS, "endpoint_url": f"http://127.0.0.1:{server.port}"}
    storage = StorageConfig(storage_options=options).tuned(max_retries=0)
    store, _ = open_store(f"{scheme}://bucket", storage)
    assert [info.key for info in store.list("")] == [*keys, "b1", "b2"]


def test_an_answer_of_oss_without_a_size_is_no_object() -> None:
    server = AnswerServer()
    options = {**SECRETS, "endpoint_url": f"http://127.0.0.1:{server.port}"}
    storage = StorageConfig(transport="fsspec", storage_options=options)
    store, key = open_store("oss://bucket/a", storage)
    server.answers = [b"HTTP/1.1 200 OK\r\n\r\n"]
    with pytest.raises(StorageError, match="does not say how large the object is"):
        store.info(key)
    server.answers = [b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n"]
    assert store.info(key).size == 7
    server.answers = [listing_answer("b1", "a1")]
    assert [info.key for info in store.list(key)] == ["a1"], "other objects were not asked for"


SECRETS = {"key": "k", "secret": "s" * 20}
