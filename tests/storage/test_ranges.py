"""Answers to range requests: the bytes that were asked for, within the time that is allowed, or an
error that says what the server sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from hypothesis import given
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.config.storage import Tuning
from streammega.errors import EndpointError, ShortReadError, StorageError
from streammega.storage import open_store
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.requests import FetchGroup, RangeRequest
from streammega.storage.http_errors import check_range
from tests.support.servers import HttpObjects, http_server

DATA = bytes(range(256)) * 8
START, STOP = 16, 32
Answer = Callable[[bytes, int, int], tuple[int, str, bytes]]

both_schemes = pytest.mark.parametrize("scheme", ["s3", "http"])
both_transports = pytest.mark.parametrize("transport", ["obstore", "fsspec"])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpObjects]:
    monkeypatch.setattr("streammega.storage.retry.MAX_PAUSE", 0.01)
    with http_server({"/bucket/key": DATA}) as server:
        yield server


def store_of(server: HttpObjects, scheme: str, transport: Any, **settings: Any) -> tuple[Any, str]:
    if scheme == "s3":
        return server.open(transport=transport, **settings)
    url = f"{server.url}/bucket/key"
    return server.open(url, transport=transport, storage_options={}, **settings)


def named(shift: int, longer: int) -> Answer:
    """Of other bytes, which the answer names."""

    def answer(data: bytes, first: int, last: int) -> tuple[int, str, bytes]:
        first += shift
        last += shift + longer
        return 206, f"bytes {first}-{last}/{len(data)}", data[first : last + 1]

    return answer


WRONG: dict[str, Answer] = {
    "other bytes of the right length": named(8, 0),
    "more bytes": named(0, 8),
    "fewer bytes": named(0, -2),
    "no Content-Range": lambda data, first, last: (206, "", data[first : last + 1]),
    "an unreadable Content-Range": lambda data, first, last: (206, "x", data[first : last + 1]),
    "200 for other bytes": lambda data, first, last: (
        200,
        f"bytes 0-{last - first}/{len(data)}",
        data[: last - first + 1],
    ),
}


REFUSED_BY_OBSTORE = ("no Content-Range", "an unreadable Content-Range", "200 for other bytes")


@pytest.mark.guarantee("answers-other-bytes")
@both_schemes
@both_transports
@pytest.mark.parametrize("wrong", WRONG)
def test_an_answer_of_other_bytes_is_never_taken_and_told_as_what_was_sent(
    server: HttpObjects, scheme: str, transport: str, wrong: str
) -> None:
    store, key = store_of(server, scheme, transport)
    server.answer_range = WRONG[wrong]
    if transport == "obstore" and wrong in REFUSED_BY_OBSTORE:
        with pytest.raises(StorageError, match="transport='fsspec'"):
            store.read(key, [(START, STOP)], '"1"')
        return
    with pytest.raises(
        ShortReadError, match=r"sent other bytes.*\[16, 32\).*failed after"
    ) as caught:
        store.read(key, [(START, STOP)], '"1"')
    assert "endpoint did not answer" not in str(caught.value)
    server.answer_range = None
    assert bytes(store.read(key, [(START, STOP)], '"1"')[0]) == DATA[START:STOP]


LEGAL: dict[str, Answer] = {
    "of unknown size": lambda data, first, last: (206, f"bytes {first}-{last}/*", data[first : last + 1]),
    "with 200": lambda data, first, last: (200, f"bytes {first}-{last}/{len(data)}", data[first : last + 1]),
}  # fmt: skip


@pytest.mark.guarantee("answers-other-bytes")
@both_schemes
@both_transports
@pytest.mark.parametrize("legal", LEGAL)
def test_an_answer_that_names_the_right_bytes_is_taken_by_fsspec(
    server: HttpObjects, scheme: str, transport: str, legal: str
) -> None:
    store, key = store_of(server, scheme, transport)
    server.answer_range = LEGAL[legal]
    if transport == "obstore":
        with pytest.raises(StorageError, match="transport='fsspec', which takes such answers"):
            store.read(key, [(START, STOP)], '"1"')
        return
    for spans in ([(START, STOP)], [(START, STOP), (0, 8), (2000, 2048)]):
        bodies = store.read(key, spans, '"1"')
        assert [bytes(body) for body in bodies] == [DATA[start:stop] for start, stop in spans]


@pytest.mark.guarantee("answers-other-bytes")
@both_schemes
@both_transports
def test_a_server_that_ignores_ranges_is_told_so_at_once(
    server: HttpObjects, scheme: str, transport: str
) -> None:
    store, key = store_of(server, scheme, transport)
    server.answer_range = lambda data, first, last: (200, "", data)
    words = "transport='fsspec'" if transport == "obstore" else "does not serve ranges.*status 200"
    with pytest.raises(StorageError, match=words) as caught:
        store.read(key, [(START, STOP)], '"1"')
    assert not caught.value.transient
    asked = [method for method, _, _ in server.requests if method == "GET"]
    assert len(asked) == 1
    if transport == "obstore":
        return
    whole = store.read(key, [(0, len(DATA))], '"1"')[0]
    assert bytes(whole) == DATA, "the whole object is what was asked for here"


@pytest.mark.guarantee("answers-other-bytes")
@given(
    start=st.integers(0, 40),
    count=st.integers(1, 40),
    first=st.integers(0, 40),
    got=st.integers(1, 40),
    size=st.integers(1, 60),
)
def test_only_the_range_that_was_asked_for_passes_up_to_the_end_of_the_object(
    start: int, count: int, first: int, got: int, size: int
) -> None:
    right = (first, first + got) == (start, min(start + count, size))
    for said, expected in (
        (f"bytes {first}-{first + got - 1}/{size}", right),
        (f"bytes {first}-{first + got - 1}/*", (first, got) == (start, count)),
    ):
        try:
            check_range("s3://b/k", (start, start + count), 206, said)
            passes = True
        except ShortReadError:
            passes = False
        assert passes == expected


@pytest.mark.guarantee("bodies-stall-drip")
@both_schemes
@both_transports
@pytest.mark.parametrize("seconds_per_byte", [0.1, 60.0], ids=["drips", "stalls"])
def test_a_body_that_drips_or_stalls_is_given_up_in_time(
    server: HttpObjects, scheme: str, transport: str, seconds_per_byte: float
) -> None:
    store, key = store_of(
        server,
        scheme,
        transport,
        request_timeout=0.6,
        retry_timeout=1.0,
        _tuning=Tuning(read_timeout=0.4),
    )
    server.seconds_per_byte = seconds_per_byte
    began = time.monotonic()
    with pytest.raises(EndpointError, match="failed after"):
        store.read(key, [(0, 1000)])
    assert time.monotonic() - began < 60


class Hanging(AsyncFileSystem):  # type: ignore[misc]
    """A driver whose requests last for ever, and that has no timeout."""

    protocol = "hanging"

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        await asyncio.sleep(3600)
        return b""

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {}

    async def _rm_file(self, path: str, **_: Any) -> None:
        await asyncio.sleep(3600)


@pytest.mark.guarantee("bodies-stall-drip")
@pytest.mark.parametrize("what", ["info", "read", "delete"])
def test_a_driver_without_timeouts_is_given_up_in_time(what: str) -> None:
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    store, key = open_store(
        "hanging://bucket/key", StorageConfig(request_timeout=0.3, retry_timeout=0.5)
    )
    ask: dict[str, Callable[[], Any]] = {
        "info": lambda: store.info(key),
        "read": lambda: store.read(key, [(0, 4)]),
        "delete": lambda: store.delete(key),
    }
    with pytest.raises(EndpointError, match="failed after"):
        ask[what]()


@both_schemes
def test_a_refusal_of_the_last_range_does_not_lose_the_answers_of_the_others(
    server: HttpObjects, scheme: str
) -> None:
    store, key = store_of(server, scheme, "obstore")
    refusals = [503, 429, 503]

    def refuse_last(data: bytes, first: int, last: int) -> tuple[int, str, bytes]:
        if first == 1000 and refusals:
            return refusals.pop(), "", b"slow down"
        return named(0, 0)(data, first, last)

    server.answer_range = refuse_last
    spans = [(0, 8), (START, STOP), (1000, 1008)]
    bodies = store.fetch(key, spans, '"1"')
    assert [bytes(body) for body in bodies] == [DATA[start:stop] for start, stop in spans]
    asked = Counter(span for _, _, span in server.requests)
    assert asked == {"bytes=0-7": 1, "bytes=16-31": 1, "bytes=1000-1007": 4}


def test_flow_control_is_told_of_refusals_that_a_batch_outlived(server: HttpObjects) -> None:
    store, key = store_of(server, "s3", "obstore")
    refusals = [503, 429]

    def refuse_last(data: bytes, first: int, last: int) -> tuple[int, str, bytes]:
        if first == 1000 and refusals:
            return refusals.pop(), "", b"slow down"
        return named(0, 0)(data, first, last)

    server.answer_range = refuse_last
    requests = [RangeRequest(store, key, "", at, at + 8, at) for at in (0, 500, 1000)]
    fetcher = Fetcher(
        StorageConfig(memory_bytes=1 << 20, max_concurrent_requests=8).tuned(hedge_requests=False)
    )
    fetcher.flow.answered(requests[0].size_class, 1, 0.01)  # before an answer none go together
    group = FetchGroup(1008, requests)
    fetcher.submit([group])
    fetcher.wait([group])
    fetcher.close()
    assert not refusals
    assert fetcher.counters.throttled == 2
    assert fetcher.counters.retries == 0
    assert fetcher.flow.window == 4, "half of what was allowed"
    assert not fetcher.counters.latencies, "it waited, so its time says nothing of the storage"


@pytest.mark.guarantee("answers-other-bytes")
@both_schemes
@both_transports
def test_an_answer_without_a_size_says_so(server: HttpObjects, scheme: str, transport: str) -> None:
    store, key = store_of(server, scheme, transport)
    server.left_out = {("HEAD", "Content-Length"), ("GET", "Content-Length")}
    with pytest.raises(StorageError, match="does not say how large the object is") as caught:
        store.info(key)
    assert not caught.value.transient
