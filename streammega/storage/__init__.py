"""URLs to bytes: one interface, `store.Store`, and a backend for each way to reach them.

To add a kind of storage: write a subclass of `Store` in `backends/` (of `remote.RemoteStore`, where
requests cross a network), and add a row to `open.SCHEMES`.

What happens when a request for a shard's bytes fails:

1. The backend turns its client's error into one of ours (`_error`, `http_errors`). Its attributes
   `transient`, `throttled` and `silent` say whether another try may help, and why.
2. If credentials were refused, `RemoteStore` reads them again and repeats the request once. If
   obstore does not take the server's range answers, `backends.fallback` reads by a second client.
3. `fetch.fetcher`, which reads for loaders, sends each request of a failed batch by itself. One that
   fails alone is sent again after the pause that `retry.RetryPolicy` gives. A refusal (429, 503)
   narrows the window of `fetch.flow_control`.
4. `Store.read`, by which all others read, is repeated by the same policy.
5. When the policy allows no more tries, the error is raised, with the URL and what was tried.
"""

from streammega.storage.backends.local import file_system_of
from streammega.storage.connection import Connection, Credentials, connection_of, credentials_of
from streammega.storage.open import join_url, open_store, parent_url, save_bytes
from streammega.storage.store import Buffer, ObjectInfo, ObjectWriter, Store

__all__ = [
    "Buffer",
    "Connection",
    "Credentials",
    "ObjectInfo",
    "ObjectWriter",
    "Store",
    "connection_of",
    "credentials_of",
    "file_system_of",
    "join_url",
    "open_store",
    "parent_url",
    "save_bytes",
]
