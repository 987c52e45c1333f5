"""Megatron's two batch samplers, for a torch DataLoader over a GPTDataset or BlendedDataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.utils.data

from streammega.config.validate import whole_number
from streammega.errors import ConfigError, StateError
from streammega.order.sharding import check_batch_sizes, rank_samples


class MegatronBatchSampler(torch.utils.data.Sampler[list[int]]):
    """Sample numbers of this rank's micro-batches: `DataLoader(dataset,
    batch_sampler=MegatronBatchSampler(...))`.

    Args:
        total_samples: the dataset's length.
        consumed_samples: where to begin, over all ranks.
        kind: "single": indices ascend from consumed_samples; each run of micro_batch_size * dp_size
            is cut into dp_size contiguous parts. "cyclic": endless epochs, each permuted by a
            generator that is seeded with the epoch's number; an iteration ends with its epoch.
        data_sharding: cyclic: a rank stays within its own part of the data.
        drop_last: single: drop the incomplete tail; else ranks share it.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        kind: Literal["single", "cyclic"] = "single",
        data_sharding: bool = True,
        drop_last: bool = True,
    ) -> None:
        total_samples = whole_number("total_samples", total_samples)
        consumed_samples = whole_number("consumed_samples", consumed_samples)
        micro_batch_size = whole_number("micro_batch_size", micro_batch_size, 1)
        dp_rank, dp_size = whole_number("dp_rank", dp_rank), whole_number("dp_size", dp_size, 1)
        check_batch_sizes(micro_batch_size * dp_size, micro_batch_size, dp_rank, dp_size)
        if kind not in ("single", "cyclic"):
            raise ConfigError(f"sampler {kind!r} is not one of 'single' and 'cyclic'")
        keeps_tail = kind == "single" and not drop_last
        fewest_samples = 1 if keeps_tail else micro_batch_size * dp_size
        if total_samples < fewest_samples:
            raise ConfigError(
                f"{total_samples} samples are less than one micro-batch of {micro_batch_size} on "
                f"{dp_size} ranks"
            )
        if kind == "single" and not 0 <= consumed_samples < total_samples:
            raise StateError(
                f"{consumed_samples} samples are consumed of {total_samples}; nothing is left"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.kind = kind
        self.data_sharding = data_sharding
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return self._single() if self.kind == "single" else self._cyclic()

    @property
    def _step(self) -> int:
        """Samples of a micro-batch on every rank."""
        return self.micro_batch_size * self.dp_size

    def _single(self) -> Iterator[list[int]]:
        size = self.micro_batch_size
        for first in range(self.consumed_samples, self.total_samples, self._step):
            if first + self._step <= self.total_samples:
                taken = rank_samples(first, size, self.dp_rank, self.dp_size, contiguous=True)
                yield taken.tolist()
            elif not self.drop_last:
                # filled rank by rank: the last ranks may get an empty batch
                low = first + self.dp_rank * size
                yield list(range(low, min(low + size, self.total_samples)))

    def _cyclic(self) -> Iterator[list[int]]:
        size = self.micro_batch_size
        step = self._step
        samples_of_epoch = self.total_samples - self.total_samples % step
        epoch, offset = divmod(self.consumed_samples, samples_of_epoch)
        if offset % step:
            raise StateError(
                f"{offset} samples into an epoch is inside a micro-batch of {size} on "
                f"{self.dp_size} ranks"
            )
        # seeded with the epoch alone, so that a resumed run permutes as before
        generator = torch.Generator()
        generator.manual_seed(epoch)
        if self.data_sharding:
            bucket_samples = self.total_samples // step * size
            permuted = torch.randperm(bucket_samples, generator=generator)
            mine = self.dp_rank * bucket_samples + permuted[offset // self.dp_size :]
        else:
            # Megatron permutes whole micro-batches of one rank, not of all
            permuted = torch.randperm(self.total_samples // size * size, generator=generator)
            mine = permuted[offset:][self.dp_rank :: self.dp_size]
        for first in range(0, len(mine) - size + 1, size):
            self.consumed_samples += step
            yield mine[first : first + size].tolist()
