"""What the loaders of a run serve to Prometheus: read again and again, as rates of each rank, and which
rank differs from the others.
"""

from __future__ import annotations

import http.client
import math
import re
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from streammega.apps.machine import FEWER_REQUESTS
from streammega.cli.render import Report
from streammega.errors import ConfigError

DEFAULT_PATH = "/metrics"
TIMEOUT = 2.0
"""Seconds for one answer."""
WINDOW = 60.0
"""Seconds over which ranks are compared."""
LATE_SECONDS = 2 * TIMEOUT + 1.0
"""Seconds by which an answer may come later than it was made, and the one before it sooner."""
MAX_ANSWER_BYTES = 16 << 20
MAX_ADDRESSES = 10_000
LONGEST_NAME = 80
"""Characters of a dataset's name that are shown."""

WAITS_MUCH = 0.05
"""The share of the time from which on waits for data are worth a line."""
TIMES_OF_OTHERS = 2.0
"""How many times as long as the others a rank waits, or its requests take, if they explain something."""
SLOWER_PACE = 0.9
"""A rank is behind if it takes fewer batches than this part of those that the others take."""
COUNTED_APART = 3
"""Batches by which paces must differ at least, and steps that are compared. Each count may be one too high
or too low.
"""
CACHE_DIFFERS = 0.2
SLOW_SECONDS = 0.1
"""Median seconds of a request from which storage is slow, if no rank differs."""
LATENCY_DIFFERS = 0.005
"""Seconds by which requests are slower, if that explains something."""

ADDRESS = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+)"
    r":(?P<first>\d{1,5})(?:-(?P<last>\d{1,5}))?(?P<path>/\S*)?"
)
LINE = re.compile(r"streammega_(?P<name>\w+)\{(?P<labels>.*)\}\s+(?P<value>\S+)(?:\s+\d+)?")
LABEL = re.compile(r'(?P<name>\w+)="(?P<value>(?:[^"\\]|\\.)*)"')
ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": " "}
BATCHES = "batches_total"
"""Every loader serves it."""
SOURCE_TOKENS = "source_tokens_total"


class Look(NamedTuple):
    """The figures of a loader at one time: by name, and the tokens of each dataset.

    Figures are named as Prometheus has them, without "streammega_".
    """

    figures: dict[str, float]
    sources: dict[str, float]

    @property
    def seconds(self) -> float:
        """The time since the loader was made, by its own clock."""
        return self.figures.get("seconds", 0.0)


def parse_addresses(text: str) -> list[str]:
    """The URLs of an address: HOST:PORT, HOST:FIRST-LAST, or a URL. Raises ConfigError."""
    if text.isdecimal():
        text = f"127.0.0.1:{text}"
    address = ADDRESS.fullmatch(text)
    if address is None:
        name = "an address with an @" if "@" in text else text  # a password may be in it
        hint = "top sends no passwords; " if "@" in text else ""
        raise ConfigError(
            f"{name}: is no address of metrics; {hint}write it as HOST:PORT or HOST:FIRST-LAST, for "
            f"instance 127.0.0.1:9400-9407 for eight ranks of train.metrics_port = 9400"
        )
    first = int(address["first"])
    last = int(address["last"] or first)
    if not 0 < first <= last < 1 << 16:
        raise ConfigError(f"{text}: ports are numbers from 1 to 65535, the smaller one first")
    scheme, host, path = address["scheme"] or "http", address["host"], address["path"]
    return [
        f"{scheme}://{host}:{port}{path if path and path != '/' else DEFAULT_PATH}"
        for port in range(first, last + 1)
    ]


def parse_answer(text: str) -> dict[int, Look]:
    """The loaders of an answer, by their data-parallel ranks. Lines of other metrics are skipped."""
    looks: dict[int, Look] = {}
    for line in text.split("\n"):  # names may have other characters that end lines, such as U+2028
        parsed = LINE.fullmatch(line.strip())
        if parsed is None:
            continue
        labels = {label["name"]: label["value"] for label in LABEL.finditer(parsed["labels"])}
        try:
            rank = int(labels["dp_rank"])
            value = float(parsed["value"])
        except (KeyError, ValueError):
            continue
        if not math.isfinite(value):
            continue
        look = looks.setdefault(rank, Look({}, {}))
        if parsed["name"] == SOURCE_TOKENS:
            look.sources[labels.get("source", "")] = value
        else:
            look.figures[parsed["name"]] = value
    return {rank: look for rank, look in looks.items() if BATCHES in look.figures}


def _shown(value: str) -> str:
    """The value of a label as text for a terminal, without its middle where it is long."""
    text = re.sub(r"\\.", lambda match: ESCAPED.get(match[0], match[0]), value)
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if len(text) > LONGEST_NAME:
        text = f"{text[: LONGEST_NAME // 2 - 1]}…{text[-LONGEST_NAME // 2 :]}"
    return text


class Endpoint:
    """An address, and what its loaders have served in the last minute."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = url.partition("://")[2].partition("/")[0]
        self.looks: dict[int, deque[Look]] = {}
        """By data-parallel rank; the newest last."""
        self.problem = ""
        """Why there is no answer; empty: there is one."""
        self.answered_at: float | None = None
        self._thread: threading.Thread | None = None
        self._answer: dict[int, Look] | str | None = None
        """The loaders of the newest answer, or why there is none; None: it is still awaited."""

    def ask(self) -> None:
        """Send a request from a thread, unless the last one is still unanswered."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._answer = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def take_answer(self, deadline: float) -> None:
        """Wait until the deadline for the answer, and keep it."""
        assert self._thread is not None
        self._thread.join(max(0.0, deadline - time.monotonic()))
        answer = self._answer
        if answer is None:
            answer = f"no answer within {TIMEOUT:g} s"
        if isinstance(answer, str):
            self.problem = answer
            return
        self.problem = ""
        now = time.monotonic()
        passed = 0.0 if self.answered_at is None else now - self.answered_at
        self.answered_at = now
        for rank in self.looks.keys() - answer.keys():  # another loader has its port now
            del self.looks[rank]
        for rank, look in answer.items():
            looks = self.looks.setdefault(rank, deque())
            if looks and _has_restarted(looks[-1], look, passed):
                looks.clear()
            looks.append(look)
            while len(looks) > 2 and look.seconds - looks[1].seconds >= WINDOW:
                looks.popleft()

    def _read(self) -> None:
        # the proxy of the environment is for the internet, not for the machines of a run
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.url, timeout=TIMEOUT) as answer:
                text = answer.read(MAX_ANSWER_BYTES).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._answer = _reason_of(error)
            return
        self._answer = parse_answer(text) or "what answers there is no loader of streammega"


def _has_restarted(before: Look, now: Look, passed: float) -> bool:
    """Whether two looks are of different loaders. passed: seconds between them, by this clock."""
    is_less = now.seconds < before.seconds or now.figures[BATCHES] < before.figures[BATCHES]
    # one that was made while nothing answered may have run longer than the one before it
    return is_less or passed - (now.seconds - before.seconds) > LATE_SECONDS


def _reason_of(error: Exception) -> str:
    """Why a request has no answer."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}: what answers there is no loader of streammega"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    if isinstance(cause, ConnectionRefusedError):
        return "connection refused: no process serves metrics there"
    if isinstance(cause, http.client.HTTPException):
        return "what answers there does not speak HTTP"
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)


class Watch:
    """The endpoints of a run, and the report of what they serve."""

    def __init__(self, addresses: Sequence[str]) -> None:
        urls = dict.fromkeys(url for text in addresses for url in parse_addresses(text))
        if len(urls) > MAX_ADDRESSES:
            raise ConfigError(f"{len(urls):,} addresses are too many; at most {MAX_ADDRESSES:,}")
        self.endpoints = [Endpoint(url) for url in urls]

    def look(self) -> None:
        """Ask all endpoints at once. Returns when all have answered, or their time is over."""
        deadline = time.monotonic() + TIMEOUT + 0.5
        for endpoint in self.endpoints:
            endpoint.ask()
        for endpoint in self.endpoints:
            endpoint.take_answer(deadline)

    @property
    def problems(self) -> list[str]:
        """Why each of the silent endpoints has no answer."""
        return [f"{each.name}: {each.problem}" for each in self.endpoints if each.problem]

    @property
    def any_answers(self) -> bool:
        """Whether an endpoint answered the last look."""
        return len(self.problems) < len(self.endpoints)

    def report(self) -> Report:
        """Figures of the run, of each rank and of each dataset; and what is not as it should be."""
        ranks = [row for endpoint in self.endpoints for row in _rows_of(endpoint)]
        reading = [row for row in ranks if row["state"] == READS and row["seconds"]]
        slow = list(stragglers(reading))
        return {
            "answering": sum(not endpoint.problem for endpoint in self.endpoints),
            "addresses": len(self.endpoints),
            "window_seconds": max((row["seconds"] for row in reading), default=0.0),
            "now": _totals([row["now"] for row in reading]),
            "window": _totals([row["window"] for row in reading]),
            "stragglers": slow,
            "findings": list(_findings(ranks, reading, slow)),
            "ranks": ranks,
            "sources": self._sources(),
        }

    def _sources(self) -> list[Report]:
        """Tokens of all ranks by dataset, the largest first. Ranks that are gone have no rate."""
        totals: dict[str, float] = {}
        rates: dict[str, float] = {}
        for endpoint in self.endpoints:
            for looks in endpoint.looks.values():
                first, last = looks[0], looks[-1]
                for name, tokens in last.sources.items():
                    totals[name] = totals.get(name, 0.0) + tokens
                    grown = 0.0 if endpoint.problem else tokens - first.sources.get(name, 0.0)
                    rates[name] = rates.get(name, 0.0) + _per_second(grown, first, last)
        all_tokens = sum(totals.values())
        return [
            {
                "source": _shown(name),
                "tokens": int(totals[name]),
                "share": totals[name] / all_tokens if all_tokens else 0.0,
                "tokens_per_second": rates[name],
            }
            for name in sorted(totals, key=lambda name: (-totals[name], name))
        ]


READS = "reads"
GONE = "gone"
SILENT = "no answer"


def _rows_of(endpoint: Endpoint) -> Iterator[Report]:
    """A row for each rank of an endpoint; one without a rank if it has never answered."""
    state = READS
    if endpoint.problem:
        state = GONE if endpoint.looks else SILENT
    silent = 0.0
    if endpoint.problem and endpoint.answered_at is not None:
        silent = time.monotonic() - endpoint.answered_at
    shared = {"address": endpoint.name, "state": state, "silent_seconds": silent}
    if not endpoint.looks:
        yield {"dp_rank": None, **shared, "problem": endpoint.problem, "seconds": 0.0}
    for rank, looks in sorted(endpoint.looks.items()):
        yield {
            "dp_rank": rank,
            **shared,
            "problem": endpoint.problem,
            "seconds": looks[-1].seconds - looks[0].seconds,
            "now": _rates(looks[-2], looks[-1]) if len(looks) > 1 else None,
            "window": _rates(looks[0], looks[-1]) if len(looks) > 1 else None,
        }


def _per_second(amount: float, first: Look, last: Look) -> float:
    return amount / max(last.seconds - first.seconds, 1e-9) if last is not first else 0.0


def _rates(first: Look, last: Look) -> dict[str, Any]:
    """What a loader did from one look to another."""
    counts = {
        name: max(0.0, value - first.figures.get(name, 0.0)) for name, value in last.figures.items()
    }

    def count(name: str) -> int:
        return int(counts.get(f"{name}_total", 0.0))

    def rate(name: str) -> float:
        return _per_second(counts.get(f"{name}_total", 0.0), first, last)

    steps = count("grad_syncs")
    return {
        "batches": count("batches"),
        "batches_per_second": rate("batches"),
        "tokens_per_second": rate("tokens"),
        "waited_share": min(1.0, rate("wait")),
        "grad_wait_share": min(1.0, rate("grad_wait")) if steps else None,
        # means of a step: one rank may have been asked just before its end, another after it
        "grad_wait_seconds": counts.get("grad_wait_total", 0.0) / steps
        if steps >= COUNTED_APART
        else None,
        "step_seconds": (last.seconds - first.seconds) / steps if steps >= COUNTED_APART else None,
        "fetched_bytes_per_second": rate("fetched_bytes"),
        "cache_share": _share(count("cache_hit_bytes"), count("fetched_bytes")),
        "fetched_bytes": count("fetched_bytes"),
        "cache_hit_bytes": count("cache_hit_bytes"),
        "requests": count("requests"),
        "requests_per_second": rate("requests"),
        "request_median_seconds": last.figures.get("request_p50", 0.0),
        "retries": count("retries"),
        "refused": count("throttled"),
        "failed": count("errors"),
    }


def _share(part: float, rest: float) -> float | None:
    """A part of a whole; None: there is no whole."""
    return part / (part + rest) if part + rest else None


SUMMED = (
    "tokens_per_second",
    "batches_per_second",
    "fetched_bytes_per_second",
    "fetched_bytes",
    "cache_hit_bytes",
    "requests",
    "requests_per_second",
    "retries",
    "refused",
    "failed",
)


def _totals(rates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of all ranks together. waited_share: the mean."""
    totals: dict[str, Any] = {name: sum(each[name] for each in rates) for name in SUMMED}
    totals["waited_share"] = (
        statistics.fmean(each["waited_share"] for each in rates) if rates else 0
    )
    totals["cache_share"] = _share(totals["cache_hit_bytes"], totals["fetched_bytes"])
    return totals


def stragglers(ranks: Sequence[Report]) -> Iterator[Report]:
    """The ranks that wait for data while the others do not, that compute longer, or that take fewer
    batches; and why.
    """
    for row in ranks:
        others = [
            other["window"] for other in ranks if other is not row and other["window"]["batches"]
        ]
        if not others:
            continue
        waited = row["window"]["waited_share"]
        usual_wait = statistics.median(other["waited_share"] for other in others)
        batches = row["window"]["batches"] / row["seconds"]
        usual = statistics.median(other["batches_per_second"] for other in others)
        late, step = _lateness(row["window"], others)
        if waited >= WAITS_MUCH + usual_wait and waited >= TIMES_OF_OTHERS * usual_wait:
            text = (
                f"waits for data {_percent(waited)} of the time, the others {_percent(usual_wait)}: "
                f"{_why_it_waits(row['window'], others)}"
            )
        elif late > (1 - SLOWER_PACE) * step:
            text = (
                f"computes {_duration(late)} longer than the others in each step of {_duration(step)}, "
                f"and they wait for it: look there at the GPU's clocks and temperature "
                f"(`nvidia-smi -q -d PERFORMANCE`), and at other processes on its host"
            )
        elif batches < SLOWER_PACE * usual and (usual - batches) * row["seconds"] >= COUNTED_APART:
            text = (
                f"takes {batches:.3g} batches a second, the others {usual:.3g}, and does not wait for "
                f"data more than they do: look at its GPU, its processors and its loop"
            )
        else:
            continue
        yield {
            "dp_rank": row["dp_rank"],
            "address": row["address"],
            "reason": f"{_name_of(row)} {text}",
        }


def _lateness(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """By how many seconds a rank computes longer in a step than the others, and the seconds of a step;
    zeros where ranks do not count how long they wait for each other.

    The rank that the others wait for waits least itself. If it waits longer for data than they do, that
    is the reason.
    """
    in_step = [other for other in others if other["step_seconds"]]
    if not row["step_seconds"] or not in_step:
        return 0.0, 0.0
    step = statistics.median(each["step_seconds"] for each in (row, *in_step))
    usual_wait = statistics.median(other["grad_wait_seconds"] for other in in_step)
    usual_share = statistics.median(other["waited_share"] for other in in_step)
    waited_longer = max(0.0, row["waited_share"] - usual_share) * step
    return usual_wait - row["grad_wait_seconds"] - waited_longer, step


def _why_it_waits(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """What the figures of a rank that waits have, and those of the others have not."""

    def usual(name: str) -> float:
        return statistics.median(other[name] or 0.0 for other in others)

    if row["refused"] > TIMES_OF_OTHERS * usual("refused"):
        return f"the store refused {row['refused']:,} of its {row['requests']:,} requests"
    if row["failed"] + row["retries"] > TIMES_OF_OTHERS * (usual("failed") + usual("retries")):
        repeated = row["failed"] + row["retries"]
        return (
            f"{repeated:,} of its {row['requests']:,} requests failed, and the log of this rank says "
            f"why"
        )
    latency, usual_latency = row["request_median_seconds"], usual("request_median_seconds")
    if latency > max(TIMES_OF_OTHERS * usual_latency, usual_latency + LATENCY_DIFFERS):
        return (
            f"its requests take {1e3 * latency:,.0f} ms, theirs {1e3 * usual_latency:,.0f} ms; look at "
            f"its network, and run `streammega doctor` there"
        )
    if row["cache_share"] is not None and row["cache_share"] < usual("cache_share") - CACHE_DIFFERS:
        return (
            f"{_percent(row['cache_share'])} of its bytes come from the cache, of theirs "
            f"{_percent(usual('cache_share'))}; look at its cache_dir"
        )
    if latency >= SLOW_SECONDS:  # of ranks in step one waits for data, and the others for it
        return (
            f"requests take {1e3 * latency:,.0f} ms on every rank; `streammega doctor` and "
            f"`streammega bench` find why"
        )
    return "its requests are as fast as theirs; look at its processors and disk"


def _findings(
    ranks: Sequence[Report], reading: Sequence[Report], slow: Sequence[Report]
) -> Iterator[str]:
    """Sentences on what is not as it should be: the silent, the slow, and then what all have."""
    for row in ranks:
        if row["state"] == GONE:
            yield (
                f"{_name_of(row)} has not answered for {row['silent_seconds']:.0f} s: {row['problem']}"
            )
        elif row["state"] == SILENT:
            yield f"{row['address']} has never answered: {row['problem']}"
    for row in slow:
        yield row["reason"]
    if not reading:
        return
    window = _totals([row["window"] for row in reading])
    slow_ranks = [(row["dp_rank"], row["address"]) for row in slow]
    usual = [row for row in reading if (row["dp_rank"], row["address"]) not in slow_ranks]
    waited = statistics.median(row["window"]["waited_share"] for row in usual or reading)
    if waited >= WAITS_MUCH and usual:
        yield (
            f"all {'other ' if slow else ''}ranks wait for data, {_percent(waited)} of the time: "
            f"`streammega doctor` and `streammega bench` find why"
        )
    if window["refused"]:
        yield (
            f"the store refused {window['refused']:,} of {window['requests']:,} requests: "
            f"{FEWER_REQUESTS}"
        )
    if window["failed"]:
        yield f"{window['failed']:,} requests failed for good: the logs of the ranks say why"


def _name_of(row: Mapping[str, Any]) -> str:
    return f"rank {row['dp_rank']} ({row['address']})"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.995 else "100 %"
