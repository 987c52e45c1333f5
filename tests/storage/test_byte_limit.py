"""How many bytes may be in flight: what twice as many bring decides, on networks that are computed.

A network gives each request its own time, and all of them no more than a number of bytes a second.
Looks at it are noise too, as on a busy machine.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streammega import StorageConfig
from streammega.storage.fetch.byte_limit import LEAST_BYTES, MOST_REST, OTHERS, ByteLimit, Look

MIB = 1 << 20
SIZE = 256 << 10
FIRST = ByteLimit.of(StorageConfig())
FIXED = (8, 16, 32, 64, 96)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A request by itself takes `alone` seconds, all together bring `bytes_per_second`, of which
    the program wants `wanted`.
    """

    alone: float
    bytes_per_second: float
    wanted: float = 1e18

    def in_flight_bytes(self, limit: int) -> float:
        return min(limit, max(SIZE, self.wanted * self.alone))

    def seconds(self, limit: int) -> float:
        """That a request takes, where so many bytes may be in flight."""
        return max(self.alone, self.in_flight_bytes(limit) / self.bytes_per_second)

    def rate(self, limit: int) -> float:
        return min(self.wanted, self.in_flight_bytes(limit) / self.seconds(limit))


FAR = Network(alone=0.023, bytes_per_second=900e6)
"""20 ms before the first byte, and 90 MB/s of a connection."""
LINK = Network(alone=0.023, bytes_per_second=340e6)
NEAR = Network(alone=0.0006, bytes_per_second=1e9)


class Run:
    """A limit on a network that may change, and what it has fetched."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        self.limit = FIRST
        self.fetched = 0.0
        self.seconds = 0.0
        self._noise = noise
        self._random = random.Random(seed)
        self._quickest = 1e9

    def look(self, network: Network, looks: int) -> list[int]:
        """So many looks; the limits in bytes before them."""
        limits = []
        for _ in range(looks):
            limit = self.limit.bytes
            limits.append(limit)
            in_flight = network.in_flight_bytes(limit)
            of_look = max(64 * SIZE, 2 * in_flight)
            self.fetched += of_look
            self.seconds += of_look / network.rate(limit)
            true_seconds = network.seconds(limit)
            seconds = true_seconds * self._random.lognormvariate(0, self._noise)
            # Requests of a flight are not answered all at once.
            quick = max(network.alone, true_seconds / 4)
            quickest = quick * self._random.lognormvariate(0, self._noise / 2)
            self._quickest = min(self._quickest, quickest)
            queueing = max(1.0, seconds / self._quickest)
            look = Look(
                size=SIZE, seconds=seconds, queueing=queueing, in_flight_bytes=int(in_flight)
            )
            self.limit = self.limit.after(look)
        return limits

    @property
    def rate(self) -> float:
        return self.fetched / self.seconds


def share_of_best(network: Network, noise: float) -> float:
    """Of the rate of the best fixed limit, of the median of some runs."""
    best = max(network.rate(fixed * MIB) for fixed in FIXED)
    rates = []
    for seed in range(9):
        run = Run(noise, seed)
        run.look(network, 300)
        rates.append(run.rate)
    return statistics.median(rates) / best


def changes(limits: list[int]) -> int:
    return sum(one != other for one, other in zip(limits, limits[1:], strict=False))


@pytest.mark.parametrize("network", [FAR, LINK, NEAR])
@pytest.mark.parametrize(("noise", "least"), [(0.0, 0.98), (0.15, 0.97), (0.3, 0.95)])
def test_hardly_anything_is_lost_against_the_best_fixed_limit(
    network: Network, noise: float, least: float
) -> None:
    assert share_of_best(network, noise) >= least


def test_where_storage_is_far_it_doubles_with_every_look() -> None:
    limits = Run().look(FAR, 4)
    assert [limit // MIB for limit in limits] == [8, 16, 32, 64]


def test_what_doubling_did_not_bring_is_given_back() -> None:
    limits = Run().look(FAR, 400)
    assert max(limits) == 64 * MIB, "it was tried"
    assert statistics.mean(limits[100:]) < 34 * MIB, "32 MiB bring as much"


@pytest.mark.parametrize("network", [FAR, LINK, NEAR])
def test_trials_become_rare_and_it_comes_to_rest(network: Network) -> None:
    run = Run()
    run.look(network, 300)
    assert changes(run.look(network, 2 * MOST_REST)) <= 4


def test_it_falls_where_the_network_becomes_slower_and_rises_again() -> None:
    run = Run(noise=0.1)
    run.look(FAR, 100)
    quick = run.look(FAR, 100)
    run.look(replace(FAR, bytes_per_second=200e6), 200)
    slow = run.look(replace(FAR, bytes_per_second=200e6), 100)
    run.look(FAR, 300)
    again = run.look(FAR, 100)
    assert statistics.mean(quick) > 28 * MIB
    assert statistics.mean(slow) < 14 * MIB
    assert statistics.mean(again) > 28 * MIB


@pytest.mark.parametrize("wanted", [1e6, 100e6])
def test_who_does_not_use_what_is_allowed_is_not_allowed_more(wanted: float) -> None:
    assert set(Run().look(replace(FAR, wanted=wanted), 50)) == {LEAST_BYTES}


def test_a_doubling_that_nobody_used_is_undone() -> None:
    full = Look(size=SIZE, seconds=0.02, queueing=1.0, in_flight_bytes=LEAST_BYTES)
    doubled = FIRST.after(full)
    assert doubled.bytes == 2 * LEAST_BYTES
    assert doubled.after(replace(full, in_flight_bytes=LEAST_BYTES // 2)).bytes == LEAST_BYTES


def test_reads_of_another_size_prove_nothing_and_end_a_trial_where_they_are_all_that_comes() -> (
    None
):
    full = Look(size=SIZE, seconds=0.02, queueing=1.0, in_flight_bytes=LEAST_BYTES)
    limit = FIRST.after(full)
    other = Look(size=SIZE * 8, seconds=9.0, queueing=9.0, in_flight_bytes=2 * LEAST_BYTES)
    for _ in range(OTHERS):
        limit = limit.after(other)
        assert limit.bytes == 2 * LEAST_BYTES
    assert limit.after(other).bytes == LEAST_BYTES
    kept = limit.after(replace(full, in_flight_bytes=2 * LEAST_BYTES))
    assert kept.bytes == 4 * LEAST_BYTES, "twice as much came, and the next trial begins"


LOOKS = st.builds(
    Look,
    size=st.integers(1, 1 << 24),
    seconds=st.floats(1e-4, 10.0),
    queueing=st.floats(1.0, 1e6),
    in_flight_bytes=st.integers(1, 1 << 28),
)


@given(most=st.integers(4096, 1 << 28), looks=st.lists(LOOKS, max_size=60))
def test_whatever_is_seen_it_stays_between_the_least_and_what_is_configured(
    most: int, looks: list[Look]
) -> None:
    limit = ByteLimit.of(StorageConfig(in_flight_bytes=most))
    for look in looks:
        limit = limit.after(look)
        assert min(LEAST_BYTES, most) <= limit.bytes <= most
