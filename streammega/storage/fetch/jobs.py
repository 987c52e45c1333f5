"""A job: reads that one thread sends together, and waits for together."""

from __future__ import annotations

from streammega.storage.cache.store import SMALL, CachedStore
from streammega.storage.fetch.limits import JOB_BYTES
from streammega.storage.fetch.reads import Read


def send(job: list[Read]) -> BaseException | None:
    """Read from storage into the buffers; the error, if there is one.

    Blocks: not to be called under a lock.
    """
    first = job[0]
    read_into = first.store.read_into
    if isinstance(first.store, CachedStore) and any(read.copies > 1 for read in job):
        # else it would wait for the page that the first request fetches
        read_into = first.store.read_past_cache
    try:
        spans = [(read.start, read.stop) for read in job]
        read_into(first.key, spans, [read.out for read in job], first.etag)
    except (
        BaseException
    ) as error:  # also what is no error of storage: whoever waits is to hear of it, not this thread
        return error
    return None


def together(first: Read, read: Read, job_bytes: int) -> bool:
    """Whether a read may go out with others, of `job_bytes` so far: of the same object, small, none
    that failed before.
    """
    if isinstance(first.store, CachedStore) and first.size >= SMALL:
        return False  # its pages are looked for one after the other
    if read.failures or first.failures:
        return False  # one that fails again would take the others with it
    if read.store is not first.store or read.key != first.key or read.etag != first.etag:
        return False
    return job_bytes + read.size <= JOB_BYTES
