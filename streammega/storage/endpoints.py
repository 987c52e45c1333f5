"""Which endpoints have ever answered.

One that never did is mistyped rather than down, and is not waited for as long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from streammega.storage.fork_lock import process_lock


class Endpoint:
    """One server, as `storage_options` name it."""

    def __init__(self) -> None:
        self.answered = False
        """Whether it did, whatever it said, in this process or its parent."""
        self.told: set[str] = set()
        """What was said of it, once: stores come and go with the datasets that are opened."""


_endpoints: dict[tuple[str, str, bytes], Endpoint] = {}
_lock = process_lock()


def endpoint_of(scheme: str, root: str, options: Mapping[str, Any]) -> Endpoint:
    """The endpoint that serves a bucket.

    It is that of all buckets under the same options, but of http that of one host; and one for all
    stores of this process: a bucket that is first written to when a run has gone on for days is not
    new.
    """
    host = root if scheme in ("http", "https") else ""
    # Options may hold secrets, which are not to lie about here: a digest tells them apart as well.
    spelled = repr(sorted(options.items(), key=str))
    digest = hashlib.blake2b(spelled.encode(), digest_size=16).digest()
    with _lock:
        return _endpoints.setdefault((scheme, host, digest), Endpoint())


def root_of(url: str) -> str:
    """The bucket or host of a URL, with its scheme: `s3://bucket`; a path is its own."""
    scheme, separator, path = url.partition("://")
    host, _, _ = path.partition("/")
    return scheme + separator + host
