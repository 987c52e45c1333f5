#!/usr/bin/env python3
"""An S3-style object server for benches and tests: shaped (latency, bandwidth per connection) and,
on request, faulty.

Serves the files under a folder as /bucket/key: GET (with ranges), HEAD and ListObjectsV2, without
credentials. One thread, one process: an epoll loop that sends files by sendfile, so that on
loopback it costs the machine little more than nginx does.

`POST /-/behaviour` with a JSON object sets the fields of `Behaviour`; `GET /-/counts` returns counts
of what was served, and `GET /-/clients` requests by address; `GET /-/credentials` answers as the credentials service of a container.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import dataclasses
import functools
import heapq
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

SHAPED_CHUNK = 128 * 1024
SEND_CHUNK = 1 << 20
LINK_BURST = 0.01
"""Seconds of a shared link that are made up for, as timers are late."""
MAX_FILES = 8192
"""Files that are kept open: a process may open so many."""
LISTED_AT_ONCE = 1000
"""Objects and folders of one answer to a listing, as in S3."""
CLOCK = 100_000_000
"""Nanoseconds within which the clock of a file system may tell two changes the same time."""
REASONS = {200: "OK", 206: "Partial Content", 404: "Not Found", 403: "Forbidden", 412: "Precondition Failed",
           416: "Range Not Satisfiable", 503: "Slow Down", 405: "Method Not Allowed"}  # fmt: skip


@dataclasses.dataclass
class Behaviour:
    """How the server answers.

    Shares are of GET requests of objects, drawn by a seeded generator.
    """

    latency: float = 0.0
    """Seconds before the first byte of a body."""
    latency_of_all: bool = False
    """Whether answers to HEAD requests and listings come as late as bodies."""
    bandwidth: float = 0.0
    """Bytes per second of one connection; 0: as fast as it goes."""
    link: float = 0.0
    """Bytes per second of all connections together; 0: as fast as it goes."""
    answers_at_once: int = 0
    """Bodies that are sent at once, whatever the connections; others wait for their turn. 0: all.
    """
    rate: float = 0.0
    """GET requests a second that are answered; those beyond get 503. 0: all."""
    burst: int = 1
    """As many at once, after a time without any."""
    small_bytes: int = 0
    """Bodies of fewer bytes come `small_latency` later: servers that send them in two packets wait
    for an acknowledgement that the client delays.
    """
    small_latency: float = 0.04
    slow_share: float = 0.0
    """Answers whose first byte comes `slow_factor` times as late (after a second at least, if there
    is no latency).
    """
    slow_factor: float = 20.0
    error_share: float = 0.0
    """Answers that are 503."""
    error_burst: int = 1
    """How many follow each other."""
    reset_share: float = 0.0
    """Connections reset in the middle of a body."""
    truncate_share: float = 0.0
    """Bodies that end early: half of them with the connection, half with a smaller
    Content-Length.
    """
    overlong_share: float = 0.0
    """Bodies with more bytes than were asked for."""
    stall_share: float = 0.0
    """Bodies that stop in the middle, the connection open."""
    status: int = 0
    """Answer every object request with this status."""
    code: str = ""
    """The code of that error."""
    token: str = ""
    """The session token that requests must have; others have expired. Empty: none."""
    issued: str = ""
    """The session token that `/-/credentials` hands out."""
    plain_200: bool = False
    """Answer ranges with 200 and a Content-Range, as `rclone serve s3` does."""
    seed: int = 0


class Faults:
    """Draws the faults that a behaviour asks for, by a seeded generator."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.random = random.Random(behaviour.seed)
        self.burst = 0
        """503s that follow the last one at once."""

    def draw(self) -> tuple[str | None, float]:
        """(fault of the next answer, seconds before its first byte)."""
        behaviour = self.behaviour
        fault = self._next()
        if fault != "slow":
            return fault, behaviour.latency
        return fault, behaviour.slow_factor * behaviour.latency if behaviour.latency else 1.0

    def _next(self) -> str | None:
        behaviour = self.behaviour
        draw = self.random.random()
        shares = (("error", behaviour.error_share), ("reset", behaviour.reset_share), ("truncate", behaviour.truncate_share / 2),
                  ("short", behaviour.truncate_share / 2), ("overlong", behaviour.overlong_share),
                  ("stall", behaviour.stall_share), ("slow", behaviour.slow_share))  # fmt: skip
        if self.burst > 0:
            self.burst -= 1
            return "error"
        for name, share in shares:
            if draw < share:
                if name == "error":
                    self.burst = behaviour.error_burst - 1
                return name
            draw -= share
        return None


class Connection:
    """One client: bytes received, and the answer on its way."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock = sock
        self.address = address
        self.received = b""
        self.head = b""
        self.file = -1
        self.offset = 0
        self.remaining = 0
        self.fault: str | None = None
        self.fault_at = 0
        self.delay = 0.0
        """Seconds before its first byte, from its turn on."""
        self.busy = False
        self.has_link = False
        """Whether the next piece has its place on the shared link."""


@dataclasses.dataclass
class Tree:
    """The keys below a folder, sorted, and when each of the folders there was changed last."""

    keys: list[str]
    changes: dict[str, int]
    looked_at: int

    @classmethod
    def of(cls, top: str, root: str) -> Tree:
        """The tree below `top`. Keys are without `root`."""
        looked_at = time.time_ns()
        keys = []
        changes = {}
        for folder, _, names in os.walk(top):
            changes[folder] = os.stat(folder).st_mtime_ns
            keys += [os.path.join(folder, name).removeprefix(root) for name in names]
        return cls(sorted(keys), changes, looked_at)

    def is_valid(self) -> bool:
        """Whether no folder was changed since, nor so shortly before that its clock stood still."""
        for folder, changed in self.changes.items():
            try:
                if os.stat(folder).st_mtime_ns != changed or changed + CLOCK > self.looked_at:
                    return False
            except FileNotFoundError:
                return False
        return bool(self.changes)


class Server:
    """Accepts, parses, answers; timers hold back what is shaped."""

    def __init__(self, root: Path, port: int, host: str) -> None:
        self.root, self.behaviour = root, Behaviour()
        self.faults = Faults(self.behaviour)
        self.counts = {"requests": 0, "bytes": 0, "faults": 0, "lists": 0, "listed": 0}
        self.clients: Counter[str] = Counter()
        """Requests and listings by the address that sent them."""
        self.files: dict[str, tuple[int, os.stat_result]] = {}
        self.trees: dict[str, Tree] = {}
        """The trees of folders that were listed."""
        self.listener = socket.create_server((host, port), backlog=1024)
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self.poll = select.epoll()
        self.poll.register(self.listener.fileno(), select.EPOLLIN)
        self.connections: dict[int, Connection] = {}
        self.timers: list[tuple[float, int, Connection]] = []
        self.number = 0
        self.link_at = 0.0
        self.sending: set[Connection] = set()
        """Those whose bodies are sent, where there is a limit."""
        self.turns: deque[Connection] = deque()
        self.tokens = 0.0
        """Requests that the rate has room for."""
        self.tokens_at = 0.0

    def serve(self) -> None:
        while True:
            timeout = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else -1
            for fd, _ in self.poll.poll(timeout):
                if fd == self.listener.fileno():
                    self.accept()
                elif fd in self.connections:
                    self.ready(self.connections[fd])
            now = time.monotonic()
            while self.timers and self.timers[0][0] <= now:
                connection = heapq.heappop(self.timers)[2]
                if connection.sock.fileno() >= 0:
                    self.send(connection)

    def accept(self) -> None:
        while True:
            try:
                sock, (address, _) = self.listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections[sock.fileno()] = Connection(sock, address)
            self.poll.register(sock.fileno(), select.EPOLLIN)

    def close(self, connection: Connection, *, reset: bool = False) -> None:
        fd = connection.sock.fileno()
        if fd < 0:
            return
        if reset:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.poll.unregister(fd)
        del self.connections[fd]
        connection.sock.close()
        self.next_turn(connection)

    def ready(self, connection: Connection) -> None:
        if connection.busy:
            return self.send(connection)
        try:
            data = connection.sock.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            return self.close(connection)
        connection.received += data
        head, end, rest = connection.received.partition(b"\r\n\r\n")
        if end:
            self.request(connection, head, rest)
        return None

    def request(self, connection: Connection, head: bytes, rest: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ", 2)
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:])
        }
        length = int(headers.get("content-length", 0))
        if len(rest) < length:
            return  # the body of a control request is still coming
        connection.received = rest[length:]
        connection.busy = True
        path, _, query = target.partition("?")
        path = urllib.parse.unquote(path)
        if path == "/-/behaviour":
            self.behaviour = Behaviour(**json.loads(rest[:length]))
            self.faults = Faults(self.behaviour)
            self.tokens = self.behaviour.burst
            self.tokens_at = time.monotonic()
            return self.answer(connection, 200, b"{}", method)
        if path == "/-/counts":
            return self.answer(connection, 200, json.dumps(self.counts).encode(), method)
        if path == "/-/clients":
            return self.answer(connection, 200, json.dumps(self.clients).encode(), method)
        if path == "/-/credentials":
            fields = {
                "AccessKeyId": "AKIAEXAMPLE",
                "SecretAccessKey": "never-shown",
                "Token": self.behaviour.issued,
            }
            fields["Expiration"] = time.strftime(
                "%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600)
            )
            return self.answer(connection, 200, json.dumps(fields).encode(), method)
        if method not in ("GET", "HEAD"):
            return self.answer(connection, 405, b"", method)
        self.clients[connection.address] += 1
        bucket, _, key = path[1:].partition("/")
        if not key and "list-type=2" in query:
            return self.list(connection, bucket, urllib.parse.parse_qs(query), method)
        return self.object(connection, path[1:], headers, method)

    def keys_of(self, bucket: str, prefix: str) -> list[str]:
        """The keys of a bucket that may begin with a prefix, sorted: looked up again when one of
        their folders has changed.
        """
        top = os.path.join(self.root, bucket, os.path.dirname(prefix))
        known = self.trees.get(top)
        if known is None or not known.is_valid():
            known = self.trees[top] = Tree.of(top, f"{self.root}/{bucket}/")
        return known.keys

    def list(
        self, connection: Connection, bucket: str, query: dict[str, list[str]], method: str
    ) -> None:
        prefix = query.get("prefix", [""])[0]
        top = self.root / bucket
        delimiter = query.get("delimiter", [""])[0]
        items: list[str] = []
        common: set[str] = set()
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        last = ""
        keys = self.keys_of(bucket, prefix)
        begin = bisect.bisect_left(keys, max(prefix, after))
        end = bisect.bisect_left(keys, prefix + chr(sys.maxunicode))
        for key in keys[begin:end]:
            if key == after or (after.endswith("/") and key.startswith(after)):
                continue
            if len(items) + len(common) == LISTED_AT_ONCE:
                break
            last = key
            if delimiter and delimiter in key[len(prefix) :]:
                last = prefix + key[len(prefix) :].split(delimiter)[0] + delimiter
                common.add(last)
                continue
            stat = os.stat(f"{top}/{key}")
            items.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{stat.st_size}</Size><ETag>&quot;{etag(stat)}&quot;</ETag>"
                f"<LastModified>{formatted('%Y-%m-%dT%H:%M:%S.000Z', stat)}</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            )
        else:
            last = ""  # this page is the last one
        self.counts["lists"] += 1
        self.counts["listed"] += len(items) + len(common)
        folders = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(common)
        )
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{escape(last)}</NextContinuationToken>"
        body = (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(items) + len(common)}</KeyCount>"
            f"<MaxKeys>{LISTED_AT_ONCE}</MaxKeys>{more if last else '<IsTruncated>false</IsTruncated>'}"
            f"{''.join(items)}{folders}</ListBucketResult>"
        )
        self.answer(connection, 200, body.encode(), method)

    def object(
        self, connection: Connection, name: str, headers: dict[str, str], method: str
    ) -> None:
        behaviour = self.behaviour
        self.counts["requests"] += 1
        if behaviour.status:
            return self.refuse(connection, behaviour.status, behaviour.code, method)
        if behaviour.token and headers.get("x-amz-security-token") != behaviour.token:
            return self.refuse(connection, 403, "ExpiredToken", method)
        try:
            fd, stat = self.open(name)
        except OSError:
            return self.refuse(connection, 404, "NoSuchKey", method)
        if headers.get("if-match", f'"{etag(stat)}"').strip('"') not in (etag(stat), "*"):
            return self.refuse(connection, 412, "PreconditionFailed", method)
        start = 0
        stop = stat.st_size
        status = 200
        written = formatted("%a, %d %b %Y %H:%M:%S GMT", stat)
        extra = f'ETag: "{etag(stat)}"\r\nLast-Modified: {written}\r\nAccept-Ranges: bytes\r\n'
        if "range" in headers:
            low, _, high = headers["range"].removeprefix("bytes=").partition("-")
            start = int(low) if low else stat.st_size - int(high)
            stop = min(int(high) + 1, stat.st_size) if low and high else stat.st_size
            if start >= stat.st_size:
                return self.refuse(connection, 416, "InvalidRange", method)
            status = 200 if behaviour.plain_200 else 206
            extra += f"Content-Range: bytes {start}-{stop - 1}/{stat.st_size}\r\n"
        if method == "HEAD":
            return self.begin(connection, status, extra, stop - start, self.delay_of_small())
        if not self.within_rate():
            self.counts["faults"] += 1
            return self.refuse(connection, 503, "SlowDown", method)
        fault, delay = self.faults.draw()
        if stop - start < behaviour.small_bytes:
            delay += behaviour.small_latency
        self.counts["faults"] += fault is not None
        length = stop - start
        if fault == "error":
            return self.refuse(connection, 503, "SlowDown", method)
        if fault == "short":
            length = max(1, length // 2)
        if fault == "overlong":
            length = min(length + 64, stat.st_size - start)
        connection.fault = fault
        connection.fault_at = length - length // 2
        return self.begin(connection, status, extra, length, delay, file=fd, start=start)

    def within_rate(self) -> bool:
        """Whether one more request is answered now."""
        behaviour = self.behaviour
        if not behaviour.rate:
            return True
        now = time.monotonic()
        earned = (now - self.tokens_at) * behaviour.rate
        self.tokens = min(behaviour.burst, self.tokens + earned)
        self.tokens_at = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True

    def open(self, name: str) -> tuple[int, os.stat_result]:
        """Kept open while the file of that name stays the same."""
        path = (self.root / name).resolve()
        if not path.is_relative_to(self.root) or not path.is_file():
            raise FileNotFoundError(name)
        stat = path.stat()
        known = self.files.get(name)
        if known is None or etag(known[1]) != etag(stat):
            if len(self.files) >= MAX_FILES:
                self.close_unused()
            self.files[name] = known = (os.open(path, os.O_RDONLY), stat)
        return known

    def close_unused(self) -> None:
        """Close the files that no answer is being sent of: a process may open so many."""
        used = {connection.file for connection in self.connections.values()}
        for name, (fd, _) in list(self.files.items()):
            if fd not in used:
                os.close(fd)
                del self.files[name]

    def answer(self, connection: Connection, status: int, body: bytes, method: str) -> None:
        kind = "Content-Type: application/xml\r\n"
        rest = b"" if method == "HEAD" else body
        self.begin(connection, status, kind, len(body), self.delay_of_small(), body=rest)

    def refuse(self, connection: Connection, status: int, code: str, method: str) -> None:
        """Answer with an error as S3 names it."""
        body = f"<Error><Code>{code}</Code></Error>".encode()
        self.answer(connection, status, body, method)

    def delay_of_small(self) -> float:
        """Seconds before an answer that is not the body of an object."""
        return self.behaviour.latency if self.behaviour.latency_of_all else 0.0

    def begin(
        self,
        connection: Connection,
        status: int,
        extra: str,
        length: int,
        delay: float,
        *,
        body: bytes = b"",
        file: int = -1,
        start: int = 0,
    ) -> None:
        """Answer with a body in memory, or with so many bytes of a file."""
        head = f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}\r\nContent-Length: {length}\r\n{extra}\r\n"
        connection.head = head.encode() + body
        connection.file = file
        connection.offset = start
        connection.remaining = length if file >= 0 else 0
        connection.delay = delay
        if file >= 0 and self.behaviour.answers_at_once:
            if len(self.sending) >= self.behaviour.answers_at_once:
                self.poll.modify(connection.sock.fileno(), 0)
                self.turns.append(connection)
                return
            self.sending.add(connection)
        if delay > 0:
            self.later(connection, delay)
        else:
            self.send(connection)

    def later(self, connection: Connection, delay: float) -> None:
        self.poll.modify(connection.sock.fileno(), 0)  # nothing is wanted of the socket until then
        self.number += 1
        heapq.heappush(self.timers, (time.monotonic() + delay, self.number, connection))

    def send(self, connection: Connection) -> None:
        try:
            if connection.head:
                # a few hundred bytes, or those of a listing, into an empty socket buffer
                connection.sock.sendall(connection.head)
                connection.head = b""
            while connection.remaining > 0:
                is_broken = connection.fault in ("reset", "truncate", "stall")
                if is_broken and connection.remaining <= connection.fault_at:
                    return self.break_off(connection)
                is_shaped = self.behaviour.bandwidth or self.behaviour.link
                size = min(connection.remaining, SHAPED_CHUNK if is_shaped else SEND_CHUNK)
                if self.behaviour.bandwidth:
                    # Ten pieces a second at least, so that a slow drip is no stall.
                    size = min(size, max(1, int(self.behaviour.bandwidth / 10)))
                if self.behaviour.link and not connection.has_link:
                    now = time.monotonic()
                    place = max(self.link_at, now - LINK_BURST)
                    self.link_at = place + size / self.behaviour.link
                    connection.has_link = True
                    if place > now:
                        return self.later(connection, place - now)
                sent = os.sendfile(
                    connection.sock.fileno(), connection.file, connection.offset, size
                )
                connection.offset += sent
                connection.remaining -= sent
                connection.has_link = False
                self.counts["bytes"] += sent
                if self.behaviour.bandwidth and connection.remaining:
                    return self.later(connection, sent / self.behaviour.bandwidth)
        except BlockingIOError:
            return self.poll.modify(connection.sock.fileno(), select.EPOLLOUT)
        except OSError:
            return self.close(connection)
        connection.busy = False
        connection.fault = None
        self.next_turn(connection)
        self.poll.modify(connection.sock.fileno(), select.EPOLLIN)
        return None

    def next_turn(self, ended: Connection) -> None:
        """A body was sent, or its connection is gone: the next one has its turn."""
        self.sending.discard(ended)
        while self.turns and len(self.sending) < max(1, self.behaviour.answers_at_once):
            waiting = self.turns.popleft()
            if waiting.sock.fileno() < 0:
                continue
            self.sending.add(waiting)
            self.later(waiting, waiting.delay)

    def break_off(self, connection: Connection) -> None:
        if connection.fault == "stall":
            return self.later(connection, 3600.0)
        return self.close(connection, reset=connection.fault == "reset")


def etag(stat: os.stat_result) -> str:
    return f"{stat.st_size:x}-{stat.st_mtime_ns:x}"


def formatted(form: str, stat: os.stat_result) -> str:
    """When a file was written, in whole seconds."""
    return _formatted(form, int(stat.st_mtime))


@functools.lru_cache(maxsize=4096)
def _formatted(form: str, seconds: int) -> str:
    return time.strftime(form, time.gmtime(seconds))


# --- the side of the client ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Running:
    """A server in another process. root: the folder of its buckets."""

    process: subprocess.Popen[str]
    port: int
    root: Path
    host: str = "127.0.0.1"

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """For StorageConfig: anonymous requests to this endpoint."""
        return {"anon": True, "endpoint_url": self.endpoint}

    def behave(self, **fields: Any) -> None:
        """Set the server's behaviour."""
        data = json.dumps(dataclasses.asdict(Behaviour(**fields))).encode()
        urllib.request.urlopen(
            urllib.request.Request(f"{self.endpoint}/-/behaviour", data), timeout=10
        ).read()

    def counts(self) -> dict[str, int]:
        """Requests and bytes of objects served so far, faults made, listings answered and what they
        listed.
        """
        return self._get("counts")

    def clients(self) -> dict[str, int]:
        """Requests and listings answered so far, by the address of the client."""
        return self._get("clients")

    def _get(self, name: str) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.endpoint}/-/{name}", timeout=10) as answer:
            counts: dict[str, int] = json.load(answer)
            return counts


def start(root: Path, port: int = 0, host: str = "127.0.0.1") -> Running:
    """Start a server of a folder in another process; `process.kill()` ends it."""
    program = str(Path(__file__).resolve())
    process = subprocess.Popen(
        [sys.executable, program, str(root), "--port", str(port), "--host", host],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the object server ended at its start")
    return Running(process, int(line), root, host)


@contextlib.contextmanager
def running(root: Path, host: str = "127.0.0.1", **behaviour: Any) -> Iterator[Running]:
    """A server of a folder, for the time of a `with` block."""
    server = start(root, host=host)
    try:
        if behaviour:
            server.behave(**behaviour)
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    server = Server(arguments.root.resolve(), arguments.port, arguments.host)
    print(server.port, flush=True)
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
