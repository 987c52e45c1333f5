"""Which endpoints have ever answered: one that never did is mistyped rather than down, and is not
waited for as long.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Any


class Endpoint:
    """One server, as `storage_options` name it.

    answered: whether it did, whatever it said, in this process or its parent. told: what was said
    of it, so that it is said once: stores come and go with the datasets that are opened.
    """

    def __init__(self) -> None:
        self.answered = False
        self.told: set[str] = set()


_endpoints: dict[tuple[str, str, bytes], Endpoint] = {}
_lock = threading.Lock()


def endpoint_of(scheme: str, root: str, options: Mapping[str, Any]) -> Endpoint:
    """The endpoint that serves a bucket: that of all buckets under the same options, and of each
    host by itself.

    It is one for all stores of this process: a bucket that is first written to when a run has gone
    on for days is not new.
    """
    host = root if scheme in ("http", "https") else ""
    # it may hold secrets
    digest = hashlib.blake2b(
        repr(sorted(options.items(), key=str)).encode(), digest_size=16
    ).digest()
    with _lock:
        return _endpoints.setdefault((scheme, host, digest), Endpoint())
