"""The command `simulate`: what a run on a cluster will ask of its storage, before there is either.

`simulated_reads` runs some ranks by the code that reads. This module scales their figures to the
cluster.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from streammega import DataConfig, StorageConfig
from streammega.cli.options import (
    AsJson,
    StorageFile,
    StorageOption,
    check_name,
    settings_from,
    show_progress,
    storage_config,
    with_flags,
)
from streammega.cli.render import Report, show_report
from streammega.config.validate import (
    Flag,
    Ge,
    Gt,
    check_fields,
    parse_json,
    read_toml,
    refuse_unknown,
)
from streammega.errors import ConfigError

if TYPE_CHECKING:
    from streammega.apps.simulated_reads import SimulatedReads
    from streammega.convert import ProgressObserver

Floats = NDArray[np.float64]

CLUSTER = "The cluster"
RUN = "The run"
EXACT = "exact"
SAMPLED = "sampled"
MODEL = "model"
BASIS = {
    "exact": "counted by running the opening, the order and the planner; the same on every rank",
    "model": "from the counts, the limits of the storage and the network, without jitter and errors",
}
GB = 10**9
DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
MANIFEST = ".manifest.json"
SHARD_TOKENS = 10**9
"""Tokens of a shard of datasets whose sizes are given: what many corpora have, 2 GB."""
CONNECTION_RATE = 90e6
"""Bytes a second of one connection: what S3 advises to count on."""
PREFIX_REQUESTS_PER_S = 5500.0
"""Reads a second that S3 answers for each prefix before it refuses some."""
DOLLARS_OF_A_REQUEST = 0.4e-6
"""What a GET of S3 Standard costs in us-east-1; bytes are free within a region."""
SIMULATED_RANKS = 4
SIMULATED_SAMPLES = 65_536
"""Samples of each simulated rank, from the first on."""
START_SECONDS = 10.0
"""Seconds after the opening whose requests are counted apart."""
SHOWN_DATASETS = 5
ACCEPTED_WAIT = 0.001
"""The share of the time that ranks may wait for data, as in `bench`."""
LATE_START_SECONDS = 10.0
BUSY_NETWORK = 0.5
"""The share of a node's network interface above which it is advised to have more of it."""
WIDTH = 100
"""Columns of the report for people."""
BLEND_FILE = ".toml"
MAX_DATASETS = 32_766
MAX_SHARDS = 1_000_000
"""Most shards of a dataset: each has an entry in a manifest in memory."""
_NUMBER = re.compile(r"\d+(\.\d*)?(e-?\d+)?|\.\d+")
_SIZED = re.compile(r"(?P<name>[^=]+)=(?P<tokens>[^*=/]+)(?:\*(?P<count>\d+))?")


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A cluster and a run on it."""

    nodes: Annotated[int, Flag(CLUSTER), Ge(1)] = 1
    """Nodes of the cluster."""
    ranks_per_node: Annotated[int, Flag(CLUSTER), Ge(1)] = 8
    """Data-parallel ranks of a node that read."""
    tokens_per_s: Annotated[float, Flag(CLUSTER), Gt(0)] = 10_000.0
    """Tokens a second that a data-parallel rank trains, by all GPUs that share its batches."""
    nic_gbit: Annotated[float, Flag(CLUSTER), Gt(0)] = 100.0
    """Gigabits a second of a node's network interface."""
    latency_ms: Annotated[float, Flag(CLUSTER), Ge(0)] = 30.0
    """Milliseconds to the first byte of an answer of the storage."""
    opening: Annotated[str, Flag(CLUSTER)] = "each"
    """Who asks the storage when the run starts: each rank; or one for all (together), as the trainer,
    open_loader and open_together do."""
    train_tokens: Annotated[str | None, Flag(RUN, metavar="TOKENS")] = None
    """Tokens that the run trains, such as 15T. None: all datasets once."""
    sequence_length: Annotated[int, Flag(RUN), Ge(1)] = 4096
    """Tokens of a sample."""
    micro_batch_size: Annotated[int, Flag(RUN), Ge(1)] = 1
    """Samples of a micro-batch of a rank."""
    global_batch_size: Annotated[int | None, Flag(RUN), Ge(1)] = None
    """Samples of a step. None: one micro-batch of each rank."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.opening not in ("each", "together"):
            raise ConfigError(
                f"opening (--opening) is {self.opening!r}; it must be each or together"
            )

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def opening_ranks(self) -> int:
        """Ranks that ask the storage when the run starts."""
        return {"each": self.ranks, "together": 1}[self.opening]


@with_flags(Simulation)
def simulate(
    context: typer.Context,
    blend: Annotated[
        list[str],
        typer.Argument(
            help="Datasets: NAME=TOKENS (web=10T), NAME=TOKENS*COUNT for several alike, or a prefix "
            "whose manifest is read; weights before them in turn. Or a TOML file with `blend` and "
            "any of the options by their names."
        ),
    ],
    as_json: AsJson = False,
    storage: StorageOption = None,
    storage_file: StorageFile = None,
    **settings: Any,
) -> None:
    """What will a run on a cluster ask of its storage? Waits, requests, bytes, memory, US dollars.

    No data and no cluster are needed. Some ranks are simulated by the code that reads. The report
    begins with what to change first.
    """
    flags = {name: value for name, value in settings.items() if _is_given(context, name)}
    values: dict[str, Any] = settings_from(Simulation, flags)
    words: Any = blend
    if len(blend) == 1 and blend[0].endswith(BLEND_FILE):
        check_name(blend[0])
        table = _read_file(blend[0])
        words = table.pop("blend")
        values = table | values
    simulation = Simulation(**values)
    with show_progress("reading manifests") as progress:
        datasets = _read_blend(words, storage_config(storage, storage_file, looks_only=True))
        report = forecast(datasets, simulation, progress)
    summary = "" if as_json else forecast_text(report)
    show_report(report if as_json else {}, summary=summary, as_json=as_json)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _read_file(path: str) -> dict[str, Any]:
    """A TOML file with settings of Simulation and the blend. Raises ConfigError."""
    table = read_toml(path, "give a TOML file with `blend` and settings")
    blend = table.get("blend")
    if isinstance(blend, str):
        table["blend"] = blend = blend.split()
    if not isinstance(blend, list) or not all(isinstance(word, str) for word in blend):
        raise ConfigError(f"{path}: needs blend, a list of words such as ['web=10T', 'code=2T']")
    return table


# --- the datasets


class Dataset(NamedTuple):
    """A dataset of the blend. manifest: what its bucket has; None: it is made of `tokens`."""

    name: str
    weight: float | None
    tokens: int
    manifest: bytes | None


def _read_blend(words: Sequence[str], storage: StorageConfig) -> list[Dataset]:
    """The datasets that words name, with their weights. Raises ConfigError, StorageError."""
    datasets: list[Dataset] = []
    weight: float | None = None
    for word in words:
        if _NUMBER.fullmatch(word):
            weight = float(word)
            if not 0 < weight < math.inf:
                raise ConfigError(f"the weight {word} is not a positive number; give another")
            continue
        sized = _SIZED.fullmatch(word)
        if sized is None:
            datasets.append(_stored_dataset(word, weight, storage))
        else:
            datasets += _sized_datasets(sized, weight)
        weight = None
    if not datasets or weight is not None:
        raise ConfigError(
            "the blend ends with a weight; give datasets, such as 0.7 web=10T 0.3 code=2T"
        )
    if len({dataset.weight is None for dataset in datasets}) > 1:
        raise ConfigError(
            "some datasets have a weight and some have none; give it to all, or to none"
        )
    for name, count in Counter(dataset.name for dataset in datasets).items():
        if count > 1:
            raise ConfigError(f"{name} is in the blend twice; give each dataset a name of its own")
    return datasets


def _sized_datasets(sized: re.Match[str], weight: float | None) -> list[Dataset]:
    """The datasets of NAME=TOKENS*COUNT, which share the weight."""
    count = int(sized["count"] or 1)
    if not 0 < count <= MAX_DATASETS:
        raise ConfigError(
            f"{sized[0]}: COUNT is {count}; a blend has at least 1 and at most {MAX_DATASETS:,} datasets"
        )
    tokens = _count(sized["tokens"], sized[0])
    names = [sized["name"]]
    if sized["count"]:
        names = [f"{sized['name']}-{number:05d}" for number in range(count)]
    share = None if weight is None else weight / count
    return [Dataset(name, share, tokens, None) for name in names]


def _stored_dataset(name: str, weight: float | None, storage: StorageConfig) -> Dataset:
    from streammega.storage import open_store

    name = name.removesuffix(MANIFEST)
    check_name(name)
    store, key = open_store(name + MANIFEST, storage)
    body = bytes(store.read(key, [(0, store.info(key).size)])[0])
    try:
        tokens = int(parse_json(body)["tokens"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{name}{MANIFEST}: is no manifest of a dataset; give the dataset's size: NAME=TOKENS"
        ) from None
    return Dataset(name, weight, tokens, body)


def _count(text: str, where: str) -> int:
    """A number of tokens: 15T, 2.5G, 1000000. Raises ConfigError."""
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmgbt]?)", text.strip().lower())
    count = float(parsed[1]) * DECIMAL[parsed[2]] if parsed else 0.0
    if not 1 <= count < 2**60:
        raise ConfigError(f"{where}: {text!r} is no number of tokens; write 15T, 2.5G or 1000000")
    return int(count)


def _shards_of(dataset: Dataset) -> list[int]:
    """The tokens of each shard of a dataset, all of about one size."""
    tokens = dataset.tokens
    count = -(-tokens // SHARD_TOKENS)
    if count > MAX_SHARDS:
        raise ConfigError(
            f"{dataset.name}: would have {count:,} shards of {SHARD_TOKENS:,} tokens, and at most "
            f"{MAX_SHARDS:,} are simulated; give it as several datasets, NAME=TOKENS*COUNT"
        )
    return [tokens * (number + 1) // count - tokens * number // count for number in range(count)]


# --- the figures


class Run(NamedTuple):
    """What follows from the settings alone.

    tokens, shares [datasets]: tokens of an epoch, and the part of the blend. batches: micro-batches of
    each rank.
    """

    settings: Simulation
    tokens: Floats
    shares: Floats
    trained: float
    batches: int
    batch_seconds: float
    nic: float


def forecast(
    datasets: Sequence[Dataset], settings: Simulation, progress: ProgressObserver | None = None
) -> Report:
    """The report of a run. Raises ConfigError."""
    run = _plan_run(datasets, settings)
    reads = _simulate(datasets, run, progress)
    start, notes = _start(run, reads)
    notes += _notes_on_memory(reads)
    reading = _reading(run, reads)
    prefixes = _busiest_prefixes(datasets, run, reads)
    bytes_of_a_token = float(run.shares @ reads.token_bytes)
    node_rate = bytes_of_a_token * settings.tokens_per_s * settings.ranks_per_node
    return {
        "change_first": _changes(start, reading, prefixes, notes, node_rate / run.nic),
        "notes": notes,
        "run": _about(run, reads, len(datasets), start["opening"]["value"]),
        "start": start,
        "reading": reading,
        "whole_run": _whole_run(run, reads),
        "prefixes": prefixes,
        "shuffling": list(reads.shuffling),
        "basis": BASIS | {"sampled": _describe_sample(run, reads)},
    }


def _plan_run(datasets: Sequence[Dataset], settings: Simulation) -> Run:
    tokens = np.array([dataset.tokens for dataset in datasets], np.float64)
    weights = np.array([dataset.weight or 0.0 for dataset in datasets])
    if datasets[0].weight is None:
        weights = tokens
    trained = float(tokens.sum())
    if settings.train_tokens is not None:
        trained = _count(settings.train_tokens, "train_tokens (--train-tokens)")
    batch_tokens = settings.micro_batch_size * settings.sequence_length
    return Run(
        settings=settings,
        tokens=tokens,
        shares=weights / weights.sum(),
        trained=trained,
        batches=max(1, int(trained / (batch_tokens * settings.ranks))),
        batch_seconds=batch_tokens / settings.tokens_per_s,
        nic=settings.nic_gbit * 1e9 / 8,
    )


def _simulate(
    datasets: Sequence[Dataset], run: Run, progress: ProgressObserver | None
) -> SimulatedReads:
    from streammega.apps.simulated_reads import simulate_reads

    settings = run.settings
    step_samples = settings.micro_batch_size * settings.ranks
    simulated = np.unique(np.linspace(0, settings.ranks - 1, SIMULATED_RANKS).astype(int)).tolist()
    blend: Any = [(dataset.name, dataset.weight) for dataset in datasets]
    if datasets[0].weight is None:
        blend = [dataset.name for dataset in datasets]
    return simulate_reads(
        {dataset.name: dataset.manifest or _shards_of(dataset) for dataset in datasets},
        DataConfig(
            blend=blend,
            sequence_length=settings.sequence_length,
        ),
        latency=settings.latency_ms / 1000,
        connection_rate=CONNECTION_RATE,
        rank_rate=run.nic / settings.ranks_per_node,
        request_rate=PREFIX_REQUESTS_PER_S / (settings.ranks * float(run.shares.max())),
        micro_batch_size=settings.micro_batch_size,
        global_batch_size=settings.global_batch_size or step_samples,
        dp_size=settings.ranks,
        dp_ranks=simulated,
        num_batches=min(run.batches, max(2, SIMULATED_SAMPLES // settings.micro_batch_size)),
        batch_seconds=run.batch_seconds,
        progress=progress,
    )


def _row(value: float | None, unit: str, basis: str) -> dict[str, Any]:
    """A figure with its unit, and whether it was counted, sampled or follows from the model. None:
    there is none.
    """
    return {"value": value, "unit": unit, "basis": basis}


def _about(run: Run, reads: SimulatedReads, datasets: int, opening: float) -> Report:
    settings = run.settings
    step_samples = settings.global_batch_size or settings.micro_batch_size * settings.ranks
    samples = run.batches * settings.micro_batch_size * settings.ranks
    return {
        "nodes": _row(settings.nodes, "", EXACT),
        "ranks": _row(settings.ranks, "", EXACT),
        "datasets": _row(datasets, "", EXACT),
        "shards": _row(reads.shards, "", EXACT),
        "tokens": _row(run.trained / 1e9, "G", EXACT),
        "epochs_of_all_data": _row(run.trained / float(run.tokens.sum()), "", EXACT),
        "steps": _row(samples // step_samples, "", EXACT),
        "lanes": _row(reads.lanes, "", EXACT),
        "block": _row(reads.block_bytes / 1024, "KiB", EXACT),
        "time": _row((opening + run.batches * run.batch_seconds) / 86_400, "days", MODEL),
    }


def _start(run: Run, reads: SimulatedReads) -> tuple[Report, list[str]]:
    """The figures of the start, and what limits it."""
    settings = run.settings
    opened = reads.opening.requests * settings.opening_ranks
    node_bytes = int(reads.opening.nbytes.sum()) * -(-settings.opening_ranks // settings.nodes)
    seconds = {
        "the round trips of a rank": reads.opening.seconds,
        "the requests a second of a prefix": opened.max() / PREFIX_REQUESTS_PER_S,
        "the network interface of a node": node_bytes / run.nic,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    first = max(rank.first_batch for rank in reads.ranks)
    rates = _rates(run, reads, 0.0, START_SECONDS)
    requests = int(reads.opening.requests.sum())
    rows = {
        "requests_of_a_rank": _row(requests, "", EXACT),
        "requests_of_all": _row(requests * settings.opening_ranks, "", EXACT),
        "requests_to_busiest_prefix": _row(int(opened.max()), "", EXACT),
        "bytes_of_a_rank": _row(float(reads.opening.nbytes.sum()) / 1e6, "MB", EXACT),
        "opening": _row(seconds[bound], "s", MODEL),
        "first_batch": _row(seconds[bound] + first, "s", MODEL),
        "requests_after_opening": _row(rates.sum(), "1/s", SAMPLED),
    }
    words = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
    return rows, [f"the opening is bound by {bound}: {words}"]


def _reading(run: Run, reads: SimulatedReads) -> Report:
    settings = run.settings
    waits = np.max([rank.waited for rank in reads.ranks], axis=0)  # steps wait for the slowest rank
    waits[0] = 0.0  # the first batch has a figure of its own
    early, late = np.array_split(waits, 2)
    node_rate = _mean_bytes_later(reads, run) / run.batch_seconds * settings.ranks_per_node
    memory = max(rank.memory_bytes for rank in reads.ranks)
    margins = [rank.margin for rank in reads.ranks if not math.isnan(rank.margin)]
    return {
        "wait_share_at_first": _row(_wait_share(early, run), "", SAMPLED),
        "wait_share_later": _row(_wait_share(late, run), "", SAMPLED),
        "answers_may_be_late_by": _row(min(margins, default=None), "s", SAMPLED),
        "requests": _row(_steady_rates(run, reads).sum(), "1/s", SAMPLED),
        "bytes_of_a_node": _row(node_rate / 1e6, "MB/s", SAMPLED),
        "share_of_network_interface": _row(node_rate / run.nic, "", SAMPLED),
        "memory_of_a_rank": _row(memory / 1e6, "MB", SAMPLED),
        "memory_of_a_node": _row(memory * settings.ranks_per_node / 1e6, "MB", SAMPLED),
    }


def _whole_run(run: Run, reads: SimulatedReads) -> Report:
    """What was simulated, and for the rest of the run as much a micro-batch as in its second half."""
    settings = run.settings
    ranks = settings.ranks
    opening = reads.opening
    fetched = np.mean([rank.nbytes.sum() for rank in reads.ranks])
    requests = np.mean([len(rank.nbytes) for rank in reads.ranks])
    more_batches = run.batches - len(reads.ranks[0].waited)
    fetched += more_batches * _mean_bytes_later(reads, run)
    requests += more_batches * run.batch_seconds * _steady_rates(run, reads).sum() / ranks
    all_bytes = ranks * fetched + settings.opening_ranks * float(opening.nbytes.sum())
    opening_requests = settings.opening_ranks * int(opening.requests.sum())
    all_requests = round(ranks * requests) + opening_requests
    trained_bytes = run.trained * float(run.shares @ reads.token_bytes)
    return {
        "requests": _row(all_requests, "", SAMPLED),
        "price_of_requests": _row(all_requests * DOLLARS_OF_A_REQUEST, "USD", SAMPLED),
        "egress": _row(all_bytes / GB, "GB", SAMPLED),
        "egress_for_each_byte_trained": _row(all_bytes / trained_bytes, "", SAMPLED),
        "bytes_of_a_node": _row(all_bytes / settings.nodes / GB, "GB", SAMPLED),
    }


def _rates(run: Run, reads: SimulatedReads, begin: float, end: float) -> Floats:
    """Requests a second of all ranks in a stretch of time, for each dataset."""
    counts = np.zeros(len(run.tokens))
    for rank in reads.ranks:
        is_within = (rank.sent >= begin) & (rank.sent < end)
        counts += np.bincount(rank.dataset[is_within], minlength=len(counts))
    rates: Floats = counts * run.settings.ranks / len(reads.ranks) / max(end - begin, 1e-9)
    return rates


def _half(reads: SimulatedReads) -> tuple[float, float]:
    """When the second half of the simulated micro-batches begins and ends."""
    ends = reads.ranks[0].step_end
    return float(ends[(len(ends) - 1) // 2]), float(ends[-1])


def _steady_rates(run: Run, reads: SimulatedReads) -> Floats:
    return _rates(run, reads, *_half(reads))


def _mean_bytes_later(reads: SimulatedReads, run: Run) -> float:
    """Bytes of a micro-batch in the second half."""
    begin, end = _half(reads)
    fetched = [rank.nbytes[rank.sent >= begin].sum() for rank in reads.ranks]
    return float(np.mean(fetched)) * run.batch_seconds / max(end - begin, 1e-9)


def _wait_share(waits: Floats, run: Run) -> float:
    waited = float(waits.sum())
    return waited / (waited + len(waits) * run.batch_seconds)


def _busiest_prefixes(datasets: Sequence[Dataset], run: Run, reads: SimulatedReads) -> list[Report]:
    """The datasets with the most requests at the start, and their part of the limit of a prefix:
    each dataset has its own.
    """
    opened = reads.opening.requests * run.settings.opening_ranks
    at_start = _rates(run, reads, 0.0, START_SECONDS)
    later = _steady_rates(run, reads)
    busiest = np.argsort(-(opened + at_start), kind="stable")[:SHOWN_DATASETS].tolist()
    return [
        {
            "dataset": datasets[number].name,
            "requests_to_open": int(opened[number]),
            "seconds_at_its_limit": opened[number] / PREFIX_REQUESTS_PER_S,
            "requests_a_second_at_first": at_start[number],
            "requests_a_second_later": later[number],
        }
        for number in busiest
    ]


def _notes_on_memory(reads: SimulatedReads) -> list[str]:
    enough = max(rank.enough_bytes for rank in reads.ranks)
    if not enough:
        return []
    return [
        f"memory_bytes {StorageConfig().memory_bytes:,} does not hold the open blocks of all datasets, "
        f"so samples are read one by one; {enough:,} would do (memory_bytes of the run's storage)"
    ]


def _describe_sample(run: Run, reads: SimulatedReads) -> str:
    batches = len(reads.ranks[0].waited)
    return (
        f"{len(reads.ranks)} of {run.settings.ranks:,} ranks, their first {batches:,} of {run.batches:,} "
        f"micro-batches; 'later' is the second half of them; shuffling is of the first "
        f"{reads.shuffled_samples:,} samples"
    )


def _changes(
    start: Report,
    reading: Report,
    prefixes: Sequence[Report],
    notes: Sequence[str],
    needed_share: float,
) -> list[str]:
    """What to change first; that nothing need be changed where ranks do not wait. needed_share: of a
    node's network interface, by ranks that never wait.
    """
    bound, *about_memory = notes
    lines = list(about_memory)
    if needed_share > BUSY_NETWORK:
        lines.append(
            "a faster network (--nic-gbit), or fewer ranks on a node: they need "
            f"{100 * needed_share:.0f} % of its interface"
        )
    for prefix in prefixes:
        if prefix["requests_a_second_later"] > PREFIX_REQUESTS_PER_S:
            lines.append(
                f"more prefixes for {prefix['dataset']}: it is asked more than the "
                f"{PREFIX_REQUESTS_PER_S:,.0f} times a second that S3 answers for each"
            )
    if start["opening"]["value"] > LATE_START_SECONDS:
        lines.append(
            "open the data once for all ranks (--opening together), or from the file that "
            f"`streammega manifest` writes: {bound.partition(':')[0]}"
        )
    if not lines and reading["wait_share_later"]["value"] > ACCEPTED_WAIT:
        lines.append("a storage that is nearer or faster (--latency-ms): ranks wait for answers")
    return lines or ["nothing: ranks do not wait for data"]


def forecast_text(report: Report) -> str:
    """The report for people, on one screen: what each line means, and what to change first."""
    run, start, reading, total = (
        {name: row["value"] for name, row in report[part].items()}
        for part in ("run", "start", "reading", "whole_run")
    )
    slack = reading["answers_may_be_late_by"]
    bound = report["notes"][0].partition(": ")[0].removeprefix("the opening is ")
    waits = "storage keeps up"
    if reading["wait_share_later"] > ACCEPTED_WAIT:
        waits = "storage does not keep up"
    sections = {
        "start": [
            ("opening", f"{start['opening']:.3g} s", f"ranks know their data; {bound}"),
            ("first batch", f"{start['first_batch']:.3g} s", "every rank has one"),
            (
                "requests",
                f"{start['requests_after_opening']:,.0f} /s",
                f"of all ranks, in the {START_SECONDS:.0f} s after the opening",
            ),
        ],
        "reading": [
            (
                "waits at first",
                f"{100 * reading['wait_share_at_first']:.2f} %",
                "of the time, in the first half of what was simulated",
            ),
            (
                "waits later",
                f"{100 * reading['wait_share_later']:.2f} %",
                "of the time, in its second half: so the run goes on",
            ),
            (
                "slack",
                "" if slack is None else f"{slack:,.3g} s",
                "so late may an answer be, and no rank waits",
            ),
            (
                "requests",
                f"{reading['requests']:,.3g} /s",
                f"of all ranks; S3 answers {PREFIX_REQUESTS_PER_S:,.0f} a second for each prefix",
            ),
            (
                "bytes of a node",
                f"{reading['bytes_of_a_node']:,.3g} MB/s",
                f"{100 * reading['share_of_network_interface']:.2g} % of its network interface",
            ),
            (
                "memory of a rank",
                f"{reading['memory_of_a_rank']:,.3g} MB",
                f"for tokens read ahead; of a node {reading['memory_of_a_node']:,.3g} MB",
            ),
        ],
        "all of the run": [
            (
                "requests",
                f"{total['requests']:,}",
                f"{total['price_of_requests']:,.2f} US dollars, at {1e6 * DOLLARS_OF_A_REQUEST:.2f} "
                "for a million (S3 Standard, us-east-1)",
            ),
            (
                "bytes",
                f"{_in_digits(total['egress'])} GB",
                f"{total['egress_for_each_byte_trained']:.2f} for each that is trained; "
                "free within a region of S3",
            ),
        ],
        "shuffle, and that of a full shuffle": [
            (
                row["figure"],
                _in_digits(row["this_order"]),
                f"{_in_digits(row['full_shuffle'])}; {row['meaning']}",
            )
            for row in report["shuffling"]
        ],
        "most requests": [
            (
                _shortened(row["dataset"]),
                f"{row['requests_a_second_later']:,.3g} /s",
                f"{row['requests_to_open']:,} to open; {row['requests_a_second_at_first']:,.0f} /s "
                "at first",
            )
            for row in report["prefixes"]
        ],
    }
    lines = [
        f"{_in_letters(run['tokens'] * 1e9)} tokens, {run['ranks']:,} ranks on {run['nodes']:,} nodes: "
        f"{_in_digits(run['time'])} days; epochs of all data: {_in_digits(run['epochs_of_all_data'])}",
        f"{waits}: ranks wait for data {100 * reading['wait_share_later']:.2f} % of the time",
        "change first:",
    ]
    for change in report["change_first"]:
        lines += textwrap.wrap(f"- {change}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    for title, rows in sections.items():
        lines.append(title)
        lines += [f"  {name:<16} {value:>12}  {words}" for name, value, words in rows]
    words = (
        f"how sure: {report['basis']['sampled']}; times are of a model without jitter and errors"
    )
    return "\n".join([*lines, *textwrap.wrap(words, WIDTH)])


def _shortened(name: str) -> str:
    """The end of a name, as long as a column is."""
    return name if len(name) <= 16 else f"…{name[-15:]}"


def _in_letters(count: float) -> str:
    """A number of tokens as options have it: 15T, 2.5G."""
    for letter in "TGMK":
        if count >= DECIMAL[letter.lower()]:
            return f"{count / DECIMAL[letter.lower()]:.4g}{letter}"
    return f"{count:.0f}"


def _in_digits(value: float | None) -> str:
    """A number without an exponent, in three digits or more."""
    if value is None:
        return "too few"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
