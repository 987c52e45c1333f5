"""What a loader did: bytes, requests, waiting. Read by `loader.stats()`, the log and Prometheus."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError
from streammega.errors.cached_property import cached_property
from streammega.errors.extras import import_extra
from streammega.loading.staging import Stager
from streammega.samples.token_file import TokenFile
from streammega.storage.cache.page_cache import CachedStore
from streammega.storage.fetch.fetcher import Fetcher
from streammega.storage.fetch.requests import Counters

WINDOW = 4096
"""Batches over which waiting times are kept."""
SHORTEST = 1e-9
"""Seconds in place of 0 as a divisor."""
MAX_SOURCES = 256
"""Datasets that have a figure of their own. Each is a series in Prometheus, for every rank."""
OTHER_SOURCES = "others"
COUNTERS = frozenset(
    {
        "batches",
        "tokens",
        "source_tokens",
        "useful_bytes",
        "fetched_bytes",
        "staged_bytes",
        "cache_hit_bytes",
        "requests",
        "retries",
        "hedges",
        "hedges_won",
        "throttled",
        "errors",
        "wait_total",
        "grad_syncs",
        "grad_wait_total",
    }
)
"""Figures that only grow, for Prometheus; the others are gauges."""


@dataclass(slots=True)
class TakenGroup:
    """The group of micro-batches whose batches are being handed out.

    dataset_ids: of the rows of its batches. batches: how many it has. at_hand: those that wait to be
    taken.
    """

    dataset_ids: NDArray[np.int64]
    tokens_of_row: int
    batches: int
    at_hand: int

    @property
    def taken(self) -> int:
        """Batches that were handed out."""
        return self.batches - self.at_hand

    def tokens_by_source(self) -> NDArray[np.int64]:
        """Tokens of the batches that were handed out: int64 [MAX_SOURCES]."""
        rows = len(self.dataset_ids) // max(1, self.batches) * self.taken
        sources = np.minimum(self.dataset_ids[:rows], MAX_SOURCES - 1)
        return self.tokens_of_row * np.bincount(sources, minlength=MAX_SOURCES)


NO_GROUP = TakenGroup(np.empty(0, np.int64), 0, 0, 0)


@dataclass
class Stats:
    """Counters of one loader, over all of its iterations. Times are in seconds.

    `find_source_names` names the datasets by their ids; it is called when figures are first read.
    `stager`, `is_batch_ready`, `_stores` and `_fetchers` belong to the running engine. `attach` adds
    the counts of the engine before it to the totals.
    """

    find_source_names: Callable[[], Sequence[str]] = tuple
    useful_bytes: int = 0
    planned_bytes: int = 0
    cached_bytes: int = 0
    busy: float = 0.0
    fetch_wait: float = 0.0
    began: float = field(default_factory=time.monotonic)
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    ready: int = 0
    """Groups that wait in the queue."""
    staged_bytes: int = 0
    stager: Stager | None = None
    is_batch_ready: Callable[[], bool] | None = None
    """Tells whether the next batch of the running engine is ready."""
    field_bytes: int = 0
    """Bytes for the fields of the latest batches and of those before them (see `MemoryPlan`)."""
    # Only one thread changes each of them. Another one may read tuples, which are replaced as a whole.
    _waited: tuple[float, float | None] = (0.0, None)
    """Seconds of waits that ended, and since when the caller waits now."""
    _grad_syncs: tuple[int, float] = (0, 0.0)
    """Reductions of gradients, and seconds in which this rank waited for other ranks in them."""
    _taken: tuple[int, NDArray[np.int64], TakenGroup] = field(
        default_factory=lambda: (0, np.zeros(MAX_SOURCES, np.int64), NO_GROUP)
    )
    """Batches, and tokens by source, of the groups that were taken before; and the group of now."""
    _gathered_bytes: int = 0
    _released_bytes: int = 0
    _max_ready_bytes: int = 0
    _stores: list[CachedStore] = field(default_factory=list)
    _fetchers: list[Fetcher] = field(default_factory=list)
    _done: Counters = field(default_factory=Counters)

    def attach(self, fetcher: Fetcher | None, files: Sequence[TokenFile]) -> None:
        """Count the work of a fetcher and of the cached stores of files from now on.

        The counts of the last fetcher and stores are added to the totals.
        """
        for last_fetcher in self._fetchers:
            _add(self._done, last_fetcher.counters)
        self._done.fetched_bytes += self._fetched_by_stores()
        self.cached_bytes += self._hits_of_stores()
        self.staged_bytes = self._all_staged_bytes()
        self.stager = None
        self._fetchers = [] if fetcher is None else [fetcher]
        self._stores = [file.store for file in files if isinstance(file.store, CachedStore)]

    @property
    def ready_bytes(self) -> int:
        """Bytes that are gathered and wait to be handed out."""
        return self._gathered_bytes - self._released_bytes

    def _hits_of_stores(self) -> int:
        return sum(store.hit_bytes for store in self._stores)

    def _fetched_by_stores(self) -> int:
        return sum(store.fetched_bytes for store in self._stores)

    def _all_staged_bytes(self) -> int:
        """Staged bytes of all iterations, including the running one."""
        running = self.stager.staged_bytes if self.stager else 0
        return self.staged_bytes + running

    def wait_began(self, now: float) -> None:
        """Count the time from `now` on as waited, until `wait_ended`."""
        total, _ = self._waited
        self._waited = total, now

    def wait_ended(self, now: float) -> None:
        """Count no further time as waited."""
        self._waited = self._wait_total(now), None

    def _wait_total(self, now: float) -> float:
        total, since = self._waited
        return total if since is None else total + max(0.0, now - since)

    def count_grad_sync(self, seconds: float) -> None:
        """Count a reduction of gradients."""
        count, total = self._grad_syncs
        self._grad_syncs = count + 1, total + seconds

    def group_delivered(self, group: TakenGroup, seconds: float) -> None:
        """Count the seconds that the caller waited for a group of batches: 0 if it was ready."""
        batches, tokens, last = self._taken
        self._taken = batches + last.taken, tokens + last.tokens_by_source(), group
        self.waits.append(seconds)
        # all of them are ready together with the first
        self.waits.extend(itertools.repeat(0.0, group.batches - 1))

    @cached_property
    def _source_names(self) -> list[str]:
        """The name of each dataset that has a figure. Without names there is one source."""
        names = list(self.find_source_names()) or ["data"]
        if len(names) > MAX_SOURCES:
            names[MAX_SOURCES - 1 :] = [OTHER_SOURCES]
        return names

    def _handed_out(self) -> tuple[int, dict[str, int]]:
        """The batches that were handed out, and their tokens by dataset, without those that had none."""
        batches, tokens, group = self._taken
        counts = (tokens + group.tokens_by_source()).tolist()
        names = enumerate(self._source_names)
        return batches + group.taken, {name: counts[n] for n, name in names if counts[n]}

    def hold_ready(self, nbytes: int) -> None:
        """Count gathered bytes that wait to be handed out."""
        self._gathered_bytes += nbytes
        self._max_ready_bytes = max(self._max_ready_bytes, self.ready_bytes)

    def release_ready(self, nbytes: int) -> None:
        """Count gathered bytes that are no longer needed."""
        self._released_bytes += nbytes

    def release_all_ready(self) -> None:
        """Count all gathered bytes as released, because the iteration ended."""
        self._released_bytes = self._gathered_bytes

    def step(self, seconds: float) -> None:
        """Count the seconds that the caller spent on batches, which includes making their fields."""
        self.busy += seconds

    def summary(self) -> dict[str, Any]:
        """All counters and derived figures by name, as `StreamLoader.stats` returns them."""
        # The clock is read first: what is shown of a wait is never more than what it counts when it
        # has ended, since counters must not fall.
        wait = self._wait_total(time.perf_counter())
        batches, source_tokens = self._handed_out()
        grad_syncs, grad_wait = self._grad_syncs
        counted = Counters()
        _add(counted, self._done)
        in_flight = 0
        queued = 0
        held = 0
        most_held = 0
        for fetcher in self._fetchers:
            _add(counted, fetcher.counters)
            in_flight, queued, held = fetcher.depth
            most_held = fetcher.pool.peak
        staged_bytes = self._all_staged_bytes()
        fetched_bytes = counted.fetched_bytes + self._fetched_by_stores() + staged_bytes
        asked_bytes = self.planned_bytes + counted.duplicate_bytes
        wait_p50, wait_p95, wait_p99 = _percentiles(self.waits, 50, 95, 99)
        request_p50, request_p99 = _percentiles(counted.latencies, 50, 99)
        return {
            "batches": batches,
            "tokens": sum(source_tokens.values()),
            "source_tokens": source_tokens,
            "useful_bytes": self.useful_bytes,
            "fetched_bytes": fetched_bytes,
            "staged_bytes": staged_bytes,
            "cache_hit_bytes": self.cached_bytes + self._hits_of_stores(),
            "amplification": asked_bytes / max(self.useful_bytes, 1),
            "requests": counted.requests,
            "retries": counted.retries,
            "hedges": counted.hedges,
            "hedges_won": counted.hedges_won,
            "throttled": counted.throttled,
            "errors": counted.errors,
            "request_p50": request_p50,
            "request_p99": request_p99,
            "wait_p50": wait_p50,
            "wait_p95": wait_p95,
            "wait_p99": wait_p99,
            "wait_total": wait,
            "grad_syncs": grad_syncs,
            "grad_wait_total": grad_wait,
            "stall_share": wait / max(wait + self.busy, SHORTEST),
            "ready_groups": self.ready,
            "requests_in_flight": in_flight,
            "requests_queued": queued,
            "held_bytes": held + self.ready_bytes,
            "most_held_bytes": most_held + self._max_ready_bytes + self.field_bytes,
            "seconds": time.monotonic() - self.began,
        }

    def line(self) -> str:
        """One line for the log with the main figures."""
        now = self.summary()
        megabytes = {
            name: now[name] / 1e6 for name in ("fetched_bytes", "cache_hit_bytes", "held_bytes")
        }
        rate = megabytes["fetched_bytes"] / max(now["seconds"], SHORTEST)
        p50 = 1e3 * now["wait_p50"]
        p99 = 1e3 * now["wait_p99"]
        return (
            f"{rate:.0f} MB/s, {now['requests']} requests "
            f"({now['retries']} retries, {now['hedges']} hedges), "
            f"amplification {now['amplification']:.3f}, cache "
            f"{megabytes['cache_hit_bytes']:.0f} MB, holding {megabytes['held_bytes']:.0f} MB, "
            f"waited p50 {p50:.1f} / p99 {p99:.1f} ms, stalled {100 * now['stall_share']:.2f} %"
        )


def _percentiles(seconds: Collection[float], *percents: float) -> list[float]:
    """Percentiles of the seconds; 0 if there are no seconds."""
    percentiles: list[float] = np.percentile(np.array(seconds or [0.0]), percents).tolist()
    return percentiles


def _add(total: Counters, counters: Counters) -> None:
    """Add counters to others."""
    for name, value in vars(counters).items():
        if name != "latencies":
            setattr(total, name, getattr(total, name) + value)
    total.latencies.extend(counters.latencies)


class MetricsServer:
    """Serves `stats` on a port of this machine until it is garbage-collected, with the loader that
    holds it.

    Raises ConfigError without prometheus_client, or for a port that is taken.
    """

    def __init__(self, stats: Stats, port: int, rank: int) -> None:
        prometheus_client = import_extra(
            "prometheus_client", "metrics", "metrics_port needs prometheus_client"
        )
        # of its own: the program's may have figures of another loader by these names
        registry = prometheus_client.CollectorRegistry()
        registry.register(_Collector(stats, rank))
        try:
            server, thread = prometheus_client.start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise ConfigError(
                f"metrics_port {port}: {error.strerror}; choose another, or 0 for any that is free"
            ) from None
        self.address = f"http://127.0.0.1:{server.server_address[1]}/metrics"
        # not by __del__: the program may end while the loader is still there
        weakref.finalize(self, _stop, server, thread)


def _stop(server: Any, thread: Any) -> None:
    server.shutdown()
    server.server_close()
    thread.join()


class _Collector:
    """What prometheus_client asks for the figures, when it is asked itself."""

    def __init__(self, stats: Stats, rank: int) -> None:
        self._stats = stats
        self._rank = str(rank)

    def collect(self) -> Iterator[Any]:
        """One metric for each figure, labelled by rank; those by dataset also by `source`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in self._stats.summary().items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            description = name.replace("_", " ")
            by_source = isinstance(value, dict)
            labels = ["dp_rank", "source"] if by_source else ["dp_rank"]
            metric = family(f"streammega_{name}", description, labels=labels)
            for source, number in (value if by_source else {"": value}).items():
                # a name of a file may hold bytes that are no text
                label = source.encode("utf-8", "backslashreplace").decode()
                metric.add_metric([self._rank, label][: len(labels)], float(number))
            yield metric
