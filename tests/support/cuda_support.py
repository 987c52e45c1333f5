"""Tests whose body runs on the CPU always, and on CUDA where there is a device: what can be proven
without one is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

NEEDS_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA device: torch.cuda.is_available() is False",
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
