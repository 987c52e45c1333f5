"""The command `bench`: how fast the loader reads data here, and how fast a run needs it."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from streammega.cli.options import (
    OF_DATASETS,
    AsJson,
    DataWords,
    SequenceLength,
    StorageFile,
    StorageOption,
    load_data,
    show_progress,
)
from streammega.cli.render import Report, show_report
from streammega.errors import ConfigError, StreammegaError

if TYPE_CHECKING:
    from streammega import DataConfig, StreamLoader
    from streammega.cli.progress import ProgressDisplay
    from streammega.train.config import RunConfig

ACCEPTED_SHARE = 0.001
"""The share of the time that a run may wait for data."""
FULL_SPEED_WAITS = 0.2
"""The share of the time below which storage is no limit at full speed."""
HIGH_AMPLIFICATION = 1.3
SMALL_REQUEST_BYTES = 12 << 10
"""A sample of 4,096 tokens has 8 KiB."""
HELPS = 1.2
"""How many times as fast a change has to be, to be advised: less may be chance."""
TRIAL_SHARE = 0.25
"""The share of the seconds that each change is tried for."""
SLOW_START_SECONDS = 10.0
INTERRUPTED = 130


class Setup(NamedTuple):
    """What is read: rank 0 of `dp_size`. need: tokens per second of this loader; 0: not known.
    has_default_sizes: sizes of samples and micro-batches may be others than the run's.
    """

    name: str
    data: DataConfig
    micro_batch_size: int
    global_batch_size: int
    dp_size: int
    need: float
    has_default_sizes: bool = False


class Change(NamedTuple):
    """A change of settings of the data that may help. words: what to do, as the beginning of a
    sentence.
    """

    name: str
    words: str
    settings: dict[str, Any]


def bench(
    words: DataWords,
    tokens_per_second_per_gpu: Annotated[
        float | None, typer.Option(min=1, help="The tokens that one GPU trains in a second.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of this machine.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds to read.")] = 20.0,
    sequence_length: SequenceLength = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples of a micro-batch.",
            show_default="4",
            rich_help_panel=OF_DATASETS,
        ),
    ] = None,
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
) -> None:
    """Does data come fast enough here? Measures the loader against what a run needs.

    Reads as rank 0 of a run: at full speed, then at the rate that the run needs. Exit status 1 if
    the loader does not reach that rate. Changes of settings are tried, and advised if they help.
    Ctrl-C prints what was measured so far.
    """
    per_gpu = tokens_per_second_per_gpu or 0.0
    sizes = {"sequence_length": sequence_length, "micro_batch_size": micro_batch_size}
    data, run = load_data(words, storage, storage_file, options=sizes)
    if run is not None:
        setup = _setup_of_run(words[0], run, per_gpu, gpus)
    else:
        size = micro_batch_size or 4
        has_default_sizes = None in sizes.values()
        setup = Setup(" ".join(words), data, size, size * gpus, gpus, per_gpu, has_default_sizes)
    report: Report = {}
    code = 0
    with show_progress("starting", line_every=2.0) as progress:
        try:
            for figures in measure(setup, seconds, progress):
                report |= figures
            code = int(bool(report["need"]) and not report["need"]["is_met"])
            report["trials"] = try_changes(report, setup, seconds, progress)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except StreammegaError as error:
            if "full_speed" not in report:
                raise
            report["error"] = str(error)
            code = 1
    report["advice"] = advice(report, setup)
    show_report(report if as_json else {}, summary=bench_text(report), as_json=as_json)
    raise typer.Exit(code)


def _setup_of_run(path: str, run: RunConfig, per_gpu: float, gpus: int) -> Setup:
    from streammega.config import ORDERS

    ranks_of_a_loader = run.parallel.tp * run.parallel.cp * run.parallel.pp
    dp_size = max(1, gpus // ranks_of_a_loader)
    data = run.data
    if ORDERS[data.order].is_endless:  # without an end, which a short run would reach over and over
        data = replace(data, num_samples=None)
    elif not data.num_samples:
        data = replace(data, num_samples=run.num_samples())
    return Setup(
        path,
        data,
        run.train.micro_batch_size,
        run.train.global_batch_size,
        dp_size,
        per_gpu * gpus / dp_size,
    )


def measure(setup: Setup, seconds: float, progress: ProgressDisplay) -> Iterator[Report]:
    """Figures of the start, of full speed, and of the rate that is needed, as each is measured."""
    import_module("streammega.loading.loader")  # no part of the opening, which is timed
    yield {
        "data": setup.name,
        "order": setup.data.order,
        "dp_size": setup.dp_size,
        "micro_batch_size": setup.micro_batch_size,
        "sequence_length": setup.data.sequence_length,
        "need": None,
    }
    before = resident_bytes()
    began = time.monotonic()
    with _loader(setup, setup.data, seconds) as loader:
        opened = time.monotonic() - began
        if next(loader, None) is None:
            raise ConfigError(f"{setup.name}: holds no global batch; give more data or num_samples")
        tokens = setup.micro_batch_size * setup.data.sequence_length
        first = time.monotonic() - began
        yield {"tokens_of_a_batch": tokens, "open_seconds": opened, "first_batch_seconds": first}
        # without a need all of the time is for full speed
        share = 0.5 if setup.need else 1.0
        progress.begin("reading at full speed")
        for figures in _read(loader, tokens, 0.0, share * seconds, progress):
            memory = {"peak_memory_bytes": max(0, peak_bytes() - before)}
            yield {**memory, "full_speed": figures}
        if not setup.need:
            return
        rate = figures["tokens_per_second"]
        need = {"tokens_per_second": setup.need, "times_met": rate / setup.need}
        yield {"need": {**need, "is_met": False}}
        if rate < setup.need:
            return
        progress.begin("reading as fast as the run needs")
        for figures in _read(loader, tokens, setup.need, share * seconds, progress):
            is_met = figures["waited_share"] <= ACCEPTED_SHARE
            yield {"need": {**need, "is_met": is_met}, "at_need": figures}


def _loader(setup: Setup, data: DataConfig, seconds: float) -> StreamLoader:
    """A loader of the data, or of the data with a change, as rank 0."""
    from streammega import StreamLoader

    storage = data.storage
    # a server that is gone ends the command in time
    storage = storage.changed(retry_timeout=min(storage.retry_timeout, max(5.0, seconds)))
    return StreamLoader(
        replace(data, storage=storage),
        micro_batch_size=setup.micro_batch_size,
        global_batch_size=setup.global_batch_size,
        dp_rank=0,
        dp_size=setup.dp_size,
        pin_memory=False,
    )


def try_changes(
    report: Report, setup: Setup, seconds: float, progress: ProgressDisplay
) -> list[Report]:
    """Measure what the figures say may help: new loaders with each change, between two without.

    A change that ends in an error helps nothing.
    """
    is_met = bool(report["need"] and report["need"]["is_met"])
    figures = report["full_speed"]
    changes = [] if is_met or figures["throttled"] else possible_changes(figures, setup)
    if not changes:
        return []
    unchanged = Change("no change", "", {})
    rates: dict[str, float] = {}
    for change in (unchanged, *changes, unchanged):
        progress.begin(f"trying {change.name}")
        try:
            with _loader(setup, replace(setup.data, **change.settings), seconds) as loader:
                next(loader, None)
                tokens = report["tokens_of_a_batch"]
                *_, last = _read(loader, tokens, 0.0, TRIAL_SHARE * seconds, progress)
        except StreammegaError:
            if not change.settings:
                raise
            continue
        rates[change.name] = max(last["tokens_per_second"], rates.get(change.name, 0.0))
    if not rates[unchanged.name]:  # no batch came in time
        return []
    return [
        {
            "change": change.name,
            "tokens_per_second": rates[change.name],
            "times": rates[change.name] / rates[unchanged.name],
            "advice": change.words,
        }
        for change in changes
        if change.name in rates
    ]


def possible_changes(figures: Report, setup: Setup) -> list[Change]:
    """The changes of settings that the figures of full speed speak for."""
    from streammega.config import ORDERS

    data = setup.data
    storage = data.storage
    if figures["waited_share"] < FULL_SPEED_WAITS:
        if ORDERS[data.order].has_lanes or data.fields is not None:
            return []
        settings: dict[str, Any] = {"fields": ("tokens", "labels")}
        words = "name only the `fields` that you use"
        return [Change('fields=["tokens", "labels"]', words, settings)]
    changes = []
    in_flight = figures["requests"] / figures["seconds"] * figures["request_median_seconds"]
    # These are means: a limit is not reached all of the time, least where the loop stops to plan.
    if in_flight > storage.max_concurrent_requests / 2:
        more = 4 * storage.max_concurrent_requests
        words = (
            f"raise max_concurrent_requests from {storage.max_concurrent_requests:,} to {more:,}"
        )
        settings = {"storage": storage.changed(max_concurrent_requests=more)}
        changes.append(Change(f"max_concurrent_requests={more}", words, settings))
    mean_bytes = figures["fetched_bytes"] / max(figures["requests"], 1)
    are_small = 0 < mean_bytes < SMALL_REQUEST_BYTES
    if are_small and data.shuffle_block_bytes:
        larger = 4 * data.shuffle_block_bytes
        words = f"set shuffle_block_bytes to {larger:,} before the run, which is another order"
        changes.append(
            Change(f"shuffle_block_bytes={larger}", words, {"shuffle_block_bytes": larger})
        )
    # without room for blocks, samples are requests of their own
    if are_small or figures["amplification"] > HIGH_AMPLIFICATION:
        more = 4 * storage.memory_bytes
        words = f"raise memory_bytes from {storage.memory_bytes:,} to {more:,}"
        settings = {"storage": storage.changed(memory_bytes=more)}
        changes.append(Change(f"memory_bytes={more}", words, settings))
    return changes


def _read(
    loader: StreamLoader, tokens: int, rate: float, seconds: float, progress: ProgressDisplay
) -> Iterator[Report]:
    """Take batches, at a rate if it is not 0. Yields figures each half of a second, and at the end."""
    began = time.monotonic()
    cpu = time.process_time()
    before = loader.stats()
    batches = 0
    longest = 0.0
    reported = began
    now = began
    while now < began + seconds:
        if rate:
            due = began + min(seconds, batches * tokens / rate)
            time.sleep(max(0.0, due - time.monotonic()))
        taken = time.monotonic()
        batch = next(loader, None)
        now = time.monotonic()
        if batch is None:  # the data is short: the next pass begins
            iter(loader)
            continue
        longest = max(longest, now - taken)
        batches += 1
        progress.advance(0, tokens)
        is_last = now >= began + seconds
        if is_last or now > reported + 0.5:
            reported = now
            yield _figures(loader.stats(), before, batches * tokens, now - began, cpu, longest)
    if reported < now:
        yield _figures(loader.stats(), before, batches * tokens, now - began, cpu, longest)


def _figures(
    stats: dict[str, Any],
    before: dict[str, Any],
    tokens: int,
    seconds: float,
    cpu: float,
    longest: float,
) -> Report:
    """What the loader did since `before`. cpu: the processor time of this process at that time."""
    names = ("requests", "retries", "errors", "throttled", "fetched_bytes", "cache_hit_bytes")
    seconds = max(seconds, 1e-9)
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "waited_share": (stats["wait_total"] - before["wait_total"]) / seconds,
        "longest_seconds": longest,
        "cpu_seconds_per_billion_tokens": 1e9 * (time.process_time() - cpu) / max(tokens, 1),
        "amplification": stats["amplification"],
        "request_median_seconds": stats["request_p50"],
        "request_p99_seconds": stats["request_p99"],
        "held_bytes": stats["most_held_bytes"],
        **{name: stats[name] - before[name] for name in names},
    }


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """The most memory of this process that was in RAM."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def advice(report: Report, setup: Setup) -> list[str]:
    """What would help, the largest help first; that nothing would where the need is met.

    A change of settings is advised only if it was tried, and helped.
    """
    from streammega.apps.machine import FEWER_REQUESTS, check_disk
    from streammega.dataset import default_cache_dir

    figures = report.get("full_speed")
    if not figures:
        return ["no batch came: `streammega doctor` looks at storage and machine"]
    storage = setup.data.storage
    lines = []
    need = report["need"]
    is_met = bool(need and need["is_met"])
    if is_met:
        lines.append(f"nothing is needed: full speed is {_times(need)} times the need")
    if need and setup.has_default_sizes:
        lines.append(
            f"this holds for micro-batches of {setup.micro_batch_size} x "
            f"{setup.data.sequence_length:,} tokens: give --sequence-length and --micro-batch-size "
            f"of your run, or its file"
        )
    if storage.cache_dir or storage.cache_max_bytes:
        folder = Path(storage.cache_dir or default_cache_dir())
        for finding in check_disk(folder, measures=False):
            if finding.status != "ok":
                lines.append(f"cache_dir: {finding.result}: {finding.remedy}")
    if figures["throttled"]:
        lines.append(
            f"the store refused {figures['throttled']:,} requests (429, 503): {FEWER_REQUESTS}"
        )
    elif not is_met:
        lines.append(_limit(figures))
        lines += _of_trials(report.get("trials", []))
    if report["first_batch_seconds"] > SLOW_START_SECONDS and not figures["throttled"]:
        lines.append(
            "the first batch is late: `streammega warmup` compiles kernels, `streammega prepare` "
            "builds indices, and a manifest spares listings"
        )
    return lines


def _limit(figures: Report) -> str:
    """What limits the reading."""
    if figures["waited_share"] < FULL_SPEED_WAITS:
        return "the processor is the limit"
    if not figures["requests"]:
        return "this machine is the limit: its processors, or the disk with the data"
    latency = figures["request_median_seconds"]
    rate = figures["fetched_bytes"] / figures["seconds"]
    return (
        f"storage is the limit: it gave {rate / 1e6:,.1f} MB/s, and a request took "
        f"{1e3 * latency:,.0f} ms; `streammega doctor` measures it alone"
    )


def _of_trials(trials: list[Report]) -> list[str]:
    """What helped where it was tried, and what did not."""
    helped = [trial for trial in trials if trial["times"] >= HELPS]
    others = [trial for trial in trials if trial["times"] < HELPS]
    lines = [
        f"{trial['advice']}: tried here, it was {trial['times']:.1f} times as fast"
        for trial in sorted(helped, key=lambda trial: -trial["times"])
    ]
    if others:
        tried = ", ".join(f"{trial['change']} ({trial['times']:.2f} times)" for trial in others)
        lines.append(f"tried, of no help: {tried}")
    return lines


def bench_text(report: Report) -> str:
    """The report for people, as far as it was measured."""
    lines = [
        f"{report['data']}: {report['order']} order, rank 0 of {report['dp_size']}, micro-batches of "
        f"{report['micro_batch_size']} x {report['sequence_length']:,} tokens",
        "",
    ]
    if "first_batch_seconds" in report:
        first, opened = report["first_batch_seconds"], report["open_seconds"]
        lines.append(f"first batch   {first:.1f} s, {opened:.1f} of them to open the data")
    figures = report.get("full_speed")
    if figures:
        lines += [
            f"full speed    {figures['tokens_per_second']:,.0f} tokens/s, {_waits(figures)}",
            f"processor     {figures['cpu_seconds_per_billion_tokens']:,.1f} s for 10^9 tokens",
            f"memory        {report['peak_memory_bytes'] / 1e6:,.0f} MB more than before",
        ]
        if figures["requests"]:
            lines.append(
                f"requests      {figures['requests']:,}, median "
                f"{1e3 * figures['request_median_seconds']:,.1f} ms, {figures['retries']:,} "
                f"repeated, {figures['throttled']:,} refused"
            )
            lines.append(
                f"read          {figures['fetched_bytes'] / figures['seconds'] / 1e6:,.1f} MB/s, "
                f"{figures['amplification']:.2f} bytes for each that is used"
            )
    need = report["need"]
    if need:
        times = f"full speed is {_times(need)} times that"
        lines.append(f"need          {need['tokens_per_second']:,.0f} tokens/s: {times}")
    if "at_need" in report:
        lines.append(f"at the need   {_waits(report['at_need'])}")
    if "error" in report:
        lines.append(f"ended by      {report['error']}")
    return "\n".join([*lines, "", "What would help:", *(f"- {line}" for line in report["advice"])])


def _times(need: Report) -> str:
    times = need["times_met"]
    return f"{times:,.1f}" if times >= 1 else f"{times:.2g}"


def _waits(figures: Report) -> str:
    return (
        f"waited for data {100 * figures['waited_share']:.2f} % of {figures['seconds']:.1f} s, "
        f"{1e3 * figures['longest_seconds']:,.1f} ms at most"
    )
