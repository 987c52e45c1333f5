"""How much may be in flight: no clock, no thread, no storage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.storage.fetch.flow_control import (
    ALONE_AFTER_REFUSAL,
    ALONE_AFTER_STRAGGLER,
    BATCH_REQUESTS,
    FAR_AFTER,
    FAR_BYTES,
    FIRST_ALONE,
    FIRST_HEDGES,
    FIRST_INTERVAL,
    HEDGE_AFTER,
    HEDGE_FLOOR,
    HEDGE_SHARE,
    LATENCIES,
    MAX_INTERVAL,
    MIN_INTERVAL,
    NEAR,
    NEAR_BATCH_REQUESTS,
    NEAR_BYTES,
    REFUSED_IN_A_ROW,
    REFUSED_TOGETHER,
    SHARES,
    FlowControl,
    Latencies,
    Pace,
    can_hedge,
    size_class_of,
)

KIB = 1 << 10
MIB = 1 << 20
SIZES = st.integers(1, 1 << 30)


def flow_with(window: float = 400.0, max_bytes: int = MIB) -> FlowControl:
    """Of 400 requests at most, of which refusals left so many."""
    flow = FlowControl(
        StorageConfig(max_concurrent_requests=400).tuned(max_in_flight_bytes=max_bytes)
    )
    flow.window = window
    return flow


def start(flow: FlowControl, count: int, size: int) -> None:
    for _ in range(count):
        flow.started(size)


# What may be sent.


def test_all_requests_of_the_config_are_allowed_at_first() -> None:
    flow = FlowControl(StorageConfig(max_concurrent_requests=3).tuned(max_in_flight_bytes=MIB))
    start(flow, 2, 1)
    assert flow.can_send(1, 0.0)
    assert not flow.can_send(1, 0.0, 2)
    start(flow, 1, 1)
    assert not flow.can_send(1, 0.0)
    flow.finished(1)
    assert flow.can_send(1, 0.0)


@pytest.mark.guarantee("bytes-flight-fixed")
def test_bytes_in_flight_are_bounded_and_a_larger_request_goes_alone() -> None:
    flow = flow_with()
    assert flow.can_send(100 * MIB, 0.0), "it would never be sent else"
    flow.started(MIB - KIB)
    assert flow.can_send(KIB, 0.0)
    assert not flow.can_send(KIB + 1, 0.0)
    assert not flow.can_send(KIB, 0.0, 2)


@pytest.mark.guarantee("bytes-flight-near")
@pytest.mark.parametrize("max_bytes", [MIB, 40 * MIB])
def test_far_storage_is_sent_more_at_once_after_each_answer_and_near_storage_is_not(
    max_bytes: int,
) -> None:
    flow = flow_with(max_bytes=max_bytes)
    least = min(NEAR_BYTES, max_bytes)
    for _ in range(FAR_AFTER):
        flow.answered(size_class_of(MIB), 1, NEAR)
        assert flow.max_bytes == least, "the first answers may wait for connections"
    for number in range(1, 41):
        flow.answered(size_class_of(MIB), 1, NEAR)
        assert flow.max_bytes == min(max_bytes, least + number * FAR_BYTES)
    flow.answered(size_class_of(KIB), 1, NEAR / 2, is_cached=True)
    assert flow.max_bytes == max_bytes, "a cache is near, whatever the storage is"
    flow.answered(size_class_of(KIB), 1, NEAR / 2)
    assert flow.max_bytes == least
    flow.answered(size_class_of(MIB), 1, 1.0)
    assert flow.max_bytes == least, "storage that was quick once is near"


@given(window=st.floats(1.0, 400.0), size=SIZES)
def test_one_request_may_always_be_sent(window: float, size: int) -> None:
    assert flow_with(window).can_send(size, 0.0)


@pytest.mark.guarantee("bytes-flight-fixed")
@given(window=st.floats(1.0, 400.0), size=st.just(0) | SIZES, queued=st.integers(0, 1000))
def test_a_thread_waits_for_room_for_no_more_than_a_part_of_what_may_be_in_flight(
    window: float, size: int, queued: int
) -> None:
    count = flow_with(window).full_batch(size, queued)
    assert count >= 1
    assert count == 1 or SHARES * count <= window
    assert count == 1 or SHARES * count * size <= MIB
    assert count <= max(1, queued)


# What changes it.

EVENTS = st.tuples(
    st.sampled_from(["answer", "refusal"]), st.integers(1, NEAR_BATCH_REQUESTS), st.floats(0, 1e6)
)


@pytest.mark.guarantee("429-503-halve")
@given(most=st.integers(1, 2000), events=st.lists(EVENTS, max_size=60))
def test_whatever_happens_the_window_stays_between_one_and_what_is_configured(
    most: int, events: list[tuple[str, int, float]]
) -> None:
    flow = FlowControl(StorageConfig(max_concurrent_requests=most))
    for what, count, seconds in events:
        if what == "answer":
            flow.answered(10, count, seconds)
        else:
            flow.refused(seconds, seconds)
        assert 1.0 <= flow.window <= most
        assert flow.near_bytes <= flow.max_bytes <= StorageConfig().tuning.max_in_flight_bytes


@pytest.mark.guarantee("429-503-halve")
def test_as_many_answers_as_fit_raise_the_window_by_about_one() -> None:
    flow = flow_with(100.0)
    for _ in range(100):
        flow.answered(10, 1, 0.01)
    assert flow.window == pytest.approx(101.0, abs=0.01)
    flow = flow_with(100.0)
    flow.answered(10, 8, 0.01)
    assert flow.window == 100.08


def test_slow_answers_alone_do_not_lower_the_window() -> None:
    flow = flow_with()
    for number in range(1000):
        flow.answered(10, 1, 0.001 * number)
    assert flow.window == 400


@pytest.mark.guarantee("429-503-halve")
def test_refusals_halve_the_window_once_for_all_refused_together() -> None:
    flow = flow_with(64.0)
    flow.refused(10.0, 10.0)
    assert flow.window == 32
    flow.refused(10.0, 10.0 + REFUSED_TOGETHER)
    assert flow.window == 32
    flow.refused(10.0, 10.1 + REFUSED_TOGETHER)
    assert flow.window == 16
    for second in range(20, 40):
        flow.refused(second, second)
    assert flow.window == 1, "refusals never end all requests"


# The pace.


def refused_in_a_row(times: int) -> Pace:
    pace = Pace()
    for number in range(times):
        pace.refused(1.0 + number, 1.0 + number)
    return pace


def test_a_pace_is_set_by_refusals_in_a_row_alone() -> None:
    assert refused_in_a_row(REFUSED_IN_A_ROW - 1).interval == 0
    assert refused_in_a_row(REFUSED_IN_A_ROW).interval == FIRST_INTERVAL
    pace = Pace()
    for second in range(10 * REFUSED_IN_A_ROW):
        if second % REFUSED_IN_A_ROW == 0:
            pace.answered()
        else:
            pace.refused(second, second)
        assert pace.interval == 0, "some of many are refused"


def test_what_was_sent_before_the_pace_changed_tells_nothing_of_it() -> None:
    pace = refused_in_a_row(REFUSED_IN_A_ROW)
    changed_at = float(REFUSED_IN_A_ROW)
    pace.refused(changed_at - 0.01, changed_at + 1)
    assert pace.interval == FIRST_INTERVAL
    pace.refused(changed_at, changed_at + 1)
    assert pace.interval > FIRST_INTERVAL


def test_requests_of_a_pace_are_sent_one_interval_apart() -> None:
    flow = flow_with()
    for second in range(REFUSED_IN_A_ROW):
        flow.refused(second, second)
    assert flow.batch_requests(10) == 1
    flow.pace.sent(100.0)
    assert not flow.can_send(1, 100.0 + 0.9 * FIRST_INTERVAL)
    assert flow.can_send(1, 100.0 + 1.1 * FIRST_INTERVAL)


@given(st.lists(st.booleans(), max_size=400))
def test_a_pace_stays_between_its_bounds_and_ends(answers: list[bool]) -> None:
    pace = refused_in_a_row(REFUSED_IN_A_ROW)
    for number, answered in enumerate(answers):
        now = 100.0 + number
        if answered:
            pace.answered()
        else:
            pace.refused(now, now)
        assert pace.interval == 0 or MIN_INTERVAL <= pace.interval <= MAX_INTERVAL
    seconds = 0.0
    while pace.interval:
        seconds += pace.interval
        pace.answered()
    assert seconds < 10, "a server that has recovered is read as before soon"


@pytest.mark.guarantee("server-counts-requests")
@given(rate=st.floats(4.0, 150.0))
def test_most_of_what_a_server_counts_by_the_second_is_asked_for_and_little_is_refused(
    rate: float,
) -> None:
    pace = refused_in_a_row(REFUSED_IN_A_ROW)
    now, room, answered, refused = 100.0, 0.0, 0, 0
    while now < 200:
        seconds = max(pace.interval, MIN_INTERVAL)
        now += seconds
        room = min(1.0 + rate / 10, room + seconds * rate)
        if room >= 1:
            room -= 1
            answered += 1
            pace.answered()
        else:
            refused += 1
            pace.refused(now, now)
    assert answered >= 0.75 * rate * 100
    assert refused <= 0.35 * answered


def test_after_a_refusal_requests_go_alone_until_enough_are_answered() -> None:
    flow = flow_with()
    size_class = size_class_of(KIB)
    flow.refused(0.0, 0.0)
    for _ in range(ALONE_AFTER_REFUSAL):
        assert flow.batch_requests(size_class) == flow.full_batch(KIB, 1000) == 1
        flow.answered(size_class, 1, 1.0)
    assert flow.batch_requests(size_class) == BATCH_REQUESTS


def test_after_a_straggler_of_far_storage_requests_go_alone_until_enough_are_answered() -> None:
    far, near = flow_with(), flow_with()
    size_class = size_class_of(KIB)
    near.answered(size_class, 1, NEAR / 2)
    for flow in (far, near):
        flow.straggled(size_class)
    assert near.batch_requests(size_class) == NEAR_BATCH_REQUESTS
    for _ in range(ALONE_AFTER_STRAGGLER):
        assert far.batch_requests(size_class) == 1
        far.answered(size_class, 1, 1.0)
    assert far.batch_requests(size_class) > 1


# Latencies.


def test_the_first_requests_go_alone_until_one_is_answered() -> None:
    flow = flow_with()
    size_class = size_class_of(KIB)
    for _ in range(FIRST_ALONE):
        assert flow.batch_requests(size_class) == flow.full_batch(KIB, 1000) == 1
        flow.started(KIB)
    assert flow.batch_requests(size_class) == BATCH_REQUESTS, "the first batch needs fewer"
    flow.finished(KIB)
    flow.answered(size_class, 1, 1.0)
    assert flow.batch_requests(size_class) == BATCH_REQUESTS


def test_more_go_together_where_storage_is_near_and_each_size_is_judged_by_itself() -> None:
    flow = flow_with()
    small = size_class_of(KIB)
    large = size_class_of(MIB)
    flow.answered(small, 1, NEAR)
    assert flow.batch_requests(small) == BATCH_REQUESTS
    flow.answered(small, 1, NEAR / 2)
    flow.answered(small, 1, 1.0)
    assert flow.batch_requests(small) == NEAR_BATCH_REQUESTS
    assert flow.batch_requests(large) == BATCH_REQUESTS


def straggler_seconds(seconds: list[float]) -> float:
    latencies = Latencies()
    for each in seconds:
        latencies.add(10, each)
    return latencies.straggler_seconds().get(10, math.inf)


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        pytest.param([], math.inf, id="no answers"),
        pytest.param([0.1] * (HEDGE_AFTER - 1), math.inf, id="too few to compare with"),
        pytest.param([0.1] * HEDGE_AFTER, 0.15, id="enough"),
        pytest.param([0.1] * 254 + [2.0] * 2, 0.15, id="by the 99th percentile"),
        pytest.param([0.1] * 200 + [2.0] * 56, 0.3, id="by the median"),
        pytest.param([1e-4] * LATENCIES, HEDGE_FLOOR, id="quick ones are not sent twice"),
        pytest.param([5.0] * LATENCIES + [0.1] * LATENCIES, 0.15, id="long ago is forgotten"),
    ],
)
def test_a_straggler_is_slower_than_nearly_all_of_the_latest_answers(
    seconds: list[float], limit: float
) -> None:
    assert straggler_seconds(seconds) == pytest.approx(limit)


@given(requests=st.integers(0, 10**6))
def test_few_are_sent_twice_however_few_requests_there_were(requests: int) -> None:
    hedges = 0
    while can_hedge(hedges, requests) and hedges < 10:
        hedges += 1
    assert hedges >= FIRST_HEDGES
    assert can_hedge(FIRST_HEDGES - 1, requests)
    assert not can_hedge(FIRST_HEDGES + math.ceil(HEDGE_SHARE * requests), requests)
