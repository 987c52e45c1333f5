#!/usr/bin/env python3
"""An S3 server on this machine for whom a bucket is missing: it lasts as long as a shell, or a command.

make s3                                       a shell with the server
python tools/s3_server.py -- bash program.sh  a command with it

Within it the variables of the AWS command line name the server and a bucket that is there already.
Objects are kept in memory, large ones in files without a name: all of it ends with the shell.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import psutil

HOST = "127.0.0.1"
BUCKET = "bucket"
END_WITHIN = 30.0
"""Seconds that a command has for its end, as torchrun gives its ranks."""


class S3Server:
    """moto's S3 server in a thread of this process, which it ends with. port: 0 for a free one.

    Raises OSError on entry where the port is in use.
    """

    def __init__(self, port: int = 0) -> None:
        self._port = port

    def __enter__(self) -> S3Server:
        import logging

        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request otherwise

        socket.create_server((HOST, self._port)).close()  # moto would wait for ever
        self._server = ThreadedMotoServer(ip_address=HOST, port=self._port, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def environment(self) -> dict[str, str]:
        """The variables by which S3 clients find the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(request).close()


def main() -> int:
    """Run the shell or the command, and return its exit code."""
    arguments = parse_arguments()
    # As an exception: what was started is ended on the way out.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(S3Server(arguments.port))
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            return fail(f"port {arguments.port}: {reason}: name another --port, or none")
        server.make_bucket(BUCKET)
        if not arguments.command:
            print(banner(server), file=sys.stderr, flush=True)
        command = arguments.command or [os.environ.get("SHELL") or "/bin/sh"]
        # A shell at its prompt ignores SIGTERM, and goes with its terminal.
        end_by = signal.SIGTERM if arguments.command else signal.SIGHUP
        try:
            code = run_within(command, user_environment(server), end_by)
        except OSError as error:
            return fail(f"{command[0]}: {error.strerror}")
    # A shell's code is that of its last command, which its user has seen: `make s3` calls it no error.
    return 0 if not arguments.command and sys.stdin.isatty() else code


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0, help="of the server (default: a free one)")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="what runs with the server (default: your shell)"
    )
    arguments = parser.parse_args()
    if not 0 <= arguments.port < 1 << 16:
        parser.error("--port must be 0 to 65535")
    if arguments.command[:1] == ["--"]:
        del arguments.command[0]
    return arguments


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def banner(server: S3Server) -> str:
    exports = " ".join(f"{name}={value}" for name, value in server.environment().items())
    return f"""\
s3://{BUCKET} is at {server.endpoint}, empty; `exit` ends the server and removes its objects.
Another terminal finds it after
    export {exports}"""


def user_environment(server: S3Server) -> dict[str, str]:
    """The user's variables, with `streammega` and `python` of this installation, and no other account,
    endpoint or proxy.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    direct = {
        name: ",".join(filter(None, [kept.get(name), HOST])) for name in ("NO_PROXY", "no_proxy")
    }
    files = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), os.devnull)
    return kept | server.environment() | files | direct | {"PATH": path}


def run_within(command: list[str], environment: dict[str, str], end_by: signal.Signals) -> int:
    """Run a command to its end. Its exit code is 128 and the signal's number where a signal ended it.

    If this process is to end before, the command gets the signal `end_by`. After a while, or at a second
    SIGTERM, it is killed with all of its processes.
    """
    process = subprocess.Popen(command, env=environment)
    # A terminal sends Ctrl-C to the command as well: what it means is for the command to say.
    signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = process.wait()
    finally:
        family = psutil.Process().children(recursive=True)
        try:
            process.send_signal(end_by)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_WITHIN)
        finally:
            kill(family)
    return code if code >= 0 else 128 - code


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to those that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
