"""The figures of a loader for Prometheus, by its own client library."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from streammega.errors import ConfigError
from streammega.loading.stats import Stats

COUNTERS = frozenset(
    {
        "batches",
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
    }
)
"""Figures that only grow; the others are gauges."""


class MetricsServer:
    """Serves `stats` on a port of this machine until it is garbage-collected, with the loader that
    holds it.

    Raises ConfigError without prometheus_client, or for a port that is taken.
    """

    def __init__(self, stats: Stats, port: int, rank: int) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise ConfigError(
                "metrics_port needs prometheus_client: pip install 'streammega[metrics]'"
            ) from None
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
        """One metric for each figure, labelled by rank."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in self._stats.summary().items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            description = name.replace("_", " ")
            metric = family(f"streammega_{name}", description, labels=["dp_rank"])
            metric.add_metric([self._rank], float(value))
            yield metric
