"""Answers of servers that several processes share. One of them opens data, and what servers answer is
recorded; the others open the same data by these answers, and send no request.

Stores ask through here while answers are shared: sizes and ETags, listings, manifests, and
small reads. What was not recorded is asked as always. Bytes that are read later carry their ETag, so an
object that was replaced since is noticed as it is without shared answers.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import xxhash

from streammega.config.validate import parse_json
from streammega.errors import ObjectNotFoundError
from streammega.storage.store import ObjectInfo

Method = TypeVar("Method", bound=Callable[..., Any])
MAX_READ_BYTES = 1 << 20
"""Larger reads are not recorded: they are copies of indices, which processes of a node share on disk."""
MAX_BYTES = 1 << 31
"""Most bytes of recorded answers that are unpacked."""
_COMPRESSION = 1
_current: Answers | None = None
"""Those that are shared in this process now."""


class Answers:
    """Answers by their requests: a new one records them, one that came as bytes repeats them."""

    def __init__(self) -> None:
        self._recorded: dict[str, Any] = {}
        self._received: dict[str, Any] = {}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Record, or repeat, the answers to all requests of this process. Where other answers are
        shared already, these go on instead.
        """
        global _current
        if _current is not None:
            yield
            return
        _current = self
        try:
            yield
        finally:
            _current = None

    def to_bytes(self) -> bytes:
        """What was recorded. It holds no credentials."""
        encoded = {request: _encode(answer) for request, answer in list(self._recorded.items())}
        return zlib.compress(json.dumps(encoded).encode(), _COMPRESSION)

    @classmethod
    def from_bytes(cls, stored: bytes) -> Answers:
        """The answers that `to_bytes` gave. Raises ValueError for other bytes."""
        answers = cls()
        unpacking = zlib.decompressobj()
        try:
            text = unpacking.decompress(stored, MAX_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if not unpacking.eof:
            raise ValueError(f"it is cut off, or has more than {MAX_BYTES:,} bytes")
        received = parse_json(text)
        if not isinstance(received, dict):
            raise ValueError("it holds no answers by their requests")
        answers._received = received
        return answers

    def ask(self, request: str, send: Callable[[], Any]) -> Any:
        """The answer to a request, which `send` sends. Raises ObjectNotFoundError, and what it raises."""
        if request in self._received:
            # Another version of this program may have written them in another way.
            with suppress(TypeError, ValueError):
                return _decode(self._received[request])
        try:
            answer = send()
        except ObjectNotFoundError as error:
            self._recorded[request] = error
            raise
        if _is_small(answer):
            self._recorded[request] = answer
        return answer

    def forget(self) -> None:
        """Drop them, because an object has changed since."""
        self._recorded.clear()
        self._received.clear()


def _end_in_child() -> None:
    """The thread that would end to share them is not in a forked child."""
    global _current
    _current = None


os.register_at_fork(after_in_child=_end_in_child)


def are_shared() -> bool:
    """Whether answers are shared in this process now."""
    return _current is not None


def forget_answers() -> None:
    """Ask servers again from now on."""
    if _current is not None:
        _current.forget()


def shares_answers(method: Method) -> Method:
    """A method of a remote store that reads, whose answers are shared."""

    @functools.wraps(method)
    def ask(store: Any, *arguments: Any, **options: Any) -> Any:
        answers = _current
        if answers is None:
            return method(store, *arguments, **options)
        # The same name may be in several clouds. A digest, because options may hold secrets.
        described = f"{method.__name__} {store.endpoint} {store.url('')} {arguments} {options}"
        request = xxhash.xxh3_128_hexdigest(described.encode())
        return answers.ask(request, lambda: method(store, *arguments, **options))

    return cast(Method, ask)


def _is_small(answer: Any) -> bool:
    """Whether an answer is one that is kept. Manifests have any size; they come as tuples."""
    if not isinstance(answer, list):
        return True
    return sum(len(body) for body in answer if isinstance(body, memoryview)) <= MAX_READ_BYTES


def _encode(answer: Any) -> Any:
    """As values of JSON."""
    if isinstance(answer, ObjectInfo):
        return ["info", answer.key, answer.size, answer.etag, answer.modified]
    if isinstance(answer, memoryview):
        return ["bytes", base64.b64encode(answer).decode()]
    if isinstance(answer, ObjectNotFoundError):
        return ["missing", str(answer)]
    if answer is None:
        return None
    return ["all", [_encode(part) for part in answer]]


def _decode(encoded: Any) -> Any:
    """An answer of its own for each caller. Raises ObjectNotFoundError where there was no object."""
    if encoded is None:
        return None
    kind, *values = encoded
    if kind == "info":
        key, size, etag, modified = values
        return ObjectInfo(key=key, size=size, etag=etag, modified=modified)
    if kind == "bytes":
        return memoryview(base64.b64decode(values[0], validate=True))
    if kind == "missing":
        raise ObjectNotFoundError(values[0])
    return [_decode(part) for part in values[0]]
