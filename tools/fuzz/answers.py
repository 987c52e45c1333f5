"""Fuzz targets for answers of S3 and OSS: headers, bodies, listings and errors, from a server of ours."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from streammega import StorageConfig
from streammega.storage import Store, open_store
from tools.fuzz.common import Target, new_number

BODY = bytes(range(48, 58)) * 3
SPAN = (2, 12)
XML = {"Content-Type": "application/xml"}
ETAG = '"0123456789abcdef0123456789abcdef"'
NEXT = b"\n--next answer--\n"
"""Between two answers. The last one is given to all later requests, up to MAX_ANSWERS."""
MAX_ANSWERS = 200
"""Requests of one input that get an answer. One more is a finding: the client would ask for ever."""


class AnswerServer:
    """Answers each request with the next of some bytes, and closes the connection."""

    def __init__(self) -> None:
        self.answers = [b""]
        self.requests = 0
        self.max_answers = MAX_ANSWERS
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(5)
            self._answer_one(connection)

    def _answer_one(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            data = connection.recv(65536)
            if not data:
                return
            head += data
        number = self.requests
        self.requests += 1
        if number < self.max_answers:
            connection.sendall(self.answers[min(number, len(self.answers) - 1)])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(65536)


def plain_answer(status: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    # Without the last line a client may send its next request on the connection that is being closed.
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def listing_answer(*keys: str, token: str = "", dialect: str = "ListBucketResult") -> bytes:
    more = f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>"
    if token:
        more += f"<NextContinuationToken>{token}</NextContinuationToken>"
    entries = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
        f"<ETag>{ETAG}</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass>"
        f"<Type>Normal</Type></Contents>"
        for size, key in enumerate(keys, 1)
    )
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<{dialect}><Name>bucket</Name><Prefix>a</Prefix><MaxKeys>1000</MaxKeys>"
        f"<KeyCount>{len(keys)}</KeyCount>{more}{entries}"
        f"<CommonPrefixes><Prefix>a/b/</Prefix></CommonPrefixes></{dialect}>"
    )
    return plain_answer("200 OK", text.encode(), XML)


def _error(status: str, code: str) -> bytes:
    text = f"<Error><Code>{code}</Code><Message>m</Message><RequestId>1</RequestId></Error>"
    return plain_answer(status, text.encode(), XML)


def _seeds() -> list[bytes]:
    about = {
        "ETag": ETAG,
        "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT",
        "Accept-Ranges": "bytes",
    }
    start, stop = SPAN
    part = plain_answer(
        "206 Partial Content",
        BODY[start:stop],
        about | {"Content-Range": f"bytes {start}-{stop - 1}/{len(BODY)}"},
    )
    answers = [
        (
            b"i",
            [
                plain_answer("200 OK", b"", about).replace(
                    b"Content-Length: 0", b"Content-Length: 30"
                )
            ],
        ),
        (b"r", [part]),
        (b"r", [plain_answer("200 OK", BODY, about)]),
        (b"m", [part, part]),
        (b"l", [listing_answer("a1", "a/b/c", token="t"), listing_answer("a2")]),
        (b"f", [listing_answer("a1", "a2")]),
        (b"l", [_error("503 Slow Down", "SlowDown")]),
        (b"r", [_error("404 Not Found", "NoSuchKey")]),
        (b"r", [_error("403 Forbidden", "AccessDenied")]),
        (b"r", [_error("301 Moved Permanently", "PermanentRedirect")]),
        (b"r", [_error("416 Range Not Satisfiable", "InvalidRange")]),
        (b"p", [_error("412 Precondition Failed", "PreconditionFailed")]),
        (b"p", [plain_answer("200 OK", b"", about)]),
        (b"d", [plain_answer("204 No Content")]),
    ]
    return [operation + NEXT.join(parts) for operation, parts in answers]


def answers_target(_folder: Path, scheme: str, transport: str) -> Target:
    """Answers to a request that the first byte chooses."""
    server = AnswerServer()
    options: dict[str, Any] = {"key": "k", "secret": "s" * 20}
    options["endpoint_url"] = f"http://127.0.0.1:{server.port}"
    storage = StorageConfig(
        transport=transport,  # type: ignore[arg-type]
        storage_options=options,
        request_timeout=1,
        retry_timeout=1,
    ).tuned(max_retries=0, read_timeout=0.2, connect_deadline=1, hedge_requests=False)
    store, key = open_store(f"{scheme}://bucket/a", storage)

    def run(data: bytes) -> None:
        operation = OPERATIONS.get(data[:1])
        if operation is None:
            return
        server.answers = data[1:].split(NEXT)
        server.requests = 0
        try:
            operation(store, key, server.answers)
        finally:
            # obstore's own listing of one folder, and s3fs, ask as long as a server sends pages
            may_loop = data[:1] == b"f" or transport == "fsspec"
            assert may_loop or server.requests <= MAX_ANSWERS, "the client asks again and again"

    return Target(run, _seeds())


def _look_up(store: Store, key: str, _answers: list[bytes]) -> None:
    info = store.info(key)
    assert type(info.size) is int
    assert info.size >= 0


def _read(store: Store, key: str, answers: list[bytes]) -> None:
    (body,) = store.read(key, [SPAN], ETAG)
    assert bytes(body) in _bodies(answers), "other bytes than the server sent of this range"


def _read_several(store: Store, key: str, answers: list[bytes]) -> None:
    bodies = store.read(key, [SPAN, SPAN], ETAG)
    assert all(bytes(body) in _bodies(answers) for body in bodies)


def _bodies(answers: list[bytes]) -> list[bytes]:
    """What the answers say of SPAN: bodies of just that range, or parts of whole objects."""
    start, stop = SPAN
    bodies = []
    for answer in answers:
        body = b"".join(re.split(rb"\r?\n\r?\n", answer, maxsplit=1)[1:])
        ranges = re.findall(rb"content-range:\s*bytes\s*(\d+)-(\d+)", answer.lower())
        if not ranges or (start, stop - 1) in [tuple(map(int, one)) for one in ranges]:
            bodies += [body[: stop - start], body[start:stop]]
        if b"chunked" in answer.lower():
            pieces = re.split(rb"\r?\n", body)
            bodies += [b"".join(pieces[1::2])[: stop - start], b"".join(pieces[1::2])[start:stop]]
    return bodies


def _list(store: Store, key: str, _answers: list[bytes], recursive: bool = True) -> None:
    for info in store.list(key, recursive):
        assert info.key.startswith(key), "a key that was not asked for"
        assert type(info.size) is int
        assert info.size >= 0


def _list_folder(store: Store, key: str, answers: list[bytes]) -> None:
    _list(store, key, answers, recursive=False)


def _put(store: Store, key: str, _answers: list[bytes]) -> None:
    store.put(key, str(new_number()).encode(), if_absent=True)
    store.put(key, b"x")


def _delete(store: Store, key: str, _answers: list[bytes]) -> None:
    store.delete(key)


OPERATIONS: dict[bytes, Callable[[Store, str, list[bytes]], None]] = {
    b"i": _look_up,
    b"r": _read,
    b"m": _read_several,
    b"l": _list,
    b"f": _list_folder,
    b"p": _put,
    b"d": _delete,
}
