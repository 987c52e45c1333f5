"""How bytes are fetched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from streammega.config.validate import (
    Ge,
    Gt,
    Le,
    check_fields,
    field_types,
    local_folder,
    read_toml,
    refuse_unknown,
    settings_of,
    unknown_setting,
)
from streammega.errors import ConfigError
from streammega.errors.redaction import remember_secrets

Transport = Literal["auto", "obstore", "fsspec"]

MiB = 1 << 20
DAY = 86_400
SETTINGS_OF_A_STORE = ("transport", "storage_options", "request_timeout")
"""Fields of StorageConfig that may differ between accounts or endpoints."""
_BUCKET = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]+/")


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Values that are no settings, each with its why. Tests pass others."""

    local_io: Literal["mmap", "pread"] | None = None
    """How local files are read: mapped, or by `pread`. None: by `pread` where another machine serves
    the file system, for an I/O error of a mapped file ends the process.
    """
    max_request_bytes: Annotated[int, Ge(4096)] = 8 * MiB
    """Largest single range request: a few of them fill `max_in_flight_bytes`, and a failed one is
    soon read again.
    """
    max_in_flight_bytes: Annotated[int, Ge(4096)] = 48 * MiB
    """Most bytes of range requests in flight: limits few large reads. In docs/benchmarks.md 32 MiB were
    slower with 20 ms before the first byte (126 of 164 M tokens/s), and 96 MiB at 100 requests a second
    (5.9 of 8.7). 8 MiB are the most where storage answers in less than four milliseconds.
    """
    coalesce_gap_bytes: Annotated[int, Ge(0)] = 64 * 1024
    """Ranges with at most this gap between them are fetched as one, if at most a seventh more is
    fetched than used: a request costs more than so few bytes.
    """
    cache_chunk_bytes: Annotated[int, Ge(MiB)] = 256 * MiB
    """Bytes of an object in one file of the cache: few files for a large shard, and each is soon
    removed when the cache is full.
    """
    read_timeout: Annotated[float, Gt(0), Le(DAY)] = 10.0
    """Seconds without a byte after which a request fails and is retried: `request_timeout` would be
    a long stall where a connection hangs.
    """
    multipart_part_bytes: Annotated[int, Ge(5 * MiB)] = 32 * MiB
    """Bytes of one part of an upload by obstore, which holds seven in memory. Stores accept 10,000
    parts, so the largest object has 10,000 times as many bytes. Conversions raise it for larger shards.
    """
    connect_deadline: Annotated[float, Gt(0)] = 30.0
    """Seconds for which requests are retried to an endpoint that has never answered this process, if
    that is less than `retry_timeout`: its name may be mistyped. An answer for any bucket of the
    endpoint counts. Spawned workers know which endpoints answered their parent.
    """
    max_retries: Annotated[int | None, Ge(0)] = None
    """Most retries of a failed request; None: as many as `retry_timeout` allows, which bounds what a
    run waits.
    """
    hedge_requests: bool = True
    """Send a second request for one that takes far longer than others: a batch waits for the slowest."""
    resident_bytes: int = 16 * MiB
    """A remote dataset of at most so many bytes is fetched once and stays in memory: in blocks it would
    be many small requests. 0: none stays.
    """

    def __post_init__(self) -> None:
        check_fields(self)


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """How bytes are fetched. Nothing here changes what is read, only how fast and from where."""

    transport: Transport = "auto"
    """`auto` uses obstore where it serves the scheme (docs/storage.md), and fsspec elsewhere."""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Credentials, endpoint and so on, as fsspec takes them (`key`, `secret`, `endpoint_url`,
    `anon`, ...): docs/storage.md.
    """
    max_concurrent_requests: Annotated[int, Ge(1)] = 384
    """Most range requests in flight: limits many small reads."""
    memory_bytes: Annotated[int, Ge(4096)] = 1024 * MiB
    """Most bytes that a loader holds: fetched ahead, in flight, and ready. It takes fewer where more
    would not help. If they are too few for the open blocks of the stream order, it is several times
    slower, and a warning says how many are needed.
    """
    cache_dir: str | Path | None = None
    """A folder on a local disk that keeps copies of `.idx` files and built orders, for all processes
    and runs of this node; default ~/.cache/streammega.
    """
    cache_max_bytes: Annotated[int, Ge(0)] = 0
    """Most bytes of tokens that `cache_dir` keeps too; 0: none.

    The larger of 1 GiB and 1 % of its disk stays free, on a small disk a tenth.
    """
    request_timeout: Annotated[float, Gt(0), Le(DAY)] = 60.0
    """Seconds one request may take. Drivers of fsspec without an event loop (hdfs) need a timeout of
    their own in `storage_options`.
    """
    retry_timeout: Annotated[float, Gt(0)] = 600.0
    """Seconds for which a request is retried after transient errors (503, 429, refused, reset, no
    answer, name not found), with pauses that grow to 10 seconds. Then its error is raised. Other
    errors are raised at once.
    """
    _tuning: Tuning = field(default=Tuning(), repr=False)
    # Not a setting: `with_prefixes` sets it.
    _by_prefix = cast("Mapping[str, StorageConfig]", MappingProxyType({}))

    def __post_init__(self) -> None:
        check_fields(self, hides_text=True)
        remember_secrets(self.storage_options)
        if self.cache_dir:
            # This sets a field of a frozen dataclass.
            object.__setattr__(self, "cache_dir", local_folder(self.cache_dir))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Another process that gets this makes messages of its own.
        self.__dict__.update(state)
        remember_secrets(self.storage_options)

    @property
    def tuning(self) -> Tuning:
        """Values that are no settings."""
        return self._tuning

    def for_url(self, url: str) -> StorageConfig:
        """The settings of the longest prefix that a URL begins with; these, if it begins with none."""
        prefixes = [prefix for prefix in self._by_prefix if url.startswith(prefix)]
        return self._by_prefix[max(prefixes, key=len)] if prefixes else self

    def changed(self, **settings: Any) -> StorageConfig:
        """A copy with other settings, also for URLs with their own settings."""
        storage = replace(self, **settings)
        by_prefix = {url: replace(other, **settings) for url, other in self._by_prefix.items()}
        object.__setattr__(storage, "_by_prefix", by_prefix)
        return storage

    def tuned(self, **values: Any) -> StorageConfig:
        """A copy with other values of `tuning`, also for URLs with their own settings."""
        return self.changed(_tuning=replace(self.tuning, **values))


def load_storage(path: str) -> StorageConfig:
    """The StorageConfig that a TOML file describes, by the names of its fields.

    Raises ConfigError, which repeats no value of the file: it may hold secrets.
    """
    import dacite

    table = read_toml(path, "give a TOML file with settings of StorageConfig")
    for name in table:
        if name not in {item.name for item in settings_of(StorageConfig)}:
            raise ConfigError(
                f"{path}: {unknown_setting(name, StorageConfig)} (key, secret, endpoint_url and the "
                f"like stand under [storage_options])"
            )
    # 60 means 60.0
    hooks = {float: lambda value: float(value) if type(value) is int else value}
    try:
        return dacite.from_dict(StorageConfig, table, dacite.Config(type_hooks=hooks))
    except dacite.WrongTypeError as error:
        kind = field_types(StorageConfig)[str(error.field_path)]
        raise ConfigError(f"{path}: {error.field_path} must be {kind.expected}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def with_prefixes(storage: StorageConfig, by_prefix: Mapping[str, StorageConfig]) -> StorageConfig:
    """`storage`, but for URLs that begin with a prefix what `by_prefix` has of SETTINGS_OF_A_STORE.

    Raises ConfigError for a prefix without a bucket, and for other settings that differ.
    """
    routed = replace(storage)
    chosen = {}
    for prefix, other in by_prefix.items():
        where = f"storage_by_prefix[{str(prefix)!r}]"
        if not isinstance(prefix, str) or not _BUCKET.match(prefix):
            raise ConfigError(
                f"{where}: is no beginning of URLs; write the scheme, the bucket or host, and a slash: "
                "'s3://bucket/'"
            )
        if not isinstance(other, StorageConfig):
            raise ConfigError(f"{where}: is a {type(other).__name__}; it must be a StorageConfig")
        for item in settings_of(StorageConfig):
            value = getattr(other, item.name)
            is_of_a_store = item.name in SETTINGS_OF_A_STORE
            if not is_of_a_store and value not in (item.default, getattr(storage, item.name)):
                raise ConfigError(
                    f"{where}: {item.name} counts for the whole loader; set it in storage"
                )
        changed = {name: getattr(other, name) for name in SETTINGS_OF_A_STORE}
        chosen[prefix] = replace(storage, **changed)
    object.__setattr__(routed, "_by_prefix", chosen)
    return routed
