"""Object servers for tests: moto's S3 in another process, and a small HTTP server that records and
misbehaves.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import botocore.session

from streammega import StorageConfig
from streammega.storage import open_store

KEY = "AKIATESTKEY00000"
SECRET = "test-secret-value-never-shown"
SHUTDOWN_WITHIN = 0.01
"""Seconds between two looks of a server at whether it is to end, which every test of one waits for."""


@dataclass
class S3:
    """A running S3 server: its endpoint, and how to reach it in the fsspec manner."""

    endpoint: str
    name: str = "moto"
    buckets: int = 0

    @property
    def storage(self) -> StorageConfig:
        """How to reach it; rclone answers ranges in a way that obstore refuses."""
        transport: Any = "fsspec" if self.name == "rclone" else "auto"
        return StorageConfig(transport=transport, storage_options=self.options)

    @property
    def options(self) -> dict[str, Any]:
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self) -> Any:
        return self._client

    @cached_property
    def _client(self) -> Any:
        return botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )

    def new_bucket(self) -> str:
        self.buckets += 1
        name = f"bucket-{self.buckets}"
        self.client().create_bucket(Bucket=name)
        return name

    def objects(self, bucket: str) -> Objects:
        """The objects of a bucket."""
        return Objects(self.client(), bucket)


class Objects(MutableMapping[str, bytes]):
    """Objects of a bucket by their keys, past the library."""

    def __init__(self, client: Any, bucket: str) -> None:
        self._client = client
        self._bucket = bucket

    def __getitem__(self, key: str) -> bytes:
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=key)["Body"]
        except self._client.exceptions.NoSuchKey:
            raise KeyError(key) from None
        data: bytes = body.read()
        return data

    def __setitem__(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=key, Body=data)

    def __delitem__(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=key)

    def __iter__(self) -> Iterator[str]:
        """Keys in order, 1,000 at most."""
        listed = self._client.list_objects_v2(Bucket=self._bucket).get("Contents", [])
        return iter([item["Key"] for item in listed])

    def __len__(self) -> int:
        return len(list(iter(self)))


@contextlib.contextmanager
def moto_server() -> Iterator[S3]:
    """moto's S3 server in another process, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("atomic_moto.py")),
        "-H",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        yield S3(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def rclone_server(root: Path) -> Iterator[S3]:
    """`rclone serve s3` over a folder: another implementation, which answers ranges with 200."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rclone = Path(sys.executable).parent / "rclone"
    options = [
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{KEY},{SECRET}",
        "--dir-cache-time",
        "1s",
        "--vfs-cache-mode",
        "off",
    ]
    command = [
        str(rclone),
        "serve",
        "s3",
        *options,
        "--config",
        str(root / "rclone.conf"),
        str(root),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        yield S3(f"http://127.0.0.1:{port}", "rclone")
    finally:
        process.kill()
        process.wait()


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended at its start"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError("the server did not answer")


@dataclass
class HttpObjects:
    """Objects by path over plain HTTP with ranges.

    `requests` records (method, path, range); `status` overrides answers.
    """

    objects: dict[str, bytes]
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    status: int | None = None
    etags: dict[str, str] = field(default_factory=dict)
    modified: dict[str, str] = field(default_factory=dict)
    encodings: dict[str, str] = field(default_factory=dict)
    """The Content-Encoding of answers, whatever a request accepts."""
    hosts: list[str] = field(default_factory=list)
    left_out: set[tuple[str, str]] = field(default_factory=set)
    """(method, header) of headers that answers do not have, such as ("GET", "ETag")."""
    answer_range: Callable[[bytes, int, int], tuple[int, str, bytes]] | None = None
    """(object, first byte, last byte) -> (status, Content-Range, body) of an answer; None: the right
    one. An empty Content-Range is left out.
    """
    seconds_per_byte: float = 0.0
    """How slowly bodies come."""
    closing: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.url}

    def open(self, url: str = "s3://bucket/key", **settings: Any) -> tuple[Any, str]:
        """The store of a URL whose bucket is here, and the key."""
        return open_store(url, StorageConfig(**{"storage_options": self.options, **settings}))


class HttpServer(ThreadingHTTPServer):
    """A server whose clients may go in the middle of an answer: that is no error of a test."""

    def handle_error(self, *client: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*client)


@contextlib.contextmanager
def http_server(objects: dict[str, bytes]) -> Iterator[HttpObjects]:
    """Serve `objects` ({"/path": bytes}) in threads of this process."""
    state = HttpObjects(objects)
    server = HttpServer(("127.0.0.1", 0), _handler(state))
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(SHUTDOWN_WITHIN,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _part_number(path: str) -> int:
    found = re.search(r"partNumber=(\d+)", path)
    return int(found[1]) if found else 0


def _handler(state: HttpObjects) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if state.status:
                return self._send(state.status, b"", {}, True)
            state.objects[self.path] = data  # a part's path says its number
            return self._send(200, b"", {"ETag": '"1"'}, True)

        def do_POST(self) -> None:
            """The beginning and the end of a multipart upload; the removal of several objects."""
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path, _, query = self.path.partition("?")
            if state.status:
                return self._send(state.status, b"", {}, True)
            if query == "delete":
                keys = re.findall(rb"<Key>(.*?)</Key>", data)
                for key in keys:
                    state.objects.pop(f"{path.rstrip('/')}/{key.decode()}", None)
                deleted = b"".join(b"<Deleted><Key>" + key + b"</Key></Deleted>" for key in keys)
                return self._send(200, b"<DeleteResult>" + deleted + b"</DeleteResult>", {}, True)
            if "uploadId" not in query:
                return self._send(
                    200,
                    b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>",
                    {},
                    True,
                )
            parts = sorted(
                (key for key in state.objects if key.startswith(f"{path}?")), key=_part_number
            )
            state.objects[path] = b"".join(state.objects.pop(part) for part in parts)
            return self._send(
                200,
                b"<CompleteMultipartUploadResult><ETag>1</ETag></CompleteMultipartUploadResult>",
                {},
                True,
            )

        def do_DELETE(self) -> None:
            if not state.status:
                state.objects.pop(self.path, None)
            self._send(state.status or 204, b"", {}, True)

        def _answer(self, body: bool) -> None:
            path = re.sub(r"^http://[^/]*", "", self.path)  # as a proxy sees it
            wanted = self.headers.get("Range")
            state.requests.append((self.command, path, wanted))
            state.hosts.append(self.headers.get("Host", ""))
            data = state.objects.get(path)
            status = state.status or (404 if data is None else 200)
            if status != 200 or data is None:
                return self._send(status, b"denied or gone", {}, body)
            etag = state.etags.get(path, "1")
            headers = {
                "ETag": etag if etag.startswith("W/") else f'"{etag}"',
                "Accept-Ranges": "bytes",
            }
            if path in state.encodings:
                headers["Content-Encoding"] = state.encodings[path]
            headers["Last-Modified"] = state.modified.get(path, "Sat, 21 Nov 2026 00:00:00 GMT")
            if wanted and (span := re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)):
                start = int(span[1])
                if state.answer_range:
                    status, content_range, part = state.answer_range(data, start, int(span[2]))
                    if content_range:
                        headers["Content-Range"] = content_range
                    return self._send(status, part, headers, body)
                last = min(int(span[2]), len(data) - 1)
                if start >= len(data):
                    return self._send(416, b"", {}, body)
                headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
                return self._send(206, data[start : last + 1], headers, body)
            return self._send(200, data, headers, body)

        def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(data))}).items():
                if (self.command, name) not in state.left_out:
                    self.send_header(name, value)
            if (self.command, "Content-Length") in state.left_out:
                self.close_connection = True  # which ends the body
            self.end_headers()
            if not body:
                return
            if not state.seconds_per_byte:
                self.wfile.write(data)
                return
            with contextlib.suppress(ConnectionError):
                for byte in data:
                    if state.closing.wait(state.seconds_per_byte):
                        return
                    self.wfile.write(bytes([byte]))

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
