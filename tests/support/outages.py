"""What fails for a while under a run: a server, its name, its credentials, the clock, a disk."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

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
    mounts = f"mount --bind {shlex.quote(str(hosts))} /etc/hosts"
    mounts += f" && mount -t tmpfs -o size=64m none {shlex.quote(str(disk))}"
    shell = ["unshare", "-rm", "sh", "-c"]
    try:
        subprocess.run([*shell, mounts], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [*shell, f'{mounts} && exec "$@"', "sh", *command]
