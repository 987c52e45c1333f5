"""Micro-batches of one rank as a torch IterableDataset, and its position."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.utils.data

from streammega.config import DataConfig
from streammega.errors import ConfigError, StateError
from streammega.order.cursor import make_state, read_state
from streammega.order.sharding import check_batch_sizes, check_resume, rank_samples
from streammega.order.split import SPLITS
from streammega.samples.build import build_split, open_indexed
from streammega.samples.fields import Batch, batch_fields
from streammega.samples.gpt import GPTDataset

log = logging.getLogger(__name__)


class StreamingDataset(torch.utils.data.IterableDataset[Batch]):
    """Yields micro-batches: {"tokens", "labels", "position_ids"} int64 and "loss_mask" float32, [micro_batch_size, S].

    Every rank sees its part of the same global batches, whatever dp_size is. Iterating goes on from the cursor to the
    end of the data (whole global batches only). Under a torch DataLoader (`batch_size=None`) with W workers, worker w
    builds micro-batches w, w + W, ..., so the order is the same.

    Args:
        config: what is read.
        split: "train", "valid" or "test".
        micro_batch_size: samples of one batch of this rank.
        global_batch_size: samples of one optimizer step over all ranks; a multiple of micro_batch_size * dp_size.
        dp_rank, dp_size: this data-parallel rank.

    Raises ConfigError before any token is read, StorageError and FormatError for the files.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        split: str = "train",
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        check_batch_sizes(global_batch_size, micro_batch_size, dp_rank, dp_size)
        self.config, self.split = config, split
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.samples = _open_split(config, split)
        if self.num_samples == 0:
            raise ConfigError(
                f"{split} holds {len(self.samples)} samples, less than one global batch of {global_batch_size}; lower "
                f"global_batch_size or ask for more samples"
            )
        self._consumed = 0
        # Seen by worker processes too: the copy of this dataset that counts what is handed out lives here, not there.
        self._worker_used = torch.zeros(1, dtype=torch.int8).share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """Micro-batches of this rank from the first sample to the last."""
        return self.num_samples // self.step_samples

    @property
    def num_samples(self) -> int:
        """Samples over all ranks, whole global batches only."""
        return len(self.samples) - len(self.samples) % self.global_batch_size

    @property
    def step_samples(self) -> int:
        """Samples that one micro-batch on every rank takes from the global stream."""
        return self.micro_batch_size * self.dp_size

    @property
    def consumed_samples(self) -> int:
        """The next global sample: how many were handed out, over all ranks."""
        return self._consumed

    def sample_ids(self, consumed: int) -> Any:
        """Global sample ids of this rank's micro-batch in the micro-step at `consumed`, int64 [micro_batch_size]."""
        contiguous = self.config.order == "megatron"
        return rank_samples(consumed, self.micro_batch_size, self.dp_rank, self.dp_size, contiguous=contiguous)

    def batch(self, consumed: int) -> Batch:
        """This rank's micro-batch in the micro-step at `consumed`: a pure function of it."""
        return batch_fields(*self.samples.read(self.sample_ids(consumed)), self.config)

    def positions(self) -> range:
        """The micro-steps that are left, as values of `consumed`."""
        return range(self._consumed, self.num_samples, self.step_samples)

    def advance(self, consumed: int) -> None:
        """Note that the micro-step at `consumed` was handed out."""
        self._consumed = consumed + self.step_samples

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        positions = self.positions()
        if worker is not None:
            self._worker_used[0] = 1
            positions = positions[worker.id :: worker.num_workers]
        for consumed in positions:
            batch = self.batch(consumed)
            if worker is None:
                self.advance(consumed)
            yield batch

    def seek(self, consumed_samples: int) -> None:
        """Continue at a global sample: a multiple of this rank set's micro-step from a global batch's start."""
        if not 0 <= consumed_samples <= self.num_samples:
            raise StateError(f"sample {consumed_samples} is not within the {self.num_samples} samples of {self.split}")
        check_resume(consumed_samples, self.global_batch_size, self.micro_batch_size, self.dp_size)
        self._consumed = consumed_samples

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Where to go on, the same on every rank: {"version", "consumed_samples", "identity", "fingerprint"}.

        Counts what was handed out. Under a DataLoader with workers only the caller knows that: pass `num_batches`, the
        micro-batches taken from the DataLoader since it was created (StreamLoader needs no workers, and counts by itself).
        """
        if num_batches is None and self._worker_used[0]:
            raise StateError(
                "worker processes read ahead of what the DataLoader handed out, so the position is not known here; pass "
                "state_dict(num_batches=<micro-batches taken>), or use StreamLoader, which needs no workers"
            )
        consumed = self._consumed + (num_batches or 0) * self.step_samples
        return make_state(self.samples.identity(), consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the sample after the last that was handed out. Raises StateError for another order."""
        self.seek(read_state(state, self.samples.identity()))


def _open_split(config: DataConfig, split: str) -> GPTDataset:
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    if config.order == "megatron" and config.num_samples is None:
        raise ConfigError(
            "the Megatron order depends on how many samples are asked: set num_samples=(train, valid, test), for instance "
            "(train_iters * global_batch_size, 0, 0)"
        )
    wanted = config.num_samples[SPLITS.index(split)] if config.num_samples else None
    samples = build_split(config, open_indexed(config), split, wanted)
    if samples is None:
        raise ConfigError(f"split {config.split!r} with num_samples {config.num_samples} leaves nothing for {split}")
    return samples
