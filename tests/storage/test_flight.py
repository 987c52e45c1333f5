"""When it is looked at how long answers take, and which of them count."""

from __future__ import annotations

from typing import Any

import pytest

from streammega import StorageConfig
from streammega.storage.fetch.flight import LOOK_EVERY, LOOK_FLIGHTS, Flight
from streammega.storage.fetch.reads import Holding, Read

MIB = 1 << 20
NO_STORE: Any = None
QUICK = 0.01
SLOW = 0.2


def read_of(size: int) -> Read:
    read = Read(NO_STORE, "key", "", 0, size, 0)
    Holding(size, [read])
    return read


def answers_until_look(flight: Flight, size: int, began: float, seconds: float) -> int:
    for number in range(1, 1000):
        job = [read_of(size)]
        if flight.answered(job, began, seconds):
            flight.look(job, began + seconds)
            return number
    raise AssertionError("it was never time to look")


@pytest.mark.parametrize(
    ("size", "answers"), [(1000, 64), (256 << 10, 64), (MIB, 32), (8 * MIB, 4)]
)
def test_it_is_looked_after_64_answers_or_four_flights_of_bytes(size: int, answers: int) -> None:
    """64 answers of 8 MiB, of which one may be in flight at first, would be seven seconds."""
    assert LOOK_EVERY == 64
    assert LOOK_FLIGHTS == 4
    assert answers_until_look(Flight(StorageConfig()), size, 0.0, QUICK) == answers


def test_what_was_sent_before_a_look_does_not_count_for_the_next() -> None:
    """It queued behind what was in flight then: fewer in flight would be made fewer for it."""
    flight = Flight(StorageConfig(max_requests=400))
    answers_until_look(flight, 1000, 0.0, QUICK)
    answers_until_look(flight, 1000, 10.0, SLOW)
    fewer = flight.limits.requests
    assert fewer < 400
    for _ in range(4 * LOOK_EVERY):
        assert not flight.answered([read_of(1000)], 10.0, SLOW)
    assert flight.limits.requests >= fewer
    answers_until_look(flight, 1000, 20.0, QUICK)
    assert flight.limits.requests > fewer, "answers of the latest look alone are judged"


def test_as_many_bytes_as_were_in_flight_at_once_are_what_a_look_tells() -> None:
    flight = Flight(StorageConfig())
    size = 256 << 10
    flying = [read_of(size) for _ in range(32)]
    for number, read in enumerate(flying):
        assert flight.may_send(size, 0.0)
        flight.take_off(read, 0.0)
        assert flight.requests == number + 1
    assert not flight.may_send(size, 0.0), "8 MiB are in flight"
    for read in flying:
        flight.end(read)
    assert (flight.requests, flight.bytes, flight.reads) == (0, 0, {})
    answers_until_look(flight, size, 0.0, QUICK)
    assert flight.limits.bytes == 16 * MIB
