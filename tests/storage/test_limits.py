"""How much may be in flight, as values: no clock, no thread, no storage."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.storage.fetch.byte_limit import LEAST_BYTES, QUEUEING, Look
from streammega.storage.fetch.latencies import (
    FIRST_HEDGES,
    HEDGE_AFTER,
    HEDGE_FLOOR,
    HEDGE_SHARE,
    JOB_READS,
    LATENCIES,
    NEAR,
    NEAR_JOB_READS,
    Latencies,
    may_hedge,
    size_class_of,
)
from streammega.storage.fetch.limits import (
    FEWEST,
    FIRST_INTERVAL,
    LEAST_REQUESTS,
    LONGEST_INTERVAL,
    REFUSED_IN_A_ROW,
    REFUSED_TOGETHER,
    SHARES,
    SHORTEST_INTERVAL,
    Limits,
    Pace,
)

KIB = 1 << 10
MIB = 1 << 20
LIMITS = Limits.of(StorageConfig(max_requests=400, in_flight_bytes=MIB))
SIZES = st.integers(1, 1 << 30)
QUEUES = st.floats(1.0, 1e6)


def below(requests: float, most: int = 400) -> Limits:
    return replace(LIMITS, most_requests=float(most), requests=requests)


def look(queueing: float, size: int, in_flight_bytes: int = 0) -> Look:
    """A look at answers of which the quickest took a hundredth of a second."""
    return Look(
        size=size, seconds=queueing / 100, queueing=queueing, in_flight_bytes=in_flight_bytes
    )


# What may be sent.


def test_all_requests_of_the_config_are_allowed_at_first() -> None:
    limits = Limits.of(StorageConfig(max_requests=3, in_flight_bytes=MIB))
    assert limits.admit(2, 0, 1)
    assert not limits.admit(3, 0, 1)


def test_bytes_in_flight_are_bounded_and_a_larger_request_goes_alone() -> None:
    assert LIMITS.admit(1, MIB - KIB, KIB)
    assert not LIMITS.admit(1, MIB - KIB, KIB + 1)
    assert LIMITS.admit(0, 0, 100 * MIB), "it would never be sent else"


@given(requests=st.floats(1.0, 400.0), size=SIZES)
def test_one_request_may_always_be_sent(requests: float, size: int) -> None:
    assert below(requests).admit(0, 0, size)


@given(requests=st.floats(1.0, 400.0), size=st.just(0) | SIZES)
def test_a_thread_waits_for_room_for_no_more_than_a_part_of_what_may_be_in_flight(
    requests: float, size: int
) -> None:
    share = below(requests).share(size)
    assert share >= 1
    assert share == 1 or SHARES * share <= requests
    assert share == 1 or SHARES * share * size <= LIMITS.bytes


# What changes it.


def test_limits_are_values_that_nothing_changes() -> None:
    before = below(100.0)
    assert before.after_refusal(1.0) != before
    assert before == below(100.0)
    with pytest.raises(FrozenInstanceError):
        before.requests = 1.0  # type: ignore[misc]


EVENTS = st.one_of(
    st.tuples(st.just("answers"), st.integers(1, NEAR_JOB_READS)),
    st.tuples(st.just("look"), st.builds(look, QUEUES, SIZES, SIZES)),
    st.tuples(st.just("refusal"), st.floats(0.0, 1e6)),
)


@given(most=st.integers(1, 2000), events=st.lists(EVENTS, max_size=60))
def test_whatever_happens_they_stay_between_one_and_what_is_configured(
    most: int, events: list[tuple[str, float | Look]]
) -> None:
    limits = Limits.of(StorageConfig(max_requests=most))
    for what, *told in events:
        limits = {
            "answers": limits.after_answers,
            "look": limits.after_look,
            "refusal": limits.after_refusal,
        }[what](*told)  # type: ignore[operator]
        assert 1.0 <= limits.requests <= most
        assert limits.most_requests == most
        assert LEAST_BYTES <= limits.bytes <= StorageConfig().in_flight_bytes


def test_as_many_answers_as_fit_raise_them_by_about_one() -> None:
    limits = below(100.0)
    for _ in range(100):
        limits = limits.after_answers(1)
    assert limits.requests == pytest.approx(101.0, abs=0.01)
    assert below(100.0).after_answers(8).requests == 100.08


@given(start=st.floats(1.0, 400.0))
def test_they_are_what_is_configured_again_after_answers_that_do_not_queue(start: float) -> None:
    limits = below(start)
    for _ in range(30):
        limits = limits.after_look(look(1.0, KIB))
    assert limits.requests == 400


@given(
    start=st.floats(LEAST_REQUESTS, 400.0),
    queueing=st.floats(QUEUEING, 1e6, exclude_min=True),
    size=SIZES,
)
def test_queueing_answers_lower_them_to_the_least_for_their_size(
    start: float, queueing: float, size: int
) -> None:
    limits = below(start)
    assert limits.after_look(look(queueing, size)).requests == pytest.approx(
        max(0.8 * start, limits_least(size))
    )
    for _ in range(40):
        limits = limits.after_look(look(queueing, size))
    assert limits.requests == limits_least(size)


@given(
    start=st.floats(1.0, 400.0),
    queueing=st.floats(QUEUEING, 1e6, exclude_min=True),
    size=st.just(0) | SIZES,
)
def test_queueing_answers_never_raise_them(start: float, queueing: float, size: int) -> None:
    """Also where refusals have taken them below the least: overload does not follow on being
    refused.
    """
    assert below(start).after_look(look(queueing, size)).requests <= start


def limits_least(size: int) -> int:
    """As many as are `LEAST_BYTES` together, within `FEWEST` and `LEAST_REQUESTS`."""
    return sorted([FEWEST, LEAST_BYTES // size, LEAST_REQUESTS])[1]


@pytest.mark.parametrize(("size", "least"), [(KIB, 192), (128 * KIB, 64), (8 * MIB, 8)])
def test_the_least_is_192_small_requests_or_8_mib_or_8_requests(size: int, least: int) -> None:
    limits = below(400.0)
    for _ in range(40):
        limits = limits.after_look(look(1e3, size))
    assert limits.requests == least


@given(queueing=st.floats(QUEUEING / 2, QUEUEING), start=st.floats(1.0, 400.0))
def test_in_between_they_stay(queueing: float, start: float) -> None:
    assert below(start).after_look(look(queueing, KIB)) == below(start)


def test_refusals_halve_them_once_for_all_refused_together() -> None:
    first = below(64.0).after_refusal(10.0)
    assert first.requests == 32
    assert first.after_refusal(10.0 + REFUSED_TOGETHER) == first
    assert first.after_refusal(10.1 + REFUSED_TOGETHER).requests == 16


def test_refusals_never_end_all_requests() -> None:
    limits = below(64.0)
    for second in range(20):
        limits = limits.after_refusal(float(second))
    assert limits.requests == 1


# The pace.


def refused_in_a_row(pace: Pace, times: int, began: float = 1.0) -> Pace:
    for number in range(times):
        pace = pace.after_refusal(began + number, began + number)
    return pace


def test_a_pace_is_set_by_refusals_in_a_row_alone() -> None:
    assert refused_in_a_row(Pace(), REFUSED_IN_A_ROW - 1).interval == 0
    assert refused_in_a_row(Pace(), REFUSED_IN_A_ROW).interval == FIRST_INTERVAL
    pace = Pace()
    for _ in range(10):
        pace = refused_in_a_row(pace, REFUSED_IN_A_ROW - 1).after_answer()
    assert pace == Pace(), "some of many are refused"


def test_what_was_sent_before_the_pace_changed_tells_nothing_of_it() -> None:
    pace = refused_in_a_row(Pace(), REFUSED_IN_A_ROW)
    assert pace.after_refusal(pace.changed_at - 0.01, pace.changed_at + 1) is pace
    assert pace.after_refusal(pace.changed_at, pace.changed_at + 1).interval > pace.interval


@given(st.lists(st.booleans(), max_size=400))
def test_a_pace_stays_between_its_bounds_and_ends(answers: list[bool]) -> None:
    pace = refused_in_a_row(Pace(), REFUSED_IN_A_ROW)
    for number, answered in enumerate(answers):
        now = 100.0 + number
        pace = pace.after_answer() if answered else pace.after_refusal(now, now)
        assert pace.interval == 0 or SHORTEST_INTERVAL <= pace.interval <= LONGEST_INTERVAL
    seconds = 0.0
    while pace.interval:
        seconds += pace.interval
        pace = pace.after_answer()
    assert seconds < 10, "a server that has recovered is read as before soon"


@given(rate=st.floats(4.0, 150.0))
def test_most_of_what_a_server_counts_by_the_second_is_asked_for_and_little_is_refused(
    rate: float,
) -> None:
    pace = refused_in_a_row(Pace(), REFUSED_IN_A_ROW)
    now, room, answered, refused = 100.0, 0.0, 0, 0
    while now < 200:
        seconds = max(pace.interval, SHORTEST_INTERVAL)
        now += seconds
        room = min(1.0 + rate / 10, room + seconds * rate)
        if room >= 1:
            room -= 1
            answered += 1
            pace = pace.after_answer()
        else:
            refused += 1
            pace = pace.after_refusal(now, now)
    assert answered >= 0.75 * rate * 100
    assert refused <= 0.35 * answered


# What latencies tell.


@given(seconds=st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=2 * LATENCIES))
def test_queueing_is_told_in_multiples_of_the_quickest_ever(seconds: list[float]) -> None:
    latencies = Latencies()
    for each in seconds:
        latencies.note(10, each)
    assert latencies.queueing(10, 2.0) == 2.0 / min(seconds)


def test_answers_from_memory_do_not_look_like_a_queue() -> None:
    latencies = Latencies()
    for seconds in (1e-9, 1e-4, 1e-4):
        latencies.note(10, seconds)
    assert latencies.queueing(10, 1e-4) == 1.0


def test_more_go_together_where_storage_is_near_and_each_size_is_judged_by_itself() -> None:
    latencies = Latencies()
    small = size_class_of(KIB)
    large = size_class_of(MIB)
    assert latencies.most_together(small) == JOB_READS, "nothing is known of it"
    latencies.note(small, NEAR)
    assert latencies.most_together(small) == JOB_READS
    latencies.note(small, NEAR / 2)
    latencies.note(small, 1.0)
    assert latencies.most_together(small) == NEAR_JOB_READS
    assert latencies.most_together(large) == JOB_READS


def straggling_after(seconds: list[float]) -> float:
    latencies = Latencies()
    for each in seconds:
        latencies.note(10, each)
    return latencies.straggling_after()[10]


def test_nothing_straggles_before_there_are_answers_to_compare_with() -> None:
    assert Latencies().straggling_after() == {}
    assert straggling_after([0.1] * (HEDGE_AFTER - 1)) == math.inf
    assert straggling_after([0.1] * HEDGE_AFTER) == pytest.approx(0.15)


def test_stragglers_that_make_up_the_99th_percentile_are_stragglers() -> None:
    few = [0.1] * 254 + [2.0] * 2
    many = [0.1] * 200 + [2.0] * 56
    assert straggling_after(few) == pytest.approx(0.15), "by the percentile"
    assert straggling_after(many) == pytest.approx(0.6), "by the median"


def test_quick_answers_are_not_asked_for_twice() -> None:
    assert straggling_after([1e-4] * LATENCIES) == HEDGE_FLOOR


def test_what_storage_was_long_ago_is_forgotten() -> None:
    assert straggling_after([5.0] * LATENCIES + [0.1] * LATENCIES) == pytest.approx(0.15)


@given(requests=st.integers(0, 10**6))
def test_few_are_sent_twice_however_few_requests_there_were(requests: int) -> None:
    hedges = 0
    while may_hedge(hedges, requests) and hedges < 10:
        hedges += 1
    assert hedges >= FIRST_HEDGES
    assert may_hedge(FIRST_HEDGES - 1, requests)
    assert not may_hedge(FIRST_HEDGES + math.ceil(HEDGE_SHARE * requests), requests)
