"""The S3 server of `make s3`: it lasts as long as its shell or its command."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

TOOL = Path(__file__).parents[2] / "tools" / "s3_server.py"
ON_A_TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""
"""Runs a command on a terminal of its own, where it types what comes from stdin."""
PUT = """
import os, urllib.request as http
http.urlopen(http.Request(os.environ["AWS_ENDPOINT_URL"] + "/bucket/large", bytes(20_000_000), method="PUT"))
"""


class Running:
    """The tool as a process, and what it prints."""

    def __init__(self, folder: Path, *words: str, terminal: bool = False) -> None:
        self._log = folder / "printed"
        self._temporary = folder / "temporary"
        self._temporary.mkdir()
        (folder / ".bashrc").write_text("PS1='ready> '\n")
        before = ["-c", ON_A_TERMINAL, sys.executable] if terminal else []
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *before, str(TOOL), *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={
                    "PATH": "/usr/bin:/bin",
                    "HOME": str(folder),
                    "SHELL": "/bin/bash",
                    "TMPDIR": str(self._temporary),
                    "AWS_PROFILE": "of-another-account",
                    "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
                    "HTTP_PROXY": "http://127.0.0.1:9",
                },
            )
        self._started: list[psutil.Process] = []

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def printed(self, pattern: str) -> str:
        """The first group of a pattern, as soon as it is printed."""
        deadline = time.monotonic() + 60
        while not (match := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)
        self._started = psutil.Process(self.process.pid).children(recursive=True)
        return match[1]

    def type(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def ended(self) -> int:
        """The exit code. All that it started is gone by then, and no file is left."""
        code = self.process.wait(60)
        assert not psutil.wait_procs(self._started, timeout=10)[1]
        assert not list(self._temporary.iterdir())
        return code

    def close(self) -> None:
        for process in self._started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def start(*words: str, terminal: bool = False) -> Running:
        running.append(Running(tmp_path, *words, terminal=terminal))
        return running[-1]

    yield start
    for one in running:
        one.close()


def answers(endpoint: str) -> bool:
    """Whether a server is there, which has the bucket."""
    try:
        with urllib.request.urlopen(f"{endpoint}/bucket") as answer:
            return b"ListBucketResult" in answer.read()
    except urllib.error.URLError:
        return False


@pytest.mark.guarantee("tried-server-ends")
def test_a_shell_has_the_server_until_it_is_left(run: Callable[..., Running]) -> None:
    """Ctrl-C at its prompt is no end of it."""
    server = run(terminal=True)
    endpoint = server.printed(r"s3://bucket is at (http://127\.0\.0\.1:\d+)")
    server.printed("(ready> )")
    server.type("\x03")
    server.printed(r"(\^C)")
    server.type("\n")  # a shell that is not yet reading answers Ctrl-C by nothing
    server.printed(r"\^C\s+(ready> )")
    server.type('echo "$AWS_ENDPOINT_URL, $(command -v streammega)."; false\n')
    installed = server.printed(rf"\n{re.escape(endpoint)}, (\S+)\.")
    assert installed == str(Path(sys.executable).parent / "streammega")
    assert answers(endpoint)
    server.type("exit\n")
    assert server.ended() == 0, server.text
    assert not answers(endpoint)


@pytest.mark.guarantee("tried-server-ends")
@pytest.mark.parametrize(
    ("command", "code"), [(f"{sys.executable} -c '{PUT}' && exit 7", 7), ("kill -KILL $$", 137)]
)
def test_the_exit_code_of_a_command_is_kept(
    run: Callable[..., Running], command: str, code: int
) -> None:
    server = run("--", "bash", "-c", command)
    assert server.ended() == code, server.text
    assert server.text == ""


@pytest.mark.guarantee("tried-server-ends")
def test_ctrl_c_ends_a_command_and_the_server(run: Callable[..., Running]) -> None:
    server = run("--", "bash", "-c", "echo at $AWS_ENDPOINT_URL; sleep 600", terminal=True)
    endpoint = server.printed(r"at (http\S+)\r?\n")
    assert answers(endpoint)
    server.type("\x03")
    assert server.ended() == 128 + signal.SIGINT, server.text
    assert not answers(endpoint)


@pytest.mark.guarantee("tried-server-ends")
def test_sigterm_is_passed_on_and_a_second_one_kills(run: Callable[..., Running]) -> None:
    stubborn = (
        "trap 'echo once' TERM; sleep 600 & echo at $AWS_ENDPOINT_URL; while :; do wait; done"
    )
    server = run("--", "bash", "-c", stubborn)
    endpoint = server.printed(r"at (http\S+)\n")
    server.process.send_signal(signal.SIGTERM)
    server.printed("(once)")
    assert answers(endpoint), "the command may end as it likes"
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 128 + signal.SIGTERM
    assert not answers(endpoint)


@pytest.mark.guarantee("tried-server-ends")
def test_sigterm_ends_a_shell_at_its_prompt(run: Callable[..., Running]) -> None:
    server = run(terminal=True)
    endpoint = server.printed(r"s3://bucket is at (http://\S+),")
    server.printed("(ready> )")
    (tool,) = psutil.Process(server.process.pid).children()
    tool.send_signal(signal.SIGTERM)
    assert server.ended() == 128 + signal.SIGTERM
    assert not answers(endpoint)


def test_a_port_in_use_is_named_and_nothing_runs(run: Callable[..., Running]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = run("--port", str(port), "--", "echo", "ran")
        assert server.ended() == 1
    message = "Address already in use: name another --port, or none"
    assert server.text == f"error: port {port}: {message}\n"


def test_a_command_that_is_not_there_is_named(run: Callable[..., Running]) -> None:
    server = run("--", "no-such-command")
    assert server.ended() == 1
    assert server.text == "error: no-such-command: No such file or directory\n"
