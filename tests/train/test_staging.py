"""Copies of the state on the host: of the moment, whatever is computed meanwhile."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from streammega.train.checkpoints.staging import HostStaging


class FakeCuda:
    """torch.cuda where there is none: what is ordered is noted, and copies are made at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.device = torch.device("cuda", 3)
        for name in ("Event", "current_stream", "stream", "set_device", "cudart"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", self))

    def Event(self) -> Any:
        return self

    def current_stream(self, device: torch.device) -> Any:
        assert device == self.device
        return FakeStream("main", self)

    def stream(self, stream: Any) -> Any:
        self.log.append(f"copy on {stream.name}")
        return contextlib.nullcontext()

    def set_device(self, device: torch.device) -> None:
        self.log.append(f"device {device.index}")

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.log.append(f"pin {size}")
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        self.log.append("unpin")

    def record(self, stream: Any) -> None:
        self.log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self.log.append("host waits")

    def noted(self) -> list[str]:
        """What was noted since it was asked for last."""
        noted = list(self.log)
        self.log.clear()
        return noted


class FakeStream:
    def __init__(self, name: str, cuda: FakeCuda) -> None:
        self.name = name
        self.device = cuda.device
        self._log = cuda.log

    def wait_stream(self, other: Any) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self._log.append(f"{self.name} waits for the copies")


def test_copies_from_a_gpu_use_one_kept_buffer_and_order_themselves_before_the_next_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    staging = HostStaging(cuda.device)
    state = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.arange(5).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "step": torch.tensor(3.0),
    }
    copies = staging.stage(state)
    assert list(copies) == list(state)
    assert cuda.noted() == ["pin 192", "side waits for main", "copy on side", "event on side"], (
        "the host waits for nothing"
    )
    staging.before_change()
    staging.before_change()
    assert cuda.noted() == ["main waits for the copies"], "once, on the device"
    before = {name: value.clone() for name, value in state.items()}
    for value in state.values():
        value.add_(1)
    staging.wait()
    assert cuda.noted() == ["device 3", "host waits"], (
        "a thread's own device is the first, of which a wait would make a context"
    )
    for name, value in before.items():
        assert copies[name].dtype == value.dtype
        assert torch.equal(copies[name], value)
    again = staging.stage(state)
    assert "pin" not in "".join(cuda.noted()), "the same buffer"
    assert again["a"].data_ptr() == copies["a"].data_ptr()
    assert torch.equal(again["a"], state["a"])
    del copies, again
    staging.stage({"c": torch.zeros(2)})
    assert cuda.noted()[:2] == ["unpin", "pin 64"], "another size, another buffer"
