"""Simulates the reading of some ranks, by the code that reads: the opening of datasets, the order, the
memory plan, the planner with its look-ahead, and flow control. Only the network is a model.

Nothing is read but manifests, and time is virtual. The model of the network has no jitter and no
errors: an answer comes after the latency and the time of its bytes. A request beyond the limit of
its prefix waits, where a real server refuses and is asked again.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streammega.config import ORDERS, DataConfig, StorageConfig, parse_blend
from streammega.dataset.checksums import CHECK_BYTES
from streammega.dataset.idx import index_bytes
from streammega.dataset.manifest import Manifest, Shard, parse_manifest, shard_names
from streammega.dataset.names import MANIFEST
from streammega.errors import ConfigError, ObjectNotFoundError, StorageError
from streammega.loading.lookahead import Lookahead
from streammega.loading.micro_steps import MicroSteps
from streammega.loading.read_plan import plan_reading
from streammega.loading.stats import Stats
from streammega.loading.torch_dataset import StreamingDataset
from streammega.samples.shuffling import shuffle_figures
from streammega.storage.fetch.buffer_pool import BufferPool
from streammega.storage.fetch.flow_control import FlowControl
from streammega.storage.fetch.requests import FetchGroup, RangeRequest
from streammega.storage.open import is_remote, register_scheme
from streammega.storage.progress import ProgressObserver
from streammega.storage.store import Buffer, ObjectInfo, Span, Store

SCHEME = "simulated"
DOCUMENT_TOKENS = 1000
"""Tokens of a document where no manifest says it. Only sizes of indices depend on it."""
MAX_OPENING_LATENCY = 0.02
"""Most seconds that an answer takes in the opening that is timed. Its time is scaled for more."""
ETAG = '"simulated"'
"""That of every object."""
LISTED_BYTES = 320
"""Bytes of an object in the answer to a listing: S3's XML."""
SHUFFLED_SAMPLES = 1 << 20
"""Most samples whose shuffling is measured."""
REQUEST_SECONDS = 2e-4
"""Seconds of a processor that a request takes: tools/bench/costs.py measures it."""
CLIENT_SECONDS = 7e-3
"""Seconds of a processor that obstore takes to make a client of S3, once a rank."""


class Network(NamedTuple):
    """The storage as one rank meets it.

    latency: seconds to the first byte. connection_rate, rank_rate: bytes a second of a request, and of
    all of the rank. request_rate: requests a second that this rank sends at most.
    """

    latency: float
    connection_rate: float
    rank_rate: float
    request_rate: float


class Opening(NamedTuple):
    """What one rank does until its loader is open.

    requests, nbytes: by dataset. A listing counts for the first object that it finds. seconds: on this
    machine, with answers that take the latency and a processor's time.
    """

    requests: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    seconds: float


class RankReads(NamedTuple):
    """What one rank reads. Seconds count from the end of the opening.

    sent, nbytes, dataset [requests]. first_batch: when it is handed out. waited, step_end
    [micro-batches]: seconds that the caller waits for each, and when its step ends. memory_bytes: the
    most that the loader holds. useful_bytes: of all samples. enough_bytes: the memory_bytes that would
    hold all open blocks; 0: it does. margin: how much later any answer of the second half could come
    before a step waits; nan: there was none.
    """

    sent: NDArray[np.float64]
    nbytes: NDArray[np.int64]
    dataset: NDArray[np.int64]
    first_batch: float
    waited: NDArray[np.float64]
    step_end: NDArray[np.float64]
    memory_bytes: int
    useful_bytes: int
    enough_bytes: int
    margin: float


@dataclass(frozen=True, kw_only=True)
class SimulatedReads:
    """See `simulate_reads`.

    shards: of all datasets. token_bytes [datasets]. shuffling: "this_order" and "full_shuffle" of each
    "figure", over the first `shuffled_samples`.
    """

    opening: Opening
    ranks: Sequence[RankReads]
    shards: int
    token_bytes: NDArray[np.int64]
    lanes: int
    block_bytes: int
    shuffling: Sequence[Mapping[str, Any]]
    shuffled_samples: int


def simulate_reads(
    datasets: Mapping[str, bytes | Sequence[int]],
    config: DataConfig,
    *,
    latency: float,
    connection_rate: float,
    rank_rate: float,
    request_rate: float,
    dtype: str = "uint16",
    micro_batch_size: int,
    global_batch_size: int,
    dp_size: int,
    dp_ranks: Sequence[int],
    num_batches: int,
    batch_seconds: float,
    prefetch: int = 4,
    request_seconds: float = REQUEST_SECONDS,
    progress: ProgressObserver | None = None,
) -> SimulatedReads:
    """Simulate how some data-parallel ranks of a run read, by the code that reads. Nothing has to
    exist.

    The order, the planner, the memory plan, the look-ahead and the limits of requests in flight are
    those of StreamLoader. So the requests of each rank are the ones that it will send. Times come from
    a model of the network without jitter.

    Args:
        datasets: for each name of the blend its manifest, as `streammega convert` writes it for `.bin`
            shards; or the tokens of each shard.
        config: as for StreamLoader, in the stream order, without phases.
        latency: seconds to the first byte of an answer.
        connection_rate, rank_rate: bytes a second of one request, and of all requests of a rank.
        request_rate: requests a second of a rank that are answered.
        dtype: of the tokens of datasets without a manifest.
        micro_batch_size, global_batch_size, dp_size, prefetch: as for StreamLoader.
        dp_ranks: the ranks to simulate.
        num_batches: micro-batches of each.
        batch_seconds: seconds that the training step needs for a micro-batch.
        request_seconds: seconds of a processor that a request takes. A rank sends one after the other.
        progress: receives micro-batches that were simulated.

    Raises ConfigError, FormatError for manifests.
    """
    if not ORDERS[config.order].has_lanes or config.phases:
        raise ConfigError("only the stream order without phases is simulated; set order='stream'")
    rates = min(connection_rate, rank_rate, request_rate, batch_seconds)
    if rates <= 0 or min(latency, request_seconds) < 0 or num_batches < 1:
        raise ConfigError(
            "rates, batch_seconds and num_batches are positive, latency and request_seconds are not "
            "negative"
        )
    if not dp_ranks or not all(0 <= rank < dp_size for rank in dp_ranks):
        raise ConfigError(f"dp_ranks is {list(dp_ranks)}; name ranks from 0 to {dp_size - 1}")
    names, weights = parse_blend(config.blend or "")
    missing = [name for name in names if name not in datasets]
    if missing:
        raise ConfigError(f"{missing[0]} of the blend has no size; give one, or leave it out")
    progress = progress or ProgressObserver()
    progress.begin("opening")
    bucket = SimulatedBucket({name: datasets[name] for name in names}, dtype)
    urls = [bucket.url(name) for name in bucket.names]
    blend: Any = urls if weights is None else list(zip(urls, weights, strict=True))
    # No page of the simulated data is kept.
    storage = replace(config.storage, cache_max_bytes=0)
    config = replace(config, blend=blend, storage=storage, split="1,0,0")

    def open_dataset() -> StreamingDataset:
        return StreamingDataset(
            config,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            dp_rank=dp_ranks[0],
            dp_size=dp_size,
        )

    opened, opening = _measure_opening(bucket, open_dataset, latency, request_seconds)
    steps = opened.steps
    segment = steps.samples.segment_at(0)
    order = segment.order
    assert order is not None
    request_rate = 1 / max(1 / request_rate, request_seconds)
    network = Network(latency, connection_rate, rank_rate, request_rate)
    progress.begin("simulating", len(dp_ranks) * num_batches, " micro-batches")
    ranks = [
        _simulate_rank(
            replace(steps, dp_rank=rank),
            _VirtualFetcher(config.storage, network, bucket.dataset_of),
            num_batches,
            batch_seconds,
            prefetch,
            progress,
        )
        for rank in dp_ranks
    ]
    count = min(SHUFFLED_SAMPLES, num_batches * steps.step_samples)
    progress.begin("measuring the shuffle")
    return SimulatedReads(
        opening=opening,
        ranks=ranks,
        shards=sum(map(len, segment.files)),
        token_bytes=np.array([files[0].dtype.itemsize for files in segment.files]),
        lanes=order.lanes,
        block_bytes=order.shuffle_block_bytes,
        shuffling=shuffle_figures(segment, np.arange(count), global_batch_size),
        shuffled_samples=count,
    )


def _measure_opening(
    bucket: SimulatedBucket,
    open_dataset: Callable[[], StreamingDataset],
    latency: float,
    request_seconds: float,
) -> tuple[StreamingDataset, Opening]:
    """Open twice: to count requests, which also imports modules and loads kernels; and to take the
    time, with answers that come late.

    Of that time what the processor did not need is scaled to the latency.
    """
    bucket.start_counting(0.0)
    open_dataset()
    numbers = range(len(bucket.names))
    requests = np.array([bucket.requests[number] for number in numbers], np.int64)
    nbytes = np.array([bucket.nbytes[number] for number in numbers], np.int64)
    slept = min(latency, MAX_OPENING_LATENCY)
    bucket.start_counting(slept, request_seconds)
    began, busy_before = time.perf_counter(), time.process_time()
    opened = open_dataset()
    seconds, busy = time.perf_counter() - began, time.process_time() - busy_before
    idle = max(0.0, seconds - busy) * (latency / slept if slept else 1.0)
    return opened, Opening(requests, nbytes, CLIENT_SECONDS + min(busy, seconds) + idle)


class SimulatedBucket(Store):
    """A bucket that holds datasets by their manifests. Tokens and indices are zeros."""

    def __init__(self, datasets: Mapping[str, bytes | Sequence[int]], dtype: str) -> None:
        self.names = [_key_of(name) for name in datasets]
        self.dataset_of: dict[str, int] = {}
        """The number of each object's dataset."""
        self._sizes: dict[str, int] = {}
        self._bodies: dict[str, bytes] = {}
        self.start_counting(0.0)
        register_scheme(SCHEME, lambda: self)
        for number, (name, dataset) in enumerate(zip(self.names, datasets.values(), strict=True)):
            body = dataset if isinstance(dataset, bytes) else make_manifest(name, dataset, dtype)
            url = self.url(name + MANIFEST)
            manifest = self._as_converted_here(parse_manifest(body, url), name)
            body = manifest.to_json()
            self._bodies[name + MANIFEST] = body
            self._add(name + MANIFEST, len(body), number)
            if manifest.kind != "bin":
                raise ConfigError(
                    f"{name}: has .{manifest.kind} shards, and only .bin is simulated; give its size "
                    "in tokens instead"
                )
            for shard, shard_url in zip(manifest.shards, shard_names(manifest, url), strict=True):
                key = shard_url.partition("://")[2].removesuffix(".bin")
                self._add(f"{key}.bin", shard.bytes, number)
                self._add(f"{key}.idx", shard.index_bytes, number)
        self._keys = sorted(self._sizes)

    def _as_converted_here(self, manifest: Manifest, name: str) -> Manifest:
        """The manifest that `streammega convert` would write into this bucket."""
        shards = [
            shard._replace(etag=ETAG, index_etag=ETAG, ends=shard.ends or "0" * 16)
            for shard in manifest.shards
        ]
        return replace(manifest, shards=shards, seen_at=self.place(name.rpartition("/")[0]))

    def place(self, prefix: str) -> str:
        """All is seen here."""
        return self.url(prefix)

    def _add(self, key: str, size: int, dataset: int) -> None:
        self._sizes[key] = size
        self.dataset_of[key] = dataset

    def start_counting(self, latency: float, busy_seconds: float = 0.0) -> None:
        """Count from 0, and let every answer take so many seconds, and seconds of the processor."""
        self.requests: Counter[int] = Counter()
        self.nbytes: Counter[int] = Counter()
        self._latency = latency
        self._busy_seconds = busy_seconds

    def _answer(self, key: str, nbytes: int) -> None:
        # An object that is not there belongs to the dataset whose name it begins with.
        dataset = self.dataset_of.get(key)
        if dataset is None:
            dataset = self.dataset_of.get(key.rpartition(".")[0] + MANIFEST, 0)
        self.requests[dataset] += 1
        self.nbytes[dataset] += nbytes
        if self._latency:
            time.sleep(self._latency)
        free_at = time.thread_time() + self._busy_seconds
        while time.thread_time() < free_at:  # holds the interpreter's lock, as a request does
            pass

    def url(self, key: str) -> str:
        """The name of a key for other code."""
        return f"{SCHEME}://{key}"

    def info(self, key: str) -> ObjectInfo:
        """Sizes are those of manifests."""
        self._answer(key, 0)
        if key not in self._sizes:
            raise ObjectNotFoundError(f"{self.url(key)}: is not there")
        return self._info(key)

    def _info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, size=self._sizes[key], etag=ETAG, modified=1.0)

    def get(self, key: str, max_bytes: int) -> tuple[ObjectInfo, Buffer]:
        """A manifest, by one request as obstore gets it."""
        if key not in self._bodies:
            return self.info(key), memoryview(b"")
        body = self._bodies[key]
        self._answer(key, len(body))
        return self._info(key), memoryview(body)

    def fetch(self, key: str, spans: Sequence[Span], etag: str = "") -> list[Buffer]:
        """Bytes of a manifest, or zeros."""
        bodies = []
        for start, stop in spans:
            self._answer(key, stop - start)
            body = self._bodies.get(key)
            bodies.append(memoryview(bytes(stop - start) if body is None else body[start:stop]))
        return bodies

    def list(self, prefix: str, recursive: bool = True) -> list[ObjectInfo]:
        """Objects of a folder."""
        first = bisect_left(self._keys, prefix)
        infos = []
        for key in self._keys[first:]:
            if not key.startswith(prefix):
                break
            if recursive or "/" not in key[len(prefix) :]:
                infos.append(self._info(key))
        self._count_listing(self._keys[first : first + 1], len(infos))
        return infos

    def _count_listing(self, first: Sequence[str], objects: int) -> None:
        for listed in range(0, max(objects, 1), 1000):
            answer_objects = min(1000, objects - listed)
            self._answer(first[0] if first else "", answer_objects * LISTED_BYTES)


def _key_of(name: str) -> str:
    """The key of a dataset: its name without a scheme, in some bucket."""
    key = name.partition("://")[2] if is_remote(name) else name
    return key if "/" in key else f"bucket/{key}"


def make_manifest(name: str, shard_tokens: Sequence[int], dtype: str) -> bytes:
    """The manifest that `streammega convert` would write, with documents of DOCUMENT_TOKENS."""
    shards = []
    for number, tokens in enumerate(shard_tokens):
        documents = max(1, tokens // DOCUMENT_TOKENS)
        size = tokens * np.dtype(dtype).itemsize
        index_size = index_bytes(documents, documents + 1, multimodal=False)
        shards.append(
            Shard(
                name=f"{name.rpartition('/')[2]}-{number:05d}",
                documents=documents,
                sequences=documents,
                tokens=tokens,
                bytes=size,
                checksums=_checksums(size),
                index_bytes=index_size,
                index_checksums=_checksums(index_size),
                ends="0" * 16,
            )
        )
    empty = Manifest(kind="bin", dtype=dtype, documents=0, sequences=0, tokens=0, shards=[])
    return empty.with_shards(shards).to_json()


def _checksums(size: int) -> list[str]:
    return ["0" * 32] * -(-size // CHECK_BYTES)


class _VirtualFetcher:
    """In place of a `Fetcher`: the same limits in virtual time, without threads and bytes.

    now: the time of the thread that plans and gathers.
    """

    def __init__(
        self,
        storage: StorageConfig,
        network: Network,
        dataset_of: Mapping[str, int],
    ) -> None:
        self.now = 0.0
        self.pool = BufferPool(storage.memory_bytes)
        self.flow = FlowControl(storage)
        self.sent: list[tuple[float, int, int]] = []
        """Each request: when it was sent, its bytes, and its dataset."""
        self.ready_at: dict[int, float] = {}
        """When each buffer was filled, by its id."""
        self._network = network
        self._dataset_of = dataset_of
        self._unadmitted: deque[FetchGroup] = deque()
        self._queue: deque[RangeRequest] = deque()
        self._answers: list[tuple[float, int, float, RangeRequest]] = []
        self._serial = 0
        self._rank_free_at = 0.0
        """When the network interface has a place for the next answer."""
        self._request_at = 0.0
        """When the next request may be sent."""

    @property
    def is_full(self) -> bool:
        """Whether a group waits for memory."""
        return bool(self._unadmitted)

    def submit(self, groups: Sequence[FetchGroup]) -> None:
        """Queue groups, in order of need."""
        self._unadmitted.extend(groups)
        self._admit(self.now)

    def release(self, groups: Sequence[FetchGroup]) -> None:
        """Free their memory."""
        for group in groups:
            group.release()
            self.ready_at.pop(id(group), None)
        self._admit(self.now)

    def wait(self, groups: Sequence[FetchGroup]) -> None:
        """Let time go on until all of them are filled."""
        while any(group.missing for group in groups):
            if not self._answers:
                raise StorageError(
                    "the simulation stands still; this is a defect: please report it"
                )
            self.advance(self._answers[0][0])

    def advance(self, until: float) -> None:
        """Handle what is answered until then."""
        while self._answers and self._answers[0][0] <= until:
            at, _, sent_at, request = heapq.heappop(self._answers)
            self.now = max(self.now, at)
            self.flow.finished(request.size)
            self.flow.answered(request.size_class, 1, at - sent_at)
            request.group.missing -= 1
            self.ready_at[id(request.group)] = at
            self._send(at)
        self.now = max(self.now, until)

    def _admit(self, now: float) -> None:
        while self._unadmitted and self.pool.has_room(self._unadmitted[0].size):
            group = self._unadmitted.popleft()
            group.reserve(self.pool)
            self._queue.extend(group.take_requests())
        self._send(now)

    def _send(self, now: float) -> None:
        while self._queue and self.flow.can_send(self._queue[0].size, now):
            request = self._queue.popleft()
            self.flow.started(request.size)
            self._serial += 1
            answered_at = self._answered_at(request, now)
            heapq.heappush(self._answers, (answered_at, self._serial, now, request))

    def _answered_at(self, request: RangeRequest, now: float) -> float:
        """When a request is answered that is sent now."""
        nbytes = request.size
        network = self._network
        sent = max(now, self._request_at)
        self._request_at = sent + 1 / network.request_rate
        self.sent.append((sent, nbytes, self._dataset_of[request.key]))
        first_byte = sent + network.latency
        self._rank_free_at = max(self._rank_free_at, first_byte) + nbytes / network.rank_rate
        return max(first_byte + nbytes / network.connection_rate, self._rank_free_at)


class _Taken(NamedTuple):
    """A group of micro-batches that the caller took. at: when. ended: when its last step ends.
    arrived: when its last byte did; None: its bytes were there.
    """

    at: float
    ended: float
    waited: float
    batches: int
    nbytes: int
    arrived: float | None


def _simulate_rank(
    steps: MicroSteps,
    fetcher: _VirtualFetcher,
    num_batches: int,
    batch_seconds: float,
    prefetch: int,
    progress: ProgressObserver,
) -> RankReads:
    """Run the engine's loop in virtual time: plan, wait, gather, put into the queue of ready groups.

    The caller takes a group when it is there and the steps of the group before it have ended.
    """
    storage = steps.config.storage
    plan = plan_reading(steps, 0, storage.memory_bytes, ahead=prefetch)
    memory = plan.memory
    fetcher.pool.budget = memory.fetch_bytes
    positions = iter(range(0, num_batches * steps.step_samples, steps.step_samples))
    stats = Stats()
    lookahead = Lookahead(steps, plan, positions, fetcher=fetcher, stats=stats)  # type: ignore[arg-type]
    columns = steps.samples.segments[0].columns.values()
    token_bytes = plan.table.dtype.itemsize + sum(column.token_bytes for column in columns)
    sample_bytes = (steps.config.sequence_length + 1) * token_bytes + 8  # with its length
    groups: list[_Taken] = []
    num_recorded = 0
    most_ready = 0
    while True:
        while num_recorded < len(groups) and groups[num_recorded].ended <= fetcher.now:
            ended = groups[num_recorded]
            lookahead.record_pace(batch_seconds, ended.waited / ended.batches)
            num_recorded += 1
        lookahead.plan()
        group = lookahead.take_group()
        if group is None:
            break
        needed = [buffer for buffers in group.buffers for buffer in buffers]
        fetcher.wait(needed)
        arrived = max((fetcher.ready_at[id(buffer)] for buffer in needed), default=None)
        for files, window in zip(plan.files, group.windows, strict=True):
            rows = window.rows_of(group.first, group.last)
            table = files.planner.table
            fetcher.release(table.release_rows(window.slot[rows], window.size[rows]))
        batches = len(group.consumed)
        nbytes = batches * steps.micro_batch_size * sample_bytes
        in_memory = sum(
            other.nbytes for other in groups[num_recorded:] if other.ended > fetcher.now
        )
        most_ready = max(most_ready, nbytes + in_memory)
        if len(groups) >= memory.ready_groups:  # the queue is full until a group is taken
            fetcher.advance(groups[-memory.ready_groups].at)
        free_at = groups[-1].ended if groups else 0.0
        taken_at = max(fetcher.now, free_at)
        ended_at = taken_at + batches * batch_seconds
        groups.append(_Taken(taken_at, ended_at, taken_at - free_at, batches, nbytes, arrived))
        progress.advance(batches)
    waited = np.zeros(num_batches)  # all micro-batches of a group are ready with the first
    waited[np.cumsum([0, *(group.batches for group in groups[:-1])])] = [
        group.waited for group in groups
    ]
    half = groups[-1].ended / 2
    margins = [
        group.at - group.arrived
        for group in groups
        if group.arrived is not None and group.arrived >= half
    ]
    sent, nbytes_sent, dataset = np.array(fetcher.sent or [(0.0, 0, 0)]).T
    return RankReads(
        sent=sent,
        nbytes=nbytes_sent.astype(np.int64),
        dataset=dataset.astype(np.int64),
        first_batch=groups[0].at,
        waited=waited,
        step_end=np.cumsum(waited + batch_seconds),
        memory_bytes=fetcher.pool.peak + most_ready + memory.field_bytes,
        useful_bytes=stats.useful_bytes,
        enough_bytes=memory.enough_bytes if memory.num_without_room else 0,
        margin=min(margins, default=float("nan")),
    )
