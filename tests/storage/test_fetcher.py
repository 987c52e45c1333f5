"""The limits of what is in flight: how many, how large, how often twice, and what makes them
smaller.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streammega import StorageConfig
from streammega.errors import EndpointError
from streammega.storage import retry
from streammega.storage.backends.local import LocalStore
from streammega.storage.derived_stores import DerivedStore
from streammega.storage.fetch import fetcher, flow_control
from streammega.storage.fetch.buffer_pool import rounded
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.flow_control import (
    BATCH_REQUESTS,
    FEW_LATE,
    FIRST_ALONE,
    HEDGE_SHARE,
    MAX_COPIES,
    NEAR_BATCH_REQUESTS,
    OVERTAKERS,
    size_class_of,
)
from streammega.storage.fetch.requests import (
    Answer,
    Counters,
    FetchGroup,
    RangeRequest,
    send,
)
from streammega.storage.seekable_zstd import FrameWriter, read_frames
from streammega.storage.store import Buffer, Bytes, Span, Store

SIZE = 1000
CONFIG = StorageConfig(memory_bytes=1 << 24).tuned(hedge_requests=False)


class Recorded:
    """A store that notes what is asked of it together, and how many reads and bytes are in flight
    at once.
    """

    def __init__(self, act: Callable[[int], None] = lambda start: None) -> None:
        self.act = act
        self.calls: list[tuple[str, int]] = []
        self.most = self.most_bytes = self._reads = self._bytes = 0
        self._lock = threading.Lock()

    def fetch_into(
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


def one_read(store: Any, key: object, size: int = SIZE, start: int = 0) -> FetchGroup:
    """A group of one request."""
    request = RangeRequest(store, str(key), "", start, start + size, 0)
    return FetchGroup(size, [request])


def fetch(
    store: Any, config: StorageConfig, count: int, key: Callable[[int], str] = lambda n: "key"
) -> Counters:
    """Fetch so many reads, each of a group of its own."""
    groups = [one_read(store, key(n), start=n * SIZE) for n in range(count)]
    with closing(Fetcher(config)) as made:
        made.submit(groups)
        made.wait(groups)
        return made.counters


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert holds()


@pytest.mark.guarantee("flight-most-max")
@pytest.mark.parametrize(("requests", "size", "most"), [(3, 1 << 20, 3), (300, 5 * SIZE, 5)])
@pytest.mark.parametrize("objects", [1, 7])
def test_requests_in_flight_keep_to_both_limits(
    requests: int, size: int, most: int, objects: int
) -> None:
    """Of one object several go out by one thread, of many each by its own."""
    store = Recorded(lambda start: time.sleep(0.002))
    fetch(
        store,
        replace(CONFIG, max_concurrent_requests=requests).tuned(max_in_flight_bytes=size),
        120,
        key=lambda n: str(n % objects),
    )
    assert store.most == most
    assert store.most_bytes == most * SIZE


@pytest.mark.guarantee("flight-most-max")
def test_small_reads_of_an_object_go_out_together_and_those_of_others_apart() -> None:
    gate = threading.Event()

    def wait_for_gate(start: int) -> None:
        gate.wait(60)

    store = Recorded(wait_for_gate)
    threading.Timer(0.3, gate.set).start()
    fetch(store, replace(CONFIG, max_concurrent_requests=200), 120)
    assert BATCH_REQUESTS <= max(number for _, number in store.calls) <= NEAR_BATCH_REQUESTS
    apart = Recorded()
    fetch(apart, replace(CONFIG, max_concurrent_requests=200), 120, key=str)
    assert {number for _, number in apart.calls} == {1}


def test_what_is_unpacked_from_local_files_goes_together_whatever_files_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [np.random.default_rng(number).bytes(SIZE * 24) for number in range(3)]
    stores = []
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.zst"
        local = LocalStore()
        writer = FrameWriter(local.open_writer(str(path)), frame_bytes=SIZE)
        writer.write(content)
        writer.commit()
        info = local.info(str(path))
        stores.append(DerivedStore(local, info, read_frames(local, info)))
    sizes = []

    def noting(job: list[RangeRequest]) -> Answer:
        sizes.append(len(job))
        return send(job)

    monkeypatch.setattr(fetcher, "send", noting)

    def group_of(number: int) -> FetchGroup:
        store = stores[number % 3]
        start = number // 3 * SIZE + 7
        key = store.info("").key
        return one_read(store, key, start=start)

    groups = [group_of(number) for number in range(60)]
    made = Fetcher(replace(CONFIG, max_concurrent_requests=BATCH_REQUESTS), max_threads=1)
    with closing(made):
        made.submit(groups)
        made.wait(groups)
    assert max(sizes) == BATCH_REQUESTS
    for number, group in enumerate(groups):
        start = number // 3 * SIZE + 7
        assert group.buffer is not None
        assert group.buffer[:SIZE].tobytes() == contents[number % 3][start : start + SIZE]


@pytest.mark.guarantee("bytes-flight-fixed")
def test_a_thread_waits_until_a_whole_job_fits() -> None:
    """Room for 32 requests, so for four jobs: no thread takes the one read that fits beside them
    when an answer came.
    """
    store = Recorded(lambda start: time.sleep(0.002))
    fetch(store, replace(CONFIG, max_concurrent_requests=32), 320)
    at_once = [number for _, number in store.calls]
    later = at_once[at_once.count(1) : -4]
    assert 0 < at_once.count(1) <= FIRST_ALONE
    assert min(later) >= BATCH_REQUESTS
    assert store.most <= 32


def test_a_wait_after_one_that_was_interrupted_waits_for_its_own_groups() -> None:
    """Ctrl-C in the thread that waits."""
    gates = [threading.Event(), threading.Event()]

    def wait_for_gate(start: int) -> None:
        gates[start // SIZE].wait(60)

    store: Any = Recorded(wait_for_gate)
    first, second = (one_read(store, f"key {number}", start=number * SIZE) for number in range(2))

    def interrupt() -> None:
        wait_until(lambda: first.awaited)
        # One that this thread got would not wake the other: it would wait until it warns.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def answer() -> None:
        wait_until(lambda: second.awaited)
        gates[0].set()
        wait_until(lambda: first.ready)
        time.sleep(0.2)
        gates[1].set()

    with closing(Fetcher(CONFIG)) as made:
        made.submit([first, second])
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            made.wait([first])
        threading.Thread(target=answer).start()
        made.wait([second])
        assert second.ready
        made.release([first, second])


def test_a_long_wait_for_an_answer_that_has_not_failed_yet_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "WARN_EVERY_S", 0.05)
    said = threading.Event()

    class Silent(Recorded):
        def url(self, key: str) -> str:
            return f"s3://bucket/{key}"

    def answer_late(start: int) -> None:
        wait_until(lambda: bool(caplog.messages))
        said.set()

    fetch(Silent(answer_late), CONFIG, 1)
    assert said.is_set()
    assert "a batch has waited 0 s for storage: s3://bucket/key sends slowly" in caplog.messages[0]
    assert "ends after 60 s (request_timeout)" in caplog.messages[0]


def test_what_is_released_before_there_was_room_for_it_takes_none() -> None:
    store: Any = Recorded()
    made = Fetcher(replace(CONFIG, memory_bytes=8192))
    first, second, third = (one_read(store, "key", 8192) for _ in range(3))
    with closing(made):
        made.submit([first, second, third])
        made.wait([first])
        made.release([second])
        made.release([first])
        made.wait([third])
        made.release([third])
        assert made.pool.in_use == 0
        assert len(store.calls) == 2


def alive(*kinds: type) -> int:
    """Objects of these classes that were not freed."""
    return sum(isinstance(found, kinds) for found in gc.get_objects())


def two_reads(store: Any, number: int) -> FetchGroup:
    """A group of two reads."""
    halves = [(0, SIZE), (SIZE, 2 * SIZE)]
    reads = [RangeRequest(store, str(number), "", start, stop, start) for start, stop in halves]
    return FetchGroup(2 * SIZE, reads)


@pytest.mark.parametrize("filled", [0, 1, 100])
def test_what_was_released_is_freed_without_the_collector(filled: int) -> None:
    """Else it would look through all of the program for them, again and again, while no thread
    runs.
    """
    store: Any = Recorded()
    # Where none is to be filled, none is admitted.
    made = Fetcher(CONFIG, budget=60 * rounded(2 * SIZE) if filled else 0)
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        before = alive(RangeRequest, FetchGroup)
        groups = [two_reads(store, number) for number in range(100)]
        made.submit(groups)
        for number in range(filled):
            made.wait(groups[number : number + 1])
            made.release(groups[number : number + 1])
        made.close()
        groups.clear()
        assert alive(RangeRequest, FetchGroup) == before
    finally:
        if collects:
            gc.enable()


class Bodies(Recorded):
    """A store that returns bodies, as those of object storage do."""

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        outs = [np.empty(stop - start, np.uint8) for start, stop in spans]
        super().fetch_into(key, spans, outs, etag)
        return [out.data for out in outs]

    def url(self, key: str) -> str:
        return key

    fetch_into = Store.fetch_into


@pytest.mark.guarantee("buffers-on-arrival")
def test_memory_counts_from_admission_and_is_allocated_when_the_answer_arrives() -> None:
    gate = threading.Event()

    def wait_for_gate(start: int) -> None:
        gate.wait(60)

    store: Any = Bodies(wait_for_gate)
    size = 4096
    made = Fetcher(replace(CONFIG, memory_bytes=4 * size))
    groups = [one_read(store, n, size) for n in range(8)]
    with closing(made):
        made.submit(groups)
        assert made.pool.in_use == 4 * size, "as many as the budget holds"
        assert all(group.buffer is None for group in groups)
        gate.set()
        for number, group in enumerate(groups):
            made.wait([group])
            assert group.buffer is not None
            assert (group.buffer == 1).all()
            made.release([group])
            assert made.pool.in_use == min(4, 7 - number) * size
        assert made.pool.peak == 4 * size


def fetcher_that_knows_quick_answers(store: Any) -> Fetcher:
    """A fetcher after a hundred of them, which can tell a straggler. It has sent no copies yet."""
    made = Fetcher(replace(CONFIG, max_concurrent_requests=24).tuned(hedge_requests=True))
    quick = [one_read(store, n, SIZE) for n in range(100)]
    made.submit(quick)
    made.wait(quick)
    made.release(quick)
    # Where the machine is busy, quick ones may have looked like stragglers, as many as may be. A late
    # answer to one of their copies would be one to a request that was sent before all others.
    while made.flow.requests:
        time.sleep(0.001)
    made.counters.hedges = made.counters.hedges_won = made.flow._alone = 0
    return made


@pytest.mark.parametrize("winner", [0, 1, 2])
def test_a_straggler_is_asked_for_three_times_and_its_memory_counts_until_all_requests_ended(
    winner: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests of one read are held until the test says. The storage is far."""
    monkeypatch.setattr(flow_control, "NEAR", 0.0)
    gates = [threading.Event() for _ in range(MAX_COPIES)]
    asked: list[threading.Event] = []

    def act(start: int) -> None:
        if start:
            gate = gates[len(asked)]
            asked.append(gate)
            assert gate.wait(60)

    store: Any = Recorded(act)
    size = SIZE
    made = fetcher_that_knows_quick_answers(store)
    slow = one_read(store, "slow", size, start=size)
    try:
        made.submit([slow])
        waiter = threading.Thread(target=made.wait, args=([slow],), daemon=True)
        waiter.start()
        wait_until(lambda: len(asked) == MAX_COPIES)
        gates[winner].set()
        waiter.join(60)
        assert (made.counters.hedges, made.counters.hedges_won) == (2, winner > 0)
        goes_alone = made.flow.batch_requests(size_class_of(size)) == 1
        assert goes_alone == (winner > 0), "if the first was answered first, nothing was stuck"
        assert slow.buffer is not None
        assert (slow.buffer[:size] == 1).all()
        made.release([slow])
        assert made.pool.in_use == rounded(size), "other requests still write to its memory"
        for gate in gates:
            gate.set()
        wait_until(lambda: made.pool.in_use == 0)
        assert slow.buffer is None
    finally:
        for gate in gates:
            gate.set()
        made.close()


def test_a_straggler_is_sent_again_although_nobody_waits_and_few_answers_come() -> None:
    """As for a caller that takes less than the storage gives: its batches are ready for a while."""
    gate = threading.Event()
    asked: list[int] = []

    def act(start: int) -> None:
        if start:
            asked.append(start)
            assert gate.wait(60)

    store: Any = Recorded(act)
    made = fetcher_that_knows_quick_answers(store)
    try:
        made.submit([one_read(store, "slow", SIZE, start=SIZE)])
        for number in range(30):
            if len(asked) == MAX_COPIES:
                break
            time.sleep(0.03)
            made.submit([one_read(store, f"later{number}", SIZE)])
        assert len(asked) == MAX_COPIES
    finally:
        gate.set()
        made.close()


def test_nothing_is_sent_again_where_all_answers_are_late_and_in_order() -> None:
    """As on a link that is full: further copies would only delay what is needed first."""
    sent: list[float] = []
    answered = threading.Condition()
    turn = 0

    def act(start: int) -> None:
        nonlocal turn
        if not start:
            return
        with answered:
            place = len(sent)
            sent.append(start)
            answered.wait_for(lambda: turn == place)
            time.sleep(0.02)
            turn += 1
            answered.notify_all()

    store: Any = Recorded(act)
    made = fetcher_that_knows_quick_answers(store)
    made.counters.requests = 1000  # of them fifty may be sent again
    try:
        late = [one_read(store, f"late{number}", SIZE, start=SIZE) for number in range(24)]
        made.submit(late)
        made.wait(late)
        assert made.counters.hedges <= 4 * FEW_LATE, "while a few are late, at both ends"
    finally:
        made.close()


def test_many_stragglers_are_sent_again_where_later_requests_are_answered() -> None:
    """As of one bad server of several."""
    gate = threading.Event()
    asked: list[str] = []

    def act(start: int) -> None:
        if start and len(asked) < 2 * FEW_LATE:
            asked.append("held")
            assert gate.wait(60)

    store: Any = Recorded(act)
    made = fetcher_that_knows_quick_answers(store)
    made.counters.requests = 1000
    try:
        slow = [
            one_read(store, f"slow{number}", SIZE, start=SIZE) for number in range(2 * FEW_LATE)
        ]
        made.submit(slow)
        later = [one_read(store, f"later{number}", SIZE) for number in range(2 * OVERTAKERS)]
        made.submit(later)
        made.wait(later)
        waiter = threading.Thread(target=made.wait, args=(slow,), daemon=True)
        waiter.start()
        waiter.join(60)
        assert made.counters.hedges_won == 2 * FEW_LATE
    finally:
        gate.set()
        made.close()


@pytest.mark.guarantee("429-503-halve")
def test_stragglers_are_sent_twice_one_in_twenty_at_most() -> None:
    """A third of all answers are slow: without the bound each of them would be asked for again."""
    store = Recorded(
        lambda start: time.sleep(0.15 if start // SIZE % 3 == 0 and start > 60 * SIZE else 0.001)
    )
    config = replace(CONFIG, max_concurrent_requests=24).tuned(hedge_requests=True)
    counters = fetch(store, config, 300, key=str)
    assert 0 < counters.hedges <= 5 + HEDGE_SHARE * counters.requests, (
        "a few, however few requests there were"
    )


@pytest.mark.guarantee("server-counts-requests")
def test_a_server_that_counts_requests_by_the_second_is_asked_no_faster_and_in_order_of_need() -> (
    None
):
    """400 reads are queued: without a pace, each that was refused made room for another that would
    be, thousands a second, and what was needed first waited longest.
    """
    rate = 100.0
    lock = threading.Lock()
    began = time.monotonic()
    served: list[int] = []
    refused = 0

    def act(start: int) -> None:
        nonlocal refused
        with lock:
            if len(served) < 10 + rate * (time.monotonic() - began):
                served.append(start // SIZE)
                return
            refused += 1
        error = EndpointError("503")
        error.throttled = True
        raise error

    store: Any = Recorded(act)
    made = Fetcher(replace(CONFIG, max_concurrent_requests=64))
    groups = [one_read(store, n, start=n * SIZE) for n in range(400)]
    with closing(made):
        made.submit(groups)
        made.wait(groups[:200])
        assert refused < 400, (
            "as many as were answered at most, those in flight at first among them"
        )
        late = [place for place, number in enumerate(served) if number < 100]
        assert len(late) == 100
        assert max(late) < 300, "what is needed first comes first, but for what was in flight"


def test_what_is_queued_between_two_requests_of_a_pace_is_sent_when_the_next_may_go() -> None:
    """All threads wait for work, and none for the pace: the next to queue some has one do so."""
    store: Any = Recorded()
    made = Fetcher(replace(CONFIG, max_concurrent_requests=4))
    made.flow.pace.interval = 0.4
    with closing(made):
        for number in range(3):
            group = one_read(store, number)
            made.submit([group])
            waiter = threading.Thread(target=made.wait, args=([group],), daemon=True)
            waiter.start()
            waiter.join(60)
            assert group.ready, f"read {number} was never sent"
