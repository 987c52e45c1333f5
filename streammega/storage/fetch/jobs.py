"""A job: reads that one thread sends together, and waits for together."""

from __future__ import annotations

from streammega.storage.cache.store import SMALL, CachedStore
from streammega.storage.fetch.limits import JOB_BYTES
from streammega.storage.fetch.reads import Read


def send(job: list[Read], *, past_cache: bool) -> BaseException | None:
    """Read from storage into the buffers; the error, if there is one.

    `past_cache`: a second request is among them, which must not wait for a page that the first one
    fetches. Blocks: not to be called under a lock.
    """
    first = job[0]
    read_into = first.store.read_into
    if past_cache and isinstance(first.store, CachedStore):
        read_into = first.store.read_past_cache
    try:
        spans = [(read.start, read.stop) for read in job]
        outs = [read.out for read in job]
        read_into(first.key, spans, outs, first.etag)
    except BaseException as error:
        # Also what is no error of storage: whoever waits is to hear of it, not this thread.
        return error
    return None


def together(first: Read, read: Read, job_bytes: int) -> bool:
    """Whether a read may go out with others, of `job_bytes` so far.

    They are of the same object, small, and none of them failed before.
    """
    # Pages of large reads are looked for one after the other: threads do that side by side.
    if isinstance(first.store, CachedStore) and first.size >= SMALL:
        return False
    # One that fails again would take the others with it.
    if read.failures > 0 or first.failures > 0:
        return False
    if read.store is not first.store:
        return False
    if read.key != first.key or read.etag != first.etag:
        return False
    return job_bytes + read.size <= JOB_BYTES
