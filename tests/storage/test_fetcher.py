"""The limits of what is in flight: how many, how large, how often twice, and what makes them
smaller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from streammega import StorageConfig
from streammega.errors import EndpointError
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.limits import (
    ADAPT_EVERY,
    HEDGE_SHARE,
    JOB_READS,
    LEAST_REQUESTS,
    NEAR_JOB_READS,
)
from streammega.storage.fetch.reads import Counters, Holding, Read
from streammega.storage.store import Bytes, Span

SIZE = 1000
CONFIG = StorageConfig(memory_bytes=1 << 24, hedge=False)


class Recorded:
    """A store that notes what is asked of it together, and how many reads and bytes are in flight
    at once.
    """

    def __init__(self, act: Callable[[int], None] = lambda start: None) -> None:
        self.act = act
        self.calls: list[tuple[str, int]] = []
        self.most = self.most_bytes = self._reads = self._bytes = 0
        self._lock = threading.Lock()

    def read_into(
        self, key: str, spans: Sequence[Span], outs: Sequence[Bytes], etag: str = ""
    ) -> None:
        size = sum(stop - start for start, stop in spans)
        with self._lock:
            self.calls.append((key, len(spans)))
            self._reads += len(spans)
            self._bytes += size
            self.most, self.most_bytes = (
                max(self.most, self._reads),
                max(self.most_bytes, self._bytes),
            )
        try:
            for (start, _), out in zip(spans, outs, strict=True):
                self.act(start)
                out[:] = 1
        finally:
            with self._lock:
                self._reads -= len(spans)
                self._bytes -= size


def fetch(
    store: Any, config: StorageConfig, count: int, key: Callable[[int], str] = lambda n: "key"
) -> Counters:
    """Fetch so many reads, each of a holding of its own."""
    made = Fetcher(config)
    holdings = [
        Holding(SIZE, [Read(store, key(n), "", n * SIZE, (n + 1) * SIZE, 0)]) for n in range(count)
    ]
    try:
        made.submit(holdings)
        made.wait(holdings)
        return made.counters
    finally:
        made.close()


@pytest.mark.parametrize(("requests", "size", "most"), [(3, 1 << 20, 3), (300, 5 * SIZE, 5)])
@pytest.mark.parametrize("objects", [1, 7])
def test_requests_in_flight_keep_to_both_limits(
    requests: int, size: int, most: int, objects: int
) -> None:
    """Of one object several go out by one thread, of many each by its own."""
    store = Recorded(lambda start: time.sleep(0.002))
    fetch(
        store,
        replace(CONFIG, max_requests=requests, in_flight_bytes=size),
        120,
        key=lambda n: str(n % objects),
    )
    assert store.most == most
    assert store.most_bytes == most * SIZE


def test_small_reads_of_an_object_go_out_together_and_those_of_others_apart() -> None:
    gate = threading.Event()

    def wait_for_gate(start: int) -> None:
        gate.wait(10)

    store = Recorded(wait_for_gate)
    threading.Timer(0.3, gate.set).start()
    fetch(store, replace(CONFIG, max_requests=200), 120)
    assert JOB_READS <= max(number for _, number in store.calls) <= NEAR_JOB_READS
    apart = Recorded()
    fetch(apart, replace(CONFIG, max_requests=200), 120, key=str)
    assert {number for _, number in apart.calls} == {1}


def test_stragglers_are_sent_twice_one_in_twenty_at_most() -> None:
    """A third of all answers are slow: without the bound each of them would be asked for again."""
    store = Recorded(
        lambda start: time.sleep(0.15 if start // SIZE % 3 == 0 and start > 60 * SIZE else 0.001)
    )
    config = replace(CONFIG, max_requests=24, hedge=True)
    counters = fetch(store, config, 300, key=str)
    assert 0 < counters.hedges <= 5 + HEDGE_SHARE * counters.requests, (
        "a few, however few requests there were"
    )


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_a_hedge_is_won_by_the_second_request_alone(first_ends_first: bool) -> None:
    """Both requests of one read are held until a test says; the first to take off is held longer
    than any before it.
    """
    quick = 100
    gates = [threading.Event(), threading.Event()]
    asked: list[threading.Event] = []

    def act(start: int) -> None:
        if start == quick * SIZE:
            gate = gates[len(asked)]
            asked.append(gate)
            assert gate.wait(20)

    store: Any = Recorded(act)
    made = Fetcher(replace(CONFIG, max_requests=24, hedge=True))
    holdings = [
        Holding(SIZE, [Read(store, str(n), "", n * SIZE, (n + 1) * SIZE, 0)])
        for n in range(quick + 1)
    ]
    try:
        made.submit(holdings[:quick])
        made.wait(holdings[:quick])
        made.submit(holdings[quick:])
        waiter = threading.Thread(target=made.wait, args=(holdings[quick:],), daemon=True)
        waiter.start()
        deadline = time.monotonic() + 20
        while len(asked) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(asked) == 2, "a second request was sent"
        gates[0 if first_ends_first else 1].set()
        waiter.join(20)
        assert made.counters.hedges == 1
        assert made.counters.hedges_won == (0 if first_ends_first else 1)
    finally:
        for gate in gates:
            gate.set()
        made.close()


def test_throttling_halves_what_is_in_flight_once_for_all_refused_together() -> None:
    made = Fetcher(replace(CONFIG, max_requests=64))
    refused = EndpointError("503")
    refused.throttled = True
    reads = [Read(Recorded(), "key", "", n, n + 1, 0) for n in range(10)]  # type: ignore[arg-type]
    for read in reads:
        Holding(1, [read])
        made._failed(read, refused, alone=True)
    assert made.limits.requests == 32
    assert made.counters.throttled == 10
    made.limits = replace(made.limits, halved_at=made.limits.halved_at - 1.0)
    made._failed(reads[0], refused, alone=True)
    assert made.limits.requests == 16
    made.close()


def test_fewer_are_sent_where_answers_queue_behind_each_other_and_more_again_after() -> None:
    made = Fetcher(replace(CONFIG, max_requests=400))
    job = [Read(Recorded(), "key", "", 0, SIZE, 0)]  # type: ignore[arg-type]

    def answers(seconds: float) -> float:
        for _ in range(3 * ADAPT_EVERY):
            made.counters.requests += 1
            made._observe(job, seconds)
        return made.limits.requests

    assert answers(0.01) == 400
    slower = answers(0.2)
    assert slower < 400
    for _ in range(20):
        answers(0.2)
    assert made.limits.requests == LEAST_REQUESTS, (
        "no fewer: small reads are what object stores are good at"
    )
    for _ in range(20):
        answers(0.01)
    assert made.limits.requests == 400
    made.close()
