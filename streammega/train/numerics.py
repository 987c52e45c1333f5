"""How a process computes: torch's switches, which belong to the process and not to a model."""

from __future__ import annotations

import os

import torch

from streammega.train.config import TrainConfig

WORKSPACE = ":4096:8"
"""Of cuBLAS: eight buffers of 4 MiB, one of the two values with which it always sums in one order.
Source: NVIDIA's cuBLAS documentation, "Results reproducibility".
"""


def set_numerics(train: TrainConfig) -> None:
    """Set torch's switches for TF32 and determinism. Call before the first matrix product: cuBLAS
    looks at its variable then.

    A setting that is off leaves what the process has chosen by itself.
    """
    if train.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
        torch.use_deterministic_algorithms(True)
        # What is not initialised is never read here, and filling it takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
