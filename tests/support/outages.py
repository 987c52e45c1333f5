"""What fails for a while under a run: a server, its name, its credentials, the clock, a disk.

`Outages` fails under readers, `WriteOutages` under what writes.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.support.servers import HttpServer
from tools.bench.object_server import Running, start

OUTAGES = (
    "503",
    "refused",
    "hung",
    "drip",
    "credentials expired",
    "clock jumped",
    "name not found",
    "one of two addresses hung",
    "disk full",
)
NEED_NAMESPACE = OUTAGES[6:]
"""They need a user namespace: see `in_namespace`."""
HOST = "soak.test"
DAY = 86_400
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000


_time = time.time


class Outages:
    """What fails, and the server that it fails on."""

    def __init__(self, server: Running, hosts: Path | None, cache: Path) -> None:
        self.server = server
        self.hosts = hosts
        self.cache = cache
        self.kinds = [kind for kind in OUTAGES if hosts or kind not in NEED_NAMESPACE]
        self._deaf: socket.socket | None = None
        server.behave(token="first", issued="first")

    def storage_options(self) -> dict[str, Any]:
        """How to reach the server. Credentials come from the environment, which this sets."""
        os.environ["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = f"{self.server.endpoint}/-/credentials"
        host = HOST if self.hosts else "127.0.0.1"
        # s3fs remembers addresses for ten seconds otherwise.
        connector = {"connector_args": {"use_dns_cache": False}}
        return {"endpoint_url": f"http://{host}:{self.server.port}", "config_kwargs": connector}

    def begin(self, kind: str, seconds: float = 120) -> None:
        """Let this fail, for so many seconds."""
        if kind == "503":
            self.server.behave(status=503, code="SlowDown")
        elif kind == "refused":
            self._end_server()
        elif kind == "hung":
            self.server.process.send_signal(signal.SIGSTOP)
        elif kind == "drip":
            self.server.behave(bandwidth=1 if seconds > 10 else 10)
        elif kind == "credentials expired":
            # Their source knows no others yet.
            self.server.behave(token="second", issued="first")
        elif kind == "clock jumped":
            self.server.behave(status=403, code="RequestTimeTooSkewed")
            time.time = lambda: _time() + DAY
        elif kind == "name not found":
            self._set_hosts([])
            self._restart()  # connections that are open need no name
        elif kind == "one of two addresses hung":
            self._deaf = socket.create_server(("127.0.0.2", self.server.port), backlog=1024)
            self._set_hosts(["127.0.0.2", "127.0.0.1"])
            self._restart()
        elif kind == "disk full":
            fill(self.cache / "other-data")

    def end(self, kind: str) -> None:
        """Let it work again."""
        time.time = _time
        if kind == "credentials expired":
            self.server.behave(token="second", issued="second")
        elif kind in ("503", "drip", "clock jumped"):
            self.server.behave()
        elif kind == "refused":
            self._start_server()
        elif kind == "hung":
            self.server.process.send_signal(signal.SIGCONT)
        elif kind == "disk full":
            (self.cache / "other-data").unlink()
        else:
            self._set_hosts(["127.0.0.1"])
            if self._deaf is not None:
                self._deaf.close()
                self._deaf = None

    def _set_hosts(self, addresses: list[str]) -> None:
        assert self.hosts is not None
        # In place: the file is mounted over /etc/hosts.
        self.hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {HOST}\n" for a in addresses))

    def _end_server(self) -> None:
        self.server.process.kill()
        self.server.process.wait()

    def _start_server(self) -> None:
        self.server.process = start(self.server.root, self.server.port).process

    def _restart(self) -> None:
        self._end_server()
        self._start_server()


WRITE_OUTAGES = (
    "503",
    "refused",
    "hung",
    "one of two servers fails",
    "credentials expired",
    "clock jumped",
    "name not found",
    "disk full",
)
_REFUSALS = {
    "503": (503, "SlowDown"),
    "one of two servers fails": (500, "InternalError"),
    "credentials expired": (400, "ExpiredToken"),
    "clock jumped": (403, "RequestTimeTooSkewed"),
}


class WriteOutages:
    """A proxy in front of an S3 server. `kind` begins to fail when the first large piece of data is
    sent, for so many seconds.
    """

    def __init__(self, kind: str, target: str, seconds: float, hosts: Path) -> None:
        self.kind = kind
        self.target = target.removeprefix("http://")
        self.hosts = hosts
        self.began = 0.0
        self.is_failing = False
        self.token = "first"
        self.timer = threading.Timer(seconds, lambda: self.end())
        self.timer.daemon = True
        self._count = 0
        self._lock = threading.Lock()
        self._server = self._serve(0)
        self.port: int = self._server.server_address[1]
        os.environ["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = (
            f"http://127.0.0.1:{self.port}/-/credentials"
        )

    def storage_options(self) -> dict[str, Any]:
        """How to reach the server. Credentials come from the environment, which this sets."""
        host = HOST if self.kind == "name not found" else "127.0.0.1"
        connector = {"connector_args": {"use_dns_cache": False}}
        return {"endpoint_url": f"http://{host}:{self.port}", "config_kwargs": connector}

    def note_data(self) -> None:
        """A large piece of data is on its way: the first one begins the outage."""
        with self._lock:
            if self.began:
                return
            self.began = time.monotonic()
            self.is_failing = True
        self.timer.start()
        if self.kind == "refused":
            threading.Thread(target=self._stop).start()
        elif self.kind == "name not found":
            self.hosts.write_text("127.0.0.1 localhost\n")

    def end(self) -> None:
        """Let all work again."""
        self.is_failing = False
        self.token = "second" if self.kind == "credentials expired" else "first"
        if self.kind == "refused":
            self._server = self._serve(self.port)
        elif self.kind == "name not found":
            self.hosts.write_text(f"127.0.0.1 localhost\n127.0.0.1 {HOST}\n")

    def _stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, port: int) -> HttpServer:
        server = HttpServer(("127.0.0.1", port), _proxy_of(self))
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def fails_now(self, token: str) -> tuple[int, str] | None:
        """How a request is refused, if it is."""
        if self.kind == "credentials expired" and self.began:
            return None if token == "second" else _REFUSALS[self.kind]
        if not self.is_failing:
            return None
        if self.kind == "one of two servers fails":
            self._count += 1
            return _REFUSALS[self.kind] if self._count % 2 else None
        return _REFUSALS.get(self.kind)


def _proxy_of(outages: WriteOutages) -> type[BaseHTTPRequestHandler]:
    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            if self.path == "/-/credentials":
                known = {"AccessKeyId": "AKIAEXAMPLE", "SecretAccessKey": "never-shown"}
                known |= {"Token": outages.token, "Expiration": "2100-01-01T00:00:00Z"}
                return self._send(200, json.dumps(known).encode(), {})
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if len(data) >= 1 << 20:
                outages.note_data()
            while outages.kind == "hung" and outages.is_failing:
                time.sleep(0.05)
            if outages.kind in ("refused", "name not found") and outages.is_failing:
                self.close_connection = True  # one that was open before
                return None
            refusal = outages.fails_now(self.headers.get("x-amz-security-token", ""))
            if refusal:
                status, code = refusal
                body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
                return self._send(status, body.encode(), {"Content-Type": "application/xml"})
            connection = http.client.HTTPConnection(outages.target, timeout=60)
            kept = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            connection.request(self.command, self.path, data, kept)
            answer = connection.getresponse()
            body_of_answer = answer.read()
            headers = dict(answer.getheaders())
            connection.close()
            return self._send(answer.status, body_of_answer, headers)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            left_out = ("transfer-encoding", "connection", "server", "date")
            kept = {name: value for name, value in headers.items() if name.lower() not in left_out}
            if self.command != "HEAD":
                kept = {n: v for n, v in kept.items() if n.lower() != "content-length"}
                kept["Content-Length"] = str(len(body))
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                for name, value in kept.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Proxy


def fill(path: Path) -> None:
    """A file that takes all of the disk."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(64 << 10))
        except OSError:
            pass


def in_namespace(hosts: Path, disk: Path, command: list[str]) -> list[str]:
    """A command that runs `command` with `hosts` as its /etc/hosts, and a small disk at a folder.

    Empty where this machine has no user namespaces.
    """
    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.1 {HOST}\n")
    mounts = _mounts(hosts, disk)
    shell = ["unshare", "-rm", "sh", "-c"]
    try:
        subprocess.run([*shell, mounts], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [*shell, f'{mounts} && exec "$@"', "sh", *command]


def enter_namespace(hosts: Path, disk: Path) -> None:
    """The same for this process, which must have one thread, where `in_namespace` works."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"0 {user} 1")
    (own / "gid_map").write_text(f"0 {group} 1")
    mounts = f"mount --make-rprivate / && {_mounts(hosts, disk)}"
    subprocess.run(["sh", "-c", mounts], check=True)


def _mounts(hosts: Path, disk: Path) -> str:
    """What a shell does in a namespace."""
    mounts = f"mount --bind {shlex.quote(str(hosts))} /etc/hosts"
    return f"{mounts} && mount -t tmpfs -o size=64m none {shlex.quote(str(disk))}"
