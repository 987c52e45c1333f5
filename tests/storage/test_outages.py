"""Outages: a run waits, says for what and until when, and goes on with the same tokens; or it ends at
the deadline of the user, with an error that names the cause and the setting.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega.errors import EndpointError
from streammega.storage.cache import PageCache, cache_folder, open_cached
from streammega.storage.cache.chunk_file import ChunkFile
from tests.support.outages import NEED_NAMESPACE, OUTAGES, in_namespace
from tests.support.servers import http_server
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
    """What tests/support/outage_programs.py prints, run where names and disks can fail."""
    write_data(folder)
    (folder / "disk").mkdir()
    needs = kind in NEED_NAMESPACE
    arguments = json.dumps([kind, transport, str(folder), seconds, timeout, needs])
    command = [sys.executable, "-m", "tests.support.outage_programs", arguments]
    if needs:
        command = in_namespace(folder / "hosts", folder / "disk", command)
        if not command:
            pytest.skip("this machine has no user namespaces")
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert run.returncode == 0, run.stderr[-3000:]
    assert not any(secret in run.stdout + run.stderr for secret in SECRETS)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.guarantee("outages-waited")
@pytest.mark.parametrize(("kind", "transport"), pairs(OUTAGES, "obstore"))
def test_a_run_waits_for_the_end_of_an_outage_says_so_and_goes_on(
    kind: str, transport: str, tmp_path: Path
) -> None:
    answer = read_through(kind, transport, tmp_path, seconds=4.0, timeout=60)
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
