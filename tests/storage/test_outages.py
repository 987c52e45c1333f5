"""Outages: a run waits, says for what and until when, and goes on with the same tokens; or it ends at
the deadline of the user, with an error that names the cause and the setting.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.utils import ContainerMetadataFetcher

from streammega.errors import EndpointError
from streammega.storage.cache import PageCache, cache_folder, open_cached
from streammega.storage.cache.chunk_file import ChunkFile
from tests.support.builders import write_dataset
from tests.support.outages import NEED_NAMESPACE, OUTAGES, WRITE_OUTAGES, in_namespace
from tests.support.processes import launch
from tests.support.servers import S3, http_server
from tests.support.streams import write_data
from tools.soak_long import complaints

SECRETS = ("never-shown", "AKIAEXAMPLE")
SAYS = {
    "503": "overloaded or limits requests",
    "refused": "did not answer; check endpoint_url, the network and DNS",
    "hung": "did not answer",
    "drip": "did not answer",
    "credentials expired": "the credentials have expired",
    "clock jumped": "the clock of this machine differs",
    "name not found": "did not answer; check endpoint_url, the network and DNS",
}
"""What the warning and the error say."""


def pairs(kinds: Iterable[str], first: str, only: Sequence[str] = OUTAGES) -> list[Any]:
    """Each kind with each transport. `make test` takes the two by turns, of `only`; `make soak` takes all."""
    taken = []
    for number, kind in enumerate(kinds):
        for transport in ("obstore", "fsspec"):
            is_turn = (transport == first) == (number % 2 == 0)
            marks = [] if is_turn and kind in only else [pytest.mark.soak]
            taken.append(pytest.param(kind, transport, marks=marks))
    return taken


def read_through(kind: str, transport: str, folder: Path, seconds: float, timeout: float) -> Any:
    """What tests/support/outage_programs.py prints."""
    write_data(folder)
    (folder / "disk").mkdir()
    arguments = [kind, transport, str(folder), seconds, timeout]
    return answer_of("tests.support.outage_programs", arguments, kind, folder)


def answer_of(module: str, arguments: Sequence[Any], kind: str, folder: Path) -> Any:
    """What a program prints in a fork, which goes where names and disks can fail if this kind needs
    that.
    """
    if kind in NEED_NAMESPACE and not in_namespace(folder / "hosts", folder / "disk", ["true"]):
        pytest.skip("this machine has no user namespaces")
    family = launch(folder, 1, ["-m", module, json.dumps(arguments)])
    try:
        codes = family.ended(0, within=240)
    finally:
        family.close()
    log = family.log(0)
    assert codes == [0], log[-3000:]
    assert not any(secret in log for secret in SECRETS)
    (answer,) = [line for line in log.splitlines() if line.startswith('{"error"')]
    return json.loads(answer)


@pytest.mark.guarantee("outages-waited")
@pytest.mark.parametrize(("kind", "transport"), pairs(OUTAGES, "obstore"))
def test_a_run_waits_for_the_end_of_an_outage_says_so_and_goes_on(
    kind: str, transport: str, tmp_path: Path
) -> None:
    seconds = 5.5 if kind == "drip" else 2.5  # two requests of it time out
    answer = read_through(kind, transport, tmp_path, seconds, timeout=60)
    assert answer["error"] == ""
    assert answer["equal"]
    assert answer["whole"]
    waits = [text for text in answer["said"] if "storage requests have failed for" in text]
    if kind in SAYS:
        assert len(waits) == 1, answer["said"]
        assert SAYS[kind] in waits[0]
        assert "retrying for up to 60 s (retry_timeout)" in waits[0]
    if kind == "disk full":
        assert any("disk is nearly full" in text for text in answer["said"])


@pytest.mark.guarantee("outages-waited")
@pytest.mark.parametrize(("kind", "transport"), pairs(SAYS, "fsspec", ("refused", "clock jumped")))
def test_an_outage_that_does_not_end_ends_the_run_at_the_deadline(
    kind: str, transport: str, tmp_path: Path
) -> None:
    answer = read_through(kind, transport, tmp_path, seconds=100, timeout=1.5)
    assert SAYS[kind] in answer["error"]
    assert "failed after" in answer["error"]
    assert "retry_timeout" in answer["error"]
    assert answer["equal"]
    assert 0.5 <= answer["waited"] < 30, "begun while the outage was made"


WRITING_SAYS = {
    "503": "overloaded or limits requests",
    "refused": "did not answer; check endpoint_url, the network and DNS",
    "hung": "did not answer",
    "credentials expired": "the credentials have expired",
    "clock jumped": "the clock of this machine differs",
    "name not found": "did not answer; check endpoint_url, the network and DNS",
    "disk full": "no space left on the device; free some, or write elsewhere",
}
"""What the warning and the error say. Where one of two servers fails, nothing waits for long."""


ENDED = ("503", "credentials expired", "disk full")


def writings(kinds: Iterable[str], only: Sequence[str] = WRITE_OUTAGES) -> list[Any]:
    """Each kind under each job, with each transport. `make test` takes each of `only` once."""
    pairs = [(job, way) for way in ("obstore", "fsspec") for job in ("convert", "checkpoint")]
    taken = []
    for number, kind in enumerate(kinds):
        for at, pair in enumerate(pairs):
            is_turn = number % len(pairs) == at and kind in only
            taken.append(pytest.param(kind, *pair, marks=[] if is_turn else [pytest.mark.soak]))
    return taken


def write_through(
    kind: str, job: str, transport: str, folder: Path, moto: S3, seconds: float, timeout: float
) -> Any:
    """What tests/support/write_outage_programs.py prints."""
    for name in ("data", "disk"):
        (folder / name).mkdir()
    write_dataset(folder / "data" / "web", [np.full(3_000_000, 5), [7] * 3000], np.int32)
    target = f"{moto.endpoint}/{moto.new_bucket()}"
    arguments = [job, kind, transport, str(folder), target, seconds, timeout]
    return answer_of("tests.support.write_outage_programs", arguments, kind, folder)


@pytest.mark.guarantee("outages-waited")
@pytest.mark.parametrize(("kind", "job", "transport"), writings(WRITE_OUTAGES))
def test_conversions_and_checkpoints_wait_for_the_end_of_an_outage_and_say_so(
    kind: str, job: str, transport: str, tmp_path: Path, moto: S3
) -> None:
    answer = write_through(kind, job, transport, tmp_path, moto, seconds=2.0, timeout=60)
    assert answer["error"] == ""
    assert answer["whole"]
    if kind in WRITING_SAYS:
        (wait,) = [text for text in answer["said"] if "storage requests have failed for" in text]
        assert WRITING_SAYS[kind] in wait
        assert "retrying for up to 60 s (retry_timeout)" in wait


@pytest.mark.guarantee("outages-waited")
@pytest.mark.parametrize(("kind", "job", "transport"), writings(WRITING_SAYS, ENDED))
def test_what_an_outage_ended_at_the_deadline_is_taken_up_by_the_same_command(
    kind: str, job: str, transport: str, tmp_path: Path, moto: S3
) -> None:
    answer = write_through(kind, job, transport, tmp_path, moto, seconds=100, timeout=1.5)
    assert WRITING_SAYS[kind] in answer["error"]
    assert "retry_timeout" in answer["error"]
    assert 0.5 <= answer["waited"] < 30
    assert answer["whole"]


@pytest.mark.guarantee("soak-long-fails")
@pytest.mark.parametrize(
    ("grown", "complaint"),
    [
        ({}, ""),
        ({"memory": 140.0}, "memory grew from 100.0 to 140.0"),
        ({"threads": 15}, "threads grew from 10.0 to 15.0"),
        ({"descriptors": 40}, "descriptors grew from 20.0 to 40.0"),
        ({"cpu": 0.8}, "took 0.50 ms of a processor, and 0.80"),
        ({"burst": 1000.0}, "was 4000 batches/s, and 1000"),
    ],
)
def test_a_long_run_that_grows_or_slows_down_is_found(
    grown: dict[str, float], complaint: str
) -> None:
    row = {"process": 1, "outage": "", "memory": 100.0, "threads": 10, "descriptors": 20}
    row |= {"cpu": 0.5, "burst": 4000.0}
    rows = [row] * 15 + [row | {"outage": "503", "memory": 500.0}] * 10 + [row | grown] * 12
    found = complaints(rows)
    assert [complaint in text for text in found] == [True] * bool(complaint)


@pytest.mark.guarantee("outages-waited")
@pytest.mark.parametrize("transport", ["obstore", "fsspec"])
def test_a_source_of_credentials_that_does_not_answer_is_waited_for(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = {"AccessKeyId": "AKIAEXAMPLE", "SecretAccessKey": "never-shown", "Token": "t"}
    credentials["Expiration"] = "2000-01-01T00:00:00Z"  # each request needs new ones
    body = json.dumps(credentials).encode()
    with http_server({"/credentials": body}) as source, http_server({"/b/k": b"abc"}) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{source.url}/credentials")
        options = {"endpoint_url": server.url}
        store, key = server.open("s3://b/k", transport=transport, storage_options=options)
        with pytest.raises(EndpointError, match="credentials could not be renewed") as caught:
            store.fetch(key, [(0, 3)])
        assert caught.value.transient
        assert not any(secret in str(caught.value) for secret in SECRETS)
        credentials["Expiration"] = "2100-01-01T00:00:00Z"
        source.objects["/credentials"] = json.dumps(credentials).encode()
        assert bytes(store.fetch(key, [(0, 3)])[0]) == b"abc"


@pytest.mark.guarantee("outages-waited")
def test_a_client_that_cannot_be_opened_yet_is_opened_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0.01)
    known = {"AccessKeyId": "AKIAEXAMPLE", "SecretAccessKey": "never-shown", "Token": "t"}
    body = json.dumps(known | {"Expiration": "2100-01-01T00:00:00Z"}).encode()
    with http_server({"/credentials": body}) as source, http_server({"/b/k": b"abc"}) as server:
        source.status = 500
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{source.url}/credentials")
        store, key = server.open("s3://b/k", storage_options={"endpoint_url": server.url})
        timer = threading.Timer(0.5, setattr, (source, "status", None))
        timer.start()
        assert store.info(key).size == 3
        timer.join()


@pytest.mark.guarantee("outages-waited")
def test_a_cache_whose_disk_was_full_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder, "FULL_SECONDS", 0.0)
    data = np.arange(1_000_000, dtype=np.uint32).view(np.uint8)[:1_000_000]
    cached = open_cached(PageCache(tmp_path, 1 << 30, 1 << 20), "s3://b/k", "e", len(data))
    assert cached is not None

    def fetch(start: int, stop: int, out: Any) -> None:
        out[:] = data[start:stop]

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = np.empty_like(data)
    with monkeypatch.context() as patch:
        patch.setattr(ChunkFile, "write", fail)
        cached.read(0, len(data), out, fetch)
        assert (out == data).all()
        assert not cached.contains(0, len(data))
    cached.read(0, len(data), out, fetch)
    assert (out == data).all()
    assert cached.contains(0, len(data))
