"""The checks of `streammega doctor`: a place of data, the way to it, and this machine.

Each yields findings. Those of the network run in threads that are left when their time ends, so
that all of them end in time whatever a server does.
"""

from __future__ import annotations

import http.client
import os
import random
import re
import socket
import ssl
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from streammega import StorageConfig, StreammegaError
from streammega.apps.machine import (
    FEWER_REQUESTS,
    Finding,
    check_disk,
    check_limits,
    check_versions,
    fault,
    ok,
    warning,
)
from streammega.cli.render import Report
from streammega.config.validate import settings_of
from streammega.dataset import default_cache_dir
from streammega.errors import (
    AccessDeniedError,
    CacheError,
    EndpointError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from streammega.storage import (
    Connection,
    ObjectInfo,
    connection_of,
    credentials_of,
    file_system_of,
    open_store,
    parent_url,
)

KiB = 1 << 10
MiB = 1 << 20
STATUSES = ("fault", "warning", "ok")
"""From the worst on."""
RESERVED_SECONDS = 2.0
"""For this machine, which is checked after all requests."""
REQUESTS = (
    (16 * KiB, 1),
    (256 * KiB, 1),
    (256 * KiB, 32),
    (256 * KiB, 128),
    (256 * KiB, 384),
    (8 * MiB, 1),
    (8 * MiB, 4),
)
"""(bytes, requests at once) of the measurements. 256 KiB are a block of the stream order, and 384
requests are `max_concurrent_requests` by default.
"""
MAX_ROW_SECONDS = 1.0
MAX_LATE_SECONDS = 1.0
"""Seconds after a row of measurements in which its last answers still count."""
MAX_THREADS = 32
FAR_SECONDS = 0.05
"""Seconds to the first byte from which on storage is called far."""
SLOW_BYTES_PER_SECOND = 20e6
WORTHWHILE = 1.25
"""Times faster that another setting must be to be recommended."""
CLOCK_WARNING_SECONDS = 60
CLOCK_FAULT_SECONDS = 900
"""S3 refuses signatures that are 15 minutes off."""
CERTIFICATE_DAYS = 14
DATA_SUFFIXES = (".bin", ".bin.zst", ".tar")
PUBLIC_OPTIONS = re.compile(
    "account_name|addressing_style|anon|client_kwargs|config_kwargs|endpoint|endpoint_url|profile|"
    "region|region_name|requester_pays|s3|use_ssl|verify"
)
"""Storage options that are no secrets. All others are left out of what is printed."""


class Rate(NamedTuple):
    """Requests of one size, so many at once. Seconds are those of an answer."""

    bytes: int
    at_once: int
    requests: int
    seconds: float
    median_seconds: float
    slowest_seconds: float
    refused: int
    failed: int

    @property
    def bytes_per_second(self) -> float:
        """Over all requests."""
        return self.requests * self.bytes / self.seconds


class Blocked(Exception):
    """The checks after this one cannot be made."""


class Examination:
    """The checks of one URL, with what later ones need of earlier ones."""

    def __init__(
        self,
        url: str,
        config: StorageConfig,
        *,
        may_write: bool,
        seconds: float,
    ) -> None:
        self.url = url
        self.config = config
        self.deadline = time.monotonic() + seconds
        limit = seconds / 5
        self.quick = config.changed(
            request_timeout=min(config.request_timeout, limit),
            retry_timeout=min(config.retry_timeout, limit),
        ).tuned(
            read_timeout=min(config.tuning.read_timeout, limit),
            connect_deadline=min(config.tuning.connect_deadline, limit),
            # a mapped file would be read only where its bytes are used
            local_io="pread",
        )
        self.store, self.key = open_store(url, self.quick)
        self.shown_url = self.store.url(self.key)
        self.is_local = self.store.transport == "local"
        self.may_write = may_write
        self.connect_seconds: float | None = None
        self.object: ObjectInfo | None = None
        self.is_empty = False
        """Whether the URL names a whole bucket without objects."""
        self.rates: list[Rate] = []
        self.findings: list[Finding] = []
        self.not_checked: list[str] = []
        self.changes: dict[str, Any] = {}
        """Settings that are recommended, and differ from the config's."""

    def run(self, begin: Callable[[str], None]) -> None:
        """Make all checks. begin: is called with what is checked."""
        checks = {
            "credentials": self.check_credentials,
            "endpoint": self.check_endpoint,
            "data": self.check_data,
            "reading": self.check_reading,
            "bandwidth": self.check_bandwidth,
            "conditional writes": self.check_writes,
        }
        blocked = ""
        for name, check in checks.items():
            remaining = self.deadline - RESERVED_SECONDS - time.monotonic()
            reason = blocked if name != "endpoint" else ""  # which needs no credentials
            if name == "conditional writes" and not self.may_write:
                reason = "give --write, which creates and deletes one small object"
            elif self.is_empty and name in ("reading", "bandwidth"):
                reason = "there is no object to read"
            elif remaining <= 0:
                reason = "no time was left; give more --seconds"
            if reason:
                self.not_checked.append(f"{name}: {reason}")
                continue
            begin(f"checking {name}")
            findings, is_blocked = run_within(remaining, name, check)
            self.findings += findings
            if is_blocked:
                blocked = f"first mend: {findings[-1].check}"
        begin("checking this machine")
        for check in (self.check_disks, check_limits, check_versions):
            self.findings += check()

    def check_credentials(self) -> Iterator[Finding]:
        """Where they come from, and until when they are valid. The answers show whether they are."""
        if self.is_local:
            return
        credentials = credentials_of(self.url, self.quick)
        if credentials is None:
            yield ok("credentials", "the client of this scheme finds them by itself")
            return
        result = credentials.source
        if credentials.expires:
            minutes = (credentials.expires - datetime.now(UTC)).total_seconds() / 60
            result += f", valid until {credentials.expires:%Y-%m-%d %H:%M} UTC ({minutes:,.0f} min)"
        if credentials.is_temporary and not credentials.is_renewed:
            remedy = "a run that outlasts them fails: use a role, a profile or a credentials file"
            yield warning("credentials", f"{result}; temporary, and nothing renews them", remedy)
        else:
            yield ok("credentials", result)

    def check_endpoint(self) -> Iterator[Finding]:
        """The name, the connection, TLS, the clock and the region, without a signature."""
        connection = connection_of(self.url, self.quick)
        if not connection.endpoint:
            return
        where = f"{connection.endpoint} ({connection.source})"
        parts = urlsplit(connection.bucket_url)
        host = parts.hostname or ""
        verify = (self.config.storage_options.get("client_kwargs") or {}).get("verify")
        context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
        if verify is False:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        try:
            proxy = urllib.request.getproxies().get(parts.scheme)
            if proxy and not urllib.request.proxy_bypass(host):
                where += f", through the proxy {re.sub('.*[@/]', '', proxy.rstrip('/'))}"
            else:
                port = parts.port or (443 if parts.scheme == "https" else 80)
                yield from self._connect(host, port, context if parts.scheme == "https" else None)
            yield from self._ask(connection, where, context)
        except socket.gaierror as error:
            remedy = f"correct the endpoint ({connection.source}) or this machine's name servers"
            yield fault("DNS", f"{host}: {error.strerror}", remedy)
        except ssl.SSLCertVerificationError as error:
            remedy = "for a certificate of your own: client_kwargs = {verify = '/path/to/ca.pem'}"
            yield fault("TLS", f"{host}: {error.verify_message}", remedy)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            remedy = "correct the endpoint, start its server, or open the way to it (firewall, VPN)"
            yield fault("endpoint", f"{where}: {reason}", remedy)
        else:
            return
        raise Blocked

    def _connect(self, host: str, port: int, tls: ssl.SSLContext | None) -> Iterator[Finding]:
        began = time.monotonic()
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
        if host != address[0]:
            yield ok("DNS", f"{host} is {address[0]} ({milliseconds(time.monotonic() - began)})")
        began = time.monotonic()
        with socket.create_connection((host, port), self.quick.request_timeout) as plain:
            self.connect_seconds = time.monotonic() - began
            if tls is None:
                yield ok("TLS", "none: what is read and written is not encrypted")
                return
            with tls.wrap_socket(plain, server_hostname=host) as secured:
                result = str(secured.version())
                until = (secured.getpeercert() or {}).get("notAfter")
        days = CERTIFICATE_DAYS
        if until:
            days = int((ssl.cert_time_to_seconds(str(until)) - time.time()) / 86_400)
            result += f", certificate valid for {days} days"
        if days < CERTIFICATE_DAYS:
            yield warning("TLS", result, "renew the certificate")
        else:
            yield ok("TLS", result)

    def _ask(
        self, connection: Connection, where: str, context: ssl.SSLContext
    ) -> Iterator[Finding]:
        """One HEAD request of the bucket. Any status is an answer."""
        opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
        request = urllib.request.Request(connection.bucket_url, method="HEAD")
        sent = time.time()
        try:
            with opener.open(request, timeout=self.quick.request_timeout) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as error:
            headers = error.headers
        except urllib.error.URLError as error:
            raise error.reason if isinstance(error.reason, OSError) else error from None
        now = time.time()
        server = f", server {headers['Server']}" if headers["Server"] else ""
        yield ok("endpoint", f"{where} answers in {milliseconds(now - sent)}{server}")
        yield check_clock(headers["Date"], (sent + now) / 2)
        region = headers["x-amz-bucket-region"]
        if region and region != connection.region:
            self._change_option("client_kwargs", {"region_name": region})
            result = f"the bucket is in {region}, requests are signed for {connection.region}"
            remedy = f"client_kwargs = {{region_name = '{region}'}}"
            # Amazon refuses that, other servers may not
            is_fault = urlsplit(connection.endpoint).netloc.endswith(".amazonaws.com")
            yield Finding("region", "fault" if is_fault else "warning", result, remedy)
        elif connection.region:
            yield ok("region", connection.region)

    def check_data(self) -> Iterator[Finding]:
        """List what the URL names, and choose the object that the next checks read."""
        infos: Sequence[ObjectInfo] = ()
        refused: StorageError | None = None
        began = time.monotonic()
        prefix = self.key.removesuffix(".manifest.json").rstrip("/")
        if not self.url.startswith(("http://", "https://")):  # which have no listings
            try:
                infos = self.store.list(prefix, recursive=False)
                infos = infos or self.store.list(f"{prefix}/" if prefix else "", recursive=True)
            except StorageError as error:
                if error.transient:
                    raise
                refused = error
            else:
                seconds = time.monotonic() - began
                result = f"objects: {len(infos):,}, in {seconds:.2f} s"
                if seconds > 1:
                    remedy = "name datasets by the manifests that convert writes: nothing is listed"
                    yield warning("listing", result, remedy)
                else:
                    yield ok("listing", result)
        if not infos and prefix:
            for suffix in ("", *DATA_SUFFIXES):
                with suppress(ObjectNotFoundError, AccessDeniedError):
                    infos = [*infos, self.store.info(prefix + suffix)]
        readable = [info for info in infos if info.size]
        if readable and refused:
            remedy = "give the right to list, or name datasets by their manifests or prefixes"
            yield warning("listing", f"failed ({refused})", remedy)
        elif refused:
            name = "access" if isinstance(refused, AccessDeniedError) else "data"
            yield fault(name, str(refused))
        elif not infos and not prefix:
            self.is_empty = True
            yield ok("data", "the bucket is empty")
            return
        elif not readable:
            remedy = "name a dataset, or an object of some MiB; 'streammega convert' makes some"
            yield fault("data", f"{self.shown_url}: no object to read", remedy)
        if not readable:
            raise Blocked
        self.object = max(readable, key=lambda info: (info.key.endswith(DATA_SUFFIXES), info.size))

    def check_reading(self) -> Iterator[Finding]:
        """Whether ranges and versions of an object are what a loader needs."""
        assert self.object is not None
        self.object = info = self.store.info(self.object.key)
        span = (min(1, info.size - 1), min(info.size, 1025))
        self.store.read(info.key, [span])
        yield ok("ranges", f"{self.store.url(info.key)} is read by {self.store.transport}")
        if self.is_local:
            return
        remedy = "have the server send ETags: otherwise a run may mix replaced objects"
        if not info.etag or info.etag.startswith("modified "):
            what = "Last-Modified alone" if info.etag else "neither ETag nor Last-Modified"
            yield warning("ETags", f"answers have {what}", remedy)
            return
        try:
            self.store.read(info.key, [span], '"another"')
        except ObjectChangedError:
            yield ok("ETags", "a replaced object would be noticed")
        else:
            yield warning("ETags", "answers to range requests have no ETag", remedy)

    def check_bandwidth(self) -> Iterator[Finding]:
        """Latency and bandwidth by requests of several sizes, and whether the server refuses some."""
        assert self.object is not None
        size_limit = self.object.size
        sizes = dict.fromkeys(size for size, _ in REQUESTS if size <= size_limit) or [size_limit]
        for size in sizes:
            fastest = 0.0
            for at_once in [many for of_size, many in REQUESTS if of_size == size] or [1]:
                remaining = self.deadline - RESERVED_SECONDS - 1.0 - time.monotonic()
                seconds = min(MAX_ROW_SECONDS, remaining / 4)
                if seconds < 0.05:
                    break
                late = min(MAX_LATE_SECONDS, remaining / 4)
                rate = self._measure(self.object, size, at_once, seconds, late)
                self.rates.append(rate)
                if rate.bytes_per_second < WORTHWHILE * fastest or not rate.requests:
                    break  # more at once would only load the server
                fastest = max(fastest, rate.bytes_per_second)
        rates = [rate for rate in self.rates if rate.requests]
        failed = sum(rate.failed for rate in self.rates)
        if not rates:
            remedy = "look at the server's load and log; if it is only slow, give more --seconds"
            yield fault("bandwidth", "no request was answered in time", remedy)
            raise Blocked
        for rate in self.rates:
            if not rate.requests and not rate.refused:
                result = (
                    f"none of {rate.at_once} x {size_of(rate.bytes)} within {rate.seconds:.0f} s"
                )
                yield warning("answers", result, "look at the server, and proxies on the way")
        yield from self._check_throttling()
        if failed:
            remedy = "the loader repeats them; look at the server's log and the network"
            yield warning("errors", f"failed calls: {failed}", remedy)
        soonest = min(rates, key=lambda rate: rate.median_seconds)
        latency = soonest.median_seconds
        result = f"{milliseconds(latency)} for {size_of(soonest.bytes)}"
        if latency >= FAR_SECONDS and not self.is_local:
            remedy = "use a bucket near the machines, or cache_max_bytes where bytes are read again"
            if self.connect_seconds is not None and self.connect_seconds < latency / 4:
                result += f", while it connects in {milliseconds(self.connect_seconds)}"
                remedy = "it is near but answers late: look at its load; or set cache_max_bytes"
            yield warning("latency", result, remedy)
        else:
            yield ok("latency", result)
        if latency >= FAR_SECONDS / 5 and not self.is_local:
            yield from self._check_in_flight(rates)
        best = max(rates, key=lambda rate: rate.bytes_per_second)
        result = (
            f"{best.bytes_per_second / 1e6:,.0f} MB/s by {best.at_once} x {size_of(best.bytes)}, or "
            f"{best.bytes_per_second / 2e6:,.0f} M tokens/s of 16 bits"
        )
        if best.bytes_per_second < SLOW_BYTES_PER_SECOND:
            remedy = (
                "zstd shards (convert --format zst) are smaller; cache_max_bytes keeps what is read"
            )
            yield warning("bandwidth", result, remedy)
        else:
            yield ok("bandwidth", result)

    def _measure(
        self, info: ObjectInfo, size: int, at_once: int, seconds: float, late: float
    ) -> Rate:
        """Read random ranges, by threads that are left when their answers come later than `late`."""
        if self.is_local:
            forget_pages(info.key)
        threads = min(at_once, MAX_THREADS)
        began = time.monotonic()
        answers: list[tuple[float, int]] = []
        errors: list[StorageError] = []

        def read(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < began + seconds:
                starts = [rng.randrange(info.size - size + 1) for _ in range(at_once // threads)]
                sent = time.monotonic()
                try:
                    self.store.fetch(info.key, [(start, start + size) for start in starts])
                    answers.append((time.monotonic() - sent, len(starts)))
                except StorageError as error:
                    errors.append(error)
                    time.sleep(0.05)

        workers = [threading.Thread(target=read, args=(n,), daemon=True) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(max(0.0, began + seconds + late - time.monotonic()))
        elapsed = time.monotonic() - began
        times = [each for each, _ in answers] or [0.0]
        return Rate(
            bytes=size,
            at_once=at_once,
            requests=sum(count for _, count in answers),
            seconds=elapsed,
            median_seconds=statistics.median(times),
            slowest_seconds=max(times),
            refused=sum(error.throttled for error in errors),
            failed=sum(not error.throttled for error in errors),
        )

    def _check_throttling(self) -> Iterator[Finding]:
        refused = [rate for rate in self.rates if rate.refused]
        if not refused:
            if not self.is_local:
                yield ok("throttling", "no request was refused (429, 503)")
            return
        accepted = max((rate.at_once for rate in self.rates if not rate.refused), default=0)
        per_second = max(rate.requests / rate.seconds for rate in refused)
        result = f"requests were refused (429, 503); {per_second:,.0f} a second were answered"
        remedy = FEWER_REQUESTS
        if accepted > 1:
            self.changes["max_concurrent_requests"] = accepted
            remedy = f"max_concurrent_requests = {accepted}; {remedy}"
        yield warning("throttling", result, remedy, 1.5)

    def _check_in_flight(self, rates: Sequence[Rate]) -> Iterator[Finding]:
        """Whether more requests at once than the setting allows would be faster."""
        allowed = self.config.max_concurrent_requests
        # No loader has more bytes in flight; and of large requests few are enough.
        most_bytes = self.config.tuning.max_in_flight_bytes
        usable = [
            rate for rate in rates if rate.bytes < MiB and rate.bytes * rate.at_once <= most_bytes
        ]
        now = max(
            (rate.bytes_per_second for rate in usable if rate.at_once <= allowed), default=0.0
        )
        if not now:
            return
        best = max(usable, key=lambda rate: rate.bytes_per_second)
        if best.at_once > allowed and best.bytes_per_second >= WORTHWHILE * now:
            self.changes["max_concurrent_requests"] = best.at_once
            yield warning(
                "requests in flight",
                f"{now / 1e6:,.0f} MB/s with {allowed:,} at once, "
                f"{best.bytes_per_second / 1e6:,.0f} with {best.at_once:,}",
                f"max_concurrent_requests = {best.at_once}",
                best.bytes_per_second / now,
            )

    def check_writes(self) -> Iterator[Finding]:
        """Create, replace and delete one small object, each on a condition."""
        folder = self.key if self.is_local and os.path.isdir(self.key) else parent_url(self.key)
        name = f"streammega-doctor-{random.SystemRandom().getrandbits(64):x}"
        key = f"{folder}/{name}" if folder else name
        remedy = "let no two conversions write to one prefix at the same time"
        try:
            is_created = self.store.put(key, b"1", if_absent=True)
            is_broken = self.store.put(key, b"2", if_absent=True)
            if not self.is_local:
                is_broken |= self.store.put(key, b"3", if_match='"another"')
                is_created &= self.store.put(key, b"4", if_match=self.store.info(key).etag)
        except (AccessDeniedError, EndpointError):
            raise
        except StorageError as error:
            yield warning("conditional writes", f"refused ({error})", remedy)
            return
        finally:
            with suppress(StorageError):
                self.store.delete(key)
        if is_broken:
            yield warning("conditional writes", "the server ignores their conditions", remedy)
        elif not is_created:
            yield warning("conditional writes", "refused though their condition holds", remedy)
        else:
            yield ok("conditional writes", "conversions and checkpoints are written on conditions")

    def check_disks(self) -> Iterator[Finding]:
        """The disks of local data and of the cache."""
        if self.is_local:
            disk = file_system_of(self.key)
            how = "of another machine, read by pread" if disk.is_remote else "mapped"
            yield ok("data disk", f"{disk.mount} ({disk.kind}), {how}")
        try:
            folder = Path(self.config.cache_dir or default_cache_dir())
        except CacheError as error:
            findings = [fault("cache_dir", str(error))]
        else:
            is_chosen = self.config.cache_dir is not None or self.config.cache_max_bytes > 0
            findings = list(check_disk(folder, measures=is_chosen))
        if any(finding.status == "fault" for finding in findings):
            self.changes |= {"cache_dir": None, "cache_max_bytes": None}
        yield from findings

    def _change_option(self, name: str, value: Mapping[str, Any]) -> None:
        """Recommend a storage option, with the others of its mapping."""
        options = self.changes.setdefault("storage_options", {})
        options[name] = {**(self.config.storage_options.get(name) or {}), **value}

    def report(self) -> Report:
        """All findings, the worst first, and the settings that are recommended, without secrets."""
        findings = sorted(self.findings, key=lambda item: (STATUSES.index(item.status), -item.gain))
        rates = [
            rate._asdict() | {"bytes_per_second": rate.bytes_per_second} for rate in self.rates
        ]
        storage, hidden_options = recommended_storage(self.config, self.changes)
        return {
            "url": self.shown_url,
            "faults": sum(item.status == "fault" for item in findings),
            "warnings": sum(item.status == "warning" for item in findings),
            "checks": [item._asdict() for item in findings],
            "not_checked": self.not_checked,
            "requests": rates,
            "storage": storage,
            "hidden_options": hidden_options,
        }


def run_within(
    seconds: float, name: str, check: Callable[[], Iterator[Finding]]
) -> tuple[list[Finding], bool]:
    """The findings of a check, and whether those after it cannot be made."""
    findings: list[Finding] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            findings.extend(check())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        remedy = "look at the network and the server; name less data, or give more --seconds"
        return [*findings, fault(name, f"no end within {seconds:.0f} s", remedy)], True
    for error in errors:
        if isinstance(error, StorageError) and error.throttled:
            result = f"too many requests: the store refuses even single ones ({name}: {error})"
            remedy = "stop other jobs on this bucket or have its limit raised, and run doctor again"
            findings.append(fault("throttling", result, remedy))
        elif isinstance(error, StreammegaError):
            findings.append(fault(name, str(error)))
        elif isinstance(error, OSError):
            findings.append(fault(name, f"{error.filename or name}: {error.strerror or error}"))
        elif not isinstance(error, Blocked):
            raise error
    return findings, bool(errors)


def check_clock(date: str | None, now: float) -> Finding:
    """date: the header of an answer. now: this machine's time when it was made."""
    try:
        server = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return ok("clock", "the server does not say its time")
    ahead = now - server
    if abs(ahead) <= CLOCK_WARNING_SECONDS:
        return ok("clock", "as the server's, within a minute")
    result = f"{abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    remedy = "set it (timedatectl set-ntp true): signatures hold for 15 minutes"
    make = fault if abs(ahead) > CLOCK_FAULT_SECONDS else warning
    return make("clock", result, remedy)


def forget_pages(path: str) -> None:
    """Have the system drop a file's pages from memory, so that its disk is measured."""
    with suppress(OSError), open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def recommended_storage(
    config: StorageConfig, changes: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Settings that differ from the defaults, without secrets; and the options that are left out."""
    defaults = StorageConfig()
    settings: dict[str, Any] = {}
    for item in settings_of(StorageConfig):
        value = getattr(config, item.name)
        if item.name != "storage_options" and value != getattr(defaults, item.name):
            settings[item.name] = str(value) if isinstance(value, Path) else value
    settings |= {name: value for name, value in changes.items() if name != "storage_options"}
    # None: settings that are a fault, as a cache_dir that cannot be written
    settings = {name: value for name, value in settings.items() if value is not None}
    options = {**config.storage_options, **changes.get("storage_options", {})}
    public = _public(options)
    if public:
        settings["storage_options"] = public
    return settings, sorted(set(options) - set(public))


def _public(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are no secrets. A URL with an @ may hold a password."""
    public: dict[str, Any] = {}
    for name, value in options.items():
        if PUBLIC_OPTIONS.fullmatch(name) and "@" not in str(value):
            public[name] = _public(value) if isinstance(value, Mapping) else value
    return public


def milliseconds(seconds: float) -> str:
    """0.0123 is "12.3 ms"."""
    return f"{1e3 * seconds:,.1f} ms"


def size_of(count: int) -> str:
    """1 << 20 is "1 MiB"."""
    for unit, factor in (("MiB", MiB), ("KiB", KiB)):
        if count >= factor:
            return f"{count / factor:,.0f} {unit}"
    return f"{count} bytes"
