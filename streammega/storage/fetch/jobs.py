"""A job: reads that one thread sends together, and waits for together."""

from __future__ import annotations

from dataclasses import dataclass

from streammega.storage.cache.store import SMALL, CachedStore
from streammega.storage.derived_stores import DerivedStore
from streammega.storage.fetch.limits import JOB_BYTES
from streammega.storage.fetch.reads import Read
from streammega.storage.store import Bytes, address_of, gives_bodies


@dataclass(frozen=True, slots=True)
class Answer:
    """How a job ended: with an error, or with the bytes of its reads.

    bodies: of each read, in their order, where some holding keeps its own (`Holding.keeps_body`).
    The bytes of the others are in their holdings' buffers.
    """

    error: BaseException | None = None
    bodies: list[Bytes] | None = None


def send(job: list[Read], *, past_cache: bool) -> Answer:
    """Read from storage.

    `past_cache`: a second request is among them, which must not wait for a page that the first one
    fetches. Blocks: not to be called under a lock.
    """
    first = job[0]
    store = first.store
    spans = [(read.start, read.stop) for read in job]
    try:
        if any(read.holding.keeps_body for read in job):
            assert gives_bodies(store)
            bodies = store.read_bodies(first.key, spans, first.etag)
            pairs = zip(job, bodies, strict=True)
            return Answer(bodies=[_placed(body, read) for read, body in pairs])
        if past_cache and isinstance(store, CachedStore):
            store.read_past_cache(first.key, spans, [read.out for read in job], first.etag)
            return Answer()
        for reads in _by_object(job):
            _read_into(reads)
    except BaseException as error:
        # Also what is no error of storage: whoever waits is to hear of it, not this thread.
        return Answer(error=error)
    return Answer()


def _by_object(job: list[Read]) -> list[list[Read]]:
    """The reads of each object of a job."""
    of_object: dict[tuple[int, str, str], list[Read]] = {}
    for read in job:
        of_object.setdefault((id(read.store), read.key, read.etag), []).append(read)
    return list(of_object.values())


def _read_into(reads: list[Read]) -> None:
    """Fill the buffers of reads of one object."""
    first = reads[0]
    spans = [(read.start, read.stop) for read in reads]
    first.store.read_into(first.key, spans, [read.out for read in reads], first.etag)


def _placed(body: Bytes, read: Read) -> Bytes:
    """The body of a read: in its holding's buffer, or, where that keeps the body, as it came.

    One that came with the head of its answer lies in the transport's buffer behind it, at any
    address: it is copied if kernels may not read tokens there.
    """
    holding = read.holding
    if not holding.keeps_body:
        read.out[:] = body
        return read.out
    return body if address_of(body) % holding.alignment == 0 else body.copy()


def together(first: Read, read: Read, job_bytes: int) -> bool:
    """Whether a read may go out with others, of `job_bytes` so far.

    They are of the same object or unpacked from local files, small, and none of them failed before.
    """
    # Pages of large reads are looked for one after the other: threads do that side by side.
    if isinstance(first.store, CachedStore) and first.size >= SMALL:
        return False
    # One that fails again would take the others with it.
    if read.failures > 0 or first.failures > 0:
        return False
    is_same = read.store is first.store and read.key == first.key and read.etag == first.etag
    # To unpack what lies on this machine is work and no request: of a dataset of many shards two
    # reads of one shard seldom follow each other, and a thread would take one at a time.
    if not is_same and not (_unpacks(first) and _unpacks(read)):
        return False
    return job_bytes + read.size <= JOB_BYTES


def _unpacks(read: Read) -> bool:
    """Whether a read is of a local file that is shown in another form."""
    return isinstance(read.store, DerivedStore) and read.store.local
