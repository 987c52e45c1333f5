"""What a loader did: bytes, requests, waiting. Read by `loader.stats()`, the log and Prometheus."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streammega.loading.staging import Stager
from streammega.samples.token_file import TokenFile
from streammega.storage.cache.store import CachedStore
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.reads import Counters

WINDOW = 4096
"""Batches over which waiting times are kept."""


@dataclass
class Stats:
    """Counters of one loader, over all of its iterations. Times in seconds."""

    batches: int = 0
    useful_bytes: int = 0
    planned_bytes: int = 0
    cached_bytes: int = 0
    wait: float = 0.0
    busy: float = 0.0
    fetch_wait: float = 0.0
    began: float = field(default_factory=time.monotonic)
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    ready: int = 0
    staged_bytes: int = 0
    stager: Stager | None = None
    at_hand: Callable[[], bool] | None = None
    """Of the engine that runs: whether its next batch is there."""
    _stores: list[CachedStore] = field(default_factory=list)
    _fetchers: list[Fetcher] = field(default_factory=list)
    _done: Counters = field(default_factory=Counters)

    def attach(self, fetcher: Fetcher | None, files: Sequence[TokenFile]) -> None:
        """Count what a fetcher does, and the cached stores of files; those before are added up and
        let go.
        """
        for old in self._fetchers:
            _add(self._done, old.counters)
        self.cached_bytes += self._store_hits()
        self._done.fetched_bytes += sum(store.fetched_bytes for store in self._stores)
        self.staged_bytes += self.stager.staged_bytes if self.stager else 0
        self.stager = None
        self._fetchers = [] if fetcher is None else [fetcher]
        self._stores = [file.store for file in files if isinstance(file.store, CachedStore)]

    def _store_hits(self) -> int:
        return sum(store.hit_bytes for store in self._stores)

    def handed_out(self, batches: int, waited: float, ready: int) -> None:
        """Batches were handed out together after their caller had waited for the first; `ready`
        more slabs are made.
        """
        self.batches += batches
        self.wait += waited
        self.waits.append(waited)
        self.waits.extend(itertools.repeat(0.0, batches - 1))
        self.ready = ready

    def step(self, seconds: float) -> None:
        """The caller was away for so long."""
        self.busy += seconds

    def summary(self) -> dict[str, Any]:
        """All figures, by name."""
        counted = Counters()
        _add(counted, self._done)
        in_flight = queued = held = most = 0
        for fetcher in self._fetchers:
            _add(counted, fetcher.counters)
            in_flight, queued, held = fetcher.depth
            most = fetcher.pool.most
        counted.fetched_bytes += sum(store.fetched_bytes for store in self._stores)
        counted.fetched_bytes += self.staged_bytes + (
            self.stager.staged_bytes if self.stager else 0
        )
        waits = np.array(self.waits or [0.0])
        p50, p95, p99 = np.percentile(waits, [50, 95, 99])
        latency = np.percentile(np.array(counted.latencies or [0.0]), [50, 99])
        return {
            "batches": self.batches,
            "useful_bytes": self.useful_bytes,
            "fetched_bytes": counted.fetched_bytes,
            "staged_bytes": self.staged_bytes + (self.stager.staged_bytes if self.stager else 0),
            "cache_hit_bytes": self.cached_bytes + self._store_hits(),
            "amplification": (self.planned_bytes + counted.duplicate_bytes)
            / max(self.useful_bytes, 1),
            "requests": counted.requests,
            "retries": counted.retries,
            "hedges": counted.hedges,
            "hedges_won": counted.hedges_won,
            "throttled": counted.throttled,
            "errors": counted.errors,
            "request_p50": float(latency[0]),
            "request_p99": float(latency[1]),
            "wait_p50": float(p50),
            "wait_p95": float(p95),
            "wait_p99": float(p99),
            "wait_total": self.wait,
            "stall_share": self.wait / max(self.wait + self.busy, 1e-9),
            "ready_slabs": self.ready,
            "requests_in_flight": in_flight,
            "requests_queued": queued,
            "held_bytes": held,
            "most_held_bytes": most,
            "seconds": time.monotonic() - self.began,
        }

    def line(self) -> str:
        """The figures that matter, in one line."""
        now = self.summary()
        return (
            f"{now['fetched_bytes'] / max(now['seconds'], 1e-9) / 1e6:.0f} MB/s, {now['requests']} requests "
            f"({now['retries']} retries, {now['hedges']} hedges), amplification {now['amplification']:.3f}, cache "
            f"{now['cache_hit_bytes'] / 1e6:.0f} MB, holding {now['held_bytes'] / 1e6:.0f} MB, waited p50 "
            f"{1e3 * now['wait_p50']:.1f} / p99 {1e3 * now['wait_p99']:.1f} ms, stalled {100 * now['stall_share']:.2f} %"
        )


def _add(total: Counters, own: Counters) -> None:
    for name, value in vars(own).items():
        if name != "latencies":
            setattr(total, name, getattr(total, name) + value)
    total.latencies.extend(own.latencies)
