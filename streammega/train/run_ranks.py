"""The ranks of a run, as its layout has them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from streammega.errors import ConfigError
from streammega.parallel import Ranks
from streammega.parallel.layout import ParallelLayout
from streammega.train.config import RunConfig

NCCL_MARGIN = 60.0
"""Seconds: NCCL's own watchdog aborts the process without saying which rank was missing, so it must
come after the watch.
"""


def make_ranks(config: RunConfig, device: torch.device) -> Ranks:
    """The ranks of a run's layout, in the world that there is. Raises ConfigError."""
    parallel = config.parallel
    world = dist.get_world_size() if dist.is_initialized() else 1
    layout = ParallelLayout.of_world(
        world, tp=parallel.tp, cp=parallel.cp, pp=parallel.pp, order=parallel.order
    )
    check_pipeline(config, layout)
    margin = NCCL_MARGIN if device.type == "cuda" else 0.0
    return Ranks(layout, timedelta(seconds=config.train.timeout + margin))


def check_pipeline(config: RunConfig, layout: ParallelLayout) -> None:
    """Raise ConfigError for steps of too few micro-batches to keep the pipeline's stages busy."""
    step_samples = config.train.micro_batch_size * layout.dp
    is_interleaved = config.parallel.virtual_stages > 1
    for _, batch_samples in config.schedule.stages:
        micro_batches = batch_samples // step_samples
        too_few = micro_batches < layout.pp
        # The interleaved schedule goes through its stages in rounds of pp micro-batches.
        uneven = is_interleaved and micro_batches % layout.pp != 0
        if too_few or uneven:
            needs = "a multiple of" if is_interleaved else "at least"
            raise ConfigError(
                f"a step of {batch_samples} samples has {micro_batches} micro-batches on each "
                f"rank; parallel.pp {layout.pp} needs {needs} {layout.pp}: "
                f"change train.global_batch_size or micro_batch_size"
            )
