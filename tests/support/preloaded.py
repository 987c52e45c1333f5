"""What the server of forks imports and does once, for all processes that are forked from it.

Importing torch takes seconds and setting up numba half a second; forking a process that has done
both takes milliseconds.
"""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from unittest import mock

import filelock
import hypothesis  # noqa: F401 - imported for the forks, as what follows without a use here
import numpy as np
import pytest  # noqa: F401
import s3fs  # noqa: F401

import streammega.train.trainer  # noqa: F401
import tests.support.gang
import tests.support.kill_programs  # noqa: F401
from streammega import StreamLoader
from streammega.config import Order
from tests.support.builders import data_config, write_dataset


def read_a_batch_of(order: Order, folder: str) -> None:
    """Bring the kernels of an order and of the loader into memory."""
    prefix = write_dataset(os.path.join(folder, order), [np.arange(100)])
    config = data_config([prefix], Path(folder), order=order, num_samples=(8, 0, 0))
    with StreamLoader(config, micro_batch_size=1, global_batch_size=1) as loader:
        next(iter(loader))


COMPILING = os.path.join(tempfile.gettempdir(), f"streammega-tests-compile-{os.getuid()}.lock")
"""Held by the one worker that compiles the kernels, in a fresh clone for eight seconds: the others
have them from its cache.
"""

# a process that has asked for CUDA forks none that can use it
no_cuda = mock.patch("torch.cuda.is_available", return_value=False)
nor_another = mock.patch("torch.accelerator.is_available", return_value=False)
kept = filelock.FileLock(COMPILING)
with kept, no_cuda, nor_another, tempfile.TemporaryDirectory(prefix="preloaded-") as folder:
    read_a_batch_of("stream", folder)
    read_a_batch_of("megatron", folder)

gc.collect()
gc.freeze()  # what all processes share is gone over by none of their garbage collections
