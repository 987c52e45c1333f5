"""A plugin of pytest for Megatron's own tests: CPU ranks, and our dataset class in place of its own.

In their process `tests` is Megatron's, so this file is loaded by its folder and imports nothing of
ours but the package.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

warnings.simplefilter("ignore")

import megatron.core.datasets.gpt_dataset as gpt_dataset  # noqa: E402
import megatron.core.datasets.utils as dataset_utils  # noqa: E402

from streammega.integrations.megatron_dataset import StreamGPTDataset  # noqa: E402

BUILT = Path("built.txt")
"""In the folder of the run: a line for each dataset of ours."""


class Counted(StreamGPTDataset):  # type: ignore[misc]
    """Ours, which tells that it was built."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        with BUILT.open("a") as file:
            file.write("one\n")


def initialize() -> None:
    """A process group of this process alone, without CUDA."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def compile_nothing() -> None:
    """The wheel brings its helpers."""


test_utilities = importlib.import_module("tests.unit_tests.test_utilities")
test_utilities.Utils.initialize_distributed = staticmethod(initialize)
dataset_utils.compile_helpers = compile_nothing
gpt_dataset.GPTDataset = Counted


@pytest.fixture
def tmp_path_dist_ckpt(tmp_path: Path) -> Path:
    return tmp_path
