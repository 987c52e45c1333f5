"""Tests whose body runs on the CPU always, and on CUDA where there is a device: what can be proven
without one is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from streammega.parallel.broadcast import side_stream

# device_count asks the driver's management library: is_available would begin to use CUDA, and then
# no process that is forked from this one can use it
NEEDS_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        torch.cuda.device_count() < 1,
        reason="needs a CUDA device: torch.cuda.device_count() is 0",
    ),
]
NEEDS_TWO = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two CUDA devices: torch.cuda.device_count() is {torch.cuda.device_count()}",
    ),
]


def on_cuda(*values: Any, marks: Any = NEEDS_CUDA) -> Any:
    """A parameter that is skipped, with the reason, where there is no CUDA device."""
    return pytest.param(
        *values,
        marks=marks,
        id="-".join(map(str, values)) if all(isinstance(v, str) for v in values) else None,
    )


DEVICES = ["cpu", on_cuda("cuda")]


class FakeStream:
    """A stream of a device that there is not: what is ordered by it goes into a log."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for {event.stream}")


class FakeEvent:
    stream = ""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.stream = self.cuda.current.name


class FakeCuda:
    """torch.cuda where there is none, on memory of the CPU. `log` says on which stream memory was
    asked for, what was copied and what was sent.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = FakeStream("main", self.log)
        self.streams: list[FakeStream] = []
        self.on_device: list[torch.Tensor] = []
        self.empty = torch.empty
        self.to: Any = torch.Tensor.to

    def make_stream(self, device: torch.device) -> FakeStream:
        self.streams.append(FakeStream(f"side {len(self.streams)}", self.log))
        return self.streams[-1]

    def make_event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current
        self.current = stream
        try:
            yield
        finally:
            self.current = before

    def allocate(self, size: int, **options: Any) -> torch.Tensor:
        device = options.pop("device", None)
        options.pop("pin_memory", None)
        tensor = self.empty(size, **options).zero_()
        if device is not None and device.type == "cuda":
            self.log.append(f"memory on {self.current.name}")
            self.on_device.append(tensor)
        return tensor

    def send(self, tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
        self.log.append(f"broadcast on {self.current.name}")
        return SimpleNamespace(wait=lambda: None)

    def bring(self, tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if isinstance(arguments[0], torch.device):
            if not any(tensor is other for other in self.on_device):
                self.log.append(f"copy on {self.current.name}")
            return tensor
        brought: torch.Tensor = self.to(tensor, *arguments, **options)
        return brought

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Stands for torch.cuda meanwhile."""
        with (
            mock.patch("torch.cuda.Stream", self.make_stream),
            mock.patch("torch.cuda.stream", self.stream),
            mock.patch("torch.cuda.current_stream", self.current_stream),
            mock.patch("torch.cuda.Event", self.make_event),
            mock.patch("torch.empty", self.allocate),
            mock.patch.object(
                torch.Tensor, "to", lambda tensor, *a, **o: self.bring(tensor, *a, **o)
            ),
            mock.patch.object(torch.Tensor, "record_stream"),
            mock.patch("torch.distributed.broadcast", self.send),
        ):
            try:
                yield
            finally:
                side_stream.cache_clear()
